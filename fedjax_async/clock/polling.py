"""Polls: the server asks random clients for what they have, and they answer with unfinished work."""

from __future__ import annotations

import math

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock import chance
from fedjax_async.clock.buffering import Timing
from fedjax_async.clock.record import SLACK, Record
from fedjax_async.clock.scenario import Scenario, checked_durations, require_all_answer, require_apart, too_short
from fedjax_async.types import Schedule


class _Polled:
    """The clients between polls: since when each trains, and how long a local step of its job takes."""

    def __init__(self, scenario: Scenario) -> None:
        self.record, self.steps = Record(scenario), scenario.local_steps.astype(np.int64)
        self.job, self.since = np.zeros(scenario.num_clients, np.int64), np.zeros(scenario.num_clients)
        self._number, self._seconds = self.job.copy(), self.since.copy()
        self._scenario, self.done = scenario, list[int]()  # local steps of each job

    def send(self, clients: np.ndarray, now: float) -> None:
        """Send each of the clients a job."""
        seconds = checked_durations(self._scenario, clients, self._number[clients]) / self.steps[clients]
        if len(short := clients[~(now + seconds > now)]):
            raise too_short(int(short[0]), now)
        self._seconds[clients], self.since[clients] = seconds, now
        self._number[clients] += 1
        for client in clients.tolist():
            self.job[client] = self.record.dispatch(client, now, math.inf)
            self.done.append(int(self.steps[client]))

    def first(self) -> float:
        """When the first of the clients will have made a step."""
        return float(np.min(self.since + self._seconds))

    def made(self, now: float) -> np.ndarray:
        """Local steps that each client has made by now, int64[N]."""
        whole = np.floor((now - self.since) / self._seconds * SLACK)
        return np.minimum(whole, self.steps).astype(np.int64)


def plan_polling(scenario: Scenario, length: float, size: int) -> Schedule:
    """Every ``length`` seconds the server polls ``size`` clients; see ``polling``."""
    rng, polled = chance.generator(scenario.seed, "polls"), _Polled(scenario)
    record, budget_left, poll = polled.record, True, 0
    polled.send(np.arange(scenario.num_clients), 0.0)
    while budget_left:
        poll = max(poll + 1, math.ceil(polled.first() / length / SLACK))  # polls without an answer change nothing
        now = poll * length
        require_apart(length, now)
        if now > record.end:
            break
        made = polled.made(now)
        ready = np.flatnonzero(made > 0)
        asked = ready if len(ready) <= size else np.sort(rng.choice(ready, size, replace=False))
        for count, client in enumerate(asked.tolist(), 1):
            job = polled.job.item(client)
            record.upload_time[job] = now
            polled.done[job] = int(made[client])
            budget_left = budget_left and record.apply(job, now, count == len(asked))
        if len(asked):
            polled.send(asked, now)
    later = (poll if budget_left else poll + 1) * length  # the next poll: these come then at the earliest
    for pending in polled.job.tolist():
        record.upload_time[pending] = later
    return record.schedule()._replace(local_steps=np.array(polled.done, np.int32))


def polling(*, length: float = 60.0, size: int = 10) -> Timing:
    """Every `length` seconds the server polls `size` random clients; each answers at once with what it has done.

    All clients train, at most the ``K`` local steps of the run; then a client waits. At a poll it uploads after the
    steps that it has made since its last one (``Schedule.local_steps``), and starts again with the server's answer. A
    poll is a server step, and its answers are sent after the step. Clients are drawn among those that have made a step
    since their last poll; if these are fewer, all are polled, and if there is none, the poll is no step. A step takes
    the K-th part of a job of the delay model.

    Source: Zakerinia et al. (2024), "QuAFL", with the clock of the authors' code, whose clients may be polled without a
    new step. The clients of a run with absences, faults or limits do not all answer: there it is refused.
    """
    check.real_positive("length", length)
    check.whole("size", size)

    def timing(scenario: Scenario) -> Schedule:
        require_all_answer(scenario, "polling", "answer each poll")
        allowed = f"at most {scenario.num_clients}, the number of clients"
        check.require(size <= scenario.num_clients, "size", size, allowed)
        return plan_polling(scenario, float(length), int(size))

    timing.ends_jobs = True  # type: ignore[attr-defined]
    return timing
