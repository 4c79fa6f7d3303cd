"""Synchronous rounds: which clients form a cohort, and how long the server waits for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.clock.event_queue import UPLOAD, EventQueue
from fedjax_async.clock.record import APPLIED, SLACK, Outcome
from fedjax_async.clock.scenario import Scenario
from fedjax_async.types import Schedule

# After so many cohorts in a row without an upload that counts, none is expected to come.
FRUITLESS_ROUNDS = 1000


def plan_cohort(scenario: Scenario, wanted: int, selected: int, deadline: float | None) -> Schedule:
    """Rounds of ``selected`` clients that wait for ``wanted`` sound uploads, at most ``deadline`` seconds."""
    rng = chance.generator(scenario.seed, "rounds")
    queue = EventQueue(scenario)
    down: dict[int, float] = {}  # crashed clients, until when
    start, rounds, fruitless, budget_left = 0.0, 0, 0, True
    while start <= queue.horizon:
        queue.look(start)
        chosen = _choose_cohort(queue, down, rng, scenario, selected, rounds, start)
        if not chosen and budget_left:
            queue.announce(range(scenario.num_clients), start)
            start = min(_ready_time(queue, down, client, start) for client in range(scenario.num_clients))
            if start == math.inf:
                break
            continue
        queue.prepare(chosen)
        for client in chosen:
            queue.dispatch(client, start)
        if not budget_left:
            break
        judged, end = _wait(queue, wanted, len(chosen), math.inf if deadline is None else start + deadline)
        if end > queue.horizon:
            break
        down = {client: until for client, until in down.items() if until > end} | queue.call_off(end)
        budget_left = queue.apply_step(judged, end)
        start, rounds = end, rounds + 1
        fruitless = 0 if any(_counts(queue, job, outcome) for job, outcome in judged) else fruitless + 1
        if fruitless == FRUITLESS_ROUNDS and budget_left:
            if queue.asks and queue.decisions.withheld >= fruitless:
                raise queue.decisions.nothing_uploaded()
            told = " (those that came were corrupt)" if queue.record.corrupt else ""
            raise ValueError(
                f"{_obstacles(scenario, deadline)}: must let some uploads count; {fruitless} rounds without a sound "
                f"upload{told}"
            )
    return queue.record.schedule(exhausted=budget_left and not queue.events)


def _obstacles(scenario: Scenario, deadline: float | None) -> str:
    """What can keep uploads from counting: the settings that are given."""
    availability, faults, limits = scenario.conditions
    numbers = {"deadline": deadline, "timeout": limits.timeout, "max_staleness": limits.max_staleness}
    given = {"faults": faults, "availability": availability}
    named = [name for name, sources in given.items() if sources]
    return ", ".join([*named, *(f"{name} = {value}" for name, value in numbers.items() if value is not None)])


def _wait(queue: EventQueue, wanted: int, under_way: int, limit: float) -> tuple[list[tuple[int, Outcome]], float]:
    """Wait for ``wanted`` sound uploads of the jobs under way: all uploads with their outcomes, and the round's end."""
    judged: list[tuple[int, Outcome]] = []
    came, end = 0, limit
    while under_way and came < wanted:
        event = queue.pop(min(limit * SLACK, queue.horizon))
        if event is None:
            return judged, limit
        moment, kind, _, job = event
        end = min(moment, limit)
        if moment > end:
            queue.record.no_later(job, end)
        under_way -= queue.release(event)[2]
        if kind == UPLOAD:
            judged.append((job, queue.judge(job)))
            came += _counts(queue, *judged[-1])
    return judged, end


def _counts(queue: EventQueue, job: int, outcome: Outcome) -> bool:
    """Whether an upload is one of those that a round waits for."""
    return outcome in APPLIED and queue.record.sound(job)


def _ready_time(queue: EventQueue, down: dict[int, float], client: int, time: float) -> float:
    """When a client is online and up: now, or as soon as it is."""
    up = max(time, down.get(client, time))
    return max(up, queue.interval_now(client, up)[0])


def _choose_cohort(
    queue: EventQueue,
    down: dict[int, float],
    rng: np.random.Generator,
    scenario: Scenario,
    selected: int,
    rounds: int,
    time: float,
) -> list[int]:
    """Up to ``selected`` clients that can get a job now, ascending: all sets equally probable, or a policy's choice."""
    chosen: list[int] = []
    if queue.decisions is not None and queue.decisions.policy.choose is not None:
        queue.announce(range(scenario.num_clients), time)
        idle = [client for client in range(scenario.num_clients) if _ready_time(queue, down, client, time) <= time]
        return queue.decisions.choose(np.array(idle), min(selected, len(idle)), alone=True) if idle else []
    for clients in _random_order(rng, scenario, selected, rounds):
        queue.announce(clients, time)
        chosen += [client for client in clients if _ready_time(queue, down, client, time) <= time]
        if len(chosen) >= selected:
            break
    return sorted(chosen[:selected])


def _random_order(rng: np.random.Generator, scenario: Scenario, selected: int, rounds: int) -> Iterator[list[int]]:
    """All clients in random order, some at a time; the first ones are drawn as if all clients were online."""
    first = rng.choice(scenario.num_clients, selected, replace=False).tolist()
    yield first
    more = chance.generator(scenario.seed, "substitutes", rounds)
    tried = set(first)
    while 2 * len(tried) < scenario.num_clients:  # most guesses are new
        guesses = dict.fromkeys(more.integers(scenario.num_clients, size=selected).tolist())
        new = [client for client in guesses if client not in tried]
        tried.update(new)
        yield new
    others = np.setdiff1d(np.arange(scenario.num_clients), np.fromiter(tried, np.int64, len(tried)))
    yield more.permutation(others).tolist()
