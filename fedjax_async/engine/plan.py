"""From a schedule to device work: waves, rows, slots and the width of every stretch (host, NumPy)."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.clock import Slots, allocate, waves
from fedjax_async.engine.widths import active_histogram, choose_widths, ladder, useful_share
from fedjax_async.types import Schedule


# Fewer useful local steps per executed one than this, and the run compiles more widths.
LEAST_USEFUL = 0.8


class Segment(NamedTuple):
    """One compiled call: local steps ``first .. last-1`` of a wave's leading jobs at one width."""

    width: int
    first: int
    last: int


class Plan(NamedTuple):
    """What the device will do. Wave ``v`` trains the arrivals ``bounds[v] .. bounds[v+1]-1``."""

    schedule: Schedule
    bounds: np.ndarray  # int64[V + 1]
    slots: Slots
    widths: tuple[int, ...]
    capacity: int  # rows of the wave buffers
    train_order: np.ndarray  # int32[E]  arrivals, longest job first within each wave
    row: np.ndarray  # int32[E]  buffer row of each arrival
    segments: list[list[Segment]]  # one list a wave
    useful_steps: int
    executed_steps: int


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


def make_plan(schedule: Schedule, *, max_width: int, personal: bool = False, **costs: Any) -> Plan:
    """Cut the schedule into waves of at most ``max_width`` jobs and lay out rows, slots and widths.

    ``personal``: messages differ from client to client, so each job needs a slot of its own.
    ``costs``: of a batched step and of a compilation, see :func:`choose_widths`.
    """
    bounds = np.asarray(waves(schedule, max_width=max_width))
    steps = schedule.local_steps[schedule.job]
    wave = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    order = np.lexsort((-steps, wave)).astype(np.int32)
    row = np.empty_like(order)
    row[order] = np.arange(len(order)) - bounds[wave]
    sorted_steps = steps[order]
    histogram = active_histogram(sorted_steps, bounds)
    widths = choose_widths(histogram, max_width, **costs)
    if useful_share(histogram, widths) < LEAST_USEFUL:  # a short run: save steps rather than compilations
        widths = choose_widths(histogram, max_width, **(costs | {"compiling": 0.0}))
    # a capacity that does not depend on the schedule's details lets runs share compiled programs
    most = min(max_width, schedule.num_clients)
    capacity = next(w for w in ladder(max_width) if w >= max(most, widths[-1]))
    segments = [_segments(sorted_steps[a:b], widths) for a, b in itertools.pairwise(bounds)]
    return Plan(
        schedule=schedule,
        bounds=bounds,
        slots=allocate(schedule, bounds, personal=personal),
        widths=widths,
        capacity=capacity,
        train_order=order,
        row=row,
        segments=segments,
        useful_steps=int(steps.sum()),
        executed_steps=sum(s.width * (s.last - s.first) for wave_segments in segments for s in wave_segments),
    )
