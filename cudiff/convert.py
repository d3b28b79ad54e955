"""Weights from and to other programs: PyTorch's layouts, guided-diffusion's names, unet.cu's binary, CS 179's file.

State dicts of cudiff are native: channels-last, convolution weights (K, R, S, C). Only this file and
cudiff/nn/state_dict.py know other layouts. The U-Net has guided-diffusion's parameter names, so for it only layouts
change.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudiff.as_array import as_array
from cudiff.backend import to_device
from cudiff.config import PRESETS, Config, as_flags
from cudiff.data.unetcu import MAGIC as DATA_MAGIC
from cudiff.errors import CudiffError
from cudiff.files import opened
from cudiff.models import outline
from cudiff.models.dit import SIZES
from cudiff.models.unet import UNet, num_groups
from cudiff.nn import GroupNorm, Module, StateDict
from cudiff.nn.state_dict import IN_TORCH, MODULE
from cudiff.tensorfile import read_tensors, replacing, write_tensors
from cudiff.torchfile import read_torch

UNETCU_MAGIC = 12345678
UNETCU_HEADER = 256  # int32
UNETCU_SAVES = 10000  # steps between two files of its trainer
_UNETCU_FREE = ("validation", "seed", "optimizer", "dropout", "zero_init", "num_heads")
"""Options that the function its weights compute does not depend on."""

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


def from_torch(state: Mapping[str, Any], layouts: Mapping[str, str]) -> StateDict:
    """`state`, PyTorch's tensors or arrays in its layout, in native layout: for `Module.load_state_dict`.

    layouts: `module.layouts()`; names it lacks pass unchanged, but for batch norms' `num_batches_tracked`, which no
    layer of cudiff has.

    conv2d (O, I, H, W) → (O, H, W, I); conv_transpose2d (I, O, H, W) → (I, H, W, O); conv1d (O, I, L) → (O, L, I);
    pointwise, a linear layer that is a convolution of length 1 there, (O, I, 1) → (O, I); linear, embedding and vector
    as they are. Raises CudiffError for another number of axes.
    """
    result = StateDict()
    for name, given in state.items():
        if name.rpartition(".")[2] == "num_batches_tracked" and name not in layouts:
            continue
        array, kind = to_device(as_array(given), "cpu"), layouts.get(name, "vector")
        if axes := IN_TORCH.get(kind):
            array = _with_axes(name, array, len(axes)).transpose(np.argsort(axes))
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
    if axes := IN_TORCH.get(kind):
        return _with_axes(name, array, len(axes)).transpose(axes)
    return _with_axes(name, array, 2)[:, :, None] if kind == "pointwise" else array


def read_weights(path: str | os.PathLike, key: str | None = None) -> Weights:
    """Weights that another program wrote: a .pt state_dict, a .safetensors with PyTorch's layout, unet.cu's .bin.

    key: which part of a .pt that holds several state_dicts. Names are made those of cudiff's models. Raises CudiffError
    where the file is missing, damaged, or of a kind that would run code; a file's kind is told by its content.
    """
    with opened(path) as file:
        start = file.read(9)
    suffix, is_tensors = Path(path).suffix.lower(), start[8:] == b"{"  # after its length, which may be any number
    if suffix == ".pkl" or (start[:1] == b"\x80" and not is_tensors):
        # A .pt that is one was saved by PyTorch before 1.6.
        content = "pickle.load(file)['ema'].state_dict()" if suffix == ".pkl" else "torch.load(file)"
        raise CudiffError(
            f"{path} is a pickle, a program that could do anything (NVIDIA's EDM .pkl carries source code), and is not "
            f"run: where you trust it, torch.save({content}, 'weights.pt'), and convert that"
        )
    if int.from_bytes(start[:4], "little") == UNETCU_MAGIC:
        return read_unet_cu(path)
    if start[:2] == b"PK" and not is_tensors:
        state = read_torch(path, key)
    elif key is not None:
        raise CudiffError(f"{path} holds one state_dict, and key (--key) chooses of a .pt's several: leave it out")
    else:
        try:
            state, metadata = read_tensors(path)
        except CudiffError:
            check_binary(path)
            raise
        if "cudiff" in metadata or MODULE in metadata:
            raise CudiffError(f"{path} is a cudiff checkpoint already: use it as it is")
    return rename(state)


def check_groups(source: str | os.PathLike, net: Module) -> None:
    """Raise CudiffError where norms of a U-Net from `source` are grouped otherwise than guided-diffusion's."""
    norms = [module for module in net.modules() if isinstance(module, GroupNorm)] if isinstance(net, UNet) else []
    for norm in norms:
        if norm.num_groups != (theirs := num_groups(norm.weight.size, 1)):
            raise CudiffError(
                f"{source} has norms over {norm.weight.size} channels in {norm.num_groups} groups, and "
                f"guided-diffusion takes them in {theirs}: train with --norm-group-channels 1 for weights that move"
            )


def write_weights(path: str | os.PathLike, state: Mapping[str, np.ndarray]) -> None:
    """Write arrays in PyTorch's layout (`to_torch`) as a .safetensors file for other programs."""
    write_tensors(path, state, {"format": "pt"})


def rename(state: Mapping[str, np.ndarray]) -> Weights:
    """`state` under cudiff's names: without wrappers' prefixes, unet.cu's names as guided-diffusion's.

    The configuration comes with it where the names tell the model: CS 179's and unet.cu's.
    """
    while state and (worn := [one for one in _WRAPPERS if all(name.startswith(one) for name in state)]):
        state = {name.removeprefix(worn[0]): array for name, array in state.items()}
    if "enc_blocks.0.conv1.weight" in state:
        return Weights(dict(state), PRESETS["cs179"])
    if any(".cv3_1." in name for name in state):
        pattern = rf"\.({'|'.join(sorted(_UNETCU_NAMES, key=len, reverse=True))})\."
        return Weights(
            {re.sub(pattern, lambda m: f".{_UNETCU_NAMES[m[1]]}.", name): array for name, array in state.items()},
            _unetcu_config(),
        )
    return Weights(dict(state), None)


def dit_config(state: Mapping[str, np.ndarray], config: Config) -> Config | None:
    """That of the DiT of these weights, by the names of the paper's code (arXiv 2212.09748); None for something else.

    state: in PyTorch's layout. What names and shapes do not tell is as that code has it: DDPM's linear schedule,
    sampled by 250 steps with guidance of the first three channels; or as `config` has it, where that is of a DiT.
    Raises CudiffError where heads are not known: of another width than the paper's, and than the configuration's.
    """
    patches, places = state.get("x_embedder.proj.weight"), state.get("pos_embed")
    ends, inner = state.get("final_layer.linear.weight"), state.get("blocks.0.mlp.fc1.weight")
    if patches is None or places is None or ends is None or inner is None:
        return None
    labels = state.get("y_embedder.embedding_table.weight")
    whole = all(array.size for array in (patches, places, ends, inner))
    axes = [2 if array is None else array.ndim for array in (ends, inner, labels, places, patches)]
    hidden_size = len(patches) if patches.ndim else 0
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    blocks = [state.get(f"blocks.{index}.attn.qkv.weight", patches).shape for index in range(depth)]
    if not whole or axes != [2, 2, 2, 3, 4] or set(blocks) != {(3 * hidden_size, hidden_size)}:
        raise CudiffError("the names are those of a DiT, the shapes are not: use the file as it was written")
    channels, patch_size, side = *patches.shape[1:3], math.isqrt(places.shape[1])
    heads = {size: num_heads for size, _, num_heads in SIZES.values()}
    if config.model == "dit" and config.hidden_size == hidden_size:
        heads[hidden_size] = config.num_heads
    if hidden_size not in heads:
        scale = "" if channels in (1, 3) else " --latent-scale X"
        raise CudiffError(f"no weights tell how many heads a DiT of hidden size {hidden_size} has: give --preset "
                          f"dit-xl-2 --hidden-size {hidden_size} --num-heads N{scale}")
    base = config if config.model == "dit" else PRESETS["dit-xl-2"].replace(
        guidance=4.0, guidance_channels=3, clip_denoised=channels in (1, 3),
        latent_scale=0.0 if channels in (1, 3) else 0.18215,
    )
    return base.replace(
        image_size=side * patch_size, channels=channels, patch_size=patch_size, hidden_size=hidden_size,
        depth=depth, num_heads=heads[hidden_size],
        mlp_ratio=len(inner) / hidden_size, qk_norm="blocks.0.attn.q_norm.weight" in state,
        num_classes=0 if labels is None else max(1, len(labels) - 1),
        learn_sigma=len(ends) == 2 * channels * patch_size**2,
    )


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


def is_unet_cu(path: str | os.PathLike) -> bool:
    """Whether a file begins as unet.cu's weights do; False for what cannot be read."""
    try:
        with opened(path) as file:
            return int.from_bytes(file.read(4), "little") == UNETCU_MAGIC
    except CudiffError:
        return False


def check_binary(path: str | os.PathLike) -> None:
    """Raise CudiffError for a .bin that is not unet.cu's weights, saying what it is, or that it cannot be read."""
    if Path(path).suffix.lower() != ".bin":
        return
    with opened(path) as file:
        magic = int.from_bytes(file.read(4), "little")
    if magic == DATA_MAGIC:
        raise CudiffError(f"{path} is unet.cu's training data, not its weights: give it to --data")
    if magic != UNETCU_MAGIC:
        raise CudiffError(f"{path} is not unet.cu's weights (no {UNETCU_MAGIC} at its start): name another file")


def read_unet_cu(path: str | os.PathLike) -> Weights:
    """The weights in unet.cu's binary (github.com/clu0/unet.cu: its model initialiser's and its trainer's files).

    256 little-endian int32: 12345678, B, C_in, C_model, C_out, H, W, max_period, whether AdamW's moments follow,
    whether random states follow; then float32 parameters in the order of PyTorch's named_parameters(), each in its
    layout; then what was announced: see `unet_cu_checkpoint`. Raises CudiffError where the file is something else.
    """
    binary = _unetcu_binary(path)
    return Weights(binary.values(0), binary.config)


def unet_cu_checkpoint(
    path: str | os.PathLike, parts: Collection[str]
) -> tuple[Config, dict[str, np.ndarray], dict[str, Any]]:
    """unet.cu's binary as a checkpoint's configuration, tensors of these parts and counters.

    The weights serve as their average too. Where AdamW's moments are there, a run can go on with them, from the step in
    the file's name, model_20000.bin, or else from the first at which unet.cu writes one, 10,000: the file tells none.
    The random states at its end are CUDA's own and left out; counters["notes"] says so.
    """
    binary = _unetcu_binary(path)
    layouts = {name: value.layout for name, value in binary.parameters.items()}
    runs = {"model": 0, "ema": 0} | ({"exp_avg": 1, "exp_avg_sq": 2} if binary.moments else {})
    tensors: dict[str, np.ndarray] = {}
    for name, run in runs.items():
        if name in parts:
            state = from_torch(binary.values(run), layouts)
            tensors |= {f"{name}.{key}": array for key, array in state.items()}
    counters: dict[str, Any] = {"step": 0}
    if binary.moments:
        told = re.search(r"_(\d{1,9})\.bin$", os.fspath(path))
        step = int(told[1]) if told else UNETCU_SAVES
        counters = {"step": step, "seconds": 0.0, "loss_sum": 0.0, "loss_steps": 0, "optimizer": [step, 0, 0],
                    "generator": {"seed": binary.config.seed, "step": step}, "frozen": []}
    if binary.random:
        counters["notes"] = ["the random states at the end of unet.cu's file are CUDA's own and left out"]
    elif binary.rest:
        counters["notes"] = [f"{binary.rest:,} bytes that the header of unet.cu's file does not announce are left out"]
    return binary.config, tensors, counters


def write_unet_cu(path: str | os.PathLike, config: Config, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a checkpoint's weights, and AdamW's moments where it has them, as unet.cu's binary (`read_unet_cu`).

    tensors: its parts "model", "exp_avg" and "exp_avg_sq", in native layout. What was read from a file without random
    states is written as it was, to the byte. Raises CudiffError for another model than unet.cu's, naming the options
    that differ, and where the system refuses.
    """
    width = config.options.get("model_channels", 64)
    like = _unetcu_config(config.image_size, config.channels, width if width % 32 == 0 else 64,
                          config.options.get("max_period", 1000.0))
    wanted = {name: value for name, value in like.fixed().items() if name not in _UNETCU_FREE}
    values = config.to_dict()
    other = {name: value for name, value in wanted.items() if values.get(name) != value}
    if other:
        raise CudiffError(f"this is another model than unet.cu's, which has {as_flags(other)}: its file holds no other")
    if config.max_period != int(config.max_period):
        raise CudiffError(f"unet.cu's file holds whole numbers, and max_period is {config.max_period}")
    count = sum(array.size for array in tensors.values())
    parameters = _unetcu_parameters(config, count)
    moments = "exp_avg" if any(name.startswith("exp_avg.") for name in tensors) else None
    header = np.zeros(UNETCU_HEADER, "<i4")
    header[:9] = (UNETCU_MAGIC, config.batch_size, config.channels, config.model_channels, config.channels,
                  config.image_size, config.image_size, int(config.max_period), int(moments is not None))
    with replacing(path) as file:
        file.write(header.tobytes())
        for part in ("model", "exp_avg", "exp_avg_sq") if moments else ("model",):
            for name, parameter in parameters.items():
                file.write(_in_torch(name, tensors[f"{part}.{name}"], parameter.layout).astype("<f4").tobytes())


class _Binary(NamedTuple):
    """What the header of unet.cu's weights tells. parameters: an outline's, by name; moments, random: whether these
    follow; rest: the bytes after the numbers."""

    path: str | os.PathLike
    config: Config
    parameters: dict[str, Any]
    moments: bool
    random: bool
    rest: int

    def values(self, run: int) -> dict[str, np.ndarray]:
        """The weights, run 0, or a moment, 1 or 2, by name, in PyTorch's layout."""
        shapes = {name: _in_torch(name, value.data, value.layout).shape for name, value in self.parameters.items()}
        sizes = [math.prod(shape) for shape in shapes.values()]
        values = np.fromfile(self.path, "<f4", sum(sizes), offset=4 * (UNETCU_HEADER + run * sum(sizes)))
        pieces = np.split(values, np.cumsum(sizes)[:-1])
        return {name: piece.reshape(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}


def _unetcu_binary(path: str | os.PathLike) -> _Binary:
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = [int(number) for number in np.fromfile(file, "<i4", UNETCU_HEADER)]
    if len(header) < UNETCU_HEADER or header[0] != UNETCU_MAGIC:
        raise CudiffError(f"{path} holds no weights of unet.cu: name another file")
    _, batch, channels, model_channels, out_channels, height, width, max_period, moments, random = header[:10]
    if height != width or out_channels != channels or channels not in (1, 3) or not 0 < model_channels <= 4096:
        raise CudiffError(
            f"{path} is a model for {height}x{width} images, {channels} channels in and {out_channels} out: "
            "cudiff reads those for square images of 1 or 3 channels, with as many out as in"
        )
    config = _unetcu_config(height, channels, model_channels, max_period).replace(batch_size=batch)
    parameters = _unetcu_parameters(config, (size - 4 * UNETCU_HEADER) // 4)
    count = sum(value.size for value in parameters.values())
    rest = size - 4 * UNETCU_HEADER - 4 * count * (3 if moments else 1)
    if not parameters or rest < 0:
        raise CudiffError(f"{path} is truncated: its {size:,} bytes are not all weights of its model; copy it again")
    return _Binary(path, config, parameters, bool(moments), bool(random), rest)


def _unetcu_parameters(config: Config, numbers: int) -> dict[str, Any]:
    """An outline's parameters by name, in their order; empty for a far larger model than of so many numbers."""
    try:
        return dict(outline(config, numbers, numbers).named_parameters())
    except CudiffError:
        return {}


def _unetcu_config(
    image_size: int = 64, channels: int = 3, model_channels: int = 64, max_period: float = 1000.0
) -> Config:
    """The preset "unet-cu" for such images, with attention at 1/4 and 1/8."""
    return PRESETS["unet-cu"].replace(
        image_size=image_size, channels=channels, model_channels=model_channels, max_period=float(max_period),
        attention_resolutions=(image_size // 4, image_size // 8),
    )


def _with_axes(name: str, array: np.ndarray, axes: int) -> np.ndarray:
    if array.ndim != axes:
        raise CudiffError(f"{name} has shape {array.shape} where {axes} axes were expected: it is of another model")
    return array


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray alone would give 0-d arrays an axis
