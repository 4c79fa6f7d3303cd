"""Decentralised runs: the oracle by hand, and waves equal to it, also stopped, observed, and in little memory."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.clock import Until
from fedjax_async.engine import peer_programs
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_probes import NodesProbe
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import make_peer_member, make_peer_stack, peer_layout_of, run_peer_waves
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stacking import shape_of
from fedjax_async.engine.watching import Observer, Verdict
from fedjax_async.local import job_key, local_steps, run_job
from fedjax_async.peers import plan_peers
from fedjax_async.peers.divshare_fragments import divshare
from fedjax_async.peers.full_mixing import full_models
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.types import ClientData, Message, Probe
from tests.engine.problem import MODEL, client, close, data, near, on_an_accelerator, same
from tests.refusals import refusals

SIZES = (9, 4, 13, 6, 1, 7)
FRAGMENTS = "divshare:omega=0.5"  # two, as those of ``halves``
# Lost and corrupt messages, a node that joins late, and one that leaves.
EVERYTHING = {
    "faults": "drop:probability=0.2+corrupt:probability=0.2",
    "availability": "joins:share=0.2,by=3+leaves:share=0.2,by=6",
}
OPTIONS = {"batching": "loop", "max_width": 4, "lanes": 2}
AVERAGE = full_models(lambda path: False)


HALVES = divshare(lambda path: False, omega=0.5)


@functools.cache
def halves():
    """``HALVES`` whose row also has what the event told the node when it mixed."""

    def told(event):
        return jnp.stack([jnp.asarray(event.mass, jnp.result_type(float)), jax.random.uniform(event.key)])

    def push(row, upload, event):
        after, messages, _ = HALVES.push(row[0], upload, event)
        now = told(event)
        return (after, row[1]), messages, {"mass_seen": now[0], "drawn": now[1], "told": (row[1] == now).all()}

    return HALVES._replace(
        init=lambda params: (params, jnp.zeros(2)),
        open=lambda row: HALVES.open(row[0]),
        add=lambda inbox, row, message, weight: HALVES.add(inbox, row[0], message, weight),
        wake=lambda row, inbox, event: (HALVES.wake(row[0], inbox, event), told(event)),
        start=lambda row: HALVES.start(row[0]),
        push=push,
        params=lambda row: row[0],
    )


class PeerCase(NamedTuple):
    """The arguments of both engines, in order."""

    components: Components
    schedule: PeerSchedule
    params: object
    key: object
    points: np.ndarray


def peer_case(peer=AVERAGE, exchange="mean", *, sizes=SIZES, horizon=10.0, seed=0, **conditions) -> PeerCase:
    """The arguments of one run; call it inside ``jax.enable_x64`` for float64."""
    schedule = plan_peers(
        exchange, "lognormal:mean=0.6,heterogeneity=0.5", num_clients=len(sizes),
        local_steps=local_steps(np.array(sizes), batch_size=4, epochs=2.0), until=Until(time=horizon), seed=seed,
        topology="gossip:receivers=2", network="link:latency=0.1", message_bytes=1000, **conditions,
    )  # fmt: skip
    mass = np.random.default_rng(seed).uniform(0.1, 0.4, len(schedule.client))  # which full models do not use
    components = Components(peer, client(), MODEL, data(sizes))
    keys = MODEL.init(jax.random.key(1)), jax.random.key(2)
    return PeerCase(components, schedule._replace(mass=mass), *keys, np.linspace(0, horizon, 5))


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


# --- the oracle ---------------------------------------------------------------------------------------


@jax.jit
def uploaded(key, message, part, steps):
    return run_job(client(), key, message, (), part, steps)[0]


def played(given):
    """(the node's model after each event, how many messages it refused), without an engine."""
    s, d = given.schedule, given.components.data
    corrupt = {*zip(s.push_event[s.corrupt].tolist(), s.receiver[s.corrupt].tolist())}
    nodes, after, refused = [given.params] * s.num_clients, [], []
    for e, who in enumerate(s.client.tolist()):
        model = own = nodes[who]
        inbox = range(s.inbox_bounds[e], s.inbox_bounds[e + 1])
        heard = [i for i in inbox if (s.source[i], who) not in corrupt]
        for i in heard:
            sent, weight = after[s.source[i]], s.weight[i]
            model = jax.tree.map(lambda a, o, m, k=weight: a + k * (m - o), model, own, sent)
        part = ClientData(*map(jnp.asarray, (d.x, d.y, d.order)), d.offset[who], d.size[who])
        message, key = Message(model, version=s.number[e]), job_key(given.key, who, s.number[e])
        nodes[who] = jax.tree.map(jnp.add, model, uploaded(key, message, part, s.local_steps[e]))
        after.append(nodes[who])
        refused.append(len(inbox) - len(heard))
    return after, np.array(refused)


@pytest.mark.float64
def test_the_oracle_does_what_the_plan_says():
    given = peer_case(horizon=5.0, seed=1, **EVERYTHING)
    found, (after, refused) = run_peer_reference(*given), played(given)
    s, d, rows = given.schedule, given.components.data, None
    for row, time in enumerate(given.points):
        seen = np.flatnonzero(s.end <= time)
        models = [given.params] * s.num_clients
        for e in seen:
            models[s.client[e]] = after[e]
        for who, model in enumerate(models):
            own = d.test_order[d.test_offset[who] : d.test_offset[who] + d.test_size[who]]
            for name, rows in (("", own), ("global_", np.arange(len(d.test_y)))):
                loss = np.mean(MODEL.loss(MODEL.apply(model, d.test_x[rows]), jnp.asarray(d.test_y[rows])))
                np.testing.assert_allclose(found.scores[f"{name}loss"][row, who], loss, rtol=1e-12)
        online = np.flatnonzero((s.joined <= time) & (time < s.left))
        flat = np.stack([jax.flatten_util.ravel_pytree(models[who])[0] for who in online])
        spread = np.mean(np.sum((flat - flat.mean(0)) ** 2, axis=1))
        np.testing.assert_allclose(found.scores["consensus"][row], spread, rtol=1e-9, atol=1e-20)
    close(found.params, jax.tree.map(lambda *leaves: jnp.stack(leaves), *models), 1e-12)
    np.testing.assert_array_equal(found.events, seen)
    np.testing.assert_array_equal(found.records["refused_messages"], refused[seen])
    assert refused.sum() > 0 and 1 < len(online) < s.num_clients and s.joined.max() > 0
    assert ((s.start < given.points[2]) & (given.points[2] < s.end)).any(), "some train while the models are scored"
    assert found.records["accepted"].all() and (found.records["upload_norm"] > 0).all()


@pytest.mark.float64
def test_rejected_uploads_leave_the_mixture_or_end_the_run():
    given = wanted()[0]
    for run, options, first in ((run_peer_waves, OPTIONS, r"\d+"), (run_peer_reference, {}, 1)):
        found = run(*given, norm_limit=1e-9, **options)
        close(found.params, jax.tree.map(lambda leaf: jnp.stack([leaf] * len(SIZES)), given.params), 1e-12)
        assert not found.records["accepted"].any()
        with pytest.raises(ValueError, match=f"uploads rejected so far = {first}"):
            run(*given, norm_limit=1e-9, on_bad="raise", **options)


# --- waves --------------------------------------------------------------------------------------------


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
    given, _ = wanted()

    def watched(run, **options):
        seen = []

        def observe(row, scores, again):
            seen.append((row, again, scores["accuracy"].tolist()))
            return Verdict(keep=row == 1, stop=row == 2)

        return run(*given, observer=Observer(observe, True), global_tests="ends", **options), seen

    (want, told), (have, seen) = watched(run_peer_reference), watched(run_peer_waves, **OPTIONS)
    assert have.rows == want.rows == 3 and have.kept[0] == want.kept[0] == 1
    agree(have, want)
    close(have.kept[1], want.kept[1], 1e-9)
    np.testing.assert_array_equal(have.events, np.flatnonzero(given.schedule.end <= given.points[2]))
    assert [row[:2] for row in seen] == [row[:2] for row in told] == [(0, False), (1, False), (2, False)]
    np.testing.assert_allclose([row[2] for row in seen], [row[2] for row in told], rtol=1e-12)
    for name in ("global_loss", "average_loss"):
        assert np.isfinite(want.scores[name][0]).all() and np.isnan(want.scores[name][1:]).all()


def mixture(row, inbox, weights, parts):
    """What the probe says that the bias of its node's model will be after mixing."""

    def add(k, box):
        return HALVES.add(box, row[0], jax.tree.map(lambda leaf: leaf[k], inbox), weights[k])

    mixed = HALVES.wake(row[0], jax.lax.fori_loop(0, len(weights), add, HALVES.open(row[0])), None)
    rows = parts.train.size
    return {"bias": jnp.sum(mixed["output"]["bias"]), "messages": jnp.sum(weights > 0), "rows": rows}


def spread(rows, online):
    params = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows[0])], axis=1)
    mean = jnp.sum(jnp.where(online[:, None], params, 0), axis=0) / jnp.sum(online).astype(params.dtype)
    squares = jnp.sum((params - mean[None]) ** 2, axis=1)
    return {"consensus": jnp.sum(jnp.where(online, squares, 0)) / jnp.sum(online).astype(params.dtype)}


@pytest.mark.float64
def test_a_run_equals_the_oracle_and_probes_see_what_is_mixed_and_change_nothing():
    given, want = wanted()
    s, plain = given.schedule, run_peer_waves(*given, **OPTIONS)
    agree(plain, want)
    assert plain.counters["mean_width"] > 1.5 and want.records["refused_messages"].sum() > 0
    assert want.records["told"].all(), "mixing and pushing must be told the same of an event"
    assert np.ptp(np.asarray(want.params["output"]["kernel"]), axis=0).max() > 1e-3, "the nodes must differ"
    probes = {"some": Probe(mixture, every=2), "all nodes": NodesProbe(spread)}
    found = run_peer_waves(*given, **OPTIONS, probes=probes)
    same(*((one.params, one.scores, one.records) for one in (found, plain)))
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
def test_little_memory_is_enough_with_shorter_batches():
    given, want = wanted()
    usual = run_peer_waves(*given, **OPTIONS, global_tests="never")
    assert not {"global_loss", "average_loss"} & set(usual.scores) and "consensus" in usual.scores
    enough = usual.counters["device_memory_bytes"] - 1
    have = run_peer_waves(*given, **OPTIONS, memory_limit=enough)
    agree(have, want)
    assert have.counters["device_memory_bytes"] <= enough
    widths = {3: None, 1: None}
    assert [
        peer_programs.PeerPrograms(*[None] * 2, widths, *[None] * 2, whole, *[None] * 2).number() for whole in (0, None)
    ] == [9, 8]


test_bad_input_is_refused_before_anything_compiles = refusals(
    ({"points": np.array([1.0, 2.0])}, "points = .*from 0"),
    ({"points": np.zeros(0)}, "points = .*from 0"),
    ({"global_tests": "some"}, "global_tests = 'some'"),
    ({"order": "best"}, "order = 'best'"),
    ({"max_width": 0}, "max_width = 0"),
    ({"lanes": 0}, "lanes = 0"),
    ({"probes": {"a/b": mixture}}, "probe name = 'a/b'"),
    ({"probes": {"a": NodesProbe(3)}}, "probes"),
    ({"batching": "loop", "memory_limit": 1000}, r"memory_limit = 1000: must be at least \d+ bytes"),
    by=lambda change: run_peer_waves(**peer_case()._asdict() | change),
)
