"""Euler's method with ancestral noise, as in k-diffusion (github.com/crowsonkb/k-diffusion)."""

from __future__ import annotations

from cudiff.diffusion.ddim import DDIM
from cudiff.diffusion.denoiser import Denoiser
from cudiff.diffusion.samplers import Sampler
from cudiff.options import Option
from cudiff.registry import Settings, register_sampler


@register_sampler("euler-ancestral", "k-diffusion's", options={
    "eta": Option(1.0, "ddim, euler-ancestral: share of the ancestral noise", least=0, most=1)})
def _euler_ancestral(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    """`sample_euler_ancestral`: an Euler step to sigma_down, then noise up to the next of Karras' levels. In terms of
    x = y + sigma * noise that is DDIM's step, here without its clipping."""
    return DDIM(denoiser, config.eta, clip_denoised=False, captured=captured)
