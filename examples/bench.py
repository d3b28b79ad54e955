"""Time cudiff's kernels and training step on a GPU, beside PyTorch where it is installed: python examples/bench.py

Every number is a median over CUDA-graph replays on random data, so launch costs are left out for both sides. The limits
(copy bandwidth, matrix product) are measured first, on the same GPU. `--only NAME` runs the rows whose name holds NAME.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import cupy
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cudiff import ops
from cudiff.backend import bfloat16, float32
from cudiff.config import PRESETS
from cudiff.cuda import module
from cudiff.data.dataset import Dataset
from cudiff.models import build
from cudiff.optim import EMA, AdamW
from cudiff.tensor import Tensor, no_grad
from cudiff.train import Trainer

try:
    import torch
    import torch.nn.functional as F

    from tests.models.torch_unet import TorchUNet

    torch.backends.cudnn.benchmark = True
except ImportError:
    torch = None

CONVOLUTIONS = [
    (64, 64, 64), (128, 64, 64), (192, 64, 64), (128, 128, 32), (320, 128, 32),
    (192, 192, 16), (448, 192, 16), (256, 256, 8), (512, 256, 8),
]  # in channels, out channels, pixels a side, at batch 32


def replay_time(replay: Callable[[], None], copies: int, repeats: int = 15) -> float:
    """Median microseconds of one copy; `replay` launches a graph that holds `copies`."""
    times = []
    for _ in range(repeats):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop) * 1000 / copies)
    return statistics.median(times)


def ours(fn: Callable[[], object], copies: int = 20) -> float:
    """Microseconds of `fn` inside a CUDA graph."""
    stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        for _ in range(2):
            results = [fn() for _ in range(copies)]
        stream.synchronize()
        stream.begin_capture()
        results = [fn() for _ in range(copies)]
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
        assert len(results) == copies  # alive, so that no two calls share an output
        return replay_time(lambda: graph.launch(stream), copies)


def theirs(fn: Callable[[], object], copies: int = 20) -> float:
    """Microseconds of PyTorch's `fn` inside a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(copies):
                fn()
        graph.replay()
        torch.cuda.synchronize()
        with cupy.cuda.Stream.from_external(stream):
            return replay_time(graph.replay, copies)


def random_tensor(*shape: int, dtype=bfloat16, grad: bool = False) -> Tensor:
    values = np.random.default_rng(len(shape)).standard_normal(shape, np.float32)
    tensor = ops.astype(Tensor(values, device="cuda"), dtype)
    return Tensor(tensor.data, requires_grad=grad)


def backward_of(out: Tensor, needs: tuple[bool, ...]) -> Callable[[], object]:
    """A call of the backward of the operation that made `out`, for the inputs that `needs` marks."""
    node, _ = out._source
    dout = random_tensor(*out.shape, dtype=out.dtype).data
    return lambda: node.function.backward_cuda(node.ctx, dout, needs=needs, into=(None,) * len(needs))


class Report:
    """Collects rows: name, our time, PyTorch's, and the share of the limit that the row is bound by."""

    def __init__(self, only: str):
        self.only, self.rows = only, []
        self.copy_limit = self.matmul_limit = float("nan")

    def wants(self, name: str) -> bool:
        return self.only in name

    def add(self, name: str, time: float, opponent: float | None, flops: float = 0, size: float = 0) -> None:
        rate = f"{flops / time / 1e6:.0f} TFLOP/s" if flops else f"{size / time / 1e6:.2f} TB/s" if size else ""
        limit = self.matmul_limit if flops else self.copy_limit
        achieved = (flops or size) / time / 1e6
        share = f"{achieved / limit:.0%}" if flops or size else ""
        ratio = f"{opponent / time:.2f}" if opponent else ""
        self.rows.append((name, f"{time:,.1f}", f"{opponent:,.1f}" if opponent else "", ratio, rate, share))
        print(*self.rows[-1], sep="  ", flush=True)

    def table(self) -> Table:
        table = Table(title=f"microseconds on {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")
        for column in ("what", "cudiff", "PyTorch", "ratio", "rate", "of limit"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


def measure_limits(report: Report) -> None:
    source = Tensor(cupy.random.random(1 << 28, dtype=cupy.float32))
    with no_grad():
        time = ours(lambda: ops.negative(source), 4)
    report.copy_limit = 2 * source.data.nbytes / time / 1e6
    report.add("1 GiB read, 1 GiB written", time, None, size=2 * source.data.nbytes)
    if torch:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        time = theirs(lambda: a @ b, 3)
        report.matmul_limit = 2 * 8192**3 / time / 1e6
        report.add("matmul 8192 bf16 by cuBLAS", time, None, flops=2 * 8192**3)


def convolutions(report: Report) -> None:
    for c, k, size in CONVOLUTIONS:
        name = f"conv3x3 {c}->{k}@{size}"
        if not report.wants(name):
            continue
        x, weight = random_tensor(32, size, size, c, grad=True), random_tensor(k, 3, 3, c, grad=True)
        flops = 2 * 32 * size * size * c * k * 9
        with no_grad():
            forward = ours(lambda x=x, weight=weight: ops.conv2d(x, weight, padding=1))
        out = ops.conv2d(x, weight, padding=1)
        dgrad = ours(backward_of(out, (True, False, False)))
        wgrad = ours(backward_of(out, (False, True, False)))
        opponents: tuple = (None, None, None)
        if torch:
            layout = dict(memory_format=torch.channels_last)
            tx = torch.randn(32, c, size, size, device="cuda", dtype=torch.bfloat16).to(**layout)
            tw = torch.randn(k, c, 3, 3, device="cuda", dtype=torch.bfloat16).to(**layout)
            dy = torch.randn(32, k, size, size, device="cuda", dtype=torch.bfloat16).to(**layout)

            def backward(mask, tx=tx, tw=tw, dy=dy):
                arguments = (dy, tx, tw, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask)
                return torch.ops.aten.convolution_backward(*arguments)

            opponents = (
                theirs(lambda tx=tx, tw=tw: F.conv2d(tx, tw, padding=1)),
                theirs(lambda b=backward: b([True, False, False])),
                theirs(lambda b=backward: b([False, True, False])),
            )
        for kind, time, opponent in zip(("fprop", "dgrad", "wgrad"), (forward, dgrad, wgrad), opponents, strict=True):
            report.add(f"{name} {kind}", time, opponent, flops=flops)


def group_norms(report: Report) -> None:
    for c, size in ((64, 64), (128, 32), (192, 16), (256, 8)):
        name = f"group norm + SiLU {c}@{size}"
        if not report.wants(name):
            continue
        x = random_tensor(32, size, size, c, grad=True)
        weight, bias = random_tensor(c, dtype=float32, grad=True), random_tensor(c, dtype=float32, grad=True)
        with no_grad():
            forward = ours(lambda x=x, w=weight, b=bias: ops.group_norm(x, w, b, 32, silu=True))
        out = ops.group_norm(x, weight, bias, 32, silu=True)
        backward = ours(backward_of(out, out._source[0].needs))
        opponent = opponent_backward = None
        if torch:
            tx = torch.randn(32, c, size, size, device="cuda", dtype=torch.bfloat16)
            tx = tx.to(memory_format=torch.channels_last).requires_grad_()
            ones = torch.ones(c, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            opponent = theirs(lambda tx=tx, w=ones: F.silu(F.group_norm(tx.detach(), 32, w.detach(), w.detach())))
        report.add(f"{name} forward", forward, opponent, size=2 * x.data.nbytes)
        report.add(f"{name} backward", backward, opponent_backward, size=3 * x.data.nbytes)


def attentions(report: Report) -> None:
    for n, heads, tokens, dim in ((32, 6, 256, 32), (32, 8, 64, 32), (8, 16, 1024, 64), (2, 16, 4096, 64)):
        name = f"attention B{n} H{heads} T{tokens} D{dim}"
        if not report.wants(name):
            continue
        q, k, v = (random_tensor(n, tokens, heads, dim, grad=True) for _ in range(3))
        flops = 4 * n * heads * tokens * tokens * dim
        with no_grad():
            forward = ours(lambda q=q, k=k, v=v: ops.attention(q, k, v), 10)
        out = ops.attention(q, k, v)
        backward = ours(backward_of(out, (True, True, True)), 10)
        opponent = opponent_backward = None
        if torch:
            tq, tk, tv = (torch.randn(n, heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
            opponent = theirs(lambda q=tq, k=tk, v=tv: F.scaled_dot_product_attention(q, k, v), 10)
            o = torch.ops.aten._scaled_dot_product_flash_attention(tq, tk, tv)
            g = torch.randn_like(o[0])
            arguments = (g, tq, tk, tv, o[0], o[1], o[2], o[3], o[4], o[5], 0.0, False, o[6], o[7])
            flash = partial(torch.ops.aten._scaled_dot_product_flash_attention_backward, *arguments)
            opponent_backward = theirs(flash, 10)
        report.add(f"{name} forward", forward, opponent, flops=flops)
        report.add(f"{name} backward", backward, opponent_backward, flops=2.5 * flops)


def optimiser(report: Report) -> None:
    if not report.wants("AdamW"):
        return
    net = build(PRESETS["elephants"])
    net.precision = "bf16"
    net.flatten("cuda")
    optimizer = AdamW(net, ema=EMA(net, 500.0))
    net.flat.grad[...] = cupy.random.standard_normal(net.flat.size, dtype=cupy.float32)
    time = ours(optimizer.step, 5)
    # gradient norm reads 4 bytes; AdamW reads p, g, m, v, ema and writes p, m, v, ema, shadow and its average's
    report.add("AdamW + EMA + bf16 copies + norm", time, None, size=net.flat.size * (4 + 20 + 16 + 4))


def unet_trainer(precision: str) -> Trainer:
    config = PRESETS["elephants"].replace(precision=precision, validation=0, dropout=0.0)
    images = np.random.default_rng(0).integers(0, 256, (512, 64, 64, 3), np.uint8)
    return Trainer(config, Dataset(images), "/tmp/cudiff-bench")


def training_steps(report: Report) -> None:
    for precision in ("bf16", "tf32"):
        name = f"U-Net 64x64 step, batch 32, {precision}"
        if not report.wants(name):
            continue
        trainer = unet_trainer(precision)
        for _ in range(3):
            trainer.train_step()
        cupy.cuda.Device().synchronize()
        eager = replay_time(lambda t=trainer: t.train_step(), 1, 10)
        report.add(f"{name}, eager", eager, None)
        for _ in range(5):
            trainer._step()
        captured = replay_time(lambda t=trainer: t._step(), 1, 20)
        report.add(f"{name}, captured", captured, torch_step(precision) if torch else None, flops=1.24e12)


def torch_step(precision: str) -> float:
    """PyTorch at its best: channels-last, autocast or TF32, fused AdamW, torch.compile with CUDA graphs."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    net = TorchUNet(64, conv_resample=False, use_new_attention_order=True, max_period=1000.0)
    net = net.cuda().to(memory_format=torch.channels_last)
    images = torch.randn(512, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    compiled = torch.compile(net, mode="reduce-overhead")

    def step() -> None:
        x = images[torch.randint(0, 512, (32,), device="cuda")]
        t, noise = torch.rand(32, device="cuda") * 1000, torch.randn_like(x)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.mse_loss(compiled(x + noise, t).float(), noise)
        loss.backward()
        optimizer.step()

    for _ in range(8):
        step()
    torch.cuda.synchronize()
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        return replay_time(step, 1, 20)


def forwards(report: Report) -> None:
    for batch in (1, 16, 64):
        name = f"U-Net 64x64 forward, batch {batch}, bf16"
        if not report.wants(name):
            continue
        net = build(PRESETS["elephants"])
        net.precision = "bf16"
        net.eval().flatten("cuda", trainable=False)
        x, t = random_tensor(batch, 64, 64, 3, dtype=float32), random_tensor(batch, dtype=float32)
        with no_grad():
            time = ours(lambda net=net, x=x, t=t: net(x, t).data, 2)
        opponent = None
        if torch:
            theirs_net = TorchUNet(64, conv_resample=False, use_new_attention_order=True, max_period=1000.0)
            theirs_net = torch.compile(theirs_net.cuda().to(memory_format=torch.channels_last).bfloat16().eval())
            tx = torch.randn(batch, 3, 64, 64, device="cuda", dtype=torch.bfloat16)
            tx, tt = tx.to(memory_format=torch.channels_last), torch.rand(batch, device="cuda")
            with torch.no_grad():
                opponent = theirs(lambda net=theirs_net, x=tx, t=tt: net(x, t), 2)
        report.add(name, time, opponent, flops=batch * 4.13e11 / 32)


def profile() -> None:
    """Where the captured step's time goes: every launch of one step is kept, then timed by itself inside a graph."""
    trainer = unet_trainer("bf16")
    for _ in range(2):
        trainer.train_step()
    launches: list[tuple[str, tuple, Callable[[], None]]] = []
    kernel = module.kernel

    def keeping(stem: str, name: str, **constants) -> Callable:
        function = kernel(stem, name, **constants)
        tile = "x".join(str(constants[key]) for key in ("BM", "BN") if key in constants)
        label = " ".join(filter(None, (stem if stem == name else f"{stem}.{name}", constants.get("PASS"), tile)))

        def call(grid, block, args, shared_mem=0):
            run = partial(function, grid, block, args, shared_mem=shared_mem)
            values = tuple(arg.shape if hasattr(arg, "shape") and arg.shape else arg for arg in args)
            launches.append((label, (label, grid, str(values)), run))
            run()

        return call

    module.kernel = keeping
    trainer.train_step()
    module.kernel = kernel
    times: dict[tuple, float] = {}
    totals: dict[str, list[float]] = {}
    for label, key, run in launches:
        if key not in times:
            times[key] = ours(run, 10)
        totals.setdefault(label, []).append(times[key])
    table = Table(title=f"{len(launches)} launches, {sum(map(sum, totals.values())):,.0f} µs one by one")
    for column in ("kernel", "count", "µs in all", "µs each"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for label, spent in sorted(totals.items(), key=lambda item: -sum(item[1])):
        table.add_row(label, str(len(spent)), f"{sum(spent):,.0f}", f"{sum(spent) / len(spent):.1f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the rows whose name holds this")
    parser.add_argument("--profile", action="store_true", help="show the kernels of one captured step instead")
    options = parser.parse_args()
    if options.profile:
        return profile()
    report = Report(options.only)
    measure_limits(report)
    for section in (convolutions, group_norms, attentions, optimiser, forwards, training_steps):
        try:
            section(report)
        except Exception as error:  # one failing row must not cost the others
            print(f"{section.__name__}: {type(error).__name__}: {error}", flush=True)
    Console(width=120).print(report.table())


if __name__ == "__main__":
    main()
