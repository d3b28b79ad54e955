"""Products of matrices and linear layers."""
