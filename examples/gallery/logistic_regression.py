"""Logistic regression in NumPy, with `cudiff.grad` for its gradient. Prints the accuracy on the training points."""

from typing import Any

import numpy as np

import cudiff

rng = np.random.default_rng(0)
x = rng.standard_normal((400, 3))
labels = (x @ [2.0, -1.0, 0.5] + 0.3 + rng.logistic(0, 0.3, 400) > 0).astype(float)


def loss(weights: Any, bias: Any) -> Any:
    """The mean of -log p(label), and a little weight decay."""
    logits = x @ weights + bias
    return np.mean(np.log(1 + np.exp(logits)) - labels * logits) + 1e-3 * np.sum(weights**2)


gradient = cudiff.grad(loss, argnums=(0, 1))
weights, bias = np.zeros(3), 0.0
for step in range(301):
    dweights, dbias = gradient(weights, bias)
    weights, bias = weights - 2 * dweights, bias - 2 * dbias
    if step % 100 == 0:
        print(f"step {step}: loss {loss(weights, bias):.4f}")

print(f"weights {weights.round(2)}, bias {bias:.2f}")
print(f"accuracy {np.mean((x @ weights + bias > 0) == labels):.1%}")
