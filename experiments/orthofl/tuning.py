"""Tuning of what neither the paper nor its code gives: buffer sizes, the proximal weight and FedAdam's rate.

    python experiments/orthofl/tuning.py --scale laptop

Every method with such a number gets the same effort: four values, the same seeds (from 100 on, which no table uses),
the same virtual time. A tenth of each client's examples is held out and never trained on. The value with the highest
accuracy on these examples (mean of the last tenth of the evaluations, mean over the seeds) is the one in ``METHODS`` of
``study.py``. The test set is not used.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

from study import EVALUATIONS, TASKS, Variant, budget, known_runs, options, report, setting_of, shared

from fedjax_async.results import tables
from fedjax_async.results.metrics import final_value

FIRST_SEED = 100
# Method -> the number to be tuned, the spec, and the values.
OPEN: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "fedprox": ("proximal weight", "fedprox:proximal={}@cohort:size=10", (0.001, 0.01, 0.1, 1.0)),
    "fedadam": ("server rate", "fedadam:server_lr={}@cohort:size=10", (0.003, 0.01, 0.03, 0.1)),
    "fedbuff": ("buffer", "fedbuff:server_lr=1@buffer:size={}", (2, 3, 5, 10)),
    "ca2fl": ("buffer", "ca2fl:server_lr=1@buffer:size={}", (2, 3, 5, 10)),
}
SEEDS = {"smoke": 1, "laptop": 2, "paper": 2}
VARIANTS = [
    Variant(f"{method}, {value:g}", {"method": spec.format(f"{value:g}")}, method)
    for method, (_, spec, values) in OPEN.items()
    for value in values
]


def rows_of(task: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method and value; ``chosen`` marks the best value of each method."""
    setting, updates = setting_of(TASKS[task], given.scale)
    setting |= {"validation_fraction": 0.1}

    def numbers(own: Any, seed: int) -> dict[str, Any]:
        world = FIRST_SEED + seed
        seconds = budget(setting, updates, world)
        return {"seed": world, "time": seconds, "eval_time": seconds / EVALUATIONS[given.scale]}

    runs = shared.run_variants(task, setting, VARIANTS, given, numbers)
    rows: list[dict[str, Any]] = []
    for method, (number, _, values) in OPEN.items():
        found: list[dict[str, Any]] = []
        for value in values:
            scores = [100 * final_value(run, "validation_accuracy") for run in runs[f"{method}, {value:g}"]]
            row = {"task": task, "method": method, "number": number, "value": value}
            found.append(row | {"validation accuracy (%)": tables.spread(scores), "seeds": given.seeds})
        max(found, key=lambda row: row["validation accuracy (%)"].mean)["chosen"] = "yes"
        rows += found
    return rows


def main() -> None:
    """Run, choose and write."""
    given = shared.parse_tasks(known_runs.with_known(options(__doc__, "tuning")), TASKS, ["mnist"], SEEDS)
    rows = shared.all_of(functools.partial(rows_of, task, given) for task in given.tasks)
    report([row for each in rows for row in each], given, decimals={"value": 3})


if __name__ == "__main__":
    main()
