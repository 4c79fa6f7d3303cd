"""Availability: when clients are online. They join late, leave, or come and go.

A model is ``model(num_clients, seed, part) -> Availability``. Its ``interval(client, time)`` is the half-open
interval ``[start, end)`` that contains ``time`` and in which the client is online. If the client is offline, it is the
next such interval (``inf, inf`` if there is none). ``part`` numbers the models of one name in a spec, so that each has
its own draws.

``leaving`` says what happens to a job if its client goes offline before its upload has reached the server:
``finish`` (the job is finished and uploaded; the client only gets no new one), ``pause`` (it continues when the
client is back) or ``lose`` (it is lost). Models joined with ``+`` each keep their own rule; a client is online when
it is online in all of them.
"""

from __future__ import annotations

import math
import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import chance, csv_tables
from fedjax_async.clock.chance import FAMILIES, UNSPREAD, Distribution

IntervalAt = Callable[[int, float], tuple[float, float]]


class Availability(NamedTuple):
    """One source of absences: when clients are online, and what happens to the job of a client that goes offline.

    ``prepare(clients, time)`` announces that the intervals of these clients will probably be needed soon: drawing
    many at once is cheaper. It changes no interval, and returns whether there was anything to draw.
    """

    interval: IntervalAt
    leaving: str = "finish"
    prepare: Callable[[Iterable[int], float], bool] | None = None


AvailabilityModel = Callable[[int, int, int], Availability]

LEAVING = ("finish", "pause", "lose")
NEVER = (math.inf, math.inf)

# Sources may never be online together: the search for a common moment ends after so many steps.
_MOST_CHANGES = 10_000
_MOST_MISSING = 10**7  # changes of one client; more are taken for a mistake

_CHANGES = 8  # the fewest changes (online, offline) of a client drawn at once
_KEPT = 1 << 17  # clients with changes kept in memory; beyond that they are drawn again when needed


def always() -> AvailabilityModel:
    """Every client is online from the beginning to the end."""
    return lambda num_clients, seed, part: Availability(lambda client, time: (0.0, math.inf))


def _moments(stream: str, share: float, by: float, at: float | None) -> Callable[[int, int], Callable[[int], float]]:
    """``moment(client)``: uniform in (0, by], or ``at``, with probability ``share``; else infinity."""
    check.share("share", share)
    check.real_positive("by", by)
    if at is not None:
        check.real_non_negative("at", at)

    def bound(seed: int, part: int) -> Callable[[int], float]:
        def draw(clients: np.ndarray) -> np.ndarray:
            draws = chance.Draws(seed, stream, part, clients)
            chosen, uniform = draws.random() < share, draws.random()
            return np.where(chosen, by * (1 - uniform) if at is None else float(at), math.inf)

        return chance.once_a_client(draw)

    return bound


def joins(*, share: float = 0.1, by: float = 100.0, at: float | None = None) -> AvailabilityModel:
    """Each client joins late with probability `share`: at a time uniform in (0, `by`] seconds, or all at `at`."""
    moments = _moments("joins", share, by, at)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        moment = moments(seed, part)

        def interval(client: int, time: float) -> tuple[float, float]:
            joined = moment(client)
            return (0.0 if math.isinf(joined) else joined), math.inf

        return Availability(interval)

    return model


def leaves(
    *, share: float = 0.1, by: float = 100.0, at: float | None = None, leaving: str = "lose"
) -> AvailabilityModel:
    """Each client leaves for good with probability `share`: at a time uniform in (0, `by`] seconds, or all at `at`."""
    check.one_of("leaving", leaving, LEAVING)
    moments = _moments("leaves", share, by, at)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        moment = moments(seed, part)

        def interval(client: int, time: float) -> tuple[float, float]:
            left = moment(client)
            return (0.0, left) if time < left else NEVER

        return Availability(interval, leaving)

    return model


def periodic(
    *, on: float = 60.0, off: float = 60.0, phase: float | None = None, leaving: str = "finish"
) -> AvailabilityModel:
    """Clients are online for `on` seconds, then offline for `off`; each at its own random phase, or all at `phase`.

    ``phase``: seconds of the on-off cycle that have passed at time 0.
    """
    check.real_positive("on", on)
    check.real_non_negative("off", off)
    check.one_of("leaving", leaving, LEAVING)
    period = on + off
    if phase is not None:
        check.require(check.is_real(phase) and 0 <= phase < period, "phase", phase, f"at least 0 and below {period}")

    def model(num_clients: int, seed: int, part: int) -> Availability:
        shift = chance.once_a_client(lambda clients: chance.Draws(seed, "periodic", part, clients).random() * period)

        def interval(client: int, time: float) -> tuple[float, float]:
            passed = shift(client) if phase is None else phase
            cycle = math.floor((time + passed) / period)
            start = cycle * period - passed
            if time >= start + on:
                start = (cycle + 1) * period - passed
            return start, start + on

        return Availability((lambda client, time: (0.0, math.inf)) if off == 0 else interval, leaving)

    return model


def sessions(
    *,
    on: float = 60.0,
    off: float = 60.0,
    family: str = "exponential",
    spread: float = 1.0,
    leaving: str = "finish",
) -> AvailabilityModel:
    """Random times online and offline, with means `on` and `off` seconds, from a `family` of durations.

    ``family`` is any of the delay families (``exponential``, ``lognormal``, ...); ``spread`` is the standard deviation
    over the mean, 1 for the exponential. A client begins online with probability ``on / (on + off)``.
    """
    check.real_positive("on", on)
    check.real_positive("off", off)
    check.real_positive("spread", spread)
    check.one_of("leaving", leaving, LEAVING)
    sample = registry.find("family", FAMILIES, family)
    if spread != 1 and (why := UNSPREAD.get(family)) is not None:
        text = f"availability: spread = {spread} of sessions has no effect with family = {family!r}, {why}"
        warnings.warn(text, RunWarning, stacklevel=2)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        return alternation("sessions", on, off, sample, spread, seed, part)._replace(leaving=leaving)

    return model


def alternation(
    stream: str, on: float, off: float, sample: Distribution, spread: float, seed: int, part: int
) -> Availability:
    """Random times online and offline, drawn for each client from ``stream`` when first needed."""
    # By client, the times at which it comes online (even positions) and goes offline (odd ones). All come online
    # at 0; a client that begins offline goes offline at 0 too.
    changes: dict[int, array] = {}
    begin = array("d", [0.0])

    def extend(clients: list[int], time: float) -> None:
        known = [changes.get(client, begin) for client in clients]
        column = np.array(clients)[:, None]
        counts = [len(times) for times in known]
        missing = 2 * (time - min(times[-1] for times in known)) / (on + off)  # expected, of the client furthest behind
        if missing > _MOST_MISSING:
            raise ValueError(
                f"{stream} of {on:.6g} s on, {off:.6g} s off: must be longer, or the run shorter: a client would come "
                f"and go {missing / 2:.2g} times until {time:.6g} s"
            )
        width = max(_CHANGES, min(counts) // 2, int(min(missing, _MOST_CHANGES)))
        positions = np.array(counts)[:, None] + np.arange(width)
        means = np.where(positions % 2, on, off)
        draws = chance.Draws(seed, stream, part, column, positions)
        lengths = np.maximum(sample(draws, means, spread * means), 1e-6 * means)
        offline_first = chance.Draws(seed, stream, part, column, 0).random() >= on / (on + off)
        lengths[offline_first & (positions == 1)] = 0
        lengths[:, 0] += [times[-1] for times in known]
        more, size = np.cumsum(lengths, axis=1).tobytes(), 8 * width
        for k, (client, times) in enumerate(zip(clients, known)):
            changes[client] = times + array("d", more[k * size : (k + 1) * size])

    def prepare(clients: Iterable[int], time: float) -> bool:
        lacking = missing = [client for client in clients if client not in changes or changes[client][-2] <= time]
        if missing and len(changes) > _KEPT:
            changes.clear()
        while missing:
            extend(missing, time)
            missing = [client for client in missing if changes[client][-2] <= time]
        return bool(lacking)

    def interval(client: int, time: float) -> tuple[float, float]:
        known = changes.get(client)
        if known is None or known[-2] <= time:
            prepare((client,), time)
            known = changes[client]
        return interval_at(known, time)

    return Availability(interval, prepare=prepare)


def interval_at(changes: Sequence[float], time: float) -> tuple[float, float]:
    """The online interval that contains ``time``, or the next one.

    ``changes``: ascending times at which it comes online (even positions) and goes offline (odd ones).
    """
    k = bisect_right(changes, time) - 1
    if k < 0 or k % 2:
        k += 1
    return (changes[k], changes[k + 1]) if k + 1 < len(changes) else NEVER


def csv(*, path: str, repeat: float | None = None, leaving: str = "finish") -> AvailabilityModel:
    """Recorded online intervals from a CSV file: columns client or device, start, end (seconds), one interval per line.

    With a ``client`` column every client 0..N-1 needs a line; with a ``device`` column clients draw
    devices without replacement, from all devices again when none is left; the same device in each table that lists
    the same names (of delays and energy too). After its last interval a client stays offline, unless the recording
    repeats every ``repeat`` seconds. Intervals satisfy 0 <= start < end; they may be listed in any order and may
    touch, but not overlap.
    """
    check.one_of("leaving", leaving, LEAVING)
    check.optional(check.real_positive, "repeat", repeat)
    recorded, owners = read_intervals(str(path), repeat)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        if owners is None:
            rows = chance.deck(seed, "devices", len(recorded), num_clients).tolist()
        else:
            rows = csv_tables.rows_of(owners, num_clients, path).tolist()

        def interval(client: int, time: float) -> tuple[float, float]:
            changes = recorded[rows[client]]
            if repeat is None:
                return interval_at(changes, time)
            cycle = math.floor(time / repeat)
            for k in (cycle - 1, cycle, cycle + 1):  # division rounds, so the time may lie in a neighbouring cycle
                start, end = interval_at(changes, time - k * repeat)
                if end == repeat and changes[0] == 0:  # continues in the next cycle
                    end += changes[1] if len(changes) > 2 else math.inf
                if start < math.inf and end + k * repeat > time:
                    return start + k * repeat, end + k * repeat
            return NEVER

        return Availability(interval, leaving)

    return model


def read_intervals(path: str | Path, repeat: float | None = None) -> tuple[list[list[float]], np.ndarray | None]:
    """Read recorded intervals: for each client or device, the times at which it comes online and goes offline, in turn.

    Returns these rows and the client of each row, int64[rows], or ``None`` if clients draw devices. Raises
    ``ValueError`` naming file, line and column for a bad value.
    """
    rows = csv_tables.by_device(csv_tables.read(path, ("client", "device", "start", "end"), required=("start", "end")))
    by_client = "client" in rows[0][1]
    intervals: dict[int | str, list[tuple[float, float, str]]] = {}
    for row in rows:
        line, cells = row
        start, end = csv_tables.number(row, "start"), csv_tables.number(row, "end")
        if not start < end:
            raise ValueError(f"{line}, column 'end': {cells['end']} must be after the start, {cells['start']}")
        if repeat is not None and end > repeat:
            raise ValueError(f"{line}, column 'end': {cells['end']} must be at most repeat = {repeat}")
        owner = csv_tables.client(row) if by_client else csv_tables.label(row, "device")
        intervals.setdefault(owner, []).append((start, end, line))
    changes = [_merge_touching(recorded) for recorded in intervals.values()]
    return changes, np.array(list(intervals), np.int64) if by_client else None


def _merge_touching(intervals: list[tuple[float, float, str]]) -> list[float]:
    """The times of changes in order; intervals that touch become one."""
    changes: list[float] = []
    for start, end, line in sorted(intervals, key=lambda interval: interval[:2]):
        if changes and start < changes[-1]:
            raise ValueError(f"{line}, column 'start': {start} overlaps an interval until {changes[-1]}")
        if changes and start == changes[-1]:
            changes[-1] = end
        else:
            changes += [start, end]
    return changes


def checked_availability(found: Availability) -> Availability:
    """What an availability model returned; ``ValueError`` unless it is one.

    An interval function of the user's own raises ``ValueError`` when it returns something else than an interval.
    """
    check.kind("availability", found, Availability, "a model that returns clock.Availability")
    check.one_of("availability's leaving", found.leaving, LEAVING)
    interval = found.interval
    if str(getattr(interval, "__module__", "")).startswith("fedjax_async."):
        return found

    def checked(client: int, time: float) -> tuple[float, float]:
        moments = interval(client, time)
        good = isinstance(moments, tuple) and len(moments) == 2 and moments[1] > time
        good = good and (moments[0] < moments[1] or moments[0] == moments[1] == math.inf)
        allowed = "(start, end), start < end, of the interval that contains this time or of the next one, or (inf, inf)"
        check.require(good, f"availability's interval({client}, {time:.6g})", moments, allowed)
        return float(moments[0]), float(moments[1])  # a sum with NumPy's float32 would have its few digits

    return found._replace(interval=checked)


AVAILABILITY: dict[str, Callable[..., AvailabilityModel]] = {
    "always": always,
    "joins": joins,
    "leaves": leaves,
    "periodic": periodic,
    "sessions": sessions,
    "csv": csv,
}


def together(intervals: Sequence[IntervalAt]) -> IntervalAt | None:
    """A function for the interval in which a client is online according to all ``intervals``; ``None`` without any."""
    if len(intervals) < 2:
        return intervals[0] if intervals else None

    def interval(client: int, time: float) -> tuple[float, float]:
        for _ in range(_MOST_CHANGES):
            start, end = -math.inf, math.inf
            for source in intervals:
                begins, ends = source(client, time)
                start, end = max(start, begins), min(end, ends)
            if start <= time or start < end or math.isinf(start):
                return start, end
            time = start
        return NEVER

    return interval
