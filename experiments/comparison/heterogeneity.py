"""How heterogeneous a world is, in FLHetBench's measures, and in two of our own about the clients' labels and speeds.

FLHetBench simulates rounds of a server that selects m clients every ``BREAK`` seconds after the last round:

- ``MC-R``, share of successes: a round lasts until its last upload, at most ``DEADLINE``. With S_i the rounds in which
  client i was in time, and C = rounds m / N those of an ideal world, it is ln(sum_i min(S_i, C) + 1) / ln(N C + 1).
- ``MC-T``, relative time: a round ends when the first 1 - r of its uploads are there. It is the time of ``TRIPS``
  selections divided by that of rounds without work, TRIPS BREAK / m.

*Dev* knows devices only, *Stat* absences only (the mean over jobs of several lengths), *Inter* both. Work pauses while
a client is absent. Here job times are those of a world; the paper's seconds (deadline 120, break 20, jobs up to 120 or
240) are divided by 60 and multiplied by the world's mean job, since the paper's jobs are messages over measured links.

Source: Zhang et al., "FLHetBench: Benchmarking Device and State Heterogeneity in Federated Learning", CVPR 2024, and
``metric.py`` of its released code, which was read and not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import bind_delays
from fedjax_async.clock.availability import IntervalAt
from fedjax_async.clock.faults import paces_together
from fedjax_async.clock.scenario import NO_LIMITS, bind

SELECTED, QUANTILE = 20, 0.2
DEADLINE, BREAK = 2.0, 1 / 3  # in mean jobs
LENGTHS_R = [k / 6 for k in range(1, 13)]  # of jobs where only absences count, in mean jobs
LENGTHS_T = [k / 6 for k in range(25)]
PAUSES = 10_000  # of one job; more are taken for a client that never comes back


class Clients(NamedTuple):
    """Seconds of a job, and when clients are online; None: always."""

    count: int
    seconds: Callable[[int, int], float]  # (client, its n-th job)
    interval: IntervalAt | None
    mean: float  # seconds of a job


def clients_of(settings: dict[str, Any], seed: int = 0) -> Clients:
    """The clients of a world's settings, at the speeds that they have at the start."""
    count = int(settings["clients"])
    delays = bind_delays(settings["delay"], count, seed)
    jobs = np.asarray(delays.durations(np.arange(count)[:, None], np.arange(64)[None], 1, 0, 0))
    conditions = bind(settings.get("availability"), settings.get("faults"), NO_LIMITS, count, seed)
    if (pace := paces_together(conditions.faults)) is not None:
        jobs = jobs / np.array([[pace(client, 0.0)[0]] for client in range(count)])
    interval = conditions.availability[0].interval if conditions.availability else None
    return Clients(count, lambda client, number: float(jobs[client, number % 64]), interval, float(jobs.mean()))


def finished(clients: Clients, client: int, time: float, seconds: float) -> float:
    """When work of ``seconds`` that begins at ``time`` is done, if it pauses while the client is offline."""
    if clients.interval is None:
        return time + seconds
    for _ in range(PAUSES):
        start, end = clients.interval(client, time)
        time = max(time, start)
        if time + seconds <= end or math.isinf(time):
            return time + seconds
        seconds, time = seconds - (end - time), max(end, math.nextafter(time, math.inf))
    return math.inf


def _rounds(
    clients: Clients, length: float | None, *, rounds: int, until: Callable[[np.ndarray], float], seed: int
) -> tuple[np.ndarray, float, int]:
    """How often each client was in time, the seconds of all rounds, and the number of selections.

    ``length``: of all jobs, in mean jobs; None: those of the devices. ``until(seconds)``: how long a round lasts in
    which uploads take so many seconds.
    """
    rng = np.random.default_rng(seed)
    came, jobs = np.zeros(clients.count, np.int64), np.zeros(clients.count, np.int64)
    time, trips = 0.0, 0
    for _ in range(rounds):
        time += BREAK * clients.mean
        order = rng.permutation(clients.count)
        if clients.interval is not None:
            order = np.array([k for k in order.tolist() if clients.interval(k, time)[0] <= time], np.int64)
        chosen = order[:SELECTED]
        if not len(chosen):
            continue
        work = [clients.seconds(k, int(jobs[k])) if length is None else length * clients.mean for k in chosen.tolist()]
        seconds = np.array([finished(clients, k, time, w) - time for k, w in zip(chosen.tolist(), work, strict=True)])
        came[chosen[seconds <= DEADLINE * clients.mean]] += 1
        jobs[chosen] += 1
        trips += len(chosen)
        time += until(seconds)
    return came, time, trips


def successes(clients: Clients, length: float | None = None, rounds: int = 3000, seed: int = 42) -> float:
    """MC-R: 1 where all clients are always in time."""
    check.whole("rounds", rounds)
    deadline = DEADLINE * clients.mean
    came, _, _ = _rounds(
        clients, length, rounds=rounds, until=lambda seconds: min(float(seconds.max()), deadline), seed=seed
    )
    ideal = rounds * min(SELECTED, clients.count) / clients.count
    return math.log(np.minimum(came, ideal).sum() + 1) / math.log(clients.count * ideal + 1)


def _enough(seconds: np.ndarray) -> float:
    """When the first ``1 - QUANTILE`` of the uploads are there, interpolated up to the next one if that ever comes."""
    share = 100 * (1 - QUANTILE)
    found = float(np.percentile(seconds, share))
    return found if math.isfinite(found) else float(np.percentile(seconds, share, method="lower"))


def relative_time(clients: Clients, length: float | None = None, trips: int = 10_000, seed: int = 42) -> float:
    """MC-T: 1 where work takes no time."""
    check.whole("trips", trips)
    together = min(SELECTED, clients.count)
    _, time, made = _rounds(
        clients,
        length,
        rounds=-(-trips // together),
        until=_enough,
        seed=seed,
    )
    return time / (max(made, 1) * BREAK * clients.mean / together)


def measures(settings: dict[str, Any], *, rounds: int = 3000, trips: int = 10_000) -> dict[str, float]:
    """The measures of a world's settings by name; those of absences are 1 in a world without."""
    clients = clients_of(settings)
    steady = clients._replace(interval=None)
    found = {"DevMC-R": successes(steady, rounds=rounds), "DevMC-T": relative_time(steady, trips=trips)}
    if clients.interval is not None:
        few, fewer = max(1, rounds // len(LENGTHS_R)), max(1, trips // len(LENGTHS_T))
        found["StatMC-R"] = float(np.mean([successes(clients, length, few) for length in LENGTHS_R]))
        found["StatMC-T"] = float(np.mean([relative_time(clients, length, fewer) for length in LENGTHS_T]))
        found["InterMC-R"] = successes(clients, rounds=rounds)
        found["InterMC-T"] = relative_time(clients, trips=trips)
    return found


def speed_spread(settings: dict[str, Any]) -> float:
    """The coefficient of variation of the clients' mean job times: our own measure."""
    clients = clients_of(settings)
    means = [np.mean([clients.seconds(client, number) for number in range(64)]) for client in range(clients.count)]
    return float(np.std(means) / np.mean(means))


def label_distance(counts: np.ndarray) -> float:
    """The mean total variation distance between a client's labels and those of all: our own measure.

    ``counts`` [clients, classes]: how many training examples of each class a client has. 0: equal shares.

    >>> label_distance(np.array([[4, 0], [0, 4]])), label_distance(np.array([[1, 1], [2, 2]]))
    (0.5, 0.0)
    """
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return float(np.mean(np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1) / 2))
