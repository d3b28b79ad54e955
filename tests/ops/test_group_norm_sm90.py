import itertools
import threading
from importlib import import_module

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.module import blocks
from cudiff.ops.group_norm import group_norm
from cudiff.tensor import Kept, Tensor
from tests.check import check_op
from tests.ops.test_group_norm import inputs

norm, planning = (import_module(f"cudiff.ops.{name}") for name in ("group_norm", "group_norm_sm90"))

# (shape of x, channels of x2, groups; chunks of channels, blocks of an image, boxes in registers): one box and several,
# the last of them cut short or missing, images of one block, odd numbers of blocks, lanes without a channel; no
# multiprocessor left to add up the images' sums, and too few to do so at once.
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


def forced(chunks, parts, held):
    """A stand-in for `sharing`: None where float32 cannot be cut so, as a chunk has half as many channels."""
    def sharing(pixels, channels1, channels2, groups, itemsize, images, multiprocessors):
        boxes = next((b for b in planning._boxes(channels1, channels2, groups, itemsize) if b.chunks == chunks), None)
        if boxes is None:
            return None
        own = blocks(blocks(pixels, boxes.step), parts)
        in_registers = held if own > held else 0
        shared = planning.Shared(boxes, parts, own - in_registers, in_registers, multiprocessors)
        return shared if shared.fits(images) else None

    return sharing


@pytest.mark.gpu
@pytest.mark.parametrize("silu, modulated", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("shape, channels2, groups, chunks, parts, held", SHARED)
def test_blocks_that_share_an_image(hopper, rng, monkeypatch, shape, channels2, groups, chunks, parts, held, silu,
                                    modulated):
    sharing, found = forced(chunks, parts, held), []
    monkeypatch.setattr(norm, "sharing", lambda *args: found.append(sharing(*args)) or found[-1])
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, groups, 1e-5, silu, scale, shift, x2),
        *inputs(rng, shape, channels2, modulated),
        device="cuda", dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(2, 3, 4, 5),
    )
    assert any(found)


@pytest.mark.gpu
@pytest.mark.parametrize("needs", [
    (1, 1, 1, 1, 1, 1), (0, 0, 1, 1, 0, 0), (0, 1, 0, 0, 0, 0), (1, 0, 0, 1, 0, 1), (0, 0, 1, 0, 1, 0)
])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape, channels2, groups, chunks, parts, held", [SHARED[i] for i in (1, 3, 4, 10)])
def test_all_that_may_be_asked_of_a_backward(hopper, rng, monkeypatch, shape, channels2, groups, chunks, parts, held,
                                             adds, needs):
    """Beside group_norm.cu: gradients that are wanted or not, new or added to, y once more, and the sums of dx."""
    x, x2, *parameters = (None if a is None else Tensor(a, device="cuda", dtype=bfloat16 if i < 2 else np.float32)
                          for i, a in enumerate(inputs(rng, shape, channels2, True)))
    weight, bias, scale, shift = (tensor.data for tensor in parameters)
    sources = x.data, None if x2 is None else x2.data
    y, mean, rstd = norm.group_norm_forward_cuda(*sources, weight, bias, groups, 1e-5, True, scale, shift)
    dy = Tensor(rng.standard_normal(y.shape), device="cuda", dtype=bfloat16).data
    operands = (*sources, weight, bias, scale, shift)
    before = [None if a is None else Tensor(rng.standard_normal(a.shape), device="cuda", dtype=a.dtype).data
              for a in operands]
    wanted = tuple(bool(need) and a is not None for need, a in zip(needs, operands, strict=True))

    def run(sharing):
        monkeypatch.setattr(norm, "sharing", sharing)
        into = [None if a is None or not adds else a.copy() for a in before]
        into[:2] = [None if a is None else Kept(a) for a in into[:2]]
        again, sums = y * 0, {}
        results = norm.group_norm_backward_cuda(
            dy, *sources, weight, bias, mean, rstd, True, scale, shift, needs=wanted, into=tuple(into), y=again,
            sums=sums
        )
        assert again.tobytes() == y.tobytes()
        assert tuple(result is not None for result in results) == wanted
        assert set(sums) == {i for i in (0, 1) if wanted[i]}
        return [None if a is None else Tensor(a).numpy().astype(np.float64) for a in results], sums

    expected, _ = run(lambda *args: None)
    found, sums = run(forced(chunks, parts, held))
    for a, b in zip(found, expected, strict=True):
        assert a is None or np.abs(a - b).max() < 1e-2 * np.abs(b).max()
    for i, partial in sums.items():
        rows = found[i].reshape(shape[0], -1, found[i].shape[-1])
        error = np.abs(Tensor(partial).numpy().sum(1) - rows.sum(1)) / (1 + np.abs(rows).sum(1))
        assert partial.shape[1] == parts and error.max() < 2e-3  # dx was rounded after it was summed


@pytest.mark.gpu
def test_two_streams_share_images_at_the_same_time(hopper, rng):
    """Blocks wait for each other: those of two launches, on two streams, must not wait for each other's places."""
    import cupy

    def random(shape, dtype):
        return Tensor(rng.standard_normal(shape), device="cuda", dtype=dtype, requires_grad=True)

    x, dout = (random((32, 64, 64, 64), bfloat16) for _ in range(2))
    weight, bias = (random(64, np.float32) for _ in range(2))
    needs, found, device = (True, False, True, True, False, False), {}, cupy.cuda.Device().id
    assert norm.sharing(4096, 64, 0, 32, 2, 32, 132).parts > 1

    def work(name, times):
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(times):
                node, _ = group_norm(x, weight, bias, silu=True)._source
                dx, _, *rest = node.function.backward_cuda(node.ctx, dout.data, needs=needs, into=(None,) * 6)
            stream.synchronize()
            found[name] = [a.tobytes() for a in (dx, *rest[:2])]

    cupy.cuda.Device().synchronize()
    work("alone", 1)
    threads = [threading.Thread(target=work, args=(i, 200), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found[0] == found[1] == found["alone"]


@pytest.mark.gpu
def test_every_stream_has_its_own_mail():
    import cupy

    from cudiff.cuda.mail import stream_mail

    own = stream_mail()
    assert stream_mail() is own and own.data.ptr % 16 == 0
    with cupy.cuda.Stream(non_blocking=True):
        assert stream_mail() is not own


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 16])
def test_blocks_that_wait_for_each_other_are_there_at_once(multiprocessors):
    sizes = itertools.product((1, 3, 32, 100, 300), (1, 64, 1000, 4096), (8, 40, 64, 192, 320, 1024), (0, 64), (2, 4))
    plans = 0
    for images, pixels, channels1, channels2, itemsize in sizes:
        channels = channels1 + channels2
        shared = planning.sharing(pixels, channels1, channels2, 8, itemsize, images, multiprocessors)
        if shared is None:
            continue
        plans += 1
        boxes, count, adding = shared.boxes, shared.blocks(images), shared.adding(images, channels)
        assert count == images * boxes.chunks * shared.parts
        if shared.parts > 1 or adding:
            assert count + adding <= multiprocessors
            assert images * shared.parts * channels <= 256 * multiprocessors  # letters
        assert boxes.chunks * boxes.width == channels and channels1 % boxes.width == 0
        assert (shared.parts - 1) * boxes.step < pixels <= shared.parts * (shared.kept + shared.held) * boxes.step
        assert shared.bytes <= planning._SHARED_BYTES
    assert plans > 50
