"""Everything that talks to CUDA: compiling and launching kernels, capturing graphs; `Kernel` is one of a user's own."""

from cudiff.cuda.custom import Kernel as Kernel
