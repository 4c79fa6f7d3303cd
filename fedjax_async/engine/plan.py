"""From schedules to device work: waves, rows, slots and the width of every stretch (host, NumPy)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.engine.merge import MergedSlots, merge, merge_slots, round_bounds
from fedjax_async.engine.widths import active_histogram, choose_widths, ladder, useful_share
from fedjax_async.types import Schedule

# How a compiled call trains the jobs of its batch: all at once, or one after the other.
BATCHINGS = ("vmap", "loop")

# Fewer useful local steps per executed one than this, and the run compiles more widths.
LEAST_USEFUL = 0.8


class Segment(NamedTuple):
    """One compiled call: local steps ``first .. last-1`` of a wave's leading jobs at one width."""

    width: int
    first: int
    last: int


class Plan(NamedTuple):
    """What the device will do for a stack of runs that advance side by side.

    *Positions* number the arrivals of all runs in one order. A *wave* is all jobs that may be trained
    together; it is cut into *batches*, consecutive positions that one compiled call trains: batch ``b``
    holds the positions ``bounds[b] .. bounds[b+1]-1``. Batches of one group belong to the same wave and
    may run at the same time, one a lane.
    """

    schedules: list[Schedule]
    run: np.ndarray  # int32[E]  which run arrives at a position
    source: np.ndarray  # int64[E]  which of all runs' arrivals, one run after the other
    place: list[np.ndarray]  # per run: positions of its arrivals, int64[E_r]
    waves: np.ndarray  # int64[V + 1], positions
    bounds: np.ndarray  # int64[b + 1], positions
    groups: list[range]  # of batches
    rounds: np.ndarray  # int64[rounds + 1], positions: arrivals of different runs
    slots: MergedSlots
    batching: str  # a key of BATCHINGS
    widths: tuple[int, ...]
    capacity: int  # rows of a batch's buffers
    train_order: np.ndarray  # int32[E]  positions, longest job first within each batch
    row: np.ndarray  # int32[E]  buffer row of each position
    segments: list[list[Segment]]  # one list a batch
    useful_steps: int
    executed_steps: int


def digest(plan: Plan) -> str:
    """A fingerprint of all that decides in which order, where and beside whom jobs are trained."""
    columns = (plan.run, plan.source, plan.bounds, plan.train_order, plan.row, plan.slots.start_slot)
    hashed = hashlib.sha256(repr((plan.batching, plan.capacity, plan.groups, plan.segments)).encode())
    for column in columns:
        hashed.update(np.asarray(column, np.int64).tobytes())
    return hashed.hexdigest()[:16]


def cut_wave(steps: np.ndarray, max_width: int, lanes: int) -> np.ndarray:
    """Cut one wave into batches of at most ``max_width`` jobs, the work spread over the lanes.

    ``steps``: local steps of the wave's jobs in order of arrival, int[W]. Returns the boundaries,
    int[batches + 1]. A wave that fits into one round of lanes is cut by local steps, a longer one by
    number of jobs.
    """
    jobs = len(steps)
    fewest = -(-jobs // max_width)
    batches = min(jobs, -(-fewest // lanes) * lanes)
    even = np.round(np.linspace(0, jobs, batches + 1)).astype(np.int64)
    if batches > lanes:
        return even
    done = np.concatenate([[0], np.cumsum(steps, dtype=np.int64)])
    share = np.searchsorted(done, np.linspace(0, done[-1], batches + 1)[1:-1] - 0.5 * steps.mean())
    cuts = np.concatenate([[0], share, [jobs]])
    fits = (np.diff(cuts) > 0).all() and (np.diff(cuts) <= max_width).all()
    return cuts if fits else even


def _segments(steps: np.ndarray, widths: tuple[int, ...]) -> list[Segment]:
    """Stretches of one wave; ``steps`` is sorted from long to short, int[W]."""
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


def _widths(
    sorted_steps: np.ndarray, bounds: np.ndarray, max_width: int, devices: int, costs: dict[str, Any]
) -> tuple[int, ...]:
    """The widths to compile; a short run saves steps rather than compilations."""
    active = active_histogram(sorted_steps, bounds)
    histogram = np.bincount(-(-np.arange(len(active)) // devices), weights=active).astype(np.int64)
    limit = -(-max_width // devices)
    widths = choose_widths(histogram, limit, **costs)
    if useful_share(histogram, widths) < LEAST_USEFUL:
        widths = choose_widths(histogram, limit, **(costs | {"compiling": 0.0}))
    return tuple(devices * width for width in widths)


def make_plan(
    schedules: Sequence[Schedule],
    *,
    max_width: int,
    lanes: int = 1,
    devices: int = 1,
    batching: str = "vmap",
    personal: bool = False,
    **costs: Any,
) -> Plan:
    """Cut schedules into waves and batches of at most ``max_width`` jobs; lay out rows, slots and widths.

    ``lanes``: batches that may run at the same time. ``devices`` share the jobs of a batch, the i-th
    longest going to device ``i % devices``; widths are then multiples of it. ``batching``: a looped batch needs neither
    padding nor narrowing, so it is one call of one program. ``personal``: messages differ from client to
    client, so each job needs a slot of its own. ``costs``: see :func:`choose_widths`.
    """
    check.one_of("batching", batching, BATCHINGS)
    merged = merge(schedules, by_round=batching == "vmap")
    steps = np.concatenate([s.local_steps[s.job] for s in schedules])[merged.source]
    bounds, groups, first = [np.zeros(1, np.int64)], [], 0
    for low, high in itertools.pairwise(merged.waves.tolist()):
        cuts = low + cut_wave(steps[low:high], max_width, lanes)[1:]
        after = first + len(cuts)
        groups += [range(b, min(b + lanes, after)) for b in range(first, after, lanes)]
        bounds.append(cuts)
        first = after
    cut = np.concatenate(bounds)
    widest = max(min(max_width, sum(s.num_clients for s in schedules)), int(np.diff(cut).max(initial=1)))
    # a capacity that does not depend on the schedule's details lets runs share compiled programs
    capacity = devices * next(w for w in ladder(-(-max_width // devices)) if w * devices >= widest)
    order, row = _rows(steps, cut, capacity, devices)
    if batching == "loop":
        widths: tuple[int, ...] = (capacity,)
        segments = [[Segment(capacity, 0, int(steps[order[low]]))] for low in cut[:-1]]
    else:
        widths = _widths(steps[order], cut, max_width, devices, costs)
        segments = [_segments(steps[order[a:b]], widths) for a, b in itertools.pairwise(cut)]
    padded = sum(s.width * (s.last - s.first) for stretch in segments for s in stretch)
    return Plan(
        schedules=list(schedules),
        run=merged.run,
        source=merged.source,
        place=merged.place,
        waves=merged.waves,
        bounds=cut,
        groups=groups,
        rounds=round_bounds(merged.run, cut),
        slots=merge_slots(schedules, merged, cut, personal),
        batching=batching,
        widths=widths,
        capacity=capacity,
        train_order=order,
        row=row,
        segments=segments,
        useful_steps=int(steps.sum()),
        executed_steps=padded if batching == "vmap" else int(steps.sum()),
    )


def _rows(steps: np.ndarray, bounds: np.ndarray, capacity: int, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions from long job to short within each batch, and the buffer row that this gives each position.

    Each device holds ``capacity / devices`` consecutive rows.
    """
    batch = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    order = np.lexsort((-steps, batch)).astype(np.int32)
    rank = np.arange(len(order)) - bounds[batch]
    row = np.empty_like(order)
    row[order] = rank % devices * (capacity // devices) + rank // devices
    return order, row
