"""Random numbers from Philox4x32-10: a function of (seed, stream, step, sample, element), the same on both backends."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, float32, int32
from cudiff.cuda.graph import record_again
from cudiff.cuda.launch import blocks, launch
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.tensor import Tensor
from cudiff.values import whole

__all__ = ["Generator", "Purpose", "normal", "randint", "uniform"]


class Purpose(IntEnum):
    """The uses of random numbers. A use is the fourth word of the counter, so that no two uses share their numbers."""

    NOISE = 0
    SIGMA = 1
    TIMESTEP = 2
    FLIP = 3
    LABEL = 4
    LABEL_DROP = 5
    INIT = 6
    SAMPLE = 7
    CHURN = 8
    VALIDATION = 9
    USER = 11
    DROPOUT = 1000  # plus the layer's number


def philox(c0: Array, c1: Array, c2: Array, c3: Array, seed: int) -> np.ndarray:
    """Philox4x32-10 of uint32 counter words, which broadcast. Returns uint32 (..., 4).

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the seed's low
    and high 32 bits.
    """
    words = [np.atleast_1d(np.asarray(c, np.uint32)) for c in (c0, c1, c2, c3)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, x2, x3 = (word.astype(np.uint64) for word in words)
    for _ in range(10):
        p0, p1 = x0 * np.uint64(0xD2511F53), x2 * np.uint64(0xCD9E8D57)
        x0, x1 = (p1 >> shift) ^ x1 ^ np.uint64(k0), p1 & low
        x2, x3 = (p0 >> shift) ^ x3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    out = np.empty((*np.broadcast_shapes(*(x.shape for x in (x0, x1, x2, x3))), 4), np.uint32)
    out[..., 0], out[..., 1], out[..., 2], out[..., 3] = x0, x1, x2, x3
    return out


def random_bits(rows: int, size: int, seed: int, stream: int, step: int, first: int) -> np.ndarray:
    """uint32 (rows, size rounded up to a multiple of 4); lane e % 4 of counter (e // 4, first + row, step, stream)."""
    groups = np.arange(blocks(size, 4), dtype=np.uint32)
    samples = (np.arange(rows, dtype=np.int64) + first)[:, None]
    return philox(groups, samples.astype(np.uint32), step & 0xFFFFFFFF, stream, seed).reshape(rows, 4 * len(groups))


def _to_uniform(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint32(8)) * 2.0**-24


def _to_normal(bits: np.ndarray) -> np.ndarray:
    # Box and Muller (1958). u1 lies in (0, 1] and is exact in float32, so that only the kernel's log, sqrt, sinpi
    # and cospi round differently.
    u1, u2 = _to_uniform(bits[:, 0::2]) + 2.0**-24, _to_uniform(bits[:, 1::2])
    radius, angle = np.sqrt(-2.0 * np.log(u1)), (2.0 * math.pi) * u2
    return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1).reshape(bits.shape)


class Fill(Function):
    """Overwrite `out`, which is not empty, with random numbers of one `kind`."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, out, *words, kind, seed, stream, step, first, low, width):
        rows = out.shape[0] if out.ndim else 1
        size = out.size // rows
        seed, step, first = (
            number if array is None else sum(int(word) << 32 * i for i, word in enumerate(array.view(np.uint32)))
            for number, array in zip((seed, step, first), words, strict=True)
        )
        bits = random_bits(rows, size, seed, stream, step, first)
        if kind == "randint":
            values = ((bits.astype(np.uint64) * np.uint64(width)) >> np.uint64(32)).astype(np.int64) + low
        else:
            values = _to_normal(bits) if kind == "normal" else _to_uniform(bits)
        out.reshape(rows, size)[:] = values[:, :size]
        return out

    @staticmethod
    def forward_cuda(ctx, out, *words, kind, seed, stream, step, first, low, width):
        rows = out.shape[0] if out.ndim else 1
        size = out.size // rows
        seed_words, step_word, first_word = words
        args = [out, np.int64(rows), np.int64(size), np.uint64(seed & 0xFFFFFFFFFFFFFFFF), seed_words]
        args += [np.uint32(stream), np.uint32(step & 0xFFFFFFFF), step_word, np.uint32(first & 0xFFFFFFFF), first_word]
        if kind == "randint":
            args += [low, np.uint64(width)]
        launch("random", kind, blocks(rows * blocks(size, 4), 256), 256, args)
        return out


Number = int | Tensor


def _fill(kind: str, shape: Any, seed: Number, stream: int, step: Number, first: Number, device: str, dtype: Any,
          low: int = 0, width: int = 0) -> Tensor:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = np.dtype(dtype)
    if dtype != float32 and kind != "randint" and (device != "cpu" or dtype != np.float64):
        raise TypeError(f"{kind}() makes float32 (on the CPU also float64), not {dtype}")
    numbers, words = {}, []
    for name, number, size in (("seed", seed, 2), ("step", step, 1), ("first", first, 1)):
        tensor = number if isinstance(number, Tensor) else None
        if tensor is not None and (tensor.shape != (size,) or tensor.dtype not in (int32, np.uint32)):
            raise TypeError(f"a {name} tensor has shape ({size},) and dtype int32 or uint32")
        numbers[name] = whole(name, number, 0, 2 ** (32 * size) - 1) if tensor is None else 0
        words.append(tensor)
    out = Tensor(array_module(device).empty(shape, dtype))
    stream = whole("stream", stream, 0, 2**32 - 1)
    if not out.size:
        return out
    return Fill.apply(out, *words, kind=kind, stream=stream, low=low, width=width, **numbers)


def normal(shape: int | Sequence[int], seed: Number, stream: int = Purpose.NOISE, step: Number = 0, first: Number = 0,
           device: str = "cpu", dtype: Any = float32) -> Tensor:
    """Standard normal numbers (Box-Muller); the backends agree to 1e-6.

    Row n of `shape[0]` is sample `first + n`: its numbers depend on (seed, stream, step, sample) alone, not on the
    batch it is drawn in. seed has 64 bits, step and first 32. Each is an int, or an int32 or uint32 Tensor on `device`:
    (2,) for seed, low word first, else (1,). The kernel reads it, so each replay of a graph uses its present value.
    dtype: float32; float64 too on the CPU. Raises CudiffError for a seed, stream, step or first that is not an integer
    in range.
    """
    return _fill("normal", shape, seed, stream, step, first, device, dtype)


def uniform(shape: int | Sequence[int], seed: Number, stream: int = Purpose.NOISE, step: Number = 0, first: Number = 0,
            device: str = "cpu", dtype: Any = float32) -> Tensor:
    """Multiples of 2^-24 in [0, 1), bit-equal on both backends; arguments as for `normal`."""
    return _fill("uniform", shape, seed, stream, step, first, device, dtype)


def randint(low: int, high: int, shape: int | Sequence[int], seed: Number, stream: int = Purpose.NOISE,
            step: Number = 0, first: Number = 0, device: str = "cpu") -> Tensor:
    """int32 in [low, high), bit-equal on both backends; other arguments as for `normal`.

    low + (bits * (high - low) >> 32): for ranges below 2^16 the bias is under 2^-16 of each probability.
    Raises ValueError for an empty range or one outside int32, CudiffError for bounds that are no whole numbers.
    """
    low, high = whole("low", low, None), whole("high", high, None)
    if not -(2**31) <= low < high <= 2**31:
        raise ValueError(f"randint needs -2^31 <= low < high <= 2^31, got [{low}, {high})")
    return _fill("randint", shape, seed, stream, step, first, device, int32, low=low, width=high - low)


class Advance(Function):
    """Add 1 to a step counter, in place."""

    differentiable = False

    @staticmethod
    def forward_numpy(ctx, step):
        step += 1
        return step

    @staticmethod
    def forward_cuda(ctx, step):
        launch("random", "advance", 1, 1, (step,))
        return step


class Generator:
    """A seed and counters on the device, so that a captured training step can advance them.

    A draw without a stream gives new numbers each time: the generator counts such draws. A draw with a stream is a
    function of (seed, stream, step): the same numbers until `advance()`. The two kinds share no numbers. Row n is
    sample `first + n`. If `samples` is set, rows begin with the first of these samples of the step.

    Attributes
    ----------
    seed : int, 64 bits. device : "cpu" or "cuda".
    step : Tensor (1,) int32: `advance()` adds 1. draws : Tensor (1,) int32: each draw without a stream adds 1.
    samples : range or None: which samples of a step's batch the next operations get, if several passes or processes
        divide it. A graph keeps those that it was recorded with.

    Raises CudiffError for a seed that is not an integer of 64 bits.
    """

    def __init__(self, seed: int = 0, device: str = "cpu"):
        self.seed, self.device = whole("seed", seed, 0, 2**64 - 1), device
        self.step = Tensor(np.zeros(1, int32), device=device)
        self.draws = Tensor(np.zeros(1, int32), device=device)
        self._samples: range | None = None
        # On the host: how often `step` or `samples` was set, and how many layers have a stream of this generator.
        self.moves = self.dropouts = 0

    def normal(self, shape: int | Sequence[int], *, stream: int | None = None, first: int = 0) -> Tensor:
        """Standard normal float32; see `normal`."""
        return self._draw(normal, shape, stream=stream, first=first)

    def uniform(self, shape: int | Sequence[int], *, stream: int | None = None, first: int = 0) -> Tensor:
        """float32 in [0, 1); see `uniform`."""
        return self._draw(uniform, shape, stream=stream, first=first)

    def randint(self, low: int, high: int, shape: int | Sequence[int], *, stream: int | None = None,
                first: int = 0) -> Tensor:
        """int32 in [low, high); see `randint`."""
        return self._draw(randint, low, high, shape, stream=stream, first=first)

    @property
    def samples(self) -> range | None:
        return self._samples

    @samples.setter
    def samples(self, samples: range | None) -> None:
        self._samples = samples
        self.moves += 1  # each layer counts its calls from 0 again

    def first_row(self, rows: int) -> int:
        """The number of the first of `rows` rows among the rows of the whole batch.

        If `rows` is a multiple of the number of samples, each sample has as many consecutive rows. Otherwise the rows
        do not belong to samples: the result is 0, and all passes and processes of a batch get the same rows.
        """
        samples = self._samples
        if samples is None or rows % len(samples):
            return 0
        return samples.start * (rows // len(samples))

    def _draw(self, draw: Any, *args: Any, stream: int | None, first: int) -> Tensor:
        shape = args[-1]
        rows = shape if isinstance(shape, int) else next(iter(shape), 1)
        first = first + self.first_row(rows)
        if stream is not None:
            return draw(*args, self.seed, stream, self.step, first, self.device)
        out = draw(*args, self.seed, Purpose.USER, self.draws, first, self.device)
        Advance.apply(self.draws)
        return out

    def advance(self) -> None:
        """Add 1 to `step`: the next draws give the next step's numbers."""
        Advance.apply(self.step)
        self.moves += 1

    def frozen(self) -> Generator:
        """A copy that stays at this step."""
        still = copy.copy(self)
        still.step = Tensor(self.step.data.copy())
        return still

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: the seed, the step and the number of draws without a stream."""
        return {"seed": self.seed, "step": int(self.step.item()), "draws": int(self.draws.item())}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue from a result of `state()`; older ones have no draws. The counters stay the same arrays.

        Raises CudiffError for anything else, before a change is made.
        """
        if not isinstance(state, Mapping) or not {"seed", "step"} <= state.keys() <= {"seed", "step", "draws"}:
            raise CudiffError("a generator's state holds seed, step and draws: give what state() returned")
        seed = whole("seed", state["seed"], 0, 2**64 - 1)
        step, draws = (whole(name, state.get(name, 0), -(2**31), 2**31 - 1) for name in ("step", "draws"))
        if seed != self.seed:
            record_again()  # a captured function has drawn from the other seed
        self.seed, self.step.data[...], self.draws.data[...] = seed, step, draws
        self.moves += 1
