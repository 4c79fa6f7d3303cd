"""Which widths a run compiles: how many jobs its vmapped batches train side by side (host, NumPy).

A wider batch than there are jobs trains padding, and each width is a program that takes seconds to compile. On a CPU
padding costs most, so up to six widths are chosen. On an accelerator a step of a small model takes about as long for
one job as for a hundred, and one or two widths will do.
"""

from __future__ import annotations

import itertools

import numpy as np

from fedjax_async.base import check

# A run compiles more widths if the share of useful local steps among the executed ones would be smaller than this.
LEAST_USEFUL = 0.8


def ladder(top: int) -> list[int]:
    """Candidate widths up to ``top``: 1, 2, 3, 4, 6, 8, 12, ... and ``top`` itself.

    >>> ladder(10)
    [1, 2, 3, 4, 6, 8, 10]
    """
    check.whole("max_width", top)
    steps = {1, 2, 3} | {base << k for base in (2, 3) for k in range(top.bit_length())}
    return sorted({w for w in steps if w < top} | {top})


def active_histogram(order_steps: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """For how many local steps exactly ``a`` jobs of a batch are active; int64[max width + 1].

    ``order_steps``: local steps of the jobs, sorted from long to short within each batch, int[E];
    ``bounds``: bounds of the batches, int[batches + 1].
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
    """At most ``most`` widths from ``ladder(limit)`` that minimise the cost of all local steps in the histogram.

    ``histogram``: see :func:`active_histogram`. In units of one job's local step: a step of a batch with ``a`` active
    jobs costs ``overhead + w``, where ``w >= a`` is the next chosen width, and each width costs ``compiling`` once.
    Dynamic programming over the ladder. ``limit`` must be at least the largest number of active jobs; the widest chosen
    width is too.
    """
    check.whole("most", most)
    used = np.flatnonzero(histogram)
    if len(used) == 0:
        return (1,)
    steps = ladder(limit)
    candidates = np.array([w for w, below in zip(steps, [0, *steps]) if below < used[-1]])
    counts = np.cumsum(histogram)
    # ticks[i]: local steps with at most candidates[i - 1] active jobs
    ticks = np.concatenate([[0], counts[np.minimum(candidates, len(counts) - 1)]])
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
    """The share of useful local steps among the executed ones, if each step runs at the next of ``widths``."""
    histogram = np.trim_zeros(histogram, "b")
    active = np.arange(len(histogram))
    padded = np.asarray(widths)[np.searchsorted(widths, active)]
    executed = int((histogram * padded)[1:].sum())
    return int((histogram * active).sum()) / executed if executed else 1.0


def cut_wave(steps: np.ndarray, max_width: int, lanes: int) -> np.ndarray:
    """Cut one wave into batches of at most ``max_width`` jobs, with about equal work for each lane.

    ``steps``: local steps of the wave's jobs in order of arrival, int[W]. Returns the bounds of the batches,
    int[batches + 1]. A wave with at most one batch a lane is cut into equal numbers of local steps if the batches then
    fit, any other wave into equal numbers of jobs.
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


def widths_of(sorted_steps: np.ndarray, bounds: np.ndarray, max_width: int, devices: int) -> tuple[int, ...]:
    """The widths to compile, multiples of ``devices``; ``sorted_steps``, ``bounds``: see :func:`active_histogram`.

    The cost of compilation is ignored where it would make the share of useful steps too small, as in a short run.
    """
    active = active_histogram(sorted_steps, bounds)
    histogram = np.bincount(-(-np.arange(len(active)) // devices), weights=active).astype(np.int64)
    limit = -(-max_width // devices)
    widths = choose_widths(histogram, limit)
    if useful_share(histogram, widths) < LEAST_USEFUL:
        widths = choose_widths(histogram, limit, compiling=0.0)
    return tuple(devices * width for width in widths)


def fewest_widths(
    waves: np.ndarray, steps: np.ndarray, max_width: int, devices: int, *, call: float, **costs: float
) -> tuple[int, tuple[int, ...]]:
    """How long batches may be, and one or two widths for them, so that the whole run costs least.

    ``call``: what each batch costs once more, in the units of ``costs``, which are those of :func:`choose_widths`. So
    a long wave is cut into several batches of one width, where a step costs about as much as its jobs.
    """
    longest = int(np.diff(waves).max(initial=1))
    widths = [devices * width for width in ladder(-(-max_width // devices))]
    enough = next((width for width in widths if width >= longest), widths[-1])
    least = min(devices * costs["overhead"] / 4, enough)  # a shorter batch is mostly overhead
    found = []
    for limit in [width for width in widths if least <= width <= enough]:
        cuts = [low + cut_wave(steps[low:high], limit, 1)[1:] for low, high in itertools.pairwise(waves.tolist())]
        cut = np.concatenate([[0], *cuts])
        order = np.lexsort((-steps, np.repeat(np.arange(len(cut) - 1), np.diff(cut))))
        active = active_histogram(steps[order], cut)
        histogram = np.bincount(-(-np.arange(len(active)) // devices), weights=active).astype(np.int64)
        chosen = choose_widths(histogram, -(-limit // devices), most=2, **costs)
        ran = np.asarray(chosen)[np.searchsorted(chosen, np.arange(len(histogram)))]
        cost = float((histogram * (costs["overhead"] + ran))[1:].sum()) + costs["compiling"] * len(chosen)
        found.append((cost + call * (len(cut) - 1), limit, tuple(devices * width for width in chosen)))
    return min(found)[1:]
