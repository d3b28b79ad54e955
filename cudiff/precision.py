"""Whether a GPU may round the operands of float32 matrix products to tf32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cudiff.mode import mode


def tf32_allowed() -> bool:
    """Whether this thread's products may be rounded now. In a backward it is what it was in the forward."""
    return mode.tf32


@contextlib.contextmanager
def allow_tf32(allowed: bool = True) -> Iterator[None]:
    """Let float32 matrix products, convolutions and attention of this thread round their operands to 10 bits of
    mantissa on a GPU, inside the block; also usable as a decorator.

    Their relative error is about 1e-3 then, and 1e-6 without. A backward computes as its forward did. A Module goes by
    its own `precision`, inside the block too: `fp32` does not round, the others do.
    """
    before, mode.tf32 = mode.tf32, allowed
    try:
        yield
    finally:
        mode.tf32 = before
