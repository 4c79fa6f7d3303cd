"""Timings: when the server applies uploads, when it completes a step, and which client trains next.

A timing is ``timing(scenario) -> Schedule``; the factories, registry ``TIMINGS``, take the options of its spec. Each
has one definition, for any conditions: ``plan_buffer`` (``buffering.py``), ``plan_window``, ``plan_cohort``
(``cohorts.py``). Without
conditions other than ``max_staleness``, buffered timings use ``fast_paths.py``: the same schedule, faster.
A timing says by an attribute what else a run must know: ``ends_jobs``, that a job has as many local steps as it has
made when the server wants its upload, so that its client cannot know them; ``cuts_jobs``, that jobs come in two parts;
``ignores``, the settings that it does not use.

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

import math
from collections.abc import Callable

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock import chance
from fedjax_async.clock.buffering import Timing, buffer, every, fresh, jobs_under_way, require_asked, turns
from fedjax_async.clock.cohorts import plan_cohort
from fedjax_async.clock.compass import compass
from fedjax_async.clock.durations import Profiles, Scaling, Speeds, from_profiles
from fedjax_async.clock.event_queue import UPLOAD
from fedjax_async.clock.hurry import hurry
from fedjax_async.clock.idle_clients import SUCCESSORS, idle_clients
from fedjax_async.clock.midway import midway
from fedjax_async.clock.pacing import pace
from fedjax_async.clock.polling import polling
from fedjax_async.clock.record import SLACK
from fedjax_async.clock.scenario import MOST_STEPS, Scenario, in_units
from fedjax_async.types import Schedule

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
        require_asked(scenario, "window", "window")
        return plan_window(scenario, length, jobs_under_way(scenario, concurrency), sampling)

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
        require_asked(scenario, "cohort")
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

    Faults that make a job late, or its client slow, add rounds in which nothing is trained.

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
        steps = schedule.local_steps * np.rint(delays.durations(schedule.client, schedule.number))
        most = steps.max(initial=0)
        allowed = f"larger: a job would train {most:.4g} local steps, and at most {MOST_STEPS} are possible"
        check.require(most <= MOST_STEPS, "probability", probability, allowed)
        return schedule._replace(
            local_steps=steps.astype(np.int32),
            dispatch_time=schedule.dispatch_time * length,
            upload_time=schedule.upload_time * length,
            time=schedule.time * length,
            freed_time=schedule.freed_time * length,
            failure_time=schedule.failure_time * length,
        )

    timing.ends_jobs = True  # type: ignore[attr-defined]
    timing.ignores = ("delay", "network")  # type: ignore[attr-defined]
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
    "turns": turns,
    "midway": midway,
    "polling": polling,
    "hurry": hurry,
    "pace": pace,
}
