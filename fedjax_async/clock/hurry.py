"""Requests to hurry: clients that would become too stale are asked to upload what they have."""

from __future__ import annotations

import heapq
import math

import numpy as np

from fedjax_async.base import check
from fedjax_async.clock.buffering import Timing
from fedjax_async.clock.record import SLACK, Record
from fedjax_async.clock.scenario import Scenario, checked_durations, require_all_answer, too_short
from fedjax_async.types import Schedule


class _Hurried:
    """A plan while it is made: the record, the uploads to come, and the clients that were asked to hurry."""

    def __init__(self, scenario: Scenario, size: int, bound: int) -> None:
        self.record, self.done = Record(scenario), list[int]()  # local steps of each job
        self.events: list[tuple[float, int, int]] = []  # a heap: time, client, job; older entries of a job are stale
        self.filled, self.budget_left = 0, True
        self._scenario, self._size, self._bound = scenario, size, bound
        self._job = np.zeros(scenario.num_clients, np.int64)  # of each client; -1: none
        self._number = np.zeros(scenario.num_clients, np.int64)
        self._seconds = np.zeros(scenario.num_clients)  # of a local step of its job
        self._asked = set[int]()  # clients for which the server step waits

    def send(self, client: int, now: float) -> None:
        """Send the client a job."""
        scenario, who = self._scenario, np.array([client])
        steps = int(scenario.local_steps[client])
        seconds = float(checked_durations(scenario, who, self._number[who])[0])
        if not now + seconds / steps > now:
            raise too_short(client, now)
        self._job[client] = job = self.record.dispatch(client, now, now + seconds)
        self._seconds[client] = seconds / steps
        self._number[client] += 1
        self.done.append(steps)
        heapq.heappush(self.events, (now + seconds, client, job))

    def is_current(self, time: float, client: int, job: int) -> bool:
        """Whether an event is that of the client's present job, and not from before a request."""
        return bool(self._job[client] == job) and self.record.upload_time[job] == time

    def upload(self, client: int, job: int, now: float) -> None:
        """Apply an upload; it closes the step if this is full and waits for nobody."""
        self._job[client] = -1
        self._asked.discard(client)
        self.filled += 1
        full = self.filled >= self._size and not self._asked
        closes = full and not self._ask(now)
        self.budget_left = self.record.apply(job, now, closes)
        self.filled = 0 if closes else self.filled

    def _ask(self, now: float) -> bool:
        """Ask the clients that this step would make too stale; whether there are any."""
        under_way = np.flatnonzero(self._job >= 0)
        late = [who for who in under_way.tolist() if self.record.staleness(int(self._job[who])) >= self._bound]
        for client in late:
            job = int(self._job[client])
            sent, step = self.record.dispatch_time[job], float(self._seconds[client])
            done = math.floor((now - sent) / step * SLACK) + 1  # it ends the local step that it is in
            self._asked.add(client)
            if done < self.done[job]:
                self.done[job], time = done, sent + done * step
                self.record.upload_time[job] = time
                heapq.heappush(self.events, (time, client, job))
        return bool(late)


def plan_hurry(scenario: Scenario, size: int, bound: int) -> Schedule:
    """All clients train at once; see ``hurry``."""
    made = _Hurried(scenario, size, bound)
    for client in range(scenario.num_clients):
        made.send(client, 0.0)
    while made.events and made.events[0][0] <= made.record.end and made.budget_left:
        now, back = made.events[0][0], list[int]()
        while made.events and made.events[0][0] == now:
            _, client, job = heapq.heappop(made.events)
            if made.is_current(now, client, job):
                if made.budget_left:  # else this moment ends as any other: with the replies
                    made.upload(client, job, now)
                back.append(client)
        for client in back:
            made.send(client, now)
    return made.record.schedule()._replace(local_steps=np.array(made.done, np.int32))


def hurry(*, size: int = 10, bound: int = 10) -> Timing:
    """At least `size` uploads are a server step, and no upload is staler than `bound`: late clients are asked to hurry.

    All clients train, and start again at once. When a step is full, the server asks the clients whose jobs the step
    would make staler than ``bound``. They end the local step that they are in, upload the steps that they have made
    (``Schedule.local_steps``), and the server waits for them before it completes the step; what else comes until then
    belongs to the step too. A local step takes the K-th part of a job of the delay model, the request takes no time.

    Source: Su, Li (2022), "How asynchronous can federated learning be?" (Port), whose clients report after the epoch
    that they are in. The clients of a run with absences, faults or limits do not all answer: there it is refused.
    """
    check.whole("size", size)
    check.whole("bound", bound)

    def timing(scenario: Scenario) -> Schedule:
        require_all_answer(scenario, "hurry", "answer each request")
        return plan_hurry(scenario, int(size), int(bound))

    timing.ends_jobs = True  # type: ignore[attr-defined]
    return timing
