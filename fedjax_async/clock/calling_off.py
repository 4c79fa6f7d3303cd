"""Calling off jobs under way whose uploads would be too stale, for the timing ``fresh``."""

from __future__ import annotations

import heapq
import math

from fedjax_async.clock.event_queue import Release
from fedjax_async.clock.idle_clients import IdleClients


class StaleJobs:
    """Finds the jobs under way that have become staler than ``max_staleness``; each is looked at once."""

    def __init__(self, idle: IdleClients) -> None:
        # Jobs whose uploads have come; those that are older than ``_oldest`` are forgotten.
        idle.queue.finished = self._finished = set[int]()
        self._idle, self._oldest = idle, 0

    def call_off(self, time: float, steps: int = 0) -> list[Release]:
        """Call off the jobs that are too stale by now; returns what this frees.

        ``steps``: of a longer budget, closed at this moment beyond the end of this one.
        """
        queue, record, stale = self._idle.queue, self._idle.queue.record, set[int]()
        while self._oldest < len(record.client) and queue.too_stale(self._oldest, steps):
            if self._oldest in self._finished:
                self._finished.remove(self._oldest)
            elif record.failed.get(self._oldest, math.inf) > time:
                stale.add(self._oldest)
            self._oldest += 1  # later jobs are never staler
        if not stale:
            return []
        queue.events[:] = [event for event in queue.events if event[3] not in stale]
        heapq.heapify(queue.events)
        noticed = stale & record.outcomes.keys()
        spared = stale & record.failed.keys()
        queue.spare(spared)
        self._idle.recall({record.client[job] for job in spared})
        for job in stale:
            record.call_off(job, time)
            if job in queue.open:
                outcome = queue.open[job]
                down = outcome.client_free if outcome.crash <= time < outcome.client_free else time
                queue.open[job] = outcome._replace(client_free=down)
        return [(job, record.client[job], job not in noticed, True) for job in sorted(stale)]
