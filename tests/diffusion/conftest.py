import numpy as np
import pytest

from cudiff.ops.random import Generator, normal, uniform


class WideGenerator(Generator):
    """Draws the same streams in float64, for checks that float32 would blur."""

    def normal(self, shape, stream=0, first=0):
        return normal(shape, self.seed, stream, self.step, first, dtype=np.float64)

    def uniform(self, shape, stream=0, first=0):
        return uniform(shape, self.seed, stream, self.step, first, dtype=np.float64)


@pytest.fixture
def wide_generator():
    return WideGenerator(seed=5)
