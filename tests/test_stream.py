"""Frames in time: where each begins, how they keep their contrast, and what changes them."""

import contextlib
import dataclasses
import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff import ops
from cudiff.diffusion import EDMDenoiser, Euler, ImageNoise, Sampler, sample_euler, samplers
from cudiff.diffusion.denoiser import blended
from cudiff.diffusion.samplers import Plan
from cudiff.errors import CudiffError
from cudiff.function import Function
from cudiff.models import build
from cudiff.registry import SAMPLERS
from cudiff.stream import GOLDEN, _denoised
from cudiff.tensor import Tensor
from tests.recording import counted, stand_in
from tests.test_pipeline import pipeline, randomised

PICTURE = np.random.default_rng(0).integers(0, 256, (8, 8, 1)).astype(np.uint8)


def frames(model, count=4, n=2, **options):
    return np.stack(list(itertools.islice(model.stream(n, **options), count)))


def knowing(model, pictures):
    """`model` with the exact denoiser of data that are these pictures alone: their mean, weighted by how near they
    are."""
    known = pictures.reshape(len(pictures), -1).astype(np.float64) / 127.5 - 1

    def denoiser(x, sigma, labels=None):
        flat = x.numpy().astype(np.float64).reshape(len(x), 1, -1)
        level = np.broadcast_to(sigma.numpy() if isinstance(sigma, Tensor) else sigma, len(x)).reshape(-1, 1)
        logits = -np.square(flat - known).sum(axis=2) / (2 * level**2)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        mean = weights / weights.sum(axis=1, keepdims=True) @ known
        return Tensor(mean.reshape(x.shape).astype(np.float32))

    model.config = model.config.replace(capture=False, guidance=1.0)
    model.objective = SimpleNamespace(denoiser=lambda net: denoiser, sigmas=model.objective.sigmas)
    return model


def test_the_first_frame_is_sample_s_and_the_others_follow(device):
    model = pipeline(device)
    made = frames(model, seed=3, classes=[1, 4])
    assert made.dtype == np.uint8 and made.shape == (4, 2, 8, 8, 1)
    np.testing.assert_array_equal(made[0], model.sample(2, seed=3, classes=[1, 4]))
    np.testing.assert_array_equal(frames(model, seed=3, classes=[1, 4]), made)
    assert len({frame.tobytes() for frame in made}) == 4


@pytest.mark.parametrize("strength, blend, steps", [(0.3, 0.2, 1), (0.2, 0.8, 1), (0.5, 0.0, 8)])
def test_contrast_stays(strength, blend, steps, rng):
    """With a denoiser that has no error, after 100 frames. What it is not sure of, one evaluation makes gray."""
    pictures = rng.integers(0, 256, (3, 8, 8, 1)).astype(np.uint8)
    made = frames(knowing(pipeline(), pictures), 101, strength=strength, blend=blend, steps=steps).astype(float)
    contrast = made.std(axis=(2, 3, 4))
    assert (contrast[-1] >= 0.8 * contrast[0]).all() and contrast[0].min() > 40


def test_a_frame_by_its_definition(rng):
    """(1 - blend) D(last + sigma noise; sigma) + blend last, at the level that strength goes back to."""
    model, seen = pipeline(num_classes=0, guidance=1.0), []
    levels = model.sigmas("heun", 100)
    exact = knowing(model, rng.integers(0, 256, (2, 8, 8, 1)).astype(np.uint8)).objective.denoiser(None)
    model.objective.denoiser = lambda net: lambda x, sigma, labels=None: (
        seen.append((x.numpy(), float(sigma.numpy()[0]))) or exact(x, sigma)
    )
    stream = model.stream(1, strength=0.4, blend=0.25)
    first = next(stream).astype(np.float64)
    seen.clear()
    second = next(stream)
    ((x, sigma),) = seen
    np.testing.assert_allclose(sigma, levels[60], rtol=1e-6)
    noise = (x - (first / 127.5 - 1)) / sigma
    np.testing.assert_allclose(noise, ImageNoise((1, 8, 8, 1), GOLDEN).start(1.0).numpy(), atol=1e-4)
    denoised = exact(Tensor(x), sigma).numpy().astype(np.float64) * 127.5 + 127.5
    assert np.abs(second - np.clip(0.75 * denoised + 0.25 * first, 0, 255)).max() <= 0.51
    seen.clear()
    next(stream)
    other = (seen[0][0] - (second.astype(np.float64) / 127.5 - 1)) / sigma
    np.testing.assert_allclose(other, ImageNoise((1, 8, 8, 1), 2 * GOLDEN % 2**64).start(1.0).numpy(), atol=1e-4)
    stream.change(steps=4)
    seen.clear()
    next(stream)
    assert len(seen) == 7  # Heun's


@pytest.mark.parametrize("name, values", [
    ("guidance", [1.5, 3.0]), ("seed", [0, 2**63 + 5]), ("classes", [1, [3, 4], -1]), ("strength", [0.2, 0.5, 1.0]),
    ("blend", [0.0, 0.3, 0.9]),
])
def test_an_option_changes_the_next_frame_and_records_nothing(device, monkeypatch, name, values):
    if device == "cpu":
        stand_in(monkeypatch)
    recorded, model = counted(monkeypatch), pipeline(device, sampler="euler", sample_steps=6)
    eager = pipeline(device, sampler="euler", sample_steps=6, capture=False)
    seen = []
    for value in values:
        stream, other = model.stream(2), eager.stream(2)
        for one in (stream, other):
            next(one)
            one.change(**{name: value})
        seen.append(next(stream))
        np.testing.assert_array_equal(next(other), seen[-1])
    assert len({frame.tobytes() for frame in seen}) == len(values)
    assert len(recorded) == 2  # the first frame's, and a later one's


def test_a_later_frame_is_one_graph(device, monkeypatch):
    if device == "cpu":
        stand_in(monkeypatch)
    applied, apply = [], Function.apply.__func__
    monkeypatch.setattr(Function, "apply", classmethod(
        lambda cls, *inputs, **attrs: applied.append(cls) or apply(cls, *inputs, **attrs)
    ))
    for steps in (1, 3):
        stream = pipeline(device, sampler="euler", sample_steps=6).stream(2, steps=steps)
        made = [next(stream), next(stream)]
        applied.clear()
        made += [next(stream), next(stream)]
        assert not applied
        assert len({frame.tobytes() for frame in made}) == 4


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("changes", [
    {"guidance": 1.0}, {"guidance": 2.5}, {"num_classes": 0}, {"guidance": 2.5, "guidance_channels": 2, "channels": 3},
    *({"sampler": name} for name in ("euler", "dpmpp-2m", "unipc", "euler-ancestral")),
    {"sampler": "euler", "S_churn": 3.0}, {"diffusion": "flow"}, {"diffusion": "flow", "sampler": "flow"},
    *({"diffusion": "ddpm", "prediction": name} for name in ("eps", "x0", "v")),
    *({"diffusion": "ddpm", "learn_sigma": True, "guidance": guidance} for guidance in (1.0, 2.5)),
    *({"diffusion": "ddpm", "sampler": "ddim", "clip_denoised": clip} for clip in (True, False)),
], ids=str)
def test_the_last_step_makes_the_bytes_that_came_of_its_image(device, monkeypatch, changes, steps):
    model, seen, made = pipeline(device, **changes), [], []
    picture = np.random.default_rng(1).integers(0, 256, model.shape).astype(np.uint8)
    for each_step, denoised in ((None, _denoised), (seen.append, _denoised), (seen.append, None)):
        monkeypatch.setattr("cudiff.stream._denoised", denoised)
        stream = model.stream(2, steps=steps, blend=0.3, each_step=each_step)
        made.append([stream.frame(picture), stream.frame(picture)])
    assert np.abs(np.subtract(made[:2], made[2], dtype=int)).max() <= 1 and np.std(made[2][1]) > 5
    assert seen == 4 * list(range(steps))


class OwnStep(Euler):
    """A step that ends elsewhere than the library's plan says."""

    def step(self, x, numbers, noise, labels):
        x, denoised = Euler.step(self, x, numbers, noise, labels)
        return ops.clip(x, -0.2, 0.2), denoised


class OwnBoth(OwnStep):
    """A plan that passes on what the library's says."""

    def plan(self, sigmas):
        return [plan._replace(numbers=list(plan.numbers)) for plan in super().plan(sigmas)]

    def step(self, x, numbers, noise, labels):
        return super().step(x, numbers, noise, labels)


class OwnNoise(Euler):
    def plan(self, sigmas):
        return [plan._replace(numbers=[*plan.numbers[:2], 2.0], noisy=True) for plan in super().plan(sigmas)]


class OwnEstimate(EDMDenoiser):
    def __call__(self, x, sigma, labels=None):
        return ops.clip(super().__call__(x, sigma, labels), -0.2, 0.2)


class Wrapper:
    frame = blended = None  # names of its own

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)

    def __call__(self, x, sigma, labels=None):
        return ops.clip(self.own(x, sigma, labels), -0.2, 0.2)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
@pytest.mark.parametrize("sampler, denoiser", [
    (OwnStep, None), (OwnBoth, None), (OwnNoise, None), (Euler, lambda own: OwnEstimate(own.net)), (Euler, Wrapper),
])
def test_a_last_step_of_one_s_own_is_made(device, monkeypatch, sampler, denoiser, guidance):
    """Whatever classes above it say of theirs."""
    monkeypatch.setitem(SAMPLERS, "mine", dataclasses.replace(
        SAMPLERS["euler"], build=lambda denoiser, config, captured: sampler(denoiser, captured=captured)
    ))
    model = pipeline(device, guidance=guidance)
    theirs, made = model.objective, []
    if denoiser is not None:
        model.objective = SimpleNamespace(denoiser=lambda net: denoiser(theirs.denoiser(net)), sigmas=theirs.sigmas)
    for name, each_step, denoised in (
        ("mine", None, _denoised), ("mine", lambda step: None, _denoised), ("mine", None, None), ("euler", None, None),
    ):
        if name == "euler":
            model.objective = theirs
        monkeypatch.setattr("cudiff.stream._denoised", denoised)
        stream = model.stream(2, sampler=name, steps=2, each_step=each_step)
        made.append([stream.frame(PICTURE), next(stream)])
    own, one_by_one, by_steps, others = np.array(made).astype(int)
    assert np.abs([own - by_steps, one_by_one - by_steps]).max() <= 1 and np.abs(by_steps - others).max() > 20


def test_a_graph_a_step_takes_the_last_one_too(device, monkeypatch):
    """Where all are too many launches for one graph: nothing of the network is launched by itself."""
    if device == "cpu":
        stand_in(monkeypatch)
    model, calls = pipeline(device, sampler="euler"), []
    theirs = model.objective.denoiser
    model.objective = SimpleNamespace(
        denoiser=lambda net: lambda *given: calls.append(1) or theirs(net)(*given), sigmas=model.objective.sigmas
    )
    monkeypatch.setattr(samplers, "MOST_LAUNCHES", -1)
    stream = model.stream(2, steps=3)
    made = [stream.frame(PICTURE), next(stream)]
    calls.clear()
    made.append(next(stream))
    assert not calls
    one = pipeline(device, sampler="euler", capture=False).stream(2, steps=3)
    np.testing.assert_allclose([one.frame(PICTURE), next(one), next(one)], made, atol=1)


def test_an_image_of_16_bits_has_room_for_its_sum(device):
    image, last = Tensor(np.ones((2, 200, 200, 1), np.float16), device=device), np.zeros((2, 200, 200, 1), np.uint8)
    frame, total = blended(image, Tensor(last, device=device), Tensor(np.zeros(1, np.float32), device=device))
    assert total.numpy() == 80_000 and (frame.numpy() == 255).all()


@pytest.mark.parametrize("changes, calls", [
    *((changes, ["frame"]) for changes in (
        {"guidance": 1.0}, {"guidance": 2.5}, {"num_classes": 0, "sampler": "unipc"}, {"diffusion": "flow"},
        *({"diffusion": "ddpm", "prediction": name} for name in ("eps", "x0", "v")),
        *({"diffusion": "ddpm", "learn_sigma": True, "guidance": guidance} for guidance in (1.0, 2.5)),
        {"diffusion": "ddpm", "sampler": "ddim", "clip_denoised": False},
    )),
    ({"guidance": 2.5, "guidance_channels": 1, "channels": 3}, ["output", "blend", "sum"]),
    ({"diffusion": "ddpm", "sampler": "ddim"}, ["clip_forward", "blend", "sum"]),
], ids=str)
def test_a_frame_ends_with_one_launch_after_the_network(host_of, monkeypatch, changes, calls):
    """But where the image goes through more than guidance."""
    host, model = host_of(True), pipeline("cuda", capture=False, **changes)
    monkeypatch.setattr(np, "isfinite", lambda x: np.ones(1, bool))
    stream = model.stream(2)
    stream.frame(np.zeros(model.shape, np.uint8))
    host.launches.clear()
    next(stream)
    last = max(i for i, (stem, _) in enumerate(host.launches) if stem == "conv2d")
    after = [name for _, name in host.launches[last + 1:]]
    assert after == calls if calls == ["frame"] else [name for name in after if name in calls] == calls


def test_streams_of_one_pipeline_do_not_disturb_each_other(device, monkeypatch):
    if device == "cpu":
        stand_in(monkeypatch)
    alone = [frames(pipeline(device, sampler="euler"), seed=seed, blend=0.5) for seed in (1, 2)]
    model = pipeline(device, sampler="euler")
    streams = [model.stream(2, seed=seed, blend=0.5) for seed in (1, 2)]
    together = [[next(stream) for stream in streams] for _ in range(4)]
    np.testing.assert_array_equal(np.stack(together, 1), alone)


def test_a_caller_may_draw_another_streams_frame(device, monkeypatch):
    """By the same graph: what is not finite there is not the stream's own."""
    if device == "cpu":
        stand_in(monkeypatch)
    model = pipeline(device, sampler="euler")
    fine, spoilt = model.stream(2, each_step=lambda step: draw()), model.stream(2, guidance=3e38)

    def draw():
        with pytest.raises(CudiffError, match="not finite"):
            spoilt.frame(PICTURE)

    np.testing.assert_array_equal(fine.frame(PICTURE), model.stream(2).frame(PICTURE))


def test_a_frame_follows_what_changes_in_its_pipeline(device, rng):
    """As a new stream of the changed pipeline that begins with the same picture."""
    model = pipeline(device, sampler="euler")
    stream = model.stream(1, classes=2, guidance=2.0)
    seen, other = [], another_net(model)
    for change in ({}, {"config": model.config.replace(sigma_max=5.0)}, {"net": other},
                   {"objective": replaced_levels(model.objective)}):
        for name, value in change.items():
            setattr(model, name, value)
        stream._last, stream.number = None, 1
        seen.append(stream.frame(PICTURE))
        again = model.stream(1, classes=2, guidance=2.0)
        again.number = 1
        np.testing.assert_array_equal(again.frame(PICTURE), seen[-1])
    assert len({frame.tobytes() for frame in seen}) == 4


def another_net(model):
    return randomised(build(model.config), seed=7).eval().flatten(model.device)


def replaced_levels(objective):
    return SimpleNamespace(denoiser=objective.denoiser, sigmas=lambda *args: 0.5 * objective.sigmas(*args))


class Own(Sampler):
    """Euler's, with a call of its own."""

    def plan(self, sigmas):
        return [Plan([now, after], noisy=False) for now, after in itertools.pairwise(sigmas)]

    def step(self, x, numbers, noise, labels):
        now, after = (Tensor(row.reshape(-1, 1, 1, 1)) for row in numbers.data)
        denoised = self.denoiser(x, Tensor(numbers.data[0]), labels)
        return denoised + (x - denoised) * (after / now), denoised

    def __call__(self, x, sigmas, labels=None, *, noise=None, callback=None):
        return super().__call__(x, sigmas, labels, noise=noise, callback=callback)


@pytest.mark.parametrize("own", [Own, lambda denoiser: partial(sample_euler, denoiser)])
def test_samplers_of_one_s_own_make_the_frames_of_the_library_s(device, monkeypatch, own):
    monkeypatch.setitem(SAMPLERS, "mine", dataclasses.replace(
        SAMPLERS["euler"], build=lambda denoiser, *_: own(denoiser)
    ))
    expected = frames(pipeline(device, sampler="euler", capture=False), steps=3, classes=4)
    made = frames(pipeline(device, sampler="euler", capture=False), steps=3, classes=4, sampler="mine")
    assert np.abs(made.astype(int) - expected).max() <= 1 and expected.std() > 20


def test_samples_and_frames_of_as_many_steps_record_once_each(device, monkeypatch):
    if device == "cpu":
        stand_in(monkeypatch)
    recorded, model = counted(monkeypatch), pipeline(device, sampler="euler", sample_steps=2)
    stream = model.stream(2, steps=2)
    for _ in range(3):
        next(stream), model.sample(2)
    assert len(recorded) == 2


def test_nothing_moves_without_strength_or_with_all_of_the_last():
    made = frames(pipeline(), 3, strength=0.0)
    np.testing.assert_array_equal(made[1:], made[:-1])
    made = frames(pipeline(), 3, blend=1.0)
    np.testing.assert_array_equal(made[1:], made[:-1])


def test_a_video_s_pictures(device):
    model = pipeline(device)
    stream = model.stream(2, classes=3, strength=0.0, blend=0.0)
    np.testing.assert_array_equal(stream.frame(PICTURE), [PICTURE, PICTURE])
    stream.change(blend=0.25)
    mixed = 0.75 * (255.0 - PICTURE) + 0.25 * PICTURE
    assert np.abs(stream.frame(255 - PICTURE)[0] - mixed).max() <= 0.5
    stream.change(strength=0.3)
    assert not np.array_equal(*(stream.frame(PICTURE) for _ in range(2)))


def test_a_frame_can_be_stopped_between_steps(device):
    model, steps = pipeline(device), []

    def stop(step):
        steps.append(1)
        if len(steps) == 2:
            raise KeyboardInterrupt

    stream = model.stream(1, strength=1.0, steps=3, each_step=stop)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert len(steps) == 2 and stream.last is None and stream.number == 0
    first = next(stream)
    np.testing.assert_array_equal(first, model.sample(1))
    assert len(steps) == 5


def test_a_frame_of_one_step_is_one_graph_with_a_caller_too(device, monkeypatch):
    """Which makes the same frames, and comes after the step; what it raises leaves the stream where it was."""
    if device == "cpu":
        stand_in(monkeypatch)
    recorded, seen = counted(monkeypatch), []

    def note(step):
        seen.append(step)
        if len(seen) == 3:
            raise KeyboardInterrupt

    model = pipeline(device, sampler="euler", sample_steps=6)
    streams = [model.stream(2, seed=4, each_step=each_step) for each_step in (None, note)]
    expected, made = ([stream.frame(PICTURE), next(stream)] for stream in streams)
    with pytest.raises(KeyboardInterrupt):
        next(streams[1])
    assert seen == [0, 0, 0] and streams[1].number == 2 and streams[1].last is made[1]
    for stream, frames_of_it in zip(streams, (expected, made), strict=True):
        frames_of_it.append(next(stream))  # of the same number
    np.testing.assert_array_equal(made, expected)
    assert seen == [0, 0, 0, 0] and len(recorded) == 1


def test_a_last_step_ends_in_a_graph_where_each_is_one(device, monkeypatch):
    """Noise is added by itself, no operation follows. A stop between steps leaves both graphs as they were."""
    if device == "cpu":
        stand_in(monkeypatch)
    recorded, applied, apply = counted(monkeypatch), [], Function.apply.__func__
    monkeypatch.setattr(Function, "apply", classmethod(
        lambda cls, *inputs, **attrs: applied.append(cls.__name__) or apply(cls, *inputs, **attrs)
    ))
    model, seen = pipeline(device, sampler="euler", sample_steps=6), []

    def note(step):
        seen.append((step, len(applied)))
        if len(seen) == 7:
            raise KeyboardInterrupt

    stream = model.stream(2, steps=3, each_step=note)
    made = [stream.frame(PICTURE), next(stream)]
    applied.clear()
    for error in (pytest.raises(KeyboardInterrupt), contextlib.nullcontext()):
        with error:
            made.append(next(stream))
    begun = seen[6][1]
    assert [step for step, _ in seen] == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2] and len(recorded) == 2
    assert [count for _, count in seen[6:]] == [begun, 2 * begun, 2 * begun, 2 * begun] and len(applied) == 2 * begun
    one = pipeline(device, sampler="euler", capture=False).stream(2, steps=3)
    assert np.abs(np.subtract(made, [one.frame(PICTURE), next(one), next(one)], dtype=int)).max() <= 1


@pytest.mark.parametrize("options, message", [
    ({"strength": 1.5}, "strength must be at least 0 and at most 1, not 1.5"), ({"blend": -0.1}, "blend must be"),
    ({"steps": 0}, "steps must be"), ({"steps": 101}, "steps must be 1 to 100"), ({"seed": -1}, "seed must be"),
    ({"classes": 10}, "10 is not one"), ({"guidance": "much"}, "guidance must be a number"),
    ({"strength": None}, "strength must be a number"), ({"n": 0}, "n must be at least 1"),
    ({"sampler": "none"}, "none"),
])
def test_bad_input_is_one_line(options, message):
    with pytest.raises(CudiffError, match=message) as error:
        pipeline().stream(**options)
    assert "\n" not in str(error.value)


def test_a_bad_change_leaves_a_stream_as_it_was():
    stream = pipeline().stream()
    wrong = ({"blend": 2}, "blend must be"), ({"speed": 2}, "no option speed"), ({"classes": 99}, "99")
    for options, message in wrong:
        with pytest.raises(CudiffError, match=message):
            stream.change(strength=0.9, **options)
    assert stream.options.strength == 0.3
    for picture in (PICTURE[:4], PICTURE.astype(float), PICTURE[None, None]):
        with pytest.raises(CudiffError, match="give uint8"):
            stream.frame(picture)
    assert stream.last is None


def test_models_of_latents_and_frames_that_are_not_finite(device):
    with pytest.raises(CudiffError, match="a stream is for pictures"):
        pipeline(channels=4).stream()
    for guidance in (1.0, 2.5):
        model = pipeline(device, capture=False, guidance=guidance)
        stream = model.stream()
        kept = stream.frame(PICTURE)
        bias = model.net.out[2].bias
        before = bias.numpy().copy()
        for value in (np.nan, np.inf, -np.inf):
            bias.assign(np.full(1, value, np.float32))
            with pytest.raises(CudiffError, match="not finite"):
                next(stream)
            assert stream.number == 1 and stream.last is kept
        bias.assign(before)
        assert next(stream).std() > 5


def test_a_caller_may_draw_on_a_frame():
    model, kept = pipeline(), []
    for draws in (False, True):
        stream = model.stream(1, seed=3, strength=0.2)
        first = next(stream)
        if draws:
            first[...] = 255
        kept.append(next(stream))
    np.testing.assert_array_equal(*kept)


@pytest.mark.parametrize("changes", [
    {"sampler": "ddim", "sample_spacing": "ddim"}, {"sampler": "ddim", "diffusion_steps": 50},
    {"sampler": "ancestral", "diffusion_steps": 60},
])
def test_schedules_of_few_steps_and_of_whole_strides(changes):
    made = frames(pipeline(diffusion="ddpm", sample_steps=10, **changes), count=3)
    assert len({frame.tobytes() for frame in made}) == 3
