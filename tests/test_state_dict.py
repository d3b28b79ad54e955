"""Which state dicts are cudiff's, and which are PyTorch's, or may be."""

import copy
import pickle

import numpy as np
import pytest

from cudiff import nn
from cudiff.convert import from_torch, to_torch
from cudiff.errors import CudiffError

LIKE_PYTORCHS = [
    nn.Conv2d(3, 4, 3), nn.Conv2d(2, 4, 2), nn.ConvTranspose2d(4, 3, 3), nn.Conv1d(3, 4, 3),
    nn.Conv2d(6, 4, 3, groups=2),
]


@pytest.mark.parametrize("layer", LIKE_PYTORCHS, ids=lambda layer: type(layer).__name__)
def test_arrays_in_pytorchs_layout_are_not_taken_in_silence(layer):
    """Shapes coincide: by a plain dict alone nobody can tell. What cudiff gives and reads says it."""
    own = layer.state_dict()
    theirs = to_torch(own, layer.layouts())
    assert {name: x.shape for name, x in theirs.items()} == {name: x.shape for name, x in own.items()}
    for doubtful in (theirs, dict(own)):
        with pytest.raises(CudiffError, match=r"^weight of shape \(.*\) is in PyTorch's layout, or may be: load"):
            layer.load_state_dict(doubtful)
    for known in (own, from_torch(theirs, layer.layouts()), nn.StateDict(dict(own)), copy.deepcopy(own),
                  pickle.loads(pickle.dumps(own))):
        layer.weight.assign(np.zeros(layer.weight.shape))
        layer.load_state_dict(known)
        np.testing.assert_array_equal(layer.state_dict()["weight"], own["weight"])


def test_what_tells_the_layout_of_a_plain_dict(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Linear(4, 2))
    own = model.state_dict()
    model.load_state_dict(dict(own))  # (4, 3, 3, 8) is cudiff's alone
    with pytest.raises(CudiffError, match=r"^0.weight of shape \(8, 3, 3, 3\) is in PyTorch's layout"):
        model.load_state_dict({"0.weight": own["0.weight"]}, strict=False)
    with pytest.raises(CudiffError, match=r"^1.weight of shape \(4, 8, 3, 3\) is in PyTorch's layout"):
        model.load_state_dict({"1.weight": own["1.weight"].transpose(0, 3, 1, 2)}, strict=False)
    model.load_state_dict({"2.weight": own["2.weight"]}, strict=False)
    nn.Conv2d(1, 4, 1).load_state_dict(dict(nn.Conv2d(1, 4, 1).state_dict()))  # one number a filter: both are one
    first = nn.Conv2d(3, 8, 3)
    first.save(tmp_path / "first.safetensors")
    nn.Conv2d(3, 8, 3).load(tmp_path / "first.safetensors")


def test_pytorchs_count_of_batches_is_not_read():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for net, prefix in ((model, "1."), (model[1], "")):
        state = dict(net.state_dict()) | {f"{prefix}running_mean": np.full(2, 7.0, np.float32)}
        net.load_state_dict(state | {f"{prefix}num_batches_tracked": np.array(5)})
        assert model[1].running_mean.numpy().tolist() == [7, 7] and len(net.state_dict()) == len(state)
    with pytest.raises(CudiffError, match=r"unexpected 0.num_batches_tracked$"):  # of no batch norm
        model.load_state_dict(dict(model.state_dict()) | {"0.num_batches_tracked": np.array(5)})
