"""A convolutional network that reads drawn digits. Prints its accuracy on digits that it was not shown.

    python examples/gallery/cnn.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)


def digits(part: str) -> tuple[Tensor, np.ndarray]:
    data = cudiff.load_dataset("digits", part=part, count=1500 if part == "train" else 500)
    assert data.labels is not None
    return Tensor(data.images / 127.5 - 1, dtype="float32", device=device), data.labels


model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
).to(device)
optimizer = optim.Adam(model.parameters(), lr=3e-3)
images, labels = digits("train")
for epoch in range(3):
    order = rng.permutation(len(images))
    for batch in np.split(order, len(order) // 50):
        optimizer.zero_grad()
        loss = cudiff.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

model.eval()
images, labels = digits("test")
with cudiff.no_grad():
    guesses = model(images).argmax(axis=1).numpy()
print(f"accuracy {np.mean(guesses == labels):.1%}")
