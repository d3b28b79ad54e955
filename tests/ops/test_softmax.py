import sys

import numpy as np
import pytest

from cudiff.ops.softmax import cross_entropy, log_softmax, nll_loss, softmax
from cudiff.tensor import Tensor
from tests.check import check_op, torch

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = [(3, 10), (1, 1), (2, 3, 5, 7), (5, 33), (2, 2000), (4, 8192), (300, 64), (257, 1), (130, 2), (70, 17),
          (9, 256), (5, 257), (1, 33_000)]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(device, rng, shape, log):
    ours, theirs = (log_softmax, "log_softmax") if log else (softmax, "softmax")
    check_op(
        ours, rng.standard_normal(shape) * 3, device=device, dtypes=DTYPES,
        torch_fn=lambda x: getattr(torch, theirs)(x, -1),
    )


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("shape, axis", [
    ((3, 4, 5), 0), ((3, 4, 5), 1), ((3, 4, 5), -2), ((2, 1, 3), 1), ((1031, 3), 0), ((70, 33, 2), 1), ((4, 99, 65), 1),
    ((2050, 40), 0),
])
def test_other_axes(device, rng, shape, axis, log):
    ours, theirs = (log_softmax, "log_softmax") if log else (softmax, "softmax")
    check_op(
        lambda x: ours(x, axis), rng.standard_normal(shape) * 3, device=device, dtypes=DTYPES,
        torch_fn=lambda x: getattr(torch, theirs)(x, axis),
    )


@pytest.mark.parametrize("before", [0, 1, 200])
def test_large_and_infinite_values(device, before):
    """Also where the first that a thread reads are infinite."""
    x = np.array([-np.inf] * before + [1000.0, 999.0, -np.inf], np.float32)
    expected = np.array([0.0] * before + [1.0, np.exp(-1.0), 0.0]) / (1 + np.exp(-1.0))
    for axis in (0, 1):
        found = softmax(Tensor(np.expand_dims(x, 1 - axis), device=device), axis)
        np.testing.assert_allclose(found.numpy().reshape(-1), expected, rtol=1e-5)


def test_a_row_without_a_number(device):
    """Is NaN, as PyTorch's: of minus infinity alone, and with a NaN or infinity in it."""
    for row in (np.full(5, -np.inf), np.array([0.0, np.nan]), np.array([np.inf, 0.0])):
        x = Tensor(np.stack((row, np.zeros_like(row))).astype(np.float32), device=device)
        with np.errstate(invalid="ignore"):
            found = softmax(x).numpy()
        assert np.isnan(found[0]).any() and np.isfinite(found[1]).all()


@pytest.mark.parametrize("n, classes", [(1, 1), (4, 10), (33, 7), (1500, 10), (3, 1000)])
def test_cross_entropy(device, rng, n, classes):
    labels = rng.integers(0, classes, n).astype(np.int32)
    check_op(
        cross_entropy, rng.standard_normal((n, classes)) * 2 + 1, labels, device=device,  # underflows in float16
        torch_fn=lambda x, labels: torch.nn.functional.cross_entropy(x, labels.long()),
    )


@pytest.mark.parametrize("size", [1, 7, 33, 200])
def test_blocks_of_many_short_rows(device, rng, monkeypatch, size):
    """As a GPU has of a million rows."""
    monkeypatch.setattr(sys.modules[softmax.__module__], "multiprocessors", lambda: 1)
    rows = 4 * 8192 // size + 5
    x, labels = rng.standard_normal((rows, size)), rng.integers(0, size, rows).astype(np.int32)
    check_op(softmax, x, device=device, torch_fn=lambda x: x.softmax(-1), dtypes=("float32", "bfloat16"))
    check_op(cross_entropy, x, labels, device=device,
             torch_fn=lambda x, labels: torch.nn.functional.cross_entropy(x, labels.long()))
    x = Tensor(x, dtype="float32", device=device, requires_grad=True)
    out = softmax(x) + x.reshape(size, rows).T.reshape(rows, size) * 2
    out.backward(Tensor(np.ones(out.shape, np.float32), device=device).data)
    np.testing.assert_allclose(Tensor(x.grad).numpy(), 2, atol=1e-5)  # softmax's own is 0, added to what is there


def test_cross_entropy_is_float32(device, rng):
    logits = Tensor(rng.standard_normal((4, 3)).astype(np.float16), device=device)
    loss = cross_entropy(logits, Tensor(np.zeros(4, np.int32), device=device))
    assert loss.dtype == np.float32 and loss.shape == ()


@pytest.mark.parametrize("smoothing, ignored", [(0.1, None), (0.0, -100), (0.3, 2), (1.0, -1)])
def test_smooth_and_ignored_labels(device, rng, smoothing, ignored):
    """Beside their formula, and beside PyTorch's where it is there."""
    labels = rng.integers(0, 5, 33).astype(np.int32)
    if ignored is not None:
        labels[::3] = ignored
    kept = np.ones(33, bool) if ignored is None else labels != ignored
    logits = rng.standard_normal((33, 5)) * 2 + 1
    check_op(
        lambda x: cross_entropy(x, Tensor(labels, device=x.device), smoothing, ignored), logits, device=device,
        torch_fn=lambda x: torch.nn.functional.cross_entropy(
            x, torch.tensor(labels).long(), label_smoothing=smoothing, ignore_index=-100 if ignored is None else ignored
        ),
    )
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    targets = (1 - smoothing) * np.eye(5)[labels[kept]] + smoothing / 5
    found = cross_entropy(Tensor(logits, dtype="float32", device=device), labels, smoothing, ignored)
    np.testing.assert_allclose(found.item(), -(log_p[kept] * targets).sum() / kept.sum(), rtol=1e-5)


@pytest.mark.parametrize("ignored", [None, 2])
def test_nll_loss(device, rng, ignored):
    """It is cross_entropy of log_softmax, and PyTorch's."""
    labels, logits = rng.integers(0, 5, 33).astype(np.int32), rng.standard_normal((33, 5))
    check_op(
        lambda x: nll_loss(x, Tensor(labels, device=x.device), ignored), logits, device=device,
        torch_fn=lambda x: torch.nn.functional.nll_loss(
            x, torch.tensor(labels).long(), ignore_index=-100 if ignored is None else ignored
        ),
    )
    x = Tensor(logits, dtype="float32", device=device)
    expected = cross_entropy(x, labels, ignore_index=ignored).item()
    np.testing.assert_allclose(nll_loss(log_softmax(x), labels, ignored).item(), expected, rtol=1e-6)


def test_classes_that_are_impossible(device):
    """A logit of minus infinity at a class that no label names counts for nothing."""
    logits = Tensor(np.float32([[0, -np.inf, 0]]), requires_grad=True, device=device)
    for loss in (cross_entropy(logits, [0]), cross_entropy(logits, [0], ignore_index=1), nll_loss(logits - 0.5, [0])):
        assert np.isfinite(loss.item())
        logits.grad = None
        loss.backward()
        assert np.isfinite(Tensor(logits.grad).numpy()).all()
    assert cross_entropy(logits, [1], 0.0, 2).item() == np.inf


def test_what_smooth_labels_refuse(device):
    logits = Tensor(np.zeros((2, 3), np.float32), device=device)
    for share in (-0.1, 1.5, np.ones(3), Tensor([0.5])):
        with pytest.raises(ValueError, match="label_smoothing is a share from 0 to 1, not"):
            cross_entropy(logits, [0, 1], share)
    if device == "cuda":
        assert np.isnan(cross_entropy(logits, [0, 3], 0.1, -1).item())
    else:
        with pytest.raises(ValueError, match="outside 0 to 2"):
            cross_entropy(logits, [0, 3], 0.1, -1)
    assert np.isnan(cross_entropy(logits, [2, 2], ignore_index=2).item())


def test_label_outside(device, rng):
    logits, labels = (Tensor(a, device=device) for a in (np.zeros((2, 3), np.float32), np.array([0, 3], np.int32)))
    if device == "cuda":
        assert np.isnan(cross_entropy(logits, labels).item())
    else:
        with pytest.raises(ValueError, match="outside 0 to 2"):
            cross_entropy(logits, labels)


def test_shapes_that_do_not_fit():
    for loss in (cross_entropy, nll_loss):
        with pytest.raises(ValueError, match=rf"{loss.__name__}: rows \(2, 3\) must be \(N, K\)"):
            loss(Tensor(np.zeros((2, 3))), Tensor(np.zeros(3, np.int32)))
    with pytest.raises(TypeError, match="labels and indices are integers, not float64"):
        cross_entropy(Tensor(np.zeros((2, 3))), Tensor(np.zeros(2)))


def test_integers_become_float32(device):
    x = np.array([[0, 1], [3, 2]], np.int32)
    for function in (softmax, log_softmax):
        out, expected = (function(Tensor(values, device=device)) for values in (x, x.astype(np.float32)))
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out.numpy(), expected.numpy())


@pytest.mark.parametrize("size", [3, 33, 257, 1031])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_logits_very_negative(device, rng, size, dtype):
    """A maximum that starts at 0 instead of -inf leaves only zeros to divide."""
    near = rng.integers(-20, 1, (3, size)) * 64.0  # steps that bfloat16 has at -8192
    for function in (softmax, log_softmax):
        far, expected = (function(Tensor(x, dtype=dtype, device=device)).numpy() for x in (near - 8192, near))
        assert np.isfinite(far.astype(np.float64)).all()
        np.testing.assert_array_equal(far, expected)
    labels = Tensor(np.zeros(3, np.int32), device=device)
    far, expected = (cross_entropy(Tensor(x, dtype=dtype, device=device), labels).item() for x in (near - 8192, near))
    assert far == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_axes_are_counted_from_either_end():
    x = Tensor(np.float32([[0, 1], [2, 4]]))
    np.testing.assert_array_equal(softmax(x, -2).numpy(), softmax(x, 0).numpy())
    for axis in (2, -3):
        with pytest.raises(ValueError, match="out of range"):
            softmax(x, axis)


@pytest.mark.parametrize("shape, axis", [((0, 3), -1), ((3, 0), -1), ((0, 3), 0)])
def test_of_no_elements(device, shape, axis):
    x = Tensor(np.zeros(shape, np.float32), device=device, requires_grad=True)
    for function in (softmax, log_softmax):
        out = function(x, axis)
        assert out.shape == shape
        out.sum().backward()
        assert x.grad.shape == shape
