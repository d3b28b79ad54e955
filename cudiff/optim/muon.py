"""Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from cudiff import ops
from cudiff.backend import array_module, copy_into, float32
from cudiff.errors import CudiffError
from cudiff.ops.optim import Scalar, sgd
from cudiff.optim.ema import EMA
from cudiff.optim.optimizer import Checked, Optimizer, Parameters, Range
from cudiff.optim.schedules import Schedule
from cudiff.tensor import Tensor, no_grad
from cudiff.values import flag, real, whole

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of Newton-Schulz's polynomial: it drives singular values to 0.7 to 1.2, not to 1, and is steep at 0."""


class Muon(Optimizer):
    """Muon (Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024), of matrices and convolutions.

    The gradient with momentum, as a matrix of an output a row, is replaced by one near its nearest orthogonal matrix,
    times √max(1, rows / columns); weight decay is decoupled. ns_steps: of Newton-Schulz's iteration. Biases, norms,
    embeddings and the last layer are for another optimiser, such as AdamW. Raises CudiffError for vectors.
    """

    moments: tuple[str, ...] = ("momentum_buffer",)
    numbers = ("momentum", "weight_decay", "nesterov")
    momentum, nesterov = Checked(partial(real, least=0, below=1)), Checked(flag)
    ns_steps = Checked(whole)

    def __init__(self, parameters: Parameters, lr: float = 2e-2, momentum: float = 0.95, nesterov: bool = True,
                 weight_decay: float = 0.0, ns_steps: int = 5, clip: float | None = None,
                 schedule: Schedule | None = None, ema: EMA | None = None):
        super().__init__(parameters, lr, weight_decay, clip, schedule, ema, momentum=momentum, nesterov=nesterov,
                         ns_steps=ns_steps)
        if self.flat.shards.shared:
            raise CudiffError("Muon needs whole matrices, and a sharded model is updated in parts: leave shard out, or "
                              "use AdamW, Adam, SGD, RMSprop or Lion")
        vectors = [parameter.shape for parameter in self._own() if parameter.ndim < 2]
        if vectors:
            raise CudiffError(
                f"Muon trains matrices and convolutions, not parameters of shape {vectors[0]}: give it "
                "[p for p in model.parameters() if p.ndim >= 2], and the others to AdamW"
            )

    def _update(self, part: Range, scalars_for: Callable[[float, tuple[float, float]], Tensor]) -> None:
        """By the kernel of SGD: it makes the gradient with momentum, then the step along the orthogonal matrix."""
        group, module = part.group, array_module(self.flat.device)
        scalars = scalars_for(group["lr"], self.betas)
        direction, own = (Tensor(module.zeros(part.data.size, float32)) for _ in range(2))
        sgd(direction, part.grad, part.moments[0], _with_one(scalars, Scalar.LR), part.flags,
            momentum=group["momentum"], nesterov=group["nesterov"])
        for start, stop, shape in part.places:
            place = direction.data[start:stop].reshape(shape[0], -1)
            factor = -math.sqrt(max(1, place.shape[0] / place.shape[1]))  # SGD has descended from zero
            with no_grad():
                copy_into(place, (orthogonal(Tensor(place), self.ns_steps) * factor).data)
        sgd(part.data, direction, own, _with_one(scalars, Scalar.GRAD_SCALE), part.flags, *part.targets,
            weight_decay=group["weight_decay"])


def _with_one(scalars: Tensor, at: Scalar) -> Tensor:
    """The step's scalars, but 1 at one place."""
    own = scalars.data.copy()
    own[at : at + 1].fill(1)
    return Tensor(own)


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """U·S'·Vᵀ of a matrix U·S·Vᵀ, with S' near 1, by Newton-Schulz's iteration of degree 5. Jordan 2024."""
    a, b, c = COEFFICIENTS
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else ops.transpose(x)
    x = x / (ops.sqrt(ops.sum(ops.square(x))) + 1e-7)
    for _ in range(steps):
        gram = ops.matmul(x, ops.transpose(x))
        x = x * a + ops.matmul(gram * b + ops.matmul(gram, gram) * c, x)
    return x if wide else ops.transpose(x)
