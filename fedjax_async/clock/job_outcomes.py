"""What will become of a job by itself: its draws, and its outcome under faults and absences of its client."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.availability import IntervalAt, together
from fedjax_async.clock.faults import JobFaults, Pace, combined, crashes, paces_together
from fedjax_async.clock.record import SLACK, Outcome
from fedjax_async.clock.scenario import Conditions, Scenario, checked_durations, too_short

# Names of their own: looking up members of the class would take much of the time of an event.
_APPLIED, _LOST = Outcome.APPLIED, Outcome.LOST
_CRASHED, _INTERRUPTED = Outcome.CRASHED, Outcome.INTERRUPTED

# More pauses of one job are taken for a mistake.
_MOST_PAUSES = 1_000_000

# What is drawn for a job: its seconds; for a job with a fault: seconds, seconds until the client crashes, seconds of
# the restart, whether the upload is lost, and whether it is corrupt.
JobDraw = float | tuple[float, float, float, bool, bool]


class JobOutcome(NamedTuple):
    """What will become of a job if the server does not interfere; times are infinite for what never happens."""

    outcome: Outcome
    upload: float  # when the upload reaches the server
    noticed: float  # when a server without timeout notices that no upload will come
    crash: float  # when the client crashes
    client_free: float  # when the client can get another job, if it is online


def draw_jobs(scenario: Scenario, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """What is drawn for these jobs (arrays that broadcast), an array of ``JobDraw``.

    Raises ``ValueError`` for durations that are not finite and > 0.
    """
    seconds, sources = checked_durations(scenario, clients, numbers), scenario.conditions.faults
    if not sources:
        return seconds
    found = [source.draw(clients, numbers) for source in sources if source.draw is not None]
    with np.errstate(over="ignore"):
        faults = reduce(combined, found, JobFaults())
        seconds = seconds * faults.factor + faults.extra
    if not np.isfinite(seconds).all():
        raise ValueError("faults: must leave the duration of every job a finite number (factor, extra)")
    until_crash, restart = crashes(found, seconds)
    hit = np.flatnonzero((until_crash < seconds) | faults.lost | faults.corrupt)
    if not len(hit):
        return seconds
    columns = np.broadcast_arrays(seconds, until_crash, restart, faults.lost, faults.corrupt)
    drawn = seconds.astype(object)
    flat = drawn.reshape(-1)
    for index, *values in zip(hit.tolist(), *(column.reshape(-1)[hit].tolist() for column in columns)):
        flat[index] = tuple(values)
    return drawn


def job_outcomes(conditions: Conditions) -> Callable[[int, float, JobDraw], JobOutcome]:
    """``job_outcome(client, time, drawn)`` of a job that is sent at ``time`` to a client that is online."""
    pausing = together([source.interval for source in conditions.availability if source.leaving == "pause"])
    losing = together([source.interval for source in conditions.availability if source.leaving == "lose"])
    pace = paces_together(conditions.faults)

    def job_outcome(client: int, time: float, drawn: JobDraw) -> JobOutcome:
        seconds, until_crash, restart, lost = drawn[:4] if isinstance(drawn, tuple) else (drawn, math.inf, 0.0, False)
        end, crash = time + seconds, time + until_crash
        if pausing is not None or pace is not None:
            end = _end_of_work(pausing, pace, client, time, seconds)
            crash = _end_of_work(pausing, pace, client, time, until_crash) if until_crash < math.inf else math.inf
        noticed = end if end < math.inf else time + seconds
        offline = math.inf if losing is None else losing(client, time)[1]
        if crash < end and crash <= offline:
            return JobOutcome(_CRASHED, math.inf, noticed, crash, crash + restart)
        if offline * SLACK < end or end == math.inf:
            return JobOutcome(_INTERRUPTED, math.inf, noticed, math.inf, min(offline, end))
        if lost:
            return JobOutcome(_LOST, math.inf, noticed, math.inf, end)
        return JobOutcome(_APPLIED, end, math.inf, math.inf, end)

    return job_outcome


def _end_of_work(interval: IntervalAt | None, pace: Pace | None, client: int, time: float, seconds: float) -> float:
    """When work of ``seconds`` that begins at ``time`` is done, if it pauses while the client is offline.

    ``seconds`` are those at the usual speed; ``pace`` says at which share of it the client works.
    """
    for _ in range(_MOST_PAUSES):
        start, end = (time, math.inf) if interval is None else interval(client, time)
        time = max(time, start)
        rate, until = (1.0, math.inf) if pace is None else pace(client, time)
        end = min(end, until)
        if time == math.inf:
            return time
        if (done := time + seconds / rate) <= end * SLACK:
            if done == math.inf:
                raise too_short(client, done)
            return done
        seconds -= (end - time) * rate
        # Rounding (``scenario.in_units``) may put the end of an interval at ``time`` itself: then step beyond it.
        time = end if end > time else math.nextafter(time, math.inf)
    raise ValueError(
        f"availability: times online must be longer, or jobs shorter: a job of client {client} pauses more than "
        f"{_MOST_PAUSES:,} times"
    )
