"""Optimiser steps on flat float32 buffers, in place: the scalars of a step, Adam(W), SGD, RMSprop, Lion, EMA.

All that changes from step to step is in two small device buffers, so that a captured step does not freeze it:
`counters`, int32 (3,), ordered as `Counter`, and `scalars`, float32 (7,), ordered as `Scalar`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, IntFlag
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cudiff.backend import Array, bfloat16, float32
from cudiff.cuda.launch import blocks, empty, launch
from cudiff.function import Context, Function
from cudiff.tensor import Tensor

CHUNK = 32768
"""Elements the NumPy path updates at a time: few enough to stay in cache, enough to outweigh the calls (measured)."""


class Peer(NamedTuple):
    """Another GPU: the address of `data` in its memory, and of its gradient of the same elements in this one's."""

    data: int
    grad: int


MOST_PEERS = 7
_PEERS = np.dtype([("data", "u8", MOST_PEERS), ("grads", "u8", MOST_PEERS), ("count", "i8")])


class Counter(IntEnum):
    """The elements of `counters`. A step whose gradient norm is not finite is skipped."""

    UPDATES = 0
    SKIPPED = 1
    SKIPPED_IN_A_ROW = 2


class Flag(IntFlag):
    """The flags of 32 consecutive parameters; kernels/portable/optim.cu has the same list."""

    DECAY = 1  # weight decay applies
    FROZEN = 2  # nothing changes: neither the parameters, nor their moments, nor their moving average


class Scalar(IntEnum):
    """The elements of `scalars`; kernels/portable/optim.cu has the same list."""

    LR = 0
    GRAD_SCALE = 1  # times the clip coefficient
    STEP_SIZE = 2  # lr / (1 - beta1^t)
    RSQRT_BIAS2 = 3  # (1 - beta2^t)^-1/2
    EMA_WEIGHT = 4  # of the new parameters in the moving average
    NORM = 5  # of the scaled gradient, before clipping
    APPLY = 6  # 0 where the update is skipped


def lr_factor(step: int, warmup: int, total_steps: int, final: float) -> float:
    """The factor of the learning rate at `step`, counted from 0.

    Rises linearly to 1 over `warmup` steps, then falls along half a cosine to `final`, reached at `total_steps`.
    """
    rise = min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
    progress = min(1.0, max(0.0, (step - warmup) / (total_steps - warmup))) if total_steps > warmup else 0.0
    return rise * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))


class SquareSums(Function):
    """The sums of squares of pieces of a gradient."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx: Context, grad, *, chunk, peers):
        whole = grad.size // chunk * chunk
        rows, rest = grad[:whole].reshape(-1, chunk), grad[whole:]
        return np.append(np.vecdot(rows, rows), [np.dot(rest, rest)] if rest.size else []).astype(float32)

    @staticmethod
    def forward_cuda(ctx: Context, grad, *, chunk, peers):
        sums = empty(blocks(grad.size, chunk), float32)
        if grad.size:
            args = grad, _table(peers), sums, np.int64(grad.size), chunk
            launch("optim", "square_sums", sums.size, 256, args, T=bfloat16)
        return sums


def square_sums(grad: Tensor, chunk: int = CHUNK, peers: Sequence[Peer] = ()) -> Tensor:
    """float32 (ceil(n / chunk),): the sums of squares of `chunk` elements of grad, float32 (n,), at a time, each in a
    fixed order. chunk is a multiple of 32. peers: as for `adam`; nothing is written to their memory."""
    return SquareSums.apply(grad, chunk=chunk, peers=peers)


class StepScalars(Function):
    """Find the gradient's norm, count the step and write its scalars."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx: Context, scalars, counters, squares, *, lr, warmup, total_steps, final, betas, scale, clip,
                      half_life, ramp):
        grad_norm = scale * math.sqrt(squares.sum(dtype=np.float64))
        step = int(counters[Counter.UPDATES]) + int(counters[Counter.SKIPPED])
        apply = math.isfinite(grad_norm)
        counters[Counter.UPDATES if apply else Counter.SKIPPED] += 1
        counters[Counter.SKIPPED_IN_A_ROW] = 0 if apply else counters[Counter.SKIPPED_IN_A_ROW] + 1

        t = max(1, int(counters[Counter.UPDATES]))
        rate = lr * lr_factor(step, warmup, total_steps, final)
        life = half_life if ramp is None else min(half_life, ramp * step)
        scalars[Scalar.LR] = rate
        scalars[Scalar.GRAD_SCALE] = scale * min(1.0, clip / (grad_norm + 1e-6))
        scalars[Scalar.STEP_SIZE] = rate / (1 - betas[0] ** t)
        scalars[Scalar.RSQRT_BIAS2] = (1 - betas[1] ** t) ** -0.5
        scalars[Scalar.EMA_WEIGHT] = -math.expm1(-math.log(2) / max(life, 1e-8))
        scalars[Scalar.NORM] = grad_norm
        scalars[Scalar.APPLY] = apply
        return scalars

    @staticmethod
    def forward_cuda(ctx: Context, scalars, counters, squares, *, lr, warmup, total_steps, final, betas, scale, clip,
                     half_life, ramp):
        logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
        numbers = (*logs, scale, clip, half_life, -1.0 if ramp is None else ramp)
        args = squares, scalars, counters, squares.size, np.float64(lr), warmup, total_steps, np.float64(final)
        launch("optim", "step_scalars", 1, 256, (*args, *map(np.float64, numbers)), T=bfloat16)
        return scalars


def step_scalars(scalars: Tensor, counters: Tensor, squares: Tensor, *, lr: float, warmup: int = 0,
                 total_steps: int = 0, final: float = 1.0, betas: tuple[float, float] = (0.0, 0.0), scale: float = 1.0,
                 clip: float = math.inf, half_life: float = 1.0, ramp: float | None = None) -> Tensor:
    """Count one step in `counters`, which are zero before the first, and write its `scalars`; returns `scalars`.

    squares: the `square_sums` of the gradient before `scale`. Its norm is scale·‖grad‖, summed in a fixed order in
    float64. Where that is not finite, APPLY is 0 and the step is counted as skipped. The gradient's factor is
    scale·min(1, clip / (norm + 1e-6)), as in torch.nn.utils.clip_grad_norm_. Bias corrections depend on the number
    of updates, learning rate and EMA on that of steps, skipped ones too. The EMA's half-life is min(half_life,
    ramp·step) steps, step from 0 (Karras et al. 2022, training code), so that the first step copies.
    """
    return StepScalars.apply(
        scalars, counters, squares, lr=float(lr), warmup=int(warmup), total_steps=int(total_steps), final=float(final),
        betas=betas, scale=float(scale), clip=float(clip), half_life=float(half_life), ramp=ramp,
    )


class Rescale(Function):
    """Write the scalars of parameters whose learning rate or betas differ from the step's."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx: Context, scalars, counters, out, factors, *, ratio, betas):
        t, step = max(1, int(counters[Counter.UPDATES])), int(counters[: Counter.SKIPPED + 1].sum()) - 1
        rate = float(scalars[Scalar.LR]) * ratio * (1.0 if factors is None else float(factors[: step + 1][-1]))
        out[...] = scalars
        out[Scalar.LR] = rate
        out[Scalar.STEP_SIZE] = rate / (1 - betas[0] ** t)
        out[Scalar.RSQRT_BIAS2] = (1 - betas[1] ** t) ** -0.5
        return out

    @staticmethod
    def forward_cuda(ctx: Context, scalars, counters, out, factors, *, ratio, betas):
        logs = [np.float64(math.log(beta) if beta > 0 else -math.inf) for beta in betas]
        length = 0 if factors is None else factors.size
        args = (scalars, counters, out, factors, length, np.float64(ratio), *logs)
        launch("optim", "rescale", 1, 32, args, T=bfloat16)
        return out


def rescale(scalars: Tensor, counters: Tensor, out: Tensor, factors: Tensor | None = None, *, ratio: float = 1.0,
            betas: tuple[float, float] = (0.0, 0.0)) -> Tensor:
    """The `scalars` that `step_scalars` wrote, with `ratio` times the rate and the bias corrections of `betas`.

    factors: float32; the rate is also multiplied by factors[step], step from 0, after their end by the last one. The
    result is written to `out`, which may be `scalars`, and returned.
    """
    return Rescale.apply(scalars, counters, out, factors, ratio=float(ratio), betas=betas)


def _finish(part: slice, data: Array, compute_copy: Array, ema: Array, ema_copy: Array, weight: float,
            gap: Array) -> None:
    """Update the compute copy, the moving average and its copy by one chunk of new parameters; `gap` is scratch."""
    new = data[part]
    if compute_copy is not None:
        compute_copy[part] = new
    if ema is None:
        return
    if weight < 0.5:
        np.subtract(new, ema[part], out=gap)
        gap *= weight
        ema[part] += gap
    else:  # exact where weight is 1
        np.subtract(ema[part], new, out=gap)
        gap *= 1 - weight
        np.add(new, gap, out=ema[part])
    if ema_copy is not None:
        ema_copy[part] = ema[part]


def _chunks(flags: Array) -> Iterator[tuple[slice, slice, Array, Array]]:
    """Yields slices of up to CHUNK elements that are not frozen, the slices of their flags, and two scratch arrays."""
    a, b = np.empty(CHUNK, float32), np.empty(CHUNK, float32)
    changes = np.diff(np.concatenate(([0], flags & Flag.FROZEN == 0, [0])).astype(np.int8))
    for first, last in zip(np.flatnonzero(changes == 1) * 32, np.flatnonzero(changes == -1) * 32, strict=True):
        for start in range(int(first), int(last), CHUNK):
            stop = min(start + CHUNK, int(last))
            yield slice(start, stop), slice(start // 32, stop // 32), a[: stop - start], b[: stop - start]


class Update(Function):
    """One update of `data`, in place. A subclass has the name of its `kernel` in optim.cu and the kernel's `numbers`.

    buffers: the optimiser's own, each like `data` or None, then scalars, flags, compute_copy, ema and ema_copy. On the
    CPU `change(g, scratch, values, *own, **attrs)` gets a chunk of the scaled gradient, L2 penalty included, and of
    each own buffer, which it updates. It returns what is subtracted from the parameters, as g or as scratch. values:
    the `scalars` as floats.
    """

    differentiable = False
    kernel: ClassVar[str]
    change: ClassVar[Callable[..., Array]]
    numbers: ClassVar[Callable[..., tuple]]

    @classmethod
    def forward_numpy(cls, ctx: Context, data, grad, *buffers, weight_decay, decoupled, peers, **attrs):
        *own, scalars, flags, compute_copy, ema, ema_copy = buffers
        values = [float(value) for value in scalars]
        if not values[Scalar.APPLY]:
            return data
        rate = weight_decay * values[Scalar.LR] if decoupled else weight_decay
        decay = np.where(flags & Flag.DECAY, float32.type(rate), float32.type(0))  # of each 32 parameters
        for part, block, g, scratch in _chunks(flags):
            p = data[part]
            np.multiply(grad[part], values[Scalar.GRAD_SCALE], out=g)
            if weight_decay and decoupled:
                p.reshape(-1, 32)[...] *= 1 - decay[block, None]
            elif weight_decay:
                np.multiply(p.reshape(-1, 32), decay[block, None], out=scratch.reshape(-1, 32))
                g += scratch
            p -= cls.change(g, scratch, values, *[None if x is None else x[part] for x in own], **attrs)
            _finish(part, data, compute_copy, ema, ema_copy, values[Scalar.EMA_WEIGHT], scratch)
        return data

    @classmethod
    def forward_cuda(cls, ctx: Context, data, grad, *buffers, peers, **attrs):
        args = (data, grad, *buffers, _table(peers), np.int64(data.size), *cls.numbers(**attrs))
        copies = [array.dtype for array in (buffers[-3], buffers[-1]) if array is not None]
        launch("optim", cls.kernel, blocks(data.size, 1024), 256, args, T=copies[0] if copies else bfloat16)
        return data


def _table(peers: Sequence[Peer]) -> np.ndarray:
    table, count = np.zeros(1, _PEERS), len(peers)
    table["data"][0, :count], table["grads"][0, :count] = [peer.data for peer in peers], [peer.grad for peer in peers]
    table["count"] = count
    return table


class AdamUpdate(Update):
    """One update of Adam or AdamW."""

    kernel = "adam"

    @staticmethod
    def change(g, scratch, values, m, v, betas, eps):
        m *= betas[0]
        np.multiply(g, 1 - betas[0], out=scratch)
        m += scratch
        v *= betas[1]
        g *= g
        g *= 1 - betas[1]
        v += g
        np.sqrt(v, out=g)
        g *= values[Scalar.RSQRT_BIAS2]
        g += eps
        np.divide(m, g, out=g)
        g *= values[Scalar.STEP_SIZE]
        return g

    @staticmethod
    def numbers(betas, eps, weight_decay, decoupled):
        return 1.0 - betas[0], 1.0 - betas[1], float(eps), float(weight_decay), decoupled


def adam(data: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor, flags: Tensor,
         compute_copy: Tensor | None = None, ema: Tensor | None = None, ema_copy: Tensor | None = None, *,
         betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
         decoupled: bool = False, peers: Sequence[Peer] = ()) -> Tensor:
    """Adam (Kingma and Ba, 2015), in place: moments, `data`, its 16-bit `compute_copy`, `ema` and its compute copy.

    All flat, float32 (n,), n a multiple of 32; flags uint8 (n / 32,) of `Flag`. Weight decay is added to the gradient,
    or with `decoupled` shrinks the parameter (AdamW, Loshchilov and Hutter, 2019). peers: up to MOST_PEERS other GPUs;
    a kernel adds their gradients, in this order, and writes what `data` gets to their memory too. Returns `data`.
    """
    return AdamUpdate.apply(
        data, grad, exp_avg, exp_avg_sq, scalars, flags, compute_copy, ema, ema_copy,
        betas=betas, eps=eps, weight_decay=weight_decay, decoupled=decoupled, peers=peers,
    )


def adamw(*args: Tensor | None, **attrs: Any) -> Tensor:
    """`adam` with decoupled weight decay."""
    return adam(*args, decoupled=True, **attrs)  # type: ignore[arg-type]


class SGDUpdate(Update):
    """One update of gradient descent with momentum."""

    kernel = "sgd"

    @staticmethod
    def change(g, scratch, values, b, momentum, nesterov):
        b *= momentum
        b += g
        np.multiply(b, momentum if nesterov else 1, out=scratch)
        if nesterov:
            scratch += g
        scratch *= values[Scalar.LR]
        return scratch

    @staticmethod
    def numbers(momentum, weight_decay, nesterov, decoupled):
        return float(momentum), float(weight_decay), nesterov


def sgd(data: Tensor, grad: Tensor, momentum_buffer: Tensor, scalars: Tensor, flags: Tensor,
        compute_copy: Tensor | None = None, ema: Tensor | None = None, ema_copy: Tensor | None = None, *,
        momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False,
        peers: Sequence[Peer] = ()) -> Tensor:
    """Gradient descent with momentum, optionally Nesterov's, in place; buffers as for `adam`. Returns `data`."""
    return SGDUpdate.apply(
        data, grad, momentum_buffer, scalars, flags, compute_copy, ema, ema_copy,
        momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, decoupled=False, peers=peers,
    )


class RMSpropUpdate(Update):
    """One update of RMSprop."""

    kernel = "rmsprop"

    @staticmethod
    def change(g, scratch, values, v, b, mean, alpha, eps, momentum):
        v *= alpha
        np.multiply(g, g, out=scratch)
        scratch *= 1 - alpha
        v += scratch
        variance = v
        if mean is not None:
            mean *= alpha
            np.multiply(g, 1 - alpha, out=scratch)
            mean += scratch
            variance = np.maximum(v - mean * mean, 0)
        np.sqrt(variance, out=scratch)
        scratch += eps
        g /= scratch
        b *= momentum
        b += g
        np.multiply(b, values[Scalar.LR], out=g)
        return g

    @staticmethod
    def numbers(alpha, eps, momentum, weight_decay, decoupled):
        return 1.0 - alpha, float(eps), float(momentum), float(weight_decay)


def centered_rmsprop(data: Tensor, grad: Tensor, square_avg: Tensor, momentum_buffer: Tensor, grad_avg: Tensor | None,
                     scalars: Tensor, flags: Tensor, compute_copy: Tensor | None = None, ema: Tensor | None = None,
                     ema_copy: Tensor | None = None, *, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0,
                     weight_decay: float = 0.0, peers: Sequence[Peer] = ()) -> Tensor:
    """RMSprop as in torch.optim.RMSprop, in place; buffers as for `adam`. Returns `data`.

    The gradient is divided by sqrt(square_avg) + eps, or if `grad_avg` is given by sqrt(max(square_avg - grad_avg², 0))
    + eps: rounding may take the difference below zero.
    """
    return RMSpropUpdate.apply(
        data, grad, square_avg, momentum_buffer, grad_avg, scalars, flags, compute_copy, ema, ema_copy,
        alpha=alpha, eps=eps, momentum=momentum, weight_decay=weight_decay, decoupled=False, peers=peers,
    )


def rmsprop(data: Tensor, grad: Tensor, square_avg: Tensor, momentum_buffer: Tensor, *buffers: Tensor | None,
            **attrs: Any) -> Tensor:
    """`centered_rmsprop` without `grad_avg`."""
    return centered_rmsprop(data, grad, square_avg, momentum_buffer, None, *buffers, **attrs)  # type: ignore[arg-type]


class LionUpdate(Update):
    """One update of Lion."""

    kernel = "lion"

    @staticmethod
    def change(g, scratch, values, m, betas):
        m -= g
        np.multiply(m, betas[0], out=scratch)
        scratch += g
        np.sign(scratch, out=scratch)
        scratch *= values[Scalar.LR]
        m *= betas[1]
        m += g
        return scratch

    @staticmethod
    def numbers(betas, weight_decay, decoupled):
        return *map(float, betas), float(weight_decay)


def lion(data: Tensor, grad: Tensor, exp_avg: Tensor, scalars: Tensor, flags: Tensor,
         compute_copy: Tensor | None = None, ema: Tensor | None = None, ema_copy: Tensor | None = None, *,
         betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
         peers: Sequence[Peer] = ()) -> Tensor:
    """Lion (Chen et al., 2023, arXiv 2302.06675), in place, weight decay decoupled; buffers as for `adam`. Returns
    `data`."""
    return LionUpdate.apply(
        data, grad, exp_avg, scalars, flags, compute_copy, ema, ema_copy,
        betas=betas, weight_decay=weight_decay, decoupled=True, peers=peers,
    )
