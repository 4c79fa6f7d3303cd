"""Faults of jobs: uploads that are lost, duplicated, late or corrupt, clients that crash or slow down, failing groups.

A model is ``model(num_clients, seed, part) -> Faults``. The faults of job ``n`` of client ``i`` are drawn from (seed,
the model's stream, part, i, n) alone: they do not depend on the order of events, on the timing or on the
other models. ``part`` numbers the models of one name in a spec.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import chance
from fedjax_async.clock.availability import Availability, alternation, checked_availability
from fedjax_async.clock.chance import exponential

Truths = bool | np.ndarray
Numbers = float | np.ndarray


class JobFaults(NamedTuple):
    """What goes wrong with jobs: arrays of one entry per job, or one value for all. By default, nothing does."""

    lost: Truths = False  # trained, but the upload never reaches the server
    corrupt: Truths = False  # the upload is NaN throughout: it arrives, and fills no buffer
    crash_share: Numbers = math.inf  # the client crashes after this share of the job's time,
    crash_after: Numbers = math.inf  # or after so many seconds, whichever is first,
    restart: Numbers = 0.0  # and is down for so many seconds
    factor: Numbers = 1.0  # the job takes so many times as long,
    extra: Numbers = 0.0  # and so many seconds more
    copies: tuple[Numbers, ...] = ()  # further copies of the upload, so many seconds after the first (infinite: none)


def combined(one: JobFaults, other: JobFaults) -> JobFaults:
    """Two sources of faults of the same jobs; of their restarts, the longer one (see ``crashes``)."""
    return JobFaults(
        one.lost | other.lost,
        one.corrupt | other.corrupt,
        np.minimum(one.crash_share, other.crash_share),
        np.minimum(one.crash_after, other.crash_after),
        np.maximum(one.restart, other.restart),
        one.factor * other.factor,
        one.extra + other.extra,
        one.copies + other.copies,
    )


def crashes(sources: Iterable[JobFaults], seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds until the clients of these jobs crash, and those of their restarts; of jobs that take ``seconds``.

    A crash that would not come before the job's end is none. If several sources make a client crash during the job, the
    first crash and the longest restart count.
    """
    until_crash, restart = np.full(seconds.shape, np.inf), np.zeros(seconds.shape)
    for one in sources:
        moment = np.minimum(one.crash_share * seconds, one.crash_after)
        until_crash = np.minimum(until_crash, moment)
        restart = np.maximum(restart, np.where(moment < seconds, one.restart, 0.0))
    return until_crash, restart


def in_units(faults: JobFaults, unit: float) -> JobFaults:
    """The same faults with times in units of ``unit`` seconds."""
    return faults._replace(
        crash_after=faults.crash_after / unit,
        restart=faults.restart / unit,
        extra=faults.extra / unit,
        copies=tuple(delay / unit for delay in faults.copies),
    )


DrawFaults = Callable[[np.ndarray, np.ndarray], JobFaults]
Pace = Callable[[int, float], tuple[float, float]]


class Faults(NamedTuple):
    """A fault model bound to its clients and its seed: the faults of jobs, and absences of clients.

    ``draw(clients, numbers)`` and ``draw_copies(clients, numbers)``, of arrays that broadcast, give the faults of
    these jobs: ``draw_copies`` the copies of their uploads, ``draw`` all other faults. One function may be both.
    Copies do not change the course of events: they are drawn when the schedule is known. ``pace(client, time)`` is the
    share (> 0) of its usual speed at which a client works at ``time``, and until when it does.
    """

    draw: DrawFaults | None = None
    draw_copies: DrawFaults | None = None
    absence: Availability | None = None
    pace: Pace | None = None


FaultModel = Callable[[int, int, int], Faults]


def _with_probability(
    stream: str, probability: float, faults_of: Callable[[np.ndarray, chance.Draws], JobFaults]
) -> Callable[[int, int], DrawFaults]:
    """Every job is hit with this probability; ``faults_of(hit, draws)`` gives the faults, with one draw a job."""

    def bound(seed: int, part: int) -> DrawFaults:
        def draw(clients: np.ndarray, numbers: np.ndarray) -> JobFaults:
            draws = chance.Draws(seed, stream, part, clients, numbers)
            return faults_of(draws.random() < probability, draws)

        return draw

    return bound


def _exponential(draws: chance.Draws, hit: np.ndarray) -> np.ndarray:
    """Exponential of mean 1 where ``hit``, infinite elsewhere."""
    out = np.full(hit.shape, np.inf)
    out[hit] = draws.standard_exponential(hit)
    return out


def drop(*, probability: float = 0.1) -> FaultModel:
    """An upload is lost on its way with this `probability`; the client has trained for nothing."""
    check.share("probability", probability)
    bound = _with_probability("drop", probability, lambda hit, draws: JobFaults(lost=hit))
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def duplicate(*, probability: float = 0.05, delay: float = 1.0) -> FaultModel:
    """An upload is delivered twice with this `probability`, the second copy `delay` seconds later (exponential)."""
    check.share("probability", probability)
    check.real_non_negative("delay", delay)

    def copied(hit: np.ndarray, draws: chance.Draws) -> JobFaults:
        after = _exponential(draws, hit)
        after[hit] *= delay
        return JobFaults(copies=(after,))

    bound = _with_probability("duplicate", probability, copied)
    return lambda num_clients, seed, part: Faults(draw_copies=bound(seed, part))


def crash(*, probability: float | None = None, rate: float | None = None, restart: float = 60.0) -> FaultModel:
    """A client crashes during a job: with a `probability`, at any moment of it, or at a `rate` per second of work.

    The job is lost, and the client is down for ``restart`` seconds. It is asked again after these, but not before the
    server has noticed: when the job would have been done, or at the ``timeout``. Without ``probability`` and ``rate``,
    the probability is 0.1. Seconds of work are those at the usual speed: under ``drift``, a client of a quarter of its
    speed crashes a quarter as often.
    """
    check.require(probability is None or rate is None, "rate", rate, "left out where probability is given")
    if rate is not None:
        check.real_positive("rate", rate)
    chances = 0.1 if probability is None else probability
    check.share("probability", chances)
    check.real_non_negative("restart", restart)

    def somewhere(hit: np.ndarray, draws: chance.Draws) -> JobFaults:
        shares = np.full(hit.shape, np.inf)
        shares[hit] = draws.random(hit)
        return JobFaults(crash_share=shares, restart=np.where(hit, restart, 0.0))

    def sometime(hit: np.ndarray, draws: chance.Draws) -> JobFaults:
        return JobFaults(crash_after=_exponential(draws, hit) / (rate or math.inf), restart=restart)

    bound = (
        _with_probability("crash", chances, somewhere) if rate is None else _with_probability("crash", 1.0, sometime)
    )
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def late(*, probability: float = 0.1, extra: float = 0.0, factor: float = 1.0) -> FaultModel:
    """A job takes `factor` times as long and `extra` seconds more with this `probability`."""
    check.share("probability", probability)
    check.real_non_negative("extra", extra)
    check.real_positive("factor", factor)
    check.require(factor >= 1, "factor", factor, "at least 1")
    check.require(extra > 0 or factor > 1, "extra", extra, "> 0, unless factor is > 1")

    def slow(hit: np.ndarray, draws: chance.Draws) -> JobFaults:
        return JobFaults(factor=np.where(hit, factor, 1.0), extra=np.where(hit, extra, 0.0))

    bound = _with_probability("late", probability, slow)
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def corrupt(*, probability: float = 0.05) -> FaultModel:
    """An upload arrives as NaN throughout with this `probability`; it is rejected, and fills no buffer or cohort.

    The clock marks the job, and the engine replaces the upload.
    """
    check.share("probability", probability)
    bound = _with_probability("corrupt", probability, lambda hit, draws: JobFaults(corrupt=hit))
    return lambda num_clients, seed, part: Faults(bound(seed, part))


def groups(*, count: int = 10, up: float = 3600.0, down: float = 60.0) -> FaultModel:
    """Clients in `count` groups fail together: a group works `up` and is out `down` seconds on average (exponential).

    Each client is in one group, drawn uniformly. During an outage the clients of the group are offline, and
    their jobs under way are lost.
    """
    check.whole("count", count)
    check.real_positive("up", up)
    check.real_positive("down", down)

    def model(num_clients: int, seed: int, part: int) -> Faults:
        group = chance.once_a_client(lambda clients: chance.Draws(seed, "groups", part, clients).random() * count)
        outages = alternation("outages", up, down, exponential, 1.0, seed, part)

        def interval(client: int, time: float) -> tuple[float, float]:
            return outages.interval(int(group(client)), time)

        return Faults(absence=Availability(interval, "lose"))

    return model


def drift(*, at: float = 1000.0, share: float = 0.5, factor: float = 4.0) -> FaultModel:
    """Speeds change at `at` seconds: a `share` of the clients is `factor` times as slow after it, the others before it.

    Jobs under way at that moment go on at the new speed, with their transfers. Each client is in the share with this
    probability.
    """
    check.real_positive("at", at)
    check.share("share", share)
    check.real_positive("factor", factor)

    def model(num_clients: int, seed: int, part: int) -> Faults:
        number = chance.once_a_client(lambda clients: chance.Draws(seed, "drift", part, clients).random())

        def pace(client: int, time: float) -> tuple[float, float]:
            later = time >= at
            slow = (number(client) < share) == later
            return 1.0 / factor if slow else 1.0, math.inf if later else at

        return Faults(pace=pace)

    return model


FAULTS: dict[str, Callable[..., FaultModel]] = {
    "drop": drop,
    "duplicate": duplicate,
    "crash": crash,
    "late": late,
    "corrupt": corrupt,
    "groups": groups,
    "drift": drift,
}


def checked_faults(found: Faults, num_clients: int) -> Faults:
    """The faults that a model returned; ``ValueError`` unless its functions draw ``JobFaults`` for two jobs."""
    check.kind("faults", found, Faults, "a model that returns clock.Faults")
    clients, numbers = np.array([0, num_clients - 1]), np.array([0, 1])
    for name in ("draw", "draw_copies"):
        if (draw := getattr(found, name)) is None:
            continue
        contract = f"{name}(clients, numbers) -> clock.JobFaults"
        try:
            drawn = draw(clients, numbers)
        except Exception as error:
            line = " ".join(str(error).split())
            raise ValueError(f"faults: must be of {contract}; it raised {type(error).__name__}: {line}") from error
        check.kind(f"faults: what {name} returned", drawn, JobFaults, f"JobFaults: {contract}")
        _check_jobs(f"faults: {name}'s JobFaults", drawn, clients.shape)
    absence = None if found.absence is None else checked_availability(found.absence)
    return found._replace(absence=absence, pace=None if found.pace is None else _checked_pace(found.pace))


def _checked_pace(pace: Pace) -> Pace:
    """A pace that raises ``ValueError`` when it breaks its contract (``Faults``); the package's as it is."""
    if str(getattr(pace, "__module__", "")).startswith("fedjax_async."):
        return pace

    def checked(client: int, time: float) -> tuple[float, float]:
        found = pace(client, time)
        good = isinstance(found, tuple) and len(found) == 2 and 0 < found[0] < math.inf and found[1] > time
        allowed = "(share, until), a finite share > 0 and a later time until which it holds"
        check.require(good, f"faults: pace({client}, {time:.6g})", found, allowed)
        return float(found[0]), float(found[1])  # a sum with NumPy's float32 would have its few digits

    return checked


def _check_jobs(title: str, drawn: JobFaults, shape: tuple[int, ...]) -> None:
    copies = {f"copies[{i}]": delay for i, delay in enumerate(drawn.copies)}
    for field, value in (drawn._asdict() | copies).items():
        if field == "copies":
            continue
        array, truth = np.asarray(value), field in ("lost", "corrupt")
        kinds, what = ("b", "True or False") if truth else ("iuf", "numbers >= 0")
        fits = array.dtype.kind in kinds and array.shape in ((), shape)
        fits = fits and (truth or bool(np.all(array >= 0))) and (field != "factor" or bool(np.all(array > 0)))
        what = "numbers > 0" if field == "factor" else what
        check.require(fits, f"{title}.{field}", value, f"{what}, one for all or one per job")


def paces_together(sources: Iterable[Faults]) -> Pace | None:
    """The product of the paces of all sources, and until when it holds; None if no source has one."""
    paces = [source.pace for source in sources if source.pace is not None]
    if len(paces) < 2:
        return paces[0] if paces else None

    def pace(client: int, time: float) -> tuple[float, float]:
        rates, ends = zip(*(each(client, time) for each in paces), strict=True)
        return max(math.prod(rates), sys.float_info.min), min(ends)

    return pace


def job_faults(draws: Iterable[DrawFaults | None], clients: np.ndarray, numbers: np.ndarray) -> JobFaults:
    """The faults of these jobs (arrays that broadcast) from all ``draws`` together."""
    return reduce(combined, (draw(clients, numbers) for draw in draws if draw is not None), JobFaults())
