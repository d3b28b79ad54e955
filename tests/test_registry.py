"""A user's own model, objective and sampler are trained, saved, loaded and sampled like those of the library."""

import argparse
import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

import cudiff
from cudiff import nn, registry
from cudiff.checkpoint import load_checkpoint
from cudiff.cli import main
from cudiff.config import PRESETS, Config, add_arguments, from_arguments
from cudiff.data import load_dataset
from cudiff.diffusion import EDM, Euler, Plan, Sampler, sample_euler
from cudiff.errors import CudiffError
from cudiff.folder import read_checkpoint
from cudiff.models import build
from cudiff.pipeline import export_torch
from cudiff.registry import MODELS, TABLES
from cudiff.tensorfile import read_header, read_tensors, write_tensors
from cudiff.train import Trainer


class Small(nn.Module):
    """A convolution with a shift by the time, and a batch norm, which has running means."""

    def __init__(self, config):
        super().__init__()
        self.first = nn.Conv2d(config.channels, config.hidden, 3)
        self.last = nn.Conv2d(config.hidden, config.channels, 3)
        self.norm, self.times = nn.BatchNorm2d(config.hidden), []

    def forward(self, x, t, labels=None):
        self.times.append(t.numpy())
        shift = cudiff.reshape(t, (x.shape[0], 1, 1, 1))
        return self.last(cudiff.silu(self.norm(self.first(x)) + shift))


class Scaled(EDM):
    """EDM with its loss scaled by an option."""

    def loss(self, label_dropout):
        plain, scale = super().loss(label_dropout), self.config.loss_scale
        return lambda *args: plain(*args) * scale


def check(config):
    if config.hidden % config.groups:
        raise CudiffError(f"hidden {config.hidden} does not divide by groups {config.groups}: use a multiple")


@pytest.fixture
def own():
    """A model "small", an objective "scaled" and a sampler "brief"; all registered ones go with the test."""
    before = {kind: dict(table) for kind, table in TABLES.items()}
    cudiff.register_model("small", "a convolution", check=check, classes=False, c_noise_scale=2.0, options={
        "hidden": cudiff.Option(8, "channels inside", least=1), "groups": cudiff.Option(2, "a divisor", least=1),
    })(Small)
    edm = registry.OBJECTIVES["edm"]
    cudiff.register_objective("scaled", "EDM, scaled", options={
        **edm.options, "loss_scale": cudiff.Option(3.0, "factor of the loss", above=0, fixed=True)})(Scaled)

    @cudiff.register_sampler("brief", "Euler's last steps", options={"skipped": cudiff.Option(1, "levels", least=0)})
    def brief(denoiser, config, captured):
        def sampler(x, sigmas, labels=None, *, noise=None, callback=None):
            x = x * float(sigmas[config.skipped] / sigmas[0])
            return sample_euler(denoiser, x, sigmas[config.skipped :], labels, callback=callback)

        return sampler

    yield
    for kind, table in TABLES.items():
        table.clear()
        table.update(before[kind])


def tiny(**changes):
    return Config(**{
        "model": "small", "diffusion": "scaled", "sampler": "brief", "hidden": 4, "batch_size": 8, "steps": 4,
        "sample_every": 0, "save_every": 2, "log_every": 1, "sample_steps": 3, "keep": 0, "device": "cpu", "lr": 0.01,
        "ema_half_life": 1.0, "data": "digits",
    } | changes)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", image_size=8, count=40)


def losses(trainer):
    return [line["loss"] for line in trainer.metrics.lines()]


def test_it_trains_resumes_loads_and_samples(own, digits, tmp_path):
    whole = Trainer(tiny(), digits, tmp_path / "whole")
    whole.run()
    half = Trainer(tiny(steps=2), digits, tmp_path / "half")
    half.run()
    again = Trainer(tiny(), digits, tmp_path / "half", load_checkpoint(tmp_path / "half"))
    again.run()
    assert losses(again) == losses(whole) and len(losses(whole)) == 4
    for one, other in zip(whole.net.state_dict().values(), again.net.state_dict().values(), strict=True):
        np.testing.assert_array_equal(one, other)
    model = cudiff.load(tmp_path / "half")
    assert (model.config.model, model.config.hidden, model.config.skipped, model.config.groups) == ("small", 4, 1, 2)
    images = model.sample(5, seed=3)
    np.testing.assert_array_equal(images, whole.preview.sample(5, seed=3))
    assert not np.array_equal(images, model.sample(5, seed=3, sampler="euler"))
    np.testing.assert_array_equal(
        cudiff.load(tmp_path / "half").sample(5, seed=3, sampler="euler"),
        cudiff.Pipeline(model.config.replace(skipped=0), model.net).sample(5, seed=3),
    )
    model.save(tmp_path / "copy.safetensors")
    np.testing.assert_array_equal(images, cudiff.load(tmp_path / "copy.safetensors").sample(5, seed=3))


def test_the_objective_and_the_times_are_the_user_s(own, digits, tmp_path):
    by_scale = {}
    for name in ("scaled", "edm"):
        trainer = Trainer(tiny(diffusion=name, steps=1), digits, tmp_path / name)
        trainer.run()
        by_scale[name] = losses(trainer)[0]
    assert by_scale["scaled"] == pytest.approx(3 * by_scale["edm"], rel=1e-6)
    model = cudiff.load(tmp_path / "edm")
    model.net.times.clear()
    model.sample(1, sampler="euler", steps=2)
    np.testing.assert_allclose(model.net.times[0], 2 * np.log(80), rtol=1e-6)  # c_noise_scale is 2


def test_the_check_of_memory_leaves_running_means_alone(own, digits, tmp_path, monkeypatch):
    checked = Trainer(tiny(steps=1), digits, tmp_path / "checked")
    tried, attempt = [], checked._try
    checked._try = lambda size: (tried.append(size), attempt(size))
    checked.run()
    plain = Trainer(tiny(steps=1), digits, tmp_path / "plain")
    monkeypatch.setattr("cudiff.train.check_fits", lambda trainer: None)
    plain.run()
    for one, other in zip(checked.net.state_dict().values(), plain.net.state_dict().values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert tried


def test_a_checkpoint_holds_data_and_says_what_is_not_registered(own, digits, tmp_path):
    trainer = Trainer(tiny(steps=1), digits, tmp_path / "run")
    trainer.run()
    path = trainer.save_path
    config = json.loads(read_header(path)[1]["cudiff"])["config"]
    assert (config["model"], config["hidden"], config["loss_scale"], config["skipped"]) == ("small", 4, 3.0, 1)
    assert all(isinstance(value, str | int | float | list) for value in config.values())
    assert not any("Small" in str(value) or "tests" in str(value) for value in config.values())
    for kind, name, function in [
        ("model", "small", "model"), ("diffusion", "scaled", "objective"), ("sampler", "brief", "sampler"),
    ]:
        entry = TABLES[kind].pop(name)
        for read in (cudiff.load, load_checkpoint, read_checkpoint):
            with pytest.raises(CudiffError) as error:
                read(path)
            assert f"its {kind} '{name}' is not registered here" in str(error.value)
            assert f"registers it, {__name__} (cudiff.register_{function})" in str(error.value)
            assert "\n" not in str(error.value)
        TABLES[kind][name] = entry
    cudiff.load(path)


UNET = {"model": "unet", "diffusion": "edm", "model_channels": 8, "channel_mult": (1,), "num_res_blocks": 1,
        "num_head_channels": 8, "norm_group_channels": 1}


def told_by_info(path, capsys):
    capsys.readouterr()
    assert main(["info", str(path)]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    return {cells[1].strip(): cells[2].strip() for cells in lines if len(cells) == 4}


def test_a_sampler_that_is_not_registered_is_replaced_by_one_that_is_named(own, digits, tmp_path, capsys):
    config = Config(**{name: value for name, value in tiny().to_dict().items() if name in vars(Config())} | UNET)
    config = config.replace(sampler="brief", skipped=2, eta=0.5)
    trainer = Trainer(config.replace(keep=0), digits, tmp_path / "run")
    trainer.run()
    expected = trainer.preview.sample(3, sampler="euler")
    cudiff.register_model("other", "x", options={"skipped": cudiff.Option(1, "as the sampler's")})(Small)
    path = trainer.save_path
    told = told_by_info(path, capsys)
    assert (told["sampler"], told["skipped"]) == ("brief", "2")
    del TABLES["sampler"]["brief"]
    for read in (cudiff.load, load_checkpoint, read_checkpoint):
        with pytest.raises(CudiffError, match=r"'brief' is not registered here.*or choose another one with --sampler"):
            read(path)
        with pytest.raises(CudiffError, match=r"^unknown sampler 'plms': use heun or"):
            read(path, sampler="plms")
    model = cudiff.load(path, sampler="euler")
    assert (model.config.sampler, model.config.eta, "skipped" in model.config.options) == ("euler", 0.5, False)
    np.testing.assert_array_equal(model.sample(3), expected)
    words = ["sample", str(path), "-n", "3", "--device", "cpu", "--out", str(tmp_path / "images.npz")]
    assert main(words) == 2 and "--sampler" in capsys.readouterr().err
    assert main([*words, "--sampler", "euler"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "images.npz")["images"], expected)
    assert told_by_info(path, capsys)["sampler"] == "brief, which is not registered here"
    export_torch(path, tmp_path / "torch.safetensors")
    first = tmp_path / "run" / "step-00000002.safetensors"
    more = load_checkpoint(first, sampler="euler")
    with pytest.raises(CudiffError, match=r"holds a newer checkpoint: go on with .*step-00000004"):
        Trainer(more.config, digits, tmp_path / "run", more)
    path.write_bytes(b"")
    with pytest.raises(CudiffError, match=f"{first.name} before it is whole"):
        read_checkpoint(tmp_path / "run", sampler="euler")


@pytest.mark.parametrize("kind, name", [("model", "small"), ("diffusion", "scaled"), ("sampler", "brief")])
def test_an_option_that_its_own_has_no_more_is_not_left_out(own, kind, name, tmp_path):
    """Though another model has one of that name, a user's or the library's."""
    entry = TABLES[kind][name]
    for option in ("width", "num_heads"):
        options = {option: cudiff.Option(1, "x")}
        TABLES[kind][name] = dataclasses.replace(entry, options=entry.options | options)
        MODELS["other"] = dataclasses.replace(MODELS["unet"], name="other", options=options)
        config = tiny(image_size=8, channels=1, **{option: 3})
        cudiff.Pipeline(config, build(config)).save(tmp_path / "model.safetensors")
        assert cudiff.load(tmp_path / "model.safetensors").config.options[option] == 3
        TABLES[kind][name] = entry
        with pytest.raises(CudiffError, match=rf"what was registered there, .*: {option} is an option of model"):
            cudiff.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("values, message", [
    ({"hidden": 0}, "hidden must be at least 1, not 0"),
    ({"hidden": "4"}, "hidden must be a whole number, not '4'"),
    ({"hidden": 3}, "hidden 3 does not divide by groups 2: use a multiple"),
    ({"hiden": 3}, "unknown option 'hiden': did you mean hidden?"),
    ({"num_res_blocks": 3},
     "num_res_blocks is an option of model unet, not of model small with diffusion scaled: leave it out"),
    ({"model_channels": 8}, "model_channels is an option of model unet or model cs179, not of model small with "
                            "diffusion scaled: leave it out"),
    ({"diffusion_steps": 3},
     "diffusion_steps is an option of diffusion ddpm, not of model small with diffusion scaled: leave it out"),
    ({"num_classes": 3}, "model small has no classes: num_classes must be 0, not 3"),
    ({"model": "unet", "hidden": 4},
     "hidden is an option of model small, not of model unet with diffusion scaled: leave it out"),
    ({"model": "unet", "learn_sigma": True},
     "learn_sigma needs diffusion = ddpm: SCALED has no variance to learn"),
])
def test_mistakes_get_one_clear_line(own, values, message):
    with pytest.raises(CudiffError) as error:
        tiny().replace(**values)
    assert str(error.value) == message


def test_options_come_and_go_with_what_has_them(own):
    config = tiny(skipped=2, groups=4)
    assert config.replace(model="unet").num_res_blocks == 2
    assert "hidden" not in config.replace(model="unet").to_dict()
    assert config.replace(sampler="heun").replace(sampler="brief").skipped == 2
    assert config.replace(eta=0.5).replace(sampler="ddim").eta == 0.5
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.fixed().items() >= {"hidden": 4, "groups": 4, "loss_scale": 3.0, "model": "small"}.items()
    assert not {"skipped", "P_mean", "lr"} & set(config.fixed())
    with pytest.raises(AttributeError, match="no 'hidden'"):
        Config().hidden  # noqa: B018
    assert PRESETS["digits"].replace(diffusion="ddpm").replace(diffusion="edm").P_mean == -1.2


def test_copies_and_pickles_hold_the_options(own):
    config = tiny(skipped=2)
    for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same.skipped == 2 and same.replace(lr=1.0) == config.replace(lr=1.0)
        with pytest.raises(TypeError, match="does not support item assignment"):
            same.options["skipped"] = 3


def test_flags_and_toml_know_it(own, tmp_path):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    (tmp_path / "run.toml").write_text('model = "small"\nhidden = 6\ndata = "folder"\n')
    config = from_arguments(parser.parse_args(["--config", str(tmp_path / "run.toml"), "--groups", "3"]))
    assert (config.model, config.hidden, config.groups) == ("small", 6, 3)
    text = " ".join(parser.format_help().split())
    assert "small (a convolution)" in text and "channels inside (default 8)" in text


def test_options_that_several_have_are_one_flag_with_each_one_s_default(own):
    cudiff.register_model("other", "as it", options={"hidden": cudiff.Option(5, "channels inside")})(lambda config: 0)
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    assert "channels inside (default 8 in small, 5 in other)" in " ".join(parser.format_help().split())
    assert (Config(model="other").hidden, Config(model="small").hidden) == (5, 8)
    assert Config(model="small", hidden=6).replace(model="other").hidden == 6


@pytest.mark.parametrize("name, options, message", [
    ("unet", {}, "model 'unet' is registered already: choose another name"),
    ("1st", {}, "model '1st': begin its name with a letter"),
    (3, {}, "model '3': begin its name with a letter"),
    ("new", {3: cudiff.Option(1, "x")}, "model 'new': give its options as"),
    ("new", ["depth"], "model 'new': give its options as"),
    ("new", {"dropout": cudiff.Option(1, "x")}, "model 'new': its option 'dropout' has another type in unet"),
    ("new", {"a-b": cudiff.Option(1, "x")}, "model 'new': give its options as"),
    ("new", {"depth": 3}, "model 'new': give its options as"),
    ("new", {"depth": cudiff.Option(0, "x", least=1)}, "depth must be at least 1, not 0"),
])
def test_what_cannot_be_registered(own, name, options, message):
    before = dict(MODELS)
    with pytest.raises(CudiffError) as error:
        cudiff.register_model(name, "x", options=options)(lambda config: None)
    assert message in str(error.value) and before == MODELS


@pytest.mark.parametrize("name", ["lr", "options", "fixed", "replace", "to_dict", "for_data", "stored", "from_dict",
                                  "_given", "__init__", "model", "help", "preset", "data_changed"])
def test_an_option_cannot_hide_what_every_configuration_has(own, name):
    kind = {"lr": 1.0, "model": "x"}.get(name, 1)
    for register in (cudiff.register_model, cudiff.register_objective, cudiff.register_sampler):
        with pytest.raises(CudiffError, match=f"^[a-z]+ 'greedy': every run has a '{name}' already: choose "):
            register("greedy", "x", options={name: cudiff.Option(kind, "x")})(lambda *build: None)
    assert not any("greedy" in table for table in TABLES.values())


def test_an_option_registered_before_there_were_configurations_is_refused_too():
    script = (
        "import cudiff\nfrom cudiff.registry import register_model\n"
        "register_model('greedy', 'x', options={'fixed': cudiff.Option(1, 'x')})(lambda config: None)\ncudiff.Config"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "model 'greedy': every run has a 'fixed' already" in result.stderr.splitlines()[-1]


def test_a_cell_that_defines_it_may_run_again_and_says_so(own):
    with pytest.warns(UserWarning, match="^model 'small' was registered before: this one takes its place$") as warned:
        cudiff.register_model("small", "now with more", options={"hidden": cudiff.Option(2.0, "x")})(Small)
    assert Config(model="small").hidden == 2.0 and warned[0].filename == __file__


def test_functions_of_one_name_take_no_place_in_silence(own):
    def made(build):
        return lambda config: build

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cudiff.register_model("one", "x", options={"rounds": cudiff.Option(1, "x")})(made(1))
        with pytest.raises(UserWarning, match="model 'one' was registered before"):
            cudiff.register_model("one", "x")(made(2))
        assert MODELS["one"].build(None) == 1
        with pytest.raises(CudiffError, match="model 'two': its option 'rounds' has another type in one: choose ano"):
            cudiff.register_model("two", "x", options={"rounds": cudiff.Option(1.0, "x")})(made(2))
        assert "two" not in MODELS


def test_what_is_built_has_to_be_a_module(own):
    cudiff.register_model("none", "x")(lambda config: None)
    with pytest.raises(CudiffError, match=r"model none was built as a NoneType: return a cudiff\.nn\.Module"):
        build(Config(model="none", image_size=8, channels=1))


WRONG = {
    "none": (lambda x: None, "returned a NoneType: return a Tensor of floats of shape (2, 8, 8, 1)"),
    "pair": (lambda x: (x, x), "returned a tuple: return a Tensor"),
    "fewer": (lambda x: cudiff.Tensor(x.data[:1]), "returned float32 of shape (1, 8, 8, 1): return a Tensor of floats"),
    "smaller": (lambda x: cudiff.Tensor(x.data[:, :4]), "returned float32 of shape (2, 4, 8, 1): return a Tensor"),
    "bytes": (lambda x: cudiff.Tensor(x.data.astype(np.uint8)), "returned uint8 of shape (2, 8, 8, 1): return a Ten"),
    "nan": (lambda x: x * float("nan"), "the images hold values that are not finite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sampler_that_returns_no_images_is_named(own, name):
    finish, message = WRONG[name]

    @cudiff.register_sampler("wrong", "x")
    def wrong(denoiser, config, captured):
        def sampler(x, sigmas, labels=None, *, noise=None, callback=None):
            if callback is not None:
                callback(0, x, finish(x))
            return x if callback is not None else finish(x)

        return sampler

    model = cudiff.Pipeline(tiny(image_size=8, channels=1), build(tiny(image_size=8, channels=1)))
    for frames in (None, []):
        with pytest.raises(CudiffError) as error:
            model.sample(2, sampler="wrong", frames=frames)
        assert message in str(error.value) and str(error.value).startswith("sampler wrong")


class Halves(Sampler):
    """Each step halves the noise."""

    def __init__(self, denoiser, config, captured):
        super().__init__(denoiser)

    def plan(self, sigmas):
        return [Plan([sigma], False) for sigma in sigmas[1:]]

    def step(self, x, numbers, noise, labels):
        return x * 0.5, x


@pytest.mark.parametrize("method, result, message", [
    ("plan", lambda self, sigmas: [Plan([1.0], False)] * 2, "plan returned 2 plans for 4 sigmas; return a list of 3"),
    ("plan", lambda self, sigmas: [Plan([1.0], False)] * 4, "plan returned 4 plans for 4 sigmas; return a list of 3"),
    ("plan", lambda self, sigmas: None, "plan returned a NoneType for 4 sigmas"),
    ("plan", lambda self, sigmas: [[1.0]] * 3, "plan returned a list of list for 4 sigmas; return a list of 3,"),
    ("step", lambda self, x, *rest: x, "return two Tensors from step, the next state and the image, both of shape (2,"),
    ("step", lambda self, x, *rest: (x, None), "return two Tensors from step"),
    ("step", lambda self, x, *rest: (cudiff.Tensor(x.data[:1]), x), "return two Tensors from step"),
])
def test_a_captured_sampler_s_plans_and_steps_are_checked(own, method, result, message):
    config = tiny(image_size=8, channels=1, sample_steps=3)
    model = cudiff.Pipeline(config, build(config))
    cudiff.register_sampler("halves", "x")(Halves)
    assert model.sample(2, sampler="halves").shape == (2, 8, 8, 1)
    wrong = type("Wrong", (Halves,), {method: result})
    cudiff.register_sampler("wrong", "x")(wrong)
    with pytest.raises(CudiffError) as error:
        model.sample(2, sampler="wrong")
    assert str(error.value).startswith(f"sampler Wrong: {message}")


def test_what_builds_a_sampler_returns_one_and_it_shows_its_steps(own):
    model = cudiff.Pipeline(tiny(image_size=8, channels=1), build(tiny(image_size=8, channels=1)))
    cudiff.register_sampler("nothing", "x")(lambda denoiser, config, captured: None)
    with pytest.raises(CudiffError, match="sampler nothing was built as a NoneType: return a function, sampler"):
        model.sample(2, sampler="nothing")
    cudiff.register_sampler("silent", "x")(lambda *build: lambda x, sigmas, labels=None, noise=None, callback=None: x)
    assert model.sample(2, sampler="silent").shape == (2, 8, 8, 1)
    with pytest.raises(CudiffError, match="sampler silent shows no frames: call its callback"):
        model.sample(2, sampler="silent", frames=[])


@pytest.mark.parametrize("default", [None, b"x", {}, (None,), (b"a",), (True,)])
def test_an_option_has_a_type(default):
    with pytest.raises(CudiffError, match="an option's default is"):
        cudiff.Option(default, "x")


@pytest.mark.parametrize("default, rules, message", [
    ("ab", {"choices": "abc"}, "choices are a list of texts"),
    (1, {"choices": (1, 2)}, "choices are a list of texts"),
    ("a", {"choices": 3}, "choices are a list of texts"),
    ("a", {"choices": ("a", 2)}, "choices are a list of texts"),
    (1, {"choices": ("1", "2")}, "its default is text"),
    *(("a", {bound: 0}, "only numbers have") for bound in ("least", "most", "above", "below")),
    (True, {"least": 0}, "only numbers have"),
])
def test_an_option_s_rules_fit_its_type(default, rules, message):
    with pytest.raises(CudiffError, match=message):
        cudiff.Option(default, "x", **rules)


def test_old_checkpoints_hold_the_options_of_every_model(tmp_path):
    """What cudiff wrote before models had options of their own: all of them, for every model."""
    config = PRESETS["cs179"].replace(model_channels=8, image_size=8)
    cudiff.Pipeline(config, build(config)).save(tmp_path / "new.safetensors")
    tensors, metadata = read_tensors(tmp_path / "new.safetensors")
    about = json.loads(metadata["cudiff"])
    del about["sha256"]
    about["config"] |= {"num_res_blocks": 2, "dropout": 0.1, "noise_schedule": "cosine", "eta": 0.25, "S_churn": 1.0}
    write_tensors(tmp_path / "old.safetensors", tensors, {"cudiff": json.dumps(about)})
    loaded = cudiff.load(tmp_path / "old.safetensors", "cpu").config
    assert loaded == config.replace(eta=0.25, S_churn=1.0)
    assert isinstance(registry.SAMPLERS["euler"].build(None, loaded, False), Euler)
