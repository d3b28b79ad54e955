"""A small convolutional classifier: for MNIST, and as the judge of samples."""

from __future__ import annotations

from cudiff import ops
from cudiff.backend import float32
from cudiff.errors import CudiffError
from cudiff.nn import BatchNorm2d, Conv2d, Linear, Module
from cudiff.tensor import Tensor


class CNN(Module):
    """net(x): x (N, S, S, channels) float32 in [−1, 1] → logits (N, num_classes) float32.

    Twice a 3×3 convolution (to 32, to 64 channels), batch norm, ReLU and 2×2 max-pooling; then linear to 128, ReLU,
    linear to num_classes. Any size from 4 pixels; where it does not divide by 4, pooling leaves the last ones out.
    Raises CudiffError for a smaller one.
    """

    FEATURES = 128

    def __init__(self, image_size: int = 28, channels: int = 1, num_classes: int = 10):
        super().__init__()
        if image_size < 4:
            raise CudiffError(f"images of {image_size} pixels are too small for two poolings: use 4 or more")
        self.conv1, self.norm1 = Conv2d(channels, 32, 3), BatchNorm2d(32)
        self.conv2, self.norm2 = Conv2d(32, 64, 3), BatchNorm2d(64)
        self.fc1 = Linear((image_size // 4) ** 2 * 64, self.FEATURES)
        self.fc2 = Linear(self.FEATURES, num_classes)

    def _features(self, x: Tensor) -> Tensor:
        h = ops.astype(x, self.activation_dtype)
        h = self.norm1(self.conv1(h), relu_pool=True)
        h = self.norm2(self.conv2(h), relu_pool=True)
        return ops.relu(self.fc1(ops.flatten(h, 1)))

    def features(self, x: Tensor) -> Tensor:
        """(N, 128) float32: what the last layer sees."""
        return ops.astype(self._features(x), float32)

    def forward(self, x: Tensor) -> Tensor:
        return ops.astype(self.fc2(self._features(x)), float32)
