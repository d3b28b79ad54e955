"""attention against PyTorch: both channel orders, odd sizes, long sequences, extreme scores, reproducibility."""

import ml_dtypes
import numpy as np
import pytest

import cudiff
from cudiff import Tensor, attention, attention_qkv, linear, threads
from cudiff.backend import to_device
from cudiff.cuda.kernels.attention import table
from cudiff.cuda.kernels.attention.mask import pack
from cudiff.precision import allow_tf32
from tests.check import check_op, relative_error, torch

# (N, T, heads, D): tiny, odd, the networks' own, and one of every padded width
SHAPES = [
    (1, 1, 1, 8), (2, 3, 2, 4), (1, 17, 1, 1), (2, 49, 3, 32), (1, 65, 2, 40), (2, 64, 4, 64), (1, 130, 2, 24),
    (1, 33, 1, 128), (1, 20, 2, 72), (1, 129, 1, 7), (2, 256, 6, 32), (1, 196, 2, 96),
    (1, 131, 4, 56), (1, 70, 3, 88), (2, 33, 2, 120),
]  # fmt: skip


def torch_attention(q, k, v):
    out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2).flatten(2)


def torch_qkv(qkv, heads, new_order):
    n, t, _ = qkv.shape
    if new_order:
        return torch_attention(*qkv.reshape(n, t, 3, heads, -1).unbind(2))
    return torch_attention(*qkv.reshape(n, t, heads, 3, -1).unbind(3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("new_order", [False, True])
def test_qkv(device, rng, shape, new_order):
    n, t, heads, dim = shape
    check_op(
        lambda qkv: attention_qkv(qkv, heads, new_order), rng.standard_normal((n, t, 3 * heads * dim)), device=device,
        torch_fn=lambda qkv: torch_qkv(qkv, heads, new_order), dtypes=("float32", "bfloat16", "float16"),
    )



@pytest.mark.parametrize("masked", [False, True])
def test_images_in_parts_have_the_same_bits(monkeypatch, rng, masked):
    """Each core takes some of the images."""
    arrays = [rng.standard_normal((5, 9, 3, 8)).astype(np.float32) for _ in range(3)]
    dout, mask = rng.standard_normal((5, 9, 24)).astype(np.float32), rng.random((5, 1, 9, 9)) < 0.5

    def run():
        inputs = [Tensor(array, requires_grad=True) for array in arrays]
        out = attention(*inputs, mask=mask if masked else None)
        out.backward(dout)
        return out.numpy(), *(x.grad for x in inputs)

    expected = run()
    monkeypatch.setattr(threads, "LEAST_BYTES", 1)
    monkeypatch.setattr(threads, "PART_BYTES", 1)
    for found, before in zip(run(), expected, strict=True):
        np.testing.assert_array_equal(found, before)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 49, 3, 32), (3, 64, 2, 24), (2, 77, 2, 8), (2, 256, 6, 32), (1, 130, 1, 16)])
@pytest.mark.parametrize("new_order", [False, True])
def test_the_gradient_of_qkv_brings_its_sums(hopper, rng, shape, new_order):
    """Where one launch makes it; a linear layer before takes its bias's gradient from them."""
    n, t, heads, dim = shape
    qkv = Tensor(rng.standard_normal((n, t, 3 * heads * dim)), requires_grad=True, dtype="bfloat16", device="cuda")
    dout = Tensor(rng.standard_normal((n, t, heads * dim)), dtype="bfloat16", device="cuda")
    node, _ = attention_qkv(qkv, heads, new_order)._source
    dqkv, _ = node.function.backward_cuda(node.ctx, dout.data, needs=(True, False), into=(None, None))
    sums, expected = (Tensor(x).numpy().astype(np.float64).sum(1) for x in (node.ctx.din_statistics[0].sums, dqkv))
    rounding = 0.01 * np.abs(Tensor(dqkv).numpy().astype(np.float64)).max() * np.sqrt(t)
    assert np.abs(sums - expected).max() < rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 64, 7])
def test_more_images_than_a_launch_takes(rng, monkeypatch, dim):
    """Several launches give what one gives, and the sums that the linear layer before takes."""
    values, dout = rng.standard_normal((5, 70, 3 * 2 * dim)), rng.standard_normal((5, 70, 2 * dim))

    def run():
        layer = Tensor(np.eye(6 * dim), requires_grad=True, dtype="bfloat16", device="cuda")
        bias = Tensor(np.zeros(6 * dim), requires_grad=True, dtype="float32", device="cuda")
        x = Tensor(values, requires_grad=True, dtype="bfloat16", device="cuda")
        out = attention_qkv(linear(x, layer, bias), 2)
        out.backward(Tensor(dout, dtype="bfloat16", device="cuda").data)
        return [Tensor(array).numpy() for array in (out.data, x.grad, layer.grad, bias.grad)]

    whole = run()
    monkeypatch.setattr(table, "MOST_ACROSS", 2)
    for one, parts in zip(whole, run(), strict=True):
        np.testing.assert_array_equal(one, parts)


@pytest.mark.parametrize("tq, tk", [(1, 2), (5, 70), (70, 5), (129, 64), (256, 77), (1, 300), (500, 301)])
@pytest.mark.parametrize("dim", [16, 33, 64])
def test_separate(device, rng, tq, tk, dim):
    q, k, v = (rng.standard_normal((2, t, 2, dim)) for t in (tq, tk, tk))
    check_op(attention, q, k, v, device=device, torch_fn=torch_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64])
def test_long_sequence(rng, dim):
    """4096 tokens: an error that grows with their number would be seen."""
    qkv = rng.standard_normal((1, 4096, 3 * dim)).astype(np.float32)
    leaf = Tensor(qkv.astype(np.float64), requires_grad=True)
    dout = rng.standard_normal((1, 4096, dim)).astype(np.float32)
    expected = attention_qkv(leaf, 1)
    expected.backward(dout.astype(np.float64))
    for dtype, tf32, tolerance in [("float32", False, 1e-5), ("float32", True, 3e-3), ("bfloat16", False, 3e-2)]:
        dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        x = Tensor(qkv.astype(dtype), requires_grad=True, device="cuda")
        with allow_tf32(tf32):
            out = attention_qkv(x, 1)
        out.backward(Tensor(dout.astype(dtype), device="cuda"))
        assert relative_error(out.numpy(), expected.numpy()) < tolerance
        assert relative_error(Tensor(x.grad).numpy(), leaf.grad) < tolerance


def test_large_scores_do_not_overflow(device, rng):
    qkv = 100 * rng.standard_normal((1, 40, 48))
    out = attention_qkv(Tensor(qkv.astype(np.float32), requires_grad=True, device=device), 2)
    out.backward(Tensor(np.ones(out.shape, np.float32), device=device))
    assert np.isfinite(out.numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_are_equal(rng, dtype):
    qkv = rng.standard_normal((4, 256, 3 * 192)).astype(getattr(ml_dtypes, dtype, dtype))
    dout = Tensor(rng.standard_normal((4, 256, 192)).astype(qkv.dtype), device="cuda")
    results = []
    for _ in range(2):
        x = Tensor(qkv, requires_grad=True, device="cuda")
        out = attention_qkv(x, 6)
        out.backward(dout)
        results.append((out.numpy().tobytes(), Tensor(x.grad).numpy().tobytes()))
    assert results[0] == results[1]


def test_an_image_does_not_depend_on_the_batch(device, rng):
    qkv = rng.standard_normal((3, 49, 96)).astype(np.float32)
    whole = attention_qkv(Tensor(qkv, device=device), 2).numpy()
    alone = attention_qkv(Tensor(qkv[1:2], device=device), 2).numpy()
    np.testing.assert_allclose(whole[1:2], alone, rtol=1e-5, atol=1e-6)


def test_tokens_of_an_image(device, rng):
    """They are read row by row, wherever an image's axes are; the gradient and its sums come in the input's shape."""
    qkv, dout = (rng.standard_normal((2, 6, 8, c)).astype(ml_dtypes.bfloat16) for c in (96, 32))
    results = []
    for tokens in ((6, 8), (48,)):
        x = Tensor(qkv.reshape(2, *tokens, 96), requires_grad=True, device=device)
        out = attention_qkv(x, 2)
        assert out.shape == (2, *tokens, 32)
        out.backward(Tensor(dout.reshape(out.shape), device=device))
        assert x.grad.shape == x.shape
        results.append((out.numpy().ravel(), Tensor(x.grad).numpy().ravel()))
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))


def test_bad_shapes():
    def zeros(*shape):
        return Tensor(np.zeros(shape, np.float32))

    with pytest.raises(ValueError, match="Tk"):
        attention(zeros(1, 2, 3, 8), zeros(1, 2, 2, 8), zeros(1, 2, 2, 8))
    with pytest.raises(ValueError, match="multiple of 4 heads"):
        attention_qkv(zeros(1, 2, 30), 4)


@pytest.mark.parametrize("keys", [2, 17, 33, 65, 129, 193, 257])
@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_key_beyond_a_whole_tile(device, rng, keys, dim, dtype):
    """The last key alone matters: every query is to return its value, and its gradient is the sum of all dout."""
    q, k = np.full((2, 3, 2, dim), 4.0), np.zeros((2, keys, 2, dim))
    k[:, -1] = 4.0
    v = rng.integers(-8, 8, k.shape) / 8
    q, k, v = (Tensor(x, requires_grad=True, dtype=dtype, device=device) for x in (q, k, v))
    out = attention(q, k, v)
    expected = np.repeat(v.numpy()[:, -1:], 3, 1).reshape(out.shape)
    np.testing.assert_allclose(out.numpy().astype(float), expected.astype(float), atol=1e-2)
    out.backward(Tensor(np.ones(out.shape), dtype=dtype, device=device).data)
    dv = Tensor(v.grad).numpy().astype(float)
    np.testing.assert_allclose(dv[:, -1], 3, rtol=1e-2)
    np.testing.assert_allclose(dv[:, :-1], 0, atol=1e-2)


def test_no_channels_are_refused():
    with pytest.raises(ValueError, match="multiple of 2 heads"):
        attention_qkv(Tensor(np.zeros((1, 2, 0), np.float32)), 2)


def masks(kind, rng, n, heads, tq, tk):
    """(.., Tq, Tk) of bools by their kind."""
    if kind == "causal":
        return np.tri(tq, tk, dtype=bool)
    if kind == "window":  # far pairs do not attend: whole tiles between others
        return np.abs(np.arange(tq)[:, None] - np.arange(tk)) < 20
    if kind == "padding":  # keys beyond each image's own number
        return np.arange(tk) < rng.integers(1, tk + 1, (n, 1, 1, 1))
    if kind == "by head":
        return rng.uniform(size=(1, heads, tq, tk)) < 0.5
    return rng.uniform(size=(n, heads, tq, tk)) < 0.05  # few: many queries attend to no key


def torch_masked(mask):
    def masked(q, k, v):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        none = torch.tensor(~mask.any(-1, keepdims=True))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=torch.tensor(mask) | none)
        return torch.where(none, torch.zeros_like(out), out).transpose(1, 2).flatten(2)

    return masked


@pytest.mark.parametrize("kind", ["causal", "window", "padding", "by head", "few"])
@pytest.mark.parametrize("tq, tk, dim", [(5, 7, 8), (70, 70, 24), (130, 208, 32), (65, 129, 7), (200, 130, 64),
                                         (150, 140, 96), (129, 70, 128), (70, 40, 136)])
def test_masked(device, rng, kind, tq, tk, dim):
    q, k, v = (rng.standard_normal((2, t, 3, dim)) for t in (tq, tk, tk))
    mask = masks(kind, rng, 2, 3, tq, tk)
    check_op(lambda q, k, v: attention(q, k, v, mask), q, k, v, device=device, torch_fn=torch_masked(mask),
             dtypes=("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("kind", ["causal", "window", "few"])
def test_masked_tokens_of_many_tiles(device, rng, kind):
    """More than eight tiles each way, whose states are read together."""
    q, k, v = (rng.standard_normal((1, t, 1, 8)) for t in (600, 700, 700))
    mask = masks(kind, rng, 1, 1, 600, 700)
    check_op(lambda q, k, v: attention(q, k, v, mask), q, k, v, device=device, torch_fn=torch_masked(mask),
             dtypes=("float32", "bfloat16"))


@pytest.mark.parametrize("new_order", [False, True])
@pytest.mark.parametrize("t, dim", [(70, 24), (9, 136)])
def test_masked_qkv(device, rng, new_order, t, dim):
    """Read in place, and of the tokens of an image in rows."""
    mask = masks("causal", rng, 2, 2, t, t)

    def theirs(qkv):
        shape = (2, t, 3, 2, dim) if new_order else (2, t, 2, 3, dim)
        return torch_masked(mask)(*qkv.reshape(shape).unbind(2 if new_order else 3)).reshape(2, 1, t, 2 * dim)

    check_op(lambda qkv: attention_qkv(qkv, 2, new_order, mask), rng.standard_normal((2, 1, t, 6 * dim)), device=device,
             torch_fn=theirs, dtypes=("float32", "bfloat16"))


def test_a_query_that_attends_to_no_key(device, rng):
    """It gives 0, and its gradient spoils no other's: of padded texts such rows are common."""
    mask = np.ones((70, 70), bool)
    mask[[0, 3, 69]] = False
    x = Tensor(rng.standard_normal((1, 70, 48)), dtype="float32", device=device, requires_grad=True)
    out = attention_qkv(x, 2, mask=mask)
    out.backward(Tensor(np.ones(out.shape, np.float32), device=device).data)
    assert (out.numpy()[0, [0, 3, 69]] == 0).all() and (out.numpy()[0, 1] != 0).all()
    assert np.isfinite(Tensor(x.grad).numpy()).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_of_each_image_in_several_launches(rng, monkeypatch, dtype):
    values = rng.standard_normal((3, 5, 70, 2, 16))
    q, k, v = (Tensor(x, dtype=dtype, device="cuda", requires_grad=True) for x in values)
    mask = masks("few", rng, 5, 1, 70, 70)
    found = []
    for most in (5, 2):
        monkeypatch.setattr(table, "MOST_ACROSS", most)
        out = attention(q, k, v, mask)
        q.grad = k.grad = v.grad = None
        out.backward(Tensor(np.ones(out.shape), dtype=dtype, device="cuda").data)
        found.append([out.numpy(), *(Tensor(x.grad).numpy() for x in (q, k, v))])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["whole", "shifted", "one row", "one column"])
@pytest.mark.parametrize("queries, keys", [(1, 1), (64, 64), (65, 80), (63, 1), (3, 77), (130, 592), (9, 16)])
def test_a_packed_mask(rng, layout, queries, keys):
    """The kernel sees which rows can be read in packs."""
    rows, columns = (1 if layout == "one row" else queries), (1 if layout == "one column" else keys)
    given = rng.uniform(size=(2, 3, rows, columns)) < rng.choice([0.0, 0.5, 1.0], (2, 3, 1, 1))
    given[..., 64:128] = True
    first = int(layout == "shifted")
    mask = to_device(np.append(np.ones(first, bool), given), "cuda")[first:].reshape(given.shape)
    bits, states = (to_device(array, "cpu") for array in pack(mask, queries, keys))
    down, across = -queries % 64, -keys % 64
    attends = np.pad(np.broadcast_to(given, (2, 3, queries, keys)), ((0, 0), (0, 0), (0, down), (0, across)))
    exist = np.pad(np.ones((queries, keys), bool), ((0, down), (0, across)))
    found = np.unpackbits(bits.view(np.uint8), bitorder="little").reshape(2, 3, -1, queries + down, 64)
    np.testing.assert_array_equal(found.swapaxes(2, 3).reshape(attends.shape), attends)
    tiles = (2, 3, (queries + down) // 64, 64, (keys + across) // 64, 64)
    none, every = (x.reshape(tiles).all((3, 5)) for x in (~attends, attends == exist))
    state = np.where(none, 0, np.where(every, 2, 1))
    both = [np.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % 8))) for x in (state, state.swapaxes(2, 3))]
    np.testing.assert_array_equal(states, np.concatenate([x.reshape(2, 3, -1) for x in both], 2))


def test_bad_masks(device, rng):
    q, k, v = (Tensor(rng.standard_normal((2, t, 2, 8)), dtype=np.float32, device=device) for t in (5, 7, 7))
    with pytest.raises(TypeError, match="the mask is bool"):
        attention(q, k, v, np.zeros((5, 7), np.float32))
    with pytest.raises(TypeError, match="the mask is bool, True where a query sees a key, not float64"):
        attention(q, k, v, np.tri(5, 7))
    for shape in ((7, 5), (3, 1, 5, 7), (1, 1, 1, 5, 7)):
        with pytest.raises(ValueError, match=r"does not broadcast to \(N, heads, Tq, Tk\) \(2, 2, 5, 7\)"):
            attention(q, k, v, np.zeros(shape, bool))
    with pytest.raises(ValueError, match=r"does not broadcast to \(N, heads, Tq, Tk\) \(1, 2, 5, 5\)"):
        attention_qkv(Tensor(np.zeros((1, 5, 48), np.float32)), 2, mask=np.ones((7, 7), bool))


@pytest.mark.parametrize("mask", [None, np.tri(4, dtype=bool)])
def test_a_gradient_of_the_gradient(rng, mask):
    x, towards = rng.standard_normal((2, 1, 4, 12))

    def slope(x):
        return (cudiff.grad(lambda x: (attention_qkv(x, 2, mask=mask) ** 2).sum())(x) * towards).sum()

    cudiff.check_gradient(slope, x)
