"""The event queue of a reliable world: who is under way, when every client is there and every job arrives.

Order of events: time, then kind (uploads before anything the server does at the same moment), then
client, then the job's sequence number. A client is never in flight twice, so uploads are ordered by
(time, client) already; the sequence number makes the order total by construction.
"""

from __future__ import annotations

import heapq
import math
from functools import partial

from fedjax_async.clock.record import Record
from fedjax_async.clock.stock import AHEAD, Ahead, Stock
from fedjax_async.clock.world import World, checked_durations, too_short


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
