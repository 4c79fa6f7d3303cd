"""Decentralised runs in waves: equal to the oracle, also resumed, stopped, observed, and in little memory."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async.engine.checkpoint import Keeper, completed
from fedjax_async.engine.peer_probes import NodesProbe
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import run_peer_waves
from fedjax_async.engine.watching import Observer, Verdict
from fedjax_async.types import Probe
from tests.engine.peer_problem import AVERAGE, halves, peer_case
from tests.engine.problem import close
from tests.engine.test_checkpoint import Killed, killer

PLANS = {
    "gossip": {},
    "mixed at the end": {"at_end": True, "seed": 1},
    "fragments": {"fragments": 2, "seed": 2},
    "everything": {
        "fragments": 2, "corrupt": 0.2, "lost": 0.2, "late": (1,), "leaving": (3,), "noise": 1.0, "seed": 10,
    },
}  # fmt: skip


@functools.cache
def wanted(name):
    """A problem in float64, and the oracle's result."""
    with jax.enable_x64(True):
        given = peer_case(halves() if "fragments" in PLANS[name] else AVERAGE, **PLANS[name])
        return given, run_peer_reference(*given)


def same(have, want, rtol=1e-9):
    close(have.params, want.params, rtol)
    for table in ("scores", "records"):
        have_table, want_table = getattr(have, table), getattr(want, table)
        assert set(have_table) == set(want_table)
        for name, values in want_table.items():
            np.testing.assert_allclose(have_table[name], values, rtol=rtol, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(have.events, want.events)


def ways():
    """Every plan in both batchings. Two of them are slow, since "everything" tests their features in both."""
    for name, batching in itertools.product(PLANS, ["loop", "vmap"]):
        less = (name, batching) in (("mixed at the end", "vmap"), ("fragments", "loop"))
        yield pytest.param(name, batching, marks=[pytest.mark.slow] if less else [])


@pytest.mark.slow_cases("fragments-vmap", "everything-vmap", "gossip-loop")
@pytest.mark.float64
@pytest.mark.parametrize(("name", "batching"), list(ways()))
def test_engine_equals_oracle(name, batching):
    given, want = wanted(name)
    have = run_peer_waves(*given, batching=batching, max_width=4, lanes=2)
    same(have, want)
    moved = np.ptp(np.asarray(want.params["output"]["kernel"]), axis=0)
    assert moved.max() > 1e-3, "the nodes must differ, or the comparison shows nothing"
    assert (want.records["refused_messages"].sum() > 0) == ("corrupt" in PLANS[name])
    assert have.counters["mean_width"] > 1.5
    assert want.records.get("told", np.True_).all(), "mixing and pushing must be told the same of an event"


@pytest.mark.float64
@pytest.mark.parametrize("options", [{"order": "moments"}, {"lanes": 1, "max_width": 1}])
def test_however_events_are_batched(options):
    given, want = wanted("everything")
    same(run_peer_waves(*given, batching="loop", **options), want)


def test_nodes_in_float32_are_computed_in_64_bit_mode_too():
    given = peer_case(AVERAGE, horizon=4.0)
    assert given.params["output"]["kernel"].dtype == np.float32
    with jax.enable_x64(True):
        for options in ({}, {"global_tests": "ends"}):
            have = run_peer_waves(*given, batching="loop", **options)
            same(have, run_peer_reference(*given, **options), rtol=1e-5)
            assert have.params["output"]["kernel"].dtype == np.float32
    assert np.isnan(have.scores["global_loss"]).any(axis=1).tolist() == [False, True, True, True, False]


def equal(have, want):
    parts = [(one.params, one.scores, one.records, one.probes) for one in (have, want)]
    for a, b in zip(*map(jax.tree.leaves, parts), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow_cases("vmap")
@pytest.mark.float64
@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_a_resumed_run_is_identical_bit_for_bit(tmp_path, batching):
    given = wanted("everything")[0]
    options = {"batching": batching, "max_width": 4, "lanes": 2}
    want = run_peer_waves(*given, **options)
    for at in (3, 11, 30, 47):
        with pytest.raises(Killed):
            run_peer_waves(*given, **options, keeper=Keeper(tmp_path, 5, {}), progress=killer(at))
    assert len(completed(tmp_path)) == 2
    restored = Keeper(tmp_path, 5, {}).restore()
    assert restored.turns > 0 and len(restored.scores) > 1, "there must be a checkpoint to resume from"
    equal(run_peer_waves(*given, **options, keeper=Keeper(tmp_path, 5, {})), want)


@pytest.mark.float64
def test_an_observer_stops_the_run_where_it_stops_the_oracle(tmp_path):
    def watched(run, **options):
        seen = []

        def observe(row, scores, again):
            seen.append((row, again, scores["accuracy"].copy()))
            return Verdict(keep=row == 1, stop=row == 2)

        return run(*given, observer=Observer(observe, True), **options), seen

    given = wanted("everything")[0]
    want, told = watched(run_peer_reference)
    have, seen = watched(run_peer_waves, batching="loop", max_width=4, lanes=2)
    assert have.rows == want.rows == 3 and have.kept[0] == want.kept[0] == 1
    same(have, want)
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


@pytest.mark.slow_cases("vmap")
@pytest.mark.float64
@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_probes_see_what_is_mixed_and_change_nothing(batching):
    given = wanted("everything")[0]
    options = {"batching": batching, "max_width": 4, "lanes": 2}
    s, plain = given.schedule, run_peer_waves(*given, **options)
    probes = {"some": Probe(mixture, every=2), "all nodes": NodesProbe(spread)}
    found = run_peer_waves(*given, **options, probes=probes)
    equal(found._replace(probes={}), plain)
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
    still = run_peer_waves(*given, **options, probes=probes, norm_limit=0.0)
    assert not still.records["accepted"].any()
    last = {who: e for e, who in enumerate(s.client.tolist())}
    after = np.asarray(still.params["output"]["bias"]).sum(axis=1)
    seen = [(who, e) for who, e in last.items() if e % 2 == 0]
    assert len(seen) > 1
    for who, e in seen:
        np.testing.assert_allclose(still.probes["some"]["bias"][e // 2], after[who], rtol=1e-9, atol=1e-12)


@pytest.mark.float64
def test_uploads_above_the_limit_are_refused():
    given, plain = wanted("gossip")
    limit = float(np.quantile(plain.records["upload_norm"], 0.9))
    want = run_peer_reference(*given, norm_limit=limit, global_tests="ends")
    have = run_peer_waves(*given, batching="loop", norm_limit=limit, max_width=4, lanes=2, global_tests="ends")
    same(have, want)
    assert np.isfinite(have.scores["average_loss"]).nonzero()[0].tolist() == [0, len(given.points) - 1]
    assert 0 < have.records["accepted"].sum() < len(have.events)
    with pytest.raises(ValueError, match="rejected so far"):
        run_peer_waves(*given, batching="loop", norm_limit=limit, max_width=4, lanes=2, on_bad="raise")


@pytest.mark.float64
def test_little_memory_is_enough_with_shorter_batches():
    given, want = wanted("everything")
    usual = run_peer_waves(*given, batching="loop", max_width=16, lanes=2, global_tests="never")
    assert not {"global_loss", "average_loss"} & set(usual.scores) and "consensus" in usual.scores
    enough = usual.counters["num_bytes"] - 1
    have = run_peer_waves(*given, batching="loop", max_width=16, lanes=2, memory_limit=enough)
    same(have, want)
    assert have.counters["num_bytes"] <= enough
    with pytest.raises(ValueError, match=r"memory_limit = 1000: must be at least \d+ bytes"):
        run_peer_waves(*given, batching="loop", memory_limit=1000)


@pytest.mark.float64
def test_streamed_data_give_the_same_result():
    given, want = wanted("gossip")
    components = given.components._replace(data=given.components.data._replace(streamed=True))
    same(run_peer_waves(components, *given[1:], batching="loop", max_width=4, lanes=2), want)


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
