"""A mixture of three Gaussians fitted by gradient descent on its likelihood. Prints the mixture and the true one."""

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

rng = np.random.default_rng(0)
weights, means, widths = np.array([0.5, 0.3, 0.2]), np.array([-2.0, 1.0, 4.0]), np.array([0.6, 0.3, 1.0])
which = rng.choice(3, 2000, p=weights)
x = Tensor(rng.normal(means[which], widths[which]), dtype="float32")


class Mixture(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.logits, self.means = nn.Parameter(np.zeros(n)), nn.Parameter(np.linspace(-3, 3, n))
        self.log_widths = nn.Parameter(np.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        """log p(x) of each x (N,)."""
        z = (x[:, None] - self.means) / cudiff.exp(self.log_widths)
        log_density = -0.5 * z**2 - self.log_widths - 0.5 * np.log(2 * np.pi)
        return cudiff.logsumexp(cudiff.log_softmax(self.logits) + log_density, axis=1)


model = Mixture(3)
optimizer = optim.Adam(model, lr=0.05)
for step in range(301):
    loss = -model(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

found = [cudiff.softmax(model.logits), model.means, cudiff.exp(model.log_widths)]
errors = []
for name, values, true in zip(("weights", "means", "widths"), found, (weights, means, widths), strict=True):
    print(f"{name} {values.numpy().round(2)}, true {true}")
    errors.append(np.abs(values.numpy() - true).max())
print(f"largest error {max(errors):.2f}")
