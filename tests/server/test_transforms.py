"""Staleness weights against their formulas, and the pieces from which rules are chained."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import tree
from fedjax_async.server import (
    STALENESS,
    Transform,
    chain,
    rule,
    scale_by,
    scale_by_staleness,
    staleness_weight,
    stateless,
    towards_client,
)
from tests.server import textbook
from tests.server.made_up import closing, flat, random_uploads, run, stacked, start_params

TAU = np.arange(200, dtype=np.int32)


@settings(max_examples=30)
@given(exponent=st.floats(0.0, 3.0), slope=st.floats(0.01, 50.0), threshold=st.floats(0.0, 20.0))
def test_staleness_weights_are_their_formulas(exponent, slope, threshold):
    with jax.enable_x64(True):
        cases = [
            (staleness_weight("constant"), textbook.constant),
            (staleness_weight("polynomial", exponent=exponent), lambda tau: textbook.polynomial(tau, exponent)),
            (
                staleness_weight("hinge", slope=slope, threshold=threshold),
                lambda tau: textbook.hinge(tau, slope, threshold),
            ),
        ]
        for weight, formula in cases:
            found = np.asarray(weight(jnp.asarray(TAU)))
            np.testing.assert_allclose(found, [formula(int(tau)) for tau in TAU], rtol=1e-12)
            assert found[0] == 1.0 and np.all(np.diff(found) <= 0) and np.all(found > 0)


@pytest.mark.parametrize("name", STALENESS)
def test_staleness_weights_have_the_papers_defaults_and_the_default_float(name):
    found = STALENESS[name]()(jnp.int32(9))
    assert found.shape == () and found.dtype == jnp.float32
    np.testing.assert_allclose(found, {"constant": 1.0, "hinge": 1 / 51, "polynomial": 10**-0.5}[name], rtol=1e-6)


def counting(step):
    """Multiplies the n-th accepted direction by ``step ** n``, so that its state matters."""

    def update(direction, count, params, arrival):
        del params, arrival
        return jax.tree.map(lambda leaf: leaf * jnp.asarray(step**count, leaf.dtype), direction), count + 1

    return Transform(lambda params: jnp.zeros((), float), update, lambda arrival: jnp.ones_like(arrival.weight))


def by_time(arrival):
    return arrival.time + 1.0


def test_a_chain_applies_its_parts_in_order_and_keeps_each_state():
    plus_one = stateless(lambda d, params, arrival: jax.tree.map(lambda leaf: leaf + 1, d))
    arrival = tree.take(stacked(random_uploads(0, 4, rejected=0.0)), 3)
    params = start_params()
    both = chain(scale_by(by_time), plus_one, counting(2.0), counting(3.0))
    state = both.init(params)
    assert len(state) == 4 and state[0] == state[1] == ()
    for n in range(3):
        direction, state = both.update(arrival.upload, state, params, arrival)
        np.testing.assert_allclose(flat(direction), (4 * flat(arrival.upload) + 1) * 6.0**n, rtol=1e-5)
        assert state[2:] == (n + 1, n + 1)
    other = chain(plus_one, scale_by(by_time))
    direction, _ = other.update(arrival.upload, other.init(params), params, arrival)
    np.testing.assert_allclose(flat(direction), 4 * (flat(arrival.upload) + 1), rtol=1e-5)


def test_a_chain_weighs_as_the_product_of_its_parts():
    arrival = tree.take(stacked(random_uploads(0, 4)), 2)._replace(staleness=jnp.int32(3))
    parts = chain(towards_client(), scale_by(by_time), scale_by_staleness(staleness_weight("polynomial"), 0.6))
    np.testing.assert_allclose(parts.weight(arrival), 3 * 0.6 * 0.5, rtol=1e-6)
    assert chain().weight(arrival) == 1.0 and towards_client().weight(arrival) == 1.0
    direction, state = chain().update(arrival.upload, (), start_params(), arrival)
    assert state == () and direction is arrival.upload


def test_towards_client_points_from_the_server_to_the_trained_model():
    with jax.enable_x64(True):
        upload, params = random_uploads(1, 1, rejected=0.0)[0], start_params()
        direction, _ = towards_client().update(
            tree.take(stacked([upload]), 0).upload, (), params, tree.take(stacked([upload]), 0)
        )
        np.testing.assert_allclose(flat(direction), upload.start + upload.delta - flat(params), rtol=1e-12, atol=1e-14)


def doubling():
    return rule(counting(2.0), scale_by(by_time), optimizer=optax.sgd(1.0))


def test_the_state_of_a_transform_skips_rejected_arrivals_and_survives_closing():
    first, second, third = random_uploads(2, 3, rejected=0.0)
    lost = random_uploads(3, 1, rejected=1.0)[0]
    uploads = closing([first, lost, second, lost, third], at=[0, 3, 4])
    with jax.enable_x64(True):
        state, path, weights = run(doubling, start_params(), uploads)
        deltas = first.delta + 3 * 2 * second.delta + 5 * 4 * third.delta
        np.testing.assert_allclose(path[-1], flat(start_params()) + deltas, rtol=1e-9, atol=1e-12)
        assert state.transforms[0] == 3
        np.testing.assert_array_equal(weights, [1, 0, 3, 0, 5])
