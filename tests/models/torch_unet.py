"""The guided-diffusion U-Net in PyTorch, written for the parity tests: the same names, PyTorch's layouts."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def norm(channels):
    groups = math.gcd(32, channels)  # where guided-diffusion knows none, two channels a group at least
    return nn.GroupNorm(groups if groups in (32, 1) or groups < channels else channels // 2, channels)


class Up(nn.Module):
    def __init__(self, channels, use_conv):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if use_conv else nn.Identity()

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Down(nn.Module):
    def __init__(self, channels, use_conv):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if use_conv else nn.AvgPool2d(2)

    def forward(self, x):
        return self.op(x)


class Res(nn.Module):
    def __init__(self, channels, out, emb, dropout=0.0, scale_shift=False, resample=None):
        super().__init__()
        self.scale_shift = scale_shift
        self.resample = {None: nn.Identity(), "up": Up(0, False), "down": Down(0, False)}[resample]
        self.in_layers = nn.Sequential(norm(channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, out * (2 if scale_shift else 1)))
        self.out_layers = nn.Sequential(norm(out), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(out, out, 3, padding=1))
        self.skip_connection = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, emb):
        h = self.in_layers[2](self.resample(self.in_layers[1](self.in_layers[0](x))))
        x = self.resample(x)
        emb = self.emb_layers(emb)[:, :, None, None]
        if self.scale_shift:
            scale, shift = emb.chunk(2, dim=1)
            h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        else:
            h = self.out_layers(h + emb)
        return self.skip_connection(x) + h


class Attention(nn.Module):
    def __init__(self, channels, heads, new_order):
        super().__init__()
        self.heads, self.new_order = heads, new_order
        self.norm = norm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.qkv(self.norm(x).reshape(b, c, h * w))
        if self.new_order:
            q, k, v = (part.reshape(b * self.heads, c // self.heads, -1) for part in qkv.chunk(3, dim=1))
        else:
            q, k, v = qkv.reshape(b * self.heads, 3 * c // self.heads, -1).split(c // self.heads, dim=1)
        attention = torch.softmax(torch.einsum("bct,bcs->bts", q, k) / math.sqrt(c // self.heads), dim=-1)
        out = torch.einsum("bts,bcs->bct", attention, v).reshape(b, c, -1)
        return x + self.proj_out(out).reshape(b, c, h, w)


class Block(nn.Sequential):
    def forward(self, x, emb):
        for layer in self:
            x = layer(x, emb) if isinstance(layer, Res) else layer(x)
        return x


class TorchUNet(nn.Module):
    def __init__(self, image_size, in_channels=3, model_channels=64, channel_mult=(1, 2, 3, 4), num_res_blocks=2,
                 attention_resolutions=(16, 8), num_heads=4, num_head_channels=32, use_scale_shift_norm=False,
                 resblock_updown=False, conv_resample=True, dropout=0.0, num_classes=0, learn_sigma=False,
                 use_new_attention_order=False, max_period=10000.0, norm_group_channels=1):
        super().__init__()
        self.model_channels, self.max_period = model_channels, max_period
        emb = model_channels * 4

        def res(cin, cout, resample=None):
            return Res(cin, cout, emb, dropout, use_scale_shift_norm, resample)

        def attention(c):
            return Attention(c, c // num_head_channels if num_head_channels > 0 else num_heads, use_new_attention_order)

        def resampled(c, direction):
            if resblock_updown:
                return res(c, c, direction)
            return (Up if direction == "up" else Down)(c, conv_resample)

        self.time_embed = nn.Sequential(nn.Linear(model_channels, emb), nn.SiLU(), nn.Linear(emb, emb))
        if num_classes:
            self.label_emb = nn.Embedding(num_classes, emb)
        c, size = model_channels * channel_mult[0], image_size
        self.input_blocks = nn.ModuleList([Block(nn.Conv2d(in_channels, c, 3, padding=1))])
        skips = [c]
        for level, mult in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                layers = [res(c, model_channels * mult)]
                c = model_channels * mult
                if size in attention_resolutions:
                    layers.append(attention(c))
                self.input_blocks.append(Block(*layers))
                skips.append(c)
            if level < len(channel_mult) - 1:
                self.input_blocks.append(Block(resampled(c, "down")))
                skips.append(c)
                size //= 2
        self.middle_block = Block(res(c, c), attention(c), res(c, c))
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for index in range(num_res_blocks + 1):
                layers = [res(c + skips.pop(), model_channels * mult)]
                c = model_channels * mult
                if size in attention_resolutions:
                    layers.append(attention(c))
                if level and index == num_res_blocks:
                    layers.append(resampled(c, "up"))
                    size *= 2
                self.output_blocks.append(Block(*layers))
        self.out = nn.Sequential(
            norm(c), nn.SiLU(), nn.Conv2d(c, in_channels * (2 if learn_sigma else 1), 3, padding=1)
        )

        for module in self.modules():
            if isinstance(module, nn.GroupNorm) and module.num_channels // module.num_groups < norm_group_channels:
                module.num_groups = module.num_channels // norm_group_channels

    def forward(self, x, t, labels=None):
        half = self.model_channels // 2
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        ramp = torch.arange(half, dtype=dtype, device=t.device) / half
        angles = t.to(dtype)[:, None] * torch.exp(-math.log(self.max_period) * ramp)
        emb = self.time_embed(torch.cat([torch.cos(angles), torch.sin(angles)], dim=1).to(x.dtype))
        if labels is not None:
            emb = emb + self.label_emb(labels)
        skips, h = [], x
        for block in self.input_blocks:
            h = block(h, emb)
            skips.append(h)
        h = self.middle_block(h, emb)
        for block in self.output_blocks:
            h = block(torch.cat([h, skips.pop()], dim=1), emb)
        return self.out(h)
