"""Table III and Figures 1 to 3: traffic of twenty methods until a target accuracy, ours beside the paper's.

    python experiments/asynfl/table_3.py --scale laptop --tasks mnist
    python experiments/asynfl/table_3.py --scale paper --tasks mnist fashion_mnist --seeds 1

Twelve are the table's; the paper names eight more in section V and gives no numbers: QSGD with 2 and 8 bits, top 6 and
10 % without feedback, and both with feedback and QSGD of 2 and 8 bits. ``--variants`` runs some of them, such as
``--variants fedbuff asynflc_top6``. The figures are curves of the same runs: accuracy and loss against virtual time,
for three sets of methods. Traffic is counted in two ways: values only, as the paper's numbers suggest, and whole
messages, with the indices of the entries. "less" is FedBuff's traffic divided by the method's.
"""

from __future__ import annotations

import argparse
import csv
from typing import Any

from study import HERE, METHODS, WITHOUT_A_ROW, Rows, Variant, add_reductions, draw, study

from fedjax_async.types import Run

FIGURES: dict[str, tuple[str, ...]] = {
    "figure_1": ("fedbuff", "asynfl", "asynflc_top3", "asynflc_ef_top3", "asynflc_q4b", "asynflc_ef_top3_q4b"),
    "figure_2": ("fedbuff", "asynfl", "asynflc_ef_top3", "asynflc_ef_top6", "asynflc_ef_top10"),
    "figure_3": (
        *("fedbuff", "asynfl", "asynflc_ef_top6_q4b", "asynflc_ef_top10_q4b"),
        *("asynflc_ef_top3_q2b", "asynflc_ef_top3_q4b", "asynflc_ef_top3_q8b"),
    ),
}
# left out at the smallest scale: their programs differ from the others' only in the number of entries
LARGER = ("top6", "top10", "q8b")


def variants(task: str, setting: dict[str, Any]) -> list[Variant]:
    """The twelve methods of the table and eight more; seven at the smallest scale."""
    if task == "smoke":
        chosen = {name: method for name, method in METHODS.items() if not any(part in name for part in LARGER)}
    else:
        chosen = METHODS | WITHOUT_A_ROW
    return [Variant(name, method(setting["clients"])) for name, method in chosen.items()]


def paper() -> dict[tuple[str, str], float]:
    """(task, method) -> the paper's gigabytes."""
    with (HERE / "paper_table_3.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tasks = {("cifar10", "cnn"): "cifar10_cnn", ("cifar10", "alexnet"): "cifar10_alexnet"}
    return {
        (tasks.get((row["dataset"], row["model"]), row["dataset"]), row["method"]): float(row["gigabytes"])
        for row in rows
    }


def finish(task: str, runs: dict[str, list[Run]], rows: Rows, given: argparse.Namespace) -> None:
    """Add the reductions against FedBuff, seed by seed, and the paper's numbers; draw the figures."""
    theirs = paper()
    if "fedbuff" in runs:
        add_reductions(runs, rows)
    for row in rows:
        name = row["variant"]
        if (task, name) in theirs:
            row["paper (GB)"] = theirs[task, name]
            row["paper, less"] = theirs[task, "fedbuff"] / theirs[task, name]
    for figure, names in FIGURES.items():
        draw({name: runs[name] for name in names if name in runs}, given, figure, task)


if __name__ == "__main__":
    study(__doc__, "table_3", variants, finish)
