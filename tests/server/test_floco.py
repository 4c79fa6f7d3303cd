"""FLOCO, server and clients, against float64 NumPy on the vertices themselves; FedMRUR's reaggregation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.geometry import sample_weights
from fedjax_async.local import DECAYS, local_training, run_job
from fedjax_async.server import closed, floco
from fedjax_async.server.fedmrur import fedmrur_client, reaggregated
from fedjax_async.server.floco import _POINT, Simplex, floco_client
from fedjax_async.types import Facts, Message, Request
from tests.local.made_up import MODEL, client_data, flat, groups, slope, start_params, start_vector
from tests.server.made_up import arrival

pytestmark = pytest.mark.float64

KEY, BATCH, V = jax.random.key(11), 8, 3
D = 15  # parameters of the softmax regression, as [b, w]


def first_message(server):
    """What the server sends first, compiled."""
    return jax.jit(lambda params: server.dispatch(*server.init(params), Request())[0])(start_params())


def job(client, message, steps, state=()):
    """A job of the client, compiled."""
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


def test_the_server_averages_every_vertex_by_examples():
    chance = np.random.default_rng(0)
    weights = [3.0, 1.0, 0.0, 2.0]  # one is rejected
    server = floco(server_lr=0.5)
    state, memory = server.init(start_params(), Facts(4, False, 4, 1))
    message, _ = server.dispatch(state, memory, Request())
    before = vertices_of(message.params, message.extra)
    changes = chance.normal(size=(4, V, D))
    for i, (weight, change) in enumerate(zip(weights, changes)):
        upload = Simplex(*simplex_of(change * (weight > 0)))
        given = arrival(upload, message.params, client=i, weight=weight, closes=i == 3, extra=message.extra)
        state, memory, _ = server.receive(state, memory, given)
    state, memory = closed(server, state, memory)
    message, _ = server.dispatch(state, memory, Request())
    want = before + 0.5 * np.average(changes, axis=0, weights=weights)
    np.testing.assert_allclose(vertices_of(message.params, message.extra), want, rtol=1e-12)
    np.testing.assert_allclose(flat(server.params(state)), want.mean(axis=0), rtol=1e-12)


def by_hand(vertices, steps, lr, mu, floor=1.0):
    """SGD on the vertices: each vertex's gradient is its weight times the gradient at a point drawn from the simplex.

    The rate falls linearly within the job, from ``lr`` towards ``floor * lr``.
    """
    start, now = vertices, vertices
    for k, rows in enumerate(groups(KEY, 0, BATCH, steps)):
        key = jax.random.fold_in(jax.random.fold_in(KEY, _POINT), k)
        share = np.asarray(sample_weights(key, V))
        rate = lr * (1 - (1 - floor) * k / steps)
        now = now - rate * (share[:, None] * slope(share @ now, rows) + mu * (now - start))
    return now - start


@pytest.mark.parametrize(("mu", "floor"), [(0.0, 1.0), (0.7, 1.0), (0.0, 0.2)])
def test_a_job_trains_the_vertices_at_points_of_the_simplex(mu, floor):
    scale = None if floor == 1 else DECAYS["linear"](floor=floor)
    client = floco_client(MODEL, optimizer=optax.sgd(0.3), batch_size=BATCH, proximal=mu, scale=scale)
    message = first_message(floco())
    upload, _ = job(client, message, 9)
    want = by_hand(vertices_of(message.params, message.extra), 9, 0.3, mu, floor)
    np.testing.assert_allclose(vertices_of(*upload), want, rtol=1e-10, atol=1e-12)
    assert np.ptp(want, axis=0).max() > 0.1  # the vertices part


def test_with_one_vertex_a_job_is_that_of_fedavg():
    message = first_message(floco(vertices=1))
    client = floco_client(MODEL, optimizer=optax.adam(0.1), batch_size=BATCH)
    plain = local_training(MODEL, optimizer=optax.adam(0.1), batch_size=BATCH)
    upload, _ = job(client, message, 5)
    delta, _ = job(plain, Message(start_params()), 5)
    np.testing.assert_allclose(flat(upload.params), flat(delta), rtol=1e-12)


def test_private_leaves_are_the_same_in_all_vertices():
    """They train with the whole gradient at the sampled point, and are never sent."""
    model = MODEL._replace(private=lambda path: path == ("b",))
    client = floco_client(model, optimizer=optax.sgd(0.3), batch_size=BATCH)
    message = first_message(floco())
    upload, (_, kept) = job(client, message, 1, client.init(start_params()))
    assert not np.any(upload.params["b"]) and np.any(upload.params["w"]) and np.any(upload.offsets["w"])
    share = np.asarray(sample_weights(jax.random.fold_in(jax.random.fold_in(KEY, _POINT), 0), V))
    point = share @ vertices_of(message.params, message.extra)
    point[:3] = bias = start_vector()[:3]
    (rows,) = groups(KEY, 0, BATCH, 1)
    np.testing.assert_allclose(kept["b"], bias - 0.3 * slope(point, rows)[:3], rtol=1e-4)


# --- FedMRUR ----------------------------------------------------------------------------------


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
    ours, theirs = (job(c, Message(start_params()), 6)[0] for c in (mrur, prox))
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-6)
