"""Every reader of files against damaged ones: each input is read, or refused with one CudiffError.

    python -m tests.fuzz [--count 10000] [--format NAME] [--first 0]

Input number i of a format is a function of i alone: `--first i --count 1` repeats it. The rule: the reader returns or
raises CudiffError of one line, within a second of processor time, takes at most twice the size that its data have once
decoded and 64 MiB, and starts no process, nor finds a class for a pickle.
"""

import argparse
import gzip
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
from tests.fuzz_formats import FORMATS

SECONDS, SLACK, ADDRESSES = 1.0, 64 * 2**20, 6 * 2**30
FORBIDDEN = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "pickle.", "socket.")
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)


class Result(NamedTuple):
    """Of one format: how many inputs were read and refused, what broke the rule by input number, and the extremes."""

    name: str
    inputs: int
    read: int
    refused: int
    failures: dict[int, str]
    slowest: float  # ms
    peak: float  # MiB above what the process held before


def mutate(content: bytes, rng: np.random.Generator) -> bytes:
    """`content` with one to four damages: bits, bytes, lengths, blocks, an end too early."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        if not data:
            break
        # Half of all damages hit the first 512 bytes: headers are there.
        place = int(rng.integers(min(len(data), 512) if rng.integers(2) else len(data)))
        match rng.integers(8):
            case 0:
                data[place] ^= 1 << int(rng.integers(8))
            case 1:
                data[place] = int(rng.integers(256))
            case 2:
                del data[place:]
            case 3:
                data[place:place] = rng.bytes(int(rng.integers(1, 17)))
            case 4:
                del data[place : place + int(rng.integers(1, 65))]
            case 5:
                block = data[place : place + int(rng.integers(1, 65))]
                data[place:place] = block * int(rng.integers(1, 40))
            case 6:
                width, order = int(rng.choice([1, 2, 4, 8])), str(rng.choice(["little", "big"]))
                value = EXTREMES[rng.integers(len(EXTREMES))] % 256**width
                data[place : place + width] = value.to_bytes(width, order)
            case 7:
                digits = [i for i, byte in enumerate(data[:4096]) if 48 <= byte < 58]
                if digits:  # numbers written as text
                    at, numbers = int(rng.choice(digits)), (b"-1", b"0", b"9" * 19, b"1e400", b"x")
                    data[at : at + 1] = numbers[rng.integers(len(numbers))]
    return bytes(data)


def sample(name: str, number: int) -> bytes:
    """Input `number` of a format: its seeds as they are, then damaged ones."""
    seeds = FORMATS[name].seeds()
    if number < len(seeds):
        return seeds[number]
    rng = np.random.default_rng([number, sum(name.encode())])
    seed = seeds[rng.integers(len(seeds))]
    if name.endswith(".gz") and rng.integers(2):  # damage below the compression
        return gzip.compress(mutate(gzip.decompress(seed), rng), 1, mtime=0)
    return mutate(seed, rng)


def child(name: str, first: int, count: int) -> None:
    """Read the inputs and write a line of JSON before and after each."""
    form, events = FORMATS[name], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / form.file
        path.parent.mkdir(parents=True, exist_ok=True)
        for warm in form.seeds()[:3]:  # imports are not the reader's time or memory
            path.write_bytes(warm)
            attempt(form.reader, path)
        sys.addaudithook(lambda event, _: events.append(event) if event.startswith(FORBIDDEN) else None)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        for number in range(first, first + count):
            print(json.dumps({"begin": number}), flush=True)
            content = sample(name, number)
            path.write_bytes(content)
            signal.alarm(20)  # its default action ends the process, and even C code cannot put it off
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is held now
            before, start = held("VmRSS"), time.process_time()
            outcome, failure = attempt(form.reader, path)
            seconds, peak = time.process_time() - start, held("VmHWM") - before
            signal.alarm(0)
            allowed = SLACK + 2 * form.decoded(content)
            if events:
                failure = f"does {events}"
            elif failure is None and seconds > SECONDS:
                failure = f"takes {seconds:.1f} s"
            elif failure is None and peak > allowed:
                failure = f"takes {peak / 2**20:.0f} MiB, allowed are {allowed / 2**20:.0f}"
            events.clear()
            print(json.dumps({"end": outcome, "failure": failure, "ms": 1000 * seconds, "peak": peak / 2**20}))


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


def run(name: str, count: int, first: int = 0) -> Result:
    """Inputs `first` to first + count of a format in processes of their own; one that dies is a failure."""
    lines, failures, number = [], {}, first
    while number < first + count:
        process = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--child", "--format", name, "--first", str(number), "--count",
             str(first + count - number)],
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
    parser.add_argument("--format", choices=FORMATS, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.format, options.first, options.count)
        return 0
    failed = 0
    print(f"{'format':<16}{'inputs':>8}{'read':>8}{'refused':>9}{'failures':>10}{'slowest ms':>12}{'peak MiB':>10}")
    for name in [options.format] if options.format else FORMATS:
        result = run(name, options.count, options.first)
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
