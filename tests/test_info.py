"""`cudiff info --kernels --preset`: which kernels serve a training step."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest

from cudiff import info
from cudiff.cli import main
from cudiff.cuda import device, select
from cudiff.errors import CudiffError


def rows(preset, **changes):
    with np.errstate(all="ignore"):
        table = info.step_table(preset, **changes)
    return [tuple(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize("preset", ["digits", "elephants"])
def test_a_steps_kernels_on_hopper(host_of, preset):
    host = host_of(True)
    found = rows(preset, precision="bf16")
    blocks = [row for row in found if row[0] == "convolution, fprop" and row[3] == "bias, skip, statistics"]
    assert blocks and all(row[2] == "conv2d_sm90" and row[4] == "" and row[5] for row in blocks)
    assert any(row[0] == "convolution, dgrad" and "norm backward" in row[3] for row in found)
    assert all(row[5].startswith("[") for row in found if row[2].startswith("group_norm") and "sm90" in row[2])
    assert not any("object at" in row[5] for row in found)
    passes = [row[0] for row in found]
    forward = list(takewhile(lambda name: "fprop" in name or "forward" in name, passes))
    assert not {"convolution, fprop", "attention, forward"} & set(passes[len(forward):])
    # Each weight gradient is in one batch, each batch one launch.
    batches = [(int(row[1].split()[-1]), int(row[6])) for row in found if row[2] == "wgrad_sm90"]
    weights = [int(row[6]) for row in found if row[0].endswith("wgrad") and row[2].startswith("conv2d_wgrad_sm90")]
    assert sum(size * times for size, times in batches) == sum(weights) and max(batches)[0] > 1
    launched = sum(stem == "conv2d_wgrad_sm90" for stem, _ in host.launches)
    assert sum(times for _, times in batches) == launched
    asked_again = {"skip", "second source", "upsample"}
    served = [int(row[6]) for row in found if row[2] == "conv2d_sm90" and not asked_again & set(row[4].split(", "))]
    assert sum(served) == sum(stem == "conv2d_sm90" for stem, _ in host.launches)
    assert select.watch is None


def test_options_in_place_of_the_presets(host_of):
    host_of(False)
    found = rows("digits", batch_size=4)
    assert not any("sm90" in row[2] for row in found) and found[0][1].startswith("4x16x16x1, ")


def test_what_cannot_be_shown_is_said(monkeypatch, capsys):
    monkeypatch.setattr(info, "cuda_status", lambda: (False, "no driver"))
    with pytest.raises(CudiffError, match=r"needs a GPU \(no driver\): --arch sm_80 prints the tables"):
        info.step_table("digits")
    with pytest.raises(CudiffError, match="unknown preset 'none': choose one of"):
        info.step_table("none")
    for words in (["--preset", "digits"], ["--kernels", "--preset", "digits", "--arch", "sm_80"]):
        assert main(["info", *words]) == 2
        assert "--preset goes with --kernels alone" in capsys.readouterr().err
    assert main(["info", "--kernels", "--precision", "bf16"]) == 2
    assert "go with --kernels --preset NAME" in capsys.readouterr().err


def test_what_is_wrong_with_cupy_and_the_links_is_told():
    assert device.wheels(["cupy-cuda13x"]) == "from cupy-cuda13x" and device.wheels([]) == "built here"
    assert "overwrite each other: uninstall all" in device.wheels(["cupy-cuda12x", "cupy-cuda13x"])
    assert device.links(4, lambda a, b: 1) == "each reads the others' memory"
    one_way = device.links(3, lambda a, b: (a, b) != (2, 1))
    assert one_way.startswith("not direct between 1 and 2: ") and "nvidia-smi topo -m" in one_way


@pytest.mark.gpu
def test_the_wheel_is_told():
    assert "cupy" in device.describe()["CuPy"].split("from ")[-1]
