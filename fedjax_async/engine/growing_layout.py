"""The layout of what the plans of runs side by side have gained since the last looks (host).

Turn g of all runs is trained at the same time. Slots and rows outlive the layout, so those of different runs must
differ in every layout: number i of run r is ``i * R + r`` in a stack of R runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async.engine.batches import Batch, Lanes, Segment, segments_of
from fedjax_async.engine.extension import ExtensionWork, OpenJob
from fedjax_async.engine.layout import Layout, rank_bounds


class Room(NamedTuple):
    """How jobs are trained in a stack of runs whose plans grow."""

    batching: str  # one of BATCHINGS
    lanes: int
    max_width: int  # the most jobs of a batch of ``vmap``
    rows: int  # of the store of a lane, for all runs

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that batches may have."""
        if self.batching == "loop":
            return (self.rows,)
        return (*(1 << k for k in range((self.max_width - 1).bit_length())), self.max_width)


class GrowingSlots(NamedTuple):
    """What the jobs of clients read, as in ``layout.MergedSlots``."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    ranks: np.ndarray
    write_bounds: np.ndarray
    writes: list[tuple[int, OpenJob, int]]  # per message: its run, job and slot

    @property
    def write_run(self) -> np.ndarray:
        """Of each message."""
        return np.array([run for run, _, _ in self.writes], np.int32)

    @property
    def write_client(self) -> np.ndarray:
        """Of each message."""
        return np.array([one.client for _, one, _ in self.writes], np.int32)


def growing_layout(works: Sequence[ExtensionWork], slots: int, room: Room) -> Layout:
    """Lay out one extension of each run; ``slots``: the most that a run has used so far."""
    runs, looped = len(works), room.batching == "loop"
    source, ends = _merged(works, by_ranks=runs > 1 and not looped)
    positions = [[0] * len(work.jobs) for work in works]
    for position, (r, k) in enumerate(source):
        positions[r][k] = position
    steps = [works[r].jobs[k].steps for r, k in source]
    bounds, batches, order = _dealt(works, positions, steps, ends, room)
    address = [(*works[r].address[k], r) for r, k in source]
    dealt = Lanes(
        np.array(bounds, np.int64),
        batches,
        np.array(order, np.int32),
        np.array([lane for lane, _, _ in address], np.int32),
        np.array([row * runs + r for _, row, r in address], np.int32),
    )
    due = [
        (positions[r][before - 1] + 1 if before else 0, (r, one, slot * runs + r))
        for r, work in enumerate(works)
        for before, one, slot in work.writes
    ]
    due.sort(key=lambda one: one[0])
    run = np.array([r for r, _ in source], np.int32)
    ranks = np.arange(len(source) + 1)
    if runs > 1:
        ranks = rank_bounds(run, np.append(dealt.stretches, len(source)))
    trained = sum(steps[position] for position in order)
    return Layout(
        list(works),
        run,
        np.array([k for _, k in source], np.int64),
        [np.array(own, np.int64) for own in positions],
        dealt.bounds,
        dealt,
        GrowingSlots(
            count=runs * slots,
            ranks=ranks,
            write_bounds=np.searchsorted([when for when, _ in due], np.arange(len(source) + 2)),
            writes=[write for _, write in due],
        ),
        batching=room.batching,
        widths=room.widths if looped else (),  # those of vmap are compiled as they are needed
        capacity=room.rows if looped else room.max_width,
        useful_steps=trained,
        executed_steps=trained if looped else dealt.executed_steps(),
    )


def _merged(works: Sequence[ExtensionWork], by_ranks: bool) -> tuple[list[tuple[int, int]], list[int]]:
    """Run and own position of each position, and how many are received by the end of each turn.

    The positions of a turn are in the order of their runs, or (``by_ranks``) first the first one of each run.
    """
    if len(works) == 1:
        return [(0, k) for k in range(len(works[0].jobs))], works[0].bounds[1:]
    turns = max(len(work.turns) for work in works)
    whens = [(*when, r, k) for r, work in enumerate(works) for k, when in enumerate(_when(work, turns))]
    whens.sort(key=None if by_ranks else lambda one: (one[0], one[2], one[1]))
    received = [turn for turn, *_ in whens]
    return [(r, k) for _, _, r, k in whens], [bisect_right(received, turn) for turn in range(turns)]


def _when(work: ExtensionWork, turns: int) -> list[tuple[int, int]]:
    """The turn in which each position of a run is received, ``turns`` if it is not, and its number in the turn."""
    received = [
        (turn, rank) for turn, (low, high) in enumerate(itertools.pairwise(work.bounds)) for rank in range(high - low)
    ]
    return received + [(turns, rank) for rank in range(len(work.jobs) - work.received)]


def _dealt(
    works: Sequence[ExtensionWork], positions: Sequence[list[int]], steps: list[int], ends: Sequence[int], room: Room
) -> tuple[list[int], list[list[Batch]], list[int]]:
    """Bounds, turns and training order. The jobs of all runs in a lane are a batch, or several turns if too many.

    ``ends``: how many positions are received by the end of each turn of the works.
    """
    bounds, turns, order = [0], list[list[Batch]](), list[int]()
    most = room.max_width if room.batching == "vmap" else max(len(steps), 1)
    for g, high in enumerate(ends):
        parts: list[list[Batch]] = [[]]
        shares = [(own, work.turns[g]) for work, own in zip(works, positions) if g < len(work.turns) and work.turns[g]]
        for lane in range(room.lanes) if shares else ():
            jobs = [own[p] for own, share in shares for p in share.get(lane, ())]
            if room.batching == "vmap":
                jobs.sort(key=lambda job: -steps[job])
            for k, low in enumerate(range(0, len(jobs), most)):
                own = jobs[low : low + most]
                segments = [Segment(room.rows, 0, max(steps[job] for job in own))]
                if room.batching == "vmap":
                    segments = segments_of(np.array([steps[job] for job in own]), room.widths)
                parts += [[]] * (k + 1 - len(parts))
                parts[k] = [*parts[k], Batch(lane, len(order), len(own), segments)]
                order += own
        turns += parts
        bounds += [bounds[-1]] * (len(parts) - 1) + [high]
    return bounds, turns, order
