"""Optimisers, learning-rate schedules and the moving average of weights, over flat buffers.

    model.flatten(device)
    optimizer = AdamW(model, lr=2e-4, clip=1.0, schedule=Cosine(10_000, warmup=200), ema=EMA(model, half_life=500))
    ...
    optimizer.zero_grad()
    loss_fn(model, images, labels, generator).backward()
    optimizer.step()
    generator.advance()  # else the next step has the same noise

Gradients add up in the flat buffer until `zero_grad`; for the mean over k backward passes call `step(scale=1 / k)`.
`step` reads nothing back from the device, so that it can be captured in a CUDA graph.

In fp16 the loss is scaled: `optimizer.loss_scale = LossScale()`, and `optimizer.backward(loss)` for `loss.backward()`.
"""

from cudiff.optim.adam import Adam, AdamW
from cudiff.optim.ema import EMA
from cudiff.optim.lion import Lion
from cudiff.optim.loss_scale import LossScale
from cudiff.optim.muon import Muon
from cudiff.optim.optimizer import Optimizer
from cudiff.optim.rmsprop import RMSprop
from cudiff.optim.schedules import Constant, Cosine, Tabulated
from cudiff.optim.sgd import SGD

__all__ = [
    "EMA", "SGD", "Adam", "AdamW", "Constant", "Cosine", "Lion", "LossScale", "Muon", "Optimizer", "RMSprop",
    "Tabulated",
]
