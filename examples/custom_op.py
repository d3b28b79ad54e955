"""An operation of one's own in NumPy and CUDA, as a graph, and inside PyTorch: python examples/custom_op.py"""

import argparse

import numpy as np

import cudiff
from cudiff.cuda import Kernel

SOURCE = """
extern "C" __global__ void forward(T* out, const T* x, float beta, i64 n) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        out[i] = from_float<T>(log1pf(expf(beta * to_float(x[i]))) / beta);
}
extern "C" __global__ void backward(T* dx, const T* dout, const T* x, float beta, i64 n) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        dx[i] = from_float<T>(to_float(dout[i]) / (1.0f + expf(-beta * to_float(x[i]))));
}
"""
FORWARD, BACKWARD = Kernel(SOURCE, "forward"), Kernel(SOURCE, "backward")


class Softplus(cudiff.Function):
    """log(1 + exp(beta x)) / beta."""

    @staticmethod
    def forward_numpy(ctx, x, beta):
        ctx.save(x)
        ctx.beta = beta
        return np.log1p(np.exp(beta * x)) / beta

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout / (1 + np.exp(-ctx.beta * ctx.saved[0])),)

    @staticmethod
    def forward_cuda(ctx, x, beta):
        import cupy

        ctx.save(x)
        ctx.beta = beta
        out = cupy.empty_like(x)
        FORWARD(-(-x.size // 256), 256, out, x, beta, np.int64(x.size), T=x.dtype)
        return out

    @staticmethod
    def backward_cuda(ctx, dout, needs, into):
        import cupy

        dx = cupy.empty_like(dout)
        BACKWARD(-(-dx.size // 256), 256, dx, dout, ctx.saved[0], ctx.beta, np.int64(dx.size), T=dx.dtype)
        return (dx,)


def softplus(x):
    return Softplus.apply(x, beta=2.0)


if __name__ == "__main__":
    argparse.ArgumentParser(description="Softplus as an operation of one's own.").parse_args()
    cudiff.check_gradient(softplus, np.linspace(-2, 2, 9))
    print("NumPy: the gradient is right")
    if cudiff.cuda_available():
        x = cudiff.Tensor(np.linspace(-2, 2, 1000, dtype=np.float32), device="cuda")
        graph = cudiff.capture(softplus)
        for _ in range(5):
            out = graph(x)
        print("CUDA, as a graph: differs from NumPy by", np.abs(out.numpy() - softplus(x.to("cpu")).numpy()).max())
    try:
        import torch
    except ImportError:
        raise SystemExit("PyTorch is not installed: its part is left out") from None
    y = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    in_torch = cudiff.to_torch_function(softplus)
    assert torch.autograd.gradcheck(in_torch, (y,))
    print("PyTorch: gradcheck passes")
