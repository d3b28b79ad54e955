"""Every reader of files against damaged ones: each input is read, or refused with one CudiffError.

    python -m tests.fuzz [--count 10000] [--format NAME] [--first 0]

Input number i of a format is a function of i alone: `--first i --count 1` repeats it. The rule: the reader returns or
raises CudiffError of one line, within a second of processor time, takes at most twice the size that its data have once
decoded and 64 MiB, and starts no process, nor finds a class for a pickle. Every input counts as a failure that its
process does not survive, or that is not done after `--patience` seconds by the clock.
"""

import argparse
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cudiff.errors import CudiffError
from tests.fuzz_damage import mutate
from tests.fuzz_formats import Format

SECONDS, SLACK, ADDRESSES, PATIENCE = 1.0, 64 * 2**20, 6 * 2**30, 20
FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pickle.", "socket.")


class Result(NamedTuple):
    """Of one format: how many inputs were read and refused, what broke the rule by input number, and the extremes."""

    name: str
    inputs: int
    read: int
    refused: int
    failures: dict[int, str]
    slowest: float  # ms
    peak: float  # MiB above what the process held before


def sample(name: str, form: Format, number: int) -> bytes:
    """Input `number` of a format: its seeds as they are, then damaged ones."""
    seeds = form.seeds()
    if number < len(seeds):
        return seeds[number]
    rng = np.random.default_rng([number, sum(name.encode())])
    seed = seeds[rng.integers(len(seeds))]
    return form.below(seed, rng) if form.below and rng.integers(2) else mutate(seed, rng)


def child(name: str, form: Format, first: int, count: int, patience: int) -> None:
    """Read the inputs and write a line of JSON before and after each."""
    events: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / form.file
        path.parent.mkdir(parents=True, exist_ok=True)
        for warm in form.seeds()[:3]:  # imports are not the reader's time or memory
            write(path, warm, form.zeros)
            attempt(form.reader, path)
        sys.addaudithook(lambda event, _: events.append(event) if event.startswith(FORBIDDEN) else None)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        for number in range(first, first + count):
            print(json.dumps({"begin": number}), flush=True)
            content = sample(name, form, number)
            write(path, content, form.zeros)
            children = started()
            signal.alarm(patience)  # its default action ends the process, and even C code cannot put it off
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is held now
            before, start = held("VmRSS"), time.process_time()
            outcome, failure = attempt(form.reader, path)
            seconds, peak = time.process_time() - start, held("VmHWM") - before
            signal.alarm(0)
            allowed = SLACK + 2 * form.decoded(content)
            if events or started() != children:
                failure = f"does {events or 'start a process'}"
            elif failure is None and seconds > SECONDS:
                failure = f"takes {seconds:.1f} s"
            elif failure is None and peak > allowed:
                failure = f"takes {peak / 2**20:.0f} MiB, allowed are {allowed / 2**20:.0f}"
            events.clear()
            print(json.dumps({"end": outcome, "failure": failure, "ms": 1000 * seconds, "peak": peak / 2**20}))


def write(path: Path, content: bytes, zeros: int) -> None:
    path.write_bytes(content)
    os.truncate(path, len(content) + zeros)


def started() -> int:
    """A number that grows with every process that was started and has ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def attempt(reader, path: Path) -> tuple[str, str | None]:
    """Whether the file was "read" or "refused", and how that broke the rule, if it did."""
    try:
        reader(path)
    except CudiffError as error:
        text = str(error)
        return "refused", None if text.isprintable() and 0 < len(text) < 2000 else f"says {text[:80]!r}"
    except BaseException as error:
        return "refused", f"raises {type(error).__name__}: {str(error)[:80]}"
    return "read", None


def held(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(field)


def run(
    name: str, count: int, first: int = 0, formats: str = "tests.fuzz_formats", patience: int = PATIENCE
) -> Result:
    """Inputs `first` to first + count of a format in processes of their own; one that dies is a failure.

    formats: the module whose FORMATS has it. patience: seconds, by the clock, after which an input's process is ended.
    """
    lines, failures, number = [], {}, first
    while number < first + count:
        process = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--child", "--format", name, "--first", str(number), "--count",
             str(first + count - number), "--formats", formats, "--patience", str(patience)],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        if not process.stdout:
            raise RuntimeError(f"no input of {name} was read: {process.stderr}")
        for line in map(json.loads, process.stdout.splitlines()):
            if "begin" in line:
                number = line["begin"]
            else:
                lines.append(line)
                if line["failure"]:
                    failures[number] = line["failure"]
        if process.returncode:
            failures[number] = f"ends the process ({process.returncode}) {process.stderr[-200:]}"
        number += 1
    return Result(
        name, count, sum(line["end"] == "read" for line in lines), sum(line["end"] == "refused" for line in lines),
        failures, max((line["ms"] for line in lines), default=0), max((line["peak"] for line in lines), default=0),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Read damaged files of every format.")
    parser.add_argument("--count", type=int, default=10000, help="inputs a format")
    parser.add_argument("--format", help="only this one")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--formats", default="tests.fuzz_formats", help=argparse.SUPPRESS)
    parser.add_argument("--patience", type=int, default=PATIENCE, help="seconds after which an input is given up")
    options = parser.parse_args()
    formats = importlib.import_module(options.formats).FORMATS
    if options.format not in (None, *formats):
        parser.error(f"no format {options.format}: use one of {', '.join(formats)}")
    if options.child:
        child(options.format, formats[options.format], options.first, options.count, options.patience)
        return 0
    failed = 0
    print(f"{'format':<16}{'inputs':>8}{'read':>8}{'refused':>9}{'failures':>10}{'slowest ms':>12}{'peak MiB':>10}")
    for name in [options.format] if options.format else formats:
        result = run(name, options.count, options.first, options.formats, options.patience)
        failed += len(result.failures)
        print(
            f"{name:<16}{result.inputs:>8}{result.read:>8}{result.refused:>9}{len(result.failures):>10}"
            f"{result.slowest:>12.0f}{result.peak:>10.0f}", flush=True,
        )  # fmt: skip
        for number, failure in list(result.failures.items())[:20]:
            print(f"    input {number} {failure}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
