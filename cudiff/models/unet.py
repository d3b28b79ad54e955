"""The U-Net of guided-diffusion (Dhariwal & Nichol, arXiv 2105.05233), with its options and its parameter names."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np

from cudiff import ops
from cudiff.backend import Array, float32
from cudiff.errors import CudiffError
from cudiff.models.levels import WIDTHS, check_levels
from cudiff.nn import (
    Conv2d,
    Dropout,
    Embedding,
    GroupNorm,
    Linear,
    Module,
    ModuleList,
    Sequential,
    SiLU,
    grouped_linear,
    init,
)
from cudiff.ops.attention import MOST_HEAD_CHANNELS
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.options import Option
from cudiff.recompute import recomputed
from cudiff.registry import Settings, register_model
from cudiff.tensor import Tensor
from cudiff.values import real, whole

OPTIONS = WIDTHS | {
    "num_res_blocks": Option(2, "residual blocks a level", least=1, most=1000),
    "attention_resolutions": Option((), "image sizes in pixels at which attention is used", least=1),
    "num_heads": Option(4, "attention heads, where num_head_channels is 0", least=1, most=2**16),
    "num_head_channels": Option(0, "channels of each attention head; 0 = see num_heads", least=0, most=2**16),
    "use_scale_shift_norm": Option(False, "the embedding scales and shifts the norm instead of being added"),
    "resblock_updown": Option(False, "down- and upsample inside residual blocks"),
    "conv_resample": Option(True, "down- and upsample with a convolution"),
    "dropout": Option(0.0, "dropout probability in residual blocks", least=0, below=1),
    "use_new_attention_order": Option(False, "q, k and v are split before the heads are"),
    "max_period": Option(10000.0, "longest period of the timestep sinusoids", above=1),
    "zero_init": Option(True, "start the last convolution of each block at zero"),
    "norm_group_channels": Option(1, "fewest channels in a norm's group; 1 is guided-diffusion", least=1),
}


def num_groups(channels: int, group_channels: int) -> int:
    """The largest power of two, up to guided-diffusion's 32, that divides the channels and leaves `group_channels` in
    each group. Below 32 groups, a group has two channels at least."""
    groups = math.gcd(32, channels)
    least = group_channels if groups == 32 else max(2, group_channels)
    while groups > 1 and channels // groups < least:
        groups //= 2
    return groups


def zeroed(layer: Module) -> Module:
    """Start `layer` at zero, so that the block it ends starts as the identity."""
    for parameter in layer.parameters():
        init.zero(parameter.data)
    return layer


class Upsample(Module):
    """(N, H, W, C) → (N, 2H, 2W, C): nearest, then a 3×3 convolution where `use_conv`."""

    def __init__(self, channels: int, use_conv: bool):
        super().__init__()
        self.conv = Conv2d(channels, channels, 3) if use_conv else None

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is None:
            return ops.upsample_nearest(x, 2)
        return ops.norm_silu_conv2d(x, weight=self.conv.weight, bias=self.conv.bias, upsample=True)


class Downsample(Module):
    """(N, H, W, C) → (N, H/2, W/2, C): a 3×3 convolution of stride 2 where `use_conv`, else the mean of 2×2."""

    def __init__(self, channels: int, use_conv: bool):
        super().__init__()
        self.op = Conv2d(channels, channels, 3, stride=2) if use_conv else None

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x) if self.op is not None else ops.avg_pool2d(x, 2)


class ResBlock(Module):
    """norm, SiLU, conv, + emb, norm, SiLU, dropout, conv, + skip; `x2` is the skip connection a concat would join.

    `resample` is None, "up" or "down": both paths are resampled between the first SiLU and the first convolution.
    """

    def __init__(self, channels: int, out_channels: int, emb_channels: int, dropout: float = 0.0,
                 use_scale_shift_norm: bool = False, resample: str | None = None, zero_init: bool = True,
                 norm_group_channels: int = 1):
        super().__init__()
        self.use_scale_shift_norm, self.resample = use_scale_shift_norm, resample
        last = Conv2d(out_channels, out_channels, 3)
        self.in_layers = ModuleList(
            [GroupNorm(num_groups(channels, norm_group_channels), channels), None, Conv2d(channels, out_channels, 3)]
        )
        self.emb_layers = ModuleList([None, Linear(emb_channels, out_channels * (2 if use_scale_shift_norm else 1))])
        self.out_layers = ModuleList([
            GroupNorm(num_groups(out_channels, norm_group_channels), out_channels), None, Dropout(dropout),
            zeroed(last) if zero_init else last,
        ])
        self.skip_connection = Conv2d(channels, out_channels, 1) if channels != out_channels else None

    def forward(self, x: Tensor, emb: tuple[Tensor, ...], x2: Tensor | None = None) -> Tensor:
        """x (N, H, W, C), x2 (N, H, W, C2) or None, emb from `embeddings` → (N, H, W, K)."""
        added, scale, shift = (None, *emb) if self.use_scale_shift_norm else (*emb, None, None)
        norm, _, conv = self.in_layers
        if self.resample == "down":
            h = ops.avg_pool2d(norm(x, silu=True), 2)
            h = ops.norm_silu_conv2d(h, weight=conv.weight, bias=conv.bias, emb=added)
            x = ops.avg_pool2d(x, 2)
        else:
            up = self.resample == "up"
            h = ops.norm_silu_conv2d(
                x, x2, norm_weight=norm.weight, norm_bias=norm.bias, weight=conv.weight, bias=conv.bias, emb=added,
                num_groups=norm.num_groups, eps=norm.eps, upsample=up,
            )
            x = ops.upsample_nearest(x, 2) if up else x
        return self._out(h, x, x2, scale, shift)

    def _out(self, h: Tensor, x: Tensor, x2: Tensor | None, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        norm, _, dropout, conv = self.out_layers
        skip = self.skip_connection
        if skip is None:
            x2 = None
        return ops.norm_silu_conv2d(
            h, norm_weight=norm.weight, norm_bias=norm.bias, weight=conv.weight, bias=conv.bias,
            scale=scale, shift=shift, num_groups=norm.num_groups, eps=norm.eps, dropout=dropout.draw(h.device),
            residual=x, residual2=x2, skip_weight=None if skip is None else skip.weight,
            skip_bias=None if skip is None else skip.bias,
        )


def embeddings(blocks: list[ResBlock], silu_emb: Tensor) -> dict[ResBlock, tuple[Tensor, ...]]:
    """Each block's `emb_layers` of silu_emb (N, E) float32, all by one operation: what is added, (N, K), or scale and
    shift, (N, K) each."""
    parts = 2 if blocks[0].use_scale_shift_norm else 1
    found = iter(grouped_linear(silu_emb, *(block.emb_layers[1] for block in blocks), parts=parts))
    return dict(zip(blocks, zip(*[found] * parts, strict=True), strict=True))


class AttentionBlock(Module):
    """x + proj_out(attention(qkv(norm(x)))) over all positions of x (N, H, W, C)."""

    def __init__(self, channels: int, num_heads: int, new_order: bool, zero_init: bool = True,
                 norm_group_channels: int = 1):
        super().__init__()
        self.num_heads, self.new_order = num_heads, new_order
        self.norm = GroupNorm(num_groups(channels, norm_group_channels), channels)
        self.qkv = Linear(channels, 3 * channels, layout="pointwise")
        self.proj_out = Linear(channels, channels, layout="pointwise")
        if zero_init:
            zeroed(self.proj_out)

    def forward(self, x: Tensor) -> Tensor:
        norm, qkv, proj_out = self.norm, self.qkv, self.proj_out
        h = ops.norm_silu_conv2d(
            x, norm_weight=norm.weight, norm_bias=norm.bias, weight=qkv.weight, bias=qkv.bias,
            num_groups=norm.num_groups, eps=norm.eps, silu=False, statistics=False,
        )
        h = ops.attention_qkv(h, self.num_heads, self.new_order)
        return ops.norm_silu_conv2d(h, weight=proj_out.weight, bias=proj_out.bias, residual=x)


def heads_of(channels: int, num_heads: int, num_head_channels: int) -> int:
    """How many heads attend over so many channels. Raises CudiffError where they do not divide, or heads are wider than
    `MOST_HEAD_CHANNELS`, saying what does."""
    wide = num_head_channels > 0
    name, value = ("num_head_channels", num_head_channels) if wide else ("num_heads", num_heads)
    if value < 1 or channels % value or (value if wide else channels // value) > MOST_HEAD_CHANNELS:
        divisors = (n for n in range(1, 2**16 + 1) if channels % n == 0)
        able = [n for n in divisors if (n if wide else channels // n) <= MOST_HEAD_CHANNELS]
        raise CudiffError(
            f"{name} {value} does not divide the {channels} channels where attention is used into heads of up to "
            f"{MOST_HEAD_CHANNELS}: use {', '.join(map(str, able[-8:] if wide else able[:8]))}"
        )
    return channels // value if wide else value


class UNet(Module):
    """net(x, t, labels): x (N, H, W, in_channels) float32, t (N,) or a number, labels int32 (N,) or None → float32.

    Parameters
    ----------
    image_size : int, pixels; must divide by 2 ** (levels − 1)
    attention_resolutions : image sizes in pixels at which attention follows every residual block
    num_heads, num_head_channels : heads a block, or channels a head where num_head_channels > 0
    learn_sigma : the output has twice the channels (Improved DDPM, arXiv 2102.09672)
    max_period : longest period of the timestep sinusoids; 10000 in guided-diffusion, 1000 in unet.cu
    zero_init : start the last convolution of each block at zero, as guided-diffusion does
    norm_group_channels : fewest channels in a norm's group. guided-diffusion has 1: of 32 channels its norm then
        cancels an embedding that is added before. From 64 channels on 1 and 2 are the same

    Where its attribute `recompute` is True, backward runs each block again instead of keeping what lies between its
    layers.
    Raises CudiffError for sizes, channels or heads that do not divide, saying which do, and what is out of range. Its
    call raises ValueError for labels where num_classes is 0.
    """

    recompute = False

    def __init__(self, image_size: int, in_channels: int = 3, model_channels: int = 64,
                 channel_mult: tuple[int, ...] = (1, 2, 3, 4), num_res_blocks: int = 2,
                 attention_resolutions: tuple[int, ...] = (16, 8), num_heads: int = 4, num_head_channels: int = 32,
                 use_scale_shift_norm: bool = False, resblock_updown: bool = False, conv_resample: bool = True,
                 dropout: float = 0.0, num_classes: int = 0, learn_sigma: bool = False,
                 use_new_attention_order: bool = False, max_period: float = 10000.0, zero_init: bool = True,
                 norm_group_channels: int = 1):
        super().__init__()
        whole("image_size", image_size), whole("model_channels", model_channels, 2)
        whole("num_res_blocks", num_res_blocks), real("max_period", max_period, above=1)
        check_levels(image_size, channel_mult, len(channel_mult) - 1)
        self.image_size, self.in_channels, self.model_channels = image_size, in_channels, model_channels
        self.num_classes, self.learn_sigma, self.max_period = num_classes, learn_sigma, max_period
        emb_channels = model_channels * 4

        def res_block(channels: int, out_channels: int, resample: str | None = None) -> ResBlock:
            return ResBlock(channels, out_channels, emb_channels, dropout, use_scale_shift_norm, resample, zero_init,
                            norm_group_channels)

        def attention(channels: int) -> AttentionBlock:
            heads = heads_of(channels, num_heads, num_head_channels)
            return AttentionBlock(channels, heads, use_new_attention_order, zero_init, norm_group_channels)

        def resample(channels: int, direction: str) -> Module:
            if resblock_updown:
                return res_block(channels, channels, direction)
            return (Upsample if direction == "up" else Downsample)(channels, conv_resample)

        self.time_embed = Sequential(
            Linear(model_channels, emb_channels), SiLU(), Linear(emb_channels, emb_channels)
        )
        self.label_emb = Embedding(num_classes, emb_channels) if num_classes else None
        channels, size = model_channels * channel_mult[0], image_size
        self.input_blocks = ModuleList([ModuleList([Conv2d(in_channels, channels, 3)])])
        skips = [channels]
        for level, mult in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                block = ModuleList([res_block(channels, model_channels * mult)])
                channels = model_channels * mult
                if size in attention_resolutions:
                    block.append(attention(channels))
                self.input_blocks.append(block)
                skips.append(channels)
            if level < len(channel_mult) - 1:
                self.input_blocks.append(ModuleList([resample(channels, "down")]))
                skips.append(channels)
                size //= 2
        self.middle_block = ModuleList(
            [res_block(channels, channels), attention(channels), res_block(channels, channels)]
        )
        self.output_blocks = ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for index in range(num_res_blocks + 1):
                block = ModuleList([res_block(channels + skips.pop(), model_channels * mult)])
                channels = model_channels * mult
                if size in attention_resolutions:
                    block.append(attention(channels))
                if level and index == num_res_blocks:
                    block.append(resample(channels, "up"))
                    size *= 2
                self.output_blocks.append(block)
        last = Conv2d(channels, in_channels * (2 if learn_sigma else 1), 3)
        norm = GroupNorm(num_groups(channels, norm_group_channels), channels)
        self.out = ModuleList([norm, None, zeroed(last) if zero_init else last])

    def forward(self, x: Tensor, t: Tensor | Array | float, labels: Tensor | None = None) -> Tensor:
        if labels is not None and self.label_emb is None:
            raise ValueError("this U-Net is unconditional and takes no labels: give None, or build it with num_classes")
        if labels is not None and np.shape(labels) != x.shape[:1]:
            raise ValueError(f"labels are {np.shape(labels)} for {len(x)} images: give one class for each")
        first, _, second = self.time_embed
        t = noise_levels(t, x)
        (emb,) = grouped_linear(ops.timestep_embedding(t, self.model_channels, self.max_period), first, silu=True)
        if labels is None or self.label_emb is None:
            (emb,) = grouped_linear(emb, second, silu=True)
        else:
            (emb,) = grouped_linear(emb, second)
            emb = ops.silu(emb + self.label_emb(labels))
        blocks = [*self.input_blocks, self.middle_block, *self.output_blocks]
        embs = embeddings([layer for block in blocks for layer in block if isinstance(layer, ResBlock)], emb)
        conv = self.input_blocks[0][0]
        h = ops.norm_silu_conv2d(
            ops.astype(x, float32), weight=conv.weight, bias=conv.bias, dtype=self.activation_dtype
        )
        skips = [h]
        for block in list(self.input_blocks)[1:]:
            h = self._run(block, h, embs)
            skips.append(h)
        h = self._run(self.middle_block, h, embs)
        for block in self.output_blocks:
            h = self._run(block, h, embs, skips.pop())
        norm, conv = self.out[0], self.out[2]
        return ops.norm_silu_conv2d(
            h, norm_weight=norm.weight, norm_bias=norm.bias, weight=conv.weight, bias=conv.bias,
            num_groups=norm.num_groups, eps=norm.eps, dtype=float32,
        )

    def _run(self, block: ModuleList, h: Tensor, embs: dict[ResBlock, tuple[Tensor, ...]],
             skip: Tensor | None = None) -> Tensor:
        own = [emb for layer in block if isinstance(layer, ResBlock) for emb in embs[layer]]
        return recomputed(partial(_layers, block), h, skip, *own) if self.recompute else _layers(block, h, skip, *own)


def _layers(block: ModuleList, h: Tensor, skip: Tensor | None, *embs: Tensor) -> Tensor:
    """The layers of one block in turn; its first ResBlock joins `skip`, the tensor from the way down. embs: what
    `embeddings` has for its ResBlocks, one after the other."""
    found = iter(embs)
    for layer in block:
        if isinstance(layer, ResBlock):
            own = tuple(itertools.islice(found, 2 if layer.use_scale_shift_norm else 1))
            h, skip = layer(h, own, skip), None
        else:
            h = layer(h)
    return h


def _check(config: Settings) -> None:
    check_levels(config.image_size, config.channel_mult, len(config.channel_mult) - 1)
    sizes = [config.image_size >> level for level in range(len(config.channel_mult))]
    for size in config.attention_resolutions if config.image_size else ():
        if size not in sizes:
            raise CudiffError(
                f"attention_resolutions: no level has {size} pixels; choose from {', '.join(map(str, sizes))}"
            )
    attended = {config.channel_mult[-1]}  # the middle block always attends
    attended |= {
        mult for mult, size in zip(config.channel_mult, sizes, strict=True) if size in config.attention_resolutions
    }
    for mult in sorted(attended):
        heads_of(mult * config.model_channels, config.num_heads, config.num_head_channels)


@register_model("unet", "guided-diffusion's", options=OPTIONS, check=_check, learns_variance=True)
def _build(config: Settings) -> UNet:
    return UNet(
        config.image_size, config.channels, num_classes=max(0, config.num_classes), learn_sigma=config.learn_sigma,
        **{name: config.options[name] for name in OPTIONS},
    )
