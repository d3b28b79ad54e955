"""Where products may be rounded to tf32: in the block, in modules of that precision, and in the backward of both."""

import threading
from typing import ClassVar

import numpy as np
import pytest

from cudiff import Function, Tensor, allow_tf32, nn
from cudiff.precision import tf32_allowed


class Seen(Function):
    """x, and what forward and backward were told."""

    told: ClassVar[list[bool]] = []

    @staticmethod
    def forward_numpy(ctx, x):
        Seen.told.append(ctx.tf32)
        return x.copy()

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        assert tf32_allowed() is ctx.tf32
        Seen.told.append(ctx.tf32)
        return (dout,)


class Layer(nn.Module):
    def __init__(self, *below):
        super().__init__()
        self.below = nn.ModuleList(below)

    def forward(self, x):
        x = Seen.apply(x)
        for layer in self.below:
            x = layer(x)
        return Seen.apply(x)


@pytest.fixture
def told():
    Seen.told = []
    return lambda: Seen.told


def ones():
    return Tensor(np.ones(2, np.float32), requires_grad=True)


def test_a_block_ends_and_blocks_nest():
    assert not tf32_allowed()
    with pytest.raises(ZeroDivisionError), allow_tf32():
        assert tf32_allowed()
        with allow_tf32(False):
            assert not tf32_allowed()
        assert tf32_allowed()
        raise ZeroDivisionError
    assert not tf32_allowed()
    assert allow_tf32()(tf32_allowed)() and not tf32_allowed()


def test_a_block_is_of_one_thread():
    seen = []
    with allow_tf32():
        thread = threading.Thread(target=lambda: seen.append(tf32_allowed()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_backward_computes_as_its_forward_did(told):
    with allow_tf32():
        out = Seen.apply(ones())
    out.backward(np.ones(2))
    assert told() == [True, True]
    with allow_tf32():
        exact = allow_tf32(False)(Seen.apply)(ones())
        exact.backward(np.ones(2))
    assert told()[2:] == [False, False]


@pytest.mark.parametrize("precision, allowed", [("fp32", False), ("tf32", True), ("bf16", True), ("fp16", True)])
def test_a_module_goes_by_its_own_precision(told, precision, allowed):
    model = Layer(Layer())
    model.precision = precision
    for block in (False, True):
        with allow_tf32(block):
            model(ones())
            assert tf32_allowed() is block
    assert told() == [allowed] * 8


def test_a_layer_of_another_precision_within_a_model(told):
    model = Layer(Layer())
    model.precision = "tf32"
    model.below[0].precision = "fp32"
    model(ones())
    assert told() == [True, False, False, True]
