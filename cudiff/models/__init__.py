"""The models, one file each: importing it registers it for configurations to name (docs/adding-a-model.md)."""

from __future__ import annotations

from cudiff.models.unet import UNet  # first, as it is the default: help and messages name it first

# isort: split

from cudiff.errors import CudiffError
from cudiff.models.cs179 import CS179UNet
from cudiff.models.dit import DiT
from cudiff.nn import Module, init
from cudiff.registry import MODELS, Settings, register_model

__all__ = ["CS179UNet", "DiT", "UNet", "build", "outline", "register_model"]


def build(config: Settings) -> Module:
    """The net that `config` describes, its parameters drawn from `config.seed`.

    Raises CudiffError for sizes that do not divide (see `UNet`) and for a configuration without image size or channels.
    """
    with init.seeded(config.seed):
        return _net(config)


def outline(config: Settings, tensors: int, numbers: int) -> Module:
    """What `build` returns, but for the values: names, shapes and layouts, and no memory used.

    tensors, numbers: how many a file has, which the model is to be compared with. Raises CudiffError as `build` does,
    and where the model is larger; one twice as large may pass, so that a comparison names what is missing.
    """
    with init.outlined(2 * tensors, 2 * numbers):
        return _net(config)


def _net(config: Settings) -> Module:
    if not config.image_size or not config.channels:
        raise CudiffError("a model needs image_size and channels: give both, or take them from the data")
    net = MODELS[config.model].build(config)
    if not isinstance(net, Module):
        raise CudiffError(f"model {config.model} was built as a {type(net).__name__}: return a cudiff.nn.Module")
    return net
