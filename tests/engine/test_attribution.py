"""The change of the loss by each arrival, against NumPy, for arrivals that share a server step and others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.engine import Components
from fedjax_async.engine.attribution import divided, make_attribution
from fedjax_async.server import ATTACKS, SERVERS, attacked, closed
from fedjax_async.types import Arrival, Facts
from tests.engine import problem

pytestmark = pytest.mark.float64

# example counts of the clients of six arrivals in two steps, and what is known of each; the fifth upload is rejected
SIZE, STALENESS = np.array([5.0, 2.0, 9.0, 1.0, 4.0, 3.0]), np.array([0, 1, 2, 0, 1, 3])
STEP, CLOSES, KEPT = np.array([0, 0, 0, 1, 1, 1]), np.array([False, False, True] * 2), np.array([1.0, 1, 1, 1, 0, 1])


def losses(params, direction=None, by=0.0):
    """The loss of each example, in NumPy, after a move along a direction."""
    w = jax.tree.map(lambda leaf, d: np.asarray(leaf, float) + by * np.asarray(d, float), params, direction or params)
    who = problem.data()
    out = np.tanh(who.x @ w["hidden"]["kernel"]) @ w["output"]["kernel"] + w["output"]["bias"]
    return np.log(np.exp(out).sum(axis=1)) - out[np.arange(len(who.y)), who.y]


def driven(rule, rejected=(), closing=(2, 5), scale=1.0, malicious=(), instead=None):
    """``(table, models, uploads)``: the probe's columns over six arrivals, and the models after each server step.

    ``instead(uploads)``: the uploads that take the place of the drawn ones.
    """
    who, start = problem.data(), problem.MODEL.init(jax.random.key(1))
    facts = Facts(len(who.size), every_closes=len(closing) == 6)
    parts = Components(rule, problem.client(), problem.MODEL, who)
    probe = make_attribution(parts, facts, (who.x, who.y), problem.CLASSES)
    state, memory = rule.init(start, facts)
    models, rows = [rule.params(state)], []
    keys = jax.random.split(jax.random.key(5), 6)
    uploads = [jax.tree.map(lambda leaf, k=k: jax.random.normal(k, leaf.shape), start) for k in keys]
    uploads = uploads if instead is None else instead(uploads)

    @jax.jit
    def turn(state, arrival):
        found = probe(state, memory, arrival, None)
        after, _, _ = rule.receive(state, memory, arrival)
        return found, after, closed(rule, after, memory)[0]

    for k, upload in enumerate(uploads):
        kept = float(k not in rejected)
        sent = jax.tree.map(lambda leaf, kept=kept: scale * kept * leaf, upload)
        values = jnp.asarray(kept * SIZE[k]), jnp.int32(k), jnp.asarray(float(k)), jnp.bool_(k in closing)
        arrival = Arrival(sent, models[-1], jnp.int32(STALENESS[k]), *values, malicious=jnp.bool_(k in malicious))
        found, state, after = turn(state, arrival)
        rows.append(found)
        if k in closing:
            state = after
            models.append(rule.params(state))
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}, models, uploads


SHARES = {
    "fedbuff": lambda: [(1.0 + STALENESS) ** -0.5 * KEPT / np.repeat([3.0, 2.0], 3)],
    "fedavg": lambda: [SIZE * KEPT / np.repeat([SIZE[:3].sum(), SIZE[3] + SIZE[5]], 3)],
    "asynfl": lambda: [KEPT / len(problem.data().size)],
}


@pytest.mark.parametrize("name", SHARES)
def test_arrivals_that_share_a_step_divide_it_as_the_rule_weighs_them(name):
    table, models, uploads = driven(SERVERS[name](server_lr=1.0), rejected={4})
    exact, linear = divided(table, STEP, CLOSES, shared=True)
    y, (share,) = problem.data().y, SHARES[name]()
    for k, number in enumerate(STEP):
        ahead, behind = (losses(models[number], uploads[k], by * share[k]) for by in (1e-5, -1e-5))
        slopes = (ahead - behind) / 2e-5
        by_class = [slopes[y == c].sum() / len(y) for c in range(problem.CLASSES)]
        np.testing.assert_allclose(linear[k], by_class, atol=1e-9)
    for number in (0, 1):
        here, there = (losses(models[number + i]).mean() for i in (0, 1))
        np.testing.assert_allclose(exact[number == STEP].sum(), there - here, rtol=1e-9)
        rest = (exact - linear)[(number == STEP) & (KEPT > 0)]
        np.testing.assert_allclose(rest, np.broadcast_to(rest[0], rest.shape), atol=1e-12)
    assert (exact[4] == 0).all() and (linear[4] == 0).all()


@pytest.mark.parametrize("case", ["rejected", "colluding"])
def test_forged_uploads_have_the_part_of_what_was_sent(case):
    """A forged upload that the server rejects has none; that of a colluding attacker is not its own upload's."""
    rule = SERVERS["fedbuff"](server_lr=1.0)
    if case == "rejected":
        forging = attacked(rule, ATTACKS["scaled"](factor=1e3), norm_limit=100.0)
        tables = driven(forging, malicious={4})[0], driven(rule, rejected={4})[0]
    else:
        shapes = jax.eval_shape(problem.MODEL.init, jax.random.key(1))
        forging = attacked(rule, ATTACKS["inner_product"](epsilon=0.5), shapes)

        def forged(u):
            return [*u[:4], jax.tree.map(lambda *honest: -sum(honest) / 8, *u[:4]), u[5]]

        tables = driven(forging, malicious={4})[0], driven(rule, instead=forged)[0]
    found, want = (divided(table, STEP, CLOSES, shared=True) for table in tables)
    np.testing.assert_allclose(found, want, atol=1e-12)
    assert np.any(want, axis=-1).tolist() == [[True] * 4 + [case == "colluding", True]] * 2


def test_what_never_closes_moved_nothing():
    table, *_ = driven(SERVERS["fedbuff"](), closing=(2,))
    exact, linear = divided(table, STEP, CLOSES & (STEP == 0), shared=True)
    assert exact[:3].any(axis=1).all() and not exact[3:].any() and not linear[3:].any()


def test_alone_an_arrival_has_the_whole_step_and_first_order_is_left_behind_quadratically():
    error = {}
    for scale in (1e-2, 1e-3):
        table, models, _ = driven(SERVERS["asgd"](), closing=range(6), scale=scale)
        exact, linear = divided(table, np.arange(6), np.ones(6, bool), shared=False)
        along = [losses(model).mean() for model in models]
        np.testing.assert_allclose(exact.sum(axis=1), np.diff(along), rtol=1e-7)
        error[scale] = np.abs(exact - linear).sum(axis=1)
    assert (error[1e-3] < 0.02 * np.abs(linear).sum(axis=1)).all()
    np.testing.assert_allclose(error[1e-2] / error[1e-3], 100, rtol=0.35)
