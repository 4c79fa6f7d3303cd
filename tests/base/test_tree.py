"""Pytree helpers against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base import tree


def plain(value):
    """NumPy leaves, keys by their data."""

    def leaf(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(leaf, value)


@pytest.mark.float64
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=7, max_size=7))
def test_norm_is_numpys_over_all_leaves(values):
    value = {"a": jnp.asarray(values[:6]).reshape(2, 3), "b": [jnp.asarray(values[6])]}
    tiny = 1e-150  # squares of smaller numbers underflow
    np.testing.assert_allclose(tree.norm(value), np.linalg.norm(values), rtol=1e-12, atol=tiny)


def test_norm_sums_in_the_default_float_type():
    """1,600 ones in bfloat16: a sum in bfloat16 would stop at 256."""
    value = {"w": jnp.ones((40, 40), jnp.bfloat16), "n": jnp.full((), 3, jnp.int32)}
    assert tree.norm(value).dtype == jnp.float32
    np.testing.assert_allclose(tree.norm(value), np.sqrt(1609), rtol=1e-6)
    assert tree.norm(()) == 0.0
    assert not np.isfinite(tree.norm({"a": jnp.array([1.0, np.nan])}))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_stack_zeros_makes_rows_of_every_type_keys_included(impl):
    one = {
        "w": jnp.ones((2, 3), jnp.bfloat16),
        "n": jnp.int32(4),
        "flag": jnp.bool_(True),
        "key": jax.random.key(1, impl=impl),
        "keys": jax.random.split(jax.random.key(1, impl=impl), 2),
    }
    for value in (one, jax.eval_shape(lambda: one)):
        rows = tree.stack_zeros(value, 4)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), rows)
        assert shapes == jax.tree.map(lambda leaf: ((4, *leaf.shape), leaf.dtype), one)
        assert all(not leaf.any() for leaf in jax.tree.leaves(plain(rows)))
        again = tree.gather(tree.scatter(rows, jnp.int32(2), one), jnp.int32(2))
        jax.tree.map(np.testing.assert_array_equal, plain(again), plain(one))


def test_optimize_steps_scales_and_keeps_dtypes():
    params = {"w": jnp.array([1.0, 2.0]), "h": jnp.ones(3, jnp.bfloat16)}
    gradient = jax.tree.map(jnp.ones_like, params)
    optimizer = optax.sgd(0.5, momentum=0.9)
    after, state = tree.optimize(optimizer, gradient, optimizer.init(params), params)
    np.testing.assert_allclose(after["w"], [0.5, 1.5])
    after, state = tree.optimize(optimizer, gradient, state, after, jnp.float32(0.1))
    np.testing.assert_allclose(after["w"], [0.5 - 0.1 * 0.95, 1.5 - 0.1 * 0.95], rtol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, params)


@pytest.mark.parametrize("make", [optax.adam, optax.adagrad, lambda lr: optax.sgd(lr, momentum=lr), optax.yogi])
def test_optimize_keeps_the_states_dtypes_with_traced_hyperparameters(make):
    params = {"h": jnp.ones(3, jnp.bfloat16)}

    def states(lr):
        state = make(lr).init(params)
        return state, tree.optimize(make(lr), params, state, params)[1]

    before, after = jax.eval_shape(states, jnp.float32(0.1))
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [leaf.dtype for leaf in jax.tree.leaves(before)]


def test_optimize_works_with_state_that_holds_a_key():
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1.0))
    params = {"w": jnp.zeros(4)}
    after, state = tree.optimize(optimizer, params, optimizer.init(params), params)
    again, _ = tree.optimize(optimizer, params, state, params)
    assert np.abs(after["w"]).min() > 0 and np.all(again["w"] != after["w"])


def test_private_leaves_are_left_out_of_models_and_of_their_weights_alone():
    """An upload may hold a control variate beside the model, which has no running statistics."""
    weights = {"body": {"w": np.ones(2)}, "output": {"w": np.ones(3)}}
    model = {"params": weights, "batch_stats": {"body": {"mean": np.ones(2)}}}
    sent = tree.shared((model, {"params": weights}, np.ones(1)), model, lambda path: "output" in path)
    assert tree.num_scalars(sent) == 4 + 2 + 1
    assert tree.num_scalars(tree.shared((weights, {"body": {"w": np.ones(2)}}), weights, lambda path: True)) == 0
    assert tree.num_scalars(tree.shared({"other": np.ones(5)}, weights, lambda path: True)) == 5


def test_sizes():
    value = {"w": jnp.zeros((2, 3)), "h": jnp.zeros(5, jnp.bfloat16), "n": jnp.int32(0), "none": ()}
    assert tree.num_scalars(value) == 12
    assert tree.num_bytes(value) == 24 + 10 + 4
    assert tree.num_bytes(jax.eval_shape(lambda: value)) == 38
    assert tree.num_scalars(()) == tree.num_bytes(()) == 0


def test_columns_say_what_they_lack():
    columns = tree.Columns(time=np.zeros(2), loss=np.ones(2))
    assert columns == dict(columns) and columns.get("accuracy") is None and "accuracy" not in columns
    with pytest.raises(KeyError, match=r"'validation_loss': must be one of time, loss; .* the setting validation"):
        columns["validation_loss"]
    with pytest.raises(KeyError, match=r"'los': must be one of time, loss\"$"):
        columns["los"]
    with pytest.raises(KeyError, match=r"'energi': must be one of time, energy\"$"):
        tree.Columns(time=1, energy=2)["energi"]
    doubled = jax.tree.map(lambda column: 2 * column, columns)
    assert isinstance(doubled, tree.Columns) and list(doubled) == ["time", "loss"] and doubled["loss"][0] == 2
    assert [tree.path_of(path) for path, _ in jax.tree.leaves_with_path(columns)] == [("time",), ("loss",)]
