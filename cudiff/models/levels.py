"""What models share that halve the image from level to level: their widths, and the sizes that they take."""

from __future__ import annotations

from cudiff.errors import CudiffError
from cudiff.options import Option

WIDTHS = {
    "model_channels": Option(64, "channels at the first level", least=2, most=2**16),
    "channel_mult": Option((1, 2, 2), "channels at each level, in units of model_channels", least=1, most=2**10),
}


def check_levels(image_size: int, channel_mult: tuple[int, ...], halvings: int) -> None:
    """Raise CudiffError where there is no level, and where the image does not halve so often, saying which do."""
    if not channel_mult:
        raise CudiffError("channel_mult is empty: give one number a level, such as 1,2,2")
    step = 2**halvings
    if image_size % step:
        low = image_size // step * step
        raise CudiffError(
            f"image size {image_size} does not halve {halvings} times: use a multiple of {step}, "
            f"such as {f'{low} or ' if low else ''}{low + step}, or fewer entries in channel_mult"
        )
