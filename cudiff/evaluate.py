"""How good samples are, by a network that cudiff trains itself: classes, variety, and distances of its features.

It is a classifier of the data's classes; of data without labels, of four rotations. It is trained once for a data set
and then kept in the user's cache. The features may be a function of the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.backend import cache_folder, default_device
from cudiff.classes import names_in_words
from cudiff.cuda.graph import capture
from cudiff.data import Dataset, has_test_part, load_dataset, shuffled_index
from cudiff.data.dataset import differences
from cudiff.data.rows import Rows
from cudiff.distances import frechet_or_none, kernel_distance, precision_recall
from cudiff.distributed import ALONE, Group
from cudiff.errors import CudiffError
from cudiff.models.cnn import CNN
from cudiff.nn import StateDict, init
from cudiff.optim import AdamW, Cosine
from cudiff.pipeline import Pipeline
from cudiff.report import Report
from cudiff.tensor import Tensor, no_grad
from cudiff.tensorfile import read_tensors, write_tensors

BATCH_SIZE = 128
LR = 2e-3
WEIGHT_DECAY = 0.02
EPOCHS = 3
LEAST_STEPS = 160  # a small data set is gone through more often
VERSION = 1  # of how the classifier is built and trained: a part of its name in the cache

ENOUGH = 10
"""Images for each feature of the covariance, from which on a Fréchet distance is shown without a warning."""
MANY = 1000
"""Images from which on the other distances are."""
MOST_TURNED = 10_000
"""Images that rotations are learned from: four times as many are made."""
TOLD = 0.5
"""Share of rotations that has to be told for their features to say much; guesses are right on a quarter."""

Features = Callable[[np.ndarray], np.ndarray]
Progress = Callable[[int, int], None]


class Classifier:
    """A trained CNN. test_accuracy: the share of the test images that it gets right, measured after training."""

    def __init__(self, net: CNN, test_accuracy: float = float("nan")):
        self.net, self.test_accuracy = net, test_accuracy
        net.eval()

    def logits(self, images: np.ndarray | Rows) -> np.ndarray:
        """uint8 (N, H, W, C) → float32 (N, classes)."""
        return self._run(self.net, images)

    def predict(self, images: np.ndarray | Rows) -> np.ndarray:
        """uint8 (N, H, W, C) → the most likely class of each, int32 (N,)."""
        return self.logits(images).argmax(axis=1).astype(np.int32)

    def features(self, images: np.ndarray | Rows) -> np.ndarray:
        """uint8 (N, H, W, C) → float32 (N, 128), what the last layer sees."""
        return self._run(self.net.features, images)

    def accuracy(self, data: Dataset) -> float:
        """The share of the images of `data` whose class is predicted, in [0, 1]."""
        return float((self.predict(data.images) == data.labels).mean())

    def _run(self, function: Callable[[Tensor], Tensor], images: np.ndarray | Rows,
             batch_size: int = 500) -> np.ndarray:
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
        net.load_state_dict(StateDict(tensors))
        return Classifier(net, float(json.loads(metadata["cudiff"])["test_accuracy"]))
    _train(net, train, device, max(1, steps), seed, progress)
    classifier = Classifier(net)
    classifier.test_accuracy = classifier.accuracy(test)
    with contextlib.suppress(CudiffError):  # a home that is full or read-only costs only time
        about = json.dumps({"test_accuracy": classifier.test_accuracy, "recipe": recipe})
        write_tensors(path, net.state_dict(), {"cudiff": about})  # one key: several come in no fixed order
    return classifier


def train_rotations(
    train: Dataset,
    test: Dataset,
    device: str | None = None,
    seed: int = 0,
    cache: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> Classifier:
    """A classifier of an image's rotation by 0, 90, 180 and 270 degrees, which needs no labels (RotNet, arXiv
    1803.07728): what tells them apart are shapes and where they lie. Of 10,000 images at most; see `train_classifier`.
    """
    some = [data.subset(np.sort(shuffled_index(np.arange(min(len(data), MOST_TURNED)), len(data), seed)))
            for data in (train, test)]
    return train_classifier(_rotations(some[0]), _rotations(some[1]), device, None, seed, cache, progress)


def _rotations(data: Dataset) -> Dataset:
    """Each image four times, labelled by how often it is turned by 90 degrees."""
    images = np.concatenate([np.rot90(data.images, turns, axes=(1, 2)) for turns in range(4)])
    return Dataset(images, np.repeat(np.arange(4), len(data)), 4, data.name)


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
        digest.update(np.asarray(data.images).data)
        digest.update(data.labels.data)  # type: ignore[union-attr]
    return digest.hexdigest()[:32]


def _few(counts: dict[str, int], dimensions: int) -> tuple[str, ...]:
    """A line for each kind of image of which there are too few for a Fréchet distance, or for a good one; and a line
    where there are few for the other distances."""
    lines, enough = [], ENOUGH * dimensions
    for kind, count in counts.items():
        if count <= dimensions:
            lines.append(f"{count:,} {kind} are too few for a Fréchet distance in {dimensions} features: "
                         f"{enough:,} or more make it meaningful")
        elif count < enough:
            lines.append(f"{count:,} {kind} are few for a Fréchet distance, which is too large then: "
                         f"{enough:,} or more make it meaningful")
    few = " and ".join(f"{count:,} {kind}" for kind, count in counts.items() if count < MANY)
    if few:
        lines.append(f"kernel distance, precision and recall vary by chance with {few}: compare runs of equal numbers, "
                     f"or give {MANY:,} or more")
    return tuple(lines)


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
    features: Features | None = None,
    against: str = "test",
    progress: Progress | None = None,
) -> Report:
    """Judge `n` samples: how far their features lie from those of `test`, and, of data with labels, their classes and
    the variety within each.

    Parameters
    ----------
    sample : sample(n, classes int32 (n,), or None where not `conditional` or without labels, seed) → (n, H, W, C)
        The classes asked for are those of the n training images that the samples stand beside (of all where the data
        has fewer, again from the first on), so that both have the same mixture.
    guidance : what `sample` uses, to be stated.
    classifier : trained now, or taken from the cache, where None: of `train`'s classes, or without labels of rotations
        (`train_rotations`); `progress` is for its training.
    features : a function of one's own, up to 500 images (N, H, W, C) → floats (N, D), in whose features distances are
        taken, in place of the classifier's. Latents need one.
    against : "test", or "train" where the test images are few: distances are then those to the training images, which
        copies of them have least.

    Without `conditional` the variety is that within the classes that the classifier sees.
    Raises CudiffError for fewer than two images of a kind, another `against`, samples of another size, latents without
    `features` and features that are something else.
    """
    if min(n, len(train), len(test)) < 2:
        raise CudiffError(f"{n} samples, {len(train)} training and {len(test)} test images: judge 2 or more of each")
    if against not in ("test", "train"):
        raise CudiffError(f"samples are compared with test or train images, not '{against}'")
    if train.latents and features is None:
        raise CudiffError(f"{train.name} are latents, which no classifier here judges: give a function of your own in "
                          "Python, evaluate_pipeline(pipeline, features=...), which may decode them")
    labelled = train.labels is not None and not train.latents
    if classifier is None and (labelled or features is None):
        learn = train_classifier if labelled else train_rotations
        classifier = learn(train, test, device, seed=0, progress=progress)
    real = train.subset(shuffled_index(np.arange(min(n, len(train))), len(train), seed))
    asked = np.resize(real.labels, n) if conditional and real.labels is not None else None
    images = np.asarray(sample(n, asked, seed))
    if images.dtype != train.images.dtype and not train.latents:
        raise CudiffError(f"samples are {images.dtype}, not {train.images.dtype}: Pipeline.sample gives bytes without "
                          "floats=True")
    if images.shape != (n, *train.images.shape[1:]):
        raise CudiffError(f"samples of {images.shape[1:]} do not compare with {train!r}: name the model's own data")
    see = classifier.features if features is None else partial(_own_features, features)  # type: ignore[union-attr]
    reference, others = (test, real) if against == "test" else (train, test)
    of_samples, of_others, of_reference = map(see, (images, others.images, reference.images))
    shown = min(n, len(train)) if against == "test" else len(train)
    counts = {"samples": n, "training images": shown, "test images": len(test)}
    notes = (*train.notes, *_few(counts, of_reference.shape[1]), *_untold(classifier, labelled, features))
    if against == "train":
        notes += ("the distances are those to images that the model may know: copies of them have the least",)
    found = _classes(classifier, images, real, asked, train) if labelled and classifier is not None else {}
    return Report(
        data=train.name, samples=n, real=shown, test=len(test), seed=seed, guidance=guidance, against=against,
        features=_described(classifier, labelled, features),
        classifier_accuracy=None if classifier is None else classifier.test_accuracy, notes=notes,
        **_distances(of_samples, of_reference, ""), **_distances(of_others, of_reference, "_real"), **found,
    )


def _distances(features: np.ndarray, reference: np.ndarray, which: str) -> dict[str, Any]:
    """Fields of a `Report`: a set's distances to the features of the images that all are compared with."""
    precision, recall = precision_recall(reference, features) or (None, None)
    return {
        f"frechet{which}": frechet_or_none(features, reference), f"kernel{which}": kernel_distance(features, reference),
        f"precision{which}": precision, f"recall{which}": recall,
    }


def _classes(
    classifier: Classifier, images: np.ndarray, real: Dataset, asked: np.ndarray | None, train: Dataset
) -> dict[str, Any]:
    """Fields of a `Report`: what the classifier sees in samples beside training images, class by class."""
    assert real.labels is not None
    classes, predicted = train.num_classes, classifier.predict(images)
    real_variance = within_class_variance(classifier.features(real.images), real.labels, classes)
    labels = predicted if asked is None else asked
    variance = within_class_variance(classifier.features(images), labels, classes)
    return {
        "class_names": train.class_names or tuple(map(str, range(classes))),
        "as_asked": None if asked is None else float((predicted == asked).mean()),
        "as_asked_by_class": None if asked is None else _listed(class_accuracy(predicted, asked, classes)),
        "found_by_class": _listed(np.bincount(predicted, minlength=classes) / len(images)),
        "variance": _listed([variance_ratio(variance, real_variance)])[0],
        "variance_by_class": _listed(list(map(variance_ratio, variance[:, None], real_variance[:, None]))),
    }


def _own_features(function: Features, images: np.ndarray | Rows, batch_size: int = 500) -> np.ndarray:
    """What a user's function makes of all images. Raises CudiffError where it is no row of finite floats for each."""
    parts: list[np.ndarray] = []
    for start in range(0, len(images), batch_size):
        given = np.array(images[start : start + batch_size])  # a copy, to which the function may write
        made = function(given)
        part = made.numpy() if isinstance(made, Tensor) else np.asarray(made)
        width = parts[0].shape[1] if parts else part.shape[-1] if part.ndim else 0
        if part.shape != (len(given), width) or not width or part.dtype.kind != "f" or not np.isfinite(part).all():
            raise CudiffError(f"features returned {part.dtype} {part.shape} for {len(given)} images: return finite "
                              f"floats (N, D), a row for each of N images")
        parts.append(part)
    return np.concatenate(parts)


def _described(classifier: Classifier | None, labelled: bool, features: Features | None) -> str:
    if features is not None:
        return "a function of your own"
    if labelled:
        return "those of the classifier"
    accuracy = 0.0 if classifier is None else classifier.test_accuracy
    return (f"of a network that tells four rotations of the images apart, as they have no labels; it is right on "
            f"{accuracy:.2%} of the test images' rotations")


def _untold(classifier: Classifier | None, labelled: bool, features: Features | None) -> tuple[str, ...]:
    """A line where rotations are hardly told, as of textures, or of a few images."""
    if features is not None or labelled or classifier is None or classifier.test_accuracy >= TOLD:
        return ()
    return ("the images' rotations are hardly told, so these features say little: in Python, "
            "evaluate_pipeline(pipeline, features=...) takes others",)


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
    features: Features | None = None,
    against: str = "test",
    progress: Progress | None = None,
    group: Group = ALONE,
) -> Report:
    """`evaluate` for a loaded model, on the data it was trained with or another; None is the model's configuration.

    The test images are the data's own, or, where it has none, those that the model's training held out; of data that it
    was not trained on a tenth. features and against: see `evaluate`. Processes of a group share the sampling, and each
    judges all.
    Raises CudiffError before the classifier is trained, for the data's classes too that the model does not have.
    """
    config = pipeline.config
    _, guided, _ = pipeline.checked(n, seed, steps, guidance, sampler, batch_size)
    spec = os.path.expanduser(data or config.data)
    form = dict(image_size=config.image_size, channels=config.channels, skip_bad=config.skip_bad,
                only_classes=config.only_classes)
    train = load_dataset(spec, **form)  # type: ignore[arg-type]
    before, told = pipeline.trained_on if isinstance(pipeline.trained_on, dict) else {}, ""
    found = "; ".join(differences(before, train.fingerprint())) if before else ""
    own = data is None or bool(before and not found)  # under another path too, as from another folder
    if own and before:
        if found:
            told = f"this is not the data that the model was trained on ({found}): it may know some of the test images"
            train = replace(train, notes=(*train.notes, told))
        train = train.numbered(before.get("class_names") or ())
    if has_test_part(spec):
        test = load_dataset(spec, part="test", **form)  # type: ignore[arg-type]
    else:
        train, test = train.split((config.validation if own else 0) or 0.1, config.seed)
        if own and not config.validation and not told:
            known = "training held out no image: the model knows these test images"
            train = replace(train, notes=(*train.notes, known))
    conditional = config.num_classes > 0
    numbers = np.arange(train.num_classes)
    if conditional and train.labels is not None:
        numbers = _numbers(pipeline, train, own)
        pipeline.labels(len(train), numbers[train.labels])

    def sample(count: int, classes: np.ndarray | None, seed: int) -> np.ndarray:
        return pipeline.sample(
            count, seed, None if classes is None else numbers[classes], steps, guidance, sampler, batch_size,
            group=group,  # type: ignore[arg-type]
        )

    return evaluate(
        sample, train, test, n, conditional=conditional, guidance=guided if conditional else None, seed=seed,
        device=pipeline.device, features=features, against=against, progress=progress,
    )


def _numbers(pipeline: Pipeline, data: Dataset, own: bool) -> np.ndarray:
    """The model's number of each class of the data: by name, where both have names. The data that it was trained on,
    its `own`, may have other names, which `class_names` replaced."""
    names, known = data.class_names, pipeline.class_names
    if not names or not known or names == known[: len(names)]:
        return np.arange(data.num_classes)
    strangers = [name for name in names if name not in known]
    if strangers and own and data.num_classes == len(known):
        return np.arange(data.num_classes)
    if strangers:
        raise CudiffError(f"{data.name} has the class {strangers[0]}, and the model {names_in_words(known)}: give data "
                          "with its classes")
    return np.array([known.index(name) for name in names])
