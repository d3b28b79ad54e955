"""timestep_embedding against each network's own formula."""

import math

import numpy as np
import pytest

from cudiff import Tensor, timestep_embedding
from tests.check import check_op, torch


def guided_diffusion(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float64) / half)
    args = t[:, None] * freqs[None]
    out = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    return torch.cat([out, torch.zeros_like(out[:, :1])], dim=-1) if dim % 2 else out


def song(t, dim):
    half = dim // 2
    emb = torch.exp(torch.arange(half, dtype=torch.float64) * -(math.log(10000) / (half - 1)))
    emb = t[:, None] * emb[None, :]
    return torch.cat((emb.sin(), emb.cos()), dim=-1)


VARIANTS = {
    "guided-diffusion": ({}, guided_diffusion),
    "unet.cu": ({"max_period": 1000.0}, lambda t, dim: guided_diffusion(t, dim, 1000)),
    "song": ({"divisor": "half-1", "order": "sin,cos"}, song),
    "half-1, cos": ({"divisor": "half-1"}, lambda t, dim: song(t, dim).roll(dim // 2, 1)),
}


@pytest.mark.parametrize("dim", [4, 10, 64, 600])  # the last has more frequencies than a block has threads
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(device, rng, name, dim):
    options, reference = VARIANTS[name]
    t = np.concatenate([[0.0, 1.0], rng.standard_normal(5)])
    check_op(
        lambda t: timestep_embedding(t, dim, **options), t, device=device, torch_fn=lambda t: reference(t, dim),
        dtypes=("float32",),
    )


def test_odd_dim_ends_in_zero(device):
    check_op(lambda t: timestep_embedding(t, 7), np.array([0.3, 2.0]), device=device, dtypes=("float32",),
             torch_fn=lambda t: guided_diffusion(t, 7))


def test_accurate_up_to_1000(device):
    t = np.array([0, 1, 499.5, 999, 1000], np.float32)
    out = timestep_embedding(Tensor(t, device=device), 64).numpy()
    angle = t[:, None].astype(np.float64) * np.exp(-np.log(10000) * np.arange(32) / 32)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, np.concatenate([np.cos(angle), np.sin(angle)], 1), atol=1e-7)


def test_bad_arguments():
    t = Tensor(np.zeros(1, np.float32))
    with pytest.raises(ValueError, match="order"):
        timestep_embedding(t, 8, order="cos, sin")
    with pytest.raises(ValueError, match="too small"):
        timestep_embedding(t, 2, divisor="half-1")


def test_whole_timesteps_are_read_as_numbers(device):
    t = np.array([0, 1, 500, 999])
    whole, real = (timestep_embedding(Tensor(t.astype(dtype), device=device), 16) for dtype in (np.int32, np.float32))
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole.numpy(), real.numpy())
