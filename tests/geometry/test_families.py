"""Families of curves: against float64 NumPy on the points, their ends, degree elevation and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.geometry import FAMILIES, chain, cubic, family, line, quadratic
from tests.geometry import textbook
from tests.geometry.made_up import close, flat, trees
from tests.refusals import refusals

KINDS = {"quadratic": (quadratic(), textbook.bezier), "cubic": (cubic(), textbook.bezier)}
KINDS |= {f"chain of {n}": (chain(bends=n), textbook.polygon) for n in (1, 2, 5)}
S = (0.0, 0.2, 0.5, 0.77, 1.0)


def made(kind, seed=0):
    """The family, ends, offsets [m, ...] as the family takes them, and the offsets as a list."""
    curves, _ = KINDS[kind]
    start, end, *offsets = trees(seed, 2 + curves.inner)
    given = offsets[0] if curves.inner == 1 else jax.tree.map(lambda *rows: jnp.stack(rows), *offsets)
    return curves, start, end, given, offsets


def at(curves, start, end, offsets, s):
    return jax.tree.map(jnp.add, line(start, end, s), curves.aside(offsets, jnp.asarray(s)))


@pytest.mark.float64
@pytest.mark.parametrize("kind", KINDS)
def test_a_curve_by_offsets_is_the_curve_by_points(kind):
    curves, start, end, offsets, rows = made(kind)
    shares = np.arange(1, curves.inner + 1) / (curves.inner + 1)
    vectors = [flat(start), *((1 - t) * flat(start) + t * flat(end) + flat(o) for t, o in zip(shares, rows)), flat(end)]
    points = curves.points(start, end, offsets)
    for have, want in zip(points, vectors, strict=True):
        close(flat(have), want)
    for s in S:
        want = KINDS[kind][1](vectors, s)
        close(flat(at(curves, start, end, offsets, s)), want)
        close(flat(curves.path(points, s)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_ends_are_on_the_curve_and_without_offsets_it_is_the_line(kind):
    curves, start, end, offsets, _ = made(kind)
    for s in (0.0, 1.0):
        np.testing.assert_array_equal(flat(curves.aside(offsets, jnp.asarray(s))), 0.0)
    none = jax.tree.map(jnp.zeros_like, offsets)
    for s in S:
        np.testing.assert_allclose(flat(at(curves, start, end, none, s)), flat(line(start, end, s)), atol=1e-6)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), s=st.floats(0.0, 1.0))
def test_a_quadratic_curve_is_a_cubic_one_with_raised_points(seed, s):
    """Degree elevation: ``(A + 2 P) / 3`` and ``(2 P + E) / 3``, offsets of 2/3 from the chord each."""
    start, end, offset = trees(seed, 3)
    both = jax.tree.map(lambda leaf: jnp.stack([2 / 3 * leaf] * 2), offset)
    close(at(cubic(), start, end, both, s), at(quadratic(), start, end, offset, s))
    raised = textbook.elevated([flat(point) for point in quadratic().points(start, end, offset)])
    for have, want in zip(cubic().points(start, end, both), raised, strict=True):
        close(flat(have), want)


@pytest.mark.float64
def test_a_chain_of_points_on_a_chain_of_one_bend_is_that_chain():
    start, end, offset = trees(3, 3)
    finer = jax.tree.map(lambda leaf: jnp.stack([0.5 * leaf, leaf, 0.5 * leaf]), offset)
    for s in S:
        close(at(chain(bends=3), start, end, finer, s), at(chain(), start, end, offset, s))


@pytest.mark.float64
@pytest.mark.parametrize("kind", KINDS)
def test_the_derivative_by_the_offsets_is_the_spread(kind):
    curves, start, _, offsets, _ = made(kind)
    joined = jnp.asarray(flat(start))
    for s in map(jnp.asarray, (0.0, 0.3, 0.5, 1.0)):

        def product(rows, s=s):
            return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (start, curves.aside(rows, s)))))

        slope = jax.grad(product)(offsets)
        spread = curves.spread(joined, s)
        for j in range(curves.inner):
            row = slope if curves.inner == 1 else jax.tree.map(lambda leaf, j=j: leaf[j], slope)
            close(flat(row), spread if curves.inner == 1 else spread[j])


def test_families_by_name():
    assert {name: family(name).inner for name in FAMILIES} == {"quadratic": 1, "cubic": 2, "chain": 1}
    assert family("chain", 4).inner == 4


test_bad_options_are_refused = refusals(
    (lambda: family("quartic"), "^curve = 'quartic': unknown"),
    (lambda: family("cubic", 2), "^bends = 2: must be left out unless curve=chain"),
    (lambda: family("chain", 0), "^bends = 0: must be"),
    (lambda: chain(bends=1.5), "^bends = 1.5: must be"),
    (lambda: cubic().require_offsets(jnp.zeros((3, 4)), jnp.zeros(4)), r"offsets = \[\(3, 4\)\]: must be \[\(2, 4\)\]"),
)
