"""cudiff: a NumPy-style deep learning framework with hand-written CUDA kernels, for diffusion models."""

import cudiff.signals  # noqa: F401  first, as it guards the command line while the rest is imported

# isort: split

from importlib import import_module
from typing import Any

from cudiff import autograd, nn, ops  # noqa: F401  autograd gives tensors their `backward`
from cudiff.backend import bfloat16, cuda_available, default_device, float16, float32, float64, int32, int64
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.ops import *  # noqa: F403
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor, from_dlpack, no_grad

__version__ = "0.1.0"

_LATER = {
    "Config": "cudiff.config", "PRESETS": "cudiff.config", "Pipeline": "cudiff.pipeline", "Trainer": "cudiff.train",
    "capture": "cudiff.cuda.graph", "load": "cudiff.pipeline", "load_dataset": "cudiff.data",
    "Option": "cudiff.options", "register_model": "cudiff.config", "register_objective": "cudiff.config",
    "register_sampler": "cudiff.config",
}
"""Imported when first asked for, so that `import cudiff` stays fast; so are the modules below."""
_MODULES = ("data", "diffusion", "models", "optim", "plot")

__all__ = [
    "CudiffError", "Function", "Tensor", "allow_tf32", "bfloat16", "cuda_available", "default_device", "float16",
    "float32", "float64", "from_dlpack", "int32", "int64", "nn", "no_grad", *ops.__all__, *_LATER, *_MODULES,
]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_MODULES})


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name in _MODULES:
        return import_module(f"cudiff.{name}")
    raise AttributeError(f"module 'cudiff' has no attribute '{name}'")
