"""A pace set by the slowest client under way: server steps far enough apart that no upload becomes too stale."""

from __future__ import annotations

import math

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock.buffering import Timing, jobs_under_way, require_asked
from fedjax_async.clock.event_queue import UPLOAD, Release
from fedjax_async.clock.idle_clients import SUCCESSORS, IdleClients, idle_clients
from fedjax_async.clock.record import SLACK
from fedjax_async.clock.scenario import Scenario, require_apart
from fedjax_async.types import Schedule

USUAL = 20  # jobs in flight in the authors' examples


class _Paced:
    """The uploads that wait for a step, the jobs under way, and the seconds of each client's last job."""

    def __init__(self, idle: IdleClients, clients: int, bound: int, unknown: float) -> None:
        self.waiting: list[Release] = []
        self.due = math.inf  # when the next step may close; infinite while nothing waits
        self._queue, self._bound, self._closed_at = idle.queue, bound, 0.0
        self._seconds = np.full(clients, unknown)
        self._under_way, self._sent = dict[int, int](), 0  # job -> client; jobs that are in it or were

    def receive(self, limit: float, now: float) -> list[Release]:
        """Take in the events until ``limit``; what they free at once: capacity, and clients without an upload."""
        queue, freed, record = self._queue, list[Release](), self._queue.record
        while (event := queue.pop(limit)) is not None:
            job, client, capacity_freed, client_freed = queue.release(event)
            self._under_way.pop(job, None)
            if event[0] > now:
                record.no_later(job, now)
            if event[1] == UPLOAD:
                self._seconds[client] = record.upload_time[job] - record.dispatch_time[job]
                self.waiting.append((job, client, False, client_freed))
                client_freed = False
            freed.append((job, client, capacity_freed, client_freed))
        return freed

    def step(self, now: float) -> bool:
        """Apply the uploads that wait as one step; false once the budget is spent."""
        record, before = self._queue.record, self._queue.record.closed
        left = self._queue.apply_step([(job, self._queue.judge(job)) for job, *_ in self.waiting], now)
        if record.closed > before:  # not if all were dropped or corrupt
            self._closed_at = now
        return left

    def set_due(self) -> None:
        """Note the jobs sent meanwhile, and when the next step is due: L / b after the last one."""
        record = self._queue.record
        for job in range(self._sent, len(record.client)):
            self._under_way[job] = record.client[job]
        self._sent = len(record.client)
        slowest = max((self._seconds[client] for client in self._under_way.values()), default=0.0)
        self.due = self._closed_at + slowest / self._bound if self.waiting else math.inf


def plan_pace(
    scenario: Scenario, bound: int, length: float, unknown: float, concurrency: int, sampling: str
) -> Schedule:
    """The uploads that wait are a server step ``L / bound`` seconds after the last one; see ``pace``."""
    idle = idle_clients(scenario, concurrency, sampling)
    queue, paced = idle.queue, _Paced(idle, scenario.num_clients, bound, unknown)
    tick, budget_left, exhausted = 0, True, False
    queue.look(0.0)
    paced.set_due()
    while budget_left and (soonest := min(idle.next_event(paced.due), paced.due)) < math.inf:
        if soonest > queue.horizon:
            exhausted = not queue.events and not paced.waiting
            break
        tick = max(tick + 1, math.ceil(soonest / length / SLACK))  # at the others nothing happens
        now = tick * length
        require_apart(length, now)
        if now > queue.horizon:
            break
        freed = paced.receive(min(now * SLACK, queue.horizon), now)
        paced.set_due()
        returned: list[Release] = []
        if paced.due <= now * SLACK:
            budget_left = paced.step(now)
            returned, paced.waiting = paced.waiting, []
        queue.look(now)
        idle.release(freed, now)
        if returned:  # clients that contributed train again only where no other one is idle
            idle.release(returned, now)
        paced.set_due()
    else:
        exhausted = budget_left
    return queue.record.schedule(exhausted=exhausted)


def pace(
    *,
    bound: int = 20,
    length: float = 5.0,
    unknown: float = 180.0,
    concurrency: int | None = None,
    sampling: str = "uniform",
) -> Timing:
    """All uploads that wait are a server step once ``L / bound`` seconds have passed since the last one.

    L is the largest of the seconds that the last jobs of the clients under way took, ``unknown`` for a client that has
    not returned yet. While such a client trains there are about ``bound`` steps, so that its upload is no staler, if
    jobs take as long as their clients' last ones. The server looks every ``length`` seconds: then it takes in what
    has come, completes a step if one is due, and sends new jobs, to clients other than those that wait for the step
    (to these only where no other one is idle).

    ``concurrency``: jobs in flight, by default 20, or half of the clients if there are fewer than 40. ``sampling``:
    see ``buffer``.

    Source: Jiang, Wang, Li, Li (2022), "Pisces: efficient federated learning via guided asynchronous training", in the
    authors' code (``plato/client_managers/sirius.py`` and ``plato/servers/base.py`` of github.com/SamuelGong/Pisces),
    with its numbers: looks every 5 seconds, 180 seconds for new clients, 20 jobs in flight and a bound of 20. They fit
    jobs of 15 to 180 seconds, as there; with jobs much shorter than ``length`` clients mostly wait for the next look.
    Deviations: the bound stays as it is where fewer jobs are in flight, there it is always their number; new jobs are
    sent at every look, there only where an upload waits; clients whose uploads are in a step may train again at once,
    there from the next look on; the second step too comes ``L / bound`` after the first, there after the start.
    """
    check.whole("bound", bound)
    check.real_positive("length", length)
    check.real_positive("unknown", unknown)
    check.optional(check.whole, "concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(scenario: Scenario) -> Schedule:
        require_asked(scenario, "pace")
        usual = min(USUAL, max(scenario.num_clients // 2, 1))
        jobs = jobs_under_way(scenario, usual if concurrency is None else concurrency)
        return plan_pace(scenario, int(bound), float(length), float(unknown), jobs, sampling)

    return timing
