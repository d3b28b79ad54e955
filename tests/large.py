"""Operations on arrays of more than 2^31 elements, on a GPU with 139 GiB: `python -m tests.large [NAME ...]`.

An index of 32 bits becomes negative at 2^31. Each case gives an operation so many rows that an array of it passes 2^31.
Rows at the beginning, about element 2^31 and at the end must be what the operation gives for those rows alone, and so
must their gradients. A gradient of weights must be the sum of those of the two halves of the rows. `--share 0/3` takes
every third case: three processes have room beside each other, but for attention and float32. What an access outside of
memory spoils ends the process.

`--elements 5000 --device cpu` tries the cases themselves, without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import cudiff
from cudiff import ops
from cudiff.backend import Array, array_module, bfloat16, float16, float32, free_memory, int32
from cudiff.ops.batch import shuffled_index
from cudiff.optim import AdamW
from cudiff.tensor import Tensor

PERIOD = 16_777_259  # a prime: values repeat at no power of two
ROWS = 3
LIMIT, DEVICE = 2**31, "cuda"
CASES: dict[str, Callable[[], None]] = {}


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(check: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = check
        return check

    return add


def xp() -> Any:
    return array_module(DEVICE)


@functools.cache
def some(dtype: Any, seed: int) -> Array:
    """PERIOD normal numbers, or integers in [0, 256) for uint8."""
    rng = np.random.default_rng(seed)
    if dtype == np.uint8:
        return Tensor(rng.integers(0, 256, PERIOD, np.uint8), device=DEVICE).data
    return Tensor(rng.standard_normal(PERIOD, np.float32), device=DEVICE).astype(dtype).data


def array(shape: Sequence[int], dtype: Any = bfloat16, seed: int = 0) -> Array:
    """Of the numbers in `some`, again and again."""
    size, part = int(np.prod(shape)), some(np.dtype(dtype), seed)
    whole = xp().empty(size, part.dtype)
    for start in range(0, size, PERIOD):
        whole[start : start + PERIOD] = part[: size - start]
    return whole.reshape(shape)


def rows_past(limit: int, row: Sequence[int]) -> int:
    return limit // int(np.prod(row)) + ROWS


def tensors(*arrays: Array) -> list[Tensor]:
    return [Tensor(a, requires_grad=np.issubdtype(a.dtype, np.floating) or a.dtype == bfloat16) for a in arrays]


def near(what: str, found: Any, expected: Any) -> None:
    a, b = (np.asarray(Tensor(x).numpy(), np.float64) for x in (found, expected))
    if a.shape != b.shape:
        raise AssertionError(f"{what}: shape {a.shape}, not {b.shape}")
    bound = 0.01 * np.abs(b) + 0.01 * (np.abs(b).max() if b.size else 0)
    wrong = ~(np.abs(a - b) <= bound)
    if wrong.any():
        raise AssertionError(f"{what}: {wrong.mean():.0%} differ, {a[wrong][:3]} for {b[wrong][:3]}")


def spots(*arrays: Array) -> list[slice]:
    """Rows at the beginning, at the end, and about element 2^31 of each array."""
    n = len(arrays[0])
    found = {0, n - ROWS} | {LIMIT // (a.size // n) - 1 for a in arrays}
    return [slice(at, at + ROWS) for at in sorted(found) if 0 <= at <= n - ROWS]


def by_rows(f: Callable[..., Tensor], *inputs: Array, weights: Sequence[Array] = ()) -> None:
    """Compare `f(*inputs, *weights)`, of which each row depends on that row of the inputs alone, with parts."""
    xs, ws = tensors(*inputs), tensors(*weights)
    out = f(*xs, *ws)
    trained = out.requires_grad
    dout = array(out.shape, out.dtype, 7) if trained else None
    values = out.data
    for spot in spots(*inputs, values):
        near(f"rows {spot.start}", values[spot], f(*tensors(*(a[spot] for a in inputs)), *tensors(*weights)).data)
    if dout is None:
        return
    out.backward(dout)
    for spot in spots(*inputs, values):
        parts = tensors(*(a[spot] for a in inputs))
        f(*parts, *tensors(*weights)).backward(dout[spot])
        for i, (x, part) in enumerate(zip(xs, parts, strict=True)):
            if x.requires_grad:
                near(f"gradient {i} of rows {spot.start}", x.grad[spot], part.grad)
    whole, sums = [Tensor(w.grad).numpy().astype(np.float64) for w in ws], [0.0 for _ in ws]
    del xs, out, values
    if not ws:
        return
    half = len(inputs[0]) // 2
    for spot in (slice(0, half), slice(half, None)):
        parts = tensors(*weights)
        f(*(Tensor(a[spot]) for a in inputs), *parts).backward(dout[spot])
        sums = [total + Tensor(w.grad).numpy().astype(np.float64) for total, w in zip(sums, parts, strict=True)]
    for i, (a, b) in enumerate(zip(whole, sums, strict=True)):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        if not error < 0.02:
            raise AssertionError(f"gradient of weight {i}: {error:.3f} away")


def small(*shape: int, dtype: Any = float32, scale: float = 1.0) -> Array:
    return (Tensor(array(shape, float32, 3), device=DEVICE) * scale).astype(dtype).data


def add_rows(name: str, f: Callable[..., Tensor], row: Sequence[int], dtype: Any = bfloat16, inputs: int = 1,
             weights: Callable[[], Sequence[Array]] = lambda: (), longest: Sequence[int] | None = None) -> None:
    """A case by rows. longest: a row of the result, where that is the array that passes 2^31."""
    def check() -> None:
        n = rows_past(LIMIT, longest or row)
        by_rows(f, *(array((n, *row), dtype, i) for i in range(inputs)), weights=weights())

    case(name)(check)


for name, f in {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "exp": ops.exp,
    "clip": lambda x: x.clip(-1, 1),
    "sqrt of abs": lambda x: (abs(x) + 1).sqrt(),
    "softmax": ops.softmax,
    "log_softmax": ops.log_softmax,
    "sum of a row": lambda x: x.sum(1),
    "max of a row": lambda x: x.max(1),
    "std of a row": lambda x: x.std(1),
    "cumsum of a row": lambda x: ops.cumsum(x, 1),
    "flip": lambda x: ops.flip(x, 1),
    "roll": lambda x: ops.roll(x, 5, 1),
    "pad": lambda x: ops.pad(x, ((0, 0), (1, 2))),
    "columns": lambda x: x[:, 3:700:3],
    "a row added": lambda x: x + ops.arange(1000, device=DEVICE).astype(bfloat16),
    "swapped axes": lambda x: x.reshape(-1, 10, 100).transpose(0, 2, 1),
    "repeat": lambda x: ops.repeat(x[:, :400], 2, 1),
    "to float32": lambda x: x.astype(float32),
    "to float16": lambda x: x.astype(float16),
    "where": lambda x: ops.where(x > 0, x, 2.0),
    "concatenate": lambda x: ops.concatenate([x, x[:, :24]], 1),
    "cube": lambda x: x**3,
    "argmax of a row": lambda x: ops.argmax(x, 1),
    "greater": lambda x: x > 0.5,
    "one column": lambda x: x[:, 999],
}.items():
    add_rows(name, f, (1000,))
add_rows("silu of float32", ops.silu, (1000,), float32)
add_rows("product of two", lambda x, y: x * y, (1000,), inputs=2)
add_rows("maximum", ops.maximum, (1000,), inputs=2)
add_rows("stack", lambda x, y: ops.stack([x, y], 1), (512,), inputs=2, longest=(1024,))
add_rows("repeated rows", lambda x: ops.broadcast_to(x[:, None], (len(x), 16, 64)) * 1.0, (64,), longest=(1024,))
add_rows("layer_norm", ops.layer_norm, (1024,), weights=lambda: (small(1024), small(1024)))
add_rows("layer_norm of float32", ops.layer_norm, (1000,), float32, weights=lambda: (small(1000), small(1000)))
for kind in (bfloat16, float32):
    called = np.dtype(kind).name
    add_rows(f"group_norm {called}", lambda x, w, b: ops.group_norm(x, w, b, silu=True), (16, 16, 64), kind,
             weights=lambda: (small(64), small(64)))
    add_rows(f"conv2d {called}", lambda x, w, b: ops.conv2d(x, w, b, padding=1), (32, 32, 64), kind,
             weights=lambda kind=kind: (small(64, 3, 3, 64, dtype=kind, scale=0.05), small(64)))
    add_rows(f"linear {called}", ops.linear, (1024,), kind,
             weights=lambda kind=kind: (small(1024, 1024, dtype=kind, scale=0.03), small(1024)))
add_rows("conv2d of few rows of 40", lambda x, w: ops.conv2d(x, w, padding=1), (24, 40, 40),
         weights=lambda: (small(72, 3, 3, 40, dtype=bfloat16, scale=0.05),))
add_rows("conv2d of 7x7", lambda x, w: ops.conv2d(x, w, padding=1), (7, 7, 128),
         weights=lambda: (small(128, 3, 3, 128, dtype=bfloat16, scale=0.03),))
add_rows("conv2d, stride 2", lambda x, w: ops.conv2d(x, w, stride=2, padding=1), (32, 32, 64),
         weights=lambda: (small(64, 3, 3, 64, dtype=bfloat16, scale=0.05),))
add_rows("conv2d in groups", lambda x, w: ops.conv2d(x, w, padding=1, groups=4), (32, 32, 64),
         weights=lambda: (small(64, 3, 3, 16, dtype=bfloat16, scale=0.1),))
add_rows("conv2d, depthwise", lambda x, w: ops.conv2d(x, w, padding=1, groups=64), (32, 32, 64),
         weights=lambda: (small(64, 3, 3, 1, dtype=bfloat16, scale=0.3),))
add_rows("conv2d of 1x1", ops.conv2d, (32, 32, 64), weights=lambda: (small(64, 1, 1, 64, dtype=bfloat16, scale=0.1),))
add_rows("conv2d to many channels", lambda x, w: ops.conv2d(x, w, padding=1), (64, 64, 3), longest=(64, 64, 64),
         weights=lambda: (small(64, 3, 3, 3, dtype=bfloat16, scale=0.2),))
add_rows("conv2d to few channels", lambda x, w: ops.conv2d(x, w, padding=1), (64, 64, 64),
         weights=lambda: (small(3, 3, 3, 64, dtype=bfloat16, scale=0.05),))
add_rows("conv_transpose2d", lambda x, w: ops.conv_transpose2d(x, w, stride=2), (16, 16, 64), longest=(32, 32, 64),
         weights=lambda: (small(64, 2, 2, 64, dtype=bfloat16, scale=0.1),))
add_rows("a U-Net's unit",
         lambda x, r, w, n, m: ops.norm_silu_conv2d(x, weight=w, norm_weight=n, norm_bias=m, residual=r), (32, 32, 64),
         inputs=2, weights=lambda: (small(64, 3, 3, 64, dtype=bfloat16, scale=0.05), small(64), small(64)))
add_rows("mlp", lambda x, w, v: ops.mlp(x, w, None, v, None), (256,), longest=(1024,),
         weights=lambda: (small(1024, 256, dtype=bfloat16, scale=0.06), small(256, 1024, dtype=bfloat16, scale=0.03)))
add_rows("avg_pool2d", ops.avg_pool2d, (32, 32, 64))
add_rows("max_pool2d", ops.max_pool2d, (32, 32, 64))
add_rows("upsample_nearest", ops.upsample_nearest, (16, 16, 64), longest=(32, 32, 64))
add_rows("matmul of a batch", lambda x, y: x @ y, (64, 64), inputs=2)
add_rows("grouped_linear", lambda x, w, b: ops.grouped_linear(x, [w], [b])[0], (1024,), float32,
         weights=lambda: (small(32, 1024, scale=0.03), small(32)))
for channels in (32, 64, 128):
    add_rows(f"attention, {channels} channels", ops.attention, (256, 1024 // channels, channels), inputs=3)
add_rows("attention, 1024 tokens", ops.attention, (1024, 4, 64), inputs=3)
add_rows("attention, float32", ops.attention, (64, 4, 64), float32, inputs=3)


@case("attention_qkv")
def attention_qkv() -> None:
    by_rows(lambda x: ops.attention_qkv(x, 4), array((rows_past(LIMIT, (256, 384)), 256, 384)))


@case("normalize_images")
def normalize_images() -> None:
    by_rows(ops.normalize_images, array((rows_past(LIMIT, (64, 64, 3)), 64, 64, 3), np.uint8))


@case("blend_to_uint8")
def blend_to_uint8() -> None:
    shape = (rows_past(LIMIT, (64, 64, 3)), 64, 64, 3)
    by_rows(lambda x, last: ops.blend_to_uint8(x, last, 0.5), array(shape, float32), array(shape, np.uint8, 1))


@case("draw_batch")
def draw_batch() -> None:
    images = array((rows_past(LIMIT, (64, 64, 3)), 64, 64, 3), np.uint8)
    step = Tensor(np.zeros(1, np.int32), device=DEVICE)
    drawn, _ = ops.draw_batch(images, None, step, 64, 5)
    epoch, position = np.divmod(np.arange(64), len(images))
    for i, index in enumerate(shuffled_index(position, len(images), 5, epoch)):
        near(f"image {index}", drawn.data[i], ops.normalize_images(Tensor(images[int(index)][None])).data[0])


@case("embedding")
def embedding() -> None:
    """A table of more than 2^31 elements, and its gradient."""
    n = rows_past(LIMIT, (1024,))
    table = Tensor(array((n, 1024)), requires_grad=True)
    indices = np.array([0, 1, LIMIT // 1024 - 1, LIMIT // 1024, LIMIT // 1024 + 1, n - 1, n - 1])
    out = ops.embedding(Tensor(indices.astype(np.int32), device=DEVICE), table)
    near("rows", out.data, Tensor(np.stack([Tensor(table.data[int(i)]).numpy() for i in indices])).data)
    dout = array(out.shape, out.dtype, 7)
    out.backward(dout)
    grad, rows = table.grad, Tensor(dout).numpy().astype(np.float32)
    for i in sorted(set(indices.tolist())):
        near(f"gradient of row {i}", grad[i], rows[indices == i].sum(0))
    near("gradient elsewhere", grad[5], np.zeros(1024))


@case("many embeddings")
def embeddings() -> None:
    n = rows_past(LIMIT, (1024,))
    indices = xp().arange(n, dtype=np.int32) % 7
    by_rows(lambda i, w: ops.embedding(i, w), indices, weights=(small(7, 1024, dtype=bfloat16),))


@case("cross_entropy")
def cross_entropy() -> None:
    n = rows_past(LIMIT, (1000,))
    logits, labels = array((n, 1000)), xp().arange(n, dtype=np.int32) % 997
    x = Tensor(logits, requires_grad=True)
    loss = ops.cross_entropy(x, Tensor(labels))
    loss.backward()
    losses = [ops.cross_entropy(Tensor(logits[a:b]), Tensor(labels[a:b])).item() * (b - a) / n
              for a, b in ((0, n // 2), (n // 2, n))]  # fmt: skip
    near("loss", np.float32(loss.item()), np.float32(sum(losses)))
    for spot in spots(logits):
        part = Tensor(logits[spot], requires_grad=True)
        ops.cross_entropy(part, Tensor(labels[spot])).backward()
        scale = 2.0**20  # gradients of 16 bits, which n makes small
        found = Tensor(x.grad[spot]).astype(float32) * (n / scale)
        near(f"gradient of rows {spot.start}", found.data, (Tensor(part.grad).astype(float32) * (ROWS / scale)).data)


def whole(name: str, f: Callable[[Tensor], Tensor], combine: Callable[[list[np.ndarray]], Any],
          dtype: Any = bfloat16) -> None:
    """A case of `f` of a flat array, beside what its two halves give together."""
    def check() -> None:
        x = array((rows_past(LIMIT, (1024,)) * 1024,), dtype)
        half = len(x) // 2
        parts = [np.asarray(f(Tensor(x[spot])).numpy(), np.float64) for spot in (slice(0, half), slice(half, None))]
        near(name, np.asarray(f(Tensor(x)).numpy(), np.float64), np.asarray(combine(parts), np.float64))

    case(name)(check)


for kind in (bfloat16, float32):
    called = np.dtype(kind).name
    whole(f"sum of squares {called}", lambda x: (x.astype(float32) * x).sum(), sum, kind)
    whole(f"max {called}", lambda x: x.max(), max, kind)
    whole(f"count {called}", lambda x: (x > 0).sum(), sum, kind)
    whole(f"var {called}", lambda x: x.var(), lambda v: sum(v) / 2, kind)
whole("mse", lambda x: ops.mse(x, x * 0.5), lambda v: sum(v) / 2)
whole("count_nonzero", lambda x: ops.count_nonzero(ops.round(x)), sum)
whole("bincount", lambda x: ops.bincount(x.astype(int32).clip(0, 3)), sum)


@case("columns' sums")
def columns() -> None:
    x = array((rows_past(LIMIT, (1000,)), 1000))
    half = len(x) // 2
    for name, f in {"sum": lambda t: abs(t).sum(0), "max": lambda t: t.max(0)}.items():
        a, b = (f(Tensor(part)).numpy().astype(np.float64) for part in (x[:half], x[half:]))
        near(name, f(Tensor(x)).data, a + b if name == "sum" else np.maximum(a, b))


@case("places of the largest")
def places() -> None:
    n = LIMIT + 5000
    x = xp().zeros(n, np.float16)
    at = [7, LIMIT - 1, LIMIT + 3, n - 1]
    x[n - 1] = 3
    if int(ops.argmax(Tensor(x)).numpy()) != n - 1:
        raise AssertionError(f"argmax: {ops.argmax(Tensor(x)).numpy()}, not {n - 1}")
    for i in at:
        x[i] = 1
    found = ops.nonzero(Tensor(x))[0].numpy().tolist()
    if found != at:
        raise AssertionError(f"nonzero: {found}, not {at}")


@case("transpose")
def transpose() -> None:
    x = array((rows_past(LIMIT, (1024,)), 1024))
    out = (Tensor(x).T * 1.0).data
    for spot in spots(x):
        near(f"rows {spot.start}", out[:, spot], x[spot].T)


@case("concatenated rows")
def concatenated() -> None:
    x = array((rows_past(LIMIT // 2, (1024,)), 1024))
    a, b = tensors(x, x[: len(x) - 1])
    out = ops.concatenate([a, b])
    dout = array(out.shape, out.dtype, 7)
    near("last rows", out.data[-ROWS:], x[-ROWS - 1 : -1])
    near("first rows", out.data[len(x) : len(x) + ROWS], x[:ROWS])
    out.backward(dout)
    near("gradient", b.grad[-ROWS:], dout[-ROWS:])


@case("rows taken, flipped, moved")
def taken() -> None:
    x = array((rows_past(LIMIT, (1024,)), 1024))
    n, t = len(x), Tensor(x, requires_grad=True)
    near("flip", ops.flip(t, 0).data[0], x[n - 1])
    near("roll", ops.roll(t, 2, 0).data[:2], x[-2:])
    chosen = [0, n - 1, LIMIT // 1024, n - 1]
    out = t[chosen]
    for i, row in enumerate(chosen):
        near(f"row {row}", out.data[i], x[row])
    out.backward(ops.ones_like(out).data)
    near("gradient", t.grad[n - 1], np.full(1024, 2.0))
    near("gradient", t.grad[n - 2], np.zeros(1024))


@case("cumsum")
def cumsum() -> None:
    n = LIMIT + 5000
    x = xp().zeros(n, np.float32)
    x[[3, LIMIT + 1]] = 1
    out = ops.cumsum(Tensor(x)).data
    near("cumsum", out[[2, 3, LIMIT, LIMIT + 1, n - 1]], np.array([0, 1, 1, 2, 2]))


@case("argsort")
def argsort() -> None:
    """What is indexed with arrays, and so what is sorted, has at most 2^31 - 1 rows."""
    x = Tensor(array((LIMIT + 4096,), float16))
    order = ops.argsort(x).data
    sorted_x = x.data[order]
    if bool((sorted_x[1:] < sorted_x[:-1]).any()) or int(order.sum()) != x.size * (x.size - 1) // 2:
        raise AssertionError("not sorted")
    if LIMIT == 2**31:
        for refused in (ops.sort, lambda x: x[[0, 5]], lambda x: x[x > 0]):
            try:
                refused(x)
            except IndexError:
                continue
            raise AssertionError("an index of more than 2^31 - 1 rows is not refused")


@case("tril")
def tril() -> None:
    n = int(LIMIT**0.5) + 100
    x = xp().ones((n, n), np.float16)
    near("tril", ops.tril(Tensor(x)).data[-ROWS:], np.tril(np.ones((n, n), np.int8))[-ROWS:])


@case("random numbers")
def random() -> None:
    n = LIMIT + 4096
    for name, f in {"normal": ops.normal, "uniform": ops.uniform}.items():
        out = f((n,), 5, device=DEVICE).data
        first, last = (Tensor(out[spot]).numpy().astype(np.float64) for spot in (slice(0, 4096), slice(n - 4096, n)))
        spread = 1.0 if name == "normal" else 12**-0.5
        if (first == last).mean() > 0.1 or abs(last.std() - spread) > 0.1 * spread:
            raise AssertionError(f"{name}: the end repeats the beginning or is not random")


@case("dropout")
def dropout() -> None:
    x = xp().ones((LIMIT // 1024 + ROWS, 1024), np.float16)
    t = Tensor(x, requires_grad=True)
    out = ops.dropout(t, 0.5, cudiff.Generator(1, device=DEVICE), 9)
    out.backward(ops.ones_like(out).data)
    for spot in spots(x):
        near("gradient", t.grad[spot], out.data[spot])
        share = float((out.data[spot] == 0).mean())
        if not 0.4 < share < 0.6:
            raise AssertionError(f"rows {spot.start}: {share:.2f} are zero")


@case("batch_norm")
def batch_norm() -> None:
    x = array((rows_past(LIMIT, (16, 16, 64)), 16, 16, 64))
    t = Tensor(x, requires_grad=True)
    w, b = tensors(small(64), small(64))
    mean, var = (Tensor(xp().zeros(64, np.float32)) for _ in range(2))
    out = ops.batch_norm(t, w, b, mean, var, True, momentum=1.0)
    dout = array(out.shape, out.dtype, 7)
    out.backward(dout)
    for spot in spots(x):
        expected = (Tensor(x[spot]).astype(float32).data - mean.data) / xp().sqrt(var.data + 1e-5) * w.data + b.data
        near(f"rows {spot.start}", out.data[spot], expected)
    near("gradient of the bias", b.grad, Tensor(dout).astype(float32).sum((0, 1, 2)).data)


@case("AdamW")
def adamw() -> None:
    n = LIMIT + 4096
    values, grads = array((n,), float32), array((n,), float32, 1)
    results = []
    for spot in (slice(None), slice(n - 4096, n)):
        parameter = cudiff.nn.Parameter(Tensor(values[spot].copy()))
        optimizer = AdamW([parameter], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * Tensor(grads[spot])).sum().backward()
            optimizer.step()
        results.append(parameter.data[-4096:].copy())
        del parameter, optimizer
    near("weights", *results)


def run(names: Sequence[str]) -> None:
    for name in names:
        print(f"{name}:", end=" ", flush=True)
        start = time.perf_counter()
        try:
            CASES[name]()
            print(f"right, {time.perf_counter() - start:.1f} s", flush=True)
        except AssertionError as error:
            print(f"WRONG: {error}", flush=True)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            print(f"FAILED: {type(error).__name__}: {error} ({place.name}, line {place.lineno})", flush=True)
            if "illegal" in str(error) or "launch failed" in str(error):
                os._exit(1)
        gc.collect()
        free_memory()


def main() -> None:
    global LIMIT, DEVICE
    parser = argparse.ArgumentParser(prog="python -m tests.large")
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose names hold one of these")
    parser.add_argument("--elements", type=int, default=LIMIT, help="in place of 2^31")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--share", default="0/1", help="cases of this process: 0/2 are every second")
    options = parser.parse_args()
    LIMIT, DEVICE = options.elements, options.device
    index, of = map(int, options.share.split("/"))
    chosen = [name for name in CASES if not options.names or any(n in name for n in options.names)][index::of]
    run(chosen)


if __name__ == "__main__":
    main()
