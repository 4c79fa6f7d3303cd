"""The one event queue, shared by all timing policies: who is under way, and a record of what happened.

Order of events: time, then kind (uploads before anything the server does at the same moment), then
client, then the job's sequence number. A client is never in flight twice, so uploads are ordered by
(time, client) already; the sequence number makes the order total by construction.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.clock.durations import Delays
from fedjax_async.types import Schedule

# A budget of 0.3 s admits the third window of 0.1 s, though 3 * 0.1 > 0.3 in floating point.
_SLACK = 1 + 1e-12


class Until(NamedTuple):
    """When a plan ends: at the first that is reached of virtual seconds, applied arrivals, closed server steps.

    ``time`` is inclusive. What the budget cuts off is never half done: arrivals that were applied to an
    unfinished server step are listed with ``closes`` false.
    """

    time: float | None = None
    updates: int | None = None
    steps: int | None = None


class World(NamedTuple):
    """All that a timing policy may know: the clients, their jobs' lengths and delays, the budget, the seed."""

    num_clients: int
    local_steps: np.ndarray  # int64[N]
    delays: Delays
    until: Until
    seed: int
    bytes_down: int | np.ndarray = 0
    bytes_up: int | np.ndarray = 0


def duration_lookup(world: World) -> Callable[[int, int], float]:
    """``lookup(client, number) -> seconds``: durations drawn and scaled a tile at a time, when first needed."""
    tiles: dict[int, array] = {}
    columns = chance.padded(world.num_clients) // chance.COLUMNS
    numbers = np.repeat(np.arange(chance.ROWS), chance.COLUMNS)
    offsets = np.tile(np.arange(chance.COLUMNS), chance.ROWS)
    down = np.broadcast_to(world.bytes_down, world.num_clients)
    up = np.broadcast_to(world.bytes_up, world.num_clients)

    def draw(key: int) -> array:
        row, column = divmod(key, columns)
        clients = np.minimum(column * chance.COLUMNS + offsets, world.num_clients - 1)
        jobs = row * chance.ROWS + numbers
        values = world.delays.durations(clients, jobs, world.local_steps[clients], down[clients], up[clients])
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError("delays: every duration must be a finite number > 0")
        tiles[key] = array("d", values.tobytes())
        return tiles[key]

    rows_width, width = chance.ROWS, chance.COLUMNS

    def lookup(client: int, number: int) -> float:
        row, number = divmod(number, rows_width)
        column, offset = divmod(client, width)
        key = row * columns + column
        tile = tiles[key] if key in tiles else draw(key)
        return tile[number * width + offset]

    return lookup


class EventQueue:
    """Jobs under way in a heap, and what was dispatched and applied so far in growing columns."""

    def __init__(self, world: World):
        self._duration = duration_lookup(world)
        self._heap: list[tuple[float, int, int]] = []  # upload time, client, job
        self._jobs_of = [0] * world.num_clients
        self._client, self._number, self._applied_before = array("q"), array("q"), array("q")
        self._dispatch_time, self._upload_time = array("d"), array("d")
        self._job, self._time, self._closes = array("q"), array("d"), array("b")
        self._applied = self._closed = 0
        until = world.until
        self.horizon = math.inf if until.time is None else until.time * _SLACK
        self._last_update = math.inf if until.updates is None else until.updates
        self._last_step = math.inf if until.steps is None else until.steps

    def dispatch(self, client: int, time: float) -> int:
        """Send the current model to ``client``, which must be idle; returns the job."""
        number = self._jobs_of[client]
        self._jobs_of[client] = number + 1
        upload = time + self._duration(client, number)
        if not upload > time:
            raise ValueError(f"delays: a job of client {client} is too short to advance the clock at {time} s")
        job = len(self._client)
        self._client.append(client)
        self._number.append(number)
        self._dispatch_time.append(time)
        self._upload_time.append(upload)
        self._applied_before.append(self._applied)
        heapq.heappush(self._heap, (upload, client, job))
        return job

    def next_time(self) -> float:
        """Time of the earliest upload under way; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def take(self, before: float) -> tuple[float, int, int] | None:
        """Remove and return the earliest upload (time, client, job) if it comes at ``before`` or earlier."""
        if not self._heap or self._heap[0][0] > before:
            return None
        return heapq.heappop(self._heap)

    def cancel_rest(self) -> None:
        """Call back every job under way: its upload will never reach the server (``upload_time`` infinite)."""
        for _, _, job in self._heap:
            self._upload_time[job] = math.inf
        self._heap.clear()

    def apply(self, job: int, time: float, closes: bool) -> bool:
        """The server applies ``job``'s upload, completing a step if ``closes``; false once the budget is spent."""
        self._job.append(job)
        self._time.append(time)
        self._closes.append(closes)
        self._applied += 1
        self._closed += closes
        return self._applied < self._last_update and self._closed < self._last_step

    def apply_step(self, jobs: Iterable[int], time: float) -> bool:
        """Apply ``jobs``, at least one, as one server step at ``time``; false once the budget is spent."""
        if time > self.horizon:
            return False
        *others, last = jobs
        return all(self.apply(job, time, False) for job in others) and self.apply(last, time, True)

    def schedule(self, world: World) -> Schedule:
        """The record as arrays. Versions and steps are counts of the closed steps before a position."""
        client = np.array(self._client, np.int32)
        closes = np.array(self._closes, np.bool_)
        closed = np.concatenate([[0], np.cumsum(closes, dtype=np.int64)])
        dispatched_after = np.array(self._applied_before, np.int64)
        return Schedule(
            num_clients=world.num_clients,
            client=client,
            number=np.array(self._number, np.int32),
            local_steps=world.local_steps[client].astype(np.int32),
            dispatch_time=np.array(self._dispatch_time, np.float64),
            upload_time=np.array(self._upload_time, np.float64),
            dispatched_after=dispatched_after,
            version=closed[dispatched_after],
            job=np.array(self._job, np.int64),
            time=np.array(self._time, np.float64),
            closes=closes,
            step=closed[:-1],
        )
