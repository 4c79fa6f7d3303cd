"""The event queue of a reliable world: who is under way, when every client is there and every job arrives.

Order of events: time, then kind (uploads before anything the server does at the same moment), then
client, then the job's sequence number. A client is never in flight twice, so uploads are ordered by
(time, client) already; the sequence number makes the order total by construction.
"""

from __future__ import annotations

import heapq
import math

from fedjax_async.clock.record import Record
from fedjax_async.clock.world import World, duration_lookup


class EventQueue:
    """Jobs under way in a heap; the record of what happened is in ``record``."""

    def __init__(self, world: World):
        self.record = Record(world)
        self.horizon = self.record.horizon
        self._duration = duration_lookup(world)
        self._heap: list[tuple[float, int, int]] = []  # upload time, client, job

    def dispatch(self, client: int, time: float) -> int:
        """Send the current model to ``client``, which must be idle; returns the job."""
        record = self.record
        upload = time + self._duration(client, record.jobs_of[client])
        if not upload > time:
            raise ValueError(f"delays: a job of client {client} is too short to advance the clock at {time} s")
        job = record.dispatch(client, time, upload)
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

    def cancel_rest(self, time: float) -> None:
        """Call back every job under way."""
        for _, _, job in self._heap:
            self.record.call_off(job, time)
        self._heap.clear()
