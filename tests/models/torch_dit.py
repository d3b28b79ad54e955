"""DiT in PyTorch, written for the parity tests: the names of the paper's code, PyTorch's layouts."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def sinusoids(places, channels):
    """Sines, then cosines, of places (T,) → (T, channels)."""
    frequency = torch.tensor([10000.0 ** (-i / (channels // 2)) for i in range(channels // 2)], dtype=torch.float64)
    angles = torch.outer(places.double(), frequency)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def position_embedding(rows, columns, channels):
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.cat([sinusoids(x.flatten(), channels // 2), sinusoids(y.flatten(), channels // 2)], dim=1)[None]


class Patches(nn.Module):
    def __init__(self, patch_size, in_channels, hidden):
        super().__init__()
        self.proj = nn.Conv2d(in_channels, hidden, patch_size, patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Times(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))

    def forward(self, t):
        dtype = self.mlp[0].weight.dtype
        ramp = torch.arange(128, dtype=torch.float64, device=t.device) / 128
        angles = t.double()[:, None] * torch.exp(-math.log(10000) * ramp)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype))


class Labels(nn.Module):
    def __init__(self, num_classes, hidden):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, hidden)

    def forward(self, labels):
        return self.embedding_table(torch.where(labels < 0, self.num_classes, labels))


class Attention(nn.Module):
    def __init__(self, hidden, heads, qk_norm):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.q_norm = nn.LayerNorm(hidden // heads) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(hidden // heads) if qk_norm else nn.Identity()

    def forward(self, x):
        n, tokens, hidden = x.shape
        q, k, v = self.qkv(x).reshape(n, tokens, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(out.transpose(1, 2).reshape(n, tokens, hidden))


class Mlp(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def modulated(norm, x, shift, scale):
    return norm(x) * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self, hidden, heads, mlp_ratio, qk_norm):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.attn = Attention(hidden, heads, qk_norm)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp(hidden, int(hidden * mlp_ratio))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attn(modulated(self.norm1, x, shift1, scale1))
        return x + gate2[:, None] * self.mlp(modulated(self.norm2, x, shift2, scale2))


class Final(nn.Module):
    def __init__(self, hidden, outputs):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(hidden, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulated(self.norm_final, x, shift, scale))


class TorchDiT(nn.Module):
    def __init__(self, image_size, in_channels=3, patch_size=4, hidden_size=384, depth=12, num_heads=6, mlp_ratio=4.0,
                 num_classes=0, learn_sigma=False, qk_norm=False):
        super().__init__()
        height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
        self.patch_size, self.grid = patch_size, (height // patch_size, width // patch_size)
        self.x_embedder = Patches(patch_size, in_channels, hidden_size)
        self.t_embedder = Times(hidden_size)
        if num_classes:
            self.y_embedder = Labels(num_classes, hidden_size)
        self.pos_embed = nn.Parameter(position_embedding(*self.grid, hidden_size).float(), requires_grad=False)
        self.blocks = nn.ModuleList([Block(hidden_size, num_heads, mlp_ratio, qk_norm) for _ in range(depth)])
        self.final_layer = Final(hidden_size, patch_size**2 * in_channels * (2 if learn_sigma else 1))

    def forward(self, x, t, labels=None):
        c = self.t_embedder(t)
        if labels is not None:
            c = c + self.y_embedder(labels)
        h = self.x_embedder(x) + self.pos_embed
        for block in self.blocks:
            h = block(h, c)
        h = self.final_layer(h, c)
        n, p, (rows, columns) = len(x), self.patch_size, self.grid
        h = h.reshape(n, rows, columns, p, p, -1)
        return torch.einsum("nhwpqc->nchpwq", h).reshape(n, -1, rows * p, columns * p)
