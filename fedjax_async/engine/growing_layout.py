"""The layout of what the plans of runs side by side have gained since the last looks (host, NumPy).

Turn g of all runs is trained at the same time. Slots and rows outlive the layout, so those of different runs must
differ in every layout: number i of run r is ``i * R + r`` in a stack of R runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async.engine.batches import Batch, Lanes, Segment, segments_of
from fedjax_async.engine.extension import ExtensionWork
from fedjax_async.engine.layout import Layout, MergedSlots, rank_bounds


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


def growing_layout(works: Sequence[ExtensionWork], slots: int, room: Room) -> Layout:
    """Lay out one extension of each run; ``slots``: the most that a run has used so far."""
    runs, ranked = len(works), room.batching == "vmap" and len(works) > 1
    sizes = [len(work.applied) for work in works]
    run = np.repeat(np.arange(runs, dtype=np.int32), sizes)
    turns = max(len(work.turns) for work in works)
    turn, rank = (np.concatenate(columns) for columns in zip(*(_when(work, turns) for work in works)))
    source = np.lexsort((run, rank, turn) if ranked else (rank, run, turn))
    inverse = np.empty_like(source)
    inverse[source] = np.arange(len(source))
    positions = np.split(inverse, np.cumsum(sizes)[:-1])
    begins = np.searchsorted(turn[source], np.arange(turns + 1))

    def joined(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([column * runs + r for r, column in enumerate(columns)])[source].astype(np.int32)

    lane = np.concatenate([work.lane for work in works])[source]
    steps = np.concatenate([work.schedule.local_steps[work.schedule.job] for work in works])[source]
    bounds, batches, order = _dealt(works, positions, steps, begins, room)
    dealt = Lanes(bounds, batches, np.array(order, np.int32), lane, joined([work.row for work in works]))
    due = np.concatenate([np.concatenate([[0], own + 1])[work.written] for work, own in zip(works, positions)])
    first = np.argsort(due, kind="stable")
    write_run = np.repeat(np.arange(runs, dtype=np.int32), [len(work.written) for work in works])[first]
    write_slot = np.concatenate([work.write_slot * runs + r for r, work in enumerate(works)])
    return Layout(
        schedules=[work.schedule for work in works],
        run=run[source],
        source=source,
        positions=positions,
        waves=bounds,
        dealt=dealt,
        slots=MergedSlots(
            count=runs * slots,
            start_slot=joined([work.start_slot for work in works]),
            ranks=rank_bounds(run[source], np.append(dealt.stretches, len(source))),
            write_bounds=np.searchsorted(due[first], np.arange(len(source) + 2)),
            write_slot=write_slot[first].astype(np.int32),
            write_client=np.concatenate([work.schedule.client[work.write_job] for work in works])[first],
            write_run=write_run,
            write_job=np.concatenate([work.write_job for work in works])[first],
        ),
        batching=room.batching,
        widths=room.widths if room.batching == "loop" else (),  # those of vmap are compiled as they are needed
        capacity=room.rows if room.batching == "loop" else room.max_width,
        useful_steps=int(steps.sum()),
        executed_steps=dealt.executed_steps() if room.batching == "vmap" else int(steps[order].sum()),
    )


def _when(work: ExtensionWork, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """The turn in which each position of a run is received, ``turns`` if it is not, and its number in the turn."""
    position = np.arange(len(work.applied))
    turn = np.searchsorted(work.bounds[1:], position, side="right")
    rank = position - work.bounds[turn]
    return np.where(position < work.received, turn, turns), rank


def _dealt(
    works: Sequence[ExtensionWork],
    positions: Sequence[np.ndarray],
    steps: np.ndarray,
    begins: np.ndarray,
    room: Room,
) -> tuple[np.ndarray, list[list[Batch]], list[int]]:
    """Bounds, turns and training order. The jobs of all runs in a lane are a batch, or several turns if too many."""
    bounds, turns, order = [0], list[list[Batch]](), list[int]()
    most = room.max_width if room.batching == "vmap" else len(steps)
    for g, high in enumerate(begins[1:].tolist()):
        parts: list[list[Batch]] = [[]]
        for lane in range(room.lanes):
            shares = [own[work.turns[g].get(lane, [])] for work, own in zip(works, positions) if g < len(work.turns)]
            jobs = np.concatenate(shares)
            if room.batching == "vmap":
                jobs = jobs[np.argsort(-steps[jobs], kind="stable")]
            for k, low in enumerate(range(0, len(jobs), max(most, 1))):
                own = jobs[low : low + most]
                segments = [Segment(room.rows, 0, int(steps[own].max()))]
                if room.batching == "vmap":
                    segments = segments_of(steps[own], room.widths)
                parts += [[]] * (k + 1 - len(parts))
                parts[k] = [*parts[k], Batch(lane, len(order), len(own), segments)]
                order += own.tolist()
        turns += parts
        bounds += [bounds[-1]] * (len(parts) - 1) + [high]
    return np.array(bounds, np.int64), turns, order
