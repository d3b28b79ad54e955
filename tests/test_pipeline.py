"""A model and its diffusion: sampling, loading, weights from and to PyTorch."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import cudiff
from cudiff.checkpoint import load_checkpoint, prefixed, save_checkpoint
from cudiff.config import PRESETS, Config, as_flags
from cudiff.convert import other_options, rename, to_torch, write_weights
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.ops.random import Generator
from cudiff.pipeline import Pipeline, export_torch, import_torch
from cudiff.registry import SAMPLERS
from cudiff.tensor import Tensor, no_grad
from cudiff.tensorfile import read_header, read_tensors

TINY = Config(
    data="digits", image_size=8, channels=1, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2,
    num_classes=10, sampler="heun", sample_steps=3, guidance=1.5,
    use_scale_shift_norm=True,  # norms of 8 channels in 8 groups would take out an embedding added before them
)


def randomised(net, seed=0):
    """Weights all random, those that start at zero too."""
    rng = np.random.default_rng(seed)
    for parameter in net.parameters():
        parameter.assign(parameter.numpy() + 0.2 * rng.standard_normal(parameter.shape).astype(np.float32))
    return net


def pipeline(device="cpu", **changes):
    config = TINY.replace(**changes)
    net = randomised(build(config))
    net.eval().flatten(device, trainable=False)
    return Pipeline(config, net)


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of TINY whose EMA differs from its weights."""
    net, ema = randomised(build(TINY)), randomised(build(TINY), seed=1)
    path = tmp_path / "model.safetensors"
    tensors = prefixed("model", net.state_dict()) | prefixed("ema", ema.state_dict())
    save_checkpoint(path, TINY, tensors, {"step": 7})
    return path


def levels_apart(a, b):
    return np.abs(a.astype(int) - b.astype(int)).max()


@pytest.mark.parametrize("size, on_gpu", [(8, 256), (40, 163), (64, 64)])
def test_batches_where_no_size_is_given(device, size, on_gpu):
    """64 images at once; on a GPU more small ones."""
    done, most = [], on_gpu if device == "cuda" else 64
    model = pipeline(device, image_size=size, channel_mult=(1, 1, 1))  # attention in the middle is of 16x16 pixels
    model.sample(most + 1, steps=1, sampler="euler", guidance=1, progress=lambda count, n: done.append(count))
    assert done == [most, most + 1]


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("diffusion", ["edm", "ddpm", "flow"])
def test_every_sampler_samples_every_model(diffusion, sampler, device):
    model = pipeline(device, diffusion=diffusion, sampler=sampler, S_churn=1.0, eta=0.5)
    images = model.sample(5, seed=1, batch_size=2)
    assert images.shape == (5, 8, 8, 1) and images.dtype == np.uint8
    assert np.array_equal(model.sample(5, seed=1, batch_size=2), images)
    assert not np.array_equal(model.sample(5, seed=2, batch_size=2), images)


@pytest.mark.parametrize("sampler", ["heun", "euler"])
def test_images_are_the_same_in_any_batch_where_that_is_asked_for(device, rng, sampler):
    model = pipeline(device, sampler=sampler, S_churn=1.0, precision="fp32")
    classes, seen = [3, 7, 3, 1, 0, 9, 2], []
    noise = rng.standard_normal((7, *model.shape), np.float32)
    pictures = rng.integers(0, 256, (7, *model.shape), np.uint8)
    mask = rng.integers(0, 2, (7, *model.shape[:2]))
    for given in ({}, {"noise": noise}, {"init": pictures, "mask": mask}, {"other": 4, "share": np.linspace(0, 1, 7)}):
        few = {name: value if np.ndim(value) == 0 else value[:2] for name, value in given.items()}
        whole = model.sample(7, 5, classes, guidance=3, batch_invariant=True, floats=True, **given)
        for n, batch_size, part in ((7, 2, given), (2, 64, few), (2, 1, few)):
            again = model.sample(n, 5, classes[:n], guidance=3, batch_size=batch_size, batch_invariant=True,
                                 floats=True, progress=lambda *done: seen.append(done), **part)
            assert again.shape == (n, *model.shape) and np.array_equal(again, whole[:n])
    assert seen[:3] == [(7, 7), (2, 2), (2, 2)]
    plain = model.sample(7, 5, classes, guidance=3, floats=True)
    np.testing.assert_allclose(model.sample(7, 5, classes, guidance=3, batch_invariant=True, floats=True), plain,
                               atol=0.05)


def test_frames_of_an_invariant_batch_are_of_the_images_asked_for():
    frames = []
    images = pipeline().sample(3, frames=frames, batch_invariant=True)
    assert all(frame.shape == images.shape for frame in frames) and np.array_equal(frames[-1], images)


def test_an_invariant_batch_beyond_memory_is_told(monkeypatch):
    model = pipeline()

    def too_much(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(model, "_sampling", too_much)
    with pytest.raises(CudiffError, match="64 images at once do not fit: leave batch_invariant out"):
        model.sample(3, batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", list(SAMPLERS))
@pytest.mark.parametrize("diffusion", ["edm", "ddpm", "flow"])
def test_captured_sampling_gives_the_same_images(diffusion, sampler):
    options = dict(diffusion=diffusion, sampler=sampler, S_churn=1.0, eta=0.5)
    images = [
        pipeline("cuda", capture=capture, **options).sample(12, seed=1, steps=5, batch_size=4)
        for capture in (True, False)
    ]
    np.testing.assert_array_equal(*images)


@pytest.mark.parametrize("changes", [{}, {"sampler": "ancestral", "diffusion": "ddpm"}, {"S_churn": 2.0}])
def test_an_image_does_not_depend_on_its_batch(changes, device):
    """Up to one level of 255: matrix products of another batch size may be summed in another order."""
    model = pipeline(device, **changes)
    whole = model.sample(7, seed=3, batch_size=7)
    for size in (1, 2, 5):
        assert levels_apart(model.sample(7, seed=3, batch_size=size), whole) <= 1
    assert levels_apart(model.sample(3, seed=3), whole[:3]) <= 1


def test_classes_are_given_in_turn_or_by_name(device):
    model = pipeline(device)
    np.testing.assert_array_equal(model.sample(12, classes=[i % 10 for i in range(12)]), model.sample(12))
    np.testing.assert_array_equal(model.sample(3, classes=4), model.sample(3, classes=np.array([4, 4, 4])))
    assert not np.array_equal(model.sample(3, classes=4), model.sample(3, classes=5))
    null = model.sample(3, classes=-1)
    np.testing.assert_array_equal(null, model.sample(3, classes=-1, guidance=4.0))  # nothing to guide towards


def test_guidance_moves_away_from_the_unconditional():
    model = pipeline(sampler="euler", sample_steps=8)
    one, none, far = (model.sample(4, classes=3, guidance=g).astype(int) for g in (1.0, 0.0, 3.0))
    np.testing.assert_array_equal(none, model.sample(4, classes=-1))
    assert np.abs(far - none).sum() > np.abs(one - none).sum()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"classes": 10}, "the model has classes 0 to 9, and -1 for none; 10 is not one"),
        ({"classes": [0, -2, 3, 4]}, "-2 is not one"),
        ({"classes": [1, 2]}, "2 classes were given for 4 images"),
        ({"classes": [[1], [1, 2]]}, "classes are lists of several lengths"),
        ({"classes": [1.5, 2, 3, 4]}, r"classes are float64 of shape \(4,\): give one whole number, or one for each"),
        ({"classes": [[1], [2], [3], [4]]}, r"classes are int64 of shape \(4, 1\)"),
        ({"guidance": float("inf")}, "guidance must be at least 0, not inf"),
        ({"guidance": -0.5}, "guidance must be at least 0, not -0.5"),
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"sampler": "plms"}, "unknown sampler 'plms': use heun or euler or ddim or ancestral"),
    ],
)
def test_what_cannot_be_sampled(arguments, message):
    with pytest.raises(CudiffError, match=message):
        pipeline().sample(**{"n": 4, **arguments})


def test_an_unconditional_model_has_no_classes():
    model = pipeline(num_classes=0)
    assert model.sample(2).shape == (2, 8, 8, 1)
    with pytest.raises(CudiffError, match="this model has no classes: leave classes out"):
        model.sample(2, classes=3)
    with pytest.raises(CudiffError, match="this model has no classes to guide to: leave guidance out"):
        model.sample(2, guidance=2.0)
    np.testing.assert_array_equal(model.sample(2, guidance=1), model.sample(2))


def test_more_steps_than_the_schedule_has():
    with pytest.raises(CudiffError, match="20"):
        pipeline(diffusion="ddpm", diffusion_steps=20, sampler="ddim").sample(2, steps=21)


def test_progress_and_frames():
    model, calls, frames = pipeline(), [], []
    images = model.sample(5, batch_size=2, steps=4, progress=lambda *counts: calls.append(counts), frames=frames)
    assert calls == [(2, 5), (4, 5), (5, 5)]
    assert len(frames) == 5 and all(frame.shape == (2, 8, 8, 1) for frame in frames)
    np.testing.assert_array_equal(frames[-1], images[:2])


def test_sampling_leaves_the_mode_as_it_was():
    model = pipeline(dropout=0.5)
    model.net.train()
    first = model.sample(2)
    assert model.net.training
    np.testing.assert_array_equal(model.sample(2), first)
    with pytest.raises(ZeroDivisionError):
        model.sample(2, progress=lambda *counts: 1 / 0)
    assert model.net.training


def test_out_of_memory_says_what_fits(monkeypatch):
    model = pipeline(guidance=1.0)
    forward = model.net.forward

    def limited(x, *rest):
        if len(x) > 5:
            raise MemoryError
        return forward(x, *rest)

    monkeypatch.setattr(model.net, "forward", limited)
    with pytest.raises(CudiffError, match="batch size 16 does not fit into memory: --batch-size 4 fits"):
        model.sample(20, batch_size=16)


def test_sample_spacing_chooses_the_timesteps():
    even, ddim = (pipeline(diffusion="ddpm", sample_spacing=name) for name in ("even", "ddim"))
    schedule = even.objective.schedule
    for sampler in ("ddim", "ancestral"):
        np.testing.assert_array_equal(even.sigmas(sampler, 25)[:-1], schedule.sigmas[schedule.timesteps(25)])
        np.testing.assert_array_equal(ddim.sigmas(sampler, 25)[:-1], schedule.sigmas[960::-40])
    np.testing.assert_array_equal(even.sigmas("heun", 25), ddim.sigmas("heun", 25))
    with pytest.raises(CudiffError, match="gives 300 steps"):
        ddim.sample(1, steps=300, sampler="ddim")


def test_load_takes_the_ema_unless_told(checkpoint, device):
    model = cudiff.load(checkpoint, device)
    assert (model.device, model.config, model.net.training) == (device, TINY, False)
    stored = load_checkpoint(checkpoint).tensors
    for weights in ("ema", "model"):
        for name, array in cudiff.load(checkpoint, device, weights).net.state_dict().items():
            np.testing.assert_array_equal(array, stored[f"{weights}.{name}"])
    with pytest.raises(CudiffError, match="unknown weights 'average': use ema or model"):
        cudiff.load(checkpoint, device, "average")


def test_a_saved_pipeline_is_the_same_model(tmp_path, device):
    model = pipeline(device)
    model.save(tmp_path / "new" / "model.safetensors")
    for weights in ("ema", "model"):
        again = cudiff.load(tmp_path / "new" / "model.safetensors", device, weights)
        assert again.config == model.config
        np.testing.assert_array_equal(again.sample(3, seed=1), model.sample(3, seed=1))


def test_load_of_a_run_takes_its_newest_checkpoint(checkpoint):
    checkpoint.rename(checkpoint.parent / "step-00000007.safetensors")
    assert cudiff.load(checkpoint.parent, "cpu").config == TINY


def test_load_without_ema_or_with_tensors_missing(checkpoint, tmp_path):
    config, tensors, counters = load_checkpoint(checkpoint)
    bare = {name: array for name, array in tensors.items() if name.startswith("model.")}
    save_checkpoint(tmp_path / "bare.safetensors", config, bare, counters)
    with pytest.raises(CudiffError, match="holds no 'ema' tensors"):
        cudiff.load(tmp_path / "bare.safetensors", "cpu")
    del bare["model.out.2.bias"]
    save_checkpoint(tmp_path / "lacking.safetensors", config, bare, counters)
    with pytest.raises(CudiffError, match=r"missing out\.2\.bias"):
        cudiff.load(tmp_path / "lacking.safetensors", "cpu", "model")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_load_of_a_truncated_file(checkpoint, share):
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CudiffError, match=str(checkpoint)):
        cudiff.load(checkpoint, "cpu")


def test_load_of_a_missing_file(tmp_path):
    with pytest.raises(CudiffError, match="nowhere"):
        cudiff.load(tmp_path / "nowhere.safetensors", "cpu")


def test_weights_are_exported_in_pytorchs_layout(tmp_path):
    net = randomised(build(TINY))
    Pipeline(TINY, net).save(tmp_path / "model.safetensors")
    export_torch(tmp_path / "model.safetensors", tmp_path / "torch.safetensors")
    written, expected = load_file(tmp_path / "torch.safetensors"), to_torch(net.state_dict(), net.layouts())
    assert written.keys() == expected.keys() and written["input_blocks.0.0.weight"].shape == (8, 1, 3, 3)
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array)


def test_weights_move_from_pytorch_and_back(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: no .pt file can be made")
    net = randomised(build(TINY))
    state = to_torch(net.state_dict(), net.layouts())
    assert state["input_blocks.0.0.weight"].shape == (8, 1, 3, 3)
    torch.save({name: torch.tensor(array) for name, array in state.items()}, tmp_path / "weights.pt")
    import_torch(tmp_path / "weights.pt", tmp_path / "model.safetensors", TINY)
    np.testing.assert_array_equal(
        cudiff.load(tmp_path / "model.safetensors", "cpu").sample(2), Pipeline(TINY, net).sample(2)
    )
    export_torch(tmp_path / "model.safetensors", tmp_path / "back.safetensors")
    back, _ = read_tensors(tmp_path / "back.safetensors")
    assert back.keys() == state.keys()
    for name in state:
        np.testing.assert_array_equal(back[name], state[name])
    import_torch(tmp_path / "back.safetensors", tmp_path / "again.safetensors", TINY)
    with pytest.raises(CudiffError, match=r"again.* exists already: choose another name"):
        import_torch(tmp_path / "back.safetensors", tmp_path / "again.safetensors", TINY)
    with pytest.raises(CudiffError, match=r"back.* exists already"):
        export_torch(tmp_path / "again.safetensors", tmp_path / "back.safetensors")
    with pytest.raises(CudiffError, match=r"give --model-channels 8$"):
        import_torch(tmp_path / "back.safetensors", tmp_path / "other.safetensors", TINY.replace(model_channels=16))
    assert not (tmp_path / "other.safetensors").exists()


GUIDED = [
    dict(model_channels=8, attention_resolutions=(16, 8), use_scale_shift_norm=True),
    dict(model_channels=8, channel_mult=(2, 1, 4), num_res_blocks=1, num_classes=7, attention_resolutions=(32,)),
    dict(model_channels=8, resblock_updown=True, num_res_blocks=3, learn_sigma=True, diffusion="ddpm"),
    dict(model_channels=8, channels=1, conv_resample=False, channel_mult=(1, 2)),
    dict(model_channels=8, channel_mult=(2,)),
]


@pytest.mark.parametrize("options", GUIDED, ids=lambda options: " ".join(options))
def test_weights_of_another_model_say_which_options_theirs_has(options, tmp_path):
    config = Config(image_size=32, channels=3).replace(**options)
    net = build(config)
    write_weights(tmp_path / "w.safetensors", to_torch(net.state_dict(), net.layouts()))
    import_torch(tmp_path / "w.safetensors", tmp_path / "right.safetensors", config)
    told = {name: value for name, value in options.items() if value != getattr(Config(channels=3), name)}
    other = other_options(to_torch(net.state_dict(), net.layouts()), Config(image_size=32, channels=3))
    assert other == told
    with pytest.raises(CudiffError) as error:
        import_torch(tmp_path / "w.safetensors", tmp_path / "wrong.safetensors", Config(image_size=32, channels=3))
    assert str(error.value).endswith(f"give {as_flags(other)}")
    with pytest.raises(CudiffError, match="give --image-size N --"):
        import_torch(tmp_path / "w.safetensors", tmp_path / "wrong.safetensors", Config())


def test_standardised_pixels_are_the_same_diffusion():
    """With data_mean and data_std loss and denoiser are those of the images so shifted and scaled."""
    mean, std = -0.7, 0.6
    plain, shifted = pipeline(num_classes=0), pipeline(num_classes=0, data_mean=mean, data_std=std)
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (4, 8, 8, 1)).astype(np.float32)
    scaled = (images - mean) / std
    ours, theirs = (
        model.loss()(model.net, Tensor(y), None, Generator(5)).item()
        for model, y in ((shifted, images), (plain, scaled))
    )
    assert ours == pytest.approx(theirs, rel=1e-5)
    sigma = np.array([0.1, 0.5, 2, 9], np.float32)
    x = images + sigma[:, None, None, None] * rng.standard_normal(images.shape).astype(np.float32)
    with no_grad():
        ours = shifted.denoiser()(Tensor(x), Tensor(sigma)).numpy()
        theirs = plain.denoiser()(Tensor((x - mean) / std), Tensor(sigma / std)).numpy()
    np.testing.assert_allclose(ours, theirs * std + mean, rtol=1e-4, atol=1e-4)


def test_configuration_in_a_checkpoint_is_plain_json(checkpoint):
    assert json.loads(read_header(checkpoint)[1]["cudiff"])["config"] == json.loads(json.dumps(TINY.to_dict()))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_has_a_model(name):
    config = PRESETS[name]
    if config.options.get("model_channels", 0) > 64:
        config = config.replace(model_channels=64)
    if config.model == "dit":
        config = config.replace(hidden_size=64, num_heads=1, depth=1)
        config = config if config.image_size else config.replace(image_size=16, channels=4)
    assert build(config).num_parameters() > 0


def test_a_model_needs_sizes():
    for missing in itertools.chain(({"image_size": 0},), ({"channels": 0},)):
        with pytest.raises(CudiffError, match="a model needs image_size and channels"):
            build(TINY.replace(**missing))


def test_a_pipeline_is_of_a_configuration_with_sizes_and_a_net():
    config = Config(image_size=8, channels=1, model_channels=8, channel_mult=(1,))
    net = build(config)
    for given, told in (((net, config), "a cudiff.Config and a cudiff.nn.Module, not UNet and Config"),
                        ((config, lambda x, t, labels: x), "not Config and function"),
                        ((config.replace(image_size=0), net), "give image_size and channels")):
        with pytest.raises(CudiffError, match=told):
            Pipeline(*given)
    pipeline = Pipeline(config, net)
    for name, value in (("config", Config()), ("config", {}), ("net", None), ("net", lambda x, t, labels: x)):
        with pytest.raises(CudiffError, match=r"give image_size and channels|takes a cudiff.Config and a cudiff.nn"):
            setattr(pipeline, name, value)
    assert pipeline.net is net and pipeline.config.image_size == 8


@pytest.mark.parametrize("levels", [None, [], [1.0], [[2.0, 1.0, 0.0]], [0.0, 1.0], [math.inf, 0.0]])
def test_an_objective_of_ones_own_gives_falling_levels(levels):
    config = Config(image_size=8, channels=1, model_channels=8, channel_mult=(1,))
    pipeline = Pipeline(config, build(config))
    pipeline.objective = SimpleNamespace(denoiser=pipeline.objective.denoiser, sigmas=lambda steps, discrete: levels)
    with pytest.raises(CudiffError, match="a sampler needs two or more decreasing sigmas"):
        pipeline.sample(1)
    with pytest.raises(CudiffError, match="a sampler needs two or more decreasing sigmas"):
        pipeline.sample(1, init=np.zeros((8, 8, 1), np.uint8))


@pytest.mark.parametrize("changes", [{}, {"model_channels": 64, "channel_mult": (1,), "norm_group_channels": 4}])
def test_norms_that_guided_diffusion_does_not_have_are_not_exported(tmp_path, changes):
    config = PRESETS["digits"].replace(**changes)
    Pipeline(config, build(config)).save(tmp_path / "digits.safetensors")
    with pytest.raises(CudiffError, match="norm-group-channels 1"):
        export_torch(tmp_path / "digits.safetensors", tmp_path / "torch.safetensors")
    assert not (tmp_path / "torch.safetensors").exists()


def test_sixty_four_images_at_once_unless_told():
    model, calls = pipeline(sample_steps=1, sampler="euler"), []
    images = model.sample(progress=lambda *counts: calls.append(counts))
    assert images.shape == (64, 8, 8, 1) and calls == [(64, 64)]
    np.testing.assert_array_equal(images, model.sample(64, seed=0))
    model.sample(65, progress=lambda *counts: calls.append(counts))
    assert calls[1:] == [(64, 65), (65, 65)]


def test_seeds_are_whole_numbers_below_two_to_the_64th():
    model = pipeline(sample_steps=1, sampler="euler")
    first, last = (model.sample(1, seed=seed) for seed in (0, 2**64 - 1))
    assert not np.array_equal(first, last)
    for seed in (-1, 2**64):
        with pytest.raises(CudiffError, match="seed must be 0 to 18446744073709551615"):
            model.sample(1, seed=seed)
    for name in ("n", "steps", "batch_size"):
        with pytest.raises(CudiffError, match=f"{name} must be at least 1, not 0"):
            model.sample(**({"n": 1} | {name: 0}))


def test_unet_cus_names_bring_its_configuration():
    """That of its trainer: 64 pixels, RGB, 1,000 linear betas, attention at a quarter and an eighth."""
    config = rename({"input_blocks.1.0.cv3_1.weight": np.zeros(1, np.float32)}).config
    assert (config.image_size, config.channels, config.model_channels, config.max_period) == (64, 3, 64, 1000.0)
    assert (config.diffusion, config.noise_schedule, config.diffusion_steps) == ("ddpm", "linear", 1000)
    assert (config.attention_resolutions, config.sampler, config.sample_steps) == ((16, 8), "ancestral", 1000)


def test_the_first_frame_of_given_noise_is_that_noise():
    model, first, second = pipeline(), [], []
    model.sample(2, seed=3, noise=model.noise(2, seed=9), frames=first)
    model.sample(2, seed=9, frames=second)
    for given, drawn in zip(first, second, strict=True):
        np.testing.assert_array_equal(given, drawn)
