"""compute-sanitizer's four tools over every kernel: `python -m tests.sanitize [--tools memcheck] [--rows NAME]`.

Each tool runs the operations of tests/ops/table.py and of MORE at small shapes, without CuPy's pool, which hides what
is written beside an array. A line for each kernel and tool says how many launches it saw and what it found; kernels
that no row launches are listed. What NVIDIA's tools are known to report falsely stands in FALSE. Leaves with 1 where
anything else is found, and where a run or a kernel is missing. Needs a GPU and compute-sanitizer (CUDA toolkit).
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import cudiff
from cudiff import Tensor, ops
from cudiff.backend import cuda_status
from cudiff.cuda import compiler, launch, select
from cudiff.ops import optim
from cudiff.ops.integer import integer
from cudiff.ops.loss_scale import unscale
from cudiff.ops.matmul import split_linear
from cudiff.precision import allow_tf32
from tests.ops.cases import Case, Numbers
from tests.ops.table import ROWS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
Kernel = tuple[str, str]  # stem, function


class False_(NamedTuple):
    """Reports of `tool` that match `pattern`, of one kernel in jobs whose name does, and why they are false."""

    tool: str
    kernel: Kernel
    job: str
    pattern: str
    reason: str


def _stored_by_tma(kernel: str, job: str, what: str) -> False_:
    stem, name = kernel.split(".")
    return False_("initcheck", (stem, name), job, r"^Uninitialized __global__ memory read of size 16 bytes$",
                  f"it reads {what}, which a bulk copy (TMA) stored to global memory: initcheck does not see that")


FALSE = [
    _stored_by_tma("attention_sm90.backward_q", "Hopper: attention", "out, the forward's result"),
    _stored_by_tma("attention_short_sm90.backward", "Hopper: attention", "out, the forward's result"),
    _stored_by_tma("attention_backward_sm90.delta", "Hopper: attention", "out, the forward's result"),
    _stored_by_tma("attention_backward_sm90.finish", "Hopper: attention", "the sums of dq"),
    False_("racecheck", ("attention_sm90", "backward_kv"), "Hopper: attention",
           r"^Error: Race reported between Write access at backward_kv\+",
           "a bulk copy into a stage that all warps have read: each warp's lanes meet, and its first arrives at the "
           "stage's mbarrier. With a barrier of the warpgroup in their place, 1 % slower, nothing is reported"),
    False_("racecheck", ("attention_backward_sm90", "backward"), "Hopper: attention",
           r"^Error: Race reported between Write access at backward\+",
           "the same. Where each lane arrives for itself nothing is reported"),
    False_("initcheck", ("cub", "DeviceMergeSortMergeKernel"), "",
           r"^Uninitialized __global__ memory read of size [48] bytes$", "a kernel of CUB's, by which CuPy sorts"),
    _stored_by_tma("group_norm.input_gradients", "Hopper: norm_silu_conv2d",
                   "d_preact, the result of conv2d_sm90's dgrad"),
    _stored_by_tma("gated.backward", "Hopper: gated linear layer", "y, the result of gemm_sm90"),
]
# memcheck takes an operand of wgmma for one run of bytes: 6,144 for three vertical taps of a weight gradient. They lie
# an image row apart and overlap, so that with 8 pixels a row they take 4,096. It would report the bytes behind them.
BEHIND = {"conv2d_wgrad_sm90": 2048}
JOB = re.compile(r"^@@ job (.+)$")
MARK = re.compile(r"^@@ launch (\S+) (\S+)$")
LIBRARY = re.compile(r"^=+\s+at (?:void )?(cub|thrust)::(?:\w+::)*(\w+)")  # the place of the report above it
REPORT = re.compile(r"^=+ (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|\s)(\S.*)$")


def more() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the table does not launch: kernels for Hopper's widths, the optimisers, random numbers, batches."""
    rng = np.random.default_rng(5)

    def tensor(*shape: int, dtype: str = "float32", grad: bool = True) -> Tensor:
        return Tensor(rng.standard_normal(shape), dtype=dtype, device="cuda", requires_grad=grad)

    for dtype in ("bfloat16", "float32"):
        for side in (8, 16):
            yield f"conv2d {dtype} {side}", lambda d=dtype, s=side: _back(allow_tf32()(ops.conv2d)(
                tensor(2, s, s, 64, dtype=d), tensor(64, 3, 3, 64), tensor(64), padding=1))
        yield f"convolution of wide images {dtype}", lambda d=dtype: _back(allow_tf32()(ops.conv2d)(
            tensor(1, 3, 200, 16, dtype=d), tensor(24, 3, 3, 16), tensor(24), padding=1))
        yield f"norm_silu_conv2d {dtype}", lambda d=dtype: _back(allow_tf32()(ops.norm_silu_conv2d)(
            tensor(2, 8, 8, 64, dtype=d), tensor(2, 8, 8, 64, dtype=d), weight=tensor(64, 3, 3, 128),
            norm_weight=tensor(128), norm_bias=tensor(128), emb=tensor(2, 64), residual=tensor(2, 8, 8, 64, dtype=d)))
        yield f"group_norm {dtype}", lambda d=dtype: _back(ops.group_norm(
            tensor(2, 16, 16, 64, dtype=d), tensor(64), tensor(64), silu=True))
        for groups in (32, 2):
            yield f"{groups} groups of 4,096 channels {dtype}", lambda d=dtype, groups=groups: _back(ops.group_norm(
                tensor(1, 2, 2, 4096, dtype=d), tensor(4096), tensor(4096), groups))
        for channels in (12, 64):
            yield f"unit of {channels} channels with dropout {dtype}", lambda d=dtype, c=channels: _back(
                ops.norm_silu_conv2d(tensor(2, 16, 16, c, dtype=d), weight=tensor(8, 3, 3, c), norm_weight=tensor(c),
                                     norm_bias=tensor(c), num_groups=4,
                                     dropout=(0.3, cudiff.Generator(3, "cuda"), 1000)))
        yield f"conv2d of few channels {dtype}", lambda d=dtype: _few_channels(tensor, d)
        yield f"transpose {dtype}", lambda d=dtype: _back(ops.transpose(tensor(3, 5, 64, dtype=d), (1, 0, 2)))
        yield f"transposed matrix {dtype}", lambda d=dtype: _turned(tensor(70, 33, dtype=d))
        yield f"twice {dtype}", lambda d=dtype: _twice(tensor(6, 5, 64, dtype=d))
        for tokens in (64, 130, 300):
            yield f"attention {dtype} {tokens}", lambda d=dtype, t=tokens: _back(
                ops.attention_qkv(tensor(1, t, 3 * 64, dtype=d), 2))
        yield f"depthwise convolution {dtype}", lambda d=dtype: _back(ops.conv2d(
            tensor(2, 5, 6, 24, dtype=d), tensor(24, 3, 3, 1), padding=1, groups=24))
        yield f"depthwise convolution of stride 2 {dtype}", lambda d=dtype: _back(ops.conv2d(
            tensor(2, 5, 6, 24, dtype=d), tensor(24, 3, 3, 1), stride=2, padding=1, groups=24))
        yield f"grouped convolution {dtype}", lambda d=dtype: _back(ops.conv2d(
            tensor(16, 16, 16, 64, dtype=d), tensor(64, 3, 3, 8), padding=1, groups=8))
        yield f"dilated convolution {dtype}", lambda d=dtype: _back(ops.conv2d(
            tensor(4, 19, 16, 64, dtype=d), tensor(64, 3, 3, 64), padding=2, dilation=2))
        yield f"folded convolution {dtype}", lambda d=dtype: _back(ops.conv2d(
            tensor(8, 64, 64, 3, dtype=d), tensor(64, 7, 7, 3), stride=2, padding=3))
    for tokens in (64, 130):
        for dtype in ("float32", "bfloat16"):
            yield f"masked attention {dtype} {tokens}", lambda d=dtype, t=tokens: _back(
                ops.attention_qkv(tensor(1, t, 3 * 64, dtype=d), 2, mask=np.tri(t, dtype=bool)))
    yield "attention of wide heads", lambda: _back(
        ops.attention(*(tensor(1, 520, 2, 96, dtype="bfloat16") for _ in "qkv")))
    yield "attention in pieces", lambda: _back(
        ops.attention(*(tensor(1, 520, 56, 40, dtype="bfloat16") for _ in "qkv")))
    yield "attention of many heads", lambda: _back(ops.attention_qkv(tensor(34, 130, 12 * 24, dtype="bfloat16"), 4))
    for dim in (64, 128):
        yield f"attention of long sequences {dim}", lambda d=dim: _back(
            ops.attention_qkv(tensor(4, 630, 18 * d, dtype="bfloat16"), 6))
    yield "convolution of other channels", lambda: _back(ops.conv2d(
        tensor(4, 16, 16, 100, dtype="bfloat16"), tensor(100, 3, 3, 100), padding=1))
    yield "product of rows elsewhere", lambda: _back(ops.matmul(
        tensor(515, 515, dtype="bfloat16"), tensor(515, 517, dtype="bfloat16")))
    yield "linear layer", lambda: _back(ops.linear(
        tensor(300, 136, dtype="bfloat16"), tensor(200, 136), tensor(200)))
    yield "linear layer of few rows", lambda: _back(ops.linear(tensor(3, 1030), tensor(1031, 1030), tensor(1031)))
    for rows in (3, 33):
        yield f"grouped linear layers of {rows} rows", lambda n=rows: _back(ops.grouped_linear(
            tensor(n, 36), [tensor(20, 36), tensor(7, 36)], [tensor(20), tensor(7)])[0])
    for name in ("gelu", "gelu_tanh", "silu"):
        yield f"mlp by {name}", lambda n=name: _back(ops.mlp(
            tensor(9, 24), tensor(40, 24), tensor(40), tensor(16, 40), tensor(16), tensor(9, 16), n))
    yield "GELU by tanh", lambda: _back(ops.gelu(tensor(9, 24), approximate="tanh"))
    yield "gated linear layer", lambda: _gated(
        tensor(2, 5, 24), tensor(16, 24), tensor(16), tensor(2, 5, 16), tensor(2, 16))
    yield "gated linear layer, recorded", lambda: _back(ops.linear(*(
        tensor(*shape, dtype="bfloat16") for shape in ((2, 70, 24), (40, 24), (40,), (2, 70, 40), (2, 40)))))
    yield "convolution by stream-K", lambda: ops.conv2d(
        tensor(24, 16, 16, 320, dtype="bfloat16"), tensor(192, 3, 3, 320), padding=1)
    for size in ((65, 8, 8, 192), (41, 8, 8, 512), (130, 4, 4, 256)):  # the last tile lacks images
        yield f"norm_silu_conv2d of tiles of several images, {size[3]} channels", lambda s=size: _back(
            ops.norm_silu_conv2d(tensor(*s, dtype="bfloat16"), weight=tensor(256, 3, 3, s[3]), norm_weight=tensor(s[3]),
                                 norm_bias=tensor(s[3]), emb=tensor(s[0], 256)))
    for size in ((5, 14, 14, 96), (9, 28, 28, 64), (200, 9, 11, 128)):  # one tile an image, and several
        yield f"norm_silu_conv2d of whole rows, {size[3]} channels", lambda s=size: _back(
            ops.norm_silu_conv2d(tensor(*s, dtype="bfloat16"), weight=tensor(72, 3, 3, s[3]), norm_bias=tensor(s[3]),
                                 norm_weight=tensor(s[3]), emb=tensor(s[0], 72)))
    yield "convolution of small images", lambda: _back(ops.conv2d(
        tensor(200, 2, 2, 136, dtype="bfloat16"), tensor(136, 3, 3, 136), tensor(136), padding=1))
    yield "strided convolution", lambda: _back(ops.conv2d(
        tensor(64, 16, 16, 128, dtype="bfloat16"), tensor(128, 3, 3, 128), tensor(128), stride=2, padding=1))
    for side in (3, 5):
        yield f"strided convolution of few channels, {side} x {side}", lambda side=side: _back(ops.conv2d(
            tensor(33, 15, 16, 64, dtype="bfloat16"), tensor(64, side, side, 64), tensor(64), stride=2,
            padding=side // 2))
    yield "layer norm of long rows", lambda: _back(ops.layer_norm(tensor(9, 10248), tensor(10248), tensor(10248)))
    yield "modulated layer norm", lambda: _back(ops.layer_norm(
        tensor(2, 9, 24, dtype="bfloat16"), tensor(2, 24), tensor(2, 24), plus_one=True))
    yield "linear layer in parts", lambda: _back(math.prod(split_linear(
        tensor(5, 24, dtype="bfloat16"), tensor(48, 24), tensor(48), 3)))
    yield "comparisons", _comparisons
    yield "integers", _integers
    yield "rows of an index of int64", lambda: _back(tensor(3, 5)[Tensor([2, 0], dtype="int64", device="cuda")])
    yield "rows of a long index", lambda: _back(tensor(3, 700)[rng.integers(0, 3, 5000)])
    yield "columns of a long index", lambda: _back(tensor(3, 5, 2)[:, rng.integers(0, 5, 9000)])
    yield "columns of each row", lambda: _back(ops.take_along_axis(tensor(300, 40), rng.integers(0, 300, (7, 40)), 0))
    yield "rows of a sorted index", lambda: _back(tensor(1 << 17)[rng.integers(0, 1 << 17, (1 << 21) + 1)])
    for operation in (ops.argmax, ops.prod):
        yield f"{operation.__name__} alone", lambda o=operation: o(tensor(5, 33, grad=False), 1)
    yield "cast", lambda: _back(ops.astype(tensor(3, 33), "bfloat16"))
    yield "relu of an image", lambda: _back(ops.relu(tensor(2, 4, 4, 64)))
    yield "full", lambda: _back(ops.pad(tensor(2, 3, 8), 1, constant_values=0.5))
    yield "batch_norm, evaluation", lambda: _back(ops.batch_norm(
        tensor(4, 5, 8), tensor(8), tensor(8), tensor(8, grad=False), ops.abs(tensor(8, grad=False)), False))
    yield "random", _random
    yield "dropout", lambda: _back(ops.dropout(tensor(4, 33), 0.3, cudiff.Generator(3, "cuda"), 1000))
    yield "batches", _batches
    yield "optim", _optimisers


def _back(out: Tensor) -> None:
    out.backward(Tensor(np.ones(out.shape), dtype=out.dtype, device="cuda").data)


def _gated(*operands: Tensor) -> None:
    with cudiff.no_grad():
        ops.linear(*operands)


def _few_channels(tensor: Callable[..., Tensor], dtype: str) -> None:
    _back(ops.conv2d(tensor(2, 8, 8, 3, dtype=dtype), tensor(64, 3, 3, 3), tensor(64), padding=1))
    for channels in (64, 192):
        _back(ops.conv2d(tensor(2, 9, 9, channels, dtype=dtype), tensor(3, 3, 3, channels), tensor(3), padding=1))


def _twice(x: Tensor) -> None:
    index = Tensor(np.int32([1, 0, 1]), device="cuda")
    _back(x[:3] + x[2:5] + x[index] + ops.clip(x[:3] * 1.0, -1, 1) + ops.relu(x[1:4] * 1.0) + ops.square(x[::2]))


def _turned(x: Tensor) -> None:
    _back(x.T * (x * 1.0).T)


def _comparisons() -> None:
    x, y = (Tensor(np.arange(start, start + 33.0, dtype=np.float32), device="cuda") for start in (0, 1))
    for function in (ops.less, ops.less_equal, ops.greater, ops.greater_equal, ops.equal, ops.not_equal):
        function(x, y)
    for function in (ops.logical_and, ops.logical_or, ops.logical_xor):
        function(x > y, x < y)
    ops.sum(x == y)
    ops.astype(x, bool)


def _integers() -> None:
    x, y = (Tensor(np.arange(start, start + 33), device="cuda") for start in (-9, -8))
    ops.where(x > 0, x, 1)
    for name in set(compiler.declarations("integer").kernels) - {"where"}:
        integer(name, x, y % 7)
        integer(name, x[:, None], y % 7)
    x.max(), x.min()


def _random() -> None:
    generator = cudiff.Generator(3, "cuda")
    generator.normal((4, 33))
    generator.uniform((4, 33))
    generator.randint(0, 10, (4, 33))
    generator.advance()


def _batches() -> None:
    images = Tensor(np.zeros((5, 4, 4, 3), np.uint8), device="cuda")
    labels, step = (Tensor(np.zeros(n, np.int32), device="cuda") for n in (5, 1))
    ops.draw_batch(images, labels, step, 7, 0, flip=True)
    for dtype in (np.float32, np.float16):
        ops.draw_batch(Tensor(np.zeros((5, 4, 4, 7), dtype), device="cuda"), labels, step, 7, 0, flip=True)
    ops.normalize_images(images)
    for dtype in ("float32", "bfloat16"):
        pictures = Tensor(np.zeros(images.shape, np.float32), device="cuda").astype(dtype)
        ops.blend_to_uint8(pictures, images, 0.5)
        sigma = Tensor(np.ones(5, np.float32), device="cuda")
        wide = ops.concatenate([pictures, pictures], axis=-1)
        for predicts, data, out in (("edm", (0.5, 0.0, 1.0), pictures), ("v", None, pictures), ("eps", None, wide)):
            ops.blended_frame(pictures, out, sigma, images, 0.5, predicts, data)
            ops.blended_frame(pictures[:4], out[:4], sigma[:4], images[:2], 0.5, predicts, data, guidance=2.0)


def _optimisers() -> None:
    buffers = [Tensor(np.ones(96, np.float32), device="cuda") for _ in range(4)]
    scalars = Tensor(np.zeros(len(optim.Scalar), np.float32), device="cuda")
    counters = Tensor(np.zeros(len(optim.Counter), np.int32), device="cuda")
    decay = Tensor(np.ones(3, np.uint8), device="cuda")
    compute_copy = Tensor(np.ones(96, ml_dtypes.bfloat16), device="cuda")
    optim.step_scalars(scalars, counters, optim.square_sums(buffers[1]), lr=0.1, betas=(0.9, 0.99))
    optim.adam(*buffers, scalars, decay, compute_copy, weight_decay=0.1)
    optim.sgd(*buffers[:3], scalars, decay, compute_copy, momentum=0.9)
    optim.lion(*buffers[:3], scalars, decay, compute_copy, weight_decay=0.1)
    optim.centered_rmsprop(*buffers, Tensor(np.zeros(96, np.float32), device="cuda"), scalars, decay, compute_copy)
    optim.rescale(scalars, counters, scalars, buffers[1], ratio=0.5)
    unscale(Tensor(np.ones(2, np.float32), device="cuda"), scalars, counters)


def run_case(case: Case, dtype: str) -> None:
    """Forward and backward on the GPU, as a training step would."""
    tensors = []
    for i, array in enumerate(case.arrays):
        floating = np.issubdtype(np.asarray(array).dtype, np.floating)
        own = np.asarray(array).dtype if not floating else "float32" if i in case.fp32 else dtype
        tensors.append(Tensor(array, dtype=own, device="cuda", requires_grad=floating))
    outs = case.fn(*tensors)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out.requires_grad]
    if len(outs) == 1:
        _back(outs[0])
    elif outs:
        functools.reduce(ops.add, [out.sum() for out in outs]).backward()


def jobs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, call) of all that is launched."""
    for name, (draw, _) in ROWS.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        for dtype in ("float32", "bfloat16") if name != "grouped_linear" else ("float32",):
            case = draw(Numbers(rng, "ordinary"))
            yield f"{name} {dtype}", lambda case=case, dtype=dtype: run_case(case, dtype)
    yield from more()


def watched(note: Callable[[str, str], None]) -> Callable[..., Any]:
    """Stands for `launch.kernel`: notes each launch before it is made, and waits for its end after it, so that what a
    tool prints in between is of this kernel."""
    kernel = launch.kernel

    def find(stem: str, name: str, **constants: Any) -> Any:
        found = kernel(stem, name, **constants)

        def run(grid: Any, block: Any, args: Any, shared_mem: int = 0, cooperative: bool = False) -> None:
            note(stem, name)
            found(grid, block, args, shared_mem + BEHIND.get(stem, 0), cooperative)
            synchronize = getattr(launch.get_cupy().cuda.runtime, "deviceSynchronize", None)
            if synchronize is not None:
                synchronize()

        return run

    return find


def run_all(only: str) -> int:
    """What a tool watches: every job, with a line before each launch."""
    import cupy

    cupy.cuda.set_allocator(None)
    launch.kernel = watched(lambda stem, name: print(f"@@ launch {stem} {name}", flush=True))
    for portable in ("0", "1"):  # Hopper's own kernels, then those for any GPU
        os.environ["CUDIFF_PORTABLE"] = portable
        select._target.cache_clear()
        for name, job in jobs():
            if only in name:
                print("@@ job", ("any GPU: " if int(portable) else "Hopper: ") + name, flush=True)
                job()
    print("@@ done", flush=True)
    return 0


def kernels() -> set[Kernel]:
    """Every function of kernels/*/*.cu."""
    stems = sorted(path.stem for path in compiler.kernel_folder().glob("*/*.cu"))
    return {(stem, name) for stem in stems for name in compiler.declarations(stem).kernels}


class Report(NamedTuple):
    """What a tool said, behind which launch, in which job."""

    kernel: Kernel
    job: str
    text: str


def read(output: str) -> tuple[Counter[Kernel], list[Report], bool]:
    """Launches, reports, and whether the run came to its end. A library's kernel runs behind one of ours."""
    launches: Counter[Kernel] = Counter()
    reports: list[Report] = []
    last, job = ("", ""), ""
    for line in output.splitlines():
        if started := JOB.match(line):
            job = started.group(1)
        elif mark := MARK.match(line):
            last = mark.group(1), mark.group(2)
            launches[last] += 1
        elif report := REPORT.match(line):
            reports.append(Report(last, job, report.group(1)))
        elif reports and (library := LIBRARY.match(line)):
            reports[-1] = reports[-1]._replace(kernel=library.groups())
    return launches, reports, "@@ done" in output.splitlines()


def false_reason(tool: str, report: Report) -> str:
    """Why a report is known to be false, or ""."""
    for known in FALSE:
        if (known.tool, known.kernel) == (tool, report.kernel) and report.job.startswith(known.job) and re.search(
                known.pattern, report.text):
            return known.reason
    return ""


def table(tool: str, launches: Counter[Kernel], reports: list[Report]) -> tuple[list[str], int]:
    """A line for each kernel, and how many true reports there are."""
    lines, errors = [], 0
    for kernel in sorted(kernels() | {report.kernel for report in reports}):
        own = [report for report in reports if report.kernel == kernel]
        true = [report for report in own if not false_reason(tool, report)]
        errors += len(true)
        found = "not run" if not launches[kernel] and not own else f"{len(true)} reports" if true else "clean"
        if len(own) > len(true):
            found += f" ({len(own) - len(true)} known to be false)"
        lines.append(f"{tool:9} {'.'.join(kernel):45} {launches[kernel]:5} launches  {found}")
        lines += [f"          {text} ({job})" for job, text in sorted({(report.job, report.text) for report in true})]
    return lines, errors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitize")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--rows", default="", help="only jobs whose name holds this")
    parser.add_argument("--watched", action="store_true", help="be what a tool watches")
    options = parser.parse_args()
    usable, why = cuda_status()
    if not usable:
        print(f"skipped: no GPU ({why})")
        return 0
    if options.watched:
        return run_all(options.rows)
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
        return 1
    failed = 0
    for tool in options.tools.split(","):
        command = [program, "--tool", tool, "--print-limit", "1000000", "--show-backtrace", "device",
                   "--launch-timeout", "0", sys.executable, "-m", "tests.sanitize", "--watched", "--rows", options.rows]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        launches, reports, ended = read(done.stdout)
        lines, errors = table(tool, launches, reports)
        print("\n".join(line for line in lines if not (options.rows and line.endswith("not run"))))
        missing = len(kernels() - set(launches)) if not options.rows else 0
        if not ended:
            print(f"{tool}: the run did not come to its end:\n" + "\n".join(done.stdout.splitlines()[-15:]))
        print(f"{tool}: {sum(launches.values())} launches, {errors} reports, {missing} kernels not run", flush=True)
        failed += bool(errors or missing or not ended)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
