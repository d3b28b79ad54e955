"""Multi-head attention between projections, with PyTorch's parameters."""

from __future__ import annotations

from typing import Any

from cudiff import ops
from cudiff.backend import is_low
from cudiff.errors import CudiffError
from cudiff.nn import init
from cudiff.nn.layers import Linear
from cudiff.nn.module import Module
from cudiff.nn.parameter import Parameter
from cudiff.tensor import Tensor
from cudiff.values import flag, whole


class MultiheadAttention(Module):
    """query (N, Tq, C), key and value (N, Tk, C) → (N, Tq, C); the query attends to itself where they are not given.

    mask: bool, broadcast to (N, num_heads, Tq, Tk), False where a query does not see a key: `np.tri(T, dtype=bool)` is
    causal; see `ops.attention`. It is torch.nn.MultiheadAttention with batch_first, whose state dict it takes; its
    `attn_mask` says the opposite. The weights of attention are not returned. Raises CudiffError for channels that do
    not divide into the heads. Vaswani et al. 2017.
    """

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True):
        super().__init__()
        if whole("embed_dim", embed_dim) % whole("num_heads", num_heads):
            raise CudiffError(f"embed_dim {embed_dim} is no multiple of num_heads {num_heads}")
        self.num_heads = num_heads
        weight = init.glorot_uniform((3 * embed_dim, embed_dim))
        self.in_proj_weight = Parameter(weight, low=True, decay=True, layout="linear", copy=False)
        self.in_proj_bias = Parameter(init.zeros((3 * embed_dim,)), copy=False) if flag("bias", bias) else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if self.out_proj.bias is not None:
            init.zero(self.out_proj.bias.data)

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
                mask: Any = None) -> Tensor:
        if (key is None) != (value is None):
            raise ValueError("MultiheadAttention: give key and value, or neither")
        given = [x for x in (query, key, value) if x is not None]
        channels = self.in_proj_weight.shape[1]
        if any(x.ndim != 3 or x.shape[2] != channels for x in given):
            raise ValueError(f"MultiheadAttention: {[x.shape for x in given]} are not (N, T, {channels})")
        if key is None or value is None:
            qkv = ops.linear(query, self.in_proj_weight, self.in_proj_bias)
            return self.out_proj(ops.attention_qkv(qkv, self.num_heads, new_order=True, mask=mask))
        weights = ops.split(self.in_proj_weight, 3)
        biases = (None,) * 3 if self.in_proj_bias is None else ops.split(self.in_proj_bias, 3)
        parts = tuple(
            ops.linear(x, ops.astype(weight, x.dtype) if is_low(x.dtype) else weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        q, k, v = (ops.reshape(x, (*x.shape[:2], self.num_heads, -1)) for x in parts)
        return self.out_proj(ops.attention(q, k, v, mask))

    def extra_repr(self) -> str:
        bias = "" if self.in_proj_bias is not None else ", bias=False"
        return f"embed_dim={self.in_proj_weight.shape[1]}, num_heads={self.num_heads}{bias}"
