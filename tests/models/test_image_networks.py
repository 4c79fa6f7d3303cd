"""Sizes of all models; AlexNet, VGG-11, ResNet-18 and MobileNetV2: structure, and training several clients at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_async.base import tree
from fedjax_async.models import from_flax, make
from fedjax_async.models.alexnet_vgg import VGG
from fedjax_async.models.mobilenet import Inverted, MobileNetV2
from fedjax_async.models.norm import BatchNorm, Nothing, is_statistic
from fedjax_async.models.resnet import Block, ResNet, part_means, pool_by_two

IMAGENET = {"num_classes": 1000, "input_shape": (224, 224, 3)}
HAR = {"num_classes": 6, "input_shape": (128, 9)}
# spec: (options, parameters, channels that are normalised). Published: torchvision's for "full", for "small" those of
# the widely used CIFAR versions; OrthoFL's network for HAR; AlexNet of PushCen's pages.
SIZES = {
    "logistic": ({}, 7_850, 0),
    "mlp": ({}, 50_890, 0),
    "mlp:hidden=200x100": ({"num_classes": 62}, 785 * 200 + 201 * 100 + 101 * 62, 0),
    "mlp:hidden=32,layers=2": ({}, 785 * 32 + 33 * 32 + 33 * 10, 0),
    "lenet5": ({}, 61_706, 0),
    "lenet5_orthofl": ({}, 44_190, 0),
    "lenet5_cifar": ({}, 256_830, 0),
    "cnn": ({}, 1_626_442, 0),
    "cnn:num_classes=62": ({"input_shape": (28, 28, 1)}, 1_199_882 + 52 * 129, 0),
    "char_gru": ({}, 82 * 16 + 17 * 384 + 3 * 128**2 + 128 + 129 * 82, 0),  # 67,698
    "char_transformer": ({}, 82 * 64 + 80 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64 + 65 * 82, 0),  # 115,794
    "alexnet": ({"input_shape": (32, 32, 3)}, 2_472_266, 0),
    "alexnet:num_classes=10": ({"input_shape": (28, 28, 1)}, 2_456_778, 0),
    "alexnet:variant=full,num_classes=10": ({"input_shape": (32, 32, 3)}, 20_344_650, 0),
    "alexnet:variant=full": (IMAGENET, 61_100_840, 0),
    "vgg11": ({}, 9_231_114, 2_752),
    "vgg11:norm=off": ({}, 9_225_610, 0),
    "vgg11:variant=full": (IMAGENET, 132_868_840, 2_752),
    "resnet18": ({}, 11_173_962, 4_800),
    "resnet18:norm=group": ({}, 11_173_962, 0),
    "resnet18:norm=local,variant=full": (IMAGENET, 11_689_512, 4_800),
    # stem 7*6*64, stages of c channels 3*(c_in + 3c)*c, shortcuts c_in*c, 2 per normalised channel, 513 per class
    "resnet18_1d": ({}, 3_849_222, 4_800),
    # stem 7*9*32, two blocks of c channels 4*3*c*c, joins 3*c*2c, 2 per normalised channel, 2*256 per class
    "resnet18_1d:variant=orthofl": (HAR, 1_182_496, 1_952),
    "resnet18_1d:norm=off,variant=orthofl": (HAR, 1_182_496 - 2 * 1_952, 0),
    "mobilenetv2": ({}, 2_412_212, 17_544),
    "mobilenetv2:variant=full": (IMAGENET, 3_504_872, 17_056),
}


@pytest.mark.slow_cases("mobilenetv2", "mobilenetv2:variant=full", "resnet18:norm=local,variant=full")
@pytest.mark.parametrize("spec", SIZES)
def test_number_of_parameters(spec):
    options, expected, normalised = SIZES[spec]
    model = make(spec, **options)
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert tree.num_scalars(params if model.train is None else params["params"]) == expected
    assert (tree.num_scalars(params["batch_stats"]) if model.train is not None else 0) == 2 * normalised
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


SMALL = ["vgg11:norm=local,variant=full", "resnet18:norm=group", "resnet18_1d:norm=off,variant=full"]


@pytest.mark.slow_cases("mobilenetv2:variant=full")
@pytest.mark.parametrize("spec", [*SMALL, "mobilenetv2:variant=full"])
def test_small_images_work_too(spec):
    """A layer that would leave no pixel is skipped or pads."""
    shape = (16, 3) if "1d" in spec else (8, 8, 3)
    model = make(f"{spec},width=0.0625", num_classes=5, input_shape=shape)
    params, x = jax.eval_shape(model.init, jax.random.key(0)), jnp.zeros((2, *shape))
    assert jax.eval_shape(model.apply, params, x).shape == (2, 5)
    assert (model.private is is_statistic) == ("local" in spec)
    if model.train is not None:
        out, moved = jax.eval_shape(model.train, params, x, jax.random.key(1), jnp.ones(2, bool))
        assert out.shape == (2, 5) and jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, params)


# the same modules with fewer layers, so that a test compiles in seconds
SHORT = {
    "vgg11": (lambda: VGG(3, BatchNorm, width=0.0625, layers=((64, True), (128, False))), (6, 6, 2)),
    "resnet18": (lambda: ResNet(3, BatchNorm, width=0.0625, stages=(64, 128)), (6, 6, 2)),
    "resnet18_1d": (lambda: ResNet(3, BatchNorm, "full", width=0.0625, stages=(64, 128)), (16, 2)),
    "resnet18_1d of OrthoFL": (lambda: ResNet(3, BatchNorm, "orthofl", width=0.125, stages=(64, 128)), (16, 2)),
    "mobilenetv2": (lambda: MobileNetV2(3, BatchNorm, width=0.125, stages=((1, 16, 1, 1), (3, 24, 2, 2))), (6, 6, 2)),
}


@pytest.mark.slow_cases("mobilenetv2", "resnet18_1d of OrthoFL", "resnet18_1d", "resnet18")
@pytest.mark.float64
@pytest.mark.parametrize("name", SHORT)
def test_training_vmapped_over_clients_equals_one_at_a_time(name):
    """Gradients and statistics; every client has its own weights, data and padded rows."""
    module, shape = SHORT[name]
    model = from_flax(module(), input_shape=shape)
    rng, shapes = np.random.default_rng(0), jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=(2, *leaf.shape))), shapes)
    x = jnp.asarray(rng.normal(size=(2, 4, *shape)))
    y, mask = jnp.array([[0, 1, 2, 0], [2, 2, 1, 1]]), jnp.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)

    def step(params, x, y, mask):
        def loss(weights):
            out, moved = model.train({**params, "params": weights}, x, jax.random.key(0), mask)
            return jnp.where(mask, model.loss(out, y), 0).sum(), moved["batch_stats"]

        return jax.grad(loss, has_aux=True)(params["params"])

    quick = {"xla_backend_optimization_level": 0}
    together = jax.jit(jax.vmap(step), compiler_options=quick)(params, x, y, mask)
    one = jax.jit(step, compiler_options=quick)
    for i in range(2):
        alone = one(*jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], (params, x, y, mask)))
        for have, want in zip(jax.tree.leaves(together), jax.tree.leaves(alone)):
            scale = float(np.abs(want).max()) + 1e-6
            np.testing.assert_allclose(have[i], want, rtol=0, atol=1e-8 * scale)
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(together[0])) > 0.1


def convolved(x, kernel, strides, padding):
    """[B, L, C] by [k, C, C_out], position by position."""
    x = np.pad(x, ((0, 0), (padding, padding), (0, 0)))
    starts = range(0, x.shape[1] - len(kernel) + 1, strides)
    return np.stack([np.einsum("bkc,kco->bo", x[:, i : i + len(kernel)], kernel) for i in starts], axis=1)


def orthofls(variables, x):
    """OrthoFL's network for HAR with two stages, as its code describes it, evaluated on running statistics."""
    params, moments = variables["params"], variables["batch_stats"]

    def layer(x, *path, strides=1, padding=1):
        own, seen = params, moments
        for name in path:
            own, seen = own[name], seen[name]
        x = convolved(x, np.asarray(own["conv"]["kernel"]), strides, padding)
        unit = (x - seen["norm"]["mean"]) / np.sqrt(seen["norm"]["var"] + 1e-5)
        return unit * own["norm"]["scale"] + own["norm"]["bias"]

    x = np.maximum(layer(x, "stem", strides=3, padding=0), 0)
    for stage in (1, 2):
        if stage == 2:
            x = np.maximum(convolved(x, np.asarray(params["stage2_join"]["kernel"]), 2, 1), 0)
        for n in (1, 2):
            inner = np.maximum(layer(x, f"stage{stage}_block{n}", "conv1"), 0)
            x = np.maximum(layer(inner, f"stage{stage}_block{n}", "conv2") + x, 0)
    half, rest = x.shape[1] // 2, -(-x.shape[1] // 2)  # an odd number of positions: the middle one is in both
    halves = np.concatenate([x[:, :rest].mean(axis=1), x[:, half:].mean(axis=1)], axis=1)
    return halves @ params["output"]["kernel"]


@pytest.mark.float64
@pytest.mark.parametrize("length", [28, 7])
def test_orthofls_resnet_is_its_definition(length):
    """The last stage has 4 positions for 28 steps, and 1 for 7."""
    model = from_flax(ResNet(3, BatchNorm, "orthofl", width=0.125, stages=(64, 128)), input_shape=(length, 2))
    rng, shapes = np.random.default_rng(3), jax.eval_shape(model.init, jax.random.key(0))
    variables = jax.tree.map(lambda leaf: jnp.asarray(rng.uniform(-1, 1, leaf.shape)), shapes)
    variables["batch_stats"] = jax.tree.map(lambda leaf: np.abs(leaf) + 0.5, variables["batch_stats"])
    x = rng.normal(size=(3, length, 2))
    out = jax.jit(model.apply)(variables, jnp.asarray(x))
    np.testing.assert_allclose(out, orthofls(jax.tree.map(np.asarray, variables), x), rtol=1e-10, atol=1e-10)


def test_means_of_parts_may_share_a_position():
    x = jnp.arange(5.0).reshape(1, 5, 1)
    assert part_means(x, 1).tolist() == [[2.0]]
    assert part_means(x, 2).tolist() == [[1.0, 3.0]]
    assert part_means(x, 3).tolist() == [[0.5, 2.0, 3.5]]
    assert part_means(x[:, :1], 2).tolist() == [[0.0, 0.0]]


def test_a_block_of_zeros_is_its_shortcut():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, 6, 4)), jnp.float32)
    for module, expected in (
        (Block(4, Nothing), nn.relu(x)),
        (Inverted(4, 8, 1, Nothing, True, nn.relu), x),
        (Inverted(4, 8, 1, Nothing, False, nn.relu), x),
        (Inverted(5, 8, 1, Nothing, False, nn.relu), jnp.zeros((2, 6, 6, 5))),
        (Inverted(4, 8, 2, Nothing, True, nn.relu), jnp.zeros((2, 3, 3, 4))),
    ):
        shapes = jax.eval_shape(module.init, jax.random.key(0), x)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        np.testing.assert_array_equal(jax.jit(module.apply)(zeros, x), expected)


@pytest.mark.parametrize("shape", [(2, 7, 3), (2, 6, 5, 2)])
def test_pooling_by_two_pads_with_nothing(shape):
    """Windows of three, centred on every second position, along each axis in turn."""
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32) - 5
    expected = x
    for axis in range(1, len(shape) - 1):
        n = shape[axis]
        windows = [range(max(0, i - 1), min(n, i + 2)) for i in range(0, n, 2)]
        expected = np.stack([expected.take(w, axis=axis).max(axis=axis) for w in windows], axis=axis)
    np.testing.assert_array_equal(pool_by_two(jnp.asarray(x)), expected)
