"""Checkpoints made, loaded and weighed against their models, without PyTorch."""

import numpy as np
import pytest

import cudiff
from cudiff.backend import default_device
from cudiff.checkpoint import load_checkpoint, prefixed, save_checkpoint
from cudiff.config import Config
from cudiff.convert import other_options, to_torch, write_weights
from cudiff.errors import CudiffError
from cudiff.models import build, register_model
from cudiff.nn import BatchNorm2d, Conv2d, Module
from cudiff.pipeline import Pipeline, import_torch
from cudiff.registry import MODELS
from tests.test_pipeline import TINY, randomised


def test_weights_of_a_safetensors_file_are_a_checkpoint(tmp_path):
    net = randomised(build(TINY))
    state = to_torch(net.state_dict(), net.layouts())
    write_weights(tmp_path / "weights.safetensors", state)
    with pytest.raises(CudiffError, match=r"one state_dict, and key \(--key\) chooses of a .pt's .*: leave it out"):
        import_torch(tmp_path / "weights.safetensors", tmp_path / "model.safetensors", TINY, "ema")
    assert import_torch(tmp_path / "weights.safetensors", tmp_path / "model.safetensors", TINY) == TINY
    assert other_options(state, TINY) == {} == other_options({}, TINY)
    assert other_options({"input_blocks.0.0.weight": state["input_blocks.0.0.weight"]}, TINY) == {}
    loaded = cudiff.load(tmp_path / "model.safetensors", "cpu")
    np.testing.assert_array_equal(loaded.sample(2), Pipeline(TINY, net).sample(2))


@pytest.mark.parametrize("device", [None, "auto"])
def test_a_checkpoint_is_loaded_where_there_is_a_gpu_unless_told(device, tmp_path):
    Pipeline(TINY, randomised(build(TINY))).save(tmp_path / "model.safetensors")
    assert cudiff.load(tmp_path / "model.safetensors", device).device == default_device()
    loaded = cudiff.load(tmp_path / "model.safetensors", "cpu")
    assert loaded.device == "cpu" and not any(value.requires_grad for value in loaded.net.parameters())
    trainable = cudiff.load(tmp_path / "model.safetensors", "cpu", trainable=True)
    assert all(value.requires_grad for value in trainable.net.parameters()) and trainable.net.training
    with pytest.raises(TypeError, match="trainable is True or False, not 'no'"):
        cudiff.load(tmp_path / "model.safetensors", "cpu", trainable="no")
    with pytest.raises(CudiffError, match="unknown weights 'raw': use ema or model"):
        cudiff.load(tmp_path / "model.safetensors", "cpu", "raw")


def test_weights_have_buffers_and_moments_have_none(tmp_path, monkeypatch):
    """A model with batch norms: its running means are in the weights and in their average."""

    class Normed(Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = Conv2d(1, 4, 3), BatchNorm2d(4)

    register_model("normed", "with batch norms")(lambda config: Normed())
    monkeypatch.setitem(MODELS, "normed", MODELS.pop("normed"))  # until the test ends
    config = Config(model="normed", image_size=8, channels=1)
    net = build(config)
    state, parameters = net.state_dict(), {name: value.numpy() for name, value in net.named_parameters()}
    assert set(parameters) < set(state)
    path, counters = tmp_path / "a.safetensors", {"step": 1}

    def save(**parts):
        tensors = {}
        for name, part in parts.items():
            tensors |= prefixed(name, part)
        save_checkpoint(path, config, tensors, counters)
        return load_checkpoint(path)

    assert len(save(model=state, ema=state, exp_avg=parameters, exp_avg_sq=parameters).tensors) == 2 * (
        len(state) + len(parameters))
    for parts, name in [({"model": parameters}, "model"), ({"model": state, "ema": parameters}, "ema"),
                        ({"model": state, "exp_avg": state}, "exp_avg")]:
        with pytest.raises(CudiffError, match=f"its '{name}' does not fit its configuration's model"):
            save(**parts)
