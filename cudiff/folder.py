"""A run's folder: which process trains in it, which of its checkpoints are whole, and its metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cudiff.checkpoint import (
    PARTS,
    Checkpoint,
    checkpoints,
    latest,
    load_checkpoint,
    named_step,
    read_newest,
)
from cudiff.errors import CudiffError
from cudiff.files import locked
from cudiff.plot import loss_curve, save_loss_curve
from cudiff.tensorfile import replacing

LOCK = ".lock"
"""A file in the folder that the training process holds locked; it names the process, and stays there unlocked."""
LEFTOVERS = (".step-*.tmp", ".samples-*.tmp", ".loss.png*.tmp", ".metrics.jsonl*.tmp", ".tmp??????")
"""What a kill leaves while a file of a run is written; the last is safetensors' own."""


@contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """Lock `folder`, as far as the system can, until the block or the process ends. Gives the open lock.

    The lock is one on a file opened for writing, which network file systems can lock where they cannot lock a folder.
    Raises CudiffError where another process holds it, and where the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    try:
        if not locked(file):
            raise _used(folder, path)
        try:
            os.ftruncate(file, 0)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "file": os.fstat(file).st_ino}
            os.write(file, json.dumps(holder).encode())
        except OSError as error:
            raise _cannot_write(folder, error) from None
        yield file
    finally:
        os.close(file)


def _cannot_write(folder: Path, error: OSError) -> CudiffError:
    return CudiffError(
        f"cannot write in {folder} ({error.strerror or error}): make it writable, with room, or choose another --folder"
    )


def check_unused(folder: str | os.PathLike) -> None:
    """Raise CudiffError where a process trains in `folder`, naming it; nothing is changed there."""
    try:
        import fcntl

        with open(Path(folder) / LOCK, "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: the processes of a run ask at the same time
    except BlockingIOError:
        raise _used(folder, Path(folder) / LOCK) from None
    except (ImportError, OSError):  # no lock, or a system without locks
        pass


def _used(folder: str | os.PathLike, lock: str | os.PathLike) -> CudiffError:
    process = ""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(Path(lock).read_text(encoding="utf-8"))
        process = f" (process {int(holder['pid'])} on {holder['host']})"
    return CudiffError(f"another process trains in {folder}{process}: wait for its end, or choose another --folder")


def check_free(folder: str | os.PathLike) -> None:
    """Raise CudiffError where a process trains in a folder, or where it holds a run."""
    check_unused(folder)
    check_no_run(folder)


def check_no_run(folder: str | os.PathLike) -> None:
    """Raise CudiffError where a folder holds a run, which a new one would mix with."""
    newest = latest(folder)
    if newest is not None:
        raise CudiffError(
            f"{folder} already holds a run, with {newest.name}: go on with cudiff train --resume {quoted(folder)}, or "
            "choose another --folder"
        )
    metrics = Path(folder) / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:  # there was no room for its first line
        raise CudiffError(
            f"{folder} already holds the metrics.jsonl of a run that left no checkpoint: choose another --folder"
        )


def check_newest(folder: Path, step: int, sampler: str | None = None) -> list[tuple[Path, str]]:
    """The checkpoints in `folder` named beyond `step` that hold nothing beyond it, and why, newest first.

    Why: "damaged", or "of step 10" for a copy over another's name. Raises CudiffError for one that holds a later step:
    it would be lost.
    """
    found = []
    for path in reversed(checkpoints(folder)):
        if named_step(path) <= step:
            continue
        try:
            held = load_checkpoint(path, sampler=sampler).counters["step"]
        except CudiffError:
            found.append((path, "damaged"))
            continue
        if held > step:
            raise CudiffError(
                f"{folder} holds a newer checkpoint: go on with cudiff train --resume {quoted(path)}, or choose "
                "another --folder"
            )
        found.append((path, f"of step {held}"))
    return found


def holds(folder: Path, counters: Mapping[str, Any], sampler: str | None = None) -> bool:
    """Whether a file in `folder`, by whatever name, is the checkpoint with these counters: its time is no other's."""
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(CudiffError):
            held = load_checkpoint(path, (), sampler).counters if path.is_file() else {}
            if held and all(held.get(name) == counters.get(name) for name in ("step", "seconds")):
                return True
    return False


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to a name that no run looks for, and that nothing has; returns it."""
    name, number = f"{path.name}.{why.replace(' ', '-')}", 1
    target = path.with_name(name)
    while target.exists():
        number += 1
        target = path.with_name(f"{name}-{number}")
    path.rename(target)
    return target


def read_checkpoint(
    path: str | os.PathLike, parts: Collection[str] = PARTS, option: str = "give ", sampler: str | None = None
) -> tuple[Path, Checkpoint]:
    """The checkpoint at `path`, or the newest in a run's folder, as `load_checkpoint` reads it, with the file's path.

    Raises CudiffError where it cannot be read; where an older one in its folder can, the line names the newest of them,
    after `option`.
    """

    def read(found: Path) -> tuple[Path, Checkpoint]:
        try:
            return found, load_checkpoint(found, parts, sampler)
        except CudiffError as error:
            known = checkpoints(found.parent)
            older = known[: known.index(found)] if found in known else []
            whole = next((path for path in reversed(older) if _is_whole(path, parts, sampler)), None)
            if whole is None:
                raise
            raise CudiffError(f"{error}; {whole.name} before it is whole: {option}{quoted(whole)}") from None

    return read_newest(path, read)


def _is_whole(path: Path, parts: Collection[str], sampler: str | None) -> bool:
    try:
        load_checkpoint(path, parts, sampler)
    except CudiffError:
        return False
    return True


def quoted(path: str | os.PathLike) -> str:
    """`path` as a shell takes it."""
    return shlex.quote(os.fspath(path))


class Metrics:
    """A run's metrics.jsonl. Raises CudiffError, naming the file, where the system refuses to read or write it."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Add a line; what is not finite is null, as JSON has no NaN."""
        line = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        with self._naming(), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        """The lines written so far; what is none, as a last one that a kill cut short, is left out."""
        with self._naming():
            text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        lines = []
        for line in text.splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
        return lines

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows: the loss curve; nothing where there is none yet, or no matplotlib."""
        with contextlib.suppress(ImportError):
            return loss_curve(self.lines(), str(self.path.parent))
        return None

    def drop_after(self, step: int) -> None:
        """Remove what was logged beyond a checkpoint's step: these steps are done again."""
        if self.path.exists():
            kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
            with replacing(self.path) as file:
                file.write("".join(kept).encode())

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            if self.path.exists() and not self.path.is_file():  # some devices can be read for ever
                raise OSError("no regular file")
            yield
        except OSError as error:
            raise CudiffError(
                f"cannot use {self.path} ({error.strerror or error}): make it a file that can be written, then go on "
                f"with cudiff train --resume {quoted(self.path.parent)}, or start again where no checkpoint is there"
            ) from error


class RunFolder:
    """A run's folder, as its training process uses it: locked, and refused where another run would be lost.

    resumed: the counters of the checkpoint that the run goes on from, or None. sampler: the run's own. writes: False
    for a process that leaves the folder to another one of its run: nothing is checked or done then.
    Raises CudiffError where a process trains there.
    """

    def __init__(self, path: Path, resumed: Mapping[str, Any] | None, sampler: str, writes: bool = True):
        self.path, self.metrics, self.writes = path, Metrics(path), writes
        self._resumed, self._sampler = resumed, sampler
        self._started = False
        self._lock: int | None = None  # open while it is held
        if writes:
            check_unused(path)

    def make(self) -> None:
        """Make the folder, unless it is there. Raises CudiffError where the system refuses, as where it is a file."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CudiffError(
                f"cannot use {self.path} as a folder ({error.strerror or error}): choose another --folder"
            ) from None

    @contextmanager
    def alone(self, step: int) -> Iterator[list[tuple[Path, str]]]:
        """Lock the folder and check it; nothing within a block that has, as where `run`'s display calls `save`.

        Gives what `check` does.
        """
        if self._lock is not None or not self.writes:
            self.check_kept()
            yield []
            return
        self.make()
        with alone_in(self.path) as lock:
            useless = self.check(step)
            self._lock = lock
            try:
                yield useless
            finally:
                self._lock = None

    def check_kept(self) -> None:
        """Raise CudiffError where another run has locked the folder's path, as it can once this one's is gone."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):  # none is there: a checkpoint makes the folder anew
            there = self.path / LOCK
            os.lseek(self._lock, 0, os.SEEK_SET)
            # Some network file systems number a file anew.
            if not (os.path.samestat(os.stat(there), os.fstat(self._lock))
                    or there.read_bytes() == os.read(self._lock, 4096)):
                raise CudiffError(f"{self.path} was deleted or renamed while this run trained there, and another run "
                                  "has begun in it, which is left as it is: go on with what was renamed, or begin "
                                  "again in another --folder")

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl. Raises CudiffError as `check_kept` and `Metrics` do."""
        self.check_kept()
        self.metrics.append(metrics)

    def check(self, step: int) -> list[tuple[Path, str]]:
        """What `latest` would find before this run's own, and why. Raises CudiffError where a run would be lost.

        A run asks again as it starts: another one may have been there since.
        """
        if not self.writes:
            return []
        known = self._resumed is not None or self._started
        useless = check_newest(self.path, step, self._sampler) if known else []
        if not self._started and (self._resumed is None or not holds(self.path, self._resumed, self._sampler)):
            check_no_run(self.path)
        return useless

    def take(self) -> None:
        """From now on the folder is this run's."""
        self._started = True

    def save_curve(self) -> str | None:
        """Draw loss.png; what keeps it from being drawn, if anything does."""
        try:
            drawn = not self.writes or save_loss_curve(self.path / "loss.png", self.metrics.lines())
            return None if drawn else "pip install 'cudiff[plots]'"
        except Exception as error:  # whatever a picture fails by, the run is saved
            return str(error)

    def prepare(self, useless: list[tuple[Path, str]], step: int, size: int) -> list[str]:
        """Take the folder: drop what is done again after `step`, and rename checkpoints of no use, which it tells.

        Raises CudiffError where the disk has no room for a checkpoint of `size` bytes.
        """
        if not self.writes:
            return []
        for pattern in LEFTOVERS:
            for leftover in self.path.glob(pattern):
                leftover.unlink()
        disk = shutil.disk_usage(self.path)
        if disk.total and size > disk.free:  # some network file systems tell neither
            raise CudiffError(f"a checkpoint of this run takes {size:,} bytes, and {self.path} has room for "
                              f"{disk.free:,}: make room, or choose another --folder")
        self.take()
        told = []
        for path, why in useless:
            told.append(f"{path.name} is {why} and named {set_aside(path, why).name} from now on")
        self.metrics.drop_after(step)
        return told
