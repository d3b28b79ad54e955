"""Training: it learns, it resumes bit for bit, it leaves no damage, and it says what is wrong."""

import json
import math
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cudiff
from cudiff.backend import array_module
from cudiff.checkpoint import checkpoints, latest, load_checkpoint
from cudiff.config import PRESETS, Config
from cudiff.data import Dataset, load_dataset
from cudiff.data.loader import Loader
from cudiff.errors import CudiffError
from cudiff.tensor import Tensor
from cudiff.train import Trainer

TINY = Config(
    data="digits", image_size=8, channels=1, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2,
    num_classes=10, batch_size=8, lr=2e-3, steps=6, log_every=2, sample_every=0, save_every=0, validation=8, samples=4,
    sample_steps=2, sampler="euler", ema_half_life=4.0, keep=0, device="cpu",
)
TIMES = {"seconds", "step_ms", "images_per_second", "memory_mb"}


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", image_size=8, count=100)


@pytest.fixture
def train(digits, tmp_path):
    """train(folder name, resume=path, **changes): run a Trainer on the digits and return it."""

    def run(name="run", resume=None, display=None, **changes):
        checkpoint = None if resume is None else load_checkpoint(resume)
        trainer = Trainer(TINY.replace(**changes), digits, tmp_path / name, checkpoint)
        trainer.run(display)
        return trainer

    return run


def metrics(trainer):
    lines = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def without_times(lines):
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def assert_same_state(a, b):
    """Weights, EMA, moments, counters and random state of two runs' checkpoints are equal, bit for bit."""
    a, b = (load_checkpoint(trainer.folder) for trainer in (a, b))
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        np.testing.assert_array_equal(a.tensors[name], b.tensors[name], err_msg=name)
    assert {**a.counters, "seconds": 0} == {**b.counters, "seconds": 0}


def test_training_lowers_the_loss(train, device):
    trainer = train(device=device, steps=60, log_every=15, lr=5e-3, capture=False)
    losses = [line["loss"] for line in metrics(trainer) if "loss" in line]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]


def test_dropout_draws_anew_in_every_step_and_layer(digits, tmp_path):
    trainer = Trainer(TINY.replace(dropout=0.2), digits, tmp_path / "run")
    layers = [module for module in trainer.net.modules() if isinstance(module, cudiff.nn.Dropout)]
    assert len({layer.stream for layer in layers}) == len(layers) > 4
    assert all(layer.generator is trainer.generator for layer in layers)
    trainer.train_step()
    assert trainer.generator.step.item() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dropout": 0.3, "flip": True},
        {"accumulate": 2, "clip": 0.5, "weight_decay": 0.1, "lr_schedule": "cosine", "warmup": 2},
        {"residency": "host", "flip": True, "accumulate": 2},
        {"optimizer": "sgd", "lr": 0.05},
        {"optimizer": "adam", "diffusion": "ddpm", "sampler": "ddim", "learn_sigma": True},
        {"precision": "bf16"},
        {"num_classes": 0},
    ],
    ids=["plain", "dropout", "accumulate", "streamed", "sgd", "ddpm", "bf16", "unconditional"],
)
def test_resume_goes_on_bit_for_bit(train, changes):
    # 3 steps are not a multiple of log_every: the window of the mean loss is continued too
    whole = train("whole", save_every=3, **changes)
    resumed = train("resumed", whole.folder / "step-00000003.safetensors", **changes)
    assert_same_state(whole, resumed)
    after = [line for line in without_times(metrics(whole)) if line["step"] > 3]
    assert without_times(metrics(resumed)) == after


def test_resume_in_the_same_folder_completes_its_metrics(train, digits):
    whole = train("whole", steps=8)
    part = train("part", steps=8, save_every=4)
    (part.folder / "step-00000008.safetensors").unlink()
    with open(part.folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')  # a kill in the middle of a line
    with open(part.folder / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\0\n")  # a power cut
    again = Trainer(TINY.replace(steps=8), digits, part.folder, load_checkpoint(latest(part.folder)))
    again.run()
    assert without_times(metrics(again)) == without_times(metrics(whole))


def test_streamed_and_resident_data_give_the_same_run(train):
    assert_same_state(train("resident", flip=True), train("streamed", flip=True, residency="host"))


def test_streamed_batches_are_those_drawn_on_the_device(digits, device):
    config = TINY.replace(flip=True, accumulate=2)
    resident = Loader(digits, config, device)
    streamed = Loader(digits, config.replace(residency="host"), device, first=4)
    for number in range(4, 8):
        batches = streamed.next()
        for index in range(2):
            step = Tensor(np.array([number], np.int32), device=device)
            pairs = zip(resident.batch(step, (), index), streamed.batch(step, batches, index), strict=True)
            for expected, found in pairs:
                np.testing.assert_array_equal(found.numpy(), expected.numpy())


def test_previews_and_validation_leave_training_unchanged(train):
    quiet = train("quiet", dropout=0.2, validation=20)
    looking = train("looking", dropout=0.2, validation=20, sample_every=2, save_every=2)
    assert_same_state(quiet, looking)
    assert len(list(looking.folder.glob("samples-*.png"))) == 3
    assert [line["loss"] for line in metrics(quiet) if "loss" in line] == [
        line["loss"] for line in metrics(looking) if "loss" in line
    ]


def test_previews_come_from_the_ema(train, monkeypatch):
    trainer = train()
    ema, raw = trainer.preview.sample(4), trainer.pipeline.sample(4)
    assert not np.array_equal(ema, raw)
    for weights, images in (("ema", ema), ("model", raw)):
        np.testing.assert_array_equal(cudiff.load(trainer.save_path, "cpu", weights).sample(4), images)


def test_checkpoints_need_nothing_else(train, tmp_path):
    trainer = train(sample_every=3)
    expected = trainer.preview.sample(5, seed=3, classes=7)
    alone = tmp_path / "elsewhere" / "model.safetensors"
    alone.parent.mkdir()
    trainer.save_path.rename(alone)
    np.testing.assert_array_equal(cudiff.load(alone, "cpu").sample(5, seed=3, classes=7), expected)


def test_metrics_are_complete(train):
    trainer = train(steps=7, log_every=3, sample_every=4, accumulate=2)
    lines = metrics(trainer)
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 7]
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 7]
    for line in lines:
        wanted = {"lr", "grad_norm", "skipped", *TIMES} if "loss" in line else {"train_loss"}
        assert wanted < line.keys() and all(math.isfinite(value) for value in line.values())
    # images per second and step time agree on what a step is, two batches
    assert lines[0]["images_per_second"] * lines[0]["step_ms"] == pytest.approx(16_000)


def test_a_steps_time_is_that_since_the_last_line(digits, tmp_path, monkeypatch):
    clock, step = [100.0], Trainer.train_step

    def slow_step(trainer):
        clock[0] += 0.5 if trainer.step < 4 else 2
        return step(trainer)

    monkeypatch.setattr("cudiff.train.time", SimpleNamespace(**vars(time) | {"perf_counter": lambda: clock[0]}))
    monkeypatch.setattr(Trainer, "train_step", slow_step)
    trainer = Trainer(TINY.replace(steps=6, log_every=2), digits, tmp_path / "run")
    trainer.run()
    assert [line["step_ms"] for line in metrics(trainer) if "loss" in line] == pytest.approx([500, 500, 2000], abs=1)


def test_validation_loss_is_the_mean_over_all_images(train, digits):
    trainer = train()
    chosen = digits.subset(range(12))
    first, again = trainer.validation_loss(chosen), trainer.validation_loss(chosen)
    assert first == again and 0 < first < 3


def test_keep_deletes_the_oldest(train):
    trainer = train(save_every=1, keep=2)
    names = sorted(path.name for path in trainer.folder.glob("step-*"))
    assert names == ["step-00000005.safetensors", "step-00000006.safetensors"]


def test_minutes_end_a_run(train):
    begin = time.perf_counter()
    trainer = train(steps=0, minutes=0.01)
    assert trainer.step > 0 and 0.6 <= time.perf_counter() - begin < 30
    assert trainer.save_path.exists()


def test_a_finished_run_says_so(train):
    trainer = train()
    with pytest.raises(CudiffError, match=r"at its end after 6 steps .* give more --steps than 6"):
        train("run", trainer.save_path)
    with pytest.raises(CudiffError, match=r"at its end after 6 steps .* give more --minutes than 1e-09"):
        train("run", trainer.save_path, steps=9, minutes=1e-9)
    assert train("run", trainer.save_path, steps=8).step == 8


def not_finite(trainer, steps):
    """Make the loss of these steps NaN."""
    healthy = trainer.loss

    def loss(*args):
        value = healthy(*args)
        return value * float("nan") if trainer.step in steps else value

    trainer.loss = loss


def test_gradients_that_stay_not_finite_stop_the_run(digits, tmp_path):
    trainer = Trainer(TINY.replace(steps=50, save_every=3, max_bad_steps=4), digits, tmp_path / "run")
    not_finite(trainer, range(4, 50))
    with pytest.raises(CudiffError, match=r"not finite 4 times in a row, until step 8: .*--lr.*--resume") as error:
        trainer.run()
    assert str(latest(trainer.folder)) in str(error.value)
    assert all(np.isfinite(array).all() for array in load_checkpoint(latest(trainer.folder)).tensors.values())
    assert [line["loss"] for line in metrics(trainer)][-1] is None


def test_a_short_run_without_one_finite_gradient_has_failed(digits, tmp_path):
    trainer = Trainer(TINY.replace(steps=3, save_every=0, max_bad_steps=4), digits, tmp_path / "run")
    not_finite(trainer, range(3))
    with pytest.raises(CudiffError, match="not finite 3 times in a row, until step 3"):
        trainer.run()
    assert latest(trainer.folder) is None


def test_a_few_gradients_that_are_not_finite_are_skipped_and_counted(digits, tmp_path):
    trainer = Trainer(TINY.replace(steps=8, max_bad_steps=4), digits, tmp_path / "run")
    not_finite(trainer, (2, 3))
    trainer.run()
    lines = [line for line in metrics(trainer) if "loss" in line]
    assert [line["skipped"] for line in lines] == [0, 2, 2, 2]
    assert lines[1]["loss"] is None and math.isfinite(lines[2]["loss"])


def test_a_preview_that_fails_loses_nothing(digits, tmp_path, monkeypatch):
    trainer = Trainer(TINY.replace(sample_every=3, save_every=3), digits, tmp_path / "run")
    monkeypatch.setattr(trainer, "save_preview", lambda *args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        trainer.run()
    assert latest(trainer.folder).name == "step-00000003.safetensors"


def test_a_preview_that_fails_between_saves_is_saved_first(digits, tmp_path, monkeypatch):
    trainer = Trainer(TINY.replace(sample_every=2), digits, tmp_path / "run")
    monkeypatch.setattr(trainer, "save_preview", lambda *args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        trainer.run()
    assert load_checkpoint(trainer.folder).counters["step"] == 2


def test_weights_that_are_not_finite_are_not_saved(digits, tmp_path):
    trainer = Trainer(TINY, digits, tmp_path / "run")
    trainer.step = 3
    trainer.save()
    trainer.step = 4
    trainer.net.parameters()[0].data[...] = np.inf
    with pytest.raises(CudiffError, match=r"model.time_embed.0.weight is not finite at step 4, which is not saved"):
        trainer.save()
    assert [path.name for path in checkpoints(trainer.folder)] == ["step-00000003.safetensors"]


def test_out_of_memory_says_what_fits(digits, tmp_path):
    trainer = Trainer(TINY.replace(batch_size=32), digits, tmp_path / "run")
    healthy, tried = trainer.loss, []

    def loss(net, images, *args):
        tried.append(len(images))
        if len(images) > 9:
            raise MemoryError
        return healthy(net, images, *args)

    trainer.loss = loss
    with pytest.raises(CudiffError, match="batch size 32 does not fit into memory: --batch-size 8 fits"):
        trainer.run()
    first = [1] if Path("/proc/self/clear_refs").exists() else []  # shows what an image takes
    assert tried == [*first, 32, 16, 8]
    trainer.loss = lambda *args: (_ for _ in ()).throw(MemoryError())
    trainer._step = trainer.train_step
    with pytest.raises(CudiffError, match="even one image does not fit: use a smaller model"):
        trainer.run()


def test_a_folder_that_holds_a_run_is_refused(train, digits, tmp_path):
    trainer = train(save_every=3)
    before = {path.name: path.read_bytes() for path in trainer.folder.iterdir()}
    message = r"already holds a run, with .*06.safetensors: go on with cudiff train --resume .*, or choose another"
    with pytest.raises(CudiffError, match=message):
        train()
    with pytest.raises(CudiffError, match=r"holds a newer checkpoint: go on with cudiff train .*step-00000006"):
        train("run", trainer.folder / "step-00000003.safetensors")
    assert before == {path.name: path.read_bytes() for path in trainer.folder.iterdir()}


@pytest.mark.parametrize(("log_every", "sample_every"), [(3, 0), (9, 0), (9, 3)])
def test_a_run_whose_folder_was_deleted_leaves_the_next_one_s_alone(train, digits, tmp_path, log_every, sample_every):
    """It had added its metrics, pruned the other's checkpoints and written its own beside them."""
    trainer = Trainer(TINY.replace(log_every=log_every, sample_every=sample_every, keep=1), digits, tmp_path / "run")
    step, found = trainer.train_step, {}

    def replaced():
        if trainer.step == 2:
            shutil.rmtree(tmp_path / "run")
            train(seed=1, sample_every=3)
            found.update((path, path.read_bytes()) for path in sorted((tmp_path / "run").iterdir()))
        return step()

    trainer._step = replaced
    with pytest.raises(CudiffError, match=r"run was deleted or renamed while .* left as it is: .* another --folder$"):
        trainer.run()
    assert found == {path: path.read_bytes() for path in sorted((tmp_path / "run").iterdir())}


@pytest.mark.parametrize(
    "changes",
    [{"model_channels": 16}, {"seed": 1}, {"validation": 4}, {"optimizer": "sgd"}, {"diffusion": "ddpm"},
     {"sigma_data": 0.6}],
)
def test_a_resumed_run_keeps_what_it_is(train, changes):
    trainer = train()
    name = next(iter(changes))
    with pytest.raises(CudiffError, match=f"a resumed run cannot change {name} from .* to .*: leave it out"):
        train("other", trainer.save_path, steps=9, **changes)


def test_a_folder_without_checkpoint_cannot_be_resumed(tmp_path):
    with pytest.raises(CudiffError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)


def test_bad_data_is_told_before_anything_is_made(digits, tmp_path):
    for changes, message in (
        ({"channels": 3}, "1 channels, but image_size is 8 and channels 3"),
        ({"validation": 100}, "held out|hold out|validation"),
        ({"num_classes": 4}, "num_classes 4 is too small"),
    ):
        with pytest.raises(CudiffError, match=message):
            Trainer(TINY.replace(**changes), digits, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_preview_that_fails_does_not_end_the_run_unless_the_ema_is_lost(digits, tmp_path, monkeypatch):
    class Display(list):
        update, message = (lambda self, metrics: None), list.append

    trainer, display = Trainer(TINY.replace(sample_every=2, guidance=1e38), digits, tmp_path / "guided"), Display()
    trainer.run(display)
    assert trainer.step == TINY.steps
    told = [text.partition(":")[0] for text in display if text.startswith("no preview")]
    assert told == [f"no preview of step {step}" for step in (2, 4, 6)]
    trainer = Trainer(TINY.replace(sample_every=2), digits, tmp_path / "lost")
    trainer.ema.model.flat.data[...] = np.inf
    with pytest.raises(CudiffError, match=r"the EMA is not finite at step 2: lower --lr or set --clip, and start"):
        trainer.run()


def test_lines_of_metrics_that_are_none_are_left_out(digits, tmp_path):
    Trainer(TINY, digits, tmp_path).run()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + 'null\n[1]\n{"a": 1}\n{"step": 2')
    for name in (".step-00000006.safetensors-1-1.tmp", ".samples-00000006.png-1-1.tmp", ".loss.png.tmp"):
        (tmp_path / name).touch()
    Trainer(TINY.replace(steps=8), digits, tmp_path, load_checkpoint(latest(tmp_path))).run()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()][-1] == 8
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.gpu
def test_captured_and_eager_training_agree_on_the_gpu(digits, tmp_path):
    states = []
    for capture in (True, False):
        trainer = Trainer(TINY.replace(device="cuda", capture=capture), digits, tmp_path / str(capture))
        trainer.run()
        states.append(trainer)
    assert_same_state(*states)


BF16 = TINY.replace(
    device="cuda", precision="bf16", model_channels=64, attention_resolutions=(4,), num_head_channels=32, batch_size=32,
    dropout=0.1, clip=1.0,
)


@pytest.mark.gpu
def test_two_runs_of_200_steps_are_equal_bit_for_bit(digits, tmp_path):
    runs = [Trainer(BF16.replace(steps=200, log_every=20), digits, tmp_path / name) for name in ("one", "two")]
    for trainer in runs:
        trainer.run()
    assert_same_state(*runs)
    first, second = (without_times(metrics(trainer)) for trainer in runs)
    assert len(first) >= 10 and first == second


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("steps, dropout, captured", [
    (7, 0.0, (True, False)), (7, 0.2, (True, False)), (200, 0.0, (True, True)), (200, 0.2, (True, True)),
])
def test_two_runs_of_the_elephants_are_equal_bit_for_bit(steps, dropout, captured, tmp_path, rng):
    """The U-Net of the benchmark in bf16, captured or eager: every kernel and fusion of its training step."""
    config = PRESETS["elephants"].replace(device="cuda", validation=0, dropout=dropout)
    data, states = Dataset(rng.integers(0, 256, (40, 64, 64, 3), np.uint8)), []
    for name, capture in enumerate(captured):
        trainer = Trainer(config.replace(capture=capture), data, tmp_path / str(name))
        losses = [trainer._step().item() for _ in range(steps)]
        states.append([losses, *(Tensor(m.flat.data).numpy() for m in (trainer.net, trainer.ema.model))])
    assert np.isfinite(states[0][0]).all() and len(set(states[0][0])) > 0.9 * steps
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
def test_a_new_trainer_leaves_no_memory_idle(digits, tmp_path):
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        trainer = Trainer(BF16, digits, tmp_path)
    assert pool.total_bytes() - pool.used_bytes() < 4096 < trainer.net.flat.data.nbytes


@pytest.mark.gpu
def test_a_captured_function_cannot_copy_from_the_host():
    captured = cudiff.capture(lambda x: x + Tensor(np.ones(3, np.float32), device="cuda"), warmup=1)
    x = Tensor(array_module("cuda").zeros(3, np.float32))
    captured(x)
    with pytest.raises(CudiffError, match="copied a host array to the GPU"):
        captured(x)


@pytest.mark.parametrize("drawn, told", [
    (True, []), (False, ["no loss curve was drawn: pip install 'cudiff[plots]'"]),
    (OSError("disk full"), ["no loss curve was drawn: disk full"]),
], ids=["drawn", "no matplotlib", "disk full"])
def test_a_loss_curve_that_is_not_drawn_is_told(digits, tmp_path, monkeypatch, drawn, told):
    class Display(list):
        update, message = (lambda self, metrics: None), list.append

    def save_loss_curve(path, lines):
        assert path == tmp_path / "run" / "loss.png" and lines
        if isinstance(drawn, Exception):
            raise drawn
        return drawn

    monkeypatch.setattr("cudiff.folder.save_loss_curve", save_loss_curve)
    display = Display()
    Trainer(TINY.replace(steps=2, log_every=1), digits, tmp_path / "run").run(display)
    assert [text for text in display if "loss curve" in text] == told


def test_the_validation_loss_does_not_depend_on_the_batch_size(digits, tmp_path):
    losses = []
    for size in (3, 8, 100):
        trainer = Trainer(TINY.replace(batch_size=size), digits, tmp_path / str(size))
        losses.append(trainer.validation_loss(digits.subset(range(20))))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_classes_keep_their_numbers_where_one_is_gone(tmp_path, rng):
    images = rng.integers(0, 256, (12, 8, 8, 1), dtype=np.uint8)
    data = Dataset(images, np.arange(12) % 3, 3, "insects", ("ant", "bee", "cat"))
    config = TINY.replace(num_classes=-1, validation=0, steps=2)
    Trainer(config, data, tmp_path / "run").run()
    few = Dataset(images[:8], np.arange(8) % 2, 2, "insects", ("bee", "cat"))
    for steps in (3, 4):
        again = load_checkpoint(tmp_path / "run")
        trainer = Trainer(again.config.replace(steps=steps), few, tmp_path / "run", again, data_changed=steps == 3)
        assert trainer.config.class_names == ("ant", "bee", "cat") and set(trainer.training.labels) == {1, 2}
        assert trainer.training.notes == ("the data has no image of ant: not trained any more",)
        trainer.run()


def test_classes_without_names_keep_their_numbers_where_one_is_gone(tmp_path, rng):
    """`Dataset.only` had numbered them anew: classes were trained as others."""
    data = Dataset(rng.integers(0, 256, (12, 8, 8, 1), dtype=np.uint8), np.arange(12) % 3, 3)
    Trainer(TINY.replace(num_classes=-1, validation=0, steps=2), data, tmp_path / "run").run()
    again = load_checkpoint(tmp_path / "run")
    trainer = Trainer(again.config.replace(steps=3), data.only([2, 1]), tmp_path / "run", again, data_changed=True)
    assert trainer.training.labels.tolist() == [1, 2] * 4
