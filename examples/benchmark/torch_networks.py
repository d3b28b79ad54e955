"""The networks of cudiff's benchmark in PyTorch, with cudiff's names of parameters."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudiff.config import Config
from tests.models import torch_dit, torch_unet


class Attention(torch_unet.Attention):
    """The U-Net's attention by PyTorch's own kernel and by linear layers, which keep channels last."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(b, h * w, c)
        qkv = F.linear(tokens, self.qkv.weight[:, :, 0], self.qkv.bias)
        shape, axis = ((b, h * w, 3, self.heads, -1), 2) if self.new_order else ((b, h * w, self.heads, 3, -1), 3)
        q, k, v = (part.transpose(1, 2) for part in qkv.reshape(shape).unbind(axis))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        out = F.linear(out, self.proj_out.weight[:, :, 0], self.proj_out.bias)
        return x + out.reshape(b, h, w, c).permute(0, 3, 1, 2)


class LabelEmbedding(nn.Embedding):
    """A row for each class, and zeros for -1, which is none."""

    def forward(self, labels: Tensor) -> Tensor:
        return super().forward(labels.clamp(min=0)) * (labels >= 0)[:, None]


def unet(config: Config) -> nn.Module:
    """The torch_model of cudiff's U-Net; see tests/models/torch_unet.py."""
    net = torch_unet.TorchUNet(
        config.image_size, config.channels, config.model_channels, config.channel_mult, config.num_res_blocks,
        config.attention_resolutions, config.num_heads, config.num_head_channels, config.use_scale_shift_norm,
        config.resblock_updown, config.conv_resample, num_classes=max(0, config.num_classes),
        use_new_attention_order=config.use_new_attention_order, max_period=config.max_period,
        norm_group_channels=config.norm_group_channels,
    )
    for module in net.modules():
        if type(module) is torch_unet.Attention:
            module.__class__ = Attention
        if type(module) is nn.Embedding:
            module.__class__ = LabelEmbedding
    return net


class Block(nn.Module):
    """Of CS 179's U-Net: two convolutions, the embedding added to each, ReLU; then a transposed one where `up`."""

    def __init__(self, channels: int, out: int, emb: int, up: bool = False):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time_proj = nn.Linear(emb, out)
        self.upsample = nn.ConvTranspose2d(out, out, 2, stride=2) if up else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        shift = self.time_proj(emb)[:, :, None, None]
        return self.upsample(F.relu(self.conv2(F.relu(self.conv1(x) + shift)) + shift))


class TimeEmbedding(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dim, self.mlp = dim, nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        half = self.dim // 2
        ramp = torch.arange(half, device=t.device, dtype=torch.float32)
        angles = t[:, None] * torch.exp(ramp * (-math.log(10000) / (half - 1)))
        return self.mlp(torch.cat([angles.sin(), angles.cos()], 1))


class CS179(nn.Module):
    """The torch_model of `cudiff.models.CS179UNet`, with its names."""

    def __init__(self, channels: int, widths: list[int]):
        super().__init__()
        emb = 2 * widths[0]
        self.time_emb = TimeEmbedding(emb)
        self.enc_blocks = nn.ModuleList(Block(a, b, emb) for a, b in zip([channels, *widths], widths, strict=False))
        self.bottleneck = Block(widths[-1], widths[-1], emb)
        below = [widths[-1], *reversed(widths)]
        self.dec_blocks = nn.ModuleList(Block(a + b, b, emb, up=True) for a, b in pairwise(below))
        self.out_conv = nn.Conv2d(widths[0], channels, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb, skips = self.time_emb(t), []
        for block in self.enc_blocks:
            x = F.max_pool2d(block(x, emb), 2)
            skips.append(x)
        x = self.bottleneck(x, emb)
        for block in self.dec_blocks:
            x = block(torch.cat([x, skips.pop()], 1), emb)
        return self.out_conv(x)


def cs179(config: Config) -> nn.Module:
    """CS 179's network in PyTorch."""
    return CS179(config.channels, [config.model_channels * mult for mult in config.channel_mult])


def dit(config: Config) -> nn.Module:
    """DiT in PyTorch; see tests/models/torch_dit.py."""
    return torch_dit.TorchDiT(
        config.image_size, config.channels, config.patch_size, config.hidden_size, config.depth, config.num_heads,
        config.mlp_ratio, qk_norm=config.qk_norm,
    )
