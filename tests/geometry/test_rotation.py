"""Rotation in the plane of two vectors: against its matrix, its invariants, and every degenerate case."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import geometry
from fedjax_async.geometry import CONTROL_POINTS, bezier, keep_offset, line
from tests.geometry import textbook
from tests.geometry.made_up import close, flat, like, random_tree

seeds = st.integers(0, 2**32 - 1)
# compiled once; without ``jit``, their branches would be compiled at every call
rotate, reflect = jax.jit(geometry.rotate), jax.jit(geometry.reflect)
rotate_offset = jax.jit(geometry.rotate_offset)


def trees(seed, count):
    rng = np.random.default_rng(seed)
    return [random_tree(rng) for _ in range(count)]


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), tree)


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, u_size=st.sampled_from([1e-160, 1.0, 1e150]), w_size=st.sampled_from([1e-160, 1.0, 1e150]))
def test_it_is_the_matrix_of_the_definition(seed, u_size, w_size):
    x, u, w = trees(seed, 3)
    have = flat(rotate(x, scaled(u, u_size), scaled(w, w_size)))
    matrix = textbook.rotation(flat(u), flat(w))
    close(have, matrix @ flat(x), rtol=1e-9, atol=1e-11)
    close(matrix.T @ matrix, np.eye(len(matrix)), atol=1e-12)
    assert np.linalg.det(matrix) > 0.99


@settings(max_examples=50)
@given(seed=seeds, angle=st.one_of(st.floats(0.0, np.pi), st.sampled_from([1e-9, np.pi - 1e-3, np.pi - 1e-6, np.pi])))
def test_lengths_and_angles_are_kept_at_every_angle_in_float32(seed, angle):
    rng = np.random.default_rng(seed)
    x, y, e1, e2 = (flat(random_tree(rng)) for _ in range(4))
    e1 /= np.linalg.norm(e1)
    e2 -= (e2 @ e1) * e1
    e2 /= np.linalg.norm(e2)
    shape = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), random_tree(rng))
    u, w = like(3.0 * e1, shape), like(0.2 * (np.cos(angle) * e1 + np.sin(angle) * e2), shape)
    x, y = like(x, shape), like(y, shape)
    turned_x, turned_y, turned_u = (flat(rotate(each, u, w)) for each in (x, y, u))
    for a, b, have in [(x, x, turned_x @ turned_x), (x, y, turned_x @ turned_y), (y, y, turned_y @ turned_y)]:
        np.testing.assert_allclose(
            have, flat(a) @ flat(b), atol=2e-6 * np.linalg.norm(flat(a)) * np.linalg.norm(flat(b))
        )
    direction = flat(w) / np.linalg.norm(flat(w))
    bound = 2 * np.finfo(np.float32).eps ** 0.5 if np.pi - angle < 0.01 else 1e-5
    np.testing.assert_allclose(turned_u / np.linalg.norm(flat(u)), direction, atol=bound)
    plane = np.linalg.qr(np.stack([flat(u), flat(w)], axis=1))[0]  # of the rounded vectors
    outside = flat(x) - plane @ (plane.T @ flat(x))
    have = flat(rotate(like(outside, shape), u, w))
    np.testing.assert_allclose(have, outside, atol=bound * np.linalg.norm(outside))


@pytest.mark.parametrize("x64", [False, True])
def test_parallel_vectors_and_zeros_turn_nothing(x64):
    with jax.enable_x64(x64):
        x, u = trees(1, 2)
        nothing = jax.tree.map(jnp.zeros_like, u)
        atol = 1e-14 if x64 else 2e-6
        for source, target in [(u, u), (u, scaled(u, 5.0)), (scaled(u, 1e-3), u)]:
            close(rotate(x, source, target), x, atol=atol)
        for source, target in [(u, nothing), (nothing, u), (nothing, nothing)]:
            jax.tree.map(np.testing.assert_array_equal, rotate(x, source, target), x)


@pytest.mark.parametrize("x64", [False, True])
def test_anti_parallel_vectors_reflect_along_their_line_and_keep_the_rest(x64):
    with jax.enable_x64(x64):
        x, u = trees(2, 2)
        w = scaled(u, -3.0)
        atol = 1e-14 if x64 else 2e-6
        turned = rotate(x, u, w)
        close(turned, reflect(x, u), atol=atol)
        close(flat(rotate(u, u, w)), -flat(u), atol=atol)
        along = flat(u) * (flat(x) @ flat(u)) / (flat(u) @ flat(u))
        close(flat(turned), flat(x) - 2 * along, atol=atol)


@pytest.mark.float64
def test_a_reflection_is_its_own_inverse():
    x, n = trees(4, 2)
    close(reflect(reflect(x, n), n), x)
    close(flat(reflect(n, n)), -flat(n))
    jax.tree.map(np.testing.assert_array_equal, reflect(x, jax.tree.map(jnp.zeros_like, x)), x)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds)
def test_a_control_point_keeps_its_offset_or_turns_it_with_the_chord(seed):
    start, end, control, new_start, new_end = trees(seed, 5)
    kept = keep_offset(control, (start, end), (new_start, new_end))
    turned = rotate_offset(control, (start, end), (new_start, new_end))
    a, e, phi, a2, e2 = map(flat, (start, end, control, new_start, new_end))
    offset = phi - (a + e) / 2
    close(flat(kept), (a2 + e2) / 2 + offset)
    close(flat(turned), (a2 + e2) / 2 + textbook.rotation(e - a, e2 - a2) @ offset, atol=1e-10)
    # the angle of offset and chord is kept, and so is the length of the offset
    new_offset = flat(turned) - (a2 + e2) / 2
    close(np.linalg.norm(new_offset), np.linalg.norm(offset))
    cosine = offset @ (e - a) / np.linalg.norm(e - a)
    close(new_offset @ (e2 - a2) / np.linalg.norm(e2 - a2), cosine, atol=1e-9)


@pytest.mark.float64
@pytest.mark.parametrize("name", CONTROL_POINTS)
def test_a_curve_whose_ends_move_together_moves_as_a_whole(name):
    start, end, control, way = trees(7, 4)
    by_way = [jax.tree.map(jnp.add, point, way) for point in (start, control, end)]
    moved = CONTROL_POINTS[name](control, (start, end), (by_way[0], by_way[2]))
    close(moved, by_way[1])
    jax.tree.map(np.testing.assert_allclose, bezier((by_way[0], moved, by_way[2]), 0.4), bezier(by_way, 0.4))
    straight = CONTROL_POINTS[name](line(start, end, 0.5), (start, end), (way, control))
    close(straight, line(way, control, 0.5))
