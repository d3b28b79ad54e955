"""Attention's backward in one pass, beside the gradients that NumPy computes."""

import numpy as np
import pytest

from cudiff import Tensor, attention
from cudiff.cuda.kernels.attention import backward_sm90, problem, table
from tests.check import TOLERANCE, assert_close, relative_error


def gradients(rng, images, queries, keys, heads, dim, dtype, shift=0.0, sums=None):
    """dq, dk and dv of two runs, poisoned before, and those of NumPy in float64.

    shift: what is added to keys, and taken from queries."""
    shapes = [(images, tokens, heads, dim) for tokens in (queries, keys, keys, queries)]
    q, k, v, dout = (Tensor(rng.standard_normal(shape) + plus, dtype=dtype, device="cuda", requires_grad=True)
                     for shape, plus in zip(shapes, (-shift, shift, 0, 0), strict=True))
    out = attention(q, k, v)
    node, _ = out._source
    lse = node.ctx.saved[4]
    found = []
    for _ in range(2):
        grads = [Tensor(np.full(shape, np.nan), dtype=dtype, device="cuda") for shape in shapes[:3]]
        asked = problem.Problem(True, q.dtype, images, queries, keys, heads, dim, aligned=True, products=1)
        given = problem.Backward(*(x.data for x in (*grads, dout, q, k, v)), out.data.reshape(shapes[0]), lse, sums)
        backward_sm90.backward(given, None, asked)
        found.append([x.numpy() for x in grads])
    wide = [Tensor(x.numpy().astype(np.float64), requires_grad=True) for x in (q, k, v)]
    attention(*wide).backward(dout.numpy().astype(np.float64).reshape(images, queries, -1))
    return *found, [x.grad for x in wide]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [40, 64, 72, 80, 88, 96, 104, 128])
@pytest.mark.parametrize("images, queries, keys, heads", [
    (2, 256, 256, 3), (1, 200, 200, 2), (1, 1, 129, 1), (1, 65, 300, 2), (2, 700, 70, 1), (1, 130, 513, 3),
])
def test_gradients(hopper, rng, dim, images, queries, keys, heads):
    """Odd numbers of tokens; more steps than blocks of a head, and fewer; odd heads, which begin within a sector."""
    for dtype in ("bfloat16", "float16") if images == 2 else ("bfloat16",):
        found, again, expected = gradients(rng, images, queries, keys, heads, dim, dtype)
        for a, b, c in zip(found, again, expected, strict=True):
            assert_close(a, c, TOLERANCE[a.dtype])
            assert a.tobytes() == b.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_blocks_of_several_heads(hopper, rng, monkeypatch, dim):
    """Fewer multiprocessors than the blocks of all heads."""
    monkeypatch.setattr(backward_sm90, "multiprocessors", lambda: 5)
    found, again, expected = gradients(rng, 2, 200, 190, 3, dim, "bfloat16")
    for a, b, c in zip(found, again, expected, strict=True):
        assert_close(a, c, TOLERANCE[a.dtype])
        assert a.tobytes() == b.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("left", [1, 2])
def test_turns_of_a_launch_before_do_not_count(hopper, rng, monkeypatch, left):
    """Memory is used again: it may say that the first blocks have added their parts."""
    make = backward_sm90.empty

    def empty(shape, dtype):
        array = make(shape, dtype)
        if dtype == np.uint32:
            array.fill(left)
        return array

    monkeypatch.setattr(backward_sm90, "empty", empty)
    found, again, expected = gradients(rng, 2, 130, 513, 2, 64, "bfloat16")
    for a, b, c in zip(found, again, expected, strict=True):
        assert_close(a, c, TOLERANCE[a.dtype])
        assert a.tobytes() == b.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_keys_that_are_missing_have_no_weight_where_all_scores_are_low(hopper, rng, dim):
    """Missing keys are zeros, whose score of 0 would be far above the others: a weight of infinity, times 0."""
    found, _, expected = gradients(rng, 1, 130, 191, 1, dim, "bfloat16", shift=6.0)
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a.astype(float)).all() and relative_error(a.astype(float), b) < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [40, 72, 96, 128])
@pytest.mark.parametrize("tokens", [130, 200, 256])
def test_sums_of_the_gradients(hopper, rng, dim, tokens):
    """Over tiles of 64 tokens, of what was stored."""
    tiles = -(-tokens // 64)
    sums = [Tensor(np.full((2, tiles, 3, dim), np.nan, np.float32), device="cuda") for _ in range(3)]

    def asked(count):
        assert count == tiles
        return [x.data for x in sums]

    found, _, _ = gradients(rng, 2, tokens, tokens, 3, dim, "bfloat16", sums=asked)
    for total, grad in zip(sums, found, strict=True):
        padded = np.zeros((2, 64 * tiles, 3, dim))
        padded[:, :tokens] = grad
        assert relative_error(total.numpy(), padded.reshape(2, tiles, 64, 3, dim).sum(2)) < 1e-5


LONG = problem.Problem(True, np.dtype(np.float16), 2, 4096, 4096, 16, 64, aligned=True, products=1,
                       wanted=frozenset({problem.SUMS}))


@pytest.mark.parametrize("changes, served", [
    ({}, True), ({"dim": 128}, True), ({"dim": 40}, True), ({"dim": 32}, False), ({"dim": 136}, False),
    ({"images": 8, "queries": 1024, "keys": 1024, "dim": 128}, True),
    ({"images": 256, "queries": 256, "keys": 256, "heads": 12}, False), ({"masked": True}, False),
    ({"aligned": False}, False), ({"dtype": np.dtype(np.float32)}, False), ({"backward": False}, False),
    ({"queries": 132 * 128, "keys": 132 * 128, "dim": 128}, True),
    ({"queries": 132 * 128, "keys": 132 * 128 + 1, "dim": 128}, False), ({"queries": 8192, "keys": 1024}, True),
    ({"images": 15, "queries": 200, "keys": 132 * 128, "heads": 6, "dim": 80}, False),
    ({"images": 32, "queries": 256, "keys": 256, "heads": 4, "dim": 96}, True),
    ({"images": 32, "queries": 256, "keys": 255, "heads": 4, "dim": 96}, False), ({"queries": 1, "keys": 1}, False),
])
def test_when_it_is_chosen(monkeypatch, changes, served):
    """Of many blocks of keys not all could be there at once, and of few queries they would wait for turns."""
    monkeypatch.setattr(backward_sm90, "multiprocessors", lambda: 132)
    offer = backward_sm90.offer_backward(LONG._replace(**changes))
    assert (offer is not None) == served
    if served:
        assert offer.fused == LONG.wanted
        asked = LONG._replace(**changes)
        assert table.ATTENTION.select(asked, "sm_90a").row.name == "attention_backward_sm90.backward"
        assert table.ATTENTION.select(asked, "sm_80").row.name == "attention.backward_q, backward_kv"


@pytest.mark.parametrize("dim", [40, 64, 72, 88, 128])
@pytest.mark.parametrize("queries, keys, images", [(4096, 4096, 2), (1, 700, 1), (130, 129, 40), (100, 132 * 128, 1)])
def test_every_launch_fits(monkeypatch, queries, keys, images, dim):
    """Blocks that wait for each other on an H200's 132 multiprocessors, of 227 KiB of shared memory each."""
    found = {}

    def launch(stem, name, grid, threads, args, shared=0, **constants):
        found[name] = grid, threads, shared, constants

    monkeypatch.setattr(backward_sm90, "multiprocessors", lambda: 132)
    monkeypatch.setattr(backward_sm90, "launch", launch)
    monkeypatch.setattr(backward_sm90, "empty", np.empty)
    monkeypatch.setattr(backward_sm90, "tile_map", lambda *args: None)
    q, k = (np.zeros((images, tokens, 3, dim), np.float16) for tokens in (queries, keys))
    lse = np.zeros((images, 3, queries), np.float32)
    asked = LONG._replace(images=images, queries=queries, keys=keys, heads=3, dim=dim)
    backward_sm90.backward(problem.Backward(q, k, k, q, q, k, k, q, lse, None), None, asked)
    grid, threads, shared, constants = found["backward"]
    of_head = -(-keys // 128)
    assert grid % of_head == 0 and grid <= 132 and grid // of_head <= 3 * images and threads == 384
    assert shared <= 227 << 10 and constants["cooperative"] and constants["DP"] >= dim
    assert found["delta"][0] == (2 * -(-queries // 128), 3, images)
    assert found["finish"][0] == (-(-queries // 64), 3, images)
