"""Several schedules as one: the runs of a stack advance wave by wave, side by side (host, NumPy)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async.clock import allocate, waves
from fedjax_async.types import Schedule


class Merged(NamedTuple):
    """All arrivals of R runs in one order. A *position* counts arrivals of any run.

    Each run's own arrivals keep their order; nothing of one run depends on another, so any such
    order gives every run its own result.
    """

    run: np.ndarray  # int32[E]
    source: np.ndarray  # int64[E]  index into the runs' arrivals, one run after the other
    place: list[np.ndarray]  # per run: the position of each of its arrivals, int64[E_r]
    waves: np.ndarray  # int64[V + 1], positions: wave v holds the v-th wave of every run


class MergedSlots(NamedTuple):
    """:class:`~fedjax_async.clock.Slots` of all runs together; ``start_slot`` is one entry a position."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    start_slot: np.ndarray  # int32[E]
    write_bounds: np.ndarray  # int64[E + 2]
    write_slot: np.ndarray  # int32[messages]
    write_client: np.ndarray  # int32[messages]
    write_run: np.ndarray  # int32[messages]
    write_job: np.ndarray  # int64[messages], of its run


def merge(schedules: Sequence[Schedule], by_round: bool) -> Merged:
    """Order the arrivals by wave, then by run, or (``by_round``) by rank within the run's wave."""
    sizes = np.array([len(s.job) for s in schedules])
    first = np.cumsum(sizes) - sizes
    if len(schedules) == 1:
        edges = np.asarray(waves(schedules[0]), np.int64)
        every = np.arange(sizes[0])
        return Merged(np.zeros(sizes[0], np.int32), every, [every], edges)
    run = np.repeat(np.arange(len(schedules), dtype=np.int32), sizes)
    wave, rank = [], []
    for s in schedules:
        edges = np.asarray(waves(s), np.int64)
        widths = np.diff(edges)
        wave.append(np.repeat(np.arange(len(widths)), widths))
        rank.append(np.arange(len(s.job)) - np.repeat(edges[:-1], widths))
    waves_of, ranks = np.concatenate(wave), np.concatenate(rank)
    source = np.lexsort((run, ranks, waves_of) if by_round else (ranks, run, waves_of))
    inverse = np.empty_like(source)
    inverse[source] = np.arange(len(source))
    place = [inverse[a : a + n] for a, n in zip(first, sizes)]
    widths = np.bincount(waves_of) if len(waves_of) else np.zeros(0, np.int64)
    return Merged(run[source], source, place, np.concatenate([[0], np.cumsum(widths)]).astype(np.int64))


def round_bounds(run: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Cut positions into rounds, within which no run occurs twice and no boundary lies; int64[rounds + 1].

    ``run`` must be ordered by round within each stretch between ``bounds``.
    """
    begins = np.zeros(len(run) + 1, np.bool_)
    begins[1:-1] = run[1:] <= run[:-1]
    begins[bounds] = True
    return np.flatnonzero(begins).astype(np.int64)


def merge_slots(schedules: Sequence[Schedule], merged: Merged, bounds: np.ndarray, personal: bool) -> MergedSlots:
    """Slots of every run, each run's its own, for the batches ``bounds`` (positions)."""
    base, total = 0, len(merged.run)
    start = np.zeros(total, np.int32)
    slot, client, run, job, position = [], [], [], [], []
    for r, (s, place) in enumerate(zip(schedules, merged.place)):
        batch = np.searchsorted(bounds, place, side="right")
        own = np.flatnonzero(np.diff(batch, prepend=-1))
        slots = allocate(s, np.append(own, len(place)) if len(place) else np.zeros(1, np.int64), personal=personal)
        start[place] = base + slots.start_slot[s.job]
        slot.append(base + slots.write_slot)
        client.append(slots.write_client)
        job.append(slots.write_job)
        run.append(np.full(len(slots.write_slot), r, np.int32))
        after = np.searchsorted(slots.write_bounds, np.arange(len(slots.write_slot)), side="right") - 1
        position.append(np.concatenate([[0], place + 1])[after])
        base += slots.count
    due = np.concatenate(position)
    order = np.argsort(due, kind="stable")
    return MergedSlots(
        count=base,
        start_slot=start,
        write_bounds=np.searchsorted(due[order], np.arange(total + 2)),
        write_slot=np.concatenate(slot)[order].astype(np.int32),
        write_client=np.concatenate(client)[order].astype(np.int32),
        write_run=np.concatenate(run)[order],
        write_job=np.concatenate(job)[order],
    )
