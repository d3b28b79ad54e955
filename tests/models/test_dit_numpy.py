"""DiT with random weights against plain NumPy in float64, without PyTorch; how it starts; what it refuses."""

from collections import Counter

import ml_dtypes
import numpy as np
import pytest

from cudiff.config import Config
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.models import DiT, build, outline
from cudiff.models.dit import OPTIONS, SIZES, positions
from cudiff.nn import init
from cudiff.pipeline import load
from cudiff.tensor import Tensor, no_grad
from cudiff.train import Trainer
from tests.check import assert_close
from tests.models import numpy_nets
from tests.models.test_unet_numpy import randomised

TINY = dict(image_size=8, patch_size=2, hidden_size=24, depth=2, num_heads=3)
VARIANTS = {
    "default": {},
    "classes, twice the output": dict(num_classes=5, in_channels=1, learn_sigma=True),
    "normed queries and keys": dict(qk_norm=True, patch_size=4),
    "rows and columns": dict(image_size=(4, 12), mlp_ratio=1.5),
    "no labels": dict(num_classes=3),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_dit(name, rng):
    options = TINY | VARIANTS[name]
    model = DiT(**options)
    state = randomised(model, rng)
    height, width = model.image_size
    x = rng.standard_normal((3, height, width, options.get("in_channels", 3))).astype(np.float32)
    t = np.array([0.7, 412.0, -1.2], np.float32)
    labels = np.array([1, 4, -1], np.int32) if options.get("num_classes") == 5 else None
    with no_grad():
        out = model(Tensor(x), Tensor(t), None if labels is None else Tensor(labels)).numpy()
    expected = numpy_nets.dit(state, options, x.astype(np.float64), t.astype(np.float64), labels)
    assert out.dtype == np.float32
    assert_close(out, expected, 1e-4)


def test_bf16_stays_near(rng):
    """Modulation in float32, the last layer's sums not rounded: each block rounds its activations only."""
    options = TINY | dict(num_classes=5, hidden_size=64, num_heads=2, image_size=16)
    model = DiT(**options)
    state = randomised(model, rng)
    model.precision = "bf16"
    x, t, labels = rng.standard_normal((4, 16, 16, 3)).astype(np.float32), np.float32([0, 1, 2, 3]), [0, 1, -1, 4]
    with no_grad():
        out = model(Tensor(x), Tensor(t), Tensor(np.int32(labels)))
    expected = numpy_nets.dit(state, options, x.astype(np.float64), t.astype(np.float64), np.array(labels))
    assert out.dtype == np.float32 and np.abs(out.numpy() - expected).max() < 0.05 * np.abs(expected).max()


def test_it_starts_as_the_papers_code_does():
    """Glorot's uniform weights, normal ones of 0.02 for the embeddings, zeros for biases, modulation and the end."""
    with init.seeded(3):
        model = DiT(16, 3, hidden_size=192, depth=1, num_heads=3, num_classes=200)
    state = dict(model.named_parameters())
    for name, value in state.items():
        array = value.numpy()
        if name.endswith("bias") or "adaLN" in name or name.startswith("final_layer"):
            assert not array.any(), name
        elif "embedder" in name and not name.startswith("x_"):
            assert abs(array.std() - 0.02) < 0.001 and abs(array).max() > 0.06, name
        else:
            bound = np.sqrt(6 / (array.shape[0] + array[0].size))
            assert 0.98 * bound < abs(array).max() <= bound, name
    assert state["blocks.0.attn.qkv.weight"].low and state["blocks.0.attn.qkv.weight"].decay
    assert not state["y_embedder.embedding_table.weight"].decay
    x, t = Tensor(np.ones((2, 16, 16, 3), np.float32)), Tensor(np.float32([1, 2]))
    assert not model(x, t, Tensor(np.int32([0, 199]))).numpy().any()


def test_names_are_those_of_the_papers_code():
    names = set(DiT(**TINY, num_classes=3).state_dict())
    assert {name for name in names if not name.startswith("blocks.")} == {
        "pos_embed", "x_embedder.proj.weight", "x_embedder.proj.bias", "t_embedder.mlp.0.weight",
        "t_embedder.mlp.0.bias", "t_embedder.mlp.2.weight", "t_embedder.mlp.2.bias",
        "y_embedder.embedding_table.weight", "final_layer.linear.weight", "final_layer.linear.bias",
        "final_layer.adaLN_modulation.1.weight", "final_layer.adaLN_modulation.1.bias",
    }  # fmt: skip
    assert {name.removeprefix("blocks.1.") for name in names if name.startswith("blocks.1.")} == {
        f"{layer}.{kind}" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1")
        for kind in ("weight", "bias")
    }


def test_positions_are_of_columns_then_of_rows():
    table = positions(2, 3, 8)
    assert table.shape == (1, 6, 8) and table.dtype == np.float32
    row, column = 1, 2
    expected = [wave(place * f) for place in (column, row) for wave in (np.sin, np.cos) for f in (1, 0.01)]
    np.testing.assert_allclose(table[0, row * 3 + column], expected, rtol=1e-6)


def test_the_papers_sizes():
    """Parameters in millions: Table 4 of the paper, for 32x32x4 and 1,000 classes, learned variance."""
    for size, millions in (("s", 33), ("b", 131), ("l", 459), ("xl", 675)):
        hidden_size, depth, num_heads = SIZES[size]
        with init.outlined(10**4, 10**10):
            net = DiT(32, 4, 4, hidden_size, depth, num_heads, num_classes=1000, learn_sigma=True)
        assert round(net.num_parameters() / 1e6) == pytest.approx(millions, abs=1)


@pytest.mark.parametrize("options, message", [
    (dict(image_size=30), "image size 30 is no multiple of patch_size 4: use a size such as 28 or 32, or"),
    (dict(image_size=2), "image size 2 is no multiple of patch_size 4: use a size such as 4, or another"),
    (dict(image_size=(16, 18)), "image size 18 is no multiple of patch_size 4"),
    (dict(hidden_size=26, num_heads=2), "hidden_size 26 is no multiple of 4: use 28"),
    (dict(num_heads=5), "num_heads 5 does not cut the hidden_size 24 into heads .*: use 1, 2, 3, 4, 6, 8, 12, 24"),
    (dict(hidden_size=384, num_heads=2), "num_heads 2 .* use 3, 4, 6, 8"),
])
def test_sizes_that_do_not_divide_say_which_do(options, message):
    with pytest.raises(CudiffError, match=message):
        DiT(**TINY | dict(patch_size=4, image_size=16) | options)


def test_the_configuration_is_checked_too():
    with pytest.raises(CudiffError, match="image size 30 is no multiple"):
        Config(model="dit", image_size=30)
    with pytest.raises(CudiffError, match="num_heads 7 does not cut"):
        Config(model="dit", num_heads=7)


def test_what_its_call_refuses():
    x, t, labels = Tensor(np.zeros((2, 8, 8, 3), np.float32)), Tensor(np.float32([1, 2])), Tensor(np.int32([0, 1]))
    with pytest.raises(ValueError, match="this DiT is unconditional and takes no labels"):
        DiT(**TINY)(x, t, labels)
    with pytest.raises(ValueError, match=r"takes images of 8x8 pixels, not of shape \(2, 8, 12, 3\)"):
        DiT(**TINY)(Tensor(np.zeros((2, 8, 12, 3), np.float32)), t)


OTHERS = {
    "patch_size": 4, "hidden_size": 36, "depth": 1, "num_heads": 6, "mlp_ratio": 2.0, "qk_norm": True,
    "num_classes": 2, "learn_sigma": True,
}


@pytest.mark.parametrize("name", OTHERS)
def test_build_passes_every_option_on(name):
    base = {key: value for key, value in TINY.items() if key != "image_size"} | dict(num_classes=0)
    wanted = base | {name: OTHERS[name]}
    built = build(Config(model="dit", diffusion="ddpm", image_size=8, channels=1, seed=4, **wanted))
    with init.seeded(4):
        expected = DiT(8, 1, **wanted)
    state = expected.state_dict()
    assert built.state_dict().keys() == state.keys() and set(OPTIONS) <= set(OTHERS)
    for key, value in built.state_dict().items():
        np.testing.assert_array_equal(value, state[key])
    assert [block.attn.num_heads for block in built.blocks] == [block.attn.num_heads for block in expected.blocks]


def test_an_outline_has_the_shapes_and_is_bounded():
    config = Config(model="dit", image_size=8, channels=1, **{k: v for k, v in TINY.items() if k != "image_size"})
    state = build(config).state_dict()
    tensors, numbers = len(state), sum(value.size for value in state.values())
    found = outline(config, tensors, numbers).state_dict()
    assert {name: value.shape for name, value in found.items()} == {name: value.shape for name, value in state.items()}
    with pytest.raises(CudiffError, match="the model is larger"):
        outline(config.replace(image_size=2**16), tensors, numbers)


@pytest.mark.parametrize("objective", [dict(), dict(diffusion="ddpm", learn_sigma=True, sampler="ancestral")], ids=str)
def test_it_trains_is_saved_and_samples(objective, tmp_path):
    config = Config(model="dit", **{k: v for k, v in TINY.items() if k != "image_size"}, **objective, batch_size=32,
                    lr=3e-3, ema_half_life=5.0, steps=60, log_every=20, sample_every=0, sample_steps=4, clip=1.0)
    data = load_dataset("digits", image_size=8, count=200)
    trainer = Trainer(config, data, tmp_path / "run")
    trainer.run()
    losses = [line["loss"] for line in trainer.metrics.lines() if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    pipeline = load(tmp_path / "run")
    images = pipeline.sample(4, seed=1, classes=[0, 3, 9, -1])
    assert images.shape == (4, 8, 8, 1) and images.std() > 0
    np.testing.assert_array_equal(pipeline.sample(2, seed=1, classes=[0, 3]), images[:2])
    for name, value in trainer.ema.model.state_dict().items():
        np.testing.assert_array_equal(pipeline.net.state_dict()[name], value)


def test_what_a_block_launches(host_of):
    """The gates, GELU and both residuals are in the launches of linear layers, the scales in those of layer norms. The
    six vectors are split by one launch, and their gradients joined by one."""
    host = host_of(True)
    model = DiT(32, 4, 2, hidden_size=256, depth=1, num_heads=4)
    model.precision = "bf16"
    model.flatten("cuda")
    x, silu_c = (Tensor(host.zeros(shape, ml_dtypes.bfloat16)) for shape in ((8, 256, 256), (8, 256)))
    with no_grad():
        model.blocks[0](x, silu_c)
        before = len(host.launches)
        model.blocks[0](x, silu_c)
    stems = Counter(stem for stem, _ in host.launches[before:])
    assert stems == {"conv2d_sm90": 1, "cast": 1, "layer_norm": 2, "gemm_sm90": 4, "attention_sm90": 1}
    x.requires_grad = silu_c.requires_grad = True
    out = model.blocks[0](x, silu_c)
    before = len(host.launches)
    out.backward(out.data)
    stems = Counter(stem for stem, _ in host.launches[before:])
    assert (stems["cast"], stems["gated"], stems["layer_norm"], stems["attention_sm90"]) == (1, 2, 2, 2), stems
    assert stems.keys() <= {"cast", "gated", "layer_norm", "attention_sm90", "gemm_sm90", "conv2d_sm90",
                            "conv2d_wgrad_sm90", "accumulate"}, stems


def test_labels_that_are_none_are_refused():
    net, x = DiT(8, 1, 2, 16, 1, 2, num_classes=3), Tensor(np.zeros((2, 8, 8, 1), np.float32))
    for labels in ([0, 3], [-2, 0]):
        with pytest.raises(IndexError, match=r"a label lies outside \[-1, 3\)"):
            net(x, 1.0, Tensor(np.array(labels, np.int32)))
    with pytest.raises(TypeError, match="labels and indices are integers"):
        net(x, 1.0, Tensor(np.array([0.0, 1.0])))
    np.testing.assert_array_equal(net(x, 1.0, [0, -1]).numpy(), net(x, 1.0, np.array([0, -1])).numpy())
