"""Training the batches of a group, at the same time where that helps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np

from fedjax_async.engine.kernels import Live, Rows
from fedjax_async.engine.plan import Plan
from fedjax_async.engine.programs import Programs
from fedjax_async.engine.streaming import Feed
from fedjax_async.engine.world import World


class Trainers:
    """One buffer of rows and, with several lanes, one host thread a lane; a context manager.

    Threads decide nothing: which job runs where is in the plan, and the batches of a group are
    independent of each other, so results do not depend on timing.
    """

    def __init__(self, plan: Plan, world: World, programs: Programs, live: Live, feed: Feed | None = None) -> None:
        busy = max((len(group) for group in plan.groups), default=1)
        self._plan, self._world, self._programs, self._feed = plan, world, programs.train, feed
        self._rows: list[Rows] = [programs.rows(world, live) for _ in range(busy)]
        self._pool = ThreadPoolExecutor(busy) if busy > 1 else None
        # XLA's CPU devices share a few threads: where some wait for the others to gather the rows, those that still
        # train may find none to go on with, and the run hangs
        self._in_step = jax.default_backend() == "cpu" and len(self._rows[0].norm.devices()) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _train(self, batch: int, lane: int, live: Live) -> None:
        low, high = int(self._plan.bounds[batch]), int(self._plan.bounds[batch + 1])
        world = self._world if self._feed is None else self._world._replace(**self._feed.batch(low, high))
        for width, first, last in self._plan.segments[batch]:
            span = np.array([low, high - low, first, last], np.int32)
            self._rows[lane] = self._programs[width](world, live.slots, live.clients, self._rows[lane], span)

    def _train_and_wait(self, batch: int, lane: int, live: Live) -> None:
        """Train in a thread of the pool: XLA runs what waits for other programs one after the other."""
        self._train(batch, lane, live)
        jax.block_until_ready(self._rows[lane])

    def train(self, group: range, live: Live) -> list[Rows]:
        """Train the batches of ``group``; their rows, valid until the next call."""
        if self._pool is None or len(group) == 1:
            train = self._train_and_wait if self._in_step else self._train
            for lane, batch in enumerate(group):
                train(batch, lane, live)
        else:
            started = [self._pool.submit(self._train_and_wait, b, lane, live) for lane, b in enumerate(group)]
            for future in started:
                future.result()
        return self._rows[: len(group)]
