"""The numbers that public functions and classes take where none are given: part of what they promise."""

import inspect
import math

import pytest

from cudiff import data, evaluate, nn, ops, optim, pipeline, registry, train
from cudiff.data.loader import Loader
from cudiff.data.pictures import image_folder
from cudiff.diffusion import ancestral, ddim, ddpm, edm, euler, samplers, schedule
from cudiff.models import cnn, cs179, unet
from cudiff.ops.optim import adam, sgd, step_scalars
from cudiff.options import Option

EDM = dict(sigma_data=0.5, c_noise_scale=0.25, data_mean=0.0, data_std=1.0)
CHURN = dict(S_churn=0.0, S_min=0.0, S_max=math.inf, S_noise=1.0)
UNET = dict(
    in_channels=3, model_channels=64, num_res_blocks=2, num_heads=4, num_head_channels=32, use_scale_shift_norm=False,
    resblock_updown=False, conv_resample=True, dropout=0.0, num_classes=0, learn_sigma=False,
    use_new_attention_order=False, max_period=10000.0, zero_init=True, norm_group_channels=1,
    channel_mult=(1, 2, 3, 4), attention_resolutions=(16, 8),
)
DEFAULTS = {
    data.load_dataset: dict(skip_bad=False, seed=0),
    data.Dataset: dict(num_classes=0, skipped=(), notes=()),
    data.Dataset.split: dict(seed=0),
    data.digits: dict(n=4000, image_size=16, seed=0),
    image_folder: dict(skip_bad=False),
    Loader: dict(first=0),
    samplers.Sampler: dict(captured=False),
    samplers.ImageNoise: dict(first=0),
    ancestral.Ancestral: dict(clip_denoised=True, captured=False),
    ancestral.sample_ddpm: dict(clip_denoised=True),
    ddim.DDIM: dict(eta=0.0, clip_denoised=True, captured=False),
    ddim.sample_ddim: dict(eta=0.0, clip_denoised=True),
    ddpm.DDPMLoss: dict(label_dropout=0.0, vlb_weight=0.001),
    edm.EDMLoss: EDM | dict(P_mean=-1.2, P_std=1.2, label_dropout=0.0),
    edm.EDMDenoiser: EDM,
    euler.Euler: CHURN | dict(captured=False),
    euler.Heun: CHURN | dict(captured=False),
    euler.sample_euler: CHURN,
    euler.sample_heun: CHURN,
    schedule.linear_betas: dict(num_timesteps=1000),
    schedule.cosine_betas: dict(num_timesteps=1000, offset=0.008, max_beta=0.999),
    schedule.Schedule: dict(num_timesteps=1000),
    schedule.karras_sigmas: dict(sigma_min=0.002, sigma_max=80.0, rho=7.0),
    evaluate.train_classifier: dict(seed=0),
    evaluate.evaluate: dict(n=2000, conditional=True, seed=0),
    evaluate.evaluate_pipeline: dict(n=2000, seed=0, batch_size=256),
    cnn.CNN: dict(image_size=28, channels=1, num_classes=10),
    cs179.CS179UNet: dict(image_size=28, in_channels=1, model_channels=64, channel_mult=(1, 2)),
    unet.UNet: UNET,
    unet.ResBlock: dict(dropout=0.0, use_scale_shift_norm=False, zero_init=True, norm_group_channels=1),
    unet.AttentionBlock: dict(zero_init=True, norm_group_channels=1),
    Option: dict(choices=(), fixed=False),
    registry.Model: dict(c_noise_scale=0.25, classes=True, learns_variance=False),
    registry.Objective: dict(learns_variance=False),
    registry.SamplerEntry: dict(discrete=False),
    pipeline.Pipeline.loss: dict(label_dropout=0.0),
    pipeline.Pipeline.sample: dict(n=64, seed=0, batch_size=64),
    pipeline.load: dict(trainable=False),
    train.Trainer: dict(data_changed=False),
    nn.BatchNorm2d: dict(eps=1e-5, momentum=0.1),
    nn.BatchNorm2d.forward: dict(relu_pool=False),
    nn.Conv2d: dict(stride=1, bias=True, dilation=1, groups=1),
    nn.ConvTranspose2d: dict(stride=1, padding=0),
    nn.GroupNorm: dict(eps=1e-5),
    nn.GroupNorm.forward: dict(silu=False),
    nn.LayerNorm: dict(eps=1e-5),
    nn.Linear: dict(bias=True),
    nn.grouped_linear: dict(silu=False),
    nn.Module.train: dict(mode=True),
    nn.Module.flatten: dict(trainable=True),
    nn.Module.requires_grad_: dict(requires_grad=True),
    nn.FlatParameters: dict(trainable=True),
    nn.Parameter: dict(low=False, copy=True),
    optim.Constant: dict(warmup=0),
    optim.Cosine: dict(final=0.0, warmup=0),
    optim.EMA: dict(ramp=0.05),
    optim.Optimizer.step: dict(scale=1.0),
    optim.Adam: dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
    optim.AdamW: dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
    optim.SGD: dict(lr=1e-2, momentum=0.0, nesterov=False, weight_decay=0.0),
    adam: dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False),
    sgd: dict(momentum=0.0, weight_decay=0.0, nesterov=False),
    step_scalars: dict(warmup=0, total_steps=0, final=1.0, betas=(0.0, 0.0), scale=1.0, clip=math.inf, half_life=1.0),
    ops.grouped_linear: dict(silu=False),
    ops.attention_qkv: dict(new_order=False),
    ops.draw_batch: dict(flip=False),
    ops.group_norm: dict(num_groups=32, eps=1e-5, silu=False),
    ops.layer_norm: dict(eps=1e-5),
    ops.batch_norm: dict(momentum=0.1, eps=1e-5),
    ops.batch_norm_relu_pool: dict(momentum=0.1, eps=1e-5),
    ops.norm_silu_conv2d: dict(num_groups=32, eps=1e-5, silu=True, upsample=False, relu=False, statistics=True),
    ops.conv1d: dict(stride=1, padding=0, dilation=1, groups=1),
    ops.conv2d: dict(stride=1, padding=0, dilation=1, groups=1),
    ops.conv_transpose2d: dict(stride=1, padding=0),
    ops.edm_input: dict(data_mean=0.0, data_std=1.0),
    ops.edm_mix: dict(c_noise_scale=1.0, data_mean=0.0, data_std=1.0),
    ops.edm_output: dict(data_mean=0.0, data_std=1.0),
    ops.avg_pool2d: dict(size=2, padding=0, ceil_mode=False),
    ops.max_pool2d: dict(size=2, padding=0, relu=False, ceil_mode=False),
    ops.upsample_nearest: dict(factor=2),
    ops.Generator: dict(seed=0),
    ops.Generator.normal: dict(first=0),
    ops.Generator.uniform: dict(first=0),
    ops.Generator.randint: dict(first=0),
    ops.normal: dict(stream=0, step=0, first=0),
    ops.uniform: dict(stream=0, step=0, first=0),
    ops.randint: dict(stream=0, step=0, first=0),
    ops.max: dict(keepdims=False),
    ops.min: dict(keepdims=False),
    ops.sum: dict(keepdims=False),
    ops.mean: dict(keepdims=False),
    ops.std: dict(keepdims=False, ddof=0),
    ops.var: dict(keepdims=False, ddof=0),
    ops.concatenate: dict(axis=0),
    ops.stack: dict(axis=0),
    ops.split: dict(axis=0),
    ops.flatten: dict(start=0),
    ops.pad: dict(constant_values=0),
    ops.eye: dict(k=0),
    ops.arange: dict(step=1),
    ops.linspace: dict(num=50, endpoint=True),
    ops.diagonal: dict(offset=0, axis1=0, axis2=1),
    ops.trace: dict(offset=0, axis1=0, axis2=1),
    ops.tril: dict(k=0),
    ops.triu: dict(k=0),
    ops.tensordot: dict(axes=2),
    ops.softmax: dict(axis=-1),
    ops.log_softmax: dict(axis=-1),
    ops.timestep_embedding: dict(max_period=10000.0),
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__qualname__)
def test_numbers_where_none_are_given(function):
    parameters = inspect.signature(function).parameters
    defaults = {name: one.default for name, one in parameters.items()}
    found = {name: value for name, value in defaults.items() if isinstance(value, bool | int | float | tuple)}
    assert found == DEFAULTS[function]
