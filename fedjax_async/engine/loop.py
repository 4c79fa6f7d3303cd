"""The loop of a run: train the batches of a turn, apply their uploads, evaluate, take checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.kernels import Carry, JobBuffers
from fedjax_async.engine.layout import Layout
from fedjax_async.engine.members import Member
from fedjax_async.engine.record import EngineResult, Progress, refuse
from fedjax_async.engine.scores import Evaluate, Scores
from fedjax_async.engine.streaming import Feed
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.watching import Watcher
from fedjax_async.types import Array, Params

# About how many turns the host may be ahead of the device. The limit bounds memory, and without it the progress bar
# would run ahead of the training.
TURNS_AHEAD = 8
CHECK_EVERY = 4  # turns between two checks of how far the device is; each check costs a transfer


class SideBySide(Protocol):
    """Runs that advance side by side, laid out, moved to the device and compiled: with a server or without one.

    ``carry`` is the state that goes from program to program, ``buffers`` are those of a lane. Its programs have
    ``start(tables, params) -> carry``, the carry at the start, ``buffers()``, empty buffers of a lane, and by width
    ``train[width](tables, rows, buffers, span) -> buffers``, which trains a batch: see ``kernels.Together``.
    """

    @property
    def members(self) -> Sequence[Member]: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def tables(self) -> Any: ...  # DeviceTables, GrowingTables or PeerTables
    @property
    def programs(self) -> Any: ...
    @property
    def params(self) -> Params: ...  # of the structure of models that observers keep
    @property
    def feed(self) -> Feed | None: ...
    @property
    def sharding(self) -> NamedSharding | None: ...

    def apply(self, carry: Carry, buffers: JobBuffers, low: int, high: int) -> tuple[Carry, Array]:
        """Apply the positions ``low .. high-1``; also returns how many uploads were rejected so far."""

    def scores(self) -> Scores:
        """When each run is evaluated."""

    def evaluator(self, watcher: Watcher, trainers: Trainers) -> Evaluate:
        """The evaluation of runs at moments; it hands the scores to the watcher, too."""

    def identity(self) -> dict[str, object]:
        """What a checkpoint must have in common with the runs, besides their settings."""

    def until(self, carry: Carry, watcher: Watcher, run: int) -> tuple[int, int]:
        """How many arrivals of a run belong to its result, and how many must be received until it is complete."""

    def status(self, low: int, high: int) -> dict[str, float]:
        """What the progress bar shows of the positions ``low .. high-1``."""

    def result(self, carry: Carry, scores: Scores, watcher: Watcher, run: int) -> EngineResult:
        """The result of a run."""


def advance(
    runs: SideBySide,
    evaluate: Evaluate,
    carry: Carry,
    trainers: Trainers,
    scores: Scores,
    watcher: Watcher,
    *,
    turns: int = 0,
    on_bad: str = "reject",
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> Carry:
    """Train all turns but the first ``turns``, which are done; returns the last carry.

    The host waits for the device only to stay within about ``TURNS_AHEAD`` turns and a few observed evaluations
    of it, and to take checkpoints. Raises ``ValueError`` for a rejected upload if ``on_bad`` is ``"raise"``.
    """
    dealt = runs.layout.dealt
    high, tokens, total, done = 0, deque[Array](), len(dealt.train_order), turns
    rejected: Array | None = None
    cut = dealt.stretches
    stretches, edge, lane_of = cut.tolist(), np.searchsorted(cut, dealt.bounds).tolist(), dealt.lane.tolist()

    for g in range(turns, len(dealt.turns)):
        buffers = trainers.train(dealt.turns[g], carry)
        for low, high in scores.cuts(*stretches[edge[g] : edge[g + 1] + 1]):
            carry, rejected = runs.apply(carry, buffers[lane_of[low]], low, high)
            scores.evaluate(high, partial(evaluate, carry))
        if done % CHECK_EVERY == 0 and rejected is not None:
            tokens.append(rejected)
        done += 1
        low, high = int(dealt.bounds[g]), int(dealt.bounds[g + 1])
        if len(tokens) > TURNS_AHEAD // CHECK_EVERY and int(tokens.popleft()) and on_bad == "raise":
            refuse(_rejected(runs, carry, watcher, high), on_bad)
        if keeper is not None and keeper.due(high) and high < total:
            keeper.save(high, snapshot_of(g + 1, carry, scores, watcher))
        if progress is not None:
            progress(high, total, **runs.status(low, high), accuracy=scores.latest())
        watcher.hand_over()
        if watcher.all_ended and high >= _enough(runs, carry, watcher):
            break
    watcher.hand_over(wait=True)
    if on_bad == "raise":
        refuse(_rejected(runs, carry, watcher, high), on_bad)
    return carry


def _enough(runs: SideBySide, carry: Carry, watcher: Watcher) -> int:
    """How many positions must be received until the results of all stopped runs are complete."""
    until = {run: runs.until(carry, watcher, run)[1] for run in watcher.ends}
    return max((int(runs.layout.positions[run][count - 1]) + 1 for run, count in until.items() if count), default=0)


def _rejected(runs: SideBySide, carry: Carry, watcher: Watcher, received: int) -> int:
    """Rejected uploads among the first ``received`` positions, without those after a stop; waits for the device."""
    watcher.hand_over(wait=True)
    if not watcher.ends:
        return int(carry.rejected)
    accepted, total = np.asarray(jax.device_get(carry.records["accepted"])), 0
    for run, member in enumerate(runs.members):
        arrivals = runs.until(carry, watcher, run)[0]
        position = runs.layout.positions[run][:arrivals][member.applied[:arrivals]]
        total += int(np.sum(~accepted[position[position < received]]))
    return total


def restored(
    keeper: Keeper, carry: Carry, scores: Scores, watcher: Watcher, model: Params, sharding: NamedSharding | None
) -> tuple[Carry, int]:
    """The carry of the newest checkpoint, and how many turns are done; ``(carry, 0)`` without a checkpoint.

    Its evaluations are handed to the observers again, see :func:`go_on`.
    """
    snapshot = keeper.restore()
    if snapshot is None:
        return carry, 0
    carry = to_devices(keeper.fitted(snapshot.leaves, carry), sharding)
    go_on(snapshot, scores, watcher, model)
    return carry, snapshot.turns


def go_on(snapshot: Snapshot, scores: Scores, watcher: Watcher, model: Params) -> None:
    """Put the evaluations of a checkpoint into ``scores``, and hand them to the observers again.

    ``model``: any model of the structure that observers keep.
    """
    scores.at = dict(snapshot.scores)
    models = {moment: jax.tree.unflatten(jax.tree.structure(model), found) for moment, found in snapshot.models.items()}
    watcher.restore(scores.at, models)


def snapshot_of(turns: int, state: object, scores: Scores, watcher: Watcher) -> Snapshot:
    """What a checkpoint holds after so many turns; ``state``: all arrays that must go on from here."""
    watcher.hand_over(wait=True)
    models = {moment: jax.tree.leaves(model) for moment, model in watcher.models.items()}
    leaves, seen = jax.device_get((jax.tree.leaves(state), scores.at))
    return Snapshot(turns, leaves, seen, models)
