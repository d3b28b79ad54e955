"""Options at the ends of what they take, and configuration files at theirs."""

import argparse

import pytest

from cudiff.config import Config, load_toml
from cudiff.errors import CudiffError
from cudiff.options import Option, as_text, shown
from cudiff.registry import MODELS


@pytest.mark.parametrize("rules, taken, refused", [
    ({"least": 2}, [2, 3], [1]), ({"most": 2}, [2, 1], [3]), ({"above": 2}, [3], [2, 1]), ({"below": 2}, [1], [2, 3]),
    ({"least": 0, "below": 3}, [0, 2], [-1, 3]), ({}, [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
], ids=str)
def test_whole_numbers_up_to_their_bounds(rules, taken, refused):
    for option in (Option(1, "help", **rules), Option((1,), "help", **rules)):
        wrap = (lambda value: value) if option.default == 1 else (lambda value: (value,))
        for value in taken:
            assert option.checked("x", wrap(value)) == wrap(value)
        for value in refused:
            with pytest.raises(CudiffError, match=r"^x must be "):
                option.checked("x", wrap(value))


@pytest.mark.parametrize("default, taken, refused", [
    (1, [2], [True, 1.0, "1", None, [1]]), (1.0, [2, 2.5], [True, "1", None, float("nan"), float("inf")]),
    (False, [True, False], [0, 1, "true", None]), ("a", ["b", ""], [1, None, True]),
], ids=str)
def test_values_of_other_types_are_refused(default, taken, refused):
    option = Option(default, "help")
    for value in taken:
        assert option.checked("x", value) == value and type(option.checked("x", value)) is type(default)
    for value in refused:
        with pytest.raises(CudiffError, match=r"^x must be "):
            option.checked("x", value)


def test_lists_have_up_to_16_entries():
    option = Option((1, 2), "help")
    assert option.checked("x", [1] * 16) == (1,) * 16 and option.checked("x", []) == ()
    with pytest.raises(CudiffError, match="x has 17 entries: give 16 at most"):
        option.checked("x", [1] * 17)
    with pytest.raises(CudiffError, match="x must be a list, each entry a whole number, not 3"):
        option.checked("x", 3)


def test_choices_and_flags():
    option = Option("a", "help", ("a", "b"))
    assert option.checked("x", "b") == "b" and option.metavar == "a|b"
    with pytest.raises(CudiffError, match=r"unknown x 'c{80}': use a or b"):
        option.checked("x", "c" * 81)
    assert Option((1,), "help").parsed("1, 2,") == (1, 2) and Option((), "help", entries=float).parsed("1.5") == (1.5,)
    assert Option((), "help").parsed("") == ()
    assert Option((), "help").parsed("none") == Option((), "help", entries=str).parsed(" none ") == ()
    for default, text, wanted in [(1, "1.5", "a whole number"), (1.0, "x", "a number"), ((1,), "1;2", "numbers such"),
                                  ((1,), "1,,2", "numbers such")]:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not {wanted}"):
            Option(default, "help").parsed(text)
    with pytest.raises(CudiffError, match="text or a tuple of numbers or texts, not None"):
        Option(None, "help")


def test_values_in_words():
    assert shown("x" * 81) == repr("x" * 80) and shown(2**63 - 1) == str(2**63 - 1) and shown(1.5) == "1.5"
    assert shown(2**63) == shown(-(2**63)) == "a int" and shown([]) == "a list"
    assert as_text((1, 2)) == "1,2" and as_text(()) == "none"


def test_files_up_to_64_kib_of_lines_of_1000_characters(tmp_path):
    path = tmp_path / "run.toml"
    for length, lines in ((1000, 1), (999, 65)):
        path.write_bytes((b"#" + b"x" * (length - 1) + b"\n") * lines + b"lr = 0.5")
        assert load_toml(path).lr == 0.5
    path.write_bytes(path.read_bytes() + b" " * (2**16 - path.stat().st_size))
    assert load_toml(path).lr == 0.5
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(CudiffError, match="is over 64 KiB"):
        load_toml(path)
    path.write_bytes(b"#" + b"x" * 1000 + b"\nlr = 0.5")
    with pytest.raises(CudiffError, match="has a line of over 1000 characters"):
        load_toml(path)


def test_what_a_resumed_run_keeps():
    fixed = {"image_size", "channels", "validation", "model", "num_classes", "learn_sigma", "diffusion", "optimizer",
             "seed", "latent_scale"}
    unet, edm = set(MODELS["unet"].options), {"sigma_data", "data_mean", "data_std"}
    assert set(Config().fixed()) == fixed | unet | edm
    ddpm = set(Config(diffusion="ddpm").fixed()) - fixed - unet
    assert ddpm == {"noise_schedule", "diffusion_steps", "prediction"}
