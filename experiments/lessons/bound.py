"""How far methods are from the best weights of arrivals in hindsight, found by gradients through the simulated run.

    python experiments/lessons/bound.py --scale small    # a quarter of an hour of a core; goes on where it stopped

The rule is ASGD, ``x <- x + w_n Delta_n`` for the n-th arrival, and begins at the point that the comparison has chosen
for ASGD in the block. Descent on the validation loss at the end of the run changes the logarithms of the weights and of
the local rate. Three families follow each other, each from the best of the one before:

* ``one weight``: the same for all arrivals;
* ``by staleness``: a table with two values an octave of ``1 + staleness``;
* ``by arrival``: a weight for each.

The weights are found for the very run (its seed, clients, delays and minibatches) in which they are scored, which no
method can do; test examples choose nothing. The scores of all methods of the comparison with the same seeds stand
beside. This is ``config.tune`` with weights that only depend on the arrival.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comparison"))

import effects
import jax
import jax.numpy as jnp
import kept
import numpy as np
import optax
import study
import summary
import training
from scenes import Block, blocks

from fedjax_async import Settings, server
from fedjax_async.base import disk, tree
from fedjax_async.config import prepare
from fedjax_async.engine.trajectory import make_trajectory
from fedjax_async.results import files
from fedjax_async.results.metrics import window
from fedjax_async.types import Array, Arrival, Params, ServerAlgorithm, State

COMMITTED = Path(__file__).resolve().parent.parent / "comparison" / "results"
STEPS = {"smoke": (1, 1, 2), "small": (6, 6, 18), "full": (30, 30, 100)}  # of descent, for each family
RATE = 0.2  # of Adam, on logarithms
SEEDS = {"smoke": 1, "small": 3, "full": 3}
TASKS = ("logistic", "mlp")  # small enough for gradients through a run
FAMILIES = ("one weight", "by staleness", "by arrival")
START = "asgd, tuned"
MOST, ALSO = 8, ("fedbuff", "fedasync", "fedavg", "scaffold")  # methods of the page: the first by rank, and these
Numbers = dict[str, Array]  # "weights" float[E] and "lr" float[], as logarithms


def weighted(weights: Array) -> ServerAlgorithm:
    """``x <- x + weights[n] Delta`` for the n-th arrival; weights float[E]."""

    def update(direction: Params, count: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        weight = weights[count].astype(arrival.weight.dtype)
        return jax.tree.map(lambda leaf: leaf * weight.astype(leaf.dtype), direction), count + 1, weight

    transform = server.Transform(lambda params: jnp.zeros((), jnp.int32), update)
    return server.rule(transform, optimizer=optax.sgd(1.0))


class Problem(NamedTuple):
    """A run as a function of its weights."""

    value: Callable[[Numbers], Any]  # ((validation loss, scores), gradient)
    staleness: np.ndarray  # int64[E]
    start: Numbers


def problem(settings: dict[str, Any]) -> Problem:
    """The run of ``asgd`` with these settings; compiled at its first call."""
    run = prepare(Settings(**settings))
    count, rate = len(run.schedule.job), run.components.hyper["server.server_lr"]
    components = run.components._replace(
        rule=lambda hyper: weighted(hyper["weights"]), hyper=dict(run.components.hyper) | {"weights": 1.0}
    )
    function = make_trajectory(components, run.schedule, run.key, run.points, norm_limit=run.norm_limit)
    hyper = {name: jnp.asarray(value, jnp.float32) for name, value in run.components.hyper.items()}

    def loss(numbers: Numbers) -> tuple[Array, dict[str, Array]]:
        given = hyper | {name: jnp.exp(value) for name, value in numbers.items()}
        scores = function(given, run.params)
        last = window("tail", len(scores["validation_loss"]))  # evaluations that the score is made of
        return jnp.mean(scores["validation_loss"][-last:]), {name: scores[name] for name in ("loss", "accuracy")}

    start = {"weights": jnp.full(count, jnp.log(rate), jnp.float32), "lr": jnp.log(hyper["lr"])}
    return Problem(jax.jit(jax.value_and_grad(loss, has_aux=True)), np.asarray(run.schedule.staleness), start)


def groups(family: str, staleness: np.ndarray) -> np.ndarray:
    """Which weight each arrival has; int64[E].

    >>> groups("by staleness", np.array([0, 1, 2, 3, 100])).tolist()
    [0, 2, 3, 4, 13]
    """
    if family == "by staleness":
        return np.floor(2 * np.log2(1.0 + staleness)).astype(np.int64)
    return np.zeros(len(staleness), np.int64) if family == "one weight" else np.arange(len(staleness))


class Found(NamedTuple):
    """A row of what is found, kept in a file."""

    world: str
    task: str
    seed: int
    weights: str  # family
    validation: float  # the loss that was minimised
    score: float  # on test examples: percent, or decimal logarithm of the loss gap
    lr: float
    least: float  # weight
    most: float
    values: list[float | None]  # by staleness one for each half octave, None: no such arrival; by arrival none are kept


def descended(run: Problem, index: np.ndarray, start: Numbers, steps: int) -> tuple[float, Numbers, dict[str, Array]]:
    """The lowest validation loss, its numbers and scores; ends early at a loss that is not finite."""
    optimizer = optax.adam(RATE)
    free, best = {"shift": jnp.zeros(int(index.max()) + 1), "lr": start["lr"]}, (float("inf"), start, {})
    state = optimizer.init(free)
    for step in range(steps + 1):
        numbers = {"weights": start["weights"] + free["shift"][index], "lr": free["lr"]}
        (loss, scores), gradient = run.value(numbers)
        if not np.isfinite(loss):
            break
        if float(loss) < best[0]:
            best = (float(loss), numbers, scores)
        if step < steps:
            shared = jax.ops.segment_sum(gradient["weights"], jnp.asarray(index), len(free["shift"]))
            free, state = tree.optimize(optimizer, {"shift": shared, "lr": gradient["lr"]}, state, free)
    return best


def searched(block: Block, seed: int, given: argparse.Namespace) -> list[Found]:
    """The rows of a block and a seed; read if they were found with the same steps and settings."""
    place = given.out / "found" / f"{block.name}-{seed}.json"
    steps, (spec, lr) = STEPS[given.scale], chosen(block)
    settings = block.settings() | {"method": spec, "lr": lr, "seed": seed}
    asked = json.loads(files.json_bytes({"steps": steps, "settings": settings}))
    if place.is_file() and (old := json.loads(place.read_text())).get("asked") == asked:
        return [Found(*row) for row in old["rows"]]
    began = time.process_time()
    run = problem(settings)
    best = descended(run, groups("one weight", run.staleness), run.start, 0)
    rows = [_row(block, seed, START, best, run)]
    for family, count in zip(FAMILIES, steps, strict=True):
        best = descended(run, groups(family, run.staleness), best[1], count)
        rows.append(_row(block, seed, family, best, run))
    jax.clear_caches()
    place.parent.mkdir(parents=True, exist_ok=True)
    content = {"asked": asked, "seconds": time.process_time() - began, "rows": rows}
    disk.write(place, json.dumps(content, indent=1).encode())
    if not given.quiet:
        print(f"{block.name}, seed {seed}: {content['seconds']:.0f} s", file=sys.stderr, flush=True)
    return rows


def chosen(block: Block) -> tuple[str, float]:
    """ASGD's point in the comparison; its default if the scale has no committed results."""
    try:
        tried = kept.read(COMMITTED, block.scale).tried
    except ValueError:
        return "asgd:server_lr=0.1", float(block.settings()["lr"])
    (row,) = [row for row in tried if row[:3] == (block.world, block.task, "asgd") and row.chosen]
    return row.spec, row.lr


def _row(block: Block, seed: int, family: str, best: tuple[float, Numbers, Any], run: Problem) -> Found:
    loss, numbers, scores = best
    values = training.log_gap(scores["loss"], block.minimum(seed)) if block.gap else 100 * scores["accuracy"]
    weights = np.exp(np.asarray(numbers["weights"], np.float64))
    index = groups(family if family in FAMILIES else "one weight", run.staleness)
    firsts = [np.flatnonzero(index == k)[:1] for k in range(int(index.max()) + 1)]
    table = [float(f"{weights[first[0]]:.4g}") if len(first) else None for first in firsts]
    return Found(
        block.world, block.task, seed, family, float(f"{loss:.6g}"),
        float(f"{summary.final(np.asarray(values, np.float64)):.6g}"), float(f"{np.exp(numbers['lr']):.4g}"),
        float(f"{weights.min():.4g}"), float(f"{weights.max():.4g}"), [] if family == "by arrival" else table,
    )  # fmt: skip


def distances(rows: Sequence[Found], runs: Sequence[kept.Kept]) -> list[dict[str, Any]]:
    """How far every method is from each family's end: a mean over the seeds with its interval; positive is behind."""
    ends = {(row.world, row.task, row.seed, row.weights): row.score for row in rows}
    places = list(dict.fromkeys((row.world, row.task) for row in rows))
    signs = {(block.world, block.task): -1 if block.gap else 1 for block in blocks("full")}
    finals = {
        (run.world, run.task, run.seed, run.method): summary.final(run.scores) * (1 if signs[run[:2]] < 0 else 100)
        for run in runs
    }
    found = []
    for method in dict.fromkeys(run.method for run in runs):
        cells: dict[str, Any] = {"method": method}
        for place in places:
            for family in ("by staleness", "by arrival"):
                each = [
                    signs[place] * (ends[*place, seed, family] - finals[*place, seed, method])
                    for seed in dict.fromkeys(row.seed for row in rows)
                    if (*place, seed, method) in finals
                ]
                cells[f"{', '.join(place)}, {family}"] = effects.plus_minus(np.array(each)) if each else None
        found.append(cells)
    return found


def by_rank(rows: Sequence[dict[str, Any]], runs: Sequence[kept.Kept]) -> list[dict[str, Any]]:
    """The rows in the order of their methods' mean ranks; those without a rank come last."""
    order = [row["method"] for row in summary.rank_rows(kept.Results(list(runs), [], []))[0]]
    places = {method: place for place, method in enumerate(order)}
    return sorted(rows, key=lambda row: places.get(row["method"], len(order)))


def family_rows(rows: Sequence[Found]) -> list[dict[str, Any]]:
    """A row for each block and family: validation loss and score, means over the seeds with one deviation."""
    found = []
    for world, task, family in dict.fromkeys((row.world, row.task, row.weights) for row in rows):
        mine = [row for row in rows if (row.world, row.task, row.weights) == (world, task, family)]
        found.append({
            "world": world,
            "task": task,
            "weights": family,
            **{name: effects.spread([getattr(row, name) for row in mine]) for name in ("validation", "score", "lr")},
            "least weight": float(np.mean([row.least for row in mine])),
            "most": float(np.mean([row.most for row in mine])),
        })  # fmt: skip
    return found


def main() -> None:
    """Search what is missing, and write the tables."""
    given = study.parsed(study.options(__doc__, "bound"))
    asked = [block for block in blocks(given.scale) if block.task in TASKS and block.world in ("devices", "lognormal")]
    rows = [row for block in asked for seed in range(SEEDS[given.scale]) for row in searched(block, seed, given)]
    shown = [row._asdict() | {"values": " ".join("-" if v is None else f"{v:g}" for v in row.values)} for row in rows]
    study.publish(shown, given, "bound", [])
    decimals = {"validation": 3, "lr": 3, "least weight": 4, "most": 3}
    study.publish(family_rows(rows), given, "families", decimals=decimals)
    try:
        runs = kept.read(COMMITTED, given.scale).runs
    except ValueError as error:
        print(f"no distances from methods: {error}", file=sys.stderr)
        return
    behind = by_rank(distances(rows, runs), runs)
    first = [row["method"] for row in behind[:MOST]]
    study.publish(behind, given, "distances", [row for row in behind if row["method"] in (*first, *ALSO)])


if __name__ == "__main__":
    main()
