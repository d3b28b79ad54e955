from dataclasses import replace

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda.kernels.convolution import wgrad_sm90
from cudiff.cuda.select import current_target
from cudiff.gradient import Slot, State
from cudiff.nn.parameter import Parameter
from cudiff.ops.attention import attention_qkv
from cudiff.ops.dropout import dropout
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.ops.random import Generator
from cudiff.precision import allow_tf32
from cudiff.tensor import Tensor
from tests.check import TOLERANCE, check_op, relative_error, sums_of, torch

UNITS = {  # x, x2 channels; K; kernel; which parts
    "all": dict(c1=8, c2=4, k=8, emb=True, residual=(8, 4), skip=True),
    "identity": dict(c1=8, c2=0, k=8, residual=(8, 0)),
    "scale": dict(c1=16, c2=0, k=8, scale=True, residual=(16, 0), skip=True),
    "upsample": dict(c1=8, c2=0, k=4, emb=True, upsample=True),
    "upsample of odd images": dict(c1=64, c2=32, k=72, emb=True, upsample=True, size=(5, 7)),
    "upsample without norm": dict(c1=96, c2=0, k=64, norm=False, residual=(64, 0), upsample=True, size=(7, 4)),
    "upsample of a pair": dict(c1=64, c2=8, k=16, norm=False, upsample=True, relu=True),
    "upsample and skip": dict(c1=64, c2=0, k=64, upsample=True, residual=(64, 8), skip=True, size=(9, 12)),
    "upsample, then 1x1": dict(c1=16, c2=0, k=24, r=1, upsample=True),
    "upsample to a thin result": dict(c1=64, c2=0, k=3, upsample=True),
    "no norm": dict(c1=6, c2=2, k=3, norm=False, emb=True),
    "wide": dict(c1=64, c2=64, k=64, emb=True, residual=(64, 64), skip=True),
    "1x1": dict(c1=8, c2=0, k=5, r=1),
    "linear": dict(c1=64, c2=0, k=192, r=0, silu=False, size=(16, 8)),
    "linear of odd images": dict(c1=72, c2=0, k=40, r=0, silu=False, size=(7, 5), scale=True),
    "linear of a pair": dict(c1=64, c2=8, k=24, r=0, silu=False, emb=True, residual=(24, 0)),
    "linear without norm": dict(c1=64, c2=0, k=64, r=0, norm=False, residual=(64, 0), size=(16, 8)),
    "thin result": dict(c1=64, c2=0, k=3, size=(13, 9)),
    "thin 1x1 of a scaled norm": dict(c1=96, c2=0, k=5, r=1, scale=True, emb=True),
    "3x3 of a norm": dict(c1=16, c2=0, k=8, silu=False),
    "tall": dict(c1=64, c2=32, k=16, scale=True, residual=(64, 32), skip=True, size=(35, 9)),
    "skip": dict(c1=72, c2=0, k=72, residual=(40, 0), skip=True, size=(5, 13)),
    "skip of a pair": dict(c1=64, c2=24, k=40, norm=False, residual=(64, 24), skip=True, size=(5, 13)),
    "skip beside a pair": dict(c1=72, c2=8, k=64, norm=False, residual=(64, 0), skip=True, size=(16, 16)),
    "skip beside an upsampled pair": dict(c1=64, c2=64, k=64, norm=False, residual=(64, 0), skip=True, upsample=True,
                                          size=(8, 8)),
    "skip and relu": dict(c1=64, c2=0, k=16, residual=(64, 0), skip=True, relu=True),
    "relu": dict(c1=8, c2=0, k=8, residual=(8, 0), relu=True),
    "relu of a pair": dict(c1=64, c2=24, k=72, norm=False, emb=True, relu=True),
    "relu of a thin result": dict(c1=64, c2=0, k=3, norm=False, relu=True),
    "dropout": dict(c1=8, c2=0, k=8, dropout=0.3, residual=(8, 0)),
    "dropout of odd channels": dict(c1=12, c2=8, k=5, dropout=0.6, emb=True, scale=True, size=(7, 3)),
    "dropout of many pixels": dict(c1=64, c2=0, k=64, dropout=0.2, residual=(64, 0), size=(33, 35)),
    "dropout of a pair, upsampled": dict(c1=64, c2=32, k=16, dropout=0.1, upsample=True, silu=False),
    "dropout, linear": dict(c1=64, c2=0, k=192, r=0, dropout=0.5, silu=False, size=(16, 8)),
    "thin relu": dict(c1=2, c2=0, k=32, norm=False, emb=True, relu=True),
}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_norm_silu_conv2d(device, rng, unit):
    c1, c2, k, r = unit["c1"], unit["c2"], unit["k"], unit.get("r", 3)
    channels, upsample = c1 + c2, unit.get("upsample", False)
    image = unit.get("size", (5, 6))
    size = (2, *(length * (2 if upsample else 1) for length in image))
    residual = unit.get("residual", (0, 0))

    def normal(*shape, wanted=True):
        return rng.standard_normal(shape) if wanted else None

    norm, skip = unit.get("norm", True), unit.get("skip", False)
    arrays = dict(
        x=normal(2, *image, c1), x2=normal(2, *image, c2, wanted=c2),
        weight=normal(k, *((r, r) if r else ()), channels), bias=normal(k),
        norm_weight=normal(channels, wanted=norm), norm_bias=normal(channels, wanted=norm),
        scale=normal(2, channels, wanted=unit.get("scale")), shift=normal(2, channels, wanted=unit.get("scale")),
        emb=normal(2, k, wanted=unit.get("emb")), residual=normal(*size, residual[0], wanted=residual[0]),
        residual2=normal(*size, residual[1], wanted=residual[1]),
        skip_weight=normal(k, 1, 1, sum(residual), wanted=skip), skip_bias=normal(k, wanted=skip),
    )
    attrs = dict(num_groups=4, upsample=upsample, relu=unit.get("relu", False), silu=unit.get("silu", True))

    generators, p = {place: Generator(7, place) for place in ("cpu", device)}, unit.get("dropout")

    def fn(*tensors):
        named = dict(zip(arrays, tensors, strict=True))
        x = named.pop("x")
        mask = None if p is None else (p, generators[x.device], 1000)
        return norm_silu_conv2d(x, named.pop("x2"), **named, **attrs, dropout=mask)

    low = ("x", "x2", "weight", "residual", "residual2", "skip_weight")
    fp32_inputs = tuple(i for i, name in enumerate(arrays) if name not in low)
    # The gradient passes through two roundings of the storage type more than a single operation's.
    check_op(fn, *arrays.values(), device=device, torch_fn=torch_unit(arrays, attrs, p), fp32_inputs=fp32_inputs,
             tolerance=2)


MIXED = {
    "first": dict(c1=3, k=64, norm=False),
    "first with more": dict(c1=1, k=32, norm=False, emb=True, relu=True),
    "last": dict(c1=64, k=3),
    "last 1x1": dict(c1=64, k=1, r=1, norm=False),
    "last, linear": dict(c1=96, k=6, r=0),
    "last with more": dict(c1=64, k=3, emb=True),
    "upsampled": dict(c1=64, k=3, upsample=True),
    "pair": dict(c1=32, c2=32, k=3),
    "residual": dict(c1=3, k=64, norm=False, residual=64),
    "skip": dict(c1=64, k=3, residual=8, skip=True),
    "narrow": dict(c1=8, k=5),
}


@pytest.mark.parametrize("low", [np.dtype(bfloat16), np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("unit", MIXED.values(), ids=MIXED)
def test_a_result_of_another_dtype(device, rng, unit, widens, low):
    """By kernels that take both, or by a cast; twice, so that gradients add up, and the second time a gradient starts
    where no kernel reads packs."""
    c1, c2, k, r, residual = (unit.get(name, other) for name, other in (
        ("c1", 0), ("c2", 0), ("k", 0), ("r", 3), ("residual", 0)
    ))
    channels, upsample, dtypes = c1 + c2, unit.get("upsample", False), [low, np.dtype(np.float32)]
    own, dtype = dtypes if widens else reversed(dtypes)
    image = (2, 9, 8)
    size = (2, 18, 16) if upsample else image
    shapes = dict(x=(*image, c1), weight=(k, *((r, r) if r else ()), channels), bias=(k,))
    shapes |= dict(x2=(*image, c2)) if c2 else {}
    shapes |= dict(norm_weight=(channels,), norm_bias=(channels,)) if unit.get("norm", True) else {}
    shapes |= dict(emb=(2, k)) if "emb" in unit else {}
    shapes |= dict(residual=(*size, residual)) if residual else {}
    shapes |= dict(skip_weight=(k, 1, 1, residual)) if "skip" in unit else {}
    stored = dict.fromkeys(shapes, np.dtype(np.float32)) | dict(x=own, x2=own, residual=dtype)
    arrays = {name: rng.standard_normal(shape).astype(stored[name]) for name, shape in shapes.items()}
    attrs = dict(num_groups=4, upsample=upsample, relu=unit.get("relu", False))
    rounded = ("x", "x2", "weight", "residual", "skip_weight")
    wide = {
        name: Tensor((a.astype(low) if name in rounded else a).astype(np.float64), requires_grad=True)
        for name, a in arrays.items()
    }
    expected = norm_silu_conv2d(**wide, **attrs)
    dout = rng.standard_normal(expected.shape).astype(low)
    expected.backward(2 * dout.astype(np.float64))

    tensors = {name: Tensor(a, device=device, requires_grad=True) for name, a in arrays.items()}
    for name in ("weight", "skip_weight"):
        if name in tensors:
            tensors[name] = Parameter(tensors[name].data, low=True)
    tolerance = TOLERANCE[low] * (8 if attrs["relu"] else 2)  # a rounding may take a value past ReLU
    for start in (0, 1):
        out = norm_silu_conv2d(**tensors, **attrs, dtype=dtype)
        assert out.dtype == dtype and relative_error(out.numpy(), expected.numpy()) < tolerance
        buffer = Tensor(np.zeros(dout.size + 1, dtype), device=device).data
        given = buffer[start : start + dout.size].reshape(dout.shape)
        given[...] = Tensor(dout.astype(dtype), device=device).data
        out.backward(given)
    assert tensors["weight"].compute_copy.dtype == low  # not rounded once more by each pass
    for name, tensor in tensors.items():
        assert tensor.grad.dtype == tensor.dtype
        assert relative_error(Tensor(tensor.grad).numpy(), wide[name].grad) < tolerance, name


def test_units_in_a_row(device, rng):
    """The second norm's backward leaves sums of the gradient, from which the first unit makes those of its vectors."""
    size, c = ((2, 16, 16), 64) if device == "cuda" else ((2, 3, 2), 4)
    kernel, vector = (c, 3, 3, c), (c,)
    shapes = ((*size, c), kernel, vector, vector, vector, (size[0], c), kernel, vector, vector, vector, (c, 1, 1, c),
              vector)
    scales = (1, 0.05, 1, 1, 1, 1, 0.05, 1, 1, 1, 0.1, 1)
    arrays = [rng.standard_normal(shape) * scale for shape, scale in zip(shapes, scales, strict=True)]

    def block(x, weight, bias, norm_weight, norm_bias, emb, weight2, bias2, norm_weight2, norm_bias2, skip, skip_bias):
        h = norm_silu_conv2d(x, weight=weight, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, emb=emb,
                             num_groups=4)
        h = norm_silu_conv2d(h, weight=weight2, bias=bias2, norm_weight=norm_weight2, norm_bias=norm_bias2,
                             residual=x, skip_weight=skip, skip_bias=skip_bias, num_groups=4)
        h = norm_silu_conv2d(h, weight=weight2, bias=bias2, norm_weight=norm_weight2, norm_bias=norm_bias2,
                             residual=h, num_groups=4)
        return norm_silu_conv2d(h, weight=weight, norm_weight=norm_weight, norm_bias=norm_bias, num_groups=4)

    # Four units round in turn.
    check_op(block, *arrays, device=device, fp32_inputs=(2, 3, 4, 5, 7, 8, 9, 11), tolerance=4)


def test_an_attention_block_between_norms(device, rng):
    """Sums of dqkv come with it, those of the output go to the next norm."""
    size, c = ((2, 16, 16), 64) if device == "cuda" else ((2, 3, 2), 4)
    shapes = (*size, c), (3 * c, c), (3 * c,), (c,), (c,), (c, c), (c, 3, 3, c)
    arrays = [rng.standard_normal(shape) / (8 if len(shape) in (2, 4) else 1) for shape in shapes]
    arrays[0] *= 8

    def block(x, weight, bias, norm_weight, norm_bias, weight2, weight3):
        h = norm_silu_conv2d(x, weight=weight, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, silu=False,
                             statistics=False, num_groups=4)
        h = norm_silu_conv2d(attention_qkv(h, 2), weight=weight2, residual=x)
        return norm_silu_conv2d(h, weight=weight3, norm_weight=norm_weight, norm_bias=norm_bias, num_groups=4)

    # Three units and attention round in turn.
    check_op(block, *arrays, device=device, fp32_inputs=(2, 3, 4), tolerance=4)


@pytest.mark.gpu
@pytest.mark.parametrize("image", [(8, 8), (16, 16), (5, 7)])
@pytest.mark.parametrize("channels", [64, 20])
@pytest.mark.parametrize("kernel", [(), (1, 1), (3, 3)])
@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype, tf32", [(bfloat16, False), (np.dtype("float32"), True), (np.dtype("float32"), False)])
def test_a_convolution_leaves_each_images_sums(for_any_gpu, rng, dtype, tf32, portable, kernel, channels, image):
    """But where a tile holds rows of two images, in float32 on Hopper, and where the result is of copies with channels
    of zeros, as 3x3 taps of 20 channels of 16 bits; a linear layer's gradient is in its weight's shape.

    TMA reads 64 channels, and 20 of float32, but not 20 of 16 bits, for which conv2d.cu is taken on every GPU.
    """
    if portable:
        for_any_gpu()
    x = Tensor(rng.standard_normal((3, *image, channels)), dtype=dtype, device="cuda")
    weight = rng.standard_normal((72, *kernel, channels)) / np.sqrt(channels)
    weight = Parameter(Tensor(weight, dtype="float32", device="cuda").data, low=True)
    emb = Tensor(rng.standard_normal((3, 72)), dtype="float32", device="cuda")
    residual = Tensor(rng.standard_normal((3, *image, 72)), dtype=dtype, device="cuda")
    with allow_tf32(tf32):
        out = norm_silu_conv2d(x, weight=weight, emb=emb, residual=residual)
    out.backward(np.ones(out.shape, np.float32))
    assert weight.grad.shape == weight.shape
    on_hopper = current_target().architecture == "sm_90a"
    by_tma = on_hopper and (tf32 or (dtype == bfloat16 and channels == 64))
    exact = dtype != bfloat16 and not tf32
    copied = dtype == bfloat16 and channels == 20 and kernel == (3, 3)
    if (image == (5, 7) and not by_tma) or (exact and on_hopper) or copied:
        assert out.statistics is None
        return
    assert out.statistics.sums.shape[-1] == (2 if dtype == bfloat16 else 4)
    values, sums = out.numpy().astype(np.float64), sums_of(out.statistics)
    expected = np.stack([values.sum((1, 2)), (values**2).sum((1, 2))], -1)
    assert relative_error(sums, expected) < 1e-5


def test_a_residual_whose_gradient_has_begun(device, rng):
    """A unit passes its result's gradient on to x, whose gradient has begun: a later unit left it there."""
    size, c = ((2, 16, 16), 64) if device == "cuda" else ((2, 3, 2), 4)
    shapes = (*size, c), (c, 3, 3, c), (c, 3, 3, c), (c, 3, 3, 2 * c), (2 * c,), (2 * c,)
    scales = (1, 0.05, 0.05, 0.05, 1, 1)
    arrays = [rng.standard_normal(shape) * scale for shape, scale in zip(shapes, scales, strict=True)]

    def block(x, weight, weight2, weight3, norm_weight3, norm_bias3):
        x = norm_silu_conv2d(x, weight=weight)
        h = norm_silu_conv2d(x, weight=weight2, residual=x)
        return norm_silu_conv2d(h, x, weight=weight3, norm_weight=norm_weight3, norm_bias=norm_bias3, num_groups=4)

    # Three units round in turn.
    check_op(block, *arrays, device=device, fp32_inputs=(4, 5), tolerance=3)


def test_a_gradient_that_pending_launches_read(device, rng, monkeypatch):
    """A block's dout is also its residual's gradient, to which the first norm's backward adds while a pending launch
    still reads dout for the weight's gradient. The last units have one tensor for input and residual."""
    launched, shared, init = [], [], Slot.__init__
    monkeypatch.setattr(wgrad_sm90, "_WGRADS", replace(
        wgrad_sm90._WGRADS, run=lambda batch: (launched.append(len(batch)), wgrad_sm90._launch(batch))))

    def watched(slot, array, state=State.HOLDS, pending=None):
        init(slot, array, state, pending)
        if state is State.SHARED:
            shared.append(slot)

    monkeypatch.setattr(Slot, "__init__", watched)
    size, c = ((3, 8, 8), 64) if device == "cuda" else ((2, 3, 2), 4)
    arrays = [rng.standard_normal((*size, c)), *(rng.standard_normal((c, 3, 3, c)) * 0.05 for _ in range(4)),
              *(rng.standard_normal(c) for _ in range(8))]

    def blocks(x, *parameters):
        first, second, third, fourth = (
            dict(weight=weight, norm_weight=norm_weight, norm_bias=norm_bias, num_groups=4)
            for weight, norm_weight, norm_bias in zip(parameters[:4], parameters[4:8], parameters[8:], strict=True)
        )
        x = x * 1.0
        x = norm_silu_conv2d(norm_silu_conv2d(x, **first), residual=x, **second)
        x = norm_silu_conv2d(x, residual=x, **third)
        return norm_silu_conv2d(x, residual=x, **fourth)

    # Four units round in turn.
    check_op(blocks, *arrays, device=device, fp32_inputs=tuple(range(5, 13)), tolerance=4)
    on_hopper = device == "cuda" and current_target().architecture == "sm_90a"
    assert bool(shared) == on_hopper and set(launched) == ({4} if on_hopper else set())


PAIRS = [  # shapes of x, x2, weight, residual, residual2, skip weight
    ((2, 16, 16, 64), (2, 16, 16, 32), (64, 3, 3, 96), None, None, None),
    ((2, 16, 16, 64), None, (64, 3, 3, 64), (2, 16, 16, 64), (2, 16, 16, 32), (64, 1, 1, 96)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["out", "x"])
@pytest.mark.parametrize("shapes", PAIRS)
def test_pairs_and_gradients_that_tma_cannot_read(rng, shapes, which):
    """A caller's gradient may start anywhere."""
    x, x2, weight, residual, residual2, skip = (
        None if shape is None else Tensor(rng.standard_normal(shape) * 0.1, dtype=bfloat16, device="cuda")
        for shape in shapes
    )
    tensors = [t for t in (x, x2, weight, residual, residual2, skip) if t is not None]
    for tensor in tensors:
        tensor.requires_grad = True
    dout = rng.standard_normal((2, 16, 16, 64)).astype(bfloat16)

    def gradients(displaced):
        for tensor in tensors:
            tensor.grad = None
        given = {}
        for name, array in (("out", dout), ("x", np.zeros(x.shape, bfloat16))):
            buffer = Tensor(np.zeros(array.size + 8, bfloat16), device="cuda").data
            start = int(name == displaced)
            given[name] = buffer[start : start + array.size].reshape(array.shape)
            given[name][...] = Tensor(array, device="cuda").data
        x.grad = given["x"]
        out = norm_silu_conv2d(x, x2, weight=weight, residual=residual, residual2=residual2, skip_weight=skip)
        out.backward(given["out"])
        return [Tensor(tensor.grad).numpy().astype(np.float64) for tensor in tensors]

    for got, expected in zip(gradients(which), gradients(None), strict=True):
        assert relative_error(got, expected) < 1e-2


@pytest.mark.gpu
def test_two_sources_of_more_columns_than_their_weights_gradient_takes(rng):
    """Hopper's forward reads both in place, and conv2d.cu makes that gradient."""
    shapes = (1, 3, 136, 64), (1, 3, 136, 40), (48, 3, 3, 104), (1, 3, 136, 48)
    arrays = [rng.standard_normal(shape).astype(bfloat16) for shape in shapes]

    def results(device, dtype):
        x, x2, weight = (Tensor(a.astype(dtype), device=device, requires_grad=True) for a in arrays[:3])
        out = norm_silu_conv2d(x, x2, weight=weight)
        out.backward(arrays[3].astype(dtype))
        return [out.numpy(), *(Tensor(tensor.grad).numpy() for tensor in (x, x2, weight))]

    for got, expected in zip(results("cuda", bfloat16), results("cpu", np.float64), strict=True):
        assert relative_error(got.astype(np.float64), expected) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("begun", [True, False])
def test_a_residual_whose_gradient_has_another_dtype(rng, begun):
    """A parameter that is read in 16 bits: its gradient is float32."""
    x, dout = (Tensor(rng.standard_normal((2, 16, 16, 64)), dtype=bfloat16, device="cuda") for _ in range(2))
    weight = Tensor(rng.standard_normal((64, 3, 3, 64)), dtype=bfloat16, device="cuda", requires_grad=True)
    residual = Parameter(Tensor(rng.standard_normal((2, 16, 16, 64)), dtype="float32", device="cuda").data, low=True)
    if begun:
        residual.grad = Tensor(np.zeros(residual.shape, np.float32), device="cuda").data
    for times in (1, 2):
        norm_silu_conv2d(x, weight=weight, residual=residual).backward(dout.data)
        assert residual.grad.dtype == np.float32
        np.testing.assert_array_equal(Tensor(residual.grad).numpy(), times * dout.numpy().astype(np.float32))


def test_no_images(device):
    x, emb, weight = (Tensor(np.zeros(shape, np.float32), device=device, requires_grad=True)
                      for shape in ((0, 8, 8, 32), (0, 16), (16, 3, 3, 32)))
    out = norm_silu_conv2d(x, weight=weight, emb=emb)
    out.backward(np.zeros(out.shape, np.float32))
    assert out.shape == (0, 8, 8, 16) and emb.grad.shape == (0, 16)


def torch_unit(arrays, attrs, p=None):
    def apply(*tensors):
        part = dict(zip(arrays, tensors, strict=True))
        functional = torch.nn.functional

        def joined(*names):
            return torch.cat([part[name] for name in names if part[name] is not None], 3).permute(0, 3, 1, 2)

        h = joined("x", "x2")
        if part["norm_weight"] is not None:
            h = functional.group_norm(h, attrs["num_groups"], part["norm_weight"], part["norm_bias"], 1e-5)
            if part["scale"] is not None:
                h = h * (1 + part["scale"][:, :, None, None]) + part["shift"][:, :, None, None]
            h = functional.silu(h) if attrs["silu"] else h
        if p:
            ones = Tensor(np.ones((h.shape[0], *h.shape[2:], h.shape[1])))
            h = h * torch.from_numpy(dropout(ones, p, Generator(7), 1000).numpy()).permute(0, 3, 1, 2)
        if attrs["upsample"]:
            h = functional.interpolate(h, scale_factor=2)
        weight = part["weight"]
        weight = weight[:, :, None, None] if weight.ndim == 2 else weight.permute(0, 3, 1, 2)
        out = functional.conv2d(h, weight, part["bias"], padding=weight.shape[2] // 2)
        if part["emb"] is not None:
            out = out + part["emb"][:, :, None, None]
        if part["skip_weight"] is not None:
            skip_weight = part["skip_weight"].permute(0, 3, 1, 2)
            out = out + functional.conv2d(joined("residual", "residual2"), skip_weight, part["skip_bias"])
        elif part["residual"] is not None:
            out = out + joined("residual")
        return (out.relu() if attrs["relu"] else out).permute(0, 2, 3, 1)

    return apply


@pytest.mark.parametrize("changes, message", [
    (dict(x=(2, 5, 8)), "does not fit weight"),
    (dict(weight=(4, 3, 8)), "does not fit weight"),
    (dict(weight=(8,)), "does not fit weight"),
    (dict(weight=(4, 3, 3, 7)), "does not fit weight"),
    (dict(weight=(0, 3, 3, 8), bias=None, skip_weight=None, skip_bias=None, residual=None), "an axis of size 0"),
    (dict(bias=(3,)), "the bias"),
    (dict(residual=(2, 5, 6, 7)), "skip_weight"),
    (dict(residual=None), "skip_weight"),
    (dict(skip_weight=(1, 1, 1, 8)), "skip_weight"),
    (dict(skip_weight=(4, 8)), "skip_weight"),
    (dict(skip_bias=(3,)), "the bias"),
    (dict(x2=(2, 5, 5, 4), weight=(4, 3, 3, 12)), "x2 has shape"),
    (dict(x2=(1, 5, 6, 4), weight=(4, 3, 3, 12)), "x2 has shape"),
    (dict(emb=(1, 4)), "emb has shape"),
    (dict(residual=(2, 5, 5, 8)), "residual has shape"),
    (dict(residual=(2, 5, 6, 4), residual2=(2, 6, 5, 4)), "residual2 has shape"),
    (dict(skip_weight=None, skip_bias=None), "residual has shape"),
    (dict(skip_weight=None, skip_bias=None, residual=(2, 5, 6, 4), residual2=(2, 5, 6, 4)), "residual2 needs"),
    (dict(norm_weight=(4,), norm_bias=(8,)), "the norm's weight"),
    (dict(x=(2, 0, 6, 8), residual=(2, 0, 6, 8), norm_weight=(8,), norm_bias=(8,)), "nothing to normalise"),
    (dict(x=(2, 5, 6, 0), x2=(2, 5, 6, 8), norm_weight=(8,), norm_bias=(8,)), "nothing to normalise"),
    (dict(norm_weight=(8,), norm_bias=(8,), scale=(1, 8)), "the norm's scale"),
], ids=str)
def test_sizes_that_do_not_fit(device, changes, message):
    shapes = dict(x=(2, 5, 6, 8), weight=(4, 3, 3, 8), bias=(4,), residual=(2, 5, 6, 8), skip_weight=(4, 1, 1, 8),
                  skip_bias=(4,)) | changes
    tensors = {
        name: None if shape is None else Tensor(np.zeros(shape, np.float32), device=device)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        norm_silu_conv2d(tensors.pop("x"), **tensors, num_groups=4)


def test_groups_that_do_not_divide(device):
    x, weight, vector = (Tensor(np.ones(shape, np.float32), device=device) for shape in ((1, 2, 2, 8), (4, 8), (8,)))
    with pytest.raises(ValueError, match="8 channels do not divide into 3 groups"):
        norm_silu_conv2d(x, weight=weight, norm_weight=vector, norm_bias=vector, num_groups=3)


@pytest.mark.parametrize("low", [bfloat16, np.float16], ids=["bf16", "fp16"])
def test_sources_of_another_dtype_are_rounded_to_that_of_x(device, rng, low):
    shapes = dict(x=(2, 4, 4, 8), x2=(2, 4, 4, 8), weight=(8, 3, 3, 16), residual=(2, 4, 4, 8))
    arrays = {name: rng.standard_normal(shape).astype(low) for name, shape in shapes.items()}
    results = []
    for dtype in (low, np.float32):
        tensors = {name: Tensor(a.astype(dtype if name in ("x2", "residual") else low), device=device,
                                requires_grad=True) for name, a in arrays.items()}
        out = norm_silu_conv2d(**tensors)
        out.backward(np.ones(out.shape, low))
        assert out.dtype == low
        assert all(tensors[name].grad.dtype == tensors[name].dtype for name in ("x", "x2", "residual"))
        results.append([out.numpy(), *(Tensor(t.grad).numpy().astype(np.float32) for t in tensors.values())])
    for same, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(same, expected)


@pytest.mark.parametrize("own, dtype", [(np.uint8, np.float32), (np.float32, np.int32), (np.float32, bool)])
def test_only_floats_are_converted(device, own, dtype):
    weight = Tensor(np.ones((4, 3, 3, 8), np.float32), device=device)
    with pytest.raises(TypeError, match=r"floating.*use"):
        norm_silu_conv2d(Tensor(np.ones((1, 2, 2, 8), own), device=device), weight=weight, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("r, s", [(3, 5), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("x2", [0, 8])
def test_oblong_kernels(rng, x2, r, s):
    """Padded by R // 2 on all sides, as on the CPU: from one source or two, with a skip path."""
    size = (6 + 2 * (r // 2) - r + 1, 8 + 2 * (r // 2) - s + 1)
    shapes = [(2, 6, 8, 64), (2, 6, 8, x2) if x2 else None, (16, r, s, 64 + x2), (2, *size, 8), (16, 1, 1, 8)]
    arrays = [None if shape is None else rng.standard_normal(shape).astype(bfloat16) for shape in shapes]
    dout = rng.standard_normal((2, *size, 16)).astype(bfloat16)

    def results(device, dtype):
        tensors = [None if a is None else Tensor(a.astype(dtype), device=device, requires_grad=True) for a in arrays]
        x, second, weight, residual, skip = tensors
        out = norm_silu_conv2d(x, second, weight=weight, residual=residual, skip_weight=skip)
        out.backward(dout.astype(dtype))
        return [out.numpy(), *(Tensor(t.grad).numpy() for t in tensors if t is not None)]

    for got, expected in zip(results("cuda", bfloat16), results("cpu", np.float64), strict=True):
        assert got.shape == expected.shape and relative_error(got, expected) < 1.6e-2


def test_silu_follows_the_norm_unless_told(rng):
    x, weight, ones = (Tensor(rng.standard_normal(shape)) for shape in ((1, 3, 3, 4), (2, 3, 3, 4), (4,)))
    options = dict(weight=weight, norm_weight=ones, norm_bias=ones, num_groups=2)
    more = {}, {"silu": True}, {"silu": False}
    default, with_it, without = (norm_silu_conv2d(x, **options, **given).numpy() for given in more)
    np.testing.assert_array_equal(default, with_it)
    assert not np.allclose(default, without)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "norm_weight", "norm_bias", "scale", "shift", "emb"])
def test_integers_are_refused(name):
    shapes = {"x": (2, 3, 3, 4), "weight": (5, 3, 3, 4), "bias": (5,), "norm_weight": (4,), "norm_bias": (4,),
              "scale": (2, 4), "shift": (2, 4), "emb": (2, 5)}
    tensors = {key: Tensor(np.ones(shape, np.int32 if key == name else np.float32)) for key, shape in shapes.items()}
    with pytest.raises(TypeError, match="needs floating tensors, not int32"):
        norm_silu_conv2d(**tensors, num_groups=2)
