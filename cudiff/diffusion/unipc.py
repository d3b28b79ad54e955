"""UniPC of order 2, Zhao et al. 2023 (arXiv 2302.04867): a predictor and a corrector from the same evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cudiff import ops
from cudiff.diffusion.denoiser import Denoiser, per_sample
from cudiff.diffusion.dpm_solver import extrapolations
from cudiff.diffusion.samplers import Callback, Plan, Sampler, rows
from cudiff.registry import Settings, register_sampler
from cudiff.tensor import Tensor


class UniPC(Sampler):
    """UniPC-2, arXiv 2302.04867, Algorithms 1 and 2 for predictions of the image, with B(h) = e^h - 1 of its table 2.

    One evaluation a step. Its predictor is DPM-Solver++(2M). The evaluation that begins a step first corrects the state
    to which the last step predicted, from which no new evaluation is made; the next prediction starts there.
    """

    memory = 2

    def plan(self, sigmas: np.ndarray) -> list[Plan]:
        corrections = [(0.0, 0.0)]
        h = [math.log(high / low) for high, low in pairwise(map(float, sigmas[sigmas > 0]))]
        for step in range(len(h)):
            corrections.append(_correction(h[step], h[step - 1] if step else None))
        pairs = pairwise(map(float, sigmas))
        return [
            Plan([sigma, low / sigma, onward, *correction], False, None if low else UniPC.step)
            for (sigma, low), onward, correction in zip(pairs, extrapolations(sigmas), corrections, strict=False)
        ]

    def step(self, x: Tensor, numbers: Tensor, noise: Tensor | None, labels: Tensor | None,
             *before: Tensor) -> tuple[Tensor, ...]:
        sigma, ratio, onward, of_change, of_last_change = rows(numbers)
        denoised = self.denoiser(x, sigma, labels)
        if not before:
            return ops.lerp(denoised, x, per_sample(ratio, x)), denoised
        last, *last_change = before
        change = denoised - last
        x = x + change * per_sample(of_change, x)
        if last_change:
            x = x + last_change[0] * per_sample(of_last_change, x)
        image = denoised + change * per_sample(onward, x)
        return ops.lerp(image, x, per_sample(ratio, x)), denoised, change


def _correction(h: float, before: float | None) -> tuple[float, float]:
    """What the corrector adds to a prediction over h, in l = -log(sigma): so much of the change of D over that step,
    and so much of that over the step before, of length `before`, where there was one.

    Equation 9 for p = 1 and 2, less the terms that the predictor has. r_1 = -before / h and r_2 = 1; phi_k are those of
    -h, as for all predictions of the image (appendix A.2).
    """
    B = math.expm1(-h)
    if before is None:
        return -B * 0.5, 0.0
    phi_1 = math.expm1(-h) / -h - 1
    phi_2 = phi_1 / -h - 0.5
    r = -before / h
    rho_1, rho_2 = np.linalg.solve(np.array([[1.0, 1.0], [r, 1.0]]), np.array([phi_1 / B, 2 * phi_2 / B]))
    return float(-B * rho_2), float(-B * (rho_1 - 0.5) / -r)


def sample_unipc(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Sequence[float] | np.ndarray,
    labels: Tensor | None = None,
    *,
    callback: Callback | None = None,
) -> Tensor:
    """`UniPC`'s images from x."""
    return UniPC(denoiser)(x, sigmas, labels, callback=callback)


@register_sampler("unipc", "UniPC, DPM-Solver++ with a corrector")
def _unipc(denoiser: Denoiser, config: Settings, captured: bool) -> Sampler:
    return UniPC(denoiser, captured)
