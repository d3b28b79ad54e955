"""Which pictures lie below a folder, whatever else lies there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from cudiff.errors import CudiffError, printable
from cudiff.files import system_devices

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
UNREAD = {
    ".apng", ".arw", ".avif", ".cr2", ".cr3", ".dds", ".dng", ".eps", ".exr", ".hdr", ".heic", ".heif", ".ico", ".j2k",
    ".jfif", ".jp2", ".jpe", ".jxl", ".nef", ".pbm", ".pcx", ".pdf", ".pnm", ".psd", ".qoi", ".raw", ".svg",
    ".tga",
}  # fmt: skip
"""Other pictures' suffixes: such files are left out, and counted."""
MOST_FILES = 10_000_000
OF_A_RUN = "metrics.jsonl"
"""A file in the folder of a run, whose pictures are no data."""


@dataclass
class Listing:
    """What lies below a folder, by paths relative to it.

    pictures: by their suffix, sorted. unread: pictures of other formats. others: files whose suffix is no picture's.
    folders: those right in the folder. runs: those of runs, which are not entered. repeated: links to folders that are
    read under another path, or that hold this one, as / does. broken: links that lead nowhere. closed: folders that the
    system does not open.
    """

    pictures: list[Path] = field(default_factory=list)
    unread: list[Path] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """What is left out, one line for each reason."""
        notes = []
        if self.unread:
            kinds = Counter(path.suffix.lower() for path in self.unread)
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            notes.append(
                f"pictures of formats that are not read are left out: {counts}, first {self.unread[0]}; "
                "convert them to PNG or JPEG"
            )
        if self.others:
            notes.append(f"files without a picture's suffix are left out: {some(self.others)}; where these are "
                         "pictures, end their names in .png or .jpg")  # fmt: skip
        if self.runs:
            notes.append(f"folders of runs are left out: {some(self.runs)}")
        if self.repeated:
            notes.append("links to folders that are read already, or that hold this one, are left out: "
                         f"{some(self.repeated)}")  # fmt: skip
        if self.broken:
            notes.append(f"links that lead nowhere are left out: {some(self.broken)}; make them anew")
        if self.closed:
            notes.append(f"folders that cannot be opened are left out: {some(self.closed)}; check their permissions")
        return [printable(note) for note in notes]


def some(names: Sequence[str | PurePath]) -> str:
    """How many names there are, and the first three."""
    return f"{len(names):,} ({', '.join(map(str, names[:3]))}{', ...' if len(names) > 3 else ''})"


def list_folder(folder: Path) -> Listing:
    """The files below `folder` that are pictures by their suffix; hidden files and folders are left out.

    Linked folders are entered, but for those that hold `folder`. Every folder is read once, however many links lead to
    it: under its shortest path, and of equally long ones the first, a folder itself before links to it. The folders of
    runs, as `cudiff train --data .` makes them here, are not entered. Only regular files count, and none of the
    kernel's (`files.SYSTEM`). Raises CudiffError for more than `MOST_FILES`, OSError where `folder` itself does not
    open.
    """
    found, count = Listing(), 0
    system = system_devices()
    status = os.stat(folder)
    seen = {(status.st_dev, status.st_ino), *_above(folder)}
    level = [""] if status.st_dev not in system else []
    while level:
        below = []
        for place in level:
            try:
                with os.scandir(folder / place) as entries:
                    inside = [entry for entry in entries if not entry.name.startswith(".")]
            except OSError:
                if not place:
                    raise
                found.closed.append(place)
                continue
            if place and any(entry.name == OF_A_RUN for entry in inside):
                found.runs.append(place)
                continue
            count += len(inside)
            if count > MOST_FILES:
                raise CudiffError(f"{folder} holds more than {MOST_FILES:,} files: name a smaller folder, or one "
                                  "without links that lead far away")  # fmt: skip
            for entry in inside:
                path = os.path.join(place, entry.name)
                if identity := _folder(entry, system):
                    below.append((entry.is_symlink(), path, identity))
                elif _regular(entry, system):
                    suffix = os.path.splitext(entry.name)[1].lower()
                    if suffix in SUFFIXES:
                        found.pictures.append(Path(path))
                    elif suffix in UNREAD:
                        found.unread.append(Path(path))
                    else:
                        found.others.append(path)
                elif _leads_nowhere(entry):
                    found.broken.append(path)
        level = []
        for _, path, identity in sorted(below):
            if identity in seen:
                found.repeated.append(path)
            else:
                seen.add(identity)
                level.append(path)
        if not found.folders:
            found.folders = sorted(level)
    found.pictures.sort()
    found.unread.sort()
    found.others.sort()
    found.broken.sort()
    return found


def _above(folder: Path) -> Iterator[tuple[int, int]]:
    """The device and inode of each folder that holds `folder`."""
    for path in folder.resolve().parents:
        with suppress(OSError):  # one that only others may enter
            status = os.stat(path)
            yield status.st_dev, status.st_ino


def _folder(entry: os.DirEntry, system: set[int]) -> tuple[int, int] | None:
    """The device and inode where `entry` is a folder, or a link to one, that may be entered."""
    try:
        if entry.is_dir():
            status = entry.stat()
            return (status.st_dev, status.st_ino) if status.st_dev not in system else None
    except OSError:  # a link that leads nowhere
        pass
    return None


def _leads_nowhere(entry: os.DirEntry) -> bool:
    try:
        return entry.is_symlink() and not entry.stat()
    except OSError:
        return True


def _regular(entry: os.DirEntry, system: set[int]) -> bool:
    try:
        return entry.is_file() and not (entry.is_symlink() and entry.stat().st_dev in system)
    except OSError:
        return False
