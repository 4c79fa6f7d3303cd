"""Plans with absences, faults and limits: contracts of all timings, and one scenario played through by hand."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock import JobFaults, Limits, Outcome, Until, bind_conditions, fault_counts, job_faults
from fedjax_async.clock.availability import AVAILABILITY, together
from fedjax_async.clock.buffering import plan_buffer
from fedjax_async.clock.faults import FAULTS
from fedjax_async.clock.scenario import Conditions, Scenario, models_of
from fedjax_async.clock.timing import TIMINGS, plan_window
from tests.clock import textbook
from tests.clock.textbook import (
    CALM_SPECS,
    TIMING_SPECS,
    N,
    Script,
    arrivals_of,
    check_invariants,
    play,
    same,
    scripts,
    table_of,
)
from tests.refusals import refusals

DELAY_SPECS = ["constant", "constant:heterogeneity=1", "lognormal:sigma=0.5", "exponential", "rpi"]
AVAILABILITY_SPECS = [
    "always", "joins:share=0.5,by=9", "leaves:share=0.3,by=30", "periodic:on=3,off=2",
    "periodic:on=3,off=2,leaving=pause", "sessions:on=4,off=2,leaving=lose",
    "sessions:on=4,off=2,family=lognormal+joins:share=0.5,by=5",
]  # fmt: skip
FAULT_SPECS = [
    "drop:probability=0.2", "duplicate:probability=0.3,delay=0.5", "crash:probability=0.2,restart=3",
    "crash:rate=0.2,restart=1", "late:probability=0.3,extra=2,factor=1.5", "corrupt:probability=0.5",
    "groups:count=3,up=9,down=2", "drift:at=9,share=0.5,factor=3",
    "drop+duplicate+crash+late:factor=3+corrupt+groups:up=20,down=3+drift:at=20",
]  # fmt: skip
LIMITS = [Limits(), Limits(timeout=1.5), Limits(max_staleness=2, timeout=1.0, late="drop")]
make = functools.partial(textbook.make, time=400)


def test_the_specs_cover_the_registries():
    assert {spec.partition(":")[0] for spec in TIMING_SPECS + CALM_SPECS} == set(TIMINGS)
    for specs, known in ((AVAILABILITY_SPECS, AVAILABILITY.keys() - {"csv"}), (FAULT_SPECS, FAULTS.keys())):
        assert {part.partition(":")[0] for spec in specs for part in spec.split("+")} == known


TROUBLES = [*((spec, None) for spec in AVAILABILITY_SPECS), *((None, spec) for spec in FAULT_SPECS)]
MIXED = [  # in pairs
    (timing, trouble, LIMITS[(i + k) % 3], "lognormal")
    for i, timing in enumerate(TIMING_SPECS)
    for k, trouble in enumerate(TROUBLES)
]
SLOWER = [spec.replace("=0.7", "=200").replace("deadline=2", "deadline=200") for spec in TIMING_SPECS + CALM_SPECS]
CALM = [
    (timing, (None, None), Limits(), delays)
    for delays in DELAY_SPECS
    for timing in (SLOWER if delays == "rpi" else TIMING_SPECS + CALM_SPECS)
]


@pytest.mark.parametrize(("timing", "trouble", "limits", "delays"), MIXED + CALM)
def test_every_policy_keeps_the_contract_whoever_is_there_and_whatever_fails(timing, trouble, limits, delays):
    availability, faults = trouble
    given = {"availability": availability, "faults": faults, "limits": limits, "seed": 3}
    given |= {"time": 1e6} if delays == "rpi" else {}
    s = make(timing, delays, **given)
    check_invariants(s)
    bound = bind_conditions(availability, faults, Limits(), N, 3)
    online = together([one.interval for one in bound.availability]) or (lambda client, time: (0, math.inf))
    for client, time in zip(s.client.tolist(), s.dispatch_time.tolist()):
        start, end = online(client, time)
        assert start <= time * (1 + 1e-12) and end > time
    drawn = job_faults([source.draw for source in bound.faults], s.client, s.number)
    np.testing.assert_array_equal(s.corrupt, np.broadcast_to(drawn.corrupt, s.client.shape))
    assert availability or s.closes.sum() > 5
    assert availability or faults or len(s.job) == 60
    same(s, make(timing, delays, **given))


TROUBLE = {
    **{"availability": "sessions:on=6,off=2,leaving=lose", "faults": "drop+crash:restart=2+late:extra=2"},
    **{"limits": Limits(timeout=2.0, max_staleness=6)},
}


@pytest.mark.parametrize(("budget", "short", "long"), [("updates", 25, 60), ("steps", 4, 9), ("time", 15, 40)])
@pytest.mark.parametrize(("timing", "conditions"), [
    *itertools.product(TIMING_SPECS, [TROUBLE]), *itertools.product(TIMING_SPECS + CALM_SPECS, [{}])
])  # fmt: skip
def test_a_longer_budget_continues_a_shorter_one(timing, budget, short, long, conditions):
    one, two = (make(timing, until=Until(**{budget: most}), **conditions) for most in (short, long))
    arrivals, jobs = len(one.job), len(one.client)
    spent = {"updates": arrivals == short, "steps": one.closes.sum() == short, "time": one.time[-1] <= short}
    assert arrivals < len(two.job) and spent[budget] and (budget != "steps" or one.closes[-1])
    for name in ("job", "time", "step"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name)[:arrivals])
    earlier = one.dispatch_time < one.time[-1]  # the last messages leave after fewer arrivals if the budget cuts a step
    for name in ("client", "dispatch_time", "dispatched_after", "version", "corrupt"):
        known = earlier if name in ("dispatched_after", "version") else slice(None)
        np.testing.assert_array_equal(getattr(one, name)[known], getattr(two, name)[:jobs][known])
    settled = ~np.isin(one.outcome, [Outcome.UNDER_WAY, Outcome.GIVEN_UP])
    for name in ("outcome", "local_steps", "upload_time"):
        np.testing.assert_array_equal(getattr(one, name)[settled], getattr(two, name)[:jobs][settled])
    whole = one.closes.nonzero()[0].max(initial=-1) + 1  # the step that the budget cut may differ in `closes`
    np.testing.assert_array_equal(one.closes[:whole], two.closes[:whole])


@pytest.mark.parametrize("timing", TIMING_SPECS)
@pytest.mark.parametrize("delays", ["constant", "lognormal:heterogeneity=1"])
def test_conditions_that_change_nothing_change_nothing(timing, delays):
    """Conditions without effect give the schedule of a scenario without conditions."""
    faults = "drop:probability=0+crash:probability=0+groups:up=1e12,down=1e-9"
    limits = Limits(max_staleness=10**6, timeout=1e9)
    for until in (Until(updates=80), Until(time=11.5), Until(steps=17)):
        plain = make(timing, delays, until=until, seed=1)
        same(plain, make(timing, delays, until=until, seed=1, availability="always", faults=faults, limits=limits))


@given(scripts(), st.integers(1, 3), st.sampled_from([7, 1000]), st.data())
@settings(deadline=None, max_examples=150)
def test_a_scenario_with_faults_is_the_one_played_through_by_hand(script: Script, clients, updates, data):
    windows = data.draw(st.booleans())
    length = data.draw(st.sampled_from([0.25, 1.0, 2.5])) if windows else 0.0
    size = 0 if windows else data.draw(st.integers(1, clients))
    if windows:
        updates = 1000  # if the budget cuts a window, it is not defined which jobs count as dropped
    jobs, arrivals = play(script, clients, updates, 12.0, size=size, length=length)
    availability = tuple(script.availability(k)(clients, 0, 0) for k in range(len(script.absences)))
    scenario = Scenario(
        num_clients=clients,
        local_steps=np.ones(clients, np.int64),
        delays=table_of(*script.seconds)(clients, 0),
        until=Until(time=12.0, updates=updates),
        seed=0,
        conditions=Conditions(availability, (script.faults(clients, 0, 0),), script.limits),
    )
    plan = plan_window if windows else plan_buffer
    s = plan(scenario, length if windows else size, clients, "same")
    check_invariants(s)
    found = arrivals_of(s, "client", "number", "time", "staleness", "step")
    # in a window, simultaneous arrivals may be in another order
    assert sorted(found) == sorted(arrivals) if windows else found == arrivals
    keys = list(zip(s.client.tolist(), s.number.tolist()))
    outcome = [Outcome(code).name.lower() for code in s.outcome]
    columns = (s.dispatch_time, s.version, s.dispatched_after, s.upload_time, s.freed_time)
    names = ("sent", "version", "after", "upload", "freed", "outcome")
    planned = dict(zip(keys, zip(*(column.tolist() for column in columns), outcome)))
    assert planned == {key: tuple(job[name] for name in names) for key, job in jobs.items()}
    np.testing.assert_array_equal(s.corrupt, [script.faults_of.get(key, JobFaults()).corrupt for key in keys])


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", [spec for spec in TIMING_SPECS if not spec.startswith(("cohort", "fresh"))])
def test_the_counts_are_those_of_the_draws(timing):
    spec = "drop:probability=0.1+duplicate:probability=0.05,delay=0+corrupt:probability=0.05"
    s = make(timing, updates=400, faults=spec)
    draws = [draw for model, part in models_of("faults", FAULTS, spec) for draw in model(N, 0, part)[:2]]
    drawn = job_faults(draws, s.client, s.number)
    copied = drawn.copies[0] < np.inf
    closed = s.outcome != Outcome.UNDER_WAY
    assert set(s.outcome) <= {Outcome.APPLIED, Outcome.LOST, Outcome.UNDER_WAY}
    np.testing.assert_array_equal(s.outcome[closed] == Outcome.LOST, drawn.lost[closed])
    np.testing.assert_array_equal(s.corrupt, drawn.corrupt)
    arrived = np.isin(np.arange(len(s.client)), s.job)
    np.testing.assert_array_equal(s.copies, copied & arrived)
    counts = fault_counts(s)
    assert counts["lost"] == drawn.lost[closed].sum() > 0
    assert counts["corrupt"] == drawn.corrupt[arrived].sum() > 0
    assert counts["duplicates"] == copied[arrived].sum() > 0
    assert counts["late"] == counts["dropped_stale"] == counts["called_off"] == 0


def test_copies_come_later_and_only_those_that_come_before_the_end_count():
    slow = make("every", updates=300, faults="duplicate:probability=1,delay=1e9")
    assert fault_counts(slow)["duplicates"] == 0
    soon = make("every", updates=300, faults="duplicate:probability=1,delay=1e-9+duplicate:probability=1,delay=0")
    assert set(soon.copies[soon.job[:-N]]) == {2}
    clean = make("every", updates=300)
    same(soon, clean, ("client", "job", "time", "version", "upload_time"))


def test_a_schedule_without_conditions_reports_no_trouble():
    counts = fault_counts(make("cohort:size=3,over_selection=2", until=Until(steps=10)))
    assert counts == dict.fromkeys(counts, 0) | {"applied": 30, "called_off": 20, "under_way": 5}


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_a_plan_to_which_no_client_ever_comes_is_an_error(timing):
    for away in ("leaves:share=1,at=0", "periodic:on=1,off=1,phase=0+periodic:on=1,off=1,phase=1"):
        with pytest.raises(ValueError, match="nothing is ever uploaded"):
            make(timing, until=Until(updates=10), availability=away)


@pytest.mark.parametrize("timing", ["every", "window:length=1", "cohort:size=3", "participation"])
def test_a_plan_in_which_nothing_ever_arrives_is_an_error(timing, monkeypatch):
    monkeypatch.setattr("fedjax_async.clock.event_queue.FRUITLESS", 2000)
    corrupt = make(timing, updates=30, faults="corrupt:probability=1")  # they arrive, and close no step
    assert len(corrupt.job) == 30 and not corrupt.closes.any()
    for options in (
        {"faults": "drop:probability=1"},
        {"faults": "crash:probability=1"},
        {"faults": "corrupt:probability=1", "until": Until(steps=1)},
        {"delays": "constant:mean=3", "limits": Limits(timeout=0.5, late="drop")},
        {"delays": "constant:mean=3", "availability": "periodic:on=2,off=1,leaving=lose"},
    ):
        if timing == "participation" and "delays" in options:
            continue
        with pytest.raises(ValueError, match=r"not one was applied|without a sound upload"):
            make(timing, **({"until": Until(updates=10)} | options))


test_bad_conditions_are_one_line_value_errors = refusals(
    ({"availability": "joins:share=1.5"}, "share = 1.5: must be between 0 and 1"),
    ({"availability": "joins:share=x"}, "share = 'x'"), ({"availability": "joins:by=0"}, "by = 0"),
    ({"availability": "joins:at=-1"}, "at = -1"),
    ({"availability": "leaves:leaving=run"}, "leaving = 'run': must be one of finish, pause, lose"),
    ({"availability": "periodic:on=0"}, "on = 0"), ({"availability": "periodic:off=-1"}, "off = -1"),
    ({"availability": "periodic:on=6,off=4,phase=10"}, "phase = 10: must be at least 0 and below 10"),
    ({"availability": "periodic:leaving=no"}, "leaving = 'no'"),
    ({"availability": "sessions:on=-2"}, "on = -2"), ({"availability": "sessions:off=0"}, "off = 0"),
    ({"availability": "sessions:family=beta"}, "family = 'beta': unknown"),
    ({"availability": "sessions:spread=0"}, "spread = 0"), ({"availability": "sessions:leaving=1"}, "leaving = 1"),
    ({"availability": "csv:path=nowhere.csv"}, "path = 'nowhere.csv'"),
    ({"availability": "joins+sesions"}, "availability = 'sesions': unknown; did you mean 'sessions'"),
    ({"availability": "joins:shares=1"}, "no option 'shares'"), ({"availability": "joins+"}, "availability = ''"),
    ({"faults": "drop:probability=1.1"}, "probability = 1.1: must be between 0 and 1"),
    ({"faults": "drop:probability=nan"}, "probability = nan"),
    ({"faults": "duplicate:probability=-1"}, "probability = -1"),
    ({"faults": "duplicate:delay=-1"}, "delay = -1"), ({"faults": "crash:probability=2"}, "probability = 2"),
    ({"faults": "crash:rate=0"}, "rate = 0"),
    ({"faults": "crash:rate=1,probability=0.1"}, "rate = 1: must be left out"),
    ({"faults": "crash:restart=-1"}, "restart = -1"),
    ({"faults": "late"}, "extra = 0.0: must be > 0, unless factor is > 1"),
    ({"faults": "late:factor=0.5"}, "factor = 0.5"), ({"faults": "late:extra=-1"}, "extra = -1"),
    ({"faults": "corrupt:probability=yes"}, "probability = 'yes'"),
    ({"faults": "groups:count=0"}, "count = 0"), ({"faults": "groups:up=0"}, "up = 0"),
    ({"faults": "drift:at=0"}, "at = 0: must be"), ({"faults": "drift:share=2"}, "share = 2: must be"),
    ({"faults": "drift:factor=0"}, "factor = 0: must be"),
    ({"faults": "groups:down=0"}, "down = 0"), ({"faults": "dorp+late:extra=1"}, "did you mean 'drop'"),
    ({"limits": Limits(max_staleness=-1)}, "limits.max_staleness = -1"),
    ({"limits": Limits(max_staleness=1.5)}, "limits.max_staleness = 1.5"),
    ({"limits": Limits(timeout=0)}, "limits.timeout = 0"),
    ({"limits": Limits(late="wait")}, "limits.late = 'wait': must be one of apply, drop"),
    ({"limits": None}, "limits = None"),
    by=lambda options: make("every", **options),
)  # fmt: skip
