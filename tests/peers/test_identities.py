"""The paper's identities on runs: what moves the mass-weighted mean of all models, and what the anchor contracts.

Source: PushCen-ADFL (2026), Lemma C.2 (eq. 57), eqs. 102 and 103, Lemma C.5 (eq. 92); and for ``carry`` the move
``sum sigma_old (w_new - w_old)`` of the total, which the paper's buffer lacks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.clock import Until
from fedjax_async.compress import centroids
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_reference import _Nodes
from fedjax_async.local import local_training
from fedjax_async.local.anchored import Dictionary, anchored_training
from fedjax_async.peers import Delivery, plan_peers
from fedjax_async.peers.full_mixing import full_models
from fedjax_async.peers.pushcen_adfl import pushcen
from fedjax_async.types import ClientData, Message
from tests.engine.problem import data
from tests.peers.test_methods import MODEL, nothing_stays

pytestmark = pytest.mark.float64

SIZES, K, LR, LAMBDA = (9, 4, 13, 6, 7), 4, 0.05, 0.3
CLUSTERED = pushcen(nothing_stays, k=K)
FULL = full_models(nothing_stays)
ANCHORED = anchored_training(MODEL, optimizer=optax.sgd(LR), batch_size=4, anchor=LAMBDA)
STILL = local_training(MODEL, optimizer=optax.sgd(0.0), batch_size=4)


def planned(policy, topology, updates):
    return plan_peers(
        f"push_sum:policy={policy},capacity=2", "lognormal:heterogeneity=0.7", num_clients=5, local_steps=3,
        until=Until(updates=updates), topology=topology, seed=4,
    )  # fmt: skip


def flat(params):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])


class Followed:
    """The oracle's nodes, and beside them all models and messages with their masses."""

    def __init__(self, peer, client, schedule, spread):
        components = Components(peer, client, MODEL, data(SIZES))
        self.schedule, self.starts = schedule, [MODEL.init(jax.random.key(i if spread else 1)) for i in range(5)]
        self.nodes = _Nodes(components, schedule, self.starts[0], jax.random.key(2), np.inf)
        self.nodes.rows = [self.nodes.peer["init"](self.nodes.hyper, start) for start in self.starts]
        # one more reader than there are events: every message is kept
        self.nodes.readers = {(e, 0): len(schedule.client) + 1 for e in range(len(schedule.client))}
        self.models = [flat(start) for start in self.starts]
        self.mass, self.outside, self.sent, self.pending = np.ones(5), {}, {}, set()

    def total(self):
        """X_tot and Y_tot: of the nodes, and of the messages that no event has mixed yet."""
        x = sum(mass * model for mass, model in zip(self.mass, self.models))
        x = x + sum(mass * self.sent[source] for source, mass in self.outside.values())
        return x, self.mass.sum() + sum(mass for _, mass in self.outside.values())

    def event(self, e):
        """Play event e; returns S, the node's move, the sent mass, the quantisation error and the move by ``carry``."""
        s, who = self.schedule, int(self.schedule.client[e])
        entries = range(s.inbox_bounds[e], s.inbox_bounds[e + 1])
        mixed = self.models[who] + sum(s.weight[d] * (self.sent[s.source[d]] - self.models[who]) for d in entries)
        whole, carried = self.mass[who], 0.0
        inside = {int(s.source[d]) for d in entries}
        for push, (source, mass) in list(self.outside.items()):
            sender, old = s.client[source], s.outcome[push] == Delivery.SUPERSEDED
            into = [new for new in inside if old and new > source and s.client[new] == sender]
            if s.receiver[push] == who and (source in inside or into):
                whole += mass
                if into:  # its mass moves to the next message of its sender that stays
                    carried = carried + mass * (self.sent[min(into)] - self.sent[source])
                del self.outside[push]
        record = self.nodes.event(e)
        after, message = flat(self.nodes.model(who)), self.nodes.messages[e, 0]
        clustered = isinstance(message, centroids.Clustered)
        self.sent[e] = flat(centroids.lookup(message) if clustered else message)
        self.models[who], self.mass[who] = after, s.mass[e]
        pushes = np.flatnonzero(s.push_event == e)
        self.outside |= {int(push): (e, float(s.sent_mass[push])) for push in pushes}
        error = self.sent[e] - after
        if clustered:
            np.testing.assert_allclose(np.linalg.norm(error), record["quantisation_error"], rtol=1e-9)
        return whole, after - mixed, float(s.sent_mass[pushes].sum()), error, carried


@pytest.mark.parametrize("policy", ["merge", "carry"])
def test_what_moves_the_weighted_mean(policy):
    run = Followed(CLUSTERED, ANCHORED, planned(policy, "gossip:receivers=2", 60), spread=False)
    moved = 0.0
    for e in range(60):
        (x, y), (whole, step, given, error, carried) = run.total(), run.event(e)
        later, mass = run.total()
        np.testing.assert_allclose((y, mass), 5, rtol=1e-12)
        # eq. 102 times Y_tot, its perturbation as eq. 57 has it, and what the buffer moved
        np.testing.assert_allclose(later - x, whole * step + given * error + carried, rtol=1e-9, atol=1e-11)
        degree = np.count_nonzero(run.schedule.push_event == e)
        assert given == pytest.approx(degree / (degree + 1) * whole), "c_t of eq. 103"
        moved += np.abs(carried).sum()
    assert (moved > 0) == (policy == "carry")


@pytest.mark.slow_cases("merge-ring:directed=true")
@pytest.mark.parametrize(("policy", "topology"), [("merge", "ring:directed=true"), ("carry", "exponential")])
def test_without_learning_only_the_buffer_moves_the_mean(policy, topology):
    count = 900
    run = Followed(FULL, STILL, planned(policy, topology, count), spread=True)
    start = run.total()[0] / 5
    carried = sum(run.event(e)[4] for e in range(count)) + 0 * start
    x, y = run.total()
    assert y == pytest.approx(5, rel=1e-12)
    np.testing.assert_allclose(x / y - start, carried / y, atol=1e-11)
    assert np.std([flat(one) for one in run.starts], axis=0).max() > 0.1
    np.testing.assert_allclose(np.array(run.models), np.broadcast_to(x / y, (5, len(start))), atol=1e-4)
    if policy == "merge":
        np.testing.assert_allclose(x / y, start, atol=1e-11)


def test_the_anchor_contracts():
    """Lemma C.5: ``|u'|^2 <= (1 - eta lambda) |u|^2 + (eta / lambda) |g|^2`` with the anchor and gradient made here."""
    whole, size = data(SIZES), SIZES[2]
    client = anchored_training(MODEL, optimizer=optax.sgd(LR), batch_size=16, anchor=LAMBDA)
    params = MODEL.init(jax.random.key(1))
    part = ClientData(*map(jnp.asarray, (whole.x, whole.y, whole.order)), whole.offset[2], jnp.int32(size))
    start = centroids.random_tables(params, K, jax.random.key(5))
    message = Message(params, Dictionary(start, jnp.bool_(True)), version=jnp.int32(0), local_steps=jnp.int32(6))
    work = jax.jit(client.begin)(jax.random.key(3), message, client.init(params), part)
    anchor, mask = (np.asarray(getattr(work.anchor, name)["w"]) for name in ("weights", "mask"))
    assert 0 < mask.sum() < mask.size, "some weights must be pruned"
    mask = mask.astype(float)
    rows = part.order[part.offset : part.offset + size]
    slope = jax.jit(jax.grad(lambda w: jnp.mean(MODEL.loss(MODEL.apply(w, part.x[rows]), part.y[rows]))))
    step = jax.jit(client.step)
    for k in range(6):
        before = {**work.inner.params, "w": work.inner.params["w"] * mask}  # one step an epoch: masked in each
        g, u = np.asarray(slope(before)["w"]), np.asarray(before["w"]) - anchor
        work = step(work, jnp.int32(k), message, part)
        after = np.asarray(work.inner.params["w"]) - anchor
        np.testing.assert_allclose(after, (1 - 2 * LR * LAMBDA) * u - LR * g, rtol=1e-9, atol=1e-12)
        bound = (1 - LR * LAMBDA) * np.sum(u**2) + LR / LAMBDA * np.sum(g**2)
        assert np.sum(after**2) <= bound
