"""Graphs that a pipeline keeps: recorded once, launched with other inputs, dropped when they are no longer true."""

import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

from cudiff import backend
from cudiff import pipeline as sampling_pipeline
from cudiff.config import PRESETS
from cudiff.cuda import exchange, graph
from cudiff.cuda.compiler import compiles_ahead
from cudiff.cuda.graph_cache import MOST, GraphCache
from cudiff.data import Dataset
from cudiff.diffusion import DPMSolver, Euler, Heun, ImageNoise, UniPC, karras_sigmas, samplers
from cudiff.models import outline
from cudiff.nn.parameter import FlatParameters, Parameter
from cudiff.optim import SGD
from cudiff.pipeline import Pipeline
from cudiff.train import Trainer
from tests.diffusion.test_samplers import Counting
from tests.recording import Recording, counted, stand_in
from tests.test_pipeline import TINY, build, pipeline, randomised

PICTURE = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1)).astype(np.uint8)
MASK = np.arange(64).reshape(8, 8) % 3 == 0


@pytest.fixture
def recorded(device, monkeypatch):
    """The functions of all graphs that are recorded; on the CPU by the stand-in for a graph."""
    if device == "cpu":
        stand_in(monkeypatch)
    return counted(monkeypatch)


def eager(model, n=2, **options):
    """What no graph can spoil: of the same weights, by a pipeline of its own without graphs."""
    net = build(model.config)
    net.load_state_dict(model.net.state_dict())
    net.precision = model.net.precision
    net.eval().flatten(model.device, trainable=False)
    return Pipeline(model.config.replace(capture=False), net).sample(n, floats=True, **options)


def same(model, **options):
    """Whether graphs make what is made without them; returns the images."""
    images = model.sample(2, floats=True, **options)
    np.testing.assert_array_equal(images, eager(model, **options))
    return images


@pytest.mark.parametrize("changes", [
    {}, {"sampler": "euler"}, {"sampler": "unipc", "diffusion": "flow"}, {"sampler": "dpmpp-2m-sde"},
    {"sampler": "ancestral", "diffusion": "ddpm", "learn_sigma": True}, {"S_churn": 2.0}, {"num_classes": 0,
                                                                                         "guidance": 1.0},
], ids=str)
def test_a_second_call_records_nothing(device, recorded, changes):
    """All steps are one graph; batches of another size have one too."""
    model = pipeline(device, **changes)
    first = same(model, seed=1, steps=5)
    assert len(recorded) == 1
    again = same(model, seed=2, steps=5)
    np.testing.assert_array_equal(same(model, seed=1, steps=5), first)
    assert len(recorded) == 1 and not np.array_equal(again, first)
    model.sample(5, steps=5, batch_size=2)
    assert len(recorded) == 2
    model.sample(5, steps=5, batch_size=2)
    same(model, steps=4)
    assert len(recorded) == 3


@pytest.mark.parametrize("name, values", [
    ("guidance", [1.5, 3.0, 0.0, 0.3]), ("seed", [0, 1, 2**63 + 5]), ("classes", [1, [3, 4], -1]),
    ("guidance_rescale", [0.7, 0.1]), ("guidance_interval", [(0.1, 3.0), (1.0, 70.0)]),
    ("strength", [0.2, 0.5, 0.8, 1.0]), ("init", list(PICTURE)), ("mask", [MASK, ~MASK]),
    ("other", [5, [6, 7]]), ("share", [0.2, [0.4, 0.9]]), ("noise", [np.ones((2, 8, 8, 1)), -np.ones((2, 8, 8, 1))]),
])
def test_a_slider_records_nothing_and_changes_the_picture(device, recorded, name, values):
    model = pipeline(device, sampler="euler", sample_steps=6)
    others = {"strength": {"init": PICTURE}, "init": {"strength": 0.5}, "mask": {"init": PICTURE},
              "share": {"other": 5}}.get(name, {})
    seen = []
    for value in values:
        images = same(model, **others, **{name: value})
        assert not any(np.array_equal(images, other) for other in seen), value
        seen.append(images)
    np.testing.assert_array_equal(same(model, **others, **{name: values[0]}), seen[0])
    assert len(recorded) == 1


def test_noise_levels_are_inputs(device, recorded):
    model = pipeline(device, sampler="heun", sample_steps=4)
    images = [same(model)]
    for change in ({"sigma_max": 20.0}, {"rho": 3.0}, {"sigma_min": 0.1}, {"guidance": 3.0}):
        model.config = model.config.replace(**change)
        images.append(same(model))
    assert len(recorded) == 1 and len({image.tobytes() for image in images}) == 5


def test_guidance_of_1_has_a_graph_of_its_own(device, recorded):
    """Half as large; and so have an interval and a rescale."""
    model = pipeline(device, sampler="euler")
    ways = [{"guidance": 1.0}, {"guidance": 2.0}, {"guidance_interval": (0.1, 3.0)}, {"guidance_rescale": 0.5},
            {"guidance": 1.0, "guidance_rescale": 0.5}]
    for _ in range(2):
        for way in ways:
            same(model, **way)
    assert len(recorded) == 4


def test_ways_to_sample_do_not_mix(device, recorded):
    model = pipeline(device, sampler="euler", sample_steps=4)
    ways = [{}, {"sampler": "heun"}, {"other": 5}, {"init": PICTURE, "strength": 1.0},
            {"init": PICTURE, "mask": MASK}, {"noise": np.ones((2, 8, 8, 1))}, {"steps": 3}]
    for _ in range(2):
        for way in ways:
            same(model, **way)
    assert len(recorded) == 6  # given noise is another input alone


def test_batches_of_nine_sizes_leave_eight_graphs(device, recorded, monkeypatch):
    alive, init = weakref.WeakSet(), graph._Recording.__init__
    monkeypatch.setattr(graph._Recording, "__init__", lambda self, *args: alive.add(self) or init(self, *args))
    model = pipeline(device, sampler="euler", sample_steps=2)
    for n in range(1, MOST + 2):
        model.sample(n)
    assert len(recorded) == MOST + 1 and len(alive) == MOST


def test_the_ninth_takes_the_place_of_the_oldest(device, recorded):
    model = pipeline(device, sampler="euler")
    for steps in range(2, MOST + 2):
        model.sample(2, steps=steps)
    model.sample(2, steps=2)
    assert len(recorded) == MOST == len(model._graphs) == 8
    model.sample(2, steps=20)
    model.sample(2, steps=2)
    assert len(recorded) == MOST + 1
    model.sample(2, steps=3)
    assert len(recorded) == MOST + 2


def test_what_is_dropped_is_freed_at_once(device, recorded, monkeypatch):
    """No garbage has to be collected for it, in either kind of graphs."""
    graphs, init = [], graph._Recording.__init__

    def noted(self, fn, warmup):
        init(self, fn, warmup)
        graphs.append(weakref.ref(self))

    monkeypatch.setattr(graph._Recording, "__init__", noted)
    model = pipeline(device, sampler="euler")
    gc.collect()
    gc.disable()
    try:
        model.sample(2, steps=4)
        model.sample(2, steps=4, frames=[])
        assert len(recorded) == len(graphs) == 2 and all(ref() is not None for ref in graphs)
        model.free_graphs()
        assert all(ref() is None for ref in graphs)
    finally:
        gc.enable()
    same(model, steps=4)
    assert len(recorded) == 3


def test_frames_and_many_launches_take_a_graph_a_step(device, recorded, monkeypatch):
    model = pipeline(device, sampler="euler")
    frames = []
    images = model.sample(2, frames=frames, steps=5)
    assert len(recorded) == 1 and len(frames) == 6
    np.testing.assert_array_equal(model.sample(2, frames=[], steps=9), model.sample(2, steps=9))
    assert len(recorded) == 2
    np.testing.assert_array_equal(frames[-1], images)
    monkeypatch.setattr(samplers, "MOST_LAUNCHES", -1)
    for _ in range(2):
        same(model, steps=7)
    assert len(recorded) == 3
    heun = pipeline(device, sampler="heun")
    for _ in range(2):
        same(heun, steps=7)
    assert len(recorded) == 5


@pytest.mark.parametrize("change", [
    lambda model: model.net.flatten(model.device), lambda model: SGD(model.net.parameters(), lr=0.1),
    lambda model: setattr(model.net, "precision", "tf32"), lambda model: setattr(model, "net", another(model)),
    lambda model: setattr(model, "config", model.config.replace(S_churn=1.0)),
    lambda model: setattr(model, "config", model.config.replace(sigma_data=1.0)),
    lambda model: setattr(model, "objective", model.objective),
    lambda model: setattr(model.net.out[0], "eps", 0.5),
])
def test_what_a_graph_cannot_follow_has_it_made_anew(device, recorded, change):
    model = pipeline(device, sampler="euler")
    model.net.flatten(device)  # trainable
    model.sample(2)
    change(model)
    images = model.sample(2, floats=True)
    assert len(recorded) == 2 and len(model._graphs) == 1
    np.testing.assert_array_equal(model.sample(2, floats=True), images)
    model.config = model.config.replace(capture=False)
    np.testing.assert_array_equal(model.sample(2, floats=True), images)
    assert len(recorded) == 2


def steps_launched(launches):
    """Of so many launches, two of which are the noise's: a step of the MNIST model has 137."""
    return round((launches - 2) / 137)


def without_values(preset):
    """A pipeline of a preset's model, whose weights are nothing, on the stand-in for a GPU."""
    config = PRESETS[preset].replace(device="cuda", image_size=28, channels=1)
    config = config.replace(num_classes=10 if config.num_classes else 0)
    net = outline(config, 10**5, 10**10)
    net.precision = "bf16"
    return Pipeline(config, net.train(False).flatten("cuda", trainable=False))


@pytest.fixture
def hosted(host_of, monkeypatch):
    """The host's side of a GPU, where recordings are empty."""
    host = host_of(True)
    stand_in(monkeypatch, taped=False)
    monkeypatch.setattr(sampling_pipeline, "to_uint8", lambda images: np.zeros(images.shape, np.uint8))
    with np.errstate(all="ignore"):
        yield host


@pytest.mark.parametrize("steps, at_once", [(18, True), (60, False)])
def test_a_second_call_launches_what_its_inputs_take(hosted, monkeypatch, steps, at_once):
    """18 steps of the MNIST model are 2,466 launches, 60 more than one graph takes."""
    recorded, model = counted(monkeypatch), without_values("mnist")
    model.sample(1, steps=steps)
    assert len(recorded) == 1
    before = len(hosted.launches)
    assert steps_launched(before) == (1 + steps if at_once else 3)  # warm-up and recording
    model.sample(1, steps=steps, seed=3, guidance=2.0, classes=4)
    assert hosted.launches[before:] == [("random", "normal"), ("arithmetic", "multiply_forward")]
    assert len(recorded) == 1


@pytest.mark.parametrize("preset", ["mnist", "mnist-ddpm"])
def test_kernels_of_a_first_call_are_compiled_ahead(hosted, monkeypatch, preset):
    """Under a capture, which what copies to the GPU would end."""
    ahead, stream = [], hosted.cuda.get_current_stream()

    def precompile(self, args):
        monkeypatch.setattr(stream, "is_capturing", lambda: True)
        before = len(hosted.launches)
        self.warmup(*args)
        ahead.append(len(hosted.launches) - before)
        monkeypatch.setattr(stream, "is_capturing", lambda: False)

    monkeypatch.setattr(Recording, "precompile", precompile)
    model = without_values(preset)
    model.sample(2, steps=4)
    assert len(ahead) == 1 and ahead[0] > 100
    model.stream(2).frame(np.zeros((2, *model.shape), np.uint8))
    assert len(ahead) == 2 and ahead[1] > 100


def another(model):
    return randomised(build(model.config), seed=7).eval().flatten(model.device)


def test_new_weights_in_their_old_place_are_followed(device, recorded):
    model = pipeline(device, sampler="euler")
    before = same(model)
    model.net.load_state_dict(randomised(build(TINY), seed=3).state_dict())
    after = same(model)
    assert len(recorded) == 1 and not np.array_equal(before, after)


def test_two_threads_share_a_pipeline(device, recorded):
    model, failed = pipeline(device, sampler="euler"), []
    guidances = [0.5, 2.0, 3.0]
    expected = {guidance: eager(model, guidance=guidance, seed=7, classes=3) for guidance in guidances}

    def work(guidance):
        for _ in range(4):
            images = model.sample(2, floats=True, guidance=guidance, seed=7, classes=3)
            if not np.array_equal(images, expected[guidance]):
                failed.append(guidance)

    threads = [threading.Thread(target=work, args=(guidance,)) for guidance in guidances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(recorded) == 1
    assert len(set(map(bytes, expected.values()))) == 3


def test_sampling_within_a_progress_call_disturbs_nothing(device, recorded):
    model = pipeline(device, sampler="euler")
    expected = model.sample(4, batch_size=2, guidance=3.0)
    inner = lambda done, n: model.sample(2, guidance=0.5, classes=1, seed=9)  # noqa: E731
    np.testing.assert_array_equal(model.sample(4, batch_size=2, guidance=3.0, progress=inner), expected)
    assert len(recorded) == 1


@pytest.mark.parametrize("changes", [{}, {"sampler": "unipc"}, {"capture": False}], ids=str)
def test_sampling_between_the_steps_of_another_disturbs_nothing(device, recorded, changes):
    """Neither its graphs nor its guidance."""
    model, inner = pipeline(device, **changes), []

    def draw(step):
        inner.append(model.sample(2, seed=7, guidance=3.0, floats=True, each_step=lambda step: None))

    for _ in range(2):
        np.testing.assert_array_equal(model.sample(2, seed=1, floats=True, each_step=draw), eager(model, seed=1))
    np.testing.assert_array_equal(inner, [eager(model, seed=7, guidance=3.0)] * 6)


def test_memory_that_runs_out_drops_what_is_kept_and_is_tried_again(device, recorded, monkeypatch):
    model, other = pipeline(device, sampler="euler"), pipeline(device, sampler="euler")
    expected = model.sample(2, seed=4)
    other.sample(2)
    forward, tries = model.net.forward, []

    def full(*args):
        if not compiles_ahead():  # there errors are left aside
            tries.append(len(other._graphs))
            if len(tries) == 1:
                raise MemoryError
        return forward(*args)

    monkeypatch.setattr(model.net, "forward", full)
    np.testing.assert_array_equal(model.sample(2, seed=4), expected)
    assert tries[0] == 1 and tries[-1] == 0 and len(model._graphs) == 1


def test_a_denoiser_of_one_s_own_is_not_kept(device, recorded):
    """What it computes may be another thing next time."""
    model, shade = pipeline(device, sampler="euler"), 0.0

    def flat(x, sigma, labels):
        return x * 0 + shade

    for shade in (0.25, 0.5):
        assert np.allclose(model.sample(2, denoiser=flat, floats=True, guidance=1.0), shade)
    assert len(model._graphs) == 0


def test_copies_of_a_pipeline_keep_nothing(device, recorded):
    model = pipeline(device, sampler="euler")
    expected = same(model)
    for other in (copy.deepcopy(model), *([pickle.loads(pickle.dumps(model))] if device == "cpu" else [])):
        assert len(other._graphs) == 0 and other._graphs.lock is not model._graphs.lock
        np.testing.assert_array_equal(other.sample(2, floats=True), expected)


def test_a_shallow_copy_with_another_net_leaves_the_first_as_it_was(device, recorded):
    model = pipeline(device, sampler="euler")
    expected = same(model)
    other = copy.copy(model)
    other.net = another(model)
    assert not np.array_equal(other.sample(2, floats=True), expected)
    np.testing.assert_array_equal(model.sample(2, floats=True), expected)


def test_a_second_class_that_is_given_stays_as_it_is():
    """Later batches write theirs to where the first's lies."""
    other = np.arange(4, dtype=np.int32)
    pipeline(sampler="euler").sample(4, classes=9, other=other, batch_size=2)
    np.testing.assert_array_equal(other, range(4))


def test_modules_of_another_net_are_in_evaluation_mode_too(monkeypatch):
    model = pipeline()
    other, modes = another(model).train(), []
    forward = other.forward
    monkeypatch.setattr(other, "forward", lambda *args: modes.append(other.out[0].training) or forward(*args))
    model.sample(1)
    model.net = other
    model.sample(1)
    assert modes and not any(modes) and all(module.training for module in other.modules())


def test_a_sampler_alone_takes_any_number_of_steps(device, recorded):
    """One step of each kind is taken before all are recorded: UniPC's first and second have less to go by."""
    for make, kinds in ((UniPC, 3), (Heun, 2), (DPMSolver, 2), (Euler, 1)):
        plain, captured = make(Counting()), make(Counting(), captured=True)
        recorded.clear()
        for steps in (6, 6, 9, 6):
            noise = ImageNoise((2, 3, 3, 1), seed=1, device=device)
            images, expected = (run(noise.start(80.0), karras_sigmas(steps)).numpy() for run in (captured, plain))
            np.testing.assert_array_equal(images, expected)
        assert len(recorded) == 3, make
        evaluations = sum(2 * steps - 1 if make is Heun else steps for steps in (6, 9, 6))
        if device == "cpu":  # on a GPU kernels are compiled ahead in one more
            assert captured.denoiser.calls == evaluations + 3 * (kinds + (make is Heun)), make


def test_a_preview_of_training_keeps_nothing(device, recorded, tmp_path):
    config = TINY.replace(device=device, batch_size=4, samples=2, precision="fp32", validation=0)
    trainer = Trainer(config, Dataset(np.zeros((8, 8, 8, 1), np.uint8), np.arange(8), 10), tmp_path)
    trainer.save_preview()
    assert recorded and len(trainer.preview._graphs) == 0


def test_what_python_may_have_decided_by_has_recordings_made_anew(monkeypatch, host_of):
    net = pipeline().net
    norm, states = net.out[0], [graph.recording_state()]

    def changed():
        states.append(graph.recording_state())
        return states[-1] != states[-2]

    norm.eps, norm._calls, norm.note = norm.eps, 3, "new"
    net.train().eval()
    FlatParameters({"a": Parameter(np.zeros(3))}, "cpu", None)
    assert not changed()
    for name, value in (("eps", 0.25), ("note", None), ("note", [1]), ("forward", norm.forward)):
        setattr(norm, name, value)
        assert changed(), name
    parameter = Parameter(host_of(False).zeros((3,), np.float32))
    assert not changed()
    FlatParameters({"a": parameter}, "cuda", None)  # where a graph has read it
    assert changed()


def test_the_oldest_goes_first_and_all_with_the_state_or_the_memory(monkeypatch):
    held, made = GraphCache(), []

    def get(key):
        return held.get(key, lambda: made.append(key) or object())

    first = get(0)
    for key in range(1, 8):
        get(key)
    assert get(0) is first and made == list(range(8))
    get(8)  # in place of 1
    assert get(0) is first and len(held) == 8
    get(1)
    assert made == [*range(9), 1]
    graph.record_again()
    assert get(0) is not first and len(held) == 1
    backend.free_memory()
    assert len(held) == 0


def test_a_recording_s_exchange_workspace_ends_with_it(monkeypatch):
    class Cuda:
        Stream = staticmethod(lambda **options: type("Stream", (), {"ptr": 77})())
        Event = staticmethod(lambda **options: None)
        runtime = type("Runtime", (), {"getDevice": staticmethod(lambda: 3)})

    monkeypatch.setattr(graph, "get_cupy", lambda: type("Module", (), {"cuda": Cuda}))
    monkeypatch.setattr(graph, "Arena", lambda: None)
    monkeypatch.setattr(exchange, "_workspaces", {(3, 77, 0): "its own", (3, 78, 0): "another's"})
    recording = graph._Recording(None, 1)
    assert len(exchange._workspaces) == 2
    del recording
    assert exchange._workspaces == {(3, 78, 0): "another's"}
