"""The judge of samples: its distances against closed forms, its classifier, and reports on samples of known quality."""

import dataclasses
import io
import json
import math

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
    frechet_distance,
    train_classifier,
    variance_ratio,
    within_class_variance,
)
from cudiff.models import build
from cudiff.pipeline import Pipeline
from cudiff.plot import save_npz

# --- Fréchet distance ------------------------------------------------------------------------------------------------


def with_moments(rng, n, mean, covariance):
    """`n` points whose sample mean and sample covariance are exactly these."""
    x = rng.standard_normal((n, len(mean)))
    x -= x.mean(axis=0)
    whitened = x @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    return whitened @ np.linalg.cholesky(covariance).T + mean


def random_covariance(rng, size):
    factor = rng.standard_normal((size, 2 * size))
    return factor @ factor.T / size


def test_frechet_of_spheres_is_the_closed_form(rng):
    """|μa − μb|² + D (σa − σb)² for covariances σ²·I."""
    a = with_moments(rng, 200, np.zeros(8), 4.0 * np.eye(8))
    b = with_moments(rng, 300, np.full(8, 0.5), 0.25 * np.eye(8))
    assert frechet_distance(a, b) == pytest.approx(8 * 0.25 + 8 * 1.5**2, rel=1e-10)


def test_frechet_of_commuting_covariances(rng):
    """Σ (√λa − √λb)² where both covariances have the same eigenvectors."""
    rotation, _ = np.linalg.qr(rng.standard_normal((5, 5)))
    values_a, values_b = rng.uniform(0.1, 3, (2, 5))
    a = with_moments(rng, 100, np.zeros(5), rotation * values_a @ rotation.T)
    b = with_moments(rng, 100, np.zeros(5), rotation * values_b @ rotation.T)
    expected = np.square(np.sqrt(values_a) - np.sqrt(values_b)).sum()
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)


def test_frechet_of_any_covariances_by_the_eigenvalues_of_their_product(rng):
    """tr (Ca Cb)^½ is the sum of the roots of Ca·Cb's eigenvalues, which are real and positive; it is symmetric."""
    covariance_a, covariance_b, mean = random_covariance(rng, 6), random_covariance(rng, 6), rng.standard_normal(6)
    a, b = with_moments(rng, 50, mean, covariance_a), with_moments(rng, 80, np.zeros(6), covariance_b)
    common = np.sqrt(np.linalg.eigvals(covariance_a @ covariance_b).real).sum()
    expected = mean @ mean + np.trace(covariance_a) + np.trace(covariance_b) - 2 * common
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-12)


def test_frechet_is_zero_for_equal_sets_and_takes_flat_ones(rng):
    a = rng.standard_normal((40, 128)).astype(np.float32)  # fewer points than dimensions
    a[:, ::3] = 0  # dead features
    assert abs(frechet_distance(a, a[::-1])) < 1e-9
    assert frechet_distance(a, a + 0.5) == pytest.approx(128 * 0.25, rel=1e-5)
    assert frechet_distance(a[:, :1], 2 * a[:, :1]) == pytest.approx(0, abs=1e-12)  # one dimension, dead
    with pytest.raises(ValueError, match="two features"):
        frechet_distance(a[:1], a)


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


def test_a_frechet_distance_needs_two_images_of_each():
    two = np.array([[0.0], [2.0]])
    assert frechet_distance(two, two + 3) == pytest.approx(9)
    for a, b in ((two[:1], two), (two, two[:1])):
        with pytest.raises(ValueError, match="a covariance needs two features or more, not "):
            frechet_distance(a, b)


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


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path, parts):
    (tmp_path / "file").write_text("no folder")
    few = parts[0].subset(range(128)), parts[1].subset(range(20))
    assert 0 <= train_classifier(*few, device="cpu", epochs=1, cache=tmp_path / "file").test_accuracy <= 1


def test_classifier_needs_labels_and_parts_that_match(parts):
    train, test = parts
    with pytest.raises(CudiffError, match="no labels"):
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
    assert not conditional or f"{report.as_asked:.1%}" in text


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
    assert len(report.notes) == len(warned)
    assert all(note.startswith(begin) for note, begin in zip(report.notes, warned, strict=True))
    text = " ".join(table_text(report).split())
    assert ("not meaningful" in text) != meaningful and "1,280 or more make it meaningful" in text


def test_the_table_tells_what_a_loader_noted(classifier, parts):
    train = dataclasses.replace(parts[0], notes=("3 pictures lie beside the classes",))
    assert "3 pictures lie beside the classes" in table_text(evaluate(drawn_again, train, parts[1], 100,
                                                                      classifier=classifier))


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
