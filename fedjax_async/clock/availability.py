"""When clients are there: they join late, leave, come and go.

A model is ``model(num_clients, seed, part) -> Availability``, whose ``window(client, time)`` is the
half-open stretch ``[start, end)`` in which the client is there and that holds ``time``, or else the next
one to begin (``inf, inf`` if there is none). ``part`` counts models of one name that are joined in one
spec, so that each draws its own.

``leaving`` says what happens to a job whose client goes off before its upload has reached the server:
``finish`` (it is finished and uploaded all the same; the client only takes no new one), ``pause``
(it is continued when the client is back) or ``lose`` (it is lost). Models joined with ``+`` keep each
its own rule; clients are there when all agree.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async import check, registry
from fedjax_async.clock import availability_traces, chance, inputs
from fedjax_async.clock.distributions import DISTRIBUTIONS, Distribution

Window = Callable[[int, float], tuple[float, float]]


class Availability(NamedTuple):
    """One source of absence: the stretches in which a client is there, and what its going off does to a job.

    ``prepare(clients, time)`` says that the windows of these clients will probably be asked for soon, as many
    at once are cheaper. It changes no answer, and is true if there was anything to do.
    """

    window: Window
    leaving: str = "finish"
    prepare: Callable[[Iterable[int], float], bool] | None = None


AvailabilityModel = Callable[[int, int, int], Availability]

LEAVING = ("finish", "pause", "lose")
NEVER = (math.inf, math.inf)

# Where two comings and goings never coincide, the search for a moment at which they do has to end.
_MOST_CHANGES = 10_000

_CHANGES = 8  # comings and goings that are drawn at once, at the least
_KEPT = 1 << 17  # clients whose comings and goings are kept; those of others are drawn again if need be


def always() -> AvailabilityModel:
    """Every client is there from the beginning to the end."""
    return lambda num_clients, seed, part: Availability(lambda client, time: (0.0, math.inf))


def _moments(stream: str, share: float, by: float, at: float | None) -> Callable[[int, int], Callable[[int], float]]:
    """A moment for a ``share`` of the clients, uniform in (0, by] or given; infinity for the others."""
    inputs.share("share", share)
    inputs.positive("by", by)
    if at is not None:
        inputs.non_negative("at", at)

    def bound(seed: int, part: int) -> Callable[[int], float]:
        def draw(clients: np.ndarray) -> np.ndarray:
            draws = chance.Draws(seed, stream, part, clients)
            chosen, place = draws.random() < share, draws.random()
            return np.where(chosen, by * (1 - place) if at is None else float(at), math.inf)

        return chance.once_a_client(draw)

    return bound


def joins(*, share: float = 0.1, by: float = 100.0, at: float | None = None) -> AvailabilityModel:
    """A `share` of the clients joins late: each at a time uniform in (0, `by`] seconds, or all at `at`."""
    moments = _moments("joins", share, by, at)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        moment = moments(seed, part)

        def window(client: int, time: float) -> tuple[float, float]:
            joined = moment(client)
            return (0.0 if math.isinf(joined) else joined), math.inf

        return Availability(window)

    return model


def leaves(
    *, share: float = 0.1, by: float = 100.0, at: float | None = None, leaving: str = "lose"
) -> AvailabilityModel:
    """A `share` of the clients leaves for good: each at a time uniform in (0, `by`] seconds, or all at `at`."""
    check.one_of("leaving", leaving, LEAVING)
    moments = _moments("leaves", share, by, at)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        moment = moments(seed, part)

        def window(client: int, time: float) -> tuple[float, float]:
            left = moment(client)
            return (0.0, left) if time < left else NEVER

        return Availability(window, leaving)

    return model


def periodic(
    *, on: float = 60.0, off: float = 60.0, phase: float | None = None, leaving: str = "finish"
) -> AvailabilityModel:
    """Clients are there for `on` seconds, away for `off`, and so on; each at its own random phase, or all at `phase`.

    ``phase`` is how many seconds of the cycle on-off lie behind at time 0.
    """
    inputs.positive("on", on)
    inputs.non_negative("off", off)
    check.one_of("leaving", leaving, LEAVING)
    period = on + off
    if phase is not None:
        check.require(inputs.is_real(phase) and 0 <= phase < period, "phase", phase, f"at least 0 and below {period}")

    def model(num_clients: int, seed: int, part: int) -> Availability:
        shift = chance.once_a_client(lambda clients: chance.Draws(seed, "periodic", part, clients).random() * period)

        def window(client: int, time: float) -> tuple[float, float]:
            behind = shift(client) if phase is None else phase
            cycle = math.floor((time + behind) / period)
            start = cycle * period - behind
            if time >= start + on:
                start = (cycle + 1) * period - behind
            return start, start + on

        return Availability((lambda client, time: (0.0, math.inf)) if off == 0 else window, leaving)

    return model


def sessions(
    *,
    on: float = 60.0,
    off: float = 60.0,
    family: str = "exponential",
    spread: float = 1.0,
    leaving: str = "finish",
) -> AvailabilityModel:
    """Random stretches there and away, of means `on` and `off` seconds, from a `family` of durations.

    ``family`` is any of the delay families (``exponential``, ``lognormal``, ...); ``spread`` is the
    standard deviation over the mean. A client begins there with probability ``on / (on + off)``.
    """
    inputs.positive("on", on)
    inputs.positive("off", off)
    inputs.positive("spread", spread)
    check.one_of("leaving", leaving, LEAVING)
    sample = registry.find("family", DISTRIBUTIONS, family)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        return alternation("sessions", on, off, sample, spread, seed, part)._replace(leaving=leaving)

    return model


def alternation(
    stream: str, on: float, off: float, sample: Distribution, spread: float, seed: int, part: int
) -> Availability:
    """Random stretches there and away, drawn for each client from ``stream`` when first asked for."""
    # The times at which a client comes (even places) and goes (odd ones). All come at 0; who is away then goes at once.
    changes: dict[int, array] = {}
    begin = array("d", [0.0])

    def extend(clients: list[int], time: float) -> None:
        known = [changes.get(client, begin) for client in clients]
        who = np.array(clients)[:, None]
        counts = [len(one) for one in known]
        missing = 2 * (time - min(one[-1] for one in known)) / (on + off)  # of who lags most, on average
        width = max(_CHANGES, min(counts) // 2, int(min(missing, _MOST_CHANGES)))
        places = np.array(counts)[:, None] + np.arange(width)
        means = np.where(places % 2, on, off)
        lengths = np.maximum(sample(chance.Draws(seed, stream, part, who, places), means, spread * means), 1e-6 * means)
        away = chance.Draws(seed, stream, part, who, 0).random() >= on / (on + off)
        lengths[away & (places == 1)] = 0
        lengths[:, 0] += [one[-1] for one in known]
        more, size = np.cumsum(lengths, axis=1).tobytes(), 8 * width
        for k, (client, one) in enumerate(zip(clients, known)):
            changes[client] = one + array("d", more[k * size : (k + 1) * size])

    def prepare(clients: Iterable[int], time: float) -> bool:
        lacking = missing = [client for client in clients if client not in changes or changes[client][-2] <= time]
        if missing and len(changes) > _KEPT:
            changes.clear()
        while missing:
            extend(missing, time)
            missing = [client for client in missing if changes[client][-2] <= time]
        return bool(lacking)

    def window(client: int, time: float) -> tuple[float, float]:
        known = changes.get(client)
        if known is None or known[-2] <= time:
            prepare((client,), time)
            known = changes[client]
        return within(known, time)

    return Availability(window, prepare=prepare)


def within(changes: Sequence[float], time: float) -> tuple[float, float]:
    """The stretch that holds ``time``, or the next; a client comes at even places of ``changes``, goes at odd ones."""
    k = bisect_right(changes, time) - 1
    if k < 0 or k % 2:
        k += 1
    return (changes[k], changes[k + 1]) if k + 1 < len(changes) else NEVER


def csv(*, path: str, repeat: float | None = None, leaving: str = "finish") -> AvailabilityModel:
    """Recorded stretches from a CSV file: columns client or device, start, end (seconds), one stretch a line.

    With a ``client`` column every client 0..N-1 needs a line; with a ``device`` column clients draw
    devices without replacement from a deck that is reshuffled when it runs out. After its last line a
    client is gone, unless the trace repeats every ``repeat`` seconds. Stretches may be listed in any
    order and may touch, but not overlap.
    """
    check.one_of("leaving", leaving, LEAVING)
    inputs.optional_positive("repeat", repeat)
    traces = availability_traces.read(str(path), repeat)

    def model(num_clients: int, seed: int, part: int) -> Availability:
        rows = availability_traces.assign(traces, num_clients, seed, part)

        def window(client: int, time: float) -> tuple[float, float]:
            changes = traces.changes[rows[client]]
            if repeat is None:
                return within(changes, time)
            cycle = math.floor(time / repeat)
            for k in (cycle - 1, cycle, cycle + 1):  # division rounds, so a neighbour may hold it
                start, end = within(changes, time - k * repeat)
                if end == repeat and changes[0] == 0:  # goes on beyond midnight
                    end += changes[1] if len(changes) > 2 else math.inf
                if start < math.inf and end + k * repeat > time:
                    return start + k * repeat, end + k * repeat
            return NEVER

        return Availability(window, leaving)

    return model


AVAILABILITY: dict[str, Callable[..., AvailabilityModel]] = {
    "always": always,
    "joins": joins,
    "leaves": leaves,
    "periodic": periodic,
    "sessions": sessions,
    "csv": csv,
}


def together(windows: Sequence[Window]) -> Window | None:
    """The stretches in which all ``windows`` agree that a client is there; ``None`` for no windows at all."""
    if len(windows) < 2:
        return windows[0] if windows else None

    def window(client: int, time: float) -> tuple[float, float]:
        for _ in range(_MOST_CHANGES):
            start, end = -math.inf, math.inf
            for one in windows:
                begins, ends = one(client, time)
                start, end = max(start, begins), min(end, ends)
            if start <= time or start < end or math.isinf(start):
                return start, end
            time = start
        return NEVER

    return window
