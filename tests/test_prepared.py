"""What is prepared once for a problem serves no other: launches are those of a process that had made none before."""

import gc
import struct
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff.backend import bfloat16, float32
from cudiff.cuda import select, tiles
from cudiff.cuda.kernels.attention.problem import Heads
from cudiff.ops.attention import _heads, attention_qkv
from cudiff.ops.conv2d import conv2d
from cudiff.ops.dropout import dropout
from cudiff.ops.group_norm import group_norm
from cudiff.ops.matmul import linear
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.ops.random import Generator
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from tests.host import H200, Array, decode, forget


def described(arg):
    """An argument without addresses, of arrays but how far they are from a multiple of 16 bytes."""
    if isinstance(arg, (Array, Heads)):
        return arg.shape, arg.dtype, arg.data.ptr % 16
    if isinstance(arg, (bytes, np.ndarray)):
        return decode(struct.unpack("=16Q", arg))[1:] if len(arg) == 128 else len(arg)
    return arg


def tensor(host, *shape, dtype=bfloat16, offset=0, grad=True):
    """One that starts so many elements behind a multiple of 16 bytes."""
    array = host.empty(int(np.prod(shape)) + offset, np.dtype(dtype))[offset:].reshape(shape)
    return Tensor(array, requires_grad=grad)


def norm(host, shape=(4, 16, 16, 64), channels2=0, groups=32, modulated=False, times=1, affine=True, eps=1e-5,
         silu=True, **options):
    """Forward and backward of a norm, so many times: the later backwards add."""
    channels = shape[-1] + channels2
    x, x2 = [tensor(host, *shape[:-1], c, **options) if c else None for c in (shape[-1], channels2)]
    weight, bias = [tensor(host, channels, dtype=float32, grad=affine) for _ in range(2)]
    scale, shift = [tensor(host, shape[0], channels, dtype=float32) if modulated else None for _ in range(2)]
    for _ in range(times):
        out = group_norm(x, weight, bias, groups, eps, silu, scale, shift, x2)
        out.backward(tensor(host, *out.shape, dtype=out.dtype).data)


def units(host, dtype=bfloat16, offset=0, taps=3, **options):
    """Two fused units, the second with the sums that the first one leaves, and their backward."""
    x = tensor(host, 4, 16, 16, 64, dtype=dtype, offset=offset)
    for _ in range(2):
        weight, emb = tensor(host, 64, taps, taps, 64, dtype=dtype), tensor(host, 4, 64, dtype=float32)
        vectors = {name: tensor(host, 64, dtype=float32) for name in ("norm_weight", "norm_bias", "bias")}
        residual = tensor(host, 4, 16, 16, 64, dtype=dtype, offset=offset)
        x = norm_silu_conv2d(x, weight=weight, emb=emb, residual=residual, **vectors, **options)
    x.backward(tensor(host, *x.shape, dtype=dtype).data)


def tokens(host, dim=32, count=64, **options):
    """Attention, from a linear layer, and the layers' backward."""
    x = tensor(host, 4, count, 64, **options)
    weight, bias = tensor(host, 12 * dim, 64, dtype=x.dtype), tensor(host, 12 * dim, dtype=float32)
    out = attention_qkv(linear(x, weight, bias), num_heads=4)
    out.backward(tensor(host, *out.shape, dtype=out.dtype).data)


def dropped(host, p=0.1, shape=(4, 64), stream=1, seed=0, **options):
    x, generator = tensor(host, *shape, **options), Generator(seed, "cuda")
    dropout(x, p, generator, stream).backward(tensor(host, *shape, dtype=x.dtype).data)


RUNS = [
    norm, partial(norm, offset=1), partial(norm, dtype=float32), partial(norm, channels2=64),
    partial(norm, shape=(4, 16, 16, 128)), partial(norm, shape=(4, 16, 16, 96), channels2=32),
    partial(norm, shape=(4, 8, 16, 64)), partial(norm, shape=(8, 16, 16, 64)), partial(norm, groups=8),
    partial(norm, modulated=True), partial(norm, times=2), partial(norm, affine=False), partial(norm, eps=1e-3),
    partial(norm, silu=False), partial(norm, shape=(2, 160, 160, 64)), partial(norm, shape=(2, 4, 4, 8192), groups=2),
    units, partial(units, offset=1), partial(units, dtype=float32), partial(units, taps=1), partial(units, relu=True),
    tokens, partial(tokens, offset=1), partial(tokens, dtype=float32), partial(tokens, dim=64), partial(tokens, dim=72),
    partial(tokens, count=60), partial(tokens, count=576, dim=80),
    dropped, partial(dropped, p=0.2), partial(dropped, shape=(8, 64)), partial(dropped, stream=2),
    partial(dropped, seed=2), partial(dropped, dtype=float32),
]


@pytest.mark.parametrize("hopper", [True, False], ids=["hopper", "portable"])
def test_no_run_changes_anothers_launches(host_of, monkeypatch, hopper):
    """Of other shapes, dtypes, alignment, sources, wanted gradients and arguments, and with CUDIFF_PORTABLE set."""
    host, alone = host_of(hopper), []
    keys = [(at, portable) for at in range(len(RUNS)) for portable in "01"]

    def launches(at, portable):
        found = []
        host.watch = lambda launch: found.append((*launch[:5], *map(described, launch.args), *launch[6:]))
        monkeypatch.setenv("CUDIFF_PORTABLE", portable)
        RUNS[at](host)
        return found

    for key in keys:
        forget()
        alone.append(launches(*key))
    forget()
    for _ in range(2):
        for key, before in zip(keys, alone, strict=True):
            assert launches(*key) == before, (RUNS[key[0]], key[1])
    count = len({str(found) for found in alone})
    assert count > len(RUNS) if hopper else count == len(RUNS)


def test_gpus_of_one_name_with_other_multiprocessors(host_of, monkeypatch):
    """Blocks that wait for each other must all run at once: those for 132 multiprocessors do not on 66."""
    current_target = select.current_target
    host, grids, here = host_of(True), [], []
    monkeypatch.setattr(select, "current_target", current_target)
    monkeypatch.setattr(select, "driver_version", lambda: 13000)
    host.cuda.runtime.getDevice = lambda: here[-1]
    host.cuda.Device = lambda at: SimpleNamespace(
        compute_capability="90", attributes=H200 | {"MultiProcessorCount": (132, 66)[at]})
    host.watch = lambda launch: grids.append((here[-1], launch.grid)) if launch.cooperative else None
    for at in (0, 1, 0, 1):
        here.append(at)
        norm(host, shape=(16, 64, 64, 64))
    assert {at for at, _ in grids} == {0, 1} and len(set(grids)) == 2
    assert all(grid[0] <= (132, 66)[at] for at, grid in grids)


@pytest.mark.parametrize("count", [np.int64(4), np.uint8(4), 4])
def test_a_number_of_numpys_is_taken_as_pythons(host_of, count):
    """Kernels take Python's, and a choice that held another would be found again under an equal key."""
    host = host_of(True)
    norm(host, groups=count)
    for dtype in (bfloat16, float32):
        units(host, dtype=dtype, num_groups=count)
        qkv = tensor(host, 2, 16, 16, 384, dtype=dtype)
        attention_qkv(qkv, num_heads=count).backward(tensor(host, 2, 16, 16, 128, dtype=dtype).data)
    norm(host, groups=4)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("sizes", [(64, 64), (64, 8), (32, 32)])
def test_the_columns_of_a_weight_are_no_contiguous_weight(host_of, outputs, sizes):
    """Of one output too, whose own stride tells nothing: the stand-in refuses a view where a kernel reads an array."""
    host = host_of(True)
    x, x2 = (tensor(host, 1, 8, 8, channels) for channels in sizes)
    out = norm_silu_conv2d(x, x2, weight=tensor(host, outputs, 3, 3, sum(sizes)))
    out.backward(tensor(host, 1, 8, 8, outputs).data)


@pytest.mark.parametrize("channels, whole", [(4, False), (8, True)])
def test_rows_of_a_weight_that_start_between_16_bytes_are_not_for_tma(host_of, channels, whole):
    """The gradient of x reads the first 64 columns of a weight, whose rows are 136 or 144 bytes."""
    host, found = host_of(True), []
    host.watch = lambda launch: found.append(launch) if launch.stem in ("conv2d_sm90", "gemm_sm90") else None
    x, x2 = (tensor(host, 1, 8, 8, width) for width in (64, channels))
    out = norm_silu_conv2d(x, x2, weight=tensor(host, 64, 1, 1, 64 + channels))
    found.clear()
    out.backward(tensor(host, *out.shape).data)
    assert bool(found) == whole, found


def test_taps_of_one_column_are_told_by_the_stride_of_their_rows(host_of):
    """A weight (K, 3, 1, C) that was transposed may have any stride along its axis of one."""
    host, found = host_of(True), []
    host.watch = lambda launch: found.append(launch.args) if launch.stem == "conv2d_sm90" else None
    weight = host.empty((64, 1, 3, 64), np.dtype(bfloat16)).transpose(0, 2, 1, 3)
    for own in (weight, weight.copy()):
        conv2d(tensor(host, 2, 8, 8, 64), Tensor(own), padding=(1, 0))
    own, copied = ([decode(struct.unpack("=16Q", args[at]))[1:] for at in (2, 3)] for args in found)
    assert own == copied


@pytest.mark.parametrize("taps", [(1, 1), (1, 3), (3, 1), (3, 3), (1, 7)])
def test_taps_of_a_turned_weight_follow_each_other(host_of, taps):
    """In tf32 the gradient of the input is a convolution with the weight as (C, R, S, K)."""
    host, found = host_of(True), []
    host.watch = lambda launch: found.append(launch) if launch.stem in ("conv2d_sm90", "shape") else None
    x, weight = (tensor(host, *shape, dtype=float32) for shape in ((2, 8, 24, 64), (96, *taps, 64)))
    with allow_tf32():
        out = conv2d(x, weight, padding=tuple(size // 2 for size in taps))
        found.clear()
        out.backward(tensor(host, *out.shape, dtype=float32).data)
    turn, = (launch for launch in found if launch.name == "turn")
    dgrad, = (launch for launch in found if launch.stem == "conv2d_sm90")
    turned = turn.args[0]
    assert turned.shape == (64, *taps, 96) and turned.flags.c_contiguous
    weights = decode(struct.unpack("=16Q", dgrad.args[2]))
    assert weights.pointer == turned.data.ptr
    assert weights.shape == (64, taps[0] * taps[1], 96) and weights.strides == (turned.strides[0], 96 * 4)


def test_heads_keep_their_array(host_of):
    array = host_of(True).empty((2, 16, 96), np.dtype(bfloat16))
    reference = weakref.ref(array)
    q, *_ = [part[1:] for part in _heads(array, 2, False)]
    del array, _
    gc.collect()
    assert reference() is not None and q.shape == (1, 16, 2, 16)


@pytest.mark.parametrize("hopper, rows", [(False, 512), (True, 512), (True, 8192)])
def test_an_input_gradient_that_is_added_to_says_so_while_it_is_tuned(host_of, hopper, rows):
    """Tuning launches it again and again, and puts back what was added to."""
    host, added = host_of(hopper), []
    x, weight = tensor(host, rows, 256), tensor(host, 256, 256, grad=False)
    with tiles.watched(lambda planner, problem, launch, to, leaves: added.append((planner.kernel, len(to)))):
        for _ in range(2):
            linear(x, weight).backward(tensor(host, rows, 256).data)
    assert [count for _, count in added] == [0, 0, 0, 1], added
