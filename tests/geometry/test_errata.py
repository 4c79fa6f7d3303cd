"""Errata A1 to A5 of AsyncManifold: what the paper prints lacks the property that the package's version has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.geometry import bezier, control_point, gradient_surgery, orthopos, orthostrict, rotate_offset

seeds = st.integers(0, 2**16)
few = settings(max_examples=5)


def vectors(seed, count):
    return np.random.default_rng(seed).normal(size=(count, 6))


def corrected(correction, delta, drift):
    with jax.enable_x64(True):
        return np.asarray(correction.correct(jnp.asarray(delta), jnp.asarray(drift), ())[0])


@few
@given(seed=seeds, size=st.floats(1.5, 10.0))
def test_a1_dividing_by_the_length_alone_leaves_a_component_along_the_drift(seed, size):
    delta, drift = vectors(seed, 2)
    drift *= size / np.linalg.norm(drift)
    printed = delta - (delta @ drift) / np.linalg.norm(drift) * drift
    np.testing.assert_allclose(printed @ drift, (1 - size) * (delta @ drift), rtol=1e-9)
    assert abs(corrected(orthostrict(), delta, drift) @ drift) < 1e-9


@pytest.mark.float64
@few
@given(seed=seeds, share=st.sampled_from([-2.0, -0.3, 0.1, 0.5, 0.9, 1.2, 3.0]))
def test_a2_orthopos_is_not_surgery_on_the_position_between_zero_and_the_drift(seed, share):
    side, drift = vectors(seed, 2)
    delta = side - (side @ drift) / (drift @ drift) * drift + share * drift  # so that <delta, b> = share |b|^2
    surgery = np.asarray(gradient_surgery(jnp.asarray(delta - drift), jnp.asarray(drift)))
    same = np.allclose(corrected(orthopos(), delta, drift), surgery, rtol=1e-9, atol=1e-9)
    assert same == (share < 0 or share > 1)


@pytest.mark.float64
@few
@given(seed=seeds, s=st.floats(0.01, 0.99))
def test_a3_without_the_factor_two_a_curve_of_equal_points_shrinks(seed, s):
    (x,) = vectors(seed, 1)
    printed = (1 - s) ** 2 * x + s * (1 - s) * x + s**2 * x
    np.testing.assert_allclose(printed, (1 - s + s**2) * x, rtol=1e-12)
    assert np.linalg.norm(printed) < np.linalg.norm(x)
    np.testing.assert_allclose(bezier([jnp.asarray(x)] * 3, s), x, rtol=1e-12)


@few
@given(seed=seeds)
def test_a4_the_control_point_turns_with_the_chord_to_the_corrected_end(seed):
    """With the end not yet corrected, as in Algorithm 1, the offset would not be orthogonal to the new chord."""
    change, drift, bend = vectors(seed, 3)
    bend -= (bend @ change) / (change @ change) * change
    now = corrected(orthostrict(), change, drift)

    def cosine(turned_to):
        with jax.enable_x64(True):
            start, server = jnp.zeros(6), jnp.asarray(drift)
            end = server + jnp.asarray(turned_to)
            phi = rotate_offset(jnp.asarray(change / 2 + bend), (start, jnp.asarray(change)), (server, end))
            offset = np.asarray(phi - (server + end) / 2)
        np.testing.assert_allclose(np.linalg.norm(offset), np.linalg.norm(bend), rtol=1e-9)
        return abs(offset @ now) / (np.linalg.norm(offset) * np.linalg.norm(now))

    assert cosine(now) < 1e-9 < cosine(change)


@pytest.mark.float64
@few
@given(seed=seeds)
def test_a5_the_control_point_bends_orthogonally_to_the_final_chord(seed):
    start, end, early, displacement = vectors(seed, 4)
    phi = np.asarray(control_point(*map(jnp.asarray, (start, end, displacement))))
    middle, chord = (start + end) / 2, end - start
    assert abs((phi - middle) @ chord) < 1e-9
    assert abs(displacement @ chord) > 1e-6  # what Algorithm 2 returns: Mid + dphi
    assert abs((phi - (start + early) / 2) @ chord) > 1e-6  # and from the midpoint of an earlier end
