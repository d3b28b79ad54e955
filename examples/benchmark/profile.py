"""`bench.py --profile`: where a step's time goes. Every launch of one step is kept. In a graph of them each notes when
the one before has ended."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cupy
import numpy as np
from rich.console import Console
from rich.table import Table

from cudiff.cuda import compiler
from cudiff.cuda import launch as launching
from cudiff.cuda.kernels.convolution.wgrad_sm90 import ROW
from cudiff.tensor import Tensor

REPEATS = 25  # of a graph


class Launch(NamedTuple):
    """A launch that was kept: its kernel's class, how to do it again, its work, and the memory of its step: a tensor
    map or a table holds addresses only."""

    label: str
    run: Callable[[], None]
    flops: float
    size: float
    memory: list[Any]


def arguments_of(stem: str, name: str, args: tuple, constants: dict[str, Any]) -> dict[str, Any]:
    """A launch's arguments, by the names that the kernel has for them."""
    named = compiler.c_names(compiler.kernel_path(stem), constants)
    parameters = compiler.declarations(stem).signature(name, named).parameters
    return {parameter.name: arg for parameter, arg in zip(parameters, args, strict=True)}


def flops_of(stem: str, name: str, grid: tuple, args: tuple, constants: dict[str, Any]) -> float:
    """Multiplications and additions of a launch of a kernel that computes products; 0 for the others."""
    given = arguments_of(stem, name, args, constants)

    def product(*names: str) -> float:
        return 2.0 * math.prod(int(given[name]) for name in names)

    if stem == "conv2d_sm90":
        return product("N", "H", "W", "K") * (given["C"] * constants["R"] * given["S"] + given["D"])
    if stem == "conv2d_wgrad_sm90":
        weights = sum(channels * outputs for *_, channels, outputs, _ in ROW.iter_unpack(given["jobs"]))
        return product("N", "H", "W", "S") * constants["R"] * weights
    if stem == "conv2d_wgrad_tf32_sm90":
        return product("N", "H", "W", "C", "K") * constants["R"] ** 2
    if stem == "conv2d":
        return product("N", "Ho", "Wo", "C", "K", "R", "S")
    if stem == "conv2d_few_channels":
        return 2.0 * constants["R"] ** 2 * constants["FEW"] * given["many"].size
    if stem == "gemm_sm90":
        return product("M", "N", "depth", "batches", "R", "S")
    if stem == "matmul":
        tiles = -(-given["m"] // constants["BM"]) * -(-given["n"] // constants["BN"])
        return product("m", "n", "k") * (grid[0] // tiles)
    if stem.startswith("attention") and name in PRODUCTS:
        images, heads, _ = given["lse"].shape
        return product("Tq", "Tk", "D") * PRODUCTS[name] * images * heads
    return 0.0


PRODUCTS = {"forward": 2, "backward_q": 3, "backward_kv": 4, "backward": 5}
"""Products of queries, keys and values that each of attention's kernels has."""


def size_of(stem: str, name: str, args: tuple) -> float:
    """Bytes that a launch moves where it reads or writes each of its arrays on the GPU once, but for an optimiser's
    update: what it changes in place, all float32 buffers but the gradient, its second argument, it reads and writes."""
    arrays = {arg.data.ptr: arg for arg in args if hasattr(getattr(arg, "data", None), "ptr")}
    size = sum(array.nbytes for array in arrays.values())
    if stem == "optim" and name in ("adam", "sgd", "rmsprop", "lion"):
        size += sum(array.nbytes for array in arrays.values() if array.dtype == np.float32 and array is not args[1])
    return float(size)


def launches_of(step: Callable[[], object], timeline: cupy.ndarray | None = None) -> list[Launch]:
    """Every launch of one call of `step`. timeline: None, or where they note a time: see `timeline` in common.cuh."""
    kept: list[Launch] = []
    memory: list[Any] = []
    kernel, pool = launching.kernel, cupy.get_default_memory_pool()

    def allocate(size: int) -> Any:
        memory.append(pool.malloc(size))
        return memory[-1]

    def keeping(stem: str, name: str, **constants: Any) -> Callable:
        if timeline is not None:
            constants["TIMELINE"] = 1
        function = kernel(stem, name, **constants)
        if timeline is not None and not compiler.compiles_ahead():
            named, call = compiler.c_names(stem, constants), compiler.declarations(stem).call_of(name)
            place = compiler.load(stem, named, call).get_global("timeline")
            cupy.ndarray((), np.uint64, place).fill(timeline.data.ptr)
        tile = "x".join(str(constants[key]) for key in ("BM", "BN") if key in constants)
        label = " ".join(filter(None, (stem if stem == name else f"{stem}.{name}", constants.get("PASS"), tile)))

        def call(grid: tuple, block: tuple, args: tuple, *options: Any, **named: Any) -> None:
            run = partial(function, grid, block, args, *options, **named)
            args = tuple(arg.data if isinstance(arg, Tensor) else arg for arg in args)
            flops = flops_of(stem, name, grid, args, constants)
            size = 0.0 if flops else size_of(stem, name, args)
            kept.append(Launch(label, run, flops, size, memory))
            run()

        return call

    launching.kernel = keeping
    try:
        with cupy.cuda.using_allocator(allocate):
            step()
    finally:
        launching.kernel = kernel
    return kept


def times_of(launches: list[Launch], timeline: cupy.ndarray) -> list[float]:
    """Microseconds from the end of the launch before each of them to its own, in a graph of them: medians of REPEATS.
    timeline: that of `launches_of`, a counter and twice as many times."""
    stream, count, found = cupy.cuda.Stream(non_blocking=True), 2 * len(launches), []
    assert timeline.size == 1 + count, f"{timeline.size} numbers for {count} times"
    with stream:
        stream.begin_capture()
        for launch in (*launches, *launches):
            launch.run()
        graph = stream.end_capture()
        for _ in range(REPEATS):
            timeline[0] = 0
            graph.launch(stream)
            noted, *times = timeline.get().tolist()
            assert noted == count, f"{noted} of {count} launches noted a time"
            found.append(np.diff(np.array(times, np.int64)) / 1000)
    spent = np.median(found, axis=0)  # the last launch of the second round has none, so the first round's is taken
    return [*spent[len(launches):], spent[len(launches) - 1]]


def profile(name: str, step: Callable[[], object], captured: float, limits: dict[str, float]) -> None:
    """Print each kernel class of `step`, which took `captured` microseconds as one graph: count, time, rate, share."""
    with compiler.compiling_ahead():
        count = len(launches_of(step, cupy.empty(0, np.uint64)))
    timeline = cupy.zeros(1 + 2 * count, np.uint64)
    launches = launches_of(step, timeline)
    spent = times_of(launches, timeline)
    classes: dict[str, list[Launch]] = {}
    times: dict[str, float] = defaultdict(float)
    for launch, microseconds in zip(launches, spent, strict=True):
        classes.setdefault(launch.label, []).append(launch)
        times[launch.label] += microseconds
    total = sum(spent)
    title = f"{name}: {captured:,.0f} µs captured; {total:,.0f} µs where each of {len(launches)} launches notes a time"
    table = Table(title=title, caption=f"limits, an H200's: {limits['bf16']:.0f} TFLOP/s and {limits['copy']} TB/s")
    for column in ("kernel", "count", "µs in all", "share", "µs each", "rate", "of limit"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for label, own in sorted(classes.items(), key=lambda item: -times[item[0]]):
        time = times[label]
        flops, size = sum(launch.flops for launch in own), sum(launch.size for launch in own)
        rate, limit = (flops or size) / time / 1e6, limits["bf16" if flops else "copy"]
        table.add_row(
            label, str(len(own)), f"{time:,.0f}", f"{time / total:.1%}", f"{time / len(own):.1f}",
            f"{rate:,.0f} TFLOP/s" if flops else f"{rate:.2f} TB/s", f"{rate / limit:.0%}",
        )
    Console(width=120).print(table)
