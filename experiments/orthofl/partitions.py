"""The skew of the clients' labels under four versions of the paper's Dirichlet(0.1), and with other alphas, on MNIST.

    python experiments/orthofl/partitions.py --scale paper

``concentration`` is the mean over clients of the sum of squared class shares: 1 for one class per client, 0.1 for ten
equal classes; a mix drawn from Dirichlet(0.1) has 0.55 on average. ``largest class (%)`` is the mean share of a
client's most frequent class; ``largest / smallest client`` is the ratio of their numbers of examples. Nothing is
trained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from study import TASKS, missing, options, parse, report

from fedjax_async import data
from fedjax_async.data import federate
from fedjax_async.results import tables

SEEDS = {"smoke": 2, "laptop": 20, "paper": 20}
DRAWINGS = {
    "as released, three at a time": "dirichlet_balanced:alpha=0.1,at_a_time=3",
    "as released for CIFAR, one at a time": "dirichlet_balanced:alpha=0.1,at_a_time=1",
    "equal sizes, all at once": "dirichlet_balanced:alpha=0.1",
    "every class spread over the clients": "dirichlet:alpha=0.1",
    **{
        f"as released, alpha {alpha:g}": f"dirichlet_balanced:alpha={alpha:g},at_a_time=3"
        for alpha in (0.01, 0.5, 1e4)  # with 0.1 those of Figure 9
    },
}


def measured(dataset: Any, partition: str, seed: int) -> tuple[float, float, float]:
    """Concentration, share of the largest class in %, and ratio of the largest to the smallest client."""
    dealt = federate(dataset, partition, 10, seed=seed)
    rows = [dealt.y[dealt.order[start : start + size]] for start, size in zip(dealt.offset, dealt.size)]
    shares = np.stack([np.bincount(labels, minlength=10) / len(labels) for labels in rows])
    ratio = float(dealt.size.max() / dealt.size.min())
    return float(np.mean(np.sum(shares**2, axis=1))), 100 * float(shares.max(axis=1).mean()), ratio


def main() -> None:
    """Partition, measure and write."""
    given = parse(options(__doc__, "partitions"))
    task = "smoke" if given.scale == "smoke" or missing("mnist", given.scale) else "mnist"
    dataset = data.load(TASKS[task].setting["dataset"])
    rows: list[dict[str, Any]] = []
    for name, partition in DRAWINGS.items():
        found = [measured(dataset, partition, seed) for seed in range(SEEDS[given.scale])]
        concentration, largest, ratio = (tables.spread(list(each)) for each in zip(*found, strict=True))
        rows.append({
            "drawing": name,
            "partition": partition,
            "concentration": concentration,
            "largest class (%)": largest,
            "largest / smallest client": ratio,
            "data": TASKS[task].setting["dataset"],
            "seeds": len(found),
        })  # fmt: skip
    report(rows, given)


if __name__ == "__main__":
    main()
