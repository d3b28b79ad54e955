"""MNIST and Fashion-MNIST: found in a folder, or downloaded once into the user's cache, and checked by SHA-256."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cudiff.backend import cache_folder, folder_named_by
from cudiff.data.dataset import Dataset
from cudiff.data.idx import file_names, find_file, parse_idx, read_file
from cudiff.errors import CudiffError
from cudiff.files import replaced

LARGEST = 47_040_016  # bytes of the largest of the four files


@dataclass(frozen=True)
class Published:
    """A data set of 60,000 training and 10,000 test images of 28x28 in four IDX files.

    name: what users and folders call it. sha256: of the uncompressed files. mirrors: their addresses, to be followed by
    a file's name; none is trusted beyond the digests.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    mirrors: tuple[str, ...]
    sha256: dict[str, str]


MNIST = Published(
    "mnist", "MNIST", tuple("0123456789"),
    ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
# Xiao, Rasul and Vollgraf, arXiv 1708.07747, Table 1.
FASHION_MNIST = Published(
    "fashion-mnist", "Fashion-MNIST",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
PUBLISHED = {data.name: data for data in (MNIST, FASHION_MNIST)}
"""What is known by name."""


def mnist(part: str = "train", folder: str | os.PathLike | None = None) -> Dataset:
    """The real MNIST: 60,000 training or 10,000 test digits, (N, 28, 28, 1), white on black.

    Looks in `folder`, then in $CUDIFF_DATA/mnist, then in the user's cache, and downloads what none of them has.
    Raises CudiffError where a file is not MNIST's, bit for bit, or cannot be downloaded.
    """
    return load_published(MNIST, part, folder)


def fashion_mnist(part: str = "train", folder: str | os.PathLike | None = None) -> Dataset:
    """Fashion-MNIST, photos of clothes like MNIST in all but content; in $CUDIFF_DATA/fashion-mnist. See `mnist`."""
    return load_published(FASHION_MNIST, part, folder)


def load_published(data: Published, part: str, folder: str | os.PathLike | None = None) -> Dataset:
    """A part of `data`, looked for and checked as `mnist` says."""
    names = file_names(part)
    candidates = [Path(folder)] if folder is not None else []
    if (given := folder_named_by("CUDIFF_DATA")) is not None:
        candidates.append(given / data.name)
    candidates.append(cache_folder(data.name))
    for candidate in candidates:
        files = [file for name in names if (file := find_file(candidate, name))]
        if len(files) == len(names):
            contents = [read_file(file) for file in files]
            break
    else:
        files = [cache_folder(data.name) / f"{name}.gz" for name in names]
        contents = [_download(data, name, file) for name, file in zip(names, files, strict=True)]
    for name, file, content in zip(names, files, contents, strict=True):
        if hashlib.sha256(content.data).hexdigest() != data.sha256[name]:
            raise CudiffError(
                f"{file} is not the published {data.title} file (its SHA-256 differs): move it away, it is then "
                "downloaded anew; or name its folder as the data set, which takes any IDX files"
            )
    images, labels = (parse_idx(content, file) for content, file in zip(contents, files, strict=True))
    return Dataset(images[..., None], labels, len(data.class_names), data.name, data.class_names)


def _fetch(url: str) -> bytes:
    import urllib.request  # slow to import and rarely needed

    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read(LARGEST)


def _download(data: Published, name: str, file: Path) -> np.ndarray:
    """Fetch, unpack and check one file, and only then move it, compressed, to its place in the cache."""
    from http.client import HTTPException

    failures = []
    for mirror in data.mirrors:
        url = f"{mirror}{name}.gz"
        try:
            compressed = _fetch(url)
            with gzip.open(io.BytesIO(compressed)) as stream:
                content = stream.read(LARGEST + 1)
        except (OSError, HTTPException, EOFError, zlib.error) as error:
            failures.append(f"{url}: {error or type(error).__name__}")
            continue
        if hashlib.sha256(content).hexdigest() == data.sha256[name]:
            _write_whole(data, file, compressed)
            return np.frombuffer(content, np.uint8)
        failures.append(f"{url}: wrong SHA-256")
    raise CudiffError(
        f"cannot download {data.title} ({'; '.join(failures)}): put its four files into $CUDIFF_DATA/{data.name}, "
        "or use digits, which needs no download"
    )


def _write_whole(data: Published, file: Path, content: bytes) -> None:
    """Write it so that `file` is there whole or not at all."""
    try:
        with replaced(file) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise CudiffError(
            f"cannot keep {data.title} in {file.parent} ({error.strerror or error}): make room there, "
            "or point CUDIFF_CACHE_DIR to a folder that can be written"
        ) from None
