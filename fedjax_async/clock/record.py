"""What happened: the outcomes of jobs, and the record that every timing writes and that becomes a schedule."""

from __future__ import annotations

import enum
import itertools
import math
from array import array
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock.budget import EVERY, Forecast
from fedjax_async.clock.faults import job_faults
from fedjax_async.clock.scenario import Scenario
from fedjax_async.types import Schedule


class Outcome(enum.IntEnum):
    """What became of a job by the end of the schedule: the codes of ``Schedule.outcome``."""

    APPLIED = 0  # its upload came in time and was applied
    UNDER_WAY = 1  # the server still waits for it
    CALLED_OFF = 2  # its round ended without it
    LOST = 3  # trained, but the upload was lost on the way
    CRASHED = 4  # the client crashed before it had uploaded
    INTERRUPTED = 5  # the client went offline or left, or its group failed
    LATE = 6  # applied, though it came after its timeout
    DROPPED_LATE = 7  # came after its timeout and was not applied
    DROPPED_STALE = 8  # came, but staler than the server allows
    GIVEN_UP = 9  # the server gave it up at its timeout; its upload comes after the end, or its round ended first
    WITHHELD = 10  # trained, but the client did not upload it (a policy's decision)


# The upload (or the notice that it is withheld) reached the server, and was applied or dropped:
APPLIED = (Outcome.APPLIED, Outcome.LATE)
DROPPED = (Outcome.DROPPED_LATE, Outcome.DROPPED_STALE, Outcome.WITHHELD)
RECEIVED = APPLIED + DROPPED
NEVER_CAME = (Outcome.LOST, Outcome.CRASHED, Outcome.INTERRUPTED)

# A budget of 0.3 s admits the third window of 0.1 s, though 3 * 0.1 > 0.3 in floating point.
SLACK = 1 + 1e-12


def at_or_before(times: np.ndarray, moments: np.ndarray | float) -> np.ndarray:
    """How many of the sorted ``times`` are at or before each moment, up to rounding; int64, shape of ``moments``.

    A time counts as at a moment if it is later by at most 1e-12 of the moment.

    >>> at_or_before(np.array([0.1, 3 * 0.1, 0.4]), np.array([0.3, 0.4]))
    array([2, 3])
    """
    return np.searchsorted(times, np.asarray(moments) * SLACK, side="right")


def order_by_client(clients: np.ndarray) -> np.ndarray:
    """The stable order that sorts a column of clients; int64."""
    # Sorting packed numbers takes half the time of an argsort.
    return np.sort((clients.astype(np.int64) << 32) + np.arange(len(clients))) & 0xFFFFFFFF


def job_numbers(clients: np.ndarray) -> np.ndarray:
    """For each entry of a column of clients, how many entries before it have the same client; int64."""
    order = order_by_client(clients)
    begins = np.flatnonzero(np.diff(clients[order], prepend=-1))
    numbers = np.empty(len(clients), np.int64)
    numbers[order] = np.arange(len(clients)) - np.repeat(begins, np.diff(begins, append=len(clients)))
    return numbers


class Extension(NamedTuple):
    """The jobs and arrivals that a record holds after the first so many of each, in order; often a single one."""

    # one entry per job
    client: list[int]
    dispatch_time: list[float]
    dispatched_after: list[int]  # arrivals applied before
    version: list[int]
    # one entry per arrival
    job: list[int]
    time: list[float]
    closes: list[bool]
    step: list[int]
    staleness: list[int]


class Record:
    """The job and arrival columns of a schedule while it is planned, and its budget."""

    def __init__(self, scenario: Scenario):
        self.client, self._applied_before = array("q"), array("q")
        self.dispatch_time, self.upload_time = array("d"), array("d")
        self._job, self._time = array("q"), array("d")
        self._closed = array("q", [0])  # steps closed before each arrival, and before the next one
        # What only some jobs have, by job: an outcome other than APPLIED or UNDER_WAY, and a time other than the
        # upload's at which the server stops waiting for it.
        self.outcomes: dict[int, Outcome] = {}
        self.freed: dict[int, float] = {}
        self.doomed: dict[int, float] = {}  # jobs that crash, are interrupted or lost, noticed or not, and when
        self.failed: dict[int, float] = {}  # those of which it is noticed, and jobs that were called off late
        self.corrupt = set[int]()  # jobs with corrupt uploads, arrived or not
        self.applied = self.closed = 0
        self._scenario, until = scenario, scenario.until
        self.num_clients = scenario.num_clients
        self.horizon = math.inf if until.time is None else until.time * SLACK
        self._last_update = math.inf if until.updates is None else until.updates
        self._last_step = math.inf if until.steps is None else until.steps
        self._forecast, self._next_look = Forecast(until, scenario.progress), EVERY

    def dispatch(self, client: int, time: float, upload: float) -> int:
        """Note a job sent now, with an upload that reaches the server at ``upload``; returns the job."""
        job = len(self.client)
        if job == self._next_look:
            self._next_look += EVERY
            self._forecast.note(job, time=time, updates=self.applied, steps=self.closed)
        self.client.append(client)
        self.dispatch_time.append(time)
        self.upload_time.append(upload)
        self._applied_before.append(self.applied)
        return job

    def staleness(self, job: int) -> int:
        """How many steps were closed since ``job`` was sent."""
        return self.closed - self._closed[self._applied_before[job]]

    def call_off(self, job: int, time: float) -> None:
        """The server cancels ``job``: its upload will never come (``upload_time`` infinite).

        A job that the server has given up before stays given up, from its timeout on; its client works until now. One
        whose client has failed before, which the server does not know, ends there.
        """
        self.upload_time[job] = math.inf
        given_up, failure = self.freed.get(job, math.inf), self.doomed.get(job, math.inf)
        if given_up < time or failure < time:
            self.failed[job] = min(failure, time)
        self.freed[job] = min(given_up, time)
        self.outcomes.setdefault(job, Outcome.CALLED_OFF)

    def no_later(self, job: int, time: float) -> None:
        """If times of ``job`` are later than ``time``, but only by rounding, set them to ``time``."""
        if self.upload_time[job] <= time * SLACK:
            self.upload_time[job] = min(self.upload_time[job], time)
        if job in self.freed:
            self.freed[job] = min(self.freed[job], time)

    def apply(self, job: int, time: float, closes: bool) -> bool:
        """The server applies ``job``'s upload, completing a step if ``closes``; false once the budget is spent."""
        self._job.append(job)
        self._time.append(time)
        self.applied += 1
        self.closed += closes
        self._closed.append(self.closed)
        return self.applied < self._last_update and self.closed < self._last_step

    def sound(self, job: int) -> bool:
        """Whether the upload of ``job`` counts: a corrupt one fills no buffer and closes no step by itself."""
        return job not in self.corrupt

    @property
    def end(self) -> float:
        """The end of the schedule: its last application if updates or steps reached their limit, else the time limit.

        Includes the tolerance for rounding: compare with it exactly.
        """
        spent = self.applied >= self._last_update or self.closed >= self._last_step
        return self._time[-1] * SLACK if spent and self._time else self.horizon

    def extension(self, jobs: int, arrivals: int) -> Extension:
        """What was noted after the first ``jobs`` jobs and the first ``arrivals`` arrivals; costs what it returns."""
        closed, before = self._closed, self._applied_before
        sent, job, step = before[jobs:].tolist(), self._job[arrivals:].tolist(), closed[arrivals:-1].tolist()
        return Extension(
            client=self.client[jobs:].tolist(),
            dispatch_time=self.dispatch_time[jobs:].tolist(),
            dispatched_after=sent,
            version=[closed[position] for position in sent],
            job=job,
            time=self._time[arrivals:].tolist(),
            closes=[after > own for own, after in itertools.pairwise(closed[arrivals:])],
            step=step,
            staleness=[own - closed[before[one]] for own, one in zip(step, job)],
        )

    def schedule(self, *, exhausted: bool = False) -> Schedule:
        """The record as arrays. Versions and steps are counts of the closed steps before a position.

        ``exhausted``: see ``Schedule``.
        """
        scenario, client = self._scenario, np.array(self.client, np.int32)
        number = job_numbers(client).astype(np.int32)
        closed, applied_before = np.array(self._closed, np.int64), np.array(self._applied_before, np.int64)
        job = np.array(self._job, np.int64)
        outcome = np.full(len(client), Outcome.UNDER_WAY, np.int8)
        outcome[job] = Outcome.APPLIED
        outcome[list(self.outcomes)] = list(self.outcomes.values())
        upload_time = np.array(self.upload_time, np.float64)
        freed_time = upload_time.copy()
        freed_time[list(self.freed)] = list(self.freed.values())
        corrupt = np.zeros(len(client), np.bool_)
        corrupt[list(self.corrupt)] = True
        unnoticed = {job: time for job, time in self.doomed.items() if job not in self.outcomes and time <= self.end}
        failed = unnoticed | self.failed
        failure_time = np.full(len(client) if failed else 0, np.inf)
        failure_time[list(failed)] = list(failed.values())
        faults = job_faults((source.draw_copies for source in scenario.conditions.faults), client, number)
        copies = np.zeros(len(client), np.int8)
        for delay in faults.copies:
            copies += (upload_time + delay <= self.end) & np.isin(outcome, RECEIVED) & (outcome != Outcome.WITHHELD)
        return Schedule(
            num_clients=scenario.num_clients,
            client=client,
            number=number,
            local_steps=scenario.local_steps[client].astype(np.int32),
            dispatch_time=np.array(self.dispatch_time, np.float64),
            upload_time=upload_time,
            dispatched_after=applied_before,
            version=closed[applied_before],
            job=job,
            time=np.array(self._time, np.float64),
            closes=np.diff(closed) > 0,
            step=closed[:-1],
            outcome=outcome,
            freed_time=freed_time,
            corrupt=corrupt,
            copies=copies,
            exhausted=exhausted,
            failure_time=failure_time,
        )


# --- outcomes of a finished schedule ------------------------------------------------------------


def with_derived_columns(schedule: Schedule) -> Schedule:
    """The schedule with ``outcome``, ``freed_time``, ``corrupt`` and ``copies`` derived where they are left empty.

    See ``clock.make_schedule``. Raises ``ValueError`` if one of them is neither empty nor of one entry per job.
    """
    jobs = len(schedule.client)
    columns = {name: np.asarray(getattr(schedule, name)) for name in ("outcome", "freed_time", "corrupt", "copies")}
    for name, column in columns.items():
        if column.shape not in ((0,), (jobs,)):
            raise ValueError(
                f"schedule.{name}: has shape {column.shape}, must be empty or ({jobs},), one entry per job"
            )
    empty = [name for name, column in columns.items() if len(column) != jobs]
    if not empty:
        return schedule
    derived: dict[str, Any] = {"corrupt": np.zeros(jobs, np.bool_), "copies": np.zeros(jobs, np.int8)}
    if "outcome" in empty:
        never = np.isinf(schedule.upload_time)
        derived["outcome"] = np.where(never, Outcome.CALLED_OFF, Outcome.UNDER_WAY).astype(np.int8)
        derived["outcome"][schedule.job] = Outcome.APPLIED
    if "freed_time" in empty:
        following = next_dispatch(schedule)
        derived["freed_time"] = np.where(np.isinf(schedule.upload_time), following, schedule.upload_time)
    return schedule._replace(**{name: derived[name] for name in empty})


def next_dispatch(schedule: Schedule) -> np.ndarray:
    """When the client of each job gets its next one, infinity after its last job; float64[J]."""
    order = np.argsort(schedule.client, kind="stable")
    client, sent = schedule.client[order], schedule.dispatch_time[order]
    following = np.full(len(order), np.inf)
    following[order[:-1]] = np.where(client[1:] == client[:-1], sent[1:], np.inf)
    return following


def used_arrivals(schedule: Schedule) -> int:
    """How many arrivals belong to completed server steps: all up to the last one that closes its step.

    The uploads after it wait for a step that the budget does not let the server complete.
    """
    closing = np.flatnonzero(schedule.closes)
    return int(closing[-1]) + 1 if len(closing) else 0


def trained_in_vain(schedule: Schedule) -> np.ndarray:
    """Which jobs the client trains to the end although the server never applies them; bool[J].

    Their uploads are lost, dropped, or come after the server has given them up. Not among them are jobs that are not
    trained to the end: crashed, interrupted or called off.
    """
    schedule = with_derived_columns(schedule)
    unapplied = np.isin(schedule.outcome, (Outcome.LOST, *DROPPED))
    return unapplied | ((schedule.outcome == Outcome.GIVEN_UP) & np.isfinite(schedule.upload_time))


def fault_counts(schedule: Schedule) -> dict[str, int]:
    """How many jobs failed, and how.

    * ``lost``: never reached the server, and it noticed; includes ``crashed`` and ``interrupted``;
    * ``late``: came after their timeout; includes ``dropped_late``, which were not applied;
    * ``dropped_stale``: refused for their staleness (late ones too);
    * ``duplicates``: further copies delivered, and ignored; of a run that was stopped before its budget, or of another
      cut schedule, also those that would come after its end;
    * ``corrupt``: arrivals with NaN uploads: the engine rejects them, and they fill no buffer;
    * ``withheld``: trained, and not uploaded by the client's own decision;
    * ``called_off``, ``given_up`` (at the end not yet arrived), ``under_way``: see ``Outcome``.

    In schedules made by ``plan``, ``applied`` + ``lost`` + ``dropped_late`` + ``dropped_stale`` + ``withheld``
    + ``called_off`` + ``given_up`` + ``under_way`` is the number of jobs.
    """
    schedule = with_derived_columns(schedule)
    counts = np.bincount(schedule.outcome, minlength=len(Outcome))
    return {
        "applied": len(schedule.job),
        "lost": int(sum(counts[outcome] for outcome in NEVER_CAME)),
        "crashed": int(counts[Outcome.CRASHED]),
        "interrupted": int(counts[Outcome.INTERRUPTED]),
        "late": int(counts[Outcome.LATE] + counts[Outcome.DROPPED_LATE]),
        "dropped_late": int(counts[Outcome.DROPPED_LATE]),
        "dropped_stale": int(counts[Outcome.DROPPED_STALE]),
        "duplicates": int(schedule.copies.sum(dtype=np.int64)),
        "corrupt": int(schedule.corrupt[schedule.job].sum()),
        "withheld": int(counts[Outcome.WITHHELD]),
        "called_off": int(counts[Outcome.CALLED_OFF]),
        "given_up": int(counts[Outcome.GIVEN_UP]),
        "under_way": int(counts[Outcome.UNDER_WAY]),
    }
