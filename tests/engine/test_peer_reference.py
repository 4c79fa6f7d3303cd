"""The oracle of decentralised runs, by hand: three nodes, five events; event 1 trains during the second evaluation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.clock.peer_schedule import Delivery, PeerSchedule
from fedjax_async.engine.components import PeerComponents
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.watching import Observer, Verdict
from fedjax_async.local import job_key, run_job
from fedjax_async.peers.full_models import full_models, sgp
from fedjax_async.types import ClientData, Message
from tests.engine.problem import MODEL, client, close, data

pytestmark = pytest.mark.float64

SIZES = (5, 3, 4)
INBOX = [[], [(0, 0.25)], [(0, 0.5)], [(1, 0.5), (2, 0.25)], [(3, 0.4)]]  # (source, weight) of each event


def schedule(corrupt: int | None = None) -> PeerSchedule:
    """Events 0 and 3 of node 0, 1 of node 1, 2 and 4 of node 2; event 1 takes long."""
    owner, start, end = [0, 1, 2, 0, 2], [0.0, 1.0, 1.5, 4.0, 5.0], [1.0, 3.9, 2.0, 4.5, 9.0]
    pushes = [(e, r) for e, who in enumerate(owner) for r in range(3) if r != who]
    mixed = {(s, owner[e]): e for e, inbox in enumerate(INBOX) for s, _ in inbox}
    zeros, flat = np.zeros(len(pushes)), [entry for inbox in INBOX for entry in inbox]
    return PeerSchedule(
        num_clients=3,
        client=np.array(owner, np.int32),
        number=np.array([0, 0, 0, 1, 1], np.int32),
        local_steps=np.array([2, 3, 1, 2, 2], np.int32),
        start=np.array(start),
        end=np.array(end),
        mixed_at=np.array(start),
        mass=np.full(5, 0.3),
        inbox_bounds=np.cumsum([0, *map(len, INBOX)]),
        source=np.array([s for s, _ in flat], np.int64),
        fragment=np.zeros(len(flat), np.int32),
        weight=np.array([w for _, w in flat]),
        push_event=np.array([e for e, _ in pushes]),
        push_fragment=np.zeros(len(pushes), np.int32),
        receiver=np.array([r for _, r in pushes], np.int32),
        sent_mass=zeros + 0.25,
        arrival=np.array([end[e] for e, _ in pushes]),
        outcome=np.array([Delivery.MIXED if p in mixed else Delivery.WAITING for p in pushes], np.int8),
        mixed_by=np.array([mixed.get(p, -1) for p in pushes]),
        corrupt=np.array([e == corrupt for e, _ in pushes]),
        joined=np.zeros(3),
        left=np.array([np.inf, 6.0, np.inf]),
    )


POINTS = np.array([0.0, 3.0, 4.5, 8.0])  # event 1 ends after 3.0, event 4 after the end


def by_hand(corrupt=None, mass=1.0):
    """The model of each node after each event, computed without the engine."""
    d, params, key = data(SIZES), MODEL.init(jax.random.key(1)), jax.random.key(2)
    nodes, sent, after = [params] * 3, {}, []
    s = schedule()
    for e in range(4):
        who, own = s.client[e], nodes[s.client[e]]
        w = own
        for source, weight in INBOX[e]:
            if source != corrupt:
                w = jax.tree.map(lambda a, o, m, k=weight: a + k * (m - o), w, own, sent[source])
        part = ClientData(*map(jnp.asarray, (d.x, d.y, d.order)), d.offset[who], d.size[who])
        message = Message(w, version=s.number[e])
        upload, _ = run_job(client(), job_key(key, who, s.number[e]), message, (), part, int(s.local_steps[e]))
        nodes[who] = sent[e] = jax.tree.map(lambda a, u: a + u / mass, w, upload)
        after.append(list(nodes))
    return after


def components(peer):
    return PeerComponents(peer, client(), MODEL, data(SIZES))


STATIC = {"stays": lambda path: False}
FULL, SGP = full_models(**STATIC), sgp(**STATIC)


@pytest.mark.slow_cases("peer0-None-1.0", "peer1-1-1.0")
@pytest.mark.parametrize(("peer", "corrupt", "mass"), [(FULL, None, 1.0), (FULL, 1, 1.0), (SGP, None, 0.8)])
def test_it_does_what_the_schedule_says(peer, corrupt, mass):
    plan = schedule(corrupt)
    found = run_peer_reference(components(peer), plan, MODEL.init(jax.random.key(1)), jax.random.key(2), POINTS)
    after = by_hand(corrupt, mass)
    start = MODEL.init(jax.random.key(1))
    shown = [[start] * 3, [after[0][0], start, after[2][2]], after[3], after[3]]  # event 1 is still training at 3
    close(found.params, jax.tree.map(lambda *leaves: jnp.stack(leaves), *after[3]), 1e-12)
    d = data(SIZES)
    for row, models in enumerate(shown):
        for who, model in enumerate(models):
            mine = d.test_order[d.test_offset[who] : d.test_offset[who] + d.test_size[who]]
            for name, rows in (("", mine), ("global_", np.arange(len(d.test_y)))):
                loss = np.mean(MODEL.loss(MODEL.apply(model, d.test_x[rows]), jnp.asarray(d.test_y[rows])))
                np.testing.assert_allclose(found.scores[f"{name}loss"][row, who], loss, rtol=1e-12)
        there = models if row < 3 else [models[0], models[2]]  # node 1 has left at 6
        flat = np.stack([np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(m)]) for m in there])
        spread = np.mean(np.sum((flat - flat.mean(0)) ** 2, axis=1))
        np.testing.assert_allclose(found.scores["consensus"][row], spread, rtol=1e-9, atol=1e-20)
    assert found.events.tolist() == [0, 1, 2, 3]
    assert found.records["refused_messages"].tolist() == [0, 0, 0, int(corrupt is not None)]
    assert found.records["accepted"].all() and (found.records["upload_norm"] > 0).all()


def test_a_rejected_upload_leaves_the_mixture():
    found = run_peer_reference(
        components(FULL), schedule(), MODEL.init(jax.random.key(1)), jax.random.key(2), POINTS, norm_limit=1e-9
    )
    start = MODEL.init(jax.random.key(1))
    close(found.params, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), start), 1e-12)
    assert not found.records["accepted"].any()
    with pytest.raises(ValueError, match="uploads rejected so far = 1"):
        run_peer_reference(
            components(FULL), schedule(), start, jax.random.key(2), POINTS, norm_limit=1e-9, on_bad="raise"
        )


def test_an_observer_ends_the_run():
    seen = []

    def observe(row, scores, again):
        seen.append(scores["loss"].shape)
        return Verdict(keep=row == 1, stop=row == 1)

    found = run_peer_reference(
        components(FULL), schedule(), MODEL.init(jax.random.key(1)), jax.random.key(2), POINTS,
        observer=Observer(observe, True), global_tests="ends",
    )  # fmt: skip
    assert seen == [(3,), (3,)] and found.rows == 2
    assert found.events.tolist() == [0, 2], "event 1 ends after the evaluation at which the run was stopped"
    assert found.kept[0] == 1 and len(found.records["accepted"]) == 2
    for name in ("global_loss", "average_loss"):
        assert np.isfinite(found.scores[name][0]).all() and np.isnan(found.scores[name][1]).all()
