"""check_op, check_case and check_needed: one call that holds an operation to its reference on every backend.

On the CPU: NumPy's backward against finite differences in float64, and forward and backward against PyTorch where it
is installed. On the GPU: the CUDA kernels in float32, bfloat16 and float16 against NumPy in float64 on the same
(rounded) inputs. Arrays are compared as a whole and element by element, as one norm of many hides a wrong one.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from cudiff.backend import is_float
from cudiff.cuda.graph import capture
from cudiff.cuda.kernels.convolution import problem
from cudiff.ops.cast import astype
from cudiff.statistics import Kind
from cudiff.tensor import Tensor

try:
    import torch
except ImportError:
    torch = None

# ‖a−b‖/‖b‖: about 10 roundings of the storage type; sums are in float32 and do not grow it.
TOLERANCE = {np.dtype(np.float32): 2e-5, np.dtype(ml_dtypes.bfloat16): 1.6e-2, np.dtype(np.float16): 2e-3}


def relative_error(actual, expected) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; infinite where a value is not finite or shapes differ."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / scale) if scale > 0 else float(np.linalg.norm(actual))


def problem_of(*given, **options) -> problem.Problem:
    """A convolution's, of operands as `fields_of` takes them."""
    return problem.problem_of(*problem.fields_of(*given, **options))


ELEMENT = 8  # times an array's root mean square: what an element's rounding may have been part of


def assert_close(actual, expected, tolerance, beside=0.0, what="the result"):
    """Hold an array as a whole to `tolerance` of its norm, and each element to that of its own size and of the array's
    root mean square. `beside`: a norm added to the array's, of what cancels in it."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, not {expected.shape}"
    assert np.isfinite(actual).all(), f"{what} has elements that are not finite, or were never written"
    norm = np.linalg.norm(expected) + beside
    error = np.abs(actual - expected)
    assert np.linalg.norm(error) <= tolerance * norm, (
        f"{what} differs by {np.linalg.norm(error):.1e}, allowed {tolerance * norm:.1e}"
    )
    allowed = tolerance * (np.abs(expected) + ELEMENT * norm / np.sqrt(max(expected.size, 1)))
    _assert_elements(error, allowed, actual, expected, what)


def _assert_elements(error, allowed, actual, expected, what):
    over = np.argwhere(error > allowed)
    if len(over):
        at = tuple(over[0])
        raise AssertionError(
            f"{what} differs at {len(over)} of {error.size} elements, first at {[int(i) for i in at]}: "
            f"{actual[at]:.9g}, not {expected[at]:.9g}, allowed {allowed[at]:.1e}"
        )


def sums_of(statistics):
    """Sums and sums of squares over an image, float64 (N, C, 2)."""
    tiles = Tensor(statistics.sums).numpy().astype(np.float64)
    if statistics.kind is Kind.CENTRED:  # around a centre
        count, centre, total, square = np.moveaxis(tiles, -1, 0)
        tiles = np.stack((total + count * centre, square + centre * (2 * total + count * centre)), -1)
    return tiles.sum(1)


def check_op(fn, *arrays, device, torch_fn=None, dtypes=("float32", "bfloat16"), fp32_inputs=(), tolerance=1.0):
    """Check `fn(*tensors) -> Tensor or tuple of Tensors` forward and backward.

    `arrays`: float64 arrays (each gets a gradient), integer arrays, or None. `torch_fn` takes the same as torch
    tensors. `fp32_inputs`: positions that stay float32 when the rest is low precision (norm weights, biases).
    `tolerance` multiplies the CUDA tolerances; give the reason where it is not 1.
    """
    if device == "cpu":
        _check_gradients(fn, arrays)
        if torch_fn is not None and torch is not None:
            _check_torch(fn, torch_fn, arrays)
    else:
        for dtype in dtypes:
            dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
            _check_cuda(fn, arrays, dtype, set(fp32_inputs), TOLERANCE[dtype] * tolerance)


def _is_float(array) -> bool:
    return array is not None and np.issubdtype(np.asarray(array).dtype, np.floating)


def _run(fn, arrays, device, douts=None, before=None, only=None):
    """Outputs and gradients as NumPy arrays; random output gradients are drawn (or given), to weigh every element.
    `before`: the gradients that the inputs have already. `only`: the one input that is to have a gradient."""
    tensors = [
        None if a is None else Tensor(a, device=device, requires_grad=only in (None, i) and (
            _is_float(a) or a.dtype == ml_dtypes.bfloat16))
        for i, a in enumerate(arrays)
    ]
    for tensor, grad in zip(tensors, before or (), strict=False):
        if grad is not None:
            tensor.grad = Tensor(grad.copy(), device=device).data
    outs = fn(*tensors)
    outs = outs if isinstance(outs, tuple) else (outs,)
    if douts is None:
        rng = np.random.default_rng(7)
        douts = [rng.standard_normal(out.shape) for out in outs]
    total = [(o, d) for o, d in zip(outs, douts, strict=True) if o.requires_grad]
    for out, dout in total:
        out.backward(Tensor(dout.astype(out.dtype), device=device).data) if len(total) == 1 else None
    if len(total) > 1:
        _weighted_sum([(o, Tensor(d.astype(o.dtype), device=device)) for o, d in total]).backward()
    grads = [None if t is None or t.grad is None else Tensor(t.grad).numpy() for t in tensors]
    return [o.numpy() for o in outs], grads, douts


def _weighted_sum(pairs):
    return sum(((out * dout).sum() for out, dout in pairs[1:]), (pairs[0][0] * pairs[0][1]).sum())


def _check_gradients(fn, arrays, step=1e-6, atol=1e-5, rtol=1e-3):
    outs, grads, douts = _run(fn, arrays, "cpu")
    for out in outs:
        assert np.isfinite(out.astype(np.float64)).all(), "the forward made a value that is not finite"
    rng = np.random.default_rng(11)
    for i, array in enumerate(arrays):
        if not _is_float(array):
            continue
        assert grads[i] is not None, f"input {i} got no gradient"
        assert grads[i].shape == array.shape, f"gradient {i} has shape {grads[i].shape}, not {array.shape}"
        count = min(array.size, 24)
        for flat in rng.choice(array.size, count, replace=False):
            values = []
            for sign in (1, -1):
                moved = [a if a is None else a.copy() for a in arrays]
                moved[i].reshape(-1)[flat] += sign * step
                values.append(
                    sum(float((o * d).sum()) for o, d in zip(_forward(fn, moved), douts, strict=True) if _is_float(o))
                )
            numeric = (values[0] - values[1]) / (2 * step)
            analytic = grads[i].reshape(-1)[flat]
            assert abs(numeric - analytic) <= atol + rtol * abs(numeric), (
                f"input {i}, element {flat}: gradient {analytic}, finite difference {numeric}"
            )


def _forward(fn, arrays):
    outs = fn(*[None if a is None else Tensor(a) for a in arrays])
    return [o.numpy() for o in (outs if isinstance(outs, tuple) else (outs,))]


def _check_torch(fn, torch_fn, arrays):
    outs, grads, douts = _run(fn, arrays, "cpu")
    leaves = [None if a is None else torch.tensor(a, requires_grad=_is_float(a)) for a in arrays]
    expected = torch_fn(*leaves)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for out, reference in zip(outs, expected, strict=True):
        error = relative_error(out, reference.detach().numpy())
        assert error < 1e-9, f"forward differs from PyTorch by {error:.1e}"
    sum((e * torch.tensor(d)).sum() for e, d in zip(expected, douts, strict=True) if e.requires_grad).backward()
    for i, leaf in enumerate(leaves):
        if leaf is not None and leaf.grad is not None:
            error = relative_error(grads[i], leaf.grad.numpy())
            assert error < 1e-8, f"gradient {i} differs from PyTorch by {error:.1e}"


def _check_cuda(fn, arrays, dtype, fp32_inputs, tolerance):
    rounded = [
        a if not _is_float(a) else a.astype(np.float32 if i in fp32_inputs else dtype) for i, a in enumerate(arrays)
    ]
    reference = [a if a is None or not _is_float(arrays[i]) else a.astype(np.float64) for i, a in enumerate(rounded)]
    outs, grads, douts = _run(fn, rounded, "cuda")
    douts = [d.astype(o.dtype).astype(np.float64) if _is_float(d) else d for o, d in zip(outs, douts, strict=True)]
    expected, expected_grads, _ = _run(fn, reference, "cpu", douts)
    for out, reference_out in zip(outs, expected, strict=True):
        assert_close(out, reference_out, tolerance, what=f"{dtype} forward")
    everything = np.sqrt(sum(np.sum(np.square(grad)) for grad in expected_grads if grad is not None))
    for i, (grad, expected_grad) in enumerate(zip(grads, expected_grads, strict=True)):
        if expected_grad is not None:
            # A gradient that cancels (a norm over two values) is held to the size of all gradients together.
            assert_close(grad, expected_grad, tolerance, 0.05 * everything, f"{dtype} gradient {i}")


def check_case(case, device, dtypes=("float32", "bfloat16"), smooth=True):
    """Hold a row of tests/ops/table.py to its meaning in float64, its gradient to differences, and each dtype on
    `device` to float64 of the same rounded numbers, all element by element.

    smooth: whether the numbers are ordinary ones, of which differences can be taken.
    """
    outs, _, douts = _run(case.fn, case.arrays, "cpu")
    expected = _tuple(case.meaning(*case.arrays))
    for out, reference, size in zip(outs, expected, _sizes(case, case.arrays, expected), strict=True):
        share = 8 * (16 + math.sqrt(case.terms)) * np.finfo(out.dtype).eps  # float32 where bytes went in
        _hold(out, reference, out.dtype, case.steps, share, size, "float64 against its meaning")
    if smooth and any(_is_float(array) for array in case.arrays):
        _check_along_a_line(case, douts)
    for dtype in dtypes:
        _check_rounded(case, device, np.dtype(getattr(ml_dtypes, dtype, None) or dtype))


def _tuple(values):
    return values if isinstance(values, tuple) else (values,)


def _sizes(case, arrays, expected):
    """What each element's terms add up to without their signs; of what is not linear the largest result, where it sums
    at all."""
    if case.linear:
        return _tuple(case.meaning(*[np.abs(array) for array in arrays]))
    return [0.0 if case.terms == 1 or not np.size(e) else np.abs(e).max() for e in expected]


def _hold(actual, expected, dtype, steps, share, size, what):
    """Within 2 units of the last place for each of `steps` roundings, and `share` of what was summed."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert np.isfinite(actual).all(), f"{what}: elements that are not finite, or were never written"
    unit = ml_dtypes.finfo(dtype)
    allowed = 2 * steps * float(unit.eps) * np.abs(expected) + share * np.abs(size) + 2 * float(unit.smallest_subnormal)
    _assert_elements(np.abs(actual - expected), np.broadcast_to(allowed, expected.shape), actual, expected, what)


def _check_along_a_line(case, douts, step=1e-6):
    """All elements of all gradients at once: the slope along a random line, which one wrong element changes."""
    _, grads, _ = _run(case.fn, case.arrays, "cpu", douts)
    if all(grad is None for grad in grads):
        return  # not differentiable
    rng = np.random.default_rng(13)
    line = [rng.choice([-1.0, 1.0], np.shape(a)) if g is not None else None
            for a, g in zip(case.arrays, grads, strict=True)]
    values = []
    for sign in (1, -1):
        moved = [a if v is None else a + sign * step * v for a, v in zip(case.arrays, line, strict=True)]
        values.append(math.fsum(np.sum(o * d) for o, d in zip(_forward(case.fn, moved), douts, strict=True)))
    numeric = (values[0] - values[1]) / (2 * step)
    terms = [grad * v for grad, v in zip(grads, line, strict=True) if v is not None]
    analytic = math.fsum(term.sum() for term in terms)
    size = max(np.abs(term).max() for term in terms if term.size)
    noise = 1e-14 * (abs(values[0]) + sum(np.abs(d).sum() for d in douts)) / step  # of the forward's own sums
    assert abs(numeric - analytic) <= 1e-4 * size + noise, f"slope along a line {numeric}, by the gradients {analytic}"


def check_adding(case, device, dtype):
    """Hold a row's gradients to be added to those that the inputs have, each element to within two roundings of the
    largest: an input that is used several times gets its terms one by one."""
    rounded = _rounded(case, np.dtype(getattr(ml_dtypes, dtype, None) or dtype))
    _, alone, douts = _run(case.fn, rounded, device)
    rng = np.random.default_rng(17)
    before = [None if g is None else rng.uniform(-2, 2, g.shape).astype(g.dtype) for g in alone]
    _, sums, _ = _run(case.fn, rounded, device, douts, before)
    for i, (own, first, total) in enumerate(zip(alone, before, sums, strict=True)):
        if own is not None:
            unit, own, first, total = ml_dtypes.finfo(own.dtype), *(a.astype(np.float64) for a in (own, first, total))
            allowed = np.full(own.shape, 2 * float(unit.eps) * (np.abs(own) + np.abs(first)).max(initial=0.0))
            _assert_elements(np.abs(total - own - first), allowed, total, own + first, f"{dtype} gradient {i}, added")


def check_alone(case, dtype):
    """Hold each of a row's gradients on the CPU to be the same where no other input has one, within two roundings."""
    rounded = _rounded(case, np.dtype(getattr(ml_dtypes, dtype, None) or dtype))
    _, together, douts = _run(case.fn, rounded, "cpu")
    for i, expected in enumerate(together):
        if expected is not None:
            _, grads, _ = _run(case.fn, rounded, "cpu", douts, only=i)
            assert [j for j, grad in enumerate(grads) if grad is not None] == [i]
            alone, eps = grads[i].astype(np.float64), float(ml_dtypes.finfo(expected.dtype).eps)
            expected = expected.astype(np.float64)
            allowed = np.full(expected.shape, 2 * eps * np.abs(expected).max(initial=0.0))
            _assert_elements(np.abs(alone - expected), allowed, alone, expected, f"{dtype} gradient {i}, alone")


def check_captured(case, dtype):
    """Hold results and gradients of a row's graph, given other numbers, to be those of a plain call, bit for bit."""
    rounded = _rounded(case, np.dtype(getattr(ml_dtypes, dtype, None) or dtype))
    others = [a if a is None else (a * 0.75).astype(a.dtype) if is_float(a.dtype) else a.ravel()[::-1].reshape(a.shape)
              for a in rounded]

    def run(*given):
        leaves = [t if t is None else Tensor(t.data, requires_grad=is_float(t.dtype)) for t in given]
        outs = case.fn(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        squares = [(astype(out, "float32") ** 2).sum() for out in outs if out.requires_grad]
        if squares:
            sum(squares[1:], squares[0]).backward()
        grads = [Tensor(leaf.grad) for leaf in leaves if leaf is not None and leaf.grad is not None]
        return *(out.detach() for out in outs), *grads

    def results(function, arrays):
        return [t.numpy().copy() for t in function(*(a if a is None else Tensor(a, device="cuda") for a in arrays))]

    captured = capture(run, warmup=1, device="cuda")
    expected = results(run, others)
    for _ in range(3):  # a plain call, one that records, a replay
        results(captured, rounded)
    for found, plain in zip(results(captured, others), expected, strict=True):
        np.testing.assert_array_equal(found, plain)


def _rounded(case, dtype):
    """A row's arrays as a GPU gets them where floats are stored in `dtype`."""
    rounded = list(case.arrays)
    for i, a in enumerate(rounded):
        if _is_float(a):
            numbers = a if i in case.fp32 and i not in case.low else a.astype(dtype)
            rounded[i] = numbers.astype(np.float32 if i in case.fp32 else dtype)
    return rounded


def _check_rounded(case, device, dtype):
    eps, rounded = float(ml_dtypes.finfo(dtype).eps), _rounded(case, dtype)
    wide = [r.astype(np.float64) if _is_float(a) else r for a, r in zip(case.arrays, rounded, strict=True)]
    outs, grads, douts = _run(case.fn, rounded, device)
    douts = [d.astype(o.dtype).astype(np.float64) for o, d in zip(outs, douts, strict=True)]
    expected, wide_grads, _ = _run(case.fn, wide, "cpu", douts)
    share = 8 * (2 + math.sqrt(case.terms)) * float(np.finfo(np.float32).eps)
    between = share + (2 * case.steps * eps if case.steps > 1 else 0.0)
    for out, reference, size in zip(outs, expected, _sizes(case, wide, expected), strict=True):
        _hold(out, reference, out.dtype, case.steps, between, size, f"{dtype} on {device}")
    largest = max((np.abs(grad).max() for grad in wide_grads if grad is not None and grad.size), default=0.0)
    for i, (grad, reference) in enumerate(zip(grads, wide_grads, strict=True)):
        if reference is not None and reference.size:
            # What a backward reads may have been rounded once: of each term two units. Of several steps a gradient's
            # terms may cancel (attention to one key), and are as large as another's.
            size = largest if case.steps > 1 else np.abs(reference).max()
            _hold(grad, reference, dtype, 2 * case.steps, between + 2 * eps, size, f"{dtype} gradient {i} on {device}")


def check_needed(op, arrays, needed, device) -> None:
    """Where only some inputs want a gradient, these get the same float32 numbers as beside all others."""
    every, some = (
        [Tensor(array.astype(np.float32), device=device, requires_grad=i in wanted) for i, array in enumerate(arrays)]
        for wanted in (range(len(arrays)), needed)
    )
    for tensors in (every, some):
        out = op(*tensors)
        out.backward(out.data)
    for i, (one, other) in enumerate(zip(every, some, strict=True)):
        if i in needed:
            np.testing.assert_array_equal(Tensor(one.grad).numpy(), Tensor(other.grad).numpy())
        else:
            assert other.grad is None
