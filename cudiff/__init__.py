"""cudiff: a NumPy-style deep learning framework with hand-written CUDA kernels, for diffusion models."""

import cudiff.signals  # noqa: F401  first, as it guards the command line while the rest is imported

# isort: split

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cudiff import autograd  # noqa: F401  it gives tensors their `backward`
from cudiff import nn as nn
from cudiff import ops as ops
from cudiff.backend import bfloat16 as bfloat16
from cudiff.backend import cuda_available as cuda_available
from cudiff.backend import default_device as default_device
from cudiff.backend import float16 as float16
from cudiff.backend import float32 as float32
from cudiff.backend import float64 as float64
from cudiff.backend import int32 as int32
from cudiff.backend import int64 as int64
from cudiff.errors import CudiffError as CudiffError
from cudiff.function import Function as Function
from cudiff.nn.init import seed as seed
from cudiff.ops import *
from cudiff.precision import allow_tf32 as allow_tf32
from cudiff.tensor import Tensor as Tensor
from cudiff.tensor import from_dlpack as from_dlpack
from cudiff.tensor import no_grad as no_grad

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cudiff import checkpoint as checkpoint
    from cudiff import convert as convert
    from cudiff import data as data
    from cudiff import diffusion as diffusion
    from cudiff import models as models
    from cudiff import optim as optim
    from cudiff import plot as plot
    from cudiff.config import PRESETS as PRESETS
    from cudiff.config import Config as Config
    from cudiff.config import register_model as register_model
    from cudiff.config import register_objective as register_objective
    from cudiff.config import register_sampler as register_sampler
    from cudiff.cuda.graph import capture as capture
    from cudiff.data import load_dataset as load_dataset
    from cudiff.differentiate import check_gradient as check_gradient
    from cudiff.differentiate import elementwise_grad as elementwise_grad
    from cudiff.differentiate import grad as grad
    from cudiff.differentiate import value_and_grad as value_and_grad
    from cudiff.differentiate import vjp as vjp
    from cudiff.options import Option as Option
    from cudiff.pipeline import Pipeline as Pipeline
    from cudiff.pipeline import load as load
    from cudiff.torchfunction import to_torch_function as to_torch_function
    from cudiff.train import Trainer as Trainer
else:
    _LATER = {
        "Config": "cudiff.config", "PRESETS": "cudiff.config", "Pipeline": "cudiff.pipeline",
        "Trainer": "cudiff.train", "capture": "cudiff.cuda.graph", "load": "cudiff.pipeline",
        "load_dataset": "cudiff.data", "Option": "cudiff.options", "register_model": "cudiff.config",
        "register_objective": "cudiff.config", "register_sampler": "cudiff.config",
        "check_gradient": "cudiff.differentiate", "elementwise_grad": "cudiff.differentiate",
        "grad": "cudiff.differentiate", "value_and_grad": "cudiff.differentiate", "vjp": "cudiff.differentiate",
        "to_torch_function": "cudiff.torchfunction",
    }
    """Imported when first asked for, so that `import cudiff` stays fast; so are the modules below."""
    _MODULES = ("checkpoint", "convert", "data", "diffusion", "models", "optim", "plot")

    __all__ = [
        "CudiffError", "Function", "Tensor", "allow_tf32", "bfloat16", "cuda_available", "default_device", "float16",
        "float32", "float64", "from_dlpack", "int32", "int64", "nn", "no_grad", "seed", *ops.__all__, *_LATER,
        *_MODULES,
    ]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, *_MODULES})

    def __getattr__(name: str) -> Any:
        if name in _LATER:
            return getattr(import_module(_LATER[name]), name)
        if name in _MODULES:
            return import_module(f"cudiff.{name}")
        raise AttributeError(f"module 'cudiff' has no attribute '{name}'")
