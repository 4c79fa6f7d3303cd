"""What goes wrong with jobs: uploads lost, doubled, late or corrupt, clients that crash, groups that fail together.

A model is ``model(num_clients, seed, part) -> Faults``. What befalls job ``n`` of client ``i`` is drawn
from (seed, the model's stream, part, i, n) alone: it does not depend on the order of events, on the
timing policy or on the other models. ``part`` counts models of one name joined in one spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np

from fedjax_async import check
from fedjax_async.clock import chance, inputs
from fedjax_async.clock.availability import Availability, alternation
from fedjax_async.clock.distributions import exponential

Truths = bool | np.ndarray
Numbers = float | np.ndarray


class Mishap(NamedTuple):
    """What befalls jobs: arrays of one entry a job, or one value for all. The defaults are: nothing."""

    lost: Truths = False  # trained, but the upload never reaches the server
    corrupt: Truths = False  # the upload is NaN throughout: it arrives, and counts for nothing
    crash_share: Numbers = math.inf  # the client crashes after this share of the job's time,
    crash_after: Numbers = math.inf  # or after so many seconds, whichever is first,
    restart: Numbers = 0.0  # and is down for so many seconds
    factor: Numbers = 1.0  # the job takes so many times as long,
    extra: Numbers = 0.0  # and so many seconds more
    copies: tuple[Numbers, ...] = ()  # further copies of the upload, so many seconds after the first (infinite: none)


def both(one: Mishap, other: Mishap) -> Mishap:
    """Two mishaps of the same jobs; of two crashes' restarts the longer counts."""
    return Mishap(
        one.lost | other.lost,
        one.corrupt | other.corrupt,
        np.minimum(one.crash_share, other.crash_share),
        np.minimum(one.crash_after, other.crash_after),
        np.maximum(one.restart, other.restart),
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


Draw = Callable[[np.ndarray, np.ndarray], Mishap]


class Faults(NamedTuple):
    """The mishaps of jobs, and the absences that a fault model brings with it.

    ``course(clients, numbers)`` and ``marks(clients, numbers)``, of arrays that broadcast, are what befalls
    these jobs; of ``marks`` only ``copies`` count, of ``course`` all else. They may be the same. Copies do not
    change how a plan goes: they are drawn when it is known.
    """

    course: Draw | None = None
    marks: Draw | None = None
    absence: Availability | None = None


FaultModel = Callable[[int, int, int], Faults]


def _befalling(
    stream: str, probability: float, mishap: Callable[[np.ndarray, chance.Draws], Mishap]
) -> Callable[[int, int], Draw]:
    """Every job suffers with this probability; ``mishap(who, draws)`` is what, with draws at the jobs' places."""

    def bound(seed: int, part: int) -> Draw:
        def draw(clients: np.ndarray, numbers: np.ndarray) -> Mishap:
            draws = chance.Draws(seed, stream, part, clients, numbers)
            return mishap(draws.random() < probability, draws)

        return draw

    return bound


def _exponential(draws: chance.Draws, who: np.ndarray) -> np.ndarray:
    """Exponential of mean 1 where ``who`` says so, elsewhere infinite."""
    out = np.full(who.shape, np.inf)
    out[who] = draws.standard_exponential(who)
    return out


def drop(*, probability: float = 0.1) -> FaultModel:
    """An upload is lost on its way with this `probability`; the client has trained in vain."""
    inputs.share("probability", probability)
    bound = _befalling("drop", probability, lambda who, draws: Mishap(lost=who))
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def duplicate(*, probability: float = 0.05, delay: float = 1.0) -> FaultModel:
    """An upload is delivered twice with this `probability`, the second copy `delay` seconds later (exponential)."""
    inputs.share("probability", probability)
    inputs.non_negative("delay", delay)

    def copied(who: np.ndarray, draws: chance.Draws) -> Mishap:
        after = _exponential(draws, who)
        after[who] *= delay
        return Mishap(copies=(after,))

    bound = _befalling("duplicate", probability, copied)
    return lambda num_clients, seed, part: Faults(marks=bound(seed, part))


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

    def somewhere(who: np.ndarray, draws: chance.Draws) -> Mishap:
        shares = np.full(who.shape, np.inf)
        shares[who] = draws.random(who)
        return Mishap(crash_share=shares, restart=np.where(who, restart, 0.0))

    def sometime(who: np.ndarray, draws: chance.Draws) -> Mishap:
        return Mishap(crash_after=_exponential(draws, who) / (rate or math.inf), restart=restart)

    bound = _befalling("crash", chances, somewhere) if rate is None else _befalling("crash", 1.0, sometime)
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def late(*, probability: float = 0.1, extra: float = 0.0, factor: float = 1.0) -> FaultModel:
    """A job takes `factor` times as long and `extra` seconds more with this `probability`."""
    inputs.share("probability", probability)
    inputs.non_negative("extra", extra)
    inputs.positive("factor", factor)
    check.require(factor >= 1, "factor", factor, "at least 1")
    check.require(extra > 0 or factor > 1, "extra", extra, "> 0, unless factor is > 1")

    def slow(who: np.ndarray, draws: chance.Draws) -> Mishap:
        return Mishap(factor=np.where(who, factor, 1.0), extra=np.where(who, extra, 0.0))

    bound = _befalling("late", probability, slow)
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def corrupt(*, probability: float = 0.05) -> FaultModel:
    """An upload arrives as NaN throughout with this `probability`; it is applied, but fills no place in a buffer.

    The clock marks it, and the engine makes it so.
    """
    inputs.share("probability", probability)
    bound = _befalling("corrupt", probability, lambda who, draws: Mishap(corrupt=who))
    return lambda num_clients, seed, part: Faults(bound(seed, part))


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

        return Faults(absence=Availability(window, "lose"))

    return model


FAULTS: dict[str, Callable[..., FaultModel]] = {
    "drop": drop,
    "duplicate": duplicate,
    "crash": crash,
    "late": late,
    "corrupt": corrupt,
    "groups": groups,
}


def mishaps(draws: Iterable[Draw | None], clients: np.ndarray, numbers: np.ndarray) -> Mishap:
    """What befalls these jobs (arrays that broadcast), all ``draws`` together."""
    return reduce(both, (draw(clients, numbers) for draw in draws if draw is not None), Mishap())
