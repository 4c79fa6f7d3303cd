"""Staleness weights against their formulas, and the pieces from which rules are chained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import geometry
from fedjax_async.base import tree
from fedjax_async.server import (
    STALENESS,
    Transform,
    chain,
    clip_by_norm,
    dc_asgd,
    delay_corrected,
    rule,
    scale_by,
    scale_by_staleness,
    staleness_weight,
    stateless,
    towards_client,
)
from tests.server.made_up import D, closing, flat, random_uploads, run, stacked, start_params
from tests.server.textbook import Upload

TAU = np.arange(200, dtype=np.int32)


@pytest.mark.parametrize("name", STALENESS)
def test_staleness_weights_have_the_papers_defaults_and_the_default_float(name):
    found = STALENESS[name]()(jnp.int32(9))
    assert found.shape == () and found.dtype == jnp.float32
    np.testing.assert_allclose(found, {"constant": 1.0, "hinge": 1 / 51, "polynomial": 10**-0.5}[name], rtol=1e-6)


def counting(step):
    """Multiplies the n-th accepted direction by ``step ** n``, so that its state matters."""

    def update(direction, count, params, arrival):
        del params
        moved = jax.tree.map(lambda leaf: leaf * jnp.asarray(step**count, leaf.dtype), direction)
        return moved, count + 1, jnp.ones_like(arrival.weight)

    return Transform(lambda params: jnp.zeros((), float), update)


def by_time(arrival):
    return arrival.time + 1.0


def test_a_chain_applies_its_parts_in_order_and_keeps_each_state():
    plus_one = stateless(lambda d, params, arrival: jax.tree.map(lambda leaf: leaf + 1, d))
    arrival = tree.gather(stacked(random_uploads(0, 4, rejected=0.0)), 3)
    params = start_params()
    both = chain(scale_by(by_time), plus_one, counting(2.0), counting(3.0))
    state = both.init(params)
    assert len(state) == 4 and state[0] == state[1] == ()
    for n in range(3):
        direction, state, _ = both.update(arrival.upload, state, params, arrival)
        np.testing.assert_allclose(flat(direction), (4 * flat(arrival.upload) + 1) * 6.0**n, rtol=1e-5)
        assert state[2:] == (n + 1, n + 1)
    other = chain(plus_one, scale_by(by_time))
    direction, _, _ = other.update(arrival.upload, other.init(params), params, arrival)
    np.testing.assert_allclose(flat(direction), 4 * (flat(arrival.upload) + 1), rtol=1e-5)


def test_a_chain_weighs_as_the_product_of_its_parts():
    arrival = tree.gather(stacked(random_uploads(0, 4)), 2)._replace(staleness=jnp.int32(3))
    parts = chain(towards_client(), scale_by(by_time), scale_by_staleness(staleness_weight("polynomial"), 0.6))
    params = start_params()
    _, _, weight = parts.update(arrival.upload, parts.init(params), params, arrival)
    np.testing.assert_allclose(weight, 3 * 0.6 * 0.5, rtol=1e-6)
    assert towards_client().update(arrival.upload, (), params, arrival)[2] == 1.0
    direction, state, weight = chain().update(arrival.upload, (), params, arrival)
    assert state == () and direction is arrival.upload and weight == 1.0


@pytest.mark.parametrize("weight", [lambda tau: 0.5, lambda tau: 1, lambda tau: 3 - tau])
def test_a_weight_of_staleness_may_be_a_number_or_whole(weight):
    arrival = tree.gather(stacked(random_uploads(0, 4)), 2)._replace(staleness=jnp.int32(2))
    direction, _, found = scale_by_staleness(weight, 0.5).update(arrival.upload, (), start_params(), arrival)
    expected = 0.5 * {0.5: 0.5}.get(weight(2), 1)
    assert float(found) == expected
    np.testing.assert_allclose(flat(direction), expected * flat(arrival.upload), rtol=1e-6)


def doubling():
    return rule(counting(2.0), scale_by(by_time), optimizer=optax.sgd(1.0))


@pytest.mark.float64
def test_the_state_of_a_transform_skips_rejected_arrivals_and_survives_closing():
    first, second, third = random_uploads(2, 3, rejected=0.0)
    lost = random_uploads(3, 1, rejected=1.0)[0]
    uploads = closing([first, lost, second, lost, third], at=[0, 3, 4])
    state, path, weights = run(doubling, start_params(), uploads)
    deltas = first.delta + 3 * 2 * second.delta + 5 * 4 * third.delta
    np.testing.assert_allclose(path[-1], flat(start_params()) + deltas, rtol=1e-10, atol=1e-12)
    assert state.transforms[0] == 3
    np.testing.assert_array_equal(weights, [1, 0, 3, 0, 5])


def clipped(delta, limit):
    arrival = tree.gather(stacked([Upload(delta, delta, 0, 1.0, True)]), 0)
    direction, state, weight = clip_by_norm(limit).update(arrival.upload, (), arrival.start, arrival)
    assert state == ()
    return flat(direction), float(weight)


@pytest.mark.parametrize(("size", "limit"), [(0.0, 1e-3), (1.0, 1e30), (1e6, jnp.inf), (1e6, jnp.float32(jnp.inf))])
def test_clipping_far_away_is_no_clipping(limit, size):
    delta = np.float32(size * np.random.default_rng(0).normal(size=D))
    direction, weight = clipped(delta, jnp.asarray(limit))
    np.testing.assert_array_equal(direction, delta)
    assert weight == 1.0


def clipped_first(*, limit):
    return rule(clip_by_norm(limit), delay_corrected(geometry.dc_asgd(strength=0.2)), optimizer=optax.sgd(1.0))


@pytest.mark.float64
def test_a_clipped_delta_may_be_corrected_too():
    uploads = closing(random_uploads(4, 8, rejected=0.0))
    short = [u._replace(delta=u.delta * min(1.0, 2.0 / np.linalg.norm(u.delta))) for u in uploads]
    want = run(dc_asgd, start_params(), short, strength=0.2)[1]
    np.testing.assert_allclose(run(clipped_first, start_params(), uploads, limit=2.0)[1], want, rtol=1e-10)
