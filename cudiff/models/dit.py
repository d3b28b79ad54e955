"""DiT, the transformer of Peebles and Xie (arXiv 2212.09748), with the parameter names of their code."""

from __future__ import annotations

import math

import numpy as np

from cudiff import ops
from cudiff.backend import Array, float32, int32
from cudiff.errors import CudiffError
from cudiff.nn import (
    Conv2d,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    ModuleList,
    Parameter,
    Sequential,
    SiLU,
    grouped_linear,
    init,
)
from cudiff.ops.attention import MOST_HEAD_CHANNELS
from cudiff.ops.cast import as_index
from cudiff.ops.matmul import split_linear
from cudiff.ops.timestep_embedding import noise_levels
from cudiff.options import Option
from cudiff.recompute import recomputed
from cudiff.registry import Settings, register_model
from cudiff.tensor import Tensor
from cudiff.values import whole, whole_pair

OPTIONS = {
    "patch_size": Option(4, "DiT: pixels a side of what becomes a token", least=1, most=2**10),
    "hidden_size": Option(384, "DiT: channels of a token", least=4, most=2**16),
    "depth": Option(12, "DiT: blocks", least=1, most=1000),
    "num_heads": Option(6, "attention heads", least=1, most=2**16),
    "mlp_ratio": Option(4.0, "DiT: channels inside a block's MLP, in units of hidden_size", above=0, most=64),
    "qk_norm": Option(False, "DiT: normalise the queries and keys of each head"),
}
SIZES = {"s": (384, 12, 6), "b": (768, 12, 12), "l": (1024, 24, 16), "xl": (1152, 28, 16)}
"""hidden_size, depth and num_heads of the paper's models (Table 1)."""
FREQUENCIES = 256  # channels of the sinusoids of t
EPS = 1e-6  # of the norms that are modulated


def _linear(inputs: int, outputs: int, std: float | None = None) -> Linear:
    """A layer whose weight is drawn with this deviation, by Glorot's rule where None; without a bias at first."""
    layer, shape = Linear(inputs, outputs), (outputs, inputs)
    weight = init.glorot_uniform(shape) if std is None else init.normal(shape, std)
    layer.weight = Parameter(weight, low=True, decay=True, layout="linear", copy=False)
    layer.bias = Parameter(init.zeros((outputs,)), copy=False)
    return layer


def _zeroed(layer: Linear) -> Linear:
    init.zero(layer.weight.data)
    return layer


def _modulation(hidden_size: int, vectors: int) -> Sequential:
    """SiLU and the layer that gives so many vectors of `hidden_size`, all of them 0 at first: adaLN-Zero."""
    return Sequential(SiLU(), _zeroed(_linear(hidden_size, vectors * hidden_size)))


def _vectors(adaln: Sequential, silu_c: Tensor, vectors: int) -> tuple[Tensor, ...]:
    """Those of `_modulation`, float32 (N, D) each, of silu(c) (N, D) in the dtype of activations."""
    return split_linear(silu_c, adaln[1].weight, adaln[1].bias, vectors)


class PatchEmbed(Module):
    """x (N, H, W, C) → (N, H/P · W/P, D): each patch of P×P pixels by one linear layer, which is stored as the
    convolution of stride P that it is."""

    def __init__(self, patch_size: int, in_channels: int, hidden_size: int):
        super().__init__()
        self.proj = Conv2d(in_channels, hidden_size, patch_size, stride=patch_size, padding=0)
        patch = patch_size * patch_size * in_channels
        weight = init.glorot_uniform((hidden_size, patch)).reshape(self.proj.weight.shape)
        self.proj.weight = Parameter(weight, low=True, decay=True, layout="conv2d", copy=False)
        self.proj.bias = Parameter(init.zeros((hidden_size,)), copy=False)

    def forward(self, x: Tensor) -> Tensor:
        n, height, width, channels = x.shape
        hidden_size, p = self.proj.weight.shape[:2]
        rows, columns, dtype = height // p, width // p, self.activation_dtype
        patches = ops.transpose(ops.reshape(x, (n, rows, p, columns, p, channels)), (0, 1, 3, 2, 4, 5))
        patches = ops.astype(ops.reshape(patches, (n, rows * columns, p * p * channels)), dtype)
        weight = ops.astype(ops.reshape(self.proj.weight, (hidden_size, p * p * channels)), dtype)
        return ops.linear(patches, weight, self.proj.bias)


class TimestepEmbedder(Module):
    """t (N,) → (N, D): sinusoids, then two layers with SiLU between."""

    def __init__(self, hidden_size: int):
        super().__init__()
        first, second = _linear(FREQUENCIES, hidden_size, 0.02), _linear(hidden_size, hidden_size, 0.02)
        self.mlp = Sequential(first, SiLU(), second)

    def forward(self, t: Tensor) -> Tensor:
        first, _, second = self.mlp
        (hidden,) = grouped_linear(ops.timestep_embedding(t, FREQUENCIES), first, silu=True)
        return grouped_linear(hidden, second)[0]


class LabelEmbedder(Module):
    """labels → (N, D): a row for each class and, last, one for none."""

    def __init__(self, num_classes: int, hidden_size: int):
        super().__init__()
        self.embedding_table = Embedding(num_classes + 1, hidden_size)
        table = init.normal((num_classes + 1, hidden_size), 0.02)
        self.embedding_table.weight = Parameter(table, decay=False, layout="embedding", copy=False)

    def forward(self, labels: Tensor | None) -> Tensor:
        """labels int32 (N,), −1 for none → (N, D); of no labels at all (1, D). On the CPU IndexError for others."""
        weight = self.embedding_table.weight
        none = len(weight) - 1
        if labels is None:
            return weight[none:]
        labels = as_index("a DiT", labels, weight.device)
        if labels.device == "cpu" and labels.size and not -1 <= labels.data.min() <= labels.data.max() < none:
            raise IndexError(f"a label lies outside [-1, {none}): {labels.data.min()} to {labels.data.max()}")
        # in float32, exact up to 2^24 classes: device arithmetic is for floats
        rows = ops.where(labels < 0, float(none), ops.astype(labels, float32))
        return self.embedding_table(ops.astype(rows, int32))


class Attention(Module):
    """Self-attention of all tokens of x (N, T, D); `qk_norm`: the queries and keys of a head are normalised."""

    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = _linear(hidden_size, 3 * hidden_size), _linear(hidden_size, hidden_size)
        self.q_norm = LayerNorm(hidden_size // num_heads) if qk_norm else None
        self.k_norm = LayerNorm(hidden_size // num_heads) if qk_norm else None

    def forward(self, x: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
        """residual + gate · attention(x)"""
        qkv, proj = self.qkv(x), self.proj
        if self.q_norm is None or self.k_norm is None:
            mixed = ops.attention_qkv(qkv, self.num_heads, new_order=True)
        else:
            heads = (*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads)
            q, k, v = (ops.reshape(part, heads) for part in ops.split(qkv, 3, axis=2))
            mixed = ops.attention(self.q_norm(q), self.k_norm(k), v)
        return ops.linear(mixed, proj.weight, proj.bias, residual, gate)


class Mlp(Module):
    """Two layers with GELU between, as tanh approximates it."""

    def __init__(self, hidden_size: int, inner: int):
        super().__init__()
        self.fc1, self.fc2 = _linear(hidden_size, inner), _linear(inner, hidden_size)

    def forward(self, x: Tensor, residual: Tensor, gate: Tensor) -> Tensor:
        """residual + gate · mlp(x)"""
        fc1, fc2 = self.fc1, self.fc2
        return ops.mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, residual, "gelu_tanh", gate)


class Block(Module):
    """x + gate · attention(modulated(x)), then x + gate · mlp(modulated(x)): Figure 3 of the paper, adaLN-Zero."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, qk_norm: bool):
        super().__init__()
        self.attn = Attention(hidden_size, num_heads, qk_norm)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio))
        self.adaLN_modulation = _modulation(hidden_size, 6)

    def forward(self, x: Tensor, silu_c: Tensor) -> Tensor:
        """x (N, T, D) and silu(c) (N, D), both in the dtype of activations."""
        shift, scale, gate, shift2, scale2, gate2 = _vectors(self.adaLN_modulation, silu_c, 6)
        x = self.attn(ops.layer_norm(x, scale, shift, EPS, plus_one=True), x, gate)
        return self.mlp(ops.layer_norm(x, scale2, shift2, EPS, plus_one=True), x, gate2)


class FinalLayer(Module):
    """x (N, T, D) → (N, T, P · P · out_channels) float32; 0 at first."""

    def __init__(self, hidden_size: int, outputs: int):
        super().__init__()
        self.linear = _zeroed(_linear(hidden_size, outputs))
        self.adaLN_modulation = _modulation(hidden_size, 2)

    def forward(self, x: Tensor, silu_c: Tensor) -> Tensor:
        shift, scale = _vectors(self.adaLN_modulation, silu_c, 2)
        rows = ops.reshape(ops.layer_norm(x, scale, shift, EPS, plus_one=True), (*x.shape[:2], 1, x.shape[2]))
        # a linear layer whose sums need not be rounded to 16 bits
        out = ops.norm_silu_conv2d(rows, weight=self.linear.weight, bias=self.linear.bias, dtype=float32)
        return ops.reshape(out, (*x.shape[:2], out.shape[3]))


class DiT(Module):
    """net(x, t, labels): x (N, H, W, in_channels) float32, t (N,) or a number, labels int32 (N,) or None → float32.

    Parameters
    ----------
    image_size : pixels a side, or of rows and columns; multiples of patch_size
    hidden_size, depth, num_heads : see `SIZES`
    num_classes : 0 for none; label −1 is the last row of the table of num_classes + 1
    learn_sigma : the output has twice the channels (Improved DDPM, arXiv 2102.09672)
    qk_norm : a layer norm of queries and keys in each head (arXiv 2302.05442, section 3.1), which the paper has not

    Weights start as in the paper's code: each block is the identity, and the output 0. The position embedding is a
    buffer, `pos_embed`, as it is in that code's state dict. Raises CudiffError for sizes and heads that do not divide,
    saying which do. Its call raises ValueError for images of another size, and for labels where num_classes is 0.
    Where its attribute `recompute` is True, backward runs each block again instead of keeping what lies between its
    layers.
    """

    recompute = False

    def __init__(self, image_size: int | tuple[int, int], in_channels: int = 3, patch_size: int = 4,
                 hidden_size: int = 384, depth: int = 12, num_heads: int = 6, mlp_ratio: float = 4.0,
                 num_classes: int = 0, learn_sigma: bool = False, qk_norm: bool = False):
        super().__init__()
        self.image_size = height, width = whole_pair("image_size", image_size)
        whole("patch_size", patch_size), whole("hidden_size", hidden_size, 4), whole("depth", depth)
        for size in (height, width):
            check_sizes(size, patch_size, hidden_size, num_heads, mlp_ratio)
        self.patch_size, self.out_channels = patch_size, in_channels * (2 if learn_sigma else 1)
        self.x_embedder = PatchEmbed(patch_size, in_channels, hidden_size)
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.register_buffer("pos_embed", Tensor(positions(height // patch_size, width // patch_size, hidden_size)))
        self.blocks = ModuleList([Block(hidden_size, num_heads, mlp_ratio, qk_norm) for _ in range(depth)])
        self.final_layer = FinalLayer(hidden_size, patch_size * patch_size * self.out_channels)

    def forward(self, x: Tensor, t: Tensor | Array | float, labels: Tensor | None = None) -> Tensor:
        if labels is not None and self.y_embedder is None:
            raise ValueError("this DiT is unconditional and takes no labels: give None, or build it with num_classes")
        if labels is not None and np.shape(labels) != x.shape[:1]:
            raise ValueError(f"labels are {np.shape(labels)} for {len(x)} images: give one class for each")
        if x.shape[1:3] != self.image_size:
            height, width = self.image_size
            raise ValueError(f"this DiT takes images of {height}x{width} pixels, not of shape {x.shape}")
        dtype = self.activation_dtype
        c = self.t_embedder(noise_levels(t, x))
        if self.y_embedder is not None:
            c = c + self.y_embedder(labels)
        silu_c = ops.astype(ops.silu(c), dtype)
        h = self.x_embedder(ops.astype(x, float32)) + ops.astype(self.pos_embed, dtype)
        for block in self.blocks:
            h = recomputed(block, h, silu_c) if self.recompute else block(h, silu_c)
        return self._image(self.final_layer(h, silu_c))

    def _image(self, tokens: Tensor) -> Tensor:
        """(N, T, P · P · K) as (N, H, W, K)."""
        (height, width), p, k = self.image_size, self.patch_size, self.out_channels
        patches = ops.reshape(tokens, (len(tokens), height // p, width // p, p, p, k))
        return ops.reshape(ops.transpose(patches, (0, 1, 3, 2, 4, 5)), (len(tokens), height, width, k))


def positions(rows: int, columns: int, hidden_size: int) -> np.ndarray:
    """Sinusoids (1, rows · columns, hidden_size) of a token's place: sine and cosine of its column, then of its row.

    A quarter of the channels each, with the frequencies 10000^(−4i / hidden_size), in float64 rounded to float32.
    """
    table = init.zeros((1, rows * columns, hidden_size))
    frequency = 10000.0 ** (-np.arange(hidden_size // 4) / (hidden_size // 4))
    row, column = np.divmod(np.arange(rows * columns)[:, None], columns)
    angles = [place * frequency for place in (column, row)]
    np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1, out=table[0],
                   casting="same_kind")
    return table


def check_sizes(image_size: int, patch_size: int, hidden_size: int, num_heads: int, mlp_ratio: float) -> None:
    """Raise CudiffError where patches do not cover the image, heads not the channels, or an MLP has none, saying what
    does."""
    if image_size % patch_size:
        low = image_size // patch_size * patch_size
        raise CudiffError(
            f"image size {image_size} is no multiple of patch_size {patch_size}: use a size such as "
            f"{f'{low} or ' if low else ''}{low + patch_size}, or another patch_size"
        )
    heads = [n for n in range(1, hidden_size + 1) if hidden_size % n == 0 and hidden_size // n <= MOST_HEAD_CHANNELS]
    if hidden_size % 4:
        raise CudiffError(f"hidden_size {hidden_size} is no multiple of 4: use {-(-hidden_size // 4) * 4}")
    if num_heads not in heads:
        raise CudiffError(
            f"num_heads {num_heads} does not cut the hidden_size {hidden_size} into heads of up to "
            f"{MOST_HEAD_CHANNELS} channels: use {', '.join(map(str, heads[:8]))}"
        )
    if int(hidden_size * mlp_ratio) < 1:
        raise CudiffError(f"mlp_ratio {mlp_ratio} of hidden_size {hidden_size} is not one channel: use "
                          f"{math.ceil(1000 / hidden_size) / 1000} or more")


def _check(config: Settings) -> None:
    check_sizes(config.image_size, config.patch_size, config.hidden_size, config.num_heads, config.mlp_ratio)


@register_model("dit", "a transformer of patches", options=OPTIONS, check=_check, learns_variance=True)
def _build(config: Settings) -> DiT:
    return DiT(
        config.image_size, config.channels, num_classes=max(0, config.num_classes), learn_sigma=config.learn_sigma,
        **{name: config.options[name] for name in OPTIONS},
    )
