"""Both U-Nets with random weights against plain NumPy in float64: every option, without PyTorch."""

import numpy as np
import pytest

from cudiff.config import Config
from cudiff.errors import CudiffError
from cudiff.models import CS179UNet, UNet, build, outline
from cudiff.models.unet import num_groups
from cudiff.nn import init, set_generator
from cudiff.ops import Generator
from cudiff.tensor import Tensor, no_grad
from tests.check import assert_close
from tests.models import numpy_nets

TINY = dict(image_size=8, model_channels=16, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(4,),
            num_heads=2, num_head_channels=-1)
OPTIONS = {
    "default": {},
    "pooling, short period": dict(conv_resample=False, max_period=1000.0),
    "scale and shift": dict(use_scale_shift_norm=True, num_head_channels=8),
    "classes, twice the output": dict(num_classes=5, in_channels=1, learn_sigma=True),
    "new order": dict(use_new_attention_order=True, attention_resolutions=(8, 4)),
    "residual resampling": dict(resblock_updown=True, use_scale_shift_norm=True),
    "groups of four": dict(norm_group_channels=4, model_channels=24),
    "three levels": dict(channel_mult=(1, 2, 4), num_res_blocks=2, attention_resolutions=(2,)),
}


def randomised(model, rng):
    """Every parameter drawn anew, also those that start at zero; and all as float64."""
    state = {}
    for name, parameter in model.named_parameters():
        scale = 1 / np.sqrt(max(1, np.prod(parameter.shape[1:])))
        values = rng.standard_normal(parameter.shape) * scale + (parameter.ndim == 1 and name.endswith("weight"))
        parameter.assign(values.astype(np.float32))
        state[name] = values.astype(np.float32).astype(np.float64)
    return state


@pytest.mark.parametrize("name", OPTIONS)
def test_unet(name, rng):
    options = TINY | OPTIONS[name]
    model = UNet(**options)
    state = randomised(model, rng)
    x = rng.standard_normal((2, 8, 8, options.get("in_channels", 3))).astype(np.float32)
    t = np.array([0.7, 412.0], np.float32)
    labels = np.array([1, 4], np.int32) if options.get("num_classes") else None
    with no_grad():
        out = model(Tensor(x), Tensor(t), None if labels is None else Tensor(labels)).numpy()
    expected = numpy_nets.unet(state, options, x.astype(np.float64), t.astype(np.float64), labels)
    assert out.dtype == np.float32
    assert_close(out, expected, 1e-4)


@pytest.mark.parametrize("sizes", [(8, (1, 2)), (16, (1, 2, 3))], ids=str)
def test_cs179(sizes, rng):
    size, mult = sizes
    model = CS179UNet(size, 2, 8, mult)
    state = randomised(model, rng)
    x, t = rng.standard_normal((2, size, size, 2)).astype(np.float32), np.float32([0.3, -1.2])
    with no_grad():
        out = model(Tensor(x), Tensor(t)).numpy()
    assert_close(out, numpy_nets.cs179(state, x.astype(np.float64), t.astype(np.float64)), 1e-4)


@pytest.mark.parametrize("channels, least, groups", [
    (32, 1, 32), (64, 1, 32), (64, 2, 32), (32, 2, 16), (96, 4, 16), (48, 1, 16), (16, 1, 8), (24, 1, 8), (8, 1, 4),
    (24, 4, 4), (6, 1, 2), (3, 1, 1), (2, 1, 1), (2, 2, 1),
])
def test_groups_of_narrow_norms(channels, least, groups):
    """Two channels a group at least where there are no 32: of one channel a group erases what was added to it."""
    assert num_groups(channels, least) == groups


@pytest.mark.parametrize("missing", ["image_size", "channels"])
def test_a_model_needs_a_size_and_channels(missing):
    with pytest.raises(CudiffError, match="needs image_size and channels"):
        build(Config(**{"image_size": 16, "channels": 1, missing: 0}))


def test_dropout_acts_in_training_only(rng):
    model = UNet(**TINY, dropout=0.3)
    randomised(model, rng)
    x, t = Tensor(rng.standard_normal((2, 8, 8, 3)).astype(np.float32)), Tensor(np.float32([1, 2]))
    set_generator(model, Generator(1))
    trained, again = model.train()(x, t).numpy(), model.train()(x, t).numpy()
    plain = model.eval()(x, t).numpy()
    assert np.abs(trained - again).max() > 0.01  # though nobody advanced the generator
    assert np.abs(trained - plain).max() > 0.01
    reference = UNet(**TINY)
    reference.load_state_dict(model.state_dict())
    np.testing.assert_array_equal(reference.train()(x, t).numpy(), plain)


def test_the_projects_own_net_is_the_default():
    shapes = {name: parameter.shape for name, parameter in CS179UNet().named_parameters()}
    assert shapes["enc_blocks.0.conv1.weight"] == (64, 3, 3, 1) and shapes["out_conv.weight"] == (1, 1, 1, 64)
    assert shapes["bottleneck.conv2.weight"] == (128, 3, 3, 128) and shapes["time_emb.mlp.0.weight"] == (512, 128)


def shapes(model):
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def test_the_sizes_unless_told():
    """Those of the class's own words; attention heads have no shape, but a number."""
    with init.outlined(10**4, 10**9):
        plain, told = UNet(64), UNet(64, 3, 64, (1, 2, 3, 4), 2, (16, 8), num_head_channels=32)
        heads = UNet(64, num_head_channels=0)
        assert shapes(CS179UNet()) == shapes(CS179UNet(28, 1, 64, (1, 2)))
    assert shapes(plain) == shapes(told) and plain.label_emb is None
    assert plain.max_period == 10000 and not plain.learn_sigma
    assert plain.input_blocks[0][0].weight.shape == (64, 3, 3, 3) and plain.out[2].weight.shape == (3, 3, 3, 64)
    assert plain.middle_block[1].num_heads == 256 // 32 and heads.middle_block[1].num_heads == 4
    assert plain.time_embed[0].weight.shape == (256, 64) and not plain.middle_block[1].new_order


OPTION_VALUES = {
    "in_channels": 3, "model_channels": 8, "channel_mult": (2, 3), "num_res_blocks": 3, "attention_resolutions": (4,),
    "num_heads": 8, "num_head_channels": 8, "use_scale_shift_norm": True, "resblock_updown": True,
    "conv_resample": False, "dropout": 0.25, "num_classes": 3, "learn_sigma": True, "use_new_attention_order": True,
    "max_period": 7.0, "zero_init": False, "norm_group_channels": 4,
}


@pytest.mark.parametrize("name", OPTION_VALUES)
def test_build_passes_every_option_on(name):
    """The net of a configuration is the one that the constructor makes of its options, drawn from its seed."""
    base = dict(in_channels=1, model_channels=16, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(),
                num_heads=4, num_head_channels=0)
    wanted = base | {name: OPTION_VALUES[name]}
    options = {key: value for key, value in wanted.items() if key != "in_channels"}
    config = Config(diffusion="ddpm", image_size=8, channels=wanted["in_channels"], seed=4, **options)
    built = build(config)
    with init.seeded(4):
        expected = UNet(8, **wanted)
    state = expected.state_dict()
    assert built.state_dict().keys() == state.keys()
    for key, value in built.state_dict().items():
        np.testing.assert_array_equal(value, state[key])
    assert (built.label_emb is None) == (name != "num_classes")
    for net in (built, expected):
        set_generator(net.eval(), Generator(0))
    x = Tensor(np.random.default_rng(0).standard_normal((2, 8, 8, wanted["in_channels"])).astype(np.float32))
    t = Tensor(np.float32([1, 9]))
    np.testing.assert_array_equal(built(x, t).numpy(), expected(x, t).numpy())


def test_an_outline_is_compared_with_what_a_file_has():
    config = Config(image_size=8, channels=1, model_channels=8, channel_mult=(1,), num_res_blocks=1, num_heads=1)
    state = build(config).state_dict()
    tensors, numbers = len(state), sum(value.size for value in state.values())
    assert shapes(outline(config, tensors, numbers)) == shapes(build(config))
    for arguments in ((tensors // 3, numbers), (tensors, numbers // 3)):
        with pytest.raises(CudiffError, match="the model is larger"):
            outline(config, *arguments)
    assert isinstance(outline(Config(model="cs179", image_size=8, channels=1, num_classes=0), 1000, 10**7), CS179UNet)


@pytest.mark.parametrize("classes", [-1, 0])
def test_a_net_without_classes_has_no_embedding_of_labels(classes):
    assert build(Config(image_size=8, channels=1, model_channels=8, num_classes=classes)).label_emb is None


@pytest.mark.parametrize("size, advice", [(30, "such as 24 or 32"), (4, "such as 8"), (33, "such as 32 or 40")])
def test_a_size_that_does_not_halve_is_told_with_one_that_does(size, advice):
    with pytest.raises(CudiffError, match=f"image size {size} does not halve 3 times: use a multiple of 8, {advice},"):
        UNet(size)
    with pytest.raises(CudiffError, match="image size 30 does not halve 2 times: use a multiple of 4"):
        CS179UNet(30)
