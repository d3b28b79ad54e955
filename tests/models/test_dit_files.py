"""DiT's weights by the names of the paper's code: told from the file, sampled as that code does, written back."""

from argparse import Namespace

import numpy as np
import pytest

from cudiff.cli import main
from cudiff.config import PRESETS, Config
from cudiff.convert import to_torch, write_weights
from cudiff.diffusion import Guided
from cudiff.errors import CudiffError
from cudiff.models import DiT
from cudiff.pipeline import import_torch, load
from cudiff.tensor import Tensor, no_grad
from cudiff.tensorfile import read_tensors
from tests.models.test_unet_numpy import randomised

SMALL = dict(hidden_size=384, depth=2, num_heads=6, patch_size=4, image_size=8, in_channels=4, num_classes=3,
             learn_sigma=True)


@pytest.fixture
def model(rng):
    model = DiT(**SMALL)
    randomised(model, rng)
    return model


def written(model, path, leave_out=()):
    state = to_torch(model.state_dict(), model.layouts())
    write_weights(path, {name: array for name, array in state.items() if name not in leave_out})
    return path


def test_the_file_tells_the_model(model, tmp_path):
    config = import_torch(written(model, tmp_path / "dit.safetensors"), tmp_path / "ours.safetensors", Config())
    told = dict(model="dit", image_size=8, channels=4, patch_size=4, hidden_size=384, depth=2, num_heads=6,
                mlp_ratio=4.0, qk_norm=False, num_classes=3, learn_sigma=True)
    assert {name: getattr(config, name) for name in told} == told
    assert (config.diffusion, config.noise_schedule, config.diffusion_steps) == ("ddpm", "linear", 1000)
    assert (config.sampler, config.sample_steps, config.clip_denoised) == ("ancestral", 250, False)
    assert config.guidance_channels == 3
    found = load(tmp_path / "ours.safetensors").net.state_dict()
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(found[name], array)


def test_there_and_back_is_the_identity(model, tmp_path, capsys):
    source = written(model, tmp_path / "dit.safetensors")
    import_torch(source, tmp_path / "ours.safetensors", Config())
    back = ["convert", str(tmp_path / "ours.safetensors"), str(tmp_path / "back.safetensors"), "--to-torch"]
    assert main(back) == 0 and "wrote" in capsys.readouterr().out
    (before, _), (after, _) = read_tensors(source), read_tensors(tmp_path / "back.safetensors")
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


def test_without_classes_or_learned_variance(tmp_path, rng):
    model = DiT(16, 3, 2, 96, 1, 2, mlp_ratio=1.5, qk_norm=True)
    randomised(model, rng)
    given = Config(model="dit", hidden_size=96, num_heads=2, diffusion="edm")
    config = import_torch(written(model, tmp_path / "dit.safetensors"), tmp_path / "ours.safetensors", given)
    assert (config.num_classes, config.learn_sigma, config.qk_norm, config.mlp_ratio) == (0, False, True, 1.5)
    assert (config.image_size, config.num_heads, config.diffusion) == (16, 2, "edm")


@pytest.mark.parametrize("channels, scale", [(1, 0.0), (3, 0.0), (2, 0.18215), (4, 0.18215)])
def test_one_or_three_channels_are_pictures_and_others_latents(tmp_path, rng, channels, scale):
    model = DiT(8, channels, 4, 384, 1, 6)
    randomised(model, rng)
    config = import_torch(written(model, tmp_path / "dit.safetensors"), tmp_path / "ours.safetensors", Config())
    assert (config.channels, config.latent_scale, config.clip_denoised) == (channels, scale, not scale)
    assert (config.guidance, config.guidance_channels) == (4.0, 3)


@pytest.mark.parametrize("sampler", ["ddim", "ancestral"])
@pytest.mark.parametrize(("channels", "words"), [(3, "--num-heads N$"), (4, "--num-heads N --latent-scale X$")])
def test_latents_of_a_model_that_is_described_are_not_cut(tmp_path, rng, channels, words, sampler):
    """Of a hidden size that is none of the paper's; without a scale too, which only its user knows."""
    model = DiT(8, channels, 4, 48, 1, 3)
    randomised(model, rng)
    source = written(model, tmp_path / "dit.safetensors")
    given = PRESETS["dit-xl-2"].replace(hidden_size=48, num_heads=3)
    with pytest.raises(CudiffError, match=words):
        import_torch(source, tmp_path / "ours.safetensors", Config())
    import_torch(source, tmp_path / "ours.safetensors", given.replace(learn_sigma=False))
    images = load(tmp_path / "ours.safetensors").sample(
        2, steps=4, sampler=sampler, floats=True, guidance=1.0, denoiser=lambda x, sigma, labels: x * 0 + 3)
    assert images.max() == (1 if channels == 3 else 3)


def test_what_it_refuses(model, tmp_path, rng):
    with pytest.raises(CudiffError, match=r"blocks\.1\.attn\.proj\.bias"):
        import_torch(written(model, tmp_path / "a.safetensors", ["blocks.1.attn.proj.bias"]), tmp_path / "b", Config())
    other = DiT(8, 3, 4, 48, 1, 3)
    randomised(other, rng)
    with pytest.raises(CudiffError, match="give --preset dit-xl-2 --hidden-size 48 --num-heads N"):
        import_torch(written(other, tmp_path / "c.safetensors"), tmp_path / "b", Config())
    state = to_torch(model.state_dict(), model.layouts())
    write_weights(tmp_path / "d.safetensors", state | {"pos_embed": state["pos_embed"][0]})
    with pytest.raises(CudiffError, match="the names are those of a DiT, the shapes are not"):
        import_torch(tmp_path / "d.safetensors", tmp_path / "b", Config())
    for name in ("x_embedder.proj.weight", "final_layer.linear.weight", "blocks.0.mlp.fc1.weight",
                 "y_embedder.embedding_table.weight"):
        write_weights(tmp_path / "f.safetensors", state | {name: np.array(1, np.float32)})
        with pytest.raises(CudiffError, match="the names are those of a DiT, the shapes are not"):
            import_torch(tmp_path / "f.safetensors", tmp_path / "b", Config())
    write_weights(tmp_path / "e.safetensors", state | {"pos_embed": np.zeros((1, 3, 384), np.float32)})
    with pytest.raises(CudiffError, match="pos_embed"):
        import_torch(tmp_path / "e.safetensors", tmp_path / "b", Config())
    assert not (tmp_path / "b").exists()


def test_names_of_a_huge_model_build_none(model, tmp_path):
    """Blocks of a few numbers each are not those of a model."""
    state = to_torch(model.state_dict(), model.layouts())
    state |= {f"blocks.{index}.attn.proj.bias": np.zeros(1, np.float32) for index in range(2, 900)}
    write_weights(tmp_path / "a.safetensors", state)
    with pytest.raises(CudiffError, match="the names are those of a DiT, the shapes are not"):
        import_torch(tmp_path / "a.safetensors", tmp_path / "b.safetensors", Config())


def test_guidance_of_the_first_three_channels(rng):
    """As forward_with_cfg of the paper's code: of the noise, whose other channels are the class's own."""
    means = rng.standard_normal((2, 4)).astype(np.float32)

    def denoiser(x, sigma, labels):
        mean = np.where((labels.numpy() < 0)[:, None], means[0], means[1])[:, None, None]
        return x * 0.5 + Tensor(mean)

    x, sigma = rng.standard_normal((3, 2, 2, 4)).astype(np.float32), 2.0
    labels = Tensor(np.zeros(3, np.int32))
    guided = Guided(denoiser, 4.0, channels=3)(Tensor(x), sigma, labels).numpy()
    uncond, cond = ((x - (x * 0.5 + mean)) / sigma for mean in means)
    eps = np.concatenate([uncond + 4.0 * (cond - uncond), cond], -1)[..., [0, 1, 2, 7]]
    np.testing.assert_allclose(guided, x - sigma * eps, rtol=1e-5, atol=1e-5)
    for channels in (0, 4, 9):  # all
        np.testing.assert_array_equal(Guided(denoiser, 4.0, channels=channels)(Tensor(x), sigma, labels).numpy(),
                                      Guided(denoiser, 4.0)(Tensor(x), sigma, labels).numpy())
    with pytest.raises(CudiffError, match="guidance_channels must be at least 0"):
        Guided(denoiser, 4.0, channels=-1)


def test_latents_are_sampled_as_floats(model, tmp_path, capsys):
    source, ours = written(model, tmp_path / "dit.safetensors"), tmp_path / "ours.safetensors"
    assert main(["convert", str(source), str(ours)]) == 0
    sample = ["sample", str(ours), "-n", "2", "--steps", "2", "--device", "cpu"]
    assert main([*sample, "--out", str(tmp_path / "a.png")]) == 2
    assert "latents of 4 channels, which are no pictures: give --out NAME.npz" in capsys.readouterr().err
    assert main([*sample, "--out", str(tmp_path / "a.npz")]) == 0
    found = np.load(tmp_path / "a.npz")
    assert found["latents"].shape == (2, 8, 8, 4) and found["latents"].dtype == np.float32
    assert abs(found["latents"]).max() > 1  # not cut
    pipeline = load(ours, "cpu")
    np.testing.assert_allclose(pipeline.sample(2, steps=2, batch_size=1), found["latents"], rtol=1e-3,
                               atol=0.2 / 0.18215)
    assert pipeline.config.latent_scale == 0.18215
    with pytest.raises(CudiffError, match="the model makes latents, not pictures: leave frames out"):
        pipeline.sample(2, steps=2, frames=[])
    with pytest.raises(CudiffError, match="28 pixels a side and 1 channels, but image_size is 28 and channels 4"):
        PRESETS["dit-s-2"].replace(image_size=28, channels=4).for_data((2, 28, 28, 1), 0)


def test_meta_s_training_checkpoint_samples_as_its_code_does(tmp_path):
    """A .pt with its parts, by the average's; one step of the network with guidance equals PyTorch's."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no parity test")
    from tests.models.torch_dit import TorchDiT

    torch.manual_seed(0)
    options = dict(image_size=8, in_channels=4, patch_size=4, hidden_size=384, depth=2, num_heads=6, num_classes=3,
                   learn_sigma=True)
    net = TorchDiT(**options)
    for parameter in net.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    parts = {"model": TorchDiT(**options).state_dict(), "ema": net.state_dict(), "opt": torch.optim.AdamW(
        net.parameters()).state_dict(), "args": Namespace(model="DiT-S/4", ckpt=None, lr=1e-4, sizes=[256])}
    torch.save(parts, tmp_path / "0400000.pt")
    import_torch(tmp_path / "0400000.pt", tmp_path / "ours.safetensors", Config(), key="ema")
    pipeline = load(tmp_path / "ours.safetensors", "cpu")
    x = torch.randn(2, 4, 8, 8)
    t, labels = torch.full((4,), 500.0), torch.tensor([0, 2, 3, 3])  # 3: the table's last row
    with torch.no_grad():
        out = net(torch.cat([x, x]), t, labels)
    eps, rest = out[:, :3], out[:, 3:]
    eps = eps[2:] + 4.0 * (eps[:2] - eps[2:])
    expected = torch.cat([eps, rest[:2]], 1).permute(0, 2, 3, 1).numpy()
    sigma = float(pipeline.objective.schedule.sigmas[500])
    ours = x.permute(0, 2, 3, 1).numpy()
    with no_grad():
        guided = Guided(pipeline.denoiser(), 4.0, channels=pipeline.config.guidance_channels)
        noisy, level = Tensor(ours * np.sqrt(1 + sigma**2)), Tensor(np.full(2, sigma, np.float32))
        denoised, fraction = guided.with_variance(noisy, level, Tensor(np.array([0, 2], np.int32)))
    np.testing.assert_allclose((noisy.numpy() - denoised.numpy()) / sigma, expected[..., :4], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(fraction.numpy() * 2 - 1, expected[..., 4:], rtol=1e-4, atol=1e-4)
