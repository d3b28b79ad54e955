"""The command line: every command and every kind of mistake, as a user meets them."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cudiff
from cudiff.backend import cuda_available
from cudiff.checkpoint import latest, load_checkpoint
from cudiff.cli import main
from cudiff.config import PRESETS, Config
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.plot import save_npz
from cudiff.tensor import Tensor

TINY = [
    "--image-size", "8", "--model-channels", "8", "--attention-resolutions", "", "--num-head-channels", "0",
    "--num-heads", "2", "--batch-size", "8", "--steps", "4", "--log-every", "2", "--sample-every", "0", "--save-every",
    "2", "--samples", "4", "--sample-steps", "2", "--device", "cpu",
]


@pytest.fixture
def cli(capsys, monkeypatch, tmp_path):
    """cli(*words): run a command in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def mistake(cli):
    """mistake(*words): the one line on stderr of a command that has to fail with exit code 2."""

    def run(*words):
        code, out, error = cli(*words)
        assert code == 2, out + error
        assert error.startswith("cudiff: ") and error.count("\n") == 1 and error.endswith("\n"), error
        assert "Traceback" not in out + error
        return error

    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A finished run of 4 steps."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *TINY, "--folder", str(folder), "--validation", "8", "--norm-group-channels", "1"]) == 0
    return folder


def test_train_leaves_a_run(run_folder):
    names = {path.name for path in run_folder.iterdir()}
    assert {"metrics.jsonl", "step-00000002.safetensors", "step-00000004.safetensors"} <= names
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    config = load_checkpoint(latest(run_folder)).config
    assert (config.data, config.model_channels, config.lr) == ("digits", 8, PRESETS["digits"].lr)


def test_train_says_what_it_does(cli):
    code, out, error = cli("train", *TINY, "--folder", "run")
    assert (code, error) == (0, "")
    assert re.search(r"4,000 images 8x8x1, 10 classes", out) and "parameters, fp32, on the CPU; run in run" in out
    assert re.search(r"step +2  loss \d\.\d+  [\d,]+ images/s  \S+ m?s/step  [\d,]+ MB", out)
    assert "saved run/step-00000004.safetensors" in out


def test_resume_goes_on_where_the_run_is(cli, run_folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in run_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    code, out, _ = cli("train", "--resume", copy, "--steps", "6")
    assert code == 0 and "going on at step 4" in out and (copy / "step-00000006.safetensors").exists()
    assert [json.loads(line)["step"] for line in (copy / "metrics.jsonl").read_text().splitlines()] == [2, 4, 4, 6, 6]
    (copy / "metrics.jsonl").unlink()  # one of several checkpoints is of a run all the same
    assert cli("train", "--resume", copy / "step-00000006.safetensors", "--steps", "8")[0] == 0
    assert (copy / "step-00000008.safetensors").exists()


def test_a_toml_file_and_flags_over_it(cli, tmp_path):
    (tmp_path / "run.toml").write_text('preset = "digits"\nimage_size = 8\nmodel_channels = 8\nnum_head_channels = 8\n')
    words = TINY[TINY.index("--batch-size") :]
    assert cli("train", "--config", "run.toml", *words, "--folder", "run", "--attention-resolutions", "4")[0] == 0
    config = load_checkpoint(latest(tmp_path / "run")).config
    assert (config.model_channels, config.batch_size, config.attention_resolutions) == (8, 8, (4,))


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "--batch-sise", "8"], "unknown option --batch-sise: did you mean --batch-size?"),
        (["train", "--batch", "8"], "unknown option --batch"),
        (["train", "--qqq"], "unknown option --qqq: see cudiff train --help"),
        (["train", "extra"], "'extra' is one word too many: see cudiff train --help"),
        (["train", "--batch-size", "many"], "argument --batch-size: 'many' is not a whole number"),
        (["train", "--batch-size", "0"], "batch_size must be at least 1, not 0"),
        (["train", "--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["train", "--lr"], "argument --lr: expected one argument"),
        (["train", "--preset", "large"], "unknown preset 'large': use digits or"),
        (["train", "--steps", "0", "--lr-schedule", "constant"], "training would never end: give steps or minutes"),
        (["train", "--config", "none.toml"], "cannot read none.toml (No such file or directory): check the path"),
        (["train", "--data", "none"], "no data at 'none': give digits, mnist, fashion-mnist, a folder of images"),
        (["train", "--resume", "none"], "none"),
        (["train", "--resume", ""], ". holds no checkpoint: give the folder of a run, or a checkpoint"),
        (["train", "--image-size", "15"], "image size 15 does not halve 1 times: use a multiple of 2, such as 14"),
        (["train", "--attention-resolutions", "4"], "attention_resolutions: no level has 4 pixels; choose from 16, 8"),
        (["train", "--num-head-channels", "7"], "num_head_channels 7 does not divide the 32 channels"),
        (["eval", "x", "--samples", "300"], "unknown option --samples: did you mean -n?"),
        (["sample"], "the following arguments are required: CHECKPOINT: see cudiff sample --help"),
        (["sample", "none.safetensors"], "none.safetensors"),
        (["sample", "x", "--classes", "1,,b"], "argument --classes: '1,,b' is not a class or a list such as 0,1,2"),
        (["sample", "none.safetensors", "--classes", "-1,2"], "none.safetensors"),
        (["sample", "x", "--out", "a.jpg"], "cannot write 'a.jpg': use .png, .npz, .gif or a folder's name"),
        (["sample", "x", "--out", ""], "cannot write '': use .png"),
        (["train", "--data", ""], "data is empty: give digits, mnist"),
        (["train", *TINY, "--sample-every", "9", "--rho", "1e-300"], "rho must be above 0, and 1e-300 is 0 in float32"),
        (["train", *TINY, "--sample-every", "9", "--diffusion", "ddpm", "--diffusion-steps", "30", "--sample-steps",
          "31", "--sampler", "ddim"],
         "no preview can be drawn (31 steps of a schedule that has 30: use 1 to 30): change --sample-steps"),
        (["eval", "none.safetensors"], "none.safetensors"),
        (["info", "none.safetensors"], "none.safetensors"),
        (["convert", "none", "out.pt", "--to-torch"], "cannot write out.pt: name it .safetensors"),
        (["convert", "none.pt", "out.safetensors"], "cannot read none.pt (No such file or directory): check the path"),
        (["convert", ".", "out.safetensors"], ". is a folder: a run's weights go to PyTorch's layout with --to-t"),
        (["train", "--data-changed"], "--data-changed is for a run that goes on: give --resume, or leave it out"),
        (["sample", "x", "-n", "2", "--classes", "1,2,3"], "3 classes were given for 2 images: give fewer, or more"),
        (["sample", "x", "-n", "-1", "--classes", "1"], "1 classes were given for -1 images"),
        (["info", "x", "--kernels"], "--kernels and --arch say nothing of a checkpoint: leave them out, or the check"),
        (["info", "x", "--arch", "sm_80"], "--kernels and --arch say nothing of a checkpoint"),
        (["convert", "x", "y.safetensors", "--weights", "ema"], "--weights chooses what --to-torch writes: give that"),
        *((["convert", "x", "y.safetensors", "--to-torch", *words],
           f"{words[0]} is for weights that come from PyTorch: with --to-torch leave it out")
          for words in (["--key", "net"], ["--preset", "mnist"], ["--config", "x"], ["--image-size", "8"])),
        (["dance"], "invalid choice: 'dance'"),
        ([], "the following arguments are required: COMMAND: see cudiff --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(mistake, tmp_path, words, message):
    assert message in mistake(*words)
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(cli):
    with pytest.raises(CudiffError, match="no data at 'none'"):
        cli("train", "--data", "none", "--debug")
    with pytest.raises(CudiffError, match="no data at 'none'"):
        cli("--debug", "train", "--data", "none")


def test_what_nobody_expected_is_one_line_too(mistake, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("cudiff.data.load_dataset", broken)
    message = mistake("train", *TINY)
    assert "unexpected ZeroDivisionError: first line (run again with --debug for the traceback)" in message


def test_memory_that_runs_out_anywhere_is_told(mistake, monkeypatch):
    def full(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr("cudiff.data.load_dataset", full)
    assert "out of memory: use a smaller --batch-size" in mistake("train", *TINY)


@pytest.mark.skipif(cuda_available(), reason="a GPU is here")
@pytest.mark.parametrize("words", [["train"], ["sample", "RUN"], ["eval", "RUN"], ["demo"]], ids=lambda words: words[0])
def test_no_cuda_says_why_and_what_to_install(mistake, run_folder, words, tmp_path):
    words = [run_folder if word == "RUN" else word for word in words]
    message = mistake(*words, "--device", "cuda")
    assert "no CUDA: " in message and re.search(r"install|driver", message)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_left_alone(mistake, run_folder):
    before = {path.name: path.read_bytes() for path in run_folder.iterdir()}
    message = mistake("train", *TINY, "--folder", run_folder)
    assert "already holds a run, with step-00000004.safetensors: go on with cudiff train --resume" in message
    assert "holds a newer checkpoint" in mistake("train", "--resume", run_folder / "step-00000002.safetensors")
    assert "at its end after 4 steps" in mistake("train", "--resume", run_folder)
    assert "cannot change model_channels" in mistake("train", "--resume", run_folder, "--model-channels", "16")
    assert before == {path.name: path.read_bytes() for path in run_folder.iterdir()}


def test_another_run_s_folder_is_not_resumed_into(mistake, cli, run_folder, tmp_path):
    cli("train", *TINY, "--folder", "other", "--steps", "1")
    assert "other already holds a run" in mistake("train", "--resume", run_folder, "--folder", "other", "--steps", "9")


def test_a_folder_is_resumed_without_its_metrics(cli, run_folder, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "step-00000004.safetensors").write_bytes(latest(run_folder).read_bytes())
    assert cli("train", "--resume", "copy", "--steps", "5")[0] == 0
    assert (tmp_path / "copy" / "step-00000005.safetensors").exists() and not (tmp_path / "runs").exists()


def test_a_run_is_named_like_its_data(cli, tmp_path, monkeypatch):
    (tmp_path / "photos" / "more").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "photos" / "a.png")
    for data, home in ((".", "photos"), ("..", "photos/more")):
        monkeypatch.chdir(tmp_path / home)
        main(["train", *TINY, "--num-classes", "0", "--data", data])
        assert (tmp_path / home / "runs" / "photos" / "step-00000004.safetensors").exists()


@pytest.mark.parametrize("folder", ["file", "file/run", "/proc/run"])
def test_folders_that_cannot_be_made(mistake, tmp_path, folder):
    (tmp_path / "file").touch()
    message = mistake("train", *TINY, "--folder", folder)
    assert f"cannot use {folder} as a folder (" in message and "choose another --folder" in message


def test_resume_into_a_folder_of_its_own(cli, run_folder, tmp_path):
    first = run_folder / "step-00000002.safetensors"
    assert cli("train", "--resume", first, "--folder", "branch", "--steps", "3")[0] == 0
    assert [path.name for path in (tmp_path / "branch").glob("step-*")] == ["step-00000003.safetensors"]


@pytest.mark.parametrize("name", ["images.npz", "train-images-idx3-ubyte", "photos"])
def test_damaged_data_is_named(mistake, tmp_path, name):
    path = tmp_path / name
    if name == "images.npz":
        np.savez(path, images=np.zeros((4, 8, 8, 1), np.uint8))
        path.write_bytes(path.read_bytes()[:-40])
        data = path
    elif name == "photos":
        path.mkdir()
        (path / "cat.png").write_bytes(b"not a picture")
        data, name = path, "cat.png"
    else:
        path.write_bytes(b"\0\0\x08\x03\0\0\0\x05\0\0\0\x08\0\0\0\x08" + bytes(100))
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x05" + bytes(5))
        data = tmp_path
    assert name in mistake("train", "--data", data, "--image-size", "8", "--device", "cpu", "--folder", "run")


def test_skipped_images_are_counted(cli, tmp_path):
    for index in range(12):
        path = tmp_path / "photos" / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (9, 11), index).save(path)
    (tmp_path / "photos" / "broken.png").write_bytes(b"not a picture")
    code, out, _ = cli("train", "--data", "photos", *TINY, "--num-classes", "0", "--skip-bad")
    assert code == 0 and re.search(r"do not decode and are left out: 1, first .*broken.png", out), out
    assert (tmp_path / "runs" / "photos" / "metrics.jsonl").exists()


def test_class_folders_are_classes_unless_told_otherwise(cli, tmp_path):
    for name in ("cats", "dogs", "owls"):
        for index in range(4):
            path = tmp_path / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * index).save(path)
    words = ["train", "--preset", "guided64", "--data", "photos", *TINY, "--precision", "fp32", "--channels", "1",
             "--channel-mult", "1,2", "--sampler", "ddim"]
    code, out, error = cli(*words, "--folder", "with")
    assert code == 0 and "conditioned on the data's 3 classes: --num-classes 0 trains without them" in out, error
    assert load_checkpoint(tmp_path / "with").config.num_classes == 3
    assert "conditioned" not in cli("train", "--resume", "with", "--steps", "5")[1]
    code, out, error = cli(*words, "--folder", "without", "--num-classes", "0")
    assert code == 0 and "the data's 3 classes are not used: the model is unconditional" in out, error
    assert load_checkpoint(tmp_path / "without").config.num_classes == 0
    (tmp_path / "run.toml").write_text("num_classes = 0\n")
    assert "are not used" in cli(*words, "--config", "run.toml", "--folder", "toml")[1]
    out = cli(*words, "--num-classes", "5", "--folder", "five")[1]
    assert "the model has 5 classes and the data 3: the others are not trained (--num-classes -1 takes" in out
    assert "not trained" not in cli(*words, "--num-classes", "-1", "--folder", "own")[1]


def test_train_prints_what_a_loader_noted(cli, monkeypatch):
    digits = dataclasses.replace(load_dataset("digits", image_size=8, count=20), notes=("two [strays]", "one more"))
    monkeypatch.setattr("cudiff.data.load_dataset", lambda *args, **options: digits)
    out = cli("train", *TINY, "--folder", "run")[1]
    assert "two [strays]\none more\n" in out and out.count("one more") == 1


def test_truncated_checkpoints_are_told(mistake, run_folder, tmp_path):
    content = latest(run_folder).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[: len(content) // 2])
    for words in (["sample"], ["eval"], ["info"], ["train", "--resume"], ["convert", "--to-torch"]):
        target = ["out.safetensors"] if "convert" in words else []
        assert "cut.safetensors" in mistake(*words, "cut.safetensors", *target)


def test_sample_writes_every_kind_of_file(cli, run_folder, tmp_path):
    run = ["sample", run_folder, "--device", "cpu", "--steps", "2"]  # a folder stands for its newest checkpoint
    code, out, error = cli(*run, "-n", "9", "--out", "grid.png")
    assert (code, error) == (0, "") and "9 images in grid.png" in out
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.mode == "L" and picture.size[0] == picture.size[1] > 3 * 8

    assert cli(*run, "-n", "5", "--classes", "3,7", "--out", "some.npz")[0] == 0
    with np.load(tmp_path / "some.npz") as arrays:
        assert arrays["images"].shape == (5, 8, 8, 1) and arrays["labels"].tolist() == [3, 7, 3, 7, 3]
        images = arrays["images"]

    assert cli(*run, "-n", "5", "--classes", "3,7", "--out", "single")[0] == 0
    assert sorted(path.name for path in (tmp_path / "single").iterdir()) == [f"{i:06d}.png" for i in range(5)]
    for index in range(5):
        with Image.open(tmp_path / "single" / f"{index:06d}.png") as picture:
            np.testing.assert_array_equal(np.asarray(picture)[..., None], images[index])

    assert cli(*run, "-n", "4", "--steps", "5", "--out", "denoising.gif")[0] == 0
    with Image.open(tmp_path / "denoising.gif") as picture:
        assert picture.n_frames == 6

    assert cli(*run, "-n", "2", "--weights", "model", "--sampler", "ddim", "--guidance", "1", "--seed", "5")[0] == 0
    assert (tmp_path / "samples.png").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--classes", "11"], "the model has classes 0 to 9, and -1 for none; 11 is not one"),
        (["--classes", "9" * 30], "classes are object of shape (2,): give one whole number, or one for each image"),
        (["--guidance", "nan"], "guidance must be at least 0, not nan"),
        (["--guidance", "-1"], "guidance must be at least 0, not -1"),
        (["--guidance", "1e39"], "guidance must be at most 3.4e+38 in size, the most that float32 holds"),
        (["--steps", "3", "--guidance", "1e30"], "the images hold values that are not finite: use less guidance"),
        (["-n", "0"], "n must be at least 1, not 0"),
        (["--steps", "0"], "steps must be at least 1, not 0"),
        (["--out", "/proc/none/x.png"], "cannot write"),
    ],
)
def test_mistakes_in_sampling(mistake, run_folder, words, message):
    assert message in mistake("sample", run_folder, "-n", "2", "--steps", "1", *words)


def test_single_pictures_of_two_runs_are_never_mixed(mistake, cli, run_folder, tmp_path):
    words = ["sample", run_folder, "--steps", "1", "--device", "cpu", "--out", "single"]
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "notes.txt").touch()
    assert cli(*words, "-n", "3")[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "single").iterdir()}
    message = mistake(*words, "-n", "2", "--seed", "1")
    assert re.search(r"single holds pictures already, such as 00000\d.png: name another folder with --out", message)
    assert {path.name: path.read_bytes() for path in (tmp_path / "single").iterdir()} == before


def test_eval_computes_in_the_precision_asked_for(cli, run_folder, monkeypatch):
    from cudiff.evaluate import Report

    seen = []
    report = Report(data="digits", samples=2, real=2, test=2, seed=0, guidance=None, features="any", frechet=None,
                    frechet_real=None, kernel=0.0, kernel_real=0.0, precision=None, precision_real=None, recall=None,
                    recall_real=None)
    monkeypatch.setattr("cudiff.evaluate.evaluate_pipeline", lambda pipeline, *args, **options: (
        seen.append(pipeline.net.precision) or report))
    for words in ([], ["--precision", "bf16"], ["--precision", "tf32"]):
        assert cli("eval", run_folder, "--device", "cpu", *words)[0] == 0
    assert seen == ["fp32", "bf16", "tf32"]


def test_home_is_expanded_in_every_path(cli, run_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data = load_dataset("digits", image_size=8, count=30)
    (tmp_path / "home").mkdir()
    save_npz(tmp_path / "home" / "few.npz", data.images, data.labels)
    (tmp_path / "home" / "run.toml").write_text('preset = "digits"\ndata = "~/few.npz"\n')
    assert cli("train", "--config", "~/run.toml", *TINY, "--folder", "~/run", "--norm-group-channels", "1")[0] == 0
    assert cli("train", "--resume", "~/run", "--steps", "5")[0] == 0
    assert cli("sample", "~/run", "-n", "2", "--steps", "1", "--device", "cpu", "--out", "~/grid.png")[0] == 0
    assert cli("info", "~/run")[0] == 0
    assert cli("convert", "~/run", "~/weights.safetensors", "--to-torch")[0] == 0
    names = {path.name for path in (tmp_path / "home").glob("[!.]*")}
    assert names == {"few.npz", "run.toml", "run", "grid.png", "weights.safetensors"}
    assert not (tmp_path / "~").exists()


def test_advice_holds_quoted_paths(mistake, cli, tmp_path):
    assert cli("train", *TINY, "--folder", "my run")[0] == 0
    assert "cudiff train --resume 'my run'" in mistake("train", *TINY, "--folder", "my run")


def test_info_says_which_kernels_run(cli):
    code, out, _ = cli("info", "--kernels")
    assert code == 0 and "attention_sm90.forward" in out and "attention.forward" in out
    for architecture, there, runs in ("sm_80", "sm_80", "no"), ("sm_90", "sm_90a", "yes"):
        out = cli("info", "--kernels", "--arch", architecture)[1]
        rows = [line.split("│") for line in out.splitlines() if line.startswith("│ attention")]
        assert f"runs on {there}" in out.replace("\n", " ") and len(rows) > 4
        assert all(row[-2].strip() == (runs if "_sm" in row[1] else "yes") for row in rows)
    code, _, error = cli("info", "--arch", "sm_70")
    assert code == 2 and error.count("\n") == 1 and "choose one of sm_75, " in error


def test_info_with_and_without_checkpoint(cli, run_folder, monkeypatch):
    code, out, error = cli("info")
    assert (code, error) == (0, "")
    for word in ("cudiff", "Python", "numpy", "CUDA", "kernels", "default device"):
        assert word in out
    if not cuda_available():
        assert "not usable" in out
        monkeypatch.setattr("cudiff.info.cuda_status", lambda: (False, "pip install 'cudiff[cuda13]'"))
        assert "cudiff[cuda13]" in cli("info")[1]  # brackets are no markup
    code, out, _ = cli("info", run_folder)
    assert code == 0 and "4 steps" in out and "model_channels" in out


def test_convert_both_ways(cli, mistake, run_folder, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no .pt file can be made")
    assert cli("convert", run_folder, "weights.safetensors", "--to-torch")[0] == 0
    from cudiff.tensorfile import read_tensors

    state, _ = read_tensors(tmp_path / "weights.safetensors")
    torch.save({name: torch.tensor(array) for name, array in state.items()}, tmp_path / "weights.pt")
    sizes = ["--image-size", "8", "--channels", "1", "--model-channels", "8", "--num-heads", "2", "--num-head-channels",
             "0", "--attention-resolutions", ""]
    assert cli("convert", "weights.pt", "model.safetensors", "--preset", "digits", *sizes)[0] == 0
    for source in (latest(run_folder), "model.safetensors"):
        cli("sample", source, "-n", "2", "--steps", "2", "--device", "cpu", "--out", f"{Path(source).stem}.npz")
    with np.load("model.npz") as ours, np.load(f"{latest(run_folder).stem}.npz") as theirs:
        np.testing.assert_array_equal(ours["images"], theirs["images"])
    assert "model.safetensors exists already" in mistake("convert", "weights.pt", "model.safetensors", *sizes)
    out = cli("convert", "weights.pt", "a model.safetensors", "--preset", "digits", *sizes)[1]
    assert "cudiff info 'a model.safetensors' says the rest" in out
    message = mistake("convert", "weights.pt", "new.safetensors", "--preset", "mnist")
    assert "give --model-channels 8 --channel-mult 1,2 --num-res-blocks 1" in message
    torch.save({"net": torch.load("weights.pt"), "epoch": 3}, tmp_path / "parts.pt")
    assert "choose from its parts 'net' with key (--key)" in mistake("convert", "parts.pt", "new.safetensors")
    assert cli("convert", "parts.pt", "new.safetensors", "--key", "net", "--preset", "digits", *sizes)[0] == 0
    # converted weights can be trained further, in a folder of their own
    assert cli("train", "--resume", "model.safetensors", *TINY, "--norm-group-channels", "1")[0] == 0
    assert (tmp_path / "runs" / "model" / "step-00000004.safetensors").exists()


def test_convert_starts_from_the_defaults_that_its_help_prints(cli, mistake, tmp_path):
    """Plain guided-diffusion weights: 4 heads where the digits preset has 32 channels a head."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no .pt file can be made")
    from tests.models.torch_unet import TorchUNet

    torch.manual_seed(0)
    torch_model = TorchUNet(16, 3, 64, (1, 2), 1, (8,), num_heads=4, num_head_channels=0).eval()
    torch.save(torch_model.state_dict(), tmp_path / "w.pt")
    assert "give --channel-mult 1,2 --num-res-blocks 1 --attention-resolutions 8" in mistake(
        "convert", "w.pt", "model.safetensors", "--image-size", "16", "--channels", "3"
    )
    options = ["--image-size", "16", "--channels", "3", "--channel-mult", "1,2", "--num-res-blocks", "1",
               "--attention-resolutions", "8", "--diffusion", "ddpm", "--data", "mnist"]
    code, out, _ = cli("convert", "w.pt", "model.safetensors", *options)
    assert code == 0 and "a model of ddpm, sampled by heun in 18 steps" in out
    model = cudiff.load(tmp_path / "model.safetensors", "cpu")
    assert model.config == Config(
        image_size=16, channels=3, channel_mult=(1, 2), num_res_blocks=1, num_classes=0, attention_resolutions=(8,),
        diffusion="ddpm", data="mnist",
    )
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([3.0, 700.0])
    with torch.no_grad():
        expected = torch_model(x, t).permute(0, 2, 3, 1).numpy()
    ours = model.net(Tensor(x.permute(0, 2, 3, 1).numpy()), Tensor(t.numpy())).numpy()
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("words, given", [
    ([], (Path("runs/demo"), 0, "auto")),
    (["--folder", "here", "--seed", "7", "--device", "cpu"], (Path("here"), 7, "cpu")),
])
def test_the_demo_is_given_its_options(cli, monkeypatch, words, given):
    asked = []
    monkeypatch.setattr("cudiff.demo.demo", lambda *arguments: asked.append(arguments[:3]))
    assert cli("demo", "--processes", "1", *words)[0] == 0 and asked == [given]


def test_help_names_every_command_and_fits(capsys):
    for words in ([], ["train"], ["sample"], ["eval"], ["info"], ["convert"], ["demo"]):
        with pytest.raises(SystemExit) as exit:
            main([*words, "--help"])
        assert exit.value.code == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 110
        if not words:
            assert all(name in out for name in ("demo", "train", "sample", "eval", "info", "convert"))


@pytest.mark.parametrize("columns, width", [(80, 78), (300, 108)])
def test_help_is_as_wide_as_the_terminal_up_to_110(monkeypatch, capsys, columns, width):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert width - 8 <= max(map(len, capsys.readouterr().out.splitlines())) <= width
