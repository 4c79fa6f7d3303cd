"""Adaptive runs equal planned ones if the policy ignores what it sees, and else the oracle; their threads end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import clock
from fedjax_async.clock import Choice, Limits, Policy
from fedjax_async.engine import Every, evaluation_points, growing_stack, programs, run_waves, trainers
from fedjax_async.engine.adaptive import alone
from fedjax_async.engine.adaptive_reference import ReferenceExecutor
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.devices import as_bytes, from_bytes
from fedjax_async.engine.evaluation import points_among
from fedjax_async.engine.outset import GrowingPoints
from tests.engine.adaptive_problem import (
    DELAY,
    EVERY,
    FAULTY,
    LOOP,
    VMAP,
    adaptive,
    learned,
    outset_of,
    personal,
    planned,
    sparse_client,
)
from tests.engine.problem import Killed, case, changed, close, killer, on_an_accelerator, remembering, same

pytestmark = pytest.mark.float64


@pytest.mark.slow_cases("window:length=0.7-conditions1-1", "cohort:size=3,over_selection=1,deadline=2-conditions2-1")
@pytest.mark.parametrize(
    ("timing", "conditions", "every"),
    [
        ("buffer:size=2,concurrency=3", {}, 4),
        ("window:length=0.7", FAULTY, 1),
        ("cohort:size=3,over_selection=1,deadline=2", FAULTY, 1),
    ],
)
def test_a_policy_that_ignores_what_it_sees_gives_the_planned_run_bit_for_bit(timing, conditions, every):
    given = personal(timing, **conditions)
    want = run_waves(*given, **LOOP)
    looking = Policy(every=every)
    schedule, have, decisions = adaptive(alone, given, timing, looking, conditions=conditions, **LOOP)
    same(list(given.schedule), list(schedule))
    same(learned(want), learned(have))
    if not conditions:
        assert have.counters["waves"] == want.counters["waves"], "looks must not add waves"
    assert decisions.looks >= 24 / (3 * every) and (conditions != FAULTY or len(have.in_vain) > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("timing", "policy"), [
    ("buffer:size=2,concurrency=3", "power_of_choice:d=4+adaptive_buffer:size=1,recent=4"),
    ("window:length=0.7,concurrency=3", "power_of_choice:d=4+adaptive_window:length=0.7,most=2,recent=4"),
])  # fmt: skip
def test_engine_equals_oracle_and_the_replayed_schedule(timing, policy):
    given = personal(timing)
    have = adaptive(alone, given, timing, policy, **VMAP)
    want = adaptive(ReferenceExecutor, given, timing, policy)
    same(list(have[0]), list(want[0]))
    assert not np.array_equal(have[0].client, given.schedule.client), "the policy must decide something"
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    close(have[1].probes, want[1].probes, 1e-9)
    same(have[2].tables["chosen"]["client"], want[2].tables["chosen"]["client"])
    (decided,) = have[2].tables.keys() - {"chosen"}
    same(have[2].tables[decided], want[2].tables[decided])
    assert len(np.unique([*have[2].tables[decided].values()][-1])) > 1, "the policy must decide something else"
    again = given._replace(schedule=have[0], points=evaluation_points(have[0], EVERY))
    close(run_waves(*again, batching="vmap").params, have[1].params, 1e-12)


def test_off_the_cpu_an_adaptive_run_equals_the_oracle(tmp_path):
    """Flat states, a memory, and messages of known number: also in a run that is killed and resumed."""
    conditions, timing = FAULTY, "cohort:size=3,over_selection=1,deadline=2"
    given = case(remembering(), timing, DELAY, every=EVERY, **conditions)
    policy, options = "power_of_choice:d=4", {"conditions": conditions} | VMAP
    want = adaptive(ReferenceExecutor, given, timing, policy, conditions=conditions)
    with on_an_accelerator():
        have = adaptive(alone, given, timing, policy, **options)
        with pytest.raises(Killed):
            adaptive(alone, given, timing, policy, keeper=Keeper(tmp_path, 3, {}), progress=killer(9), **options)
        again = adaptive(alone, given, timing, policy, keeper=Keeper(tmp_path, 3, {}), **options)
    same(list(have[0]), list(want[0]))
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    same(learned(again[1]), learned(have[1]))


def test_clients_that_withhold_and_true_bytes_equal_the_oracle():
    timing, policy = "buffer:size=2,concurrency=3", "event_triggered:norm=0.3+true_bytes"
    conditions = FAULTY | {"network": "link:up=40,down=1e6"}
    given = case("fedbuff", timing, DELAY, every=EVERY, **conditions)
    given = changed(given, client=sparse_client())
    have = adaptive(alone, given, timing, policy, conditions=conditions, **LOOP)
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


@pytest.mark.slow
def test_tables_slots_and_rows_grow_or_make_room_where_a_plan_needs_more_than_expected(monkeypatch):
    """All uploads are trained and wait for the end of their window, but the store has only two rows."""
    monkeypatch.setattr(growing_stack, "LEAST", 2)
    timing, policy = "window:length=2,concurrency=4", "oort:every=5+event_triggered:norm=0.2"
    given = personal(timing, **FAULTY)
    options = {"conditions": FAULTY, "batching": "loop", "max_width": 1, "lanes": 1, "under_way": 1}
    have = adaptive(alone, given, timing, policy, **options)
    want = adaptive(ReferenceExecutor, given, timing, policy, conditions=FAULTY)
    same(list(have[0]), list(want[0]))
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    assert have[1].counters["slots"] > 4 and have[1].counters["executed_steps"] > have[1].counters["useful_steps"]


def test_a_policy_that_decides_otherwise_when_it_is_resumed_is_refused(tmp_path):
    timing = "buffer:size=2,concurrency=3"
    given = case("fedbuff", timing, DELAY, every=EVERY)
    first = Policy(choose=lambda view, idle, count: Choice(idle[:count], np.zeros(count)))
    last = Policy(choose=lambda view, idle, count: Choice(idle[-count:], np.zeros(count)))
    sizes = Policy(choose=first.choose, buffer=lambda view: 1)
    with pytest.raises(Killed):
        adaptive(alone, given, timing, first, keeper=Keeper(tmp_path, 3, {}), progress=killer(7), **LOOP)
    for other in (last, sizes):
        with pytest.raises(ValueError, match=r"policy = .*must be deterministic, so that the run can be resumed"):
            adaptive(alone, given, timing, other, keeper=Keeper(tmp_path, 3, {}), **LOOP)


def test_windows_of_other_lengths_are_refused_too_when_a_run_is_resumed(tmp_path):
    """Jobs of equal length: all clients come together at 1 s, and only the end of the window differs."""
    given = case("fedbuff", "window:length=1,concurrency=3", "constant:mean=1", every=EVERY)
    timing, options = "window:concurrency=3", LOOP | {"delay": "constant:mean=1", "progress": killer(9)}
    for length, refused in ((0.5, pytest.raises(Killed)), (0.7, pytest.raises(ValueError, match="must be determini"))):
        decided = Policy(window=lambda view, length=length: length)
        with refused:
            adaptive(alone, given, timing, decided, keeper=Keeper(tmp_path, 3, {}), **options)


@pytest.mark.parametrize("every", [Every(updates=3), Every(steps=2), Every(time=0.7), Every(at=[0.5, 0.5, 1.5, 9.0])])
@pytest.mark.parametrize("horizon", [None, 5.0])
def test_evaluations_of_a_growing_plan_are_those_of_the_plan_so_far(every, horizon):
    """All before the last known arrival; several arrivals come at the same time."""
    rng = np.random.default_rng(5)
    time, closes, low = np.sort(rng.integers(1, 50, 40) / 10), rng.random(40) < 0.6, 0
    points = GrowingPoints(every, horizon)
    while low < 40:
        high = low + int(rng.integers(1, 4))
        points.add(time[low:high].tolist(), closes[low:high].tolist())
        known = points_among(time[:high], closes[:high], every, horizon)
        same([column[known.position < min(high, 40)] for column in known], list(points.points))
        low = high


def test_arrays_go_to_the_host_as_bytes():
    kept = {
        "a": jnp.arange(3.0),
        "b": jnp.array([True, False, True]),
        "c": jnp.arange(6, dtype=jnp.int32).reshape(3, 2),
    }
    kept |= {"d": jnp.array([1 + 2j, -1j]), "e": jnp.array([np.nan, 0.1], jnp.float32)}
    same(kept, from_bytes(jax.jit(as_bytes)(kept), kept))
    same(jax.tree.map(jnp.zeros_like, kept), from_bytes(None, kept))


def test_no_job_is_trained_that_is_lost_though_the_server_learns_it_at_its_timeout():
    """Jobs that are under way when the run ends may be."""
    conditions, timing = FAULTY | {"limits": Limits(timeout=4.0)}, "every:concurrency=4"
    given = case("fedbuff", timing, DELAY, every=EVERY, **conditions)
    schedule, have, _ = adaptive(alone, given, timing, "oort", conditions=conditions, **LOOP)
    lost, under_way = np.isinf(schedule.upload_time), schedule.outcome == clock.Outcome.UNDER_WAY
    more, useful = (have.counters[f"{name}_steps"] for name in ("executed", "useful"))
    assert 0 < useful <= more <= useful + schedule.local_steps[under_way].sum()
    assert lost.sum() > 5 and schedule.local_steps[lost].sum() > schedule.local_steps[under_way].sum()


def test_a_choice_that_is_none_is_refused():
    given = case("fedasync", "every:concurrency=3", DELAY, every=EVERY)
    for clients, says in ([[0, 0], "different clients"], [[9], "different clients"], [[], "between 1 and 3"]):
        choice = Choice(np.array(clients, int), np.zeros(len(clients)))
        wrong = Policy(choose=lambda view, idle, count, choice=choice: choice)
        with pytest.raises(ValueError, match=f"policy.choose.*{says}"):
            adaptive(ReferenceExecutor, given, "every:concurrency=3", wrong)


TIMING = "buffer:size=2,concurrency=3"


@pytest.fixture
def pools(monkeypatch):
    """The pools of threads that are made; kept here, because a pool that is collected ends its threads, too."""
    made = []

    def pool(threads):
        made.append(ThreadPoolExecutor(threads))
        return made[-1]

    monkeypatch.setattr(trainers, "ThreadPoolExecutor", pool)
    return made


def all_ended(pools):
    for pool in pools:
        with pytest.raises(RuntimeError, match="after shutdown"):
            pool.submit(int)
    return len(pools)


def test_the_threads_end_with_a_run_that_fails(pools):
    with pytest.raises(Killed):
        run_waves(*case("fedbuff", TIMING, DELAY), progress=killer(4), **LOOP)
    assert all_ended(pools) == 1


def test_the_threads_of_an_adaptive_run_last_while_its_tables_grow_and_end_with_it(pools, monkeypatch):
    compiled, compile_programs = [], programs.compile_programs
    monkeypatch.setattr(programs, "compile_programs", lambda *a, **k: compiled.append(a) or compile_programs(*a, **k))
    rare = Policy(every=300)
    outset = outset_of(case("fedbuff", TIMING, DELAY, every=EVERY), rare)
    planned(alone(outset, **LOOP), rare, TIMING, updates=310)
    assert len(compiled) == 2 and all_ended(pools) == 1
