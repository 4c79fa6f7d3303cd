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

    def __init__(self, world: World, concurrency: int, sampling: str):
        rule = registry.find("sampling", SUCCESSORS, sampling) if concurrency < world.num_clients else same
        self._idle = rule(world.num_clients, concurrency, world.seed)
        self._swap = self._idle.swap
        self.queue = UnreliableQueue(world, self._idle.ahead)
        self._here = 0  # clients in the container of the idle; some may have gone off since
        self._away: list[tuple[float, int, bool]] = []  # when an absent or busy client can go; whether it was busy
        self._free = concurrency
        self._start()

    def _start(self) -> None:
        chosen: list[int] = []
        tried, candidates = 0, self._idle.candidates
        while tried < len(candidates) and len(chosen) < self._free:
            some = candidates[tried : tried + self._free - len(chosen)]
            self.queue.foresee(some, 0.0)
            chosen += [client for client in some if self._is_there(client, 0.0)]
            tried += len(some)
        self._idle.fill(candidates[tried:])
        self._here = len(candidates) - tried
        self._free -= len(chosen)
        self.queue.prepare(chosen)
        for client in sorted(chosen):
            self.queue.dispatch(client, 0.0)

    def _is_there(self, client: int, time: float) -> bool:
        """Whether an idle client can go now; if not, it is noted when it can."""
        if self.queue.always_there:
            return True
        start, _ = self.queue.there(client, time)
        if time < start < math.inf:
            heapq.heappush(self._away, (start, client, False))
        return start <= time

    def next_time(self) -> float:
        """When a free place can next be filled; infinity if there is none, or nobody for it."""
        return self._away[0][0] if self._free and self._away else math.inf

    def next_event(self) -> float:
        """When something happens next: an event of the queue, or a place that can be filled."""
        events = self.queue.events
        now = events[0][0] if events else math.inf
        return min(now, self._away[0][0]) if self._free and self._away else now

    def release(self, news: list[News], time: float) -> None:
        """What the news of each job sets free can be used from now on, or as soon as its client is up again."""
        if len(news) > 1 and self._idle.ahead is None:  # those that return leave again
            self.queue.prepare([client for _, client, _, idle in news if idle])
        for job, client, place, idle in news:
            self.exchange(job, client, place, idle, time)
        if not news:
            self.fill(time)

    def exchange(self, job: int, client: int, place: bool, idle: bool, time: float) -> None:
        """The same for the news of a single job."""
        queue, away = self.queue, self._away
        ready = math.inf if not idle else queue.ready(job, time) if job in queue.open else time
        if place and ready <= time and not self._free and not (away and away[0][0] <= time):
            # One comes, one goes: most events are like this.
            leaving = self._swap(client)
            if queue.always_there or self._is_there(leaving, time):
                queue.dispatch(leaving, time)
                return
            self._free = 1
        else:
            self._free += place
            if idle:
                self._take_in(client, ready, time)
        self.fill(time)

    def _take_in(self, client: int, ready: float, time: float) -> None:
        if ready <= time:
            self._idle.add(client)
            self._here += 1
        elif ready < math.inf and (start := max(ready, self.queue.window(client, ready)[0])) < math.inf:
            heapq.heappush(self._away, (start, client, True))

    def fill(self, time: float) -> None:
        """Send free places' messages to the clients that can go now."""
        while self._away and self._away[0][0] <= time:
            _, client, was_busy = heapq.heappop(self._away)
            (self._idle.add if was_busy else self._idle.restore)(client)
            self._here += 1
        while self._free and self._here:
            self._here -= 1
            client = self._idle.draw()
            if self._is_there(client, time):
                self._free -= 1
                self.queue.dispatch(client, time)
