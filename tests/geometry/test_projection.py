"""Projections and rotations against least squares and their matrices, and every degenerate case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import geometry
from fedjax_async.geometry import CONTROL_POINTS, GROUPINGS
from fedjax_async.geometry.vectors import joined, parted
from tests.geometry import textbook
from tests.geometry.made_up import GROUPS, close, flat, like, random_tree, scaled, trees, vector

# compiled once; without ``jit``, their loops and branches would be compiled at every call
rotate, reflect = jax.jit(geometry.rotate), jax.jit(geometry.reflect)
control_points = {name: jax.jit(function) for name, function in CONTROL_POINTS.items()}
project_out = jax.jit(geometry.project_out, static_argnames="per")
project_out_span = jax.jit(geometry.project_out_span, static_argnames="per")
orthonormalise = jax.jit(geometry.orthonormalise)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.float64
@pytest.mark.parametrize("per", GROUPINGS)
@settings(max_examples=25)
@given(seed=seeds, size=st.sampled_from([1e-160, 1.0, 1e150]))
def test_the_projection_is_orthogonal(per, seed, size):
    v, d = trees(seed, 2)
    d = scaled(d, size)
    out = project_out(v, d, per=per)
    for group in GROUPS[per]:
        v_g, d_g, out_g = (vector(tree, group) for tree in (v, d, out))
        unit = d_g / np.linalg.norm(d_g / size) / size
        assert abs(out_g @ unit) < 1e-12 * np.linalg.norm(v_g)
        close(out_g + (v_g @ unit) * unit, v_g)


@pytest.mark.float64
@pytest.mark.parametrize("per", GROUPINGS)
def test_zero_directions_change_nothing_zero_vectors_stay_zero_and_a_share_is_removed(per):
    v, d = trees(4, 2)
    nothing = jax.tree.map(jnp.zeros_like, v)
    jax.tree.map(np.testing.assert_array_equal, project_out(v, nothing, per=per), v)
    jax.tree.map(np.testing.assert_array_equal, project_out(nothing, v, per=per), nothing)
    one_zero = {**v, "dense": nothing["dense"]}
    if per != "whole":  # a layer that the client did not change keeps the whole shift
        np.testing.assert_array_equal(project_out(v, one_zero, per=per)["dense"]["kernel"], v["dense"]["kernel"])
    have, whole = project_out(v, d, per=per, gamma=0.3), project_out(v, d, per=per)
    close(have, jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, v, whole))
    jax.tree.map(np.testing.assert_array_equal, project_out(v, d, per=per, gamma=0.0), v)


@pytest.mark.parametrize("sizes", [(1e-30, 1.0), (1.0, 1e-18), (1e-12, 1e-8), (1e18, 1.0), (1e30, 1e-30), (1.0, 1e30)])
def test_products_near_the_limits_keep_their_digits_in_float32(sizes):
    """The result does not depend on the direction's length, and scales with the vector."""
    v, d = jax.tree.map(jnp.float32, trees(1, 2))
    far = project_out(scaled(v, sizes[1]), scaled(d, sizes[0]), per="layer")
    close(
        jax.tree.map(lambda leaf: leaf / np.float32(sizes[1]), far), project_out(v, d, per="layer"), rtol=0, atol=2e-6
    )


@pytest.mark.float64
@pytest.mark.parametrize("per", GROUPINGS)
@settings(max_examples=25)
@given(seed=seeds, size=st.sampled_from([1e-160, 1e-3, 1.0, 1e150]))
def test_what_is_subtracted_on_the_way_is_as_if_subtracted_first(per, seed, size):
    now, before, d = trees(seed, 3)
    d = scaled(d, size)
    nothing, shift = jax.tree.map(jnp.zeros_like, d), jax.tree.map(jnp.subtract, now, before)
    close(project_out(now, d, minus=before, per=per), project_out(shift, d, per=per))
    jax.tree.map(np.testing.assert_array_equal, project_out(now, nothing, minus=before, per=per), shift)
    jax.tree.map(np.testing.assert_array_equal, project_out(now, d, minus=now, per=per), nothing)


def test_joined_vectors_come_apart_as_they_were():
    tree = {"a": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "b": (jnp.float32(7.0), jnp.zeros((0, 2)))}
    whole = joined(tree)
    np.testing.assert_array_equal(whole, [0, 1, 2, 3, 4, 5, 7])
    back = parted(whole, tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(back)] == [leaf.dtype for leaf in jax.tree.leaves(tree)]
    assert joined({}).shape == (0,) and parted(joined({}), {}) == {}


@pytest.mark.float64
def test_parallel_vectors_vanish_and_any_structure_will_do():
    v = jnp.arange(1.0, 5.0)
    np.testing.assert_allclose(project_out(v, -3 * v), np.zeros(4), atol=1e-15)
    out = project_out([v, (v, v)], [v, (2 * v, 0 * v)], per="tensor")
    np.testing.assert_allclose(out[1][1], v)
    np.testing.assert_allclose(out[0], np.zeros(4), atol=1e-15)


def test_dtypes_are_kept_and_leaves_may_have_several():
    v = {"a": {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.arange(3.0)}}
    out = project_out(v, v)
    assert out["a"]["w"].dtype == jnp.bfloat16 and out["a"]["b"].dtype == jnp.float32
    rows = jax.tree.map(lambda leaf: leaf[None], v)
    spanned = project_out_span(v, rows)
    assert spanned["a"]["w"].dtype == jnp.bfloat16 and float(jnp.abs(spanned["a"]["b"]).max()) < 1e-5
    assert project_out_span({"none": jnp.zeros(0)}, {"none": jnp.zeros((2, 0))}, per="tensor")["none"].shape == (0,)


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, shape=st.sampled_from([(1, 1), (1, 8), (8, 1), (3, 5), (5, 3), (8, 8)]), rank=st.integers(0, 8))
def test_orthonormal_rows_span_what_was_given(seed, shape, rank):
    (k, d), rng = shape, np.random.default_rng(seed)
    rows = rng.normal(size=(k, rank)) @ rng.normal(size=(rank, d))
    q = np.asarray(orthonormalise(jnp.asarray(rows)))
    kept = np.linalg.norm(q, axis=1) > 0.5
    np.testing.assert_allclose(q[kept] @ q[kept].T, np.eye(kept.sum()), atol=1e-9)
    np.testing.assert_array_equal(q[~kept], 0)
    np.testing.assert_allclose(rows @ q.T @ q, rows, atol=1e-3 * max(1, np.abs(rows).max()))
    assert kept.sum() <= min(k, d, rank)


@pytest.mark.float64
@pytest.mark.parametrize("per", ["tensor", "whole"])
@settings(max_examples=10)
@given(seed=seeds, k=st.integers(1, 4))
def test_the_rest_outside_a_span_is_that_of_least_squares(per, seed, k):
    rng = np.random.default_rng(seed)
    v, rows = random_tree(rng), random_tree(rng, (k,))
    rows = jax.tree.map(lambda leaf: leaf.at[0].set(0.0), rows)  # a client that has not arrived yet
    out = project_out_span(v, rows, per=per)
    for group in GROUPS[per]:
        v_g, out_g, rows_g = vector(v, group), vector(out, group), vector(rows, group, rows=True)
        expected = v_g - rows_g.T @ np.linalg.lstsq(rows_g.T, v_g, rcond=1e-10)[0]
        np.testing.assert_allclose(out_g, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.float64
@settings(max_examples=50)
@given(seed=seeds, u_size=st.sampled_from([1e-160, 1.0, 1e150]), w_size=st.sampled_from([1e-160, 1.0, 1e150]))
def test_it_is_the_matrix_of_the_definition(seed, u_size, w_size):
    x, u, w = trees(seed, 3)
    have = flat(rotate(x, scaled(u, u_size), scaled(w, w_size)))
    matrix = textbook.rotation(flat(u), flat(w))
    close(have, matrix @ flat(x), rtol=1e-9, atol=1e-11)


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
def test_parallel_vectors_and_zeros_turn_nothing_and_anti_parallel_ones_reflect_along_their_line(x64):
    with jax.enable_x64(x64):
        x, u = trees(1, 2)
        nothing, w = jax.tree.map(jnp.zeros_like, u), scaled(u, -3.0)
        atol = 1e-14 if x64 else 2e-6
        for source, target in [(u, u), (u, scaled(u, 5.0)), (scaled(u, 1e-3), u)]:
            close(rotate(x, source, target), x, atol=atol)
        for source, target in [(u, nothing), (nothing, u), (nothing, nothing)]:
            jax.tree.map(np.testing.assert_array_equal, rotate(x, source, target), x)
        turned = rotate(x, u, w)
        close(turned, reflect(x, u), atol=atol)
        close(flat(rotate(u, u, w)), -flat(u), atol=atol)
        along = flat(u) * (flat(x) @ flat(u)) / (flat(u) @ flat(u))
        close(flat(turned), flat(x) - 2 * along, atol=atol)
        close(reflect(reflect(x, u), u), x, atol=atol)
        jax.tree.map(np.testing.assert_array_equal, reflect(x, nothing), x)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, apart=st.booleans())
def test_a_control_point_keeps_its_offset_or_turns_it_with_the_chord(seed, apart):
    start, end, control, new_start, new_end = trees(seed, 5)
    if not apart:  # the curve moves as a whole
        new_end = jax.tree.map(lambda new, old, last: new + last - old, new_start, start, end)
    ends = (start, end), (new_start, new_end)
    kept, turned = (control_points[name](control, *ends) for name in ("none", "rotation"))
    a, e, phi, a2, e2 = map(flat, (start, end, control, new_start, new_end))
    offset = phi - (a + e) / 2
    close(flat(kept), (a2 + e2) / 2 + offset)
    close(flat(turned), (a2 + e2) / 2 + textbook.rotation(e - a, e2 - a2) @ offset, atol=1e-10)
