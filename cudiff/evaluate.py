"""How good samples are, by a classifier that cudiff trains itself: classes, Fréchet distance, variety.

The classifier is trained once for a data set and then kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from cudiff import ops
from cudiff.backend import cache_folder, default_device
from cudiff.cuda.graph import capture
from cudiff.data import Dataset, load_dataset, shuffled_index
from cudiff.data.idx import has_idx
from cudiff.errors import CudiffError
from cudiff.models.cnn import CNN
from cudiff.nn import init
from cudiff.optim import AdamW, Cosine
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor, no_grad
from cudiff.tensorfile import read_tensors, write_tensors

BATCH_SIZE = 128
LR = 2e-3
WEIGHT_DECAY = 0.02
EPOCHS = 3
LEAST_STEPS = 160  # a small data set is gone through more often
VERSION = 1  # of how the classifier is built and trained: a part of its name in the cache

ENOUGH = 10 * CNN.FEATURES
"""Images from which on a Fréchet distance is shown without a warning: ten for each feature of the covariance."""

MEANINGLESS = "not meaningful"

Progress = Callable[[int, int], None]


class Classifier:
    """A trained CNN. test_accuracy: the share of the test images that it gets right, measured after training."""

    def __init__(self, net: CNN, test_accuracy: float = float("nan")):
        self.net, self.test_accuracy = net, test_accuracy
        net.eval()

    def logits(self, images: np.ndarray) -> np.ndarray:
        """uint8 (N, H, W, C) → float32 (N, classes)."""
        return self._run(self.net, images)

    def predict(self, images: np.ndarray) -> np.ndarray:
        """uint8 (N, H, W, C) → the most likely class of each, int32 (N,)."""
        return self.logits(images).argmax(axis=1).astype(np.int32)

    def features(self, images: np.ndarray) -> np.ndarray:
        """uint8 (N, H, W, C) → float32 (N, 128), what the last layer sees."""
        return self._run(self.net.features, images)

    def accuracy(self, data: Dataset) -> float:
        """The share of the images of `data` whose class is predicted, in [0, 1]."""
        return float((self.predict(data.images) == data.labels).mean())

    def _run(self, function: Callable[[Tensor], Tensor], images: np.ndarray, batch_size: int = 500) -> np.ndarray:
        device, parts = self.net.fc1.weight.device, []
        with no_grad():
            for start in range(0, len(images), batch_size):
                x = images[start : start + batch_size].astype(np.float32) / 127.5 - 1
                parts.append(function(Tensor(x, device=device)).numpy())
        return np.concatenate(parts)


def train_classifier(
    train: Dataset,
    test: Dataset,
    device: str | None = None,
    epochs: int | None = None,
    seed: int = 0,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> Classifier:
    """A classifier of `train`'s classes, measured on `test`; from the cache where it was trained before.

    Parameters
    ----------
    device : the GPU where there is one.
    epochs : passes over the data; 3, or more where that is under 160 batches of 128.
    cache : a folder; that of the user's cache (`cudiff.backend.cache_folder`) where None.
    progress : called with (batches done, batches in all).

    Raises CudiffError where the data has no labels or its two parts do not match.
    """
    if train.labels is None or test.labels is None:
        raise CudiffError(f"{train.name} has no labels: a classifier needs data with classes, such as sub-folders")
    if train.images.shape[1:] != test.images.shape[1:] or train.num_classes != test.num_classes:
        raise CudiffError(f"{train!r} and {test!r} differ in size or classes: give two parts of one data set")
    device = default_device() if device in (None, "auto") else device
    steps = max(LEAST_STEPS, EPOCHS * len(train) // BATCH_SIZE) if epochs is None else epochs * len(train) // BATCH_SIZE
    with init.seeded(seed):
        net = CNN(train.images.shape[1], train.images.shape[3], train.num_classes)
    net.flatten(device)
    recipe = dict(version=VERSION, steps=steps, seed=seed, batch_size=BATCH_SIZE, lr=LR, weight_decay=WEIGHT_DECAY)
    path = Path(cache or cache_folder("classifiers")) / f"{_digest(train, test, recipe)}.safetensors"
    with contextlib.suppress(CudiffError, ValueError, KeyError):  # whatever is wrong with it, it is trained again
        tensors, metadata = read_tensors(path)
        net.load_state_dict(tensors)
        return Classifier(net, float(json.loads(metadata["cudiff"])["test_accuracy"]))
    _train(net, train, device, max(1, steps), seed, progress)
    classifier = Classifier(net)
    classifier.test_accuracy = classifier.accuracy(test)
    with contextlib.suppress(CudiffError):  # a home that is full or read-only costs only time
        about = json.dumps({"test_accuracy": classifier.test_accuracy, "recipe": recipe})
        write_tensors(path, net.state_dict(), {"cudiff": about})  # one key: several come in no fixed order
    return classifier


def _train(net: CNN, data: Dataset, device: str, steps: int, seed: int, progress: Progress | None) -> None:
    """AdamW under a cosine; the data lies on the device and a step is one CUDA graph there."""
    images, labels = Tensor(data.images, device=device), Tensor(data.labels, device=device)
    optimizer = AdamW(net, lr=LR, weight_decay=WEIGHT_DECAY, schedule=Cosine(steps, warmup=min(50, steps // 4)))
    generator = ops.Generator(seed, device)

    def step() -> Tensor:
        optimizer.zero_grad()
        x, y = ops.draw_batch(images, labels, generator.step, BATCH_SIZE, seed)
        loss = ops.cross_entropy(net(x), y)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        generator.advance()
        return loss

    run = capture(step, device=device, precompile=True)
    for done in range(1, steps + 1):
        run()
        if progress is not None:
            progress(done, steps)


def _digest(train: Dataset, test: Dataset, recipe: dict[str, Any]) -> str:
    """Names a classifier by all that it depends on."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode())
    for data in (train, test):
        digest.update(repr((data.images.shape, data.num_classes)).encode())
        digest.update(data.images.data)
        digest.update(data.labels.data)  # type: ignore[union-attr]
    return digest.hexdigest()[:32]


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """Fréchet distance of the Gaussians fitted to two sets of features (N, D), (M, D), in float64.

    |μa − μb|² + tr(Ca + Cb − 2 (Ca Cb)^½), Dowson and Landau (1982); with Inception's features, the FID (Heusel et
    al. 2017, equation 6). The trace of (Ca Cb)^½ is the sum of the singular values of Ca^½ Cb^½, which needs no square
    root of an asymmetric matrix and is the same for (b, a). It shrinks as N and M grow: compare equal numbers.
    Raises ValueError for fewer than two features.
    """
    a, b = np.asarray(features_a, np.float64), np.asarray(features_b, np.float64)
    if len(a) < 2 or len(b) < 2:
        raise ValueError(f"a covariance needs two features or more, not {len(a)} and {len(b)}")
    covariance_a, covariance_b = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    product = _square_root(covariance_a) @ _square_root(covariance_b)
    difference = a.mean(axis=0) - b.mean(axis=0)
    common = np.linalg.svd(product, compute_uv=False).sum()
    return float(difference @ difference + np.trace(covariance_a) + np.trace(covariance_b) - 2 * common)


def frechet_or_none(features_a: np.ndarray, features_b: np.ndarray) -> float | None:
    """`frechet_distance`, or None where one set (N, D) has no more than D: its covariance is singular then, and the
    distance says how many there are rather than how good they are."""
    if min(len(features_a), len(features_b)) <= features_a.shape[1]:
        return None
    return frechet_distance(features_a, features_b)


def _few(counts: dict[str, int]) -> tuple[str, ...]:
    """A line for each kind of image of which there are too few for a Fréchet distance, or for a good one."""
    lines = []
    for kind, count in counts.items():
        if count <= CNN.FEATURES:
            lines.append(f"{count:,} {kind} are too few for a Fréchet distance in {CNN.FEATURES} features: "
                         f"{ENOUGH:,} or more make it meaningful")
        elif count < ENOUGH:
            lines.append(f"{count:,} {kind} are few for a Fréchet distance, which is too large then: "
                         f"{ENOUGH:,} or more make it meaningful")
    return tuple(lines)


def _square_root(matrix: np.ndarray) -> np.ndarray:
    """The symmetric root of a positive semi-definite matrix; eigenvalues that rounding made negative count as 0."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(values.clip(0)) @ vectors.T


def within_class_variance(features: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """For each class the variance of its features (N, D), summed over D, float64 (num_classes,).

    NaN for a class with fewer than two. One image a class, however good, has variance 0.
    """
    variance = np.full(num_classes, np.nan)
    for label in range(num_classes):
        own = np.asarray(features[labels == label], np.float64)
        if len(own) > 1:
            variance[label] = own.var(axis=0, ddof=1).sum()
    return variance


def variance_ratio(variance: np.ndarray, real: np.ndarray) -> float:
    """Mean within-class variance of samples over that of real images, of the classes that vary; NaN for none."""
    both = np.isfinite(variance) & (real > 0)
    return float(variance[both].sum() / real[both].sum()) if both.any() else float("nan")


def class_accuracy(predicted: np.ndarray, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """For each class the share of its images that are predicted as it, float64 (num_classes,); NaN for none."""
    total = np.bincount(labels, minlength=num_classes)
    right = np.bincount(labels[predicted == labels], minlength=num_classes)
    return np.divide(right, total, out=np.full(num_classes, np.nan), where=total > 0)


@dataclass(frozen=True)
class Report:
    """What `evaluate` found. Shares lie in [0, 1]; lists have one entry for each class, None where it has no images.

    as_asked: samples classified as the class asked for, None for an unconditional model; `as_asked_by_class` alike.
    found_by_class: share of the samples that the classifier sees in each class.
    frechet: of `samples` samples to the test images; frechet_real: of `real` training images to the same; None where
    one side has too few for a covariance, see `frechet_or_none`.
    variance: within-class variance of the samples' features over that of as many training images.
    notes: what to know before the numbers are believed, one line each.
    """

    data: str
    samples: int
    real: int
    test: int
    seed: int
    guidance: float | None
    class_names: tuple[str, ...]
    classifier_accuracy: float
    as_asked: float | None
    as_asked_by_class: list[float | None] | None
    found_by_class: list[float | None]
    frechet: float | None
    frechet_real: float | None
    variance: float | None
    variance_by_class: list[float | None]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, for JSON."""
        return asdict(self)

    def table(self) -> Table:
        """A rich table: the classes, and the whole. Print it with rich."""
        guidance = "" if self.guidance is None else f", guidance {self.guidance:g}"
        title = f"{self.samples:,} samples against {self.data}{guidance}, seed {self.seed}"
        table = Table(title=title, show_footer=True)
        shares, total = self.found_by_class, 1.0
        if self.as_asked is not None and self.as_asked_by_class is not None:
            shares, total = self.as_asked_by_class, self.as_asked
        table.add_column("class", "all")
        heading = "classified so" if self.as_asked is None else "classified as asked"
        table.add_column(heading, f"{total:.1%}", justify="right")
        table.add_column("variance, real = 1", _cell(self.variance, ".2f"), justify="right")
        for name, share, variance in zip(self.class_names, shares, self.variance_by_class, strict=True):
            table.add_row(name, _cell(share, ".1%"), _cell(variance, ".2f"))
        table.caption = (
            f"Fréchet distance to {self.test:,} test images: {_cell(self.frechet, '.3f', MEANINGLESS)}; of "
            f"{self.real:,} training images: {_cell(self.frechet_real, '.3f', MEANINGLESS)}\n"
            f"the classifier is right on {self.classifier_accuracy:.2%} of the test images"
        ) + "".join(f"\n{note}" for note in self.notes)
        return table


def _cell(value: float | None, form: str, missing: str = "–") -> str:
    return missing if value is None else format(value, form)


def _listed(values: np.ndarray | list[float]) -> list[float | None]:
    """As Python numbers, None where not finite, which JSON cannot hold."""
    return [float(value) if np.isfinite(value) else None for value in values]


def evaluate(
    sample: Callable[[int, np.ndarray | None, int], np.ndarray],
    train: Dataset,
    test: Dataset,
    n: int = 2000,
    *,
    conditional: bool = True,
    guidance: float | None = None,
    seed: int = 0,
    device: str | None = None,
    classifier: Classifier | None = None,
    progress: Progress | None = None,
) -> Report:
    """Judge `n` samples by a classifier of `train`: class, Fréchet distance to `test`, variety within a class.

    Parameters
    ----------
    sample : sample(n, classes int32 (n,), or None where not `conditional`, seed) → uint8 (n, H, W, C)
        The classes asked for are those of the n training images that the samples stand beside (of all where the data
        has fewer, again from the first on), so that both have the same mixture.
    guidance : what `sample` uses, to be stated.
    classifier : trained now, or taken from the cache, where None; `progress` is for its training.

    Without `conditional` the variety is that within the classes that the classifier sees.
    Raises CudiffError for data without labels and for fewer than two images of a kind.
    """
    if min(n, len(train), len(test)) < 2:
        raise CudiffError(f"{n} samples, {len(train)} training and {len(test)} test images: judge 2 or more of each")
    classifier = classifier or train_classifier(train, test, device, progress=progress)
    assert train.labels is not None
    real = train.subset(shuffled_index(np.arange(min(n, len(train))), len(train), seed))
    asked = np.resize(real.labels, n) if conditional else None  # type: ignore[arg-type]
    images = sample(n, asked, seed)
    if images.shape != (n, *train.images.shape[1:]):
        raise CudiffError(f"samples of {images.shape[1:]} do not compare with {train!r}: name the model's own data")
    classes, predicted = train.num_classes, classifier.predict(images)
    features, real_features, test_features = map(classifier.features, (images, real.images, test.images))
    real_variance = within_class_variance(real_features, real.labels, classes)  # type: ignore[arg-type]
    variance = within_class_variance(features, predicted if asked is None else asked, classes)
    return Report(
        data=train.name, samples=n, real=len(real), test=len(test), seed=seed, guidance=guidance,
        class_names=train.class_names or tuple(map(str, range(classes))),
        classifier_accuracy=classifier.test_accuracy,
        as_asked=None if asked is None else float((predicted == asked).mean()),
        as_asked_by_class=None if asked is None else _listed(class_accuracy(predicted, asked, classes)),
        found_by_class=_listed(np.bincount(predicted, minlength=classes) / n),
        frechet=frechet_or_none(features, test_features), frechet_real=frechet_or_none(real_features, test_features),
        variance=_listed([variance_ratio(variance, real_variance)])[0],
        variance_by_class=_listed(list(map(variance_ratio, variance[:, None], real_variance[:, None]))),
        notes=(*train.notes, *_few({"samples": n, "training images": len(real), "test images": len(test)})),
    )


def evaluate_pipeline(
    pipeline: Pipeline,
    n: int = 2000,
    data: str | os.PathLike | None = None,
    *,
    seed: int = 0,
    steps: int | None = None,
    guidance: float | None = None,
    sampler: str | None = None,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> Report:
    """`evaluate` for a loaded model, on the data it was trained with or another; None is the model's configuration.

    The test images are the data's own, or, where it has none, those that the model's training held out.
    Raises CudiffError before the classifier is trained, for the data's classes too that the model does not have.
    """
    config = pipeline.config
    _, guided, _ = pipeline.checked(n, seed, steps, guidance, sampler, batch_size)
    spec = os.path.expanduser(data or config.data)
    form = dict(image_size=config.image_size, channels=config.channels, skip_bad=config.skip_bad)
    train = load_dataset(spec, **form)  # type: ignore[arg-type]
    if spec in ("digits", "mnist") or (Path(spec).is_dir() and has_idx(Path(spec))):
        test = load_dataset(spec, part="test", **form)  # type: ignore[arg-type]
    else:
        train, test = train.split(config.validation or 0.1, config.seed)
    conditional = config.num_classes > 0
    if conditional and train.labels is not None:
        pipeline.labels(len(train), train.labels)

    def sample(count: int, classes: np.ndarray | None, seed: int) -> np.ndarray:
        return pipeline.sample(count, seed, classes, steps, guidance, sampler, batch_size)  # type: ignore[arg-type]

    return evaluate(
        sample, train, test, n, conditional=conditional, guidance=guided if conditional else None, seed=seed,
        device=pipeline.device, progress=progress,
    )
