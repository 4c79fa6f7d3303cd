"""The registry: sizes, gradients, dropout, losses, and that every model learns."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_async.models import METRICS, MODELS, cross_entropy, decoded, from_flax, hits, in_dtype, make
from tests.refusals import refusals

OTHERS = ["logistic", "mlp", "lenet5", "lenet5_orthofl", "lenet5_cifar", "cnn"]
IMAGES = ["alexnet:width=0.1", "alexnet:width=0.1,variant=full", "vgg11:width=0.1,norm=off,variant=full"]
SMALL = {"lenet5_cifar": (16, 16, 3), "cnn": (10, 10, 3)}


def small(name, **options):
    """The model for small images, so that the test is quick."""
    shape = SMALL.get(name, (16, 16, 1))
    return MODELS[name](input_shape=shape, **options), shape


def started(model, seed=0):
    """Params made by one compiled program; without it every initialiser would compile a dozen."""
    return jax.jit(model.init)(jax.random.key(seed))


@cache
def batch(shape, size=8):
    """Two classes: one half of the image differs in brightness."""
    rng = np.random.default_rng(0)
    y = np.arange(size) % 2
    x = rng.normal(size=(size, *shape)) * 0.3
    x[:, : shape[0] // 2] += np.where(y == 1, 1.0, -1.0).reshape(-1, 1, 1, 1)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)


def test_the_lowering_reaches_the_layers():
    programs = set()
    for lowering in ("lax", "im2col", "tiled"):
        model, shape = small("lenet5", lowering=lowering)
        params = jax.eval_shape(model.init, jax.random.key(0))
        programs.add(str(jax.make_jaxpr(model.apply)(params, batch(shape)[0])))
    assert len(programs) == 3


@pytest.mark.parametrize("spec", [*OTHERS, *IMAGES])
def test_some_models_have_dropout_and_only_with_a_key(spec):
    model = make(spec, input_shape=SMALL.get(spec, (16, 16, 1)))
    params, x = jax.eval_shape(model.init, jax.random.key(0)), batch(SMALL.get(spec, (16, 16, 1)))[0]
    has = spec == "cnn" or "full" in spec
    assert ("random_bits" in str(jax.make_jaxpr(model.apply)(params, x, jax.random.key(1)))) == has
    assert not has or "random_bits" not in str(jax.make_jaxpr(model.apply)(params, x))


def test_dropout_keeps_the_mean():
    """Inverted dropout at 0.25 and 0.5: kept entries are scaled up, so that the mean does not change."""
    model = from_flax(Dropped(), input_shape=(64,))
    out, other = (jax.jit(model.apply)(started(model), jnp.ones((1000, 64)), jax.random.key(n)) for n in (1, 2))
    assert not np.array_equal(out, other)
    assert set(np.unique(out)) == {0.0, 2.0}
    assert abs(float(out.mean()) - 1) < 0.02


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        self.param("unused", nn.initializers.zeros_init(), ())
        return nn.Dropout(0.5, deterministic=deterministic)(x)


@pytest.mark.float64
def test_loss_is_cross_entropy_of_each_example():
    rng = np.random.default_rng(7)
    logits, y = rng.normal(size=(5, 4)) * 3, rng.integers(0, 4, 5).astype(np.int32)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ours = cross_entropy(jnp.asarray(logits), jnp.asarray(y))
    np.testing.assert_allclose(ours, -np.log(probability[np.arange(5), y]), rtol=1e-12)
    gradient = jax.grad(lambda z: cross_entropy(z, jnp.asarray(y)).sum())(jnp.asarray(logits))
    np.testing.assert_allclose(gradient, probability - np.eye(4)[y], atol=1e-12)


def test_labels_in_eight_bits_are_not_those_of_later_classes():
    outputs, y = jnp.zeros((2, 300)).at[0, 259].set(9.0), jnp.array([3, 255], jnp.uint8)  # 259 is 3 in eight bits
    np.testing.assert_array_equal(cross_entropy(outputs, y), cross_entropy(outputs, y.astype(jnp.int32)))
    assert float(cross_entropy(outputs, y)[0]) > 9
    assert hits(outputs, y).tolist() == [False, False]
    assert METRICS["label_accuracy"]().values(outputs, y)["right"].tolist() == [0.0, 0.0]


def test_labels_of_long_sequences_are_counted_exactly_in_half_precision():
    y = jnp.ones((1, 301), jnp.int32)
    outputs = jnp.zeros((1, 301, 2), jnp.bfloat16).at[0, 1:, 1].set(1.0)
    np.testing.assert_allclose(hits(outputs, y), 300 / 301, rtol=1e-6)
    metric = METRICS["label_accuracy"]()
    np.testing.assert_allclose(metric.finish({k: v[0] for k, v in metric.values(outputs, y).items()}), 300 / 301, 1e-6)


def test_logistic_starts_at_the_uniform_guess():
    model, shape = small("logistic")
    x, y = batch(shape)
    losses = jax.jit(lambda params: model.loss(model.apply(params, x), y))(started(model))
    np.testing.assert_allclose(losses, np.log(10), rtol=1e-6)


def test_decoded_takes_raw_rows():
    model, shape = small("lenet5")
    raw = jnp.asarray(np.random.default_rng(8).integers(0, 256, (3, *shape)), jnp.uint8)
    params = started(model)

    def decode(rows):
        return rows.astype(jnp.float32) / 255

    by_hand = jax.jit(lambda params, raw: model.apply(params, decode(raw)))
    np.testing.assert_array_equal(jax.jit(decoded(model, decode).apply)(params, raw), by_hand(params, raw))


@pytest.mark.slow_cases("lenet5")
@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn"])
def test_bfloat16_computes_near_float32_and_keeps_float32_parameters(name):
    model, shape = small(name)
    x, y = batch(shape)
    params = started(model)
    low = in_dtype(model, jnp.bfloat16)
    out, full = jax.jit(low.apply)(params, x), jax.jit(model.apply)(params, x)
    assert out.dtype == jnp.float32
    assert not np.array_equal(out, full)
    np.testing.assert_allclose(out, full, atol=0.05 * float(jnp.abs(full).max()))
    gradient = jax.eval_shape(jax.grad(lambda p: low.loss(low.apply(p, x), y).mean()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}


test_bad_specs_are_named = refusals(
    ("lenet", "did you mean 'lenet5'"),
    ("mlp:hiden=3", "did you mean 'hidden'"),
    ("mlp:hidden=0", "hidden = 0"),
    ("mlp:hidden=20xx", "hidden = '20xx'"),
    ("mlp:hidden=20x\u00b2", "hidden = '20x\u00b2'"),
    ("mlp:hidden=20x10,layers=3", "layers = 3"),
    ("lenet5:lowering=fft", "lowering = 'fft'"),
    ("lenet5:num_classes=1", "num_classes = 1"),
    ("cnn:input_shape=28", "input_shape = 28"),
    ("cnn:lowering=winograt", "did you mean 'winograd'"),
    ("alexnet:variant=wide", "variant = 'wide'"),
    ("alexnet:width=0", "width = 0"),
    ("alexnet:lowering=fft", "lowering = 'fft'"),
    ("alexnet:num_classes=1", "num_classes = 1"),
    ("alexnet:variant=full,input_shape=4", "input_shape"),
    ("resnet18:norm=layer", "norm = 'layer'"),
    ("resnet18:norm=grup", "did you mean 'group'"),
    ("resnet18:momentum=1.0", "momentum = 1.0"),
    ("resnet18:norm=local,momentum=0.5", "momentum = 0.5: must be left out"),
    ("resnet18:variant=orthofl", "variant = 'orthofl': must be one of small, full"),
    ("resnet18_1d:variant=released", "variant = 'released': must be one of small, full, orthofl"),
    ("resnet18_1d:input_shape=128", "input_shape = 128"),
    ("vgg11:norm=group,groups=0", "groups = 0"),
    ("vgg11:groups=4", "groups = 4: must be left out: norm 'batch' does not take it"),
    ("vgg11:norm=off,momentum=0.5", "momentum = 0.5: must be left out"),
    ("vgg11:variant=tiny", "variant = 'tiny'"),
    ("vgg11:lowering=fft", "lowering = 'fft'"),
    ("mobilenetv2:width=0", "width = 0"),
    ("char_gru:hidden=0", "hidden = 0"),
    ("char_gru:last=2", "last = 2"),
    ("char_transformer:heads=3", "width = 64: must be a multiple of heads = 3"),
    by=make,
)


test_inputs_of_a_wrong_shape_are_refused = refusals(
    ("lenet5", (10, 10, 1), r"input_shape = \(10, 10, 1\)"),
    ("alexnet:variant=full", (6, 6, 1), r"input_shape = \(6, 6, 1\): must be at least 7 x 7"),
    ("char_gru", (28, 28, 1), r"input_shape = \(28, 28, 1\): must be \(length,\)"),
    by=lambda spec, shape: make(spec, input_shape=shape),
)
