from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import factories
from fedjax_async.clock import (
    AVAILABILITY,
    FAULTS,
    TIMINGS,
    JobFaults,
    Limits,
    Outcome,
    Until,
    allocate,
    bind_conditions,
    fault_counts,
    job_faults,
    longest_chain,
    timing,
    waves,
)
from fedjax_async.clock.availability import together
from fedjax_async.clock.scenario import Conditions, Scenario, models_of
from tests.clock import textbook
from tests.clock.slow_scenario import Script, play, scripts
from tests.clock.textbook import (
    TIMING_SPECS,
    N,
    check_invariants,
    fewest_stabbing_points,
    most_live_at_once,
    replay,
    same,
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
    "crash:rate=0.2,restart=1", "late:probability=0.3,extra=2,factor=1.5", "corrupt:probability=0.2",
    "groups:count=3,up=9,down=2",
    "drop+duplicate+crash+late:factor=3+corrupt+groups:up=20,down=3",
]  # fmt: skip
LIMITS = [Limits(), Limits(timeout=1.5), Limits(max_staleness=2, timeout=1.0, late="drop")]
make = functools.partial(textbook.make, time=400)


def windows(availability, faults, seed):
    bound = bind_conditions(availability, faults, Limits(), N, seed)
    return together([one.interval for one in bound.availability]) or (lambda client, time: (0, math.inf))


def test_the_specs_cover_the_registries():
    assert {spec.partition(":")[0] for spec in TIMING_SPECS} == set(TIMINGS)
    names = {part.partition(":")[0] for spec in AVAILABILITY_SPECS for part in spec.split("+")}
    assert names == set(AVAILABILITY) - {"csv"}
    assert {part.partition(":")[0] for spec in FAULT_SPECS for part in spec.split("+")} == set(FAULTS)
    for known in (AVAILABILITY, FAULTS):
        assert all(factories.summary(factory) for factory in known.values())


def check_conditions(s, there):
    """Nothing is sent to a client that is offline; lost uploads never arrive; one job at a time."""
    check_invariants(s)
    for client, time in zip(s.client.tolist(), s.dispatch_time.tolist()):
        start, end = there(client, time)
        assert start <= time * (1 + 1e-12)
        assert end > time
    if len(s.job) <= 60:
        bounds = waves(s)
        assert len(bounds) - 1 == longest_chain(s)
        for personal in (False, True):
            slots = allocate(s, bounds, personal)
            replay(s, bounds, slots, personal)
            assert slots.count == most_live_at_once(s, bounds, personal)


TROUBLES = [*((spec, None) for spec in AVAILABILITY_SPECS), *((None, spec) for spec in FAULT_SPECS)]
WORLDS = list(itertools.product(TIMING_SPECS, TROUBLES))
MIXED = [(*world, LIMITS[(i // len(TROUBLES) + i) % 3]) for i, world in enumerate(WORLDS)]  # in pairs
SLOWER = [spec.replace("length=0.7", "length=200").replace("deadline=2", "deadline=200") for spec in TIMING_SPECS]
CALM = [
    (timing, (None, None), Limits(), delays)
    for delays in DELAY_SPECS
    for timing in (SLOWER if delays == "rpi" else TIMING_SPECS)
]


@pytest.mark.parametrize(("timing", "trouble", "limits", "delays"), [*((*one, "lognormal") for one in MIXED), *CALM])
def test_every_policy_keeps_the_contract_whoever_is_there_and_whatever_fails(timing, trouble, limits, delays):
    availability, faults = trouble
    given = {"availability": availability, "faults": faults, "limits": limits, "seed": 3}
    given |= {"time": 1e6} if delays == "rpi" else {}
    s = make(timing, delays, **given)
    check_conditions(s, windows(availability, faults, 3))
    assert availability or s.closes.sum() > 5
    assert availability or faults or len(s.job) == 60
    same(s, make(timing, delays, **given))


TROUBLE = {
    **{"availability": "sessions:on=6,off=2,leaving=lose", "faults": "drop+crash:restart=2+late:extra=2"},
    **{"limits": Limits(timeout=2.0, max_staleness=6)},
}


@pytest.mark.parametrize("conditions", [{}, TROUBLE], ids=["calm", "trouble"])
@pytest.mark.parametrize(("budget", "short", "long"), [("updates", 25, 60), ("steps", 4, 9), ("time", 15, 40)])
@pytest.mark.parametrize("timing", TIMING_SPECS)
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
    np.testing.assert_array_equal(one.outcome[settled], two.outcome[:jobs][settled])
    whole = one.closes.nonzero()[0].max(initial=-1) + 1  # the step that the budget cut may differ in `closes`
    np.testing.assert_array_equal(one.closes[:whole], two.closes[:whole])


@pytest.mark.parametrize("timing", TIMING_SPECS)
@pytest.mark.parametrize("delays", ["constant", "exponential", "lognormal:heterogeneity=1"])
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
    end = 12.0
    jobs, arrivals = play(script, clients, updates, end, size=size, length=length)
    availability = tuple(script.availability(k)(clients, 0, 0) for k in range(len(script.absences)))
    scenario = Scenario(
        num_clients=clients,
        local_steps=np.ones(clients, np.int64),
        delays=script.delays(clients, 0),
        until=Until(time=end, updates=updates),
        seed=0,
        conditions=Conditions(availability, (script.faults(clients, 0, 0),), script.limits),
    )
    if windows:
        s = timing.plan_window(scenario, length, clients, "same")
    else:
        s = timing.plan_buffer(scenario, size, clients, "same")
    check_invariants(s)
    found = [
        (int(s.client[j]), int(s.number[j]), time, int(stale), int(step))
        for j, time, stale, step in zip(s.job, s.time.tolist(), s.staleness, s.step)
    ]
    assert sorted(found) == sorted(arrivals)
    if not windows:  # in a window, simultaneous arrivals may be in another order
        assert found == arrivals
    planned = {}
    for j in range(len(s.client)):
        outcome = Outcome(s.outcome[j]).name.lower()
        sent = (float(s.dispatch_time[j]), int(s.version[j]), int(s.dispatched_after[j]))
        planned[int(s.client[j]), int(s.number[j])] = (*sent, float(s.upload_time[j]), float(s.freed_time[j]), outcome)
    corrupt = [script.faults_of.get(key, JobFaults()).corrupt for key in zip(s.client.tolist(), s.number.tolist())]
    np.testing.assert_array_equal(s.corrupt, corrupt)
    assert planned == {
        key: (job["sent"], job["version"], job["after"], job["upload"], job["freed"], job["outcome"])
        for key, job in jobs.items()
    }
    if len(arrivals) <= 9:
        intervals = [(int(s.dispatched_after[j]), e) for e, j in enumerate(s.job)]
        assert len(waves(s)) - 1 == fewest_stabbing_points(intervals)


# --- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", [spec for spec in TIMING_SPECS if not spec.startswith("cohort")])
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


# --- rules, by hand -----------------------------------------------------------------------------


def faulty(**faults):
    """Faults of client 0, by job number: ``job1=JobFaults(...)``."""
    return Script([], {(0, int(name[3:])): job_faults for name, job_faults in faults.items()}, [], Limits()).faults


def there(*stretches, leaving="finish"):
    return Script([], {}, [(leaving, list(stretches))], Limits()).availability(0)


ALWAYS = [(0, math.inf)]


def test_another_client_takes_the_place_of_one_that_crashed():
    crash = faulty(job0=JobFaults(crash_share=0.5, restart=40))
    timing = "every:concurrency=1,sampling=round_robin"
    s = make(timing, table_of([2], [2], [2]), num_clients=3, until=Until(time=10), faults=crash)
    np.testing.assert_array_equal(s.client, [0, 1, 2, 1, 2, 1])
    np.testing.assert_array_equal(s.dispatch_time, [0, 2, 4, 6, 8, 10])


@pytest.mark.parametrize(("late", "outcome"), [("apply", Outcome.LATE), ("drop", Outcome.DROPPED_LATE)])
def test_a_job_given_up_goes_on_and_its_upload_comes_late(late, outcome):
    options = {"num_clients": 2, "until": Until(time=8), "limits": Limits(timeout=3, late=late)}
    s = make("every:concurrency=1,sampling=round_robin", table_of([5], [2]), **options)
    # client 0 is given up at 3, client 1 takes its place; 0's upload comes at 5, and 0 gets a new job
    np.testing.assert_array_equal(s.client, [0, 1, 0, 1])
    np.testing.assert_array_equal(s.dispatch_time, [0, 3, 5, 8])
    np.testing.assert_array_equal(s.freed_time, [3, 5, 8, 10])
    np.testing.assert_array_equal(s.upload_time, [5, 5, 10, 10])
    np.testing.assert_array_equal(s.outcome, [outcome, Outcome.APPLIED, Outcome.GIVEN_UP, Outcome.UNDER_WAY])
    np.testing.assert_array_equal(s.job, [0, 1] if late == "apply" else [1])
    counts = fault_counts(s)
    assert (counts["late"], counts["dropped_late"], counts["given_up"]) == (1, int(late == "drop"), 1)


@pytest.mark.parametrize("length", [0.7, 3, 7])
def test_pauses_end_though_rounds_of_other_lengths_round_their_moments(length):
    """In units of rounds, the end of a window may be rounded down to the very moment that was asked for."""
    away = "periodic:on=3,off=2,leaving=pause+joins:share=0.5,by=5"
    s = make(f"participation:spread=0.8,length={length}", "constant", availability=away)
    check_invariants(s)
    assert len(s.job) == 60


@pytest.mark.parametrize(("timing", "until"), [
    ("every:concurrency=2", Until(updates=20_000)), ("cohort:size=3", Until(steps=3000)),
])  # fmt: skip
def test_clients_are_drawn_uniformly_of_those_that_are_there(timing, until):
    half = there(*[ALWAYS if i < 5 else [(1e9, 2e9)] for i in range(10)])
    s = make(timing, "exponential", num_clients=10, availability=half, until=until)
    sent = np.bincount(s.client, minlength=10)
    np.testing.assert_allclose(sent[:5] / sent.sum(), 0.2, atol=0.01)
    assert sent[5:].sum() == 0


def test_a_round_begins_with_whom_there_is_and_ends_when_nobody_is_left_to_wait_for():
    availability = there(ALWAYS, ALWAYS, [(50, 60)])
    lost = faulty(job0=JobFaults(lost=True))
    s = make("cohort:size=3", table_of([2], [1], [1]), num_clients=3, updates=7, availability=availability, faults=lost)
    # round 1: clients 0 and 1; the upload of 0 is lost, and the round ends at 2, when it was due
    np.testing.assert_array_equal(s.client[:4], [0, 1, 0, 1])
    np.testing.assert_array_equal(s.dispatch_time[:4], [0, 0, 2, 2])
    np.testing.assert_array_equal(s.time[:3], [2, 4, 4])
    np.testing.assert_array_equal(s.step[:3], [0, 1, 1])


def test_a_round_in_which_everything_is_lost_is_no_step():
    lost = faulty(job0=JobFaults(lost=True), job1=JobFaults(crash_share=0.5, restart=7))
    s = make("cohort:size=1", table_of([2]), num_clients=1, updates=2, faults=lost)
    np.testing.assert_array_equal(s.dispatch_time, [0, 2, 10, 12, 14])
    np.testing.assert_array_equal(s.time, [12, 14])
    np.testing.assert_array_equal(s.version, [0, 0, 0, 1, 2])


def test_what_a_round_has_given_up_stays_given_up_when_the_round_ends():
    limits = Limits(timeout=2)
    s = make("cohort:size=3,over_selection=1", table_of([5], [9], [3], [1]), num_clients=4, updates=3, limits=limits)
    # at 2 no job is left to wait for: the round ends with one upload
    np.testing.assert_array_equal(
        s.outcome[:4], [Outcome.GIVEN_UP, Outcome.GIVEN_UP, Outcome.GIVEN_UP, Outcome.APPLIED]
    )
    np.testing.assert_array_equal(s.freed_time[:4], [2, 2, 2, 1])
    np.testing.assert_array_equal(s.upload_time[:4], [np.inf, np.inf, np.inf, 1])
    np.testing.assert_array_equal(s.dispatch_time[4:8], [2, 2, 2, 2])
    assert fault_counts(s)["called_off"] == 0


def corrupting(*jobs):
    """These jobs, (client, number), are corrupt."""
    return Script([], {job: JobFaults(corrupt=True) for job in jobs}, [], Limits()).faults


def test_a_corrupt_arrival_is_no_step_of_the_budget():
    steps = make("every", table_of([1]), num_clients=1, until=Until(steps=4), faults=corrupting((0, 1), (0, 2)))
    np.testing.assert_array_equal(steps.time, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(steps.closes, [1, 0, 0, 1, 1, 1])


def test_a_cohort_waits_for_sound_uploads():
    faults = corrupting((0, 0), (1, 0), (2, 0), (0, 1))
    delays = table_of([1], [2], [3], [4])
    s = make("cohort:size=1,over_selection=3", delays, num_clients=4, until=Until(steps=2), faults=faults)
    # each round needs one sound upload: in the first it is the last one, in the second that of client 1
    np.testing.assert_array_equal(s.client[s.job], [0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(s.time, [4, 4, 4, 4, 6, 6])
    np.testing.assert_array_equal(s.closes, [0, 0, 0, 1, 0, 1])
    spoiled = corrupting((0, 0), (1, 0), (0, 1))
    s = make("cohort:size=2", table_of([1], [2]), num_clients=2, until=Until(steps=2), faults=spoiled)
    # a round with nothing but corrupt uploads ends when no job is left to wait for, and is no step
    np.testing.assert_array_equal(s.time, [2, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(s.closes, [0, 0, 0, 1, 0, 1])
    np.testing.assert_array_equal(s.step, [0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_every_step_has_a_sound_upload(timing, limits):
    size = {"buffer:size=2,concurrency=5": 2, "every": 1}.get(timing.partition(":")[0] if "=" not in timing else timing)
    for seed in range(4):
        s = make(timing, faults="corrupt:probability=0.5+drop+duplicate:probability=0.5", limits=limits, seed=seed)
        sound = ~s.corrupt[s.job]
        assert 10 < sound.sum() < 50
        of_step = np.bincount(s.step, weights=sound, minlength=s.closes.sum())[: s.closes.sum()]
        assert (of_step > 0).all()
        if size is not None:
            np.testing.assert_array_equal(of_step, size)
            assert sound[s.closes].all()
        marks = [model(N, seed, part).draw for model, part in models_of("faults", FAULTS, "corrupt:probability=0.5")]
        np.testing.assert_array_equal(s.corrupt, job_faults(marks, s.client, s.number).corrupt)


@pytest.mark.parametrize("timing", ["every", "window:length=1", "cohort:size=3"])
def test_a_plan_in_which_everything_is_corrupt_never_ends_by_itself(timing, monkeypatch):
    monkeypatch.setattr("fedjax_async.clock.event_queue.FRUITLESS", 2000)
    faults = "corrupt:probability=1"
    s = make(timing, faults=faults, updates=30)
    assert len(s.job) == 30
    assert not s.closes.any()
    with pytest.raises(ValueError, match=r"not one was applied|without a sound upload"):
        make(timing, faults=faults, until=Until(steps=1))


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", TIMING_SPECS)
def test_a_plan_ends_when_nobody_will_ever_be_there_again(timing):
    s = make(timing, until=Until(updates=10**6), availability="leaves:share=1,by=20")
    assert 0 < len(s.job) < 400
    assert s.dispatch_time.max() <= 20
    with pytest.raises(ValueError, match="nothing is ever uploaded"):
        make(timing, until=Until(updates=10), availability="leaves:share=1,at=0")
    empty = "periodic:on=1,off=1,phase=0+periodic:on=1,off=1,phase=1"
    with pytest.raises(ValueError, match="nothing is ever uploaded"):
        make(timing, until=Until(updates=10), availability=empty)


@pytest.mark.parametrize("timing", ["every", "window:length=1", "cohort:size=3", "participation"])
def test_a_plan_in_which_nothing_ever_arrives_is_an_error(timing, monkeypatch):
    monkeypatch.setattr("fedjax_async.clock.event_queue.FRUITLESS", 2000)
    for options in (
        {"faults": "drop:probability=1"},
        {"faults": "crash:probability=1"},
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
    ({"faults": "groups:down=0"}, "down = 0"), ({"faults": "dorp+late:extra=1"}, "did you mean 'drop'"),
    ({"limits": Limits(max_staleness=-1)}, "limits.max_staleness = -1"),
    ({"limits": Limits(max_staleness=1.5)}, "limits.max_staleness = 1.5"),
    ({"limits": Limits(timeout=0)}, "limits.timeout = 0"),
    ({"limits": Limits(late="wait")}, "limits.late = 'wait': must be one of apply, drop"),
    ({"limits": None}, "limits = None"),
    by=lambda options: make("every", **options),
)  # fmt: skip
