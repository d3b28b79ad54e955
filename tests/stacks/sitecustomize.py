"""Found by each Python that has this folder on its path: SIGUSR1 makes it write its stacks and go on."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR1, file=2)
