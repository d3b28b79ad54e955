"""Noise schedules, preconditioning, losses and samplers. They are handed a `net` and never import one.

Importing a file here registers its objective or its samplers (docs/adding-a-sampler.md).
"""

from cudiff.diffusion.edm import EDM  # first, as it is the default: help and messages name it first

# isort: split

from cudiff.diffusion.ddpm import DDPM
from cudiff.diffusion.loss import DDPMLoss, EDMLoss, drop_labels
from cudiff.diffusion.preconditioning import DDPMDenoiser, EDMDenoiser, Guided, per_sample
from cudiff.diffusion.samplers import (
    DDIM,
    Ancestral,
    Euler,
    Heun,
    ImageNoise,
    Plan,
    Sampler,
    rows,
    sample_ddim,
    sample_ddpm,
    sample_euler,
    sample_heun,
)
from cudiff.diffusion.schedule import Schedule, cosine_betas, karras_sigmas, linear_betas
from cudiff.registry import register_objective, register_sampler

__all__ = [
    "DDIM", "DDPM", "EDM", "Ancestral", "DDPMDenoiser", "DDPMLoss", "EDMDenoiser", "EDMLoss", "Euler", "Guided", "Heun",
    "ImageNoise", "Plan", "Sampler", "Schedule",
    "cosine_betas", "drop_labels", "karras_sigmas", "linear_betas", "per_sample", "register_objective",
    "register_sampler", "rows", "sample_ddim", "sample_ddpm", "sample_euler", "sample_heun",
]  # fmt: skip
