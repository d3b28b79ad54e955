"""A recurrent network, a loop over time, that continues sine waves of unknown frequency and phase.

Prints the error of the next value, beside that of repeating the last one.

    python examples/gallery/rnn.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)


def waves(n: int) -> Tensor:
    frequency, phase = rng.uniform(0.2, 0.6, (n, 1)), rng.uniform(0, 2 * np.pi, (n, 1))
    return Tensor(np.sin(frequency * np.arange(30) + phase), dtype="float32", device=device)


class RNN(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.from_input, self.from_state = nn.Linear(1, width), nn.Linear(width, width)
        self.width, self.out = width, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, T) to the guesses (N, T) of what comes next."""
        state, guesses = cudiff.zeros((len(x), self.width), device=device), []
        for time in range(x.shape[1]):
            state = cudiff.tanh(self.from_input(x[:, time : time + 1]) + self.from_state(state))
            guesses.append(self.out(state))
        return cudiff.concatenate(guesses, axis=1)


model = RNN(32).to(device)
optimizer = optim.Adam(model.parameters(), lr=3e-3, clip=1.0)
for step in range(301):
    x = waves(64)
    loss = cudiff.mse(model(x[:, :-1])[:, 5:], x[:, 6:])  # the first values say too little
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: error {loss.item() ** 0.5:.3f}")

with cudiff.no_grad():
    x = waves(500)
    error = cudiff.mse(model(x[:, :-1])[:, 5:], x[:, 6:]).item() ** 0.5
    repeated = cudiff.mse(x[:, 5:-1], x[:, 6:]).item() ** 0.5
print(f"error {error:.3f}, of repeating {repeated:.3f}")
