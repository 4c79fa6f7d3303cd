"""The loop of a run: train the batches of a turn, apply their uploads, evaluate, take checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from fedjax_async.engine.batches import Lanes
from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.engine.devices import to_devices
from fedjax_async.engine.evaluation import Scores
from fedjax_async.engine.record import Progress, refuse
from fedjax_async.engine.trainers import Moved, Results, Tables, Trainers
from fedjax_async.engine.watching import Watcher
from fedjax_async.types import Array, Params

# About how many turns the host may be ahead of the device. The limit bounds memory, and without it the progress bar
# would run ahead of the training.
TURNS_AHEAD = 8
CHECK_EVERY = 4  # turns between two checks of how far the device is; each check costs a transfer


class Calls(NamedTuple, Generic[Moved, Results]):
    """The functions that the loop calls, beside the training of the lanes; ``carry`` is the state between programs."""

    # (carry, buffers, low, high) -> (carry, rejected so far)
    apply: Callable[[Moved, Results, int, int], tuple[Moved, Array]]
    # (carry, [(run, its arrivals so far; without a server: the row of the evaluation)]) -> scores of each
    evaluate: Callable[[Moved, list[tuple[int, int]]], list[dict[str, Any]]]
    # (carry, high) -> rejected uploads among positions 0 .. high-1, without those after a run's stop; waits
    rejected: Callable[[Moved, int], int]
    enough: Callable[[Moved], int]  # carry -> how many positions give all stopped runs their results
    status: Callable[[int, int], dict[str, float]]  # (low, high) -> what the progress bar shows of these positions


def advance(
    calls: Calls[Moved, Results],
    dealt: Lanes,
    carry: Moved,
    trainers: Trainers[Tables, Moved, Results],
    scores: Scores,
    watcher: Watcher,
    *,
    turns: int = 0,
    on_bad: str = "reject",
    progress: Progress | None = None,
    keeper: Keeper | None = None,
) -> Moved:
    """Train all turns but the first ``turns``, which are done; returns the last carry.

    The host waits for the device only to stay within about ``TURNS_AHEAD`` turns and a few observed evaluations
    of it, and to take checkpoints. Raises ``ValueError`` for a rejected upload if ``on_bad`` is ``"raise"``.
    """
    high, tokens, total, done = 0, deque[Array](), len(dealt.train_order), turns
    stretches, lane_of = dealt.stretches.tolist(), dealt.lane.tolist()
    edge = np.searchsorted(dealt.stretches, dealt.bounds).tolist()

    for g in range(turns, len(dealt.turns)):
        buffers = trainers.train(dealt.turns[g], carry)
        for low, high in scores.cuts(*stretches[edge[g] : edge[g + 1] + 1]):
            carry, rejected = calls.apply(carry, buffers[lane_of[low]], low, high)
            scores.evaluate(high, partial(calls.evaluate, carry))
        if done % CHECK_EVERY == 0:
            tokens.append(rejected)
        done += 1
        low, high = int(dealt.bounds[g]), int(dealt.bounds[g + 1])
        if len(tokens) > TURNS_AHEAD // CHECK_EVERY and int(tokens.popleft()) and on_bad == "raise":
            refuse(calls.rejected(carry, high), on_bad)
        if keeper is not None and keeper.due(high) and high < total:
            keeper.save(high, _snapshot(g + 1, carry, scores, watcher))
        if progress is not None:
            progress(high, total, **calls.status(low, high), accuracy=scores.latest())
        watcher.hand_over()
        if watcher.all_ended and high >= calls.enough(carry):
            break
    refuse(calls.rejected(carry, high), on_bad)
    return carry


def restored(
    keeper: Keeper | None, carry: Moved, scores: Scores, watcher: Watcher, model: Params,
    sharding: NamedSharding | None,
) -> tuple[Moved, int]:  # fmt: skip
    """The carry of the newest checkpoint, and how many turns are done; ``(carry, 0)`` without a checkpoint.

    Its evaluations are put into ``scores`` and handed to the observers again. ``model``: any model of the structure
    that observers keep.
    """
    snapshot = None if keeper is None else keeper.restore()
    if keeper is None or snapshot is None:
        return carry, 0
    leaves, structure = jax.tree.flatten(carry)
    keeper.require_count(len(snapshot.leaves), len(leaves))
    keeper.require_types(snapshot.leaves, leaves)
    carry = to_devices(jax.tree.unflatten(structure, snapshot.leaves), sharding)
    scores.at = dict(snapshot.scores)
    models = {moment: jax.tree.unflatten(jax.tree.structure(model), found) for moment, found in snapshot.models.items()}
    watcher.restore(scores.at, models)
    return carry, snapshot.turns


def _snapshot(turns: int, carry: object, scores: Scores, watcher: Watcher) -> Snapshot:
    watcher.hand_over(wait=True)
    models = {moment: jax.tree.leaves(model) for moment, model in watcher.models.items()}
    leaves, seen = jax.device_get((jax.tree.leaves(carry), scores.at))
    return Snapshot(turns, leaves, seen, models)
