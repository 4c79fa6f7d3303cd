"""From schedules to the layout of a stack (host, NumPy): the order of all arrivals, batches, rows and slots."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock import allocate, waves
from fedjax_async.engine.batches import Cutting, Lanes, deal
from fedjax_async.types import Schedule


class Merged(NamedTuple):
    """All arrivals of R runs in one order. A *position* is an index into this order.

    The arrivals of each run keep their order. Runs do not depend on each other, so their results are the same in any
    such order.
    """

    run: np.ndarray  # int32[E]
    source: np.ndarray  # int64[E]  index into the arrivals of all runs, listed one run after the other
    positions: list[np.ndarray]  # per run: the position of each of its arrivals, int64[E_r]
    waves: np.ndarray  # int64[V + 1], positions: wave v holds the v-th wave of every run


class MergedSlots(NamedTuple):
    """What the jobs of clients read: :class:`~fedjax_async.clock.SlotPlan` of all runs together."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    start_slot: np.ndarray  # int32[E], one entry a position
    ranks: np.ndarray  # int64[ranks + 1], positions: the arrivals of a rank belong to different runs
    write_bounds: np.ndarray  # int64[E + 2]
    write_slot: np.ndarray  # int32[messages]
    write_client: np.ndarray  # int32[messages]
    write_run: np.ndarray  # int32[messages]
    write_job: np.ndarray  # int64[messages], job of its run


def merge(schedules: Sequence[Schedule], by_ranks: bool) -> Merged:
    """Order the arrivals by wave, then by run, or (``by_ranks``) by rank within the run's wave."""
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
    source = np.lexsort((run, ranks, waves_of) if by_ranks else (ranks, run, waves_of))
    inverse = np.empty_like(source)
    inverse[source] = np.arange(len(source))
    position = [inverse[a : a + n] for a, n in zip(first, sizes)]
    widths = np.bincount(waves_of) if len(waves_of) else np.zeros(0, np.int64)
    return Merged(run[source], source, position, np.concatenate([[0], np.cumsum(widths)]).astype(np.int64))


def rank_bounds(run: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Cut positions into ranks at ``bounds`` and wherever a run would occur twice; int64[ranks + 1].

    Between ``bounds``, ``run`` must be ordered by rank.
    """
    begins = np.zeros(len(run) + 1, np.bool_)
    begins[1:-1] = run[1:] <= run[:-1]
    begins[bounds] = True
    return np.flatnonzero(begins).astype(np.int64)


def merge_slots(
    schedules: Sequence[Schedule], merged: Merged, bounds: np.ndarray, stretches: np.ndarray, personal: bool
) -> MergedSlots:
    """The slots of all runs, for turns with these ``bounds`` (positions). Runs share no slots.

    ``stretches``: positions at which a rank must end.
    """
    base, total = 0, len(merged.run)
    start = np.zeros(total, np.int32)
    slot, client, run, job, written_at = [], [], [], [], []
    for r, (s, position) in enumerate(zip(schedules, merged.positions)):
        turn = np.searchsorted(bounds, position, side="right")
        own = np.flatnonzero(np.diff(turn, prepend=-1))
        edges = np.append(own, len(position)) if len(position) else np.zeros(1, np.int64)
        slots = allocate(s, edges, personal=personal)
        start[position] = base + slots.start_slot[s.job]
        slot.append(base + slots.write_slot)
        client.append(slots.write_client)
        job.append(slots.write_job)
        run.append(np.full(len(slots.write_slot), r, np.int32))
        after = np.searchsorted(slots.write_bounds, np.arange(len(slots.write_slot)), side="right") - 1
        written_at.append(np.concatenate([[0], position + 1])[after])
        base += slots.count
    due = np.concatenate(written_at)
    order = np.argsort(due, kind="stable")
    return MergedSlots(
        count=base,
        start_slot=start,
        ranks=rank_bounds(merged.run, stretches),
        write_bounds=np.searchsorted(due[order], np.arange(total + 2)),
        write_slot=np.concatenate(slot)[order].astype(np.int32),
        write_client=np.concatenate(client)[order].astype(np.int32),
        write_run=np.concatenate(run)[order],
        write_job=np.concatenate(job)[order],
    )


class Layout(NamedTuple):
    """What the device will do for a stack of runs that advance side by side.

    *Positions* number the arrivals of all runs in one order (without a server: the executed events). The batches of
    *turn* g of ``dealt``, at most one a lane, are trained at the same time. Then the results of the positions
    ``bounds[g] .. bounds[g+1]-1`` are applied.
    """

    schedules: list[Any]  # Schedule, or PeerSchedule
    run: np.ndarray  # int32[E]  whose job is at a position
    source: np.ndarray  # int64[E]  index into the arrivals of all runs, listed one run after the other
    positions: list[np.ndarray]  # per run: positions of its arrivals, int64[E_r]
    waves: np.ndarray  # int64[V + 1], positions
    dealt: Lanes
    slots: Any  # what jobs read: MergedSlots, or peer_layout.InboxSlots
    batching: str  # one of BATCHINGS
    widths: tuple[int, ...]
    capacity: int  # rows of a lane's buffers
    useful_steps: int
    executed_steps: int

    @property
    def whole(self) -> bool:
        """Whether each job ends in the call that begins it."""
        return self.batching == "loop"

    def counters(self) -> dict[str, Any]:
        """What a run says of its batches."""
        return {
            "batches": sum(map(len, self.dealt.turns)),
            "widths": list(self.widths),
            "slots": self.slots.count,
            "useful_steps": self.useful_steps,
            "executed_steps": self.executed_steps,
        }


def digest(layout: Layout) -> str:
    """A fingerprint of the order, the lanes, the batches in which jobs are trained, and of what they read."""
    dealt, slots = layout.dealt, layout.slots
    first, last = ([layout.run], slots.start_slot) if isinstance(slots, MergedSlots) else ([], slots.slot)
    decided = (*first, layout.source, dealt.bounds, dealt.train_order, dealt.lane, dealt.row, last)
    return digest_of((layout.batching, layout.capacity, dealt.turns), *decided)


def digest_of(plain: tuple[Any, ...], *columns: np.ndarray) -> str:
    """A fingerprint of plain values and of columns of whole numbers."""
    hashed = hashlib.sha256(repr(plain).encode())
    for column in columns:
        hashed.update(np.asarray(column, np.int64).tobytes())
    return hashed.hexdigest()[:16]


def make_layout(schedules: Sequence[Schedule], cut: Cutting, *, personal: bool = False) -> Layout:
    """Cut schedules into batches, and choose their rows, slots and widths.

    ``personal``: messages differ from client to client, so each job needs its own slot. Raises ``ValueError`` for an
    unknown batching.
    """
    merged = merge(schedules, by_ranks=cut.batching == "vmap")
    steps = np.concatenate([s.local_steps[s.job] for s in schedules])[merged.source]
    layout = laid_out(schedules, merged, _ready(schedules, merged), steps, cut)
    dealt = layout.dealt
    return layout._replace(slots=merge_slots(schedules, merged, dealt.bounds, dealt.stretches, personal))


def laid_out(schedules: Sequence[Any], merged: Merged, ready: np.ndarray, steps: np.ndarray, cut: Cutting) -> Layout:
    """The layout of merged runs, without slots. ``steps``, int[E]: the local steps of each job.

    ``ready``, int64[E]: how many positions must be applied before the job of each may be trained.
    """
    most = sum(s.num_clients for s in schedules)
    dealt, widths, capacity, executed = deal(ready, merged.waves, steps, most, cut)
    cost = (widths, capacity, int(steps.sum()), executed)
    return Layout(list(schedules), *merged, dealt, None, cut.batching, *cost)


def _ready(schedules: Sequence[Schedule], merged: Merged) -> np.ndarray:
    """How many positions must have been received before the start model of each position's job exists; int64[E]."""
    ready = [
        np.concatenate([[0], position + 1])[s.dispatched_after[s.job]]
        for s, position in zip(schedules, merged.positions)
    ]
    return np.concatenate(ready)[merged.source]
