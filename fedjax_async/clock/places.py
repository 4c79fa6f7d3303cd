"""Places: the C jobs that a policy keeps under way, and who is to fill those that become free."""

from __future__ import annotations

import heapq
import math

from fedjax_async import registry
from fedjax_async.clock.successors import SUCCESSORS, same
from fedjax_async.clock.unreliable import News, UnreliableQueue
from fedjax_async.clock.world import World


class Places:
    """Who is idle and may be there, who is away or busy until when, and how many places are free."""

    def __init__(self, queue: UnreliableQueue, world: World, concurrency: int, sampling: str):
        rule = registry.find("sampling", SUCCESSORS, sampling) if concurrency < world.num_clients else same
        self._queue = queue
        self._idle = rule(world.num_clients, concurrency, world.seed)
        self._here = 0  # clients in the container of the idle; some may have gone off since
        self._away: list[tuple[float, int, bool]] = []  # when an absent or busy client can go; whether it was busy
        self._free = concurrency
        self._start()

    def _start(self) -> None:
        chosen: list[int] = []
        tried = 0
        for client in self._idle.candidates:
            if len(chosen) == self._free:
                break
            tried += 1
            if self._is_there(client, 0.0):
                chosen.append(client)
        rest = self._idle.candidates[tried:]
        self._idle.fill(rest)
        self._here = len(rest)
        self._free -= len(chosen)
        for client in sorted(chosen):
            self._queue.dispatch(client, 0.0)

    def _is_there(self, client: int, time: float) -> bool:
        """Whether an idle client can go now; if not, it is noted when it can."""
        start, _ = self._queue.there(client, time)
        if time < start < math.inf:
            heapq.heappush(self._away, (start, client, False))
        return start <= time

    def next_time(self) -> float:
        """When a free place can next be filled; infinity if there is none, or nobody for it."""
        return self._away[0][0] if self._free and self._away else math.inf

    def release(self, news: list[News], time: float) -> None:
        """What the news of each job sets free can be used from now on, or as soon as its client is up again."""
        for job, place, client in news:
            self._free += place
            if client:
                self._take_in(self._queue.record.client[job], self._queue.ready(job, time), time)
            self.fill(time)
        if not news:
            self.fill(time)

    def _take_in(self, client: int, ready: float, time: float) -> None:
        if ready <= time:
            self._idle.add(client)
            self._here += 1
        elif ready < math.inf and (start := max(ready, self._queue.there(client, ready)[0])) < math.inf:
            heapq.heappush(self._away, (start, client, True))

    def fill(self, time: float) -> None:
        """Send free places' messages to the clients that can go now."""
        while self._free and (client := self._next(time)) is not None:
            self._free -= 1
            self._queue.dispatch(client, time)

    def _next(self, time: float) -> int | None:
        while self._away and self._away[0][0] <= time:
            _, client, was_busy = heapq.heappop(self._away)
            (self._idle.add if was_busy else self._idle.restore)(client)
            self._here += 1
        while self._here:
            self._here -= 1
            client = self._idle.draw()
            if self._is_there(client, time):
                return client
        return None
