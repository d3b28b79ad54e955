"""unet.cu's files both ways: weights with AdamW's moments to the byte, data, and what its .bin serves for as it is."""

import numpy as np
import pytest
from PIL import Image

from cudiff.checkpoint import load_checkpoint, save_checkpoint
from cudiff.cli import main
from cudiff.config import PRESETS
from cudiff.convert import UNETCU_MAGIC
from cudiff.data import Dataset, load_dataset
from cudiff.data.unetcu import write_unetcu
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.pipeline import Pipeline, export_unet_cu, import_torch, load
from tests.test_convert import unet_cu_parameters

SMALL = dict(B=4, C_in=1, C_model=32, C_out=1, H=8, W=8, period=1000)


def binary(path, rng, moments=False, random=False, **changes):
    """A file as unet.cu's trainer writes it, weights and each moment of their own numbers; returns its bytes."""
    numbers = {"magic": UNETCU_MAGIC} | SMALL | {"moments": int(moments), "random": int(random)} | changes
    count = sum(int(np.prod(shape)) for _, shape in unet_cu_parameters(channels=1))
    header = np.zeros(256, "<i4")
    header[: len(numbers)] = list(numbers.values())
    runs = [rng.standard_normal(count).astype("<f4") / 20]
    runs += [rng.standard_normal(count).astype("<f4"), rng.random(count).astype("<f4")] if moments else []
    if random:
        header[10:] = 7  # the trainer leaves what was in its memory
    content = header.tobytes() + b"".join(run.tobytes() for run in runs) + rng.bytes(48 * 256) * random
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("moments", [False, True])
def test_weights_and_moments_there_and_back_to_the_byte(moments, tmp_path, rng, capsys):
    content = binary(tmp_path / "model_20000.bin", rng, moments)
    ours, back = tmp_path / "ours.safetensors", tmp_path / "back.bin"
    assert main(["convert", str(tmp_path / "model_20000.bin"), str(ours)]) == 0
    assert "a model of ddpm, sampled by ancestral in 1000 steps" in " ".join(capsys.readouterr().out.split())
    assert main(["convert", str(ours), str(back)]) == 0
    assert back.read_bytes() == content


def test_each_moment_is_its_parameters(tmp_path, rng):
    content = binary(tmp_path / "model_20000.bin", rng, moments=True)
    checkpoint = load_checkpoint(tmp_path / "model_20000.bin")
    values = np.frombuffer(content[1024:], "<f4").reshape(3, -1)
    first = unet_cu_parameters(channels=1)[0][1]
    for part, run in zip(("model", "exp_avg", "exp_avg_sq"), values, strict=True):
        np.testing.assert_array_equal(checkpoint.tensors[f"{part}.time_embed.0.weight"].ravel(), run[: np.prod(first)])
    assert (checkpoint.tensors["exp_avg_sq.out.2.weight"] >= 0).all()


def test_random_states_are_left_out_and_that_is_said(tmp_path, rng, capsys):
    content = binary(tmp_path / "model_20000.bin", rng, moments=True, random=True)
    ours, back = tmp_path / "ours.safetensors", tmp_path / "back.bin"
    assert main(["convert", str(tmp_path / "model_20000.bin"), str(ours)]) == 0
    assert "random states" in capsys.readouterr().out
    assert main(["info", str(ours)]) == 0
    assert "random states" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "model_20000.bin"), str(tmp_path / "again.bin")]) == 0
    assert "random states" in capsys.readouterr().out
    export_unet_cu(ours, back)
    header = np.frombuffer(content[:1024], "<i4").copy()
    header[9:] = 0
    assert back.read_bytes() == header.tobytes() + content[1024 : -48 * 256]


def test_bytes_that_nothing_announces_are_told(tmp_path, rng, capsys):
    content = binary(tmp_path / "unet_init.bin", rng)
    (tmp_path / "unet_init.bin").write_bytes(content + bytes(1000))
    assert main(["convert", str(tmp_path / "unet_init.bin"), str(tmp_path / "ours.safetensors")]) == 0
    assert "1,000 bytes that the header of unet.cu's file does not announce" in capsys.readouterr().out


def test_the_bin_is_sampled_and_told_as_it_is(tmp_path, rng, capsys):
    binary(tmp_path / "unet_init.bin", rng)
    sample = ["sample", str(tmp_path / "unet_init.bin"), "-n", "2", "--steps", "2", "--device", "cpu"]
    assert main([*sample, "--out", str(tmp_path / "direct.npz")]) == 0
    import_torch(tmp_path / "unet_init.bin", tmp_path / "ours.safetensors", PRESETS["digits"])
    images = load(tmp_path / "ours.safetensors", "cpu").sample(2, steps=2)
    np.testing.assert_array_equal(np.load(tmp_path / "direct.npz")["images"], images)
    capsys.readouterr()
    assert main(["info", str(tmp_path / "unet_init.bin")]) == 0
    assert "ddpm" in capsys.readouterr().out
    assert main([*sample, "--out", str(tmp_path / "b.npz"), "--sampler", "ddim"]) == 0
    (tmp_path / "short.bin").write_bytes((tmp_path / "unet_init.bin").read_bytes()[:-4])
    assert main(["sample", str(tmp_path / "short.bin"), "--out", str(tmp_path / "c.png")]) == 2
    assert "truncated" in capsys.readouterr().err


def test_options_that_its_weights_tell_are_not_taken_in_silence(tmp_path, rng, capsys):
    binary(tmp_path / "unet_init.bin", rng)
    words = ["convert", str(tmp_path / "unet_init.bin"), str(tmp_path / "ours.safetensors")]
    assert main([*words, "--sample-steps", "50", "--dropout", "0.3"]) == 2
    error = capsys.readouterr().err
    assert "tells its model by itself, without --sample-steps 50 --dropout 0.3: leave that out" in error
    assert error.count("\n") == 1 and not (tmp_path / "ours.safetensors").exists()
    assert main([*words, "--sample-steps", "1000"]) == 0


def test_latents_are_no_training_data_of_unet_cu(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", latents=np.zeros((2, 8, 8, 3), np.float32))
    assert main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "b.bin")]) == 2
    assert "a holds latents, and unet.cu's training data are pictures" in capsys.readouterr().err
    assert not (tmp_path / "b.bin").exists()


def test_another_bin_is_told_as_what_it_is(tmp_path, capsys):
    write_unetcu(tmp_path / "data.bin", Dataset(np.zeros((4, 8, 8, 1), np.uint8)))
    (tmp_path / "other.bin").write_bytes(np.ones(300, "<i4").tobytes())
    for name, told in (("data.bin", "is unet.cu's training data, not its weights: give it to --data"),
                       ("other.bin", "is not unet.cu's weights (no 12345678 at its start): name another file"),
                       ("none.bin", "none.bin (No such file or directory): check the path")):
        for words in (["sample"], ["convert"], ["train", "--data", "digits", "--init"]):
            target = ["x.safetensors"] if words == ["convert"] else []
            assert main([*words, str(tmp_path / name), *target]) == 2
            error = capsys.readouterr().err
            assert told in error and error.count("\n") == 1, words


def test_a_run_goes_on_with_its_moments(tmp_path, rng, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = binary(tmp_path / "model_20000.bin", rng, moments=True, random=True)
    write_unetcu("data.bin", Dataset(rng.integers(0, 256, (8, 8, 8, 1)).astype(np.uint8)))
    command = ["train", "--resume", "model_20000.bin", "--data", "data.bin", "--steps", "20001", "--sample-every", "0",
               "--sample-steps", "1", "--samples", "1", "--device", "cpu"]
    assert main(command) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "going on at step 20,000" in out and "random states" in out
    after = load_checkpoint("runs/model_20000")
    assert after.counters["step"] == 20001 and after.counters["optimizer"][0] == 20001
    before = load_checkpoint("model_20000.bin")
    name = "time_embed.0.weight"
    gradient = (after.tensors[f"exp_avg.{name}"] - 0.9 * before.tensors[f"exp_avg.{name}"]) / 0.1
    second = 0.999 * before.tensors[f"exp_avg_sq.{name}"] + 0.001 * gradient**2
    np.testing.assert_allclose(after.tensors[f"exp_avg_sq.{name}"], second, rtol=1e-4, atol=1e-6)
    assert abs(after.tensors[f"model.{name}"] - before.tensors[f"model.{name}"]).max() > 1e-6
    assert main(["convert", "runs/model_20000", "next.bin"]) == 0  # goes on there
    assert len((tmp_path / "next.bin").read_bytes()) == len(content) - 48 * 256


def test_averaged_weights_have_no_moments(tmp_path, rng):
    content = binary(tmp_path / "a.bin", rng, moments=True)
    import_torch(tmp_path / "a.bin", tmp_path / "a.safetensors", PRESETS["digits"])
    checkpoint = load_checkpoint(tmp_path / "a.safetensors")
    tensors = {name: value * (2 if name.startswith("ema.") else 1) for name, value in checkpoint.tensors.items()}
    save_checkpoint(tmp_path / "b.safetensors", checkpoint.config, tensors, checkpoint.counters)
    assert main(["convert", str(tmp_path / "b.safetensors"), str(tmp_path / "b.bin"), "--weights", "ema"]) == 0
    found, count = (tmp_path / "b.bin").read_bytes(), (len(content) - 1024) // 3
    assert np.frombuffer(found[:1024], "<i4")[8] == 0 and len(found) == 1024 + count
    expected = np.frombuffer(content[1024 : 1024 + count], "<f4") * 2
    np.testing.assert_array_equal(np.frombuffer(found[1024:], "<f4"), expected)


def test_a_file_that_tells_no_step_is_of_the_first_that_its_trainer_writes(tmp_path, rng):
    binary(tmp_path / "unet.bin", rng, moments=True)
    assert load_checkpoint(tmp_path / "unet.bin", ()).counters["optimizer"] == [10000, 0, 0]
    binary(tmp_path / "model_30000.bin", rng)
    assert load_checkpoint(tmp_path / "model_30000.bin", ()).counters == {"step": 0}


def test_other_models_are_not_written(tmp_path):
    for name, changes, message in (
        ("elephants", {}, "which has --diffusion ddpm"),
        ("unet-cu", {"channel_mult": (1, 2), "attention_resolutions": ()},
         "--channel-mult 1,2,3,4 --attention-resolutions 2,1"),
        ("unet-cu", {"noise_schedule": "cosine"}, "which has --noise-schedule linear"),
        ("unet-cu", {"max_period": 999.5}, "whole numbers, and max_period is 999.5"),
        ("cs179", {"channel_mult": (1, 2), "model_channels": 8}, "than unet.cu's, which has --model unet"),
    ):
        small = {"image_size": 8, "channels": 1, "model_channels": 32, "num_classes": 0}
        small |= {} if name == "cs179" else {"attention_resolutions": (2, 1)}
        config = PRESETS[name].replace(**(small | changes))
        Pipeline(config, build(config)).save(tmp_path / "a.safetensors")
        with pytest.raises(CudiffError, match=message):
            export_unet_cu(tmp_path / "a.safetensors", tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_what_is_not_finite_is_not_taken(tmp_path, rng):
    content = bytearray(binary(tmp_path / "model_10000.bin", rng, moments=True))
    for place in (1024, len(content) - 4):  # a weight, a moment
        damaged = bytes(content[:place]) + np.float32(np.nan).tobytes() + bytes(content[place + 4 :])
        (tmp_path / "model_10000.bin").write_bytes(damaged)
        with pytest.raises(CudiffError, match=r"is not finite, .* is not written"):
            import_torch(tmp_path / "model_10000.bin", tmp_path / "ours.safetensors", PRESETS["digits"])
    assert not (tmp_path / "ours.safetensors").exists()


def test_data_is_written_as_prepare_data_does(tmp_path, rng, capsys):
    images = rng.integers(0, 256, (5, 6, 6, 3)).astype(np.uint8)
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(5) % 2)
    assert main(["convert", str(tmp_path / "data.npz"), str(tmp_path / "data.bin")]) == 0
    assert "5 images; its labels have no place there" in " ".join(capsys.readouterr().out.split())
    header = np.zeros(256, np.int32)
    header[:5] = 20240620, 5, 3, 6, 6
    floats = [(image.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1).astype("float32") for image in images]
    assert (tmp_path / "data.bin").read_bytes() == header.tobytes() + b"".join(image.tobytes() for image in floats)
    np.testing.assert_array_equal(load_dataset(tmp_path / "data.bin").images, images)
    assert main(["convert", str(tmp_path / "data.bin"), str(tmp_path / "again.bin")]) == 0
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "data.bin").read_bytes()
    assert main(["convert", str(tmp_path / "data.bin"), str(tmp_path / "gray.bin"), "--channels", "1"]) == 0
    assert load_dataset(tmp_path / "gray.bin").images.shape == (5, 6, 6, 1)
    (tmp_path / "pictures").mkdir()
    Image.fromarray(images[0]).save(tmp_path / "pictures" / "a.png")
    assert main(["convert", str(tmp_path / "pictures"), str(tmp_path / "pictures.bin")]) == 0
    np.testing.assert_array_equal(load_dataset(tmp_path / "pictures.bin").images, images[:1])


@pytest.mark.parametrize("given, message", [
    (["data.bin", "out.bin", "--key", "ema"], "--key is not for a data set's images"),
    (["data.bin", "out.bin", "--model", "unet"], "--model is not for a data set's images"),
    (["model.bin", "out.bin", "--image-size", "8"], "--image-size is not for the weights of a checkpoint"),
    (["data.bin", "model.bin"], "model.bin exists already"),
    (["model.bin", "data.bin"], "data.bin exists already"),
    (["missing", "out.bin"], "no data at 'missing'"),
    (["missing.safetensors", "out.bin"], "missing.safetensors"),
])
def test_mistakes_get_one_line(given, message, tmp_path, rng, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    binary(tmp_path / "model.bin", rng)
    write_unetcu("data.bin", Dataset(rng.integers(0, 256, (2, 8, 8, 1)).astype(np.uint8)))
    assert main(["convert", *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out.bin").exists()
