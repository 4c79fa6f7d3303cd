"""Shared by the experiments of this folder: tasks, methods, scales, runs and tables.

Every script takes ``--scale smoke|laptop|paper``. It keeps each finished run under ``OUT/runs``, and a second start of
the same command continues from there. ``paper`` is the paper's setting. ``laptop`` is smaller; ``TASKS`` has its
changes. ``smoke`` only shows that the script runs; it uses the data in the package.
"""

from __future__ import annotations

import argparse
import csv
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import known_runs
import numpy as np
import variants as shared
from variants import Variant, common, parse, report

from fedjax_async import Settings
from fedjax_async.config import prepare
from fedjax_async.results import tables
from fedjax_async.results.curves import MOST_BANDS, accuracy_curve
from fedjax_async.results.metrics import FINAL, final_accuracy, relative_time, to_target
from fedjax_async.types import Run

__all__ = [
    "HERE",
    "METHODS",
    "TASKS",
    "Variant",
    "beside_the_paper",
    "common",
    "crossed",
    "known_runs",
    "missing",
    "options",
    "parse",
    "report",
    "rows_against",
    "rows_by_panel",
    "rows_of",
    "setting_of",
    "shared",
    "study",
]

HERE = Path(__file__).resolve().parent
EVALUATIONS = {"smoke": 50, "laptop": 50, "paper": 100}  # number of evaluations in the time budget

# The paper's seven methods (Table 1); the synchronous ones sample 10 clients per round. Neither the paper nor its code
# gives the proximal weight, FedAdam's rate and the buffers: tuning.py chose them (results/tuning_laptop.csv).
METHODS: dict[str, str] = {
    "fedavg": "fedavg@cohort:size=10",
    "fedprox": "fedprox:proximal=0.001@cohort:size=10",
    "fedadam": "fedadam:server_lr=0.03@cohort:size=10",
    "fedasync": "fedasync:mixing=0.6,exponent=0.5",
    "fedbuff": "fedbuff:server_lr=1@buffer:size=2",
    "ca2fl": "ca2fl:server_lr=1@buffer:size=5",
    "orthofl": "orthofl:mixing=0.6,exponent=0.5",
    "orthofl_released": "orthofl_released:mixing=0.6,exponent=0.5",
}


class Task(NamedTuple):
    """A data set with its model and the paper's setting; ``laptop`` has the changes of the smaller scale."""

    title: str
    setting: dict[str, Any]
    updates: int  # of an asynchronous method; the virtual time that they take is the budget of all methods
    examples: int  # for training, of an average client
    laptop: dict[str, Any]


# The released code's settings where the paper gives none: profiles drawn with replacement, a delay <= 0 replaced by
# the mean, batches of 128, clients of equal size that draw in turns from Dirichlet mixes.
DELAY = "rpi:family=normal_or_mean,replacement=true"
_COMMON: dict[str, Any] = {"delay": DELAY, "epochs": 5.0, "batch_size": 128, "lr": 0.01}
_SKEWED = {**_COMMON, "partition": "dirichlet_balanced:alpha=0.1,at_a_time=3"}
_CIFAR = {**_COMMON, "partition": "dirichlet_balanced:alpha=0.1,at_a_time=1", "augment": "crop:padding=4+flip"}
_NEWS = Task(
    "20 Newsgroups, MiniLM + LoRA (the paper: DistilBERT)",
    {
        **{**_SKEWED, "dataset": "newsgroups20:max_length=512", "model": "minilm_lora", "clients": 20},
        **{"batch_size": 8, "optimizer": "adamw:weight_decay=0,clip=1", "lr": 5e-5, "decay": "linear"},
    },
    200,
    566,
    {
        **{"dataset": "newsgroups20:max_length=64", "epochs": None, "steps": 5, "batch_size": 16, "lr": 1e-3},
        **{"updates": 80, "eval_examples": 500},
    },
)
TASKS: dict[str, Task] = {
    "mnist": Task(
        "MNIST, LeNet-5",
        {**_SKEWED, "dataset": "mnist", "model": "lenet5_orthofl", "clients": 10},
        500,
        6000,
        {"epochs": 1.0, "lr": 0.05, "batch_size": 32, "updates": 300},
    ),
    "cifar10": Task(
        "CIFAR-10, VGG-11",
        {**_CIFAR, "dataset": "cifar10:train=40000", "model": "vgg11", "clients": 10},
        500,
        4000,
        {"epochs": None, "steps": 10, "batch_size": 32, "updates": 60, "eval_examples": 1000},
    ),
    "20newsgroups": _NEWS,
    "20newsgroups_long": _NEWS._replace(laptop={**_NEWS.laptop, "updates": 320}),
    "har": Task(
        "HAR, ResNet-18 (1-D)",
        {**_COMMON, "dataset": "har", "model": "resnet18_1d:variant=orthofl", "clients": 21, "partition": "natural"},
        1000,
        350,
        {"model": "resnet18_1d:width=0.174", "epochs": 1.0, "batch_size": 32, "updates": 210},
    ),
    "cifar100": Task(
        "CIFAR-100, MobileNetV2",
        {**_CIFAR, "dataset": "cifar100:train=40000", "model": "mobilenetv2", "clients": 100},
        100_000,
        400,
        {"epochs": None, "steps": 5, "batch_size": 32, "updates": 200, "eval_examples": 1000},
    ),
    "smoke": Task(
        "Fashion-MNIST (6,000 images), logistic regression",
        {
            **{**_SKEWED, "dataset": "fashion_mnist_6k", "model": "logistic", "clients": 10},
            **{"epochs": 1.0, "lr": 0.05, "batch_size": 32},
        },
        120,
        500,
        {},
    ),
}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 3}
BANDS = ("fedavg", "fedasync", "fedbuff", "ca2fl", "orthofl", "orthofl_released")  # rows of the pictures with bands


def crossed(methods: Sequence[str], changes: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
    """Every method under every change, named ``METHOD, TITLE`` by the change's title; one picture per change."""
    return [
        Variant(f"{method}, {title}", {"method": METHODS[method], **change}, title)
        for title, change in changes.items()
        for method in methods
    ]


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of the options that all scripts share; ``name`` is the script's."""
    return shared.options(about, "orthofl", name)


def setting_of(task: Task, scale: str) -> tuple[dict[str, Any], int]:
    """The settings of a task at a scale, and the number of updates of an asynchronous method."""
    setting = task.setting | (task.laptop if scale == "laptop" else {})
    updates = setting.pop("updates", task.updates)
    return setting, updates


def budget(setting: Mapping[str, Any], updates: int, seed: int) -> float:
    """Virtual seconds until ``updates`` updates have arrived, if every client starts its next job at once."""
    one = prepare(Settings(**setting, method="fedasync", updates=updates, seed=seed))
    return float(one.schedule.time[-1])


def run_task(
    name: str, variants: Sequence[Variant], given: argparse.Namespace, *, budget_of: Sequence[str] = ()
) -> dict[str, list[Run]]:
    """Run every variant with every seed for the same virtual time; returns variant -> its runs.

    ``budget_of``: the settings of a variant that also change the time budget, such as its delay model.
    """
    setting, updates = setting_of(TASKS[name], given.scale)

    @functools.cache
    def seconds_of(seed: int, *changes: Any) -> float:
        return budget(setting | dict(zip(budget_of, changes)), updates, seed)

    def numbers(own: Mapping[str, Any], seed: int) -> dict[str, Any]:
        seconds = seconds_of(seed, *(own[key] for key in budget_of))
        return {"time": seconds, "eval_time": seconds / EVALUATIONS[given.scale]}

    return shared.run_variants(name, setting, variants, given, numbers)


def rows_of(task: str, runs: Mapping[str, Sequence[Run]], baseline: str) -> list[dict[str, Any]]:
    """One row per variant: accuracy in % and time to target relative to ``baseline``, over the seeds.

    ``accuracy (%)`` is the mean of the last tenth of the evaluations, because single ones fluctuate; ``last (%)`` is
    the last evaluation, ``best (%)`` the best one, ``mean dip (points)`` the mean over all evaluations of the best
    accuracy so far less the accuracy, ``above BASELINE (points)`` the difference of two accuracies in the same seed.
    The target is 95 % of the lowest accuracy among the variants. Without the baseline there are no columns against it.
    ``near best``: whether the mean is below the best variant's by at most the larger of the two deviations; ``-`` with
    one seed.
    """
    relative = relative_time(runs, baseline) if baseline in runs else None
    rows: list[dict[str, Any]] = []
    for name, seeds in runs.items():
        accuracy = {
            "accuracy (%)": tables.spread([100 * final_accuracy(run, FINAL) for run in seeds]),
            "last (%)": tables.spread([100 * final_accuracy(run, "last") for run in seeds]),
            "best (%)": tables.spread([100 * final_accuracy(run, "best") for run in seeds]),
            "mean dip (points)": tables.spread([mean_dip(run) for run in seeds]),
        }
        against: dict[str, Any] = {}
        if relative is not None:
            pairs = zip(seeds, runs[baseline], strict=True)
            above = [100 * (final_accuracy(run, FINAL) - final_accuracy(reference, FINAL)) for run, reference in pairs]
            against[f"above {baseline} (points)"] = tables.spread(above)
            against[f"time / {baseline}"] = tables.spread(relative.ratio[name])
        updates = {"updates": tables.spread([len(run.updates["client"]) for run in seeds]), "seeds": len(seeds)}
        rows.append({"task": task, "variant": name} | accuracy | against | updates)
    best = max((row["accuracy (%)"] for row in rows), key=lambda spread: spread.mean)
    for row in rows:
        own = row["accuracy (%)"]
        near = own.mean >= best.mean - max(own.std, best.std)
        row["near best"] = "-" if row["seeds"] == 1 else "yes" if near else "no"
    return rows


def mean_dip(run: Run) -> float:
    """Mean over the evaluations of (best accuracy so far - accuracy), in points; 0 if the accuracy never falls."""
    accuracy = 100 * np.asarray(run.evaluations["accuracy"], np.float64)
    return float(np.mean(np.maximum.accumulate(accuracy) - accuracy))


def rows_against(task: str, runs: Mapping[str, Sequence[Run]], baseline: str) -> list[dict[str, Any]]:
    """The rows of :func:`rows_of` with another time: to 95 % of the baseline's final accuracy in the same seed.

    A variant that does not reach it with every seed has no time.
    """
    rows = rows_of(task, runs, baseline)
    for row in rows if baseline in runs else []:
        ratios = []
        for run, reference in zip(runs[row["variant"]], runs[baseline], strict=True):
            goal = 0.95 * final_accuracy(reference, FINAL)
            ratios.append(to_target(run, goal) / to_target(reference, goal))
        row[f"time / {baseline}"] = tables.spread(ratios)
    return rows


def rows_by_panel(
    task: str,
    runs: Mapping[str, Sequence[Run]],
    name: str,
    *,
    baseline_of: Callable[[str], str] = "fedavg, {}".format,
    rows: Callable[[str, Mapping[str, Sequence[Run]], str], list[dict[str, Any]]] = rows_of,
) -> list[dict[str, Any]]:
    """The rows of several panels, each compared within the panel only; NAME stands for the baseline in the columns.

    ``baseline_of``: picture (a variant's name after its first comma) -> its baseline. Pictures with the same baseline
    are one panel. A panel without its baseline (``--variants``) has no columns against it.
    """
    panels: dict[str, dict[str, Sequence[Run]]] = {}
    for variant, seeds in runs.items():
        panels.setdefault(baseline_of(variant.partition(", ")[2]), {})[variant] = seeds
    found = []
    for baseline, panel in panels.items():
        for row in rows(task, panel, baseline):
            found.append({column.replace(baseline, name): value for column, value in row.items()})
    return found


def beside_the_paper(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the paper's Table 1 to the rows; the variant's name up to the first comma is the method in the paper."""
    with (HERE / "paper_table_1.csv").open(encoding="utf-8", newline="") as file:
        paper = {(row["dataset"], row["method"]): row for row in csv.DictReader(file)}
    for row in rows:
        theirs = paper.get((row["task"].removesuffix("_long"), row["variant"].partition(",")[0]))
        if theirs is not None:
            row["paper (%)"] = f"{theirs['accuracy_mean']} ± {theirs['accuracy_std']}"
            row["paper time"] = float(theirs["relative_time"])
    return rows


def missing(task: str, scale: str) -> str | None:
    """Why a task cannot be run here, in one line; ``None`` if it can."""
    setting, _ = setting_of(TASKS[task], scale)
    return shared.missing(setting | {"method": "fedasync"})


def study(
    about: str | None,
    name: str,
    tasks: Sequence[str],
    variants: Callable[[str, str], Sequence[Variant]] | Sequence[Variant],
    *,
    baseline: str,
    budget_of: Sequence[str] = (),
    rows_of_runs: Callable[[str, Mapping[str, Sequence[Run]], str], list[dict[str, Any]]] = rows_of,
    more: Callable[[str, argparse.Namespace], list[dict[str, Any]]] = lambda task, given: [],
    finish: Callable[[list[dict[str, Any]], argparse.Namespace], list[dict[str, Any]]] | None = None,
    bands: Sequence[str] = BANDS,
) -> None:
    """Run an experiment: parse the options, run every task, write the table and pictures of accuracy curves.

    ``variants``: a list for all tasks, or a function ``variants(task, scale)``. ``more(task, given)`` returns further
    rows of a task. Pictures of more rows than can have bands come twice: all rows without bands, and those of ``bands``
    (names up to the first comma) with them.
    """
    parser = known_runs.with_known(shared.with_variants(options(about, name)))
    given = shared.parse_tasks(parser, TASKS, tasks, SEEDS)

    def rows(task: str) -> shared.Rows:
        chosen = shared.asked_for(variants(task, given.scale) if callable(variants) else variants, given)
        runs = run_task(task, chosen, given, budget_of=budget_of)
        shared.draw(f"{name}_{task}", TASKS[task].title, chosen, runs, given, accuracy_curve)
        crowded = {p for p, rows in Counter(v.picture for v in chosen).items() if rows > MOST_BANDS}
        few = [v for v in chosen if v.picture in crowded and v.name.partition(",")[0] in bands]
        shared.draw(f"{name}_{task}_bands", TASKS[task].title, few, runs, given, accuracy_curve)
        return rows_of_runs(task, runs, baseline)

    def of_task(task: str) -> shared.Rows:
        found = shared.all_of([functools.partial(rows, task), functools.partial(more, task, given)])
        return [row for each in found for row in each]

    found = shared.over_tasks(given, lambda task: missing(task, given.scale), of_task)
    report(finish(found, given) if finish is not None else found, given)
