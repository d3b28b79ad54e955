import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.device import current_device
from cudiff.cuda.kernels.norm import sm90, table
from cudiff.cuda.kernels.norm.problem import NO_DROPOUT, Problem
from cudiff.cuda.launch import blocks
from cudiff.gradient import Slot, State
from cudiff.ops.dropout import dropout_of
from cudiff.ops.group_norm import group_norm
from cudiff.ops.random import Generator
from cudiff.tensor import Tensor
from tests.check import check_op
from tests.ops.test_group_norm import inputs

ROOT = Path(__file__).resolve().parents[2]

# (shape of x, channels of x2, groups; chunks of channels, blocks of an image, boxes in registers): one box and several,
# the last of them cut short or missing, images of one block, odd numbers of blocks, lanes without a channel; of 132
# multiprocessors none left to add up the images' sums, and too few to do so at once.
SHARED = [
    ((3, 31, 17, 64), 0, 32, 1, 3, 0),
    ((5, 29, 64, 64), 64, 32, 2, 2, 3),
    ((2, 40, 41, 40), 0, 5, 1, 7, 0),
    ((7, 24, 25, 256), 0, 32, 1, 4, 3),
    ((32, 12, 12, 64), 64, 32, 2, 2, 0),
    ((2, 16, 16, 192), 192, 32, 4, 5, 0),
    ((40, 3, 5, 64), 0, 32, 1, 1, 0),
    ((1, 64, 64, 32), 0, 4, 1, 33, 0),
    ((1, 9, 9, 512), 0, 32, 16, 2, 0),
    ((2, 50, 50, 8), 0, 1, 1, 9, 0),
    ((33, 21, 12, 64), 0, 32, 1, 4, 0),
    ((32, 6, 6, 512), 0, 32, 4, 1, 0),
]


@pytest.fixture
def room(hopper):
    """Skips what needs more blocks at once than the GPU has multiprocessors."""
    def check(shape, chunks, parts):
        if parts > 1 and shape[0] * chunks * parts > current_device().multiprocessors:
            pytest.skip("more blocks wait for each other than this GPU has multiprocessors")

    return check


@pytest.fixture
def force(monkeypatch):
    """force(name, stand-in): have a plan chosen by it, until the test ends."""
    def choose(name, stand_in):
        monkeypatch.setattr(sm90, name, stand_in)
        table.NORM.forget()

    yield choose
    monkeypatch.undo()
    table.NORM.forget()


def forced(chunks, parts, held):
    """A stand-in for `sharing`: None where float32 cannot be cut so, or does not fit."""
    def sharing(pixels, channels1, channels2, groups, itemsize, images, multiprocessors):
        boxes = next((b for b in sm90._boxes(channels1, channels2, groups, itemsize) if b.chunks == chunks), None)
        if boxes is None:
            return None
        own = blocks(blocks(pixels, boxes.step), parts)
        in_registers = held if own > held else 0
        shared = sm90.SharedPlan(boxes, parts, own - in_registers, in_registers, multiprocessors)
        return shared if shared.fits(images) else None

    return sharing


@pytest.mark.gpu
@pytest.mark.parametrize("silu, modulated", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("shape, channels2, groups, chunks, parts, held", SHARED)
def test_blocks_that_share_an_image(room, rng, force, shape, channels2, groups, chunks, parts, held, silu,
                                    modulated):
    room(shape, chunks, parts)
    sharing, found = forced(chunks, parts, held), {}

    def noted(*args):
        plan = found[args[4]] = sharing(*args)  # by the bytes of an element
        return plan

    force("sharing", noted)
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, groups, 1e-5, silu, scale, shift, x2),
        *inputs(rng, shape, channels2, modulated),
        device="cuda", dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(2, 3, 4, 5),
    )
    assert found[2] is not None


@pytest.mark.gpu
def test_more_boxes_than_a_warp_has_threads(hopper, force, rng):
    def clusters(pixels, channels1, channels2, groups, itemsize, images, multiprocessors):
        boxes, = sm90._boxes(channels1, channels2, groups, itemsize)
        cut = sm90.ClusterPlan(boxes, 1, blocks(pixels, boxes.step))
        assert cut.fits() and cut.kept > 32
        return cut

    force("clusters", clusters)
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, 1, 1e-5, True, scale, shift, x2),
        *inputs(rng, (2, 100, 100, 8), 0, True), device="cuda", dtypes=("bfloat16", "float16"),
        fp32_inputs=(2, 3, 4, 5),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("needs", [
    (1, 1, 1, 1, 1, 1), (0, 0, 1, 1, 0, 0), (0, 1, 0, 0, 0, 0), (1, 0, 0, 1, 0, 1), (0, 0, 1, 0, 1, 0)
])
@pytest.mark.parametrize("adds", [None, State.SHARED, State.HOLDS], ids=["new", "elsewhere", "in place"])
@pytest.mark.parametrize("shape, channels2, groups, chunks, parts, held", [SHARED[i] for i in (1, 3, 4, 10)])
@pytest.mark.parametrize("drops", [False, True])
def test_all_that_may_be_asked_of_a_backward(room, rng, force, shape, channels2, groups, chunks, parts, held,
                                             adds, needs, drops):
    """Beside group_norm.cu: gradients that are wanted or not, new or added to, y once more, and the sums of dx; with
    dropout and without."""
    room(shape, chunks, parts)
    x, x2, *parameters = (None if a is None else Tensor(a, device="cuda", dtype=bfloat16 if i < 2 else np.float32)
                          for i, a in enumerate(inputs(rng, shape, channels2, True)))
    weight, bias, scale, shift = (tensor.data for tensor in parameters)
    sources = x.data, None if x2 is None else x2.data
    whole = *shape[:3], shape[-1] + channels2
    dropout = dropout_of(whole, 0.4, Generator(1, "cuda"), 1000) if drops else NO_DROPOUT
    y, mean, rstd = table.forward(*sources, weight, bias, groups, 1e-5, True, scale, shift, dropout=dropout)
    assert not drops or 0.3 < (Tensor(y).numpy() == 0).mean() < 0.5
    dy = Tensor(rng.standard_normal(y.shape), device="cuda", dtype=bfloat16).data
    operands = (*sources, weight, bias, scale, shift)
    before = [None if a is None else Tensor(rng.standard_normal(a.shape), device="cuda", dtype=a.dtype).data
              for a in operands]
    wanted = tuple(bool(need) and a is not None for need, a in zip(needs, operands, strict=True))

    def run(sharing):
        force("sharing", sharing)
        into = [None if a is None or adds is None else Slot(a.copy(), adds if i < 2 else State.HOLDS)
                for i, a in enumerate(before)]
        again, statistics = y * 0, {}
        results = table.backward(
            dy, *sources, weight, bias, mean, rstd, True, scale, shift, needs=wanted, into=tuple(into), y=again,
            din_statistics=statistics, dropout=dropout,
        )
        assert again.tobytes() == y.tobytes()
        assert tuple(result is not None for result in results) == wanted
        assert set(statistics) == {i for i in (0, 1) if wanted[i]}
        return [None if a is None else Tensor(a).numpy().astype(np.float64) for a in results], statistics

    expected, _ = run(lambda *args: None)
    found, statistics = run(forced(chunks, parts, held))
    for a, b in zip(found, expected, strict=True):
        assert a is None or np.abs(a - b).max() < 1e-2 * np.abs(b).max()
    for i, left in statistics.items():
        rows = found[i].reshape(shape[0], -1, found[i].shape[-1])
        error = np.abs(Tensor(left.sums).numpy().sum(1) - rows.sum(1)) / (1 + np.abs(rows).sum(1))
        assert left.tiles == parts and error.max() < 2e-3  # dx was rounded after it was summed


@pytest.mark.gpu
def test_two_streams_share_images_at_the_same_time(hopper, streams, rng):
    """Blocks wait for each other: those of two launches, on two streams, must not wait for each other's places."""
    import cupy

    def random(shape, dtype):
        return Tensor(rng.standard_normal(shape), device="cuda", dtype=dtype, requires_grad=True)

    plan = sm90.sharing(4096, 64, 0, 32, 2, 32, current_device().multiprocessors)
    if plan is None or plan.parts == 1:
        pytest.skip("on this GPU no blocks share these images")
    x, dout = (random((32, 64, 64, 64), bfloat16) for _ in range(2))
    weight, bias = (random(64, np.float32) for _ in range(2))
    node, _ = group_norm(x, weight, bias, silu=True)._source

    def backward():
        needs = (True, False, True, True, False, False)
        return node.function.backward_cuda(node.ctx, dout.data, needs=needs, into=(None,) * 6)

    alone = backward()
    cupy.cuda.Device().synchronize()
    recordings = []
    for _ in range(2):
        stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc), stream:
            backward()
            stream.synchronize()
            stream.begin_capture()
            results = [backward() for _ in range(20)]
            recordings.append((stream, stream.end_capture(), results))
    for _ in range(20):
        for stream, graph, _ in recordings:
            graph.launch(stream)
    for stream, _, results in recordings:
        stream.synchronize()
        for found in results:
            for a, b in zip(found, alone, strict=True):
                assert a is None or a.tobytes() == b.tobytes()


@pytest.mark.gpu
def test_beside_a_stream_of_higher_priority_and_a_full_gpu(hopper, streams):
    """Launches that take places as they come free would each hold some and wait for the rest for ever."""
    command = [sys.executable, "-m", "tests.ops.crowded"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.stdout == "equal\n", found.stderr


@pytest.mark.gpu
def test_every_stream_has_its_own_workspace(streams):
    import cupy

    from cudiff.cuda.exchange import exchange_workspace

    own = exchange_workspace()
    assert exchange_workspace() is own and own.data.ptr % 16 == 0
    with cupy.cuda.Stream(non_blocking=True):
        other = exchange_workspace()
        assert other is not own and exchange_workspace() is other


@pytest.mark.parametrize("there", [132, 114, 78, 16])
def test_blocks_that_wait_for_each_other_are_there_at_once(there):
    sizes = itertools.product((1, 3, 32, 100, 300), (1, 64, 1000, 4096), (8, 40, 64, 192, 320, 1024), (0, 64), (2, 4))
    plans = 0
    for images, pixels, channels1, channels2, itemsize in sizes:
        channels = channels1 + channels2
        shared = sm90.sharing(pixels, channels1, channels2, 8, itemsize, images, there)
        if shared is None:
            continue
        plans += 1
        boxes, count, adding = shared.boxes, shared.blocks(images), shared.adding(images, channels)
        assert count == images * boxes.chunks * shared.parts
        if shared.parts > 1 or adding:
            assert count + adding <= there
            assert images * shared.parts * channels <= 256 * there  # letters
        assert boxes.chunks * boxes.width == channels and channels1 % boxes.width == 0
        assert (shared.parts - 1) * boxes.step < pixels <= shared.parts * (shared.kept + shared.held) * boxes.step
        assert shared.bytes <= sm90._SHARED_BYTES
    assert plans > 50


ASKED = Problem(True, bfloat16, 32, 4096, 64, 0, 32, packs=True, summed=False, two_terms=False)
HOPPER, ANY = "group_norm_backward_sm90.backward", "group_norm.backward_sums, finish_sums, input_gradients"
FORWARD, PASSES = "group_norm_sm90.forward", "group_norm.statistics, finish_statistics, normalize"


@pytest.mark.parametrize("changes, architecture, kernels", [
    ({}, "sm_90a", HOPPER), ({}, "sm_80", ANY), ({"packs": False}, "sm_90a", ANY), ({"summed": True}, "sm_90a", ANY),
    ({"two_terms": True}, "sm_90a", ANY), ({"pixels": 2**20}, "sm_90a", ANY), ({"channels1": 72}, "sm_90a", ANY),
    ({"backward": False}, "sm_90a", FORWARD), ({"backward": False}, "sm_120", PASSES),
    ({"backward": False, "packs": False}, "sm_90a", PASSES), ({"backward": False, "summed": True}, "sm_90a", PASSES),
    ({"backward": False, "pixels": 2**20}, "sm_90a", PASSES),
])
def test_which_kernels_run(changes, architecture, kernels):
    assert table.NORM.select(ASKED._replace(**changes), architecture).row.name == kernels


def test_images_are_not_shared_by_more_blocks_than_a_gpu_has_multiprocessors(force):
    force("multiprocessors", lambda: 16)
    assert table.NORM.select(ASKED, "sm_90a").row.name == ANY
