"""The event queue of an unreliable world: clients that are away, jobs that fail, a server that loses patience.

Sending. A client is sent a message only while it is there and has nothing to do. When a place becomes
free, the sampling rule chooses among the clients that are there; if none is, the place stays empty and
goes to the first that appears, which gets the model of that moment. A client has one job at a time.

Losing. What becomes of a job is decided by draws that belong to it, and by the comings and goings of its
client. A job that will never arrive frees its place when the server notices: at the job's timeout; without
one, at the moment at which the upload would have arrived.

Giving up. At its timeout a job frees its place, unless the upload comes at that very moment. Its client
is not told: it goes on, takes no other message until it is through, and its upload, if it comes at all,
is applied or dropped as the limits say. A crashed client takes no message before it has restarted.

Order of events: time, then kind (uploads, then what the server notices, then the server's own steps and
messages), then client, then job.

Corrupting. The server sees that a corrupt upload is one when it comes, and rejects it. It is listed among the
arrivals, since it was trained and came, and counts for nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.availability import Window, together
from fedjax_async.clock.conditions import NO_CONDITIONS, Conditions
from fedjax_async.clock.event_queue import Record
from fedjax_async.clock.faults import mishaps
from fedjax_async.clock.outcomes import APPLIED, Outcome
from fedjax_async.clock.stock import AHEAD, Ahead, Stock
from fedjax_async.clock.world import World, checked_durations, too_short

# So many jobs in a row of which not one was applied, or only corrupt ones: none ever will be.
_FRUITLESS = 100_000

# Members by themselves: looking them up in their class would take much of the time of an event.
_APPLIED, _LATE, _GIVEN_UP = Outcome.APPLIED, Outcome.LATE, Outcome.GIVEN_UP
_LOST, _CRASHED, _INTERRUPTED = Outcome.LOST, Outcome.CRASHED, Outcome.INTERRUPTED

UPLOAD, FREED = 0, 1
Event = tuple[float, int, int, int]  # time, kind, client, job


News = tuple[int, int, bool, bool]  # a job, its client; whether its event frees a place, and whether its client
# The seconds of a job; or of one that something befalls: seconds, those until a crash, restart, whether its upload is
# lost, and whether it is corrupt.
Work = float | tuple[float, float, float, bool, bool]


class Fortune(NamedTuple):
    """What will become of a job if nobody interferes; times are infinite for what never happens."""

    outcome: Outcome
    upload: float  # when the upload reaches the server
    noticed: float  # when a server without timeout notices that none will
    struck: float  # when the client crashes
    free: float  # when the client can take another message, if it is there


def works(world: World, clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """These jobs (arrays that broadcast) as an array of ``Work``."""
    seconds, faults = checked_durations(world, clients, numbers), (world.conditions or NO_CONDITIONS).faults
    if not faults:
        return seconds
    what = mishaps((one.course for one in faults), clients, numbers)
    seconds = seconds * what.factor + what.extra
    until_crash = np.minimum(what.crash_share * seconds, what.crash_after)
    befallen = np.flatnonzero((until_crash < seconds) | what.lost | what.corrupt)
    if not len(befallen):
        return seconds
    columns = np.broadcast_arrays(seconds, until_crash, what.restart, what.lost, what.corrupt)
    found = seconds.astype(object)
    flat = found.reshape(-1)
    for place, *work in zip(befallen.tolist(), *(column.reshape(-1)[befallen].tolist() for column in columns)):
        flat[place] = tuple(work)
    return found


def fortunes(conditions: Conditions) -> Callable[[int, float, Work], Fortune]:
    """``fortune(client, time, work)`` of a job that is sent at ``time``, when the client is there."""
    pausing = together([one.window for one in conditions.availability if one.leaving == "pause"])
    losing = together([one.window for one in conditions.availability if one.leaving == "lose"])

    def fortune(client: int, time: float, work: Work) -> Fortune:
        seconds, until_crash, restart, lost = work[:4] if isinstance(work, tuple) else (work, math.inf, 0.0, False)
        end, crash = time + seconds, time + until_crash
        if pausing is not None:
            end = _with_pauses(pausing, client, time, seconds)
            crash = _with_pauses(pausing, client, time, until_crash) if until_crash < math.inf else math.inf
        noticed = end if end < math.inf else time + seconds
        off = math.inf if losing is None else losing(client, time)[1]
        if crash < end and crash <= off:
            return Fortune(_CRASHED, math.inf, noticed, crash, crash + restart)
        if off < end or end == math.inf:
            return Fortune(_INTERRUPTED, math.inf, noticed, math.inf, min(off, end))
        if lost:
            return Fortune(_LOST, math.inf, noticed, math.inf, end)
        return Fortune(_APPLIED, end, math.inf, math.inf, end)

    return fortune


def _with_pauses(window: Window, client: int, time: float, seconds: float) -> float:
    """When ``seconds`` of work are done that goes on only while the client is there."""
    while True:
        start, end = window(client, time)
        time = max(time, start)
        if time + seconds <= end or time == math.inf:
            return time + seconds
        seconds -= end - time
        time = end


class UnreliableQueue:
    """Jobs under way in a heap, what will become of them, and the record of what did."""

    def __init__(self, world: World, ahead: Ahead | None = None):
        ahead = ahead or self._returning
        conditions = world.conditions or NO_CONDITIONS
        self.record = Record(world)
        self.horizon = self.record.horizon
        self._preparing = [one.prepare for one in conditions.availability if one.prepare is not None]
        window = together([one.window for one in conditions.availability])
        self.always_there = window is None
        self.window: Window = window or _always
        self._ahead, self._foreseen = ahead, set[int]()
        self._limits = conditions.limits
        # Then every upload that comes is applied.
        self.patient = conditions.limits.max_staleness is None and conditions.limits.timeout is None
        self._patience = math.inf if conditions.limits.timeout is None else conditions.limits.timeout
        stock = Stock(partial(works, world), world.num_clients, ahead)
        self.prepare, self._work = stock.prepare, stock.take
        self._fortune = fortunes(conditions)
        # Then all that can come between a job and its upload is a mishap.
        self._unhindered = self._patience == math.inf and all(
            one.leaving == "finish" for one in conditions.availability
        )
        self.events: list[Event] = []  # a heap
        self.open: dict[int, Fortune] = {}  # jobs whose place is freed, or will be, before their upload comes
        self.late = set[int]()  # jobs given up
        # jobs in a row of which no sound upload was applied, after so many that were; corrupt uploads applied
        self._fruitless = self._sound = self._corrupt = 0

    def foresee(self, clients: Collection[int], time: float) -> None:
        """Whether these clients are there will probably be asked next."""
        self._foreseen = set(clients)
        for prepare in self._preparing:
            prepare(clients, time)

    def there(self, client: int, time: float) -> tuple[float, float]:
        """The window of a client that is to be sent off."""
        if self._preparing and client not in self._foreseen:
            self._foreseen.add(client)
            if any(prepare((client,), time) for prepare in self._preparing):
                self.foresee({client, *self._ahead(client)}, time)
        return self.window(client, time)

    def _returning(self, client: int) -> list[int]:
        return [event[2] for event in self.events[:AHEAD]]

    def dispatch(self, client: int, time: float) -> int:
        """Send the current model to ``client``, which must be there and have nothing to do; returns the job."""
        work = self._work(client)
        if self._unhindered and isinstance(work, float):
            upload = time + work
            if not upload > time:
                raise too_short(client, time)
            job = self.record.dispatch(client, time, upload)
            heapq.heappush(self.events, (upload, UPLOAD, client, job))
            return job
        job = self._send(client, time, self._fortune(client, time, work))
        if isinstance(work, tuple) and work[4]:
            self.record.corrupt.add(job)
        return job

    def _send(self, client: int, time: float, fortune: Fortune) -> int:
        record = self.record
        _, upload, noticed, _, _ = fortune
        freed = noticed if upload == self._patience == math.inf else min(upload, time + self._patience)
        if not freed > time:
            raise too_short(client, time)
        job = record.dispatch(client, time, upload)
        if upload < math.inf:
            heapq.heappush(self.events, (upload, UPLOAD, client, job))
        if freed < upload:
            heapq.heappush(self.events, (freed, FREED, client, job))
            record.freed[job] = freed
            self.open[job] = fortune
        return job

    def next_time(self) -> float:
        """Time of the next upload or notice; infinity if there is none."""
        return self.events[0][0] if self.events else math.inf

    def take(self, before: float) -> Event | None:
        """The next event if it comes at ``before`` or earlier. Of a freed place the job's outcome is noted here."""
        if not self.events or self.events[0][0] > before:
            return None
        event = heapq.heappop(self.events)
        if event[1] == FREED:
            self.notice(event[3])
        return event

    def notice(self, job: int) -> None:
        """The server turns from a job, whose upload it has given up or knows to be lost."""
        outcome = self.open[job].outcome
        if outcome is _APPLIED:
            self.late.add(job)
        self._settle(job, _GIVEN_UP if outcome is _APPLIED else outcome)

    def news(self, event: Event) -> News:
        """What an event sets free, to be asked before its upload is applied: given up, a job keeps its client busy."""
        _, kind, client, job = event
        in_time = job not in self.late
        return job, client, in_time or kind == FREED, in_time or kind == UPLOAD

    def judge(self, job: int) -> Outcome:
        """What the server does with the upload of ``job`` if it turns to it now: apply it, or drop it and why."""
        late, most = job in self.late, self._limits.max_staleness
        if late and self._limits.late == "drop":
            return Outcome.DROPPED_LATE
        if most is not None and self.record.staleness(job) > most:
            return Outcome.DROPPED_STALE
        return _LATE if late else _APPLIED

    def apply(self, job: int, outcome: Outcome, time: float, closes: bool) -> bool:
        """Apply an upload that was judged fit; false once the budget is spent."""
        if outcome is not _APPLIED:
            self.record.outcomes[job] = outcome
        if job in self.record.corrupt:
            self._note_fruitless()
            self._corrupt += 1
        return self.record.apply(job, time, closes)

    def apply_step(self, judged: list[tuple[int, Outcome]], time: float) -> bool:
        """Apply the fit ones of the judged uploads as one step, drop the others; false once the budget is spent.

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

    def ready(self, job: int, time: float) -> float:
        """When the client of ``job``, whose place is free from ``time`` on, has nothing to do any more."""
        return max(time, self.open.pop(job).free) if job in self.open else time

    def call_off(self, time: float) -> dict[int, float]:
        """Call back every job under way; returns until when clients are down that have crashed since the last time."""
        for *_, job in self.events:
            self.record.call_off(job, time)
        self.events.clear()
        crashed = {self.record.client[job]: one.free for job, one in self.open.items() if one.struck <= time < one.free}
        self.open.clear()
        return crashed

    def _settle(self, job: int, outcome: Outcome) -> None:
        self.record.outcomes[job] = outcome
        self._note_fruitless()

    def _note_fruitless(self) -> None:
        sound = self.record.applied - self._corrupt
        self._fruitless = self._fruitless + 1 if sound == self._sound else 1
        self._sound = sound
        if self._fruitless > _FRUITLESS:
            raise ValueError(f"faults, limits: of the last {_FRUITLESS} jobs not one was applied, nor will the next be")


def _always(client: int, time: float) -> tuple[float, float]:
    return 0.0, math.inf
