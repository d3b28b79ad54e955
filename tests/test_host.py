"""What the host does for a training step on a GPU: that every path runs, how many launches it makes, its memory."""

from collections import Counter

import numpy as np
import pytest

from cudiff.config import PRESETS
from cudiff.data import Dataset
from cudiff.train import Trainer
from tests.host import Memory, forget, pretend


@pytest.fixture
def host_of(monkeypatch):
    yield lambda hopper: pretend(monkeypatch, hopper)
    monkeypatch.undo()
    forget()


def trainer(config, folder):
    config = config.replace(device="cuda", validation=0, capture=False)
    size, classes = config.image_size or 32, config.num_classes
    images = np.zeros((64, size, size, config.channels or 3), np.uint8)
    data = Dataset(images, np.arange(64) % classes, classes) if classes else Dataset(images)
    return Trainer(config, data, folder)


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("preset", ["digits", "mnist", "mnist-ddpm", "cs179", "elephants"])
def test_every_path_of_a_training_step_runs(host_of, tmp_path, preset, precision, hopper):
    host = host_of(hopper)
    step = trainer(PRESETS[preset].replace(precision=precision), tmp_path).train_step
    step()
    first = host.launches.copy()
    step()
    assert host.launches == 2 * first
    kernels = {stem for stem, _ in first}
    assert ("conv2d_sm90" in kernels) == (hopper and precision != "fp32")
    assert hopper or not any(stem.endswith("_sm90") for stem in kernels)
    assert {"optim", "group_norm" if preset != "cs179" else "pool"} <= {stem.removesuffix("_sm90") for stem in kernels}


def test_the_benchmarks_step(host_of, tmp_path):
    """An H200 took 698 MiB for the graph at 6ad84cd, beside 476 for what a step keeps."""
    host = host_of(True)
    step = trainer(PRESETS["elephants"].replace(precision="bf16", dropout=0.0), tmp_path).train_step
    step()
    host.launches.clear()
    host.memory = Memory()
    step()
    launches = Counter(stem for stem, _ in host.launches)
    assert launches.total() <= 360 and launches["conv2d_wgrad_sm90"] <= 24
    assert host.memory.taken <= 720 << 20
