"""From the plan of a decentralised run to work for the device (host, NumPy): order, batches, rows and slots.

A *position* is the number of an executed event in order of execution. Events are executed wave by wave
(``peers.peer_waves``), or in order of the moments at which they mix, which keeps fewer messages alive. In both orders,
an evaluation comes after all events that it sees and before all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.engine.batches import BATCHINGS, Lanes, deal
from fedjax_async.engine.layout import digest_of
from fedjax_async.peers.schedule import PeerSchedule
from fedjax_async.peers.waves import first_cuts, peer_slots, peer_waves, previous_events

# How events are ordered: as early as their inboxes allow, or by the moments at which they mix.
ORDERS = ("waves", "moments")


class PeerLayout(NamedTuple):
    """How the events of a plan are trained. E executed events, D entries of their inboxes, F fragments."""

    schedule: PeerSchedule
    order: np.ndarray  # int64[E], the event at each position
    stops: np.ndarray  # int64[V], positions before each evaluation
    waves: int  # the fewest batches that could train all events, if lanes were wide enough
    dealt: Lanes
    inbox_bounds: np.ndarray  # int64[E + 1]: the inbox of position p is inbox_bounds[p] .. inbox_bounds[p+1]-1
    inbox: np.ndarray  # int64[D], entries of the plan's inboxes
    inbox_slot: np.ndarray  # int32[D], the slot of the message
    slot: np.ndarray  # int32[E, F], where the messages of a position are written; -1: nobody reads them
    slot_count: int
    batching: str  # one of BATCHINGS
    widths: tuple[int, ...]
    capacity: int  # rows of a lane's buffers
    useful_steps: int
    executed_steps: int


def peer_digest(layout: PeerLayout) -> str:
    """A fingerprint of the order, the lanes and the batches in which events are trained."""
    dealt = layout.dealt
    columns = (layout.order, dealt.bounds, dealt.train_order, dealt.lane, dealt.row, layout.slot)
    return digest_of((layout.batching, layout.capacity, dealt.turns), *columns)


def make_peer_layout(
    schedule: PeerSchedule,
    times: np.ndarray,
    *,
    max_width: int,
    lanes: int = 1,
    devices: int = 1,
    batching: str = "vmap",
    order: str = "waves",
    fill: bool = True,
    costs: Mapping[str, float] = MappingProxyType({}),
) -> PeerLayout:
    """Cut a plan into batches of at most ``max_width`` events; lay out rows, slots and widths.

    ``times``: of the evaluations, float64[V]. ``order``: one of ``ORDERS``. The other options are those of
    :func:`~fedjax_async.engine.make_layout`.
    """
    check.one_of("batching", batching, BATCHINGS)
    check.one_of("order", order, ORDERS)
    cut = first_cuts(schedule, times)
    waves = peer_waves(schedule, times) if order == "waves" else cut
    chosen = np.lexsort((np.arange(len(waves)), waves))
    chosen = chosen[: np.count_nonzero(cut < len(times))]
    ready = ready_at(schedule, chosen)
    steps = schedule.local_steps[chosen].astype(np.int64)
    runs = contiguous_runs(ready)
    dealt, widths, capacity, executed = deal(
        ready, runs, steps, most=schedule.num_clients, max_width=max_width, lanes=lanes, devices=devices,
        batching=batching, fill=fill, costs=costs,
    )  # fmt: skip
    bounds, entries = _inboxes(schedule, chosen)
    slots, slot = _slots(schedule, chosen, dealt.bounds)
    return PeerLayout(
        schedule=schedule,
        order=chosen,
        stops=np.searchsorted(np.sort(cut[chosen]), np.arange(len(times)), side="right"),
        waves=len(runs) - 1,
        dealt=dealt,
        inbox_bounds=bounds,
        inbox=entries,
        inbox_slot=slot[schedule.source[entries], schedule.fragment[entries]],
        slot=slot[chosen],
        slot_count=slots,
        batching=batching,
        widths=widths,
        capacity=capacity,
        useful_steps=int(steps.sum()),
        executed_steps=executed,
    )


def _readers(schedule: PeerSchedule) -> np.ndarray:
    """The event that reads each inbox entry; int64[D]."""
    return np.repeat(np.arange(len(schedule.client)), np.diff(schedule.inbox_bounds))


def ready_at(schedule: PeerSchedule, order: np.ndarray) -> np.ndarray:
    """How many positions must be written before the event at each position may be trained; int64[E].

    An event needs its node's previous event and the events whose messages it mixes. Raises ``ValueError`` for an order
    in which one of them comes later.
    """
    position = np.full(len(schedule.client) + 1, len(schedule.client))
    position[order] = np.arange(len(order))
    position[-1] = -1  # the first event of a node has no previous one
    ready = position[previous_events(schedule.client)] + 1
    np.maximum.at(ready, _readers(schedule), position[schedule.source] + 1)
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


def _inboxes(schedule: PeerSchedule, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inboxes in order of positions: their bounds, int64[E + 1], and the entries of the plan, int64[D]."""
    sizes = np.diff(schedule.inbox_bounds)[order]
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    within = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    return bounds, np.repeat(schedule.inbox_bounds[:-1][order], sizes) + within


def _slots(schedule: PeerSchedule, order: np.ndarray, bounds: np.ndarray) -> tuple[int, np.ndarray]:
    """How many slots there are, and the slot of each message of the plan; int32[E, F].

    A message keeps its slot until the turn in which the last event that mixes it is written, because a run that resumes
    before that turn may train that event again.
    """
    written = np.full(len(schedule.client), len(order) + 1)
    written[order] = np.arange(len(order)) + 1
    read = np.full(len(schedule.client), -1)
    read[order] = np.repeat(bounds[:-1], np.diff(bounds))
    return peer_slots(schedule, written, read)


def corrupt_entries(schedule: PeerSchedule) -> np.ndarray:
    """Which inbox entries arrive as NaN: those whose push to the reading node is corrupt; bool[D]."""
    if not schedule.corrupt.any():
        return np.zeros(len(schedule.source), np.bool_)
    shape = (len(schedule.client), schedule.fragments, schedule.num_clients)
    pushed = np.ravel_multi_index((schedule.push_event, schedule.push_fragment, schedule.receiver), shape)
    read = np.ravel_multi_index((schedule.source, schedule.fragment, schedule.client[_readers(schedule)]), shape)
    return np.isin(read, pushed[schedule.corrupt])
