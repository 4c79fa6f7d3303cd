"""FedCompass: local steps by speed, so that clients arrive in groups.

Source: Li et al., "FedCompass: efficient cross-silo federated learning on heterogeneous client devices using a
computing power-aware scheduler" (2024), and ``CompassScheduler`` in the authors' code (github.com/APPFL/APPFL).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.record import SLACK, Record
from fedjax_async.clock.scenario import NO_CONDITIONS, Scenario, finite, too_short
from fedjax_async.types import Schedule

_UPLOAD, _LATEST = 0, 1  # kinds of events; at one moment uploads come first


@dataclass
class ArrivalGroup:
    """Clients that are to arrive together."""

    expected: float  # seconds; T_a, when all of them should have arrived
    latest: float  # T_max, when the server stops waiting; both are 0 once it has taken its step
    coming: list[int]  # clients that train
    waiting: list[tuple[int, int]] = field(default_factory=list)  # (client, job) that have arrived


class Compass:
    """The scheduler: what it knows of its clients, and the groups that have not arrived."""

    def __init__(self, most: np.ndarray, shortest: float, slack: float, momentum: float) -> None:
        count = len(most)
        self.most = most  # int64[N], Q_max
        self.least = np.maximum(np.ceil(shortest * most - 1e-9), 1).astype(np.int64)  # Q_min
        self.seconds = np.full(count, np.nan)  # of a local step, as estimated; NaN: unknown
        self.steps, self.sent = most.copy(), np.zeros(count)  # of each client's last job
        self.group = np.full(count, -1)  # the number of each client's group; -1: none yet
        self.groups: dict[int, ArrivalGroup] = {}
        self._slack, self._momentum, self._next = slack, momentum, 0

    def note(self, client: int, now: float) -> None:
        """Estimate the client's seconds a step from the job that has arrived."""
        found, known = (now - self.sent[client]) / self.steps[client], self.seconds[client]
        kept = 0.0 if math.isnan(known) else 1.0 - self._momentum
        self.seconds[client] = found if kept == 0.0 else kept * known + self._momentum * found

    def assign(self, client: int, now: float) -> int | None:
        """Give the client its local steps and a group; returns the number of the group if it is new."""
        self.sent[client] = now
        joined, steps = -1, -1
        for number, group in self.groups.items():
            fits = math.floor((group.expected * SLACK - now) / self.seconds[client])
            if max(int(self.least[client]), steps) <= fits <= self.most[client]:
                joined, steps = number, fits
        if joined >= 0:
            self.groups[joined].coming.append(client)
            self.group[client], self.steps[client] = joined, steps
            return None
        steps = self._steps_of_new(client, now)
        takes = steps * self.seconds[client]
        self.groups[self._next] = ArrivalGroup(now + takes, now + takes * self._slack, [client])
        self.group[client], self.steps[client] = self._next, steps
        self._next += 1
        return self._next - 1

    def _steps_of_new(self, client: int, now: float) -> int:
        """So many that the group arrives with the fastest client of another one, after that client's next job."""
        steps, most = -1, int(self.most[client])
        for group in self.groups.values():
            if now < group.latest:
                members = [*group.coming, *(other for other, _ in group.waiting)]
                fastest = min(self.seconds[other] * self.most[other] for other in members)
                fits = math.floor(((group.latest + fastest) * SLACK - now) / self.seconds[client])
                steps = max(steps, fits) if fits <= most else steps
        return most if steps < 0 else max(steps, int(self.least[client]))


class _Plan:
    """A plan while it is made: the scheduler, the record and the events to come."""

    def __init__(self, scenario: Scenario, compass: Compass) -> None:
        self._scenario, self._compass = scenario, compass
        self.record, self.steps_of = Record(scenario), list[int]()
        self.events: list[tuple[float, int, int, int]] = []  # a heap: time, kind, client or group, job
        self._number = np.zeros(scenario.num_clients, np.int64)
        everyone = np.arange(scenario.num_clients)
        shortest, longest = (self._seconds(everyone, 0, steps) for steps in (compass.least, compass.most))
        self._whole_jobs = bool(np.all(shortest == longest))  # the delay model knows only their times
        self._budget_left = True

    def _seconds(self, clients: np.ndarray, numbers: int | np.ndarray, steps: np.ndarray) -> np.ndarray:
        sizes = (self._scenario.bytes_down, self._scenario.bytes_up)
        of_clients = (np.broadcast_to(size, self._scenario.num_clients)[clients] for size in sizes)
        return finite(self._scenario.delays.durations(clients, numbers, steps, *of_clients))

    def dispatch(self, client: int, now: float) -> None:
        """Send the client a job of the local steps that it was given."""
        who, steps = np.array([client]), int(self._compass.steps[client])
        most = int(self._compass.most[client])
        asked = np.array([most if self._whole_jobs else steps])
        seconds = float(self._seconds(who, self._number[who], asked)[0])
        seconds *= steps / most if self._whole_jobs else 1.0
        if not now + seconds > now:
            raise too_short(client, now)
        job = self.record.dispatch(client, now, now + seconds)
        heapq.heappush(self.events, (now + seconds, _UPLOAD, client, job))
        self.steps_of.append(steps)
        self._number[client] += 1

    def _send(self, client: int, now: float) -> None:
        group = self._compass.assign(client, now)
        if group is not None:
            heapq.heappush(self.events, (self._compass.groups[group].latest, _LATEST, group, 0))
        self.dispatch(client, now)

    def _apply(self, job: int, now: float, closes: bool) -> None:
        self._budget_left = self._budget_left and self.record.apply(job, now, closes)

    def upload(self, client: int, job: int, now: float) -> None:
        """An upload comes: it waits for its group, or is a step of its own."""
        compass = self._compass
        compass.note(client, now)
        number = int(compass.group[client])
        group = compass.groups.get(number)
        if group is not None:
            group.coming.remove(client)
            if now <= group.latest * SLACK:
                group.waiting.append((client, job))
                if not group.coming:
                    self.arrived(number, now)
                return
            if not group.coming and not group.waiting:
                del compass.groups[number]
        self._apply(job, now, True)
        self._send(client, now)

    def arrived(self, number: int, now: float) -> None:
        """Take the step of a group if some have arrived, and send these clients again, the fastest first."""
        group = self._compass.groups.get(number)
        if group is None or not group.waiting:
            return
        back, group.waiting = group.waiting, []
        for k, (_, job) in enumerate(back, 1):
            self._apply(job, now, k == len(back))
        group.expected = group.latest = 0.0
        for client, _ in sorted(back, key=lambda one: self._compass.seconds[one[0]]):
            self._send(client, now)
        if not group.coming:
            del self._compass.groups[number]


def plan_compass(scenario: Scenario, shortest: float, slack: float, momentum: float) -> Schedule:
    """All clients train at once; a group that has arrived is a server step. See ``compass``."""
    made = _Plan(scenario, Compass(scenario.local_steps.astype(np.int64), shortest, slack, momentum))
    for client in range(scenario.num_clients):
        made.dispatch(client, 0.0)
    while made.events and made.events[0][0] <= made.record.end:
        now, kind, who, job = heapq.heappop(made.events)
        if kind == _LATEST and made.events and now < made.events[0][0] <= now * SLACK:
            heapq.heappush(made.events, (made.events[0][0], _LATEST, who, job))  # later by rounding: they come first
        elif kind == _LATEST:
            made.arrived(who, now)
        else:
            made.upload(who, job, now)
    return made.record.schedule()._replace(local_steps=np.array(made.steps_of, np.int32))


def compass(*, shortest: float = 0.2, slack: float = 1.5, momentum: float = 0.9) -> Callable[[Scenario], Schedule]:
    """Local steps by speed, so that clients arrive in groups (FedCompass); each group is a server step.

    All clients train. A job has between ``Q_min`` and ``Q_max`` local steps; ``Q_max`` is the run's, ``Q_min =
    shortest * Q_max``. A client that returns joins the group in which it can do most steps before the group's expected
    arrival; if it can join none, it makes a new one, which arrives together with another group's fastest client after
    that one's next job. The server waits for a group until all have arrived, at most until `slack` times the seconds
    expected at its beginning; then its clients start from the new model. ``momentum`` is the weight of the last job in
    the estimate of a client's speed. A job of the delay model is one of ``Q_max`` steps, and fewer take proportionally
    less, unless the model has ``reference_steps``.

    Source: Li et al. (2024), "FedCompass", with the scheduler and the defaults of the authors' code (``compass.py``).
    Deviation: an upload that comes too late for its group is a server step of its own; the authors add it to the step
    of the next group, but send its client at once. The clients of a run with absences, faults or limits do not all
    return: there it is refused.
    """
    for name, value in (("shortest", shortest), ("momentum", momentum)):
        check.real_positive(name, value)
        check.in_range(name, value, 0, 1)
    check.real_positive("slack", slack)
    check.require(slack >= 1, "slack", slack, "at least 1")

    def timing(scenario: Scenario) -> Schedule:
        check.require(scenario.decisions is None, "timing", "compass", "another one in a run with a policy")
        allowed = "another one with availability, faults or limits: its groups expect every client to return"
        check.require(scenario.conditions == NO_CONDITIONS, "timing", "compass", allowed)
        return plan_compass(scenario, shortest, slack, momentum)

    return timing
