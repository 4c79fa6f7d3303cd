"""Idle clients: which client gets the next job when the server may send one.

A *sampling rule*, registry ``SUCCESSORS``, is ``rule(num_clients, concurrency, seed) -> IdlePool``: a container of the
clients without a job, and the order in which they are drawn from it. A call costs O(1) where clients are always
online, however many are idle.

``IdleClients`` keeps C jobs under way with such a pool: it knows which clients are idle, which are offline or busy
until when, and how many jobs may be sent (the *capacity*).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count as counting
from itertools import islice, repeat
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check, registry
from fedjax_async.clock import chance
from fedjax_async.clock.durations import PREDICTED, Predict
from fedjax_async.clock.event_queue import FRUITLESS, READY, EventQueue, Release
from fedjax_async.clock.scenario import Scenario


class IdlePool(NamedTuple):
    """The clients without a job, and which of them is drawn next.

    ``candidates``: all clients that ever train, in the order in which they are tried for the first jobs. Those
    without a first job are handed to ``fill``. ``add(client)`` takes in a client that returns from a job,
    ``draw()`` removes the next one (there must be one), ``swap(client)`` is ``add`` and then ``draw``.
    ``restore(client)`` takes back a client that was drawn but was offline, as if it had never been drawn.
    ``predict(client)``: the clients that will probably be drawn soon after ``client``, a guess that changes no
    result; ``None``: those that return soon.

    ``positions(count)`` yields the same draws as indices, in arrays, for a caller that owns the array of ``count``
    idle clients and always swaps: the returning client is put at index ``count``, the client at the next
    of the ``positions`` is drawn, and the client at index ``count`` moves there.
    """

    candidates: Sequence[int]
    fill: Callable[[Iterable[int]], None]
    add: Callable[[int], None]
    draw: Callable[[], int]
    restore: Callable[[int], None]
    swap: Callable[[int], int]
    positions: Callable[[int], Iterator[np.ndarray]]
    predict: Predict | None = None


Rule = Callable[[int, int, int], IdlePool]

_DRAWS = 4096  # uniform numbers drawn at once


def same(num_clients: int, concurrency: int, seed: int) -> IdlePool:
    """The returning client itself; only the clients 0..C-1 ever train."""
    idle: list[int] = []

    def add(client: int) -> None:
        heapq.heappush(idle, client)

    def positions(count: int) -> Iterator[np.ndarray]:
        return repeat(np.full(PREDICTED, count))

    swap = partial(heapq.heappushpop, idle)
    return IdlePool(range(concurrency), idle.extend, add, lambda: heapq.heappop(idle), add, swap, positions)


def round_robin(num_clients: int, concurrency: int, seed: int) -> IdlePool:
    """The client that has been idle longest, at first in order of number."""
    idle: deque[int] = deque()
    passed_over: list[tuple[int, int]] = []  # clients that were offline at their turn: (turn, client)
    turn = array("q", np.arange(num_clients).tobytes())
    turns = iter(range(num_clients, 1 << 62))

    def add(client: int) -> None:
        turn[client] = next(turns)
        idle.append(client)

    def draw() -> int:
        if passed_over and not (idle and turn[idle[0]] < passed_over[0][0]):
            return heapq.heappop(passed_over)[1]
        return idle.popleft()

    def swap(client: int) -> int:
        add(client)
        return draw()

    def restore(client: int) -> None:
        heapq.heappush(passed_over, (turn[client], client))

    def positions(count: int) -> Iterator[np.ndarray]:
        return (np.arange(begin, begin + PREDICTED) % count for begin in counting(0, PREDICTED))

    candidates = array("i", np.arange(num_clients, dtype=np.int32).tobytes())
    return IdlePool(
        candidates, idle.extend, add, draw, restore, swap, positions, lambda client: islice(idle, PREDICTED)
    )


def uniform(num_clients: int, concurrency: int, seed: int) -> IdlePool:
    """Any idle client with equal probability, the returning one included; random clients start."""
    rng = chance.generator(seed, "sampling")
    candidates = array("i", rng.permutation(num_clients).astype(np.int32).tobytes())
    idle = array("i")
    # Uniform numbers, the next one last, and the indices that they mean while ``count`` clients are idle.
    numbers, picks = np.empty(0), list[int]()
    count, scale = 0, 2

    def rescale() -> None:
        picks[:] = (numbers * scale).astype(np.int64).tolist()

    def draw_more() -> None:
        nonlocal numbers
        numbers = np.concatenate([rng.random(_DRAWS), numbers[: len(picks)]])
        rescale()

    def recount() -> None:
        # The scale is a power of two: a number means the same index while the count changes a little. That makes
        # the draws predictable.
        nonlocal count, scale, numbers
        count, before = len(idle), scale
        scale = 1 << (count + 1).bit_length()
        if scale != before:
            numbers = numbers[: len(picks)]
            rescale()

    def swap(client: int) -> int:
        if len(idle) != count:
            recount()
        while True:
            if not picks:
                draw_more()
            pick = picks.pop()
            if pick < count:
                chosen, idle[pick] = idle[pick], client
                return chosen
            if pick == count:
                return client

    def positions(count: int) -> Iterator[np.ndarray]:
        scale = 1 << (count + 1).bit_length()
        while True:
            drawn = (rng.random(_DRAWS)[::-1] * scale).astype(np.int64)
            yield drawn[drawn <= count]

    def predict(client: int) -> Iterable[int]:
        recount()  # when the next is drawn, one more client has returned
        if len(picks) < PREDICTED:
            draw_more()
        soon = np.array(picks[-PREDICTED:])
        return np.frombuffer(idle, np.int32)[soon[soon < count]].tolist() if count else ()

    def draw() -> int:
        return swap(idle.pop())

    return IdlePool(candidates, idle.extend, idle.append, draw, idle.append, swap, positions, predict)


SUCCESSORS: dict[str, Rule] = {"same": same, "uniform": uniform, "round_robin": round_robin}


class IdleClients:
    """Keeps ``concurrency`` jobs under way; sends the first of them at time 0 when created.

    Which clients are idle and, as far as known, online; which are offline or busy until when; and the capacity.
    """

    def __init__(self, scenario: Scenario, concurrency: int, pool: IdlePool):
        self._pool = pool
        self._swap = self._pool.swap
        self.queue = EventQueue(scenario, self._pool.predict)
        self._pooled = 0  # clients in the pool; some may have gone offline since they were put there
        # Idle clients found offline since one was found online; far more than there are clients are a mistake.
        self._missed, self._most_missed = 0, 2 * scenario.num_clients + FRUITLESS
        # A heap: when a client can get a job, the client, and whether it was busy.
        self._absent: list[tuple[float, int, bool]] = []
        self._capacity, self._clients = concurrency, scenario.num_clients
        self._start()

    def _start(self) -> None:
        chosen: list[int] = []
        tried, candidates = 0, self._pool.candidates
        while tried < len(candidates) and len(chosen) < self._capacity:
            some = candidates[tried : tried + self._capacity - len(chosen)]
            self.queue.announce(some, 0.0)
            chosen += [client for client in some if self._is_online(client, 0.0)]
            tried += len(some)
        self._pool.fill(candidates[tried:])
        self._pooled = len(candidates) - tried
        self._capacity -= len(chosen)
        self.queue.prepare(chosen)
        for client in sorted(chosen):
            self.queue.dispatch(client, 0.0)

    def _is_online(self, client: int, time: float) -> bool:
        """Whether an idle client can get a job now; if not, it is noted when it can."""
        if self.queue.always_online:
            return True
        start, _ = self.queue.interval_now(client, time)
        if start <= time:
            self._missed = 0
            return True
        if start < math.inf:
            heapq.heappush(self._absent, (start, client, False))
        self._missed += 1
        if self._missed > self._most_missed:
            raise ValueError(
                f"availability: of the last {self._missed} idle clients none was online at {time:g} s; "
                "their online times are too short for floating-point time"
            )
        return False

    def next_event(self, limit: float = math.inf) -> float:
        """When something happens next: an event of the queue, or, given capacity, a job for an absent client.

        A policy that decides about uploads is asked about jobs that are ready by ``limit``.
        """
        events, queue = self.queue.events, self.queue
        while True:
            now = events[0][0] if events else math.inf
            soonest = min(now, self._absent[0][0]) if self._capacity and self._absent else now
            if not (queue.asks and events and events[0][1] == READY and now == soonest <= min(limit, queue.horizon)):
                return soonest
            queue.settle()

    def release(self, releases: list[Release], time: float) -> None:
        """Use what some events have freed: the capacity now, the clients as soon as they are up."""
        if len(releases) > 1 and self._pool.predict is None:  # the returning clients get the next jobs
            self.queue.prepare([client for _, client, _, client_freed in releases if client_freed])
        for job, client, capacity_freed, client_freed in releases:
            self.release_one(job, client, capacity_freed, client_freed, time)
        if not releases:
            self.fill(time)

    def release_one(self, job: int, client: int, capacity_freed: bool, client_freed: bool, time: float) -> None:
        """Use what a single event has freed."""
        queue, absent = self.queue, self._absent
        ready = self._ready(job, client_freed, time)
        if capacity_freed and ready <= time and not self._capacity and not (absent and absent[0][0] <= time):
            # The usual event: one client returns, one gets a job.
            leaving = self._swap(client)
            if queue.always_online or self._is_online(leaving, time):
                queue.dispatch(leaving, time)
                return
            self._capacity = 1
        else:
            self._count_in(client, ready, capacity_freed, time)
        self.fill(time)

    def _ready(self, job: int, client_freed: bool, time: float) -> float:
        """When the client of an event can get another job, as far as the event frees it."""
        if not client_freed:
            return math.inf
        return self.queue.client_free(job, time) if job in self.queue.open else time

    def _count_in(self, client: int, ready: float, capacity_freed: bool, time: float) -> None:
        self._capacity += capacity_freed
        if ready < math.inf:
            self._take_in(client, ready, time)

    def _take_in(self, client: int, ready: float, time: float) -> None:
        if ready <= time:
            self._pool.add(client)
            self._pooled += 1
        elif ready < math.inf and (start := max(ready, self.queue.interval(client, ready)[0])) < math.inf:
            heapq.heappush(self._absent, (start, client, True))

    def recall(self, clients: set[int]) -> None:
        """Forget when these clients will be done with their jobs, which are called off."""
        if clients:
            self._absent[:] = [absent for absent in self._absent if absent[1] not in clients]
            heapq.heapify(self._absent)

    def fill(self, time: float) -> None:
        """Send jobs to clients that can get them now, as far as the capacity allows."""
        while self._absent and self._absent[0][0] <= time:
            _, client, was_busy = heapq.heappop(self._absent)
            (self._pool.add if was_busy else self._pool.restore)(client)
            self._pooled += 1
        while self._capacity and self._pooled:
            self._pooled -= 1
            client = self._pool.draw()
            if self._is_online(client, time):
                self._capacity -= 1
                self.queue.dispatch(client, time)


class ChosenClients(IdleClients):
    """Keeps at most ``concurrency`` jobs under way, of clients that a policy chooses among the idle ones.

    All that an event frees is counted before the policy is asked. Capacity that the policy leaves unused waits for the
    next event.
    """

    def _start(self) -> None:
        self._idle = np.ones(self._clients, np.bool_)
        self.fill(0.0)

    def release(self, releases: list[Release], time: float) -> None:
        """Count what some events have freed, and ask the policy."""
        for job, client, capacity_freed, client_freed in releases:
            self._count_in(client, self._ready(job, client_freed, time), bool(capacity_freed), time)
        self.fill(time)

    def release_one(self, job: int, client: int, capacity_freed: bool, client_freed: bool, time: float) -> None:
        """Count what a single event has freed, and ask the policy."""
        self.release([(job, client, capacity_freed, client_freed)], time)

    def fill(self, time: float) -> None:
        """Send jobs to clients that the policy chooses, as far as the capacity allows."""
        queue = self.queue
        while self._absent and self._absent[0][0] <= time:
            self._idle[heapq.heappop(self._absent)[1]] = True
        queue.look(time)
        if not self._capacity:
            return
        idle = np.flatnonzero(self._idle)
        if not queue.always_online:
            queue.announce(idle.tolist(), time)
            online = np.array([self._is_online(client, time) for client in idle.tolist()], np.bool_)
            self._idle[idle[~online]] = False
            idle = idle[online]
        if not len(idle):
            return
        chosen = queue.decisions.choose(idle, min(self._capacity, len(idle)), alone=not queue.events)
        queue.prepare(chosen)
        for client in chosen:
            self._idle[client] = False
            self._capacity -= 1
            queue.dispatch(client, time)

    def _take_in(self, client: int, ready: float, time: float) -> None:
        if ready <= time:
            self._idle[client] = True
        else:
            super()._take_in(client, ready, time)


def idle_clients(scenario: Scenario, concurrency: int, sampling: str) -> IdleClients:
    """The idle clients of a scenario, with the sampling rule or the policy that says which client is next."""
    decisions, count = scenario.decisions, scenario.num_clients
    if decisions is not None and decisions.policy.choose is not None:
        check.require(sampling == "uniform", "sampling", sampling, "left out: the policy chooses the clients")
        allowed = f"below {count}, the number of clients, so that the policy has clients to choose among"
        check.require(concurrency < count, "concurrency", concurrency, allowed)
        return ChosenClients(scenario, concurrency, same(count, concurrency, scenario.seed))
    # If all clients are under way, only the returning one is ever idle.
    rule = registry.find("sampling", SUCCESSORS, sampling) if concurrency < count else same
    return IdleClients(scenario, concurrency, rule(count, concurrency, scenario.seed))
