"""The cost of policies that look at a run: adaptive runs beside the planned run of the same settings.

    python experiments/benchmarks/policies.py          # two models, two minutes
    python experiments/benchmarks/policies.py --smoke  # does it run

100 clients of ``fashion_mnist_6k``, ten in flight, speeds lognormal(0.5), jobs of ten local steps of batch 32; FedBuff
with K = 10 and FedAsync. Every run is prepared and compiled once, then the runs are interleaved.

* planned: no policy.
* uniform: a policy that looks at every decision and ignores what it sees. The run is the planned one, bit for bit, so
  its time shows the cost of looks; ``every=10`` looks at most at every tenth arrival.
* power of choice evaluates the loss of d = 20 candidates at every decision. Oort evaluates the loss on the client's
  examples at every arrival.

``ms a look`` is the time of the host: tables, transfers and the policy, without training and evaluation; for power of
choice it includes the candidates' losses. ``overhead`` is the additional time over the planned run, divided by the
looks. Rows *side by side* are of eight seeds of FedBuff that train as in a sweep: seconds, looks and waves are those of
all together, the planned run is the sweep without a policy, and the host's time is not known, since the runs share it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from common import interleave, write_table

from fedjax_async import Run, Settings
from fedjax_async.config import Experiment, execute, execute_group, plan_groups, prepare

METHODS = {"fedbuff": "fedbuff@buffer:size=10,concurrency=10", "fedasync": "fedasync@every:concurrency=10"}
POLICIES = {
    "planned": None,
    "uniform": "uniform",
    "uniform, every=10": "uniform:every=10",
    "power of choice": "power_of_choice:d=20",
    "Oort": "oort",
}


SIDE_BY_SIDE = ("planned", "uniform", "Oort")
SWEPT = ", side by side"


def prepared(a: argparse.Namespace, model: str, method: str, policy: str | None, seed: int = 0) -> Experiment:
    """A run that is ready to execute."""
    return prepare(
        Settings(
            method=METHODS[method],
            policy=policy,
            model=model,
            clients=a.clients,
            partition="iid",
            delay="lognormal:sigma=0.1,heterogeneity=0.5",
            steps=10,
            updates=a.updates,
            eval_updates=a.updates,
            eval_examples=100,
            seed=seed,
        )
    )


def swept(experiments: list[Experiment]) -> list[Run]:
    """The runs of a sweep."""
    runs: list[Run] = []
    for group in plan_groups([e.settings for e in experiments]):
        execute_group(experiments, group, on_finished=lambda _, run: runs.append(run))
    return runs


def measure(a: argparse.Namespace, model: str, method: str) -> list[dict[str, Any]]:
    """One row per policy."""
    alone = {name: prepared(a, model, method, policy) for name, policy in POLICIES.items()}
    several: dict[str, list[Experiment]] = {}
    if method == "fedbuff":
        names = {name + SWEPT: POLICIES[name] for name in SIDE_BY_SIDE}
        several = {name: [prepared(a, model, method, names[name], seed) for seed in range(a.runs)] for name in names}
    last: dict[str, list[Run]] = {}

    def call(name: str) -> None:
        last[name] = [execute(alone[name])] if name in alone else swept(several[name])

    found = interleave({name: lambda name=name: call(name) for name in (*alone, *several)}, a.repeats)
    seconds = {name: np.array(each) for name, each in found.items()}
    rows = []
    for name, runs in last.items():
        planned = seconds["planned" if name in alone else "planned" + SWEPT]
        looks = sum(run.counters.get("looks", 0) for run in runs)
        host = runs[0].counters.get("look_seconds", 0.0) if name in alone else math.nan
        rows.append(
            {
                "model": model,
                "method": method,
                "policy": name,
                "seconds": float(np.median(seconds[name])),
                "time / planned": float(np.median(seconds[name] / planned)),
                "looks": looks,
                "ms a look": 1000 * host / looks if looks else 0.0,
                "overhead (ms a look)": 1000 * float(np.median(seconds[name] - planned)) / looks if looks else 0.0,
                "waves": sum(run.counters["waves"] for run in runs),
                "mean width": float(np.mean([run.counters["mean_width"] for run in runs])),
            }
        )
    return rows


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["logistic", "mlp"])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs", type=int, default=8, help="runs side by side [8]")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/policies.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, one repeat; writes if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.models, a.clients, a.updates, a.repeats, a.runs = ["logistic"], 30, 20, 1, 2
    methods = list(METHODS)[: 1 if a.smoke else None]
    rows = [row for model in a.models for method in methods for row in measure(a, model, method)]
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "policies.csv")


if __name__ == "__main__":
    main()
