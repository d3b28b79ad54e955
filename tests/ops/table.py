"""Every public operation: how it is called on random shapes, and what it means in plain NumPy, in float64.

`ROWS[name]` draws a `Case` from a generator of numbers; tests/ops/test_table.py runs them, tests/sanitize.py too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import cudiff
from cudiff import Tensor, ops
from tests.ops import table_index, table_products  # noqa: F401  their rows
from tests.ops.cases import MAGNITUDES, ORDINARY, ROWS, Case, Numbers, row
from tests.ops.table_elementwise import NOT_ZERO, UP_TO_ONE
from tests.ops.table_rearrange import moves

__all__ = ["ELSEWHERE", "ROWS"]

# Of these no number goes in, or none comes out that a formula of numbers gives: the test that holds each.
ELSEWHERE = {
    **dict.fromkeys(["Generator", "Purpose", "normal", "uniform", "randint"], "tests/ops/test_random.py"),
    **dict.fromkeys([
        "all", "allclose", "any", "array_equal", "count_nonzero", "equal", "greater", "greater_equal", "isclose",
        "isfinite", "isinf", "isnan", "less", "less_equal", "logical_and", "logical_not", "logical_or", "logical_xor",
        "not_equal",
    ], "tests/ops/test_compare.py"),
    **dict.fromkeys([
        "bitwise_and", "bitwise_or", "bitwise_xor", "invert", "left_shift", "right_shift",
    ], "tests/ops/test_integer.py"),
    **dict.fromkeys([
        "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "zeros",
        "zeros_like",
    ], "tests/ops/test_create.py"),
    **dict.fromkeys([
        "argmax", "argmin", "argsort", "bincount", "one_hot", "searchsorted", "unique",
    ], "tests/ops/test_order.py"),
    **dict.fromkeys(["argwhere", "nonzero"], "tests/ops/test_index.py"),
    "blend_to_uint8": "tests/ops/test_blend.py", "blended_frame": "tests/ops/test_frame.py",
    "draw_batch": "tests/ops/test_batch.py", "dropout": "tests/ops/test_dropout.py",
}


def _pair(n: Numbers, positive: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Two that broadcast, either way."""
    shape = n.shape(n.size(1, 2, 3))
    other = tuple(1 if n.size(0, 0, 1) else size for size in shape)[n.size(0, 0, len(shape) - 1):]
    pair = n.values(*shape, positive=positive), n.values(*other, positive=positive)
    return pair if n.size(0, 1) else pair[::-1]


_BINARY: dict[str, tuple[Any, Any, bool, tuple[str, ...]]] = {
    "add": (ops.add, np.add, False, MAGNITUDES), "subtract": (ops.subtract, np.subtract, False, MAGNITUDES),
    "multiply": (ops.multiply, np.multiply, False, MAGNITUDES), "divide": (ops.divide, np.divide, False, NOT_ZERO),
    "power": (ops.power, np.power, True, ORDINARY), "maximum": (ops.maximum, np.maximum, False, NOT_ZERO),
    "minimum": (ops.minimum, np.minimum, False, NOT_ZERO),
    "arctan2": (ops.arctan2, np.arctan2, False, ORDINARY),
    "hypot": (ops.hypot, np.hypot, False, ORDINARY),
    "logaddexp": (ops.logaddexp, np.logaddexp, False, UP_TO_ONE),
    "floor_divide": (ops.floor_divide, np.floor_divide, False, ORDINARY),
    "remainder": (ops.remainder, np.remainder, False, ORDINARY),
    "operator +": (lambda a, b: a + b, np.add, False, MAGNITUDES),
    "operator -": (lambda a, b: a - b, np.subtract, False, MAGNITUDES),
    "operator *": (lambda a, b: a * b, np.multiply, False, MAGNITUDES),
    "operator /": (lambda a, b: a / b, np.divide, False, NOT_ZERO),
    "operator **": (lambda a, b: a**b, np.power, True, ORDINARY),
}
for _name, (_fn, _meaning, _positive, _magnitudes) in _BINARY.items():
    def _binary(n: Numbers, fn: Any = _fn, meaning: Any = _meaning, positive: bool = _positive) -> Case:
        pair = _pair(n, positive)
        return Case(fn, pair, meaning, terms=max(x.size for x in pair), linear=fn is ops.add)

    row(_name, _magnitudes)(_binary)


@row("operators with numbers", NOT_ZERO)
def _numbers(n: Numbers) -> Case:
    def fn(x: Any) -> Any:
        return ((2.5 + x) * 3 - 1) / 2 + 4 / x - (-x) * 0.5 + 1 * x

    return Case(fn, (n.values(*n.shape(2)),), fn, steps=12)


@row("operator @")
def _matmul_operator(n: Numbers) -> Case:
    m, k, c = n.size(), n.size(1, 7, 33, 130), n.size()
    return Case(lambda a, b: a @ b, (n.values(m, k), n.values(k, c)), np.matmul, terms=k, linear=True)


@row("matmul")
def _matmul(n: Numbers) -> Case:
    m, k, c, b = n.size(), n.size(1, 7, 33, 130, 515), n.size(1, 5, 16, 67), n.size(1, 2, 3)
    return Case(ops.matmul, (n.values(b, m, k), n.values(1, k, c)), np.matmul, terms=max(k, b * m, c), linear=True)


@row("linear")
def _linear(n: Numbers) -> Case:
    rows, k, c = n.size(1, 2, 33, 130), n.size(1, 7, 64, 130), n.size(1, 5, 16, 67)
    arrays = n.values(rows, k), n.values(c, k), n.values(c), n.values(rows, c)
    return Case(lambda x, w, b, r: ops.linear(x, w, b, residual=r), arrays, lambda x, w, b, r: x @ w.T + b + r,
                terms=max(k, rows, c), linear=True, fp32=(1, 2), low=(1,))


@row("grouped_linear")
def _grouped_linear(n: Numbers) -> Case:
    rows, k, outs = n.size(), n.size(1, 7, 33), [n.size() for _ in range(3)]
    arrays = n.values(rows, k), *(n.values(c, k) for c in outs), *(n.values(c) for c in outs)
    return Case(lambda x, *p: ops.grouped_linear(x, p[:3], p[3:]), arrays,
                lambda x, *p: tuple(x @ w.T + b for w, b in zip(p[:3], p[3:], strict=True)),
                terms=rows + k + sum(outs), linear=True, fp32=tuple(range(7)))


@row("where")
def _where(n: Numbers) -> Case:
    a, b = _pair(n)
    mask = n.rng.integers(0, 2, np.broadcast_shapes(a.shape, b.shape)).astype(np.uint8)
    return Case(ops.where, (mask, a, b), lambda m, a, b: np.where(m != 0, a, b), terms=mask.size)


@row("lerp")
def _lerp(n: Numbers) -> Case:
    a, b = _pair(n)
    weight = n.values(*np.broadcast_shapes(a.shape, b.shape)[:1], *(1,) * (max(a.ndim, b.ndim) - 1))
    return Case(ops.lerp, (a, b, weight), lambda a, b, w: a + (b - a) * w, terms=max(a.size, b.size), steps=3)


@row("clip", ORDINARY)
def _clip(n: Numbers) -> Case:
    return Case(lambda x: ops.clip(x, -0.7, 0.9), (n.values(*n.shape(2)),),
                lambda x: np.minimum(np.maximum(x, -0.7), 0.9))


@row("astype")
def _astype(n: Numbers) -> Case:
    return Case(lambda x: ops.astype(x, x.dtype) * 1, (n.values(*n.shape(2)),), lambda x: x)


def _axes(n: Numbers) -> tuple[tuple[int, ...], Any, bool]:
    shape = n.shape(3)
    return shape, [None, 0, 1, -1, (0, 1), (1, 2), (0, 2)][n.size(*range(7))], bool(n.size(0, 1))


for _name, _magnitudes in {"sum": MAGNITUDES, "mean": MAGNITUDES, "max": NOT_ZERO, "min": NOT_ZERO, "var": ORDINARY,
                           "std": ORDINARY, "ptp": ORDINARY, "amax": NOT_ZERO, "amin": NOT_ZERO}.items():
    def _reduction(n: Numbers, name: str = _name) -> Case:
        shape, axis, keepdims = _axes(n)
        ddof = {"ddof": n.size(0, 1)} if name in ("var", "std") else {}
        if ddof:
            shape = tuple(size + 1 for size in shape)
        return Case(lambda x: getattr(ops, name)(x, axis, keepdims, **ddof), (n.values(*shape),),
                    lambda x: getattr(np, name)(x, axis=axis, keepdims=keepdims, **ddof),
                    terms=math.prod(shape), linear=name in ("sum", "mean"), steps=2 if name == "std" else 1)

    row(_name, _magnitudes)(_reduction)


moves("reshape", lambda x: ops.reshape(x, (x.shape[1], -1)), lambda x: x.reshape(x.shape[1], -1))
moves("flatten", lambda x: ops.flatten(x, 1), lambda x: x.reshape(len(x), -1))
moves("expand_dims", lambda x: ops.expand_dims(x, (0, -1)), lambda x: x[None, ..., None])
moves("squeeze", lambda x: ops.squeeze(x[:, :1], 1), lambda x: x[:, 0])
moves("transpose", lambda x: ops.transpose(x, (2, 0, 1)), lambda x: np.moveaxis(x, 2, 0))
moves("broadcast_to", lambda x: ops.broadcast_to(x, (3, *x.shape)), lambda x: np.stack([x, x, x]))
moves("split", lambda x: ops.split(x, [1], 2), lambda x: (x[..., :1], x[..., 1:]))
moves("pad", lambda x: ops.pad(x, ((1, 0), (0, 2), (1, 1)), "constant", 0.5),
      lambda x: np.pad(x, ((1, 0), (0, 2), (1, 1)), constant_values=0.5))
moves("stack", lambda x: ops.stack([x, x * 2, x], 1), lambda x: np.stack([x, x * 2, x], 1))
moves("concatenate", lambda x: ops.concatenate([x, x[:, :1]], 1), lambda x: np.concatenate([x, x[:, :1]], 1))


@row("embedding")
def _embedding(n: Numbers) -> Case:
    classes, width = n.size(), n.size(1, 7, 257)
    index = n.rng.integers(-1, classes, n.size()).astype(np.int32)
    return Case(ops.embedding, (index, n.values(classes, width)),
                lambda i, w: np.stack([w[j] if j >= 0 else 0 * w[0] for j in i]), terms=16)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


SPREAD = ("ordinary", "tiny", "some zeros", "zeros")
for _name, _meaning in {"softmax": _softmax, "log_softmax": lambda x: np.log(_softmax(x)),
                        "logsumexp": lambda x: np.logaddexp.reduce(x, None)}.items():
    def _over(n: Numbers, name: str = _name, meaning: Any = _meaning) -> Case:
        x = n.values(n.size(), n.size(1, 5, 33, 257, 1031)) + n.size(0, -300, 300)  # the maximum is far from 0
        return Case(getattr(ops, name), (x,), meaning, terms=x.shape[1])

    row(_name, SPREAD)(_over)


@row("cross_entropy", SPREAD)
def _cross_entropy(n: Numbers) -> Case:
    rows, classes = n.size(), n.size(1, 5, 33, 257)
    labels = n.rng.integers(0, classes, rows).astype(np.int32)
    return Case(ops.cross_entropy, (n.values(rows, classes), labels),
                lambda x, t: -np.mean([np.log(_softmax(x[i]))[t[i]] for i in range(rows)]), terms=rows * classes)


@row("nll_loss", ORDINARY)
def _nll_loss(n: Numbers) -> Case:
    rows, classes = n.size(), n.size(1, 5, 33, 257)
    labels = n.rng.integers(0, classes, rows).astype(np.int32)
    return Case(ops.nll_loss, (n.values(rows, classes), labels),
                lambda x, t: -np.mean([x[i, t[i]] for i in range(rows)]), terms=rows * classes, steps=2)


_LOSSES = {
    "mae": lambda p, t: np.mean(np.abs(p - t)),
    "huber": lambda p, t: np.mean(np.where(abs(p - t) < 1, (p - t) ** 2 / 2, abs(p - t) - 0.5)),
    "binary_cross_entropy_with_logits": lambda p, t: np.mean(np.logaddexp(0, p) - p * t),
}
for _name, _meaning in _LOSSES.items():
    def _loss(n: Numbers, name: str = _name, meaning: Any = _meaning) -> Case:
        shape = n.shape(2)
        return Case(getattr(ops, name), (n.values(*shape), n.values(*shape)), meaning, terms=math.prod(shape), steps=2)

    row(_name, ORDINARY)(_loss)


@row("mse")
def _mse(n: Numbers) -> Case:
    rows, size = n.size(), n.size(1, 33, 1031)
    return Case(ops.mse, (n.values(rows, size), n.values(rows, size), n.values(rows)),
                lambda p, t, w: np.mean(w[:, None] * (p - t) ** 2), terms=rows * size, fp32=(2,))


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | bool = True) -> np.ndarray:
    weights = _softmax(np.where(mask, np.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[3]), -np.inf))
    return np.einsum("nhqk,nkhd->nqhd", weights, v).reshape(*q.shape[:2], -1)


@row("attention", UP_TO_ONE)
def _attention_case(n: Numbers) -> Case:
    heads, dim, queries, keys = n.size(1, 2, 3), n.size(1, 8, 16, 40), n.size(1, 7, 65), n.size(1, 5, 64, 65)
    arrays = tuple(n.values(2, t, heads, dim) for t in (queries, keys, keys))
    mask = None if n.size(0, 1) else np.tri(queries, keys, dtype=bool)

    def run(*qkv: Any) -> Tensor:
        device = next(x.device for x in qkv if isinstance(x, Tensor))
        return ops.attention(*qkv, None if mask is None else Tensor(mask, device=device))

    return Case(run, arrays, lambda *qkv: _attention(*qkv, True if mask is None else mask),
                terms=keys + dim + queries, steps=2)


@row("attention_qkv", UP_TO_ONE)
def _attention_qkv(n: Numbers) -> Case:
    heads, dim, tokens, new = n.size(1, 2, 3), n.size(1, 8, 16, 33), n.size(1, 7, 65), bool(n.size(0, 1))

    def meaning(qkv: np.ndarray) -> np.ndarray:
        if new:
            return _attention(*(part.reshape(2, tokens, heads, dim) for part in np.split(qkv, 3, -1)))
        return _attention(*np.moveaxis(qkv.reshape(2, tokens, heads, 3, dim), 3, 0))

    return Case(lambda x: ops.attention_qkv(x, heads, new), (n.values(2, tokens, 3 * heads * dim),), meaning,
                terms=2 * tokens + dim, steps=2)


def _conv(x: np.ndarray, w: np.ndarray, stride: int, padding: int) -> np.ndarray:
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    high, wide = ((x.shape[i] - w.shape[i]) // stride + 1 for i in (1, 2))
    out = np.zeros((len(x), high, wide, len(w)))
    for i in range(high):
        for j in range(wide):
            window = x[:, i * stride : i * stride + w.shape[1], j * stride : j * stride + w.shape[2]]
            out[:, i, j] = np.einsum("nrsc,krsc->nk", window, w)
    return out


@row("conv2d")
def _conv2d(n: Numbers) -> Case:
    side, c, k, r = n.size(3, 5, 8), n.size(1, 3, 8, 16), n.size(1, 3, 8, 16), n.size(1, 2, 3)
    stride, padding = n.size(1, 2), n.size(0, 1)
    arrays = n.values(2, side, side + 1, c), n.values(k, r, r, c), n.values(k)
    return Case(lambda x, w, b: ops.conv2d(x, w, b, stride, padding), arrays,
                lambda x, w, b: _conv(x, w, stride, padding) + b, terms=c * k * r * r * side * side, linear=True,
                fp32=(1, 2), low=(1,))


@row("conv2d with groups and dilation")
def _conv2d_grouped(n: Numbers) -> Case:
    groups, c, k, gap = n.size(1, 2, 8), n.size(1, 3), n.size(1, 2), n.size(1, 2)
    arrays = n.values(2, 6, 7, groups * c), n.values(groups * k, 3, 2, c), n.values(groups * k)

    def meaning(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = np.zeros((groups * k, 2 * gap + 1, gap + 1, c))
        wide[:, ::gap, ::gap] = w
        parts = zip(np.split(x, groups, 3), np.split(wide, groups), strict=True)
        return np.concatenate([_conv(part, weight, 1, 1) for part, weight in parts], 3) + b

    return Case(lambda x, w, b: ops.conv2d(x, w, b, 1, 1, gap, groups), arrays, meaning, terms=600, linear=True,
                fp32=(1, 2), low=(1,))


@row("conv1d")
def _conv1d(n: Numbers) -> Case:
    length, c, k, s = n.size(3, 8, 31), n.size(1, 3, 8), n.size(1, 3, 8), n.size(1, 2, 3)
    arrays = n.values(2, length, c), n.values(k, s, c), n.values(k)
    return Case(lambda x, w, b: ops.conv1d(x, w, b), arrays,
                lambda x, w, b: _conv(x[:, None], w[:, None], 1, 0)[:, 0] + b, terms=c * k * s * length, linear=True,
                fp32=(1, 2), low=(1,))


@row("conv_transpose2d")
def _conv_transpose2d(n: Numbers) -> Case:
    side, c, k, r, stride = n.size(1, 3, 5), n.size(1, 3, 8), n.size(1, 3, 8), n.size(2, 3), n.size(1, 2)

    def meaning(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = np.zeros((2, (side - 1) * stride + r, (side - 1) * stride + r, k)) + b
        for i in range(side):
            for j in range(side):
                window = out[:, i * stride : i * stride + r, j * stride : j * stride + r]
                window += np.einsum("nc,crsk->nrsk", x[:, i, j], w)
        return out

    arrays = n.values(2, side, side, c), n.values(c, r, r, k), n.values(k)
    return Case(lambda x, w, b: ops.conv_transpose2d(x, w, b, stride), arrays, meaning,
                terms=c * k * r * r * side * side, linear=True, fp32=(1, 2), low=(1,))


def _windows(x: np.ndarray, size: int) -> np.ndarray:
    high, wide = x.shape[1] // size, x.shape[2] // size
    x = x[:, : high * size, : wide * size].reshape(len(x), high, size, wide, size, -1)
    return np.moveaxis(x, 3, 2).reshape(len(x), high, wide, size * size, -1)


def _image(n: Numbers, least: int = 2) -> np.ndarray:
    return n.values(n.size(1, 2, 3), n.size(least, 5, 8), n.size(least, 7, 8), n.size(1, 3, 8, 16, 33))


@row("max_pool2d", NOT_ZERO)
def _max_pool2d(n: Numbers) -> Case:
    return Case(lambda x: ops.max_pool2d(x, 2), (_image(n),), lambda x: _windows(x, 2).max(3))


@row("avg_pool2d")
def _avg_pool2d(n: Numbers) -> Case:
    return Case(lambda x: ops.avg_pool2d(x, 2), (_image(n),), lambda x: _windows(x, 2).mean(3), terms=4, linear=True)


@row("upsample_nearest")
def _upsample_nearest(n: Numbers) -> Case:
    return Case(lambda x: ops.upsample_nearest(x, 3), (_image(n),), lambda x: x.repeat(3, 1).repeat(3, 2), terms=9)


@row("layer_norm", ORDINARY)
def _layer_norm(n: Numbers) -> Case:
    images, rows, c, eps = (n.size(1, 3),) * n.size(0, 1), n.size(), n.size(2, 8, 33, 257), 0.05

    plus_one = bool(n.size(0, 1))

    def meaning(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
        normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return normal * (w + plus_one)[..., None, :] + b[..., None, :]

    x, w, b = n.values(*images, rows, c), n.values(*images, c), n.values(*images, c)
    return Case(lambda *a: ops.layer_norm(*a, eps, plus_one), (x, w, b), meaning, terms=c * rows, fp32=(1, 2))


def _group_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray, groups: int, eps: float) -> np.ndarray:
    parts = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean, var = parts.mean((1, 3), keepdims=True), parts.var((1, 3), keepdims=True)
    return ((parts - mean) / np.sqrt(var + eps)).reshape(x.shape) * w + b


@row("group_norm", ORDINARY)
def _group_norm_case(n: Numbers) -> Case:
    groups, each = n.size(1, 2, 3), n.size(2, 3, 8)
    c, eps = groups * each, 0.05

    def meaning(x: np.ndarray, w: np.ndarray, b: np.ndarray, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        z = _group_norm(x, w, b, groups, eps) * (1 + s[:, None, None]) + t[:, None, None]
        return z / (1 + np.exp(-z))

    arrays = n.values(2, 3, n.size(3, 5, 8), c), *(n.values(*s) for s in ((c,), (c,), (2, c), (2, c)))
    return Case(lambda x, w, b, s, t: ops.group_norm(x, w, b, groups, eps, True, s, t), arrays, meaning,
                terms=48 * each, fp32=(1, 2, 3, 4))


def _batch_norm(pool: bool) -> Callable[[Numbers], Case]:
    def draw(n: Numbers) -> Case:
        c, eps = n.size(1, 3, 8, 33), 0.05

        def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            mean, var = (Tensor(np.full(c, v), dtype=w.dtype, device=x.device) for v in (0, 1))
            return (ops.batch_norm_relu_pool if pool else ops.batch_norm)(x, w, b, mean, var, True, eps=eps)

        def meaning(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
            rows = x.reshape(-1, c)
            y = (x - rows.mean(0)) / np.sqrt(rows.var(0) + eps) * w + b
            return np.maximum(_windows(y, 2).max(3), 0) if pool else y

        return Case(fn, (n.values(2, 4, n.size(4, 6), c), n.values(c), n.values(c)), meaning, terms=64, fp32=(1, 2))

    return draw


row("batch_norm", ORDINARY)(_batch_norm(False))
row("batch_norm_relu_pool", ORDINARY)(_batch_norm(True))


@row("norm_silu_conv2d", ORDINARY)
def _norm_silu_conv2d(n: Numbers) -> Case:
    c, k, side = n.size(4, 8, 16), n.size(3, 8, 16), n.size(4, 5, 8)

    def fn(x: Tensor, w: Tensor, b: Tensor, g: Tensor, h: Tensor, e: Tensor, r: Tensor) -> Tensor:
        return ops.norm_silu_conv2d(x, weight=w, bias=b, norm_weight=g, norm_bias=h, emb=e, residual=r, num_groups=2,
                                    eps=0.05)

    def meaning(*arrays: np.ndarray) -> np.ndarray:
        x, w, b, g, h, e, r = arrays
        z = _group_norm(x, g, h, 2, 0.05)
        return _conv(z / (1 + np.exp(-z)), w, 1, 1) + b + e[:, None, None] + r

    shapes = (2, side, side, c), (k, 3, 3, c), (k,), (c,), (c,), (2, k), (2, side, side, k)
    return Case(fn, tuple(n.values(*shape) for shape in shapes), meaning, terms=9 * max(c, k) * side * side, steps=4,
                fp32=(1, 2, 3, 4, 5))


@row("timestep_embedding", UP_TO_ONE)
def _timestep_embedding(n: Numbers) -> Case:
    dim, late, sin_first, period = n.size(4, 7, 10, 64), n.size(0, 1), n.size(0, 1), float(n.size(100, 10000))

    def fn(t: Tensor) -> Tensor:
        options = {"divisor": "half-1" if late else "half", "order": "sin,cos" if sin_first else "cos,sin"}
        return ops.timestep_embedding(t, dim, period, **options)

    def meaning(t: np.ndarray) -> np.ndarray:
        half = dim // 2
        angle = t[:, None] / period ** (np.arange(half) / (half - late))
        parts = [np.sin(angle), np.cos(angle)] if sin_first else [np.cos(angle), np.sin(angle)]
        return np.concatenate([*parts, np.zeros((len(t), dim % 2))], 1)

    return Case(fn, (n.values(n.size()),), meaning, terms=dim, fp32=(0,))


def _edm(n: Numbers) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    images = n.values(n.size(1, 3), n.size(1, 5), n.size(1, 8), n.size(1, 3))
    return images, n.values(*images.shape), n.values(len(images), positive=True)


_DATA = {"sigma_data": 0.6, "data_mean": 0.3, "data_std": 0.8}


def _of(sigma: np.ndarray, x: Tensor) -> Tensor:
    """Noise levels that float32 holds, beside images in float64 in that."""
    return Tensor(sigma.astype(np.float32), dtype=x.dtype if x.dtype == np.float64 else "float32", device=x.device)


@row("edm_mix", ORDINARY)
def _edm_mix(n: Numbers) -> Case:
    def fn(images: Tensor, noise: Tensor, draw: Tensor) -> Any:
        with cudiff.no_grad():
            return ops.edm_mix(images, noise, draw, P_mean=-1.2, P_std=1.1, c_noise_scale=0.25, **_DATA)

    def meaning(images: np.ndarray, noise: np.ndarray, draw: np.ndarray) -> Any:
        sigma = np.exp(-1.2 + 1.1 * draw)[:, None, None, None]
        y = (images - 0.3) / 0.8
        length = np.sqrt(sigma**2 + 0.36)
        return ((y + sigma * noise) / length, (y - 0.36 / length**2 * (y + sigma * noise)) / (sigma * 0.6 / length),
                (-1.2 + 1.1 * draw) * 0.25)

    return Case(fn, _edm(n), meaning, terms=16, fp32=(2,))


@row("edm_input", ORDINARY)
def _edm_input(n: Numbers) -> Case:
    x, _, sigma = _edm(n)

    def fn(x: Tensor) -> Any:
        return ops.edm_input(x, _of(sigma, x), c_noise_scale=0.25, **_DATA)[0]

    s = sigma.astype(np.float32).astype(float)[:, None, None, None] / 0.8
    return Case(fn, (x,), lambda x: (x - 0.3) / 0.8 / np.sqrt(s**2 + 0.36), terms=16)


@row("edm_output", ORDINARY)
def _edm_output(n: Numbers) -> Case:
    x, out, sigma = _edm(n)

    def fn(x: Tensor, out: Tensor) -> Any:
        return ops.edm_output(x, out, _of(sigma, x), **_DATA)

    s = sigma.astype(np.float32).astype(float)[:, None, None, None] / 0.8
    return Case(fn, (x, out), lambda x, out: 0.3 + 0.8 * (0.36 / (s**2 + 0.36) * (x - 0.3) / 0.8
                                                         + s * 0.6 / np.sqrt(s**2 + 0.36) * out), terms=16)


@row("normalize_images", ORDINARY)
def _normalize_images(n: Numbers) -> Case:
    images = n.rng.integers(0, 256, n.shape(3)).astype(np.uint8)
    return Case(ops.normalize_images, (images,), lambda x: x / 127.5 - 1, terms=2)
