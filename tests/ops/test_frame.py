import numpy as np
import pytest

from cudiff.ops import blend_to_uint8, blended_frame, edm_output, lerp, reshape, split
from cudiff.ops.frame import ESTIMATES
from cudiff.tensor import Tensor

DATA = 0.6, -0.2, 0.9
PREDICTS = ["edm", "eps", "x0", "v", "flow"]
LEARNED = ["eps, learned", "x0, learned", "v, learned"]
"""With twice as many channels, of which the second half is not to be read."""


def shares(predicts, sigma):
    """c_skip and c_out by the papers, of (image - mean) / std; mean and std."""
    sigma_data, mean, std = DATA if predicts == "edm" else (1, 0, 1)
    s = sigma / std
    root = np.sqrt(s**2 + sigma_data**2)
    return {
        "edm": (sigma_data**2 / root**2, s * sigma_data / root), "eps": (1 + 0 * s, -s), "x0": (0 * s, 1 + 0 * s),
        "v": (1 / root**2, -s / root), "flow": (1 / (1 + s), -s / (1 + s)),
    }[predicts], mean, std  # fmt: skip


def estimate(predicts, x, out, sigma):
    (c_skip, c_out), mean, std = shares(predicts, sigma.reshape(-1, *(1,) * (x.ndim - 1)))
    return mean + std * (c_skip * (x - mean) / std + c_out * out)


def separate(predicts, x, out, sigma, last, share, guidance):
    """The frame by one operation after the other."""
    if predicts == "edm":
        image = edm_output(x, out, sigma, *DATA)
    else:
        image = ESTIMATES[predicts](x, out, reshape(sigma, (-1, *(1,) * (x.ndim - 1))))
    if guidance is not None:
        conditional, plain = split(image, 2)
        image = lerp(plain, conditional, guidance)
    return blend_to_uint8(image, last, share)


def named(predicts):
    """The network's output's name, its data, and whether it has twice the channels."""
    name, _, learned = predicts.partition(", ")
    return name, DATA if name == "edm" else None, bool(learned)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 3, 1), (3, 4, 67, 3), (1, 2, 100, 3), (2, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("predicts", PREDICTS + LEARNED)
@pytest.mark.parametrize("guidance", [None, 1.5])
def test_a_frame_is_the_blended_estimate(device, rng, shape, dtype, predicts, guidance):
    n, share, (name, data, learned) = shape[0], 0.3, named(predicts)
    both = (n if guidance is None else 2 * n, *shape[1:])
    x, out = (Tensor(a, dtype="float32").astype(dtype) for a in rng.standard_normal((2, *both)))
    sigma = Tensor(np.tile(np.exp(rng.standard_normal(n)), len(x) // n), dtype="float32")
    last = Tensor(rng.integers(0, 256, shape).astype(np.uint8))
    image = estimate(name, *(a.astype("float64").numpy() for a in (x, out, sigma)))
    if guidance is not None:
        image = image[n:] + guidance * (image[:n] - image[n:])
    if learned:
        both = [out.astype("float32").numpy(), np.full(out.shape, np.nan, np.float32)]
        out = Tensor(np.concatenate(both, axis=-1)).astype(dtype)
    given = [t.to(device) for t in (x, out, sigma, last)]
    frame, sums = blended_frame(*given, share, name, data, guidance)
    assert frame.dtype == np.uint8 and sums.dtype == np.float32 and frame.device == sums.device == device
    exact = np.clip((1 - share) * (image * 127.5 + 127.5) + share * last.numpy().astype(np.float64), 0, 255)
    assert np.abs(frame.numpy() - exact).max() <= 0.5 + 1e-3
    np.testing.assert_allclose(sums.numpy(), image.reshape(*shape[:2], -1).sum(2), rtol=1e-5, atol=1e-4)
    told = (Tensor(np.array([number], np.float32), device=device) for number in (share, guidance or 0))
    of_share, of_guidance = told
    again, _ = blended_frame(*given, of_share, name, data, None if guidance is None else of_guidance)
    np.testing.assert_array_equal(again.numpy(), frame.numpy())


def test_a_frame_has_no_gradient(device):
    x, out = (Tensor(np.ones((2, 3, 4, 1), np.float32), device=device, requires_grad=True) for _ in range(2))
    sigma, last = Tensor(np.ones(2, np.float32), device=device), Tensor(np.ones(x.shape, np.uint8), device=device)
    assert [t.requires_grad for t in blended_frame(x, out, sigma, last, 0.5, "x0")] == [False, False]


@pytest.mark.parametrize("predicts", PREDICTS)
@pytest.mark.parametrize("guidance", [None, 2.0])
def test_bytes_are_those_of_separate_operations(device, rng, predicts, guidance):
    """On the CPU all of them. A GPU rounds less often: at most 1 in 100 is another level, the next one, at high noise
    levels, where an estimate is a small difference of large numbers."""
    levels, (name, data, _) = np.array([0.02, 1.0, 80.0, 150.0] * (1 if guidance is None else 2)), named(predicts)
    images = rng.uniform(-1, 1, (len(levels), 8, 32, 3))
    sigma = levels.reshape(-1, 1, 1, 1)
    x = images + sigma * rng.standard_normal(images.shape)
    (c_skip, c_out), mean, std = shares(name, sigma)
    out = ((images - mean) / std - c_skip * (x - mean) / std) / c_out
    last = rng.integers(0, 256, (4, *images.shape[1:])).astype(np.uint8)
    x, out, sigma = (Tensor(a.astype(np.float32), device=device) for a in (x, out, levels))
    given = x, out, sigma, Tensor(last, device=device), 0.25
    frame, expected = blended_frame(*given, name, data, guidance)[0].numpy(), separate(name, *given, guidance).numpy()
    apart = np.abs(np.subtract(frame, expected, dtype=int))
    assert apart.max() <= (device == "cuda") and (apart > 0).mean() <= 0.01 and frame.std() > 20


@pytest.mark.parametrize("predicts", PREDICTS)
def test_sums_of_a_frame_show_what_is_not_finite(device, rng, predicts):
    name, data, _ = named(predicts)
    x, out = (Tensor(a, dtype="float32", device=device) for a in rng.standard_normal((2, 2, 4, 3, 2)))
    last, sigma = (Tensor(a, device=device) for a in (np.zeros(x.shape, np.uint8), np.ones(2, np.float32)))
    for value, byte in ((np.nan, (0, 0)), (np.inf, (255, 0)), (-np.inf, (0, 255))):
        out.data[1, 2, 0, 1] = value
        with np.errstate(invalid="ignore"):
            frame, sums = blended_frame(x, out, sigma, last, 0.0, name, data)
        assert frame.numpy()[1, 2, 0, 1] == byte[name in ("eps", "v", "flow")]
        np.testing.assert_array_equal(np.argwhere(~np.isfinite(sums.numpy())), [[1, 2]])


def test_the_state_is_not_in_an_image_that_is_predicted(device):
    x, out = (Tensor(np.full((1, 2, 3, 1), a, np.float32), device=device) for a in (np.inf, 0.0))
    last, sigma = Tensor(np.zeros(x.shape, np.uint8), device=device), Tensor(np.ones(1, np.float32), device=device)
    frame, sums = blended_frame(x, out, sigma, last, 0.0, "x0")
    assert (frame.numpy() == 128).all() and (sums.numpy() == 0).all()


def test_no_images(device):
    x, sigma = (Tensor(np.empty(shape, np.float32), device=device) for shape in ((0, 4, 4, 1), (0,)))
    frame, sums = blended_frame(x, x, sigma, Tensor(np.empty(x.shape, np.uint8), device=device), 0.5, "eps")
    assert (frame.shape, sums.shape) == (x.shape, (0, 4))


def test_operands_must_agree():
    x, levels = Tensor(np.zeros((2, 3), np.float32)), Tensor(np.ones(3, np.float32))
    wide, last = Tensor(np.zeros((2, 6), np.float32)), Tensor(np.zeros((2, 3), np.uint8))
    sigma = levels[:2]
    for name, call in (
        ("the network's output", lambda: blended_frame(x, x[:, :2], sigma, last, 0.5, "eps")),
        ("the network's output", lambda: blended_frame(x, wide, sigma, last, 0.5, "edm", DATA)),
        ("the network's output", lambda: blended_frame(x, wide, sigma, last, 0.5, "flow")),
        ("noise levels", lambda: blended_frame(x, x, levels, last, 0.5, "v")),
        ("last", lambda: blended_frame(x, x, sigma, last[:1], 0.5, "eps")),
        ("last", lambda: blended_frame(levels, levels, levels, last[0], 0.5, "eps")),
        ("twice as many", lambda: blended_frame(x, x, sigma, last, 0.5, "eps", guidance=2.0)),
        ("share is 0 to 1", lambda: blended_frame(x, x, sigma, last, 1.5, "eps")),
        ("predicts is edm, with data, or eps, x0, v, flow, without; not 'u'",
         lambda: blended_frame(x, x, sigma, last, 0.5, "u")),
        ("not 'edm' with data None", lambda: blended_frame(x, x, sigma, last, 0.5, "edm")),
        ("not 'v' with data", lambda: blended_frame(x, x, sigma, last, 0.5, "v", DATA)),
    ):
        with pytest.raises(ValueError, match=f"blended_frame.*{name}"):
            call()
    for name, call in (
        ("guidance is a number", lambda: blended_frame(x, x, sigma, last[:1], 0.5, "eps", guidance=levels)),
        ("last must be uint8", lambda: blended_frame(x, x, sigma, x, 0.5, "eps")),
        ("floating", lambda: blended_frame(x, last, sigma, last, 0.5, "eps")),
    ):
        with pytest.raises(TypeError, match=name):
            call()
