"""Shared by the experiments of this folder: the paper's tasks, its methods, and the traffic until a target accuracy.

The scale ``paper`` is the paper's setting; the README lists the settings that the paper does not give. ``laptop`` is
smaller; ``TASKS`` has its changes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import known_runs
import numpy as np
import variants as shared
from variants import Rows, Variant, parse, report

from fedjax_async.results import tables
from fedjax_async.results.curves import accuracy_curve, loss_curve
from fedjax_async.results.figure import save_figure
from fedjax_async.results.metrics import final_accuracy, progress_in, to_target
from fedjax_async.types import Run

__all__ = [
    "HERE",
    "METHODS",
    "TASKS",
    "WINDOW",
    "WITHOUT_A_ROW",
    "Rows",
    "Task",
    "Variant",
    "add_reductions",
    "asynfl",
    "draw",
    "fedbuff",
    "options",
    "parse",
    "report",
    "setting_of",
    "study",
    "summary",
]

HERE = Path(__file__).resolve().parent
WINDOW = 500  # default length of a window, in virtual seconds
SEEDS = {"smoke": 1, "laptop": 1, "paper": 3}
USUAL = ("mnist", "fashion_mnist")  # tasks that a CPU can run at the paper's scale


class Task(NamedTuple):
    """A data set with its model and the paper's setting; ``laptop`` has the changes of the smaller scale."""

    title: str
    setting: dict[str, Any]
    windows: int  # the virtual time of all methods, in windows of WINDOW seconds
    target: float  # test accuracy until which Table III counts traffic
    laptop: dict[str, Any]


_COMMON: dict[str, Any] = {
    **{"clients": 100, "partition": "dirichlet:alpha=0.4", "batch_size": 128, "lr": 0.01},
    **{"steps": 10, "delay": "normal:mean=500,std=150"},
}
_LAPTOP = {"lr": 0.05, "steps": 5, "windows": 60}
_LAPTOP_CIFAR = _LAPTOP | {"clients": 20, "batch_size": 32, "windows": 30, "eval_examples": 1000, "target": 0.3}
TASKS: dict[str, Task] = {
    "mnist": Task("MNIST, MLP", {**_COMMON, "dataset": "mnist", "model": "mlp:hidden=64"}, 150, 0.85, _LAPTOP),
    "fashion_mnist": Task(
        "Fashion-MNIST, MLP", {**_COMMON, "dataset": "fashion_mnist", "model": "mlp:hidden=64"}, 250, 0.75, _LAPTOP
    ),
    "cifar10_cnn": Task("CIFAR-10, CNN", {**_COMMON, "dataset": "cifar10", "model": "cnn"}, 2000, 0.55, _LAPTOP_CIFAR),
    "cifar10_alexnet": Task(
        "CIFAR-10, AlexNet",
        {**_COMMON, "dataset": "cifar10", "model": "alexnet", "lr": 1e-4},
        3000,
        0.55,
        _LAPTOP_CIFAR | {"model": "alexnet:width=0.25"},
    ),
    "smoke": Task(
        "Fashion-MNIST (6,000 images), logistic regression",
        {
            **_COMMON,
            **{"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 10, "batch_size": 32},
            **{"steps": 5, "lr": 0.05},
        },
        6,
        0.5,
        {},
    ),
}


def fedbuff(clients: int) -> dict[str, Any]:
    """FedBuff with a buffer of two thirds of the clients, the mean number of uploads in a window."""
    return {"method": f"fedbuff:server_lr=1@buffer:size={round(2 * clients / 3)}"}


def asynfl(kind: str = "", compress: str | None = None, window: int = WINDOW, **options: float) -> dict[str, Any]:
    """AsynFL, AsynFLC or AsynFLC-EF: ``kind`` is empty, ``c`` or ``c_ef``; ``options`` are the server rule's."""
    rule = ",".join(f"{name}={value:g}" for name, value in options.items())
    method = f"asynfl{kind}{':' if rule else ''}{rule}@window:length={window}"
    return {"method": method} if compress is None else {"method": method, "compress": compress}


# Table III's methods by the names of paper_table_3.csv; FedBuff's buffer depends on the number of clients. QSGD with
# b bits has 2^(b-1) - 1 levels.
METHODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "fedbuff": fedbuff,
    "asynfl": lambda n: asynfl(),
    "asynflc_q4b": lambda n: asynfl("c", "qsgd:levels=7"),
    "asynflc_ef_top10": lambda n: asynfl("c_ef", "topk:ratio=0.1"),
    "asynflc_ef_top6": lambda n: asynfl("c_ef", "topk:ratio=0.06"),
    "asynflc_ef_top3": lambda n: asynfl("c_ef", "topk:ratio=0.03"),
    "asynflc_top3": lambda n: asynfl("c", "topk:ratio=0.03"),
    "asynflc_ef_top10_q4b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.1,levels=7"),
    "asynflc_ef_top6_q4b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.06,levels=7"),
    "asynflc_ef_top3_q8b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.03,levels=127"),
    "asynflc_ef_top3_q4b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.03,levels=7"),
    "asynflc_ef_top3_q2b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.03,levels=1"),
}
# Named in the paper's section V, without a row in Table III.
WITHOUT_A_ROW: dict[str, Callable[[int], dict[str, Any]]] = {
    "asynflc_q2b": lambda n: asynfl("c", "qsgd:levels=1"),
    "asynflc_q8b": lambda n: asynfl("c", "qsgd:levels=127"),
    "asynflc_top6": lambda n: asynfl("c", "topk:ratio=0.06"),
    "asynflc_top10": lambda n: asynfl("c", "topk:ratio=0.1"),
    "asynflc_ef_top10_q8b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.1,levels=127"),
    "asynflc_ef_top10_q2b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.1,levels=1"),
    "asynflc_ef_top6_q8b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.06,levels=127"),
    "asynflc_ef_top6_q2b": lambda n: asynfl("c_ef", "topk_qsgd:ratio=0.06,levels=1"),
}


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of the options that all scripts share; ``name`` is the script's."""
    return shared.options(about, "asynfl", name)


def setting_of(task: str, scale: str) -> tuple[dict[str, Any], float]:
    """The settings of a task at a scale, with its time budget; and its target accuracy."""
    setting = TASKS[task].setting | (TASKS[task].laptop if scale == "laptop" else {})
    seconds = float(WINDOW * setting.pop("windows", TASKS[task].windows))
    target = setting.pop("target", TASKS[task].target)
    return setting | {"time": seconds, "eval_time": float(WINDOW)}, target


def summary(task: str, name: str, runs: Sequence[Run], target: float) -> dict[str, Any]:
    """One row: accuracies, and updates, virtual time and traffic until the target, over the seeds."""

    def until(unit: str, size: float = 1e9) -> tables.Spread:
        return tables.spread([to_target(run, target, unit) / size for run in runs])

    return {
        "task": task,
        "variant": name,
        "final (%)": tables.spread([100 * final_accuracy(run, "last") for run in runs]),
        "best (%)": tables.spread([100 * final_accuracy(run, "best") for run in runs]),
        "target (%)": 100 * target,
        "updates to target": until("update", 1),
        "seconds to target": until("time", 1),
        "values up (GB)": until("values_bytes_up"),
        "wire up (GB)": until("bytes_up"),
        "wire both ways (GB)": until("bytes"),
        "updates": tables.spread([progress_in(run, "update")[-1] for run in runs]),
        "seeds": len(runs),
    }


DECIMALS = {
    **{"target (%)": 0, "updates to target": 0, "seconds to target": 0, "paper (GB)": 3},
    **{f"{what} (GB)": 5 for what in ("values up", "wire up", "wire both ways")},
    **dict.fromkeys(("less, values", "less, wire", "paper, less"), 1),
}


def add_reductions(runs: Mapping[str, Sequence[Run]], rows: Rows) -> None:
    """Add FedBuff's traffic divided by the row's, seed by seed: values alone, and whole messages."""
    target = rows[0]["target (%)"] / 100
    for row in rows:
        for column, unit in (("less, values", "values_bytes_up"), ("less, wire", "bytes_up")):
            pairs = zip(runs["fedbuff"], runs[row["variant"]], strict=True)
            row[column] = tables.spread([to_target(a, target, unit) / to_target(b, target, unit) for a, b in pairs])


def draw(runs: Mapping[str, Sequence[Run]], given: argparse.Namespace, name: str, task: str) -> None:
    """Draw accuracy and loss against virtual time: ``NAME_TASK.png`` and ``NAME_TASK_loss.png``."""
    if not runs or not shared.pictures(given):  # ``--variants`` chose no variant of this figure
        return
    for figure, end in ((accuracy_curve(runs, final="last"), ""), (loss_curve(runs, final="last"), "_loss")):
        figure.axes[0].set_title(TASKS[task].title)
        save_figure(figure, given.out / f"{name}_{task}{end}.png")


def study(
    about: str | None,
    name: str,
    variants: Callable[[str, dict[str, Any]], Sequence[Variant]],
    finish: Callable[[str, dict[str, list[Run]], Rows, argparse.Namespace], None],
    *,
    clients: Callable[[Run], Mapping[str, np.ndarray]] | None = None,
) -> None:
    """Run an experiment: parse the options, run every task, ``finish`` its rows and pictures, write the table.

    ``variants(task, setting)`` returns a task's variants; ``finish(task, runs, rows, given)`` may change its rows.
    ``clients``: what ``finish`` needs of the runs beside their evaluations, as in :func:`shared.run_variants`.
    """
    parser = known_runs.with_known(shared.with_variants(options(about, name)))
    given = shared.parse_tasks(parser, TASKS, USUAL, SEEDS)

    def rows(task: str) -> Rows:
        setting, target = setting_of(task, given.scale)
        chosen = shared.asked_for(variants(task, setting), given)
        runs = shared.run_variants(task, setting, chosen, given, clients=clients)
        found = [summary(task, variant, seeds, target) for variant, seeds in runs.items()]
        finish(task, runs, found, given)
        return found

    found = shared.over_tasks(
        given, lambda task: shared.missing(setting_of(task, given.scale)[0] | {"method": "asynfl"}), rows
    )
    report(found, given, decimals=DECIMALS)
