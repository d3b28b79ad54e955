"""Fine-tuning: a network that reads digits learns from 30 examples which are odd, its first layers frozen.

Prints its accuracy, that of such a network trained on the 30 alone, and how far the frozen layers moved.

    python examples/gallery/fine_tuning.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)
data = cudiff.load_dataset("digits", count=3000)
assert data.labels is not None
images = Tensor(data.images / 127.5 - 1, dtype="float32", device=device)
digits, odd = Tensor(data.labels, device=device), Tensor(data.labels % 2, device=device)


def features() -> nn.Sequential:
    pool, relu = nn.MaxPool2d(2), nn.ReLU()
    convolutions = [nn.Conv2d(1, 16, 3), relu, pool, nn.Conv2d(16, 32, 3), relu, pool]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(512, 32), relu)


def train(model: nn.Module, examples: np.ndarray, labels: Tensor, steps: int) -> nn.Module:
    optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(steps):
        batch = rng.choice(examples, 30)
        optimizer.zero_grad()
        cudiff.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, examples: np.ndarray) -> float:
    with cudiff.no_grad():
        return float((model(images[examples]).argmax(axis=1) == odd[examples]).mean())


few, test = np.arange(30), np.arange(2000, 3000)
learned = features()
train(nn.Sequential(learned, nn.Linear(32, 10)).to(device), np.arange(2000), digits, 250)
learned.requires_grad_(False)
before = learned.state_dict()
tuned = train(nn.Sequential(learned, nn.Linear(32, 2)).to(device), few, odd, 200)
alone = train(nn.Sequential(features(), nn.Linear(32, 2)).to(device), few, odd, 200)
moved = max(np.abs(values - before[name]).max() for name, values in learned.state_dict().items())
print(f"accuracy {accuracy(tuned, test):.1%}, alone {accuracy(alone, test):.1%}, frozen layers moved {moved:.1f}")
