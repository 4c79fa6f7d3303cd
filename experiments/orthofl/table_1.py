"""Table 1 and Figure 5: seven methods on five tasks, the same virtual time for all, ours beside the paper's.

    python experiments/orthofl/table_1.py --scale laptop --tasks mnist har     # three seeds, see the README
    python experiments/orthofl/table_1.py --scale paper --tasks mnist --seeds 1

Relative time: virtual time to 95 % of the lowest final accuracy among the methods, divided by FedAvg's.
Figure 5, accuracy against virtual time, is the picture that is written for each task.
"""

from __future__ import annotations

import csv
from typing import Any

from study import HERE, METHODS, TASKS, Variant, study


def beside_the_paper(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the paper's numbers; tasks that were not run have no numbers of ours."""
    with (HERE / "paper_table_1.csv").open(encoding="utf-8", newline="") as file:
        paper = {(row["dataset"], row["method"]): row for row in csv.DictReader(file)}
    for row in rows:
        theirs = paper.get((row["task"], row["variant"]))
        if theirs is not None:
            row["paper (%)"] = f"{theirs['accuracy_mean']} ± {theirs['accuracy_std']}"
            row["paper time"] = float(theirs["relative_time"])
    return rows


if __name__ == "__main__":
    study(
        __doc__,
        "table_1",
        [task for task in TASKS if task != "smoke"],
        [Variant(name, {"method": spec}) for name, spec in METHODS.items()],
        baseline="fedavg",
        finish=beside_the_paper,
    )
