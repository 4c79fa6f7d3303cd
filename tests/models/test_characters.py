"""Labels of sequences and the character models, against NumPy in float64: loss, GRU, causal attention, the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.data.characters import VOCABULARY as LETTERS
from fedjax_async.models import METRICS, char_gru, char_transformer, cross_entropy, hits
from fedjax_async.models.characters import VOCABULARY

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
def test_loss_and_accuracy_of_sequences_leave_padding_out():
    rng = np.random.default_rng(1)
    z = rng.normal(size=(3, L, V)) * 2
    y = np.concatenate([Y, np.zeros((1, L), np.int32)])  # the last text is all padding
    p, there = softmax(z), y > 0
    counts = np.maximum(there.sum(1), 1)
    losses = -np.log(np.take_along_axis(p, y[..., None], -1)[..., 0])
    np.testing.assert_allclose(
        cross_entropy(jnp.asarray(z), jnp.asarray(y)), (losses * there).sum(1) / counts, rtol=1e-12
    )
    gradient = jax.grad(lambda z: cross_entropy(z, jnp.asarray(y)).sum())(jnp.asarray(z))
    np.testing.assert_allclose(gradient, (p - np.eye(V)[y]) * (there / counts[:, None])[..., None], atol=1e-12)
    right = (z.argmax(-1) == y) & there
    np.testing.assert_allclose(hits(jnp.asarray(z), jnp.asarray(y)), right.sum(1) / counts)
    metric = METRICS["label_accuracy"]()
    means = jax.tree.map(jnp.mean, metric.values(jnp.asarray(z), jnp.asarray(y)))
    np.testing.assert_allclose(metric.finish(means), right.sum() / there.sum())


def test_a_metric_of_examples_refuses_sequences():
    with pytest.raises(ValueError, match=r"one label per example \(label_accuracy is for sequences\)"):
        METRICS["macro_f1"]().values(jnp.zeros((2, L, V)), jnp.asarray(Y))


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
    model, last = MODELS[name](num_classes=V), MODELS[name](num_classes=V, last=True)
    params = params_of(model)
    outputs = jax.jit(model.apply)(params, jnp.asarray(X))
    np.testing.assert_allclose(outputs, by_hand(params, X), rtol=1e-9, atol=1e-9)
    ends = jax.jit(last.apply)(params, jnp.asarray(X))
    np.testing.assert_allclose(ends, [outputs[0, 4], outputs[1, 2]], rtol=1e-12)


def test_the_vocabulary_is_that_of_the_data():
    assert len(LETTERS) == VOCABULARY == 82
