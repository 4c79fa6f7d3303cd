"""Decentralised runs: the oracle by hand, and waves equal to it, also stopped, observed, and in little memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.engine import peer_programs
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_probes import NodesProbe
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import make_peer_member, make_peer_stack, peer_layout_of, run_peer_waves
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stacking import shape_of
from fedjax_async.engine.watching import Observer, Verdict
from fedjax_async.local import job_key, run_job
from fedjax_async.peers.full_mixing import full_models, sgp
from fedjax_async.peers.schedule import Delivery, PeerSchedule
from fedjax_async.types import ClientData, Message, Probe
from tests.engine.peer_problem import AVERAGE, EVERYTHING, FRAGMENTS, halves, peer_case
from tests.engine.problem import MODEL, client, close, data, near, on_an_accelerator, same

OPTIONS = {"batching": "loop", "max_width": 4, "lanes": 2}


@functools.cache
def wanted():
    """A problem with all that messages and nodes may do, in float64, and the oracle's result."""
    with jax.enable_x64(True):
        given = peer_case(halves(), FRAGMENTS, seed=10, **EVERYTHING)
        return given, run_peer_reference(*given)


def agree(have, want, rtol=1e-9):
    close(have.params, want.params, rtol)
    near(have.scores, want.scores, rtol)
    near(have.records, want.records, rtol)
    np.testing.assert_array_equal(have.events, want.events)


@pytest.mark.slow_cases("vmap")
@pytest.mark.float64
@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_engine_equals_oracle(batching):
    given, want = wanted()
    have = run_peer_waves(*given, **OPTIONS | {"batching": batching})
    agree(have, want)
    moved = np.ptp(np.asarray(want.params["output"]["kernel"]), axis=0)
    assert moved.max() > 1e-3, "the nodes must differ, or the comparison shows nothing"
    assert want.records["refused_messages"].sum() > 0
    assert have.counters["mean_width"] > 1.5
    assert want.records["told"].all(), "mixing and pushing must be told the same of an event"


@pytest.mark.float64
def test_off_the_cpu_the_events_of_a_turn_are_written_at_once():
    """Of two runs side by side, whose messages have two fragments."""
    given, want = wanted()
    other = given._replace(key=jax.random.key(77))
    with on_an_accelerator():
        members = [make_peer_member(*given), make_peer_member(*other)]
        layout = peer_layout_of(members, max_width=4)
        stack = make_peer_stack(members, layout, shape_of(layout))
        carry = stack.programs.start(stack.tables, stack.params)
        span = np.zeros(2, np.int32)
        traced = peer_programs.write(False, None).trace(stack.tables, carry, stack.programs.buffers(), span)
        assert not {"while", "cond"} & {eqn.primitive.name for eqn in traced.jaxpr.eqns}
        first, second = run_stack(stack)
    agree(first, want)
    agree(second, run_peer_reference(*other))


@pytest.mark.float64
def test_events_in_the_order_of_their_moments_equal_the_oracle():
    given, want = wanted()
    agree(run_peer_waves(*given, **OPTIONS, order="moments"), want)


def test_nodes_in_float32_are_computed_in_64_bit_mode_too():
    given, options = peer_case(AVERAGE, horizon=4.0), {"global_tests": "ends"}
    assert given.params["output"]["kernel"].dtype == np.float32
    with jax.enable_x64(True):
        have = run_peer_waves(*given, batching="loop", **options)
        agree(have, run_peer_reference(*given, **options), rtol=1e-5)
        assert have.params["output"]["kernel"].dtype == np.float32
    assert np.isnan(have.scores["global_loss"]).any(axis=1).tolist() == [False, True, True, True, False]


@pytest.mark.float64
def test_an_observer_stops_the_run_where_it_stops_the_oracle():
    def watched(run, **options):
        seen = []

        def observe(row, scores, again):
            seen.append((row, again, scores["accuracy"].copy()))
            return Verdict(keep=row == 1, stop=row == 2)

        return run(*given, observer=Observer(observe, True), **options), seen

    given = wanted()[0]
    want, told = watched(run_peer_reference)
    have, seen = watched(run_peer_waves, **OPTIONS)
    assert have.rows == want.rows == 3 and have.kept[0] == want.kept[0] == 1
    agree(have, want)
    close(have.kept[1], want.kept[1], 1e-9)
    assert len(have.events) < len(given.schedule.client)
    for (row, again, accuracy), (row_told, _, accuracy_told) in zip(seen, told, strict=True):
        assert row == row_told and not again
        np.testing.assert_allclose(accuracy, accuracy_told, rtol=1e-12)


def mixture(row, inbox, weights, parts):
    """What the probe says that the bias of its node's model will be after mixing."""
    which, values = inbox
    own = row[0]["output"]["bias"]
    length = row[0]["output"]["bias"].size  # the flat output layer begins with its bias
    change = jnp.sum(weights[:, None] * jnp.where(which[:, None] == 1, values[:, :length] - own[None], 0), axis=0)
    return {"bias": jnp.sum(own + change), "messages": jnp.sum(weights > 0), "rows": parts.train.size}


def spread(rows, online):
    params = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows[0])], axis=1)
    mean = jnp.sum(jnp.where(online[:, None], params, 0), axis=0) / jnp.sum(online).astype(params.dtype)
    squares = jnp.sum((params - mean[None]) ** 2, axis=1)
    return {"consensus": jnp.sum(jnp.where(online, squares, 0)) / jnp.sum(online).astype(params.dtype)}


def learned(outcome):
    return outcome.params, outcome.scores, outcome.records


@pytest.mark.float64
def test_probes_see_what_is_mixed_and_change_nothing():
    given = wanted()[0]
    s, plain = given.schedule, run_peer_waves(*given, **OPTIONS)
    probes = {"some": Probe(mixture, every=2), "all nodes": NodesProbe(spread)}
    found = run_peer_waves(*given, **OPTIONS, probes=probes)
    same(learned(found), learned(plain))
    table, nodes = found.probes["some"], found.probes["all nodes"]
    np.testing.assert_array_equal(table["update"], np.arange(0, len(s.client), 2))
    np.testing.assert_array_equal(table["client"], s.client[::2])
    np.testing.assert_array_equal(table["time"], s.mixed_at[::2])
    np.testing.assert_array_equal(table["rows"], given.components.data.size[s.client[::2]])
    size = np.diff(s.inbox_bounds)[::2]
    np.testing.assert_array_equal(table["messages"], size - found.records["refused_messages"][::2])
    np.testing.assert_allclose(nodes["consensus"], found.scores["consensus"], rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(nodes["time"], given.points)
    # without training, the bias after the event is the one that the probe computed before it
    still = run_peer_waves(*given, **OPTIONS, probes=probes, norm_limit=0.0)
    assert not still.records["accepted"].any()
    last = {who: e for e, who in enumerate(s.client.tolist())}
    after = np.asarray(still.params["output"]["bias"]).sum(axis=1)
    seen = [(who, e) for who, e in last.items() if e % 2 == 0]
    assert len(seen) > 1
    for who, e in seen:
        np.testing.assert_allclose(still.probes["some"]["bias"][e // 2], after[who], rtol=1e-9, atol=1e-12)


@pytest.mark.float64
def test_an_upload_above_the_limit_may_end_the_run():
    with pytest.raises(ValueError, match="rejected so far"):
        run_peer_waves(*wanted()[0], **OPTIONS, norm_limit=1e-9, on_bad="raise")


@pytest.mark.float64
def test_little_memory_is_enough_with_shorter_batches():
    given, want = wanted()
    usual = run_peer_waves(*given, **OPTIONS, global_tests="never")
    assert not {"global_loss", "average_loss"} & set(usual.scores) and "consensus" in usual.scores
    enough = usual.counters["device_memory_bytes"] - 1
    have = run_peer_waves(*given, **OPTIONS, memory_limit=enough)
    agree(have, want)
    assert have.counters["device_memory_bytes"] <= enough
    with pytest.raises(ValueError, match=r"memory_limit = 1000: must be at least \d+ bytes"):
        run_peer_waves(*given, batching="loop", memory_limit=1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": np.array([1.0, 2.0])}, "points = .*from 0"),
        ({"global_tests": "some"}, "global_tests = 'some'"),
        ({"order": "best"}, "order = 'best'"),
        ({"max_width": 0}, "max_width = 0"),
        ({"lanes": 0}, "lanes = 0"),
        ({"probes": {"a/b": mixture}}, "probe name = 'a/b'"),
        ({"probes": {"a": NodesProbe(3)}}, "probes"),
    ],
)
def test_bad_input_is_refused_before_anything_compiles(change, message):
    given = peer_case()._asdict() | change
    with pytest.raises(ValueError, match=message):
        run_peer_waves(**given)


SIZES = (5, 3, 4)
INBOX = [[], [(0, 0.25)], [(0, 0.5)], [(1, 0.5), (2, 0.25)], [(3, 0.4)]]  # (source, weight) of each event


WHOLE = np.array([1.0, 1.25, 1.25, 1.0, 1.0])  # a node's mass after mixing, of which it sends a quarter to each other


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
        mass=WHOLE - 0.5,
        unsent_mass=np.zeros(5),
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


@jax.jit
def uploaded(key, message, part, steps):
    return run_job(client(), key, message, (), part, steps)[0]


def by_hand(corrupt, mass):
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
        upload = uploaded(job_key(key, who, s.number[e]), message, part, s.local_steps[e])
        nodes[who] = sent[e] = jax.tree.map(lambda a, u, m=mass[e]: a + u / m, w, upload)
        after.append(list(nodes))
    return after


def found_by(peer, corrupt=None, **options):
    given = Components(peer, client(), MODEL, data(SIZES)), schedule(corrupt), MODEL.init(jax.random.key(1))
    return run_peer_reference(*given, jax.random.key(2), POINTS, **options)


STATIC = {"stays": lambda path: False}
FULL, SGP = full_models(**STATIC), sgp(**STATIC)


@pytest.mark.float64
@pytest.mark.slow_cases("full_models")
@pytest.mark.parametrize(("peer", "corrupt"), [(FULL, 1), (SGP, None)], ids=["full_models", "sgp"])
def test_it_does_what_the_schedule_says(peer, corrupt):
    found = found_by(peer, corrupt)
    after, start = by_hand(corrupt, WHOLE if peer is SGP else np.ones(5)), MODEL.init(jax.random.key(1))
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


@pytest.mark.float64
def test_a_rejected_upload_leaves_the_mixture():
    found = found_by(FULL, norm_limit=1e-9)
    start = MODEL.init(jax.random.key(1))
    close(found.params, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), start), 1e-12)
    assert not found.records["accepted"].any()
    with pytest.raises(ValueError, match="uploads rejected so far = 1"):
        found_by(FULL, norm_limit=1e-9, on_bad="raise")


@pytest.mark.float64
def test_an_observer_ends_the_run():
    seen = []

    def observe(row, scores, again):
        seen.append(scores["loss"].shape)
        return Verdict(keep=row == 1, stop=row == 1)

    found = found_by(FULL, observer=Observer(observe, True), global_tests="ends")
    assert seen == [(3,), (3,)] and found.rows == 2
    assert found.events.tolist() == [0, 2], "event 1 ends after the evaluation at which the run was stopped"
    assert found.kept[0] == 1 and len(found.records["accepted"]) == 2
    for name in ("global_loss", "average_loss"):
        assert np.isfinite(found.scores[name][0]).all() and np.isnan(found.scores[name][1]).all()
