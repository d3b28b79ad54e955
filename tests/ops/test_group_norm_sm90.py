import itertools
import threading
from importlib import import_module

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.module import blocks
from cudiff.ops.group_norm import group_norm
from cudiff.tensor import Tensor
from tests.check import check_op
from tests.ops.test_group_norm import inputs

norm, planning = (import_module(f"cudiff.ops.{name}") for name in ("group_norm", "group_norm_sm90"))

# (shape of x, channels of x2, groups; chunks of channels, blocks of an image, boxes in registers): one box and several,
# the last of them cut short or missing, images of one block, odd numbers of blocks, lanes without a channel.
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
]


@pytest.mark.gpu
@pytest.mark.parametrize("silu, modulated", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("shape, channels2, groups, chunks, parts, held", SHARED)
def test_blocks_that_share_an_image(hopper, rng, monkeypatch, shape, channels2, groups, chunks, parts, held, silu,
                                    modulated):
    taken = []

    def shared(pixels, channels1, channels2, groups, itemsize, images):
        boxes = next((b for b in planning._boxes(channels1, channels2, groups, itemsize) if b.chunks == chunks), None)
        if boxes is None:  # of float32 a chunk has half as many channels
            return None
        own = blocks(blocks(pixels, boxes.step), parts)
        in_registers = held if own > held else 0
        found = planning.Shared(boxes, parts, own - in_registers, in_registers)
        taken.append(found.fits(images))
        return found if taken[-1] else None

    monkeypatch.setattr(norm, "sharing", shared)
    check_op(
        lambda x, x2, w, b, scale, shift: group_norm(x, w, b, groups, 1e-5, silu, scale, shift, x2),
        *inputs(rng, shape, channels2, modulated),
        device="cuda", dtypes=("float32", "bfloat16", "float16"), fp32_inputs=(2, 3, 4, 5),
    )
    assert any(taken)


@pytest.mark.gpu
def test_two_streams_share_images_at_the_same_time(hopper, rng):
    """Blocks wait for each other: those of two launches, on two streams, must not wait for each other's places."""
    import cupy

    def random(shape, dtype):
        return Tensor(rng.standard_normal(shape), device="cuda", dtype=dtype, requires_grad=True)

    x, dout = (random((32, 64, 64, 64), bfloat16) for _ in range(2))
    weight, bias = (random(64, np.float32) for _ in range(2))
    needs, found = (True, False, True, True, False, False), {}

    def work(name, device):
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(200):
                node, _ = group_norm(x, weight, bias, silu=True)._source
                dx, _, *rest = node.function.backward_cuda(node.ctx, dout.data, needs=needs, into=(None,) * 6)
            stream.synchronize()
            found[name] = [a.tobytes() for a in (dx, *rest[:2])]

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(i, cupy.cuda.Device().id)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]


@pytest.mark.gpu
def test_every_stream_has_its_own_mail():
    import cupy

    from cudiff.cuda.mail import mail

    own = mail()
    assert mail() is own and own.data.ptr % 16 == 0
    with cupy.cuda.Stream(non_blocking=True):
        assert mail() is not own


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 16])
def test_blocks_that_wait_for_each_other_are_there_at_once(monkeypatch, multiprocessors):
    monkeypatch.setattr(planning, "hopper", lambda: True)
    monkeypatch.setattr(planning, "multiprocessors", lambda: multiprocessors)
    sizes = itertools.product((1, 3, 32, 100, 300), (1, 64, 1000, 4096), (8, 40, 64, 192, 320, 1024), (0, 64), (2, 4))
    plans = 0
    for images, pixels, channels1, channels2, itemsize in sizes:
        channels = channels1 + channels2
        shared = planning.sharing.__wrapped__(pixels, channels1, channels2, 8, itemsize, images)
        if shared is None:
            continue
        plans += 1
        boxes, count = shared.boxes, shared.blocks(images)
        assert count == images * boxes.chunks * shared.parts
        assert count + shared.adding(images, channels) <= multiprocessors or shared.parts == 1
        assert shared.adding(images, channels) == 0 or count * boxes.width <= 256 * multiprocessors  # letters
        assert boxes.chunks * boxes.width == channels and channels1 % boxes.width == 0
        assert (shared.parts - 1) * boxes.step < pixels <= shared.parts * (shared.kept + shared.held) * boxes.step
        assert shared.bytes <= planning._SHARED_BYTES
    assert plans > 50
