"""Bezier curves and their control point, simplices, and the plane through three models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import geometry
from fedjax_async.geometry import (
    bezier,
    bezier_derivative,
    bezier_points,
    centroid,
    line,
    plane,
    plane_coordinates,
    plane_point,
    polygon,
    sample_simplex,
    sample_weights,
    simplex,
    simplex_point,
)
from tests.geometry import textbook
from tests.geometry.made_up import close, flat, trees
from tests.refusals import refusals

seeds = st.integers(0, 2**32 - 1)
positions = st.floats(0.0, 1.0)
# compiled once; without ``jit``, their branches would be compiled at every call
control_point = jax.jit(geometry.control_point)
bezier_length = jax.jit(geometry.bezier_length, static_argnames="nodes")


@pytest.mark.float64
@pytest.mark.parametrize("degree", [0, 1, 2, 5])
def test_de_casteljau_is_bernsteins_form_and_its_derivative(degree):
    points = trees(degree, degree + 1)
    vectors = list(map(flat, points))
    higher, step = textbook.elevated(vectors), 1e-6

    @jax.jit
    def at(s):
        point, slope = jax.jvp(lambda s: bezier(points, s), (s,), (jnp.ones(()),))
        return point, slope, bezier_derivative(points, s), bezier(list(map(jnp.asarray, higher)), s)

    close(jax.tree.map(lambda leaf: leaf[1], bezier_points(points, 5)), at(0.25)[0])
    for s in (0.0, 0.123, 0.5, 0.9, 1.0, 1.5):
        point, slope, derivative, of_higher = at(s)
        close(flat(point), textbook.bezier(vectors, s))
        close(derivative, slope)
        by_hand = (textbook.bezier(vectors, s + step) - textbook.bezier(vectors, s - step)) / (2 * step)
        close(flat(derivative), by_hand, rtol=1e-6, atol=1e-6)
        close(textbook.bezier(higher, s), textbook.bezier(vectors, s))
        close(of_higher, textbook.bezier(vectors, s))


@settings(max_examples=50)
@given(seed=seeds, degree=st.integers(1, 4), size=st.sampled_from([1e-20, 1.0, 1e20]))
def test_the_ends_are_exact_in_float32_and_a_constant_curve_is_exactly_constant(seed, degree, size):
    points = jax.tree.map(jnp.float32, trees(seed, degree + 1, size))
    jax.tree.map(np.testing.assert_array_equal, bezier(points, 0.0), points[0])
    jax.tree.map(np.testing.assert_array_equal, bezier(points, 1.0), points[-1])
    jax.tree.map(np.testing.assert_array_equal, polygon(points, 0.0), points[0])
    jax.tree.map(np.testing.assert_array_equal, polygon(points, 1.0), points[-1])
    same = [points[0]] * (degree + 1)
    jax.tree.map(np.testing.assert_array_equal, bezier(same, 0.3), points[0])


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, s=positions)
def test_with_the_control_point_at_the_midpoint_the_curve_is_the_line(seed, s):
    """Erratum A3: this needs the factor 2 of the middle term."""
    start, end = trees(seed, 2)
    middle = line(start, end, 0.5)
    close(bezier((start, middle, end), s), line(start, end, s))
    close(flat(line(start, end, s)), (1 - s) * flat(start) + s * flat(end))
    as_printed = (1 - s) ** 2 * flat(start) + s * (1 - s) * flat(middle) + s**2 * flat(end)
    if 0.01 < s < 0.99:
        assert np.abs(as_printed - flat(line(start, end, s))).max() > 1e-6


@pytest.mark.float64
@pytest.mark.parametrize(("degree", "size"), [(0, 1.0), (1, 1.0), (2, 1e-150), (3, 1e150), (4, 1.0)])
def test_length_of_a_smooth_curve(degree, size):
    points = trees(degree + 10, degree + 1, size)
    have = float(bezier_length(points))
    want = textbook.bezier_length([flat(p) / size for p in points]) * size
    np.testing.assert_allclose(have, want, rtol=1e-7)
    chord = np.linalg.norm(flat(points[-1]) / size - flat(points[0]) / size) * size
    sides = sum(np.linalg.norm((flat(b) - flat(a)) / size) * size for a, b in itertools.pairwise(points))
    assert chord * (1 - 1e-12) <= have <= sides * (1 + 1e-12)


@pytest.mark.float64
def test_length_of_lines_and_of_curves_that_turn_back():
    a, b = jnp.array([1.0, 2.0]), jnp.array([4.0, 6.0])
    np.testing.assert_allclose(bezier_length((a, line(a, b, 0.5), b)), 5.0, rtol=1e-12)
    # it goes half the way to the control point and back
    for nodes in (8, 32, 64):
        np.testing.assert_allclose(bezier_length((a, b, a), nodes=nodes), 5.0, rtol=1 / nodes**2)
    assert float(bezier_length((a, a, a))) == 0.0
    slopes = jax.grad(bezier_length)((a, a, a))
    assert all(float(jnp.abs(s).max()) == 0.0 for s in slopes)


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, sides=st.integers(0, 4), s=positions)
def test_polygonal_chains(seed, sides, s):
    points = trees(seed, sides + 1)
    close(flat(polygon(points, s)), textbook.polygon(list(map(flat, points)), s))
    close(polygon(points, 7.0), points[-1])
    close(polygon(points, -7.0), points[0])


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, gamma=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_control_point_of_a_displacement(seed, gamma):
    start, end, displacement = trees(seed, 3)
    phi = control_point(start, end, displacement, gamma=gamma)
    close(flat(phi), textbook.control_point(*map(flat, (start, end, displacement)), gamma))
    middle = line(start, end, 0.5)
    offset = jax.tree.map(jnp.subtract, phi, middle)
    if gamma == 1.0:  # the curve bends orthogonally to its chord
        assert abs(flat(offset) @ (flat(end) - flat(start))) < 1e-9
    if gamma == 0.0:
        close(offset, displacement)
    nothing = jax.tree.map(jnp.zeros_like, displacement)
    close(control_point(start, end, nothing, gamma=gamma), middle)
    close(control_point(start, start, displacement, gamma=gamma), jax.tree.map(jnp.add, start, displacement))


test_input_is_checked = refusals(
    (lambda: bezier([], 0.5), "points = \\[\\]: must be at least one point"),
    (lambda: bezier_points([jnp.ones(2)], 1), "count = 1: must be a whole number >= 2"),
    (lambda: geometry.control_point(*[jnp.ones(2)] * 3, gamma=2), r"gamma = 2: must be between 0\.0 and 1\.0"),
    (lambda: geometry.bezier_length([jnp.ones(2)], nodes=0), "nodes = 0: must be a whole number >= 1"),
    (lambda: simplex([]), r"vertices = \[\]: must be at least one vertex"),
    (lambda: sample_weights(jax.random.key(0), 0), "count = 0: must be a whole number >= 1"),
)


@pytest.mark.parametrize(
    ("points", "s", "message"),
    [
        ([jnp.ones(2), jnp.ones(1)], 0.5, r"points\[1\]\.shape = \(1,\): must be that of points\[0\], \(2,\)"),
        ([{"w": jnp.ones(2)}, {"w": jnp.ones((2, 2))}], 0.5, r"points\[1\]\['w'\]\.shape = \(2, 2\): must be that of"),
        ([jnp.arange(2), jnp.ones(2)], 0.5, r"points\[0\] = ShapeDtypeStruct\(.*int32\): must be an array of floats"),
        ([jnp.ones(2), 1.0], 0.5, r"points\[1\] = 1\.0: must be an array of floats"),
        ([jnp.ones(2), {"w": jnp.ones(2)}], 0.5, r"points\[1\] = \{'w': .*\}: must be like points\[0\]"),
        ([jnp.ones(2), jnp.ones(2)], jnp.ones(2), r"s\.shape = \(2,\): must be \(\)"),
    ],
)
def test_points_must_be_alike_and_the_position_a_scalar(points, s, message):
    for function in (geometry.bezier, geometry.polygon):
        with pytest.raises(ValueError, match=message):
            function(points, s)
    with pytest.raises(ValueError, match=message.replace(r"points\[0\]", "start").replace(r"points\[1\]", "end")):
        geometry.line(*points, s)


@pytest.mark.float64
@pytest.mark.parametrize("count", [1, 2, 5])
def test_mixtures_of_vertices(count):
    each = trees(count, count)
    vertices = simplex(each)
    rows = np.stack(list(map(flat, each)))
    weights = np.random.default_rng(0).dirichlet(np.ones(count))
    close(flat(simplex_point(vertices, jnp.asarray(weights))), weights @ rows)
    for k in range(count):
        close(simplex_point(vertices, jnp.eye(count)[k]), each[k])
    close(flat(centroid(vertices)), rows.mean(axis=0))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_sampled_weights_are_uniform_in_the_simplex(count):
    """Means 1 / V, variances (V - 1) / (V^2 (V + 1)), covariances -1 / (V^2 (V + 1)); a weight is Beta(1, V - 1)."""
    draws = np.asarray(jax.vmap(lambda key: sample_weights(key, count))(jax.random.split(jax.random.key(0), 20_000)))
    assert (draws >= 0).all()
    np.testing.assert_allclose(draws.sum(axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(draws.mean(axis=0), 1 / count, atol=0.01)
    exact = (np.eye(count) * count - 1) / (count**2 * (count + 1))
    np.testing.assert_allclose(np.cov(draws.T).reshape(count, count), exact, atol=0.003)
    if count > 1:
        at = np.array([0.1, 0.3, 0.6])
        np.testing.assert_allclose((draws[:, :1] <= at).mean(axis=0), 1 - (1 - at) ** (count - 1), atol=0.015)


def test_a_sampled_point_lies_in_the_simplex():
    each = trees(3, 3)
    key = jax.random.key(1)
    point = sample_simplex(key, simplex(each))
    want = np.asarray(sample_weights(key, 3), np.float64) @ np.stack(list(map(flat, each)))
    np.testing.assert_allclose(flat(point), want, atol=1e-6)


@pytest.mark.float64
def test_coordinates_are_those_of_gram_schmidt():
    *models, elsewhere = trees(0, 4)
    found = plane(*models)
    a, b, c, other = map(flat, (*models, elsewhere))
    basis, _ = np.linalg.qr(np.stack([b - a, c - a], axis=1))
    basis = basis * np.sign([basis[:, 0] @ (b - a), basis[:, 1] @ (c - a)])
    close(flat(found.first), basis[:, 0])
    close(flat(found.second), basis[:, 1])
    for model, vector in zip(models, (a, b, c), strict=True):
        at = plane_coordinates(found, model)
        close(at, basis.T @ (vector - a), atol=1e-12)
        close(flat(plane_point(found, at)), vector)
    nearest = a + basis @ (basis.T @ (other - a))
    close(flat(plane_point(found, plane_coordinates(found, elsewhere))), nearest)


def test_three_models_on_a_line_have_no_plane():
    one, two = trees(0, 2)
    for three in (one, two, line(one, two, 0.3), line(one, two, -2.0)):
        with pytest.raises(ValueError, match="not on one line"):
            plane(one, two, three)
    with pytest.raises(ValueError, match="first two are equal"):
        plane(one, one, two)
