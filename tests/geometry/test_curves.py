"""Bezier curves, their control point and families of curves; simplices, and the plane through three models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import geometry
from fedjax_async.geometry import FAMILIES, bezier, chain, cubic, family, line, polygon, quadratic, sample_weights
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

    @jax.jit
    def at(s):
        point, slope = jax.jvp(lambda s: bezier(points, s), (s,), (jnp.ones(()),))
        return point, slope, geometry.bezier_derivative(points, s)

    close(jax.tree.map(lambda leaf: leaf[1], geometry.bezier_points(points, 5)), at(0.25)[0])
    for s in (0.0, 0.123, 0.5, 0.9, 1.0, 1.5):
        point, slope, derivative = at(s)
        close(flat(point), textbook.bezier(list(map(flat, points)), s))
        close(derivative, slope)


@settings(max_examples=50)
@given(seed=seeds, degree=st.integers(1, 4), size=st.sampled_from([1e-20, 1.0, 1e20]))
def test_the_ends_are_exact_in_float32_and_a_constant_curve_is_exactly_constant(seed, degree, size):
    points = jax.tree.map(jnp.float32, trees(seed, degree + 1, size))
    for curve, (s, end) in itertools.product((bezier, polygon), ((0.0, points[0]), (1.0, points[-1]))):
        jax.tree.map(np.testing.assert_array_equal, curve(points, s), end)
    jax.tree.map(np.testing.assert_array_equal, bezier([points[0]] * (degree + 1), 0.3), points[0])


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, s=positions)
def test_with_the_control_point_at_the_midpoint_the_curve_is_the_line(seed, s):
    """Erratum A3: this needs the factor 2 of the middle term."""
    start, end = trees(seed, 2)
    middle, straight = line(start, end, 0.5), (1 - s) * flat(start) + s * flat(end)
    close(flat(bezier((start, middle, end), s)), straight)
    close(flat(line(start, end, s)), straight)
    as_printed = (1 - s) ** 2 * flat(start) + s * (1 - s) * flat(middle) + s**2 * flat(end)
    assert not 0.01 < s < 0.99 or np.abs(as_printed - straight).max() > 1e-6


@pytest.mark.float64
@pytest.mark.parametrize(("degree", "size"), [(0, 1.0), (1, 1.0), (2, 1e-150), (3, 1e150), (4, 1.0)])
def test_length_of_a_smooth_curve(degree, size):
    points = trees(degree + 10, degree + 1, size)
    have, vectors = float(bezier_length(points)), [flat(p) / size for p in points]
    np.testing.assert_allclose(have, textbook.bezier_length(vectors) * size, rtol=1e-7)
    chord = np.linalg.norm(vectors[-1] - vectors[0]) * size
    sides = sum(np.linalg.norm(b - a) * size for a, b in itertools.pairwise(vectors))
    assert chord * (1 - 1e-12) <= have <= sides * (1 + 1e-12)


@pytest.mark.float64
def test_length_of_lines_and_of_curves_that_turn_back():
    a, b = jnp.array([1.0, 2.0]), jnp.array([4.0, 6.0])
    np.testing.assert_allclose(bezier_length((a, line(a, b, 0.5), b)), 5.0, rtol=1e-12)
    # it goes half the way to the control point and back
    for nodes in (8, 32, 64):
        np.testing.assert_allclose(bezier_length((a, b, a), nodes=nodes), 5.0, rtol=1 / nodes**2)
    assert float(bezier_length((a, a, a))) == 0.0
    assert not np.any(jax.grad(bezier_length)((a, a, a)))


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


def on_one_line(*shares):
    """The plane through points of a line."""
    one, two = trees(0, 2)
    return geometry.plane(*(line(one, two, share) for share in shares))


test_input_is_checked = refusals(
    (lambda: bezier([], 0.5), "points = \\[\\]: must be at least one point"),
    (lambda: geometry.bezier_points([jnp.ones(2)], 1), "count = 1: must be a whole number >= 2"),
    (lambda: geometry.control_point(*[jnp.ones(2)] * 3, gamma=2), r"gamma = 2: must be between 0\.0 and 1\.0"),
    (lambda: geometry.bezier_length([jnp.ones(2)], nodes=0), "nodes = 0: must be a whole number >= 1"),
    (lambda: geometry.simplex([]), r"vertices = \[\]: must be at least one vertex"),
    (lambda: sample_weights(jax.random.key(0), 0), "count = 0: must be a whole number >= 1"),
    *((lambda share=share: on_one_line(0.0, 1.0, share), "not on one line") for share in (0.0, 1.0, 0.3, -2.0)),
    (lambda: on_one_line(0.0, 0.0, 1.0), "first two are equal"),
    (lambda: family("quartic"), "^curve = 'quartic': unknown"),
    (lambda: family("cubic", 2), "^bends = 2: must be left out unless curve=chain"),
    (lambda: family("chain", 0), "^bends = 0: must be"),
    (lambda: chain(bends=1.5), "^bends = 1.5: must be"),
    (lambda: cubic().require_offsets(jnp.zeros((3, 4)), jnp.zeros(4)), r"offsets = \[\(3, 4\)\]: must be \[\(2, 4\)\]"),
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


# --- families -----------------------------------------------------------------------------------

KINDS = {"quadratic": (quadratic(), textbook.bezier), "cubic": (cubic(), textbook.bezier)}
KINDS |= {f"chain of {n}": (chain(bends=n), textbook.polygon) for n in (1, 2, 5)}


@pytest.mark.float64
@pytest.mark.parametrize("kind", KINDS)
def test_a_curve_by_offsets_is_the_curve_by_points(kind):
    """And the derivative by the offsets is the spread."""
    curves, book = KINDS[kind]
    start, end, *rows = trees(0, 2 + curves.inner)
    offsets = rows[0] if curves.inner == 1 else jax.tree.map(lambda *each: jnp.stack(each), *rows)
    shares = np.arange(1, curves.inner + 1) / (curves.inner + 1)
    vectors = [flat(start), *((1 - t) * flat(start) + t * flat(end) + flat(o) for t, o in zip(shares, rows)), flat(end)]
    points = curves.points(start, end, offsets)
    for have, want in zip(points, vectors, strict=True):
        close(flat(have), want)

    @jax.jit
    def at(s, vector):
        def product(offsets):
            return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (start, curves.aside(offsets, s)))))

        parts = curves.aside(offsets, s), line(start, end, s), curves.path(points, s)
        return *parts, jax.grad(product)(offsets), curves.spread(vector, s)

    for s in (0.0, 0.2, 0.5, 0.77, 1.0):
        *parts, slope, spread = at(s, flat(start))
        aside, straight, path = map(flat, parts)
        close(straight + aside, book(vectors, s))
        close(path, book(vectors, s))
        assert 0 < s < 1 or not aside.any()
        each = (
            [slope] if curves.inner == 1 else [jax.tree.map(lambda leaf, j=j: leaf[j], slope) for j in range(len(rows))]
        )
        close(np.stack(list(map(flat, each))), spread.reshape(len(rows), -1))


def test_families_by_name():
    assert {name: family(name).inner for name in FAMILIES} == {"quadratic": 1, "cubic": 2, "chain": 1}
    assert family("chain", 4).inner == 4


# --- simplices and planes -----------------------------------------------------------------------


@pytest.mark.float64
@pytest.mark.parametrize("count", [1, 2, 5])
def test_mixtures_of_vertices(count):
    each, key = trees(count, count), jax.random.key(1)
    vertices, rows = geometry.simplex(each), np.stack(list(map(flat, each)))
    weights, point = np.random.default_rng(0).dirichlet(np.ones(count)), jax.jit(geometry.simplex_point)
    close(flat(point(vertices, weights)), weights @ rows)
    for k in range(count):
        close(point(vertices, np.eye(count)[k]), each[k])
    close(flat(jax.jit(geometry.centroid)(vertices)), rows.mean(axis=0))
    found, weights = jax.jit(lambda key: (geometry.sample_simplex(key, vertices), sample_weights(key, count)))(key)
    close(flat(found), np.asarray(weights) @ rows)


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


@pytest.mark.float64
def test_coordinates_are_those_of_gram_schmidt():
    *models, elsewhere = trees(0, 4)
    found = geometry.plane(*models)
    a, b, c, other = map(flat, (*models, elsewhere))
    basis, _ = np.linalg.qr(np.stack([b - a, c - a], axis=1))
    basis = basis * np.sign([basis[:, 0] @ (b - a), basis[:, 1] @ (c - a)])
    close(np.stack([flat(found.first), flat(found.second)], axis=1), basis)
    for model, vector in zip((*models, elsewhere), (a, b, c, other), strict=True):
        at = geometry.plane_coordinates(found, model)
        close(at, basis.T @ (vector - a), atol=1e-12)
        close(flat(geometry.plane_point(found, at)), a + basis @ (basis.T @ (vector - a)))
