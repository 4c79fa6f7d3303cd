"""The timing policies under conditions: clients that come and go, jobs that fail, limits of the server.

The rules are those of ``timing``, of which these are the general cases; what is sent when, and what
becomes of it, is in ``unreliable``. A window acts on losses at its end, as on uploads. A cohort takes as
many clients as it wants of those that are there and have nothing to do; if there are fewer it begins
with these, if there are none it waits for the first. It ends when it has the uploads it wants, when no
job of it is left to wait for, or at its deadline; if nothing came it is no step, and the next one begins.

A corrupt upload is applied, and counts for nothing: it fills no place in a buffer and is none of the uploads that
a cohort wants. A window or a cohort closes its step with its last upload, whether corrupt or not, if one is sound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop

import numpy as np

from fedjax_async.clock import chance
from fedjax_async.clock.event_queue import SLACK
from fedjax_async.clock.outcomes import APPLIED, Outcome
from fedjax_async.clock.places import Places
from fedjax_async.clock.unreliable import FREED, UPLOAD, News, UnreliableQueue
from fedjax_async.clock.world import World
from fedjax_async.types import Schedule

_APPLIED = Outcome.APPLIED  # by itself: looking it up in its class takes time

# A cohort that met its deadline with no upload so many times in a row never will.
FRUITLESS_ROUNDS = 1000


def buffer(world: World, size: int, concurrency: int, sampling: str) -> Schedule:
    """Every ``size`` arrivals are a server step; see ``timing.buffer``."""
    places = Places(world, concurrency, sampling)
    queue = places.queue
    events, horizon, patient = queue.events, queue.horizon, queue.patient
    filled, funded, apply, exchange, corrupt = 0, True, queue.apply, places.exchange, queue.record.corrupt
    while funded and (now := places.next_event()) <= horizon and now < math.inf:
        news: list[News] = []
        while funded and events and events[0][0] <= now:
            _, kind, client, job = event = heappop(events)
            if kind == FREED:
                queue.notice(job)
            place, idle = (True, True) if patient else queue.news(event)[2:]
            if kind == UPLOAD:
                outcome = _APPLIED if patient else queue.judge(job)
                if outcome in APPLIED:
                    sound = job not in corrupt
                    filled = (filled + sound) % size
                    funded = apply(job, outcome, now, sound and filled == 0)
                else:
                    queue.drop(job, outcome)
            if not news and funded and (not events or events[0][0] > now):
                exchange(job, client, place, idle, now)  # of most moments it is the only event
                break
            news.append((job, client, place, idle))
        else:
            if funded:
                places.release(news, now)
    return queue.record.schedule(world)


def window(world: World, length: float, concurrency: int, sampling: str) -> Schedule:
    """Every ``length`` seconds are a server step; see ``timing.window``."""
    places = Places(world, concurrency, sampling)
    queue = places.queue
    count, funded = 0, True
    while funded and (now := min(queue.next_time(), places.next_time())) <= queue.horizon and now < math.inf:
        count = max(count + 1, math.floor(now / length))
        while count * length * SLACK < now:
            count += 1
        end = count * length
        limit = min(end * SLACK, queue.horizon)
        uploads, news = [], []
        while (now := min(queue.next_time(), places.next_time())) <= limit:
            while (event := queue.take(now if now < end else limit)) is not None:
                news.append(queue.news(event))
                if event[1] == UPLOAD:
                    uploads.append(event[3])
                if event[0] > end:
                    queue.record.no_later(event[3], end)
            if now >= end:
                break  # clients that appear at the end of the window leave with the others
            places.fill(now)
        if end > queue.horizon:
            break
        funded = queue.apply_step([(job, queue.judge(job)) for job in uploads], end)
        if funded:
            places.release(news, end)
    return queue.record.schedule(world)


def cohort(world: World, wanted: int, selected: int, deadline: float | None) -> Schedule:
    """Synchronous rounds of ``selected`` clients, ``wanted`` uploads and at most ``deadline`` seconds."""
    rng = chance.generator(world.seed, "rounds")
    queue = UnreliableQueue(world)
    down: dict[int, float] = {}  # crashed clients, until when
    start, rounds, fruitless = 0.0, 0, 0
    while start <= queue.horizon:
        chosen = _choose(queue, down, rng, world, selected, rounds, start)
        if not chosen:
            queue.foresee(range(world.num_clients), start)
            start = min(_ready(queue, down, client, start) for client in range(world.num_clients))
            if start == math.inf:
                break
            continue
        queue.prepare(chosen)
        for client in chosen:
            queue.dispatch(client, start)
        judged, end = _round(queue, wanted, len(chosen), math.inf if deadline is None else start + deadline)
        if end > queue.horizon:
            break
        down = {client: until for client, until in down.items() if until > end} | queue.call_off(end)
        if not queue.apply_step(judged, end):
            break
        start, rounds = end, rounds + 1
        fruitless = 0 if any(_counts(queue, job, outcome) for job, outcome in judged) else fruitless + 1
        if fruitless == FRUITLESS_ROUNDS:
            raise ValueError(f"faults, deadline = {deadline}: {fruitless} rounds in a row without an upload")
    return queue.record.schedule(world)


def _round(queue: UnreliableQueue, wanted: int, left: int, limit: float) -> tuple[list[tuple[int, Outcome]], float]:
    """Wait for ``wanted`` uploads of ``left`` jobs: the uploads with what becomes of them, and the round's end."""
    judged: list[tuple[int, Outcome]] = []
    fit, end = 0, limit
    while left and fit < wanted:
        event = queue.take(min(limit, queue.horizon))
        if event is None:
            return judged, limit
        end, kind, _, job = event
        left -= queue.news(event)[2]
        if kind == UPLOAD:
            judged.append((job, queue.judge(job)))
            fit += _counts(queue, *judged[-1])
    return judged, end


def _counts(queue: UnreliableQueue, job: int, outcome: Outcome) -> bool:
    """Whether an upload is one of those that a round waits for."""
    return outcome in APPLIED and queue.record.sound(job)


def _ready(queue: UnreliableQueue, down: dict[int, float], client: int, time: float) -> float:
    """When a client is there and up: now, or as soon as it is."""
    up = max(time, down.get(client, time))
    return max(up, queue.there(client, up)[0])


def _choose(
    queue: UnreliableQueue,
    down: dict[int, float],
    rng: np.random.Generator,
    world: World,
    selected: int,
    rounds: int,
    time: float,
) -> list[int]:
    """Up to ``selected`` clients that can go now, each set of them equally probable, in order of number."""
    chosen: list[int] = []
    for clients in _tried(rng, world, selected, rounds):
        queue.foresee(clients, time)
        chosen += [client for client in clients if _ready(queue, down, client, time) <= time]
        if len(chosen) >= selected:
            break
    return sorted(chosen[:selected])


def _tried(rng: np.random.Generator, world: World, selected: int, rounds: int) -> Iterator[list[int]]:
    """All clients in random order, some at a time, the first of them as in a world where everybody is there."""
    first = rng.choice(world.num_clients, selected, replace=False).tolist()
    yield first
    more = chance.generator(world.seed, "substitutes", rounds)
    tried = set(first)
    while 2 * len(tried) < world.num_clients:  # most guesses are new
        guesses = dict.fromkeys(more.integers(world.num_clients, size=selected).tolist())
        new = [client for client in guesses if client not in tried]
        tried.update(new)
        yield new
    rest = np.setdiff1d(np.arange(world.num_clients), np.fromiter(tried, np.int64, len(tried)))
    yield more.permutation(rest).tolist()
