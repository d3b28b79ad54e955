"""The models, one file each, and how a configuration names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudiff.errors import CudiffError
from cudiff.models.cs179 import CS179UNet
from cudiff.models.unet import UNet
from cudiff.nn import Module, init

if TYPE_CHECKING:
    from cudiff.config import Config

__all__ = ["CS179UNet", "UNet", "build", "outline"]


def build(config: Config) -> Module:
    """The net that `config` describes, its parameters drawn from `config.seed`.

    Raises CudiffError for sizes that do not divide (see `UNet`) and for a configuration without image size or channels.
    """
    with init.seeded(config.seed):
        return _net(config)


def outline(config: Config, tensors: int, numbers: int) -> Module:
    """What `build` returns, but for the values: names, shapes and layouts, and no memory used.

    tensors, numbers: how many a file has, which the model is to be compared with. Raises CudiffError as `build` does,
    and where the model is larger; one twice as large may pass, as a weight that starts at zero is asked for twice.
    """
    with init.outlined(2 * tensors, 2 * numbers):
        return _net(config)


def _net(config: Config) -> Module:
    if not config.image_size or not config.channels:
        raise CudiffError("a model needs image_size and channels: give both, or take them from the data")
    if config.model == "cs179":
        return CS179UNet(config.image_size, config.channels, config.model_channels, config.channel_mult)
    return UNet(
        config.image_size, config.channels, config.model_channels, config.channel_mult, config.num_res_blocks,
        config.attention_resolutions, config.num_heads, config.num_head_channels, config.use_scale_shift_norm,
        config.resblock_updown, config.conv_resample, config.dropout, max(0, config.num_classes),
        config.learn_sigma, config.use_new_attention_order, config.max_period, config.zero_init,
        config.norm_group_channels,
    )
