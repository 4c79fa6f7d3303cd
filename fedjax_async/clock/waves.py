"""Waves and slots: how a schedule is batched for the device, and where the start models live there.

*Waves* are the fewest batches that train all jobs of a schedule exactly as one at a time would.
The job of arrival ``e`` may be trained at any moment after its start model was written (after
``dispatched_after[job[e]]`` arrivals) and before its upload is applied (before arrival ``e``), that is at
any position of the interval ``[dispatched_after[job[e]], e]``. Training happens at the start of a wave,
so every interval must contain the start of a wave. Cut the arrivals greedily into maximal runs such that all start
models of a run are written before it: that needs the fewest waves (the classic problem of stabbing intervals with
points, solved from the left). By duality the number of waves is the length of the longest chain of jobs, each
dependent on the one before.

*Slots* are allocated ahead of time like registers. Positions count applied arrivals: at position 0 nothing has been
applied, at position p the first p arrivals have. Wave v begins at position ``bounds[v]``: it reads its start messages,
after the writes of that position. Its arrivals advance the position to ``bounds[v + 1]``. So a message lives
from the position of its write to the beginning of the wave that trains its last job, and its slot may be
written again at any later position.

Messages per version (``personal`` false): one write for each server version that some arriving job starts
from. A synchronous schedule then needs 1 slot, whatever the largest width. An asynchronous one needs at most
C + 1 for C jobs in flight: the versions in flight, and the current version even while none of its jobs is in flight.
Messages per job (``personal`` true): at most C slots, and m for cohorts of m.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import DROPPED, with_derived_columns
from fedjax_async.types import Schedule


class WaveStatistics(NamedTuple):
    """How well a schedule batches. ``share`` is the mean width over the mean number of jobs in flight."""

    waves: int
    longest_chain: int
    mean_width: float
    max_width: int
    mean_in_flight: float
    share: float


def waves(schedule: Schedule, max_width: int | None = None) -> np.ndarray:
    """Bounds of the waves: wave v trains the jobs of arrivals ``bounds[v] <= e < bounds[v + 1]``; int64[V + 1].

    Every job of a wave was dispatched at ``bounds[v]`` arrivals or earlier. Without ``max_width`` the
    number of waves V is the smallest possible; with it, wider waves are cut.
    """
    check.kind("schedule", schedule, Schedule, "a Schedule; that of a run is run.schedule")
    check.optional(check.whole, "max_width", max_width)
    written = schedule.dispatched_after[schedule.job].tolist()
    widest = len(written) + 1 if max_width is None else int(max_width)
    bounds, start, full = [0], 0, widest
    for e, position in enumerate(written):
        if position > start or e == full:
            bounds.append(e)
            start, full = e, e + widest
    if written:
        bounds.append(len(written))
    return np.array(bounds, np.int64)


def longest_chain(schedule: Schedule) -> int:
    """Length of the longest chain of arrivals, each dispatched after the one before it had been applied.

    No exact batching has fewer waves, because two jobs of a chain can never train together. Dynamic
    programming over the arrivals: ``length[e] = 1 + max(length[:dispatched_after[job[e]]])``.
    """
    best = [0]  # best[p]: the longest chain among the first p arrivals
    longest = 0
    for position in schedule.dispatched_after[schedule.job].tolist():
        longest = max(longest, 1 + best[position])
        best.append(longest)
    return longest


def wave_statistics(schedule: Schedule, bounds: np.ndarray | None = None) -> WaveStatistics:
    """Widths of the waves (``bounds``, by default ``waves(schedule)``) against the jobs in flight.

    Jobs in flight are counted at each application, just before anything is applied at that moment;
    jobs that are called off, lost or dropped are left out.
    """
    schedule = with_derived_columns(schedule)
    bounds = waves(schedule) if bounds is None else bounds
    widths = np.diff(bounds)
    arrivals = len(schedule.job)
    kept = schedule.dispatch_time[np.isfinite(schedule.upload_time) & ~np.isin(schedule.outcome, DROPPED)]
    in_flight = np.searchsorted(kept, schedule.time) - np.searchsorted(schedule.time, schedule.time)
    mean_width = arrivals / max(len(widths), 1)
    mean_in_flight = float(in_flight.mean()) if arrivals else 0.0
    return WaveStatistics(
        waves=len(widths),
        longest_chain=longest_chain(schedule),
        mean_width=mean_width,
        max_width=int(widths.max(initial=0)),
        mean_in_flight=mean_in_flight,
        share=mean_width / mean_in_flight if arrivals else 0.0,
    )


# --- slots --------------------------------------------------------------------------------------


class SlotPlan(NamedTuple):
    """The messages written at position p are rows ``write_bounds[p]:write_bounds[p + 1]`` of the last three fields."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    start_slot: np.ndarray  # int32[J]: where job j's start message is; -1 if j never arrives
    write_bounds: np.ndarray  # int64[E + 2]
    write_slot: np.ndarray  # int32[messages]
    write_client: np.ndarray  # int32[messages]: the client it is for (the first one, if shared)
    write_job: np.ndarray  # int64[messages]: the job it is for (the first one, if shared)


def allocate(schedule: Schedule, bounds: np.ndarray, personal: bool) -> SlotPlan:
    """The fewest slots for a schedule trained in the waves ``bounds`` (greedy, optimal for intervals).

    ``personal`` says whether each job gets a message of its own (the server keeps a row of memory per
    client), or all jobs sent from one version share one, written when the first of them is dispatched.
    """
    arrivals = len(schedule.job)
    jobs = np.sort(schedule.job)  # numbered in order of dispatch
    begins = np.zeros(len(schedule.client), np.int64)
    begins[schedule.job] = np.repeat(bounds[:-1], np.diff(bounds))
    if personal:  # also for jobs that never arrive: the server's memory changes when the message is sent
        first, message = np.arange(len(schedule.client)), jobs
        last_read = schedule.dispatched_after.copy()
        last_read[jobs] = begins[jobs]
    else:
        _, index, message = np.unique(schedule.version[jobs], return_index=True, return_inverse=True)
        first = jobs[index]
        last_read = np.zeros(len(first), np.int64)
        np.maximum.at(last_read, message, begins[jobs])
    written = schedule.dispatched_after[first]
    slot, count = colour(written, last_read)
    start_slot = np.full(len(schedule.client), -1, np.int32)
    start_slot[jobs] = slot[message]
    return SlotPlan(
        count=count,
        start_slot=start_slot,
        write_bounds=np.searchsorted(written, np.arange(arrivals + 2)),
        write_slot=slot,
        write_client=schedule.client[first],
        write_job=first,
    )


def colour(written: np.ndarray, last_read: np.ndarray) -> tuple[np.ndarray, int]:
    """Slots for messages in order of writing, and how many; a slot is free for writes later than its last reading."""
    order = np.argsort(last_read, kind="stable")
    ending, ends = order.tolist(), [*last_read[order].tolist(), math.inf]  # earliest last reading first
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
