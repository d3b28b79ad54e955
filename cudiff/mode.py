"""What holds for all that a thread computes now. It is read for each operation, and changed in the two modules that
give it to others: see `cudiff.tensor` and `cudiff.precision`."""

from __future__ import annotations

import threading


class _Mode(threading.local):
    """grad: whether operations are being recorded on the tape. depth: how many times what runs now will be
    differentiated (see `cudiff.differentiate`). tf32: whether products may be rounded; in a backward what it was in the
    forward."""

    grad: bool = True
    depth: int = 0
    tf32: bool = False


mode = _Mode()
