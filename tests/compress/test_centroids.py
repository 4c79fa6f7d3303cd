"""Weight clustering with pruning: against a plain k-means in NumPy, and identities."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.compress import is_weight, lookup, mask, random_tables, wcp
from tests.compress import textbook

KEY = jax.random.key(7)
TREE = {
    "conv": {"kernel": jnp.zeros((3, 3, 2, 4)), "bias": jnp.ones(4)},
    "dense": {"kernel": jnp.zeros((5, 7)), "bias": jnp.arange(7.0)},
    "norm": {"scale": jnp.ones(4)},
}


def model(kind="gaussian", seed=0):
    shapes = {"conv": (3, 3, 2, 4), "dense": (5, 7)}
    drawn = {
        name: jnp.asarray(textbook.vector(kind, int(np.prod(shape)), seed + i)).reshape(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {name: leaves | ({"kernel": drawn[name]} if name in drawn else {}) for name, leaves in TREE.items()}


@functools.cache
def encoded(k, **options):
    return jax.jit(lambda params, init, key: wcp(params, k, init=init, key=key, **options))


def test_leaves_are_clustered_by_the_stated_rule():
    params = model()
    clustered = encoded(4)(params, None, KEY)
    for layer in ("conv", "dense"):
        kernel = params[layer]["kernel"]
        assert clustered.tables[layer]["kernel"].shape == (4,)
        index = clustered.indices[layer]["kernel"]
        assert index.dtype == jnp.uint8 and index.shape == kernel.shape
        assert clustered.rest[layer]["kernel"] is None and clustered.tables[layer]["bias"] is None
    decoded = lookup(clustered)
    assert jax.tree.map(jnp.shape, decoded) == jax.tree.map(jnp.shape, params)
    np.testing.assert_array_equal(decoded["dense"]["bias"], params["dense"]["bias"])
    np.testing.assert_array_equal(decoded["norm"]["scale"], params["norm"]["scale"])
    kept = mask(clustered)
    np.testing.assert_array_equal(kept["conv"]["kernel"], np.asarray(decoded["conv"]["kernel"]) != 0)
    assert kept["norm"]["scale"].all() and jax.tree.structure(kept) == jax.tree.structure(params)
    assert is_weight(("a",), jnp.ones((2, 2))) and not is_weight(("a",), jnp.ones((2, 2), jnp.int32))


@settings(max_examples=30)
@given(kind=st.sampled_from(list(textbook.MAKERS)), seed=st.integers(0, 999), k=st.sampled_from([1, 2, 4, 200]))
def test_identities(kind, seed, k):
    params = model(kind, seed)
    clustered = encoded(k)(params, None, jax.random.key(seed))
    once = lookup(clustered)
    again = encoded(k, tolerance=0.0)(once, clustered.tables, KEY)
    for layer in ("conv", "dense"):
        table, x = np.asarray(clustered.tables[layer]["kernel"]), np.asarray(params[layer]["kernel"])
        assert table[0] == 0 and (np.diff(table[1:]) >= 0).all()
        x_hat = np.asarray(once[layer]["kernel"])
        np.testing.assert_array_equal(x_hat, lookup(again)[layer]["kernel"])
        nearest = np.abs(x[..., None] - table).min(axis=-1)
        np.testing.assert_allclose(np.abs(x - x_hat), nearest, atol=1e-6)


def test_a_random_start_has_a_zero_and_entries_of_the_layer():
    params = model()
    tables = random_tables(params, 9, KEY)
    table, x = np.asarray(tables["conv"]["kernel"]), np.asarray(params["conv"]["kernel"])
    assert table[0] == 0 and (np.diff(table[1:]) > 0).all() and np.isin(table[1:], x).all()
    same = encoded(9)(params, tables, None)
    jax.tree.map(np.testing.assert_array_equal, same, encoded(9)(params, None, KEY))


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (0, {"key": KEY}, "k = 0: must be a whole number from 1 to 256"),
        (257, {"key": KEY}, "k = 257"),
        (4, {}, "key = None: must be a random key"),
        (4, {"key": KEY, "tolerance": -1}, "tolerance = -1"),
        (4, {"key": KEY, "max_iter": -1}, "max_iter = -1"),
        (4, {"key": KEY, "reference": "printed"}, "reference = 'printed': unknown"),
    ],
)
def test_bad_options_are_refused(k, options, message):
    with pytest.raises(ValueError, match=message):
        wcp(model(), k, **options)
