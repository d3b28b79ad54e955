"""Everything that talks to CUDA: compiling and launching kernels, capturing graphs."""
