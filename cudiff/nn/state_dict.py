"""State dicts in cudiff's own layouts, and those that are in PyTorch's, or may be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from cudiff.errors import CudiffError

IN_TORCH = {"conv2d": (0, 3, 1, 2), "conv_transpose2d": (0, 3, 1, 2), "conv1d": (0, 2, 1)}
"""By a parameter's layout, the order in which PyTorch has the axes of cudiff's weight (K, R, S, C) or (K, S, C)."""

MODULE, LAYOUT = "cudiff_module", "native KRSC"
"""What the metadata of a file that `Module.save` wrote says: under one key, as the library has no order of several."""


class StateDict(dict[str, np.ndarray]):
    """Arrays by name in cudiff's own layouts: what `Module.state_dict` and `cudiff.convert.from_torch` give. Of any
    other dict `Module.load_state_dict` looks at the shapes of convolutions' weights."""


def is_batch_count(name: str, targets: Mapping[str, Any]) -> bool:
    """Whether `name` is PyTorch's count of batches in a batch norm among `targets`, which no layer of cudiff has."""
    stem, dot, last = name.rpartition(".")
    return last == "num_batches_tracked" and name not in targets and f"{stem}{dot}running_mean" in targets


def require_native(state: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Raise CudiffError where weights have the shapes of PyTorch's layouts, and none has one that is cudiff's alone:
    (4, 3, 3, 3) is both."""
    doubtful = []
    for name, parameter in parameters.items():
        axes = IN_TORCH.get(parameter.layout)
        if axes is None or name not in state:
            continue
        given, own = tuple(state[name].shape), parameter.shape
        if given == tuple(own[axis] for axis in axes):
            if own[-1] > 1 or given != own:  # of one channel and one tap both layouts are one
                doubtful.append(f"{name} of shape {given}")
        elif given == own:
            return
    if doubtful:
        raise CudiffError(
            f"{doubtful[0]} is in PyTorch's layout, or may be: load cudiff.convert.from_torch(state, model.layouts()), "
            "or nn.StateDict(state) where it is cudiff's"
        )


def metadata_of(digests: Mapping[str, str]) -> dict[str, str]:
    """Of a file that `Module.save` writes, with the SHA-256 digests of its tensors."""
    return {MODULE: json.dumps({"layout": LAYOUT, "sha256": digests})}


def digests_in(path: str | os.PathLike, metadata: Mapping[str, str]) -> dict[str, str] | None:
    """Those in the metadata of the file at `path`; None of a file that was written before there were any.

    Raises CudiffError where `Module.save` did not write it.
    """
    text = metadata.get(MODULE, "")
    if text == LAYOUT:
        return None
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        about = json.loads(text)
        if about["layout"] == LAYOUT:
            return dict(about["sha256"])
    raise CudiffError(
        f"{path} was not written by Module.save, or is damaged: cudiff.load reads checkpoints, "
        "cudiff.convert.read_weights and from_torch weights of PyTorch"
    )
