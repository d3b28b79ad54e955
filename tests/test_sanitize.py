"""The sanitizer's script: what it launches, by the stand-in for a GPU, and how it reads the tools' output."""

from collections import Counter

import pytest

from cudiff.cuda import launch
from tests import sanitize

OUTPUT = """\
========= COMPUTE-SANITIZER
@@ job Hopper: attention bfloat16
@@ launch cast cast
@@ launch attention forward
========= Invalid __global__ write of size 4 bytes
=========     at forward+0x1d0
=========     by thread (0,0,0) in block (3,0,0)
=========     Address 0x7f1f0a000204 is out of bounds
@@ launch attention_sm90 backward_q
========= Uninitialized __global__ memory read of size 16 bytes
=========     at backward_q+0x40
@@ done
========= ERROR SUMMARY: 2 errors
"""


def test_reports_belong_to_the_launch_before_them():
    launches, reports, ended = sanitize.read(OUTPUT)
    assert launches == {("cast", "cast"): 1, ("attention", "forward"): 1, ("attention_sm90", "backward_q"): 1} and ended
    job = "Hopper: attention bfloat16"
    assert reports == [
        (("attention", "forward"), job, "Invalid __global__ write of size 4 bytes"),
        (("attention_sm90", "backward_q"), job, "Uninitialized __global__ memory read of size 16 bytes"),
    ]
    assert not sanitize.read(OUTPUT.replace("@@ done\n", ""))[2]


def test_a_report_of_a_librarys_kernel_bears_its_name():
    at = "void cub::CUB_300102_SM_900::detail::merge_sort::DeviceMergeSortMergeKernel<cub::policy>(bool)+0xc40"
    text = "Uninitialized __global__ memory read of size 8 bytes"
    output = OUTPUT.replace("@@ done", f"@@ launch shape copy\n========= {text}\n=========     at {at}\n@@ done")
    launches, reports, _ = sanitize.read(output)
    assert reports[2] == (("cub", "DeviceMergeSortMergeKernel"), "Hopper: attention bfloat16", text)
    lines, errors = sanitize.table("initcheck", launches, reports)
    assert errors == 1 and any("cub.DeviceMergeSortMergeKernel" in line for line in lines)
    assert any("shape.copy" in line and line.endswith("clean") for line in lines)


def test_only_named_reports_are_false():
    launches, reports, _ = sanitize.read(OUTPUT)
    lines, errors = sanitize.table("initcheck", launches, reports)
    assert errors == 1
    text = "\n".join(lines)
    assert "attention_sm90.backward_q" in text and "clean (1 known to be false)" in text
    assert sum("not run" in line for line in lines) == len(sanitize.kernels()) - 3
    assert sanitize.table("memcheck", launches, reports)[1] == 2  # there it is not known
    known = reports[1]
    for other in (known._replace(kernel=("attention", "backward_q")), known._replace(job="any GPU: attention bfloat16"),
                  known._replace(text="Uninitialized __global__ memory read of size 4 bytes")):
        assert sanitize.table("initcheck", Counter(), [other])[1] == 1, other


@pytest.mark.slow
def test_every_kernel_is_launched(host_of, monkeypatch):
    """On Hopper and on older GPUs together."""
    found = set()
    for hopper in (True, False):
        host = host_of(hopper)
        monkeypatch.setattr(launch, "kernel", sanitize.watched(lambda stem, name: found.add((stem, name))))
        for _, job in sanitize.jobs():
            job()
        assert len(host.launches) > 200
    assert not (sanitize.kernels() - found), sorted(sanitize.kernels() - found)
