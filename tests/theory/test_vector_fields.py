"""Antisymmetry, dense and from random pairs, against NumPy; the cost and the standard error of the second form."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_async.theory.vector_fields import (
    antisymmetry,
    curl,
    displacement,
    estimate_antisymmetry,
    estimate_curl,
    gradient_map,
    is_k_conservative,
    iterate,
)
from tests.refusals import refusals

MAPS = 50

pytestmark = pytest.mark.float64


def map_of(inner, outer, x):
    """A smooth map of trees like ``x`` that is no gradient."""
    _, unravel = ravel_pytree(x)

    def field(x):
        flat = ravel_pytree(x)[0]
        return unravel(flat - 0.3 * (outer @ jnp.tanh(inner @ flat)))

    return field


def random_maps(dim):
    """The arguments of ``MAPS`` maps, stacked."""
    rng = np.random.default_rng(0)
    inner, outer = (jnp.asarray(rng.standard_normal((MAPS, dim, dim)) / dim**0.5) for _ in range(2))
    a, b = rng.standard_normal((MAPS, dim // 3, 2)), rng.standard_normal((MAPS, dim // 3))
    return inner, outer, {"a": jnp.asarray(a), "b": jnp.asarray(b)}


def random_map():
    inner, outer, x = jax.tree.map(lambda leaf: leaf[0], random_maps(12))
    return map_of(inner, outer, x), x


def test_fields_are_applied_k_times_and_gradients_step_downhill():
    """The learning rate of a gradient map may be a tracer."""
    field, x = random_map()
    again = x
    for k in range(5):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-14), iterate(field, k)(x), again)
        again = field(again)
    x = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}
    moved = jax.jit(lambda gamma: gradient_map(lambda x: jnp.sum(x["w"] ** 2) * x["b"], gamma)(x))(0.1)
    np.testing.assert_allclose(moved["w"], [1 - 0.6, -2 + 1.2])
    np.testing.assert_allclose(moved["b"], 3 - 0.5)


@pytest.mark.parametrize("k", [1, 3])
def test_the_matrix_free_antisymmetry_equals_the_dense_one_on_50_maps(k):
    """From D pairs on it is exact, so chance plays no part."""

    def both(key, inner, outer, x):
        field = map_of(inner, outer, x)
        return antisymmetry(field, k, x), estimate_antisymmetry(key, field, k, x, pairs=12)

    dense, free = jax.jit(jax.vmap(both))(jax.random.split(jax.random.key(0), MAPS), *random_maps(12))
    assert dense.shape == (MAPS,) and dense.min() > 0.1
    np.testing.assert_allclose(free.value, dense, rtol=1e-11)
    assert not np.any(free.standard_error)


def test_fewer_pairs_are_as_far_off_as_the_standard_error_says():
    """50 maps x 20 keys: the mean of the scores is near 0, that of their squares near 1."""

    def score(keys, inner, outer, x):
        field = map_of(inner, outer, x)
        free = jax.vmap(lambda key: estimate_antisymmetry(key, field, 2, x, pairs=20))(keys)
        return (free.value - antisymmetry(field, 2, x)) / free.standard_error

    keys = jax.random.split(jax.random.key(0), (MAPS, 20))
    scores = np.asarray(jax.jit(jax.vmap(score))(keys, *random_maps(60)))
    assert abs(scores.mean()) < 0.25
    assert 0.8 < np.mean(scores**2) < 1.3
    assert np.abs(scores).max() < 6


@pytest.mark.parametrize("k", [1, 3])
def test_antisymmetry_is_of_the_displacement(k):
    """It equals NumPy's value from a linear map's powers."""
    matrix = np.eye(4) - 0.1 * np.random.default_rng(k).standard_normal((4, 4))
    moved = np.eye(4) - np.linalg.matrix_power(matrix, k)
    expected = np.linalg.norm(moved - moved.T) / np.linalg.norm(moved + moved.T)
    np.testing.assert_allclose(antisymmetry(lambda x: jnp.asarray(matrix) @ x, k, jnp.ones(4)), expected, rtol=1e-10)


def test_the_identity_does_not_hide_a_small_step():
    """V = I - h R: the antisymmetry relative to V vanishes with h, that relative to the displacement does not."""
    turn = jnp.array([[1.0, -0.5], [0.5, 1.0]])
    for h in (1e-1, 1e-3, 1e-5):
        field = partial(lambda h, x: x - h * (turn @ x), h)
        np.testing.assert_allclose(antisymmetry(field, 1, jnp.ones(2)), 0.5, rtol=1e-9)
        assert curl(field, jnp.ones(2)) < 0.6 * h


def test_curl_at_the_ends_of_its_range():
    x = jnp.ones(2)
    assert curl(lambda x: 0 * x, x) == 0
    assert curl(lambda x: 3 * x, x) == 0
    assert curl(lambda x: jnp.stack([x[1], -x[0]]), x) == np.inf
    free = estimate_curl(jax.random.key(0), lambda x: 3 * x, jnp.ones(5), pairs=3)
    assert free.value == 0 and free.standard_error == 0


def test_is_k_conservative_reports_the_worst_point():
    """f = x^2 y on three points; the antisymmetry at each by itself."""
    step = gradient_map(lambda x: x["x"] ** 2 * x["y"], 0.1)
    points = {"x": jnp.array([0.0, 1.0, 0.5]), "y": jnp.array([1.0, 2.0, 0.1])}
    assert is_k_conservative(step, 1, points).holds
    found = is_k_conservative(step, 2, points)
    each = [antisymmetry(step, 2, jax.tree.map(lambda leaf, i=i: leaf[i], points)) for i in range(3)]
    assert not found.holds
    assert found.worst == np.argmax(each)
    np.testing.assert_allclose(found.largest, max(each))
    assert is_k_conservative(step, 2, points, tol=1.0).holds
    assert not is_k_conservative(jnp.log, 2, -jnp.ones((2, 3))).holds, "values that are not finite"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [2, 6])
def test_a_map_whose_kth_power_is_the_identity_is_k_conservative(k, dtype):
    """I - V^k is then only rounding, which does not count as antisymmetry; V^(k-1) has its true value."""
    points = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2)), dtype)
    cos, sin = np.cos(2 * np.pi / k), np.sin(2 * np.pi / k)
    turn = jnp.asarray([[cos, -sin], [sin, cos]], dtype).__matmul__

    @jax.jit
    def found(points):
        free = estimate_antisymmetry(jax.random.key(0), turn, k, points[0], pairs=2)
        return is_k_conservative(turn, k, points), is_k_conservative(turn, k - 1, points), free

    here, before, free = found(points)
    assert here.holds and here.largest == 0 and free.value == free.standard_error == 0
    assert before.holds == (k == 2)  # the rotation by pi is symmetric


def test_small_steps_of_a_conservative_map_are_conservative_in_float32():
    """The antisymmetry of the rounding grows with 1 / step; a rotation of the same size is still detected."""
    matrix = jnp.asarray([[2.0, 0.7, 0.1], [0.7, 1.1, 0.3], [0.1, 0.3, 0.9]], jnp.float32)
    skew = jnp.asarray([[0.0, 0.1, 0.0], [-0.1, 0.0, 0.0], [0.0, 0.0, 0.0]], jnp.float32)
    loss, points = lambda x: jnp.vdot(x, jnp.sin(matrix @ x)) + jnp.vdot(x, matrix @ x), jnp.ones((1, 3), jnp.float32)
    for k in (1, 4):
        for gamma in (1e-2, 1e-4):
            assert is_k_conservative(gradient_map(loss, gamma), 1, points).holds
            found = is_k_conservative(lambda x, h=gamma: x - jnp.float32(h) * ((matrix + skew) @ x), k, points)
            assert not found.holds and 0.03 < found.largest < 0.06


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtypes_are_kept_and_everything_compiles(dtype):
    x = {"w": jnp.ones((2, 2), dtype), "b": jnp.ones(1, dtype)}
    step = gradient_map(lambda x: jnp.sum(jnp.sin(x["w"])) * x["b"][0], 0.1)
    assert {leaf.dtype for leaf in jax.tree.leaves(displacement(step, 2)(x))} == {jnp.dtype(dtype)}
    assert jax.jit(lambda x: antisymmetry(step, 2, x))(x).dtype == dtype
    free = jax.jit(lambda key, x: estimate_antisymmetry(key, step, 2, x, pairs=3))(jax.random.key(0), x)
    assert free.value.dtype == free.standard_error.dtype == dtype


def test_the_field_is_evaluated_once_for_all_pairs():
    field, x = random_map()

    def uses(pairs):
        jaxpr = jax.make_jaxpr(lambda key: estimate_curl(key, field, x, pairs=pairs))(jax.random.key(0))
        return str(jaxpr).count("= tanh")

    assert uses(2) == uses(8) == 1


def test_directions_are_decomposed_one_matrix_after_the_other():
    """jaxlib's batched decompositions wait for each other for ever, if a program has as many as there are cores."""
    field, x = random_map()
    keys = jax.random.split(jax.random.key(0), 5)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda key: estimate_curl(key, field, x, pairs=3)))(keys)
    assert re.search(r"f64\[12,3\] \w+:f64\[3,3\] = qr\[", str(jaxpr))


def doubled(x):
    return jax.tree.map(lambda leaf: 2 * leaf, x)


def test_points_are_trees_of_floats():
    for x in ({"w": jnp.ones((2, 0)), "b": (jnp.ones(()), jnp.ones(2))}, jnp.ones(())):
        assert jax.jit(lambda x: antisymmetry(doubled, 2, x) + curl(doubled, x))(x) == 0


MEASURES = (
    lambda field, x: iterate(field, 2)(x),
    lambda field, x: antisymmetry(field, 2, x),
    lambda field, x: estimate_curl(jax.random.key(0), field, x),
)
FIELDS = (lambda x: (x[0], x[1]), lambda x: x[0], lambda x: x.astype(jnp.float32))
OTHER_FORM = r"^result of the field = .*: must be of the form of its argument, 'float64"
test_a_field_must_return_what_it_takes = refusals(
    *((measure, field, OTHER_FORM) for measure in MEASURES for field in FIELDS),
    by=lambda measure, field: measure(field, jnp.ones(2)),
)

OF_ONE_DTYPE, LEAVES = r"^x = .*: must be floats of one dtype", r"^points = .*: must be leaves \[P, ...\]"
NO_FLOAT = r"^x = 'float64\[0\]': must be at least one float"
test_bad_input = refusals(
    (lambda: antisymmetry(doubled, 1, {"w": jnp.ones(2), "n": 3}), OF_ONE_DTYPE),
    (lambda: antisymmetry(doubled, 1, {"w": jnp.ones(2), "v": jnp.ones(2, jnp.float32)}), OF_ONE_DTYPE),
    (lambda: antisymmetry(doubled, 1, {}), OF_ONE_DTYPE),
    (lambda: antisymmetry(doubled, 1, jnp.ones(2, complex)), OF_ONE_DTYPE),
    (lambda: antisymmetry(doubled, 1, jnp.ones(16385)), r"^D = 16385: must be at most 16384 for a matrix"),
    (lambda: estimate_antisymmetry(jax.random.key(0), doubled, 1, jnp.ones(0)), NO_FLOAT),
    (lambda: is_k_conservative(doubled, 1, jnp.ones((0, 2))), LEAVES),
    (lambda: is_k_conservative(doubled, 1, {"a": jnp.ones((2, 1)), "b": jnp.ones((3, 1))}), LEAVES),
    (lambda: is_k_conservative(doubled, 1, jnp.float64(1)), LEAVES),
    (lambda: is_k_conservative(doubled, 1, jnp.ones((2, 2)), tol=-1), "tol = -1"),
    (lambda: iterate(doubled, -1), "k = -1"),
    (lambda: gradient_map(jnp.sum, 0), "gamma = 0"),
    (lambda: estimate_curl(jax.random.key(0), doubled, jnp.ones(3), pairs=1), "pairs = 1"),
    (lambda: estimate_curl(jax.random.key(0), doubled, jnp.ones(3), pairs=2.0), "pairs = 2.0"),
)
