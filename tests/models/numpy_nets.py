"""The networks in plain NumPy and float64, of a state_dict: what they mean, where PyTorch is not installed."""

from __future__ import annotations

import math

import numpy as np


def conv(x, state, name, stride=1):
    weight = state[f"{name}.weight"]
    edge = weight.shape[1] // 2
    x = np.pad(x, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    views = np.lib.stride_tricks.sliding_window_view(x, weight.shape[1:3], (1, 2))[:, ::stride, ::stride]
    return np.einsum("nhwcrs,krsc->nhwk", views, weight) + state[f"{name}.bias"]


def dense(x, state, name):
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def silu(x):
    return x / (1 + np.exp(-x))


def norm(x, state, name, group_channels):
    channels = x.shape[-1]
    groups = next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0 and g <= math.gcd(32, channels) and (
        g == 1 or channels // g >= (group_channels if math.gcd(32, channels) == 32 else max(2, group_channels))))
    parts = x.reshape(len(x), -1, groups, channels // groups)
    parts = (parts - parts.mean((1, 3), keepdims=True)) / np.sqrt(parts.var((1, 3), keepdims=True) + 1e-5)
    return parts.reshape(x.shape) * state[f"{name}.weight"] + state[f"{name}.bias"]


def halved(x):
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).mean((2, 4))


def doubled(x):
    return x.repeat(2, 1).repeat(2, 2)


def attention(x, state, name, heads, new_order, group_channels):
    n, h, w, c = x.shape
    qkv = dense(norm(x, state, f"{name}.norm", group_channels), state, f"{name}.qkv").reshape(n, h * w, -1)
    shape, axis = ((n, h * w, 3, heads, -1), 2) if new_order else ((n, h * w, heads, 3, -1), 3)
    q, k, v = np.moveaxis(qkv.reshape(shape), axis, 0)
    scores = np.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return x + dense(np.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, h, w, c), state, f"{name}.proj_out")


def unet(state, options, x, t, labels=None):
    """guided-diffusion's; a block is told by the names of its parameters."""
    width, groups = options["model_channels"], options.get("norm_group_channels", 1)
    angles = t[:, None] / options.get("max_period", 10000.0) ** (np.arange(width // 2) / (width // 2))
    emb = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    emb = dense(silu(dense(emb, state, "time_embed.0")), state, "time_embed.2")
    if labels is not None:
        emb = emb + state["label_emb.weight"][labels]

    def res_block(x, name, resample):
        h = silu(norm(x, state, f"{name}.in_layers.0", groups))
        if resample:
            h, x = resample(h), resample(x)
        h = conv(h, state, f"{name}.in_layers.2")
        added = dense(silu(emb), state, f"{name}.emb_layers.1")[:, None, None]
        if options.get("use_scale_shift_norm"):
            scale, shift = np.split(added, 2, -1)
            h = norm(h, state, f"{name}.out_layers.0", groups) * (1 + scale) + shift
        else:
            h = norm(h + added, state, f"{name}.out_layers.0", groups)
        h = conv(silu(h), state, f"{name}.out_layers.3")
        return h + (conv(x, state, f"{name}.skip_connection") if f"{name}.skip_connection.weight" in state else x)

    def run(h, name, down=False):
        """The layers of one block; `down`: it has nothing but a layer that halves."""
        layer = 0
        while f"{name}.{layer}" in parts:
            own, here = f"{name}.{layer}", parts[f"{name}.{layer}"]
            resample = halved if down else doubled if layer else None
            if "in_layers" in here:
                h = res_block(h, own, resample)
            elif "qkv" in here:
                each = options.get("num_head_channels", 32)
                heads = h.shape[-1] // each if each > 0 else options["num_heads"]
                h = attention(h, state, own, heads, options.get("use_new_attention_order", False), groups)
            elif "op" in here:
                h = conv(h, state, f"{own}.op", 2)
            elif "conv" in here:
                h = conv(doubled(h), state, f"{own}.conv")
            layer += 1
        return h

    parts: dict[str, set[str]] = {}
    for name in state:
        pieces = name.split(".")
        if pieces[0].endswith("blocks"):
            parts.setdefault(".".join(pieces[:3]), set()).add(pieces[3])
    depth, rounds = len(options["channel_mult"]), options["num_res_blocks"]
    h = conv(x, state, "input_blocks.0.0")
    skips, number = [h], 1
    for level in range(depth):
        for _ in range(rounds):
            h = run(h, f"input_blocks.{number}")
            skips.append(h)
            number += 1
        if level < depth - 1:
            h = run(h, f"input_blocks.{number}", True) if options.get("conv_resample", True) else halved(h)
            skips.append(h)
            number += 1
    h = res_block(h, "middle_block.0", None)
    each = options.get("num_head_channels", 32)
    heads = h.shape[-1] // each if each > 0 else options["num_heads"]
    h = attention(h, state, "middle_block.1", heads, options.get("use_new_attention_order", False), groups)
    h = res_block(h, "middle_block.2", None)
    number = 0
    for level in reversed(range(depth)):
        for index in range(rounds + 1):
            h = run(np.concatenate([h, skips.pop()], -1), f"output_blocks.{number}")
            if level and index == rounds and not options.get("conv_resample", True):
                h = doubled(h)
            number += 1
    return conv(silu(norm(h, state, "out.0", groups)), state, "out.2")


def cs179(state, x, t):
    """The CS 179 project's; what was pooled is the skip connection, joined behind x."""
    half = state["time_emb.mlp.0.weight"].shape[1] // 2
    angles = t[:, None] / 10000 ** (np.arange(half) / (half - 1))
    emb = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    emb = dense(silu(dense(emb, state, "time_emb.mlp.0")), state, "time_emb.mlp.2")

    def block(x, name):
        shift = dense(emb, state, f"{name}.time_proj")[:, None, None]
        x = np.maximum(conv(x, state, f"{name}.conv1") + shift, 0)
        return np.maximum(conv(x, state, f"{name}.conv2") + shift, 0)

    def up(x, name):
        weight = state[f"{name}.weight"]  # (C, 2, 2, K)
        n, h, w, _ = x.shape
        out = np.einsum("nhwc,crsk->nhrwsk", x, weight).reshape(n, 2 * h, 2 * w, weight.shape[3])
        return out + state[f"{name}.bias"]

    skips, level = [], 0
    while f"enc_blocks.{level}.conv1.weight" in state:
        n, h, w, _ = x.shape
        x = block(x, f"enc_blocks.{level}").reshape(n, h // 2, 2, w // 2, 2, -1).max((2, 4))
        skips.append(x)
        level += 1
    x = block(x, "bottleneck")
    for index in range(level):
        name = f"dec_blocks.{index}"
        x = up(block(np.concatenate([x, skips.pop()], -1), name), f"{name}.upsample")
    return conv(x, state, "out_conv")


def layer_norm(x, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def dit(state, options, x, t, labels=None):
    """That of Peebles and Xie. A sum over patches' pixels and channels makes tokens, and one over channels images."""
    p, heads = options["patch_size"], options["num_heads"]
    n, height, width, channels = x.shape
    patches = x.reshape(n, height // p, p, width // p, p, channels)
    h = np.einsum("nipjqc,kpqc->nijk", patches, state["x_embedder.proj.weight"]) + state["x_embedder.proj.bias"]
    hidden = h.shape[-1]
    frequency = 10000.0 ** (-4 * np.arange(hidden // 4) / hidden)
    rows, columns = np.arange(height // p)[:, None] * frequency, np.arange(width // p)[:, None] * frequency
    quarters = np.split(h, 4, -1)  # views
    quarters[0] += np.sin(columns)
    quarters[1] += np.cos(columns)
    quarters[2] += np.sin(rows)[:, None]
    quarters[3] += np.cos(rows)[:, None]
    angles = t[:, None] * 10000.0 ** (-np.arange(128) / 128)
    c = dense(np.concatenate([np.cos(angles), np.sin(angles)], 1), state, "t_embedder.mlp.0")
    c = dense(silu(c), state, "t_embedder.mlp.2")
    if options.get("num_classes"):
        c = c + state["y_embedder.embedding_table.weight"][-1 if labels is None else labels]  # the last one is -1 too
    h = h.reshape(n, -1, hidden)

    def normed(h, shift, scale):
        return layer_norm(h, 1e-6) * (1 + scale) + shift

    def vectors(name, count):
        return np.split(dense(silu(c), state, f"{name}.adaLN_modulation.1")[:, None], count, -1)

    def attention(h, name):
        q, k, v = np.moveaxis(dense(h, state, f"{name}.qkv").reshape(n, -1, 3, heads, hidden // heads), 2, 0)
        if options.get("qk_norm"):
            q, k = (layer_norm(part, 1e-5) * state[f"{name}.{which}_norm.weight"] + state[f"{name}.{which}_norm.bias"]
                    for part, which in ((q, "q"), (k, "k")))
        weights = np.exp(np.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(q.shape[-1]))
        weights /= weights.sum(-1, keepdims=True)
        return dense(np.einsum("nhqk,nkhd->nqhd", weights, v).reshape(n, -1, hidden), state, f"{name}.proj")

    def mlp(h, name):
        h = dense(h, state, f"{name}.fc1")
        h = h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
        return dense(h, state, f"{name}.fc2")

    for name in (f"blocks.{index}" for index in range(options["depth"])):
        shift, scale, gate, shift2, scale2, gate2 = vectors(name, 6)
        h = h + gate * attention(normed(h, shift, scale), f"{name}.attn")
        h = h + gate2 * mlp(normed(h, shift2, scale2), f"{name}.mlp")
    h = dense(normed(h, *vectors("final_layer", 2)), state, "final_layer.linear")
    return np.moveaxis(h.reshape(n, height // p, width // p, p, p, -1), 3, 2).reshape(n, height, width, -1)
