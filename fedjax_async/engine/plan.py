"""From schedules to device work (host, NumPy): runs merged, waves cut into batches, their widths, rows and slots.

The runs of a stack advance wave by wave, side by side. A batch of ``n`` jobs runs at the next width of a short list.
Its jobs take unequal numbers of local steps, so it narrows as jobs finish. Both are known from the schedule alone,
hence the best list of widths is computed, not guessed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.clock import allocate, waves
from fedjax_async.types import Schedule


class Merged(NamedTuple):
    """All arrivals of R runs in one order. A *position* counts arrivals of any run.

    Each run's own arrivals keep their order; nothing of one run depends on another, so any such
    order gives every run its own result.
    """

    run: np.ndarray  # int32[E]
    source: np.ndarray  # int64[E]  index into the runs' arrivals, one run after the other
    place: list[np.ndarray]  # per run: the position of each of its arrivals, int64[E_r]
    waves: np.ndarray  # int64[V + 1], positions: wave v holds the v-th wave of every run


class MergedSlots(NamedTuple):
    """:class:`~fedjax_async.clock.Slots` of all runs together; ``start_slot`` is one entry a position."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    start_slot: np.ndarray  # int32[E]
    write_bounds: np.ndarray  # int64[E + 2]
    write_slot: np.ndarray  # int32[messages]
    write_client: np.ndarray  # int32[messages]
    write_run: np.ndarray  # int32[messages]
    write_job: np.ndarray  # int64[messages], of its run


def merge(schedules: Sequence[Schedule], by_round: bool) -> Merged:
    """Order the arrivals by wave, then by run, or (``by_round``) by rank within the run's wave."""
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
    source = np.lexsort((run, ranks, waves_of) if by_round else (ranks, run, waves_of))
    inverse = np.empty_like(source)
    inverse[source] = np.arange(len(source))
    place = [inverse[a : a + n] for a, n in zip(first, sizes)]
    widths = np.bincount(waves_of) if len(waves_of) else np.zeros(0, np.int64)
    return Merged(run[source], source, place, np.concatenate([[0], np.cumsum(widths)]).astype(np.int64))


def round_bounds(run: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Cut positions into rounds, within which no run occurs twice and no boundary lies; int64[rounds + 1].

    ``run`` must be ordered by round within each stretch between ``bounds``.
    """
    begins = np.zeros(len(run) + 1, np.bool_)
    begins[1:-1] = run[1:] <= run[:-1]
    begins[bounds] = True
    return np.flatnonzero(begins).astype(np.int64)


def merge_slots(schedules: Sequence[Schedule], merged: Merged, bounds: np.ndarray, personal: bool) -> MergedSlots:
    """Slots of every run, each run's its own, for the batches ``bounds`` (positions)."""
    base, total = 0, len(merged.run)
    start = np.zeros(total, np.int32)
    slot, client, run, job, position = [], [], [], [], []
    for r, (s, place) in enumerate(zip(schedules, merged.place)):
        batch = np.searchsorted(bounds, place, side="right")
        own = np.flatnonzero(np.diff(batch, prepend=-1))
        slots = allocate(s, np.append(own, len(place)) if len(place) else np.zeros(1, np.int64), personal=personal)
        start[place] = base + slots.start_slot[s.job]
        slot.append(base + slots.write_slot)
        client.append(slots.write_client)
        job.append(slots.write_job)
        run.append(np.full(len(slots.write_slot), r, np.int32))
        after = np.searchsorted(slots.write_bounds, np.arange(len(slots.write_slot)), side="right") - 1
        position.append(np.concatenate([[0], place + 1])[after])
        base += slots.count
    due = np.concatenate(position)
    order = np.argsort(due, kind="stable")
    return MergedSlots(
        count=base,
        start_slot=start,
        write_bounds=np.searchsorted(due[order], np.arange(total + 2)),
        write_slot=np.concatenate(slot)[order].astype(np.int32),
        write_client=np.concatenate(client)[order].astype(np.int32),
        write_run=np.concatenate(run)[order],
        write_job=np.concatenate(job)[order],
    )


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
