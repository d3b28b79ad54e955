"""The outline of a model that a file is compared with: up to twice as large, and no larger."""

import pytest

from cudiff.config import Config
from cudiff.errors import CudiffError
from cudiff.models import build, outline

CONFIG = Config(image_size=8, channels=1, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2)


def test_an_outline_is_at_most_twice_as_large_as_the_file():
    net = build(CONFIG)
    shapes = {name: value.shape for name, value in net.named_parameters()}
    tensors, numbers = len(shapes), net.num_parameters()
    for few, small in ((tensors, numbers), (-(-tensors // 2), numbers), (tensors, -(-numbers // 2))):
        found = outline(CONFIG, few, small)
        assert {name: value.shape for name, value in found.named_parameters()} == shapes
    for few, small in (((tensors - 1) // 2, numbers), (tensors, (numbers - 1) // 2)):
        with pytest.raises(CudiffError):
            outline(CONFIG, few, small)


@pytest.mark.parametrize("missing", ["image_size", "channels"])
def test_a_model_needs_a_size_and_channels(missing):
    with pytest.raises(CudiffError, match="a model needs image_size and channels: give both"):
        build(CONFIG.replace(**{missing: 0}))
