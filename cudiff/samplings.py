"""A net, what it was trained for, and the ways to sample it that are kept, with their graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cudiff.backend import free_memory, out_of_memory_errors
from cudiff.config import Config
from cudiff.cuda.graph_cache import GraphCache
from cudiff.diffusion.denoiser import Checked
from cudiff.diffusion.samplers import decreasing
from cudiff.diffusion.sampling import Guidance, Sampling
from cudiff.errors import CudiffError
from cudiff.nn import Module
from cudiff.nn.parameter import Parameter, structure
from cudiff.registry import MODELS, OBJECTIVES, SAMPLERS

INPUTS = ("sigma_min", "sigma_max", "rho", "sample_steps", "guidance")
"""Options of which the library's recordings hold nothing: they take noise levels and guidance as inputs."""

T = TypeVar("T")


class Way(NamedTuple):
    """How to sample: by which sampler, with which guidance, names of arrays that are given, a denoiser of one's own."""

    sampler: str
    guidance: Guidance | None
    given: tuple[str, ...]
    denoiser: Any


class Samplings:
    """A net, its configuration, its objective, and at most 8 ways to sample it, with the graphs that were recorded.

    Another net, objective or configuration drops them. Raises CudiffError for what is none, and for a configuration
    without sizes.
    """

    def __init__(self, config: Config, net: Module):
        _check(config, net)
        self._graphs = GraphCache()
        self._net = net
        self._found: tuple[Module, int, list[Module], Parameter] | None = None
        self._set_config(config)

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        _check(config, self._net)
        with self._graphs.lock:
            before = self._config
            self._set_config(config)
            if not OBJECTIVES[config.diffusion].of_library or _built_from(before) != _built_from(self._config):
                self.free_graphs()

    def _set_config(self, config: Config) -> None:
        self._config = config.replace(num_classes=max(0, config.num_classes))  # none where no data has said
        self._objective = OBJECTIVES[config.diffusion].build(self._config, MODELS[config.model].c_noise_scale)

    @property
    def objective(self) -> Any:
        return self._objective

    @objective.setter
    def objective(self, objective: Any) -> None:
        with self._graphs.lock:
            self._objective = objective
            self.free_graphs()

    @property
    def net(self) -> Module:
        return self._net

    @net.setter
    def net(self, net: Module) -> None:
        _check(self._config, net)
        with self._graphs.lock:
            self._net, self._found = net, None
            self.free_graphs()

    def free_graphs(self) -> None:
        """Give back the GPU memory of what sampling has recorded: it records anew when it is asked for again."""
        with self._graphs.lock:
            self._graphs.clear()

    @property
    def device(self) -> str:
        return self._parts()[1].device

    def _parts(self) -> tuple[list[Module], Parameter]:
        """All modules of the net and its first parameter, looked up anew where a structure has changed."""
        net, number, found = self._net, structure(), self._found
        if found is None or found[0] is not net or found[1] != number:
            first = next(parameter for _, parameter in net.named_parameters())
            found = self._found = net, number, list(net.modules()), first
        return found[2:]

    def denoiser(self) -> Any:
        """D(x, sigma, labels) for every sampler of `cudiff.diffusion`."""
        return self.objective.denoiser(self.net)

    def sigmas(self, sampler: str, steps: int) -> np.ndarray:
        """The noise levels that a sampler passes through, float64 (steps + 1,), from the highest to 0.

        Raises CudiffError where an objective of one's own gives none that fall.
        """
        if sampler != self.config.sampler:
            self.config.replace(sampler=sampler)  # says what there is where there is none of that name
        return decreasing(self.objective.sigmas(steps, SAMPLERS[sampler].discrete))

    @contextmanager
    def _sampled(self) -> Iterator[None]:
        """This thread alone samples, with the net in evaluation mode."""
        with self._graphs.lock:
            training = [module for module in self._parts()[0] if module.training]  # a part may be kept in evaluation
            for module in training:
                module.training = False
            try:
                yield
            finally:
                for module in training:
                    module.training = True

    def _cache_for(self, way: Way) -> GraphCache:
        """Where samplings are kept: for one call only without graphs, and with a denoiser of one's own, which may
        compute another thing next time."""
        return self._graphs if self.config.capture and way.denoiser is None else GraphCache()

    def _sampling(self, way: Way, count: int, steps: int | None, graphs: GraphCache, captured: bool) -> Sampling:
        """What samples so many images at once in this way, as it was kept or made now: also where the one that is kept
        is in the midst of a call, whose caller between steps samples too.

        steps: of which one graph is made, None where each has its own. captured: whether there are graphs.
        """
        entry, build = SAMPLERS[way.sampler], partial(self._sampler, way.sampler, captured=captured)
        own = None if entry.of_library else self.config  # of the library's, `config` knows what they are built from
        form = None if way.guidance is None else way.guidance.form
        key = entry.build, own, form, *(name in way.given for name in ("other", "mask", "last")), count, steps
        device = self.device if graphs is self._graphs else None

        def make() -> Sampling:
            denoiser = self.denoiser() if way.denoiser is None else Checked(way.denoiser)
            return Sampling(denoiser, build, way.guidance, way.given, device, one_by_one=steps is None)

        kept = graphs.get(key, make)
        return make() if kept.running else kept

    def _sampler(self, name: str, denoiser: Any, captured: bool) -> Callable[..., Any]:
        sampler = SAMPLERS[name].build(denoiser, self.config.replace(sampler=name), captured)
        if not callable(sampler):
            raise CudiffError(
                f"sampler {name} was built as a {type(sampler).__name__}: return a function, "
                "sampler(x, sigmas, labels, noise=, callback=)"
            )
        return sampler

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over, a pickled one too: no graphs, nor what only this process knows."""
        return vars(self) | {"_found": None, "_graphs": GraphCache()}


def _check(config: Any, net: Any) -> None:
    if not isinstance(config, Config) or not isinstance(net, Module):
        raise CudiffError("a Pipeline takes a cudiff.Config and a cudiff.nn.Module, not "
                          f"{type(config).__name__} and {type(net).__name__}")
    if not config.image_size or not config.channels:
        raise CudiffError("a Pipeline's configuration says how large its images are: give image_size and channels")


def _built_from(config: Config) -> dict[str, Any]:
    """What of a configuration a recording may hold."""
    return {name: value for name, value in config.to_dict().items() if name not in INPUTS}


def twice(run: Callable[[], T]) -> T | None:
    """What `run` returns; where memory runs out what it does once graphs are dropped, or None where it fails again."""
    for _ in range(2):
        try:
            return run()
        except out_of_memory_errors():
            pass  # while the exception lives, so does the memory of what failed
        free_memory()
    return None
