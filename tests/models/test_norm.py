"""Normalisation against float64 NumPy: masks, gradients, running statistics, and how models carry them."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import tree
from fedjax_async.models import NORMS, BatchNorm, GroupNorm, decoded, from_flax, in_dtype, rematerialised
from fedjax_async.models.norm import is_statistic, normalisation

EPS = 1e-5


def textbook(x, mask, scale, bias):
    """Output, and mean, biased variance and count over the rows with mask 1."""
    valid = x[mask.astype(bool)].reshape(-1, x.shape[-1])
    mean, var = valid.mean(axis=0), valid.var(axis=0)
    return (x - mean) / np.sqrt(var + EPS) * scale + bias, mean, var, len(valid)


def textbook_gradient(x, mask, scale, dy):
    """With respect to x, scale and bias, from the known formula; ``dy`` is zero in padded rows."""
    axes, count = tuple(range(x.ndim - 1)), x[mask.astype(bool)][..., 0].size
    _, mean, var, _ = textbook(x, mask, 1.0, 0.0)
    unit = (x - mean) / np.sqrt(var + EPS)
    dscale, dbias = (dy * unit).sum(axis=axes), dy.sum(axis=axes)
    dx = scale / np.sqrt(var + EPS) * (dy - dbias / count - unit * dscale / count)
    return dx * mask.reshape(-1, *(1,) * (x.ndim - 1)), dscale, dbias


def started(module, x, seed=0):
    """Variables with made-up scale, bias and statistics, in the dtype of ``x``."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    return jax.tree.map(lambda p: jnp.asarray(rng.uniform(0.5, 2.0, p.shape), x.dtype), shapes)


@pytest.mark.float64
@settings(max_examples=4)
@given(
    shape=st.sampled_from([(5, 3), (4, 6, 2), (3, 2, 4, 3), (3, 1)]),  # the last also with a single number
    padded=st.integers(0, 2),
    shift=st.sampled_from([0.0, 100.0]),
    momentum=st.sampled_from([0.9, 0.6]),
    seed=st.integers(0, 99),
)
def test_batch_norm_is_the_textbooks(shape, padded, shift, momentum, seed):
    """Running statistics are PyTorch's, with m = 1 - momentum: (1 - m) running + m new, and the unbiased variance."""
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=shape) + shift, (np.arange(shape[0]) < shape[0] - padded).astype(float)
    dy = rng.normal(size=shape) * mask.reshape(-1, *(1,) * (len(shape) - 1))
    module = BatchNorm(momentum=momentum)
    variables = started(module, jnp.asarray(x))
    fixed, m = variables["batch_stats"], 1 - momentum

    @jax.jit
    def run(x, params, dy):
        def total(x, params):
            variables = {"params": params, "batch_stats": fixed}
            out, moved = module.apply(variables, x, True, jnp.asarray(mask), mutable=["batch_stats"])
            return (out * dy).sum(), (out, moved["batch_stats"])

        return jax.grad(total, argnums=(0, 1), has_aux=True)(x, params)

    gradients, (out, moved) = run(jnp.asarray(x), variables["params"], jnp.asarray(dy))
    scale, bias = (np.asarray(variables["params"][name]) for name in ("scale", "bias"))
    expected, mean, var, count = textbook(x, mask, scale, bias)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-9)
    unbiased = var * count / max(count - 1, 1)
    np.testing.assert_allclose(moved["mean"], (1 - m) * fixed["mean"] + m * mean, rtol=1e-12)
    np.testing.assert_allclose(moved["var"], (1 - m) * fixed["var"] + m * unbiased, rtol=1e-9)
    evaluated = (x - np.asarray(fixed["mean"])) / np.sqrt(np.asarray(fixed["var"]) + EPS) * scale + bias
    np.testing.assert_allclose(module.apply(variables, jnp.asarray(x)), evaluated, rtol=1e-9, atol=1e-9)
    dx, dscale, dbias = textbook_gradient(x, mask, scale, dy)
    np.testing.assert_allclose(gradients[0], dx, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(gradients[1]["scale"], dscale, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(gradients[1]["bias"], dbias, rtol=1e-10, atol=1e-10)


def test_padded_rows_do_not_matter_whatever_they_hold_and_a_negative_running_variance_counts_as_zero():
    module, mask = BatchNorm(), jnp.array([True, True, False, True])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 2)), jnp.float32)
    variables = started(module, x)

    @jax.jit
    def run(x):
        out, moved = module.apply(variables, x, True, mask, mutable=["batch_stats"])
        return out[jnp.array([0, 1, 3])], moved

    for junk in (0.0, 1e6, jnp.nan):
        jax.tree.map(np.testing.assert_array_equal, run(x.at[2].set(junk)), run(x))
    statistics = {"mean": jnp.zeros(1), "var": jnp.full(1, -0.3)}
    variables = {"params": {"scale": jnp.ones(1), "bias": jnp.zeros(1)}, "batch_stats": statistics}
    np.testing.assert_allclose(module.apply(variables, jnp.ones((2, 1))), 1 / np.sqrt(EPS), rtol=1e-5)


@pytest.mark.float64
@pytest.mark.parametrize(("channels", "asked", "groups"), [(6, 32, 6), (6, 4, 3), (7, 3, 1), (8, 4, 4)])
def test_group_norm_is_the_textbooks(channels, asked, groups):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 4, channels)) * 2 + 1
    module = GroupNorm(groups=asked)
    variables = started(module, jnp.asarray(x))
    out = jax.jit(module.apply)(variables, jnp.asarray(x))
    scale, bias = (np.asarray(variables["params"][name]) for name in ("scale", "bias"))
    cut = x.reshape(3, 4, groups, -1)
    unit = (cut - cut.mean(axis=(1, 3), keepdims=True)) / np.sqrt(cut.var(axis=(1, 3), keepdims=True) + EPS)
    np.testing.assert_allclose(out, unit.reshape(x.shape) * scale + bias, rtol=1e-10, atol=1e-10)


class Small(nn.Module):
    """One dense layer, normalised."""

    norm: str = "batch"

    @nn.compact
    def __call__(self, x, train: bool = False, mask=None):
        x = normalisation(self.norm).layer(name="norm")(nn.Dense(4, name="fc")(x), train, mask)
        return nn.Dense(3, name="output")(nn.relu(x))


X = jnp.asarray(np.random.default_rng(3).normal(size=(5, 6)), jnp.float32)
MASK = jnp.array([1, 1, 1, 1, 0], bool)
KEY = jax.random.key(0)


@cache
def small(norm="batch"):
    """The compiled model, and params with the statistics of one step."""
    model = from_flax(Small(norm), input_shape=(6,), private=normalisation(norm).private)
    train = None if model.train is None else jax.jit(model.train)
    model = model._replace(apply=jax.jit(model.apply), train=train)
    params = jax.jit(model.init)(jax.random.key(1))
    return model, params if model.train is None else model.train(params, X, KEY, MASK)[1]


@pytest.mark.parametrize("norm", NORMS)
def test_models_have_statistics_only_where_there_are_any(norm):
    model, params = small(norm)
    has = norm in ("batch", "local")
    assert (model.train is not None) == has
    assert model.private is (is_statistic if norm == "local" else None)
    assert set(params) == ({"params", "batch_stats"} if has else {"fc", "output"} | ({"norm"} & set(params)))
    assert model.apply(params, X).shape == (5, 3)
    assert type(params) is dict


def test_apply_uses_the_running_statistics_and_train_the_batchs():
    model, params = small()
    alone = model.apply(params, X[:1])
    np.testing.assert_allclose(model.apply(params, X)[:1], alone, rtol=1e-5)  # no row depends on another
    out, _ = model.train(params, X, KEY, MASK)
    assert float(jnp.abs(out[:1] - alone).max()) > 0.01
    whole, moved = model.train(params, X, KEY, jnp.ones(5, bool))
    np.testing.assert_allclose(model.apply(params, X, KEY), whole, rtol=1e-6)  # a key: training behaviour
    assert not np.array_equal(moved["batch_stats"]["norm"]["mean"], params["batch_stats"]["norm"]["mean"])
    jax.tree.map(np.testing.assert_array_equal, moved["params"], params["params"])


def test_local_statistics_are_not_used_by_apply():
    model, params = small("local")
    shared, _ = small("batch")
    other = {**params, "batch_stats": jax.tree.map(lambda s: np.asarray(s) + 7, params["batch_stats"])}
    np.testing.assert_array_equal(model.apply(params, X), model.apply(other, X))
    np.testing.assert_allclose(model.apply(params, X), shared.train(params, X, KEY, jnp.ones(5, bool))[0], rtol=1e-6)
    # the same network with shared statistics evaluates a client's own
    assert not np.array_equal(shared.apply(params, X), shared.apply(other, X))


def loss_of(train):
    """The loss of a batch as a function of the params."""
    model, _ = small()
    return lambda params: model.loss(train(params, X, KEY, MASK)[0], jnp.zeros(5, jnp.int32)).sum()


def test_gradients_do_not_reach_the_statistics():
    model, params = small()
    gradient = jax.jit(jax.grad(loss_of(model.train)))(params)
    assert float(tree.norm(gradient["batch_stats"])) == 0.0 < float(tree.norm(gradient["params"]))
    through = jax.jit(jax.grad(lambda p: tree.norm(model.train(p, X, KEY, MASK)[1]["batch_stats"])))(params)
    assert float(tree.norm(through["params"])) == 0.0


def test_wrappers_carry_train_through():
    model, params = small()
    want = model.train(params, X, KEY, MASK)
    raw = decoded(model, lambda rows: rows / 2)
    jax.tree.map(np.testing.assert_array_equal, raw.train(params, 2 * X, KEY, MASK), want)
    again = rematerialised(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again.train(params, X, KEY, MASK), want)
    slopes = (jax.jit(jax.grad(loss_of(one.train)))(params) for one in (again, model))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *slopes)
    assert decoded(small("group")[0], lambda rows: rows).train is None
    assert in_dtype(decoded(small("local")[0], lambda rows: rows), jnp.bfloat16).private is is_statistic


def test_bfloat16_leaves_statistics_in_float32():
    model, params = small()
    low = in_dtype(model, jnp.bfloat16)
    (out, moved), (full, precise) = low.train(params, X, KEY, MASK), model.train(params, X, KEY, MASK)
    assert {leaf.dtype for leaf in jax.tree.leaves((out, moved))} == {jnp.dtype("float32")}
    assert not np.array_equal(out, full)
    np.testing.assert_allclose(out, full, atol=0.05 * float(jnp.abs(full).max()))
    jax.tree.map(np.testing.assert_array_equal, moved["params"], params["params"])
    for name in ("mean", "var"):
        have, want = moved["batch_stats"]["norm"][name], precise["batch_stats"]["norm"][name]
        np.testing.assert_allclose(have, want, rtol=0.02, atol=0.01)
    np.testing.assert_allclose(low.apply(params, X), model.apply(params, X), atol=0.1)
