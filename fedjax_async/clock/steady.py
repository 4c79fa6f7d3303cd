"""Asynchrony in a reliable world, at millions of events a second: policies whose clients leave when they return.

Without absences and losses every upload sends one client off, so job ``C + e`` is the one that arrival
``e`` sends, and all columns follow from the order of arrivals. Where clients send themselves off again,
that order is a merge of the clients' own timelines, made with whole arrays. Where others are drawn, a
heap finds it; who is drawn and for how long is prepared with whole arrays as far as it is known ahead.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.event_queue import SLACK, turns
from fedjax_async.clock.outcomes import Outcome
from fedjax_async.clock.stock import AHEAD, stocked
from fedjax_async.clock.successors import Rule
from fedjax_async.clock.world import World, checked_durations, too_short
from fedjax_async.types import Schedule

# Events that one step of the merge adds to the timelines of those that lag behind, at the most.
_CHUNK = 1 << 18


class Arrivals(NamedTuple):
    """Who arrives when. ``client`` and ``number`` (one a job), ``upload`` (one a job), ``job`` (one an arrival)."""

    client: np.ndarray
    number: np.ndarray
    upload: np.ndarray
    job: np.ndarray


def budget(world: World, size: int) -> tuple[float, float]:
    """The most arrivals, and the last moment, that the budget admits when every ``size`` arrivals are a step."""
    until = world.until
    most = min(
        math.inf if until.updates is None else until.updates, math.inf if until.steps is None else until.steps * size
    )
    return most, math.inf if until.time is None else until.time * SLACK


def buffered(world: World, size: int, concurrency: int, arrivals: Arrivals) -> Schedule:
    """The schedule of ``arrivals`` of which every ``size`` are a server step.

    Jobs that the end of the budget leaves unsent are cut off: of uploads at the very moment at which it
    is spent, none sends anybody.
    """
    job = arrivals.job
    time = arrivals.upload[job]
    spent = len(job) == budget(world, size)[0]
    sending = int(np.searchsorted(time, time[-1])) if spent else len(job)
    jobs = concurrency + sending
    client = arrivals.client[:jobs].astype(np.int32)
    upload = arrivals.upload[:jobs]
    started = np.zeros(concurrency, np.int64)
    dispatched_after = np.concatenate([started, np.searchsorted(time, time[:sending], side="right")])
    position = np.arange(1, len(job) + 1)
    outcome = np.full(jobs, Outcome.UNDER_WAY, np.int8)
    outcome[job] = Outcome.APPLIED
    return Schedule(
        num_clients=world.num_clients,
        client=client,
        number=arrivals.number[:jobs].astype(np.int32),
        local_steps=world.local_steps[client].astype(np.int32),
        dispatch_time=np.concatenate([np.zeros(concurrency), time[:sending]]),
        upload_time=upload,
        dispatched_after=dispatched_after,
        version=dispatched_after // size,
        job=job,
        time=time,
        closes=position % size == 0,
        step=(position - 1) // size,
        outcome=outcome,
        freed_time=upload.copy(),
        corrupt=np.zeros(jobs, np.bool_),
        copies=np.zeros(jobs, np.int8),
    )


def sampled(world: World, size: int, concurrency: int, rule: Rule) -> Arrivals:
    """The arrivals when a client drawn by ``rule`` leaves in the stead of each that returns."""
    clientele = rule(world.num_clients, concurrency, world.seed)
    candidates = clientele.candidates
    most, horizon = budget(world, size)
    first, idle = sorted(candidates[:concurrency]), array("i", candidates[concurrency:])
    count = len(idle)
    idle.append(-1)
    heap: list[tuple[float, int, int]] = []

    def returning(client: int) -> Iterable[int]:
        # Where many are idle, all but few of those that leave are foreseen anyway.
        return (event[1] for event in heap[:AHEAD]) if count < AHEAD else ()

    stock = stocked(partial(checked_durations, world), world.num_clients, concurrency + most, returning)
    uploads = array("d", stock.take_each(np.array(first)).tobytes())
    heap += zip(uploads, first, range(concurrency))
    heapq.heapify(heap)
    clients, arrived = array("q", first), array("q")
    take, replace, next_job = stock.take, heapq.heapreplace, concurrency
    events = _foreseen(np.frombuffer(idle, np.int32), clientele.places(count), stock.take_each)
    for place, foreseen, ready in islice(events, None if most == math.inf else int(most)):
        now, client, job = heap[0]
        if now > horizon:
            break
        arrived.append(job)
        if ready:
            chosen, upload = foreseen, now + ready
        else:
            idle[count] = client
            chosen = idle[place]
            upload = now + take(chosen)
        idle[place] = client
        if upload <= now:
            raise too_short(chosen, now)
        clients.append(chosen)
        uploads.append(upload)
        replace(heap, (upload, chosen, next_job))
        next_job += 1
    columns = [np.array(column) for column in (clients, uploads, arrived)]
    return Arrivals(columns[0], turns(columns[0]), *columns[1:])


def _foreseen(
    idle: np.ndarray, places: Iterator[np.ndarray], take_each: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[int, int, float]]:
    """For each event the place that is drawn and, of most, who is drawn there and the seconds of the job; else 0.

    Who is in a place is known ahead until it is drawn for the second time: then somebody has returned there.
    """
    count = len(idle) - 1
    first = np.empty(count + 1, np.int32)

    def ahead(some: np.ndarray) -> Iterable[tuple[int, int, float]]:
        if count < AHEAD:  # most would be drawn again soon
            return zip(some.tolist(), repeat(0), repeat(0.0))
        order, clients, seconds = np.arange(len(some)), idle[some], np.zeros(len(some))
        first[some[::-1]] = order[::-1]
        known = (first[some] == order) & (some < count)
        seconds[known] = take_each(clients[known])
        return zip(some.tolist(), clients.tolist(), seconds.tolist())

    return chain.from_iterable(
        ahead(block[begin : begin + AHEAD]) for block in places for begin in range(0, len(block), AHEAD)
    )


def merged(world: World, size: int, concurrency: int) -> Arrivals:
    """The arrivals when the clients 0..C-1 leave again as soon as they return."""
    most, horizon = budget(world, size)
    client, number, time = _timelines(world, concurrency, most, horizon)
    within = np.flatnonzero(time <= horizon)
    order = within[np.lexsort((client[within], time[within]))]
    if len(order) > most:
        order = order[: int(most)]
    who, which = client[order], number[order]
    # Job C + e is the one that arrival e sends; so that of an arrival is known from its client's arrival before.
    own = np.argsort(who, kind="stable")
    job = np.empty(len(order), np.int64)
    job[own[1:]] = concurrency + own[:-1]
    begins = which == 0
    job[begins] = who[begins]
    everyone = np.arange(concurrency)
    jobs_client, jobs_number = np.concatenate([everyone, who]), np.concatenate([np.zeros_like(everyone), which + 1])
    upload = np.empty(len(jobs_client))
    upload[job] = time[order]
    # What is under way at the end: each client's job after its last arrival.
    done = np.bincount(who, minlength=concurrency)
    latest = everyone.copy()
    latest[who] = concurrency + np.arange(len(who))
    open_ = np.flatnonzero(number == done[client])
    upload[latest[client[open_]]] = time[open_]
    return Arrivals(jobs_client, jobs_number, upload, job)


def _timelines(
    world: World, concurrency: int, most: float, horizon: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Uploads (client, number, time) of the clients 0..C-1: all that the budget admits, and each client's next.

    The timelines are drawn until every client's reaches beyond the moment at which the budget ends, as far
    as that is known: no later than the ``most``-th earliest upload drawn so far.
    """
    everyone = np.arange(concurrency)
    reach, drawn = np.zeros(concurrency), np.zeros(concurrency, np.int64)
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    lagging, rows = everyone, 1
    if most < math.inf:
        rows = min(max(1, math.ceil(1.1 * most / concurrency)), max(1, 2 * _CHUNK // concurrency))
    while len(lagging):
        depth = max(1, min(rows, _CHUNK // len(lagging)))
        numbers = drawn[lagging] + np.arange(depth)[:, None]
        clients = np.broadcast_to(lagging, numbers.shape)
        durations = checked_durations(world, lagging, numbers)
        times = np.cumsum(np.concatenate([reach[lagging][None], durations]), axis=0)
        stuck = np.argwhere(times[1:] <= times[:-1])
        if len(stuck):
            row, column = stuck[0]
            raise too_short(int(lagging[column]), float(times[row, column]))
        columns.append((clients.reshape(-1), numbers.reshape(-1), times[1:].reshape(-1)))
        reach[lagging], drawn[lagging] = times[-1], drawn[lagging] + depth
        end = horizon
        if sum(len(times) for _, _, times in columns) >= most:
            together = np.concatenate([times for _, _, times in columns])
            end = min(end, float(np.partition(together, int(most) - 1)[int(most) - 1]))
        lagging = np.flatnonzero(reach <= end)
        rows *= 2
    client, number, time = (np.concatenate(column) for column in zip(*columns))
    return client, number, time
