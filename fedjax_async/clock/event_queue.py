"""The event queue: jobs under way, what will become of each, and the record of what happened.

Dispatch. A client gets a job only while it is online and has no other. When the server may send a job (it has
*capacity*), the sampling rule chooses among the clients that are online. If none is online, the capacity waits for
the first client that comes online. This client then gets the current model.

Loss. The outcome of a job follows from its own random draws and from the availability of its client. A job that will
never arrive frees its capacity when the server notices: at the job's timeout, or without a timeout at the
moment at which the upload would have arrived.

Timeout. At its timeout a job frees its capacity, unless the upload comes at that very moment, up to rounding. The
client is not told: it continues and gets no other job before it has finished. If its upload comes, it is applied or
dropped as the limits say. A crashed client gets no job before it has restarted.

Order of events: time, then kind (uploads, then what the server notices, then the server's own steps and
dispatches), then client, then job.

Decisions. Where a policy decides about uploads (``decisions.py``), a job has a further event, at the first moment at
which it can have an outcome. The policy is asked then, and only then is the outcome known.

Corrupt uploads. The server recognises a corrupt upload when it comes, and rejects it. It is listed among the arrivals,
because it was trained and came, but it counts for no buffer, cohort or step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import numpy as np

from fedjax_async.clock.availability import IntervalAt, together
from fedjax_async.clock.durations import PREDICTED, DurationCache, Predict
from fedjax_async.clock.job_outcomes import JobDraw, JobOutcome, draw_jobs, job_outcomes
from fedjax_async.clock.record import APPLIED, SLACK, Outcome, Record
from fedjax_async.clock.scenario import Scenario, too_short

# After so many jobs in a row without a sound upload, none is expected to come.
FRUITLESS = 100_000

# Names of their own: looking up members of the class would take much of the time of an event.
_APPLIED, _LATE, _GIVEN_UP, _CRASHED = Outcome.APPLIED, Outcome.LATE, Outcome.GIVEN_UP, Outcome.CRASHED

READY, UPLOAD, FREED = -1, 0, 1  # READY: the outcome of a job is decided now
QueuedEvent = tuple[float, int, int, int]  # time, kind, client, job

# A job, its client, whether its event frees capacity, and whether it frees the client.
Release = tuple[int, int, bool, bool]


class EventQueue:
    """Jobs under way in a heap, their outcomes, and the record.

    ``predict``: see ``DurationCache``; by default the clients that return next.
    """

    def __init__(self, scenario: Scenario, predict: Predict | None = None):
        conditions, predict = scenario.conditions, predict or self._next_returning
        self.record = Record(scenario)
        self.horizon = self.record.horizon
        self._preparing = [source.prepare for source in conditions.availability if source.prepare is not None]
        interval = together([source.interval for source in conditions.availability])
        self.always_online = interval is None
        self.interval: IntervalAt = interval or _always
        self._predict, self._announced = predict, set[int]()
        self._limits = conditions.limits
        # True if the server applies every upload that comes, and never times out.
        self.patient = conditions.limits.max_staleness is None and conditions.limits.timeout is None
        self.decisions: Any = scenario.decisions
        self.asks = self.decisions is not None and self.decisions.asks
        self._scenario = scenario
        # Where the policy decides about uploads, the number of the last job of each client, and of each undecided job.
        self._numbers, self._undecided = dict[int, int](), dict[int, int]()
        if self.decisions is not None:
            self.decisions.record = self.record
            self.patient = self.patient and not self.asks
            scenario = scenario._replace(bytes_up=0) if self.decisions.policy.sizes else scenario
        self._timeout = math.inf if conditions.limits.timeout is None else conditions.limits.timeout
        cache = DurationCache(partial(draw_jobs, scenario), scenario.num_clients, predict)
        self.prepare, self._pop_draw = cache.prepare, cache.pop
        self._job_outcome = job_outcomes(conditions)
        # True if only a fault of the job itself can come between a job and its upload.
        steady = all(source.pace is None for source in conditions.faults)
        self._undisturbed = (
            steady
            and self._timeout == math.inf
            and all(source.leaving == "finish" for source in conditions.availability)
        )
        self.events: list[QueuedEvent] = []  # a heap
        self.open: dict[int, JobOutcome] = {}  # jobs that free their capacity before their upload comes
        self.late = set[int]()  # jobs given up
        self.withheld = set[int]()  # jobs that their clients do not upload
        self.finished: set[int] | None = None  # jobs whose uploads have come; ``calling_off.py`` needs them
        # Jobs in a row without a sound upload applied; sound uploads applied when they began; corrupt uploads applied,
        # and how many of them when the row began.
        self._fruitless = self._sound = self._corrupt = self._corrupt_before = 0

    def announce(self, clients: Collection[int], time: float) -> None:
        """Prepare the intervals of clients that will probably be needed next."""
        self._announced = set(clients)
        for prepare in self._preparing:
            prepare(clients, time)

    def interval_now(self, client: int, time: float) -> tuple[float, float]:
        """The interval of a client that may get a job now; prepares those of clients predicted to be next."""
        if self._preparing and client not in self._announced:
            self._announced.add(client)
            if any(prepare((client,), time) for prepare in self._preparing):
                self.announce({client, *self._predict(client)}, time)
        return self.interval(client, time)

    def _next_returning(self, client: int) -> list[int]:
        return [event[2] for event in self.events[:PREDICTED]]

    def dispatch(self, client: int, time: float) -> int:
        """Send the current model to ``client``, which must be online and without a job; returns the job."""
        drawn = self._pop_draw(client)
        if self.asks:
            return self._dispatch_open(client, time, drawn)
        if self._undisturbed and isinstance(drawn, float):
            upload = time + drawn
            if not upload > time:
                raise too_short(client, time)
            job = self.record.dispatch(client, time, upload)
            heapq.heappush(self.events, (upload, UPLOAD, client, job))
            return job
        job_outcome = self._job_outcome(client, time, drawn)
        job = self.record.dispatch(client, time, job_outcome.upload)
        self._schedule(job, client, time, job_outcome)
        if isinstance(drawn, tuple) and drawn[4]:
            self.record.corrupt.add(job)
        return job

    def _schedule(self, job: int, client: int, time: float, job_outcome: JobOutcome) -> None:
        """Put the events of a job sent at ``time`` into the heap."""
        upload, freed = job_outcome.upload, self._freed(time, job_outcome)
        if not freed > time:
            raise too_short(client, time)
        if upload < math.inf:
            heapq.heappush(self.events, (upload, UPLOAD, client, job))
        if freed < upload:
            heapq.heappush(self.events, (freed, FREED, client, job))
            self.record.freed[job] = freed
            self.open[job] = job_outcome
        if job_outcome.outcome is not _APPLIED:
            self.record.doomed[job] = job_outcome.crash if job_outcome.outcome is _CRASHED else job_outcome.client_free

    def _freed(self, time: float, job_outcome: JobOutcome) -> float:
        """When the server stops waiting for a job sent at ``time``: the first moment at which anything happens."""
        _, upload, noticed, _, _ = job_outcome
        if upload == self._timeout == math.inf:
            return noticed
        given_up = time + self._timeout
        return upload if upload <= given_up * SLACK else given_up

    def _dispatch_open(self, client: int, time: float, drawn: JobDraw) -> int:
        """Send a job; a policy decides about its upload later.

        ``drawn`` is for an upload of 0 bytes if the policy has ``sizes``. The policy is not asked about an upload that
        never arrives.
        """
        number = self._numbers[client] = self._numbers.get(client, -1) + 1
        job_outcome = self._job_outcome(client, time, drawn)
        arrives = job_outcome.upload < math.inf
        if not arrives:
            job_outcome = self._job_outcome(client, time, self._drawn_for(client, number, self._scenario.bytes_up))
        job = self.record.dispatch(client, time, job_outcome.upload)
        if isinstance(drawn, tuple) and drawn[4]:
            self.record.corrupt.add(job)
        if not arrives:
            self._schedule(job, client, time, job_outcome)
            return job
        ready = self._freed(time, job_outcome)
        if not ready > time:
            raise too_short(client, time)
        if ready < job_outcome.upload:
            self.record.freed[job], self.open[job] = ready, job_outcome
        self._undecided[job] = number
        heapq.heappush(self.events, (ready, READY, client, job))
        return job

    def _drawn_for(self, client: int, number: int, size: int | np.ndarray) -> JobDraw:
        """What is drawn for a job with an upload of ``size`` bytes."""
        scenario = self._scenario._replace(bytes_up=size)
        drawn: JobDraw = draw_jobs(scenario, np.array([client]), np.array([number])).tolist()[0]
        return drawn

    def settle(self) -> None:
        """Remove the next event, which must be READY: ask the policy about its job, and decide the job's outcome."""
        now, _, client, job = heapq.heappop(self.events)
        number, time = self._undecided.pop(job), self.record.dispatch_time[job]
        size = self.decisions.upload(self.record, job, number, now)
        sent = 0 if size is None else size
        drawn = self._drawn_for(client, number, sent if self.decisions.policy.sizes else self._scenario.bytes_up)
        job_outcome = self._job_outcome(client, time, drawn)
        self.record.upload_time[job] = job_outcome.upload
        self.record.freed.pop(job, None)
        self.open.pop(job, None)
        if size is None:
            self.withheld.add(job)
        self._schedule(job, client, time, job_outcome)

    def look(self, time: float) -> None:
        """Let the policy see what has happened by now; does nothing in a planned run."""
        if self.decisions is not None:
            self.decisions.look(self.record, time)

    def pop(self, before: float) -> QueuedEvent | None:
        """Remove the next event if it comes at ``before`` or earlier; for FREED events, note the job's outcome."""
        while self.asks and self.events and self.events[0][1] == READY and self.events[0][0] <= before:
            self.settle()
        if not self.events or self.events[0][0] > before:
            return None
        event = heapq.heappop(self.events)
        if event[1] == FREED:
            self.notice(event[3])
        return event

    def notice(self, job: int) -> None:
        """Note that the server stops waiting for a job: it gives the upload up, or knows that none will come."""
        outcome = self.open[job].outcome
        if outcome is _APPLIED:
            self.late.add(job)
        else:
            self.record.failed[job] = self.record.doomed[job]
        self._settle(job, _GIVEN_UP if outcome is _APPLIED else outcome)

    def release(self, event: QueuedEvent) -> Release:
        """What an event frees. Call it before its upload is applied: a job given up still occupies its client."""
        _, kind, client, job = event
        in_time = job not in self.late
        if kind == UPLOAD and self.finished is not None:
            self.finished.add(job)
        return job, client, in_time or kind == FREED, in_time or kind == UPLOAD

    def judge(self, job: int) -> Outcome:
        """The outcome of ``job`` if its upload comes now: applied, or dropped for which reason."""
        if job in self.withheld:
            return Outcome.WITHHELD
        late = job in self.late
        if late and self._limits.late == "drop":
            return Outcome.DROPPED_LATE
        if self.too_stale(job):
            return Outcome.DROPPED_STALE
        return _LATE if late else _APPLIED

    def apply(self, job: int, outcome: Outcome, time: float, closes: bool) -> bool:
        """Apply an upload with one of the outcomes ``APPLIED``; false once the budget is spent."""
        if outcome is not _APPLIED:
            self.record.outcomes[job] = outcome
        if job in self.record.corrupt:
            self._note_fruitless()
            self._corrupt += 1
        return self.record.apply(job, time, closes)

    def apply_step(self, judged: list[tuple[int, Outcome]], time: float) -> bool:
        """Apply the judged uploads as one step, except those to drop; false once the budget is spent.

        The last one closes the step, unless all are corrupt.
        """
        for job, outcome in judged:
            if outcome not in APPLIED:
                self.drop(job, outcome)
        fit = [(job, outcome) for job, outcome in judged if outcome in APPLIED]
        last = len(fit) if any(self.record.sound(job) for job, _ in fit) else 0
        return all(self.apply(job, outcome, time, k == last) for k, (job, outcome) in enumerate(fit, 1))

    def drop(self, job: int, outcome: Outcome) -> None:
        """Note that an upload came and was not applied."""
        self._settle(job, outcome)

    def client_free(self, job: int, time: float) -> float:
        """When the client of ``job``, a job that has freed its capacity at ``time``, can get another."""
        return max(time, self.open.pop(job).client_free) if job in self.open else time

    def call_off(self, time: float) -> dict[int, float]:
        """Call off every job under way; returns the clients that are down after a crash, and until when."""
        for *_, job in self.events:
            self.record.call_off(job, time)
        self.events.clear()
        self.spare(job for job in self.open if self.record.failed.get(job, time) > time)
        crashed = {
            self.record.client[job]: outcome.client_free
            for job, outcome in self.open.items()
            if outcome.crash <= time < outcome.client_free
        }
        self.open.clear()
        return crashed

    def spare(self, jobs: Iterable[int]) -> None:
        """Note that these jobs, which were to fail after their timeout, are stopped before: they stay given up."""
        for job in jobs:
            self.record.outcomes[job] = _GIVEN_UP
            del self.record.failed[job]

    def too_stale(self, job: int, steps: int = 0) -> bool:
        """Whether an upload of ``job`` would be too stale, were ``steps`` more steps closed."""
        most = self._limits.max_staleness
        return most is not None and self.record.staleness(job) + steps > most

    def _settle(self, job: int, outcome: Outcome) -> None:
        self.record.outcomes[job] = outcome
        self._note_fruitless()

    def _note_fruitless(self) -> None:
        sound = self.record.applied - self._corrupt
        if sound != self._sound:
            self._fruitless, self._corrupt_before = 0, self._corrupt
        self._fruitless += 1
        self._sound = sound
        if self._fruitless > FRUITLESS:
            raise fruitless(self._corrupt - self._corrupt_before)


def fruitless(corrupt: int = 0) -> ValueError:
    """The error for a budget that will never be spent; ``corrupt``: how many of the last uploads came, but corrupt."""
    told = f" ({'all' if corrupt >= FRUITLESS else corrupt} of their uploads came, but corrupt)" if corrupt else ""
    sound = "was applied with a sound upload"
    fields = "faults, availability, timeout, max_staleness"
    return ValueError(f"{fields}: of the last {FRUITLESS} jobs not one {sound}{told}, nor will the next be")


def _always(client: int, time: float) -> tuple[float, float]:
    return 0.0, math.inf
