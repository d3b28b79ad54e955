"""Given images, noise and denoisers in sampling, on data whose denoiser is known, and guidance's two options."""

import math
import os

import numpy as np
import pytest
from PIL import Image

from cudiff import Tensor
from cudiff.cli import main
from cudiff.diffusion import (
    Between,
    Guided,
    ImageNoise,
    Inpainted,
    Inversion,
    karras_sigmas,
    sample_ddim,
    sample_dpm_solver,
    sample_heun,
    sample_unipc,
    slerp,
)
from cudiff.errors import CudiffError
from cudiff.pipeline import Pipeline
from tests.diffusion.test_multistep import mixture
from tests.diffusion.test_samplers import gaussian, ode_solution, start
from tests.test_pipeline import pipeline


def two_classes(x, sigma, labels=None):
    """x scaled by its class, 1 without one."""
    factor = np.where(labels.numpy() < 0, 1.0, 1.0 + labels.numpy()).reshape(-1, 1, 1, 1)
    return x * Tensor(factor.astype(x.dtype))


def test_guidance_in_an_interval(rng):
    """Equation 5 of arXiv 2404.07724: the class's own estimate at and below the lower end and above the upper."""
    x, sigma = Tensor(rng.standard_normal((5, 2, 2, 1))), Tensor(np.array([0.1, 0.2, 1.0, 5.0, 5.1]))
    labels = Tensor(np.full(5, 2, np.int32))
    guided = Guided(two_classes, 4.0, interval=(0.2, 5.0))(x, sigma, labels).numpy()
    factor = np.array([3, 3, 9, 9, 3]).reshape(-1, 1, 1, 1)  # 1 + 4 (3 - 1) inside
    np.testing.assert_allclose(guided, x.numpy() * factor, rtol=1e-12)
    again = Guided(two_classes, 2.0, interval=(0.0, 9.0), rescale=0.5)
    again.guide(4.0, (0.2, 5.0))
    np.testing.assert_array_equal(again(x, sigma, labels).numpy(), guided)
    whole = Guided(two_classes, 4.0, interval=(0.0, 1e9))(x, sigma, labels).numpy()
    np.testing.assert_array_equal(whole, Guided(two_classes, 4.0)(x, sigma, labels).numpy())


def test_guidance_with_rescale(rng):
    """Equations 15 and 16 of arXiv 2305.08891, image by image."""
    x = Tensor(0.4 + rng.standard_normal((3, 4, 4, 2)))
    labels = Tensor(np.array([0, 1, 2], np.int32))

    def denoiser(x, sigma, labels):
        k = labels.numpy().reshape(-1, 1, 1, 1)
        return Tensor(np.sin(x.numpy() * (k + 2)) + 0.1 * k)

    cond, null = (denoiser(x, None, Tensor(given)).numpy() for given in (labels.numpy(), np.full(3, -1)))
    for phi in (0.0, 0.7, 1.0):
        expected = null + 5 * (cond - null)
        for i in range(3):
            expected[i] = phi * expected[i] * cond[i].std() / expected[i].std() + (1 - phi) * expected[i]
        guided = Guided(denoiser, 5.0, rescale=phi)(x, Tensor(np.ones(3)), labels).numpy()
        np.testing.assert_allclose(guided, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options, message", [
    ({"interval": (3.0, 1.0)}, "guidance_interval must go from a lower noise level up, not from 3.0 to 1.0"),
    ({"interval": (1.0,)}, "guidance_interval must be two noise levels"),
    ({"interval": (-1.0, 2.0)}, "guidance_interval must be at least 0"),
    ({"rescale": 1.5}, "guidance_rescale must be at least 0 and at most 1, not 1.5"),
])
def test_wrong_guidance_is_refused(options, message):
    with pytest.raises(CudiffError, match=message):
        Guided(None, 2.0, **options)


@pytest.mark.parametrize("sampler", [
    sample_heun, sample_unipc, sample_dpm_solver, lambda *args, **options: sample_ddim(*args, eta=1.0, **options),
    lambda *args, **options: sample_dpm_solver(*args, stochastic=True, **options)])
def test_known_pixels_have_each_level_s_noise(rng, sampler):
    """Its deviation at every step of every sampler; at the end they are themselves. The others depend on them."""
    known, mask = rng.uniform(-1, 1, (1, 64, 64, 1)), np.zeros((1, 64, 64, 1))
    mask[:, :, 32:] = 1
    wrapped = Inpainted(gaussian)
    wrapped.know(Tensor(known), Tensor(mask))
    sigmas, noise = karras_sigmas(12, 0.1, 80.0), ImageNoise((1, 64, 64, 1), 2, dtype=np.float64)
    seen = []
    options = {} if sampler in (sample_heun, sample_unipc) else {"noise": noise}
    out = sampler(wrapped, Tensor(known) + noise.start(80.0), sigmas, **options,
                  callback=lambda step, x, denoised: seen.append(x.numpy()[:, :, :32])).numpy()
    for x, sigma in zip(seen[:-1], sigmas[1:-1], strict=True):
        assert abs((x - known[:, :, :32]).std() / sigma - 1) < 4 / math.sqrt(2 * 2048)
    np.testing.assert_allclose(out[:, :, :32], known[:, :, :32], atol=1e-12)
    assert np.abs(out[:, :, 32:] - known[:, :, 32:]).mean() > 0.1


def test_known_pixels_keep_the_variance_that_was_learned(rng):
    class Learned:
        def with_variance(self, x, sigma, labels=None):
            return x * 2, x * sigma

    inpainted, x = Inpainted(Learned()), Tensor(rng.standard_normal((2, 3, 3, 1)))
    images, mask = (Tensor(rng.random((2, 3, 3, 1))) for _ in range(2))
    inpainted.know(images, mask)
    denoised, fraction = inpainted.with_variance(x, 0.5)
    np.testing.assert_allclose(denoised.data, x.data * 2 * mask.data + images.data * (1 - mask.data), rtol=1e-6)
    np.testing.assert_array_equal(fraction.data, x.data * 0.5)


def test_inversion_is_the_ode_backwards():
    """On a Gaussian it finds the noise, with an error of second order; on a mixture the way back ends at the image."""
    x, _ = start()
    image = ode_solution(x.numpy(), 80.0, 0.002)
    errors = []
    for n in (32, 64, 128):
        found = Inversion(gaussian)(Tensor(image), karras_sigmas(n)[-2::-1]).numpy()
        errors.append(np.abs(found - x.numpy()).max() / 80)
    assert errors[-1] < 2e-3 and 3.5 < errors[0] / errors[1] < 4.7 and 3.5 < errors[1] / errors[2] < 4.7
    image = sample_heun(mixture, start((32, 4, 4, 1))[0], karras_sigmas(200))
    trips = []
    for n in (20, 40, 80):
        sigmas = karras_sigmas(n)
        back = sample_heun(mixture, Inversion(mixture)(image, sigmas[-2::-1]), sigmas).numpy()
        trips.append(math.sqrt(np.mean(np.square(back - image.numpy()))))
    print(errors, trips)
    assert trips[-1] < 0.005 and trips[0] > 3 * trips[1] > 9 * trips[2]
    with pytest.raises(CudiffError, match="sigmas that rise from above 0"):
        Inversion(gaussian)(x, [0.0, 1.0])


def test_slerp(rng):
    a, b = rng.standard_normal((2, 3, 32, 32, 1)).astype(np.float32)
    np.testing.assert_allclose(slerp(a, b, 0.0), a, rtol=1e-6)
    np.testing.assert_allclose(slerp(a, b, np.array([0.0, 1.0, 1.0]))[1:], b[1:], atol=1e-6)
    for share in (0.25, 0.5, 0.75):
        turned = slerp(a, b, share)
        assert turned.dtype == np.float32
        for i in range(3):
            one, two, at = (v[i].ravel().astype(np.float64) for v in (a, b, turned))
            angle = np.arccos(one @ two / np.linalg.norm(one) / np.linalg.norm(two))
            np.testing.assert_allclose(at, (np.sin((1 - share) * angle) * one + np.sin(share * angle) * two)
                                       / np.sin(angle), rtol=1e-4, atol=1e-5)
            assert abs(np.linalg.norm(at) / np.linalg.norm(one) - 1) < 0.05
    np.testing.assert_allclose(slerp(a, a, 0.3), a, rtol=1e-5)
    np.testing.assert_array_equal(slerp(0 * a, 0 * b, 0.5), 0 * a)
    with pytest.raises(CudiffError, match="slerp takes noise, in floats, not int64: "):
        slerp(np.eye(2, dtype=np.int64), np.eye(2)[::-1], 0.5)  # which had given zeros
    with pytest.raises(CudiffError, match="two arrays"):
        slerp(a, b[:1], 0.5)
    for share in (7, -0.1, [0.1, 0.2], "a", np.nan):
        with pytest.raises(CudiffError, match="share must be a number from 0 to 1, or one for each of 3 images"):
            slerp(a, b, share)


def test_pictures_noise_and_denoisers_are_given(device):
    model = pipeline(device, sampler="euler", sample_steps=6)
    init = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    np.testing.assert_array_equal(model.sample(5, init=init, strength=0.0), init)
    near, far = (model.sample(5, init=init, strength=s).astype(int) for s in (0.2, 1.0))
    assert 0 < np.abs(near - init).mean() < np.abs(far - init).mean()
    one = model.sample(5, init=init[0], strength=0.5, batch_size=2)
    assert np.abs(one[3:].astype(int) - model.sample(5, init=init[[0] * 5], strength=0.5)[3:]).max() <= 1
    mask = np.zeros((8, 8), bool)
    mask[4:] = True
    for sampler in ("euler", "unipc", "dpmpp-2m-sde"):
        painted = model.sample(5, init=init, mask=mask, sampler=sampler, batch_size=2)
        np.testing.assert_array_equal(painted[:, :4], init[:, :4])
        assert (painted[:, 4:] != init[:, 4:]).any()
    np.testing.assert_array_equal(model.sample(5, seed=3, noise=model.noise(5, 7)), model.sample(5, seed=7))
    floats = model.sample(5, seed=7, floats=True)
    assert floats.dtype == np.float32
    rounded = np.round(floats * 127.5 + 127.5).clip(0, 255)
    np.testing.assert_array_equal(rounded, model.sample(5, seed=7))
    gray = model.sample(5, denoiser=lambda x, sigma, labels: x * 0 + 0.2, guidance=1.0)
    assert (gray == round(0.2 * 127.5 + 127.5)).all()
    for made, told in ((lambda x: None, "a NoneType"), (lambda x: x[:1], r"float32 of shape \(1, 8, 8, 1\)"),
                       (lambda x: x.numpy(), "a ndarray"), (lambda x: x.astype("int32"), "int32 of shape .*")):
        with pytest.raises(CudiffError, match=rf"the denoiser returned {told}: return a Tensor of floats of x's shape"):
            model.sample(5, denoiser=lambda x, sigma, labels, made=made: made(x), guidance=1.0)
    frames = []
    model.sample(5, init=init, strength=0.2, frames=frames)
    assert 0 < np.abs(frames[0].astype(int) - init).mean() < 60  # the picture with its noise, not noise alone


def test_a_denoiser_of_ones_own_has_no_learned_variance():
    """Nor where it guides, repaints or lies between classes: the posterior's is taken."""
    model = pipeline(diffusion="ddpm", learn_sigma=True, sampler="ancestral", sample_steps=4)
    inner = model.denoiser()
    fixed = pipeline(diffusion="ddpm", sampler="ancestral", sample_steps=4)
    for given in ({}, {"guidance": 2.0}, {"other": 3}, {"init": np.zeros((8, 8, 1)), "mask": np.ones((8, 8))}):
        own = model.sample(2, denoiser=lambda *args: inner(*args), **given)
        np.testing.assert_array_equal(own, fixed.sample(2, denoiser=inner.__call__, **given))
        assert (model.sample(2, **given) != own).any()


def test_the_way_between_two_classes(rng, device):
    """Of point estimates it is their mixture; at its ends it is the classes themselves, in every batch."""
    x, sigma = Tensor(rng.standard_normal((3, 2, 2, 1))), Tensor(np.ones(3))
    between = Between(two_classes)
    between.toward(Tensor(np.full(3, 4, np.int32)), Tensor(np.array([0.0, 0.25, 1.0]).reshape(3, 1, 1, 1)))
    factors = np.array([2.0, 0.75 * 2 + 0.25 * 5, 5.0]).reshape(3, 1, 1, 1)
    np.testing.assert_allclose(between(x, sigma, Tensor(np.ones(3, np.int32))).numpy(), x.numpy() * factors, rtol=1e-12)
    model = pipeline(device, sampler="unipc", sample_steps=5, guidance=2.0)
    images = model.sample(5, classes=2, other=[5, 6, 7, 8, 9], share=np.array([0, 0.5, 1, 1, 1.0]), batch_size=2)
    ends = model.sample(5, classes=[2, 2, 7, 8, 9], batch_size=2)
    assert np.abs(images.astype(int) - ends)[[0, 2, 3, 4]].max() <= 1 < np.abs(images[1].astype(int) - ends[1]).max()


def test_a_pipeline_s_round_trip():
    model = pipeline(sample_steps=24)
    image = model.sample(3, seed=2, classes=1)
    back = model.sample(3, classes=1, noise=model.invert(image, classes=1, batch_size=2), sampler="heun")
    other = model.sample(3, seed=5, classes=1)
    assert np.abs(back.astype(int) - image).mean() < 0.5 * np.abs(other.astype(int) - image).mean()
    with pytest.raises(CudiffError, match="inversion takes 2 steps"):
        model.invert(image, steps=1)
    np.testing.assert_array_equal(model.invert(image[0], classes=1, steps=3), model.invert(image[:1], 1, steps=3))
    with pytest.raises(CudiffError, match=r"images has shape"):
        model.invert(image[:, :4])


@pytest.mark.parametrize("options, message", [
    ({"strength": 0.5}, "strength and mask are for a picture to begin with: give init"),
    ({"mask": np.ones((8, 8))}, "strength and mask are for a picture"),
    ({"init": np.zeros((8, 8, 1)), "strength": 1.5}, "strength must be at least 0 and at most 1, not 1.5"),
    ({"init": np.zeros((8, 9, 1))}, r"init has shape \(8, 9, 1\): give \(4, 8, 8, 1\), or one picture \(8, 8, 1\)"),
    ({"init": np.zeros((8, 8, 1), int)}, "init must be uint8, or finite floats"),
    ({"init": np.full((8, 8, 1), np.nan)}, "init must be uint8, or finite floats"),
    ({"init": np.full((8, 8, 1), 200.0)}, r"init has values up to 200: floats lie in about \[-1, 1\], and pixels of"),
    ({"noise": np.full((4, 8, 8, 1), np.inf)}, "noise holds values that are not finite"),
    ({"init": np.zeros((8, 8, 1)), "mask": np.ones((4, 4))}, r"mask has shape \(4, 4\): give \(8, 8\)"),
    ({"init": np.zeros((8, 8, 1)), "mask": np.full((8, 8), 255)}, "a mask's numbers are 0, known, to 1"),
    ({"noise": np.zeros((3, 8, 8, 1))}, r"noise is float64 of shape \(3, 8, 8, 1\): give floats of shape \(4, 8, 8"),
    ({"other": 12}, "the model has classes 0 to 9"), ({"other": 3, "share": 2}, "share must be a number from 0 to 1"),
    ({"share": 0.3}, "share says how far to go to other classes: give other too"),
    ({"denoiser": 5}, r"denoiser is a function D\(x, sigma, labels\), not a int"),
    ({"frames": ()}, r"frames are added to a list, not to a tuple: give frames=\[\]"),
    ({"guidance_rescale": -1.0}, "guidance_rescale must be"), ({"guidance_interval": (2, 1)}, "guidance_interval must"),
])
def test_what_is_given_has_to_fit(options, message):
    with pytest.raises(CudiffError, match=message) as error:
        pipeline().sample(4, **options)
    assert "\n" not in str(error.value)
    if "guidance" in message:
        with pytest.raises(CudiffError, match="this model has no classes to guide to: leave guidance_"):
            pipeline(num_classes=0).sample(4, **options)


def test_the_command_line_takes_a_picture_and_a_mask(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = pipeline()
    model.save("model.safetensors")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    Image.fromarray(pixels).save("init.png")
    Image.fromarray(np.repeat([0, 255], 4)[:, None].repeat(8, 1).astype(np.uint8)).save("mask.png")
    strokes = np.zeros((8, 8, 4), np.uint8)
    strokes[4:] = 255  # white on nothing
    Image.fromarray(strokes).save("strokes.png")
    Image.new("L", (9, 8)).save("wide.png")
    (tmp_path / "none.png").write_bytes(b"no picture")
    os.mkfifo("pipe")
    run = ["sample", "model.safetensors", "-n", "2", "--steps", "3", "--device", "cpu"]
    assert main([*run, "--init", "init.png", "--mask", "mask.png", "--out", "out.npz", "--guidance-interval", "0.1,5",
                 "--guidance-rescale", "0.5", "--guidance", "2"]) == 0, capsys.readouterr().err
    with np.load("out.npz") as made:
        images = made[made.files[0]]
    np.testing.assert_array_equal(images[:, :4, :, 0], [pixels[:4]] * 2)
    assert main([*run, "--init", "init.png", "--mask", "strokes.png", "--out", "strokes.npz"]) == 0
    with np.load("strokes.npz") as made:
        painted = made[made.files[0]]
    np.testing.assert_array_equal(painted[:, :4, :, 0], [pixels[:4]] * 2)
    assert (painted[:, 4:, :, 0] != pixels[4:]).any()
    for words, message in [
        ("--init wide.png", "wide.png is 9x8 and the model's images are 8x8: resize it"),
        ("--init init.png --mask wide.png", "wide.png is 9x8 and the model's images are 8x8: resize it"),
        ("--init none.png", "cannot read the picture none.png: not an image"),
        ("--init gone.png", "cannot read gone.png (No such file or directory): check the path"),
        ("--init pipe", "pipe is not a file: check the path"),
        ("--init init.png --mask pipe", "pipe is not a file: check the path"),
        ("--init init.png --strength 2", "strength must be at least 0 and at most 1, not 2"),
        ("--mask mask.png", "strength and mask are for a picture to begin with"),
        ("--guidance-interval 1,x", "'1,x' is not two noise levels such as 0.2,5"),
    ]:
        assert main([*run, *words.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_the_command_line_inverts_mixes_and_writes_floats(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = pipeline(sampler="heun", sample_steps=12)
    model.save("model.safetensors")
    image = model.sample(1, seed=2, classes=1)
    Image.fromarray(image[0, :, :, 0]).save("one.png")
    Image.fromarray(np.eye(8, dtype=np.uint8)).save("dark.png")
    np.savez("flat.npz", latents=np.zeros((2, 8, 8, 1), np.float32))
    alone = ["sample", "model.safetensors", "--device", "cpu", "--out", "out.npz"]
    run = [*alone, "-n", "2"]

    def made(*words, run=run):
        assert main([*run, *words]) == 0, capsys.readouterr().err
        with np.load("out.npz") as file:
            return file[file.files[0]]

    noise = made("--invert", "one.png", "--classes", "1", run=alone)
    os.rename("out.npz", "noise.npz")
    np.testing.assert_array_equal(noise, model.invert(image, classes=1))
    np.testing.assert_array_equal(made("-n", "1", "--classes", "1", "--noise", "noise.npz"),
                                  model.sample(1, classes=1, noise=noise))
    floats = made("--floats", "--seed", "3")
    np.testing.assert_array_equal(floats, model.sample(2, seed=3, floats=True))
    between = slerp(model.noise(2, 3), model.noise(2, 4), 0.25)
    np.testing.assert_array_equal(made("--seed", "3", "--other-seed", "4", "--share", "0.25"),
                                  model.sample(2, noise=between))
    other = Pipeline(model.config.replace(sampler="euler-ancestral", eta=0.3), model.net)
    np.testing.assert_array_equal(made("--sampler", "euler-ancestral", "--eta", "0.3"), other.sample(2))
    np.testing.assert_array_equal(made("--classes", "2", "--other", "5,6"), model.sample(2, classes=2, other=[5, 6]))
    for words, message in [
        ("--floats --out x.png", "--floats writes floats: give --out NAME.npz"),
        ("--eta 2 --sampler ddim", "eta must be at least 0 and at most 1, not 2"),
        ("--S-noise x", "'x' is not a number"),
        ("--eta 0.5", "--eta is an option of ddim and euler-ancestral, not of sampler heun: leave it out"),
        ("--sampler ddim --S-churn 5", "--S-churn is an option of heun and euler, not of sampler ddim: leave it out"),
        ("--guidance 1 --guidance-rescale 0.5", "--guidance-rescale says how to guide, and nothing is guided"),
        ("--guidance 1 --guidance-interval 1,2", "--guidance-interval says how to guide, and nothing is guided"),
        ("--guidance 1 --guidance-channels 1", "--guidance-channels says how to guide, and nothing is guided"),
        ("--guidance-channels 2", "--guidance-channels 2 are more than the model's 1: give fewer, or leave it out"),
        ("--init one.png --mask dark.png", "nothing in dark.png is white, its brightest pixel is 1 of 255"),
        ("--invert one.png", "--invert draws nothing: leave -n out"),
        ("--share 0.5", "--share says how far to go to --other or --other-seed: give one of them too"),
        ("--other 1 --share 2", "share must be a number from 0 to 1"),
        ("--other 1,2,3", "3 classes were given for 2 images"),
        ("--noise noise.npz --other-seed 4", "--noise is in place of a seed's: leave --other-seed out"),
        ("--noise noise.npz", "noise.npz holds noise of 1 images: give -n 1"),
        ("--noise flat.npz", "flat.npz holds no noise: its standard deviation is 0, not about 1"),
        ("--noise gone.npz", "cannot read gone.npz"),
        ("--noise out.npz", "out.npz holds pictures, not floats: give an .npz that --invert wrote"),
    ]:
        assert main([*run, *words.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    for words, message in [
        ("--out x.gif", "--invert writes floats: give --out NAME.npz"),
        ("--classes 1,2", "--invert takes one class, that of its picture, not 2"),
        ("--init one.png", "--invert draws nothing: leave --init out"),
        ("--sampler euler", "--invert draws nothing: leave --sampler out"),
        ("--seed 3", "--invert draws nothing: leave --seed out"),
        ("--S-churn 5", "--invert draws nothing: leave --S-churn out"),
    ]:
        assert main([*alone, "--invert", "one.png", *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_rescaled_guidance_of_flat_estimates():
    def flat(x, sigma, labels=None):
        return Tensor(np.zeros(x.shape, np.float32))

    x = Tensor(np.ones((2, 4, 4, 1), np.float32))
    sigma, labels = Tensor(np.ones(2, np.float32)), Tensor(np.zeros(2, np.int32))
    assert not Guided(flat, 3.0, rescale=0.7)(x, sigma, labels).numpy().any()


def test_guidance_that_takes_what_was_never_learned_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pipeline(label_dropout=0.0).save("model.safetensors")
    run = ["sample", "model.safetensors", "-n", "1", "--device", "cpu", "--out", "out.npz"]
    for guidance, told in (("1", False), ("2", True)):
        assert main([*run, "--guidance", guidance]) == 0
        assert ("trained by --label-dropout 0" in " ".join(capsys.readouterr().out.split())) == told
