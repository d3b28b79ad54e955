"""Whether a run fits into memory, before its first step; and where it does not, what does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cudiff.backend import PRECISIONS, free_memory, is_low, memory_in_use, memory_total, out_of_memory_errors
from cudiff.config import Config
from cudiff.cuda.graph import Captured, capture
from cudiff.distributed import Group
from cudiff.errors import CudiffError
from cudiff.memory import memory_available, peak_of, resident
from cudiff.nn import Module
from cudiff.nn.parameter import BLOCK
from cudiff.optim import SGD, Adam


class Forecast(NamedTuple):
    """Bytes of a GPU's memory: of what stays (weights, gradients, moments, averages, 16-bit copies, and data that lies
    there), of a step beside, and of what was free for it. Of several GPUs each is that of the one where it is worst."""

    stays: int
    step: int
    free: int
    gpus: int = 1

    def __str__(self) -> str:
        return (f"memory on {_each(self.gpus)}: {_gib(self.stays)} stay, a step takes {_gib(self.step)} more, and "
                f"{_gib(self.free)} are free")


def check_model(net: Module, config: Config, device: str, group: Group) -> None:
    """Raise CudiffError where a GPU has no room for a model, its gradient, moments and average."""
    if device != "cuda":
        return
    need = model_bytes(net, config, group)
    if need > _free():
        free_memory()
    if need > (free := _free()):
        raise CudiffError(
            f"the model's {net.num_parameters():,} parameters take {_gib(need)} of the GPU's memory with gradient, "
            f"moments and average, and {_gib(free)} are free: use a smaller model, or end what else runs there"
        )


def model_bytes(net: Module, config: Config, group: Group) -> int:
    """What training holds of a model: weights, gradient and their average in float32, the moments of its optimiser, and
    16-bit copies of weights and average; each parameter padded as `FlatParameters` does. With `shard` each process of a
    group holds a part of moments and average, no 16-bit copy of that, and on one machine the others' gradients of
    it."""
    size = sum(-(-parameter.size // BLOCK) * BLOCK for parameter in net.parameters())
    moments = len((SGD if config.optimizer == "sgd" else Adam).moments)
    copy = 2 if is_low(PRECISIONS[config.precision]) else 0
    if config.shard and group.size > 1:
        received = (group.size - 1) * group.one_machine
        return size * (4 * 2 + copy) + -(-size * 4 * (1 + moments + received) // group.size)
    return size * (4 * (3 + moments) + 2 * copy)


def check_fits(trainer: Any) -> Forecast | None:
    """See `Trainer.forecast`."""
    group = trainer.group
    if trainer.device == "cpu" and group.size == 1:
        _check_fits_host(trainer)
    if trainer.device == "cpu" or not trainer.config.capture:
        return None
    free = min(group.exchange(_free()))
    need, fits, data = _needs(trainer, trainer._step)
    stays = model_bytes(trainer.net, trainer.config, group) + data
    if fits:
        return Forecast(stays, need, free, group.size) if need else None
    trainer._step.forget()
    free_memory()
    raise CudiffError(
        f"a step of batch size {trainer.config.batch_size} takes {_gib(need)} of memory on {_each(group.size)} beside "
        f"{_gib(stays)} that stay, and {_gib(min(group.exchange(_free())))} are free: {_what_fits(trainer)}"
    )


def _what_fits(trainer: Any) -> str:
    """The options that do, tried as the whole update: its step is recorded and thrown away. Every process of a group
    tries the same ones."""
    batch, recomputes, processes = trainer.config.batch_size, trainer.config.recompute, trainer.group.size
    may_recompute = hasattr(trainer.net, "recompute") and not recomputes
    found = []
    if may_recompute and (need := _needed(trainer, batch, True)):
        found.append(f"--recompute ({_gib(need)})")
    for recompute in (False, True) if may_recompute else (recomputes,):
        share = batch // processes // 2
        while share and not (need := _needed(trainer, share * processes, recompute)):
            share //= 2
        if share:
            smaller = _smaller(trainer.config, share * processes)
            found.append(f"{smaller}{' --recompute' * (recompute > recomputes)} ({_gib(need)})")
            break
    return " or ".join(found) + " fits" if found else "even one image does not fit: use a smaller model"


def _smaller(config: Config, size: int) -> str:
    """The flags of passes of `size` images, of which as many as fill the whole batch are accumulated."""
    passes = config.accumulate * config.batch_size // size
    return f"--batch-size {size}" + (f" --accumulate {passes}" if config.batch_size % size == 0 else "")


def _needed(trainer: Any, size: int, recompute: bool) -> int:
    """Bytes that a step takes with passes of `size` images; 0 where a GPU has not as much."""
    with _as_if(trainer, size, recompute):
        need, fits, _ = _needs(trainer, capture(trainer.train_step, device="cuda", precompile=True))
    return need if fits else 0  # also where it is not known


def _needs(trainer: Any, step: Captured) -> tuple[int, bool, int]:
    """`step.needs`, and the bytes of what the loader holds on the GPU, which lies there meanwhile. Of a group's GPUs
    the most, whether all have it, and 0 bytes where one does not know."""
    held, streamed = trainer.loader.on_device, not trainer.loader.resident
    own = *step.needs(*held[: len(held) // 2 if streamed else 0]), sum(tensor.data.nbytes for tensor in held)
    needs, fit, data = zip(*trainer.group.exchange(own), strict=True)
    fits = all(fit)
    return max(needs) if all(needs) or not fits else 0, fits, max(data)


@contextmanager
def _as_if(trainer: Any, size: int, recompute: bool) -> Iterator[None]:
    """Have steps take an update's samples in passes of `size`, as many as are whole, and recompute blocks or not. Of a
    group's process each pass is its part."""
    loader, net, reduction, group = trainer.loader, trainer.net, trainer._reduction, trainer.group
    passes, before = loader.passes, getattr(net, "recompute", None)
    samples, own = trainer.config.batch_size * trainer.config.accumulate, size // group.size
    starts = range(group.rank * own, samples - size + group.rank * own + 1, size)
    loader.passes = [range(start, start + own) for start in starts]
    reduction.passes = len(loader.passes)
    if before is not None:
        net.recompute = recompute
    try:
        yield
    finally:
        loader.passes, reduction.passes = passes, len(passes)
        if before is not None:
            net.recompute = before


def _each(gpus: int) -> str:
    return "the GPU" if gpus == 1 else f"each of {gpus} GPUs"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size < 10 * 2**30 else f"{size / 2**30:,.1f} GiB"


def _free() -> int:
    return memory_total("cuda") - memory_in_use("cuda")


def _check_fits_host(trainer: Any) -> None:
    """Raise CudiffError where a batch would take more of the CPU's memory than is free: the system kills for that.

    Steps of 1, 2, 4, … images show what one image takes; nothing is updated by them.
    """
    config, free, start = trainer.config, memory_available(), resident()
    if config.batch_size < 4 or start is None:
        return
    state, size, sizes, peaks = trainer.generator.state(), 1, list[int](), list[int]()
    statistics = [(buffer, buffer.data.copy()) for _, buffer in trainer.net.named_buffers()]
    try:
        while (peak := peak_of(partial(trainer._try, size))) is not None:
            sizes.append(size)
            peaks.append(peak - start)
            if peaks[-1] * config.batch_size < free * size:
                return
            if size > 1:
                # A line through all: by the last two alone a peak that is a fifth off puts the slope a quarter off.
                each, base = map(float, np.polyfit(sizes, peaks, 1))
                need = round(base + each * config.batch_size)
                hopeless = size >= 32 and need > 4 * free  # an error of the measurement does not explain that
                if size > config.batch_size // 4 or (size >= 8 and (hopeless or peaks[-1] > free / 16)):
                    break
            size *= 2
        else:
            return
    except out_of_memory_errors():
        return  # the step itself will say what fits
    finally:
        trainer.generator.load_state(state)
        for buffer, values in statistics:  # running means of batch norms
            buffer.data[...] = values
    if need > free:
        fits = max(1, int(config.batch_size - (need - free) / each))
        raise CudiffError(
            f"batch size {config.batch_size} would take about {need / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} GiB are free: {_smaller(config, 2 ** (fits.bit_length() - 1))} fits"
        )
