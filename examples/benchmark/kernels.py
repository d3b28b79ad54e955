"""The rows of single kernels: convolutions, norms, attention, the optimiser, and the limits they are held against."""

from __future__ import annotations

from collections.abc import Callable

import cupy

from cudiff import ops
from cudiff.backend import float32
from cudiff.config import PRESETS
from cudiff.cuda.kernels.convolution import plans_sm90, table
from cudiff.cuda.kernels.convolution.problem import Norm, Operands
from cudiff.cuda.kernels.norm import table as norms
from cudiff.cuda.timing import graph_time
from cudiff.models import build
from cudiff.optim import EMA, AdamW
from cudiff.statistics import ChannelStatistics, Kind
from cudiff.tensor import Tensor, no_grad
from examples.benchmark.measure import Report, backward_of, random_tensor

CONVOLUTIONS = [
    (64, 64, 64), (128, 64, 64), (192, 64, 64), (128, 128, 32), (320, 128, 32),
    (192, 192, 16), (448, 192, 16), (256, 256, 8), (512, 256, 8),
]  # in channels, out channels, pixels a side, at batch 32
GROUP_NORMS = [(64, 64), (128, 32), (192, 16), (256, 8)]  # channels, pixels a side, at batch 32
ATTENTIONS = [
    (32, 6, 256, 32), (32, 8, 64, 32), (8, 16, 1024, 64), (2, 16, 4096, 64), (32, 16, 256, 72), (8, 6, 1024, 96),
    (2, 16, 4096, 128),
]  # batch, heads, tokens, channels


def limits(report: Report) -> None:
    """What this GPU can do: a copy of 1 GiB, and with PyTorch a product of 8192 x 8192 matrices by cuBLAS."""
    source = Tensor(cupy.random.random(1 << 28, dtype=cupy.float32))
    with no_grad():
        time = graph_time(lambda: ops.negative(source), 4)
    report.add("limit: copy", time, size=2 * source.data.nbytes, limit="copy")
    if report.torch:
        from examples.benchmark import baselines

        for precision in ("bf16", "tf32"):
            time = baselines.matmul(precision, 8192)
            report.add(f"limit: {precision}", time, flops=2 * 8192**3, limit=precision)


def convolutions(report: Report) -> None:
    """The nine shapes, ours with bias, norm sums and fixed-order sums of splits, cuDNN bare; and the gradient of the
    input as most of a U-Net's are, with SiLU's slope and the sums that group norm's backward takes."""
    for c, k, size in CONVOLUTIONS:
        x, weight = random_tensor(32, size, size, c, grad=True), random_tensor(k, 3, 3, c, grad=True)
        bias = random_tensor(k, dtype=float32, grad=True)
        with no_grad():
            forward = graph_time(lambda x=x, weight=weight, bias=bias: ops.conv2d(x, weight, bias, padding=1))
        out = ops.conv2d(x, weight, bias, padding=1)
        gradients = (True, False, False), (False, True, False)
        times = [forward, *(graph_time(backward_of(out, needs)) for needs in gradients)]
        baseline: tuple = (None, None, None)
        if report.torch:
            from examples.benchmark import baselines

            baseline = baselines.convolution(c, k, size)
        for kind, time, other in zip(("fprop", "dgrad", "wgrad"), times, baseline, strict=True):
            report.add(f"conv3x3 {c}->{k}@{size} {kind}", time, other, flops=2 * 32 * size * size * c * k * 9)
        time = graph_time(_dgrad_of_a_norm(x, weight, random_tensor(*out.shape)))
        report.add(f"conv3x3 {c}->{k}@{size} dgrad of a norm", time, flops=2 * 32 * size * size * c * k * 9)


def _dgrad_of_a_norm(x: Tensor, weight: Tensor, dout: Tensor) -> Callable[[], object]:
    """The gradient of the convolution's input where that is the group norm and SiLU of `x`."""
    parameters = [random_tensor(x.shape[-1], dtype=float32).data for _ in range(2)]
    _, mean, rstd = norms.forward(x.data, None, *parameters, 32, 1e-5, True)
    norm = Norm(True, x.data, None, *parameters, None, None, mean, rstd)

    def run() -> object:
        d_preact = cupy.empty_like(x.data)
        return d_preact, table.dgrad(Operands(dout.data, weight.data, d_preact, norm=norm), (1, 1), (1, 1))

    return run


def group_norms(report: Report) -> None:
    """Norms that find their sums themselves, and those whose sums come with the input and the gradient."""
    for c, size in GROUP_NORMS:
        x = random_tensor(32, size, size, c, grad=True)
        weight, bias = random_tensor(c, dtype=float32, grad=True), random_tensor(c, dtype=float32, grad=True)
        with no_grad():
            forward = graph_time(lambda x=x, w=weight, b=bias: ops.group_norm(x, w, b, 32, silu=True))
        out = ops.group_norm(x, weight, bias, 32, silu=True)
        backward = graph_time(backward_of(out, out._source[0].needs))
        baseline: tuple = (None, None)
        if report.torch:
            from examples.benchmark import baselines

            baseline = baselines.group_norm_silu(c, size)
        name = f"group norm + SiLU {c}@{size}"
        report.add(f"{name} forward", forward, baseline[0], size=2 * x.data.nbytes, limit="copy")
        report.add(f"{name} backward", backward, baseline[1], size=3 * x.data.nbytes, limit="copy")
        forward, backward = _group_norm_with_sums(x, weight, bias)
        report.add(f"{name} forward, sums given", forward, size=2 * x.data.nbytes, limit="copy")
        report.add(f"{name} backward, sums given", backward, size=4 * x.data.nbytes, limit="copy")


def _group_norm_with_sums(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[float, float]:
    """Forward and backward between two convolutions: these give the sums, and want the output, once more in backward,
    and dx's sums. The weight's and bias's gradients, which all norms of a step add up in one launch, are left out."""
    parameters, d_preact = (weight.data, bias.data), random_tensor(*x.shape, dtype=x.dtype)
    plan = plans_sm90.plan(x.shape, x.shape[-1], (3, 3), x.dtype.itemsize, 0, False)
    tiles = plans_sm90.tiles_of(x.shape, plan.rows, plan.whole_rows) * plan.cluster

    def sums(a: Tensor, b: Tensor) -> cupy.ndarray:
        wide, other = (t.data.astype(float32).reshape(len(t.data), tiles, -1, t.shape[-1]) for t in (a, b))
        return cupy.stack((wide.sum(2), (wide * other).sum(2)), -1)

    given = ChannelStatistics(Kind.MOMENTS, sums(x, x))
    given_d_preact = ChannelStatistics(Kind.PRODUCTS, sums(d_preact, x))

    def forward() -> tuple:
        return norms.forward(x.data, None, *parameters, 32, 1e-5, True, statistics=(given, None))

    _, mean, rstd = forward()

    def backward() -> object:
        y = cupy.empty_like(x.data)
        return y, norms.backward(
            d_preact.data, x.data, None, *parameters, mean, rstd, True, needs=(True, *(False,) * 5), into=(None,) * 6,
            y=y, din_statistics={}, statistics=given_d_preact,
        )

    return graph_time(forward), graph_time(backward)


def attentions(report: Report) -> None:
    for n, heads, tokens, dim in ATTENTIONS:
        q, k, v = (random_tensor(n, tokens, heads, dim, grad=True) for _ in range(3))
        flops = 4 * n * heads * tokens * tokens * dim
        with no_grad():
            forward = graph_time(lambda q=q, k=k, v=v: ops.attention(q, k, v), 10)
        out = ops.attention(q, k, v)
        backward = graph_time(backward_of(out, (True, True, True)), 10)
        baseline: tuple = (None, None)
        if report.torch:
            from examples.benchmark import baselines

            baseline = baselines.attention(n, heads, tokens, dim)
        name = f"attention B{n} H{heads} T{tokens} D{dim}"
        report.add(f"{name} forward", forward, baseline[0], flops=flops)
        report.add(f"{name} backward", backward, baseline[1], flops=2.5 * flops)


def optimiser(report: Report) -> None:
    net = build(PRESETS["elephants"])
    net.precision = "bf16"
    net.flatten("cuda")
    optimizer = AdamW(net, ema=EMA(net, 500.0))
    net.flat.grad[...] = cupy.random.standard_normal(net.flat.size, dtype=cupy.float32)
    # The gradient's norm reads 4 bytes; AdamW reads p, g, m, v, ema and writes p, m, v, ema and two 16-bit copies.
    size = net.flat.size * (4 + 20 + 16 + 4)
    report.add("AdamW + EMA + bf16 copies + norm", graph_time(optimizer.step, 5), size=size, limit="copy")
