"""Staleness weights against their formulas, the pieces from which rules are chained, and identities among rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import geometry, simulate
from fedjax_async.base import tree
from fedjax_async.base.notices import AllRejected
from fedjax_async.server import (
    SERVERS,
    STALENESS,
    Transform,
    asgd,
    ca2fl,
    chain,
    clip_by_norm,
    dc_asgd,
    delay_corrected,
    fedasync,
    fedavg,
    fedbuff,
    rule,
    scale_by,
    scale_by_staleness,
    staleness_weight,
    stateless,
    towards_client,
)
from fedjax_async.types import Arrival
from tests.server.made_up import CLIENTS, D, closing, flat, random_uploads, received, run, stacked, start_params
from tests.server.textbook import Upload


@pytest.mark.parametrize(("name", "weight"), {"constant": 1.0, "hinge": 1 / 51, "polynomial": 10**-0.5}.items())
def test_staleness_weights_have_the_papers_defaults_and_the_default_float(name, weight):
    found = STALENESS[name]()(jnp.int32(9))
    assert found.shape == () and found.dtype == jnp.float32
    np.testing.assert_allclose(found, weight, rtol=1e-6)


def counting(step):
    """Multiplies the n-th accepted direction by ``step ** n``, so that its state matters."""

    def update(direction, count, params, arrival):
        del params
        moved = jax.tree.map(lambda leaf: leaf * jnp.asarray(step**count, leaf.dtype), direction)
        return moved, count + 1, jnp.ones_like(arrival.weight)

    return Transform(lambda params: jnp.zeros((), float), update)


def by_time(arrival):
    return arrival.time + 1.0


PARTS = {
    "plus one": stateless(lambda d, params, arrival: jax.tree.map(lambda leaf: leaf + 1, d)),
    "by time": scale_by(by_time),  # 4
    "doubling": counting(2.0),
    "tripling": counting(3.0),
    "towards the client": towards_client(),
    "by staleness": scale_by_staleness(staleness_weight("polynomial"), 0.6),
    "half": scale_by_staleness(lambda tau: 0.5, 0.5),
    "whole": scale_by_staleness(lambda tau: 1, 0.5),
    "of whole numbers": scale_by_staleness(lambda tau: 4 - tau, 0.5),
}
CHAINS = [  # parts, the direction of an upload d after n others from start s at x, the weight
    ("", lambda d, s, x, n: d, 1.0),
    ("by time, plus one, doubling, tripling", lambda d, s, x, n: (4 * d + 1) * 6.0**n, 4.0),
    ("plus one, by time", lambda d, s, x, n: 4 * (d + 1), 4.0),
    ("towards the client", lambda d, s, x, n: s + d - x, 1.0),
    ("towards the client, by time, by staleness", lambda d, s, x, n: 1.2 * (s + d - x), 1.2),
    ("half", lambda d, s, x, n: 0.25 * d, 0.25),
    ("whole", lambda d, s, x, n: 0.5 * d, 0.5),
    ("of whole numbers", lambda d, s, x, n: 0.5 * d, 0.5),
]


@pytest.mark.parametrize(("names", "expected", "weight"), CHAINS)
def test_a_chain_applies_its_parts_in_order_keeps_each_state_and_weighs_as_their_product(names, expected, weight):
    arrival = tree.gather(stacked(random_uploads(0, 4, rejected=0.0)), 3)._replace(staleness=jnp.int32(3))
    parts, params = [PARTS[name] for name in names.split(", ") if name], start_params()
    both = chain(*parts)
    state = both.init(params)
    for n in range(3):
        direction, state, found = both.update(arrival.upload, state, params, arrival)
        want = expected(*map(flat, (arrival.upload, arrival.start, params)), n)
        np.testing.assert_allclose(flat(direction), want, rtol=1e-5)
        np.testing.assert_allclose(found, weight, rtol=1e-6)
        assert state == tuple(n + 1 if name in ("doubling", "tripling") else () for name in names.split(", ") if name)


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


@pytest.mark.parametrize(("size", "limit"), [(0.0, 1e-3), (1.0, 1e30), (1e6, jnp.inf), (1e6, jnp.float32(jnp.inf))])
def test_clipping_far_away_is_no_clipping(limit, size):
    delta = np.float32(size * np.random.default_rng(0).normal(size=D))
    arrival = tree.gather(stacked([Upload(delta, delta, 0, 1.0, True)]), 0)
    direction, state, weight = clip_by_norm(jnp.asarray(limit)).update(arrival.upload, (), arrival.start, arrival)
    np.testing.assert_array_equal(flat(direction), delta)
    assert weight == 1.0 and state == ()


def clipped_first(*, limit):
    return rule(clip_by_norm(limit), delay_corrected(geometry.dc_asgd(strength=0.2)), optimizer=optax.sgd(1.0))


@pytest.mark.float64
def test_a_clipped_delta_may_be_corrected_too():
    uploads = closing(random_uploads(4, 8, rejected=0.0))
    short = [u._replace(delta=u.delta * min(1.0, 2.0 / np.linalg.norm(u.delta))) for u in uploads]
    want = run(dc_asgd, start_params(), short, strength=0.2)[1]
    np.testing.assert_allclose(run(clipped_first, start_params(), uploads, limit=2.0)[1], want, rtol=1e-10)


# --- FedStaleWeight: what its weights are for, and where they are zero ------------------------------

WORLD = {"dataset": "quadratic", "model": "linear", "partition": "natural", "steps": 1}


def run_of(method, timing="buffer:size=3,sampling=same", updates=1998):
    return simulate(method=f"{method}@{timing}", delay="lognormal:heterogeneity=1", updates=updates, **WORLD)


def influence(method):
    """The sum of each client's shares in the server steps, as a part of the mean of all."""
    table = run_of(method).updates
    total = np.bincount(table["step"], table["weight"])[table["step"]]
    shares = np.divide(table["weight"], total, out=np.zeros(len(total)), where=total > 0)
    of_client = np.bincount(table["client"], shares)
    return of_client / of_client.mean()


def test_slow_clients_count_more_nearly_as_fast_ones_do():
    fair, usual = influence("fedstaleweight"), influence("fedbuff:staleness=constant")
    assert usual.max() > 10 * usual.min() and fair.max() < 5 * fair.min()
    slow = np.argsort(usual)[: len(usual) // 2]
    assert (fair[slow] > usual[slow]).all()


def test_in_rounds_nothing_is_stale_and_nothing_moves():
    with pytest.warns(AllRejected, match="30 of weight 0"):
        run = run_of("fedstaleweight", "cohort:size=3", updates=30)
    assert run.counters["unchanged_steps"] == run.counters["server_steps"] == 10


# --- identities and what all rules share ----------------------------------------------------------

seeds = st.integers(0, 2**31)


def end(factory, uploads, **options):
    """Params [D] at the end of a run from ``start_params()``."""
    return run(factory, start_params(), uploads, **options)[1][-1]


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, a=st.floats(0.01, 0.99), k=st.integers(1, 12))
def test_fedasync_from_one_dispatch_is_asgd_with_geometric_weights(seed, a, k):
    """``x_k = x_0 + sum_i a (1 - a)^(k - i) Delta_i`` when all k clients started from x_0."""
    uploads = [u._replace(start=flat(start_params())) for u in closing(random_uploads(seed, k, rejected=0.0))]
    weighted = [u._replace(delta=a * (1 - a) ** (k - i) * u.delta) for i, u in enumerate(uploads, start=1)]
    mixed = end(fedasync, uploads, mixing=a, staleness="constant")
    np.testing.assert_allclose(mixed, end(asgd, weighted, server_lr=1.0), rtol=1e-10, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_fedbuff_over_all_clients_without_staleness_is_uniform_fedavg(seed, lr):
    uploads = closing(random_uploads(seed, 12, rejected=0.0), at=range(3, 12, 4))
    expected = end(fedavg, uploads, weighting="uniform", server_lr=lr)
    constant = end(fedbuff, uploads, staleness="constant", server_lr=lr)
    fresh = end(fedbuff, [u._replace(staleness=0) for u in uploads], server_lr=lr)
    np.testing.assert_allclose(constant, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(fresh, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.float64
@settings(max_examples=25)
@given(seed=seeds, lr=st.floats(0.01, 2.0))
def test_ca2fl_whose_buffer_holds_every_client_is_uniform_fedavg(seed, lr):
    """The caches cancel: ``h + mean(Delta_i - h_i) = mean Delta_i``."""
    uploads = closing(random_uploads(seed, 3 * CLIENTS, rejected=0.0), at=range(CLIENTS - 1, 3 * CLIENTS, CLIENTS))
    expected = end(fedavg, uploads, weighting="uniform", server_lr=lr)
    np.testing.assert_allclose(end(ca2fl, uploads, server_lr=lr), expected, atol=1e-10)
    assert np.abs(end(ca2fl, uploads, clients=CLIENTS + 1, server_lr=lr) - expected).max() > 1e-4 * lr


@pytest.mark.parametrize("weight", [jnp.int32(7), 7])
@pytest.mark.parametrize("name", ["fedasync", "fedavg", "orthofl_released", "fednova", "dc_asgd", "krum"])
def test_an_integer_number_of_examples_is_as_good_as_a_float(name, weight):
    """One rule of each way to weigh uploads."""
    rule = SERVERS[name]()

    def after(weight):
        number = jnp.int32
        arrival = Arrival(jnp.ones(3), jnp.zeros(3), number(2), weight, number(0), 1.0, jnp.bool_(True), number(2))
        return received(rule)(*rule.init(jnp.zeros(3)), arrival)

    have, want = after(weight), after(jnp.float32(7))
    assert want[2].weight > 0.3
    jax.tree.map(np.testing.assert_array_equal, have, want)
    assert [leaf.dtype for leaf in jax.tree.leaves(have)] == [leaf.dtype for leaf in jax.tree.leaves(want)]


@pytest.mark.parametrize(("name", "options"), [("dc_asgd", {}), ("dc_asgd_a", {"clip": 5.0})])
def test_a_delta_whose_square_overflows_is_rejected(name, options):
    good = closing(random_uploads(5, 6, rejected=0.0))
    huge = Upload(np.full(D, 1e30), good[0].start, 0, 4.0, True)
    before = run(SERVERS[name], start_params(), good, **options)
    after = run(SERVERS[name], start_params(), [*good, huge], **options)
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    np.testing.assert_array_equal(after[2], [*before[2], 0.0])
    assert np.isfinite(after[1]).all()
