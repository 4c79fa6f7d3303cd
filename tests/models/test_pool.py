"""Pools equal flax's in values and gradients, ties included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.models import avg_pool, max_pool

PAIRS = {"max": (max_pool, nn.max_pool), "avg": (avg_pool, nn.avg_pool)}


@pytest.mark.slow_cases("avg")
@pytest.mark.float64
@settings(max_examples=8)
@given(
    size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    window=st.sampled_from([(2, 2), (3, 3), (2, 3)]),
    strides=st.sampled_from([None, (2, 2), (1, 2)]),
    padding=st.sampled_from(["VALID", "SAME"]),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("name", PAIRS)
def test_equals_flax(name, size, window, strides, padding, seed):
    """Whole numbers 0, 1, 2: most windows have ties."""
    ours, theirs = PAIRS[name]
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(0, 3, (2, *size, 3)).astype(np.float64))
    shape = jax.eval_shape(lambda x: ours(x, window, strides, padding), x).shape
    weight = jnp.asarray(rng.normal(size=shape))

    def value_and_gradient(pool):
        def run(x, weight):
            out, back = jax.vjp(pool, x)
            return out, back(weight)[0]

        return jax.jit(run)(x, weight)

    out, gradient = value_and_gradient(lambda x: ours(x, window, strides, padding))
    with jax.numpy_dtype_promotion("standard"):  # flax's avg_pool divides by a NumPy integer
        expected = value_and_gradient(lambda x: theirs(x, window, strides or window, padding))
    np.testing.assert_allclose(out, expected[0], rtol=1e-14)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-12, atol=1e-14)


def test_ties_go_to_the_first_entry():
    x = jnp.ones((1, 2, 2, 1))
    gradient = jax.jit(jax.grad(lambda x: max_pool(x).sum()))(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1, 0], [0, 0]])


@pytest.mark.float64
def test_forward_mode_agrees_with_reverse_mode():
    rng = np.random.default_rng(0)
    x, v = jnp.asarray(rng.normal(size=(2, 1, 4, 4, 2)))
    _, along = jax.jit(lambda x, v: jax.jvp(lambda x: (max_pool(x) ** 2).sum(), (x,), (v,)))(x, v)
    back = jax.jit(jax.grad(lambda x: (max_pool(x) ** 2).sum()))(x)
    np.testing.assert_allclose(along, np.vdot(back, v), rtol=1e-12)


def test_a_nan_is_not_lost():
    x = jnp.ones((1, 2, 2, 1)).at[0, 1, 0, 0].set(jnp.nan)
    assert jnp.isnan(max_pool(x)).all()
    assert jnp.isnan(avg_pool(x)).all()
