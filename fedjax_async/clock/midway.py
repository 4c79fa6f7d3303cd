"""Messages in mid-job: a job is cut into two parts, and the second one begins with the server's present model.

Each part is a job of the schedule. The upload of the first one is withheld: the server never gets it, and the client
goes on from what it has trained, with a message of the moment at which the second part begins.
"""

from __future__ import annotations

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock.buffering import Timing, jobs_under_way, plan_of
from fedjax_async.clock.idle_clients import SUCCESSORS
from fedjax_async.clock.record import SLACK, Outcome, job_numbers
from fedjax_async.clock.scenario import Scenario, require_all_answer, too_short
from fedjax_async.types import Schedule


def in_two_parts(schedule: Schedule, at: float, end: float) -> Schedule:
    """The schedule with each job of K > 1 steps cut after ``round(at K)`` of them, at least 1 and at most K - 1.

    The parts take as much of the job's time as of its steps. ``end``: the end of the schedule, in virtual seconds; a
    job that has not come so far has its first part only. No job may have failed, nor be called off.
    """
    steps = schedule.local_steps
    first = np.clip(np.rint(at * steps), 1, np.maximum(steps - 1, 1)).astype(np.int32)
    cut = steps > 1
    begun, came = schedule.dispatch_time, schedule.upload_time
    middle = np.where(cut, begun + (came - begun) * (first / steps), came)
    short = np.flatnonzero(cut & ~((middle > begun) & (middle < came)))
    if len(short):
        raise too_short(int(schedule.client[short[0]]), float(begun[short[0]]))
    goes_on = np.flatnonzero(cut & (middle <= end))
    jobs, closed = len(steps), np.concatenate([[0], np.cumsum(schedule.closes, dtype=np.int64)])
    after = np.searchsorted(schedule.time, middle[goes_on], side="right")
    order = np.argsort(np.concatenate([begun, middle[goes_on]]), kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    last = place[:jobs].copy()  # of each job, its last part
    last[goes_on] = place[jobs:]

    def both(of_first: np.ndarray, of_second: np.ndarray) -> np.ndarray:
        return np.concatenate([of_first, of_second]).astype(of_first.dtype)[order]

    outcome = schedule.outcome.copy()
    outcome[cut] = Outcome.UNDER_WAY
    outcome[goes_on] = Outcome.WITHHELD
    client = both(schedule.client, schedule.client[goes_on])
    return schedule._replace(
        client=client,
        number=job_numbers(client).astype(np.int32),
        local_steps=both(np.where(cut, first, steps), (steps - first)[goes_on]),
        dispatch_time=both(begun, middle[goes_on]),
        upload_time=both(middle, came[goes_on]),
        dispatched_after=both(schedule.dispatched_after, after),
        version=both(schedule.version, closed[after]),
        job=last[schedule.job],
        outcome=both(outcome, schedule.outcome[goes_on]),
        freed_time=both(middle, came[goes_on]),
        corrupt=both(schedule.corrupt, schedule.corrupt[goes_on]),
        copies=both(schedule.copies, schedule.copies[goes_on]),
    )


def _end_of(schedule: Schedule, scenario: Scenario) -> float:
    """The end of a planned schedule: its last application if updates or steps reached their limit, else the limit."""
    until = scenario.until
    spent = until.updates is not None and len(schedule.job) >= until.updates
    spent |= until.steps is not None and int(np.count_nonzero(schedule.closes)) >= until.steps
    if spent or until.time is None:
        return float(schedule.time[-1]) if len(schedule.time) else 0.0
    return until.time * SLACK


def midway(*, at: float = 0.5, size: int = 1, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """As `buffer`, but after the share `at` of its steps each job gets the server's present model once more.

    The client goes on from its unfinished model and from this second message, as its local training says
    (``local.going_on``); training that keeps no unfinished model is refused. A job is two jobs of the schedule: the
    first part is listed as withheld and trained in vain, and the second one has the upload, its own number of local
    steps, and a staleness that counts from the second message. What a run counts of its arrivals, such as gradients, is
    that of the second parts. The parts take as much of the job's time as of its steps, and the message itself takes
    none. Bytes: two messages down for each upload. A job of one step has one part.

    All clients must get their second message: with absences, faults or limits this timing is refused.

    With ``fedasync``, the server mixes the client's model in as ever, weighted by the staleness since the second
    message. Where the idea comes from: Liu et al. (2024), "FedASMU", which is left out, as its text could not be read.
    """
    check.require(isinstance(at, (int, float)) and not isinstance(at, bool) and 0 < at < 1, "at", at, "in (0, 1)")
    check.whole("size", size)
    check.optional(check.whole, "concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(scenario: Scenario) -> Schedule:
        require_all_answer(scenario, "midway", "all get their second message")
        jobs = jobs_under_way(scenario, concurrency)
        check.require(size <= jobs, "size", size, f"at most the {jobs} clients in flight: it would never fill")
        whole = plan_of(scenario)(scenario, int(size), jobs, sampling)
        return in_two_parts(whole, float(at), _end_of(whole, scenario))

    timing.cuts_jobs = True  # type: ignore[attr-defined]  # a run asks: its clients must go on from unfinished work
    return timing
