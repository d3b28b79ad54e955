"""IDX files: images and labels in files named like MNIST's.

Format: LeCun, Cortes and Burges, "The MNIST database of handwritten digits": two zero bytes, a type (8: unsigned
byte), the number of dimensions, each dimension as a big-endian int32, then the bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cudiff.data.dataset import Dataset
from cudiff.data.npz import fill, inflates
from cudiff.errors import CudiffError, printable
from cudiff.memory import check_memory

PREFIXES = {"train": "train", "test": "t10k"}


def has_idx(folder: Path) -> bool:
    """Whether `folder` holds images under MNIST's file names."""
    return any(find_file(folder, file_names(part)[0]) for part in PREFIXES)


def idx_folder(folder: Path, part: str = "train") -> Dataset:
    """Any data set stored in files named like MNIST's (EMNIST, say), gzipped or plain, not checked by hash.

    Raises CudiffError where a file is missing, truncated or not IDX, or images and labels do not match.
    """
    files = []
    for name in file_names(part):
        file = find_file(folder, name)
        if file is None:
            raise CudiffError(f"{folder} has no {name} or {name}.gz: put it there, or load another part")
        files.append(file)
    images, labels = (parse_idx(read_file(file), file) for file in files)
    if images.ndim != 3 or labels.ndim != 1:
        raise CudiffError(
            f"{folder}: images have {images.ndim} dimensions and labels {labels.ndim}, not 3 and 1: check the files"
        )
    if 0 in images.shape[1:]:
        raise CudiffError(f"{folder}: images of {images.shape[1]}x{images.shape[2]} pixels: get the files anew")
    if len(images) == 0 or len(images) != len(labels):
        raise CudiffError(
            f"{folder}: {len(images)} images and {len(labels)} labels: the files do not belong together, get both anew"
        )
    highest = max([labels.max(), *(other.max() for other in _other_labels(folder, part) if other.size)])
    return Dataset(images[..., None], labels, int(highest) + 1, printable(folder.resolve().name))


def _other_labels(folder: Path, part: str) -> Iterator[np.ndarray]:
    """Those of the other part, where it is there: both have the same classes."""
    for other in PREFIXES.keys() - {part}:
        file = find_file(folder, file_names(other)[1])
        with contextlib.suppress(CudiffError, OSError):
            if file is not None:
                yield parse_idx(read_file(file), file)


def file_names(part: str) -> tuple[str, str]:
    """Of images and labels. Raises CudiffError for an unknown part."""
    if part not in PREFIXES:
        raise CudiffError(f"MNIST has no part '{part}': use train or test")
    return f"{PREFIXES[part]}-images-idx3-ubyte", f"{PREFIXES[part]}-labels-idx1-ubyte"


def find_file(folder: Path, name: str) -> Path | None:
    """The file called `name` in `folder`, plain or gzipped, with a hyphen or, as some tools unpack it, a dot."""
    for stem in (name, name.replace("-idx", ".idx")):
        for file in (folder / stem, folder / f"{stem}.gz"):
            if file.is_file():
                return file
    return None


def read_file(file: Path) -> np.ndarray:
    """All bytes of an IDX file, unpacked: as many as its own header announces, and nothing may follow."""
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as stream:  # type: ignore[operator]
            start = stream.read(16)
            offset, shape = _header(start, file)
            size = offset + math.prod(shape)
            stored = file.stat().st_size
            if not inflates(size, stored) or (file.suffix != ".gz" and size != stored):
                raise CudiffError(
                    f"{file} is truncated or damaged: {stored:,} bytes where {'x'.join(map(str, shape))} are "
                    "announced: get the file anew"
                )
            check_memory(str(file), size, "use fewer images")
            content = np.empty(size, np.uint8)
            begun = min(len(start), size)
            content[:begun] = np.frombuffer(start, np.uint8, begun)
            try:
                fill(stream, content[begun:])
                short = False
            except EOFError as error:
                if "end-of-stream" in str(error):
                    raise
                short = True
            if short or len(start) > size or stream.read(1):
                raise CudiffError(
                    f"{file} is truncated or damaged: it holds {'fewer' if short else 'more'} bytes than the "
                    f"{'x'.join(map(str, shape))} announced: get the file anew"
                )
            return content
    except (OSError, EOFError, zlib.error) as error:
        raise CudiffError(f"cannot read {file} ({error}): get the file anew") from None


def _header(start: bytes | np.ndarray, file: Path) -> tuple[int, tuple[int, ...]]:
    """The header's length and the array's shape, from the first 16 bytes of an IDX file."""
    start = bytes(start[:16])
    dimensions = start[3] if len(start) >= 4 and start[:3] == b"\x00\x00\x08" else 0
    offset = 4 + 4 * dimensions
    if not 1 <= dimensions <= 3 or len(start) < offset:
        raise CudiffError(f"{file} is not an IDX file of bytes: get the file anew")
    shape = struct.unpack_from(f">{dimensions}i", start, 4)
    if min(shape) < 0:
        raise CudiffError(f"{file} is damaged: {'x'.join(map(str, shape))} are announced: get the file anew")
    return offset, shape


def parse_idx(content: np.ndarray, file: Path) -> np.ndarray:
    """The array in all bytes of an IDX file."""
    offset, shape = _header(content, file)
    return content[offset:].reshape(shape)

