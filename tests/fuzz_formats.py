"""What `tests.fuzz` damages: for every format a few small whole files, and the function that reads them."""

import gzip
import io
import json
import struct
import tempfile
import warnings
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from cudiff.checkpoint import save_checkpoint
from cudiff.config import PRESETS, load_toml
from cudiff.convert import UNETCU_MAGIC, read_weights, write_weights
from cudiff.data import load_dataset
from cudiff.data.pictures import FORMATS as PICTURES
from cudiff.data.pictures import MOST_PIXELS
from cudiff.models import build
from cudiff.pipeline import load
from cudiff.tensorfile import read_tensors, write_tensors
from tests.fuzz_damage import in_gzip, in_png, in_zip
from tests.test_convert import archive, tensor_program
from tests.test_data import idx_bytes, unetcu_bytes


class Format(NamedTuple):
    """seeds: whole files. file: the name to write them under. reader: takes its path. decoded: bytes that a file's
    data take once decoded, or where it lies, the most that its reader lets them take. below: damages a whole file
    below its checksums, which half of the inputs are for. zeros: bytes that follow every input, a hole in its file."""

    seeds: Callable[[], list[bytes]]
    file: str
    reader: Callable[[Path], object]
    decoded: Callable[[bytes], int] = len
    below: Callable[[bytes, np.random.Generator], bytes] | None = None
    zeros: int = 0


def _pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def _written(write: Callable[[Path], object], name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


TINY = PRESETS["digits"].replace(
    image_size=8, channels=1, model_channels=8, channel_mult=(1,), num_res_blocks=1, num_heads=1, num_head_channels=0,
    num_classes=2,
)  # fmt: skip


@cache
def _checkpoints() -> list[bytes]:
    state = {f"{part}.{name}": a for name, a in build(TINY).state_dict().items() for part in ("model", "ema")}
    counters = {"step": 3, "seed": 0}
    whole = _written(lambda path: save_checkpoint(path, TINY, state, counters), "a.safetensors")

    def without_digests(path: Path) -> None:
        path.write_bytes(whole)
        tensors, metadata = read_tensors(path)
        about = json.loads(metadata["cudiff"])
        del about["sha256"]
        write_tensors(path, tensors, {"cudiff": json.dumps(about)})

    return [whole, _written(without_digests, "a.safetensors")]


@cache
def _torch_files() -> list[bytes]:
    values = np.arange(6, dtype=np.float32).tobytes()
    return [_written(lambda path: archive(path, tensor_program(), {"0": values}), "a.pt")]


@cache
def _safetensors() -> list[bytes]:
    state = {"a.weight": np.ones((2, 3), np.float32), "b": np.arange(4)}
    return [_written(lambda path: write_weights(path, state), "a.safetensors")]


UNETCU_NUMBERS = 5_135_169  # parameters of the smallest model that unet.cu's kernels take, of 32 channels


def _weights_bins() -> list[bytes]:
    """With AdamW's moments and without; the rest of the header and the values are zeros."""
    return [struct.pack("<10i", UNETCU_MAGIC, 1, 1, 32, 1, 8, 8, 1000, moments, 0) for moments in (1, 0)]


@cache
def _npz() -> list[bytes]:
    images, labels = _pixels(4, 8, 8, 3), np.array([0, 2, 1, 1])
    return [
        _written(lambda path: np.savez(path, images=images, labels=labels), "a.npz"),
        _written(lambda path: np.savez_compressed(path, arr_0=images, arr_1=labels), "a.npz"),
        _written(lambda path: np.savez_compressed(path, images=np.asfortranarray(images[..., 0])), "a.npz"),
        _written(lambda path: np.savez(path, images=images / 255), "a.npz"),
        _written(lambda path: np.savez_compressed(path, latents=np.float32(images[..., :2]), labels=labels), "a.npz"),
    ]


@cache
def _imagenet() -> list[bytes]:
    arrays = {"data": _pixels(4, 192), "labels": np.array([194, 24, 194, 1000]), "mean": np.zeros(192)}
    return [_written(partial(save, **arrays), "a.npz") for save in (np.savez, np.savez_compressed)]


@cache
def _idx() -> list[bytes]:
    return [idx_bytes(_pixels(4, 8, 8)), idx_bytes(_pixels(4, 28, 28))]


def _read_idx(path: Path) -> None:
    labels = path.with_name("train-labels-idx1-ubyte")
    if not labels.exists():
        labels.write_bytes(idx_bytes(np.arange(4, dtype=np.uint8)))
    load_dataset(path.parent)


@cache
def _pictures(kind: str) -> list[bytes]:
    """Gray, colour, palette or transparency, as far as the format has them, and with metadata."""
    exif = Image.Exif()
    exif[0x0112] = 6
    options: dict = {"JPEG": {"exif": exif}, "PNG": {"exif": exif}, "TIFF": {"compression": "tiff_lzw"}}.get(kind, {})
    seeds = []
    colour = Image.fromarray(_pixels(12, 16, 4))
    for mode in ("L", "RGB", "RGBA", "P", "CMYK", "1"):
        image = colour.convert("RGB").convert(mode) if mode != "RGBA" else colour
        stream = io.BytesIO()
        try:
            image.save(stream, kind, **options)
        except (OSError, KeyError, ValueError):  # not a mode of this format
            continue
        seeds.append(stream.getvalue())
    stream = io.BytesIO()
    frames = [Image.fromarray(_pixels(8, 8)) for _ in range(3)]
    if kind in ("GIF", "TIFF", "WEBP", "PNG"):
        frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
        seeds.append(stream.getvalue())
    if kind == "JPEG":
        colour.convert("RGB").save(stream, kind, progressive=True, icc_profile=bytes(300))
        seeds.append(stream.getvalue())
    return seeds


def _declared(content: bytes) -> int:
    """What a picture's pixels take as RGBA, by its header; only its length where that is refused."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content), formats=PICTURES) as picture:
            width, height = picture.size
    except Exception:
        return len(content)
    return 4 * width * height if width * height <= MOST_PIXELS else len(content)


def _picture(kind: str, suffix: str) -> Format:
    # Pillow reads every WebP by libwebp's decoder of animations, which holds two pictures.
    pictures = 2 if kind == "WEBP" else 1
    return Format(
        partial(_pictures, kind), f"pictures/a{suffix}", lambda path: load_dataset(path.parent, image_size=8),
        lambda content: pictures * _declared(content), in_png if kind == "PNG" else None,
    )  # fmt: skip


def _toml() -> list[bytes]:
    return [
        b'preset = "digits"\nlr = 1e-3\nchannel_mult = [1, 2]\nflip = true\ndata = "caf\xc3\xa9"\n',
        b"seed = 12\nbetas = [0.9, 0.99]\nsteps = 1_000\n[model]\nx.y.z = 1\n",
        b"lr = " + b"9" * 400 + b"\n",
        b"channel_mult = " + b"[" * 1000 + b"]" * 1000 + b"\n",
        b"steps = " + b"9" * 5000 + b"\n",
    ]


def _inflated(content: bytes) -> int:
    """What the header in a gzip announces, as far as there is one."""
    try:
        with gzip.open(io.BytesIO(content)) as stream:
            start = stream.read(16)
        numbers = struct.unpack_from(f">{min(start[3], 3)}i", start, 4)
    except (OSError, EOFError, IndexError, struct.error, zlib.error):
        return len(content)
    return max(len(content), min(int(np.prod(np.array(numbers, object))), 2**26))


FORMATS = {
    "npz": Format(_npz, "a.npz", load_dataset, below=in_zip),
    "imagenet.npz": Format(_imagenet, "a.npz", partial(load_dataset, only_classes=["194"]), below=in_zip),
    "idx": Format(_idx, "train-images-idx3-ubyte", _read_idx),
    "idx.gz": Format(
        lambda: [gzip.compress(seed, mtime=0) for seed in _idx()], "train-images-idx3-ubyte.gz",
        _read_idx, _inflated, in_gzip,
    ),
    "data.bin": Format(
        lambda: [unetcu_bytes(_pixels(4, 8, 8, 3)), unetcu_bytes(_pixels(3, 4, 4, 1))], "a.bin", load_dataset
    ),
    **{
        kind.lower(): _picture(kind, suffix)
        for kind, suffix in {
            "BMP": ".bmp", "GIF": ".gif", "JPEG": ".jpg", "PNG": ".png", "PPM": ".ppm", "TIFF": ".tif", "WEBP": ".webp"
        }.items()
    },
    "checkpoint": Format(_checkpoints, "a.safetensors", partial(load, device="cpu")),
    "safetensors": Format(_safetensors, "a.safetensors", read_weights),
    "pt": Format(_torch_files, "a.pt", read_weights, below=in_zip),
    "weights.bin": Format(
        _weights_bins, "a.bin", read_weights, lambda content: 4 * UNETCU_NUMBERS,
        zeros=1024 - 40 + 3 * 4 * UNETCU_NUMBERS,
    ),
    "toml": Format(_toml, "a.toml", load_toml),
}  # fmt: skip
