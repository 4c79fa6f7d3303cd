"""Timings: when the server applies uploads, when it completes a step, and which client trains next.

A timing is ``timing(scenario) -> Schedule``; the factories, registry ``TIMINGS``, take the options of its spec. Each
has one definition, for any conditions: ``plan_buffer``, ``plan_window``, ``plan_cohort`` (``cohorts.py``). Without
conditions other than ``max_staleness``, buffered timings use ``fast_paths.py``: the same schedule, faster.

Rules common to all: a client gets the current model at the moment of its dispatch, after the arrivals applied so far.
It gets the next job only after its upload was applied (or its job was lost or called off). Jobs under way at the end of
the budget are listed among the jobs, never among the arrivals; so are those that the server sends at the very moment at
which the budget is spent, the replies to the last uploads, whatever the budget counts. ``event_queue.py`` says what is
sent when, and with which outcome.

Which uploads count is decided as far as the clock can know. Uploads too late or too stale for the server's limits
are not arrivals. Corrupt uploads are arrivals, but fill no buffer and no cohort, and a step without a sound upload is
not closed. The clock does not know the result of training: an upload that is rejected because it is not finite or
too large still fills its buffer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from heapq import heappop

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock import chance, fast_paths
from fedjax_async.clock.calling_off import StaleJobs
from fedjax_async.clock.cohorts import plan_cohort
from fedjax_async.clock.compass import compass
from fedjax_async.clock.durations import Profiles, Scaling, Speeds, from_profiles
from fedjax_async.clock.event_queue import FREED, UPLOAD, Release
from fedjax_async.clock.idle_clients import SUCCESSORS, idle_clients
from fedjax_async.clock.record import APPLIED, SLACK, Outcome
from fedjax_async.clock.scenario import NO_CONDITIONS, NO_LIMITS, Scenario, in_units
from fedjax_async.types import Schedule

Timing = Callable[[Scenario], Schedule]

_APPLIED = Outcome.APPLIED  # by itself: the look-up in the class takes time


def _jobs_under_way(scenario: Scenario, concurrency: int | None) -> int:
    if concurrency is None:
        return scenario.num_clients
    check.whole("concurrency", concurrency, low=1, high=scenario.num_clients)
    return int(concurrency)


# --- every K arrivals ---------------------------------------------------------------------------


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
        _require_asked(scenario, name, "buffer")
        jobs = _jobs_under_way(scenario, concurrency)
        allowed = (
            f"at most the {jobs} clients in flight (it would never fill; a smaller one: METHOD@buffer:size={jobs})"
        )
        check.require(size <= jobs, "size", size, allowed)
        return _plan_of(scenario)(scenario, int(size), jobs, sampling)

    return timing


def _plan_of(scenario: Scenario) -> Callable[[Scenario, int, int, str], Schedule]:
    """``plan_buffer``, or the fast path that gives the same schedule."""
    conditions = scenario.conditions
    if scenario.decisions is None and conditions == NO_CONDITIONS:
        return fast_paths.buffer
    if scenario.decisions is None and conditions == NO_CONDITIONS._replace(
        limits=NO_LIMITS._replace(max_staleness=conditions.limits.max_staleness, late=conditions.limits.late)
    ):
        return fast_paths.buffer_of_fresh
    return plan_buffer


class _Filling:
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
            return False
        self._filled = 0
        self._clients.clear()
        return True


def plan_buffer(
    scenario: Scenario, size: int, concurrency: int, sampling: str, *, call_off: bool = False, everyone: bool = False
) -> Schedule:
    """Every ``size`` sound arrivals are a server step; see ``buffer``.

    ``call_off``: jobs that have become staler than ``max_staleness`` by a moment's end are called off.
    ``everyone``: a step has an upload of every client. See ``fresh``.
    """
    idle = idle_clients(scenario, concurrency, sampling)
    queue, size_of = idle.queue, _sizes(scenario, concurrency)
    events, horizon, patient, corrupt = queue.events, queue.horizon, queue.patient, queue.record.corrupt
    apply, release_one = queue.apply, idle.release_one
    budget_left = True
    stale = StaleJobs(queue) if call_off else None
    beyond = 0  # where jobs are called off: steps of a longer budget at the last moment
    queue.look(0.0)
    filling = _Filling(size if size_of is None else size_of(), scenario.num_clients if everyone else 0)
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
    waits for an upload of each client; a client that never returns stops the run.

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
        jobs, limits, most = _jobs_under_way(scenario, concurrency), scenario.conditions.limits, int(threshold) - 1
        allowed = "left out with everyone and sampling = 'same': other clients never train"
        check.require(not everyone or jobs == scenario.num_clients or sampling != "same", "concurrency", jobs, allowed)
        most = most if limits.max_staleness is None else min(most, limits.max_staleness)
        conditions = scenario.conditions._replace(limits=limits._replace(max_staleness=most))
        scenario = scenario._replace(conditions=conditions)
        slow = functools.partial(plan_buffer, call_off=stop, everyone=everyone)
        plan = slow if stop or everyone else _plan_of(scenario)
        return plan(scenario, int(size), jobs, sampling)

    return timing


def _require_asked(scenario: Scenario, name: str, asked: str | None = None) -> None:
    """``ValueError`` if the policy decides the end of a step in another way than ``asked``, that of the timing."""
    if scenario.decisions is None:
        return
    policy = scenario.decisions.policy
    who = f"policy = {policy.spec!r}" if policy.spec else "the policy"
    for field, decided in (("buffer", "how large it is"), ("window", "how long it is")):
        refused = field != asked and getattr(policy, field) is not None
        check.require(not refused, "timing", name, f"{field}: {who} decides {decided}")


# --- every W seconds ----------------------------------------------------------------------------


def window(*, length: float = 60.0, concurrency: int | None = None, sampling: str = "uniform") -> Timing:
    """Every `length` seconds are a server step: what arrived is applied at the window's end, then clients start again.

    An upload at the very end still counts, and so does one that is later by a rounding error only: its
    ``upload_time`` is then the window's end. Uploads are applied in order of arrival, the last one closes
    the step; then their clients (or others, see ``buffer``) start from the new model. A window without an arrival is
    no step. Lost jobs too are noticed at the window's end.

    A policy that decides the length is asked at the start, and at the end of each window in which something happened.
    A window in which nothing happened is as long as the one before.
    """
    check.real_positive("length", length)
    check.optional(check.whole, "concurrency", concurrency)
    registry.find("sampling", SUCCESSORS, sampling)

    def timing(scenario: Scenario) -> Schedule:
        _require_asked(scenario, "window", "window")
        return plan_window(scenario, length, _jobs_under_way(scenario, concurrency), sampling)

    return timing


def plan_window(scenario: Scenario, length: float, concurrency: int, sampling: str) -> Schedule:
    """Every ``length`` seconds are a server step if a sound upload came; see ``window``."""
    idle = idle_clients(scenario, concurrency, sampling)
    queue, decisions = idle.queue, scenario.decisions
    next_length = None if decisions is None or decisions.policy.window is None else decisions.length
    if next_length is not None:
        queue.look(0.0)
        length = next_length()
    # The ends of equal windows are multiples of their length after ``start``, so that rounding errors do not add up.
    start, count, budget_left, exhausted = 0.0, 0, True, False
    while budget_left and (now := idle.next_event()) <= queue.horizon and now < math.inf:
        count = max(count + 1, math.floor((now - start) / length))
        while (start + count * length) * SLACK < now:
            count += 1
        end = start + count * length
        limit = min(end * SLACK, queue.horizon)
        uploads, releases = [], []
        while (now := idle.next_event(limit)) <= limit:
            while (event := queue.pop(now if now < end else limit)) is not None:
                releases.append(queue.release(event))
                if event[1] == UPLOAD:
                    uploads.append(event[3])
                if event[0] > end:
                    queue.record.no_later(event[3], end)
            if now >= end:
                break  # clients that come online at the end of the window start with the others
            idle.fill(now)
        if end > queue.horizon:
            break
        budget_left = queue.apply_step([(job, queue.judge(job)) for job in uploads], end)
        queue.look(end)
        if next_length is not None and budget_left and (decided := next_length()) != length:
            start, count, length = end, 0, decided
        idle.release(releases, end)
    else:
        exhausted = budget_left and not queue.events  # else uploads may still wait for the end of their window
    return queue.record.schedule(exhausted=exhausted)


# --- synchronous cohorts ------------------------------------------------------------------------


def cohort(*, size: int | None = None, over_selection: int = 0, deadline: float | None = None) -> Timing:
    """Synchronous rounds: `size` random clients, all from one model; the round lasts as long as the slowest.

    ``size``: 10 by default, or all clients if there are fewer. ``over_selection`` more are dispatched,
    and as many of the slowest dropped. With a ``deadline`` the server waits at most that many seconds and
    drops late uploads. All uploads are applied at the round's end, in order of arrival; then the next cohort starts.
    Dropped jobs are called off at that moment: their ``upload_time`` is infinite.

    A cohort is drawn from the clients that are online and up. If there are fewer than wanted, the round begins with
    these; if there is none, it waits for the first. A round also ends when no job is left to wait for. The last
    upload closes the step if one of the uploads is sound; otherwise the round is no step.
    """
    check.optional(check.whole, "size", size)
    check.whole("over_selection", over_selection, low=0)
    check.optional(check.real_positive, "deadline", deadline)

    def timing(scenario: Scenario) -> Schedule:
        _require_asked(scenario, "cohort")
        wanted = min(10, scenario.num_clients - int(over_selection)) if size is None else int(size)
        selected = wanted + int(over_selection)
        allowed = f"at most {scenario.num_clients}, the number of clients"
        check.require(wanted >= 1 and selected <= scenario.num_clients, "size + over_selection", selected, allowed)
        return plan_cohort(scenario, wanted, selected, deadline)

    return timing


# --- participation sets -------------------------------------------------------------------------


def participation(*, probability: float = 0.5, spread: float = 0.0, length: float = 1.0) -> Timing:
    """Rounds of `length` seconds: a random set of clients uploads, the others train `local_steps` more.

    Client i is in a round's set S_t with probability ``p_i``, independently: ``p_i`` is drawn once,
    uniform in ``probability * (1 -+ spread)``. An upload after tau rounds holds ``tau * local_steps``
    steps (``Schedule.local_steps`` says so); then the client starts from the new model. The delay model
    is not used. A round without participants is no server step.

    This is Algorithm 1 of AsynFL (2025) read literally: a window with "delays" that are whole numbers of
    rounds, geometrically distributed.
    """
    check.real_positive("probability", probability)
    check.in_range("probability", probability, 0, 1)
    check.real_non_negative("spread", spread)
    check.require(spread <= 1, "spread", spread, "between 0 and 1")
    highest = probability * (1 + spread)
    check.require(highest <= 1, "probability * (1 + spread)", highest, "at most 1")
    check.real_positive("length", length)

    def timing(scenario: Scenario) -> Schedule:
        check.require(scenario.decisions is None, "timing", "participation", "another one in a run with a policy")
        # Counted in rounds, all times are whole numbers and exact; they become seconds at the end.
        time = None if scenario.until.time is None else scenario.until.time / length
        delays = _rounds_until_upload(probability, spread)(scenario.num_clients, scenario.seed)
        in_rounds = scenario._replace(
            delays=delays,
            until=scenario.until._replace(time=time),
            conditions=in_units(scenario.conditions, length),
        )
        schedule = plan_window(in_rounds, 1.0, scenario.num_clients, "same")
        trained = np.rint(delays.durations(schedule.client, schedule.number)).astype(np.int64)
        return schedule._replace(
            local_steps=(schedule.local_steps * trained).astype(np.int32),
            dispatch_time=schedule.dispatch_time * length,
            upload_time=schedule.upload_time * length,
            time=schedule.time * length,
            freed_time=schedule.freed_time * length,
            failure_time=schedule.failure_time * length,
        )

    return timing


def _rounds_until_upload(probability: float, spread: float) -> Callable:
    """Delays, in rounds, until a client participates: geometric with its own probability."""

    def profiles(count: int, seed: int) -> Profiles:
        draws = chance.Draws(seed, "participation", np.arange(count))
        chances = probability * (1 + spread * (1 - 2 * draws.random()))
        return Profiles(1 / chances, np.zeros(count), np.ones(count))

    def geometric(draws: chance.Draws, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
        return draws.geometric(1 / mean)

    return from_profiles(profiles, geometric, Scaling(), Speeds())


TIMINGS: dict[str, Callable[..., Timing]] = {
    "every": every,
    "buffer": buffer,
    "fresh": fresh,
    "window": window,
    "cohort": cohort,
    "participation": participation,
    "compass": compass,
}
