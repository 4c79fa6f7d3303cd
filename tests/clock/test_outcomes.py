"""Small plans with faults, absences and limits, by hand."""

import math

import numpy as np
import pytest

from fedjax_async.clock import JobFaults, Limits, Outcome, Until, fault_counts
from fedjax_async.clock.record import trained_in_vain
from tests.clock.textbook import Script, check_invariants, make, table_of


def faulty(jobs):
    """Faults of jobs (client, number)."""
    return {"faults": Script([], jobs, [], Limits()).faults}


def corrupt(*jobs):
    return faulty(dict.fromkeys(jobs, JobFaults(corrupt=True)))


def there(*stretches):
    return {"availability": Script([], {}, [("finish", list(stretches))], Limits()).availability(0)}


def crash(restart):
    return JobFaults(crash_share=0.5, restart=restart)


ALWAYS, LOST = [(0, math.inf)], JobFaults(lost=True)
APPLIED, GIVEN_UP, UNDER_WAY = Outcome.APPLIED, Outcome.GIVEN_UP, Outcome.UNDER_WAY
TO_60 = {"until": Until(time=60), "limits": Limits(timeout=5)}
ONE_BY_ONE = "every:concurrency=1,sampling=round_robin"
BY_HAND = {
    "another client takes the place of one that crashed": (
        ONE_BY_ONE, [[2], [2], [2]], faulty({(0, 0): crash(40)}) | {"until": Until(time=10)},
        {"client": [0, 1, 2, 1, 2, 1], "dispatch_time": [0, 2, 4, 6, 8, 10]},
    ),
    # Client 0 is given up at 3, client 1 takes its place; 0's upload comes at 5, and 0 gets a new job.
    **{
        f"a job given up goes on, and its upload comes late: {late}": (
            ONE_BY_ONE, [[5], [2]], {"until": Until(time=8), "limits": Limits(timeout=3, late=late)},
            {"client": [0, 1, 0, 1], "dispatch_time": [0, 3, 5, 8], "freed_time": [3, 5, 8, 10],
             "upload_time": [5, 5, 10, 10], "outcome": [outcome, APPLIED, GIVEN_UP, UNDER_WAY], "job": job,
             "late": 1, "dropped_late": int(late == "drop"), "given_up": 1},
        )
        for late, outcome, job in (("apply", Outcome.LATE, [0, 1]), ("drop", Outcome.DROPPED_LATE, [1]))
    },
    "empty windows are no steps, and cost no time": (
        "window:length=0.001", [[1e6]], {"updates": 3}, {"step": [0, 1, 2], "time": [1e6, 2e6, 3e6]},
    ),
    "windows end at multiples, and the budget is inclusive": (
        "window:length=0.1", [[0.05]], {"until": Until(time=0.3)}, {"time": [0.1, 0.2, 3 * 0.1]},
    ),
    # Round 1: clients 0 and 1; the upload of 0 is lost, and the round ends at 2, when it was due.
    "a round begins with whom there is, and ends when nobody is left to wait for": (
        "cohort:size=3", [[2], [1], [1]],
        there(ALWAYS, ALWAYS, [(50, 60)]) | faulty({(0, 0): LOST}) | {"updates": 7},
        {"client": (0, 1, 0, 1), "dispatch_time": (0, 0, 2, 2), "time": (2, 4, 4), "step": (0, 1, 1)},
    ),
    "a round in which everything is lost is no step": (
        "cohort:size=1", [[2]], faulty({(0, 0): LOST, (0, 1): crash(7)}) | {"updates": 2},
        {"dispatch_time": [0, 2, 10, 12, 14], "time": [12, 14], "version": [0, 0, 0, 1, 2]},
    ),
    # Round 1: both late; round 2: 1 and 2 seconds.
    "a deadline drops the late": (
        "cohort:size=2,deadline=5", [[9, 1], [7, 2]], {"updates": 4},
        {"dispatch_time": [0, 0, 5, 5, 7, 7, 9, 9], "time": [7, 7, 9, 9], "step": [0, 0, 1, 1],
         "version": [0, 0, 0, 0, 1, 1, 2, 2]},
    ),
    # At 2 no job is left to wait for: the round ends with one upload.
    "what a round has given up stays given up when the round ends": (
        "cohort:size=3,over_selection=1", [[5], [9], [3], [1]], {"updates": 3, "limits": Limits(timeout=2)},
        {"outcome": (GIVEN_UP, GIVEN_UP, GIVEN_UP, APPLIED), "freed_time": (2, 2, 2, 1),
         "upload_time": (np.inf, np.inf, np.inf, 1), "dispatch_time": (0, 0, 0, 0, 2, 2, 2, 2), "called_off": 0},
    ),
    # Client 0 is given up at 2 and would lose its upload at 5; the round ends at 2, and it is in the next one too.
    "a job that would fail after its round is stopped by the end of the round": (
        "cohort:size=2", [[5, 1], [1, 1]], faulty({(0, 0): LOST}) | {"updates": 2, "limits": Limits(timeout=2)},
        {"dispatch_time": (0, 0, 2, 2), "outcome": (GIVEN_UP, APPLIED), "failure_time": [], "lost": 0},
    ),
    # A step every 10 s calls the job of 100 s off, though it was given up at 5, and would have failed later.
    **{
        f"a job that would have failed is called off as any other: {what}": (
            "fresh:threshold=1", [[10], [100]], faulty({(1, 0): fault}) | TO_60,
            {"dispatch_time": [0, 0, 10, 10, 20, 20, 30, 30, 40, 40, 50, 50, 60, 60], "lost": 0,
             "outcome": (Outcome.LATE, GIVEN_UP), "failure_time": (np.inf, 10)},
        )
        for what, fault in (("sound", JobFaults()), ("lost", LOST), ("crashed", crash(40)))
    },
    "a job that crashes as it would be called off has crashed": (
        "fresh:threshold=1", [[10], [100]], faulty({(1, 0): JobFaults(crash_after=10, restart=40)}) | TO_60,
        {"dispatch_time": [0, 0, 10, 20, 30, 40, 50, 50, 60, 60], "outcome": (Outcome.LATE, Outcome.CRASHED),
         "failure_time": (np.inf, 10)},
    ),
    "a corrupt arrival is no step of the budget": (
        "every", [[1]], corrupt((0, 1), (0, 2)) | {"until": Until(steps=4)},
        {"time": [1, 2, 3, 4, 5, 6], "closes": [1, 0, 0, 1, 1, 1]},
    ),
    # In the first round the sound upload is the last one, in the second that of client 1.
    "a cohort waits for a sound upload": (
        "cohort:size=1,over_selection=3", [[1], [2], [3], [4]],
        corrupt((0, 0), (1, 0), (2, 0), (0, 1)) | {"until": Until(steps=2)},
        {"time": [4, 4, 4, 4, 6, 6], "closes": [0, 0, 0, 1, 0, 1]},
    ),
    "a round with nothing but corrupt uploads is no step": (
        "cohort:size=2", [[1], [2]], corrupt((0, 0), (1, 0), (0, 1)) | {"until": Until(steps=2)},
        {"time": [2, 2, 4, 4, 6, 6], "closes": [0, 0, 0, 1, 0, 1], "step": [0, 0, 0, 0, 1, 1]},
    ),
    # The third job has done half of its work at 25, the rest takes four times as long.
    "a job under way goes on at the new speed": (
        "every", [[10]], {"updates": 5, "faults": "drift:at=25,factor=4,share=1"}, {"time": [10, 20, 45, 85, 125]},
    ),
    # A slow job has done 6.25 s of its work at 25, the rest takes 3.75 s.
    "a slow job goes on at the new speed": (
        "every", [[10]], {"updates": 3, "faults": "drift:at=25,factor=4,share=0"}, {"time": [28.75, 38.75, 48.75]},
    ),
    # 5 s of the second round's work are left at 15.
    "rounds wait for clients that are slow by then": (
        "cohort:size=2", [[10], [10]], {"until": Until(steps=4), "faults": "drift:at=15,factor=3,share=1"},
        {"time": [10, 10, 30, 30, 60, 60, 90, 90]},
    ),
    "new jobs are sent before the step to others than those that wait for it": (
        "pace:bound=1,length=1,unknown=10,concurrency=2,sampling=round_robin", [[2], [9], [2], [2]], {"updates": 12},
        {"client": (0, 1, 2, 3), "dispatch_time": (0, 0, 2, 4), "time": (9,), "version": (0, 0, 0, 0)},
    ),
    # Client 1 comes at 8, and is too stale at 12, 6 s after the step at 6. Its next upload need not wait.
    "a look at which all uploads are dropped is no step": (
        "pace:bound=1,length=1,unknown=1,concurrency=2", [[6, 50], [8, 1]],
        {"updates": 2, "limits": Limits(max_staleness=0)},
        {"time": [6, 13], "job": [0, 3], "client": (0, 1, 0, 1), "dispatch_time": (0, 0, 6, 12)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("timing", "rows", "options", "wanted"), BY_HAND.values(), ids=BY_HAND)
def test_a_plan_by_hand(timing, rows, options, wanted):
    s = make(timing, table_of(*rows), num_clients=len(rows), **options)
    found = s._asdict() | fault_counts(s)
    for name, want in wanted.items():
        have = found[name][: len(want)] if isinstance(want, tuple) else found[name]  # a tuple is the beginning
        np.testing.assert_array_equal(have, want, err_msg=name)
    if "failure_time" in wanted:
        assert not trained_in_vain(s)[s.outcome == GIVEN_UP].any()


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
    s = make(timing, "exponential", num_clients=10, until=until, **half)
    sent = np.bincount(s.client, minlength=10)
    np.testing.assert_allclose(sent[:5] / sent.sum(), 0.2, atol=0.01)
    assert sent[5:].sum() == 0


def test_rounds_without_an_upload_that_counts_name_what_keeps_them_from_it():
    for given, named in (
        ({"limits": Limits(timeout=0.5)}, "timeout = 0.5"),
        ({"limits": Limits(timeout=0.5), "faults": "drop", "availability": "always"}, "faults, availability, timeout"),
    ):
        with pytest.raises(ValueError, match=f"^{named}.*: must let some uploads count"):
            make("cohort:size=2", table_of([1], [1]), num_clients=2, until=Until(updates=2), **given)
