"""What samples are judged against: bytes, the model's own data under other names, and images that it knows."""

import numpy as np
import pytest

import cudiff
from cudiff import evaluate as module
from cudiff.config import Config
from cudiff.data import Dataset, load_dataset
from cudiff.errors import CudiffError
from cudiff.evaluate import evaluate, evaluate_pipeline
from cudiff.models import build
from cudiff.pipeline import Pipeline
from cudiff.plot import save_images
from cudiff.train import Trainer

NAMES = "ant", "bee"


@pytest.fixture
def insects(tmp_path, rng, monkeypatch):
    """A folder of two classes, and a pipeline(...) that was trained on it."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        save_images(tmp_path / name, rng.integers(0, 256, (20, 8, 8, 1), dtype=np.uint8))
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path.parent / "cache"))
    monkeypatch.setattr(module, "LEAST_STEPS", 2)

    def pipeline(**options):
        config = Config(data=str(tmp_path), image_size=8, channels=1, model_channels=8, channel_mult=(1,),
                        num_res_blocks=1, num_classes=2, sample_steps=1, **options)
        return Pipeline(config, build(config))

    return pipeline


def test_floats_are_refused(rng):
    data = Dataset(rng.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8), np.arange(40) % 2, 2, "two")
    with pytest.raises(CudiffError, match="samples are float32, not uint8"):
        evaluate(lambda n, classes, seed: np.zeros((n, 8, 8, 1), np.float32), data, data, 8,
                 features=lambda images: images.mean((1, 2)))


def test_its_own_data_may_have_had_other_names(insects):
    renamed = insects(class_names=("workers", "drones"))
    assert evaluate_pipeline(renamed, 8).samples == 8
    with pytest.raises(CudiffError, match="has the class ant, and the model workers"):
        evaluate_pipeline(renamed, 8, data=renamed.config.data)


@pytest.mark.parametrize("validation", [0, 8])
def test_images_that_the_model_knows_are_told(insects, validation):
    notes = evaluate_pipeline(insects(validation=validation), 8).notes
    assert any("training held out no image" in note for note in notes) == (validation == 0)


def test_its_own_data_by_another_path_is_judged_by_what_was_held_out(insects, tmp_path):
    """From another folder the path is another. A tenth of all had been taken, which the model knows."""
    for validation in (0, 8):
        pipeline = insects(validation=validation)
        pipeline.trained_on = load_dataset(tmp_path).fingerprint()
        own, there = (evaluate_pipeline(pipeline, 8, data=data) for data in (None, str(tmp_path / "." / "ant" / "..")))
        assert own == there and own.test == (validation or 4)
        assert evaluate_pipeline(insects(validation=validation), 8, data=tmp_path).test == 4


def test_data_that_has_changed_since_training_is_told(insects, tmp_path, rng):
    config = insects(validation=8).config.replace(batch_size=4, steps=1, sample_every=0, device="cpu")
    Trainer(config, load_dataset(config.data, image_size=8, channels=1), tmp_path.parent / "run").run()
    trained = cudiff.load(tmp_path.parent / "run", "cpu")
    assert not any("not the data" in note for note in evaluate_pipeline(trained, 8).notes)
    save_images(tmp_path / "bee", rng.integers(0, 256, (25, 8, 8, 1), dtype=np.uint8))
    (told,) = (note for note in evaluate_pipeline(trained, 8).notes if "not the data" in note)
    assert "(40 images are now 45)" in told
    trained.config = trained.config.replace(validation=0)
    assert not any("training held out no image" in note for note in evaluate_pipeline(trained, 8).notes)
