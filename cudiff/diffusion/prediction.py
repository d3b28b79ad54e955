"""What a net may predict of an image y and its noise n, each as a preconditioning of x = y + sigma n.

As in EDM (arXiv 2206.00364, equation 7) D(x; sigma) = c_skip x + c_out F(c_in x). F's target is (y - c_skip x) / c_out:

    predicts  c_skip             c_out                      c_in                   target         arXiv
    eps       1                  -sigma                     1 / sqrt(1 + sigma^2)  n              2006.11239
    x0        0                  1                          1 / sqrt(1 + sigma^2)  y              2202.00512
    v         1 / (1 + sigma^2)  -sigma / sqrt(1 + sigma^2) 1 / sqrt(1 + sigma^2)  alpha n - s y  2202.00512
    flow      1 / (1 + sigma)    -sigma / (1 + sigma)       1 / (1 + sigma)        n - y          2209.03003

alpha = c_in and s = c_in sigma are the state's shares of y and n: c_in x = alpha y + s n. A flow's are 1 - t and t.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cudiff import ops
from cudiff.errors import CudiffError
from cudiff.ops.frame import ESTIMATES
from cudiff.tensor import Tensor


class Prediction(NamedTuple):
    """One line of the table above.

    denoised(x, out, sigma): D(x; sigma) of the net's output, sigma (N, 1, ..., 1). c_out(sigma).
    target(y, n, alpha, s): what the output should be, alpha and s (N, 1, ..., 1).
    """

    denoised: Callable[[Tensor, Tensor, Tensor], Tensor]
    c_out: Callable[[Tensor], Tensor]
    target: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


PREDICTIONS = {
    "eps": Prediction(
        denoised=ESTIMATES["eps"],
        c_out=lambda sigma: -sigma,
        target=lambda y, n, alpha, s: n,
    ),
    "x0": Prediction(
        denoised=ESTIMATES["x0"],
        c_out=lambda sigma: sigma * 0 + 1,
        target=lambda y, n, alpha, s: y,
    ),
    "v": Prediction(
        denoised=ESTIMATES["v"],
        c_out=lambda sigma: -sigma / ops.sqrt(ops.square(sigma) + 1),
        target=lambda y, n, alpha, s: n * alpha - y * s,
    ),
    "flow": Prediction(
        denoised=ESTIMATES["flow"],
        c_out=lambda sigma: -sigma / (sigma + 1),
        target=lambda y, n, alpha, s: n - y,
    ),
}
DISCRETE = ("eps", "x0", "v")
"""Those of variance-preserving states, which a DDPM schedule has."""


def predicting(name: str) -> Prediction:
    """The prediction of this name in a variance-preserving process. Raises CudiffError where there is none."""
    if name not in DISCRETE:
        raise CudiffError(f"unknown prediction '{name}': use {' or '.join(DISCRETE)}")
    return PREDICTIONS[name]
