"""How the jobs of a wave become batches, one a lane, and the compiled calls that train a batch (host, NumPy).

A batch is trained in one of two ways. ``vmap``: its ``n`` jobs run at once, padded to the next of a few compiled
widths, and narrower widths follow as jobs finish. ``loop``: one job after the other, any number of them in one call of
one program. Both follow from the schedule alone, so the best widths can be computed before the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.engine.widths import cut_wave, fewest_widths, ladder, widths_of

# How a compiled call trains the jobs of its batch: all at once, or one after the other.
BATCHINGS = ("vmap", "loop")

# How many jobs a looped lane may hold that were trained before their wave, and how many arrivals ahead it searches.
SPARE = 2
LOOK_AHEAD = 32


class Segment(NamedTuple):
    """One compiled call: local steps ``first .. last-1`` of the longest jobs of a batch, at one width."""

    width: int
    first: int
    last: int


class Batch(NamedTuple):
    """Jobs that one lane trains: ``jobs`` entries of ``Layout.train_order`` from ``first`` on."""

    lane: int
    first: int
    jobs: int
    segments: list[Segment]


class Lanes(NamedTuple):
    """Jobs dealt to lanes, turn by turn."""

    bounds: np.ndarray  # int64[G + 1]: after turn g the server receives positions bounds[g] .. bounds[g+1]-1
    turns: list[list[Batch]]  # at most one batch a lane
    train_order: np.ndarray  # int32[E], positions
    lane: np.ndarray  # int32[E], which lane trains a position
    row: np.ndarray  # int32[E], which row of its lane's buffers a position has

    @property
    def lanes(self) -> int:
        """How many lanes are in use."""
        return max((batch.lane + 1 for turn in self.turns for batch in turn), default=1)

    @property
    def stretches(self) -> np.ndarray:
        """Bounds of the stretches: all uploads of a stretch are in one lane's buffers; int64, positions."""
        edges = np.zeros(len(self.lane) + 1, np.bool_)
        edges[1:-1] = self.lane[1:] != self.lane[:-1]
        edges[self.bounds] = True
        return np.flatnonzero(edges)

    def unreceived(self, turn: int, capacity: int) -> list[Batch]:
        """The jobs that are trained before ``turn`` and received with it or later, each as a batch of one job."""
        begin = self.turns[turn][0].first if turn < len(self.turns) else len(self.train_order)
        index = np.flatnonzero(self.train_order[:begin] >= self.bounds[turn])
        position = self.train_order[index]
        segments = [[Segment(capacity, 0, 1)]] * len(index)
        return [Batch(*one) for one in zip(self.lane[position].tolist(), index.tolist(), [1] * len(index), segments)]

    def executed_steps(self) -> int:
        """Local steps that vmapped batches execute, padding included."""
        return sum(s.width * (s.last - s.first) for turn in self.turns for b in turn for s in b.segments)


def segments_of(steps: np.ndarray, widths: tuple[int, ...]) -> list[Segment]:
    """The segments of one batch; ``steps``: local steps of its jobs, from long to short, int[W]."""
    level = next(i for i, w in enumerate(widths) if w >= len(steps))
    found, tick = [], 0
    while level >= 0:
        narrower = widths[level - 1] if level > 0 else 0
        # at most `narrower` jobs are still active from tick steps[narrower] on
        end = int(steps[narrower]) if narrower < len(steps) else tick
        if end > tick:
            found.append(Segment(widths[level], tick, end))
            tick = end
        level -= 1
    return found


def looped_lanes(
    ready: np.ndarray, steps: np.ndarray, max_width: int, lanes: int, devices: int, capacity: int, fill: bool
) -> Lanes:
    """Deal the jobs of looped batches to lanes, so that the lanes wait for each other as little as possible.

    ``ready``: int[E], how many positions must have been received before the job of a position may be trained;
    ``steps``: int[E], local steps of each position. A turn covers the longest range of positions that are ready at its
    start, up to ``max_width`` jobs a lane. Each lane trains consecutive jobs of it. With ``fill``, a lane that would
    finish before the others also trains jobs of later positions that are ready already. Their rows stay occupied until
    they are received, so a lane holds at most ``capacity - max_width`` of them. Without ``fill``, rows are as in
    :func:`vmapped_lanes`.
    """
    ready_at, work = ready.tolist(), steps.tolist()
    spare = capacity - max_width if fill else 0
    trained, lane_of = bytearray(len(work)), np.zeros(len(work), np.int32)
    bounds, turns, order = [0], [], list[int]()
    early: list[int] = []  # positions that are trained and not yet received
    while (low := bounds[-1]) < len(work):
        todo: list[int] = []
        high = low
        while high < len(work) and ready_at[high] <= low and len(todo) < lanes * max_width:
            if not trained[high]:
                todo.append(high)
            high += 1
        if not todo:  # all of them are trained already: they are received with the previous turn
            bounds[-1] = high
            continue
        shares = _shares(todo, work, max_width, lanes)
        early = [position for position in early if position >= low]
        if spare:
            room = [spare - sum(lane_of[position] == lane for position in early) for lane in range(lanes)]
            early += _fill(shares, room, trained, ready_at, work, low, high)
        turn = []
        for lane, share in enumerate(shares):
            if not spare:
                share.sort(key=lambda position: -work[position])
            for position in share:
                trained[position], lane_of[position] = 1, lane
            if share:
                longest = max(work[position] for position in share)
                turn.append(Batch(lane, len(order), len(share), [Segment(capacity, 0, longest)]))
                order += share
        turns.append(turn)
        bounds.append(high)
    dealt = Lanes(np.array(bounds, np.int64), turns, np.array(order, np.int32), lane_of, np.zeros_like(lane_of))
    return dealt._replace(row=_rows_kept(dealt, capacity) if spare else _rows(dealt, capacity, devices))


def _rows(dealt: Lanes, capacity: int, devices: int) -> np.ndarray:
    """Rows of batches that are received as a whole; each device holds ``capacity / devices`` consecutive rows."""
    begins = np.array([batch.first for turn in dealt.turns for batch in turn], np.int64)
    rank = np.arange(len(dealt.train_order))
    rank -= np.repeat(begins, np.diff(begins, append=len(rank)))
    row = np.empty_like(dealt.train_order)
    row[dealt.train_order] = rank % devices * (capacity // devices) + rank // devices
    return row


def _rows_kept(dealt: Lanes, capacity: int) -> np.ndarray:
    """Rows if some jobs of a batch are received with a later turn: a row is free once its job is received."""
    row = np.zeros_like(dealt.train_order)
    free = [list(range(capacity)) for _ in range(1 + int(dealt.lane.max(initial=0)))]
    kept: list[tuple[int, int]] = []  # (position, lane)
    for high, turn in zip(dealt.bounds[1:].tolist(), dealt.turns):
        for batch in turn:
            for position in dealt.train_order[batch.first : batch.first + batch.jobs].tolist():
                row[position] = free[batch.lane].pop()
                kept.append((position, batch.lane))
        for position, lane in kept:
            if position < high:
                free[lane].append(int(row[position]))
        kept = [one for one in kept if one[0] >= high]
    return row


def _shares(todo: list[int], work: list[int], max_width: int, lanes: int) -> list[list[int]]:
    """Consecutive jobs for each lane, with about equal local steps and at most ``max_width`` jobs; may be empty."""
    if lanes == 1:
        return [todo]
    steps = [work[position] for position in todo]
    if min(steps) == max(steps):  # an even cut needs no arrays
        used = min(lanes, len(todo))
        cuts = [len(todo) * lane // used for lane in range(used + 1)]
    else:
        cuts = cut_wave(np.array(steps), max_width, lanes).tolist()
    shares = [todo[a:b] for a, b in itertools.pairwise(cuts)]
    return shares + [[] for _ in range(lanes - len(shares))]


def _fill(
    shares: list[list[int]],
    room: list[int],
    trained: bytearray,
    ready_at: list[int],
    work: list[int],
    low: int,
    high: int,
) -> list[int]:
    """Add jobs of positions from ``high`` on, ready at ``low``, to lanes that would finish before the others.

    ``room``: how many jobs each lane may add. Returns the positions that were added.
    """
    loads = [sum(work[position] for position in share) for share in shares]
    longest, added = max(loads), []
    for position in range(high, min(high + LOOK_AHEAD, len(work))):
        if trained[position] or ready_at[position] > low:
            continue
        lane = min((k for k in range(len(shares)) if room[k] > 0), key=loads.__getitem__, default=None)
        if lane is None or loads[lane] == longest:
            break
        if loads[lane] + work[position] <= longest:
            shares[lane].append(position)
            loads[lane] += work[position]
            room[lane] -= 1
            added.append(position)
    return added


def vmapped_lanes(
    waves: np.ndarray,
    steps: np.ndarray,
    max_width: int,
    lanes: int,
    devices: int,
    capacity: int,
    widths: tuple[int, ...] | None,
) -> tuple[Lanes, tuple[int, ...]]:
    """Cut ``waves`` (int64[V + 1], positions) into batches of at most ``max_width`` jobs; returns their widths, too.

    ``devices`` share the jobs of a batch: the i-th longest job is trained on device ``i % devices``. ``widths``: None,
    to choose them by :func:`widths_of`.
    """
    cuts, first_of_turn = [np.zeros(1, np.int64)], [0]
    for low, high in itertools.pairwise(waves.tolist()):
        inner = low + cut_wave(steps[low:high], max_width, lanes)[1:]
        before = first_of_turn[-1]
        first_of_turn += [*range(before + lanes, before + len(inner), lanes), before + len(inner)]
        cuts.append(inner)
    cut = np.concatenate(cuts)
    batch = np.repeat(np.arange(len(cut) - 1), np.diff(cut))
    order = np.lexsort((-steps, batch)).astype(np.int32)
    if widths is None:
        widths = widths_of(steps[order], cut, max_width, devices)
    begins = np.array(first_of_turn)
    lane = np.arange(len(cut) - 1) - np.repeat(begins[:-1], np.diff(begins))
    batches = [
        Batch(int(lane[b]), low, high - low, segments_of(steps[order[low:high]], widths))
        for b, (low, high) in enumerate(itertools.pairwise(cut.tolist()))
    ]
    turns = [batches[first:after] for first, after in itertools.pairwise(first_of_turn)]
    dealt = Lanes(cut[begins], turns, order, lane[batch].astype(np.int32), np.zeros_like(order))
    return dealt._replace(row=_rows(dealt, capacity, devices)), widths


class Cutting(NamedTuple):
    """How jobs are cut into batches.

    ``max_width``: the most jobs of a batch. ``lanes``: how many batches may be trained at the same time. ``devices``:
    how many devices share the jobs of a batch; widths are multiples of it. ``batching``: one of ``BATCHINGS``.
    ``fill``: see :func:`looped_lanes`. ``costs``: an accelerator's, of :func:`fewest_widths`, or empty.
    """

    max_width: int
    lanes: int = 1
    devices: int = 1
    batching: str = "vmap"
    fill: bool = True
    costs: Mapping[str, float] = MappingProxyType({})


class Dealt(NamedTuple):
    """Jobs dealt to lanes, and the sizes of the programs that train them."""

    lanes: Lanes
    widths: tuple[int, ...]
    capacity: int  # rows of a lane's buffers
    executed_steps: int  # local steps, padding included


def deal(ready: np.ndarray, waves: np.ndarray, steps: np.ndarray, most: int, cut: Cutting) -> Dealt:
    """Deal jobs to lanes. ``ready``: see :func:`looped_lanes`; ``waves``: see :func:`vmapped_lanes`.

    ``most``: how many jobs can be under way at a time. Raises ``ValueError`` for an unknown batching.
    """
    check.one_of("batching", cut.batching, BATCHINGS)
    max_width, lanes, devices, batching, fill, costs = cut
    widths = None
    if batching == "vmap" and costs:
        max_width, widths = fewest_widths(waves, steps, max_width, devices, **costs)
    # a capacity that does not depend on the plan's details lets runs share compiled programs
    widest = min(max_width, most)
    capacity = devices * next(w for w in ladder(-(-max_width // devices)) if w * devices >= widest)
    if batching == "vmap":
        dealt, widths = vmapped_lanes(waves, steps, max_width, lanes, devices, capacity, widths)
        return Dealt(dealt, widths, capacity, dealt.executed_steps())
    fill = fill and lanes > 1 and devices == 1  # rows that are kept would not be those of their job's device
    capacity += min(SPARE, widest) if fill else 0
    dealt = looped_lanes(ready, steps, widest, lanes, devices, capacity, fill)
    return Dealt(dealt, (capacity,), capacity, int(steps.sum()))
