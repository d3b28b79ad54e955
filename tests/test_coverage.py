"""Every kernel is launched on the stand-ins for a GPU of Hopper and for an older one, with checked arguments."""

import functools
import math

import numpy as np
import pytest

from cudiff import Tensor, nn, ops
from cudiff.backend import bfloat16
from cudiff.cuda import compiler
from cudiff.cuda.compiler import kernel_folder
from cudiff.ops.integer import integer
from cudiff.ops.matmul import split_linear
from cudiff.optim import SGD, AdamW, Lion, LossScale, RMSprop, Tabulated
from cudiff.precision import allow_tf32
from cudiff.tensor import no_grad
from tests.test_operands import OPS

UNARY = {
    name: getattr(ops, name)
    for name in ("negative", "exp", "log", "sqrt", "cbrt", "sin", "cos", "tanh", "abs", "square", "relu", "sigmoid",
                 "silu", "gelu", "exp2", "log2", "log10", "arcsin", "arccos", "arctan", "sinh", "cosh", "arcsinh",
                 "arccosh", "arctanh", "sign", "floor", "ceil", "round", "log1p", "expm1", "tan", "softplus",
                 "sum", "max", "min", "var", "std", "softmax", "log_softmax",
                 "logsumexp")
}
UNARY |= {
    "clip": lambda x: ops.clip(x, 0.0, 1.0), "sum over one axis": lambda x: ops.sum(x, 1),
    "prod": lambda x: ops.prod(x.detach()), "argmax": ops.argmax, "cumsum": ops.cumsum,
    "one_hot": lambda x: ops.one_hot(x.detach().astype("int32"), 3),
    "getitem": lambda x: x[[0, 1]], "long index": lambda x: x[np.zeros(5000, int)],
    "sorted index": lambda x: ops.repeat(x, 1 << 11, 1).flatten()[np.zeros((1 << 21) + 1, int)],
    "at": lambda x: x.at[[0, 1]].set(1), "mask": lambda x: x[[True, False, True, True]],
    "transpose": ops.transpose, "pad": lambda x: ops.pad(x, 1), "embedding": lambda x: ops.embedding([0, 1], x),
    "index of int64": lambda x: x[Tensor([0, 1], dtype="int64", device="cuda")],
    "dropout": lambda x: ops.dropout(x, 0.5, ops.Generator(0, "cuda"), 0),
    "cross_entropy": lambda x: ops.cross_entropy(x, [0, 1, 2, 3]),
    "slice": lambda x: x[1:, 2:] + x[1:, 2:] * x[:-1, 2:], "astype": lambda x: ops.astype(x, "float32"),
    "blend": lambda x: ops.blend_to_uint8(x, Tensor(np.zeros(x.shape, np.uint8), device="cuda")),
    "frame": lambda x: ops.blended_frame(x, x, x[:, 0], ops.zeros(x.shape, np.uint8, "cuda"), 0.5, "eps")[0],
}
IMAGE = {
    "avg_pool2d": ops.avg_pool2d, "max_pool2d": ops.max_pool2d, "upsample_nearest": ops.upsample_nearest,
    "few channels": lambda x: ops.conv2d(x, Tensor(np.ones((3, 3, 3, 64), x.dtype), device="cuda"), padding=1),
    "qkv": lambda x: ops.attention_qkv(ops.concatenate((x, x, x), 3), 2),
}
CHOSEN = {  # for kernels that the others do not need: shapes of operands, and the call
    "add_packed": (((4, 8, 64),), lambda x: x[1:] * x[:-1]),
    "turned": (((40, 64),), lambda x: (x.T * x.T).T + x),
    "join": (((4, 3), (4, 5)), lambda *x: ops.concatenate(x, 1)),
    "fit": (((515, 515), (515, 517)), ops.matmul),
    "taken columns": (((4, 16),), lambda x: x[:, [3, 0, 3]] * 1),
    "fill": (((4, 16),), lambda x: ops.pad(x, 1, constant_values=1.0)),
    "few out": (((2, 8, 8, 64), (3, 3, 3, 64)), lambda x, w: ops.conv2d(x, w, padding=1)),
    "few out of many more": (((2, 8, 8, 192), (3, 3, 3, 192)), lambda x, w: ops.conv2d(x, w, padding=1)),
    "few in": (((2, 8, 8, 3), (64, 3, 3, 3)), lambda x, w: ops.conv2d(x, w, padding=1)),
    "depthwise": (((2, 8, 8, 64), (64, 3, 3, 1)), lambda x, w: ops.conv2d(x, w, padding=1, groups=64)),
    "grouped": (((2, 8, 8, 64), (64, 3, 3, 16)), lambda x, w: ops.conv2d(x, w, padding=1, groups=4)),
    "strided": (((32, 16, 16, 64), (64, 5, 5, 64)), lambda x, w: ops.conv2d(x, w, stride=2, padding=2)),
    "relu": (((2, 8, 8, 64),), lambda x: ops.relu(ops.relu(x))),
    "tf32": (((2, 8, 8, 64), (64, 3, 3, 64)), lambda x, w: allow_tf32()(ops.conv2d)(x, w, padding=1)),
    "wide norm": (((2, 4, 4096), (4096,), (4096,)), lambda x, w, b: ops.group_norm(x, w, b, num_groups=2)),
    "norm of long rows": (((2, 10248), (10248,), (10248,)), ops.layer_norm),
    "modulated": (((2, 16), (2, 16), (2, 16)), functools.partial(ops.layer_norm, plus_one=True)),
    "norm": (((2, 16, 16, 64), (64,), (64,)), lambda x, w, b: ops.group_norm(x, w, b, num_groups=8)),
    "linear": (((1000, 512), (1024, 512)), ops.linear),
    "huber": (((4, 16), (4, 16)), ops.huber),
    "linear in parts": (((4, 16), (32, 16), (32,)), lambda *x: math.prod(split_linear(*x, 2))),
    "linear of few rows": (((3, 1024), (1024, 1024)), ops.linear),
    "grouped linear of more rows": (((9, 8), (16, 8), (16,)), lambda x, w, b: ops.grouped_linear(x, [w], [b])[0]),
    "tanh-GELU": (((4, 16),), lambda x: ops.gelu(x, approximate="tanh")),
    "mlp": (((8, 16), (32, 16), (32,), (16, 32), (16,)), ops.mlp),
    **{f"mlp by {name}": (((8, 16), (32, 16), (32,), (16, 32), (16,)), functools.partial(ops.mlp, activation=name))
       for name in ("silu", "gelu_tanh")},
    "gated linear": (((1, 130, 16), (8, 16), (8,), (1, 130, 8), (1, 8)), lambda *x: _gated(*x) + ops.linear(*x)),
    "attention": (((2, 64, 2, 64),) * 3, ops.attention),
    "attention long": (((2, 256, 2, 64),) * 3, ops.attention),
    "attention of wide heads": (((2, 512, 2, 96),) * 3, ops.attention),
    "attention of long sequences": (((4, 640, 6, 64),) * 3, ops.attention),
    "masked attention": (((2, 64, 2, 64),) * 3, lambda *qkv: ops.attention(*qkv, np.tri(64, dtype=bool))),
}


def _gated(*operands):
    with no_grad():
        return ops.linear(*operands)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what no kernel wrote is undefined
def test_every_kernel_is_launched(host_of):
    launched = set()
    for hopper in (False, True):
        host = host_of(hopper)
        for dtype in (np.dtype(np.float32), bfloat16, np.dtype(np.float16)):
            launch_all(host, dtype)
        images = Tensor(host.zeros((4, 8, 8, 3), np.uint8))
        for drawn in (images, Tensor(host.zeros((4, 8, 8, 4), np.float16))):
            ops.draw_batch(drawn, [0, 1, 2, 3], Tensor(host.zeros(1, np.int32)), 2, 0)
        ops.normalize_images(images)
        for name in compiler.declarations("compare").kernels:
            getattr(ops, name)(images, 3).sum()
        for name in set(compiler.declarations("integer").kernels) - {"where"}:
            integer(name, images, 3).max().min()
        ops.where(images > 0, images, 1)
        images.astype(bool)
        generator = ops.Generator(0, "cuda")
        generator.normal(4), generator.uniform(4), generator.randint(0, 9, 4), generator.advance()
        for optimizer in (AdamW, SGD, RMSprop, Lion):
            optimizer(nn.Linear(3, 2).flatten("cuda"), schedule=Tabulated(lambda step: 1.0, 3)).step()
        model = nn.Linear(3, 2).flatten("cuda")
        optimizer = SGD(model)
        optimizer.loss_scale = LossScale()
        optimizer.backward(model(Tensor(host.zeros((1, 3), np.float32))).sum())
        optimizer.step()
        launched |= set(host.launches)
    stems = [path.stem for path in kernel_folder().glob("*/*.cu")]
    every = {(stem, name) for stem in stems for name in compiler.declarations(stem).kernels}
    missing = every - launched
    assert not missing, " ".join(map(".".join, sorted(missing)))


def launch_all(host, dtype):
    """Forward and backward of every op, with operands of one dtype."""
    running = [Tensor(host.zeros(16, np.float32)) for _ in range(2)]
    cases = [(call, sizes) for name, (sizes, call) in OPS.items() if name != "batch_norm"]
    for training in (True, False):
        cases.append((lambda x, w, b, training=training: ops.batch_norm(x, w, b, *running, training=training),
                      OPS["batch_norm"][0][:3]))
    cases += [(call, ((4, 16),)) for call in UNARY.values()] + [(call, ((2, 8, 8, 64),)) for call in IMAGE.values()]
    cases += [(call, ((4, 16), (4, 16))) for call in (
        ops.minimum, ops.subtract, ops.arctan2, ops.floor_divide, ops.hypot, ops.remainder,
    )]
    cases += [(call, sizes) for sizes, call in CHOSEN.values()]
    for call, sizes in cases:
        out = call(*(Tensor(host.asarray(np.ones(size, dtype)), requires_grad=True) for size in sizes))
        if out.requires_grad:
            out.backward(host.asarray(np.ones(out.shape, out.dtype)))
