"""What attention's Hopper kernels are given, and what tests/ops/test_attention.py does not ask of them."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor, attention, attention_qkv
from cudiff.cuda.device import asked_about
from cudiff.cuda.kernels.attention import problem, short_sm90, sm90, table, wide_sm90
from cudiff.cuda.launch import blocks
from cudiff.ops.matmul import linear
from tests.check import TOLERANCE, assert_close, check_op, relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 49, 3, 32), (1, 130, 2, 24), (2, 256, 6, 32), (1, 300, 2, 64), (1, 129, 1, 8)])
def test_portable_kernels(device, rng, for_any_gpu, shape):
    """What other GPUs take, on Hopper too."""
    for_any_gpu()
    q, k, v = rng.standard_normal((3, *shape))
    check_op(attention, q, k, v, device=device, dtypes=("bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 72, 96, 128])
@pytest.mark.parametrize("tokens", [256, 700])
def test_scores_that_grow_along_the_keys(rng, dim, tokens):
    """The maximum rises with each tile of keys, and what was summed before vanishes beside it."""
    q, k, v = rng.standard_normal((3, 1, tokens, 1, dim))
    q[..., 0], k[..., 0] = 8.0, np.linspace(-20, 20, tokens)[None, :, None]
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    expected = attention(*(Tensor(x.astype(np.float64)) for x in (q, k, v)))
    got = attention(*(Tensor(x, device="cuda") for x in (q, k, v)))
    assert relative_error(got.numpy(), expected.numpy()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dim, tokens", [(32, 200), (64, 200), (72, 200), (96, 600)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_scores_that_leap_and_one_that_is_nan(rng, dim, tokens, masked, dtype):
    """Two queries have a score 600 and 20 above all before it: by the largest so far its weight is no float, or no
    float16. Another query is NaN."""
    q, k, v = rng.standard_normal((3, 1, tokens, 1, dim))
    q[..., 0], k[..., 0] = 0, 1
    q[0, 37, 0, 0], q[0, 100, 0, 0], k[0, 140, 0, 0], q[0, 90, 0, 1] = 75, 2.5, 8 * dim**0.5, np.nan
    mask = np.tri(tokens, tokens, 120, dtype=bool) if masked else None
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    expected = attention(*(Tensor(x.astype(np.float64)) for x in (q, k, v)), mask=mask).numpy()[0]
    got = attention(*(Tensor(x, device="cuda") for x in (q, k, v)), mask=mask).numpy()[0].astype(float)
    rest = np.arange(tokens) != 90
    assert np.isnan(got[90]).all() and relative_error(got[rest], expected[rest]) < 1e-2
    assert relative_error(got[37], v[0, 140, 0].astype(float)) < 1e-2, "it attends to one key alone"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 24])
@pytest.mark.parametrize("queries, keys", [(1, 257), (258, 1), (260, 130)])
def test_narrow_heads_of_more_tokens_than_one_launch_takes(hopper, rng, dim, queries, keys):
    q, k, v = (rng.standard_normal((1, tokens, 3, dim)) for tokens in (queries, keys, keys))
    check_op(attention, q, k, v, device="cuda", dtypes=("bfloat16",))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 24, 32])
@pytest.mark.parametrize("queries, keys", [(1, 200), (256, 1), (144, 130), (65, 129), (196, 256), (70, 150)])
def test_narrow_heads_of_two_short_sequences(hopper, rng, dim, queries, keys):
    """Tiles without queries, or without keys."""
    q, k, v = (rng.standard_normal((2, tokens, 3, dim)) for tokens in (queries, keys, keys))
    check_op(attention, q, k, v, device="cuda", dtypes=("bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("queries, keys, dim, groups", [
    (196, 196, 32, 2), (196, 196, 32, 4), (256, 256, 32, 2), (256, 256, 32, 4), (144, 144, 24, 1), (144, 144, 24, 2),
    (144, 144, 24, 3), (49, 200, 8, 2), (49, 200, 8, 4), (256, 1, 32, 2), (256, 1, 32, 4), (81, 150, 16, 1),
    (81, 150, 16, 2), (200, 130, 32, 2), (200, 130, 32, 4), (128, 128, 32, 1), (128, 128, 32, 2), (60, 60, 16, 1),
])
def test_rounds_of_the_short_backward(hopper, rng, queries, keys, dim, groups):
    """Each number of warpgroups, with one round of keys or several, of which the last may leave some without keys."""
    dtype, heads = ml_dtypes.bfloat16, 3
    q, k, v, dout = (rng.standard_normal((2, tokens, heads, dim)).astype(dtype)
                     for tokens in (queries, keys, keys, queries))
    x = [Tensor(array.astype(np.float64), requires_grad=True) for array in (q, k, v)]
    attention(*x).backward(dout.astype(np.float64).reshape(2, queries, heads * dim))
    expected = [Tensor(tensor.grad).numpy() for tensor in x]

    q, k, v, dout = (Tensor(array, device="cuda").data for array in (q, k, v, dout))
    tiles, parts = blocks(queries, 64), 4 * blocks(max(queries, keys), 64)
    out, dq, dk, dv = (Tensor(np.full(array.shape, np.nan, dtype), device="cuda").data for array in (q, q, k, v))
    lse = Tensor(np.full((2, heads, tiles * 64), np.nan, np.float32), device="cuda").data
    asked = problem.Problem(False, q.dtype, 2, queries, keys, heads, dim, aligned=True, products=1)
    sm90.forward(problem.Forward(out, lse, q, k, v), sm90.Warpgroups(1), asked)
    sums = [Tensor(np.full((2, parts, heads, dim), np.nan, np.float32), device="cuda") for _ in range(3)]
    writes_sums = 4 * tiles == parts
    given = problem.Backward(dq, dk, dv, dout, q, k, v, out, lse,
                             (lambda tiles: [array.data for array in sums]) if writes_sums else None)
    short_sm90.backward(given, sm90.Warpgroups(groups), asked._replace(backward=True))
    for found, grad, total in zip((dq, dk, dv), expected, sums, strict=True):
        found = Tensor(found).numpy().astype(np.float32)
        assert_close(found, grad, TOLERANCE[q.dtype], beside=1.0)  # of one key, dq and dk are 0
        if writes_sums:  # of dk they cancel
            assert_close(total.numpy().sum(1), found.sum(1), TOLERANCE[q.dtype], beside=1 + np.linalg.norm(found))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [24, 40, 72])
def test_keys_that_are_missing_have_no_weight_where_all_scores_are_low(hopper, rng, dim):
    """Missing keys are zeros, whose score of 0 would be far above the others: a weight of infinity, times 0."""
    q, k, v = rng.standard_normal((3, 1, 70, 2, dim))
    q, k, v = (Tensor(x, dtype="bfloat16", device="cuda", requires_grad=True) for x in (q - 12, k + 12, v))
    out = attention(q, k, v)
    out.backward(Tensor(rng.standard_normal(out.shape), dtype="bfloat16", device="cuda"))
    assert all(np.isfinite(Tensor(x.grad).numpy().astype(np.float32)).all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("groups, dim", [(2, 24), (2, 56), (2, 72), (1, 72), (1, 96), (3, 120), (2, 128)])
def test_warpgroups_that_share_keys(hopper, rng, groups, dim):
    """As the forward of many images has. One has not all its queries; odd heads begin within a sector."""
    q, k, v = (rng.standard_normal((2, tokens, 3, dim)) for tokens in (200, 150, 150))
    q, k, v = (Tensor(x, dtype="bfloat16", device="cuda") for x in (q, k, v))
    out = Tensor(np.full(q.shape, np.nan), dtype="bfloat16", device="cuda")
    lse = Tensor(np.full((2, 3, 256), np.nan, np.float32), device="cuda")
    asked = problem.Problem(False, q.dtype, 2, 200, 150, 3, dim, aligned=True, products=1)
    sm90.forward(problem.Forward(out.data, lse.data, q.data, k.data, v.data), sm90.Warpgroups(groups), asked)
    expected = attention(*(Tensor(x.numpy().astype(np.float64)) for x in (q, k, v)))
    assert_close(out.numpy(), expected.numpy().reshape(q.shape), TOLERANCE[q.dtype])
    assert np.isfinite(lse.numpy()[:, :, :200]).all() and np.isposinf(lse.numpy()[:, :, 200:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [24, 48, 56, 72])
def test_a_head_that_is_not_finite_leaves_the_next_one_alone(hopper, rng, dim):
    """Tiles of odd heads begin where the head before ends. The second image begins behind the first one's tokens."""
    qkv = rng.standard_normal((2, 130, 3, 2, dim))
    qkv[1, 5, 2, 0, [0, -1]] = np.inf
    x = Tensor(qkv.reshape(2, 130, 6 * dim), dtype="bfloat16", device="cuda", requires_grad=True)
    out = attention_qkv(x, 2, new_order=True)
    out.backward(Tensor(np.ones(out.shape), dtype="bfloat16", device="cuda").data)
    found = out.numpy().astype(float).reshape(2, 130, 2, dim)
    grad = Tensor(x.grad).numpy().astype(float).reshape(qkv.shape)
    assert not np.isfinite(found[1, :, 0]).all()
    assert np.isfinite(found[0]).all() and np.isfinite(grad[0]).all()
    assert np.isfinite(found[1, :, 1]).all() and np.isfinite(grad[1, :, :, 1]).all()


WIDE = [72, 80, 88, 96, 104, 112, 120, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", WIDE)
@pytest.mark.parametrize("tokens", [1, 65, 196, 577])
@pytest.mark.parametrize("new_order", [False, True])
def test_wide_heads_of_one_array(hopper, rng, dim, tokens, new_order):
    """Odd numbers of tokens, in both orders of the channels of q, k and v."""
    check_op(lambda qkv: attention_qkv(qkv, 3, new_order), rng.standard_normal((2, tokens, 9 * dim)), device="cuda",
             dtypes=("bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", WIDE)
@pytest.mark.parametrize("queries, keys", [(5, 129), (129, 64), (70, 513), (300, 641), (1, 1025)])
def test_wide_heads_of_two_sequences(hopper, rng, dim, queries, keys):
    q, k, v = (rng.standard_normal((2, tokens, 2, dim)) for tokens in (queries, keys, keys))
    check_op(attention, q, k, v, device="cuda", dtypes=("bfloat16", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("plan, dim", [
    *((wide_sm90.Tiles(2, keys), dim) for keys in (64, 128) for dim in (72, 96, 128)),
    (wide_sm90.Tiles(3, 128), 24), (wide_sm90.Tiles(3, 96), 40), (wide_sm90.Tiles(3, 96), 64),
])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [18, 20])
def test_every_tile_of_long_sequences(hopper, rng, dim, dtype, plan, heads):
    """More tiles of queries than multiprocessors, so that blocks take several; a key beyond whole tiles; very negative
    scores, which are far from those of other heads. On 132 multiprocessors the last tiles of 18 heads are computed in
    pieces, some without queries, those of 20 as a whole."""
    q, k, v = rng.standard_normal((3, 4, 641, heads, dim))
    q[:, :, 3], k[:, :, 3] = -40.0, 4.0
    q, k, v = (Tensor(x, dtype=dtype, device="cuda") for x in (q, k, v))
    out, again = (Tensor(np.full(q.shape, np.nan), dtype=dtype, device="cuda") for _ in range(2))
    lse = Tensor(np.full((4, heads, 704), np.nan, np.float32), device="cuda")
    asked = problem.Problem(False, q.dtype, 4, 641, 641, heads, dim, aligned=True, products=1)
    for x in (out, again):
        wide_sm90.forward(problem.Forward(x.data, lse.data, q.data, k.data, v.data), plan, asked)
    expected = attention(*(Tensor(x.numpy().astype(np.float64)) for x in (q, k, v)))
    assert_close(out.numpy(), expected.numpy().reshape(q.shape), TOLERANCE[q.dtype])
    assert out.numpy().tobytes() == again.numpy().tobytes()
    found = lse.numpy()
    assert np.isfinite(found[:, :, :641]).all() and np.isposinf(found[:, :, 641:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens, dim", [
    (256, 32), (100, 24), (196, 32), (65, 16), (256, 64), (65, 40), (200, 72), (66, 56), (70, 88), (130, 120),
    (130, 128),
])
@pytest.mark.parametrize("new_order", [False, True])
def test_sums_of_the_gradients(hopper, rng, tokens, dim, new_order):
    """Those of a tile add up to the bias's gradient of the linear layer before: what was stored, without what lies
    beyond the tokens."""
    qkv, dout, heads = rng.standard_normal((2, tokens, 9 * dim)), rng.standard_normal((2, tokens, 3 * dim)), 3
    found = []
    for _ in range(2):
        x = Tensor(qkv, dtype="bfloat16", device="cuda", requires_grad=True)
        bias = Tensor(np.zeros(9 * dim, np.float32), device="cuda", requires_grad=True)
        eye = Tensor(np.eye(9 * dim), dtype="bfloat16", device="cuda")
        out = attention_qkv(linear(x, eye, bias), heads, new_order)
        out.backward(Tensor(dout, dtype="bfloat16", device="cuda").data)
        found.append([Tensor(bias.grad).numpy(), Tensor(x.grad).numpy().astype(float)])
    assert relative_error(found[0][0], found[0][1].sum((0, 1))) < (1e-5 if dim > 32 else 1e-2)
    assert found[0][0].tobytes() == found[1][0].tobytes()


@pytest.mark.parametrize("queries, keys", [(1, 1), (64, 64), (65, 64), (256, 77), (256, 256), (257, 256), (4096, 4096)])
@pytest.mark.parametrize("dim", [8, 32, 40, 64, 72, 96, 112, 128])
def test_every_launch_covers_the_tokens_and_fits(monkeypatch, queries, keys, dim):
    """Blocks times their tokens against each side; shared memory against an H200's 227 KiB a block."""
    found = {}

    def launch(stem, name, grid, threads, args, shared, **constants):
        found[name] = grid, threads, args, shared, constants

    def prepared(stem, name, grid, block, shared, **constants):
        return SimpleNamespace(run=lambda args: launch(stem, name, grid, *block, args, shared, **constants))

    monkeypatch.setattr(wide_sm90, "launch", launch)
    monkeypatch.setattr(wide_sm90, "multiprocessors", lambda: 132)
    monkeypatch.setattr(sm90, "launch", launch)
    monkeypatch.setattr(sm90, "empty", np.empty)
    monkeypatch.setattr(sm90, "tensor_map", lambda *args: b"")
    for module, made in ((sm90, "_forward"), (short_sm90, "_backward")):
        monkeypatch.setattr(module, "Launch", prepared)
        monkeypatch.setattr(module, made, getattr(module, made).__wrapped__)
    monkeypatch.setattr(short_sm90, "tensor_map", lambda *args: None)
    q, k = (np.zeros((2, tokens, 3, dim), np.float16) for tokens in (queries, keys))
    lse = np.zeros((2, 3, queries), np.float32)
    for given in (problem.Forward(q, lse, q, k, k), problem.Backward(q, k, k, q, q, k, k, q, lse, None)):
        backward = isinstance(given, problem.Backward)
        asked = problem.Problem(backward, q.dtype, 2, queries, keys, 3, dim, aligned=True, products=1)
        chosen = table.ATTENTION.select(asked, "sm_90a")
        if chosen.row.name == "attention_backward_sm90.backward":
            sm90.backward(given, None, asked)
        else:
            chosen.row.run(given, chosen.offer.plan, asked)
    assert all(shared <= 227 << 10 for *_, shared, _ in found.values())
    grid, threads, args, _, constants = found["forward"]
    assert constants["DP"] >= dim
    if "KEYS" in constants:  # blocks walk over all tiles, or over pieces of the last ones
        tiles, whole = args[5:7]
        groups = constants["GROUPS"]
        assert tiles == 6 * -(-queries // (64 * groups)) and whole in (tiles, tiles // 132 * 132)
        assert grid == min(132, whole + (tiles - whole) * groups) and threads == 128 * (groups + 1)
    else:
        assert grid[0] * threads // 128 * 64 >= queries and grid[1:] == (3, 2)
    if "backward" in found:
        grid, threads, _, _, constants = found["backward"]
        assert grid == (3, 2) and constants["TILES"] * 64 >= max(queries, keys) and constants["DP"] >= dim
        assert threads == constants["GROUPS"] * 128
    else:
        (own_queries, *others), (own_keys, *again) = found["backward_q"][0], found["backward_kv"][0]
        assert own_queries * 64 >= queries and own_keys * 64 >= keys and others == again == [3, 2]


ASKED = problem.Problem(True, np.dtype(np.float16), 2, 256, 256, 4, 32, aligned=True, products=1,
                        wanted=frozenset({problem.SUMS}))


@pytest.mark.parametrize("changes, architecture, kernel, left", [
    ({}, "sm_90a", "attention_short_sm90.backward", 0), ({}, "sm_80", "attention.backward_q, backward_kv", 1),
    ({"queries": 192}, "sm_90a", "attention_sm90.backward_q, backward_kv", 1),
    ({"queries": 192, "images": 32}, "sm_90a", "attention_short_sm90.backward", 1),
    ({"keys": 257}, "sm_90a", "attention_sm90.backward_q, backward_kv", 1),
    ({"dim": 40}, "sm_90a", "attention_sm90.backward_q, backward_kv", 0),
    ({"dim": 72}, "sm_90a", "attention_sm90.backward_q, backward_kv", 0),
    ({"dim": 128}, "sm_90a", "attention_sm90.backward_q, backward_kv", 0),
    ({"dim": 72, "backward": False}, "sm_90a", "attention_wide_sm90.forward", 1),
    ({"dim": 72, "backward": False, "images": 64}, "sm_90a", "attention_sm90.forward", 1),
    ({"dim": 72, "backward": False, "keys": 255}, "sm_90a", "attention_sm90.forward", 1),
    ({"dim": 64, "backward": False, "keys": 512}, "sm_90a", "attention_wide_sm90.forward", 1),
    ({"dim": 64, "backward": False, "keys": 511}, "sm_90a", "attention_sm90.forward", 1),
    ({"dim": 64, "backward": False, "keys": 512, "images": 64}, "sm_90a", "attention_sm90.forward", 1),
    ({"masked": True}, "sm_90a", "attention_sm90.backward_q, backward_kv", 1),
    ({"masked": True, "dim": 72, "keys": 512, "backward": False}, "sm_90a", "attention_sm90.forward", 1),
    ({"aligned": False}, "sm_90a", "attention.backward_q, backward_kv", 1),
    ({"dtype": np.dtype(np.float32)}, "sm_90a", "attention.backward_q, backward_kv", 1),
    ({"backward": False}, "sm_90a", "attention_sm90.forward", 1),
    ({"backward": False}, "sm_90", "attention.forward", 1),
])
def test_which_kernel_runs(changes, architecture, kernel, left):
    chosen = table.ATTENTION.select(ASKED._replace(**changes), architecture)
    assert chosen.row.name == kernel and len(chosen.left) == left


@pytest.mark.parametrize("heads, tokens, groups", [
    (48, 256, 4), (192, 256, 2), (396, 256, 4), (300, 192, 1), (1024, 144, 2), (396, 128, 1), (1024, 196, 2),
    (1024, 64, 1), (100, 100, 2),
])
def test_warpgroups_of_the_short_backward(heads, tokens, groups):
    """Those that were fastest on an H200."""
    with asked_about("sm_90a"):
        assert short_sm90.BACKWARD.by_rule(heads, tokens, tokens)[0].groups == groups


def test_rows_that_start_anywhere_are_seen(host_of):
    """Of q, k and v in one array, whose heads may be parts of longer ones."""
    host = host_of(True)
    row, longer = (host.zeros((2, 9, 3, 4, dim), np.float16) for dim in (64, 68))
    for q, stem in ((row[:, :, 0], "attention_sm90"), (row[..., :63][:, :, 0], "attention"),
                    (longer[..., :64][:, :, 0], "attention")):
        host.launches.clear()
        table.forward(problem.Forward(host.empty(q.shape, q.dtype), host.empty((2, 4, 64), np.float32), q, q, q))
        assert host.launches == [(stem, "forward")]
