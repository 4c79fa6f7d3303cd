"""Training the batches of a group, at the same time where that helps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np

from fedjax_async.engine import programs
from fedjax_async.engine.kernels import Live, Rows
from fedjax_async.engine.plan import Plan
from fedjax_async.engine.world import World
from fedjax_async.types import ClientAlgorithm


class Trainers:
    """One buffer of rows and, with several lanes, one host thread a lane; a context manager.

    Threads decide nothing: which job runs where is in the plan, and the batches of a group are
    independent of each other, so results do not depend on timing.
    """

    def __init__(self, plan: Plan, world: World, client: ClientAlgorithm, live: Live, lanes: int) -> None:
        busy = max((len(group) for group in plan.groups), default=1)
        self._plan, self._world = plan, world
        make = programs.rows(client, plan.capacity, plan.batching)
        self._rows: list[Rows] = [make(world, live) for _ in range(busy)]
        vmapped = plan.batching == "vmap"
        # compiled here, once: JAX keeps settings such as enable_x64 a thread, and the lanes' threads have their own
        arguments = (world, live.slots, live.clients, self._rows[0], np.zeros(4, np.int32))
        self._programs = {
            w: (programs.train(client, w) if vmapped else programs.loop(client)).lower(*arguments).compile()
            for w in plan.widths
        }
        self._pool = ThreadPoolExecutor(min(lanes, busy)) if busy > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _train(self, batch: int, lane: int, live: Live) -> None:
        low, high = int(self._plan.bounds[batch]), int(self._plan.bounds[batch + 1])
        for width, first, last in self._plan.segments[batch]:
            span = np.array([low, high - low, first, last], np.int32)
            self._rows[lane] = self._programs[width](self._world, live.slots, live.clients, self._rows[lane], span)

    def _train_and_wait(self, batch: int, lane: int, live: Live) -> None:
        """Train in a thread of the pool: XLA runs what waits for other programs one after the other."""
        self._train(batch, lane, live)
        jax.block_until_ready(self._rows[lane])

    def train(self, group: range, live: Live) -> list[Rows]:
        """Train the batches of ``group``; their rows, valid until the next call."""
        if self._pool is None or len(group) == 1:
            for lane, batch in enumerate(group):
                self._train(batch, lane, live)
        else:
            started = [self._pool.submit(self._train_and_wait, b, lane, live) for lane, b in enumerate(group)]
            for future in started:
                future.result()
        return self._rows[: len(group)]
