"""Several waves in one compiled call: where a call costs more than a wave's work, as of small models on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async.engine.batches import Batch
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.tables import DeviceTables
from fedjax_async.types import Array


class Piece(NamedTuple):
    """Positions ``low .. high-1``, received from one lane's buffers, and the group that is trained before, if any."""

    group: int | None
    low: int
    high: int


def make_waves(trains: Mapping[int, Callable[..., Any]], receive: Callable[..., Any]) -> Any:
    """``train_and_receive(tables, carry, buffers, work, count) -> (carry, buffers, rejected)``: some pieces in turn.

    ``trains``: width -> the function that trains, and ``receive``: as of single calls. ``work``: see :func:`work_of`.
    """

    def train_and_receive(
        tables: DeviceTables, carry: Carry, buffers: JobBuffers, work: Array, count: Array
    ) -> tuple[Carry, JobBuffers, Array]:
        def one(i: Array, held: tuple[Carry, JobBuffers]) -> tuple[Carry, JobBuffers]:
            carry, buffers = held
            for level, train in enumerate(trains.values()):
                span = work[i, level]

                # once or not at all: a conditional would copy the buffers on a CPU
                def trained(_: Array, buffers: JobBuffers, train: Any = train, span: Array = span) -> JobBuffers:
                    left: JobBuffers = train(tables, carry.slots, carry.clients, buffers, span)
                    return left

                buffers = jax.lax.fori_loop(0, (span[1] > 0).astype(np.int32), trained, buffers)
            return receive(tables, carry, buffers, work[i, len(trains), :2])[0], buffers

        carry, buffers = jax.lax.fori_loop(0, count, one, (carry, buffers))
        return carry, buffers, carry.rejected + 0

    return train_and_receive


def work_of(
    pieces: Sequence[Piece],
    groups: Sequence[Sequence[Batch]],
    widths: Sequence[int],
    ranks: np.ndarray | None,
    length: int,
) -> np.ndarray:
    """What a call is told of its pieces; int32[length, widths + 1, 4].

    Of each piece a row for each width, from wide to narrow as a batch narrows: the span of ``make_train``, or zeros
    where nothing is trained at it. Then the span of ``receive``, in positions, or in ``ranks`` if these are given.
    """
    work = np.zeros((length, len(widths) + 1, 4), np.int32)
    level = {width: k for k, width in enumerate(sorted(widths, reverse=True))}
    for row, (group, low, high) in zip(work, pieces):
        for batch in [] if group is None else groups[group]:
            for width, first, last in batch.segments:
                row[level[width]] = batch.first, batch.jobs, first, last
        row[-1, :2] = (low, high) if ranks is None else np.searchsorted(ranks, [low, high])
    return work
