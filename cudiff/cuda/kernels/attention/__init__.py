"""Attention: host code of kernels/*/attention*.cu; `table.py` says which runs."""
