"""Policies that choose clients, on worlds that none of them was made for: accuracy and time to target.

    python experiments/policies/worlds.py --scale laptop     # a few minutes on 2 cores
    python experiments/policies/learn.py --scale laptop      # learns the rows "learned": OUT/learn.csv

Three worlds differ in delays and skew. FedBuff closes a step at every fifth upload; six of forty clients train at any
time, and a policy says who is next. The rows "learned" have what ``learn.py`` found on other worlds and seeds, as
``results/learn.csv`` beside this file has it (copy yours there): the weights of ``linear`` (whom to send next),
FedBuff's server rate and staleness exponent (how much an arrival counts), or both, joined. All rows of a world have the
same clients, delays and minibatches, seed by seed.

The server's rate of the other rows is the best of ``RATES`` on the training worlds, by the validation part, too.
The target of a world is the accuracy that uniform reaches at the end, its mean over the seeds.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from variants import Rows, Variant, options, parse_seeds, report, run_variants

from fedjax_async.results.metrics import final_accuracy, to_target
from fedjax_async.results.significance import interval
from fedjax_async.types import Run

HERE = Path(__file__).resolve().parent
COMMON: dict[str, Any] = {
    **{"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 40, "steps": 10, "lr": 0.05, "batch_size": 16},
    **{"time": 60.0, "eval_time": 2.0, "validation_fraction": 0.2},
}
SMALL = {"clients": 20, "time": 6.0, "eval_time": 2.0, "eval_examples": 100}
# of delays of mean 1; none of them is a world of learn.py
WORLDS: dict[str, dict[str, Any]] = {
    "two classes, lognormal(1)": {"partition": "shards:classes_per_client=2", "delay": "lognormal:heterogeneity=1"},
    "Dirichlet(0.1), Pareto": {"partition": "dirichlet:alpha=0.1,min_size=5", "delay": "pareto:heterogeneity=0.5"},
    "Dirichlet(1), gamma(1.5)": {"partition": "dirichlet:alpha=1", "delay": "gamma:heterogeneity=1.5"},
}
TIMING = "buffer:size=5,concurrency=6"
POLICIES = {
    "uniform (FedBuff)": "uniform",
    "power of choice": "power_of_choice:d=15",
    "Oort": "oort",
    "adaptive buffer": "adaptive_buffer:size=2,most=6",
}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 10}


def learned() -> dict[str, dict[str, str]]:
    """What learn.py has found: row -> method and policy; and the rate of the others under ``rate``."""
    with (HERE / "results" / "learn.csv").open(encoding="utf-8", newline="") as file:
        return {row["row"]: row for row in csv.DictReader(file)}


def variants() -> list[Variant]:
    """A row a policy."""
    found = learned()
    usual = f"fedbuff:server_lr={float(found['rate']['server_lr']):g}@{TIMING}"
    rows = [Variant(name, {"method": usual, "policy": policy}) for name, policy in POLICIES.items()]
    for name, row in found.items():
        if name != "rate":
            rows.append(Variant(name, {"method": f"{row['method']}@{TIMING}", "policy": row["policy"]}))
    return rows


def rows_of(world: str, runs: dict[str, list[Run]]) -> Rows:
    """A row a policy, with intervals over the seeds, and differences to uniform seed by seed."""
    final = {name: np.array([100 * final_accuracy(run, "tail") for run in each]) for name, each in runs.items()}
    usual = final["uniform (FedBuff)"]
    target = float(usual.mean()) / 100
    rows: Rows = []
    for name, each in runs.items():
        times = np.array([to_target(run, target) for run in each])
        reached = np.isfinite(times)
        ahead = final[name] - usual
        rows.append(
            {
                "world": world,
                "policy": name,
                "accuracy (%)": float(final[name].mean()),
                "accuracy ±": half(final[name]),
                "against uniform (points)": float(ahead.mean()),
                "against uniform ±": half(ahead),
                "target (%)": 100 * target,
                "time to target (s)": float(times[reached].mean()) if reached.all() else float("nan"),
                "time ±": half(times) if reached.all() else float("nan"),
                "reached": f"{int(reached.sum())}/{len(each)}",
                "updates": float(np.mean([run.counters["updates"] for run in each])),
                "of ten clients (%)": 100 * float(np.mean([of_ten(run) for run in each])),
            }
        )
    return rows


def of_ten(run: Run) -> float:
    """The share of the updates that the ten clients with the most updates made."""
    counts = np.sort(np.bincount(run.updates["client"]))[::-1]
    return float(counts[:10].sum() / counts.sum())


def half(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean (Student's t); NaN of a single value."""
    if len(values) < 2:
        return float("nan")
    found = interval(values)
    return (found.high - found.low) / 2


if __name__ == "__main__":
    given = parse_seeds(options(__doc__, "policies", "worlds"), SEEDS)
    setting = COMMON | (SMALL if given.scale == "smoke" else {})
    chosen, rows = variants(), list[dict[str, Any]]()
    for k, (world, changes) in enumerate(WORLDS.items()):
        if given.scale == "smoke" and k:
            break
        rows += rows_of(world, run_variants(f"world{k}", setting | changes, chosen, given))
    report(rows, given, decimals={column: 1 for column in rows[0] if column not in ("world", "policy", "reached")})
