"""Adaptive runs side by side equal the runs alone: each asks, trains, is stopped and resumed as if by itself."""

from __future__ import annotations

import threading
from functools import partial

import jax
import numpy as np
import pytest

from fedjax_async.clock import Choice, Policy
from fedjax_async.engine.adaptive import alone, side_by_side
from fedjax_async.engine.checkpoint import Keeper, completed
from fedjax_async.engine.execution import Execution
from fedjax_async.engine.watching import Observer, Verdict
from tests.engine.adaptive_problem import (
    DELAY,
    EVERY,
    FAULTY,
    LOOP,
    VMAP,
    bound_to,
    learned,
    outset_of,
    personal,
    planned,
    sparse_client,
)
from tests.engine.problem import Killed, case, changed, close, killer, on_an_accelerator, same

pytestmark = pytest.mark.float64
UPDATES, SEEDS = (24, 9, 17), (3, 4, 5)  # of the runs of a stack: they end at different moments
LINK = {"network": "link:up=40,down=1e6"}


def plain(rule):
    return lambda timing, **conditions: case(rule, timing, DELAY, every=EVERY, **conditions)


def compressed(timing, **conditions):
    return changed(plain("fedbuff")(timing, **conditions), client=sparse_client())


CASES = {
    "uniform": (plain("fedasync"), "every:concurrency=3", "uniform", {}),
    "random": (plain("fedadam"), "buffer:size=2,concurrency=3", "linear:speed=1,temperature=1", {}),
    "oort": (plain("fedbuff"), "every:concurrency=3", "oort:every=2", FAULTY),
    "losses": (personal, "cohort:size=2", "power_of_choice:d=4", FAULTY),
    "buffer": (personal, "buffer:size=2,concurrency=3", "power_of_choice:d=4+adaptive_buffer:size=1,recent=4", {}),
    "window": (plain("fedbuff"), "window:length=0.7", "adaptive_window:length=0.7,most=2,recent=4", {}),
    "withheld": (compressed, "buffer:size=2,concurrency=3", "event_triggered:norm=0.3+true_bytes", FAULTY | LINK),
}


def members(name, policies=None):
    """The outsets and plans of three runs that differ in their seeds and lengths."""
    (make, timing, policy, conditions), outsets, plans = CASES[name], [], []
    for k, (seed, updates) in enumerate(zip(SEEDS, UPDATES)):
        made = bound_to(policy if policies is None else policies[k])
        given = make(timing, **conditions)._replace(key=jax.random.key(20 + k))
        outsets.append(outset_of(given, made, arrive=not conditions))
        how = {"updates": updates, "seed": seed, "conditions": conditions}
        plans.append(partial(planned, policy=made, timing=timing, **how))
    return outsets, plans


def each_alone(name, observers=(None,) * 3, **how):
    outsets, plans = members(name)
    return [plan(alone(o, observer=one, **how)) for o, plan, one in zip(outsets, plans, observers)]


def together(name, observers=(None,) * 3, **how):
    return side_by_side(*members(name), observers, Execution(**how))


def decided(runs):
    """Of each run: its schedule, what was learned, recorded and probed, and the decisions."""
    return [(list(plan), learned(found), found.probes, decisions.tables) for plan, found, decisions in runs]


def stopping(row):
    """Observers of three runs; the second one is stopped at this evaluation."""
    return None, Observer(lambda now, scores, again: Verdict(stop=now == row), models=True), None


@pytest.mark.slow_cases("uniform", "random", "losses", "window")
@pytest.mark.parametrize("name", CASES)
def test_each_run_equals_the_run_alone_bit_for_bit(name):
    want, have = each_alone(name, **LOOP), together(name, **LOOP)
    same(decided(want), decided(have))
    assert len({tuple(schedule.client) for schedule, *_ in have}) == 3, "the runs must differ"
    calls = [sum(run[1].counters["waves"] for run in runs) for runs in (want, have)]
    assert calls[0] == calls[1], "no run is trained in more waves"


@pytest.mark.slow_cases("losses", "withheld")
@pytest.mark.parametrize("name", ["losses", "buffer", "withheld"])
def test_trained_together_in_batches_they_equal_the_runs_alone_to_rounding(name):
    want, have = each_alone(name, **LOOP), together(name, **VMAP)
    for one, other in zip(have, want, strict=True):
        same(list(one[0]), list(other[0]))
        close(learned(one[1])[:3], learned(other[1])[:3], 1e-10)
        same(one[1].in_vain, other[1].in_vain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["oort", "losses"])
def test_off_the_cpu_they_equal_the_runs_alone(name):
    """Messages of known number, and all runs evaluated by one call."""
    with on_an_accelerator():
        want, have = each_alone(name, **VMAP), together(name, **VMAP)
    for one, other in zip(have, want, strict=True):
        same(list(one[0]), list(other[0]))
        close(learned(one[1])[:3], learned(other[1])[:3], 1e-10)


@pytest.mark.slow_cases("withheld")
@pytest.mark.parametrize("name", ["oort", "withheld"])
def test_a_run_that_is_stopped_leaves_the_others(name):
    """If uploads differ in size, it trains on, to count its bytes."""
    want = each_alone(name, stopping(1), **LOOP)
    have = together(name, stopping(1), **LOOP)
    same(decided(want), decided(have))
    assert [run[1].rows for run in have][1] == 2 and have[0][1].rows > 2


@pytest.mark.parametrize(("name", "updates"), [("oort", 26), ("oort", 36), ("withheld", 30)])
def test_a_stack_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path, name, updates):
    """One of its runs has been stopped by then, or two have ended."""
    want = together(name, stopping(0), **LOOP)
    with pytest.raises(Killed):
        together(name, stopping(0), **LOOP, keeper=Keeper(tmp_path, 5, {}), progress=killer(updates))
    assert completed(tmp_path)[-1] > updates - 8
    have = together(name, stopping(0), **LOOP, keeper=Keeper(tmp_path, 5, {}))
    same(decided(want), decided(have))


def test_a_policy_that_decides_otherwise_is_refused_when_its_stack_is_resumed(tmp_path):
    def of(choose):
        policies = ["uniform", Policy(choose=choose), "uniform"]
        keeper = Keeper(tmp_path, 3, {})
        how = Execution(keeper=keeper, progress=killer(20), **LOOP)
        return side_by_side(*members("uniform", policies), [None] * 3, how)

    with pytest.raises(Killed):
        of(lambda view, idle, count: Choice(idle[:count], np.zeros(count)))
    with pytest.raises(ValueError, match=r"policy = .*must be deterministic"):
        of(lambda view, idle, count: Choice(idle[-count:], np.zeros(count)))


def test_the_error_of_one_planner_ends_all_of_them():
    def failing(view, idle, count):
        return Choice(idle[:count], np.zeros(count)) if len(view.arrivals["client"]) < 5 else Choice([9], np.zeros(1))

    before = threading.active_count()
    with pytest.raises(ValueError, match=r"policy\.choose.*different clients"):
        side_by_side(*members("uniform", ["uniform", Policy(choose=failing), "uniform"]), [None] * 3, Execution(**LOOP))
    assert threading.active_count() == before
