"""Several waves in one compiled call. It pays where a call costs more than a wave, as for small models on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_async import tree
from fedjax_async.engine.batches import Batch
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.tables import DeviceTables
from fedjax_async.types import Array


class Piece(NamedTuple):
    """A turn to train, or None; then positions ``low .. high-1`` to receive, all from one lane's buffers."""

    turn: int | None
    low: int
    high: int


def make_waves(trains: Mapping[int, Callable[..., Any]], receive: Callable[..., Any]) -> Any:
    """``train_and_receive(tables, carry, buffers, work, count) -> (carry, buffers, rejected)``, piece by piece.

    ``trains``: width -> :func:`make_train` of that width, from wide to narrow. ``receive``: :func:`make_receive`.
    ``work``: the table of :func:`work_of`, for ``count`` pieces.
    """

    def train_and_receive(
        tables: DeviceTables, carry: Carry, buffers: JobBuffers, work: Array, count: Array
    ) -> tuple[Carry, JobBuffers, Array]:
        def one(i: Array, held: tuple[Carry, JobBuffers]) -> tuple[Carry, JobBuffers]:
            carry, buffers = held
            for level, train in enumerate(trains.values()):
                span = work[i, level]

                # a loop of one pass or none, since a conditional would copy the buffers on a CPU
                def trained(_: Array, buffers: JobBuffers, train: Any = train, span: Array = span) -> JobBuffers:
                    left: JobBuffers = train(tables, carry.slots, carry.clients, buffers, span)
                    return left

                buffers = tree.loop("train", 0, (span[1] > 0).astype(np.int32), trained, buffers)
            return receive(tables, carry, buffers, work[i, len(trains), :2])[0], buffers

        carry, buffers = tree.loop("pieces", 0, count, one, (carry, buffers))
        return carry, buffers, carry.rejected + 0

    return train_and_receive


def work_of(
    pieces: Sequence[Piece],
    turns: Sequence[Sequence[Batch]],
    widths: Sequence[int],
    ranks: np.ndarray | None,
    length: int,
) -> np.ndarray:
    """The table of ``length`` pieces that a call executes; int32[length, widths + 1, 4].

    A piece has ``widths + 1`` rows. All but the last one train, one row per width from wide to narrow, with the columns
    first job, number of jobs, first local step, end of the steps (the span of ``make_train``); a row of zeros trains
    nothing. The last row receives, with the columns low, high (the span of ``receive``): positions, or ranks if
    ``ranks`` (their bounds) is given. Unused pieces are zeros.
    """
    work = np.zeros((length, len(widths) + 1, 4), np.int32)
    level = {width: k for k, width in enumerate(sorted(widths, reverse=True))}
    for rows, (turn, low, high) in zip(work, pieces):
        for batch in [] if turn is None else turns[turn]:
            for width, first, last in batch.segments:
                rows[level[width]] = batch.first, batch.jobs, first, last
        rows[-1, :2] = (low, high) if ranks is None else np.searchsorted(ranks, [low, high])
    return work
