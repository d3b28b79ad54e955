"""Group norm: host code of kernels/*/group_norm*.cu; `table.py` says which runs."""
