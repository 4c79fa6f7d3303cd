"""The cost of policies that look at a run: adaptive runs beside the planned run of the same settings.

    python experiments/benchmarks/policies.py          # two models, a minute
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
looks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import interleave, write_table

from fedjax_async import Run, Settings
from fedjax_async.config import Experiment, execute, prepare

METHODS = {"fedbuff": "fedbuff@buffer:size=10,concurrency=10", "fedasync": "fedasync@every:concurrency=10"}
POLICIES = {
    "planned": None,
    "uniform": "uniform",
    "uniform, every=10": "uniform:every=10",
    "power of choice": "power_of_choice:d=20",
    "Oort": "oort",
}


def prepared(a: argparse.Namespace, model: str, method: str, policy: str | None) -> Experiment:
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
        )
    )


def measure(a: argparse.Namespace, model: str, method: str) -> list[dict[str, Any]]:
    """One row per policy."""
    runs = {name: prepared(a, model, method, policy) for name, policy in POLICIES.items()}
    last: dict[str, Run] = {}

    def call(name: str) -> None:
        last[name] = execute(runs[name])

    found = interleave({name: lambda name=name: call(name) for name in runs}, a.repeats)
    seconds = {name: np.array(each) for name, each in found.items()}
    rows = []
    for name, run in last.items():
        counters, more = run.counters, seconds[name] - seconds["planned"]
        looks = counters.get("looks", 0)
        rows.append(
            {
                "model": model,
                "method": method,
                "policy": name,
                "seconds": float(np.median(seconds[name])),
                "time / planned": float(np.median(seconds[name] / seconds["planned"])),
                "looks": looks,
                "ms a look": 1000 * counters["look_seconds"] / looks if looks else 0.0,
                "overhead (ms a look)": 1000 * float(np.median(more)) / looks if looks else 0.0,
                "waves": counters["waves"],
                "mean width": float(counters["mean_width"]),
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
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/policies.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, one repeat; writes if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.models, a.clients, a.updates, a.repeats = ["logistic"], 30, 20, 1
    methods = list(METHODS)[: 1 if a.smoke else None]
    rows = [row for model in a.models for method in methods for row in measure(a, model, method)]
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "policies.csv")


if __name__ == "__main__":
    main()
