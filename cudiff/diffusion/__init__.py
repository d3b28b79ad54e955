"""Noise schedules, objectives and samplers. They are handed a `net` and never import one.

Importing a file here registers its objective or its samplers (docs/adding-a-sampler.md).
"""

# The defaults first: help and messages name them first.
from cudiff.diffusion.edm import EDM, EDMDenoiser, EDMLoss
from cudiff.diffusion.euler import Euler, Heun, sample_euler, sample_heun

# isort: split

from cudiff.diffusion.ddim import DDIM, sample_ddim
from cudiff.diffusion.ddpm import DDPM, DDPMDenoiser, DDPMLoss

# isort: split

from cudiff.diffusion.ancestral import Ancestral, sample_ddpm
from cudiff.diffusion.denoiser import per_sample
from cudiff.diffusion.dpm_solver import DPMSolver, sample_dpm_solver
from cudiff.diffusion.editing import Between, Inpainted, Inversion, slerp
from cudiff.diffusion.euler_ancestral import _euler_ancestral  # noqa: F401  registers itself
from cudiff.diffusion.flow import Flow, FlowDenoiser, FlowLoss, flow_sigmas
from cudiff.diffusion.guidance import Guided, drop_labels
from cudiff.diffusion.samplers import ImageNoise, Plan, Sampler, rows
from cudiff.diffusion.schedule import Schedule, cosine_betas, karras_sigmas, linear_betas
from cudiff.diffusion.unipc import UniPC, sample_unipc
from cudiff.registry import register_objective, register_sampler

__all__ = [
    "DDIM", "DDPM", "EDM", "Ancestral", "Between", "DDPMDenoiser", "DDPMLoss", "DPMSolver", "EDMDenoiser", "EDMLoss",
    "Euler", "Flow", "FlowDenoiser", "FlowLoss", "Guided", "Heun", "ImageNoise", "Inpainted", "Inversion", "Plan",
    "Sampler", "Schedule", "UniPC",
    "cosine_betas", "drop_labels", "flow_sigmas", "karras_sigmas", "linear_betas", "per_sample", "register_objective",
    "register_sampler", "rows", "sample_ddim", "sample_ddpm", "sample_dpm_solver", "sample_euler", "sample_heun",
    "sample_unipc", "slerp",
]  # fmt: skip
