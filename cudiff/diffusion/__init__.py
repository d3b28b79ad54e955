"""Noise schedules, preconditioning, losses and samplers. They are handed a `net` and never import one."""

from cudiff.diffusion.loss import DDPMLoss, EDMLoss, drop_labels
from cudiff.diffusion.preconditioning import DDPMDenoiser, EDMDenoiser, Guided
from cudiff.diffusion.samplers import (
    DDIM,
    Ancestral,
    Euler,
    Heun,
    ImageNoise,
    Sampler,
    sample_ddim,
    sample_ddpm,
    sample_euler,
    sample_heun,
)
from cudiff.diffusion.schedule import Schedule, cosine_betas, karras_sigmas, linear_betas

__all__ = [
    "DDIM", "Ancestral", "DDPMDenoiser", "DDPMLoss", "EDMDenoiser", "EDMLoss", "Euler", "Guided", "Heun", "ImageNoise",
    "Sampler", "Schedule",
    "cosine_betas", "drop_labels", "karras_sigmas", "linear_betas",
    "sample_ddim", "sample_ddpm", "sample_euler", "sample_heun",
]  # fmt: skip
