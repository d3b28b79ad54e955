"""Word vectors (skip-gram): words that stand beside the same words get similar vectors.

Prints each word's nearest neighbour, and how many of these are of its own kind.

    python examples/gallery/word_vectors.py [cpu or cuda]
"""

import sys

import numpy as np

import cudiff
from cudiff import Tensor, nn, optim

device = sys.argv[1] if len(sys.argv) > 1 else cudiff.default_device()
rng = np.random.default_rng(0)
kinds = [
    ["cat", "dog", "horse", "bird"], ["eats", "finds", "wants", "smells"], ["bread", "meat", "fruit", "rice"],
    ["today", "often", "never", "again"],
]
words = [word for kind in kinds for word in kind]
sentences = np.stack([4 * kind + rng.integers(4, size=1000) for kind in range(4)], axis=1)  # a word of each kind
pairs = np.concatenate([sentences[:, [i, j]].reshape(-1, 2) for i, j in ((0, 1), (1, 2), (2, 3))])
pairs = np.concatenate([pairs, pairs[:, ::-1]])


class SkipGram(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.vectors, self.context = nn.Embedding(len(words), dim), nn.Linear(dim, len(words))

    def forward(self, word: Tensor) -> Tensor:
        """The logits of a word's neighbours."""
        return self.context(self.vectors(word))


model = SkipGram(8).to(device)
optimizer = optim.Adam(model.parameters(), lr=0.02)
for step in range(301):
    word, neighbour = rng.choice(pairs, 256).T
    optimizer.zero_grad()
    loss = cudiff.cross_entropy(model(Tensor(word, device=device)), Tensor(neighbour, device=device))
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

with cudiff.no_grad():
    vectors = model.vectors.weight / cudiff.sqrt((model.vectors.weight**2).sum(axis=1, keepdims=True))
    similarity, each = vectors @ vectors.T, np.arange(len(words))
    nearest = similarity.at[each, each].set(-1).argmax(axis=1).numpy()
print(", ".join(f"{word} - {words[other]}" for word, other in zip(words, nearest, strict=True)))
print(f"of its own kind {np.mean(nearest // 4 == each // 4):.0%}")
