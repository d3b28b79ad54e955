"""Configuration: presets build, files and flags agree, and every mistake gets one clear line."""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from cudiff.config import PRESETS, SECTIONS, Config, add_arguments, from_arguments, load_toml, options_in
from cudiff.errors import CudiffError
from cudiff.registry import TABLES
from tests.at_once import at_once


def parse(*words, base=None):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return from_arguments(parser.parse_args(words), base)


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def toml_value(value):
    if isinstance(value, tuple):
        return list(value)
    return value


def write_toml(path, values):
    path.write_text("".join(f"{name} = {json.dumps(toml_value(value))}\n" for name, value in values.items()))
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json_and_toml(name, tmp_path):
    config = PRESETS[name]
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert load_toml(write_toml(tmp_path / "run.toml", config.to_dict())) == config


def test_elephants_is_the_model_of_unet_cu():
    config = PRESETS["elephants"]
    assert (config.image_size, config.channels, config.model_channels) == (64, 3, 64)
    assert (config.channel_mult, config.num_res_blocks, config.attention_resolutions) == ((1, 2, 3, 4), 2, (16, 8))
    assert (config.num_head_channels, config.conv_resample, config.resblock_updown) == (32, False, False)
    assert (config.max_period, config.zero_init, config.use_new_attention_order) == (1000, False, True)


def test_every_option_has_help_and_a_flag_of_its_name():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = {action.dest: action for action in parser._actions}
    names = {name for preset in PRESETS.values() for sampler in ("heun", "ddim")
             for name in preset.replace(sampler=sampler).to_dict()}
    assert {"lr", "num_res_blocks", "P_mean", "diffusion_steps", "eta", "S_churn"} <= names
    for name in names:
        assert flags[name].help[0] != " "
        assert f"--{name.replace('_', '-')}" in flags[name].option_strings
    parser.format_help()


def test_flags_of_some_sections_only():
    parser = argparse.ArgumentParser()
    add_arguments(parser, sections=("sampling",))
    assert from_arguments(parser.parse_args(["--guidance", "3"])).guidance == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--batch-size", "3"])


def test_flags_take_every_type():
    config = parse("--channel-mult", "1,2,4,8", "--flip", "--no-capture", "--lr", "1e-3", "--betas", "0.5,0.9",
                   "--steps", "7", "--image-size", "64", "--attention-resolutions", "", "--data", "somewhere")
    assert config.channel_mult == (1, 2, 4, 8)
    assert (config.flip, config.capture, config.lr, config.betas) == (True, False, 1e-3, (0.5, 0.9))
    assert (config.steps, config.attention_resolutions, config.data) == (7, (), "somewhere")


def test_nothing_given_is_the_digits_demo_and_a_data_set_brings_its_preset():
    assert parse() == PRESETS["digits"]
    assert parse("--data", "mnist") == PRESETS["mnist"]
    assert parse("--data", "my/folder") == Config(data="my/folder")
    assert parse("--steps", "3", base=PRESETS["cs179"]) == PRESETS["cs179"].replace(steps=3)


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('preset = "elephants"\nlr = 1\nbatch_size = 9\n')
    config = parse("--config", str(path), "--batch-size", "10")
    assert config == PRESETS["elephants"].replace(lr=1.0, batch_size=10)
    assert parse("--config", str(path), "--preset", "mnist").model_channels == PRESETS["mnist"].model_channels
    assert load_toml(path) == PRESETS["elephants"].replace(lr=1.0, batch_size=9)
    path.write_text("lr = 1.0\n")
    assert load_toml(path, PRESETS["mnist"]) == PRESETS["mnist"].replace(lr=1.0)


@pytest.mark.parametrize(
    "words", [("--lr", "fast"), ("--channel-mult", "1,x"), ("--sampler", "magic"), ("--steps", "1.5")]
)
def test_bad_flags_are_refused_by_argparse(words):
    with pytest.raises(argparse.ArgumentError) as error:
        parse(*words)
    assert words[0] in str(error.value) and words[1] in str(error.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model_chanels": 64}, "unknown option 'model_chanels': did you mean model_channels?"),
        ({"zzz": 1}, "unknown option 'zzz': see cudiff train --help"),
        ({"batch_size": "many"}, "batch_size must be a whole number, not 'many'"),
        ({"batch_size": 1.5}, "batch_size must be a whole number, not 1.5"),
        ({"batch_size": True}, "batch_size must be a whole number, not True"),
        ({"flip": 1}, "flip must be true or false, not 1"),
        ({"lr": float("nan")}, "lr must be a finite number, not nan"),
        ({"lr": 0}, "lr must be above 0, not 0.0"),
        ({"lr": 1e-60}, "lr must be above 0, and 1e-60 is 0 in float32"),
        ({"weight_decay": 1e60}, "weight_decay must be at most 3.4e+38 in size, the most that float32 holds"),
        ({"P_mean": 1000.0}, "P_mean 1000 and P_std 1.2 give noise levels too large or small for float32: "
         "use |P_mean| + 7 P_std of at most 43"),
        ({"rho": 1e-30}, "rho 1e-30 is too small for noise levels from 80 to 0.002: use one nearer to 7"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1.0"),
        ({"label_dropout": 1.5}, "label_dropout must be at least 0 and at most 1, not 1.5"),
        ({"steps": -1}, "steps must be at least 0, not -1"),
        ({"sampler": "magic"}, "unknown sampler 'magic': use heun or euler or ddim or ancestral or "
         "dpmpp-2m or dpmpp-2m-sde or euler-ancestral or flow or unipc"),
        ({"data": 3}, "data must be text, not 3"),
        ({"channel_mult": "1,2"}, "channel_mult must be a list, each entry a whole number, not '1,2'"),
        ({"channel_mult": [1, "2"]}, "channel_mult must be a whole number, not '2'"),
        ({"channel_mult": [1, 0]}, "channel_mult must be at least 1, not 0"),
        ({"channel_mult": []}, "channel_mult is empty: give one number a level, such as 1,2,2"),
        ({"betas": [0.9]}, "betas must be two numbers such as 0.9,0.999: 1 given"),
        ({"learn_sigma": True}, "learn_sigma needs diffusion = ddpm: EDM has no variance to learn"),
        ({"sigma_min": 90.0}, "sigma_min 90.0 must be below sigma_max 80.0"),
        ({"steps": 0}, "training would never end: give steps or minutes"),
        ({"lr_schedule": "cosine", "steps": 0, "minutes": 1.0},
         "the cosine schedule needs an end: give steps, or lr_schedule = constant"),
        ({"image_size": 30, "channel_mult": (1, 2, 2)},
         "image size 30 does not halve 2 times: use a multiple of 4, such as 28 or 32, "
         "or fewer entries in channel_mult"),
        ({"image_size": 2, "channel_mult": (1, 2, 2)},
         "image size 2 does not halve 2 times: use a multiple of 4, such as 4, or fewer entries in channel_mult"),
        ({"image_size": 30, "model": "cs179", "channel_mult": (1, 2)},
         "image size 30 does not halve 2 times: use a multiple of 4, such as 28 or 32, "
         "or fewer entries in channel_mult"),
        ({"image_size": 32, "attention_resolutions": (10,)},
         "attention_resolutions: no level has 10 pixels; choose from 32, 16, 8"),
        ({"num_heads": 3},
         "num_heads 3 does not divide the 128 channels where attention is used into heads of up to 128: "
         "use 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"image_size": 32, "attention_resolutions": (32,), "model_channels": 48, "num_head_channels": 32},
         "num_head_channels 32 does not divide the 48 channels where attention is used into heads of up to 128: "
         "use 3, 4, 6, 8, 12, 16, 24, 48"),
        ({"model_channels": 387, "channel_mult": (1,), "num_heads": 1},
         "num_heads 1 does not divide the 387 channels where attention is used into heads of up to 128: "
         "use 9, 43, 129, 387"),
        ({"model_channels": 256, "channel_mult": (1,), "num_head_channels": 256},
         "num_head_channels 256 does not divide the 256 channels where attention is used into heads of up to 128: "
         "use 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"model_channels": 1}, "model_channels must be at least 2, not 1"),
        ({"model": "cs179", "model_channels": 1}, "model_channels must be at least 2, not 1"),
        ({"model": "dit", "hidden_size": 24, "num_heads": 2, "mlp_ratio": 0.04},
         "mlp_ratio 0.04 of hidden_size 24 is not one channel: use 0.042 or more"),
    ],
)  # fmt: skip
def test_mistakes_get_one_clear_line(values, message):
    with pytest.raises(CudiffError) as error:
        Config.from_dict(values)
    assert one_line(error) == message


def test_whole_numbers_become_floats_and_lists_tuples():
    config = Config.from_dict({"lr": 1, "channel_mult": [1, 2]})
    assert isinstance(config.lr, float) and config.channel_mult == (1, 2)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[model]\nlr = 1\n", "options have no sections; remove the line [model]"),
        ("lr 1", "is not TOML"),
        ("skip-bad = true", "did you mean skip_bad?"),
        ('preset = "moon"', "unknown preset 'moon': use digits or"),
    ],
)
def test_bad_toml(text, message, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(CudiffError) as error:
        load_toml(path)
    assert message in one_line(error)
    with pytest.raises(CudiffError):
        parse("--config", str(path))


def test_toml_with_a_byte_order_mark(tmp_path):
    (tmp_path / "run.toml").write_text("seed = 3", encoding="utf-8-sig")
    assert load_toml(tmp_path / "run.toml").seed == 3


def test_missing_toml(tmp_path):
    with pytest.raises(CudiffError, match=r"cannot read .*none\.toml"):
        load_toml(tmp_path / "none.toml")


def deep(depth):
    return [deep(depth - 1)] * 2 if depth else []


HUGE = {
    "lr": 10**400, "steps": 10**400, "batch_size": 2**63, "seed": 10**5000, "channel_mult": [1] * 100_000,
    "attention_resolutions": [64] * 17, "num_res_blocks": 10**6, "model_channels": 2**20, "num_classes": 2**31,
    "image_size": 10**9, "num_head_channels": 10**9, "diffusion_steps": 10**12, "sample_steps": 10**12,
    "data": deep(40), "sampler": "x" * 10**6, "y" * 10**6: 1, "betas": {"a": deep(40)}, "flip": None,
}  # fmt: skip


@pytest.mark.parametrize("name", HUGE, ids=lambda name: name[:30])
def test_huge_values_get_one_short_line_at_once(name):
    with at_once(), pytest.raises(CudiffError) as error:
        Config.from_dict({name: HUGE[name]})
    assert len(one_line(error)) < 300 and name[:80] in one_line(error)


@pytest.mark.parametrize(
    "content",
    [
        b"a = " + b"[" * 990, b"a = " + b"[" * 60_000, b"a" + b".a" * 30_000 + b" = 1",
        b"".join(b"a.b%d = 1\n" % number for number in range(100_000)), b"lr = " + b"1" * 400,
        b"lr = " + b"1" * 990, b"lr = 1e400", b"seed = 9223372036854775808", b"seed = 1\xff", b"data = '\0'",
        b"\0" * 100,
        b"data = 1979-05-27T07:32:00Z", b"preset = 1979-05-27", b"preset = [[1]]", b"data = [[1]]", b"data = {a = 1}",
        b"x" * 10**7, b"[[lr]]", b"lr = nan", b"lr = inf", b"# \r", b"'\n' = 3",
        b"\n".join(b"a" + b".a" * 480 + b"%d = 1" % number for number in range(60)),
    ],
    ids=lambda content: repr(content[:20]),
)  # fmt: skip
def test_files_from_strangers_get_one_short_line_at_once(content, tmp_path):
    (tmp_path / "run.toml").write_bytes(content)
    with at_once(), pytest.raises(CudiffError) as error:
        load_toml(tmp_path / "run.toml")
    assert len(one_line(error)) < 400
    with pytest.raises(CudiffError):
        parse("--config", str(tmp_path / "run.toml"))


def test_a_pipe_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in [(tmp_path / "pipe", "is not a file"), (tmp_path, "is not a file"), ("a\0b", "cannot read")]:
        with pytest.raises(CudiffError, match=message):
            load_toml(path)


def test_for_data_fills_in_and_checks():
    config = Config(num_classes=10)
    assert config.for_data((5, 28, 28, 1), 10) == config.replace(image_size=28, channels=1)
    assert Config(image_size=28).for_data((5, 28, 28, 3), 4).channels == 3
    for shape, classes, message in [
        ((5, 28, 32, 1), 10, "not square"),
        ((5, 30, 30, 1), 10, "such as 28 or 32"),
        ((5, 28, 28, 1), 0, "no labels"),
        ((5, 28, 28, 1), 11, "num_classes 10 is too small"),
    ]:
        with pytest.raises(CudiffError, match=message):
            config.for_data(shape, classes)
    with pytest.raises(CudiffError, match="load them with these"):
        Config(channels=1).for_data((5, 28, 28, 3), 0)


@pytest.mark.parametrize("config, of_data, expected", [
    (Config(), 3, 3), (Config(), 0, 0), (Config(num_classes=0), 3, 0), (Config(num_classes=5), 3, 5),
    (PRESETS["elephants"], 2, 2), (PRESETS["mnist-ddpm"], 10, 0), (PRESETS["cs179"], 10, 0),
])
def test_the_data_s_classes_are_the_model_s_unless_it_has_its_own(config, of_data, expected):
    size, channels = config.image_size or 28, config.channels or 1
    assert config.for_data((5, size, size, channels), of_data).num_classes == expected


def test_a_config_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 1.0


def test_the_papers_transformers_by_a_rule_of_names():
    """Hidden size, blocks and heads of the paper's Table 1, and patches of 2, 4 or 8."""
    config = PRESETS["dit-l-8"]
    assert (config.hidden_size, config.depth, config.num_heads, config.patch_size) == (1024, 24, 16, 8)
    assert (config.diffusion, config.learn_sigma, config.noise_schedule) == ("ddpm", True, "linear")
    assert len([name for name in PRESETS if name.count("-") == 2]) == 12
    with pytest.raises(CudiffError, match=re.escape("unknown preset 'dit-m-2': use digits or")):
        parse("--preset", "dit-m-2")
    with pytest.raises(CudiffError, match=re.escape("or dit-{s,b,l,xl}-{2,4,8}")):
        parse("--preset", "dit-s-3")
    with pytest.raises(CudiffError, match="image size 30 is no multiple of patch_size 4"):
        parse("--preset", "dit-s-4", "--image-size", "30")


def test_three_checkpoints():
    assert (Config().keep, Config().save_every, Config().sample_every) == (3, 1000, 1000)


def test_options_and_presets_are_those_on_record():
    """tests/options.txt: each option unless told, the values it takes, and what a preset sets. Saved runs and TOML
    files that leave options out rely on them: change the record only with a reason."""
    options = {name: option for section in SECTIONS for name, option in options_in(section).items()}
    lines = []
    for name, option in options.items():
        rules = [f"{word} {getattr(option, word)}" for word in ("least", "most", "above", "below")
                 if getattr(option, word) is not None]
        lines.append(", ".join([f"{name} = {option.default!r}", *rules, *option.choices]))
    for name, config in PRESETS.items():
        values = {key: value for key, value in config.to_dict().items() if value != options[key].default}
        lines += ["", f"[{name}]", *(f"{key} = {value!r}" for key, value in values.items())]
    record = Path(__file__).with_name("options.txt").read_text()
    assert "\n".join(lines) + "\n" == record


def test_the_help_of_a_choice_says_what_it_is_and_each_choices_help():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = " ".join(parser.format_help().split())
    for name in TABLES:
        (option,) = (options[name] for options in map(options_in, SECTIONS) if name in options)
        first = next(iter(TABLES[name].values()))
        assert f"{option.help}: {first.name} ({' '.join(first.help.split()[:2])}" in text


def test_a_stored_default_is_not_given_to_another_sampler_or_objective():
    for before, after, eta in (("euler-ancestral", "ddim", 0.0), ("ddim", "euler-ancestral", 1.0)):
        assert Config.stored(Config(sampler=before).to_dict()).replace(sampler=after).eta == eta
    chosen = Config.stored(Config(sampler="ddim", eta=0.3).to_dict())
    assert chosen.eta == 0.3 and chosen.replace(sampler="euler-ancestral").eta == 0.3
    edm = Config.stored(Config(diffusion="edm").to_dict())
    assert (edm.P_mean, edm.replace(diffusion="flow").P_mean) == (-1.2, Config(diffusion="flow").P_mean)


def test_only_some_classes_of_a_presets_in_a_file(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text('preset = "digits"\nonly_classes = ["3", "1"]\n')
    assert load_toml(path).num_classes == -1
    path.write_text('preset = "digits"\nonly_classes = ["3", "1"]\nnum_classes = 2\n')
    assert load_toml(path).num_classes == 2


def test_numpys_numbers_and_classes_by_number():
    config = Config(steps=np.int64(3), lr=np.float32(0.5), only_classes=[1, "2"])
    assert (config.steps, config.lr, config.only_classes) == (3, 0.5, ("1", "2")) and type(config.steps) is int
    for values in (dict(steps=np.bool_(True)), dict(only_classes=[True]), dict(only_classes=[1.5])):
        with pytest.raises(CudiffError, match="must be"):
            Config(**values)
