"""What goes wrong with jobs: uploads lost, doubled, late or corrupt, clients that crash, groups that fail together.

A model is ``model(num_clients, seed, part) -> Faults``. What befalls job ``n`` of client ``i`` is drawn
from (seed, the model's stream, part, i, n) alone: it does not depend on the order of events, on the
timing policy or on the other models. ``part`` counts models of one name joined in one spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.clock import chance, inputs
from fedjax_async.clock.availability import Availability, alternation
from fedjax_async.clock.distributions import exponential


class Mishap(NamedTuple):
    """What befalls one job. The defaults are: nothing."""

    lost: bool = False  # trained, but the upload never reaches the server
    corrupt: bool = False  # the upload is NaN throughout
    crash_share: float = math.inf  # the client crashes after this share of the job's time,
    crash_after: float = math.inf  # or after so many seconds, whichever is first,
    restart: float = 0.0  # and is down for so many seconds
    factor: float = 1.0  # the job takes so many times as long,
    extra: float = 0.0  # and so many seconds more
    copies: tuple[float, ...] = ()  # further copies of the upload, so many seconds after the first


def both(one: Mishap, other: Mishap) -> Mishap:
    """Two mishaps of the same job; of two crashes' restarts the longer counts."""
    return Mishap(
        one.lost or other.lost,
        one.corrupt or other.corrupt,
        min(one.crash_share, other.crash_share),
        min(one.crash_after, other.crash_after),
        max(one.restart, other.restart),
        one.factor * other.factor,
        one.extra + other.extra,
        one.copies + other.copies,
    )


def in_units(mishap: Mishap, unit: float) -> Mishap:
    """The same mishap for a clock that counts in units of so many seconds."""
    return mishap._replace(
        crash_after=mishap.crash_after / unit,
        restart=mishap.restart / unit,
        extra=mishap.extra / unit,
        copies=tuple(delay / unit for delay in mishap.copies),
    )


class Faults(NamedTuple):
    """The mishaps of jobs, and the absences that a fault model brings with it.

    ``draw(clients, numbers) -> float64``, of arrays that broadcast, gives for these jobs a number >= 0 where
    something happens and -1 where nothing does; ``mishap(number)`` is then what happens. ``None`` draws
    nothing.
    """

    draw: Callable[[np.ndarray, np.ndarray], np.ndarray] | None
    mishap: Callable[[float], Mishap]
    absence: Availability | None = None


FaultModel = Callable[[int, int, int], Faults]


def _befalls(stream: str, probability: float, mishap: Callable[[float], Mishap], seed: int, part: int) -> Faults:
    """Every job suffers ``mishap(u)`` with this probability, u uniform in [0, 1) and drawn for it."""

    def draw(clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        draws = chance.Draws(seed, stream, part, clients, numbers)
        return np.where(draws.random() < probability, draws.random(), -1.0)

    return Faults(draw, mishap)


def drop(*, probability: float = 0.1) -> FaultModel:
    """An upload is lost on its way with this `probability`; the client has trained in vain."""
    inputs.share("probability", probability)
    return lambda num_clients, seed, part: _befalls("drop", probability, lambda u: Mishap(lost=True), seed, part)


def duplicate(*, probability: float = 0.05, delay: float = 1.0) -> FaultModel:
    """An upload is delivered twice with this `probability`, the second copy `delay` seconds later (exponential)."""
    inputs.share("probability", probability)
    inputs.non_negative("delay", delay)

    def copied(u: float) -> Mishap:
        return Mishap(copies=(-delay * math.log1p(-u),))

    return lambda num_clients, seed, part: _befalls("duplicate", probability, copied, seed, part)


def crash(*, probability: float | None = None, rate: float | None = None, restart: float = 60.0) -> FaultModel:
    """A client crashes during a job: with a `probability`, at any moment of it, or at a `rate` per second of work.

    The job is lost, and the client is down for ``restart`` seconds. Without either, ``probability`` is 0.1.
    """
    check.require(probability is None or rate is None, "rate", rate, "left out where probability is given")
    if rate is not None:
        inputs.positive("rate", rate)
    chances = 0.1 if probability is None else probability
    inputs.share("probability", chances)
    inputs.non_negative("restart", restart)

    def somewhere(u: float) -> Mishap:
        return Mishap(crash_share=u, restart=restart)

    def sometime(u: float) -> Mishap:
        return Mishap(crash_after=-math.log1p(-u) / (rate or math.inf), restart=restart)

    happens, mishap = (chances, somewhere) if rate is None else (1.0, sometime)
    return lambda num_clients, seed, part: _befalls("crash", happens, mishap, seed, part)


def late(*, probability: float = 0.1, extra: float = 0.0, factor: float = 1.0) -> FaultModel:
    """A job takes `factor` times as long and `extra` seconds more with this `probability`."""
    inputs.share("probability", probability)
    inputs.non_negative("extra", extra)
    inputs.positive("factor", factor)
    check.require(factor >= 1, "factor", factor, "at least 1")
    check.require(extra > 0 or factor > 1, "extra", extra, "> 0, unless factor is > 1")
    slow = Mishap(factor=factor, extra=extra)
    return lambda num_clients, seed, part: _befalls("late", probability, lambda u: slow, seed, part)


def corrupt(*, probability: float = 0.05) -> FaultModel:
    """An upload arrives as NaN throughout with this `probability` (marked here, made so by the engine)."""
    inputs.share("probability", probability)
    return lambda num_clients, seed, part: _befalls("corrupt", probability, lambda u: Mishap(corrupt=True), seed, part)


def groups(*, count: int = 10, up: float = 3600.0, down: float = 60.0) -> FaultModel:
    """Clients in `count` groups fail together: a group works `up` and is out `down` seconds on average (exponential).

    A client is in each group with equal probability. In an outage its clients are away, and the jobs
    that it hits are lost.
    """
    check.whole("count", count)
    inputs.positive("up", up)
    inputs.positive("down", down)

    def model(num_clients: int, seed: int, part: int) -> Faults:
        group = chance.once_a_client(lambda clients: chance.Draws(seed, "groups", part, clients).random() * count)
        outages = alternation("outages", up, down, exponential, 1.0, seed, part)

        def window(client: int, time: float) -> tuple[float, float]:
            return outages.window(int(group(client)), time)

        return Faults(None, lambda u: Mishap(), Availability(window, "lose"))

    return model


FAULTS: dict[str, Callable[..., FaultModel]] = {
    "drop": drop,
    "duplicate": duplicate,
    "crash": crash,
    "late": late,
    "corrupt": corrupt,
    "groups": groups,
}


def mishaps(faults: Sequence[Faults], clients: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """What befalls these jobs (arrays that broadcast): an array of ``Mishap`` or ``None``."""
    found = np.full(np.broadcast_shapes(np.shape(clients), np.shape(numbers)), None, object)
    flat = found.reshape(-1)
    for one in faults:
        if one.draw is not None:
            drawn = one.draw(clients, numbers).reshape(-1)
            for place in np.flatnonzero(drawn >= 0).tolist():
                here = one.mishap(float(drawn[place]))
                flat[place] = here if flat[place] is None else both(flat[place], here)
    return found
