"""Every kernel for any GPU is launched on the stand-in, with arguments that are checked, but for those named here."""

import numpy as np
import pytest

from cudiff import Tensor, ops
from cudiff.backend import bfloat16
from cudiff.cuda import module
from cudiff.cuda.module import kernel_folder
from tests.test_operands import OPS

UNARY = {
    name: getattr(ops, name)
    for name in ("negative", "exp", "log", "sqrt", "sin", "cos", "tanh", "abs", "square", "relu", "sigmoid", "silu",
                 "gelu", "sum", "max", "min", "var", "softmax", "log_softmax")
}
UNARY |= {
    "clip": lambda x: ops.clip(x, 0.0, 1.0), "sum over one axis": lambda x: ops.sum(x, 1),
    "getitem": lambda x: x[[0, 1]],
    "transpose": ops.transpose, "pad": lambda x: ops.pad(x, 1), "embedding": lambda x: ops.embedding([0, 1], x),
    "dropout": lambda x: ops.dropout(x, 0.5, ops.Generator(0, "cuda"), 0),
    "cross_entropy": lambda x: ops.cross_entropy(x, [0, 1, 2, 3]),
    "slice": lambda x: x[1:, 2:] + x[1:, 2:] * x[:-1, 2:], "astype": lambda x: ops.astype(x, "float32"),
}
IMAGE = {
    "avg_pool2d": ops.avg_pool2d, "max_pool2d": ops.max_pool2d, "upsample_nearest": ops.upsample_nearest,
    "thin": lambda x: ops.conv2d(x, Tensor(np.ones((3, 3, 3, 64), x.dtype), device="cuda"), padding=1),
    "qkv": lambda x: ops.attention_qkv(ops.concatenate((x, x, x), 3), 2),
}
# Not reached by small operands one by one, but by training steps (tests/test_host.py) or on a GPU only.
ELSEWHERE = {("optim", name) for name in module.kernels("optim")} | {
    ("conv2d_thin", "wgrad"), ("elementwise", "relu_backward_sums"), ("group_norm", "finish_statistics"),
    ("group_norm", "finish_sums"), ("shape", "add_packed"), ("shape", "fill"), ("shape", "turn"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what no kernel wrote is undefined
def test_every_kernel_of_a_portable_file_is_launched(host_of):
    host = host_of(False)
    running = [Tensor(host.zeros(16, np.float32)) for _ in range(2)]
    for dtype in (np.dtype(np.float32), bfloat16, np.dtype(np.float16)):
        def tensor(size, dtype=dtype):
            return Tensor(host.asarray(np.ones(size, dtype)), requires_grad=True)

        cases = [(call, sizes) for name, (sizes, call) in OPS.items() if name != "batch_norm"]
        for training in (True, False):
            cases.append((lambda x, w, b, training=training: ops.batch_norm(x, w, b, *running, training=training),
                          OPS["batch_norm"][0][:3]))
        cases += [(call, ((4, 16),)) for call in UNARY.values()] + [(call, ((2, 8, 8, 64),)) for call in IMAGE.values()]
        cases += [(call, ((4, 16), (4, 16))) for call in (ops.minimum, ops.subtract)]
        for call, sizes in cases:
            out = call(*map(tensor, sizes))
            if out.requires_grad:
                out.backward(host.asarray(np.ones(out.shape, out.dtype)))
    images = Tensor(host.zeros((4, 8, 8, 3), np.uint8))
    ops.draw_batch(images, [0, 1, 2, 3], Tensor(host.zeros(1, np.int32)), 2, 0)
    ops.normalize_images(images)
    generator = ops.Generator(0, "cuda")
    generator.normal(4), generator.uniform(4), generator.randint(0, 9, 4), generator.advance()
    every = {
        (path.stem, name) for path in kernel_folder().glob("*.cu") if not path.stem.endswith("_sm90")
        for name in module.kernels(path.stem)
    }
    missing = every - set(host.launches) - ELSEWHERE
    assert not missing, ' '.join(map('.'.join, sorted(missing)))
