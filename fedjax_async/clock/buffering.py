"""Buffered timings: every K arrivals are a server step, of any uploads (``every``, ``buffer``) or of fresh ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from heapq import heappop

from fedjax_async.base import check, registry
from fedjax_async.clock import fast_paths
from fedjax_async.clock.calling_off import StaleJobs
from fedjax_async.clock.event_queue import FREED, UPLOAD, Release
from fedjax_async.clock.idle_clients import SUCCESSORS, idle_clients
from fedjax_async.clock.record import APPLIED, Outcome
from fedjax_async.clock.scenario import NO_CONDITIONS, NO_LIMITS, Scenario
from fedjax_async.types import Schedule

Timing = Callable[[Scenario], Schedule]

_APPLIED = Outcome.APPLIED  # by itself: the look-up in the class takes time


def jobs_under_way(scenario: Scenario, concurrency: int | None) -> int:
    """How many jobs are under way at once: ``concurrency``, at most N, or without it one of each client."""
    if concurrency is None:
        return scenario.num_clients
    check.whole("concurrency", concurrency, low=1, high=scenario.num_clients)
    return int(concurrency)


def every(*, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """Every arrival is a server step; its client starts from the new model at once (C in flight, by default all)."""
    return _buffered("every", 1, concurrency, sampling)


def buffer(*, size: int = 10, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """Every `size` arrivals are a server step; clients start from the current model at once (C in flight).

    ``sampling`` says which client gets the next job when one returns: ``same``, ``uniform`` (over the idle clients) or
    ``round_robin``. Simultaneous uploads are all applied, in the order of clients, before any of the
    clients gets a new job: equal delays make rounds, and a buffer of all N clients is then FedAvg. If the budget ends
    within a buffer, its arrivals are listed and close no step.
    """
    return _buffered("buffer", size, concurrency, sampling)


def _buffered(name: str, size: int, concurrency: int | None, sampling: str) -> Timing:
    check.whole("size", size)
    check.optional(check.whole, "concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(scenario: Scenario) -> Schedule:
        require_asked(scenario, name, "buffer")
        jobs = jobs_under_way(scenario, concurrency)
        allowed = (
            f"at most the {jobs} clients in flight (it would never fill; a smaller one: METHOD@buffer:size={jobs})"
        )
        check.require(size <= jobs, "size", size, allowed)
        return plan_of(scenario)(scenario, int(size), jobs, sampling)

    return timing


def plan_of(scenario: Scenario) -> Callable[[Scenario, int, int, str], Schedule]:
    """``plan_buffer``, or the fast path that gives the same schedule."""
    conditions = scenario.conditions
    if scenario.decisions is None and conditions == NO_CONDITIONS:
        return fast_paths.buffer
    if scenario.decisions is None and conditions == NO_CONDITIONS._replace(
        limits=NO_LIMITS._replace(max_staleness=conditions.limits.max_staleness, late=conditions.limits.late)
    ):
        return fast_paths.buffer_of_fresh
    return plan_buffer


# Sound uploads in a row that complete no step, where a step waits for every client: then one of them is gone.
LONGEST_WAIT = 1_000_000


def _require_progress(waited: int) -> None:
    """``ValueError`` if ``waited`` uploads in a row have completed no step."""
    if waited > LONGEST_WAIT:
        raise ValueError(
            f"timing: of the last {LONGEST_WAIT} uploads not one completes a server step, for which it waits for every "
            "client: one of them does not return, or is too slow"
        )


class Filling:
    """The server step that is filling: whether a sound upload closes it."""

    def __init__(self, size: int, everyone: int) -> None:
        self.size, self._everyone = size, everyone  # the number of clients that must all take part; 0: any
        self._filled, self._clients = 0, set[int]()

    def closes(self, client: int) -> bool:
        """Count a sound upload of ``client``; whether the step is complete, so that the next one begins."""
        self._filled += 1
        if self._everyone:
            self._clients.add(client)
        if self._filled < self.size or len(self._clients) < self._everyone:
            if self._everyone:
                _require_progress(self._filled - self.size)
            return False
        self._filled = 0
        self._clients.clear()
        return True


class Turns:
    """Steps of cycles: each client uploads, and then has its turn, in which its next upload closes a step."""

    def __init__(self, clients: int) -> None:
        self._clients, self.size, self._waited = clients, 1, 0
        self._arrived = set[int]()  # in this cycle, before all had
        self._left = set[int]()  # clients whose turn is still to come, once all have arrived

    def closes(self, client: int) -> bool:
        """Count a sound upload of ``client``; whether it is its turn."""
        turn = client in self._left
        self._left.discard(client)
        if not turn:
            self._arrived.add(client)  # where turns are left, for the next cycle
            if not self._left and len(self._arrived) == self._clients:
                turn, self._left = True, set(range(self._clients)) - {client}
                self._arrived.clear()
        self._waited = 0 if turn else self._waited + 1
        _require_progress(self._waited)
        return turn


def plan_buffer(
    scenario: Scenario,
    size: int,
    concurrency: int,
    sampling: str,
    *,
    call_off: bool = False,
    everyone: bool = False,
    turns: bool = False,
) -> Schedule:
    """Every ``size`` sound arrivals are a server step; see ``buffer``.

    ``call_off``: jobs that have become staler than ``max_staleness`` by a moment's end are called off.
    ``everyone``: a step has an upload of every client. See ``fresh``. ``turns``: see ``turns``.
    """
    idle = idle_clients(scenario, concurrency, sampling)
    queue, size_of = idle.queue, _sizes(scenario, concurrency)
    events, horizon, patient, corrupt = queue.events, queue.horizon, queue.patient, queue.record.corrupt
    apply, release_one = queue.apply, idle.release_one
    budget_left = True
    stale = StaleJobs(idle) if call_off else None
    beyond = 0  # where jobs are called off: steps of a longer budget at the last moment
    queue.look(0.0)
    filling: Filling | Turns = Filling(size if size_of is None else size_of(), scenario.num_clients if everyone else 0)
    filling = Turns(scenario.num_clients) if turns else filling
    while (now := idle.next_event(horizon)) <= horizon and now < math.inf:
        releases: list[Release] = []
        while events and events[0][0] <= now:
            _, kind, client, job = event = heappop(events)
            if kind == FREED:
                queue.notice(job)
            capacity_freed, client_freed = (True, True) if patient else queue.release(event)[2:]
            if kind == UPLOAD and (budget_left or job in queue.withheld):
                outcome = _APPLIED if patient else queue.judge(job)
                if outcome in APPLIED:
                    closes = job not in corrupt and filling.closes(client)
                    budget_left = apply(job, outcome, now, closes)
                    if closes and size_of is not None and budget_left:
                        queue.look(now)
                        filling.size = size_of()
                    if not budget_left:
                        horizon = min(horizon, queue.record.end)  # this moment ends as any other: with the replies
                else:
                    queue.drop(job, outcome)
            elif kind == UPLOAD and call_off and not queue.too_stale(job, beyond):
                beyond += queue.judge(job) in APPLIED and job not in corrupt and filling.closes(client)
            if not releases and not call_off and (not events or events[0][0] > now):
                queue.look(now)
                release_one(job, client, capacity_freed, client_freed, now)  # usually the only event now
                break
            releases.append((job, client, capacity_freed, client_freed))
        else:
            queue.look(now)
            releases += [] if stale is None else stale.call_off(now, beyond)
            idle.release(releases, now)
    return queue.record.schedule(exhausted=budget_left and not events)


def _sizes(scenario: Scenario, most: int) -> Callable[[], int] | None:
    """The size of the next buffer, at most ``most``, if a policy decides it."""
    decisions = scenario.decisions
    if decisions is None or decisions.policy.buffer is None:
        return None
    return lambda: decisions.size(most)


def fresh(
    *,
    threshold: int = 1,
    size: int = 1,
    everyone: bool = False,
    stop: bool = True,
    concurrency: int | None = None,
    sampling: str = "uniform",
) -> Timing:
    """Every `size` uploads of a staleness below `threshold` are a server step; jobs that reach it are called off.

    A staler upload is dropped before it counts, as by the setting ``max_staleness = threshold - 1``, which may only
    lower the limit here. With ``stop`` such a job is called off at the server step that makes it too stale, and its
    client (or another, see ``buffer``) starts from the new model at once; without, the client trains to the end and
    its upload is dropped. Uploads that come at the very moment of that step still come. With ``everyone`` a step also
    waits for an upload of each client; if one never returns, a million uploads later this is an error.

    Sources: ``size=1``: Maranjyan, Tyurin, Richtarik (2025), "Ringmaster ASGD: the first asynchronous SGD with optimal
    time complexity", with its delay threshold R, Algorithm 4 (without stops) and 5 (with stops). ``threshold=1``: the
    batch of Rennala SGD, and with ``everyone`` that of Malenia SGD, Tyurin, Richtarik (2023), "Optimal time
    complexities of parallel stochastic optimization methods under a fixed computation model", which either stop
    unfinished calculations or ignore them.
    """
    check.whole("threshold", threshold)
    check.whole("size", size)
    for name, value in (("everyone", everyone), ("stop", stop)):
        check.kind(name, value, bool, "True or False")
    check.optional(check.whole, "concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(scenario: Scenario) -> Schedule:
        check.require(scenario.decisions is None, "timing", "fresh", "another one in a run with a policy")
        jobs, limits, most = jobs_under_way(scenario, concurrency), scenario.conditions.limits, int(threshold) - 1
        allowed = "left out with everyone and sampling = 'same': other clients never train"
        check.require(not everyone or jobs == scenario.num_clients or sampling != "same", "concurrency", jobs, allowed)
        most = most if limits.max_staleness is None else min(most, limits.max_staleness)
        conditions = scenario.conditions._replace(limits=limits._replace(max_staleness=most))
        scenario = scenario._replace(conditions=conditions)
        slow = functools.partial(plan_buffer, call_off=stop, everyone=everyone)
        plan = slow if stop or everyone else plan_of(scenario)
        return plan(scenario, int(size), jobs, sampling)

    return timing


def turns() -> Timing:
    """Cycles: each client uploads at least once, then each one's next upload is a server step of its own, its turn.

    All clients train, and start again at once. The upload that completes the first part of a cycle is the first turn.
    Uploads of clients that have had their turn close no step and count for the next cycle, which begins when all have
    had it. If a client never returns, this is an error after a million uploads.

    Source: Maranjyan, Richtarik (2025), "Ringleader ASGD", whose two phases these are.
    """

    def timing(scenario: Scenario) -> Schedule:
        check.require(scenario.decisions is None, "timing", "turns", "another one in a run with a policy")
        return plan_buffer(scenario, 1, scenario.num_clients, "same", turns=True)

    return timing


def require_asked(scenario: Scenario, name: str, asked: str | None = None) -> None:
    """``ValueError`` if the policy decides the end of a step in another way than ``asked``, that of the timing."""
    if scenario.decisions is None:
        return
    policy = scenario.decisions.policy
    who = f"policy = {policy.spec!r}" if policy.spec else "the policy"
    for field, decided in (("buffer", "how large it is"), ("window", "how long it is")):
        refused = field != asked and getattr(policy, field) is not None
        check.require(not refused, "timing", name, f"{field}: {who} decides {decided}")
