"""Time cudiff on a GPU: python examples/bench.py [--against torch] [--part 1/7] [--only NAME ...] [--jobs N]
[--model PRESET-OR-FILE] [--profile]

Every section runs in a process of its own under a time limit, to which is added what those before left of theirs: what
takes too long is stopped and says so, the rest goes on. With `--against torch` PyTorch does the same work beside it.
The parts that `--part` chooses take at most nine minutes each, PyTorch's compiler included: three were seen to on an
H200. `--jobs` runs several sections at once: they compile side by side and measure one at a time; the GPU must hold
them all. `--model` times a training step of a preset or a TOML file, as EDM without classes, learned variance and
dropout.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cudiff.backend import cuda_status
from cudiff.errors import CudiffError

try:
    import cupy

    from examples.benchmark import kernels, networks, operations
    from examples.benchmark.measure import Report, Row, step_time
    from examples.benchmark.profile import profile
    from examples.benchmark.turns import turns
except ImportError:
    if cuda_status()[0]:
        raise
    sys.exit(f"bench.py: {cuda_status()[1]}")


class Section(NamedTuple):
    """Rows that belong together: what measures them, the part they are in, and the seconds they may take."""

    run: Callable[[Report], None]
    part: int
    seconds: int


SECTIONS = {
    "limits": Section(kernels.limits, 0, 25),
    "first step": Section(networks.first_step, 1, 150),
    "U-Net bf16": Section(networks.unet_steps("bf16"), 1, 330),
    "convolutions": Section(kernels.convolutions, 2, 25),
    "attention": Section(kernels.attentions, 2, 20),
    "AdamW": Section(kernels.optimiser, 2, 10),
    "memory": Section(networks.memory, 2, 20),
    "group norm": Section(kernels.group_norms, 2, 45),
    "CNN": Section(networks.cnn, 2, 45),
    "CS 179": Section(networks.cs179, 2, 85),
    "forward": Section(networks.forwards, 2, 100),
    "U-Net tf32": Section(networks.unet_steps("tf32"), 2, 160),
    "DiT-B/4": Section(networks.dit_step("DiT-B/4 64x64"), 3, 250),
    "operations": Section(operations.operations, 3, 120),
    "frames": Section(networks.frames, 3, 30),
    "DiT-XL/2": Section(networks.dit_step("DiT-XL/2 32x32x4"), 7, 400),
    "mnist": Section(networks.other_step("mnist 28x28"), 4, 110),
    "few images": Section(networks.other_step("U-Net 64x64, few images"), 4, 100),
    "48 channels": Section(networks.other_step("U-Net 40x40 of 48 channels"), 4, 100),
    "sampling": Section(networks.sampling, 4, 25),
    "other forwards": Section(networks.other_forwards, 4, 170),
    "guided64": Section(networks.other_step("guided64 64x64"), 5, 240),
    "imagenet64": Section(networks.other_step("imagenet64 64x64"), 5, 270),
    "CIFAR-10": Section(networks.other_step("CIFAR-10's 32x32"), 6, 260),
    "many images": Section(networks.other_step("U-Net 64x64, many images"), 6, 125),
    "128x128": Section(networks.other_step("U-Net 128x128"), 6, 125),
}
PARTS = [f"{part}/7" for part in range(1, 8)]
RUNNING: list[subprocess.Popen] = []  # sections
LIMITS = {"copy": 4.27, "bf16": 791.0, "tf32": 411.0}  # TB/s and TFLOP/s of an H200, where they are not measured


def rows_of(name: str, against: str | None, seconds: float, model: str | None = None,
            turns: str | None = None) -> tuple[list[Row], bool]:
    """Run one section in a process of its own, for so long at most. Returns its rows and whether it came to its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        command = [sys.executable, __file__, "--section", name, "--rows", str(path)]
        command += ["--against", against] if against else []
        command += ["--model", model] if model else []
        command += ["--turns", turns] if turns else []
        process, done = subprocess.Popen(command, start_new_session=True), False
        RUNNING.append(process)
        try:
            done = process.wait(seconds) == 0
            if not done:
                print(f"{name}: failed, see above", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped after its {seconds:.0f} s", flush=True)
        finally:
            stop(process)
            RUNNING.remove(process)
        lines = path.read_text().splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return list({row.name: row for row in rows}.values()), done  # of two by one name the later


def stop(process: subprocess.Popen) -> None:
    """End a section, and the children that PyTorch's compiler has."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):  # another thread has ended it just now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measured(sections: dict[str, Section], against: str | None, model: str | None,
             jobs: int) -> Iterator[tuple[str, list[Row], bool]]:
    """Each section's name, with what `rows_of` gives, as they end: the first by itself, then so many at once."""
    names, start = list(sections), time.monotonic()

    def run(i: int, turns: str | None) -> tuple[list[Row], bool]:
        until = sum(section.seconds for section in list(sections.values())[: None if turns else i + 1])
        return rows_of(names[i], against, until - (time.monotonic() - start), model, turns)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        try:
            yield names[0], *pool.submit(run, 0, None).result()
            turns = folder if jobs > 1 else None
            futures = {pool.submit(run, i, turns): names[i] for i in range(1, len(names))}
            for future in as_completed(futures):
                yield futures[future], *future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                stop(process)


def cells(row: Row, limits: dict[str, float]) -> tuple[str, ...]:
    """Name, ours, PyTorch's, unit, how many times ours is as good, rate, share of the limit."""
    ours, theirs = (f"{value:,.1f}" if value else "" for value in (row.ours, row.theirs))
    ratio = f"{row.theirs / row.ours:.2f}" if row.ours and row.theirs else ""
    rate = f"{row.rate:.0f} TFLOP/s" if row.flops else f"{row.rate:.2f} TB/s" if row.size else ""
    share = f"{row.rate / limits['copy' if row.size else row.limit]:.1%}" if rate else ""
    return row.name, ours, theirs, row.unit, ratio, rate, share


def summary(rows: list[Row], limits: dict[str, float]) -> None:
    table = Table(title=cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
    for column in ("what", "cudiff", "PyTorch", "", "ratio", "rate", "of limit"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(*cells(row, limits))
    Console(width=120).print(table)
    ratios = [row.theirs / row.ours for row in rows if row.name.startswith("conv3x3") and row.theirs and row.ours]
    if ratios:
        mean = math.prod(ratios) ** (1 / len(ratios))
        print(f"{len(ratios)} convolutions: geometric mean of the ratios {mean:.3f}, the lowest {min(ratios):.2f}")


def profile_of(name: str) -> None:
    """Print the kernels of the step called `name`."""
    if name == "unet":
        trainer = networks.unet_trainer("bf16")
        eager, captured = trainer.train_step, trainer._step
    elif name == "cs179":
        trainer = networks.trainer_of(networks.cs179_config())
        eager, captured = trainer.train_step, trainer._step
    elif name == "denoise":
        _, denoise, arguments = networks.cs179_denoiser()
        eager, captured = (lambda: denoise.fn(*arguments)), (lambda: denoise(*arguments))
    else:
        _, captured, eager = networks.cnn_step(int(name.removeprefix("cnn")))
    profile(name, eager, step_time(captured), LIMITS)


def stop_on_signals() -> None:
    """Have SIGTERM, and a hangup that is not ignored, end the benchmark as Ctrl-C does: its section with it."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


def torch_has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


PROFILES = ("unet", "cs179", "denoise", "cnn256", "cnn4096")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=("torch",), help="time PyTorch too, after checking that both agree")
    names = ", ".join(SECTIONS)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"sections whose name holds one of these: {names}")
    parser.add_argument("--part", choices=PARTS, help="a seventh of the sections")
    parser.add_argument("--model", metavar="NAME", help="time a training step of this preset or TOML file alone")
    parser.add_argument("--profile", nargs="?", const="unet", choices=PROFILES, help="the kernels of a step instead")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="sections at once, each measured alone")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profile and (options.against or options.only or options.part or options.model):
        parser.error("--profile is for cudiff's own step, by itself: leave out --against, --only, --part and --model")
    if options.model and (options.only or options.part):
        parser.error("--model is timed alone: leave out --only and --part")
    if options.jobs < 1:
        parser.error("--jobs must be 1 or more")
    if options.model:
        try:
            networks.model_of(options.model)
        except CudiffError as error:
            sys.exit(f"bench.py: {error}")
    sections = {"model": Section(networks.step_of(options.model), 0, 540)} if options.model else SECTIONS
    offered = {name: section for name, section in sections.items() if options.part in (None, f"{section.part}/7")}
    for wanted in options.only or []:
        if not any(wanted.casefold() in name.casefold() for name in offered):
            sys.exit(f"bench.py: no section's name holds '{wanted}': use one of {', '.join(offered)}")
    chosen = {name: section for name, section in offered.items()
              if not options.only or any(wanted.casefold() in name.casefold() for wanted in options.only)}
    usable, reason = cuda_status()
    if not usable:
        sys.exit(f"bench.py needs a GPU: {reason}")
    if options.profile:
        return profile_of(options.profile)
    if options.turns:
        turns.join(Path(options.turns))
    if options.section:
        return (SECTIONS | sections)[options.section].run(Report(options.rows, options.against == "torch"))
    if options.against and not torch_has_cuda():
        sys.exit("bench.py: --against torch needs PyTorch with CUDA: see https://pytorch.org/get-started/locally")
    stop_on_signals()
    limits, rows, cut = dict(LIMITS), [], []
    chosen = {"limits": SECTIONS["limits"]} | chosen
    for name, found, done in measured(chosen, options.against, options.model, options.jobs):
        cut += [] if done else [name]
        for row in found:
            rows.append(row)
            if row.name.startswith("limit: "):
                limits[row.limit if row.flops else "copy"] = row.rate
    summary(rows, limits)
    if cut:
        sys.exit(f"bench.py: not measured to the end: {', '.join(cut)}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("bench.py: interrupted")
