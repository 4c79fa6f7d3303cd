"""Adaptive runs: as planned if the policy ignores what it sees, side by side as alone; resumed, stopped and ended.

``tests/test_worlds.py`` has every policy against the oracle.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import clock
from fedjax_async.clock import Choice, Decisions, Limits, Policy, Prior, Until, plan
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config.adaptive import in_flight, observed_loss
from fedjax_async.engine import Every, growing_stack, programs, run_waves, trainers
from fedjax_async.engine.adaptive import alone, side_by_side
from fedjax_async.engine.adaptive_reference import ReferenceExecutor
from fedjax_async.engine.checkpoint import Keeper, completed
from fedjax_async.engine.components import facts_of
from fedjax_async.engine.devices import as_bytes, from_bytes
from fedjax_async.engine.evaluation import points_among
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.outset import OBSERVED, GrowingPoints, Outset
from fedjax_async.engine.watching import Observer, Verdict
from fedjax_async.local import feedback, local_steps
from fedjax_async.types import Probe
from tests.engine import problem
from tests.engine.problem import MODEL, SIZES, Killed, client, close, killer, on_an_accelerator, same

pytestmark = pytest.mark.float64
EVERY, DELAY = Every(updates=5), "lognormal:mean=1,heterogeneity=0.5"
LOOP, VMAP = {"batching": "loop", "max_width": 2, "lanes": 2}, {"batching": "vmap", "max_width": 2, "lanes": 1}
STEPS = local_steps(np.array(SIZES), batch_size=4, epochs=2.0)
PRIOR = Prior(len(SIZES), np.array(SIZES), 1.0 + np.arange(len(SIZES)), STEPS, 3)
FAULTY = {"faults": "drop:probability=0.2+crash:probability=0.1,restart=2+corrupt:probability=0.1"}
LINK = {"network": "link:up=40,down=1e6"}
BUFFER = "buffer:size=2,concurrency=3"


def personal(timing, **conditions):
    return problem.personal(timing, DELAY, every=EVERY, **conditions)


def case(rule, timing, delay=DELAY, **conditions):
    return problem.case(rule, timing, delay, every=EVERY, **conditions)


@functools.cache
def sparse_client():
    """A client whose uploads are compressed; ``topk`` would compile twice as long."""
    return feedback(client(), COMPRESSORS["topk_fast"](ratio=0.3))


def compressed(timing, **conditions):
    return problem.changed(case("fedbuff", timing, **conditions), client=sparse_client())


def outset_of(given, policy, *, arrive=True, under_way=None):
    """What an adaptive run with the components of the planned run ``given`` knows when it begins."""
    return Outset(
        given.components,
        given.schedule,
        facts_of(given.schedule),
        STEPS,
        given.params,
        given.key,
        GrowingPoints(EVERY, None),
        in_flight(given.schedule) if under_way is None else under_way,
        asks=policy.sends is not None or policy.sizes,
        all_arrive=arrive and policy.sends is None,
        probes={OBSERVED: Probe(observed_loss(MODEL, 32))} if policy.loss else {},
    )


def planned(executor, policy, timing, *, updates=24, delay=DELAY, seed=3, conditions=None):
    """``(schedule, outcome, decisions)`` of a run that is planned while ``executor`` executes it."""
    decisions = Decisions(policy, executor)
    schedule = plan(
        timing, delay, num_clients=len(SIZES), local_steps=STEPS, until=Until(updates=updates), seed=seed,
        bytes_down=1000, bytes_up=1000, decisions=decisions, **(conditions or {}),
    )  # fmt: skip
    return schedule, executor.finish(decisions.record, schedule, True), decisions


def bound_to(policy):
    return clock.bind_policy(policy)(PRIOR) if isinstance(policy, str) else policy


def adaptive(executor, given, timing, policy, *, conditions=None, delay=DELAY, under_way=None, **options):
    """``(schedule, outcome, decisions)`` of an adaptive run with the components of the planned run ``given``."""
    policy = bound_to(policy)
    outset = outset_of(given, policy, arrive=not conditions, under_way=under_way)
    return planned(executor(outset, **options), policy, timing, delay=delay, conditions=conditions)


def learned(outcome):
    return outcome.params, outcome.scores, outcome.records, outcome.in_vain, outcome.in_vain_records


@pytest.mark.slow_cases("window:length=0.7-conditions1-1", "cohort:size=3,over_selection=1,deadline=2-conditions2-1")
@pytest.mark.parametrize(
    ("timing", "conditions", "every"),
    [(BUFFER, {}, 4), ("window:length=0.7", FAULTY, 1), ("cohort:size=3,over_selection=1,deadline=2", FAULTY, 1)],
)
def test_a_policy_that_ignores_what_it_sees_gives_the_planned_run_bit_for_bit(timing, conditions, every):
    given = personal(timing, **conditions)
    want = run_waves(*given, **LOOP)
    schedule, have, decisions = adaptive(alone, given, timing, Policy(every=every), conditions=conditions, **LOOP)
    same((list(given.schedule), learned(want)), (list(schedule), learned(have)))
    assert conditions or have.counters["waves"] == want.counters["waves"], "looks must not add waves"
    assert decisions.looks >= 24 / (3 * every) and (conditions != FAULTY or len(have.in_vain) > 0)


@pytest.mark.slow
def test_tables_slots_and_rows_grow_or_make_room_where_a_plan_needs_more_than_expected(monkeypatch):
    """All uploads are trained and wait for the end of their window, but the store has only two rows."""
    monkeypatch.setattr(growing_stack, "LEAST", 2)
    how = personal("window:length=2,concurrency=4", **FAULTY), "window:length=2,concurrency=4"
    how += ("oort:every=5+event_triggered:norm=0.2",)
    width = {"batching": "loop", "max_width": 1, "lanes": 1, "under_way": 1}
    have = adaptive(alone, *how, conditions=FAULTY, **width)
    want = adaptive(ReferenceExecutor, *how, conditions=FAULTY)
    same(list(have[0]), list(want[0]))
    close(learned(have[1])[:3], learned(want[1])[:3], 1e-10)
    assert have[1].counters["slots"] > 4 and have[1].counters["executed_steps"] > have[1].counters["useful_steps"]


def test_no_job_is_trained_that_is_lost_though_the_server_learns_it_at_its_timeout():
    """Jobs that are under way when the run ends may be."""
    conditions, timing = FAULTY | {"limits": Limits(timeout=4.0)}, "every:concurrency=4"
    given = case("fedbuff", timing, **conditions)
    schedule, have, _ = adaptive(alone, given, timing, "oort", conditions=conditions, **LOOP)
    lost, under_way = np.isinf(schedule.upload_time), schedule.outcome == clock.Outcome.UNDER_WAY
    more, useful = (have.counters[f"{name}_steps"] for name in ("executed", "useful"))
    assert 0 < useful <= more <= useful + schedule.local_steps[under_way].sum()
    assert lost.sum() > 5 and schedule.local_steps[lost].sum() > schedule.local_steps[under_way].sum()


def first(view, idle, count):
    return Choice(idle[:count], np.zeros(count))


def last(view, idle, count):
    return Choice(idle[-count:], np.zeros(count))


def window_of(length):
    return Policy(window=lambda view: length)


@pytest.mark.parametrize(
    ("timing", "delay", "begun", "others"),
    [
        (BUFFER, DELAY, Policy(choose=first), [Policy(choose=last), Policy(choose=first, buffer=lambda view: 1)]),
        # all clients come together at 1 s, and only the end of the window differs
        ("window:length=1,concurrency=3", "constant:mean=1", window_of(0.5), [window_of(0.7)]),
    ],
    ids=["choice and buffer", "window"],
)
def test_a_policy_that_decides_otherwise_when_it_is_resumed_is_refused(tmp_path, timing, delay, begun, others):
    given, timing = case("fedbuff", timing, delay), timing.replace("length=1,", "")
    how = LOOP | {"delay": delay, "progress": killer(9)}
    with pytest.raises(Killed):
        adaptive(alone, given, timing, begun, keeper=Keeper(tmp_path, 3, {}), **how)
    for other in others:
        with pytest.raises(ValueError, match=r"policy = .*must be deterministic, so that the run can be resumed"):
            adaptive(alone, given, timing, other, keeper=Keeper(tmp_path, 3, {}), **how)


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
    kept = [jnp.arange(3.0), jnp.array([True, False, True]), jnp.arange(6, dtype=jnp.int32).reshape(3, 2)]
    kept += [jnp.array([1 + 2j, -1j]), jnp.array([np.nan, 0.1], jnp.float32)]
    same(kept, from_bytes(jax.jit(as_bytes)(kept), kept))
    same(jax.tree.map(jnp.zeros_like, kept), from_bytes(None, kept))


@pytest.mark.parametrize(
    ("clients", "says"), [([0, 0], "different clients"), ([9], "different clients"), ([], "between 1 and 3")]
)
def test_a_choice_that_is_none_is_refused(clients, says):
    wrong = Policy(choose=lambda view, idle, count: Choice(np.array(clients, int), np.zeros(len(clients))))
    given = case("fedasync", "every:concurrency=3")
    with pytest.raises(ValueError, match=f"policy.choose.*{says}"):
        adaptive(ReferenceExecutor, given, "every:concurrency=3", wrong)


@pytest.fixture
def pools(monkeypatch):
    """The pools of threads that are made; kept here, because a pool that is collected ends its threads, too."""
    made = []

    def pool(threads):
        made.append(ThreadPoolExecutor(threads))
        return made[-1]

    monkeypatch.setattr(trainers, "ThreadPoolExecutor", pool)
    yield made
    assert len(made) == 1
    with pytest.raises(RuntimeError, match="after shutdown"):
        made[0].submit(int)


def test_the_threads_end_with_a_run_that_fails(pools):
    with pytest.raises(Killed):
        run_waves(*case("fedbuff", BUFFER), progress=killer(4), **LOOP)


def test_the_threads_of_an_adaptive_run_last_while_its_tables_grow_and_end_with_it(pools, monkeypatch):
    compiled, compile_programs = [], programs.compile_programs
    monkeypatch.setattr(programs, "compile_programs", lambda *a, **k: compiled.append(a) or compile_programs(*a, **k))
    rare = Policy(every=300)
    planned(alone(outset_of(case("fedbuff", BUFFER), rare), **LOOP), rare, BUFFER, updates=310)
    assert len(compiled) == 2


# --- side by side -------------------------------------------------------------------------------------

UPDATES, SEEDS = (24, 9, 17), (3, 4, 5)  # of the runs of a stack: they end at different moments


def plain(rule):
    return functools.partial(case, rule)


CASES = {
    "uniform": (plain("fedasync"), "every:concurrency=3", "uniform", {}),
    "random": (plain("fedadam"), BUFFER, "linear:speed=1,temperature=1", {}),
    "oort": (plain("fedbuff"), "every:concurrency=3", "oort:every=2", FAULTY),
    "losses": (personal, "cohort:size=2", "power_of_choice:d=4", FAULTY),
    "buffer": (personal, BUFFER, "power_of_choice:d=4+adaptive_buffer:size=1,recent=4", {}),
    "window": (plain("fedbuff"), "window:length=0.7", "adaptive_window:length=0.7,most=2,recent=4", {}),
    "withheld": (compressed, BUFFER, "event_triggered:norm=0.3+true_bytes", FAULTY | LINK),
}


def members(name, policies=None):
    """The outsets and plans of three runs that differ in their seeds and lengths."""
    (make, timing, policy, conditions), outsets, plans = CASES[name], [], []
    for k, (seed, updates) in enumerate(zip(SEEDS, UPDATES)):
        made = bound_to(policy if policies is None else policies[k])
        given = make(timing, **conditions)._replace(key=jax.random.key(20 + k))
        outsets.append(outset_of(given, made, arrive=not conditions))
        how = {"updates": updates, "seed": seed, "conditions": conditions}
        plans.append(functools.partial(planned, policy=made, timing=timing, **how))
    return outsets, plans


def each_alone(name, observers=(None,) * 3):
    return [plan(alone(o, observer=one, **LOOP)) for o, plan, one in zip(*members(name), observers)]


def together(name, observers=(None,) * 3, policies=None, **how):
    return side_by_side(*members(name, policies), observers, Execution(**LOOP | how))


def decided(runs):
    """Of each run: its schedule, what was learned, recorded and probed, and the decisions."""
    return [(list(plan), learned(found), found.probes, decisions.tables) for plan, found, decisions in runs]


@pytest.mark.slow_cases("uniform", "random", "losses", "window")
@pytest.mark.parametrize("name", CASES)
def test_each_run_equals_the_run_alone_bit_for_bit(name):
    want, have = each_alone(name), together(name)
    same(decided(want), decided(have))
    schedule, found, _ = have[0]
    assert len({tuple(plan.client) for plan, *_ in have}) == 3, "the runs must differ"
    calls = [sum(run[1].counters["waves"] for run in runs) for runs in (want, have)]
    assert calls[0] == calls[1], "no run is trained in more waves"
    if name == "withheld":
        withheld = schedule.outcome == clock.Outcome.WITHHELD
        assert 0 < withheld.sum() < len(withheld) and not np.isin(np.flatnonzero(withheld), schedule.job).any()
        assert len(np.unique(-(-found.records["bits"] // 8))) > 1
        nominal = compressed(BUFFER, **FAULTY | LINK).schedule
        takes = [np.mean(s.upload_time[s.job] - s.dispatch_time[s.job]) for s in (schedule, nominal)]
        assert takes[0] < takes[1], "compressed uploads are shorter than the longest one"


@pytest.mark.slow_cases("losses")
@pytest.mark.parametrize("name", ["oort", "losses"])
def test_off_the_cpu_and_in_batches_they_equal_the_runs_alone_also_if_they_are_killed(tmp_path, name):
    """Messages of known number, and all runs evaluated by one call; with ``losses`` flat states and a memory."""
    want = each_alone(name)
    with on_an_accelerator():
        with pytest.raises(Killed):
            together(name, keeper=Keeper(tmp_path, 5, {}), progress=killer(26), **VMAP)
        assert completed(tmp_path)[-1] > 18
        have = together(name, keeper=Keeper(tmp_path, 5, {}), **VMAP)
    for one, other in zip(have, want, strict=True):
        same(list(one[0]), list(other[0]))
        close(learned(one[1])[:3], learned(other[1])[:3], 1e-10)
        same(one[1].in_vain, other[1].in_vain)


@pytest.mark.parametrize(("name", "row", "updates"), [("oort", 1, 26), ("oort", 0, 36), ("withheld", 0, 30)])
def test_a_stack_with_a_stopped_run_is_killed_and_goes_on_as_the_runs_alone(tmp_path, name, row, updates):
    """If uploads differ in size, the stopped run trains on, to count its bytes."""
    observers = None, Observer(lambda now, scores, again: Verdict(stop=now == row), models=True), None
    with pytest.raises(Killed):
        together(name, observers, keeper=Keeper(tmp_path, 5, {}), progress=killer(updates))
    assert completed(tmp_path)[-1] > updates - 8
    have = together(name, observers, keeper=Keeper(tmp_path, 5, {}))
    same(decided(each_alone(name, observers)), decided(have))
    assert have[1][1].rows == row + 1 and have[0][1].rows > 2


def test_a_policy_that_decides_otherwise_is_refused_when_its_stack_is_resumed(tmp_path):
    refused = pytest.raises(ValueError, match=r"policy = .*must be deterministic")
    for choose, raised in ((first, pytest.raises(Killed)), (last, refused)):
        with raised:
            policies = ["uniform", Policy(choose=choose), "uniform"]
            together("uniform", policies=policies, keeper=Keeper(tmp_path, 3, {}), progress=killer(20))


def test_the_error_of_one_planner_ends_all_of_them():
    def failing(view, idle, count):
        return first(view, idle, count) if len(view.arrivals["client"]) < 5 else Choice([9], np.zeros(1))

    before = threading.active_count()
    with pytest.raises(ValueError, match=r"policy\.choose.*different clients"):
        together("uniform", policies=["uniform", Policy(choose=failing), "uniform"])
    assert threading.active_count() == before
