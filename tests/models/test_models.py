"""The registry: sizes, gradients, dropout and losses; the character models against NumPy in float64."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_async.data.characters import VOCABULARY as LETTERS
from fedjax_async.models import (
    METRICS,
    char_gru,
    char_transformer,
    cross_entropy,
    decoded,
    from_flax,
    hits,
    in_dtype,
    make,
)
from fedjax_async.models.characters import VOCABULARY
from tests.refusals import last_options, refusals

OTHERS = ["logistic", "mlp", "lenet5", "lenet5_orthofl", "lenet5_cifar", "cnn"]
IMAGES = ["alexnet:width=0.1", "alexnet:width=0.1,variant=full", "vgg11:width=0.1,norm=off,variant=full"]
SMALL = {"lenet5_cifar": (16, 16, 3), "cnn": (10, 10, 3)}


def small(spec):
    """The model for small images, so that the test is quick."""
    shape = SMALL.get(spec, (16, 16, 1))
    return make(spec, input_shape=shape), shape


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
        model, shape = small(f"lenet5:lowering={lowering}")
        params = jax.eval_shape(model.init, jax.random.key(0))
        programs.add(str(jax.make_jaxpr(model.apply)(params, batch(shape)[0])))
    assert len(programs) == 3


@pytest.mark.parametrize("spec", [*OTHERS, *IMAGES])
def test_some_models_have_dropout_and_only_with_a_key(spec):
    model, shape = small(spec)
    params, x = jax.eval_shape(model.init, jax.random.key(0)), batch(shape)[0]
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


def test_labels_in_eight_bits_and_sequences_in_half_precision_are_counted_exactly():
    metric = METRICS["label_accuracy"]()
    outputs, y = jnp.zeros((2, 300)).at[0, 259].set(9.0), jnp.array([3, 255], jnp.uint8)  # 259 is 3 in eight bits
    np.testing.assert_array_equal(cross_entropy(outputs, y), cross_entropy(outputs, y.astype(jnp.int32)))
    assert float(cross_entropy(outputs, y)[0]) > 9
    assert hits(outputs, y).tolist() == [False, False]
    assert metric.values(outputs, y)["right"].tolist() == [0.0, 0.0]
    long, halves = jnp.ones((1, 301), jnp.int32), jnp.zeros((1, 301, 2), jnp.bfloat16).at[0, 1:, 1].set(1.0)
    np.testing.assert_allclose(hits(halves, long), 300 / 301, rtol=1e-6)
    shares = {name: values[0] for name, values in metric.values(halves, long).items()}
    np.testing.assert_allclose(metric.finish(shares), 300 / 301, 1e-6)


def test_logistic_starts_at_the_uniform_guess_and_decoded_takes_raw_rows():
    model, shape = small("logistic")
    x, y = batch(shape)
    losses = jax.jit(lambda params: model.loss(model.apply(params, x), y))(started(model))
    np.testing.assert_allclose(losses, np.log(10), rtol=1e-6)
    model, shape = small("mlp")
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


WRONG = """
mlp:hidden=0 mlp:hidden=20xx mlp:hidden=20x\u00b2 mlp:hidden=20x10,layers=3 lenet5:lowering=fft lenet5:num_classes=1
cnn:input_shape=28 alexnet:variant=wide alexnet:width=0 alexnet:lowering=fft alexnet:num_classes=1 resnet18:norm=layer
resnet18:momentum=1.0 resnet18_1d:input_shape=128 vgg11:norm=group,groups=0 vgg11:variant=tiny vgg11:lowering=fft
mobilenetv2:width=0 char_gru:hidden=0 char_gru:last=2
"""
test_bad_specs_are_named = refusals(
    *last_options(WRONG),
    ("lenet", "did you mean 'lenet5'"),
    ("mlp:hiden=3", "did you mean 'hidden'"),
    ("cnn:lowering=winograt", "did you mean 'winograd'"),
    ("alexnet:variant=full,input_shape=4", "input_shape"),
    ("resnet18:norm=grup", "did you mean 'group'"),
    ("resnet18:norm=local,momentum=0.5", "momentum = 0.5: must be left out"),
    ("resnet18:variant=orthofl", "variant = 'orthofl': must be one of small, full"),
    ("resnet18_1d:variant=released", "variant = 'released': must be one of small, full, orthofl"),
    ("vgg11:groups=4", "groups = 4: must be left out: norm 'batch' does not take it"),
    ("vgg11:norm=off,momentum=0.5", "momentum = 0.5: must be left out"),
    ("char_transformer:heads=3", "width = 64: must be a multiple of heads = 3"),
    by=make,
)


test_inputs_of_a_wrong_shape_are_refused = refusals(
    ("lenet5", (10, 10, 1), r"input_shape = \(10, 10, 1\)"),
    ("alexnet:variant=full", (6, 6, 1), r"input_shape = \(6, 6, 1\): must be at least 7 x 7"),
    ("char_gru", (28, 28, 1), r"input_shape = \(28, 28, 1\): must be \(length,\)"),
    by=lambda spec, shape: make(spec, input_shape=shape),
)


@pytest.mark.parametrize("columns", [1, 2])
def test_linear_takes_one_number_an_example(columns):
    """One column broadcast, and the error spoke of a mean; two ended with JAX's words."""
    with pytest.raises(ValueError, match=rf"^targets of linear = 'shape \[4, {columns}\]': must be one number an"):
        make("linear", input_shape=(3,)).loss(jnp.zeros(4), jnp.zeros((4, columns)))


V, L = 6, 5
X = np.array([[2, 3, 4, 5, 1], [3, 3, 2, 0, 0]], np.uint8)
Y = np.array([[3, 4, 5, 1, 2], [3, 2, 0, 0, 0]], np.int32)
MODELS = {
    "gru": lambda **options: char_gru(hidden=3, embedding=2, vocabulary=V, input_shape=(L,), **options),
    "transformer": lambda **options: char_transformer(
        width=4, heads=2, layers=1, vocabulary=V, input_shape=(L,), **options
    ),
}


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def params_of(model, seed=0):
    """Random parameters in float64, biases too."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) * 0.5, shapes)


@pytest.mark.float64
def test_loss_and_accuracy_are_of_examples_and_leave_padding_of_sequences_out():
    rng = np.random.default_rng(1)
    z = rng.normal(size=(3, L, V)) * 2
    y = np.concatenate([Y, np.zeros((1, L), np.int32)])  # the last text is all padding
    there = y > 0
    shares = there / np.maximum(there.sum(1), 1)[:, None]
    losses = -np.log(np.take_along_axis(softmax(z), y[..., None], -1)[..., 0])
    ends = z[:, 0], y[:, 0], losses[:, 0]
    for outputs, labels, wanted, weights in ((z, y, (losses * shares).sum(1), shares), (*ends, np.ones(3))):
        found = cross_entropy(jnp.asarray(outputs), jnp.asarray(labels))
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        gradient = jax.grad(lambda z, y=labels: cross_entropy(z, jnp.asarray(y)).sum())(jnp.asarray(outputs))
        slope = (softmax(outputs) - np.eye(V)[labels]) * weights[..., None]
        np.testing.assert_allclose(gradient, slope, atol=1e-12)
    right = (z.argmax(-1) == y) & there
    np.testing.assert_allclose(hits(jnp.asarray(z), jnp.asarray(y)), (right * shares).sum(1))
    metric = METRICS["label_accuracy"]()
    means = jax.tree.map(jnp.mean, metric.values(jnp.asarray(z), jnp.asarray(y)))
    np.testing.assert_allclose(metric.finish(means), right.sum() / there.sum())
    with pytest.raises(ValueError, match=r"one label per example \(label_accuracy is for sequences\)"):
        METRICS["macro_f1"]().values(jnp.asarray(z), jnp.asarray(y))


def gru_by_hand(p, x):
    h, out = np.zeros((len(x), 3)), []
    kernel = {gate: p["gru1"][f"recurrent_{gate}"] for gate in "rzn"}
    for t in range(L):
        given = p["embedding"]["table"][x[:, t]] @ p["gru1"]["input"]["kernel"] + p["gru1"]["input"]["bias"]
        r, z = (1 / (1 + np.exp(-(given[:, 3 * i : 3 * i + 3] + h @ kernel[gate]))) for i, gate in enumerate("rz"))
        n = np.tanh(given[:, 6:] + r * (h @ kernel["n"] + p["gru1"]["recurrent_bias"]))
        h = (1 - z) * n + z * h
        out.append(h @ p["output"]["kernel"] + p["output"]["bias"])
    return np.stack(out, axis=1)


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def norm(p, x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def transformer_by_hand(p, x):
    h, block = p["embedding"]["table"][x] + p["positions"], p["block1"]
    qkv = dense(block["attention_input"], norm(block["norm1"], h))
    mixed = np.zeros_like(h)
    for head in (slice(0, 2), slice(2, 4)):
        q, k, v = (qkv[..., 4 * i : 4 * i + 4][..., head] for i in range(3))
        for t in range(L):  # position t sees itself and what comes before
            weights = softmax(np.einsum("bd,bmd->bm", q[:, t], k[:, : t + 1]) / np.sqrt(2))
            mixed[:, t, head] = np.einsum("bm,bmd->bd", weights, v[:, : t + 1])
    h = h + dense(block["attention_output"], mixed)
    inner = dense(block["fc1"], norm(block["norm2"], h))
    inner = 0.5 * inner * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
    return dense(p["output"], norm(p["norm"], h + dense(block["fc2"], inner)))


@pytest.mark.float64
@pytest.mark.parametrize(("name", "by_hand"), [("gru", gru_by_hand), ("transformer", transformer_by_hand)])
def test_outputs_equal_the_formulas_and_the_end_is_the_last_character(name, by_hand):
    assert len(LETTERS) == VOCABULARY == 82  # that of the data
    model, last = MODELS[name](num_classes=V), MODELS[name](num_classes=V, last=True)
    params = params_of(model)
    outputs = jax.jit(model.apply)(params, jnp.asarray(X))
    np.testing.assert_allclose(outputs, by_hand(params, X), rtol=1e-9, atol=1e-9)
    ends = jax.jit(last.apply)(params, jnp.asarray(X))
    np.testing.assert_allclose(ends, [outputs[0, 4], outputs[1, 2]], rtol=1e-12)
