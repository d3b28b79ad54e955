"""A net together with the diffusion it was trained for: build one from a configuration, load one, sample it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.backend import default_device, is_float, out_of_memory, out_of_memory_errors
from cudiff.checkpoint import check_parts, part, prefixed, save_checkpoint
from cudiff.config import Config, as_flags
from cudiff.convert import from_torch, other_options, read_weights, to_torch, write_weights
from cudiff.diffusion import Guided, ImageNoise
from cudiff.errors import CudiffError
from cudiff.folder import read_checkpoint
from cudiff.models import build
from cudiff.nn import GroupNorm, Module
from cudiff.plot import to_uint8
from cudiff.registry import MODELS, OBJECTIVES, SAMPLERS
from cudiff.tensor import Tensor
from cudiff.values import real, whole

Progress = Callable[[int, int], None]


class Pipeline:
    """A net and the configuration that says how it was trained; `load` makes one from a checkpoint.

    Attributes: config, net (on its device, in its precision), objective (see `cudiff.registry.Objective`), which is
    made anew of each `config` that is set.
    """

    def __init__(self, config: Config, net: Module):
        self.config = config
        self.net = net

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        self._config = config.replace(num_classes=max(0, config.num_classes))  # none where no data has said
        self.objective = OBJECTIVES[config.diffusion].build(self.config, MODELS[config.model].c_noise_scale)

    @property
    def device(self) -> str:
        return self.net.parameters()[0].device

    def denoiser(self) -> Any:
        """D(x, sigma, labels) for every sampler of `cudiff.diffusion`."""
        return self.objective.denoiser(self.net)

    def loss(self, label_dropout: float = 0.0) -> Callable[..., Tensor]:
        """loss(net, images, labels, generator): what training minimises, with a share of the labels dropped."""
        return self.objective.loss(label_dropout)

    def sample(
        self,
        n: int = 64,
        seed: int = 0,
        classes: int | Sequence[int] | np.ndarray | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        sampler: str | None = None,
        batch_size: int = 64,
        progress: Progress | None = None,
        frames: list[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Images, uint8 (n, H, W, C). Image i depends on (seed, i) and its class alone, not on the batch.

        Parameters
        ----------
        classes : one class for all, one for each image, or None: class i mod num_classes for image i.
            −1 is no class. Unconditional models take None.
        steps, guidance, sampler : the configuration's where None. guidance: 0 or more. sampler: heun, euler, ddim,
            ancestral or one of `cudiff.register_sampler`.
        batch_size : images denoised at once; smaller needs less memory.
        progress : called with (images done, n) after each batch.
        frames : a list that receives the first batch after each step, uint8, for an animation.

        Raises CudiffError for classes the model does not have, for guidance where it has none, for a number of steps
        its schedule does not have, for numbers out of range (seed is a whole one below 2^64), and for a sampler that
        returns something else than images, by name.
        """
        sampler, guidance, sigmas = self.checked(n, seed, steps, guidance, sampler, batch_size)
        labels = self.labels(n, classes)
        denoiser = Guided(self.denoiser(), guidance) if labels is not None else self.denoiser()
        run = self._sampler(sampler, denoiser, captured=self.config.capture)
        images = []

        def batch(start: int, count: int, frames: list[np.ndarray] | None = None) -> np.ndarray:
            noise = ImageNoise((count, *self.shape), seed, start, self.device)
            chosen = None if labels is None else Tensor(labels[start : start + count], device=self.device)
            seen: list[np.ndarray] = []

            def record(step: int, x: Tensor, denoised: Tensor) -> None:
                seen.append(self._bytes(sampler, denoised, count))

            with np.errstate(all="ignore"):  # `_bytes` says what is not finite
                callback = None if frames is None else record
                drawn = run(noise.start(sigmas[0]), sigmas, chosen, noise=noise, callback=callback)
            if frames is not None and not seen:
                raise CudiffError(f"sampler {sampler} shows no frames: call its callback(step, x, denoised) each step")
            if frames is not None:
                frames += [to_uint8(noise.start(1.0)), *seen]
            return self._bytes(sampler, drawn, count)

        modes = [(module, module.training) for _, module in self.net.modules()]
        self.net.eval()
        try:
            for start in range(0, n, batch_size):
                count = min(batch_size, n - start)
                try:
                    images.append(batch(start, count, None if start else frames))
                except out_of_memory_errors():
                    break
                if progress is not None:
                    progress(start + count, n)
            else:
                return np.concatenate(images)
            sigmas, run = sigmas[-2:], self._sampler(sampler, denoiser, captured=False)  # one step shows what fits
            raise out_of_memory(batch_size, lambda size: batch(0, min(n, size)), self.device)
        finally:
            for module, training in modes:  # a part may be kept in evaluation mode
                module.training = training

    def checked(
        self, n: int, seed: int, steps: int | None, guidance: float | None, sampler: str | None, batch_size: int
    ) -> tuple[str, float, np.ndarray]:
        """The sampler, the guidance and the noise levels that `sample` uses; raises CudiffError as `sample` does."""
        config = self.config
        steps = config.sample_steps if steps is None else steps
        sampler = config.sampler if sampler is None else sampler
        if guidance not in (None, 1) and not config.num_classes:
            raise CudiffError("this model has no classes to guide to: leave guidance out")
        guidance = config.guidance if guidance is None else guidance
        real("guidance", guidance, 0)
        whole("seed", seed, 0, 2**64 - 1)
        for name, value in (("n", n), ("steps", steps), ("batch_size", batch_size)):
            whole(name, value)
        return sampler, guidance, self.sigmas(sampler, steps)

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint for `load`, in place of what is at `path`: its EMA too is made of this net's weights.

        Training can start from it, but not resume: it holds no optimiser. Raises CudiffError where the system refuses,
        and, with what is at `path` as it was, for weights that are not finite or that `load` would not take: those of
        another net than the configuration's.
        """
        state = self.net.state_dict()
        for name, array in state.items():
            if not np.isfinite(array).all():
                raise CudiffError(f"{name} is not finite, {path} is not written: use weights of an earlier step")
        tensors = prefixed("model", state) | prefixed("ema", state)
        check_parts(path, tensors, self.config)
        save_checkpoint(path, self.config, tensors, {"step": 0})

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of an image."""
        return self.config.image_size, self.config.image_size, self.config.channels

    def sigmas(self, sampler: str, steps: int) -> np.ndarray:
        """The noise levels that a sampler passes through, float64 (steps + 1,), from the highest to 0."""
        chosen = self.config.replace(sampler=sampler).sampler  # says what there is where there is none of that name
        return self.objective.sigmas(steps, SAMPLERS[chosen].discrete)

    def _sampler(self, name: str, denoiser: Any, captured: bool) -> Callable[..., Any]:
        sampler = SAMPLERS[name].build(denoiser, self.config.replace(sampler=name), captured)
        if not callable(sampler):
            raise CudiffError(
                f"sampler {name} was built as a {type(sampler).__name__}: return a function, "
                "sampler(x, sigmas, labels, noise=, callback=)"
            )
        return sampler

    def _bytes(self, sampler: str, images: Any, n: int) -> np.ndarray:
        """What a sampler returned, as uint8 (n, H, W, C). Raises CudiffError, naming it, where these are no images."""
        wanted, dtype = (n, *self.shape), getattr(images, "dtype", None)
        if getattr(images, "shape", None) != wanted or not is_float(dtype):
            what = f"a {type(images).__name__}" if dtype is None else f"{dtype} of shape {images.shape}"
            raise CudiffError(f"sampler {sampler} returned {what}: return a Tensor of floats of shape {wanted}")
        try:
            return to_uint8(images)
        except CudiffError as error:
            raise CudiffError(f"sampler {sampler}: {error}") from None

    def labels(self, n: int, classes: int | Sequence[int] | np.ndarray | None = None) -> np.ndarray | None:
        """The class of each of n images, int32 (n,), as `sample` takes them; None for an unconditional model."""
        known = self.config.num_classes
        if not known:
            if classes is not None:
                raise CudiffError("this model has no classes: leave classes out")
            return None
        labels = np.arange(n) % known if classes is None else np.asarray(classes)
        if labels.ndim > 1 or (labels.size and not np.issubdtype(labels.dtype, np.integer)):
            raise CudiffError(
                f"classes are {labels.dtype} of shape {labels.shape}: give one whole number, or one for each image"
            )
        if labels.ndim == 1 and len(labels) != n:
            raise CudiffError(f"{len(labels)} classes were given for {n} images: give one class, or one for each image")
        labels = np.broadcast_to(labels, n)
        strangers = labels[(labels < -1) | (labels >= known)]
        if strangers.size:
            raise CudiffError(f"the model has classes 0 to {known - 1}, and -1 for none; {strangers[0]} is not one")
        return np.ascontiguousarray(labels, np.int32)


def load(
    path: str | os.PathLike, device: str | None = None, weights: str = "ema", precision: str | None = None,
    trainable: bool = False, sampler: str | None = None,
) -> Pipeline:
    """The model in a checkpoint, or in the newest of a run's folder, ready to sample. Nothing else is needed.

    weights: "ema", the moving average, or "model", the raw weights. device: the GPU where there is one.
    precision: that of training on the GPU, fp32 on the CPU. trainable: with gradients and in training mode, for an
    optimiser to go on with; otherwise the net takes only the memory that sampling needs. sampler: in place of the
    checkpoint's, which then need not be registered.
    Raises CudiffError where the file is missing, damaged, of another version or lacks tensors.
    """
    if weights not in ("ema", "model"):
        raise CudiffError(f"unknown weights '{weights}': use ema or model")
    _, checkpoint = read_checkpoint(path, parts=(weights,), sampler=sampler)
    config = checkpoint.config
    device = default_device() if device in (None, "auto") else device
    net = build(config)
    net.load_state_dict(part(checkpoint.tensors, weights))
    net.precision = precision or (config.precision if device == "cuda" else "fp32")
    net.train(trainable).flatten(device, trainable=trainable)
    return Pipeline(config, net)


def import_torch(
    source: str | os.PathLike, target: str | os.PathLike, config: Config, key: str | None = None
) -> Config:
    """Make a checkpoint of weights in PyTorch's layout and guided-diffusion's, unet.cu's or CS 179's names.

    config: the model they belong to; where the names tell the model, theirs is used. Its norms are grouped as in
    guided-diffusion. key: which part of a .pt that holds several. The weights serve as EMA too. Returns the
    configuration in the checkpoint. Raises CudiffError where the file cannot be read, its weights do not fit the model
    (naming the options that would), or `target` exists.
    """
    if os.path.exists(target):
        raise CudiffError(f"{target} exists already: choose another name")
    weights = read_weights(source, key)
    other = {} if weights.config else other_options(weights.state, config)
    if other:
        flags = ("" if config.image_size else "--image-size N ") + as_flags(other)
        raise CudiffError(f"{source} holds the weights of another model than the options say: give {flags}")
    config = weights.config or config
    if "norm_group_channels" in config.options:
        config = config.replace(norm_group_channels=1)
    net = build(config)
    try:
        net.load_state_dict(from_torch(weights.state, net.layouts()))
    except CudiffError as error:
        raise CudiffError(f"{error}: describe the weights' model by --preset, --config or options") from None
    Pipeline(config, net).save(target)
    return config


def export_torch(source: str | os.PathLike, target: str | os.PathLike, weights: str = "ema") -> None:
    """Write a checkpoint's weights as a .safetensors file with PyTorch's layout and guided-diffusion's names.

    Raises CudiffError where the checkpoint cannot be read or `target` exists or is named as another kind of file, and
    where norms over 32 channels are grouped otherwise than guided-diffusion's: its images would be others.
    """
    if Path(target).suffix.lower() != ".safetensors":
        raise CudiffError(f"cannot write {target}: name it .safetensors, and safetensors.torch.load_file reads it")
    if os.path.exists(target):
        raise CudiffError(f"{target} exists already: choose another name")
    net = load(source, "cpu", weights, sampler=Config().sampler).net  # any: its own need not be registered for this
    if any(isinstance(m, GroupNorm) and m.weight.size == 32 and m.num_groups < 32 for _, m in net.modules()):
        raise CudiffError(
            f"{source} has norms over 32 channels in groups of two or more, which guided-diffusion takes one by "
            f"one: train with --norm-group-channels 1, or with --model-channels 64, for weights that move"
        )
    write_weights(target, to_torch(net.state_dict(), net.layouts()))
