"""Adaptive runs equal planned ones if the policy ignores what it sees; otherwise they equal the oracle."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import clock
from fedjax_async.clock import Choice, Decisions, Limits, Policy, Prior, Until, plan
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config.adaptive import in_flight, observed_loss
from fedjax_async.engine import Every, evaluation_points, growing_stack, run_waves
from fedjax_async.engine.adaptive import WavesExecutor
from fedjax_async.engine.adaptive_reference import ReferenceExecutor
from fedjax_async.engine.checkpoint import Keeper, completed
from fedjax_async.engine.components import facts_of
from fedjax_async.engine.outset import OBSERVED, GrowingPoints, Outset
from fedjax_async.local import feedback, local_steps
from fedjax_async.types import Probe
from tests.engine.problem import MODEL, SIZES, case, client, close
from tests.engine.test_checkpoint import Killed, killer
from tests.engine.test_contract import carrying, remembering

EVERY, DELAY = Every(updates=5), "lognormal:mean=1,heterogeneity=0.5"
STEPS = local_steps(np.array(SIZES), batch_size=4, epochs=2.0)
PRIOR = Prior(len(SIZES), np.array(SIZES), 1.0 + np.arange(len(SIZES)), STEPS, 3)
FAULTY = {"faults": "drop:probability=0.2+crash:probability=0.1,restart=2+corrupt:probability=0.1"}
LATE = {"limits": Limits(timeout=1.2), "availability": "sessions:on=8,off=2"}
STALE = {"limits": Limits(max_staleness=1)}


def adaptive(executor, given, timing, policy, *, conditions=None, updates=24, delay=DELAY, under_way=None, **options):
    """``(schedule, outcome, decisions)`` of an adaptive run with the components of the planned run ``given``."""
    policy = clock.bind_policy(policy)(PRIOR) if isinstance(policy, str) else policy
    conditions = conditions or {}
    outset = Outset(
        given.components,
        given.schedule,
        facts_of(given.schedule),
        STEPS,
        given.params,
        given.key,
        GrowingPoints(EVERY, None),
        in_flight(given.schedule) if under_way is None else under_way,
        asks=policy.sends is not None or policy.sizes,
        all_arrive=not conditions and policy.sends is None,
        probes={OBSERVED: Probe(observed_loss(MODEL))} if policy.loss else {},
    )
    made = executor(outset, **options)
    decisions = Decisions(policy, made)
    schedule = plan(
        timing, delay, num_clients=len(SIZES), local_steps=STEPS, until=Until(updates=updates), seed=3, bytes_down=1000,
        bytes_up=1000, decisions=decisions, **conditions,
    )  # fmt: skip
    return schedule, made.finish(decisions.record, schedule, True), decisions


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def learned(outcome):
    return outcome.params, outcome.scores, outcome.records, outcome.in_vain, outcome.in_vain_records


def personal(timing, **conditions):
    """A server with memory and personal messages, and clients with state, which also train in vain."""
    given = case(remembering(), timing, DELAY, every=EVERY, **conditions)
    return given._replace(components=given.components._replace(client=carrying(client())))


@pytest.mark.slow_cases(
    "window:length=0.7-conditions5-1", "every-conditions0-1", "cohort:size=3,over_selection=1,deadline=2-conditions6-1"
)
@pytest.mark.parametrize(
    ("timing", "conditions", "every"),
    [
        ("every", {}, 1),
        ("buffer:size=2,concurrency=3", {}, 4),
        pytest.param("buffer:size=2", FAULTY, 1, marks=pytest.mark.slow),
        pytest.param("buffer:size=2,concurrency=4", LATE, 1, marks=pytest.mark.slow),
        pytest.param("buffer:size=2", STALE, 1, marks=pytest.mark.slow),
        ("window:length=0.7", FAULTY, 1),
        ("cohort:size=3,over_selection=1,deadline=2", FAULTY, 1),
    ],
)
def test_a_policy_that_ignores_what_it_sees_gives_the_planned_run_bit_for_bit(timing, conditions, every):
    given = personal(timing, **conditions)
    want = run_waves(*given, batching="loop", lanes=2)
    looking = Policy(every=every)
    schedule, have, decisions = adaptive(
        WavesExecutor, given, timing, looking, conditions=conditions, batching="loop", lanes=2
    )
    same(list(given.schedule), list(schedule))
    same(learned(want), learned(have))
    if not conditions:
        assert have.counters["waves"] == want.counters["waves"], "looks must not add waves"
    assert decisions.looks >= 24 / (3 * every) and (conditions != FAULTY or len(have.in_vain) > 0)


@pytest.mark.float64
@pytest.mark.slow
def test_vmapped_it_is_the_planned_run_to_rounding():
    given = personal("buffer:size=2,concurrency=4", **FAULTY)
    want = run_waves(*given, batching="vmap", max_width=3, lanes=1)
    schedule, have, _ = adaptive(
        WavesExecutor, given, "buffer:size=2,concurrency=4", Policy(), conditions=FAULTY, batching="vmap",
        max_width=3, lanes=1,
    )  # fmt: skip
    same(list(given.schedule), list(schedule))
    close(have.params, want.params, 1e-12)
    close(have.records, want.records, 1e-12)


def compressed(timing, **conditions):
    given = case("fedbuff", timing, DELAY, every=EVERY, **conditions)
    sending = feedback(client(), COMPRESSORS["topk"](ratio=0.3))
    return given._replace(components=given.components._replace(client=sending))


ADAPTIVE = [
    ("power_of_choice:d=3", "buffer:size=2,concurrency=3", FAULTY, "loop"),
    ("oort:exploration=0.5", "every:concurrency=3", {}, "loop"),
    pytest.param("oort:every=3", "window:length=1,concurrency=3", LATE, "vmap", marks=pytest.mark.slow),
    ("oort", "cohort:size=2,over_selection=1", FAULTY, "loop"),
    ("power_of_choice:d=4+adaptive_buffer:size=1,recent=4", "buffer:size=2,concurrency=3", {}, "vmap"),
]


@pytest.mark.slow_cases(
    "power_of_choice:d=3-buffer:size=2,concurrency=3-conditions0-loop",
    "power_of_choice:d=4+adaptive_buffer:size=1,recent=4-buffer:size=2,concurrency=3-conditions4-vmap",
    "oort:exploration=0.5-every:concurrency=3-conditions1-loop",
    "oort-cohort:size=2,over_selection=1-conditions3-loop",
)
@pytest.mark.float64
@pytest.mark.parametrize(("policy", "timing", "conditions", "batching"), ADAPTIVE)
def test_engine_equals_oracle_and_the_replayed_schedule(policy, timing, conditions, batching):
    given = personal(timing, **conditions)
    have = adaptive(WavesExecutor, given, timing, policy, conditions=conditions, batching=batching, max_width=2)
    want = adaptive(ReferenceExecutor, given, timing, policy, conditions=conditions)
    same(list(have[0]), list(want[0]))
    assert not np.array_equal(have[0].client, given.schedule.client), "the policy must decide something"
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    close(have[1].probes, want[1].probes, 1e-9)
    same(have[2].tables["chosen"]["client"], want[2].tables["chosen"]["client"])
    again = given._replace(schedule=have[0], points=evaluation_points(have[0], EVERY))
    replayed = run_waves(*again, batching=batching)
    close(replayed.params, have[1].params, 1e-12)


@pytest.mark.float64
@pytest.mark.parametrize("conditions", [pytest.param({}, marks=pytest.mark.slow), FAULTY])
def test_clients_that_withhold_and_true_bytes_equal_the_oracle(conditions):
    timing, policy = "buffer:size=2,concurrency=4", "event_triggered:norm=0.3+true_bytes"
    conditions = conditions | {"network": "link:up=40,down=1e6"}
    given = compressed(timing, **conditions)
    have = adaptive(WavesExecutor, given, timing, policy, conditions=conditions, max_width=2)
    want = adaptive(ReferenceExecutor, given, timing, policy, conditions=conditions)
    same(list(have[0]), list(want[0]))
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    withheld = have[0].outcome == clock.Outcome.WITHHELD
    assert 0 < withheld.sum() < len(withheld) and not np.isin(np.flatnonzero(withheld), have[0].job).any()
    size = -(-have[1].records["bits"] // 8)
    assert len(np.unique(size)) > 1
    quick = have[0].upload_time[have[0].job] - have[0].dispatch_time[have[0].job]
    planned = given.schedule.upload_time[given.schedule.job] - given.schedule.dispatch_time[given.schedule.job]
    assert quick.mean() < planned.mean(), "compressed uploads are shorter than the longest one"


@pytest.mark.slow_cases("loop")
@pytest.mark.float64
@pytest.mark.parametrize("batching", ["loop", pytest.param("vmap", marks=pytest.mark.slow)])
def test_tables_slots_and_rows_grow_or_make_room_where_a_plan_needs_more_than_expected(monkeypatch, batching):
    """All uploads are trained and wait for the end of their window, but the store has only two rows."""
    monkeypatch.setattr(growing_stack, "LEAST", 2)
    timing, policy = "window:length=2,concurrency=4", "oort:every=5+event_triggered:norm=0.2"
    given = personal(timing, **FAULTY)
    options = {"conditions": FAULTY, "batching": batching, "max_width": 1, "lanes": 1, "under_way": 1}
    have = adaptive(WavesExecutor, given, timing, policy, **options)
    want = adaptive(ReferenceExecutor, given, timing, policy, conditions=FAULTY)
    same(list(have[0]), list(want[0]))
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    assert have[1].counters["slots"] > 4 and have[1].counters["executed_steps"] > have[1].counters["useful_steps"]


@pytest.mark.slow_cases("power_of_choice:d=3+event_triggered:norm=0.05-vmap")
@pytest.mark.parametrize(
    ("policy", "batching"),
    [
        pytest.param("oort", "loop", marks=pytest.mark.slow),
        ("power_of_choice:d=3+event_triggered:norm=0.05", "vmap"),
    ],
)
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path, policy, batching):
    timing = "buffer:size=2,concurrency=3"
    given = personal(timing, **FAULTY)
    options = {"conditions": FAULTY, "batching": batching, "max_width": 2, "lanes": 1}
    want = adaptive(WavesExecutor, given, timing, policy, **options)
    for at in (6, 7, 20):
        with pytest.raises(Killed):
            keeper = Keeper(tmp_path, 3, {})
            adaptive(WavesExecutor, given, timing, policy, keeper=keeper, progress=killer(at), **options)
    assert completed(tmp_path)
    have = adaptive(WavesExecutor, given, timing, policy, keeper=Keeper(tmp_path, 3, {}), **options)
    same(list(want[0]), list(have[0]))
    same((learned(want[1]), want[1].probes, want[2].tables), (learned(have[1]), have[1].probes, have[2].tables))


def test_a_policy_that_decides_otherwise_when_it_is_resumed_is_refused(tmp_path):
    timing = "buffer:size=2,concurrency=3"
    given = personal(timing)
    options = {"batching": "loop", "max_width": 2, "lanes": 1}
    first = Policy(choose=lambda view, idle, count: Choice(idle[:count], np.zeros(count)))
    last = Policy(choose=lambda view, idle, count: Choice(idle[-count:], np.zeros(count)))
    with pytest.raises(Killed):
        adaptive(WavesExecutor, given, timing, first, keeper=Keeper(tmp_path, 3, {}), progress=killer(7), **options)
    with pytest.raises(ValueError, match=r"policy = .*must be deterministic, so that the run can be resumed"):
        adaptive(WavesExecutor, given, timing, last, keeper=Keeper(tmp_path, 3, {}), **options)
    sizes = Policy(choose=first.choose, buffer=lambda view: 1)
    with pytest.raises(ValueError, match=r"policy = .*must be deterministic, so that the run can be resumed"):
        adaptive(WavesExecutor, given, timing, sizes, keeper=Keeper(tmp_path, 3, {}), **options)


def test_no_job_is_trained_that_is_lost_though_the_server_learns_it_at_its_timeout():
    conditions, timing = FAULTY | {"limits": Limits(timeout=4.0)}, "every:concurrency=4"
    given = personal(timing, **conditions)
    schedule, have, _ = adaptive(
        WavesExecutor, given, timing, "oort", conditions=conditions, batching="loop", max_width=2, lanes=1
    )
    assert np.isinf(schedule.upload_time).sum() > 5
    assert have.counters["executed_steps"] == have.counters["useful_steps"] > 0


def test_a_choice_that_is_none_is_refused():
    given = case("fedasync", "every:concurrency=3", DELAY, every=EVERY)
    for clients, says in ([[0, 0], "different clients"], [[9], "different clients"], [[], "between 1 and 3"]):
        choice = Choice(np.array(clients, int), np.zeros(len(clients)))
        wrong = Policy(choose=lambda view, idle, count, choice=choice: choice)
        with pytest.raises(ValueError, match=f"policy.choose.*{says}"):
            adaptive(ReferenceExecutor, given, "every:concurrency=3", wrong)
