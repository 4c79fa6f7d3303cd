"""Every decentralised method against float64 NumPy over 200 events."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async.compress import topk
from fedjax_async.engine.components import PeerComponents
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.local import local_training
from fedjax_async.local.anchored import anchored_training
from fedjax_async.models.wrap import cross_entropy
from fedjax_async.peers.choco import choco
from fedjax_async.peers.contract import Event
from fedjax_async.peers.divshare import cut, divshare
from fedjax_async.peers.full_models import full_models, sgp
from fedjax_async.peers.pushcen import pushcen
from fedjax_async.types import Model
from tests.engine.problem import CLASSES, FEATURES, data
from tests.peers import textbook
from tests.peers.schedules import made_up

MODEL = Model(
    lambda key: {"w": 0.5 * jax.random.normal(key, (FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)},
    lambda params, x, key=None: x.astype(params["w"].dtype) @ params["w"] + params["b"][None],
    cross_entropy,
)


def nothing_stays(path):
    return False


def plain():
    return local_training(MODEL, optimizer=optax.sgd(textbook.LR), batch_size=textbook.BATCH)


def anchored(reference, mask=True):
    optimizer, anchor = optax.adam(textbook.LR), textbook.LAMBDA
    return anchored_training(
        MODEL, optimizer=optimizer, batch_size=textbook.BATCH, anchor=anchor, reference=reference, mask=mask
    )


def run(peer, client, schedule, seed=2):
    """The package's result: all nodes' models [N, ...] and the records."""
    start = MODEL.init(jax.random.key(1))
    points = np.array([0.0, schedule.end[-1]])
    components = PeerComponents(peer, client, MODEL, data())
    found = run_peer_reference(components, schedule, start, jax.random.key(seed), points, global_tests="never")
    return found, np.asarray(start["w"]), np.asarray(start["b"])


def compare(found, nodes):
    for name in ("w", "b"):
        want = np.stack([getattr(node, name) for node in nodes])
        np.testing.assert_allclose(np.asarray(found.params[name]), want, rtol=1e-8, atol=1e-9)


@pytest.mark.slow_cases("sgp-True")
@pytest.mark.float64
@pytest.mark.parametrize(("peer", "masses"), [(full_models, False), (sgp, True)])
def test_full_models(peer, masses):
    schedule = made_up()
    found, w, b = run(peer(nothing_stays), plain(), schedule)
    nodes = [textbook.Full(w, b, masses) for _ in range(5)]
    compare(found, textbook.run(schedule, nodes, data(), jax.random.key(2)))
    assert np.abs(np.asarray(found.params["w"]) - w).max() > 0.1


# the released clustering puts centroids on entries: equal entries, such as pruned ones, are ties, decided by rounding
@pytest.mark.slow_cases("released-40-1", "released-200-0")
@pytest.mark.float64
@pytest.mark.parametrize(
    ("reference", "events", "mask"), [("paper", 200, 1), ("released", 200, 0), ("released", 40, 1)]
)
def test_pushcen(reference, events, mask):
    released = reference == "released"
    schedule = made_up(events, steps=5, first_alone=released, seed=2 * released)
    client = anchored(reference, bool(mask))
    found, w, b = run(pushcen(nothing_stays, k=textbook.K, reference=reference), client, schedule)
    nodes = [textbook.PushCen(w, b, released, bool(mask)) for _ in range(5)]
    compare(found, textbook.run(schedule, nodes, data(), jax.random.key(2)))
    assert (found.records["quantisation_error"] > 0).all()


@pytest.mark.slow_cases("0.34")
@pytest.mark.float64
@pytest.mark.parametrize("omega", [0.34, 0.2])
def test_divshare(omega):
    fragments = 2 if omega == 0.34 else 5
    schedule = made_up(fragments=fragments)
    counts = {}  # the mean of each entry: all messages with the same fragment weigh alike
    for e in range(200):
        for d in range(schedule.inbox_bounds[e], schedule.inbox_bounds[e + 1]):
            counts[e, schedule.fragment[d]] = counts.get((e, schedule.fragment[d]), 0) + 1
    reader = np.repeat(np.arange(200), np.diff(schedule.inbox_bounds))
    weight = [1 / (1 + counts[e, f]) for e, f in zip(reader, schedule.fragment)]
    schedule = schedule._replace(weight=np.array(weight))
    found, w, b = run(divshare(nothing_stays, omega=omega), plain(), schedule)
    rng = np.random.default_rng(0)
    tables = {"b": cut(b.size, fragments, rng), "w": cut(w.size, fragments, rng)}
    pieces = [
        tuple(t[f][t[f] < s] for t, s in ((tables["w"], w.size), (tables["b"], b.size))) for f in range(fragments)
    ]
    assert sorted(np.concatenate([p[0] for p in pieces])) == list(range(w.size)), "each entry is in one fragment"
    nodes = [textbook.DivShare(w, b, pieces) for _ in range(5)]
    compare(found, textbook.run(schedule, nodes, data(), jax.random.key(2)))


def rounds(nodes, events):
    """A synchronous gossip on a complete graph: every event reads the other nodes' events of the round before."""
    base = made_up(events, nodes)
    owner = np.arange(events) % nodes
    inboxes = [
        [s for s in range(events) if s // nodes == e // nodes - 1 and owner[s] != owner[e]] for e in range(events)
    ]
    source = np.concatenate(inboxes).astype(np.int64)
    bounds = np.cumsum([0, *map(len, inboxes)])
    return base._replace(
        client=owner.astype(np.int32), number=(np.arange(events) // nodes).astype(np.int32), inbox_bounds=bounds,
        source=source, fragment=np.zeros(len(source), np.int32), weight=np.full(len(source), 1 / nodes),
        push_event=source, push_fragment=np.zeros(len(source), np.int32),
        receiver=np.repeat(owner, np.diff(bounds)).astype(np.int32), sent_mass=np.zeros(len(source)),
        corrupt=np.zeros(len(source), np.bool_),
    )  # fmt: skip


@pytest.mark.float64
def test_choco():
    schedule = rounds(5, 200)
    keep = 4
    peer = choco(nothing_stays, topk(ratio=keep / 18), gamma=0.3)
    found, w, b = run(peer, plain(), schedule)
    nodes = [textbook.Choco(w, b, keep, 0.3) for _ in range(5)]
    compare(found, textbook.run(schedule, nodes, data(), jax.random.key(2), who_sends=True))


def test_choco_compresses_with_random_numbers_that_no_local_step_draws():
    seen = []

    def kept(key, x):
        seen.append(jax.random.key_data(key).tolist())
        return exact.compress(key, x)

    exact = topk(ratio=0.5)
    peer, key = choco(nothing_stays, exact._replace(compress=kept)), jax.random.key(4)
    row = peer.init(MODEL.init(jax.random.key(1)))
    peer.push(row, row.params, Event(key, jnp.int32(0)))
    training = [key, *(jax.random.fold_in(key, k) for k in range(50))]
    assert len(seen) == 1 and seen[0] not in [jax.random.key_data(one).tolist() for one in training]
