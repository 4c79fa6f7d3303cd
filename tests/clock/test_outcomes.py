"""Small plans with faults, absences and limits, by hand; and that every server step has a sound upload."""

import math

import numpy as np
import pytest

from fedjax_async.clock import FAULTS, JobFaults, Limits, Outcome, Until, fault_counts, job_faults
from fedjax_async.clock.record import trained_in_vain
from fedjax_async.clock.scenario import models_of
from tests.clock.slow_scenario import Script
from tests.clock.test_unreliable import LIMITS, make
from tests.clock.textbook import TIMING_SPECS, N, check_invariants, table_of


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


def test_a_job_that_would_fail_after_its_round_is_stopped_by_the_end_of_the_round():
    """Client 0 is given up at 2 and would lose its upload at 5; the round ends at 2, and it is in the next one too."""
    limits, lost = Limits(timeout=2), faulty(job0=JobFaults(lost=True))
    s = make("cohort:size=2", table_of([5, 1], [1, 1]), num_clients=2, updates=2, limits=limits, faults=lost)
    np.testing.assert_array_equal(s.dispatch_time[:4], [0, 0, 2, 2])
    np.testing.assert_array_equal(s.outcome[:2], [Outcome.GIVEN_UP, Outcome.APPLIED])
    assert not len(s.failure_time) and not trained_in_vain(s).any() and fault_counts(s)["lost"] == 0


def test_rounds_without_an_upload_that_counts_name_what_keeps_them_from_it():
    for given, named in (
        ({"limits": Limits(timeout=0.5)}, "timeout = 0.5"),
        ({"limits": Limits(timeout=0.5), "faults": "drop", "availability": "always"}, "faults, availability, timeout"),
    ):
        with pytest.raises(ValueError, match=f"^{named}.*: must let some uploads count"):
            make("cohort:size=2", table_of([1], [1]), num_clients=2, until=Until(updates=2), **given)
