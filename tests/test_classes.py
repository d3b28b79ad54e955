"""Classes by name: from the data into configurations and checkpoints, and asked for in sampling."""

from argparse import Namespace

import numpy as np
import pytest
from PIL import Image

from cudiff.checkpoint import load_checkpoint
from cudiff.classes import chosen, names_in_words, numbers_of
from cudiff.config import Config, from_arguments
from cudiff.data import Dataset, load_dataset
from cudiff.errors import CudiffError
from cudiff.options import Option, as_text
from cudiff.pipeline import load
from cudiff.train import Trainer
from tests.test_cli import TINY, cli, mistake  # noqa: F401  fixtures
from tests.test_data import picture

NAMES = ("african", "indian", "2")


def test_a_class_is_its_name_or_else_its_number():
    assert numbers_of(["indian", "2", 2, "1", "-1", -1], NAMES, "it") == [1, 2, 2, 1, -1, -1]
    assert numbers_of(["1", 1], ("1", "0"), "it") == [0, 1]  # a text names, a number counts
    assert chosen([0, "2"], NAMES, "it") == [0, 2]
    with pytest.raises(CudiffError, match=r"^it has no class 3: its classes are african, indian, 2$"):
        chosen([3], NAMES, "it")
    with pytest.raises(CudiffError, match=r"^the model has no class 'x{80}': its classes are african, indian, 2$"):
        numbers_of(["indian", "x" * 90], NAMES, "the model")
    with pytest.raises(CudiffError, match=r"^it has no class 'x': give numbers, from 0: they have no names"):
        numbers_of(["x"], (), "it")


def test_a_number_that_is_not_among_names_of_numbers_is_no_place_among_them():
    """Of digits 1 and 3 alone, 0 was drawn as a 1."""
    assert numbers_of(["3", 0, "-1", "2"], ("1", "3"), "it") == [1, 0, -1, 2]
    for text in ("0", "01"):
        with pytest.raises(CudiffError, match=f"^it has no class '{text}': its classes are 1, 3$"):
            numbers_of([text], ("1", "3"), "it")


def test_of_many_names_the_first_twenty_are_listed():
    names = [f"n{i}" for i in range(1021)]
    assert names_in_words(names[:20]) == ", ".join(names[:20])
    assert names_in_words(names) == ", ".join(names[:20]) + " and 1,001 more"


def test_texts_are_options_too():
    option = Option((), "help", entries=str)
    assert option.parsed("T-shirt/top, Ankle boot") == ("T-shirt/top", "Ankle boot") == option.checked(
        "x", ["T-shirt/top", "Ankle boot"])
    assert option.metavar == "NAME,NAME,.." and as_text(("a", "b")) == "a,b"
    assert len(option.checked("x", ["n"] * 1000)) == 1000
    assert option.checked("x", ["a", 3]) == ("a", "3")  # a class by its number
    with pytest.raises(CudiffError, match=r"x must be text, not 3\.5"):
        option.checked("x", ["a", 3.5])
    with pytest.raises(CudiffError, match="only numbers have least"):
        Option((), "help", entries=str, least=1)


@pytest.mark.parametrize("given, classes, names, expected", [
    ((), -1, NAMES, NAMES), ((), 3, NAMES, NAMES), ((), 5, NAMES, NAMES), ((), 0, NAMES, ()), ((), -1, None, ()),
    (("a", "b", "c"), -1, NAMES, ("a", "b", "c")), (("a",), 3, None, ("a",)),
])
def test_a_configuration_takes_the_names_of_its_data(given, classes, names, expected):
    """Names that it has go before; an unconditional model needs none."""
    config = Config(class_names=given, num_classes=classes).for_data((9, 8, 8, 1), 3, names)
    assert config.class_names == expected and Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("values, message", [
    ({"class_names": ["a", "b", "a"]}, "class_names has 'a' twice"),
    ({"class_names": ["a", "b"], "num_classes": 1}, r"2 class_names for 1 classes \(num_classes\): give no more"),
    ({"class_names": ["a"], "num_classes": 0}, "1 class_names for 0 classes"),
])
def test_names_that_do_not_fit_are_refused(values, message):
    with pytest.raises(CudiffError, match=message):
        Config(**values)
    with pytest.raises(CudiffError, match="4 class_names for 3 classes"):
        Config(class_names=tuple("abcd")).for_data((9, 8, 8, 1), 3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder of one step on class folders."""
    home = tmp_path_factory.mktemp("named")
    for name in NAMES[:2]:
        (home / "photos" / name).mkdir(parents=True)
        for index in range(4):
            Image.fromarray(picture(8, 8, 3)).save(home / "photos" / name / f"{index}.png")
    from cudiff.cli import main

    words = ["train", *TINY, "--model-channels", "16", "--data", str(home / "photos"), "--folder", str(home / "run")]
    assert main(words) == 0
    return home


def test_a_checkpoint_holds_the_names_of_class_folders(run, cli):  # noqa: F811
    assert load_checkpoint(run / "run").config.class_names == ("african", "indian")
    pipeline = load(run / "run", "cpu")
    assert pipeline.class_names == ("african", "indian")
    by_number = pipeline.sample(3, classes=[1, 0, -1])
    np.testing.assert_array_equal(pipeline.sample(3, classes=["indian", "african", "-1"]), by_number)
    np.testing.assert_array_equal(pipeline.sample(2, classes="indian"), pipeline.sample(2, classes=1))
    np.testing.assert_array_equal(pipeline.sample(2, classes="indian", other="african", share=1.0),
                                  pipeline.sample(2, classes=1, other=0, share=1.0))
    pipeline.save(run / "copy.safetensors")
    assert load(run / "copy.safetensors", "cpu").class_names == ("african", "indian")
    for classes in ("asian", ["indian", "asian"]):
        with pytest.raises(CudiffError, match="the model has no class 'asian': its classes are african, indian"):
            pipeline.sample(2, classes=classes)
    with pytest.raises(CudiffError, match=r"the model has classes 0 to 1 \(african, indian\), and -1 for none; 2 is"):
        pipeline.sample(2, classes="2")
    code, out, _ = cli("info", run / "run")
    assert code == 0 and "class_names" in out and "african, indian" in out


def test_classes_are_asked_for_by_name_on_the_command_line(run, cli, mistake, tmp_path):  # noqa: F811
    words = ["sample", run / "run", "--device", "cpu", "-n", "4", "--out", "a.npz"]
    assert cli(*words, "--classes", "indian, african")[0] == 0
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["labels"].tolist() == [1, 0, 1, 0]
    assert "no class 'asian': its classes are african, indian" in mistake(*words, "--classes", "asian,indian")


def test_images_of_no_class_are_written_without_labels(run, cli, tmp_path):  # noqa: F811
    words = ["sample", run / "run", "--device", "cpu", "-n", "4", "--out", "a.npz", "--classes"]
    for classes in ("-1", "indian,-1"):
        assert cli(*words, classes)[0] == 0
        data = load_dataset(tmp_path / "a.npz")
        assert len(data) == 4 and data.labels is None


def test_names_that_the_command_line_cannot_say():
    composed, names = "caf\xe9", ("cafe\u0301", "red, blue", "green ")
    assert numbers_of([composed, "cafe\u0301", "green ", "1"], names, "it") == [0, 0, 2, 1]
    assert numbers_of([composed], (composed, "cafe\u0301"), "it") == [0]
    with pytest.raises(CudiffError, match=r"no class 'red': its classes are .*; say one with a comma, or a space"):
        numbers_of(["red"], names, "it")


def test_only_some_class_folders(run, cli, mistake, tmp_path):  # noqa: F811
    words = ["train", *TINY, "--data", run / "photos", "--model-channels", "16"]
    assert cli(*words, "--only-classes", "indian", "--folder", "one")[0] == 0
    config = load_checkpoint(tmp_path / "one").config
    assert (config.num_classes, config.class_names, config.only_classes) == (1, ("indian",), ("indian",))
    assert "'' is not names such as ant,bee" in mistake(*words, "--only-classes", "", "--folder", "two")
    error = mistake(*words, "--only-classes", "asian", "--folder", "two")
    assert "photos has no class 'asian': its classes are african, indian" in error


@pytest.mark.parametrize("given, base, expected", [
    ({"preset": "digits"}, None, -1), ({}, None, -1), ({"preset": "mnist-ddpm"}, None, 0),
    ({"num_classes": 3}, None, 3), ({}, Config(num_classes=10), 10),
])
def test_some_of_the_classes_are_those_of_the_model(given, base, expected):
    """Not the ten of the preset, nine of which no image would train; a run that goes on keeps its own."""
    options = Namespace(only_classes=("5",), **given)
    assert from_arguments(options, base).num_classes == expected


def test_weights_go_on_with_other_classes(run, cli, tmp_path):  # noqa: F811
    code, _, error = cli("train", *TINY, "--model-channels", "16", "--init", run / "run", "--data", "digits",
                         "--folder", "digits")
    assert code == 0, error
    assert load_checkpoint(tmp_path / "digits").config.class_names == tuple("0123456789")


def going_on(folder, names, renamed):
    """A run on images of three classes that goes on where these have other names, in the order of the data's."""
    config = Config(image_size=8, model_channels=16, channel_mult=(1,), num_res_blocks=1, batch_size=2, steps=1,
                    sample_every=0, device="cpu")
    labels = [0, 1, 2, 1, 2, 2]
    Trainer(config, Dataset(picture(6, 8, 8, 1), labels, 3, class_names=names), folder).run()
    checkpoint, now = load_checkpoint(folder), sorted(renamed)
    data = Dataset(picture(6, 8, 8, 1), [now.index(renamed[label]) for label in labels], 3, class_names=now)
    with pytest.raises(CudiffError, match=r"the class a is now \w+.*\).*--data-changed"):
        Trainer(checkpoint.config.replace(steps=2), data, folder, checkpoint)
    return Trainer(checkpoint.config.replace(steps=2), data, folder, checkpoint, data_changed=True)


@pytest.mark.parametrize("renamed", [("z", "b", "c"), ("z", "b", "y"), ("0", "b", "c")])
def test_a_class_that_is_renamed_keeps_its_number_and_leaves_the_others_theirs(renamed, tmp_path):
    trainer = going_on(tmp_path, ("a", "b", "c"), renamed)
    names = trainer.config.class_names
    assert names[1] == "b" and set(names) == set(renamed) and trainer.data["class_names"] == list(names)
    labels = np.concatenate([part.labels for part in (trainer.training, trainer.held_out)])
    assert np.bincount(labels)[names.index("b")] == 2 and np.bincount(labels)[names.index(renamed[0])] == 1
    trainer.run()
    assert load_checkpoint(tmp_path).config.class_names == names


def test_names_of_a_run_that_goes_on_are_the_datas_or_ones_own(tmp_path):
    assert going_on(tmp_path / "all", ("a", "b", "c"), ("d", "e", "f")).config.class_names == ("d", "e", "f")
    checkpoint = load_checkpoint(tmp_path / "all")
    own = checkpoint.config.replace(steps=2, class_names=("x", "y", "z"))
    data = Dataset(picture(6, 8, 8, 1), [0, 1, 2, 1, 2, 2], 3, class_names=("a", "b", "c"))
    trainer = Trainer(own, data, tmp_path / "all", checkpoint, data_changed=True)
    assert trainer.config.class_names == ("x", "y", "z")


@pytest.mark.parametrize("own, before, expected, labels", [
    (("a", "c"), ("a", "b", "c"), ("a", "b", "c"), [0, 2]),
    (("c", "d", "a"), ("a", "b", "c"), ("a", "d", "c"), [2, 1, 0]),
    (("a", "b", "d"), ("a", "b"), ("a", "b", "d"), [0, 1, 2]),
    (("d", "a", "e"), ("b", "a"), ("d", "a", "e"), [0, 1, 2]),
    (("x", "y"), ("a", "b"), ("x", "y"), [0, 1]),
])
def test_classes_are_numbered_as_before(own, before, expected, labels):
    data = Dataset(picture(len(own), 4, 4, 1), np.arange(len(own)), len(own), class_names=own).numbered(before)
    assert data.class_names == expected and data.labels.tolist() == labels and data.num_classes == len(expected)
