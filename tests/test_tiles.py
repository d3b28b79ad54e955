"""Which plan a problem takes: lists, the rule, and what `cudiff tune` measures and writes."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from cudiff import info, tune
from cudiff.backend import bfloat16
from cudiff.cli import main
from cudiff.config import PRESETS
from cudiff.cuda import tiles
from cudiff.cuda.compiler import kernel_folder
from cudiff.cuda.deferred import immediate
from cudiff.cuda.device import asked_about, current_device, multiprocessors
from cudiff.cuda.kernels.attention import problem as attention_problem
from cudiff.cuda.kernels.attention import short_sm90, wide_sm90
from cudiff.cuda.kernels.attention import sm90 as attention
from cudiff.cuda.kernels.attention.table import ATTENTION
from cudiff.cuda.kernels.convolution import plans_sm90, wgrad_sm90
from cudiff.cuda.kernels.gemm import product
from cudiff.cuda.kernels.gemm import sm90 as gemm_sm90
from cudiff.cuda.kernels.norm import sm90 as norm
from cudiff.cuda.tiles import Planner, name_of, read, user_file
from cudiff.data import Dataset
from cudiff.errors import CudiffError
from cudiff.ops import conv2d, group_norm, norm_silu_conv2d
from cudiff.tensor import Tensor
from cudiff.train import Trainer

PLANNERS = {planner.kernel: planner for planner in (
    plans_sm90.plan, wgrad_sm90.plan, product.plan, norm.FORWARD, norm.BACKWARD, attention.FORWARD, short_sm90.BACKWARD,
    gemm_sm90.plan,
)}


class Cut(NamedTuple):
    parts: int

    @property
    def choice(self):
        return [self.parts]


@pytest.fixture
def planner(monkeypatch):
    """Of a kernel that no list knows: by the rule 3 parts take least time, 1 twice as long, 7 four times."""
    monkeypatch.setattr(tiles, "_planners", [])
    cuts = [Cut(1), Cut(3), Cut(7)]
    return Planner("kernel", lambda size, flag: cuts, lambda cut, size, flag: abs(cut.parts - 3) or 1)


@pytest.fixture
def listing(monkeypatch, tmp_path):
    """Has cudiff take this machine for one with a GPU of that name, for which the user's file says this."""
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiles, "cuda_status", lambda: (True, ""))
    monkeypatch.setattr(tiles, "current_device", lambda: SimpleNamespace(name="Some GPU"))

    def write(text):
        user_file().write_text(text)
        tiles.forget()

    tiles.forget()
    yield write
    monkeypatch.undo()
    tiles.forget()


def test_the_rule(planner):
    assert planner(5, True) == Cut(3) and planner.estimate(5, True) == 1
    assert planner.by_rule(5, True, count=9, margin=2) == [Cut(3), Cut(1)]
    assert planner.by_rule(5, True, count=9, margin=4) == [Cut(3), Cut(1), Cut(7)]
    assert planner.by_rule(5, True, count=2, margin=4) == [Cut(3), Cut(1)]


def test_a_list_goes_before_the_rule(planner, listing):
    listing('["Some GPU".kernel-1]\n"5, True" = [7]\n"6, True" = [8]\n\n["Another GPU".kernel-1]\n"7, True" = [1]\n')
    assert planner(5, True) == Cut(7)
    assert planner(6, True) == Cut(3), "there is no such plan"
    assert planner(7, True) == Cut(3), "that is another GPU"
    assert planner.estimate(5, True) == 1


def test_the_users_file_goes_before_that_of_cudiff(planner, listing, monkeypatch, tmp_path):
    monkeypatch.setattr(tiles, "kernel_folder", lambda: tmp_path / "kernels")
    (tmp_path / "kernels" / "tuned").mkdir(parents=True)
    for name in ("Another-GPU", "Some-GPU", "Third-GPU"):
        text = f'["{name.replace("-", " ")}".kernel-1]\n"5, True" = [7]\n"6, True" = [7]\n'
        (tmp_path / "kernels" / "tuned" / f"{name}.toml").write_text(text)
    listing('["Some GPU".kernel-1]\n"5, True" = [1]\n')
    assert planner(5, True) == Cut(1) and planner(6, True) == Cut(7)


@pytest.mark.parametrize("text", [
    "[", "a = 1", '["Some GPU"]\nkernel-1 = 3', '["Some GPU".kernel-1]\n"5, True" = 7', "\udcff", "a = " + 3000 * "[",
    *(f'["Some GPU".kernel-1]\n"5, True" = [{choice}]' for choice in ('"7"', "7.0", "true", "[7]")),
])
def test_a_damaged_file(planner, listing, text):
    user_file().write_bytes(text.encode(errors="surrogateescape"))
    tiles.forget()
    with pytest.raises(CudiffError, match=r"tiles.toml.*move it away"):
        planner(5, True)
    assert info._tiles().startswith("not usable: cannot use")


def test_a_file_with_a_byte_order_mark(planner, listing):
    listing('\ufeff["Some GPU".kernel-1]\n"5, True" = [7]\n')
    assert planner(5, True) == Cut(7) and info._tiles() == "1 measured for this GPU"


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError, FileNotFoundError])
def test_what_cannot_be_reached_lists_nothing(planner, listing, monkeypatch, error):
    def refuse(path, **options):
        raise error(13, "refused", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert planner(5, True) == Cut(3)


def test_another_gpu_that_is_only_asked_about_has_no_lines_of_this_one(planner, listing):
    listing('["Some GPU".kernel-1]\n"5, True" = [7]\n')
    with asked_about("sm_80"):
        assert planner(5, True) == Cut(3) and multiprocessors() == 108
    assert planner(5, True) == Cut(7)


def test_lines_of_another_version_are_passed_over(planner, listing, monkeypatch):
    newer = Planner("kernel", planner.plans, planner.time, version=2)
    listing('["Some GPU".kernel-1]\n"5, True" = [7]\n["Some GPU".kernel-2]\n"5, True" = [1]')
    assert planner(5, True) == Cut(7) and newer(5, True) == Cut(1)


def test_each_gpu_has_its_own_plans(planner, listing, monkeypatch):
    listing('["Some GPU".kernel-1]\n"5, True" = [7]\n["Another".kernel-1]\n"5, True" = [1]')
    for name, parts in ("Some GPU", 7), ("Another", 1), ("Some GPU", 7), ("A third", 3):
        monkeypatch.setattr(tiles, "current_device", lambda name=name: SimpleNamespace(name=name))
        assert planner(5, True) == Cut(parts)


def test_without_a_gpu_nothing_is_listed(planner, listing, monkeypatch):
    listing('["Some GPU".kernel-1]\n"5, True" = [7]\n')
    monkeypatch.setattr(tiles, "cuda_status", lambda: (False, "none"))
    assert planner(5, True) == Cut(3)


def test_each_line_that_comes_with_cudiff_names_a_plan():
    files = sorted((kernel_folder() / "tuned").iterdir())
    assert "NVIDIA-H200.toml" in [path.name for path in files]
    for path in files:
        ((gpu, kernels),) = read(path).items()
        assert path.name == f"{gpu.replace(' ', '-')}.toml"
        for kernel, lines in kernels.items():
            for name, choice in lines.items():
                problem = ast.literal_eval(name)
                assert name_of(problem) == name
                assert choice in [plan.choice for plan in PLANNERS[kernel].plans(*problem)], f"{kernel}: {name}"


@pytest.mark.parametrize("problem", [
    ((32, 64, 64, 64), 64, (3, 3), 2, 0, False), ((8, 8, 8, 512), 256, (3, 3), 4, 72, True),
    ((16, 28, 28, 64), 64, (3, 3), 2, 0, False),
])
def test_plans_of_convolutions_differ_by_their_choice(problem):
    plans = plans_sm90.plans(*problem)
    assert len({tuple(plan.choice) for plan in plans}) == len(plans)


@pytest.mark.parametrize("height, tried, taken", [
    (64, {256, 128, 64}, 256), (32, {256, 128, 64}, 256), (7, {256, 128, 112, 96, 64}, 64),
    (28, {256, 224, 128, 112, 64}, 224), (40, {256, 160, 128, 112, 64}, 160), (72, {256, 208, 192, 128, 96, 64}, 192),
    (14, {256, 128, 112, 64}, 112), (52, {256, 224, 216, 208, 160, 128, 112, 96, 64}, 208),
])
def test_tiles_whose_rows_divide_an_images_height_are_tried(height, tried, taken):
    problem = (1024, height, 64, 256), 64, (3, 3), 2, 0, False
    assert {plan.pixels for plan in plans_sm90.plans(*problem)} == tried
    assert plans_sm90.plan.by_rule(*problem)[0].pixels == taken


@pytest.mark.parametrize("channels, itemsize, spared", [
    (64, 2, 0), (48, 2, 1), (33, 2, 1), (32, 2, 2), (8, 2, 3), (136, 2, 3), (32, 4, 0), (24, 4, 1), (36, 4, 3),
])
def test_the_last_channels_leave_out_k_steps_of_zeros(channels, itemsize, spared):
    """A k-step has 16 channels of 16 bits, or 8 floats; four make a chunk."""
    assert plans_sm90.spared_k_steps(channels, itemsize) == spared
    chunk = 128 // itemsize
    own, whole = (plans_sm90.plan.estimate((32, 40, 40, count), 48, (3, 3), itemsize, 0, False)
                  for count in (channels, -(-channels // chunk) * chunk))
    assert own < whole if spared else own == whole


def test_plans_of_products_differ_by_their_choice():
    plans = set(product.plans(131072, 64, 576, 1, 2, 1, True))
    assert len({tuple(plan.choice) for plan in plans}) == len(plans)


@pytest.mark.parametrize("images", [(32, 64, 64), (32, 28, 28)])
def test_plans_of_weights_gradients_differ_by_their_choice(images):
    plans = list(wgrad_sm90.plans(images, ((64, 3, 3, 64), (64, 3, 3, 128)), False))
    assert len({tuple(plan.choice) for plan in plans}) == len(plans)


@pytest.mark.parametrize("images, weight, measured", [  # by the choice: microseconds on an H200
    ((6, 12, 12), (32, 3, 3, 640), {(1, 1, 4, 4, 12): 7.7, (1, 1, 1, 1, 12): 10.0, (1, 1, 1, 3, 12): 11.0}),
    ((2, 64, 64), (48, 3, 3, 64), {(1, 1, 1, 32): 10.7, (1, 1, 1, 37): 11.2, (1, 1, 1, 34): 11.2}),
    ((1, 120832, 8), (256, 1, 1, 192), {(1, 3, 1, 32): 221.6, (1, 3, 1, 33): 236.2, (1, 3, 2, 66): 261.9}),
    ((18, 16, 16), (96, 3, 3, 128), {(1, 1, 8, 8): 8.6, (1, 1, 1, 9): 11.7, (1, 1, 1, 6): 12.2}),
    ((7, 8, 8), (448, 3, 3, 256), {(1, 1, 1, 1): 10.0, (3, 1, 4, 4): 13.8, (3, 1, 1, 1): 14.7}),
    ((200, 48, 48), (160, 3, 3, 32), {(3, 1, 2, 42): 140.1, (3, 1, 2, 44): 144.9, (3, 1, 1, 42): 146.9}),
    ((25, 40, 40), (160, 3, 3, 128), {(1, 1, 1, 7): 33.2, (3, 1, 4, 20, 5): 36.1, (3, 1, 4, 20, 2): 39.2}),
    ((8, 14, 14), (256, 3, 3, 32), {(1, 1, 4, 4, 7): 7.1, (1, 1, 8, 8, 14): 7.6, (1, 1, 1, 10, 7): 10.3}),
    ((22, 24, 24), (48, 3, 3, 80), {(1, 1, 1, 22): 12.7, (1, 1, 1, 18): 13.1, (1, 1, 1, 13): 13.7}),
    ((3, 128, 128), (32, 3, 3, 64), {(1, 1, 1, 42): 16.5, (1, 1, 1, 43): 16.9, (1, 1, 4, 40): 17.5}),
    ((143, 32, 32), (192, 3, 3, 320), {(3, 1, 1, 8): 225.2, (3, 1, 8, 8): 227.1, (3, 1, 1, 16): 253.9}),
    ((15, 28, 28), (192, 3, 3, 192), {(1, 1, 4, 4, 2): 21.8, (3, 1, 4, 12, 7): 25.0, (1, 1, 1, 3, 2): 30.0}),
    ((1, 20, 20), (128, 3, 3, 64), {(1, 1, 4, 4, 4): 5.8, (1, 1, 1, 1, 10): 8.1, (3, 1, 1, 2, 10): 12.3}),
    ((1, 3038, 14), (192, 1, 1, 384), {(1, 3, 1, 21, 8): 24.6, (1, 3, 1, 22, 8): 24.8, (1, 3, 2, 22, 8): 25.7}),
    ((1, 4, 4), (128, 3, 3, 32), {(1, 1, 2, 2, 2): 5.5, (1, 1, 1, 1, 4): 5.7, (1, 1, 1, 2, 2): 8.0}),
    ((119, 20, 10), (32, 3, 3, 192), {(1, 1, 2, 14, 20): 16.6, (1, 1, 1, 13, 20): 17.7, (1, 1, 1, 11, 10): 19.4}),
])
def test_the_rule_of_weights_gradients_takes_what_was_fast(images, weight, measured):
    """The fastest plan of those that were measured, the slowest, and one between them or the rule's."""
    problem = images, (weight,), False
    plans = {tuple(plan.choice): plan for plan in wgrad_sm90.plans(*problem)}
    estimates = {choice: wgrad_sm90.time(plans[choice], *problem) for choice in measured}
    assert estimates == pytest.approx(measured, rel=0.26)
    assert measured[min(estimates, key=estimates.get)] <= 1.09 * min(measured.values())


@pytest.mark.parametrize("planner", [norm.FORWARD, norm.BACKWARD])
@pytest.mark.parametrize("problem", [(1024, 128, 0, 32, 2, 8, 132), (256, 128, 128, 32, 4, 2, 132)])
def test_plans_of_norms_differ_by_their_choice(planner, problem):
    plans = planner.plans(*problem)
    assert len({tuple(plan.choice) for plan in plans}) == len(plans) > 1


@pytest.mark.parametrize("images, tokens, heads, channels, measured", [  # by the plan: microseconds on an H200
    (451, 49, 1, 32, {1: 3.8, 2: 6.6}), (346, 256, 1, 32, {1: 17.1, 2: 15.4, "wide": 24.3}),
    (691, 900, 1, 32, {1: 307.5, 2: 276.9, "wide": 315.1}), (5, 577, 1, 32, {1: 8.8, 2: 9.9, "wide": 7.3}),
    (6, 64, 4, 64, {1: 2.4, 2: 2.8}), (4, 512, 16, 64, {1: 18.3, 2: 12.4, "wide": 19.0}),
    (26, 640, 16, 64, {1: 125.4, 2: 108.4, "wide": 133.4}), (1, 1024, 6, 64, {1: 13.5, 2: 15.2, "wide": 10.8}),
    (1, 1296, 16, 40, {1: 32.1, 2: 27.0, "wide": 20.2}), (2, 4096, 16, 64, {1: 380.8, 2: 296.0, "wide": 281.4}),
    (9, 324, 6, 80, {1: 9.9, 2: 10.9, "wide": 12.9}), (81, 256, 8, 80, {1: 50.8, 2: 46.1, "wide": 54.7}),
    (14, 577, 12, 72, {1: 73.1, 2: 59.1, "wide": 67.5}), (3, 1024, 16, 72, {1: 50.7, 2: 47.9, "wide": 39.7}),
    (26, 900, 12, 96, {1: 233.0, "wide": 266.6}), (2, 2000, 2, 96, {1: 30.1, "wide": 20.4}),
    (5, 64, 1, 128, {1: 3.1, 2: 3.5, 3: 4.2}), (35, 144, 6, 128, {1: 16.4, 2: 21.2, 3: 14.0}),
    (4, 640, 8, 128, {1: 25.5, 2: 26.5, 3: 16.8, "wide": 18.8}),
    (19, 2000, 4, 128, {1: 364.1, 2: 368.6, 3: 300.6, "wide": 265.6}),
])
def test_attentions_rule_takes_what_was_faster(images, tokens, heads, channels, measured):
    """Warpgroups of attention_sm90, or attention_wide_sm90."""
    dtype = np.dtype(np.float16)
    problem = attention_problem.Problem(False, dtype, images, tokens, tokens, heads, channels, aligned=True, products=1)
    with asked_about("sm_90a"):
        for plan in attention.FORWARD.plans(*attention.key(problem)):
            estimate = attention.FORWARD.time(plan, *attention.key(problem))
            assert estimate == pytest.approx(measured[plan.groups], rel=0.13)
    row, offer, _ = ATTENTION.select(problem, "sm_90a")
    wide = row.name.startswith("attention_wide")
    if wide:
        assert wide_sm90.time(offer.plan, problem) == pytest.approx(measured["wide"], rel=0.1)
    assert measured["wide" if wide else offer.plan.groups] <= 1.01 * min(measured.values())


@pytest.mark.parametrize("images, tokens, heads, channels, measured", [  # by the kernel: microseconds on an H200
    (45, 256, 8, 32, {"short": 33.6, "two": 38.9}), (3, 64, 8, 32, {"short": 2.3, "two": 3.9}),
    (1, 256, 8, 16, {"short": 10.5, "two": 8.0}), (2, 1536, 16, 40, {"one": 120.8, "two": 164.8}),
    (1, 1024, 16, 64, {"one": 30.2, "two": 36.6}), (3, 577, 2, 64, {"one": 19.8, "two": 18.1}),
    (109, 400, 6, 64, {"one": 322.1, "two": 230.8}), (1, 3000, 4, 72, {"one": 92.8, "two": 136.4}),
    (1, 577, 16, 72, {"one": 27.9, "two": 34.3}), (49, 256, 2, 80, {"one": 29.3, "two": 23.4}),
    (61, 512, 1, 96, {"one": 52.4, "two": 69.4}), (2, 768, 16, 96, {"one": 63.9, "two": 55.7}),
    (30, 1296, 2, 104, {"one": 315.9, "two": 375.1}), (3, 256, 2, 128, {"one": 16.2, "two": 12.6}),
])
def test_attentions_backward_by_what_was_faster(images, tokens, heads, channels, measured):
    """In one launch of few tokens, in one pass of many, or in two passes."""
    problem = attention_problem.Problem(True, np.dtype(np.float16), images, tokens, tokens, heads, channels,
                                        aligned=True, products=1)
    with asked_about("sm_90a"):
        assert attention.time_of_backward(problem) == pytest.approx(measured["two"], rel=0.15)
    row = ATTENTION.select(problem, "sm_90a").row.name
    taken = {"attention_short_sm90.backward": "short", "attention_backward_sm90.backward": "one"}.get(row, "two")
    assert measured[taken] == min(measured.values())


@pytest.fixture
def tuned_host_of(host_of, monkeypatch, tmp_path):
    """A stand-in for a GPU, on which the most channels of a tile, and the most parts, are the fastest."""

    def make(hopper):
        host = host_of(hopper)

        def graph_time(launch, **options):
            before = len(host.launches)
            with immediate():
                launch()
            assert len(host.launches) > before
            assert host.launches[before:].count(("accumulate", "sum_rows")) <= 1, "sums are batched, as in a backward"
            return 1000 - sum(launch.args[-1].choice)

        monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(tune, "capture", lambda fn, **options: fn)
        monkeypatch.setattr(tune, "graph_time", graph_time)
        return host

    return make


@pytest.fixture
def host(tuned_host_of):
    return tuned_host_of(hopper=True)


def digits(config):
    size = config.image_size
    return Dataset(np.zeros((64, size, size, config.channels), np.uint8), np.arange(64) % config.num_classes, 10)


def test_tune_writes_what_is_fastest_and_the_next_step_takes_it(host):
    config = PRESETS["digits"].replace(precision="bf16", image_size=16, channels=1)
    user_file().write_text('["Another GPU".gemm-1]\n"1" = [2]\n\n["NVIDIA H200".gemm-1]\n"3" = [4]\n')
    told = []
    tuned = tune.tune(config, digits(config), images=(), progress=lambda kernel, launches: told.append(launches))
    lines = read(user_file())
    assert lines.pop("Another GPU") == {"gemm-1": {"1": [2]}}
    assert lines["NVIDIA H200"]["gemm-1"].pop("3") == [4]
    kernels = lines.pop("NVIDIA H200")
    assert not lines
    assert {"conv2d_sm90-4", "conv2d_wgrad_sm90-2", "group_norm_backward_sm90-1"} <= set(kernels)
    assert sum(map(len, kernels.values())) == len(tuned)
    assert told == list(range(1, sum(row.launches for row in tuned) + 1))
    assert any(row.fastest[1] != row.before[1] for row in tuned)
    for row in tuned:
        plan = PLANNERS[row.kernel](*ast.literal_eval(row.problem))
        assert plan.choice == row.fastest[1] == kernels[row.kernel][row.problem]
        assert row.fastest[0] <= row.before[0]
    again = tune.tune(config, digits(config), images=())
    assert all(row.fastest[1] == row.before[1] for row in again)
    shown = tune.table(tuned)
    assert shown.row_count == 1 + sum(row.fastest[1] != row.before[1] for row in tuned)


def test_a_gain_below_two_percent_is_none(host, monkeypatch):
    monkeypatch.setattr(tune, "graph_time", lambda launch, **options: 100 - sum(launch.args[-1].choice) / 1000)
    config = PRESETS["digits"].replace(precision="bf16", image_size=16, channels=1)
    assert all(row.fastest == row.before for row in tune.tune(config, digits(config), images=()))


def test_what_is_added_to_is_as_before(planner, monkeypatch):
    total = np.array([1.0, np.inf])
    monkeypatch.setattr(tune, "graph_time", lambda launch, **options: launch() or 1.0)

    def add(cut):
        total[...] += cut.parts

    watch = tune._Watch(lambda kernel, launches: None)
    with tiles.watched(watch):
        planner.run((5, True), add, [total])
    assert total[0] == 1 + 3 and np.isinf(total[1])
    assert watch.times == {(planner, (5, True)): [{Cut(3): 1.0}]}, "the others are estimated to take twice as long"


def test_what_is_recorded_is_not_measured(planner, monkeypatch):
    """Nothing may wait for the GPU then; the warm-up before has been measured."""
    launched = []
    monkeypatch.setattr(tune, "cuda_available", lambda: True)
    monkeypatch.setattr(tune, "is_capturing", lambda device: True)
    watch = tune._Watch(lambda kernel, launches: None)
    with tiles.watched(watch):
        planner.run((5, True), launched.append)
    assert launched == [Cut(3)] and not watch.times


def test_weights_gradients_say_what_they_add_to(host, tmp_path):
    added = []
    config = PRESETS["digits"].replace(
        precision="bf16", image_size=16, channels=1, accumulate=2, device="cuda", validation=0, capture=False
    )
    step = Trainer(config, digits(config), tmp_path / "run").train_step
    with tiles.watched(lambda planner, problem, launch, to, leaves: added.append((planner.kernel, len(to)))):
        step()
    counts = [count for kernel, count in added if kernel == "conv2d_wgrad_sm90-2"]
    half = len(counts) // 2
    assert counts[:half] == [0] * half and sum(counts[half:]) > 20


def test_norms_say_what_they_add_to_and_which_plans_leave_the_same(host):
    added = []
    x = Tensor(host.zeros((2, 16, 16, 64), bfloat16), requires_grad=True)
    weight, bias = (Tensor(host.zeros(64, np.float32), requires_grad=True) for _ in range(2))

    def note(planner, problem, launch, to, leaves):
        added.append((planner.kernel, [id(array) for array in to]))
        assert len({leaves(plan) for plan in planner.plans(*problem)}) == 1

    with tiles.watched(note):
        for _ in range(2):
            group_norm(x, weight, bias).backward(host.zeros(x.shape, bfloat16))
    backward = [ids for kernel, ids in added if kernel == "group_norm_backward_sm90-1"]
    assert backward == [[], [id(x.grad), id(weight.grad), id(bias.grad)]]


def test_a_convolution_says_what_it_adds_to(host):
    """The gradient of its input, the second time: measured again and again it would be a multiple of it."""
    added = []
    x = Tensor(host.zeros((2, 16, 16, 64), bfloat16), requires_grad=True)
    weight = Tensor(host.zeros((64, 3, 3, 64), bfloat16))

    def note(planner, problem, launch, to, leaves):
        added.append([id(array) for array in to])

    for there in (False, True):
        out = conv2d(x, weight, padding=1)
        with tiles.watched(note):
            out.backward(host.zeros(out.shape, bfloat16))
        assert added.pop() == ([id(x.grad)] if there else []) and not added


def test_a_norm_that_recomputes_its_output_says_that_dy_is_overwritten(host):
    changed = []
    x = Tensor(host.zeros((2, 8, 8, 64), bfloat16), requires_grad=True)
    norm, kernel = Tensor(host.zeros(64, np.float32)), Tensor(host.zeros((64, 3, 3, 64), bfloat16), requires_grad=True)
    out = norm_silu_conv2d(x, weight=kernel, norm_weight=norm, norm_bias=norm, upsample=True)
    with tiles.watched(lambda planner, problem, launch, to, leaves: changed.append((planner.kernel, len(to)))):
        out.backward(host.zeros(out.shape, bfloat16))
    assert [count for kernel, count in changed if kernel == "group_norm_backward_sm90-1"] == [1]


def test_plans_that_leave_no_sums_for_a_norm_are_not_compared_with_those_that_do(tuned_host_of, monkeypatch):
    """Of the portable convolutions: where the depth is cut, group norm would need a pass of its own."""
    tuned_host_of(hopper=False)
    compared = []
    original = tune._Watch.__call__

    def call(watch, planner, problem, launch, added_to, leaves):
        original(watch, planner, problem, launch, added_to, leaves)
        compared.append({leaves(plan) for plan in watch.times[planner, problem][-1]})

    monkeypatch.setattr(tune._Watch, "__call__", call)
    config = PRESETS["digits"].replace(precision="bf16", image_size=16, channels=1)
    tune.tune(config, digits(config), images=())
    assert all(len(left) == 1 for left in compared) and {True} in compared and {False} in compared


def test_lines_written_meanwhile_stay(host):
    config = PRESETS["digits"].replace(precision="bf16", image_size=16, channels=1)
    text = '["A \\"GPU\\"".gemm-1]\n"1" = [2]\n'
    tune.tune(config, digits(config), images=(), progress=lambda kernel, launches: user_file().write_text(text))
    assert read(user_file())['A "GPU"'] == {"gemm-1": {"1": [2]}}


def test_bad_requests(host, monkeypatch):
    config = PRESETS["digits"].replace(image_size=16, channels=1)
    for images in ((4, 0), ("4",), (1.5,)):
        with pytest.raises(CudiffError, match="1 or more"):
            tune.tune(config, digits(config), images=images)
    user_file().write_text("[")
    with pytest.raises(CudiffError, match="move it away"):
        tune.tune(config, digits(config))
    user_file().unlink()
    monkeypatch.setattr(tune, "Trainer", None)  # nothing is measured where nothing can be kept
    monkeypatch.setattr("os.replace", refused)
    with pytest.raises(CudiffError, match="choose another folder by the environment's CUDIFF_CACHE_DIR"):
        tune.tune(config, digits(config))


def refused(*paths):
    raise PermissionError(13, "refused")


def test_the_command_says_what_is_wrong_before_it_reads_data(monkeypatch, capsys):
    monkeypatch.setattr("cudiff.data.load_dataset", None)
    assert main(["tune", "--images", "4,0"]) == 2
    assert "1 or more" in capsys.readouterr().err
    if not tiles.cuda_status()[0]:
        assert main(["tune"]) == 2
        assert "no CUDA" in capsys.readouterr().err


@pytest.mark.gpu
def test_tuning_a_small_model_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path))
    config = PRESETS["digits"].replace(precision="bf16", image_size=16, channels=1, batch_size=8)
    images = np.random.default_rng(0).integers(0, 256, (64, 16, 16, 1), dtype=np.uint8)
    try:
        tuned = tune.tune(config, Dataset(images, np.arange(64) % 10, 10), images=(4,))
        lines = read(user_file())[current_device().name]
        assert tuned and sum(map(len, lines.values())) == len(tuned)
        for row in tuned:
            assert 1 < row.fastest[0] <= row.before[0]
            assert PLANNERS[row.kernel](*ast.literal_eval(row.problem)).choice == lines[row.kernel][row.problem]
    finally:
        monkeypatch.undo()
        tiles.forget()
