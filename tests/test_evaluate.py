"""The judge of samples: its distances against closed forms, its classifier, and reports on samples of known quality."""

import dataclasses
import io
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

from cudiff import evaluate as module
from cudiff.config import Config
from cudiff.data import Dataset, digits
from cudiff.errors import CudiffError
from cudiff.evaluate import (
    class_accuracy,
    evaluate,
    evaluate_pipeline,
    train_classifier,
    variance_ratio,
    within_class_variance,
)
from cudiff.models import build
from cudiff.pipeline import Pipeline
from cudiff.plot import save_images, save_npz
from cudiff.tensor import Tensor

# --- shares and variances --------------------------------------------------------------------------------------------


def test_variance_within_classes(rng):
    labels = np.repeat([0, 1, 3], [400, 300, 1])
    features = 5 * rng.standard_normal((5, 3))[labels] + np.array([1, 2, 0, 0, 0])[labels, None] * np.ones(3)
    features[:700] += np.where(labels[:700] == 0, 1, 2)[:, None] * rng.standard_normal((700, 3))
    variance = within_class_variance(features, labels, 5)
    np.testing.assert_allclose(variance[:2], [3, 12], rtol=0.2)
    assert np.isnan(variance[2:]).all()  # none, one, none
    direct = sum(np.var(features[labels == 0][:, d], ddof=1) for d in range(3))
    assert variance[0] == pytest.approx(direct)
    assert variance_ratio(np.array([1.0, np.nan, 3.0]), np.array([2.0, 5.0, 2.0])) == pytest.approx(1.0)
    assert math.isnan(variance_ratio(np.array([np.nan, 1.0]), np.array([1.0, np.nan])))


def test_variance_of_two_images_and_beside_images_that_do_not_vary():
    np.testing.assert_array_equal(within_class_variance(np.array([[1.0], [3.0], [7.0]]), np.array([0, 0, 1]), 2),
                                  [2, np.nan])
    assert variance_ratio(np.array([1.0, 4.0]), np.array([0.5, 0.0])) == 2  # a class of equal images says nothing
    assert math.isnan(variance_ratio(np.array([1.0]), np.array([0.0])))


def test_class_accuracy():
    shares = class_accuracy(np.array([0, 1, 1, 1, 0]), np.array([0, 0, 1, 1, 1]), 3)
    np.testing.assert_allclose(shares[:2], [1 / 2, 2 / 3])
    assert np.isnan(shares[2])
    np.testing.assert_array_equal(class_accuracy(np.array([0, 0]), np.array([0, 1]), 2), [1, 0])  # one image each


# --- the classifier --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts():
    return digits(1500, 12), digits(500, 12, part="test")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("classifiers")


@pytest.fixture(scope="module")
def classifier(parts, cache):
    return train_classifier(*parts, device="cpu", epochs=8, cache=cache)


def test_classifier_learns_digits(classifier, parts, cache):
    test = parts[1]
    assert classifier.test_accuracy > 0.93
    assert classifier.accuracy(test) == classifier.test_accuracy
    predicted, features = classifier.predict(test.images), classifier.features(test.images)
    assert predicted.dtype == np.int32 and features.shape == (500, 128) and features.dtype == np.float32
    np.testing.assert_array_equal(classifier.predict(test.images[3:4]), predicted[3:4])
    assert len(list(cache.iterdir())) == 1


def test_classifier_is_trained_once(classifier, parts, cache, monkeypatch):
    def forbidden(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "_train", forbidden)
    again = train_classifier(*parts, device="cpu", epochs=8, cache=cache)
    assert again.test_accuracy == classifier.test_accuracy
    np.testing.assert_array_equal(again.logits(parts[1].images), classifier.logits(parts[1].images))
    for different in ({"epochs": 9}, {"epochs": 8, "seed": 1}):
        with pytest.raises(AssertionError, match="again"):
            train_classifier(*parts, device="cpu", cache=cache, **different)
    other = Dataset(parts[0].images.copy(), parts[0].labels, 10)
    other.images[7, 3, 3] ^= 1
    with pytest.raises(AssertionError, match="again"):
        train_classifier(other, parts[1], device="cpu", epochs=8, cache=cache)


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_a_damaged_cache_is_replaced(tmp_path, parts, content):
    few = parts[0].subset(range(128)), parts[1].subset(range(20))
    calls = []

    def run():
        return train_classifier(*few, device="cpu", epochs=2, cache=tmp_path, progress=lambda *done: calls.append(done))

    first = run()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10] if content is None else content)
    second = run()
    assert calls == [(1, 2), (2, 2)] * 2 and path.read_bytes() == whole
    assert second.test_accuracy == first.test_accuracy


@pytest.mark.parametrize("count, epochs, steps", [(20, None, 160), (7680, None, 180), (7680, 2, 120)])
def test_a_classifier_sees_the_images_three_times_or_160_batches(tmp_path, count, epochs, steps):
    images = Dataset(np.zeros((count, 8, 8, 1), np.uint8), np.zeros(count, int), 2)

    def told(*done):
        assert done == (1, steps)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train_classifier(images, images, device="cpu", epochs=epochs, cache=tmp_path, progress=told)


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, parts):
    (tmp_path / "file").write_text("no folder")
    few = parts[0].subset(range(128)), parts[1].subset(range(20))
    assert 0 <= train_classifier(*few, device="cpu", epochs=1, cache=tmp_path / "file").test_accuracy <= 1


def test_classifier_needs_labels_and_parts_that_match(parts):
    train, test = parts
    with pytest.raises(CudiffError, match="a classifier needs data with classes"):
        train_classifier(Dataset(train.images), test, device="cpu")
    with pytest.raises(CudiffError, match="differ"):
        train_classifier(train, digits(20, 16), device="cpu")


# --- reports ---------------------------------------------------------------------------------------------------------


def drawn_again(n, classes, seed):
    """A perfect sampler: new digits of the classes asked for; `digits` draws the classes in turn."""
    images = digits(10 * n, 12, seed=seed + 100).images
    return images[:n] if classes is None else images[10 * np.arange(n) + classes]


def test_a_perfect_sampler(classifier, parts):
    report = evaluate(drawn_again, *parts, n=300, guidance=2.0, seed=3, classifier=classifier)
    assert report.samples == report.real == 300 and report.test == 500 and report.guidance == 2.0
    assert report.as_asked > 0.9 and min(report.as_asked_by_class) > 0.7
    assert 0.8 < report.variance < 1.25
    assert 0.5 < report.frechet / report.frechet_real < 2
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["samples"] == 300


def test_a_single_mode_in_each_class_is_seen(classifier, parts):
    train, test = parts
    prototypes = np.stack([train.images[np.flatnonzero(classifier.predict(train.images) == c)[0]] for c in range(10)])
    report = evaluate(lambda n, classes, seed: prototypes[classes], train, test, 300, classifier=classifier)
    assert report.as_asked == 1 and report.variance < 1e-6
    assert report.frechet > 3 * report.frechet_real


def test_wrong_classes_and_noise_are_seen(classifier, parts):
    def others(n, classes, seed):
        return drawn_again(n, (classes + 1) % 10, seed)

    wrong = evaluate(others, *parts, 300, classifier=classifier)
    assert wrong.as_asked < 0.1
    assert sum(wrong.found_by_class) == pytest.approx(1)
    noise = np.random.default_rng(0).integers(0, 256, (300, 12, 12, 1), dtype=np.uint8)
    report = evaluate(lambda n, classes, seed: noise, *parts, 300, classifier=classifier)
    assert report.frechet > 10 * report.frechet_real and report.as_asked < 0.4


def test_an_unconditional_model(classifier, parts):
    asked = []

    def sample(n, classes, seed):
        asked.append(classes)
        return drawn_again(n, classes, seed)

    report = evaluate(sample, *parts, 200, conditional=False, classifier=classifier)
    assert asked == [None] and report.as_asked is None and report.as_asked_by_class is None
    assert max(report.found_by_class) < 0.2 and 0.7 < report.variance < 1.3


def test_more_samples_than_training_images_ask_again(classifier, parts):
    train = parts[0].subset(range(50))
    seen = []

    def sample(n, classes, seed):
        seen.append(classes)
        return drawn_again(n, classes, seed)

    report = evaluate(sample, train, parts[1], 100, classifier=classifier)
    assert report.real == 50 and report.samples == 100 and np.bincount(seen[0]).tolist() == [10] * 10


def test_samples_of_another_size_are_refused(classifier, parts):
    with pytest.raises(CudiffError, match="do not compare"):
        evaluate(lambda n, classes, seed: np.zeros((n, 16, 16, 1), np.uint8), *parts, 20, classifier=classifier)


def test_too_few_are_refused(classifier, parts):
    for n, train, test in ((1, *parts), (20, parts[0].subset([0]), parts[1]), (20, parts[0], parts[1].subset([0]))):
        with pytest.raises(CudiffError, match="2 or more"):
            evaluate(drawn_again, train, test, n, classifier=classifier)
    report = evaluate(drawn_again, parts[0].subset([0, 1]), parts[1].subset([0, 1]), 2, classifier=classifier)
    assert (report.samples, report.real, report.test) == (2, 2, 2)


def table_text(report):
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.table())
    return console.export_text()


@pytest.mark.parametrize("conditional", [True, False])
def test_the_table_says_it_all(classifier, parts, conditional):
    guidance = 1.5 if conditional else None
    report = evaluate(drawn_again, *parts, 200, conditional=conditional, guidance=guidance, classifier=classifier)
    text = table_text(report)
    assert f"{report.frechet:.3f}" in text and f"{report.frechet_real:.3f}" in text
    assert f"{classifier.test_accuracy:.2%}" in text and f"{report.variance:.2f}" in text
    assert ("guidance 1.5" in text) == conditional and ("as asked" in text) == conditional
    _, of_all = re.findall(r"\b(all)\b[^%]*?([\d.]+%)", text)[0]
    assert of_all == (f"{report.as_asked:.1%}" if conditional else "100.0%")


@pytest.mark.parametrize("n, test, meaningful, warned", [
    (5, 500, False, ["5 samples are too few", "5 training images are too few", "500 test images are few"]),
    (128, 500, False, ["128 samples are too few", "128 training", "500 test images are few"]),
    (129, 500, True, ["129 samples are few", "129 training images are few", "500 test images are few"]),
    (200, 20, False, ["200 samples are few", "200 training images are few", "20 test images are too few"]),
    (1279, 500, True, ["1,279 samples are few", "1,279 training images are few", "500 test images are few"]),
    (1280, 500, True, ["500 test images are few"]),
])
def test_too_few_images_for_a_frechet_distance(n, test, meaningful, warned, classifier, parts):
    report = evaluate(drawn_again, parts[0], parts[1].subset(range(test)), n, classifier=classifier)
    assert (report.frechet is not None) == (report.frechet_real is not None) == meaningful
    *notes, others = report.notes
    assert all(note.startswith(begin) for note, begin in zip(notes, warned, strict=True))
    kinds = (f"{n:,} samples and {n:,} training images and " if n < 1000 else "") + f"{test} test images"
    assert f"precision and recall vary by chance with {kinds}: compare runs of equal numbers, or give 1,000" in others
    text = " ".join(table_text(report).split())
    assert ("not meaningful" in text) != meaningful and "1,280 or more make it meaningful" in text


def test_the_table_tells_what_a_loader_noted(classifier, parts):
    train = dataclasses.replace(parts[0], notes=("3 pictures lie beside the classes",))
    assert "3 pictures lie beside the classes" in table_text(evaluate(drawn_again, train, parts[1], 100,
                                                                      classifier=classifier))


# --- data without labels, features of one's own ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def unlabelled(parts):
    return tuple(dataclasses.replace(part, labels=None, num_classes=0, class_names=None) for part in parts)


@pytest.fixture(scope="module")
def turner(unlabelled, cache):
    return module.train_rotations(*unlabelled, device="cpu", cache=cache)


def test_rotations_are_those_of_each_image(rng):
    images = rng.integers(0, 256, (3, 4, 4, 1), np.uint8)
    turned = module._rotations(Dataset(images))
    assert turned.num_classes == 4 and turned.labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    np.testing.assert_array_equal(turned.images[:3], images)
    np.testing.assert_array_equal(turned.images[3:6, 0, :, 0], images[:, :, -1, 0])  # the right column came to the top
    np.testing.assert_array_equal(turned.images[6:9], images[:, ::-1, ::-1])
    np.testing.assert_array_equal(turned.images[9:, :, -1, 0], images[:, 0, :, 0])  # the top row to the right


def test_rotations_are_learned_of_some_images(unlabelled, monkeypatch):
    """The same ones each time, of a large data set as many as may be turned."""
    seen = []
    monkeypatch.setattr(module, "train_classifier", lambda train, test, *rest: seen.append((train, test)))
    monkeypatch.setattr(module, "MOST_TURNED", 40)
    for _ in range(2):
        module.train_rotations(unlabelled[0], unlabelled[1].subset(range(10)))
    (train, test), again = seen
    assert (len(train), len(test)) == (160, 40) and len(np.unique(train.images, axis=0)) == 160
    np.testing.assert_array_equal(train.images, again[0].images)


def test_data_without_labels_is_judged_by_rotations(turner, unlabelled, rng):
    """Digits drawn anew are near the data, one digit again and again is good but misses most, noise is neither."""
    assert turner.test_accuracy > 0.7
    one = drawn_again(1, np.array([3]), 0)
    samplers = {
        "good": lambda n, classes, seed: drawn_again(n, classes, seed),
        "one": lambda n, classes, seed: np.clip(
            one.astype(int) + rng.integers(-3, 4, (n, *one.shape[1:])), 0, 255).astype(np.uint8),
        "noise": lambda n, classes, seed: rng.integers(0, 256, (n, 12, 12, 1), np.uint8),
    }
    found = {name: evaluate(sample, *unlabelled, 300, classifier=turner) for name, sample in samplers.items()}
    good, one, noise = found.values()
    assert 0.5 < good.frechet / good.frechet_real < 2 and min(good.precision, good.recall) > 0.75
    assert abs(good.kernel) < 0.1 * min(one.kernel, noise.kernel)
    assert one.recall < 0.1 and noise.precision < 0.2 and min(one.frechet, noise.frechet) > 3 * good.frechet
    assert (good.class_names, good.as_asked, good.variance, good.found_by_class) == ((), None, None, [])
    text = " ".join(table_text(good).split())
    assert "300 samples against digits, seed 0" in text and "no labels" in text
    assert f"right on {turner.test_accuracy:.2%} of the test images' rotations" in text and "class" not in text
    assert json.loads(json.dumps(good.to_dict(), allow_nan=False))["precision"] == good.precision


def test_a_conditional_model_beside_data_without_labels_is_asked_for_no_class(turner, unlabelled):
    asked = []
    evaluate(lambda n, classes, seed: asked.append(classes) or drawn_again(n, classes, seed), *unlabelled, 20,
             conditional=True, classifier=turner)
    assert asked == [None]


def test_rotations_that_cannot_be_told_are_warned_of(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "cache_folder", lambda name: tmp_path)
    noise = Dataset(rng.integers(0, 256, (200, 8, 8, 1), np.uint8))
    report = evaluate(lambda n, classes, seed: noise.images[:n], *noise.split(100), 50, device="cpu")
    assert report.classifier_accuracy < 0.5 and "rotations are hardly told" in report.notes[-1]


def pixels(images):
    return images.reshape(len(images), -1)[:, ::20] / 255


def test_samples_against_the_training_images(turner, unlabelled):
    """All of them, in place of the test images, which stand beside the samples then."""
    train, test = unlabelled
    report = evaluate(drawn_again, train, test, 200, classifier=turner, against="train")
    other = evaluate(lambda n, classes, seed: drawn_again(200, None, seed), test, train, 200, classifier=turner)
    assert (report.real, report.test, report.frechet, report.precision) == (1500, 500, other.frechet, other.precision)
    real = module.frechet_or_none(*map(turner.features, (test.images, train.images)))
    assert report.frechet_real == pytest.approx(real)
    text = " ".join(table_text(report).split())
    assert "to 1,500 training images" in text and "500 test images" in text and "copies of them have the least" in text
    copies = evaluate(lambda n, classes, seed: train.images[:n], train, test, 200, classifier=turner, against="train")
    assert copies.precision == 1 and copies.frechet < report.frechet
    with pytest.raises(CudiffError, match="samples are compared with test or train images, not 'all'"):
        evaluate(drawn_again, train, test, 20, classifier=turner, against="all")


@pytest.mark.parametrize("labelled", [True, False])
def test_features_of_ones_own(classifier, parts, unlabelled, labelled, monkeypatch):
    """No network is trained where only features are asked for; of data with labels the classes are judged as before."""
    monkeypatch.setattr(module, "_train", lambda *args: pytest.fail("trained"))
    train, test = parts if labelled else unlabelled
    sizes = []
    report = evaluate(drawn_again, train, test, 700, classifier=classifier if labelled else None,
                      features=lambda images: sizes.append(len(images)) or pixels(images))
    assert sizes == [500, 200, 500, 200, 500] and (report.as_asked is None) != labelled
    images = drawn_again(700, np.resize(train.subset(module.shuffled_index(np.arange(700), 1500, 0)).labels, 700), 0) \
        if labelled else drawn_again(700, None, 0)
    assert report.frechet == pytest.approx(module.frechet_or_none(pixels(images), pixels(test.images)), rel=1e-9)
    assert report.kernel == pytest.approx(module.kernel_distance(pixels(images), pixels(test.images)), rel=1e-9)
    assert (report.precision, report.recall) == module.precision_recall(pixels(test.images), pixels(images))
    assert report.features == "a function of your own" and "a function of your own" in table_text(report)
    as_tensor = evaluate(drawn_again, train, test, 700, classifier=classifier if labelled else None,
                         features=lambda images: Tensor(pixels(images)))
    assert as_tensor == report


@pytest.mark.parametrize("function, message", [
    (lambda images: images, r"features returned uint8 \(20, 12, 12, 1\) for 20 images: return finite floats \(N, D\)"),
    (lambda images: np.zeros(len(images)), r"features returned float64 \(20,\) for 20 images"),
    (lambda images: np.zeros((3, 4)), r"features returned float64 \(3, 4\) for 20 images"),
    (lambda images: np.zeros((len(images), 0)), r"float64 \(20, 0\)"),
    (lambda images: np.zeros((len(images), 2), int), r"int64 \(20, 2\)"),
    (lambda images: np.full((len(images), 2), np.nan), r"finite"), (lambda images: 3.0, r"float64 \(\)"),
])
def test_features_that_are_none(unlabelled, function, message):
    with pytest.raises(CudiffError, match=message):
        evaluate(drawn_again, *unlabelled, 20, features=function)


def test_latents_need_features(rng):
    data = Dataset(rng.standard_normal((40, 4, 4, 2)).astype(np.float32), [0, 1] * 20, 2, "codes", latents=True)
    with pytest.raises(CudiffError, match="codes are latents, which no classifier here judges: give a function"):
        evaluate(lambda n, classes, seed: data.images[:n], *data.split(10), 5)
    report = evaluate(lambda n, classes, seed: data.images[:n], *data.split(10), 20,
                      features=lambda latents: latents.mean(axis=(1, 2)))
    assert report.frechet is not None and report.class_names == () and report.classifier_accuracy is None
    before = data.images.copy()
    evaluate(lambda n, classes, seed: data.images[:n], *data.split(10), 20,
             features=lambda latents: latents.mean((1, 2), out=latents[:, 0, 0]))
    np.testing.assert_array_equal(data.images, before)


# --- a loaded model --------------------------------------------------------------------------------------------------


def tiny_pipeline(**options):
    config = Config(channel_mult=(1, 2), num_res_blocks=1, model_channels=16, sample_steps=2, **options)
    return Pipeline(config, build(config))


def test_a_pipeline_is_judged_on_its_data_and_what_it_held_out(tmp_path, monkeypatch):
    data = digits(300, 12)
    save_npz(tmp_path / "digits.npz", data.images, data.labels)
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LEAST_STEPS", 4)
    pipeline = tiny_pipeline(
        data=str(tmp_path / "digits.npz"), image_size=12, channels=1, num_classes=10, validation=60, guidance=1.5
    )
    report = evaluate_pipeline(pipeline, 24, seed=2, batch_size=16)
    assert (report.samples, report.real, report.test, report.guidance) == (24, 24, 60, 1.5)
    assert len(list((tmp_path / "cache" / "classifiers").iterdir())) == 1
    assert report == evaluate_pipeline(pipeline, 24, seed=2, batch_size=24)
    assert None in report.variance_by_class and "–" in table_text(report)  # of 24 images some class has under two
    assert evaluate_pipeline(pipeline, 24, guidance=3.0).guidance == 3.0


@pytest.mark.parametrize("options, message", [
    ({"guidance": -1.0}, "guidance"), ({"steps": 0}, "steps"), ({"sampler": "plms"}, "unknown sampler 'plms'"),
    ({"seed": -1}, "seed"), ({"batch_size": 0}, "batch_size"), ({"n": 0}, "n must be at least 1"),
    ({}, "has classes 0 to 2, and -1 for none; 3 is not one"),
])
def test_mistakes_are_told_before_the_classifier_is_trained(options, message, tmp_path, monkeypatch):
    data = Dataset(digits(40, 8).images, np.arange(40) % 4, 4, "four")
    save_npz(tmp_path / "four.npz", data.images, data.labels)
    monkeypatch.setattr(module, "train_classifier", lambda *args, **options: pytest.fail("trained"))
    pipeline = tiny_pipeline(data=str(tmp_path / "four.npz"), image_size=8, channels=1, num_classes=3)
    with pytest.raises(CudiffError, match=message):
        evaluate_pipeline(pipeline, **{"n": 4, **options})


def test_an_unconditional_pipeline_asks_for_no_classes(monkeypatch):
    seen = {}
    monkeypatch.setattr(module, "evaluate", lambda *args, **options: seen.update(options, parts=args[1:3]) or args[0])
    pipeline = tiny_pipeline(data="digits", image_size=16, channels=1)
    sample = evaluate_pipeline(pipeline, 5)
    assert not seen["conditional"] and seen["guidance"] is None
    assert [len(part) for part in seen["parts"]] == [4000, 1000]
    assert sample(3, None, 0).shape == (3, 16, 16, 1)


def test_a_model_of_one_class_is_asked_for_it(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(module, "evaluate", lambda *args, **options: seen.update(options))
    save_npz(tmp_path / "one.npz", digits(20, 8).images, np.zeros(20, np.int64))
    data = str(tmp_path / "one.npz")
    evaluate_pipeline(tiny_pipeline(data=data, image_size=8, channels=1, num_classes=1, guidance=1.5), 5)
    assert seen["conditional"] and seen["guidance"] == 1.5 and seen["seed"] == 0


@pytest.mark.parametrize("validation, seed", [(0, 3), (25, 3), (25, 4)])
def test_data_without_a_test_part_is_split_as_training_split_it(tmp_path, monkeypatch, validation, seed):
    """A tenth of it where training held nothing out."""
    data = digits(100, 8)
    save_npz(tmp_path / "digits.npz", data.images, data.labels)
    seen = []
    monkeypatch.setattr(module, "evaluate", lambda sample, *parts, **options: seen.extend(parts[:2]))
    evaluate_pipeline(tiny_pipeline(data=str(tmp_path / "digits.npz"), image_size=8, channels=1, num_classes=10,
                                    validation=validation, seed=seed))
    for found, expected in zip(seen, data.split(validation or 10, seed), strict=True):
        np.testing.assert_array_equal(found.images, expected.images)


def test_a_pipeline_is_judged_on_data_without_labels(tmp_path, monkeypatch):
    save_npz(tmp_path / "digits.npz", digits(120, 8).images)
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "LEAST_STEPS", 4)
    pipeline = tiny_pipeline(data=str(tmp_path / "digits.npz"), image_size=8, channels=1, num_classes=0, validation=20)
    report = evaluate_pipeline(pipeline, 12)
    assert (report.real, report.test, report.class_names, report.frechet) == (12, 20, (), None)
    assert 0 <= report.precision <= 1 and "20 test images are too few" in table_text(report)
    assert len(list((tmp_path / "cache" / "classifiers").iterdir())) == 1
    own = evaluate_pipeline(pipeline, 12, features=lambda images: images[:, ::4, ::4, 0].reshape(len(images), -1) / 255)
    assert own.frechet is not None and own.classifier_accuracy is None


def test_classes_of_other_data_are_found_by_their_names(tmp_path, monkeypatch):
    for number, name in enumerate(("dog", "hen")):
        save_images(tmp_path / "data" / name, np.full((8, 8, 8, 1), 90 * number, np.uint8))
    asked = []
    monkeypatch.setattr(module, "evaluate", lambda sample, *parts, **options: sample(3, np.array([0, 1, 1]), 0))
    monkeypatch.setattr(Pipeline, "sample", lambda self, n, seed, classes, *rest, **options: asked.append(classes))
    model = tiny_pipeline(image_size=8, channels=1, num_classes=3, class_names=("cat", "hen", "dog"))
    evaluate_pipeline(model, 5, tmp_path / "data")
    assert asked[0].tolist() == [2, 1, 1]
    (tmp_path / "data" / "dog").rename(tmp_path / "data" / "cow")
    with pytest.raises(CudiffError, match="data has the class cow, and the model cat, hen, dog: give data with its"):
        evaluate_pipeline(model, 5, tmp_path / "data")
