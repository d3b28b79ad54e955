"""The numbers that public functions and classes take where none are given: part of what they promise."""

import inspect
import math

import pytest

from cudiff import data, evaluate, pipeline, registry, train
from cudiff.data.loader import Loader
from cudiff.data.pictures import image_folder
from cudiff.diffusion import ancestral, ddim, ddpm, edm, euler, samplers, schedule
from cudiff.models import cnn, cs179, unet
from cudiff.options import Option

EDM = dict(sigma_data=0.5, c_noise_scale=0.25, data_mean=0.0, data_std=1.0)
CHURN = dict(S_churn=0.0, S_min=0.0, S_max=math.inf, S_noise=1.0)
UNET = dict(
    in_channels=3, model_channels=64, num_res_blocks=2, num_heads=4, num_head_channels=32, use_scale_shift_norm=False,
    resblock_updown=False, conv_resample=True, dropout=0.0, num_classes=0, learn_sigma=False,
    use_new_attention_order=False, max_period=10000.0, zero_init=True, norm_group_channels=1,
)
DEFAULTS = {
    data.load_dataset: dict(skip_bad=False, seed=0),
    data.Dataset: dict(num_classes=0),
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
    cs179.CS179UNet: dict(image_size=28, in_channels=1, model_channels=64),
    unet.UNet: UNET,
    unet.ResBlock: dict(dropout=0.0, use_scale_shift_norm=False, zero_init=True, norm_group_channels=1),
    unet.AttentionBlock: dict(zero_init=True, norm_group_channels=1),
    Option: dict(fixed=False),
    registry.Model: dict(c_noise_scale=0.25, classes=True, learns_variance=False),
    registry.Objective: dict(learns_variance=False),
    registry.SamplerEntry: dict(discrete=False),
    pipeline.Pipeline.loss: dict(label_dropout=0.0),
    pipeline.Pipeline.sample: dict(n=64, seed=0, batch_size=64),
    pipeline.load: dict(trainable=False),
    train.Trainer: dict(data_changed=False),
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__qualname__)
def test_numbers_where_none_are_given(function):
    parameters = inspect.signature(function).parameters
    found = {name: one.default for name, one in parameters.items() if isinstance(one.default, bool | int | float)}
    assert found == DEFAULTS[function]
