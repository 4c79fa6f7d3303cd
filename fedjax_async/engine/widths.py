"""Which padded batch widths a run should compile (host, NumPy).

A wave of ``n`` jobs runs at the next width of a short list. Jobs of a wave take unequal numbers of
local steps, so the batch narrows as jobs finish. Both are known from the schedule alone, hence the
best list can be computed instead of guessed.
"""

from __future__ import annotations

import numpy as np

from fedjax_async import check


def ladder(top: int) -> list[int]:
    """Candidate widths up to ``top``: 1, 2, 3, 4, 6, 8, 12, ... and ``top`` itself.

    >>> ladder(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    check.whole("max_width", top)
    steps = {1, 2, 3} | {base << k for base in (2, 3) for k in range(top.bit_length())}
    return sorted({w for w in steps if w < top} | {top})


def active_histogram(order_steps: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many local-step ticks run with exactly ``a`` active jobs; int64[max width + 1].

    ``order_steps``: local steps of the arrivals, sorted from long to short within each wave, int[E];
    ``bounds``: wave boundaries, int[V + 1].
    """
    counts = np.diff(bounds)
    following = np.append(order_steps[1:], 0).astype(np.int64)
    following[bounds[1:] - 1] = 0
    rank = np.arange(len(order_steps)) - np.repeat(bounds[:-1], counts) + 1
    ticks = order_steps.astype(np.int64) - following
    return np.bincount(rank, weights=ticks, minlength=int(counts.max(initial=0)) + 1).astype(np.int64)


def choose_widths(
    histogram: np.ndarray, limit: int, *, most: int = 6, overhead: float = 0.35, compiling: float = 500.0
) -> tuple[int, ...]:
    """At most ``most`` widths from ``ladder(limit)`` that minimise the cost of the histogram's ticks.

    In units of one job's local step: a tick with ``a`` active jobs costs ``overhead + w``, where
    ``w >= a`` is the next chosen width, and each width costs ``compiling`` once. Dynamic programme
    over the ladder; a width that holds the widest tick is always chosen. ``limit`` is at least that.
    """
    check.whole("most", most)
    used = np.flatnonzero(histogram)
    if len(used) == 0:
        return (1,)
    steps = ladder(limit)
    candidates = np.array([w for w, below in zip(steps, [0, *steps]) if below < used[-1]])
    counts = np.cumsum(histogram)
    ticks = np.concatenate([[0], counts[np.minimum(candidates, len(counts) - 1)]])  # at most so many active
    cost = np.full((most + 1, len(candidates) + 1), np.inf)
    cost[:, 0] = 0.0
    cut = np.zeros((most + 1, len(candidates) + 1), np.int64)
    for m in range(1, most + 1):
        for i in range(1, len(candidates) + 1):
            options = cost[m - 1, :i] + (ticks[i] - ticks[:i]) * (overhead + candidates[i - 1]) + compiling
            cut[m, i] = int(np.argmin(options))
            cost[m, i] = options[cut[m, i]]
    widths, m, i = [], most, len(candidates)
    while i > 0:
        widths.append(int(candidates[i - 1]))
        i, m = int(cut[m, i]), m - 1
    return tuple(sorted(widths))


def useful_share(histogram: np.ndarray, widths: tuple[int, ...]) -> float:
    """Useful local steps over executed ones if every tick runs at the next of ``widths``."""
    histogram = np.trim_zeros(histogram, "b")
    active = np.arange(len(histogram))
    padded = np.asarray(widths)[np.searchsorted(widths, active)]
    executed = int((histogram * padded)[1:].sum())
    return int((histogram * active).sum()) / executed if executed else 1.0
