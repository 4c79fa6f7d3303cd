"""An extension as work for the device (host): what an adaptive run's plan has gained since the last look.

Between two looks the planner has sent some messages and applied some arrivals. ``growing_layout.py`` lays them out.
Start models and trained uploads outlive this layout. A start model keeps its slot until its upload is received. A job
under way may be trained together with others before it arrives; its upload then waits in its row. So an adaptive run
needs few waves, however often the policy looks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock import Outcome, Record
from fedjax_async.clock.record import DROPPED, NEVER_CAME

# A job with an outcome in _THROUGH can no longer arrive; with one in _IN_VAIN, its client has trained it to the end.
_THROUGH = (*NEVER_CAME, *DROPPED, Outcome.CALLED_OFF)
_IN_VAIN = (Outcome.LOST, *DROPPED)


@dataclasses.dataclass(slots=True)
class OpenJob:
    """A job whose start model is kept: it is under way, or must still be trained in vain."""

    job: int
    client: int
    number: int
    steps: int
    time: float  # of its dispatch, virtual seconds
    version: int
    corrupt: bool
    message: int  # what it starts from: its version, or the job itself if messages are personal
    sent: int  # position of its dispatch in the extension that sent it
    lane: int = -1  # of its trained upload; -1: not trained
    row: int = -1  # of its lane's store; -1: not trained


class ExtensionWork(NamedTuple):
    """What the device does for an extension; *positions* are those of the run's own jobs, from 0 on.

    The first ``received`` positions are received. The others are jobs under way that are trained before they arrive.
    Turn g is trained right before the positions ``bounds[g] .. bounds[g+1]-1`` are received. In lists: most looks bring
    a single arrival.
    """

    first: int  # arrivals applied before
    # one entry per arrival
    time: Sequence[float]
    closes: Sequence[bool]
    step: Sequence[int]
    # one entry per position
    jobs: list[OpenJob]
    arrival: list[int]  # the number of its arrival; -1: trained in vain, or received later
    applied: list[bool]  # false: trained in vain
    slot: list[int]  # from which its job starts
    address: list[tuple[int, int]]  # lane, row of the lane's store
    received: int
    at: list[int]  # the position of each arrival, then ``received``
    turns: list[dict[int, list[int]]]  # the positions that each lane trains
    bounds: list[int]
    writes: list[tuple[int, OpenJob, int]]  # per message: how many positions are received before, its job, its slot
    seen: Mapping[str, Sequence[int]] = {}  # per probe: the numbers of the arrivals that it sees

    @property
    def staleness(self) -> list[int]:
        """Of each arrival."""
        return [step - self.jobs[position].version for step, position in zip(self.step, self.at)]


class Growing:
    """The plan so far, with the slots and rows in use.

    ``local_steps``: of a job of each client, int[N]. ``personal``: messages differ from client to client. ``stateful``:
    clients keep a state between jobs, so jobs whose uploads never arrive are trained too. ``rows``: how many trained
    uploads the store of each lane holds, more than ``max_width``.
    """

    def __init__(
        self, local_steps: np.ndarray, *, personal: bool, stateful: bool, max_width: int, lanes: int, rows: int
    ) -> None:
        self._local_steps, self._personal, self._stateful = local_steps, personal, stateful
        self._width = max_width
        self._jobs = self._arrivals = 0
        self._numbers = np.zeros(len(local_steps), np.int64)
        self._open: dict[int, OpenJob] = {}
        self._latest: dict[int, int] = {}  # client -> its last job
        self._slot: dict[int, int] = {}  # message -> slot
        self._readers: dict[int, int] = {}  # message -> jobs that start from it
        self._free_slots: list[int] = []
        self._free_rows = [list(range(rows)) for _ in range(lanes)]
        self.slots = self.useful_steps = self.waves = 0

    def extend(self, record: Record, wanted: int | None = None) -> ExtensionWork:
        """The work for what is new in ``record``; ``wanted``: a job under way that must be trained now."""
        first, old = self._arrivals, self._jobs
        walked = self._walk(record)
        self._forget(record)
        return self._work(first, walked, _Dealt(self, walked, old, record, wanted))

    def nothing(self) -> ExtensionWork:
        """The work of an extension in which other runs have gained something."""
        walked = _Walked([], [], [], [], [], [], [])
        return self._work(self._arrivals, walked, _Dealt(self, walked, self._jobs, None, None))

    def where(self, job: int) -> tuple[int, int]:
        """``(lane, row)`` of a job that is trained and not yet received."""
        return self._open[job].lane, self._open[job].row

    # --- what is sent and received, and the slots -----------------------------------------------

    def _walk(self, record: Record) -> _Walked:
        """Dispatch and receive what is new in ``record``, in order."""
        new = record.extension(self._jobs, self._arrivals)
        walked = _Walked([], [], [], [], new.time, new.closes, new.step)
        jobs, arriving, e = self._jobs, new.job, 0
        for k, after in enumerate(new.dispatched_after):
            while e < after - self._arrivals:
                self._receive(walked, self._open[arriving[e]], e)
                e += 1
            self._dispatch(record, walked, jobs + k, new.client[k], new.dispatch_time[k], new.version[k])
        for later in range(e, len(arriving)):
            self._receive(walked, self._open[arriving[later]], later)
        self._jobs, self._arrivals = jobs + len(new.client), self._arrivals + len(arriving)
        return walked

    def _receive(self, walked: _Walked, one: OpenJob, e: int) -> None:
        walked.seen.append(one)
        walked.arrival.append(e)
        walked.slots.append(self._slot[one.message])
        self._close(one)

    def _dispatch(self, record: Record, walked: _Walked, job: int, client: int, time: float, version: int) -> None:
        before = self._open.get(self._latest.get(client, -1))
        if before is not None:  # its upload never came
            if self._stateful and record.outcomes.get(before.job) in _IN_VAIN:
                self._untrain(before)
                self._receive(walked, before, -1)
            else:
                self._close(before)
                self._untrain(before)
        message = job if self._personal else version
        one = OpenJob(
            job, client, int(self._numbers[client]), int(self._local_steps[client]), time, version,
            job in record.corrupt, message, len(walked.seen),
        )  # fmt: skip
        self._open[job], self._latest[client] = one, job
        self._numbers[client] += 1
        self._readers[message] = self._readers.get(message, 0) + 1
        if message not in self._slot:
            if not self._free_slots:
                self._free_slots.append(self.slots)
                self.slots += 1
            self._slot[message] = self._free_slots.pop()
            walked.writes.append((len(walked.seen), one, self._slot[message]))

    def _forget(self, record: Record) -> None:
        """Close jobs that can no longer arrive, except those that must still be trained in vain."""
        for job in record.outcomes.keys() & self._open.keys():
            outcome, one = record.outcomes[job], self._open[job]
            if outcome in _THROUGH or record.upload_time[job] == np.inf:
                self._untrain(one)
                if not (self._stateful and outcome in _IN_VAIN):
                    self._close(one)

    def _close(self, one: OpenJob) -> None:
        """Forget a job; once no other job starts from its message, the slot is free from the next position on."""
        del self._open[one.job]
        self._readers[one.message] -= 1
        if not self._readers[one.message]:
            del self._readers[one.message]
            self._free_slots.append(self._slot.pop(one.message))

    def _untrain(self, one: OpenJob) -> None:
        if one.row >= 0:
            self._free_rows[one.lane].append(one.row)
            one.lane = one.row = -1

    # --- what is trained, and the rows ------------------------------------------------------------

    def deal(self, todo: list[OpenJob], positions: list[int]) -> dict[int, list[int]]:
        """Deal jobs to the lanes, each to the lane with the fewest local steps so far; the positions of each lane."""
        shares: dict[int, list[int]] = {}
        loads = [0] * len(self._free_rows)
        for one, position in zip(todo, positions, strict=True):
            able = [k for k, free in enumerate(self._free_rows) if free and len(shares.get(k, ())) < self._width]
            lane = min(able, key=loads.__getitem__)
            one.lane, one.row = lane, self._free_rows[lane].pop()
            shares.setdefault(lane, []).append(position)
            loads[lane] += one.steps
        self.waves += 1
        return shares

    def room(self, *, spare: bool) -> int:
        """How many jobs can be trained now so that one row stays free; with ``spare``, rows for a full wave."""
        free = sum(map(len, self._free_rows))
        most = sum(min(self._width, len(rows)) for rows in self._free_rows)
        return min(most, free - self._width * len(self._free_rows)) if spare else min(most, free - 1)

    def make_room(self, record: Record) -> None:
        """If too few rows are free, discard the upload of the job that will arrive last; it is trained again later."""
        if self.room(spare=False) < 1:
            trained = [one for one in self._open.values() if one.row >= 0]
            self._untrain(max(trained, key=lambda one: (record.upload_time[one.job], one.client)))

    def release(self, one: OpenJob) -> None:
        """Free the row of a job whose upload is received."""
        self.useful_steps += one.steps
        self._free_rows[one.lane].append(one.row)

    def under_way(self, record: Record) -> list[OpenJob]:
        """Jobs that are not trained yet and, as far as is known, will arrive; in order of arrival."""
        found = [
            one for one in self._open.values()
            if one.row < 0 and record.upload_time[one.job] < np.inf and record.outcomes.get(one.job) not in _THROUGH
        ]  # fmt: skip
        return sorted(found, key=lambda one: (record.upload_time[one.job], one.client))

    def _work(self, first: int, walked: _Walked, dealt: _Dealt) -> ExtensionWork:
        received, ahead = len(walked.seen), len(dealt.ahead)
        return ExtensionWork(
            first,
            walked.time,
            walked.closes,
            walked.step,
            jobs=[*walked.seen, *dealt.ahead],
            arrival=walked.arrival + [-1] * ahead,
            applied=[number >= 0 for number in walked.arrival] + [True] * ahead,
            slot=walked.slots + [self._slot[one.message] for one in dealt.ahead],
            address=dealt.address,
            received=received,
            at=[*(p for p, number in enumerate(walked.arrival) if number >= 0), received],
            turns=dealt.turns,
            bounds=dealt.bounds,
            writes=walked.writes,
        )


class _Walked(NamedTuple):
    """What is new in the record, in order: positions that are received, writes, and columns of the arrivals."""

    seen: list[OpenJob]
    arrival: list[int]  # the number of each position among the new arrivals; -1: trained in vain
    slots: list[int]  # the slot from which the job of each position starts
    writes: list[tuple[int, OpenJob, int]]  # position, job, slot
    time: Sequence[float]
    closes: Sequence[bool]
    step: Sequence[int]


class _Dealt:
    """The jobs of an extension dealt to lanes, turn by turn, and the rows that they take."""

    def __init__(self, growing: Growing, walked: _Walked, old: int, record: Any, wanted: int | None) -> None:
        seen = walked.seen
        self.turns: list[dict[int, list[int]]] = []
        self.ahead: list[OpenJob] = []
        self.bounds, low = [0], 0
        self.address, ahead = list[tuple[int, int]](), list[tuple[int, int]]()  # lane and row, when they are trained
        later = growing.under_way(record) if wanted is not None or any(one.row < 0 for one in seen) else []
        asked = [one for one in later if one.job == wanted]

        def train(todo: list[OpenJob], positions: list[int]) -> dict[int, list[int]]:
            """Train ``todo``, and as many jobs under way as there is room for."""
            room = growing.room(spare=True) - len(todo)
            more = [one for one in later if is_ready(one) and one not in asked][: max(0, room)]
            positions = positions + [len(seen) + len(self.ahead) + k for k in range(len(more))]
            shares = growing.deal(todo + more, positions)
            self.ahead += more
            ahead.extend((one.lane, one.row) for one in self.ahead[len(ahead) :])
            return shares

        def is_ready(one: OpenJob) -> bool:
            return one.row < 0 and (one.job < old or one.sent <= low)

        while low < len(seen):
            if seen[low].row < 0:
                ready = [p for p in range(low, len(seen)) if is_ready(seen[p])][: max(1, growing.room(spare=False))]
                self.turns.append(train([seen[p] for p in ready], ready))
            else:
                self.turns.append({})
            high = low
            while high < len(seen) and seen[high].row >= 0:
                high += 1
            self.address += [(one.lane, one.row) for one in seen[low:high]]
            for one in seen[low:high]:
                growing.release(one)
            self.bounds.append(high)
            low = high
        if asked and asked[0].row < 0:
            growing.make_room(record)
            position = len(seen) + len(self.ahead)
            self.ahead += asked
            self.turns.append(train(asked, [position]))
            self.bounds.append(low)
        self.address += ahead
