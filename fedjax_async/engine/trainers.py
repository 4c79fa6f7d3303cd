"""Train the batches of a group, each lane in a host thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np

from fedjax_async.engine.batches import Batch
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.programs import Programs
from fedjax_async.engine.streaming import Feed
from fedjax_async.engine.tables import DeviceTables


class Trainers:
    """The buffers of every lane and, with several lanes, a host thread for each but the first; a context manager.

    The layout decides which lane trains a job, and the batches of a group are independent of each other. So results
    do not depend on the timing of threads.
    """

    def __init__(
        self, layout: Layout, tables: DeviceTables, programs: Programs, carry: Carry, feed: Feed | None = None
    ) -> None:
        busy = layout.lanes
        self._layout, self._tables, self._programs, self._feed = layout, tables, programs.train, feed
        self._buffers: list[JobBuffers] = [programs.buffers(tables, carry) for _ in range(busy)]
        self._pool = ThreadPoolExecutor(busy - 1) if busy > 1 else None
        # XLA's CPU devices share a few threads: where some wait for the others to gather the buffers, those that still
        # train may find none to go on with, and the run hangs
        self._in_step = jax.default_backend() == "cpu" and len(self._buffers[0].norm.devices()) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _train(self, batch: Batch, carry: Carry) -> None:
        tables, low, count, lane = self._tables, batch.first, batch.jobs, batch.lane
        if self._feed is not None:
            tables = tables._replace(**self._feed.batch(self._layout.train_order[low : low + count]))
        for width, first, last in batch.segments:
            span = np.array([low, count, first, last], np.int32)
            self._buffers[lane] = self._programs[width](tables, carry.slots, carry.clients, self._buffers[lane], span)

    def _train_and_wait(self, batch: Batch, carry: Carry) -> None:
        """Train, and wait for it: XLA runs what waits for other programs one after the other."""
        self._train(batch, carry)
        jax.block_until_ready(self._buffers[batch.lane])

    def train_again(self, batches: Sequence[Batch], carry: Carry) -> None:
        """Train jobs whose buffers a checkpoint does not hold, after a resume."""
        for batch in batches:
            self._train_and_wait(batch, carry)

    def train(self, group: Sequence[Batch], carry: Carry) -> list[JobBuffers]:
        """Train the batches of ``group``; the buffers of every lane, valid until the next call."""
        if self._pool is None:
            for batch in group:
                (self._train_and_wait if self._in_step else self._train)(batch, carry)
        else:
            others = [self._pool.submit(self._train_and_wait, batch, carry) for batch in group[1:]]
            for batch in group[:1]:
                self._train_and_wait(batch, carry)
            for future in others:
                future.result()
        return self._buffers
