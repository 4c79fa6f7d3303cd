"""Execute a schedule in waves: the fast engine."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_async import check, tree
from fedjax_async.engine import programs
from fedjax_async.engine.evaluation import Points, owners
from fedjax_async.engine.kernels import Live
from fedjax_async.engine.plan import Plan, make_plan
from fedjax_async.engine.record import Outcome
from fedjax_async.engine.trainers import Trainers
from fedjax_async.engine.widths import ladder
from fedjax_async.engine.world import make_world
from fedjax_async.types import ClientAlgorithm, FederatedData, Key, Model, Params, Schedule, ServerAlgorithm

# How many groups of batches the host may be ahead of the device: bounds memory, and keeps the progress bar honest.
AHEAD = 8

# Fewer slots than this are rounded up, so that small runs of different methods share programs.
LEAST_SLOTS = 12

# Besides one training program a width: start, rows, receive, evaluate.
OTHER_PROGRAMS = 4

Progress = Callable[..., None]


class Pieces(NamedTuple):
    """What a run is made of: everything that learns, and the data it learns from."""

    server: ServerAlgorithm
    client: ClientAlgorithm
    model: Model
    data: FederatedData


def default_batching() -> str:
    """How a compiled call trains its jobs: one after the other on a CPU, all at once elsewhere.

    A core with matrix instructions is busy with a single client, and another client's matrices only
    spill its caches: with two lanes, looping beat ``vmap`` by 1.0 (logistic regression) to 1.25 (an MLP).
    """
    return "loop" if jax.default_backend() == "cpu" else "vmap"


def default_width(params: Params) -> int:
    """The longest batch that pays on this backend.

    On a CPU 16 jobs hide the cost of a call; on an accelerator width is what fills it. Bounded by memory:
    about 64 MiB of uploads on a CPU, about 2 GiB for all of a batch's buffers elsewhere.
    """
    size = max(tree.num_bytes(params), 1)
    if jax.default_backend() == "cpu":
        return max(1, min(16, 2**26 // size))
    return max(1, min(1024, 2**31 // (8 * size)))


def default_lanes() -> int:
    """How many batches are trained at the same time: one a core on a CPU, one on an accelerator.

    XLA runs the programs that one host thread starts one after the other, and a client's matrices are
    too small to keep several cores busy; independent batches, started by threads of their own, are not.
    """
    if jax.default_backend() != "cpu":
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, usable)


def run_waves(
    pieces: Pieces,
    schedule: Schedule,
    params: Params,
    key: Key,
    points: Points,
    *,
    max_width: int | None = None,
    lanes: int | None = None,
    batching: str | None = None,
    per_client: bool = False,
    on_bad: str = "reject",
    progress: Progress | None = None,
) -> Outcome:
    """Train every job of the schedule, batched in waves; the same result as one event at a time.

    Nothing in the loop waits for the device except to stay at most ``AHEAD`` groups of batches in front of it.
    """
    server, client, model, data = pieces
    top = default_width(params) if max_width is None else max_width
    lanes = default_lanes() if lanes is None else lanes
    check.whole("max_width", top)
    check.whole("lanes", lanes)
    memory = jax.eval_shape(lambda p: server.init(p)[1], params)
    personal = bool(jax.tree.leaves(memory))
    batching = batching or default_batching()
    plan = make_plan(schedule, max_width=top, lanes=lanes, batching=batching, personal=personal)
    world = make_world(plan, data, key)
    slots = next(s for s in ladder(2 * max(LEAST_SLOTS, plan.slots.count)) if s >= max(LEAST_SLOTS, plan.slots.count))
    receive = programs.receive(server, bool(np.all(schedule.closes)))
    labels = bool(np.issubdtype(data.test_y.dtype, np.integer))
    evaluate = programs.evaluate(model, server, len(data.test_y), labels, len(data.size) if per_client else None)
    tests = jax.device_put((data.test_x, data.test_y, owners(data) if per_client else None))

    live = programs.start(server, client, len(data.size), slots)(world, params)
    scores = Scores(points)
    scores.take(0, lambda: evaluate(live.server, *tests))
    tokens: deque[Any] = deque()
    with Trainers(plan, world, client, live, lanes) as trainers:
        for group in plan.groups:
            for b, rows in zip(group, trainers.train(group, live), strict=True):
                for low, high in scores.cuts(int(plan.bounds[b]), int(plan.bounds[b + 1])):
                    live, rejected = receive(world, live, rows, np.array([low, high], np.int32))
                    scores.take(high, lambda: evaluate(live.server, *tests))  # noqa: B023 (called at once)
            tokens.append(rejected)
            if len(tokens) > AHEAD:
                refuse(int(tokens.popleft()), on_bad)
            if progress is not None:
                low, high = int(plan.bounds[group[0]]), int(plan.bounds[group[-1] + 1])
                progress(high, len(schedule.job), **_status(schedule, low, high), accuracy=scores.latest())
    refuse(int(live.rejected), on_bad)
    return _outcome(plan, live, scores, server)


def refuse(rejected: int, on_bad: str) -> None:
    """Under the policy ``raise``, end the run at the first non-finite upload."""
    if rejected and on_bad == "raise":
        raise ValueError(
            f"uploads rejected so far = {rejected}: must be 0 under on_bad='raise' (a client diverged: lower the "
            "learning rate, or let the run go on with on_bad='reject')"
        )


def _status(schedule: Schedule, low: int, high: int) -> dict[str, float]:
    """What the progress bar shows of a wave."""
    return {"time": float(schedule.time[high - 1]), "staleness": float(np.mean(schedule.staleness[low:high]))}


class Scores:
    """Evaluations as they come: device values, fetched when ready or at the end."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.stops = np.unique(points.position)
        self.at: dict[int, dict[str, Any]] = {}

    def cuts(self, low: int, high: int) -> list[tuple[int, int]]:
        """Split the arrivals ``low .. high-1`` so that every evaluation falls between two pieces."""
        inner = self.stops[np.searchsorted(self.stops, low, "right") : np.searchsorted(self.stops, high, "left")]
        edges = [low, *inner.tolist(), high]
        return list(itertools.pairwise(edges))

    def take(self, position: int, evaluate: Callable[[], dict[str, Any]]) -> None:
        """Evaluate, if one is due after ``position`` arrivals."""
        place = np.searchsorted(self.stops, position)
        if place < len(self.stops) and self.stops[place] == position:
            self.at[position] = evaluate()

    def latest(self) -> float:
        """The newest accuracy that the device has finished, NaN if none; never waits."""
        for scores in reversed(self.at.values()):
            if getattr(scores["accuracy"], "is_ready", lambda: True)():
                return float(scores["accuracy"])
        return float("nan")

    def columns(self) -> dict[str, np.ndarray]:
        """All evaluations, one row a point: arrays [V] and, per client, [V, N]."""
        fetched = jax.device_get(self.at)
        names = next(iter(fetched.values()))
        return {name: np.stack([fetched[int(p)][name] for p in self.points.position]) for name in names}


def _outcome(plan: Plan, live: Live, scores: Scores, server: ServerAlgorithm) -> Outcome:
    total = len(plan.schedule.job)
    waves = np.diff(plan.waves)
    return Outcome(
        params=jax.device_get(server.params(live.server)),
        scores=scores.columns(),
        records={name: np.asarray(column)[:total] for name, column in jax.device_get(live.records).items()},
        counters={
            "waves": len(waves),
            "mean_width": float(waves.mean()) if len(waves) else 0.0,
            "batches": len(plan.segments),
            "widths": list(plan.widths),
            "slots": plan.slots.count,
            "useful_steps": plan.useful_steps,
            "executed_steps": plan.executed_steps,
            "programs": len(plan.widths) + OTHER_PROGRAMS,
        },
    )
