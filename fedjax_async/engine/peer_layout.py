"""From the plans of decentralised runs to work for the device (host, NumPy): order, batches, rows and slots.

A *position* is the number of an executed event in order of execution. Events are executed wave by wave
(``peers.peer_waves``), or in order of the moments at which they mix, which keeps fewer messages alive. In both orders,
an evaluation comes after all events that it sees and before all others of its run. The waves of several runs are
executed side by side: the runs share lanes and batches, but no slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.engine.batches import Cutting
from fedjax_async.engine.layout import Layout, Merged, laid_out
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.peers.statistics import readers
from fedjax_async.peers.waves import first_cuts, peer_slots, peer_waves, previous_events

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
