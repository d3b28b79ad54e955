"""Kernels of a user's own, and operations inside PyTorch."""

import numpy as np
import pytest

import cudiff
from cudiff import CudiffError, Tensor, nn, ops, to_torch_function
from cudiff.cuda import Kernel, compiler
from examples.custom_op import SOFTPLUS
from tests.check import torch

SCALE = """
extern "C" __global__ void scale(T* out, const T* x, float factor, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<T>(factor * to_float(x[i]));
}
"""
ADD = """
#include "map.cuh"
extern "C" __global__ void first(T* out, const T* a, const T* b, i64 n) {
    wait_for_previous();
    map<T>(out, 0, n, a, b, [](float x, float y) { return x + OFFSET * y; });
}
extern "C" __global__ void second(int* out) { out[0] = 1; }
"""


def test_a_kernel_is_found_by_its_name():
    assert Kernel(SCALE).name == "scale" and Kernel(ADD, "second").name == "second"
    with pytest.raises(ValueError, match="the source defines first, second: give the name of one"):
        Kernel(ADD)
    with pytest.raises(ValueError, match="the source has no kernel 'third' but first, second"):
        Kernel(ADD, "third")
    for source in ("", "__global__ void f(int* x) {}", "int f() { return 1; }"):
        with pytest.raises(ValueError, match='the source defines no kernel: begin one with extern "C" __global__ void'):
            Kernel(source)


def test_arguments_are_checked_by_name(host_of):
    host = host_of(True)
    x, n = host.zeros(4, np.float32), np.int64(4)
    kernel = Kernel(SCALE)
    kernel.check(x, x, 2.0, n, T=x.dtype)
    for args, told in [
        ((x, x, 2.0, 4), "np.int64 for 'n', not a Python int"), ((x, x, 2, n), "for 'factor', not a Python int"),
        ((x, host.zeros(4, np.float64), 2.0, n), "an array of float32 for 'x', not an array of float64"),
        ((x, np.zeros(4, np.float32), 2.0, n), "for 'x', not 16 bytes of the host"),
        ((x, x, 2.0), "takes 4 arguments, not 3"),
    ]:
        with pytest.raises(TypeError, match=f"your_kernel.cu: scale.* {told}"):
            kernel.check(*args, T=x.dtype)
    with pytest.raises(TypeError, match=r"your_kernel.cu takes .*, not float64: convert it on the CPU first"):
        kernel.check(x, x, 2.0, n, T=np.dtype(np.float64))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_it_compiles_without_a_gpu(architecture, nvrtc):
    assert "registers" in Kernel(SCALE).compile(architecture, T=cudiff.bfloat16)
    assert "registers" in SOFTPLUS.compile(architecture, T=np.float32)
    with pytest.raises(TypeError, match=r"takes float32, .* not complex64: convert it on the CPU first"):
        Kernel(SCALE).compile(architecture, T=np.complex64)
    assert "registers" in Kernel(ADD, "first").compile(architecture, T=cudiff.float32, OFFSET=3)
    with pytest.raises(CudiffError, match=r"your_kernel.cu does not compile for .*nothing"):
        Kernel(SCALE.replace("factor *", "nothing *")).compile(architecture, T=cudiff.float32)


def test_compile_returns_what_the_compiler_says(monkeypatch):
    monkeypatch.setattr(compiler, "compile_text", lambda file, text, architecture, constants: (b"a cubin", "its log"))
    assert Kernel(SCALE).compile("sm_80", T=np.float32) == "its log"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_runs(dtype):
    import cupy

    x = Tensor(np.arange(1000.0), dtype=dtype, device="cuda")
    y = Tensor(np.arange(1000.0)[::-1].copy(), dtype=dtype, device="cuda")

    def both(x, y):
        out, total = cupy.empty_like(x.data), cupy.empty_like(x.data)
        Kernel_scale(4, 256, out, x.data, 2.0, np.int64(1000), T=x.dtype)
        Kernel_add((4,), (256,), total, out, y.data, np.int64(1000), T=x.dtype, OFFSET=3)
        return Tensor(total)

    Kernel_scale, Kernel_add = Kernel(SCALE), Kernel(ADD, "first")
    expected = 2 * x.numpy().astype(np.float32) + 3 * y.numpy().astype(np.float32)
    captured = cudiff.capture(both)
    for _ in range(5):
        np.testing.assert_allclose(captured(x, y).numpy().astype(np.float32), expected, rtol=1e-2)
    with pytest.raises(ValueError, match="scale takes whole arrays, not a view"):
        Kernel_scale(4, 256, x.data[::2], x.data, 2.0, np.int64(500), T=x.dtype)


needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@needs_torch
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_operation_inside_pytorch(where):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    x = torch.randn(3, 4, device=where, requires_grad=True)
    weight = torch.randn(5, 4, device=where, requires_grad=True)
    out = to_torch_function(lambda x, w: ops.silu(x @ w.T))(x * 2, weight)
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, weight)]
    expected = torch.nn.functional.silu(2 * exact[0] @ exact[1].T)  # PyTorch may round products on a GPU to tf32
    dout = torch.randn_like(out)
    given = torch.autograd.grad(out, (x, weight), dout)
    pairs = zip((out, *given), (expected, *torch.autograd.grad(expected, exact, dout.double().cpu())), strict=True)
    for found, right in pairs:
        assert found.device.type == where
        torch.testing.assert_close(found.double().cpu(), right, rtol=1e-5, atol=1e-5)


@needs_torch
def test_gradcheck_and_what_needs_no_gradient():
    function = to_torch_function(ops.tanh)
    assert torch.autograd.gradcheck(function, (torch.randn(3, 2, dtype=torch.float64, requires_grad=True),))
    assert not function(torch.randn(3)).requires_grad
    with pytest.raises(TypeError, match="the function takes PyTorch's tensors, not ndarray"):
        function(np.ones(3))


@needs_torch
def test_an_argument_that_was_changed_before_backward_is_told():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    out = to_torch_function(ops.multiply)(a, b).sum()
    b.add_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@needs_torch
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_inside_pytorch(where):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    x = torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16, device=where, requires_grad=True)
    out = to_torch_function(lambda x: x * 2)(x)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.bfloat16 and out.device == x.device
    assert out.tolist() == [[2.0, -5.0]] and x.grad.tolist() == [[2.0, 2.0]]


@needs_torch
@pytest.mark.parametrize("function, kind", [(lambda x: (x, x), "tuple"), (lambda x: x.numpy(), "ndarray")])
def test_a_function_inside_pytorch_returns_one_tensor(function, kind):
    with pytest.raises(TypeError, match=f"the function returns one Tensor, not {kind}: join several by"):
        to_torch_function(function)(torch.ones(3))


@needs_torch
def test_a_module_learns_inside_a_network_of_pytorch():
    layer = nn.Linear(4, 2)
    to_torch_function(layer)(torch.nn.Linear(3, 4)(torch.randn(5, 3))).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (2, 4)
    first = nn.Linear(3, 4)  # its argument, the data, requires no gradient
    function, last = to_torch_function(first), torch.nn.Linear(4, 1)
    last(function(torch.randn(5, 3))).sum().backward()
    np.testing.assert_allclose(first.bias.grad, 5 * last.weight[0].detach().numpy(), rtol=1e-5)
    with torch.no_grad():
        assert not function(torch.randn(5, 3)).requires_grad
    first.requires_grad_(False)
    assert not function(torch.randn(5, 3)).requires_grad
