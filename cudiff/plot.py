"""Pictures: grids of samples, single images, the denoising as a GIF, the loss curve, and the nearest training photos.

Every file is replaced whole or not at all, and its folder is made as needed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cudiff import ops
from cudiff.backend import Array, array_module, bfloat16, is_float, to_device
from cudiff.errors import CudiffError
from cudiff.tensor import Tensor
from cudiff.tensorfile import replacing

GRID_WIDTH = 720  # pixels that an enlarged grid is about as wide as
GIF_WIDTH = 400
LARGEST_SCALE = 8
GAP = 2
BACKGROUND = 64  # dark gray parts black digits and photos alike

FRAME, LAST_FRAME = 80, 2500  # milliseconds
MOST_FRAMES = 60

INK, QUIET, LINE, ACCENT, SECOND = "#1f2328", "#6e7781", "#0969da", "#d1570a", "#1a7f37"


def to_uint8(x: Tensor | Array) -> np.ndarray:
    """Images in [-1, 1], any shape and device, as bytes: round(127.5·x + 127.5), cut to 0..255.

    Raises CudiffError where a value is not finite.
    """
    if isinstance(x, Tensor) and x.device == "cuda" and is_float(x.dtype):
        # Enqueued while the GPU still samples. To copy 256 digits as floats and round them the host took 0.8 ms.
        made = ops.blend_to_uint8(x, Tensor(array_module("cuda").empty(x.shape, np.uint8)))
        if math.isfinite(ops.sum(x).item()):
            return made.numpy()
    x = np.asarray(to_device(x.data if isinstance(x, Tensor) else x, "cpu"), np.float32)
    if not np.isfinite(x).all():
        raise CudiffError("the images hold values that are not finite: use less guidance or an earlier checkpoint")
    return np.round(x * 127.5 + 127.5).clip(0, 255).astype(np.uint8)


def grid(
    images: Tensor | Array, columns: int | None = None, scale: int | None = None, gap: int = GAP
) -> Image.Image:
    """Images (N, H, W, C), uint8 or floats in [-1, 1], side by side, row by row; a notebook shows the picture.

    columns: as many as rows by default. scale: the integer factor by which each pixel is enlarged; small images are by
    default, to be well visible. gap: pixels between two images. Raises ValueError for images of another type or shape,
    or none, and CudiffError as `to_uint8`.
    """
    images = to_uint8(images) if is_float(images.dtype) else to_device(Tensor(images).data, "cpu")
    n, height, width, channels = _checked(images).shape
    columns = columns or math.ceil(math.sqrt(n))
    scale = scale or _scale(columns * width, GRID_WIDTH)
    rows, height, width = -(-n // columns), height * scale, width * scale
    canvas = np.full(
        (rows * (height + gap) + gap, columns * (width + gap) + gap, channels), BACKGROUND, np.uint8
    )
    for index, image in enumerate(images):
        top = gap + index // columns * (height + gap)
        left = gap + index % columns * (width + gap)
        canvas[top : top + height, left : left + width] = image.repeat(scale, axis=0).repeat(scale, axis=1)
    return _picture(canvas)


def save_grid(
    path: str | os.PathLike, images: np.ndarray, columns: int | None = None, scale: int | None = None
) -> None:
    """Write `grid` of uint8 (N, H, W, C) as a PNG."""
    _save_png(path, grid(images, columns, scale))


def save_images(folder: str | os.PathLike, images: np.ndarray) -> list[Path]:
    """Write uint8 (N, H, W, C) as 000000.png, 000001.png, …; returns their paths. Where one cannot be written, those
    that were not there before are removed."""
    paths = [Path(folder) / f"{index:06d}.png" for index in range(len(_checked(images)))]
    new = []
    try:
        for path, image in zip(paths, images, strict=True):
            new += [] if path.exists() else [path]
            _save_png(path, _picture(image))
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise
    return paths


def save_npz(path: str | os.PathLike, images: np.ndarray, labels: np.ndarray | None = None) -> None:
    """Write `images` uint8 (N, H, W, C), or as `latents` floats (N, H, W, C), and, where given, `labels` (N,);
    `load_dataset` reads it. bfloat16 is written as float32. Raises ValueError for others, and labels beyond int32."""
    latents = is_float(images.dtype) and images.ndim == 4 and len(images) > 0
    if images.dtype == bfloat16:  # which NumPy's files do not know
        images = images.astype(np.float32)
    arrays = {"latents": images} if latents else {"images": _checked(images)}
    if labels is not None:
        given = np.asarray(labels)
        if given.shape != (len(images),) or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"labels are {given.dtype} {given.shape}: give one integer for each image")
        if given.min() < -(2**31) or given.max() >= 2**31:
            raise ValueError(f"labels run from {given.min()} to {given.max()}: number the classes from 0")
        arrays["labels"] = given.astype(np.int32)
    with replacing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def save_gif(path: str | os.PathLike, frames: Sequence[np.ndarray], columns: int | None = None) -> None:
    """Write frames of uint8 (N, H, W, C), each as a grid, in an endless loop that rests on the last one.

    Of more than 60 frames, 60 are taken, evenly spaced, the first and the last among them.
    """
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), MOST_FRAMES)).round().astype(int))
    n, _, width, _ = _checked(frames[0]).shape
    columns = columns or math.ceil(math.sqrt(n))
    scale = _scale(columns * width, GIF_WIDTH)
    pictures = [grid(frames[index], columns, scale) for index in chosen]
    if pictures[0].mode == "RGB":  # dithering would flicker
        pictures = [picture.quantize(256, dither=Image.Dither.NONE) for picture in pictures]
    durations = [FRAME] * (len(pictures) - 1) + [LAST_FRAME]
    content = io.BytesIO()
    pictures[0].save(
        content, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=False
    )
    with replacing(path) as file:
        file.write(content.getvalue())


def nearest(samples: np.ndarray, training: np.ndarray, flip: bool = False) -> np.ndarray:
    """For each sample the index of the training image at the smallest Euclidean distance in pixels, int64 (N,).

    samples, training: uint8 (N, H, W, C) of the same H, W, C. flip: mirrored training images count too. Exact; of
    equal distances the first is taken. Raises ValueError for others, or none.
    """
    n = len(_checked(samples))
    if _checked(training).shape[1:] != samples.shape[1:]:
        raise ValueError(f"samples {samples.shape} and training images {training.shape} differ in shape")
    queries = [samples, samples[:, :, ::-1]] if flip else [samples]  # mirroring either side gives the same distance
    x = np.concatenate(queries).reshape(n * len(queries), -1).astype(np.float64)
    best, index = np.full(n, np.inf), np.zeros(n, np.int64)
    for start in range(0, len(training), 1024):
        y = training[start : start + 1024].reshape(-1, x.shape[1]).astype(np.float64)
        # ‖x−y‖² without ‖x‖², which is the same for all: integers below 2^53, so nothing is rounded.
        distance = (np.square(y).sum(axis=1) - 2 * x @ y.T).reshape(len(queries), n, len(y)).min(axis=0)
        here = distance.argmin(axis=1)
        closer = distance[np.arange(n), here] < best
        index[closer] = start + here[closer]
        best[closer] = distance[closer, here[closer]]
    return index


def save_neighbours(path: str | os.PathLike, samples: np.ndarray, neighbours: np.ndarray) -> None:
    """Write a PNG of pairs: each sample (left) beside its nearest training image (right), uint8 (N, H, W, C) both."""
    if _checked(samples).shape != neighbours.shape:
        raise ValueError(f"samples {samples.shape} and their neighbours {neighbours.shape} differ in shape")
    n, _, width, _ = samples.shape
    columns = math.ceil(math.sqrt(n / 2))
    pairs = np.concatenate([samples, neighbours], axis=2)
    _save_png(path, grid(pairs, columns, _scale(2 * columns * width, GRID_WIDTH), gap=4 * GAP))


def save_loss_curve(path: str | os.PathLike, metrics: Sequence[Mapping[str, Any]], title: str = "") -> bool:
    """Write `loss_curve` as a PNG, where there is one; False where matplotlib is not installed."""
    try:
        content = loss_curve(metrics, title)
    except ImportError:
        return False
    if content is not None:
        with replacing(path) as file:
            file.write(content)
    return True


def loss_curve(metrics: Sequence[Mapping[str, Any]], title: str = "") -> bytes | None:
    """The lines of `metrics.jsonl` as the content of a PNG. Raises ImportError where matplotlib is not installed.

    metrics: mappings with `step` and `loss` or `val_loss` and `train_loss`, the EMA's on held-out and on training
    images; what is not finite is left out, and None is returned where no loss is left. The axis is logarithmic where
    the loss falls by more than a factor of 4.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    steps, losses = _series(metrics, "loss")
    if not len(steps):
        return None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    smooth = _smoothed(losses)
    curves = [("training", smooth[-1], LINE)]
    axes.plot(steps, losses, color=LINE, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smooth, color=LINE, linewidth=2)
    shown = np.concatenate([smooth, np.percentile(losses, (1, 99))])
    for key, name, color in (("val_loss", "held out, EMA", ACCENT), ("train_loss", "training, EMA", SECOND)):
        at, values = _series(metrics, key)
        if len(values):
            axes.plot(at, values, color=color, linewidth=1.6, marker="o", markersize=4)
            curves.append((name, values[-1], color))
            shown = np.concatenate([shown, values])
    low, high = shown.min(), shown.max()
    if low > 0 and high > 4 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, high * 1.15)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif high > low:
        axes.set_ylim(low - 0.08 * (high - low), high + 0.08 * (high - low))
    _label_ends(axes, curves)
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", parse_math=False)  # a path has $
    axes.set_xlabel("training step", color=QUIET)
    axes.set_ylabel("loss", color=QUIET)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(0, 1.01 * max(steps.max(), 1))
    axes.grid(axis="y", which="both", color="#d0d7de", linewidth=0.6)
    axes.tick_params(which="both", length=0, colors=QUIET)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#d0d7de")
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _label_ends(axes: Any, curves: list[tuple[str, float, str]]) -> None:
    """Write each curve's (name, last value, colour) to the right of the axes, apart where they would touch."""
    place = np.log if axes.get_yscale() == "log" else np.asarray
    low, high = (float(place(limit)) for limit in axes.get_ylim())
    position = -np.inf
    for name, value, color in sorted(curves, key=lambda curve: curve[1]):
        position = max(position + 0.11, (float(place(value)) - low) / (high - low))
        axes.annotate(
            f"{name}\n{value:.4g}", (1.01, position), xycoords="axes fraction", va="center", color=color, fontsize=10
        )


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the lines that have `key`, as far as they are finite."""
    points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None and math.isfinite(line[key])]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Exponential mean over a thirtieth of the curve; over fewer values near its start, where it is steep."""
    out, mean = np.empty_like(values), 0.0
    for index, value in enumerate(values):
        mean += (value - mean) / max(1.0, min(len(values) / 30, (index + 1) / 6))
        out[index] = mean
    return out


def _scale(width: int, target: int) -> int:
    """The integer factor that brings `width` pixels nearest to `target`, from 1 to 8."""
    return min(LARGEST_SCALE, max(1, round(target / width)))


def _checked(images: np.ndarray) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or not len(images):
        raise ValueError(f"images must be uint8 (N, H, W, C) with 1 or 3 channels, not {images.dtype} {images.shape}: "
                         "write latents by save_npz")
    return images


def _picture(image: np.ndarray) -> Image.Image:
    """One uint8 (H, W, C) as gray or RGB."""
    return Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)


def _save_png(path: str | os.PathLike, picture: Image.Image) -> None:
    with replacing(path) as file:
        picture.save(file, "PNG")
