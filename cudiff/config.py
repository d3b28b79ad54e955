"""The configuration of a model, its training and its sampling: flat, so that a TOML key and a flag share one name."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, get_args, get_origin, get_type_hints

from cudiff.errors import CudiffError
from cudiff.files import opened

SECTIONS = ("data", "model", "diffusion", "training", "sampling")


def _option(
    section: str,
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field with its help text and the values it takes; bounds of a tuple hold for each of its entries."""
    limits = {"least": least, "most": most, "above": above, "below": below}
    return field(default=default, metadata={"section": section, "help": text, "choices": choices, **limits})


_data, _model, _diffusion, _training, _sampling = (partial(_option, section) for section in SECTIONS)


@dataclass(frozen=True)
class Config:
    """Everything a run depends on, and nothing nested. `PRESETS` holds named ones; checkpoints hold theirs.

    Raises CudiffError, one line, for a value of the wrong type or out of range and for values that contradict.
    """

    # Data
    data: str = _data("digits", "digits, mnist, a folder of images, an .npz or unet.cu's .bin")
    image_size: int = _data(0, "pixels a side; 0 = that of the data", least=0, most=2**16)
    channels: int = _data(0, "1 (gray), 3 (RGB), 0 = that of the data", least=0, most=3)
    validation: int = _data(0, "images held out of the training data for the validation loss", least=0)
    flip: bool = _data(False, "mirror each image with probability 1/2")
    skip_bad: bool = _data(False, "leave out images that do not decode, instead of stopping")
    residency: str = _data("auto", "where training images lie", ("auto", "device", "host"))

    # Model
    model: str = _model("unet", "unet (guided-diffusion's) or cs179 (a small one for MNIST)", ("unet", "cs179"))
    model_channels: int = _model(64, "channels at the first level", least=1, most=2**16)
    channel_mult: tuple[int, ...] = _model((1, 2, 2), "channels at each level, in units of model_channels", least=1,
                                         most=2**10)
    num_res_blocks: int = _model(2, "residual blocks a level", least=1, most=1000)
    attention_resolutions: tuple[int, ...] = _model((), "image sizes in pixels at which attention is used", least=1)
    num_heads: int = _model(4, "attention heads, where num_head_channels is 0", least=1, most=2**16)
    num_head_channels: int = _model(0, "channels of each attention head; 0 = see num_heads", least=0, most=2**16)
    use_scale_shift_norm: bool = _model(False, "the embedding scales and shifts the norm instead of being added")
    resblock_updown: bool = _model(False, "down- and upsample inside residual blocks")
    conv_resample: bool = _model(True, "down- and upsample with a convolution")
    dropout: float = _model(0.0, "dropout probability in residual blocks", least=0, below=1)
    num_classes: int = _model(-1, "classes the model is conditioned on; 0 = unconditional, -1 = those of the data",
                              least=-1, below=2**31)
    learn_sigma: bool = _model(False, "DDPM: also predict the variance (Improved DDPM)")
    use_new_attention_order: bool = _model(False, "q, k and v are split before the heads are")
    max_period: float = _model(10000.0, "longest period of the timestep sinusoids", above=1)
    zero_init: bool = _model(True, "start the last convolution of each block at zero")
    norm_group_channels: int = _model(1, "fewest channels in a norm's group; 1 is guided-diffusion", least=1)

    # Diffusion
    diffusion: str = _diffusion("edm", "edm (Karras et al. 2022) or ddpm (Ho et al. 2020)", ("edm", "ddpm"))
    noise_schedule: str = _diffusion("linear", "DDPM: how betas grow", ("linear", "cosine"))
    diffusion_steps: int = _diffusion(1000, "DDPM: noise levels", least=1, most=10**6)
    sigma_data: float = _diffusion(0.5, "EDM: standard deviation of the data", above=0)
    data_mean: float = _diffusion(0.0, "EDM: subtracted from pixels in [-1, 1]; the noise levels are those after it")
    data_std: float = _diffusion(1.0, "EDM: pixels less data_mean are divided by it", above=0)
    P_mean: float = _diffusion(-1.2, "EDM: mean of log(sigma) in training")
    P_std: float = _diffusion(1.2, "EDM: standard deviation of log(sigma) in training", above=0)
    sigma_min: float = _diffusion(0.002, "lowest noise level of the EDM samplers", above=0)
    sigma_max: float = _diffusion(80.0, "highest noise level of the EDM samplers", above=0)
    rho: float = _diffusion(7.0, "how much the noise levels crowd near sigma_min", above=0)
    label_dropout: float = _diffusion(0.1, "share of labels dropped in training, for guidance", least=0, most=1)

    # Training
    batch_size: int = _training(128, "images a forward pass", least=1)
    accumulate: int = _training(1, "forward passes whose gradients are averaged for one update", least=1)
    lr: float = _training(2e-4, "learning rate", above=0)
    optimizer: str = _training("adamw", "update rule", ("adamw", "adam", "sgd"))
    betas: tuple[float, ...] = _training((0.9, 0.999), "Adam: decay of the two moments", least=0, below=1)
    eps: float = _training(1e-8, "Adam: added to the root of the second moment", above=0)
    momentum: float = _training(0.9, "SGD momentum", least=0, below=1)
    weight_decay: float = _training(0.0, "of weights, not of norms, biases and embeddings", least=0)
    warmup: int = _training(0, "updates over which the learning rate rises from zero; at most half of steps", least=0)
    lr_schedule: str = _training("constant", "after warm-up; cosine falls to zero", ("constant", "cosine"))
    ema_half_life: float = _training(500.0, "updates after which old weights count half in the average", above=0)
    clip: float = _training(0.0, "largest norm of the whole gradient; 0 = do not clip", least=0)
    precision: str = _training("fp32", "of activations and matrix products", ("fp32", "tf32", "bf16"))
    steps: int = _training(10000, "updates; 0 = as many as fit into minutes", least=0)
    minutes: float = _training(0.0, "stop after this long; 0 = no limit", least=0)
    seed: int = _training(0, "of weights, data order and noise", least=0, below=2**63)
    device: str = _training("auto", "auto takes the GPU where there is one", ("auto", "cpu", "cuda"))
    capture: bool = _training(True, "GPU: replay a step of training or sampling as one CUDA graph")
    max_bad_steps: int = _training(10, "stop after this many updates in a row with a loss that is not finite", least=1)
    log_every: int = _training(50, "updates between two lines of metrics.jsonl", least=1)
    sample_every: int = _training(1000, "updates between two sample grids; 0 = none", least=0)
    save_every: int = _training(1000, "updates between two checkpoints; 0 = only at the end", least=0)
    keep: int = _training(3, "newest checkpoints to keep; 0 = all", least=0)

    # Sampling
    sampler: str = _sampling("heun", "how noise becomes an image", ("heun", "euler", "ddim", "ancestral"))
    sample_steps: int = _sampling(18, "noise levels a sample passes through", least=1, most=10**6)
    sample_spacing: str = _sampling("even", "DDPM: timesteps that ddim and ancestral visit; ddim = by a whole stride",
                                    ("even", "ddim"))
    guidance: float = _sampling(1.0, "classifier-free guidance; 1 = the plain conditional model", least=0)
    samples: int = _sampling(64, "images in a grid", least=1, most=10**6)
    eta: float = _sampling(0.0, "DDIM: share of the ancestral noise", least=0, most=1)
    S_churn: float = _sampling(0.0, "heun and euler: noise added anew, over all steps", least=0)
    S_min: float = _sampling(0.0, "lowest noise level that is churned", least=0)
    S_max: float = _sampling(1e9, "highest noise level that is churned", least=0)
    S_noise: float = _sampling(1.0, "scale of the noise that churning adds", least=0)

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value = _checked(option, getattr(self, option.name))
            object.__setattr__(self, option.name, value)
        _check_model(self)
        _check_run(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], base: Config | None = None) -> Config:
        """`base` (or the defaults) with `values` in place of its own. Raises CudiffError for an unknown key."""
        return (base or cls()).replace(**values)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name; JSON and TOML can hold every value."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed, checked again. Raises CudiffError for an unknown field."""
        for name in changes:
            if name not in _types():
                raise CudiffError(f"unknown option '{name[:80]}': {_nearest(name[:80], _types())}")
        return dataclasses.replace(self, **changes)

    def for_data(self, shape: tuple[int, ...], num_classes: int) -> Config:
        """The configuration with the data's size and channels where its own are 0, checked against the data.

        shape: (N, H, W, C) of the images. num_classes: how many classes their labels have, 0 without labels.
        """
        height, width, channels = shape[1:]
        if height != width:
            raise CudiffError(f"the images are {height}x{width}, not square: crop them with image_size")
        if (self.image_size or height, self.channels or channels) != (height, channels):
            raise CudiffError(
                f"the images have {height} pixels a side and {channels} channels, "
                f"but image_size is {self.image_size} and channels {self.channels}: load them with these"
            )
        classes = self.num_classes
        if classes < 0:
            classes = 0 if self.model == "cs179" else num_classes
        if classes and num_classes == 0:
            raise CudiffError("the data has no labels: sort the images into sub-folders, or set num_classes to 0")
        if classes and num_classes > classes:
            raise CudiffError(f"the data has {num_classes} classes: num_classes {classes} is too small")
        return self.replace(image_size=height, channels=channels, num_classes=classes)


def load_toml(path: str | os.PathLike, base: Config | None = None) -> Config:
    """The configuration in a TOML file; options it leaves out are those of its `preset`, else of `base`, else defaults.

    Raises CudiffError where the file is missing or not TOML, and for whatever `Config` does not take.
    """
    values = _read_toml(path)
    return Config.from_dict(values, _preset(values.pop("preset")) if "preset" in values else base)


def add_arguments(parser: argparse.ArgumentParser, sections: Collection[str] = SECTIONS) -> None:
    """Add --preset, --config and a flag for every field of `sections`; `from_arguments` reads them."""
    parser.add_argument("--preset", metavar="NAME", help=f"start from {', '.join(PRESETS)}")
    parser.add_argument("--config", type=os.path.expanduser, metavar="FILE",
                        help="start from a TOML file; its keys are the flags' names")
    groups = {section: parser.add_argument_group(section) for section in sections}
    for option in dataclasses.fields(Config):
        if option.metadata["section"] not in groups:
            continue
        group = groups[option.metadata["section"]]
        kind = _types()[option.name]
        text = f"{option.metadata['help']} (default {_as_text(option.default)})"
        settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
        if kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        elif option.metadata["choices"]:
            settings |= {"choices": option.metadata["choices"], "metavar": "|".join(option.metadata["choices"])}
        else:
            settings |= {"type": partial(_parse, option.name), "metavar": _METAVARS[kind]}
        group.add_argument(f"--{option.name.replace('_', '-')}", **settings)


def from_arguments(arguments: argparse.Namespace, base: Config | None = None) -> Config:
    """The configuration of a command line: flags over the TOML file over the preset.

    Without a preset `base` is it, and without that the one named like the data set, so that `--data mnist` suffices.
    """
    given = vars(arguments)
    values = _read_toml(given["config"]) if given.get("config") else {}
    name = given.get("preset") or values.get("preset")
    values = {key: value for key, value in values.items() if key != "preset"}
    values |= {key: value for key, value in given.items() if key in _types()}
    if name is not None:
        base = _preset(name)
    elif base is None:
        base = PRESETS.get(str(values.get("data", "digits")), Config())
    return base.replace(**values)


def as_flags(values: Mapping[str, Any]) -> str:
    """Options as they are given on a command line."""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {_as_text(value) if value != () else repr('')}")
    return " ".join(words)


@cache
def _types() -> dict[str, Any]:
    """The type of every field, by name."""
    return get_type_hints(Config)


_LONGEST_LIST = 16
_LONGEST_FILE, _LONGEST_LINE = 2**16, 1000  # bytes; one line of 16 kB can keep tomllib busy for a second, of 64 for 18
_METAVARS = {int: "N", float: "X", str: "TEXT", tuple[int, ...]: "N,N,..", tuple[float, ...]: "X,X,.."}
_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _checked(option: dataclasses.Field, value: Any) -> Any:
    """`value` as the field's type. Raises CudiffError where it is of another type or out of range."""
    kind, rules = _types()[option.name], option.metadata
    if get_origin(kind) is tuple:
        of = get_args(kind)[0]
        if not isinstance(value, list | tuple):
            raise CudiffError(f"{option.name} must be a list, each entry {_NOUNS[of]}, not {_shown(value)}")
        if len(value) > _LONGEST_LIST:
            raise CudiffError(f"{option.name} has {len(value):,} entries: give {_LONGEST_LIST} at most")
        return tuple(_in_range(option.name, rules, _typed(option.name, of, entry)) for entry in value)
    value = _typed(option.name, kind, value)
    if rules["choices"] and value not in rules["choices"]:
        raise CudiffError(f"unknown {option.name} '{value[:80]}': use {' or '.join(rules['choices'])}")
    return value if kind in (str, bool) else _in_range(option.name, rules, value)


def _typed(name: str, kind: type, value: Any) -> Any:
    wanted: Any = (int, float) if kind is float else kind
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise CudiffError(f"{name} must be {_NOUNS[kind]}, not {_shown(value)}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise CudiffError(f"{name} must be {_NOUNS[kind]} between -2^63 and 2^63, and is beyond")
    if kind is float and not math.isfinite(value):
        raise CudiffError(f"{name} must be a finite number, not {value}")
    return kind(value)


def _shown(value: Any) -> str:
    """A value that may be large, or nested without end, in a few words."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) < 2**63):
        return repr(value[:80] if isinstance(value, str) else value)
    return f"a {type(value).__name__}"


def _in_range(name: str, rules: Mapping[str, Any], value: float) -> float:
    least, most, above, below = (rules[key] for key in ("least", "most", "above", "below"))
    if least is not None and value < least:
        raise CudiffError(f"{name} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise CudiffError(f"{name} must be at most {most}, not {value}")
    if above is not None and value <= above:
        raise CudiffError(f"{name} must be above {above}, not {value}")
    if below is not None and value >= below:
        raise CudiffError(f"{name} must be below {below}, not {value}")
    return value


def _check_model(config: Config) -> None:
    """Raise CudiffError where no U-Net of these sizes can be built, saying which can."""
    if config.channels == 2:
        raise CudiffError("channels must be 1 (gray) or 3 (RGB), not 2")
    if not config.channel_mult:
        raise CudiffError("channel_mult is empty: give one number a level, such as 1,2,2")
    halvings = len(config.channel_mult) - (config.model == "unet")  # cs179 has its bottleneck below the last level
    if config.image_size % 2**halvings:
        step = 2**halvings
        low = config.image_size // step * step
        raise CudiffError(
            f"image size {config.image_size} does not halve {halvings} times: use a multiple of {step}, "
            f"such as {f'{low} or ' if low else ''}{low + step}, or fewer entries in channel_mult"
        )
    if config.model == "cs179":
        if config.num_classes > 0 or config.learn_sigma:
            raise CudiffError("model cs179 has no classes and learns no variance: drop num_classes and learn_sigma")
        return
    sizes = [config.image_size >> level for level in range(halvings + 1)]
    for size in config.attention_resolutions if config.image_size else ():
        if size not in sizes:
            raise CudiffError(
                f"attention_resolutions: no level has {size} pixels; choose from {', '.join(map(str, sizes))}"
            )
    attended = {config.channel_mult[-1]}  # the middle block always attends
    attended |= {
        mult for mult, size in zip(config.channel_mult, sizes, strict=True) if size in config.attention_resolutions
    }
    name = "num_head_channels" if config.num_head_channels else "num_heads"
    for mult in sorted(attended):
        channels = mult * config.model_channels
        if channels % getattr(config, name):
            divisors = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if channels % n == 0]
            raise CudiffError(
                f"{name} {getattr(config, name)} does not divide the {channels} channels where attention is used: "
                f"use {', '.join(map(str, divisors))}"
            )


def _check_run(config: Config) -> None:
    """Raise CudiffError where training or sampling with these options cannot mean anything."""
    if not config.data:
        raise CudiffError("data is empty: give digits, mnist, a folder of images, an .npz or a .bin")
    if len(config.betas) != 2:
        raise CudiffError(f"betas must be two numbers such as 0.9,0.999, not {len(config.betas)}")
    if config.learn_sigma and config.diffusion != "ddpm":
        raise CudiffError("learn_sigma needs diffusion = ddpm: EDM has no variance to learn")
    if (config.data_mean, config.data_std) != (0, 1) and config.diffusion != "edm":
        raise CudiffError("data_mean and data_std need diffusion = edm: DDPM takes pixels in [-1, 1]")
    if config.sigma_min >= config.sigma_max:
        raise CudiffError(f"sigma_min {config.sigma_min} must be below sigma_max {config.sigma_max}")
    if config.steps == 0 and config.minutes == 0:
        raise CudiffError("training would never end: give steps or minutes")
    if config.lr_schedule == "cosine" and config.steps == 0:
        raise CudiffError("the cosine schedule needs an end: give steps, or lr_schedule = constant")


def _parse(name: str, text: str) -> Any:
    """The value of a flag. Raises argparse's error, which names the flag, where `text` is none of its type."""
    kind = _types()[name]
    try:
        if get_origin(kind) is tuple:
            return tuple(get_args(kind)[0](part) for part in text.split(",") if part.strip())
        return kind(text)
    except ValueError:
        wanted = "numbers such as 1,2,3,4" if get_origin(kind) is tuple else _NOUNS[kind]
        raise argparse.ArgumentTypeError(f"'{text}' is not {wanted}") from None


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else "see cudiff train --help"


def _preset(name: Any) -> Config:
    if not isinstance(name, str) or name not in PRESETS:
        shown = name[:80] if isinstance(name, str) else _shown(name)
        raise CudiffError(f"unknown preset '{shown}': use {' or '.join(PRESETS)}")
    return PRESETS[name]


def _read_toml(path: str | os.PathLike) -> dict[str, Any]:
    with opened(path) as file:
        content = file.read(_LONGEST_FILE + 1)
    if len(content) > _LONGEST_FILE:
        raise CudiffError(f"{path} is over {_LONGEST_FILE >> 10} KiB: a configuration is some lines 'name = value'")
    if max(map(len, content.splitlines()), default=0) > _LONGEST_LINE:
        raise CudiffError(f"{path} has a line of over {_LONGEST_LINE} characters: write one 'name = value' a line")
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise CudiffError(f"{path} is nested too deeply: write one 'name = value' a line") from None
    except ValueError as error:
        raise CudiffError(f"{path} is not TOML ({str(error)[:200]}): write one 'name = value' a line") from None
    for name, value in values.items():
        if isinstance(value, dict):
            raise CudiffError(f"{path}: options have no sections; remove the line [{name[:80]}]")
    return values


_MNIST = Config(
    data="mnist", image_size=28, channels=1, model_channels=64, channel_mult=(1, 2, 2), num_res_blocks=2,
    attention_resolutions=(14, 7), num_head_channels=32, num_classes=10, batch_size=256, lr=5e-4, warmup=200,
    lr_schedule="cosine", clip=1.0, precision="bf16", steps=10000, sampler="euler", guidance=1.1,
)

_GUIDED64 = Config(
    data="images", image_size=64, channels=3, model_channels=128, channel_mult=(1, 2, 3, 4), num_res_blocks=2,
    attention_resolutions=(16, 8), num_heads=4, use_scale_shift_norm=True, diffusion="ddpm", batch_size=32, lr=1e-4,
    ema_half_life=6931.0, precision="bf16", steps=500000, sampler="ancestral", sample_steps=250,
)

PRESETS = {
    # A model that a laptop's CPU trains in two minutes. A norm over one channel would take out a class embedding added
    # before it: hence two a group, and use_scale_shift_norm (with one a group 94 % of samples as asked, not 83).
    # P_mean: the shape of a digit is decided at more noise than the details of a photo (97 % of them, not 93).
    "digits": Config(
        data="digits", image_size=16, channels=1, model_channels=32, channel_mult=(1, 2), num_res_blocks=1,
        num_head_channels=32, use_scale_shift_norm=True, norm_group_channels=2, num_classes=10, P_mean=-0.4,
        batch_size=32, lr=2e-3, warmup=50, lr_schedule="cosine", ema_half_life=50.0, clip=1.0, steps=500,
        sample_every=250, save_every=250, sampler="euler", sample_steps=10, guidance=3.0,
    ),
    "mnist": _MNIST,
    "mnist-ddpm": _MNIST.replace(
        diffusion="ddpm", noise_schedule="cosine", num_classes=0, sampler="ancestral", sample_steps=250
    ),
    # What the CS 179 project trained (github.com/Austinwang22/cs179-diffusion); its published weights fit. It shifts
    # and scales pixels in [0, 1] by MNIST's mean 0.1307 and deviation 0.3081: in [-1, 1] twice that, the mean less 1.
    "cs179": Config(
        data="mnist", image_size=28, channels=1, model="cs179", channel_mult=(1, 2), num_classes=0, data_mean=-0.7386,
        data_std=0.6162, batch_size=256, lr=1e-3, optimizer="adam", sampler="euler",
    ),
    # Exactly unet.cu's U-Net (github.com/clu0/unet.cu). Without dropout it learns a few hundred photos by heart.
    "elephants": Config(
        data="elephants", image_size=64, channels=3, validation=20, flip=True, model_channels=64,
        channel_mult=(1, 2, 3, 4), num_res_blocks=2, attention_resolutions=(16, 8), num_head_channels=32,
        conv_resample=False, use_new_attention_order=True, max_period=1000.0, zero_init=False, dropout=0.2,
        batch_size=32, lr=2e-4, warmup=200, lr_schedule="cosine", clip=1.0, precision="bf16", steps=12000,
    ),
    # The defaults of guided-diffusion's scripts (github.com/openai/guided-diffusion).
    "guided64": _GUIDED64,
    # The model whose weights guided-diffusion publishes as 64x64_diffusion.pt.
    "imagenet64": _GUIDED64.replace(
        model_channels=192, num_res_blocks=3, attention_resolutions=(32, 16, 8), num_head_channels=64, dropout=0.1,
        resblock_updown=True, num_classes=1000, learn_sigma=True, use_new_attention_order=True,
        noise_schedule="cosine",
    ),
}
"""Configurations by name, for `--preset`."""
