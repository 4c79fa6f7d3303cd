"""Fast paths of buffered timing: millions of events a second where clients are always online and nothing fails.

Every function here is an optimisation of ``buffering.plan_buffer``, the definition, and gives the same schedule, column
by column (``tests/clock/test_fast_paths.py``). Only ``timing`` calls them.

Without absences, faults and limits every upload is followed by exactly one dispatch. So arrival ``e`` leads to job
``C + e``, and all columns follow from the order of arrivals. If the returning client itself gets the next job, this
order is a merge of the clients' timelines, made with whole arrays (``merged``). If others are drawn, a heap finds it
(``sampled``): the draws of clients and durations are made with whole arrays as far as they are known in advance.
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

from fedjax_async.clock.budget import EVERY, Forecast, Until
from fedjax_async.clock.durations import PREDICTED, DrawDurations, DurationCache, Predict
from fedjax_async.clock.event_queue import FRUITLESS, fruitless
from fedjax_async.clock.idle_clients import SUCCESSORS, Rule
from fedjax_async.clock.record import SLACK, Outcome, at_or_before, job_numbers
from fedjax_async.clock.scenario import Scenario, checked_durations, too_short
from fedjax_async.types import Schedule

# The most events that one step of the merge adds to the timelines that lag behind.
_CHUNK = 1 << 18
_DRAWN = 8  # entries of timelines that need as much memory as one job of a schedule

_CELLS, _SHALLOWEST = 1 << 19, 4  # of a duration table: the most cells, the fewest jobs per row
_DEEPEST = 64  # the most jobs per row


class Arrivals(NamedTuple):
    """Jobs and arrivals: ``client``, ``number`` and ``upload`` have one entry per job, ``job`` one per arrival."""

    client: np.ndarray
    number: np.ndarray
    upload: np.ndarray
    job: np.ndarray


def buffer(scenario: Scenario, size: int, concurrency: int, sampling: str) -> Schedule:
    """Every ``size`` arrivals are a server step; equals ``buffering.plan_buffer`` for a scenario without conditions.

    All uploads of the moment at which the budget is spent lead to a dispatch, also those that it leaves out.
    """
    most, _ = budget(scenario, size)
    arrivals = _arrivals(scenario, size, concurrency, sampling)
    return _schedule(scenario, arrivals, size, concurrency, np.ones(int(min(len(arrivals.job), most)), np.bool_))


def buffer_of_fresh(scenario: Scenario, size: int, concurrency: int, sampling: str) -> Schedule:
    """Every ``size`` arrivals that are not too stale are a step; equals ``buffering.plan_buffer`` without conditions
    other than ``max_staleness``.

    A dropped upload is followed by a dispatch as an applied one is, so the arrivals are those of ``buffer``. How many
    of them the budget needs is known only afterwards: with too few, it tries again with more.
    """
    most, limit = budget(scenario, size)[0], scenario.conditions.limits.max_staleness or 0
    forecast, count, spent = Forecast(scenario.until, scenario.progress), 2 * most, 0.0
    while True:
        forecast.expect(0.0 if count == math.inf else count, 0.0)
        until = Until(time=scenario.until.time, updates=None if count == math.inf else int(count))
        halfway = partial(_tell_half, forecast, spent)  # each attempt is shown as half of what is left
        arrivals = _arrivals(scenario._replace(until=until, progress=halfway), size, concurrency, sampling)
        fresh = _fresh(_seen_before(arrivals)[arrivals.job], size, most, limit)
        applied = int(fresh.sum())
        if applied == most or len(arrivals.job) < count:
            moment = arrivals.upload[arrivals.job]
            came = at_or_before(moment, moment[len(fresh) - 1]) if applied == most else len(moment)
            return _schedule(scenario, arrivals._replace(job=arrivals.job[:came]), size, concurrency, fresh)
        count, spent = 4 * count, (1 + spent) / 2


def _tell_half(forecast: Forecast, spent: float, share: float) -> None:
    forecast.tell(spent + (1 - spent) * share / 2)


def _fresh(seen_before: np.ndarray, size: int, most: float, limit: int) -> np.ndarray:
    """Which arrivals are applied, in order, until ``most`` are; bool, at most one entry per arrival.

    ``seen_before``: how many arrivals came before the job of each arrival was sent. Raises ``ValueError`` if so many
    uploads in a row are dropped that none is expected to be applied again.
    """
    closed, fresh = array("q", [0]), array("b")
    steps = applied = dropped = 0
    for before in seen_before.tolist():
        good = steps - closed[before] <= limit
        fresh.append(good)
        if good:
            applied, dropped = applied + 1, 0
            steps += applied % size == 0
        else:
            dropped += 1
            if dropped > FRUITLESS:
                raise fruitless()
        closed.append(steps)
        if applied == most:
            break
    return np.array(fresh, np.bool_)


def _arrivals(scenario: Scenario, size: int, concurrency: int, sampling: str) -> Arrivals:
    if concurrency == scenario.num_clients or sampling == "same":
        return merged(scenario, size, concurrency)
    return sampled(scenario, size, concurrency, SUCCESSORS[sampling])


def _seen_before(arrivals: Arrivals) -> np.ndarray:
    """How many arrivals came before each job was sent, those of the same moment included; int64[J]."""
    time = arrivals.upload[arrivals.job]
    first = np.zeros(len(arrivals.client) - len(time), np.int64)
    return np.concatenate([first, np.searchsorted(time, time, side="right")])


def _schedule(scenario: Scenario, arrivals: Arrivals, size: int, concurrency: int, fresh: np.ndarray) -> Schedule:
    """The schedule of these arrivals; only the ``fresh`` ones are applied.

    The arrivals beyond the length of ``fresh`` come at the moment at which the budget is spent, too late to be applied.
    """
    moment = arrivals.upload[arrivals.job]
    jobs = concurrency + len(moment)
    client = arrivals.client[:jobs].astype(np.int32)
    upload = arrivals.upload[:jobs]
    came = arrivals.job[: len(fresh)]
    job, time = came[fresh], moment[: len(fresh)][fresh]
    first = np.zeros(concurrency, np.int64)
    dispatched_after = np.concatenate([first, np.searchsorted(time, moment, side="right")])
    position = np.arange(1, len(job) + 1)
    outcome = np.full(jobs, Outcome.UNDER_WAY, np.int8)
    outcome[came] = np.where(fresh, np.int8(Outcome.APPLIED), np.int8(Outcome.DROPPED_STALE))
    return Schedule(
        num_clients=scenario.num_clients,
        client=client,
        number=arrivals.number[:jobs].astype(np.int32),
        local_steps=scenario.local_steps[client].astype(np.int32),
        dispatch_time=np.concatenate([np.zeros(concurrency), moment]),
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


def budget(scenario: Scenario, size: int) -> tuple[float, float]:
    """The most arrivals, and the last moment, that the budget admits when every ``size`` arrivals are a step."""
    until = scenario.until
    most = min(
        math.inf if until.updates is None else until.updates, math.inf if until.steps is None else until.steps * size
    )
    return most, math.inf if until.time is None else until.time * SLACK


# --- another client is drawn --------------------------------------------------------------------


def sampled(scenario: Scenario, size: int, concurrency: int, rule: Rule) -> Arrivals:
    """The arrivals when each returning client is replaced by one drawn by ``rule``."""
    pool = rule(scenario.num_clients, concurrency, scenario.seed)
    candidates = pool.candidates
    most, horizon = budget(scenario, size)
    first, idle = sorted(candidates[:concurrency]), array("i", candidates[concurrency:])
    count = len(idle)
    idle.append(-1)
    heap: list[tuple[float, int, int]] = []

    def predict(client: int) -> Iterable[int]:
        # Where many are idle, almost all clients that leave are known in advance anyway.
        return (event[1] for event in heap[:PREDICTED]) if count < PREDICTED else ()

    cache = make_cache(partial(checked_durations, scenario), scenario.num_clients, concurrency + most, predict)
    uploads = array("d", cache.pop_each(np.array(first)).tobytes())
    heap += zip(uploads, first, range(concurrency))
    heapq.heapify(heap)
    clients, arrived = array("q", first), array("q")
    pop, replace, next_job = cache.pop, heapq.heapreplace, concurrency
    forecast, next_look = Forecast(scenario.until, scenario.progress), concurrency + EVERY
    events = _known_draws(np.frombuffer(idle, np.int32), pool.positions(count), cache.pop_each)
    within_budget = islice(events, None if most == math.inf else int(most))
    for draws in (within_budget, events):  # then those that come at the moment at which the budget is spent
        for position, known_client, known_seconds in draws:
            now, client, job = heap[0]
            if now > horizon:
                break
            if next_job == next_look:
                applied, next_look = next_job - concurrency, next_look + EVERY
                forecast.note(next_job, time=now, updates=applied, steps=applied // size)
            arrived.append(job)
            if known_seconds:
                chosen, upload = known_client, now + known_seconds
            else:
                idle[count] = client
                chosen = idle[position]
                upload = now + pop(chosen)
            idle[position] = client
            if upload <= now:
                raise too_short(chosen, now)
            clients.append(chosen)
            uploads.append(upload)
            replace(heap, (upload, chosen, next_job))
            next_job += 1
        horizon = min(horizon, now * SLACK)
    columns = [np.array(column) for column in (clients, uploads, arrived)]
    return Arrivals(columns[0], job_numbers(columns[0]), *columns[1:])


def _known_draws(
    idle: np.ndarray, positions: Iterator[np.ndarray], pop_each: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[int, int, float]]:
    """For each event the position drawn and, for most, the client there and the seconds of its job; else 0 seconds.

    The client at a position is known until the position is drawn for the second time: by then another client has
    returned there.
    """
    count = len(idle) - 1
    first = np.empty(count + 1, np.int32)

    def known(drawn: np.ndarray) -> Iterable[tuple[int, int, float]]:
        if count < PREDICTED:  # most positions would be drawn again soon
            return zip(drawn.tolist(), repeat(0), repeat(0.0))
        order, clients, seconds = np.arange(len(drawn)), idle[drawn], np.zeros(len(drawn))
        first[drawn[::-1]] = order[::-1]
        is_known = (first[drawn] == order) & (drawn < count)
        seconds[is_known] = pop_each(clients[is_known])
        return zip(drawn.tolist(), clients.tolist(), seconds.tolist())

    return chain.from_iterable(
        known(block[begin : begin + PREDICTED]) for block in positions for begin in range(0, len(block), PREDICTED)
    )


class DurationTable:
    """A faster ``DurationCache``, for few clients and durations > 0: a row of the next jobs of each client.

    ``jobs``: about how many will be needed in all.
    """

    def __init__(self, draw: DrawDurations, num_clients: int, jobs: float):
        self._depth = int(min(_DEEPEST, _CELLS // num_clients, max(_SHALLOWEST, 2 * jobs / num_clients)))
        self._draw = draw
        width = self._depth + 1
        # Every row ends with a 0: the cursor of a client stands there when its row is used up.
        self._cells = array("d", bytes(8 * num_clients * width))
        self._cursor = array("q", np.arange(num_clients * width).reshape(-1, width)[:, -1].tobytes())
        # The same memory as NumPy arrays.
        self._at, self._rows = np.frombuffer(self._cursor, np.int64), np.frombuffer(self._cells).reshape(-1, width)
        self._ends = self._at.copy()
        self._drawn = np.zeros(num_clients, np.int64)  # jobs drawn of each client

    def pop(self, client: int) -> float:
        """The duration of the client's next job."""
        cell = self._cursor[client]
        item = self._cells[cell]
        if not item:
            self._refill()
            cell = self._cursor[client]
            item = self._cells[cell]
        self._cursor[client] = cell + 1
        return item

    def pop_each(self, clients: np.ndarray) -> np.ndarray:
        """What ``pop`` would give each of these clients, all different, as an array."""
        cells, at = self._rows.reshape(-1), self._at[clients]
        if not cells[at].all():
            self._refill()
            at = self._at[clients]
        self._at[clients] = at + 1
        return cells[at]

    def _refill(self) -> None:
        """Fill the rows that are at least half used up; what is left of them moves to the front."""
        left = self._ends - self._at
        low = np.flatnonzero(left <= self._depth // 2)
        begin = self._drawn[low] - left[low]
        self._rows[low, :-1] = self._draw(low[:, None], begin[:, None] + np.arange(self._depth))
        self._at[low] = self._ends[low] - self._depth
        self._drawn[low] = begin + self._depth


def make_cache(draw: DrawDurations, num_clients: int, jobs: float, predict: Predict) -> DurationTable | DurationCache:
    """A ``DurationTable`` if it fits into memory and each client will need some jobs, else a ``DurationCache``."""
    if _CELLS // num_clients >= _SHALLOWEST and _SHALLOWEST * jobs >= num_clients:
        return DurationTable(draw, num_clients, jobs)
    return DurationCache(draw, num_clients, predict)


# --- the returning client is sent again ---------------------------------------------------------


def merged(scenario: Scenario, size: int, concurrency: int) -> Arrivals:
    """The arrivals when the clients 0..C-1 leave again as soon as they return."""
    most, horizon = budget(scenario, size)
    client, number, time = timelines(scenario, concurrency, most, horizon)
    within = np.flatnonzero(time <= horizon)
    order = within[np.lexsort((client[within], time[within]))]
    if len(order) > most:
        order = order[: at_or_before(time[order], time[order[int(most) - 1]])]
    arriving, arriving_number = client[order], number[order]
    # Arrival e sends job C + e, so the job of an arrival follows from its client's arrival before.
    by_client = np.argsort(arriving, kind="stable")
    job = np.empty(len(order), np.int64)
    job[by_client[1:]] = concurrency + by_client[:-1]
    is_first = arriving_number == 0
    job[is_first] = arriving[is_first]
    everyone = np.arange(concurrency)
    job_client = np.concatenate([everyone, arriving])
    job_number = np.concatenate([np.zeros_like(everyone), arriving_number + 1])
    upload = np.empty(len(job_client))
    upload[job] = time[order]
    # What is under way at the end: each client's job after its last arrival.
    done = np.bincount(arriving, minlength=concurrency)
    latest = everyone.copy()
    latest[arriving] = concurrency + np.arange(len(arriving))
    under_way = np.flatnonzero(number == done[client])
    upload[latest[client[under_way]]] = time[under_way]
    return Arrivals(job_client, job_number, upload, job)


def timelines(
    scenario: Scenario, concurrency: int, most: float, horizon: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Uploads (client, number, time) of the clients 0..C-1: all that the budget admits, and each client's next.

    The timelines are drawn until each reaches beyond the end of the budget. The end is at the latest the time of the
    ``most``-th earliest upload drawn so far.
    """
    everyone, forecast = np.arange(concurrency), Forecast(scenario.until, scenario.progress)
    reach, drawn = np.zeros(concurrency), np.zeros(concurrency, np.int64)
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    lagging, rows = everyone, 1
    if most < math.inf:
        rows = min(max(1, math.ceil(1.1 * most / concurrency)), max(1, 2 * _CHUNK // concurrency))
    while len(lagging):
        depth = max(1, min(rows, _CHUNK // len(lagging)))
        numbers = drawn[lagging] + np.arange(depth)[:, None]
        clients = np.broadcast_to(lagging, numbers.shape)
        durations = checked_durations(scenario, lagging, numbers)
        with np.errstate(over="ignore"):
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
            end = min(end, float(np.partition(together, int(most) - 1)[int(most) - 1]) * SLACK)
        lagging = np.flatnonzero(reach <= end)
        if len(lagging):
            done = float(drawn.sum())
            expected = min(float(most), float(np.sum(drawn * (end / reach)))) + concurrency
            forecast.expect(done / _DRAWN, expected, doubt=2)
            forecast.tell(done / expected)
        rows *= 2
    client, number, time = (np.concatenate(column) for column in zip(*columns))
    return client, number, time
