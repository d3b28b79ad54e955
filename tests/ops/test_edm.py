import numpy as np
import pytest

from cudiff.ops import edm_input, edm_mix, edm_output
from cudiff.tensor import Tensor
from tests.check import TOLERANCE, check_op, relative_error


@pytest.mark.parametrize("shape", [(3, 4, 6, 2), (2, 3, 5, 1), (2, 37, 71, 1), (40, 64, 64, 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_input_and_target(device, rng, shape, dtype):
    images, noise = (Tensor(rng.standard_normal(shape), dtype="float32").astype(dtype) for _ in range(2))
    draw = Tensor(rng.standard_normal(shape[0]), dtype="float32")
    y, z = (t.astype("float32").numpy().astype(np.float64) for t in (images, noise))
    y = (y - 0.3) / 0.8
    sigma = np.exp(-1.2 + 1.2 * draw.numpy().astype(np.float64)).reshape(-1, 1, 1, 1)
    total = sigma**2 + 0.25
    c_skip, c_out, c_in = 0.25 / total, 0.5 * sigma / np.sqrt(total), 1 / np.sqrt(total)  # EDM, Table 1
    x, target, c_noise = edm_mix(*(t.to(device) for t in (images, noise, draw)), -1.2, 1.2, 0.5, 0.25, 0.3, 0.8)
    assert x.dtype == target.dtype == images.dtype and c_noise.dtype == np.float32
    assert relative_error(x.astype("float32").numpy(), c_in * (y + sigma * z)) < TOLERANCE[x.dtype]
    expected = (y - c_skip * (y + sigma * z)) / c_out
    assert relative_error(target.astype("float32").numpy(), expected) < TOLERANCE[x.dtype]
    assert relative_error(c_noise.numpy(), 0.25 * np.log(sigma).ravel()) < 1e-6


@pytest.mark.parametrize("shape", [(3, 4, 6, 2), (2, 3, 5, 1), (5,)])
def test_input_and_output_of_the_network(device, rng, shape):
    """D = mean + std (c_skip y + c_out F(c_in y)), y and its noise level s of standardised images; EDM, Table 1."""
    (x, out), levels = rng.standard_normal((2, *shape)), np.exp(rng.standard_normal(shape[0]))
    sigma_data, scale, mean, std = 0.6, 0.25, -0.7, 0.4
    y, s = (x - mean) / std, levels.reshape(-1, *(1,) * (len(shape) - 1)) / std
    total = s**2 + sigma_data**2
    c_in, c_skip, c_out = 1 / np.sqrt(total), sigma_data**2 / total, s * sigma_data / np.sqrt(total)

    def sigma(x):
        return Tensor(levels, dtype="float64" if x.dtype == np.float64 else "float32", device=x.device)

    def scaled(x):
        return edm_input(x, sigma(x), sigma_data, scale, mean, std)[0]

    def denoised(x, out):
        return edm_output(x, out, sigma(x), sigma_data, mean, std)

    x32, out32 = (Tensor(a, dtype="float32", device=device) for a in (x, out))
    assert relative_error(scaled(x32).numpy(), c_in * y) < 1e-6
    assert relative_error(denoised(x32, out32).numpy(), mean + std * (c_skip * y + c_out * out)) < 1e-6
    c_noise = edm_input(x32, sigma(x32), sigma_data, scale, mean, std)[1]
    assert relative_error(c_noise.numpy(), scale * np.log(s).ravel()) < 1e-6
    check_op(scaled, x, device=device, dtypes=("float32", "bfloat16", "float16"))
    check_op(denoised, x, out, device=device, dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_levels_of_16_bits_are_taken_as_float32(device, rng, dtype):
    x = Tensor(rng.standard_normal((2, 3, 5, 1)), dtype="float32", device=device)
    levels = Tensor([0.5, 8.0], device=device)
    for few, many in zip(edm_input(x, levels.astype(dtype), 0.5, 1), edm_input(x, levels, 0.5, 1), strict=True):
        np.testing.assert_array_equal(few.numpy(), many.numpy())
    few, many = (edm_output(x, x, sigma, 0.5) for sigma in (levels.astype(dtype), levels))
    np.testing.assert_array_equal(few.numpy(), many.numpy())


def test_no_images(device):
    x, sigma = (Tensor(np.empty(shape, np.float32), device=device) for shape in ((0, 4, 4, 1), (0,)))
    made = *edm_mix(x, x, sigma, -1.2, 1.2, 0.5), *edm_input(x, sigma, 0.5, 0.25), edm_output(x, x, sigma, 0.5)
    assert [t.shape for t in made] == [x.shape, x.shape, (0,), x.shape, (0,), x.shape]


def test_operands_must_agree():
    x, levels = Tensor(np.zeros((2, 3), np.float32)), Tensor(np.ones(3, np.float32))
    for name, call in (
        ("edm_mix", lambda: edm_mix(x, x, levels, 0, 1, 0.5)),
        ("edm_input", lambda: edm_input(x, levels, 0.5, 1)),
        ("edm_output", lambda: edm_output(x, x[:, :2], levels, 0.5)),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_pixels_are_standardised_only_where_it_is_asked(rng):
    x, z, draw = (Tensor(rng.standard_normal(shape)) for shape in ((3, 2, 2, 1), (3, 2, 2, 1), (3,)))
    sigma = Tensor(np.exp(draw.numpy()))
    pairs = [
        (edm_mix(x, z, draw, -1.2, 1.2, 0.5), edm_mix(x, z, draw, -1.2, 1.2, 0.5, 1.0, 0.0, 1.0)),
        (edm_input(x, sigma, 0.5, 0.25), edm_input(x, sigma, 0.5, 0.25, 0.0, 1.0)),
        ((edm_output(x, z, sigma, 0.5),), (edm_output(x, z, sigma, 0.5, 0.0, 1.0),)),
    ]
    for plain, told in pairs:
        for one, other in zip(plain, told, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_images_and_noise_are_of_one_shape_and_dtype(rng):
    images, draw = Tensor(rng.standard_normal((3, 2, 2, 1)).astype(np.float32)), Tensor(np.zeros(3, np.float32))
    for noise in (np.zeros((3, 2, 2, 2), np.float32), np.zeros((3, 2, 2, 1), np.float64)):
        with pytest.raises(ValueError, match=r"edm_mix: images \(3, 2, 2, 1\) float32 and noise .* differ"):
            edm_mix(images, Tensor(noise), draw, 0, 1, 0.5)
