"""The update kernels against formulas written out in float64, and against torch.optim."""

import math

import ml_dtypes
import numpy as np
import pytest

from cudiff.ops import optim as ops
from cudiff.tensor import Tensor
from tests.check import relative_error, torch

SIZE = 32 * 37  # not a multiple of a thread block's 1024 elements


def gradient(device, norm):
    """A gradient of that norm."""
    grad = np.zeros(SIZE, np.float32)
    grad[-3] = norm
    return Tensor(grad, device=device)


def scalars_and_counters(device):
    scalars = Tensor(np.zeros(len(ops.Scalar), np.float32), device=device)
    return scalars, Tensor(np.zeros(len(ops.Counter), np.int32), device=device)


def schedule(device, norm=1.0, steps=1, **attrs):
    """The scalars and counters after `steps` steps as NumPy arrays."""
    scalars, counters = scalars_and_counters(device)
    attrs = {"lr": 0.1, "betas": (0.9, 0.999), "half_life": 100.0} | attrs
    grad = gradient(device, norm)
    for _ in range(steps):
        ops.step_scalars(scalars, counters, ops.square_sums(grad), **attrs)
    return scalars.numpy(), counters.numpy()


@pytest.mark.parametrize("size", [32, 1024, SIZE, 32 * 40000])
@pytest.mark.parametrize("chunk", [32, 4096, ops.CHUNK])
def test_norm_of_the_gradient(device, rng, size, chunk):
    grad = rng.standard_normal(size).astype(np.float32)
    scalars, counters = scalars_and_counters(device)
    norms = []
    for _ in range(5):
        squares = ops.square_sums(Tensor(grad, device=device), chunk)
        assert squares.dtype == np.float32 and squares.shape == (-(-size // chunk),)
        norms.append(ops.step_scalars(scalars, counters, squares, lr=0.1, scale=0.5).numpy()[ops.Scalar.NORM])
    assert abs(norms[0] / (0.5 * np.linalg.norm(grad.astype(np.float64))) - 1) < 1e-6
    assert len(set(norms)) == 1
    assert counters.numpy().tolist() == [5, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_is_seen(device, rng, bad):
    grad = rng.standard_normal(32 * 40000).astype(np.float32)
    grad[1_100_777] = bad
    scalars, counters = scalars_and_counters(device)
    ops.step_scalars(scalars, counters, ops.square_sums(Tensor(grad, device=device)), lr=0.1)
    assert scalars.numpy()[ops.Scalar.APPLY] == 0 and counters.numpy().tolist() == [0, 1, 1]


@pytest.mark.parametrize("steps", [1, 2, 20, 1000])
def test_bias_corrections(device, steps):
    scalars, counters = schedule(device, steps=steps)
    assert counters.tolist() == [steps, 0, 0]
    np.testing.assert_allclose(scalars[ops.Scalar.STEP_SIZE], 0.1 / (1 - 0.9**steps), rtol=1e-6)
    np.testing.assert_allclose(scalars[ops.Scalar.RSQRT_BIAS2], 1 / math.sqrt(1 - 0.999**steps), rtol=1e-6)


@pytest.mark.parametrize(
    "steps, factor",
    [(1, 0.25), (3, 0.75), (4, 1), (5, 1), (8, 0.1 + 0.9 * 0.5), (12, 0.1), (30, 0.1)],
)
def test_warm_up_and_cosine(device, steps, factor):
    # Warm-up over steps 0..3, then from step 4 half a cosine of length 6: step 7 is its middle, step 10 its end.
    scalars, _ = schedule(device, steps=steps, warmup=4, total_steps=10, final=0.1)
    np.testing.assert_allclose(scalars[ops.Scalar.LR], 0.1 * factor, rtol=1e-6)


def test_constant_rate(device):
    for steps in (1, 50):
        np.testing.assert_allclose(schedule(device, steps=steps)[0][ops.Scalar.LR], 0.1, rtol=1e-7)


def test_half_life(device):
    for steps in (1, 2, 20, 3000):
        weight = schedule(device, steps=steps, half_life=100.0, ramp=0.05)[0][ops.Scalar.EMA_WEIGHT]
        life = min(100.0, 0.05 * (steps - 1))
        expected = 1.0 if life == 0 else 1 - 0.5 ** (1 / life)
        np.testing.assert_allclose(weight, expected, rtol=1e-6)
    weight = schedule(device, half_life=100.0)[0][ops.Scalar.EMA_WEIGHT]
    np.testing.assert_allclose((1 - np.float64(weight)) ** 100, 0.5, rtol=1e-6)


@pytest.mark.parametrize("norm, factor", [(4.0, 0.5), (0.1, 1.0), (0.0, 1.0)])
def test_clip_coefficient(device, norm, factor):
    scalars, _ = schedule(device, norm=norm, scale=0.5, clip=1.0)
    np.testing.assert_allclose(scalars[ops.Scalar.GRAD_SCALE], 0.5 * factor, rtol=1e-5)
    np.testing.assert_allclose(scalars[ops.Scalar.NORM], 0.5 * norm, rtol=1e-6)


def test_counters_of_skipped_steps(device):
    scalars, counters = scalars_and_counters(device)
    seen = []
    for norm in (1.0, np.nan, np.inf, 2.0, np.nan):
        ops.step_scalars(scalars, counters, ops.square_sums(gradient(device, norm)), lr=0.1, betas=(0.9, 0.99))
        seen.append((*counters.numpy().tolist(), float(scalars.numpy()[ops.Scalar.APPLY])))
    assert seen == [(1, 0, 0, 1), (1, 1, 1, 0), (1, 2, 2, 0), (2, 2, 0, 1), (2, 3, 1, 0)]
    # Adam's time counts updates.
    np.testing.assert_allclose(scalars.numpy()[ops.Scalar.RSQRT_BIAS2], (1 - 0.99**2) ** -0.5, rtol=1e-6)


def test_the_learning_rate_counts_skipped_steps(device):
    scalars, counters = scalars_and_counters(device)
    rates = []
    for norm in (1.0, np.nan, 1.0, np.nan, 1.0):
        ops.step_scalars(scalars, counters, ops.square_sums(gradient(device, norm)), lr=1.0, warmup=10)
        rates.append(float(scalars.numpy()[ops.Scalar.LR]))
    np.testing.assert_allclose(rates[::2], [0.1, 0.3, 0.5], rtol=1e-6)


def reference_adam(p, gradients, mask, lr, betas, eps, weight_decay, decoupled):
    m, v, path = np.zeros_like(p), np.zeros_like(p), []
    for t, g in enumerate(gradients, start=1):
        if decoupled:
            p = p - lr * weight_decay * mask * p
        else:
            g = g + weight_decay * mask * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        path.append(p)
    return path, (m, v)


def reference_sgd(p, gradients, mask, lr, momentum, weight_decay, nesterov):
    b, path = np.zeros_like(p), []
    for g in gradients:
        g = g + weight_decay * mask * p
        b = momentum * b + g
        p = p - lr * (g + momentum * b if nesterov else b)
        path.append(p)
    return path, (b,)


def reference_ema(path, half_life, ramp):
    ema = 0.0
    for step, p in enumerate(path):
        keep = 0.5 ** (1 / max(min(half_life, ramp * step), 1e-8))
        ema = keep * ema + (1 - keep) * p
    return ema


class Problem:
    """Random parameters, 20 gradients and a decay mask with holes, as arrays and as what an update takes."""

    def __init__(self, rng, device, moments, compute_copy=None):
        self.device, self.start = device, rng.standard_normal(SIZE).astype(np.float32)
        sizes = 10.0 ** rng.integers(-3, 2, (20, 1))
        self.gradients = (sizes * rng.standard_normal((20, SIZE))).astype(np.float32)
        decay = rng.integers(0, 2, SIZE // 32).astype(np.uint8)
        decay[[0, -1]] = 1
        self.mask = np.repeat(decay, 32).astype(np.float64)
        self.flags = Tensor(decay, device=device)
        self.data, self.ema = Tensor(self.start.copy(), device=device), self.zeros(SIZE)
        self.moments = [self.zeros(SIZE) for _ in range(moments)]
        self.compute_copy, self.ema_copy = (
            None if compute_copy is None else self.zeros(SIZE, compute_copy) for _ in range(2)
        )
        self.scalars, self.counters = scalars_and_counters(device)

    def zeros(self, shape, dtype=np.float32):
        return Tensor(np.zeros(shape, dtype), device=self.device)

    def step(self, update, gradient, betas=(0.0, 0.0), **attrs):
        grad = Tensor(gradient, device=self.device)
        squares = ops.square_sums(grad)
        ops.step_scalars(self.scalars, self.counters, squares, lr=1e-2, betas=betas, half_life=3.0, ramp=0.5)
        if self.moments[1:]:
            attrs["betas"] = betas
        update(
            self.data, grad, *self.moments, self.scalars, self.flags, self.compute_copy, self.ema,
            self.ema_copy, **attrs
        )

    def check(self, path, moments):
        """Against the parameters after each step, and the moments after the last."""
        assert relative_error(self.data.numpy() - self.start, path[-1] - self.start) < 2e-5
        assert relative_error(self.data.numpy(), path[-1]) < 1e-6
        assert relative_error(self.ema.numpy(), reference_ema(path, 3.0, 0.5)) < 1e-6
        for moment, expected in zip(self.moments, moments, strict=True):
            assert relative_error(moment.numpy(), expected) < 2e-6
        if self.compute_copy is not None:
            for compute_copy, source in ((self.compute_copy, self.data), (self.ema_copy, self.ema)):
                np.testing.assert_array_equal(compute_copy.numpy(), source.numpy().astype(compute_copy.dtype))


DTYPES = [None, ml_dtypes.bfloat16, np.float16]


@pytest.mark.parametrize("compute_copy", DTYPES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(device, rng, decoupled, compute_copy):
    problem = Problem(rng, device, moments=2, compute_copy=compute_copy)
    for gradient in problem.gradients:
        problem.step(ops.adamw if decoupled else ops.adam, gradient, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.3)
    problem.check(*reference_adam(
        problem.start.astype(np.float64), problem.gradients.astype(np.float64), problem.mask, 1e-2, (0.9, 0.99), 1e-3,
        0.3, decoupled,
    ))


@pytest.mark.parametrize("compute_copy", DTYPES)
@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd(device, rng, momentum, nesterov, compute_copy):
    problem = Problem(rng, device, moments=1, compute_copy=compute_copy)
    for gradient in problem.gradients:
        problem.step(ops.sgd, gradient, momentum=momentum, nesterov=nesterov, weight_decay=0.3)
    problem.check(*reference_sgd(
        problem.start.astype(np.float64), problem.gradients.astype(np.float64), problem.mask, 1e-2, momentum, 0.3,
        nesterov,
    ))


@pytest.mark.parametrize("update, moments", [(ops.adamw, 2), (ops.adam, 2), (ops.sgd, 1)])
def test_frozen_blocks_stay_and_the_others_move_as_without_them(device, rng, update, moments):
    problem, free = (Problem(np.random.default_rng(3), device, moments, ml_dtypes.bfloat16) for _ in range(2))
    frozen = rng.integers(0, 2, SIZE // 32).astype(bool)
    frozen[:3] = True, False, True
    flags = problem.flags.numpy() | np.where(frozen, ops.Flag.FROZEN, 0).astype(np.uint8)
    problem.flags = Tensor(flags, device=device)
    kept = [[t.numpy().copy() for t in (p.data, p.ema, p.compute_copy, p.ema_copy)] for p in (problem, free)]
    for gradient in problem.gradients:
        for each in (problem, free):
            each.step(update, gradient, weight_decay=0.3)
    elements = np.repeat(frozen, 32)
    for tensor, other, before in zip(
        (problem.data, problem.ema, problem.compute_copy, problem.ema_copy),
        (free.data, free.ema, free.compute_copy, free.ema_copy), kept[0], strict=True,
    ):
        np.testing.assert_array_equal(tensor.numpy()[elements], before[elements])
        np.testing.assert_array_equal(tensor.numpy()[~elements], other.numpy()[~elements])
    for moment, other in zip(problem.moments, free.moments, strict=True):
        assert not moment.numpy()[elements].any()
        np.testing.assert_array_equal(moment.numpy()[~elements], other.numpy()[~elements])


@pytest.mark.gpu
@pytest.mark.parametrize("update, moments", [(ops.adamw, 2), (ops.sgd, 1), (ops.lion, 1), (ops.rmsprop, 2)])
@pytest.mark.parametrize("count", [1, ops.MOST_PEERS])
def test_peers_add_gradients_and_get_parameters(update, moments, count, rng):
    """As by the summed gradient, in no more of their memory; a step that is skipped changes nothing there."""
    steps = rng.integers(-9, 10, (3, 1 + count, SIZE)).astype(np.float32)
    steps[1, -1, 7] = np.nan
    (data, *buffers), (alone, *others) = ([Tensor(np.ones(SIZE, np.float32), device="cuda") for _ in range(1 + moments)]
                                          for _ in range(2))
    copies = Tensor(np.full((count, SIZE + 32), 5, np.float32), device="cuda")
    flags = Tensor(np.zeros(SIZE // 32, np.uint8), device="cuda")
    counted, summed = scalars_and_counters("cuda"), scalars_and_counters("cuda")
    for gradients in steps:
        own, received, grad = (Tensor(x, device="cuda") for x in (gradients[0], gradients[1:], gradients.sum(axis=0)))
        peers = [ops.Peer(copies.data.data.ptr + 4 * row * (SIZE + 32), received.data.data.ptr + 4 * row * SIZE)
                 for row in range(count)]
        ops.step_scalars(*counted, ops.square_sums(own, peers=peers), lr=0.1)
        ops.step_scalars(*summed, ops.square_sums(grad), lr=0.1)
        update(data, own, *buffers, counted[0], flags, peers=peers)
        update(alone, grad, *others, summed[0], flags)
        np.testing.assert_array_equal(counted[0].numpy(), summed[0].numpy())
    for tensor, expected in zip((data, *buffers), (alone, *others), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), expected.numpy())
    found = copies.numpy()
    np.testing.assert_array_equal(found[:, :SIZE], np.stack([data.numpy()] * count))
    assert (found[:, SIZE:] == 5).all() and (data.numpy() != 1).any()


@pytest.mark.parametrize("update, moments", [(ops.adamw, 2), (ops.sgd, 1)])
def test_bad_gradients_change_nothing(device, rng, update, moments):
    problem = Problem(rng, device, moments, compute_copy=ml_dtypes.bfloat16)
    problem.step(update, problem.gradients[0])
    tensors = [problem.data, problem.ema, problem.compute_copy, problem.ema_copy, *problem.moments]
    before = [tensor.numpy().copy() for tensor in tensors]
    for bad in (np.nan, -np.inf):
        gradient = problem.gradients[1].copy()
        gradient[5] = bad
        problem.step(update, gradient)
    for tensor, values in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), values)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_against_torch(rng, name):
    problem = Problem(rng, "cpu", moments=1 if name == "SGD" else 2)
    parameter = torch.tensor(problem.start)
    groups = [torch.nn.Parameter(parameter[problem.mask == on].clone()) for on in (0, 1)]
    attrs = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {"betas": (0.9, 0.99)}
    optimizer = getattr(torch.optim, name)(
        [{"params": group, "weight_decay": 0.3 * on} for on, group in enumerate(groups)], lr=1e-2, **attrs
    )
    update = {"AdamW": ops.adamw, "Adam": ops.adam, "SGD": ops.sgd}[name]
    for gradient in problem.gradients:
        problem.step(update, gradient, weight_decay=0.3, **attrs)
        for on, group in enumerate(groups):
            group.grad = torch.tensor(gradient[problem.mask == on])
        optimizer.step()
    for on, group in enumerate(groups):
        chosen = problem.mask == on
        moved = group.detach().numpy() - problem.start[chosen]
        assert relative_error(problem.data.numpy()[chosen] - problem.start[chosen], moved) < 1e-5


def test_the_rate_stays_where_there_is_nothing_to_fall_to():
    """`final` counts from the end of the warm-up on, and only where steps are left then."""
    assert [ops.lr_factor(step, 0, 0, 0.1) for step in (0, 5)] == [1.0, 1.0]
    assert ops.lr_factor(1, 4, 4, 0.1) == pytest.approx(0.5)
    assert ops.lr_factor(10, 2, 10, 0.1) == pytest.approx(0.1)
    assert ops.lr_factor(6, 2, 10, 0.1) == pytest.approx(0.55)


def _plain(kind, data, grads, decay, lr, weight_decay, ema_weight):
    """Adam, AdamW and SGD with momentum as their papers have them, in float64: parameters and their average."""
    p, average = data.astype(np.float64), data.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, grad in enumerate(grads.astype(np.float64), 1):
        g = grad if kind == "adamw" else grad + weight_decay * decay * p
        if kind == "adamw":
            p = p - lr * weight_decay * decay * p
        if kind in ("adam", "adamw"):
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            p = p - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6)
        else:
            m = 0.8 * m + g
            p = p - lr * (g + 0.8 * m if kind == "nesterov" else m)
        average = average + ema_weight * (p - average)
    return p, average


@pytest.mark.parametrize("size", [32, 96, ops.CHUNK + 64])
@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd", "nesterov"])
def test_updates_are_the_papers(kind, size, device, rng):
    """Decay reaches the blocks that ask for it, the last too, coupled for Adam and SGD and decoupled for AdamW."""
    start, grads = rng.standard_normal(size).astype(np.float32), rng.standard_normal((4, size)).astype(np.float32)
    decay = np.zeros(size // 32, np.uint8)
    decay[[0, -1]] = 1
    data, m, v, ema = (Tensor(x.copy(), device=device) for x in (start, 0 * start, 0 * start, start))
    scalars, counters = scalars_and_counters(device)
    mask = Tensor(decay, device=device)
    for grad in grads:
        grad = Tensor(grad, device=device)
        ops.step_scalars(scalars, counters, ops.square_sums(grad), lr=0.05, betas=(0.9, 0.95), half_life=3.0)
        if kind.startswith("adam"):
            function = ops.adamw if kind == "adamw" else ops.adam
            function(data, grad, m, v, scalars, mask, None, ema, None, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.3)
        else:
            ops.sgd(data, grad, m, scalars, mask, None, ema, None, momentum=0.8, weight_decay=0.3,
                    nesterov=kind == "nesterov")
    expected, average = _plain(kind, start, grads, np.repeat(decay, 32), 0.05, 0.3, 1 - 2 ** (-1 / 3))
    np.testing.assert_allclose(data.numpy(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ema.numpy(), average, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("update", [ops.adamw, ops.adam, ops.rmsprop])
def test_a_mean_square_without_memory_is_the_last_gradients(update, device):
    """The square of a gradient of 0.01 is not lost beside that of 1000 before it."""
    options = {"alpha": 0.0} if update is ops.rmsprop else {"betas": (0.9, 0.0)}
    own = {"betas": options["betas"]} if "betas" in options else {}
    data, *moments = (Tensor(np.zeros(32, np.float32), device=device) for _ in range(3))
    flags = Tensor(np.zeros(1, np.uint8), device=device)
    scalars, counters = scalars_and_counters(device)
    for value in (1000.0, 0.01):
        grad = Tensor(np.full(32, value, np.float32), device=device)
        ops.step_scalars(scalars, counters, ops.square_sums(grad), lr=0.1, **own)
        update(data, grad, *moments, scalars, flags, eps=1e-8, **options)
    np.testing.assert_allclose(moments[0 if update is ops.rmsprop else 1].numpy(), 1e-4, rtol=1e-5)
