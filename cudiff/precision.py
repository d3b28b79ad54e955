"""Whether a GPU may round the operands of float32 matrix products to tf32."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_mode = threading.local()


def tf32_allowed() -> bool:
    """Whether this thread's products may be rounded now. In a backward it is what it was in the forward."""
    return getattr(_mode, "tf32", False)


@contextlib.contextmanager
def allow_tf32(allowed: bool = True) -> Iterator[None]:
    """Let float32 matrix products, convolutions and attention of this thread round their operands to 10 bits of
    mantissa on a GPU, inside the block; also usable as a decorator.

    Their relative error is about 1e-3 then, and 1e-6 without. A backward computes as its forward did. A Module goes by
    its own `precision`, inside the block too: `fp32` does not round, the others do.
    """
    before = tf32_allowed()
    set_tf32(allowed)
    try:
        yield
    finally:
        set_tf32(before)


def set_tf32(allowed: bool) -> None:
    """Set what `tf32_allowed` returns, until the next call or the end of the `allow_tf32` block around this one."""
    _mode.tf32 = allowed
