"""The event queue of a world without absences and faults, and the record that every timing policy writes.

``Record``: what was dispatched and applied so far, in growing columns, and the ``Schedule`` they become.
``EventQueue``: who is under way, and when each job arrives. Order of events: time, then kind (uploads before anything
the server does at the same moment), then client, then the job's sequence number. A client is never in flight twice,
so uploads are ordered by (time, client) already; the sequence number makes the order total by construction.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterable
from functools import partial

import numpy as np

from fedjax_async.clock.conditions import NO_CONDITIONS
from fedjax_async.clock.faults import mishaps
from fedjax_async.clock.outcomes import RECEIVED, Outcome
from fedjax_async.clock.stock import AHEAD, Ahead, Stock
from fedjax_async.clock.world import World, checked_durations, too_short
from fedjax_async.types import Schedule

# A budget of 0.3 s admits the third window of 0.1 s, though 3 * 0.1 > 0.3 in floating point.
SLACK = 1 + 1e-12


def at_or_before(times: np.ndarray, moments: np.ndarray | float) -> np.ndarray:
    """How many of ``times``, which are sorted, are at or before each moment, up to rounding; int64, as ``moments``.

    A time counts as at a moment if it is later by at most 1e-12 of it.

    >>> at_or_before(np.array([0.1, 3 * 0.1, 0.4]), np.array([0.3, 0.4]))
    array([2, 3])
    """
    return np.searchsorted(times, np.asarray(moments) * SLACK, side="right")


def client_order(clients: np.ndarray) -> np.ndarray:
    """The places of a column of clients, by client, those of a client in order; int64."""
    # Sorting numbers takes half the time of sorting places by them.
    return np.sort((clients.astype(np.int64) << 32) + np.arange(len(clients))) & 0xFFFFFFFF


def turns(clients: np.ndarray) -> np.ndarray:
    """How many entries before each have the same client; int64."""
    order = client_order(clients)
    begins = np.flatnonzero(np.diff(clients[order], prepend=-1))
    found = np.empty(len(clients), np.int64)
    found[order] = np.arange(len(clients)) - np.repeat(begins, np.diff(begins, append=len(clients)))
    return found


class Record:
    """The job and arrival columns of a plan in the making, and its budget."""

    def __init__(self, world: World):
        self.client, self._applied_before = array("q"), array("q")
        self.dispatch_time, self.upload_time = array("d"), array("d")
        self._job, self._time = array("q"), array("d")
        self._closed = array("q", [0])  # steps before each position, the next one included
        # what only some jobs have, by job: a outcome other than applied or under way, and a place freed before
        # the upload came (or because none will)
        self.outcomes: dict[int, Outcome] = {}
        self.freed: dict[int, float] = {}
        self.corrupt = set[int]()  # jobs whose uploads are or would be NaN
        self.applied = self.closed = 0
        until = world.until
        self.horizon = math.inf if until.time is None else until.time * SLACK
        self._last_update = math.inf if until.updates is None else until.updates
        self._last_step = math.inf if until.steps is None else until.steps

    def dispatch(self, client: int, time: float, upload: float) -> int:
        """Note a job sent now, whose upload will reach the server at ``upload``; returns the job."""
        job = len(self.client)
        self.client.append(client)
        self.dispatch_time.append(time)
        self.upload_time.append(upload)
        self._applied_before.append(self.applied)
        return job

    def staleness(self, job: int) -> int:
        """How many steps were closed since ``job`` was sent."""
        return self.closed - self._closed[self._applied_before[job]]

    def call_off(self, job: int, time: float) -> None:
        """The server calls ``job`` back: its upload will never come (``upload_time`` infinite).

        A job that the server has given up before stays given up, from its timeout on.
        """
        self.upload_time[job] = math.inf
        self.freed[job] = min(self.freed.get(job, math.inf), time)
        self.outcomes.setdefault(job, Outcome.CALLED_OFF)

    def no_later(self, job: int, time: float) -> None:
        """What happens to ``job`` within rounding error of ``time`` happens at ``time`` at the latest."""
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

    def apply_step(self, jobs: Iterable[int], time: float) -> bool:
        """Apply ``jobs``, at least one, as one server step at ``time``; false once the budget is spent."""
        if time > self.horizon:
            return False
        *others, last = jobs
        return all(self.apply(job, time, False) for job in others) and self.apply(last, time, True)

    @property
    def end(self) -> float:
        """Until when the plan goes: its last application if updates or steps were limited and reached, else its time.

        A comparison with it needs no further tolerance.
        """
        spent = self.applied >= self._last_update or self.closed >= self._last_step
        return self._time[-1] * SLACK if spent and self._time else self.horizon

    def schedule(self, world: World) -> Schedule:
        """The record as arrays. Versions and steps are counts of the closed steps before a position."""
        client = np.array(self.client, np.int32)
        number = turns(client).astype(np.int32)
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
        marks = mishaps((one.marks for one in (world.conditions or NO_CONDITIONS).faults), client, number)
        copies = np.zeros(len(client), np.int8)
        for delay in marks.copies:
            copies += (upload_time + delay <= self.end) & np.isin(outcome, RECEIVED)
        return Schedule(
            num_clients=world.num_clients,
            client=client,
            number=number,
            local_steps=world.local_steps[client].astype(np.int32),
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
        )


class EventQueue:
    """Jobs under way in a heap; the record of what happened is in ``record``.

    ``ahead``: see ``Stock``; by default, who returns soon is sent off soon.
    """

    def __init__(self, world: World, ahead: Ahead | None = None):
        self.record = Record(world)
        self.horizon = self.record.horizon
        self._durations = Stock(partial(checked_durations, world), world.num_clients, ahead or self._returning)
        self.prepare = self._durations.prepare
        self._heap: list[tuple[float, int, int]] = []  # upload time, client, job

    def dispatch(self, client: int, time: float) -> int:
        """Send the current model to ``client``, which must be idle; returns the job."""
        record = self.record
        upload = time + self._durations.take(client)
        if not upload > time:
            raise too_short(client, time)
        job = record.dispatch(client, time, upload)
        heapq.heappush(self._heap, (upload, client, job))
        return job

    def _returning(self, client: int) -> list[int]:
        return [event[1] for event in self._heap[:AHEAD]]

    def next_time(self) -> float:
        """Time of the earliest upload under way; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def take(self, before: float) -> tuple[float, int, int] | None:
        """Remove and return the earliest upload (time, client, job) if it comes at ``before`` or earlier."""
        if not self._heap or self._heap[0][0] > before:
            return None
        return heapq.heappop(self._heap)

    def cancel_rest(self, time: float) -> None:
        """Call back every job under way."""
        for _, _, job in self._heap:
            self.record.call_off(job, time)
        self._heap.clear()
