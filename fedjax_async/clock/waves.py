"""Waves: the fewest batches that train all jobs of a schedule exactly as one at a time would.

The job of arrival ``e`` may be trained at any moment after its start model was written (after
``dispatched_after[job[e]]`` arrivals) and before its upload is applied (before arrival ``e``), that is at
any position of the interval ``[dispatched_after[job[e]], e]``. Training happens at the start of a wave,
so the starts must stab all intervals. Cutting the arrivals greedily into maximal runs whose start models
all predate the run does that with the fewest points: the classic stabbing problem, solved from the left.
By duality the number of waves is that of the longest chain of jobs each of which needs the one before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_async.clock import inputs
from fedjax_async.clock.outcomes import DROPPED, with_derived_columns
from fedjax_async.types import Schedule


class WaveStatistics(NamedTuple):
    """How well a schedule batches. ``share`` is the mean width over the mean number of jobs in flight."""

    waves: int
    longest_chain: int
    mean_width: float
    max_width: int
    mean_in_flight: float
    share: float


def waves(schedule: Schedule, max_width: int | None = None) -> np.ndarray:
    """Bounds of the waves: wave v trains the jobs of arrivals ``bounds[v] <= e < bounds[v + 1]``; int64[V + 1].

    Every job of a wave was dispatched at ``bounds[v]`` arrivals or earlier. Without ``max_width`` the
    number of waves V is the smallest possible; with it, a wave that would be wider is cut.
    """
    inputs.optional_whole("max_width", max_width)
    written = schedule.dispatched_after[schedule.job].tolist()
    widest = len(written) + 1 if max_width is None else int(max_width)
    bounds, start, full = [0], 0, widest
    for e, position in enumerate(written):
        if position > start or e == full:
            bounds.append(e)
            start, full = e, e + widest
    if written:
        bounds.append(len(written))
    return np.array(bounds, np.int64)


def longest_chain(schedule: Schedule) -> int:
    """The most arrivals of which each was dispatched only after the one before it had been applied.

    No exact batching has fewer waves, for two jobs of a chain can never train together. Dynamic
    programming over the arrivals: ``length[e] = 1 + max(length[:dispatched_after[job[e]]])``.
    """
    best = [0]  # best[p]: the longest chain among the first p arrivals
    longest = 0
    for position in schedule.dispatched_after[schedule.job].tolist():
        longest = max(longest, 1 + best[position])
        best.append(longest)
    return longest


def wave_statistics(schedule: Schedule, bounds: np.ndarray | None = None) -> WaveStatistics:
    """Widths of the waves (``bounds``, by default the widest possible) against the jobs in flight.

    Jobs in flight are counted at each application, just before anything is applied at that moment;
    jobs that are called off, lost or dropped are left out.
    """
    schedule = with_derived_columns(schedule)
    bounds = waves(schedule) if bounds is None else bounds
    widths = np.diff(bounds)
    arrivals = len(schedule.job)
    kept = schedule.dispatch_time[np.isfinite(schedule.upload_time) & ~np.isin(schedule.outcome, DROPPED)]
    in_flight = np.searchsorted(kept, schedule.time) - np.searchsorted(schedule.time, schedule.time)
    mean_width = arrivals / max(len(widths), 1)
    mean_in_flight = float(in_flight.mean()) if arrivals else 0.0
    return WaveStatistics(
        waves=len(widths),
        longest_chain=longest_chain(schedule),
        mean_width=mean_width,
        max_width=int(widths.max(initial=0)),
        mean_in_flight=mean_in_flight,
        share=mean_width / mean_in_flight if arrivals else 0.0,
    )
