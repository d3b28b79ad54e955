"""`python -m cudiff` is the command line."""

import sys

from cudiff.cli import main

sys.exit(main())
