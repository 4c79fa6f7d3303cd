"""Server rates by staleness, buffer and local rate, learned on some worlds and tasks, frozen, tested on others.

    python experiments/lessons/learned.py --scale small    # a quarter of an hour of a core; goes on where it stopped

The rule is ``x <- x + eta mean_i (1 + tau_i / c)^-a Delta_i`` over K arrivals. The cross-entropy method (Rubinstein
1999) looks for eta, c, a, K and a factor of the task's usual local rate. The population of a generation is the run axis
of a sweep: all candidates of a block are simulated side by side. What a candidate has to lower is the mean logarithm of
the validation loss at the end, over the training blocks; every generation has a seed of its own.

What is found is frozen and runs in other worlds on other tasks, without any tuning there. Beside it run known methods,
each tuned in the block itself (eight runs over the server's rate and the local one). No test example is used for
learning or tuning.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comparison"))

import effects
import jax
import jax.numpy as jnp
import kept
import numpy as np
import optax
import parts
import scenes
import study
import training
from scenes import Block, Task, World

from fedjax_async import ServerAlgorithm, register, server
from fedjax_async.base import check, disk, notices
from fedjax_async.results import files
from fedjax_async.types import Array, Traced

_TIMES = {"steps": 5, "lr": 0.05, "batch_size": 32}
scenes.WORLDS.update({
    "exponential": World(
        {"clients": 20, "delay": "exponential:mean=60,heterogeneity=1"}, 0.3, 3000.0, "20 clients, exponential"
    ),
    "short lognormal": scenes.WORLDS["lognormal"]._replace(time=600.0),
    "sessions": World(
        {"clients": 60, "delay": "gamma:mean=60,heterogeneity=1", "availability": "sessions:on=600,off=300"},
        0.2, 900.0, "60 clients, gamma, offline a third of the time",
    ),
})  # fmt: skip
scenes.TASKS.update(
    {
        "digits": Task(
            {"dataset": "mnist", "model": "mlp:hidden=16", "validation_fraction": 0.03} | _TIMES,
            "MNIST, 16 hidden units",
        ),
        "motion": Task(
            {"dataset": "har", "model": "mlp:hidden=32", "validation_fraction": 0.1} | _TIMES, "HAR, 32 hidden units"
        ),
    }
)
Blocks = list[tuple[str, str]]
LEARNING: dict[str, Blocks] = {
    "smoke": [("exponential", "logistic")],
    "small": [(w, t) for w in ("short lognormal", "exponential") for t in ("logistic", "digits")],
}
UNSEEN: dict[str, Blocks] = {
    "smoke": [("devices", "logistic")],
    "small": [(w, t) for w in ("devices", "sessions") for t in ("mlp", "motion")],
}
LEARNING["full"], UNSEEN["full"] = LEARNING["small"], UNSEEN["small"]
GENERATIONS = {"smoke": (1, 3), "small": (3, 12), "full": (30, 64)}  # and the size of the population
COUNTS, SEEDS = {"smoke": 2, "small": 8, "full": 16}, {"smoke": 2, "small": 5, "full": 10}
# Number -> mean and deviation of the first Gaussian.
NUMBERS = {
    "log rate": (-0.7, 1.0), "exponent": (0.5, 0.4), "log knee": (1.0, 1.5), "log2 buffer": (2.0, 1.2),
    "log local": (0.0, 0.5),
}  # fmt: skip
BUFFERS = (1.0, 4.0)  # binary logarithms of the smallest and the largest
WORST = 10.0  # loss of a run that diverged
FIRST_SEED = 2000  # of the generations; those of the test are 0, 1, ...
LEARNED, TUNED_LEARNED, BEST = "learned, frozen", "learned, rates tuned", "best tuned"
METHODS = {  # spec, range of rates, exponent of the staleness weights
    "asgd": ("asgd:server_lr={:g}", "every", 0.0),
    "orthofl_released": ("orthofl_released:mixing={:g}", "every", 0.0),
    "fedbuff": ("fedbuff:server_lr={:g}@buffer:size=5", "buffer", 0.5),
}


@register("method", "by_staleness", timing="buffer:size=5")
def by_staleness(*, server_lr: Traced = 0.5, exponent: Traced = 0.5, knee: Traced = 1.0) -> ServerAlgorithm:
    """Mean of deltas weighted by ``(1 + tau / knee)^-exponent``, times ``server_lr``."""
    for name, value in (("server_lr", server_lr), ("knee", knee)):
        check.positive(name, value)
    check.non_negative("exponent", exponent)

    def weight(tau: Array) -> Array:
        real = jnp.result_type(float)
        return (1.0 + tau.astype(real) / jnp.asarray(knee, real)) ** -jnp.asarray(exponent, real)

    return server.rule(server.scale_by_staleness(weight), optimizer=optax.sgd(server_lr))


def spec_of(numbers: Sequence[float], rate: str = "") -> str:
    """The method of a candidate; ``rate``: text in place of its own server rate."""
    log_rate, exponent, log_knee, log_buffer, _ = numbers
    size = round(2 ** float(np.clip(log_buffer, *BUFFERS)))
    shown = rate or f"{np.exp(log_rate):.4g}"
    options = f"server_lr={shown},exponent={max(exponent, 0.0):.4g},knee={np.exp(log_knee):.4g}"
    return f"by_staleness:{options}@buffer:size={size}"


def losses(block: Block, candidates: np.ndarray, seed: int) -> list[float]:
    """The validation loss at the end of each candidate's run; infinite if it is not a number. One sweep."""
    base = block.settings()
    settings = [
        base | {"method": spec_of(one), "lr": float(f"{base['lr'] * np.exp(one[-1]):.4g}"), "seed": seed}
        for one in candidates
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", notices.RunWarning)  # small buffers, runs that diverge
        runs = training.trained(settings, [])
    found = [float(np.mean(run.evaluations["validation_loss"][-2:])) for run in runs]
    return [value if np.isfinite(value) else np.inf for value in found]


def searched(given: argparse.Namespace) -> dict[str, Any]:
    """The state of the search after its last generation, read or continued: a row a generation.

    ``ValueError`` if the file is of a search with other candidates, worlds or tasks.
    """
    file, (generations, size) = given.out / "search.json", GENERATIONS[given.scale]
    first = np.array(list(NUMBERS.values()))
    places = {f"{world}-{task}": Block(world, task, given.scale).settings() for world, task in LEARNING[given.scale]}
    asked = json.loads(files.json_bytes({"size": size, "numbers": NUMBERS, "blocks": places}))
    state: dict[str, Any] = {
        "asked": asked,
        "mean": first[:, 0].tolist(),
        "std": first[:, 1].tolist(),
        "generations": [],
        "seconds": 0.0,
    }
    if file.is_file() and (state := json.loads(file.read_text())).get("asked") != asked:
        raise ValueError(f"out = {str(given.out)!r}: must be empty or hold the same search; {file.name} is of another")
    given.out.mkdir(parents=True, exist_ok=True)
    while (turn := len(state["generations"])) < generations:
        began, mean, std = time.process_time(), np.array(state["mean"]), np.array(state["std"])
        drawn = mean + std * np.random.default_rng([turn, len(mean)]).normal(size=(size, len(mean)))
        drawn[0] = mean
        found = []
        for world, task in LEARNING[given.scale]:
            found.append(losses(Block(world, task, given.scale), drawn, FIRST_SEED + turn))
            jax.clear_caches()
        aim = np.mean(np.log(np.minimum(found, WORST)), axis=0)
        best = drawn[np.argsort(aim, kind="stable")[: max(2, size // 4)]]
        of_mean = {f"{world}, {task}": each[0] for (world, task), each in zip(LEARNING[given.scale], found)}
        state["generations"].append({"mean": state["mean"], "std": state["std"], "loss of the mean": of_mean})
        state |= {"mean": best.mean(axis=0).tolist(), "std": (0.7 * best.std(axis=0) + 0.3 * std).tolist()}
        state["seconds"] += time.process_time() - began
        disk.write(file, json.dumps(state, indent=1).encode())
        if not given.quiet:
            print(f"generation {turn + 1}: {spec_of(state['mean'])}", file=sys.stderr, flush=True)
    return state


def search_rows(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each generation: the numbers of its mean, and the validation losses of that candidate."""
    rows = []
    after = {"mean": state["mean"], "std": state["std"], "loss of the mean": {}}
    for turn, one in enumerate([*state["generations"], after], 1):
        log_rate, exponent, log_knee, log_buffer, log_local = one["mean"]
        rows.append({
            "generation": turn if one is not after else "found",
            "rate": float(np.exp(log_rate)),
            "exponent": max(exponent, 0.0),
            "knee": float(np.exp(log_knee)),
            "buffer": round(2 ** float(np.clip(log_buffer, *BUFFERS))),
            "local factor": float(np.exp(log_local)),
            **{name: one["loss of the mean"].get(name) for name in rows_of_losses(state)},
        })  # fmt: skip
    return rows


def rows_of_losses(state: dict[str, Any]) -> list[str]:
    """The names of the training blocks."""
    return list(state["generations"][0]["loss of the mean"])


class Frozen(study.Tuned):
    """A configuration that runs as it is: its one point has the learned numbers."""

    def results(self) -> kept.Results:
        """Train it."""
        base = self.block.settings()
        local = float(f"{base['lr'] * float(dict(self.changes)['local']):.4g}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", notices.RunWarning)  # a buffer that is small for this world
            found = training.tuned(self.method, self.block, base, [study.spaces.Point(self.spec, local)], self.seeds)
        jax.clear_caches()
        return found


def asked(numbers: Sequence[float], given: argparse.Namespace) -> list[study.Tuned]:
    """The frozen rule, the same with its rates tuned, and the tuned methods, in every unseen block."""
    found: list[study.Tuned] = []
    methods = dict(list(METHODS.items())[:1]) if given.scale == "smoke" else METHODS
    for world, task in UNSEEN[given.scale]:
        block, seeds, count = Block(world, task, given.scale), SEEDS[given.scale], COUNTS[given.scale]
        local = (("local", float(np.exp(numbers[-1]))),)
        frozen = spec_of(numbers)
        found.append(Frozen(LEARNED, frozen, "buffer", block, given.out, 1, seeds, local))
        per_step = block.settings()["clients"] / int(frozen.rpartition("=")[2])
        weight = (1 + per_step / np.exp(numbers[2])) ** max(numbers[1], 0.0)  # as in the ablation
        spec = spec_of(numbers, "{:g}")
        found.append(study.Tuned(TUNED_LEARNED, spec, "buffer", block, given.out, count, seeds, factor=float(weight)))
        for name, (spec, kind, exponent) in methods.items():
            factor = (1 + block.settings()["clients"] / 5) ** exponent
            found.append(study.Tuned(name, spec, kind, block, given.out, count, seeds, factor=factor))
    return found


def with_best(found: kept.Results) -> list[kept.Kept]:
    """All runs, and those of each block's best tuned method again, by its validation score, as ``BEST``."""
    runs = list(found.runs)
    for world, task in dict.fromkeys((row.world, row.task) for row in found.tried):
        sign = -1 if scenes.TASKS[task].gap else 1
        mine = [row for row in found.tried if row[:2] == (world, task) and row.method in METHODS and row.chosen]
        best = max(mine, key=lambda row: sign * row.validation).method
        runs += [run._replace(method=BEST) for run in found.runs if run[:3] == (world, task, best)]
    return runs


def main() -> None:
    """Learn, test, write the tables."""
    given = study.parsed(study.with_processes(study.options(__doc__, "learned")))
    state = searched(given)
    study.publish(search_rows(state), given, "search", decimals={"rate": 3, "exponent": 3})
    about = {"numbers": state["mean"], "points": COUNTS[given.scale], "seeds": SEEDS[given.scale], "methods": METHODS}
    blocks = {f"{world}-{task}": Block(world, task, given.scale).settings() for world, task in UNSEEN[given.scale]}
    parts.begin(given.out, about | blocks)
    found = parts.train_all(asked(state["mean"], given), given.processes, quiet=given.quiet)
    study.publish_runs(found, given, "unseen")
    runs = with_best(found)
    others = [BEST, *(name for name in (TUNED_LEARNED, *METHODS) if any(run.method == name for run in runs))]
    study.publish(effects.rows(runs, {name: [(name, LEARNED)] for name in others}, "frozen against"), given, "learned")
    study.publish(effects.score_rows(found.runs), given, "unseen")


if __name__ == "__main__":
    main()
