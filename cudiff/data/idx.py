"""MNIST's IDX files: read from a folder, or downloaded once into the user's cache and checked by SHA-256.

Format: LeCun, Cortes and Burges, "The MNIST database of handwritten digits": two zero bytes, a type (8: unsigned
byte), the number of dimensions, each dimension as a big-endian int32, then the bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from cudiff.backend import cache_folder
from cudiff.data.dataset import Dataset
from cudiff.data.npz import fill, inflates
from cudiff.errors import CudiffError, printable
from cudiff.files import replaced
from cudiff.memory import check_memory

MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
PREFIXES = {"train": "train", "test": "t10k"}
LARGEST = 47_040_016  # bytes of the largest of the four files
SHA256 = {  # of the uncompressed files
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def mnist(part: str = "train", folder: str | os.PathLike | None = None) -> Dataset:
    """The real MNIST: 60,000 training or 10,000 test digits, (N, 28, 28, 1), white on black.

    Looks in `folder`, then in $CUDIFF_DATA/mnist, then in the user's cache, and downloads what none of them has.
    Raises CudiffError where a file is not MNIST's, bit for bit, or cannot be downloaded.
    """
    names = _names(part)
    candidates = [Path(folder)] if folder is not None else []
    if os.environ.get("CUDIFF_DATA"):
        candidates.append(Path(os.environ["CUDIFF_DATA"]) / "mnist")
    candidates.append(cache_folder("mnist"))
    for candidate in candidates:
        files = [file for name in names if (file := _find(candidate, name))]
        if len(files) == len(names):
            contents = [_read(file) for file in files]
            break
    else:
        files = [cache_folder("mnist") / f"{name}.gz" for name in names]
        contents = [_download(name, file) for name, file in zip(names, files, strict=True)]
    for name, file, content in zip(names, files, contents, strict=True):
        if hashlib.sha256(content.data).hexdigest() != SHA256[name]:
            raise CudiffError(
                f"{file} is not the published MNIST file (its SHA-256 differs): move it away, it is then downloaded "
                "anew; or name its folder as the data set, which takes any IDX files"
            )
    images, labels = (_parse_idx(content, file) for content, file in zip(contents, files, strict=True))
    return Dataset(images[..., None], labels, 10, "mnist", tuple("0123456789"))


def has_idx(folder: Path) -> bool:
    """Whether `folder` holds images under MNIST's file names."""
    return any(_find(folder, _names(part)[0]) for part in PREFIXES)


def idx_folder(folder: Path, part: str = "train") -> Dataset:
    """Any data set stored in files named like MNIST's (Fashion-MNIST, say), gzipped or plain, not checked by hash.

    Raises CudiffError where a file is missing, truncated or not IDX, or images and labels do not match.
    """
    files = []
    for name in _names(part):
        file = _find(folder, name)
        if file is None:
            raise CudiffError(f"{folder} has no {name} or {name}.gz: put it there, or load another part")
        files.append(file)
    images, labels = (_parse_idx(_read(file), file) for file in files)
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
    return Dataset(images[..., None], labels, int(labels.max()) + 1, printable(folder.resolve().name))


def _names(part: str) -> tuple[str, str]:
    if part not in PREFIXES:
        raise CudiffError(f"MNIST has no part '{part}': use train or test")
    return f"{PREFIXES[part]}-images-idx3-ubyte", f"{PREFIXES[part]}-labels-idx1-ubyte"


def _find(folder: Path, name: str) -> Path | None:
    """The file called `name` in `folder`, plain or gzipped, with a hyphen or, as some tools unpack it, a dot."""
    for stem in (name, name.replace("-idx", ".idx")):
        for file in (folder / stem, folder / f"{stem}.gz"):
            if file.is_file():
                return file
    return None


def _read(file: Path) -> np.ndarray:
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


def _parse_idx(content: np.ndarray, file: Path) -> np.ndarray:
    offset, shape = _header(content, file)
    return content[offset:].reshape(shape)


def _fetch(url: str) -> bytes:
    import urllib.request  # slow to import and rarely needed

    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read(LARGEST)


def _download(name: str, file: Path) -> np.ndarray:
    """Fetch, unpack and check one file, and only then move it, compressed, to its place in the cache."""
    from http.client import HTTPException

    failures = []
    for mirror in MIRRORS:
        url = f"{mirror}{name}.gz"
        try:
            compressed = _fetch(url)
            with gzip.open(io.BytesIO(compressed)) as stream:
                content = stream.read(LARGEST + 1)
        except (OSError, HTTPException, EOFError, zlib.error) as error:
            failures.append(f"{url}: {error or type(error).__name__}")
            continue
        if hashlib.sha256(content).hexdigest() == SHA256[name]:
            _write_whole(file, compressed)
            return np.frombuffer(content, np.uint8)
        failures.append(f"{url}: wrong SHA-256")
    raise CudiffError(
        f"cannot download MNIST ({'; '.join(failures)}): put its four files into $CUDIFF_DATA/mnist, "
        "or use digits, which needs no download"
    )


def _write_whole(file: Path, content: bytes) -> None:
    """Write it so that `file` is there whole or not at all."""
    try:
        with replaced(file) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise CudiffError(
            f"cannot keep MNIST in {file.parent} ({error.strerror or error}): make room there, "
            "or point CUDIFF_CACHE_DIR to a folder that can be written"
        ) from None
