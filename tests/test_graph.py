"""Capture: a replayed graph does what the function does, bit for bit; on the CPU it is the function."""

import gc

import numpy as np
import pytest

from cudiff import grad, no_grad, ops
from cudiff.autograd import accumulate
from cudiff.backend import bfloat16
from cudiff.cuda import compiler, launch
from cudiff.cuda.graph import capture
from cudiff.cuda.memory import PAGE
from cudiff.errors import CudiffError
from cudiff.nn import Module, Parameter
from cudiff.ops.random import Generator, Purpose
from cudiff.optim import EMA, AdamW, Cosine
from cudiff.tensor import Tensor
from tests.recording import stand_in

STEPS = 20


class Net(Module):
    """Elementwise, so that the tests need few kernels: tanh(x·weight + bias)."""

    def __init__(self, width):
        super().__init__()
        rng = np.random.default_rng(1)
        self.weight = Parameter(rng.standard_normal(width).astype(np.float32), decay=True)
        self.bias = Parameter(rng.standard_normal(width).astype(np.float32))

    def forward(self, x):
        return ops.tanh(x * self.weight + self.bias)


def train(device, captured, precompile=False, steps=STEPS):
    """Losses, weights and averaged weights after training on noise drawn in the step."""
    model = Net(77)
    model.flatten(device)
    generator = Generator(seed=5, device=device)
    optimizer = AdamW(model, lr=0.05, clip=0.5, schedule=Cosine(steps, warmup=4), ema=EMA(model, half_life=3))
    target = Tensor(np.linspace(-0.5, 0.5, 77, dtype=np.float32), device=device)

    def step(scale):
        optimizer.zero_grad()
        x = generator.normal((16, 77), stream=Purpose.NOISE) * scale
        loss = ops.mean(ops.square(model(x) - target))
        loss.backward()
        optimizer.step()
        generator.advance()
        return loss

    run = capture(step, precompile=precompile) if captured else step
    losses = [run(Tensor(np.array([1 + 0.1 * i], np.float32), device=device)).item() for i in range(steps)]
    assert optimizer.metrics()["updates"] == steps and generator.step.item() == steps
    return losses, model.flat.data, optimizer.ema.model.flat.data


def as_numpy(array):
    return Tensor(array).numpy()


@pytest.mark.parametrize("precompile", [False, True])
def test_a_captured_step_trains_bit_for_bit_as_the_eager_one(device, precompile, monkeypatch):
    eager = train(device, captured=False)
    monkeypatch.setattr(launch, "_kernels", {})  # as in a new process
    captured = train(device, captured=True, precompile=precompile)
    assert eager[0] == captured[0]
    assert len(set(captured[0])) == STEPS
    for expected, actual in zip(eager[1:], captured[1:], strict=True):
        np.testing.assert_array_equal(as_numpy(actual), as_numpy(expected))


def test_random_numbers_advance_from_call_to_call(device):
    generator, expected = Generator(seed=3, device=device), Generator(seed=3, device=device)

    def draw():
        x = generator.normal((4, 9), stream=Purpose.NOISE)
        generator.advance()
        return x

    draw = capture(draw, warmup=2, device=device)
    for _ in range(6):
        np.testing.assert_array_equal(draw().numpy(), expected.normal((4, 9), stream=Purpose.NOISE).numpy())
        expected.advance()


def test_a_generator_that_gets_another_seed_draws_from_it(monkeypatch):
    stand_in(monkeypatch)
    generator, other = Generator(1), Generator(2)
    draw = capture(lambda x: x + generator.normal((2,)), warmup=1)
    for _ in range(3):
        draw(Tensor([0.0, 0.0]))
    generator.load_state(other.state())
    assert draw(Tensor([0.0, 0.0])).tolist() == other.normal((2,)).tolist()


def test_a_warm_up_function_takes_the_place_of_the_first_calls(device, monkeypatch):
    if device == "cpu":
        stand_in(monkeypatch)
    calls, warmups = [], []
    function = capture(lambda x: calls.append(1) or x * 2.0 + 1.0, warmup=lambda x: warmups.append(1) or x * 2.0 + 1.0)
    for i in range(4):
        x = Tensor(np.full(3, i, np.float32), device=device)
        np.testing.assert_array_equal(function(x).numpy(), 2 * i + 1)
    assert (len(calls), len(warmups)) == (1, 1)


def test_inputs_are_copied_in_and_shapes_have_graphs_of_their_own(device, rng):
    affine = capture(lambda x, y: (x * 2.0 + 1.0, None) if y is None else (x * y, y), warmup=1)
    for i in range(5):
        for shape in ((3, 5), (8,)):
            x, y = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
            product, _ = affine(Tensor(x, device=device), Tensor(y, device=device))
            np.testing.assert_array_equal(product.numpy(), x * y)
            line, nothing = affine(Tensor(x, device=device), None)
            np.testing.assert_allclose(line.numpy(), x * 2 + 1, rtol=1e-6)
            assert nothing is None, i


def test_what_a_captured_function_takes(device):
    with pytest.raises(CudiffError, match="Tensors, not float"):
        capture(lambda x: x)(1.0)
    with pytest.raises(CudiffError, match="no Tensor"):
        capture(lambda: None)()
    with pytest.raises(ValueError, match="warm-up"):
        capture(lambda x: x, warmup=0)


def test_on_the_cpu_the_function_is_called():
    calls = []
    function = capture(lambda x: calls.append(x) or x, warmup=2)
    x = Tensor(np.ones(3, np.float32))
    assert all(function(x) is x for _ in range(5)) and len(calls) == 5


@pytest.mark.gpu
def test_the_function_runs_only_until_it_is_recorded():
    calls = []
    function = capture(lambda x: calls.append(1) or x + 1.0, warmup=2)
    x = Tensor(np.zeros(3, np.float32), device="cuda")
    results = [function(x) for _ in range(6)]
    assert len(calls) == 3
    assert results[2] is results[3] is results[5]


@pytest.mark.gpu
def test_precompiling_compiles_and_changes_nothing(monkeypatch):
    import cupy

    monkeypatch.setattr(launch, "_kernels", {})
    compiled, calls, cubin = [], [], compiler._cubin
    monkeypatch.setattr(compiler, "_cubin", lambda *variant: compiled.append(variant) or cubin(*variant))
    weight = Parameter(cupy.arange(8, dtype=np.float32), low=True)
    total = Tensor(np.zeros(8, np.float32), device="cuda")

    def step(x):
        calls.append(len(compiled))
        accumulate(total.data, (Tensor(weight.operand(bfloat16)) * x).data)
        total.data *= 2  # by CuPy
        return total

    step = capture(step, precompile=True)
    x = ops.astype(Tensor(np.ones(8, np.float32), device="cuda"), bfloat16)
    step(x)
    assert len(calls) == 2 and calls[1] > calls[0]
    for _ in range(4):
        step(x)
    np.testing.assert_array_equal(total.numpy(), np.arange(8) * (2**6 - 2))


@pytest.mark.gpu
@pytest.mark.parametrize("read", [lambda x: x.numpy(), lambda x: x[0].item(), lambda x: bool(x[0])])
def test_reading_from_the_gpu_is_refused_and_breaks_nothing(read):
    x = Tensor(np.ones(4, np.float32), device="cuda")
    function = capture(lambda x: (read(x), x + 1.0)[1], warmup=1)
    function(x)
    with pytest.raises(CudiffError, match=r"\.item\(\)"):
        function(x)
    np.testing.assert_array_equal((x + 1.0).numpy(), 2)
    good = capture(lambda x: x + 1.0, warmup=1)
    for _ in range(3):
        np.testing.assert_array_equal(good(x).numpy(), 2)


@pytest.mark.gpu
def test_an_error_in_the_function_stays_itself():
    x = Tensor(np.ones(4, np.float32), device="cuda")
    calls = []

    def fails(x):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        return x + 1.0

    function = capture(fails, warmup=1)
    function(x)
    with pytest.raises(KeyError, match="mine"):
        function(x)
    np.testing.assert_array_equal(function(x).numpy(), 2)


@pytest.mark.gpu
def test_captured_within_captured_is_refused():
    inner = capture(lambda x: x + 1.0)
    outer = capture(lambda x: inner(x))
    x = Tensor(np.ones(4, np.float32), device="cuda")
    with pytest.raises(CudiffError, match="within another"):
        outer(x)
    np.testing.assert_array_equal(inner(x).numpy(), 2)


def test_an_argument_whose_gradient_would_be_lost_is_refused(monkeypatch):
    stand_in(monkeypatch)
    square = capture(lambda x: (x * x).sum(), warmup=1)
    x = Tensor([1.0, 2.0], requires_grad=True)
    for _ in range(3):
        with pytest.raises(CudiffError, match="requires a gradient, which a graph would not give it"):
            square(x)
        with pytest.raises(CudiffError, match="requires a gradient"):
            grad(square)(np.float32([1, 2]))
        with no_grad():
            assert square(x).item() == square(x.detach()).item() == 5
    tangent = capture(grad(lambda x: (x * x).sum()), warmup=1)
    for _ in range(3):
        assert tangent(x.detach()).tolist() == [2, 4]


@pytest.mark.parametrize("change", [lambda x: setattr(x, "data", np.full(2, 5, np.float32)),
                                    lambda x: x.change(Tensor([5.0, 5.0]))], ids=["data", "change"])
def test_a_tensor_that_is_given_another_array_is_read_there(monkeypatch, change):
    """The graph has the old one's address, where by then others may lie."""
    stand_in(monkeypatch)
    calls, held, other = [], Tensor([1.0, 2.0]), Tensor([3.0, 4.0])
    add = capture(lambda x: calls.append(1) or x + held, warmup=1)
    for _ in range(3):
        assert add(Tensor([1.0, 1.0])).tolist() == [2, 3]
    change(other)
    assert add(Tensor([1.0, 1.0])).tolist() == [2, 3] and len(calls) == 2
    change(held)
    for _ in range(3):
        assert add(Tensor([1.0, 1.0])).tolist() == [6, 6]
    assert len(calls) == 4


def test_an_argument_that_is_changed_is_told(monkeypatch):
    stand_in(monkeypatch)
    with pytest.raises(CudiffError, match="changed an argument"):
        capture(lambda x: x.change(x + 1.0))(Tensor([1.0]))


@pytest.mark.gpu
def test_the_graph_shares_memory_with_nobody():
    """Temporaries freed while recording are still written by each replay: nobody else may get them."""
    function = capture(lambda x: ops.exp(ops.sin(x * 2.0) + 1.0) - 1.0, warmup=1)
    x = np.linspace(0, 3, 5000, dtype=np.float32)
    expected = function(Tensor(x, device="cuda")).numpy()
    function(Tensor(x, device="cuda"))
    others = [Tensor(np.full(5000, i, np.float32), device="cuda") for i in range(50)]
    for _ in range(3):
        np.testing.assert_array_equal(function(Tensor(x, device="cuda")).numpy(), expected)
    for i, other in enumerate(others):
        np.testing.assert_array_equal(other.numpy(), i)


@pytest.mark.gpu
def test_an_array_outlives_the_graph_it_was_made_in():
    kept = []
    function = capture(lambda x: kept.append(x * 3.0) or x + 1.0, warmup=1)
    x = Tensor(np.ones(100_000, np.float32), device="cuda")
    for _ in range(3):
        function(x)
    del function
    gc.collect()
    others = [Tensor(np.zeros(100_000, np.float32), device="cuda") for _ in range(20)]
    for tensor in kept:
        np.testing.assert_array_equal(tensor.numpy(), 3)
    assert len(others) == 20


@pytest.mark.gpu
def test_small_graphs_hold_little_memory(rng):
    function = capture(lambda x: ops.exp(ops.sin(x * 2.0) + 1.0), warmup=2)
    for shape in ((3, 5), (1000,)):
        x = Tensor(rng.standard_normal(shape).astype(np.float32), device="cuda")
        for _ in range(4):
            function(x)
    assert function.pool_bytes == 2 * PAGE


@pytest.mark.gpu
def test_a_recording_may_end_while_another_is_made():
    x = Tensor(np.ones(1000, np.float32), device="cuda")
    held, calls = [capture(lambda x: x + 1.0, warmup=1)], []
    for _ in range(3):
        held[0](x)

    def forget(x):
        calls.append(1)
        y = x * 2.0
        if len(calls) == 2:
            held.clear()
        return y + 1.0

    function = capture(forget, warmup=1)
    for _ in range(3):
        np.testing.assert_array_equal(function(x).numpy(), 3)
    assert not held


@pytest.mark.gpu
def test_memory_that_runs_out_while_recording_is_told():
    import cupy

    x = Tensor(np.ones(4, np.float32), device="cuda")
    calls = []

    def greedy(x):
        calls.append(1)
        if len(calls) == 2:
            cupy.empty(1 << 50, np.uint8)
        return x + 1.0

    function = capture(greedy, warmup=1)
    function(x)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        function(x)
    np.testing.assert_array_equal(function(x).numpy(), 2)
