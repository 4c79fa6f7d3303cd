"""FLOCO, server, clients and regions, against float64 NumPy on the vertices themselves; FedMRUR's reaggregation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import simulate
from fedjax_async.geometry import sample_weights
from fedjax_async.local import DECAYS, local_training, run_job
from fedjax_async.server import closed, floco
from fedjax_async.server.fedmrur import fedmrur_client, reaggregated
from fedjax_async.server.floco import _POINT, Simplex, floco_client
from fedjax_async.server.regions import SCALES, Region, energy, placed, projected, sketched, within
from fedjax_async.types import Facts, Message, Request
from tests.local.made_up import MODEL, client_data, flat, groups, slope, start_params, start_vector
from tests.refusals import refusals
from tests.server.made_up import arrival

pytestmark = pytest.mark.float64

KEY, BATCH, V = jax.random.key(11), 8, 3
D = 15  # parameters of the softmax regression, as [b, w]


def first_message(server):
    """What the server sends first, compiled."""
    return jax.jit(lambda params: server.dispatch(*server.init(params), Request())[0])(start_params())


def job(message, steps, client=None, state=(), **options):
    """A job of the client, compiled; by default of FLOCO's by SGD at a rate of 0.3."""
    client = client or floco_client(MODEL, optimizer=optax.sgd(0.3), batch_size=BATCH, **options)
    return jax.jit(lambda message, state: run_job(client, KEY, message, state, client_data(), steps))(message, state)


def vertices_of(params, offsets):
    """[V, D] from a centroid and the offsets of all vertices but the first."""
    rest = np.stack([flat(jax.tree.map(lambda leaf, v=v: np.asarray(leaf)[v], offsets)) for v in range(V - 1)])
    return flat(params) + np.concatenate([-rest.sum(axis=0)[None], rest])


def simplex_of(vertices):
    """Centroid and offsets as pytrees."""
    _, back = jax.flatten_util.ravel_pytree(start_params())
    centre = vertices.mean(axis=0)
    return back(jnp.asarray(centre)), jax.vmap(back)(jnp.asarray(vertices[1:] - centre))


def test_the_first_simplex_lies_around_the_models_initialisation():
    x = flat(start_params())
    for spread in (1.0, 0.5, 0.0):
        server = floco(spread=spread)
        message, sent = first_message(server), jax.jit(lambda p, s=server: s.params(s.init(p)[0]))
        vertices = vertices_of(message.params, message.extra)
        np.testing.assert_array_equal(flat(message.params), x)
        np.testing.assert_array_equal(flat(sent(start_params())), x)
        moved = (vertices - x) / (spread or 1.0)
        if spread:  # vertex 0 is not shuffled: x - mean; the others differ from it by shuffles of each tensor
            shuffled = moved + x - moved[0]
            for part in (slice(0, 3), slice(3, D)):
                np.testing.assert_allclose(np.sort(shuffled[:, part]), np.sort([x[part]] * V), atol=1e-12)
            assert np.abs(moved).max() > 0.3
        else:
            np.testing.assert_array_equal(moved, 0.0)


CENTRE, SHARE = np.array([0.7, 0.2, 0.1]), 0.15


def in_region(centre=CENTRE, share=SHARE):
    """The first message to a client of a region."""
    message = first_message(floco())
    return message._replace(extra=Region(message.extra, jnp.asarray(centre), jnp.asarray(share)))


def by_hand(vertices, steps, mu=0.0, floor=1.0, region=None):
    """SGD on the vertices: each vertex's gradient is its weight times the gradient at a point drawn from the simplex.

    The rate falls linearly within the job, from 0.3 towards ``floor`` times it.
    """
    start, now = vertices, vertices
    for k, rows in enumerate(groups(KEY, 0, BATCH, steps)):
        share = np.asarray(sample_weights(jax.random.fold_in(jax.random.fold_in(KEY, _POINT), k), V))
        if region is not None:
            centre = np.asarray(region.centre)
            share = centre + float(region.share) * (share - centre)
        rate = 0.3 * (1 - (1 - floor) * k / steps)
        now = now - rate * (share[:, None] * slope(share @ now, rows) + mu * (now - start))
    return now - start


@pytest.mark.parametrize(("mu", "floor"), [(0.0, 1.0), (0.7, 1.0), (0.0, 0.2)])
def test_a_job_trains_the_vertices_at_points_of_the_simplex(mu, floor):
    message, scale = first_message(floco()), None if floor == 1 else DECAYS["linear"](floor=floor)
    upload, _ = job(message, 9, proximal=mu, scale=scale)
    want = by_hand(vertices_of(message.params, message.extra), 9, mu, floor)
    np.testing.assert_allclose(vertices_of(*upload), want, rtol=1e-10, atol=1e-12)
    assert np.ptp(want, axis=0).max() > 0.1  # the vertices part


def test_a_job_trains_the_vertices_at_points_of_the_region():
    client = floco_client(MODEL, optimizer=optax.sgd(0.3), batch_size=BATCH, regions=0.5)
    # the second is before the second stage: as without regions
    for message, steps in ((in_region(), 6), (in_region(np.full(3, 1 / 3), 1.0), 2)):
        start = vertices_of(message.params, message.extra.offsets)
        upload, _ = job(message, steps, client)
        want = by_hand(start, steps, region=message.extra)
        np.testing.assert_allclose(vertices_of(*upload), want, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(flat(client.own(message, ())), np.asarray(message.extra.centre) @ start, rtol=1e-12)


def test_with_one_vertex_a_job_is_that_of_fedavg():
    given = {"optimizer": optax.adam(0.1), "batch_size": BATCH}
    upload, _ = job(first_message(floco(vertices=1)), 5, floco_client(MODEL, **given))
    delta, _ = job(Message(start_params()), 5, local_training(MODEL, **given))
    np.testing.assert_allclose(flat(upload.params), flat(delta), rtol=1e-12)


def test_private_leaves_are_the_same_in_all_vertices():
    """They train with the whole gradient at the sampled point, are never sent, and are the own model's."""
    model = MODEL._replace(private=lambda path: path == ("b",))
    message, options = first_message(floco()), {"optimizer": optax.sgd(0.3), "batch_size": BATCH}
    client = floco_client(model, **options)
    upload, (_, kept) = job(message, 1, client, client.init(start_params()))
    assert not np.any(upload.params["b"]) and np.any(upload.params["w"]) and np.any(upload.offsets["w"])
    share = np.asarray(sample_weights(jax.random.fold_in(jax.random.fold_in(KEY, _POINT), 0), V))
    point = share @ vertices_of(message.params, message.extra)
    point[:3] = bias = start_vector()[:3]
    (rows,) = groups(KEY, 0, BATCH, 1)
    np.testing.assert_allclose(kept["b"], bias - 0.3 * slope(point, rows)[:3], rtol=1e-4)
    regional = floco_client(model, **options, regions=0.5)
    inner, leaves = regional.init(start_params())
    own = regional.own(in_region(), (inner, {**leaves, "b": leaves["b"] + 2.0}))
    np.testing.assert_allclose(own["b"], start_params()["b"] + 2.0, rtol=1e-12)


# --- regions ----------------------------------------------------------------------------------


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


def test_clients_are_placed_by_their_principal_components_and_those_not_seen_at_the_centroid():
    signals = np.random.default_rng(0).normal(size=(5, 8)) * np.linspace(2.0, 0.2, 8)
    place, want = jax.jit(placed, static_argnums=2), placed_by_hand(signals, 3)
    found = np.asarray(place(np.insert(signals, 2, 0.0, axis=0), np.arange(6) != 2, 3))
    np.testing.assert_allclose(np.delete(found, 2, axis=0), want, atol=1e-9)
    np.testing.assert_allclose(found[2], 1 / 3)
    np.testing.assert_allclose(place(signals, np.ones(5, bool), 3), want, atol=1e-9)
    assert np.ptp(want, axis=0).min() > 0.1
    few = place(signals[:2], np.ones(2, bool), 4)  # fewer clients than vertices
    assert few.shape == (2, 4) and np.allclose(few.sum(axis=1), 1.0)


project = jax.jit(projected)


@settings(max_examples=30)
@given(seed=st.integers(0, 999), scale=st.floats(1e-3, 1.0), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_the_projection_is_that_of_bisection(seed, scale, size):
    points = size * np.random.default_rng(seed).normal(size=(3, 4))
    found = project(points, scale)
    np.testing.assert_allclose(found, onto_simplex(points, scale), atol=1e-7)


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


def test_vertices_are_averaged_by_examples_and_the_stage_after_a_share_of_the_steps_places_the_clients():
    """Two server steps of two arrivals each; the rejected upload of client 2 leaves no signal."""
    server = floco(regions=0.5, radius=0.4, server_lr=0.5)
    state, memory = server.init(start_params(), Facts(4, False, 8, 4))
    rows, weights = [memory] * 4, [2.0, 1.0, 0.0, 3.0]
    receive, dispatch = jax.jit(server.receive), jax.jit(server.dispatch)
    close = jax.jit(lambda state, memory: closed(server, state, memory))
    changes = np.random.default_rng(3).normal(size=(4, V, D))
    for i in range(4):
        message, rows[i] = dispatch(state, rows[i], Request(i))
        np.testing.assert_allclose(message.extra.centre, 1 / 3)
        assert float(message.extra.share) == 1.0
        upload = Simplex(*simplex_of(changes[i] * (weights[i] > 0)))
        told = {"weight": weights[i], "closes": i % 2 == 1, "extra": message.extra}
        state, rows[i], _ = receive(state, rows[i], arrival(upload, message.params, client=i, **told))
        if i % 2 == 1:
            assert not bool(state.begun)
            state, rows[i] = close(state, rows[i])
            before, (message, _) = (
                vertices_of(message.params, message.extra.offsets),
                dispatch(state, rows[i], Request(i)),
            )
            want = before + 0.5 * np.average(changes[i - 1 : i + 1], axis=0, weights=weights[i - 1 : i + 1])
            np.testing.assert_allclose(vertices_of(message.params, message.extra.offsets), want, rtol=1e-12)
            np.testing.assert_allclose(flat(server.params(state)), want.mean(axis=0), rtol=1e-12)
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


# --- FedMRUR ----------------------------------------------------------------------------------


@pytest.mark.float64
def test_each_client_of_a_cohort_is_sent_its_own_region():
    given = {
        "method": "floco:regions=0.3@cohort:size=3",
        "model": "logistic",
        "clients": 6,
        "server_steps": 8,
        "steps": 2,
    }
    have, want = simulate(**given), simulate(**given, engine="reference")
    plain = simulate(**given | {"method": "floco@cohort:size=3"})
    for ours, theirs, without in zip(*(jax.tree.leaves(run.params) for run in (have, want, plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        assert np.abs(ours - without).max() > 1e-4


def test_opposite_directions_reaggregate_to_nothing():
    """Their mean has no direction; ``test_rules.py`` has those that have one."""
    add, start = reaggregated(), start_params()
    state = add.init(start)
    for direction in (start, jax.tree.map(jnp.negative, start)):
        state = add.add(state, direction, jnp.asarray(1.0), None)
    np.testing.assert_array_equal(flat(add.close(state)[0]), 0.0)


def test_fedmrurs_client_is_fedprox_in_flat_space():
    given = {"optimizer": optax.sgd(1e-3), "batch_size": BATCH}
    mrur = fedmrur_client(MODEL, **given, proximal=0.8, sigma=2.0, beta=1e8)
    prox = local_training(MODEL, **given, proximal=0.4)
    ours, theirs = (job(Message(start_params()), 6, client)[0] for client in (mrur, prox))
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-6)
