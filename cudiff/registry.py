"""What a configuration chooses by name: models, objectives and samplers, each with its options. A user's own too.

A file that defines one registers it; nothing else has to know of it. A checkpoint holds names and values of options,
never code: where it is loaded, what it names has to be registered.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from cudiff.errors import CudiffError
from cudiff.options import Option

T = TypeVar("T", bound=Callable[..., Any])


class Settings(Protocol):
    """What a run is asked, as attributes: a `cudiff.config.Config`, which lies above."""

    def __getattr__(self, name: str) -> Any: ...


def nothing_to_check(config: Settings) -> None:
    """For options that need no check beyond their own bounds."""


@dataclass(frozen=True)
class Entry:
    """name: in configurations. help: a few words. build: see below. options: by name; one name has one type everywhere.

    check(config) raises CudiffError where the options contradict each other; config.image_size and config.channels are
    0 as long as no data has said them.
    """

    name: str
    help: str
    build: Callable[..., Any]
    options: Mapping[str, Option] = field(default_factory=dict)
    check: Callable[[Settings], None] = nothing_to_check

    @property
    def of_library(self) -> bool:
        """Whether cudiff has it, not a user."""
        return getattr(self.build, "__module__", "").startswith("cudiff.")


@dataclass(frozen=True)
class Model(Entry):
    """build(config) -> Module, called as net(x, t, labels): x (N, H, W, channels) float32, t (N,) float32, labels int32
    (N,), -1 for none, or None -> (N, H, W, channels) float32, twice the channels where it learns the variance.

    c_noise_scale: EDM hands it t = c_noise_scale * log(sigma). classes, learns_variance: whether its builder minds
    config.num_classes and config.learn_sigma.
    """

    c_noise_scale: float = 0.25
    classes: bool = True
    learns_variance: bool = False


@dataclass(frozen=True)
class Objective(Entry):
    """build(config, c_noise_scale) -> what is learned and how it is turned into images, an object with

    loss(label_dropout) -> loss(net, images, labels, generator) -> scalar Tensor,
    denoiser(net) -> D(x, sigma, labels), the image in x = image + sigma * noise,
    sigmas(steps, discrete) -> float64 (steps + 1,), decreasing to 0: the levels that a sampler visits.

    learns_variance: whether config.learn_sigma means something to it.
    """

    learns_variance: bool = False


@dataclass(frozen=True)
class SamplerEntry(Entry):
    """build(denoiser, config, captured) -> sampler(x, sigmas, labels, noise=, callback=) -> images, such as a
    `cudiff.diffusion.Sampler`; captured: its steps may be recorded as CUDA graphs.

    discrete: it visits an objective's own timesteps, where that has some, instead of levels in between.
    """

    discrete: bool = False


MODELS: dict[str, Model] = {}
OBJECTIVES: dict[str, Objective] = {}
SAMPLERS: dict[str, SamplerEntry] = {}
TABLES: dict[str, Mapping[str, Entry]] = {"model": MODELS, "diffusion": OBJECTIVES, "sampler": SAMPLERS}
"""Each table by the name of the option that chooses from it."""


def register_model(name: str, help: str, **settings: Any) -> Callable[[T], T]:
    """Decorate what builds a model, `build(config)`: a function, or a Module whose constructor takes a Config.

    settings: the other fields of `Model`. What has the same name in the same module takes the place of the one before,
    with a warning: a notebook's cell may run again. Raises CudiffError for a name that another has taken, and for an
    option whose name has another type elsewhere or is that of a configuration's own field or method.
    """
    return partial(_register, "model", MODELS, partial(Model, name, help, **settings))


def register_objective(name: str, help: str, **settings: Any) -> Callable[[T], T]:
    """Decorate what builds an objective, `build(config, c_noise_scale)`. settings, errors: see `Objective`,
    `register_model`."""
    return partial(_register, "diffusion", OBJECTIVES, partial(Objective, name, help, **settings))


def register_sampler(name: str, help: str, **settings: Any) -> Callable[[T], T]:
    """Decorate what builds a sampler, `build(denoiser, config, captured)`. settings, errors: see `SamplerEntry`,
    `register_model`."""
    return partial(_register, "sampler", SAMPLERS, partial(SamplerEntry, name, help, **settings))


_reserved: set[str] = set()


def reserve(names: Iterable[str]) -> None:
    """Have no option called like these, as the fields and methods of a configuration and the flags of commands are.

    Raises CudiffError where one that is registered already is."""
    _reserved.update(names)
    for kind, table in TABLES.items():
        for entry in table.values():
            _check_not_reserved(f"{kind} '{entry.name}'", entry.options)


def _check_not_reserved(what: str, options: Iterable[str]) -> None:
    for name in _reserved.intersection(options):
        raise CudiffError(f"{what}: every run has a '{name}' already: choose another name for the option")


def options_named(name: str) -> Iterator[tuple[str, Entry, Option]]:
    """(table, entry, option) for every entry that has an option of this name."""
    for kind, table in TABLES.items():
        for entry in table.values():
            if name in entry.options:
                yield kind, entry, entry.options[name]


def _register(kind: str, table: dict[str, Any], make: Callable[..., Entry], build: T) -> T:
    entry = make(build)
    what = f"{kind} '{entry.name}'"
    if not isinstance(entry.name, str) or not re.fullmatch(r"[A-Za-z][\w.-]{0,79}", entry.name):
        raise CudiffError(f"{what}: begin its name with a letter; letters, digits, '_', '-' and '.' may follow")
    again = entry.name in table
    if again and not _same(table[entry.name].build, build):
        raise CudiffError(f"{what} is registered already: choose another name")
    if not isinstance(entry.help, str):
        raise CudiffError(f"{what}: its help is a few words of text, not {entry.help!r}")
    for name in entry.options:
        option = entry.options[name] if isinstance(entry.options, Mapping) else None
        if not isinstance(name, str) or not name.isidentifier() or not isinstance(option, Option):
            raise CudiffError(f"{what}: give its options as {{'a_name': cudiff.Option(default, help)}}, not '{name}'")
        option.checked(name, option.default)
        for where, other, known in options_named(name):
            if known.kind != option.kind and (where, other.name) != (kind, entry.name):
                raise CudiffError(f"{what}: its option '{name}' has another type in {other.name}: choose another name")
    _check_not_reserved(what, entry.options)
    if again:  # a lambda, or what a factory makes, may be another of the same name
        warnings.warn(f"{what} was registered before: this one takes its place", stacklevel=2)
    table[entry.name] = entry
    return build


def _same(one: Any, other: Any) -> bool:
    """Whether these have one name in one module, as where a notebook's cell runs again."""
    return all(getattr(one, name, one) == getattr(other, name, other) for name in ("__module__", "__qualname__"))
