"""What went wrong without a word when a NumPy or PyTorch user came: each does what it says now, or is refused."""

import collections
import copy
import pickle

import numpy as np
import pytest

import cudiff
from cudiff import nn, plot
from cudiff.checkpoint import load_checkpoint
from cudiff.data import Dataset
from cudiff.diffusion.edm import EDMDenoiser
from cudiff.diffusion.schedule import karras_sigmas
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.optim import EMA, SGD
from cudiff.pipeline import Pipeline
from cudiff.tensor import Tensor
from cudiff.train import Trainer

TINY = cudiff.Config(
    image_size=8, channels=1, model_channels=8, channel_mult=(1,), num_res_blocks=1, num_classes=3, batch_size=4,
    steps=2, save_every=0, sample_every=0, sample_steps=2, keep=1, device="cpu",
)


def data():
    return Dataset(np.arange(6, dtype=np.uint8).repeat(64).reshape(6, 8, 8, 1), np.arange(6) % 3, 3)


def test_a_mask_chooses_the_images_where_it_is_true():
    images = data().subset(data().labels == 2).images
    assert images[:, 0, 0, 0].tolist() == [2, 5]


@pytest.mark.parametrize("indices", [[0.9, 2.7], [True, False], [[0, 1]]], ids=str)
def test_indices_of_a_subset_are_whole_numbers_or_a_mask(indices):
    with pytest.raises(CudiffError, match="give whole numbers"):
        data().subset(indices)


@pytest.mark.parametrize("validation", [1.9, -0.5, float("nan")])
def test_a_part_that_is_no_number_of_images_is_refused(validation):
    with pytest.raises(CudiffError, match="cannot hold out"):
        data().split(validation)


def test_a_part_in_evaluation_mode_stays_so_when_a_sample_is_drawn():
    net = build(TINY)
    net.out.eval()
    Pipeline(TINY, net).sample(1)
    assert net.training and not any(module.training for module in net.out.modules())


@pytest.mark.parametrize("spoil, problem", [
    (lambda net: net.parameters()[0].assign(np.full(net.parameters()[0].shape, np.nan)), "is not finite"),
    (lambda net: setattr(net, "extra", nn.Linear(2, 2)), "unexpected extra.weight"),
], ids=["NaN", "another net"])
def test_a_good_file_is_not_replaced_by_weights_that_cannot_be_used(tmp_path, spoil, problem):
    pipeline = Pipeline(TINY, build(TINY))
    pipeline.save(tmp_path / "w.safetensors")
    before = (tmp_path / "w.safetensors").read_bytes()
    spoil(pipeline.net)
    with pytest.raises(CudiffError, match=problem):
        pipeline.save(tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_save_writes_into_no_other_run(tmp_path):
    late = Trainer(TINY, data(), tmp_path)
    Trainer(TINY.replace(save_every=1, keep=0), data(), tmp_path).run()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CudiffError, match="already holds a run"):
        late.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_run_goes_on_after_save(tmp_path):
    trainer = Trainer(TINY, data(), tmp_path)
    assert trainer.save().exists()
    trainer.run()
    assert trainer.save_path.exists()


class SavesOnUpdate:
    def __init__(self, trainer):
        self.trainer, self.saved = trainer, []

    def update(self, metrics):
        self.saved.append(self.trainer.save())

    def message(self, text):
        pass


def test_a_display_may_save_while_the_run_goes_on(tmp_path):
    trainer = Trainer(TINY.replace(log_every=1, keep=0), data(), tmp_path)
    display = SavesOnUpdate(trainer)
    trainer.run(display)
    assert [path.name for path in display.saved] == ["step-00000001.safetensors", "step-00000002.safetensors"]
    assert all(path.exists() for path in display.saved)


def test_what_was_frozen_stays_so_when_a_run_goes_on(tmp_path):
    first = Trainer(TINY, data(), tmp_path)
    first.net.time_embed.requires_grad_(False)
    first.run()
    before = first.net.state_dict()
    again = Trainer(TINY.replace(steps=4), data(), tmp_path, resume=load_checkpoint(first.save_path))
    again.run()
    after = again.net.state_dict()
    same = {name for name in before if (before[name] == after[name]).all()}
    assert same == {name for name in before if name.startswith("time_embed.")}


def test_a_checkpoint_that_says_nothing_of_freezing_is_resumed(tmp_path):
    first = Trainer(TINY, data(), tmp_path)
    first.run()
    checkpoint = load_checkpoint(first.save_path)
    checkpoint.counters["frozen"] = None
    again = Trainer(TINY.replace(steps=3), data(), tmp_path, resume=checkpoint)
    assert all(parameter.requires_grad for parameter in again.net.parameters())


@pytest.mark.parametrize("dataset, resume", [("digits", None), (None, "runs/a")], ids=str)
def test_a_trainer_takes_a_dataset_and_a_checkpoint(tmp_path, dataset, resume):
    with pytest.raises(CudiffError, match=r"what cudiff\.load_dataset returns"):
        Trainer(TINY, dataset or data(), tmp_path, resume)


def test_a_pipelines_new_configuration_holds_for_its_noise_levels():
    pipeline = Pipeline(TINY, build(TINY))
    pipeline.config = TINY.replace(sigma_max=5.0)
    assert pipeline.sigmas("euler", 4)[0] == pytest.approx(5)


def test_a_copy_of_a_tensor_shares_no_gradient_and_none_is_made_of_the_tape():
    x = Tensor([1.0, 2.0], requires_grad=True)
    (x * x).sum().backward()
    for copied in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert copied.grad is None and copied.requires_grad and copied.numpy().tolist() == [1, 2]
    with pytest.raises(TypeError, match=r"use x\.detach\(\)"):
        copy.deepcopy(x * 2)


@pytest.mark.parametrize("layers", [nn.Linear(2, 2), [nn.Linear(2, 2)]], ids=["one", "a list"])
def test_layers_of_a_class_are_refused(layers):
    with pytest.raises(TypeError, match=r"Net\.layers: layers are attributes of a model: set self\.layers"):
        type("Net", (nn.Module,), {"layers": layers})


def test_layers_in_a_deque_are_refused():
    with pytest.raises(TypeError, match="layers in a deque have no names"):
        nn.Module().layers = collections.deque([nn.Linear(2, 2)])


def test_a_net_that_the_optimiser_does_not_train_is_told(tmp_path):
    trainer = Trainer(TINY, data(), tmp_path)
    trainer.net = build(TINY)
    with pytest.raises(CudiffError, match="the net was replaced"):
        trainer.run()


@pytest.mark.parametrize("replace, message", [
    (lambda trainer: setattr(trainer, "ema", EMA(trainer.net, 5)), "the optimiser or the average was replaced"),
    (lambda trainer: setattr(trainer, "optimizer", SGD(trainer.net, lr=0.1)), "the optimiser or the average was rep"),
    (lambda trainer: setattr(trainer, "config", trainer.config.replace(lr=1.0)), "the configuration was replaced"),
    (lambda trainer: setattr(trainer.ema, "half_life", -1), "half_life must be above 0"),
    (lambda trainer: setattr(trainer.ema, "half_life", "500"), "half_life"),
    (lambda trainer: setattr(trainer.ema, "ramp", -3.0), "ramp must be above 0"),
    (lambda trainer: setattr(trainer, "loss", lambda *given: 0.5), "trainer.loss returned a float: let it return"),
    (lambda trainer: setattr(trainer, "loss", lambda net, images, *given: images), r"a Tensor of shape \(1, 8, 8, 1"),
], ids=["ema", "optimizer", "config", "half-life", "text", "ramp", "float", "images"])
def test_what_would_train_apart_from_what_is_saved_is_told(tmp_path, replace, message):
    trainer = Trainer(TINY, data(), tmp_path)
    replace(trainer)
    with pytest.raises(CudiffError, match=message):
        trainer.run()
    assert trainer.step == 0


def test_a_loss_may_have_an_axis_of_one(tmp_path):
    trainer, plain = Trainer(TINY, data(), tmp_path / "a"), Trainer(TINY, data(), tmp_path / "b")
    loss = trainer.loss
    trainer.loss = lambda *given: loss(*given).reshape((1, 1))
    assert trainer.run()["loss"] == plain.run()["loss"]


def test_labels_of_another_number_are_refused():
    net, x, t = build(TINY.replace(num_classes=3)), Tensor(np.zeros((4, 8, 8, 1), np.float32)), Tensor(np.ones(4))
    for labels in ([1], [0, 1], [[0], [1], [2], [0]]):
        with pytest.raises(ValueError, match=r"labels are .* for 4 images: give one class for each"):
            net(x, t, Tensor(np.array(labels, np.int32)))


@pytest.mark.parametrize("model", ["unet", "dit", "cs179"])
def test_noise_levels_are_numbers_and_arrays_too(model, rng):
    net = build(TINY.replace(model=model, num_classes=0))
    x = Tensor(rng.standard_normal((2, 8, 8, 1)), dtype="float32")
    for parameter in net.parameters():
        parameter.data = rng.standard_normal(parameter.shape)  # a net that starts at zero returns zeros
    for called in (net, EDMDenoiser(net)):
        expected = called(x, Tensor(np.float32([0.5, 0.5]))).numpy()
        assert expected.any()
        for given in (0.5, np.float32(0.5), np.array(0.5), np.array([0.5, 0.5])):
            np.testing.assert_array_equal(called(x, given).numpy(), expected)
    with pytest.raises(ValueError, match=r"t has shape \(2, 1\), not \(N,\): give one number for each image"):
        net(x, np.ones((2, 1)))


@pytest.mark.parametrize("grad", [np.ones(3, np.float32), np.ones(2)], ids=["another shape", "another dtype"])
def test_a_gradient_of_another_kind_is_refused(grad):
    x = Tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(ValueError, match="the gradient of this tensor is an array of float32"):
        x.grad = grad
    assert x.grad is None


@pytest.mark.gpu
def test_a_view_is_no_gradient_on_a_gpu():
    x = Tensor(np.ones((2, 3), np.float32), device="cuda", requires_grad=True)
    with pytest.raises(ValueError, match="a C-contiguous array: give a copy of this view"):
        x.grad = Tensor(np.ones((3, 2), np.float32), device="cuda").data.T
    assert x.grad is None


def test_one_number_is_not_gone_through():
    for through in (list, sum, max):
        with pytest.raises(TypeError, match="0-d tensor has no elements"):
            through(Tensor(3.0))
    assert Tensor(3.0)[..., None].shape == (1,)


def test_a_list_of_tensors_does_not_lose_their_gradient():
    x, y = (Tensor(value, requires_grad=True) for value in (2.0, 3.0))
    for make in (lambda: Tensor([x * 2, y]), lambda: Tensor([1.0, 2.0]) + [[x], [y]]):
        with pytest.raises(TypeError, match=r"cudiff\.stack"):
            make()
    assert Tensor([x.detach(), 1.0]).numpy().tolist() == [2, 1]


@pytest.mark.parametrize("value, dtype", [(300, "uint8"), (-1, "uint8"), (2**31, "int32")])
def test_an_integer_that_a_dtype_does_not_hold_is_refused(value, dtype):
    with pytest.raises(OverflowError):
        Tensor([0, value], dtype=dtype)
    assert Tensor([0, 5], dtype=dtype).numpy().tolist() == [0, 5]


def test_integers_are_clipped_to_fractions_as_in_numpy():
    assert cudiff.clip(Tensor([0, 1, 2]), 0.5, 1.5).numpy().tolist() == [0.5, 1, 1.5]
    assert cudiff.clip(Tensor([0, 1, 2]), 0, 1).dtype == np.int64


@pytest.mark.parametrize("scale", [-1.0, float("nan"), Tensor(2.0)], ids=["negative", "NaN", "a loss"])
def test_an_update_has_a_scale_above_0(scale):
    model = nn.Linear(2, 2)
    optimizer = SGD(model)
    model(Tensor([[1.0, 2.0]])).sum().backward()
    with pytest.raises(CudiffError, match="scale must be"):
        optimizer.step(scale)


@pytest.mark.parametrize("arguments", [{"num_steps": 2.5}, {"sigma_max": np.inf}, {"rho": 0}, {"rho": np.nan}], ids=str)
def test_noise_levels_that_are_none_are_refused(arguments):
    with pytest.raises(CudiffError):
        karras_sigmas(**{"num_steps": 4} | arguments)


@pytest.mark.parametrize("labels", [[0, 1], [0.9, 1.2, 2.7]], ids=str)
def test_labels_in_a_file_are_those_of_its_images(tmp_path, labels):
    with pytest.raises(ValueError, match="one integer for each"):
        plot.save_npz(tmp_path / "a.npz", np.zeros((3, 8, 8, 1), np.uint8), labels)
    assert not list(tmp_path.iterdir())
