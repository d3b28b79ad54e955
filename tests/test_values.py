"""Options of layers, losses, denoisers and samplers are checked where they are given, in one line."""

import numpy as np
import pytest

from cudiff import Generator, nn, ops
from cudiff.config import PRESETS
from cudiff.diffusion import (
    DDIM,
    Ancestral,
    DDPMLoss,
    DPMSolver,
    EDMDenoiser,
    EDMLoss,
    Euler,
    FlowLoss,
    Guided,
    Heun,
    ImageNoise,
    Schedule,
)
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor
from cudiff.values import real, whole

NAN, INFINITY = float("nan"), float("inf")


def test_whole_numbers():
    assert whole("n", 3) == whole("n", np.int64(3)) == 3 and type(whole("n", np.uint8(3))) is int
    assert whole("n", 0, 0, 5) == 0 and whole("n", 5, 0, 5) == 5
    for value in (0, 6, -1, 2.0, True, "3", None, NAN, np.float32(2)):
        with pytest.raises(CudiffError, match=r"^n must be"):
            whole("n", value, 1, 5)


def test_real_numbers():
    assert real("x", 3) == 3.0 and type(real("x", np.float32(3))) is float
    assert real("x", 0, least=0) == 0 and real("x", 1, most=1) == 1 and real("x", 0.5, above=0, below=1) == 0.5
    for value in (-0.1, 1.1, NAN, INFINITY, True, "1", None, 1j):
        with pytest.raises(CudiffError, match=r"^x must be"):
            real("x", value, least=0, most=1)
    for value in (0, 1):
        with pytest.raises(CudiffError, match="above 0 and below 1"):
            real("x", value, above=0, below=1)
    with pytest.raises(CudiffError, match="finite"):
        real("x", NAN)


def test_real_numbers_are_those_of_float32():
    largest = float(np.finfo(np.float32).max)
    assert real("x", largest) == largest and real("x", 1e-60, least=0) == 1e-60 and real("x", np.float16(2)) == 2
    for value in (1e39, -1e39, 10**400, -(10**5000), np.float64(1e300)):
        with pytest.raises(CudiffError, match=r"^x must be at most 3.4e\+38 in size, the most that float32 holds$"):
            real("x", value)
    for value, text in ((1e-60, "1e-60 is 0"), (1 - 1e-12, "0.999999999999 is 1")):
        with pytest.raises(CudiffError, match=f"^x must be above 0 and below 1, and {text} in float32$"):
            real("x", value, above=0, below=1)


@pytest.mark.parametrize("name, make", [
    ("in_features", lambda: nn.Linear(0, 3)), ("out_features", lambda: nn.Linear(3, -1)),
    ("in_features", lambda: nn.Linear(2.5, 3)), ("in_channels", lambda: nn.Conv2d(0, 3, 3)),
    ("out_channels", lambda: nn.Conv2d(3, 3.0, 3)), ("kernel_size", lambda: nn.Conv2d(3, 3, 0)),
    ("kernel_size", lambda: nn.Conv2d(3, 3, (3, 3, 3))), ("stride", lambda: nn.Conv2d(3, 3, 3, stride=0)),
    ("in_channels 3 is no multiple of groups 2", lambda: nn.Conv2d(3, 4, 3, groups=2)),
    ("out_channels 3 is no multiple of groups 2", lambda: nn.Conv2d(4, 3, 3, groups=2)),
    ("dilation", lambda: nn.Conv2d(3, 3, 3, dilation=0)), ("groups", lambda: nn.Conv2d(3, 3, 3, groups=0)),
    ("padding", lambda: nn.Conv2d(3, 3, 3, padding=-1)), ("stride", lambda: nn.ConvTranspose2d(3, 3, 2, stride=0)),
    ("padding", lambda: nn.ConvTranspose2d(3, 3, 2, padding=-1)), ("num_groups", lambda: nn.GroupNorm(0, 4)),
    ("num_channels 6 is no multiple of num_groups 4", lambda: nn.GroupNorm(4, 6)),
    ("eps", lambda: nn.GroupNorm(2, 4, eps=0)), ("eps", lambda: nn.LayerNorm(4, eps=NAN)),
    ("num_channels", lambda: nn.LayerNorm(0)), ("momentum", lambda: nn.BatchNorm2d(4, momentum=1.5)),
    ("num_channels", lambda: nn.BatchNorm2d(0)), ("eps", lambda: nn.BatchNorm2d(4, eps=-1)),
    ("num_embeddings", lambda: nn.Embedding(0, 4)), ("dim", lambda: nn.Embedding(4, 0)),
    ("p", lambda: nn.Dropout(2.0)), ("p", lambda: nn.Dropout(1)), ("p", lambda: nn.Dropout(NAN)),
    ("seed", lambda: Generator(seed=1.5)), ("seed", lambda: Generator(seed=-1)),
    ("sigma_data", lambda: EDMLoss(sigma_data=0)), ("P_mean", lambda: EDMLoss(P_mean=NAN)),
    ("P_std", lambda: EDMLoss(P_std=0)), ("P_mean", lambda: FlowLoss(-40, 1)),
    ("P_mean", lambda: EDMLoss(P_std=7)), ("data_std", lambda: EDMLoss(data_std=0)),
    ("data_mean", lambda: EDMLoss(data_mean=NAN)), ("label_dropout", lambda: EDMLoss(label_dropout=1.5)),
    ("c_noise_scale", lambda: EDMLoss(c_noise_scale=NAN)),
    ("label_dropout", lambda: DDPMLoss(Schedule(), label_dropout=-1)),
    ("vlb_weight", lambda: DDPMLoss(Schedule(), vlb_weight=-1)), ("sigma_data", lambda: EDMDenoiser(None, -0.5)),
    ("data_std", lambda: EDMDenoiser(None, data_std=0)), ("guidance", lambda: Guided(None, NAN)),
    ("S_churn", lambda: Euler(None, S_churn=-1)), ("S_noise", lambda: Heun(None, S_noise=NAN)),
    ("S_min", lambda: Euler(None, S_min=-1)), ("S_max", lambda: Euler(None, S_max=NAN)),
    ("eta", lambda: DDIM(None, eta=1.5)), ("seed", lambda: ImageNoise((1, 2, 2, 1), 0.5)),
    ("first", lambda: ImageNoise((1, 2, 2, 1), 0, first="1")),
])
def test_options_out_of_range_are_refused_by_name(name, make):
    with pytest.raises(CudiffError, match=f"^{name}") as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, make", [
    ("bias", lambda: nn.Linear(2, 2, bias="no")), ("bias", lambda: nn.Conv1d(2, 2, 3, bias=None)),
    ("bias", lambda: nn.Conv2d(2, 2, 3, bias="no")), ("bias", lambda: nn.MultiheadAttention(4, 2, bias="no")),
    ("mode", lambda: nn.Linear(2, 2).train("no")), ("clip_denoised", lambda: DDIM(None, clip_denoised="no")),
    ("low", lambda: nn.Parameter([1.0], low="no")), ("decay", lambda: nn.Parameter([1.0], decay="no")),
    ("requires_grad", lambda: nn.Linear(2, 2).requires_grad_("no")),
    ("requires_grad", lambda: Tensor([1.0], requires_grad="no")),
    ("clip_denoised", lambda: Ancestral(None, clip_denoised="no")),
    ("stochastic", lambda: DPMSolver(None, stochastic="no")),
    ("ceil_mode", lambda: ops.max_pool2d(Tensor(np.ones((1, 2, 2, 1), np.float32)), 2, ceil_mode="no")),
    ("flip", lambda: ops.draw_batch(np.ones((2, 3, 3, 1), np.uint8), None, Tensor([0], dtype="int32"), 1, 0, "no")),
])
def test_what_is_no_flag_is_refused(name, make):
    with pytest.raises(TypeError, match=f"^{name} is True or False, not "):
        make()


def test_a_list_of_modules_takes_modules():
    for make in (lambda: nn.Sequential(nn.ReLU(), abs), lambda: nn.ModuleList([1]), lambda: nn.ModuleList().append(2)):
        with pytest.raises(TypeError, match="holds modules"):
            make()
    assert len(nn.ModuleList([None, nn.ReLU()])) == 2


@pytest.mark.parametrize("name, arguments", [
    ("seed", {"seed": 1.5}), ("seed", {"seed": -1}), ("seed", {"seed": 2**64}), ("seed", {"seed": True}),
    ("seed", {"seed": "1"}), ("n", {"n": 2.5}), ("n", {"n": True}), ("steps", {"steps": 3.7}),
    ("batch_size", {"batch_size": 2.0}), ("guidance", {"guidance": "strong"}), ("guidance", {"guidance": NAN}),
])
def test_what_sample_takes(name, arguments):
    pipeline = small_pipeline()
    with pytest.raises(CudiffError, match=f"^{name} must be"):
        pipeline.sample(**{"n": 1, "steps": 1} | arguments)


def test_sample_takes_numpy_integers():
    numbers = {"n": np.int64(2), "seed": np.uint64(2**63), "steps": np.int32(1), "batch_size": np.int16(1)}
    expected = small_pipeline().sample(2, 2**63, steps=1, batch_size=1)
    np.testing.assert_array_equal(small_pipeline().sample(**numbers), expected)


def small_pipeline():
    config = PRESETS["digits"].replace(image_size=8, model_channels=8, num_head_channels=8)
    return Pipeline(config, build(config))


def test_the_bounds_of_a_whole_number_are_said():
    for bounds, text in (((1, None), "at least 1"), ((0, 5), "0 to 5")):
        with pytest.raises(CudiffError, match=f"^n must be {text}, not -1$"):
            whole("n", -1, *bounds)
