"""A net together with the diffusion it was trained for: build one from a configuration, load one, sample it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cudiff.backend import default_device, float32, is_float, out_of_memory
from cudiff.checkpoint import check_parts, load_checkpoint, part, prefixed, save_checkpoint
from cudiff.classes import names_in_words, numbers_of
from cudiff.config import Config, as_flags
from cudiff.convert import (
    check_groups,
    dit_config,
    from_torch,
    is_unet_cu,
    other_options,
    read_weights,
    to_torch,
    write_unet_cu,
    write_weights,
)
from cudiff.cuda.device import precision_on
from cudiff.cuda.graph_cache import GraphCache
from cudiff.diffusion import Guided, ImageNoise, Inversion
from cudiff.diffusion.editing import as_images, as_mask, as_shares
from cudiff.diffusion.sampling import Guidance
from cudiff.distributed import ALONE, Group
from cudiff.errors import CudiffError
from cudiff.folder import read_checkpoint
from cudiff.models import build
from cudiff.plot import to_uint8
from cudiff.samplings import Samplings, Way, twice
from cudiff.stream import Frames, Stream
from cudiff.tensor import Tensor
from cudiff.values import flag, real, whole

Progress = Callable[[int, int], None]
Classes = int | str | Sequence[int | str] | np.ndarray | None


INVARIANT = 64
"""Images that `Pipeline.sample(batch_invariant=True)` denoises at once."""
LARGEST = 10.0
"""Beyond it a picture of floats is one of 0 to 255; what a model makes goes a little beyond 1."""


class Pipeline(Samplings):
    """A net and the configuration that says how it was trained; `load` makes one from a checkpoint.

    Attributes: config, net (on its device, in its precision), objective (see `cudiff.registry.Objective`), which is
    made anew of each `config` that is set; trained_on, its checkpoint's `Dataset.fingerprint`, or None.

    On a GPU `sample` keeps the graphs of the last 8 ways that it was called, with their memory, and launches them again
    for another seed, guidance (but to or from 1), classes, noise levels, strength, pictures. `free_graphs` drops them.
    So do another net, objective or configuration, what a graph cannot follow (see `cudiff.capture`), and memory that
    runs out. Several threads may sample: one at a time.
    """

    trained_on: Any = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Those of the classes from 0 on; none where neither the data nor `config.class_names` has named them."""
        return self.config.class_names

    def loss(self, label_dropout: float = 0.0) -> Callable[..., Tensor]:
        """loss(net, images, labels, generator): what training minimises, with a share of the labels dropped."""
        return self.objective.loss(label_dropout)

    def sample(
        self,
        n: int = 64,
        seed: int = 0,
        classes: Classes = None,
        steps: int | None = None,
        guidance: float | None = None,
        sampler: str | None = None,
        batch_size: int | None = None,
        progress: Progress | None = None,
        frames: list[np.ndarray] | None = None,
        *,
        guidance_interval: tuple[float, float] | None = None,
        guidance_rescale: float = 0.0,
        init: np.ndarray | None = None,
        strength: float | None = None,
        mask: np.ndarray | None = None,
        noise: np.ndarray | None = None,
        denoiser: Any = None,
        other: Classes = None,
        share: float | np.ndarray = 0.5,
        floats: bool = False,
        group: Group = ALONE,
        each_step: Callable[[int], None] | None = None,
        batch_invariant: bool = False,
    ) -> np.ndarray:
        """Images, uint8 (n, H, W, C). Image i depends on (seed, i) and its class alone, but for rounding: in batches of
        another size sums have another order. On an H200 in bf16 pixels differed by up to 13 levels, on the CPU by one.

        Parameters
        ----------
        classes : one class for all, one for each image, or None: class i mod num_classes for image i. A number, or a
            name of `class_names`. −1 is no class. Unconditional models take None.
        steps, guidance, sampler : the configuration's where None. guidance: 0 or more. sampler: a name that `cudiff
            sample --help` lists, or one of `cudiff.register_sampler`.
        batch_size : images denoised at once; smaller needs less memory. By default 64, on a GPU up to 256 small ones.
        progress : called with (images done, n) after each batch.
        frames : a list that receives the first batch after each step, uint8, for an animation.
        guidance_interval, guidance_rescale : noise levels (low, high), those of pixels, and a share, see `Guided`.
        init, strength : images to begin with, uint8 or floats in [-1, 1], (n, H, W, C) or one (H, W, C), and the share
            of the steps, the last ones, that they go through (SDEdit, arXiv 2108.01073): 0 returns them, 1 leaves
            little of them. 0.6 by default, 1 with a mask.
        mask : what of `init` is painted anew, 1, and what is known, 0: (H, W) or (n, H, W). See `Inpainted`.
        noise : standard normal, (n, H, W, C), in place of that of `seed`: of `noise`, `invert` or `slerp`.
        denoiser : a function D(x, sigma, labels) of one's own, in place of the net's (`Pipeline.denoiser`). Without
            a method `with_variance` it has no learned variance, and ancestral sampling takes the small one.
        other, share : second classes, given like `classes`, and how far to go to them, 0 to 1, a number or one for each
            image: see `Between`.
        floats : return float32 in about [-1, 1], neither rounded nor cut. A model of latents always does: float32,
            divided by `config.latent_scale`, as the latents it was trained on; `init` is such latents. It has no
            frames.
        group : processes that all call this, and are dealt whole batches in turn: the same images, which all return.
            See `cudiff.distributed.join`.
        each_step : called with the step's number after each step; what it raises ends the sampling there.
        batch_invariant : the same bits for any n, batch size and number of processes. INVARIANT images are denoised at
            once, whatever `batch_size` is, and those beyond n are dropped: few images take as long as so many.

        Raises CudiffError for classes the model does not have, for guidance where it has none, for a number of steps
        its schedule does not have, for numbers out of range (seed is a whole one below 2^64), for a sampler that
        returns something else than images, by name, and for given arrays of another shape.

        With `init` or `each_step`, and for the batch that fills `frames`, each step is a graph of its own. Those of a
        `denoiser` are not kept.
        """
        sampler, guidance, sigmas = self.checked(n, seed, steps, guidance, sampler, batch_size)
        batch_size = batch_size or self._at_once(n, group.size)
        if self.makes_latents and frames is not None:
            raise CudiffError("the model makes latents, not pictures: leave frames out")
        if frames is not None and not isinstance(frames, list):
            raise CudiffError(f"frames are added to a list, not to a {type(frames).__name__}: give frames=[]")
        floats = floats or self.makes_latents
        labels = self.labels(n, classes)
        guide = None
        if labels is not None:
            guide = Guidance.of(guidance, guidance_interval, guidance_rescale, self.config.guidance_channels)
        elif guidance_interval is not None or guidance_rescale:
            raise CudiffError("this model has no classes to guide to: leave guidance_interval and guidance_rescale out")
        if denoiser is not None and not callable(denoiser):
            raise CudiffError(f"denoiser is a function D(x, sigma, labels), not a {type(denoiser).__name__}")
        given = self._given(n, init, mask, noise)
        if other is None and (np.ndim(share) or share != 0.5):
            raise CudiffError("share says how far to go to other classes: give other too")
        if other is not None:
            share = as_shares(share, n).astype(np.float32)
            given |= {"other": self.labels(n, other), "share": share}  # type: ignore[dict-item]
        sigmas = sigmas[len(sigmas) - 1 - self._last_steps(len(sigmas) - 1, init, strength, mask) :]
        if len(sigmas) == 1:
            return given["init"] / self._scale if floats else to_uint8(given["init"])
        way = Way(sampler, guide, tuple(given), denoiser)
        batch_size = INVARIANT if batch_invariant else batch_size
        device, captured, graphs = self.device, self.config.capture, self._cache_for(way)
        images = np.empty((n, *self.shape), float32 if floats else np.uint8)

        def batch(start: int, count: int, frames: list[np.ndarray] | None = None) -> np.ndarray:
            size = batch_size if batch_invariant else count
            rows = np.minimum(np.arange(start, start + size), n - 1)
            noise = ImageNoise((size, *self.shape), seed, start, device)
            own = {name: Tensor(array[rows], device=device) for name, array in given.items()}
            seen: list[np.ndarray] = []
            alone = init is not None or frames is not None or each_step is not None
            run = self._sampling(way, size, None if alone else len(sigmas) - 1, graphs, captured)

            def record(step: int, x: Tensor, denoised: Tensor) -> None:
                if frames is not None:
                    seen.append(self._bytes(sampler, denoised, size)[:count])
                if each_step is not None:
                    each_step(step)

            with np.errstate(all="ignore"):  # `_bytes` says what is not finite
                begin = own["noise"] * float(sigmas[0]) if "noise" in own else noise.start(sigmas[0])
                begin = begin + own["init"] if "init" in own else begin
                chosen = None if labels is None else Tensor(labels[rows], device=device)
                callback = record if frames is not None or each_step is not None else None
                drawn = run(begin, sigmas, chosen, guidance=guide, given=own, noise=noise, callback=callback)
            if frames is not None and not seen:
                raise CudiffError(f"sampler {sampler} shows no frames: call its callback(step, x, denoised) each step")
            if frames is not None:
                first = begin / max(1.0, float(sigmas[0])) if init is not None else own.get("noise", noise.start(1.0))
                frames += [to_uint8(first)[:count], *seen]
            made = self._bytes(sampler, drawn, size)
            return (drawn.astype(float32).numpy() / self._scale if floats else made)[:count]

        with self._sampled(), group.watched():
            for start in range(group.rank * batch_size, n, group.size * batch_size):
                count = min(batch_size, n - start)
                made = twice(partial(batch, start, count, None if start else frames))
                if made is None:
                    break
                images[start : start + count] = made
                group.beat()
                if progress is not None:
                    progress(min(n, start + group.size * batch_size), n)
            else:
                for number, start in enumerate(range(0, n, batch_size)):
                    group.broadcast(images[start : start + batch_size], number % group.size)
                return images
            if group.size > 1:
                raise CudiffError(f"process {group.rank} of {group.size} is out of memory: use a --batch-size below "
                                  f"{batch_size}")
            if batch_invariant:
                raise CudiffError(f"{INVARIANT} images at once do not fit: leave batch_invariant out")
            sigmas, captured, graphs = sigmas[-2:], False, GraphCache()  # one step shows what fits
            raise out_of_memory(batch_size, lambda size: batch(0, min(n, size)), device)

    def stream(
        self, n: int = 1, seed: int = 0, classes: Classes = None, steps: int = 1, guidance: float | None = None,
        sampler: str | None = None, *, strength: float = 0.3, blend: float = 0.2,
        each_step: Callable[[int], None] | None = None,
    ) -> Stream:
        """Frames in time, an endless iterator of uint8 (n, H, W, C); `Stream` says how to change what follows `n`.

        The first is `sample`'s. Each later one is the last, or a video's picture (`Stream.frame`), with the noise of
        seed and frame at the level that `strength` goes back to, denoised and blended with the last.

        Parameters
        ----------
        classes, guidance, sampler : as for `sample`.
        steps : evaluations of the sampler a frame, fewer where `strength` has fewer of the 100 levels there are.
        strength : 0 to 1, the share of the noise levels that a frame goes through. 0 keeps the last frame. One step
            gives the mean of all that a picture may have been, so with much strength frames fade: take more steps.
        blend : 0 to 1, the share of the last frame in the next one.
        each_step : as for `sample`, but a frame of one step stays one graph; a stream can go on after what it raises.

        Raises CudiffError as `sample` does, and for a model of latents.
        """
        return Stream(self, n, sampler, Frames(seed, classes, steps, guidance, strength, blend), each_step)

    def noise(self, n: int, seed: int = 0) -> np.ndarray:
        """The standard normal noise that `sample(n, seed)` begins with, float32 (n, H, W, C)."""
        whole("n", n), whole("seed", seed, 0, 2**64 - 1)
        return ImageNoise((n, *self.shape), seed, 0, self.device).start(1.0).numpy()

    def invert(
        self,
        images: np.ndarray,
        classes: Classes = None,
        steps: int | None = None,
        guidance: float | None = None,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """The noise, float32 (n, H, W, C), that images come from: `sample(n, noise=...)` makes them of it.

        By Heun's method along the probability flow ODE, with the same classes, steps and guidance; what is lost falls
        with the square of the steps, and is least by the sampler heun. images: uint8, or floats in [-1, 1],
        (n, H, W, C) or one (H, W, C).
        Raises CudiffError as `sample` does.
        """
        n = len(images) if np.ndim(images) == 4 else 1
        _, guidance, sigmas = self.checked(n, 0, steps, guidance, "heun", batch_size)
        batch_size = batch_size or self._at_once(n)
        images, labels = self._as_images(images, n, "images"), self.labels(n, classes)
        if len(sigmas) < 3:
            raise CudiffError("inversion takes 2 steps or more")
        denoiser = self.denoiser()
        if labels is not None:
            denoiser = Guided(denoiser, guidance, channels=self.config.guidance_channels)
        run = Inversion(denoiser)
        found = []
        with self._sampled():
            for start in range(0, n, batch_size):
                part = slice(start, start + batch_size)
                chosen = None if labels is None else Tensor(labels[part], device=self.device)
                found.append(run(Tensor(images[part], device=self.device), sigmas[-2::-1], chosen).numpy() / sigmas[0])
        return np.concatenate(found).astype(np.float32)

    def _given(self, n: int, init: Any, mask: Any, noise: Any) -> dict[str, np.ndarray]:
        """The arrays that `sample` was given, by name, checked."""
        given = {}
        if noise is not None:
            given["noise"] = np.asarray(noise)
            if given["noise"].shape != (n, *self.shape) or not is_float(given["noise"].dtype):
                raise CudiffError(f"noise is {given['noise'].dtype} of shape {given['noise'].shape}: give floats of "
                                  f"shape {(n, *self.shape)}")
            if not np.isfinite(given["noise"]).all():
                raise CudiffError("noise holds values that are not finite")
            given["noise"] = given["noise"].astype(np.float32)
        if init is not None:
            given["init"] = self._as_images(init, n)
        if mask is not None:
            given["mask"] = as_mask(mask, n, self.shape)
        return given

    def _as_images(self, images: Any, n: int, what: str = "init") -> np.ndarray:
        """Given images as the net sees them. Raises CudiffError for others, bytes in the place of latents too."""
        if self.config.latent_scale and not is_float(np.asarray(images).dtype):
            raise CudiffError(f"{what} must be latents, in floats, as the model's are")
        given = as_images(images, n, self.shape, what)
        if not self.makes_latents and (largest := float(np.abs(given).max(initial=0))) > LARGEST:
            raise CudiffError(f"{what} has values up to {largest:.4g}: floats lie in about [-1, 1], and pixels of 0 to "
                              "255 are uint8")
        return given * self._scale

    def _last_steps(self, steps: int, init: Any, strength: float | None, mask: Any) -> int:
        """How many of the steps an image goes through."""
        if init is None:
            if strength is not None or mask is not None:
                raise CudiffError("strength and mask are for a picture to begin with: give init, or leave them out")
            return steps
        strength = (0.6 if mask is None else 1.0) if strength is None else real("strength", strength, 0, 1)
        return round(strength * steps)

    def checked(
        self, n: int, seed: int, steps: int | None, guidance: float | None, sampler: str | None, batch_size: int | None
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
        for name, value in (("n", n), ("steps", steps), ("batch_size", 1 if batch_size is None else batch_size)):
            whole(name, value)
        return sampler, guidance, self.sigmas(sampler, steps)

    def _at_once(self, n: int, processes: int = 1) -> int:
        """Images of a batch where nobody says: all of few pixels, which would not fill a GPU by 64."""
        most = 64 if self.device == "cpu" else max(64, min(256, 2**18 // (self.shape[0] * self.shape[1])))
        return min(most, -(-n // processes))

    def save(self, path: str | os.PathLike) -> None:
        """Write a checkpoint for `load`, in place of what is at `path`: its EMA too is made of this net's weights.

        Training can start from it, but not resume: it holds no optimiser. Raises CudiffError where the system refuses,
        and, with what is at `path` as it was, for weights that are not finite or that `load` would not take: those of
        another net than the configuration's.
        """
        state = self.net.state_dict()
        _check_finite(path, state)
        tensors = prefixed("model", state) | prefixed("ema", state)
        check_parts(path, tensors, self.config)
        save_checkpoint(path, self.config, tensors, {"step": 0})

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of an image."""
        return self.config.image_size, self.config.image_size, self.config.channels

    @property
    def makes_latents(self) -> bool:
        """Whether its images are latents, for a decoder that cudiff does not have."""
        return self.config.latent_scale > 0 or self.config.channels not in (1, 3)

    @property
    def _scale(self) -> np.float32:
        return np.float32(self.config.latent_scale or 1)

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

    def labels(self, n: int, classes: Classes = None) -> np.ndarray | None:
        """The class of each of n images, int32 (n,), as `sample` takes them; None for an unconditional model."""
        known = self.config.num_classes
        if not known:
            if classes is not None:
                raise CudiffError("this model has no classes: leave classes out")
            return None
        try:
            labels = np.arange(n) % known if classes is None else np.asarray(classes)
        except ValueError:
            raise CudiffError("classes are lists of several lengths: give one whole number for each image") from None
        if labels.dtype.kind == "U":
            labels = np.reshape(numbers_of(labels.ravel().tolist(), self.class_names, "the model"), labels.shape)
        if labels.ndim > 1 or (labels.size and not np.issubdtype(labels.dtype, np.integer)):
            raise CudiffError(
                f"classes are {labels.dtype} of shape {labels.shape}: give one whole number, or one for each image"
            )
        if labels.ndim == 1 and len(labels) != n:
            raise CudiffError(f"{len(labels)} classes were given for {n} images: give one class, or one for each image")
        labels = np.broadcast_to(labels, n)
        strangers = labels[(labels < -1) | (labels >= known)]
        if strangers.size:
            names = self.class_names if self.class_names != tuple(map(str, range(known))) else ()
            called = f" ({names_in_words(names)})" if names else ""
            raise CudiffError(f"the model has classes 0 to {known - 1}{called}, and -1 for none; {strangers[0]} is not "
                              "one")
        return np.ascontiguousarray(labels, np.int32)


def _check_finite(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise CudiffError(f"{name} is not finite, {path} is not written: use weights of an earlier step")


def load(
    path: str | os.PathLike, device: str | None = None, weights: str = "ema", precision: str | None = None,
    trainable: bool = False, sampler: str | None = None,
) -> Pipeline:
    """The model in a checkpoint, or in the newest of a run's folder, ready to sample. Nothing else is needed.

    weights: "ema", the moving average, or "model", the raw weights. device: the GPU where there is one.
    precision: that of training on the GPU, fp32 on the CPU; fp16 for bf16 on a GPU that has none. trainable: with
    gradients and in training mode, for an optimiser to go on with; otherwise the net takes only the memory that
    sampling needs. sampler: in place of the checkpoint's, which then need not be registered.
    Raises CudiffError where the file is missing, damaged, of another version or lacks tensors.
    """
    if weights not in ("ema", "model"):
        raise CudiffError(f"unknown weights '{weights}': use ema or model")
    trainable = flag("trainable", trainable)
    _, checkpoint = read_checkpoint(path, parts=(weights,), sampler=sampler)
    config = checkpoint.config
    device = default_device() if device in (None, "auto") else device
    net = build(config)
    net.load_state_dict(part(checkpoint.tensors, weights))
    net.precision = precision_on(device, precision or (config.precision if device == "cuda" else "fp32"))
    net.train(trainable).flatten(device, trainable=trainable)
    pipeline = Pipeline(config, net)
    pipeline.trained_on = checkpoint.counters.get("data")
    return pipeline


def import_torch(
    source: str | os.PathLike, target: str | os.PathLike, config: Config, key: str | None = None
) -> Config:
    """Make a checkpoint of weights in PyTorch's layout and guided-diffusion's, DiT's, unet.cu's or CS 179's names.

    config: the model they belong to; where the names tell the model, theirs is used, but for CS 179's where `config` is
    of that. Norms are grouped as in guided-diffusion. key: which part of a .pt with several. The weights serve as EMA
    too, and of unet.cu's file AdamW's moments come along. Returns the checkpoint's configuration. Raises CudiffError
    where the file cannot be read, its weights do not fit (naming the options that would), or `target` exists.
    """
    if os.path.exists(target):
        raise CudiffError(f"{target} exists already: choose another name")
    if is_unet_cu(source):
        checkpoint = load_checkpoint(source)
        _check_finite(target, checkpoint.tensors)
        save_checkpoint(target, *checkpoint)
        return checkpoint.config
    weights = read_weights(source, key)
    if weights.config is None or config.model == "cs179":  # described, as one of other widths or another objective is
        weights = weights._replace(config=dit_config(weights.state, config))
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
        raise CudiffError(f"{error}: give --preset, --config or --model {config.model} with its options") from None
    Pipeline(config, net).save(target)
    return config


def export_torch(source: str | os.PathLike, target: str | os.PathLike, weights: str = "ema") -> None:
    """Write a checkpoint's weights as a .safetensors file with PyTorch's layout and guided-diffusion's names.

    Raises CudiffError where the checkpoint cannot be read or `target` exists or is named as another kind of file, and
    where norms are grouped otherwise than guided-diffusion's: its images would be others.
    """
    if Path(target).suffix.lower() != ".safetensors":
        raise CudiffError(f"cannot write {target}: name it .safetensors, and safetensors.torch.load_file reads it")
    if os.path.exists(target):
        raise CudiffError(f"{target} exists already: choose another name")
    net = load(source, "cpu", weights, sampler=Config().sampler).net  # any: its own need not be registered for this
    check_groups(source, net)
    write_weights(target, to_torch(net.state_dict(), net.layouts()))


def export_unet_cu(source: str | os.PathLike, target: str | os.PathLike, weights: str = "model") -> None:
    """Write a checkpoint's weights as unet.cu's binary, for its trainer and generate.py.

    weights: "model", with AdamW's moments where it has them, or "ema", the averaged ones, without. Raises CudiffError
    where the checkpoint cannot be read, its model is another than unet.cu's, or `target` exists.
    """
    if os.path.exists(target):
        raise CudiffError(f"{target} exists already: choose another name")
    parts = ("ema",) if weights == "ema" else ("model", "exp_avg", "exp_avg_sq")
    checkpoint = read_checkpoint(source, parts, sampler=Config().sampler)[1]
    tensors = checkpoint.tensors if weights != "ema" else prefixed("model", part(checkpoint.tensors, "ema"))
    write_unet_cu(target, checkpoint.config, tensors)
