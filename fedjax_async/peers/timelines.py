"""When the nodes of a decentralised run compute, and when they are online.

Nodes never wait for messages here, so each node's timeline follows from its own durations and absences: it trains
whenever it is online. What the rules of absence (``leaving`` in ``availability.py``) and the faults of jobs mean for a
compute event:

* ``finish``: an event that has begun ends; ``pause``: it continues when the node is back.
* ``lose``, and a crash: the event leaves no trace. When the node is back it begins anew, with the messages that lay in
  its buffer.

Durations and crashes are drawn per attempt: after a lost event, the next attempt has new draws.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from fedjax_async.clock.availability import together
from fedjax_async.clock.budget import Forecast
from fedjax_async.clock.durations import PREDICTED, DurationCache
from fedjax_async.clock.event_queue import FRUITLESS
from fedjax_async.clock.fast_paths import timelines
from fedjax_async.clock.job_outcomes import JobDraw, JobOutcome, draw_jobs, job_outcomes
from fedjax_async.clock.record import SLACK, Outcome, order_by_client
from fedjax_async.clock.scenario import NO_CONDITIONS, Scenario, too_short
from fedjax_async.peers.receivers import Online
from fedjax_async.peers.segments import bounds_of, search


class Computes(NamedTuple):
    """Compute events that end within the budget, sorted by client and number; ``exhausted``: see ``PeerSchedule``."""

    client: np.ndarray  # int64[E]
    number: np.ndarray  # int64[E]
    start: np.ndarray  # float64[E]
    end: np.ndarray  # float64[E]
    exhausted: bool = False


class Presence(NamedTuple):
    """When nodes are online, until the end of the run; ``starts`` is ``None`` if all always are."""

    joined: np.ndarray  # float64[N]
    left: np.ndarray  # float64[N]
    bounds: np.ndarray  # int64[N + 1]  node i is online in [starts[k], ends[k]) for bounds[i] <= k < bounds[i + 1]
    starts: np.ndarray | None
    ends: np.ndarray | None
    exhausted: bool = False  # see ``PeerSchedule``

    @property
    def online(self) -> Online:
        """``online(clients, times)``, whether nodes are online at these times; ``None`` if all always are."""
        starts, ends = self.starts, self.ends
        if starts is None or ends is None:
            return None

        def online(clients: np.ndarray, times: np.ndarray) -> np.ndarray:
            clients, times = np.broadcast_arrays(clients, times)
            rows, moments = clients.reshape(-1), times.reshape(-1)
            latest = search(self.bounds, starts, rows, moments, "right") - 1
            inside = latest >= self.bounds[rows]
            inside[inside] = moments[inside] < ends[latest[inside]]
            return inside.reshape(clients.shape)

        return online


def always_present(num_clients: int) -> Presence:
    """Every node is online from the beginning to the end."""
    never = np.full(num_clients, math.inf)
    return Presence(np.zeros(num_clients), never, np.zeros(num_clients + 1, np.int64), None, None)


def budget(scenario: Scenario) -> tuple[float, float]:
    """The most compute events, and the last moment at which one may end."""
    until = scenario.until
    most = math.inf if until.updates is None else until.updates
    return most, math.inf if until.time is None else until.time * SLACK


def compute_events(scenario: Scenario, ties: str = "client") -> Computes:
    """The compute events of nodes that train whenever they are online, as many as the budget admits.

    If not all events that end at one moment fit into the budget, the first in the order of ``ties`` count, see
    :func:`order_of`.
    """
    most, horizon = budget(scenario)
    idle = False
    if scenario.conditions == NO_CONDITIONS:
        client, number, end = timelines(scenario, scenario.num_clients, most, horizon)
        order = np.lexsort((number, client))
        client, end = client[order].astype(np.int64), end[order]
        start = np.concatenate([[0.0], end[:-1]])
        start[np.flatnonzero(np.diff(client, prepend=-1))] = 0.0
    else:
        client, start, end, idle = _with_conditions(scenario, most, horizon)
    kept = np.flatnonzero(end <= horizon)
    exhausted = idle and len(kept) < most
    client = client[kept]
    first = np.searchsorted(client, np.arange(scenario.num_clients))
    found = Computes(client, np.arange(len(client)) - first[client], start[kept], end[kept], exhausted)
    if len(kept) > most:
        within = np.sort(order_of(found, "end", ties)[: int(most)])
        found = Computes(*(column[within] for column in found[:4]))
    return found


def order_of(computes: Computes, moment: str, ties: str) -> np.ndarray:
    """The order of events by ``moment``, their start or end; int64[E].

    Simultaneous events are ordered by ``ties``: ``client``, by client numbers; ``scheduled``, as by a queue of events
    in which nodes that come online go first, and the others in the order in which they entered the queue. An event
    enters it when it starts, which is at once when its node's previous event ends.
    """
    if ties == "client":
        return np.lexsort((computes.client, getattr(computes, moment)))
    client, _, start, end = (column.tolist() for column in computes[:4])
    online, done = 0, 1  # what happens at a moment, in this order
    queue = [(start[e], online, e, e) for e in np.flatnonzero(np.diff(client, prepend=-1)).tolist()]
    heapq.heapify(queue)
    started, ended, entered = array("q"), array("q"), len(client)
    while queue:
        now, what, _, event = heapq.heappop(queue)
        entered += 1
        if what == done:
            ended.append(event)
            event += 1
            if event == len(client) or client[event] != client[event - 1]:
                continue
            if start[event] > now:
                heapq.heappush(queue, (start[event], online, entered, event))
                continue
        started.append(event)
        heapq.heappush(queue, (end[event], done, entered, event))
    return np.array(started if moment == "start" else ended, np.int64)


def end_of_run(scenario: Scenario, end: np.ndarray) -> float:
    """The moment at which the run ends: the limit of time, or the last event's end if the updates end it before."""
    most, horizon = budget(scenario)
    last = float(end.max(initial=0.0))
    return last if len(end) >= most or math.isinf(horizon) else max(last, horizon / SLACK)


def _with_conditions(
    scenario: Scenario, most: float, horizon: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Client, start and end of all events that may fit into the budget, sorted by client.

    The last value says whether no node is at work at the end of the budget.
    """
    columns = array("q"), array("d"), array("d")
    worked = np.zeros(scenario.num_clients)  # until when each node has worked
    advance = _walk(scenario, columns, worked)
    forecast, time = Forecast(scenario.until, scenario.progress), np.zeros(scenario.num_clients)
    reach = further = horizon
    if most < math.inf:
        seconds = scenario.delays.durations(np.arange(min(scenario.num_clients, 64)), 0, scenario.local_steps.max())
        further = 1.1 * float(seconds.mean()) * max(1.0, most / scenario.num_clients)
        reach = min(horizon, further)
    while True:
        for begin in range(0, scenario.num_clients, PREDICTED):
            block = range(begin, min(begin + PREDICTED, scenario.num_clients))
            for source in scenario.conditions.availability:
                if source.prepare is not None:
                    source.prepare([client for client in block if time[client] < math.inf], float(time[begin]))
            for client in block:
                time[client] = advance(client, float(time[client]), reach)
            forecast.expect(len(columns[0]), 0.0)
        done = int((np.array(columns[2]) <= reach).sum())
        if reach >= horizon or done >= most or not (time < math.inf).any():
            break
        forecast.tell(done / most)
        # From where a node is there again: beyond a long absence of all, few events may be left to plan.
        reach, further = min(max(reach, float(time.min())) + further, horizon), 2 * further
    clients, starts, ends = (np.array(column) for column in columns)
    order = order_by_client(clients)
    return clients[order], starts[order], ends[order], bool((worked <= horizon).all())


def _walk(
    scenario: Scenario, columns: tuple[array, array, array], worked: np.ndarray
) -> Callable[[int, float, float], float]:
    """``advance(client, time, reach)``: append the events that begin by ``reach``; returns when the next may.

    Infinity if the node is never online again. ``worked``: until when each node has worked, on lost events too.
    """
    interval = together([source.interval for source in scenario.conditions.availability])
    job_outcome = job_outcomes(scenario.conditions)
    num_clients = scenario.num_clients

    def next_ones(client: int) -> range:
        return range(client, min(client + PREDICTED, num_clients))

    cache = DurationCache(partial(draw_jobs, scenario), num_clients, next_ones)
    clients, starts, ends = columns

    def advance(client: int, time: float, reach: float) -> float:
        fruitless = 0
        while time <= reach:
            if interval is not None:
                begins, _ = interval(client, time)
                if begins > time:
                    time = begins
                    continue
            drawn: JobDraw = cache.pop(client)
            if isinstance(drawn, tuple):
                drawn = (*drawn[:3], False, False)  # messages are lost one by one, see ``peer_pushes``
            outcome = job_outcome(client, time, drawn)
            if outcome.outcome is Outcome.APPLIED:
                if not outcome.upload > time:
                    raise too_short(client, time)
                clients.append(client)
                starts.append(time)
                ends.append(outcome.upload)
                time = worked[client] = outcome.upload
                fruitless = 0
                continue
            fruitless += 1
            if fruitless > FRUITLESS:
                raise ValueError(f"faults: of the last {FRUITLESS} events of node {client} not one was completed")
            free = outcome.client_free
            worked[client] = worked_until(outcome, time)
            # A node that goes offline as an event begins would begin it again at the same moment.
            time = free if free > time else math.nextafter(time, math.inf)
        return time

    return advance


def worked_until(outcome: JobOutcome, start: float) -> float:
    """Until when a node works on an event that is lost; its ``start`` if it never comes back from a pause."""
    until = min(outcome.crash, outcome.client_free)
    return until if until < math.inf else start


def presence(scenario: Scenario, until: float) -> Presence:
    """When each node is online, up to the moment ``until``."""
    num_clients, sources = scenario.num_clients, scenario.conditions.availability
    interval = together([source.interval for source in sources])
    if interval is None:
        return always_present(num_clients)
    joined, left = np.full(num_clients, math.inf), np.full(num_clients, math.inf)
    counts, starts, ends = np.zeros(num_clients, np.int64), array("d"), array("d")
    for client in range(num_clients):
        if client % PREDICTED == 0:
            for source in sources:
                if source.prepare is not None:
                    source.prepare(range(client, min(client + PREDICTED, num_clients)), 0.0)
        begins, stops = interval(client, 0.0)
        joined[client] = max(0.0, begins)
        while begins <= until:
            starts.append(begins)
            ends.append(stops)
            counts[client] += 1
            if stops > until:
                break
            last = stops
            begins, stops = interval(client, max(stops, math.nextafter(begins, math.inf)))
            if math.isinf(begins):
                left[client] = last
    return Presence(joined, left, bounds_of(counts), np.array(starts), np.array(ends))
