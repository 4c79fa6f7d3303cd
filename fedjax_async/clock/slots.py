"""Slots: where on the device start messages live, allocated ahead of time like registers.

Positions count applied arrivals: at position 0 nothing has been applied, at position p the first p
arrivals have. Wave v begins at position ``bounds[v]`` by reading its start messages, after the writes of
that position, and its arrivals lead through the positions up to ``bounds[v + 1]``. So a message lives
from the position of its write to the beginning of the wave that trains its last job, and its slot may be
written again at any later position.

Messages per version (``personal`` false): one write per server version that some arriving job starts
from. A synchronous schedule then needs 1 slot, whatever the width cap. An asynchronous one needs at most
C + 1 for C jobs in flight: distinct versions in flight, and the current one between two of its jobs.
Messages per job (``personal`` true): at most C slots, and m for cohorts of m.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedjax_async.types import Schedule


class Slots(NamedTuple):
    """The messages written at position p are rows ``write_bounds[p]:write_bounds[p + 1]`` of the last two."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    start_slot: np.ndarray  # int32[J]: where job j's start message is; -1 if j never arrives
    write_bounds: np.ndarray  # int64[E + 2]
    write_slot: np.ndarray  # int32[messages]
    write_client: np.ndarray  # int32[messages]: whom the message is for (the first of them, if shared)
    write_job: np.ndarray  # int64[messages]: the job that it is for (the first of them, if shared)


def allocate(schedule: Schedule, bounds: np.ndarray, personal: bool) -> Slots:
    """The fewest slots for a schedule trained in the waves ``bounds`` (greedy, optimal for intervals).

    ``personal`` says whether each job gets a message of its own (the server keeps a row of memory per
    client), or all jobs sent from one version share one, written when the first of them is dispatched.
    """
    arrivals = len(schedule.job)
    jobs = np.sort(schedule.job)  # numbered in order of dispatch
    begins = np.zeros(len(schedule.client), np.int64)
    begins[schedule.job] = np.repeat(bounds[:-1], np.diff(bounds))
    if personal:  # written for jobs that never arrive too: the server's memory knows that it was sent
        first, message = np.arange(len(schedule.client)), jobs
        last_read = schedule.dispatched_after.copy()
        last_read[jobs] = begins[jobs]
    else:
        _, index, message = np.unique(schedule.version[jobs], return_index=True, return_inverse=True)
        first = jobs[index]
        last_read = np.zeros(len(first), np.int64)
        np.maximum.at(last_read, message, begins[jobs])
    written = schedule.dispatched_after[first]
    slot, count = _colour(written, last_read)
    start_slot = np.full(len(schedule.client), -1, np.int32)
    start_slot[jobs] = slot[message]
    return Slots(
        count=count,
        start_slot=start_slot,
        write_bounds=np.searchsorted(written, np.arange(arrivals + 2)),
        write_slot=slot,
        write_client=schedule.client[first],
        write_job=first,
    )


def _colour(written: np.ndarray, last_read: np.ndarray) -> tuple[np.ndarray, int]:
    """Slots for messages in order of writing; a slot is free for writes later than its last reading."""
    order = np.argsort(last_read, kind="stable")
    ending, ends = order.tolist(), [*last_read[order].tolist(), math.inf]  # read for the last time earliest first
    free: list[int] = []
    chosen: list[int] = []
    count = done = 0
    for position in written.tolist():
        while ends[done] < position:
            free.append(chosen[ending[done]])
            done += 1
        if free:
            chosen.append(free.pop())
        else:
            chosen.append(count)
            count += 1
    return np.array(chosen, np.int32), count
