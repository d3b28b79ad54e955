"""Runs that begin with weights trained elsewhere: `Trainer(init=...)` and `cudiff train --init`."""

import numpy as np
import pytest

from cudiff.beginning import begin_alike, configuration_of, slow_widths
from cudiff.checkpoint import latest, load_checkpoint
from cudiff.cli import main
from cudiff.config import PRESETS
from cudiff.data import Dataset, load_dataset
from cudiff.distributed import Group
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.train import Trainer

TINY = PRESETS["digits"].replace(
    model_channels=8, num_heads=2, num_head_channels=0, batch_size=8, steps=6, log_every=3, sample_every=0,
    save_every=0, warmup=0, lr_schedule="constant", device="cpu",
)


class Said:
    """A display that keeps what it is told."""

    def __init__(self):
        self.lines = []

    def update(self, metrics):
        pass

    def message(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", image_size=16, count=120)


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """The folder of a finished run, whose average is not its weights."""
    trainer = Trainer(TINY, digits, tmp_path_factory.mktemp("trained") / "run")
    trainer.run()
    return trainer.folder


def test_a_run_begins_with_the_average(trained, digits, tmp_path):
    checkpoint = load_checkpoint(latest(trained))
    trainer = Trainer(configuration_of(checkpoint), digits, tmp_path / "new", init=checkpoint)
    average = {name.removeprefix("ema."): values for name, values in checkpoint.tensors.items() if name[:4] == "ema."}
    assert any((checkpoint.tensors[f"model.{name}"] != values).any() for name, values in average.items())
    for net in (trainer.net, trainer.ema.model):
        state = net.state_dict()
        assert all(np.array_equal(state[name], values) for name, values in average.items())
    said = Said()
    assert trainer.step == 0 and trainer.run(said)["step"] == 6
    assert said.lines[0] == f"{len(average)} of {len(average)} tensors begin as in the checkpoint"
    again = Trainer(TINY.replace(steps=8), digits, trainer.folder, load_checkpoint(latest(trainer.folder)))
    assert again.run()["step"] == 8


def test_classes_of_other_names_are_told(trained, digits, tmp_path):
    said, names = Said(), tuple("012345678x")
    other = Dataset(digits.images, digits.labels, 10, class_names=names)
    checkpoint = load_checkpoint(latest(trained))
    Trainer(configuration_of(checkpoint).replace(steps=1), other, tmp_path / "new", init=checkpoint).run(said)
    assert "classes begin by their numbers: x as 9" in said.lines
    assert not any("learned by" in line for line in said.lines)


def test_what_the_checkpoints_model_learned_is_told(trained, digits, tmp_path):
    said, checkpoint = Said(), load_checkpoint(latest(trained))
    Trainer(TINY.replace(steps=1, diffusion="flow"), digits, tmp_path / "new", init=checkpoint).run(said)
    assert ("the checkpoint's model learned by edm, this one learns by flow: --diffusion edm goes on as it began"
            in said.lines)


def test_options_that_make_another_function_of_the_same_weights_are_told(trained, digits, tmp_path):
    said, checkpoint = Said(), load_checkpoint(latest(trained))
    config = configuration_of(checkpoint).replace(steps=1, seed=5, lr=1e-4, data_mean=0.25, max_period=100.0,
                                                  use_new_attention_order=True)
    Trainer(config, digits, tmp_path / "new", init=checkpoint).run(said)
    assert said.lines[1] == ("options that are others in the checkpoint: data_mean 0.25, there 0, "
                             "use_new_attention_order on, there off, max_period 100, there 10000")


def test_other_classes_and_a_wider_model_take_what_fits(trained, digits, tmp_path):
    """The label embedding of ten classes is not that of three; a second block is new."""
    checkpoint = load_checkpoint(latest(trained))
    three = Dataset(digits.images[digits.labels < 3], digits.labels[digits.labels < 3], 3)
    config = configuration_of(checkpoint)
    assert (config.num_classes, config.image_size, config.channels) == (-1, 0, 0)
    said = Said()
    trainer = Trainer(config.replace(num_res_blocks=2, steps=1), three, tmp_path / "new", init=checkpoint)
    kept = trainer.net.state_dict()
    name = next(name for name in kept if name.startswith("label_emb"))
    assert kept[name].shape[0] in (3, 4) and checkpoint.tensors[f"ema.{name}"].shape[0] in (10, 11)
    trainer.run(said)
    text = "\n".join(said.lines)
    assert f"another shape, so they begin anew: {name}" in text and "not in the checkpoint, so they begin anew" in text
    assert "and " in text and " more" in text  # of many names six are repeated
    assert "classes begin by their numbers" not in text
    named = Dataset(three.images, three.labels, 3, class_names=("x", "y", "z"))
    trainer = Trainer(config.replace(steps=1), named, tmp_path / "named", init=checkpoint)
    trainer.run(said := Said())
    assert "classes begin by their numbers" not in "\n".join(said.lines)


def test_nothing_in_common_is_said(trained, digits, tmp_path):
    checkpoint = load_checkpoint(latest(trained))
    with pytest.raises(CudiffError, match="none of the checkpoint's weights fits this model"):
        other = PRESETS["cs179"].replace(image_size=16, device="cpu", sample_every=0)
        Trainer(other, digits, tmp_path / "new", init=checkpoint)
    with pytest.raises(CudiffError, match="give one of them"):
        Trainer(TINY, digits, tmp_path / "new", checkpoint, init=checkpoint)
    with pytest.raises(CudiffError, match="not Dataset and str"):
        Trainer(TINY, digits, tmp_path / "new", init=str(trained))
    for given in ({}, None, "digits"):
        with pytest.raises(CudiffError, match=rf"takes a cudiff.Config, not {type(given).__name__}: give Config\("):
            Trainer(given, digits, tmp_path / "new")
    with pytest.raises(CudiffError, match=r"what cudiff.load_dataset returns, .* not ndarray and NoneType"):
        Trainer(TINY, digits.images, tmp_path / "new")


def test_all_processes_begin_with_the_first_one_s_weights():
    class Second(Group):
        def broadcast(self, array, root=0):
            assert root == 0
            array[...] = 7

        def check_same(self, what, value):
            pass

    net = build(TINY.replace(image_size=16, channels=1)).flatten("cpu")
    begin_alike(Second(), TINY, {}, None, net)
    assert all((parameter.data == 7).all() for parameter in net.parameters())


def test_the_command(trained, tmp_path, monkeypatch, capsys):
    """The checkpoint's model on other data; flags change what they say."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--init", str(trained), "--steps", "2", "--lr", "1e-4", "--folder", "tuned"]) == 0
    assert "tensors begin as in the checkpoint" in " ".join(capsys.readouterr().out.split())
    config = load_checkpoint(latest("tuned")).config
    assert (config.model_channels, config.lr, config.steps) == (8, 1e-4, 2)
    assert main(["train", "--init", str(trained), "--resume", str(trained)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["train", "--init", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error and error.count("\n") == 1


@pytest.mark.parametrize("words, text", [
    (["--num-classes", "0"], "num_classes from 10 to 0"), (["--num-heads", "3"], "num_heads from 2 to 3"),
])
def test_what_a_resumed_run_cannot_change_is_told_first(trained, words, text, capsys):
    assert main(["train", "--resume", str(trained), *words]) == 2
    assert capsys.readouterr().err == f"cudiff: a resumed run cannot change {text}: leave it out, or start anew\n"


def test_a_preset_that_a_resumed_run_cannot_take_is_told_before_its_data_is_read(trained, capsys):
    for preset, text in (("mnist", "image_size from 16 to 28"), ("dit-s-2", "model from unet to dit")):
        assert main(["train", "--resume", str(trained), "--preset", preset, "--data", "nowhere"]) == 2
        assert capsys.readouterr().err == (
            f"cudiff: a resumed run cannot change {text}: leave --preset {preset} out, or start anew\n")


def test_options_of_sampling_that_change_nothing_are_told(tmp_path, capsys):
    words = ["train", "--model-channels", "8", "--num-head-channels", "8", "--batch-size", "8", "--steps", "1",
             "--sample-every", "0", "--device", "cpu", "--folder"]
    unused = ["--sampler", "euler", "--eta", "0.5", "--guidance-channels", "2"]
    assert main([*words, str(tmp_path / "a"), *unused]) == 0
    told = capsys.readouterr().out
    assert "sampler euler does not take eta: previews do without, and cudiff sample takes them with another" in told
    assert "guidance_channels 2 are more than the 1 that there are: all are guided" in told
    assert main([*words, str(tmp_path / "b"), "--sampler", "ddim", "--eta", "1"]) == 0
    told = capsys.readouterr().out
    assert "does not take" not in told and "guidance_channels" not in told


@pytest.mark.parametrize("preset, changes, message", [
    ("elephants", {"model_channels": 36, "num_head_channels": 12},
     "layers of 36, 108, 180, 252, 324 channels are slow: fast kernels take multiples of 8, such as 32 or 40"),
    ("elephants", {"model_channels": 48, "num_head_channels": 12}, ""), ("mnist", {}, ""), ("cs179", {}, ""),
    ("dit-mnist", {"depth": 2}, ""), ("dit-elephants", {"depth": 2, "patch_size": 8}, ""),
    ("elephants", {"model_channels": 36, "num_head_channels": 12, "precision": "fp32"}, ""),
])
def test_channels_that_fast_kernels_do_not_take_are_told(preset, changes, message):
    config = PRESETS[preset].replace(**{"precision": "bf16"} | changes)
    config = config.replace(num_classes=max(0, config.num_classes))
    net = build(config)
    net.precision = config.precision
    assert slow_widths(net, "cuda") == ([message] if message else []) and slow_widths(net, "cpu") == []
