"""From plans to the layout of a stack (host, NumPy): the order of all jobs, batches, rows and slots.

A *position* is the number of an arrival (without a server: of an executed event) in the order of all runs. Events of
nodes are executed wave by wave (``peers.peer_waves``), or in order of the moments at which they mix, which keeps fewer
messages alive. In both orders, an evaluation comes after all events that it sees and before all others of its run. The
waves of several runs are executed side by side: the runs share lanes and batches, but no slots.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import allocate, waves
from fedjax_async.engine.batches import Cutting, Lanes, deal
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.peers.statistics import readers
from fedjax_async.peers.waves import first_cuts, peer_slots, peer_waves, previous_events
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

    schedules: list[Any]  # Schedule, PeerSchedule, or in an adaptive run ExtensionWork
    run: np.ndarray  # int32[E]  whose job is at a position
    # int64[E]  index into the arrivals of all runs, listed one run after the other; of an extension, the run's position
    source: np.ndarray
    positions: list[np.ndarray]  # per run: positions of its arrivals, int64[E_r]
    waves: np.ndarray  # int64[V + 1], positions
    dealt: Lanes
    slots: Any  # what jobs read: MergedSlots, InboxSlots, or GrowingSlots
    batching: str  # one of BATCHINGS
    widths: tuple[int, ...]
    capacity: int  # rows of a lane's buffers
    useful_steps: int
    executed_steps: int

    @property
    def whole(self) -> bool:
        """Whether each job ends in the call that begins it."""
        return self.batching == "loop"

    def counters(self) -> dict[str, object]:
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
    hashed = hashlib.sha256(repr((layout.batching, layout.capacity, dealt.turns)).encode())
    for column in decided:
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


# --- runs without a server ----------------------------------------------------------------------------
# How events are ordered: as early as their inboxes allow, or by the moments at which they mix.
ORDERS = ("waves", "moments")


class InboxSlots(NamedTuple):
    """What the events of nodes read, and where they write. E executed events, D entries of their inboxes, F fragments.

    Also the order of the events, and when they are seen by an evaluation.
    """

    orders: list[np.ndarray]  # per run: its events in the order of their execution, int64[E_r]
    stops: list[np.ndarray]  # per run: how many of its events are executed before each evaluation, int64[V]
    bounds: np.ndarray  # int64[E + 1]: the inbox of position p has the entries bounds[p] .. bounds[p+1]-1
    entry: np.ndarray  # int64[D], index into the inbox entries of all plans, listed one plan after the other
    entry_slot: np.ndarray  # int32[D], the slot of the message
    slot: np.ndarray  # int32[E, F], where the messages of a position are written; -1: nobody reads them
    count: int  # type: ignore[assignment]  # of slots; hides tuple.count, which is not needed here


def make_peer_layout(
    schedules: Sequence[PeerSchedule], times: Sequence[np.ndarray], cut: Cutting, *, order: str = "waves"
) -> Layout:
    """Cut plans into batches; lay out rows, slots and widths; the waves of the layout are contiguous runs.

    ``times``: per plan, those of the evaluations, float64[V]. ``order``: one of ``ORDERS``. Raises ``ValueError`` for
    an unknown order or batching.
    """
    check.one_of("order", order, ORDERS)
    each = [_ordered(*given, order) for given in zip(schedules, times, strict=True)]
    orders, sizes = [chosen for chosen, _, _ in each], [len(chosen) for chosen, _, _ in each]
    run = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    together = np.lexsort((np.arange(len(run)), run, np.concatenate([wave for _, wave, _ in each])))
    position = np.empty_like(together)
    position[together] = np.arange(len(together))
    positions = np.split(position, np.cumsum(sizes)[:-1])
    ready = np.concatenate(
        [np.concatenate([[0], own + 1])[ready_at(s, o)] for s, own, o in zip(schedules, positions, orders)]
    )[together]
    first = _first([len(s.client) for s in schedules])
    source = np.concatenate([begin + chosen for begin, chosen in zip(first, orders)])[together]
    steps = np.concatenate([s.local_steps for s in schedules])[source].astype(np.int64)
    bounds, entries = _inboxes(schedules, source)

    merged = Merged(run[together], source, positions, contiguous_runs(ready))
    layout = laid_out(schedules, merged, ready, steps, cut)
    count, slot = _slots(schedules, orders, positions, layout.dealt.bounds)
    senders, fragments = (
        np.concatenate(columns)
        for columns in zip(*((begin + s.source, s.fragment) for begin, s in zip(first, schedules)))
    )
    entry_slot, stops = slot[senders[entries], fragments[entries]], [stops for _, _, stops in each]
    inboxes = InboxSlots(orders, stops, bounds, entries, entry_slot, slot[source], count)
    return layout._replace(slots=inboxes)


def _ordered(schedule: PeerSchedule, times: np.ndarray, order: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The executed events of a plan in order, the wave of each, and how many come before each evaluation."""
    cut = first_cuts(schedule, times)
    waves = peer_waves(schedule, times) if order == "waves" else cut
    chosen = np.lexsort((np.arange(len(waves)), waves))
    chosen = chosen[: np.count_nonzero(cut < len(times))]
    return chosen, waves[chosen], np.searchsorted(np.sort(cut[chosen]), np.arange(len(times)), side="right")


def _first(sizes: Sequence[int]) -> np.ndarray:
    """Where each of several lists begins, if they are joined."""
    return np.cumsum([0, *sizes])[:-1]


def ready_at(schedule: PeerSchedule, order: np.ndarray) -> np.ndarray:
    """How many positions must be written before the event at each position may be trained; int64[E].

    An event needs its node's previous event and the events whose messages it mixes. Raises ``ValueError`` for an order
    in which one of them comes later.
    """
    position = np.full(len(schedule.client) + 1, len(schedule.client))
    position[order] = np.arange(len(order))
    position[-1] = -1  # the first event of a node has no previous one
    ready = position[previous_events(schedule.client)] + 1
    np.maximum.at(ready, readers(schedule), position[schedule.source] + 1)
    ready = ready[order]
    late = np.flatnonzero(ready > np.arange(len(order)))
    if len(late):
        event = int(order[late[0]])
        raise ValueError(f"schedule: event {event} needs a message, or an event of its node, that comes later")
    return ready


def contiguous_runs(ready: np.ndarray) -> np.ndarray:
    """Cut the positions into the fewest runs whose positions are all ready when their run begins; bounds, int64."""
    bounds = [0]
    for position, needed in enumerate(ready.tolist()):
        if needed > bounds[-1]:
            bounds.append(position)
    return np.array([*bounds, len(ready)] if len(ready) else bounds, np.int64)


def _inboxes(schedules: Sequence[PeerSchedule], source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inboxes in order of positions: their bounds, int64[E + 1], and the entries of all plans, int64[D]."""
    sizes = np.concatenate([np.diff(s.inbox_bounds) for s in schedules])
    begins, sizes = (np.cumsum(sizes) - sizes)[source], sizes[source]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    return bounds, np.repeat(begins, sizes) + within


def _slots(
    schedules: Sequence[PeerSchedule],
    orders: Sequence[np.ndarray],
    positions: Sequence[np.ndarray],
    bounds: np.ndarray,
) -> tuple[int, np.ndarray]:
    """How many slots there are, and the slot of each message of all plans; int32[all events, F].

    A message keeps its slot until the turn in which the last event that mixes it is written, because a run that resumes
    before that turn may train that event again.
    """
    total, slots, count = int(bounds[-1]), [], 0
    begins = np.repeat(bounds[:-1], np.diff(bounds))  # of the turn of each position
    for schedule, order, position in zip(schedules, orders, positions):
        written = np.full(len(schedule.client), total + 1)
        written[order] = position + 1
        read = np.full(len(schedule.client), -1)
        read[order] = begins[position]
        own, slot = peer_slots(schedule, written, read)
        slots.append(np.where(slot < 0, slot, slot + np.int32(count)))
        count += own
    return count, np.concatenate(slots)
