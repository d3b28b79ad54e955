"""cudiff: a NumPy-style deep learning framework with hand-written CUDA kernels, for diffusion models."""

from cudiff import nn, ops
from cudiff.backend import bfloat16, cuda_available, default_device, float16, float32, float64, int32, int64
from cudiff.errors import CudiffError
from cudiff.ops import *  # noqa: F403
from cudiff.tensor import Function, Tensor, from_dlpack, no_grad

__version__ = "0.1.0"

__all__ = [  # noqa: PLE0604
    "CudiffError", "Function", "Tensor", "bfloat16", "cuda_available", "default_device", "float16", "float32",
    "float64", "from_dlpack", "int32", "int64", "nn", "no_grad", *ops.__all__,
]
