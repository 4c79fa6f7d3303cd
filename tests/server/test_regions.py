"""FLOCO's second stage: placing the clients against float64 NumPy, training in a region, and when it begins."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.geometry import sample_weights
from fedjax_async.server import closed, floco
from fedjax_async.server.floco import _POINT, Simplex, floco_client
from fedjax_async.server.regions import SCALES, Region, energy, placed, projected, sketched, within
from fedjax_async.types import Facts, Message, Request
from tests.local.made_up import MODEL, flat, groups, slope, start_params
from tests.refusals import refusals
from tests.server.made_up import arrival
from tests.server.test_floco import BATCH, KEY, D, V, job, simplex_of, vertices_of

pytestmark = pytest.mark.float64


def onto_simplex(points, scale):
    """The thresholds by bisection: ``sum_v max(p_v - t, 0) = scale``; of points [..., V]."""
    low, high = points.min(axis=-1) - scale - 1.0, points.max(axis=-1) + 0.0 * scale
    for _ in range(80):
        middle = (low + high) / 2
        over = np.maximum(points - middle[..., None], 0).sum(axis=-1) > scale
        low, high = np.where(over, middle, low), np.where(over, high, middle)
    found = np.maximum(points - low[..., None], 0)
    return found / found.sum(axis=-1, keepdims=True)


def placed_by_hand(signals, vertices):
    centred = signals - signals.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    components = centred @ vectors[:, np.argsort(values)[::-1][:vertices]]
    largest = components[np.argmax(np.abs(components), axis=0), np.arange(vertices)]
    points = onto_simplex(components * np.sign(largest), SCALES[:, None])  # [scales, N, V]
    pairs = itertools.combinations(range(len(signals)), 2)
    found = sum(1 / np.maximum(np.linalg.norm(points[:, a] - points[:, b], axis=1), 1e-4) ** 2 for a, b in pairs)
    return points[np.argmin(found)]


def test_clients_are_placed_by_their_principal_components():
    signals = np.random.default_rng(0).normal(size=(5, 8)) * np.linspace(2.0, 0.2, 8)
    found = jax.jit(placed, static_argnums=2)(jnp.asarray(signals), jnp.ones(5, bool), 3)
    np.testing.assert_allclose(found, placed_by_hand(signals, 3), atol=1e-9)
    assert np.ptp(np.asarray(found), axis=0).min() > 0.1


def test_clients_not_seen_are_at_the_centroid_and_change_nothing_for_others():
    signals = np.random.default_rng(1).normal(size=(4, 6))
    place = jax.jit(placed, static_argnums=2)
    alone = place(jnp.asarray(signals), jnp.ones(4, bool), 3)
    with_others = np.insert(signals, 2, 0.0, axis=0)
    found = np.asarray(place(jnp.asarray(with_others), jnp.asarray([True, True, False, True, True]), 3))
    np.testing.assert_allclose(np.delete(found, 2, axis=0), alone, atol=1e-12)
    np.testing.assert_allclose(found[2], 1 / 3)
    few = place(jnp.asarray(signals[:2]), jnp.ones(2, bool), 4)  # fewer clients than vertices
    assert few.shape == (2, 4) and np.allclose(few.sum(axis=1), 1.0)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), scale=st.floats(1e-3, 1.0), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_the_projection_is_that_of_bisection(seed, scale, size):
    points = size * np.random.default_rng(seed).normal(size=(3, 4))
    found = project(points, scale)
    np.testing.assert_allclose(found, onto_simplex(points, scale), atol=1e-7)


project = jax.jit(projected)


def test_a_small_scale_is_not_lost_in_float32():
    points = jnp.asarray([[1e5, -2e5, 9.0]], jnp.float32)
    np.testing.assert_array_equal(project(points, jnp.float32(1e-4)), [[1.0, 0.0, 0.0]])


def test_energy_is_that_of_the_seen_pairs():
    points = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert float(energy(jnp.asarray(points), jnp.asarray([True, True, False]))) == pytest.approx(0.5)
    assert float(energy(jnp.asarray(points), jnp.ones(3, bool))) == pytest.approx(0.5 + 0.5 + 1e8)


def test_short_signals_are_whole_and_long_ones_keep_scalar_products_in_the_mean():
    vector = np.arange(5.0)
    np.testing.assert_array_equal(sketched(jnp.asarray(vector), 5), vector)
    one, other = np.random.default_rng(2).normal(size=(2, 4001)) + 0.5
    short = [np.asarray(sketched(jnp.asarray(each), 1000)) for each in (one, other)]
    assert short[0].shape == (1000,)
    assert short[0] @ short[1] == pytest.approx(
        one @ other, abs=5 * np.linalg.norm(one) * np.linalg.norm(other) / 1000**0.5
    )


@settings(max_examples=30)
@given(seed=st.integers(0, 999), radius=st.floats(0.01, 3.0))
def test_a_region_lies_in_the_simplex_and_in_the_ball_of_its_radius(seed, radius):
    chance = np.random.default_rng(seed)
    centre, point = chance.dirichlet(np.ones(4), size=2)
    found = np.asarray(within(Region((), centre, min(1.0, radius / 2)), point))
    assert found.min() >= -1e-12 and found.sum() == pytest.approx(1.0)
    assert np.abs(found - centre).sum() <= radius + 1e-12
    if radius >= 2:
        np.testing.assert_allclose(found, point, atol=1e-12)


CENTRE, SHARE = np.array([0.7, 0.2, 0.1]), 0.15


def sent(centre=CENTRE, share=SHARE):
    message = floco().dispatch(*floco().init(start_params()), Request())[0]
    return message._replace(extra=Region(message.extra, jnp.asarray(centre), jnp.asarray(share)))


def test_a_job_trains_the_vertices_at_points_of_the_region():
    client = floco_client(MODEL, optimizer=optax.sgd(0.3), batch_size=BATCH, regions=0.5)
    message = sent()
    upload, _ = job(client, message, 6)
    start = now = vertices_of(message.params, message.extra.offsets)
    for k, rows in enumerate(groups(KEY, 0, BATCH, 6)):
        key = jax.random.fold_in(jax.random.fold_in(KEY, _POINT), k)
        share = CENTRE + SHARE * (np.asarray(sample_weights(key, V)) - CENTRE)
        now = now - 0.3 * share[:, None] * slope(share @ now, rows)
    np.testing.assert_allclose(vertices_of(*upload), now - start, rtol=1e-10, atol=1e-12)
    own = flat(client.own(message, ()))
    np.testing.assert_allclose(own, CENTRE @ start, rtol=1e-12)
    first = sent(np.full(3, 1 / 3), 1.0)  # before the second stage: as without regions
    plain = floco_client(MODEL, optimizer=optax.sgd(0.3), batch_size=BATCH)
    have, _ = job(client, first, 2)
    want, _ = job(plain, Message(first.params, first.extra.offsets), 2)
    np.testing.assert_allclose(vertices_of(*have), vertices_of(*want), rtol=1e-10, atol=1e-12)


def test_private_leaves_of_the_own_model_are_the_clients():
    model = MODEL._replace(private=lambda path: path == ("b",))
    client = floco_client(model, optimizer=optax.sgd(0.3), batch_size=BATCH, regions=0.5)
    state = client.init(start_params())
    (inner, leaves), message = state, sent()
    kept = inner, {**leaves, "b": leaves["b"] + 2.0}
    np.testing.assert_allclose(client.own(message, kept)["b"], start_params()["b"] + 2.0, rtol=1e-12)


def test_the_stage_begins_after_its_share_of_the_steps_and_places_the_clients():
    """Two server steps of two arrivals each; the rejected upload of client 2 leaves no signal."""
    server = floco(regions=0.5, radius=0.4)
    state, memory = server.init(start_params(), Facts(4, False, 8, 4))
    rows = [memory] * 4
    receive, close, dispatch = (
        jax.jit(server.receive),
        jax.jit(lambda s, m: closed(server, s, m)),
        jax.jit(server.dispatch),
    )
    changes = np.random.default_rng(3).normal(size=(4, V, D))
    weights = [2.0, 1.0, 0.0, 3.0]
    for i in range(4):
        message, rows[i] = dispatch(state, rows[i], Request(i))
        np.testing.assert_allclose(message.extra.centre, 1 / 3)
        assert float(message.extra.share) == 1.0
        upload = Simplex(*simplex_of(changes[i] * (weights[i] > 0)))
        given_ = arrival(upload, message.params, client=i, weight=weights[i], closes=i % 2 == 1, extra=message.extra)
        state, rows[i], _ = receive(state, rows[i], given_)
        if i % 2 == 1:
            assert not bool(state.begun)
            state, rows[i] = close(state, rows[i])
    assert bool(state.begun)
    want = placed_by_hand(-changes[[0, 1, 3]].reshape(3, -1), V)
    for i, centre in zip([0, 1, 3], want, strict=True):
        message, _ = dispatch(state, rows[i], Request(i))
        np.testing.assert_allclose(message.extra.centre, centre, atol=1e-8)
        assert float(message.extra.share) == pytest.approx(0.2)
    np.testing.assert_allclose(dispatch(state, rows[2], Request(2))[0].extra.centre, 1 / 3)


test_bad_options_are_refused = refusals(
    (lambda: floco(regions=1.5), "^regions = 1.5: must be"),
    (lambda: floco(regions=0.5, vertices=1), "^vertices = 1: must be at least 2 if regions < 1"),
    (lambda: floco(regions=0.5, radius=0.0), "^radius = 0.0: must be"),
    (lambda: floco(radius=0.3), "^radius = 0.3: must be left out unless regions < 1"),
    (lambda: floco(signal=9), "^signal = 9: must be left out unless regions < 1"),
    (lambda: floco(regions=0.5, signal=0), "^signal = 0: must be"),
    (lambda: floco_client(MODEL, optimizer=optax.sgd(0.1), regions=-1.0), "^regions = -1.0: must be"),
)
