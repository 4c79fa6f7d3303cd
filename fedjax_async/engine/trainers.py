"""Train the batches of a turn, the lanes at the same time in several host threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_async.engine.batches import Batch
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.types import Tree


class Trainers:
    """The buffers of all lanes, and a host thread for each lane but the first; :meth:`close` ends the threads.

    The layout decides which lane trains a job, and the batches of a turn are independent of each other. So results
    do not depend on the timing of threads.
    """

    def __init__(
        self,
        lanes: int,
        programs: Any,
        tables: Any,
        feed: Callable[[Batch], dict[str, object]] | None = None,
        stores: Callable[[], JobBuffers] | None = None,
    ) -> None:
        """``programs``: see :class:`~fedjax_async.engine.loop.SideBySide`.

        ``feed(batch)``: the tables of its examples, if they are not on the device. ``stores()`` returns an empty store
        of a lane. With it, the results of a batch are copied by ``programs.keep`` from the buffers, which the next
        batch overwrites, to the store.
        """
        self._programs, self._tables, self._feed = programs, tables, feed
        self._used: list[JobBuffers] = [programs.buffers() for _ in range(lanes)]
        # from which uploads are received; of every lane, valid until the next call
        self.buffers = self._used if stores is None else [stores() for _ in range(lanes)]
        self._pool = ThreadPoolExecutor(lanes - 1) if lanes > 1 else None
        # XLA's CPU devices share a few threads. If all of them wait to gather the buffers while other devices still
        # train, those find no thread, and the run hangs. So the host waits after each batch.
        self._in_step = jax.default_backend() == "cpu" and len(self.buffers[0].norm.devices()) > 1

    def on(self, programs: Any, tables: Any) -> None:
        """Use other programs and tables from now on."""
        self._programs, self._tables = programs, tables

    def go_on(self, buffers: Sequence[JobBuffers]) -> None:
        """Receive from these buffers: those of a checkpoint."""
        self.buffers[:] = buffers

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _train(self, batch: Batch, carry: Carry, wait: bool) -> None:
        """Train, and ``wait`` for the result: XLA runs programs that wait for others one after the other."""
        programs, tables, lane = self._programs, self._tables, batch.lane
        if self._feed is not None:
            tables = tables._replace(**self._feed(batch))
        span = np.zeros(4, np.int32)
        for width, first, last in batch.segments:
            span = np.array([batch.first, batch.jobs, first, last], np.int32)
            self._used[lane] = programs.train[width](tables, carry.readable, self._used[lane], span)
        if self.buffers is not self._used:
            self.buffers[lane] = programs.keep(tables, self.buffers[lane], self._used[lane], span[:2])
        if wait:
            jax.block_until_ready(self.buffers[lane])

    def each(self, calls: Sequence[Callable[[], Tree]]) -> list[Tree]:
        """The results of independent calls, one per lane at a time; waits for them if there are several lanes."""

        def called(call: Callable[[], Tree]) -> Tree:
            return jax.block_until_ready(call())

        if self._pool is None:
            return [call() for call in calls]
        others: list[Future[Tree]] = [self._pool.submit(called, call) for call in calls[1:]]
        return [*(called(call) for call in calls[:1]), *(future.result() for future in others)]

    def train_again(self, batches: Sequence[Batch], carry: Carry) -> None:
        """After a resume, train the jobs whose results were in buffers, which a checkpoint does not hold."""
        for batch in batches:
            self._train(batch, carry, wait=True)

    def train(self, turn: Sequence[Batch], carry: Carry) -> list[JobBuffers]:
        """Train the batches of ``turn``; returns the buffers of all lanes."""
        wait = self._pool is not None or self._in_step
        self.each([partial(self._train, batch, carry, wait) for batch in turn])
        return self.buffers
