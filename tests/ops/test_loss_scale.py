"""Loss scaling: what the kernel writes, an optimiser's steps with it, and runs in fp16."""

import numpy as np
import pytest

from cudiff import Tensor, nn
from cudiff.checkpoint import load_checkpoint
from cudiff.config import Config
from cudiff.cuda.graph import capture
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.ops import mean, square
from cudiff.ops.loss_scale import LARGEST, unscale
from cudiff.ops.optim import Counter, Scalar, square_sums, step_scalars
from cudiff.optim import EMA, SGD, AdamW, LossScale
from cudiff.train import Trainer


def gradient(device, norm):
    grad = np.zeros(96, np.float32)
    grad[41] = norm
    return Tensor(grad, device=device)


def after(device, norms, initial, interval, **attrs):
    """(scale, updates with it, norm, factor, skipped in a row) after steps with gradients of these scaled norms."""
    state = Tensor(np.array([initial, 0], np.float32), device=device)
    scalars = Tensor(np.zeros(len(Scalar), np.float32), device=device)
    counters = Tensor(np.zeros(3, np.int32), device=device)
    found = []
    for norm in norms:
        step_scalars(scalars, counters, square_sums(gradient(device, norm)), lr=0.1, **attrs)
        unscale(state, scalars, counters, interval=interval, **attrs)
        values = scalars.numpy()
        found.append((*state.numpy().tolist(), float(values[Scalar.NORM]), float(values[Scalar.GRAD_SCALE]),
                      int(counters.numpy()[Counter.SKIPPED_IN_A_ROW])))
    return found


def test_an_overflow_halves_the_scale_and_updates_in_a_row_double_it(device):
    found = after(device, [8.0, np.inf, 8.0, 8.0, 8.0, 8.0, np.nan], 16, 3)
    assert [row[:2] for row in found] == [(16, 1), (8, 0), (8, 1), (8, 2), (16, 0), (16, 1), (8, 0)]
    assert [row[2] for row in found[::2]] == pytest.approx([0.5, 1.0, 1.0, np.nan], nan_ok=True)
    assert [row[3] for row in found[2:6]] == pytest.approx([1 / 8, 1 / 8, 1 / 8, 1 / 16])
    assert not any(row[4] for row in found)


def test_the_scale_stays_in_its_range_and_at_1_skipped_steps_count(device):
    assert [(row[0], row[4]) for row in after(device, [np.inf] * 4, 4, 9)] == [(2, 0), (1, 0), (1, 1), (1, 2)]
    assert [row[0] for row in after(device, [0.0] * 3, LARGEST / 2, 1)] == [LARGEST] * 3


def test_clipping_is_of_the_gradient_without_the_scale(device):
    (_, _, norm, factor, _), = after(device, [1024.0], 64, 9, scale=0.5, clip=2.0)
    assert norm == pytest.approx(8) and factor == pytest.approx(0.5 * 2 / 8 / 64)


def net(device):
    model = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1))
    weights = np.random.default_rng(3)
    for value in model.parameters():
        value.assign(weights.standard_normal(value.shape).astype(np.float32))
    model.flatten(device)
    return model


def inputs(device, rng):
    return Tensor(rng.standard_normal((16, 4)).astype(np.float32), device=device)


@pytest.mark.parametrize("clip", [None, 0.25])
def test_in_fp32_scaling_by_a_power_of_two_changes_nothing(device, rng, clip):
    x, models = inputs(device, rng), [net(device) for _ in range(2)]
    for model, scale in zip(models, (None, LossScale(2.0**12, 2)), strict=True):
        optimizer = AdamW(model, lr=0.01, clip=clip, ema=EMA(model, 2.0))
        optimizer.loss_scale = scale
        for _ in range(5):
            optimizer.zero_grad()
            optimizer.backward(mean(square(model(x))))
            optimizer.step()
    assert optimizer.metrics()["loss_scale"] == 2.0**14
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        np.testing.assert_allclose(Tensor(a.data).numpy(), Tensor(b.data).numpy(), rtol=1e-5, atol=1e-6)


def test_a_gradient_too_small_for_fp16_is_kept(device, rng):
    """Of 1e-8 no fp16 number is left; times 65536 there is one."""
    model, x = net(device), inputs(device, rng)
    for scale, moves in ((None, False), (LossScale(), True)):
        optimizer, before = SGD(model, lr=1e6), [Tensor(value.data).numpy().copy() for value in model.parameters()]
        optimizer.loss_scale = scale
        optimizer.zero_grad()
        optimizer.backward(mean(model(x.astype("float16")).astype("float32")) * 1e-7)
        optimizer.step()
        weight = model.parameters()[0]
        assert (np.abs(Tensor(weight.data).numpy() - before[0]).max() > 1e-4) == moves


@pytest.mark.gpu
def test_a_captured_step_halves_the_scale(rng):
    model, x = net("cuda"), inputs("cuda", rng)
    optimizer = SGD(model, lr=0.01)
    optimizer.loss_scale = LossScale(2.0**16, 3)

    def step(x):
        optimizer.zero_grad()
        loss = mean(square(model(x)))
        optimizer.backward(loss)
        optimizer.step()
        return loss

    captured, scales = capture(step, device="cuda"), []
    for i in range(8):
        captured(x * float("inf") if i == 4 else x)
        scales.append(optimizer.metrics()["loss_scale"])
    assert scales == [2.0**n for n in (16, 16, 17, 17, 16, 16, 16, 17)]


def test_what_is_not_scaled_is_told():
    model = net("cpu")
    optimizer = SGD(model, lr=0.1)
    optimizer.loss_scale = LossScale()
    mean(square(model(Tensor(np.ones((2, 4), np.float32))))).backward()
    with pytest.raises(CudiffError, match=r"call optimizer.backward\(loss\)"):
        optimizer.step()
    with pytest.raises(CudiffError, match=r"LossScale\(\) or None, not a float"):
        optimizer.loss_scale = 65536.0
    for wrong in (0.5, 2.0**25):
        with pytest.raises(CudiffError, match=r"initial must be at least 1 and at most 1\.67772e"):
            LossScale(wrong)
    with pytest.raises(CudiffError, match="interval must be at least 1"):
        LossScale(interval=0)
    assert [(scale.initial, scale.interval) for scale in (LossScale(1, 1), LossScale(LARGEST))] == [
        (1, 1), (LARGEST, 2000)
    ]


def test_state_goes_round_and_only_where_both_have_a_scale():
    a, b = (SGD(net("cpu"), lr=0.1) for _ in range(2))
    a.loss_scale = LossScale(512.0)
    state = a.state_dict()
    b.load_state_dict(state)
    assert "loss_scale" not in b.state_dict()
    b.loss_scale = LossScale(8.0)
    b.load_state_dict({name: value for name, value in state.items() if name != "loss_scale"})
    assert b.metrics()["loss_scale"] == 8
    b.load_state_dict(state | {"loss_scale": np.array([64, 7], np.float32)})
    assert b.state_dict()["loss_scale"].tolist() == [64, 7]
    for bad in ([0.5, 0], [2.0**25, 0], [4, -1], [np.nan, 0]):
        with pytest.raises(CudiffError, match="damaged"):
            b.load_state_dict(state | {"loss_scale": np.array(bad, np.float32)})


SMALL = Config(
    data="digits", image_size=8, channels=1, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2,
    num_classes=10, batch_size=4, steps=4, log_every=1, sample_every=0, save_every=0, ema_half_life=4.0, keep=0,
    precision="fp16",
)


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", image_size=8, count=40)


def test_a_run_in_fp16_learns_saves_its_scale_and_goes_on_bit_for_bit(digits, tmp_path, device):
    config = SMALL.replace(device=device)
    whole = Trainer(config, digits, tmp_path / "whole")
    assert whole.run()["loss_scale"] == 2.0**16
    first = Trainer(config.replace(steps=2), digits, tmp_path / "parts")
    first.run()
    checkpoint = load_checkpoint(tmp_path / "parts")
    assert checkpoint.counters["loss_scale"] == [2.0**16, 2]
    resumed = Trainer(config, digits, tmp_path / "parts", checkpoint)
    resumed.run()
    a, b = (load_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert a.counters["loss_scale"] == b.counters["loss_scale"] == [2.0**16, 4]
    assert all(np.array_equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def test_overflows_at_the_beginning_do_not_end_a_run(digits, tmp_path, device):
    trainer = Trainer(SMALL.replace(device=device, max_bad_steps=1, steps=3), digits, tmp_path)
    trainer.optimizer.loss_scale = LossScale(LARGEST)
    weight = next(iter(trainer.net.parameters()))
    trainer.run()
    last = trainer.optimizer.metrics()
    assert last["skipped"] > 0 and last["loss_scale"] == LARGEST / 2 ** last["skipped"]
    assert np.isfinite(Tensor(weight.data).numpy()).all()


class Messages:
    def __init__(self):
        self.told = []

    def message(self, text):
        self.told.append(text)

    def update(self, metrics):
        pass


def test_a_run_may_go_on_in_another_precision_and_says_so(digits, tmp_path):
    config, display = SMALL.replace(device="cpu", steps=1), Messages()
    Trainer(config.replace(precision="fp32"), digits, tmp_path).run()
    trainer = Trainer(config.replace(steps=2), digits, tmp_path, load_checkpoint(tmp_path))
    trainer.run(display)
    assert trainer.optimizer.metrics()["loss_scale"] == 2.0**16
    assert "the run was trained in fp32 and goes on in fp16" in display.told
