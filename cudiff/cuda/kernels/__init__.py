"""The host's side of the kernels of which several could serve: a folder a family, each with its table (`table.py`)."""
