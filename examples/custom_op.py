"""log(1 + exp(x)) as an operation in NumPy and CUDA, as a graph, and inside PyTorch: python examples/custom_op.py"""

import argparse

import numpy as np

import cudiff

SOFTPLUS = cudiff.cuda.Kernel("""
extern "C" __global__ void softplus(T* out, const T* x, i64 n) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<T>(fmaxf(to_float(x[i]), 0.0f) + log1pf(expf(-fabsf(to_float(x[i])))));
}
""")


class Softplus(cudiff.Function):
    @staticmethod
    def forward_numpy(ctx, x):
        ctx.save(x)
        return np.logaddexp(0, x)

    @staticmethod
    def forward_cuda(ctx, x):
        ctx.save(x)
        out = np.empty_like(x)
        SOFTPLUS(-(-x.size // 256), 256, out, x, np.int64(x.size), T=x.dtype)
        return out

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (dout * np.exp(-np.logaddexp(0, -ctx.saved[0])),)  # times sigmoid(x)

    backward_cuda = backward_numpy


if __name__ == "__main__":
    argparse.ArgumentParser(description="Softplus as an operation of one's own.").parse_args()
    cudiff.check_gradient(Softplus.apply, np.linspace(-2, 2, 9))
    print("NumPy: the gradient is right")
    if cudiff.cuda_available():
        x = cudiff.Tensor(np.linspace(-2, 2, 1000, dtype=np.float32), device="cuda")
        error = cudiff.capture(Softplus.apply)(x) - Softplus.apply(x.to("cpu")).to("cuda")
        print("CUDA, as a graph: differs from NumPy by", abs(error).max().item())
    try:
        import torch
    except ImportError:
        raise SystemExit("PyTorch is not installed: its part is left out") from None
    y = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cudiff.to_torch_function(Softplus.apply), (y,))
    print("PyTorch: gradcheck passes")
