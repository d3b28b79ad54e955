"""Weights from and to other programs: PyTorch's layouts, guided-diffusion's names, unet.cu's binary, CS 179's file.

State dicts of cudiff are native: channels-last, convolution weights (K, R, S, C). This is the only place that knows
other layouts. The U-Net has guided-diffusion's parameter names, so for it only layouts change.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudiff.as_array import as_array
from cudiff.backend import to_device
from cudiff.config import PRESETS, Config
from cudiff.errors import CudiffError
from cudiff.files import opened
from cudiff.models import outline
from cudiff.nn.module import MODULE
from cudiff.tensorfile import read_tensors, write_tensors
from cudiff.torchfile import read_torch

UNETCU_MAGIC = 12345678
UNETCU_HEADER = 256  # int32

# unet.cu's and guided-diffusion's names for the parts of residual blocks, then of attention blocks.
_UNETCU_NAMES = {
    "gn1": "in_layers.0", "cv3_1": "in_layers.2", "l_emb": "emb_layers.1", "gn2": "out_layers.0",
    "cv3_2": "out_layers.3", "gn": "norm", "proj": "proj_out",
}  # fmt: skip
_WRAPPERS = ("module.", "_orig_mod.", "unet.")  # DataParallel's, torch.compile's, CS 179's


class Weights(NamedTuple):
    """state: arrays by cudiff's names in PyTorch's layout. config: that of the model, where the file tells it."""

    state: dict[str, np.ndarray]
    config: Config | None


def from_torch(state: Mapping[str, Any], layouts: Mapping[str, str]) -> dict[str, np.ndarray]:
    """`state`, PyTorch's tensors or arrays in its layout, in native layout: for `Module.load_state_dict`.

    layouts: `module.layouts()`; names it lacks pass unchanged, but for batch norms' `num_batches_tracked`, which no
    layer of cudiff has.

    conv2d (O, I, H, W) → (O, H, W, I); conv_transpose2d (I, O, H, W) → (I, H, W, O); conv1d (O, I, L) → (O, L, I);
    pointwise, a linear layer that is a convolution of length 1 there, (O, I, 1) → (O, I); linear, embedding and vector
    as they are. Raises CudiffError for another number of axes.
    """
    result = {}
    for name, given in state.items():
        if name.rpartition(".")[2] == "num_batches_tracked" and name not in layouts:
            continue
        array, kind = to_device(as_array(given), "cpu"), layouts.get(name, "vector")
        if kind in ("conv2d", "conv_transpose2d"):
            array = _with_axes(name, array, 4).transpose(0, 2, 3, 1)
        elif kind == "conv1d":
            array = _with_axes(name, array, 3).transpose(0, 2, 1)
        elif kind == "pointwise":
            array = _with_axes(name, array, 3)
            if array.shape[2] != 1:
                raise CudiffError(f"{name} has shape {array.shape}: only convolutions of length 1 can be read here")
            array = array[:, :, 0]
        result[name] = _contiguous(array)
    return result


def to_torch(state: Mapping[str, np.ndarray], layouts: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The inverse of `from_torch`."""
    return {name: _contiguous(_in_torch(name, array, layouts.get(name, "vector"))) for name, array in state.items()}


def _in_torch(name: str, array: np.ndarray, kind: str) -> np.ndarray:
    """A view of a native array in PyTorch's layout."""
    if kind in ("conv2d", "conv_transpose2d"):
        return _with_axes(name, array, 4).transpose(0, 3, 1, 2)
    if kind == "conv1d":
        return _with_axes(name, array, 3).transpose(0, 2, 1)
    return _with_axes(name, array, 2)[:, :, None] if kind == "pointwise" else array


def read_weights(path: str | os.PathLike, key: str | None = None) -> Weights:
    """Weights that another program wrote: a .pt state_dict, a .safetensors with PyTorch's layout, unet.cu's .bin.

    key: which part of a .pt that holds several state_dicts. Names are made those of cudiff's models. Raises CudiffError
    where the file is missing, damaged, or of a kind that would run code; a file's kind is told by its content.
    """
    with opened(path) as file:
        start = file.read(4)
    suffix = Path(path).suffix.lower()
    if suffix == ".pkl" or start[:1] == b"\x80":
        # A .pt that is one was saved by PyTorch before 1.6.
        content = "pickle.load(file)['ema'].state_dict()" if suffix == ".pkl" else "torch.load(file)"
        raise CudiffError(
            f"{path} is a pickle, a program that could do anything (NVIDIA's EDM .pkl carries source code), and is not "
            f"run: where you trust it, torch.save({content}, 'weights.pt'), and convert that"
        )
    if int.from_bytes(start, "little") == UNETCU_MAGIC:
        return read_unet_cu(path)
    if start[:2] == b"PK":
        state = read_torch(path, key)
    else:
        state, metadata = read_tensors(path)
        if "cudiff" in metadata or MODULE in metadata:
            raise CudiffError(f"{path} is a cudiff checkpoint already: use it as it is")
    return rename(state)


def write_weights(path: str | os.PathLike, state: Mapping[str, np.ndarray]) -> None:
    """Write arrays in PyTorch's layout (`to_torch`) as a .safetensors file for other programs."""
    write_tensors(path, state, {"format": "pt"})


def rename(state: Mapping[str, np.ndarray]) -> Weights:
    """`state` under cudiff's names: without wrappers' prefixes, unet.cu's names as guided-diffusion's.

    The configuration comes with it where the names tell the model: CS 179's and unet.cu's.
    """
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            state = {name.removeprefix(wrapper): array for name, array in state.items()}
    if "enc_blocks.0.conv1.weight" in state:
        return Weights(dict(state), PRESETS["cs179"])
    if any(".cv3_1." in name for name in state):
        pattern = rf"\.({'|'.join(sorted(_UNETCU_NAMES, key=len, reverse=True))})\."
        return Weights(
            {re.sub(pattern, lambda m: f".{_UNETCU_NAMES[m[1]]}.", name): array for name, array in state.items()},
            _unetcu_config(),
        )
    return Weights(dict(state), None)


def other_options(state: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """The options that guided-diffusion's U-Net of these weights has otherwise than `config`, as their values there.

    state: in PyTorch's layout; only names and shapes are looked at. Heads, the image size and the order of q, k and v
    are told by none. Empty for the weights of something else.
    """

    def size(name: str, axis: int = 0) -> int:
        shape = state[name].shape if name in state else ()
        return shape[axis] if len(shape) > axis else 0

    def blocks(pattern: str) -> list[int]:
        return sorted({int(found[1]) for name in state if (found := re.match(pattern, name))})

    config = config.replace(num_classes=max(0, config.num_classes))  # no data is there to have any
    channels, model_channels = size("input_blocks.0.0.weight", 1), size("time_embed.0.weight", 1)
    ins, outs = blocks(r"input_blocks\.(\d{1,4})\."), blocks(r"output_blocks\.(\d{1,4})\.")
    if not (channels and model_channels and len(ins) > 1 and outs):
        return {}
    updown = blocks(r"output_blocks\.(\d{1,4})\.[12]\.in_layers\.")
    convs = blocks(r"output_blocks\.(\d{1,4})\.[12]\.conv\.")
    gaps = sorted(set(range(max(ins))) - set(ins))  # downsampling without weights
    period = (updown or convs or [gap - 1 for gap in gaps] or [len(outs) - 1])[0] + 1  # blocks a level, with resampling
    firsts = [f"input_blocks.{index}" for index in range(1, max(ins) + 1, period)]  # of each level
    scales = size("input_blocks.1.0.emb_layers.1.weight") == 2 * size("input_blocks.1.0.out_layers.0.weight")
    options: dict[str, Any] = {
        "model": "unet", "channels": channels, "model_channels": model_channels,
        "channel_mult": tuple(size(f"{first}.0.out_layers.0.weight") // model_channels for first in firsts),
        "num_res_blocks": period - 1, "use_scale_shift_norm": scales, "resblock_updown": bool(updown),
        "num_classes": size("label_emb.weight"), "learn_sigma": size("out.2.weight") == 2 * channels,
    }  # fmt: skip
    if len(firsts) > 1 and not updown:
        options["conv_resample"] = bool(convs)
    if options["learn_sigma"]:
        options["diffusion"] = "ddpm"
    known = config.to_dict()
    options = {name: value for name, value in options.items() if value != known.get(name)}
    attended = [config.image_size >> level for level, name in enumerate(firsts) if f"{name}.1.qkv.weight" in state]
    if config.image_size and set(attended) != set(known.get("attention_resolutions", ())):
        options["attention_resolutions"] = tuple(attended)
    return options


def read_unet_cu(path: str | os.PathLike) -> Weights:
    """The weights in unet.cu's binary (github.com/clu0/unet.cu: its model initialiser's and its trainer's files).

    256 little-endian int32: 12345678, B, C_in, C_model, C_out, H, W, max_period, whether AdamW's moments follow,
    whether random states follow; then float32 parameters in the order of PyTorch's named_parameters(), each in its
    layout; then what was announced, which is not read. Raises CudiffError where the file is something else.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = [int(number) for number in np.fromfile(file, "<i4", UNETCU_HEADER)]
    if len(header) < UNETCU_HEADER or header[0] != UNETCU_MAGIC:
        raise CudiffError(f"{path} holds no weights of unet.cu: name another file")
    _, _, channels, model_channels, out_channels, height, width, max_period, moments, _ = header[:10]
    if height != width or out_channels != channels or not 0 < model_channels <= 4096:
        raise CudiffError(
            f"{path} is a model for {height}x{width} images, {channels} channels in and {out_channels} out: "
            "cudiff reads those for square images with as many channels out as in"
        )
    config = _unetcu_config(height, channels, model_channels, max_period)
    shapes = _unetcu_shapes(config, (size - 4 * UNETCU_HEADER) // 4)
    count = sum(map(math.prod, shapes.values()))
    if not shapes or size < 4 * UNETCU_HEADER + 4 * count * (3 if moments else 1):
        raise CudiffError(f"{path} is truncated: its {size:,} bytes are not all weights of its model; copy it again")
    values = np.fromfile(path, "<f4", count, offset=4 * UNETCU_HEADER)
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    pieces = np.split(values, ends)
    return Weights({name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}, config)


def _unetcu_shapes(config: Config, numbers: int) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes in PyTorch's layout, in their order; empty for a far larger model than of so many."""
    try:
        model = outline(config, numbers, numbers)
    except CudiffError:
        return {}
    return {name: _in_torch(name, value.data, value.layout).shape for name, value in model.named_parameters()}


def _unetcu_config(
    image_size: int = 64, channels: int = 3, model_channels: int = 64, max_period: float = 1000.0
) -> Config:
    """The preset "elephants" as unet.cu trains it: DDPM with 1,000 linear betas, attention at 1/4 and 1/8."""
    return PRESETS["elephants"].replace(
        image_size=image_size, channels=channels, model_channels=model_channels, max_period=float(max_period),
        attention_resolutions=(image_size // 4, image_size // 8), diffusion="ddpm", noise_schedule="linear",
        diffusion_steps=1000, sampler="ancestral", sample_steps=1000,
    )  # fmt: skip


def _with_axes(name: str, array: np.ndarray, axes: int) -> np.ndarray:
    if array.ndim != axes:
        raise CudiffError(f"{name} has shape {array.shape} where {axes} axes were expected: it is of another model")
    return array


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray alone would give 0-d arrays an axis
