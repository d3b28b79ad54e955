"""The small U-Net for MNIST of the CS 179 project (github.com/Austinwang22/cs179-diffusion), with its names."""

from __future__ import annotations

from cudiff import ops
from cudiff.backend import Array, float32
from cudiff.models.levels import WIDTHS, check_levels
from cudiff.nn import Conv2d, ConvTranspose2d, Linear, Module, ModuleList, Sequential, SiLU, grouped_linear
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.registry import Settings, register_model
from cudiff.tensor import Tensor
from cudiff.values import whole


class TimeEmbedding(Module):
    """t (N,) → (N, dim): sinusoids, sine first, their highest divisor dim/2 − 1; then a layer of 4·dim with SiLU."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.mlp = Sequential(Linear(dim, 4 * dim), SiLU(), Linear(4 * dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        emb = ops.timestep_embedding(t, self.dim, divisor="half-1", order="sin,cos")
        first, _, second = self.mlp
        (hidden,) = grouped_linear(emb, first, silu=True)
        return grouped_linear(hidden, second)[0]


class Block(Module):
    """Two 3×3 convolutions, each with the same projection of the time embedding added, then ReLU."""

    def __init__(self, channels: int, out_channels: int, emb_channels: int):
        super().__init__()
        self.conv1, self.conv2 = Conv2d(channels, out_channels, 3), Conv2d(out_channels, out_channels, 3)
        self.time_proj = Linear(emb_channels, out_channels)

    def forward(self, x: Tensor, shift: Tensor, x2: Tensor | None = None, pool: bool = False) -> Tensor:
        """shift (N, out_channels) is `time_proj` of the embedding; `x2` is joined to x at its end.

        pool: 2×2 max-pooling at the end, which then does the last ReLU.
        """
        h = self._convolve(self.conv1, x, shift, x2)
        h = self._convolve(self.conv2, h, shift, relu=not pool)
        return ops.max_pool2d(h, 2, relu=True) if pool else h

    def _convolve(self, conv: Conv2d, x: Tensor, shift: Tensor, x2: Tensor | None = None, relu: bool = True) -> Tensor:
        return ops.norm_silu_conv2d(
            x, x2, weight=conv.weight, bias=conv.bias, emb=shift, relu=relu, statistics=False,
            dtype=self.activation_dtype,
        )


class UpBlock(Block):
    """A Block and a 2×2 transposed convolution to twice the size."""

    def __init__(self, channels: int, out_channels: int, emb_channels: int):
        super().__init__(channels, out_channels, emb_channels)
        self.upsample = ConvTranspose2d(out_channels, out_channels, 2, stride=2)

    def forward(self, x: Tensor, shift: Tensor, x2: Tensor | None = None, pool: bool = False) -> Tensor:
        return self.upsample(super().forward(x, shift, x2, pool))


class CS179UNet(Module):
    """net(x, t, labels=None): x (N, H, W, in_channels) float32, t (N,) or a number → like x. It has no classes.

    Every encoder block ends in 2×2 max-pooling; what is pooled goes down and, as the skip connection, across.

    Parameters
    ----------
    image_size : int, pixels; must divide by 2 ** levels
    model_channels, channel_mult : channels at each level; 64 and (1, 2) are the project's
    Raises CudiffError for a size that does not divide, saying which do. Its call raises ValueError for labels.
    """

    def __init__(self, image_size: int = 28, in_channels: int = 1, model_channels: int = 64,
                 channel_mult: tuple[int, ...] = (1, 2)):
        super().__init__()
        whole("image_size", image_size), whole("model_channels", model_channels, 2)
        check_levels(image_size, channel_mult, len(channel_mult))  # the bottleneck lies below the last level
        widths = [model_channels * mult for mult in channel_mult]
        emb_channels = 2 * model_channels
        self.time_emb = TimeEmbedding(emb_channels)
        self.enc_blocks = ModuleList(
            [Block(before, width, emb_channels) for before, width in zip([in_channels, *widths], widths, strict=False)]
        )
        self.bottleneck = Block(widths[-1], widths[-1], emb_channels)
        self.dec_blocks, channels = ModuleList(), widths[-1]
        for width in reversed(widths):
            self.dec_blocks.append(UpBlock(channels + width, width, emb_channels))
            channels = width
        self.out_conv = Conv2d(channels, in_channels, 1)

    def forward(self, x: Tensor, t: Tensor | Array | float, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            raise ValueError("CS 179's U-Net has no classes and takes no labels: give None")
        blocks = [*self.enc_blocks, self.bottleneck, *self.dec_blocks]
        shifts = iter(grouped_linear(self.time_emb(noise_levels(t, x)), *(block.time_proj for block in blocks)))
        h, skips = ops.astype(x, float32), []
        for block in self.enc_blocks:
            h = block(h, next(shifts), pool=True)
            skips.append(h)
        h = self.bottleneck(h, next(shifts))
        for block in self.dec_blocks:
            h = block(h, next(shifts), skips.pop())
        out = self.out_conv
        return ops.norm_silu_conv2d(h, weight=out.weight, bias=out.bias, dtype=float32)


def _check(config: Settings) -> None:
    check_levels(config.image_size, config.channel_mult, len(config.channel_mult))


@register_model(
    "cs179", "a small one for MNIST", options=WIDTHS, check=_check, c_noise_scale=1.0, classes=False
)
def _build(config: Settings) -> CS179UNet:
    return CS179UNet(config.image_size, config.channels, config.model_channels, config.channel_mult)
