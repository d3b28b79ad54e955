"""Ratings of films as products of a few numbers for each user and each film.

Prints the error of ratings that were not shown, beside the noise in them, 0.1, and the error of the mean rating.

    python examples/gallery/matrix_factorisation.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)
USERS, FILMS, RANK = 200, 100, 3
ratings = rng.standard_normal((USERS, RANK)) @ rng.standard_normal((RANK, FILMS)) / np.sqrt(RANK)
user, film = np.nonzero(rng.random((USERS, FILMS)) < 0.3)  # those that were given
given = ratings[user, film] + rng.normal(0, 0.1, len(user))
test = rng.random(len(user)) < 0.2


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, RANK), nn.Embedding(FILMS, RANK)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return (self.users(user) * self.films(film)).sum(axis=1)


model = Factors().to(device)
optimizer = optim.Adam(model.parameters(), lr=0.02)
shown = [Tensor(array[~test], device=device) for array in (user, film)]
target = Tensor(given[~test], dtype="float32", device=device)
for step in range(401):
    optimizer.zero_grad()
    loss = cudiff.mse(model(*shown), target)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: error {loss.item() ** 0.5:.3f}")

with cudiff.no_grad():
    found = model(Tensor(user[test], device=device), Tensor(film[test], device=device)).numpy()
error = np.sqrt(np.mean((found - given[test]) ** 2))
print(f"error {error:.3f}, of the mean rating {given[test].std():.3f}")
