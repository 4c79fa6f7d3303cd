"""Shared by the experiments of this folder: tasks, methods, scales, runs and tables.

The scale ``paper`` is the paper's setting. ``laptop`` is smaller; ``TASKS`` has its changes. ``smoke`` only shows that
a script runs; it uses the data in the package. Every finished run is kept under ``OUT/runs``, and a second start of the
same command continues from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import variants as shared
from known_runs import with_known
from late import late_nodes
from variants import Rows, Variant, all_of, common, draw, over_tasks, parse, parse_tasks, report

from fedjax_async.data import Dataset, load
from fedjax_async.results import tables
from fedjax_async.types import Run

__all__ = [
    "HERE",
    "METHODS",
    "PARTITION",
    "RELEASED",
    "SEEDS",
    "TASKS",
    "Rows",
    "Variant",
    "all_of",
    "common",
    "draw",
    "missing",
    "options",
    "over_tasks",
    "parse",
    "parse_costs",
    "parse_tasks",
    "report",
    "run_task",
    "setting_of",
    "summary",
    "with_known",
]

HERE = Path(__file__).resolve().parent
SEEDS = {"smoke": 1, "laptop": 3, "paper": 1}
EVALUATIONS = {"smoke": 4, "laptop": 12, "paper": 60}  # number of evaluations in a run
PARTITION = "dirichlet:alpha={:g},min_size=10"
LATE = "joins:share=0.1,by={:g}"  # the paper's late clients join up to 32.2 of 60 seconds

# {0} is the number of receivers, {1} a fifth of it: a DivShare node sends each of its five fragments to two receivers,
# the others send one model to ten. SWIFT needs a fixed undirected graph.
METHODS: dict[str, dict[str, str]] = {
    "pushcen": {"method": "pushcen", "topology": "gossip:receivers={0}"},
    "divshare": {"method": "divshare", "topology": "gossip:receivers={1}"},
    "async_dfedavg": {"method": "async_dfedavg", "topology": "gossip:receivers={0}"},
    "swift": {"method": "swift", "topology": "random_regular:degree={0}"},
    "independent": {"method": "independent"},
}
# The methods as the code has them with which the paper's Table 1 was made.
RELEASED: dict[str, dict[str, str]] = {
    "pushcen_released": {"method": "pushcen_released", "topology": "gossip:receivers={0}"},
    "push_sum_adflab": {"method": "push_sum_adflab", "topology": "gossip:receivers={0}"},
    "divshare_adflab": {"method": "divshare_adflab", "topology": "gossip:receivers={0}"},
    "async_dfedavg, released": {
        "method": "async_dfedavg",
        "topology": "gossip:receivers={0}",
        "exchange": "mean:capacity=16,newest=false,aggregate_at=end",
    },
    "swift_adflab": {"method": "swift_adflab", "topology": "gossip:receivers={0}"},
}


class Task(NamedTuple):
    """A data set with its model and the paper's setting; ``laptop`` has the changes of the smaller scale."""

    title: str
    setting: dict[str, Any]
    laptop: dict[str, Any]


_COMMON: dict[str, Any] = {
    **{"test_fraction": 0.2, "epochs": 1.0, "batch_size": 32, "delay": "constant:mean=0.1,reference_steps=1"},
    **{"time": 60.0, "receivers": 10, "global_tests": "never"},
}
TASKS: dict[str, Task] = {
    "fashion_mnist_6k": Task(
        "Fashion-MNIST (5,000 training images), LeNet-5",
        {**_COMMON, "dataset": "fashion_mnist_6k", "model": "lenet5", "clients": 20},
        {"time": 12.0},
    ),
    "fashion_mnist_6k_60s": Task(
        "Fashion-MNIST (5,000 training images), LeNet-5",
        {**_COMMON, "dataset": "fashion_mnist_6k", "model": "lenet5", "clients": 20},
        {},
    ),
    "cifar10": Task(
        "CIFAR-10, LeNet",
        {**_COMMON, "dataset": "cifar10", "model": "lenet5_cifar", "clients": 100},
        {"dataset": "cifar10_fifth", "clients": 20, "time": 10.0},
    ),
    "cifar100": Task(
        "CIFAR-100, ResNet-18",
        {**_COMMON, "dataset": "cifar100", "model": "resnet18:variant=full,norm=local", "clients": 50},
        {"time": 6.0},
    ),
    "tiny_imagenet": Task(
        "Tiny-ImageNet, ResNet-18",
        {**_COMMON, "dataset": "tiny_imagenet", "model": "resnet18:variant=full,norm=local", "clients": 50},
        {"time": 6.0},
    ),
    "smoke": Task(
        "Fashion-MNIST (5,000 training images), logistic regression",
        {
            **_COMMON,
            **{"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 6, "time": 6.0, "receivers": 2},
        },
        {},
    ),
}


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of the options that all scripts share; ``name`` is the script's."""
    return shared.options(about, "pushcen", name)


def parse_costs(about: str | None, name: str) -> argparse.Namespace:
    """The parsed options of a script that trains nothing."""
    return parse(options(about, name))


def setting_of(task: str, scale: str) -> tuple[dict[str, Any], int]:
    """The settings of a task at a scale, and the number of receivers of a push."""
    setting = TASKS[task].setting | (TASKS[task].laptop if scale == "laptop" else {})
    receivers = setting.pop("receivers")
    late = LATE.format(0.54 * setting["time"])
    if setting["dataset"] == "cifar10_fifth":
        setting["dataset"] = cifar10_fifth()
    return {"availability": late, "eval_time": setting["time"] / EVALUATIONS[scale], **setting}, receivers


@cache
def cifar10_fifth() -> Dataset:
    """Every fifth training image of CIFAR-10: 20 nodes then have as many each as 100 nodes have of the whole set."""
    whole = load("cifar10")
    return whole._replace(name="cifar10_fifth", x=whole.x[::5], y=whole.y[::5])


def missing(task: str, scale: str) -> str | None:
    """Why a task cannot be run here, in one line; ``None`` if it can."""
    try:
        setting = setting_of(task, scale)[0]
    except ValueError as error:  # the data set is not available here
        return str(error)
    parts = {"method": "independent", "partition": PARTITION.format(1.0)}  # the tables' own: sizes decide what can run
    return shared.missing(setting | parts, time=setting["time"])


def run_task(task: str, variants: Sequence[Variant], given: argparse.Namespace) -> dict[str, list[Run]]:
    """Run every variant with every seed for the same virtual time; returns variant -> its runs."""
    setting, receivers = setting_of(task, given.scale)

    def filled(variant: Variant) -> Variant:
        counts = (receivers, max(1, round(receivers / 5)))
        topology = {name: value.format(*counts) for name, value in variant.changes.items() if name == "topology"}
        return variant._replace(changes=variant.changes | topology)

    return shared.run_variants(task, setting, [filled(variant) for variant in variants], given, clients=of_nodes)


def of_nodes(run: Run) -> dict[str, np.ndarray]:
    """When each node joined, and its accuracy on its own tests at every evaluation."""
    return {"joined": run.schedule.joined, "own_accuracy": np.asarray(run.per_client["own_accuracy"], np.float32)}


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """The columns of a row, over the seeds.

    accuracy, best: mean accuracy of the nodes online on their own tests, at the end and at its highest; SD: deviation
    between nodes at the end; late: mean and deviation over late nodes of their highest accuracies; mass left: in % of
    all mass that entered the run; MB: sent by all nodes, and the mean of a push; updates: the events.
    """
    found = [_of_one(run) for run in runs]
    return {name: tables.spread([one[name] for one in found]) for name in found[0]} | {"seeds": len(runs)}


def _of_one(run: Run) -> dict[str, float]:
    nodes, joins = run.per_client["own_accuracy"], run.per_client["joined"]
    mean = np.asarray(run.evaluations["accuracy"])
    here = np.isfinite(nodes[-1]) & (joins <= run.evaluations["time"][-1])
    events = max(1, int(run.evaluations["update"][-1]))
    sent = float(run.evaluations["bytes_up"][-1]) / 1e6
    columns: Mapping[str, Any] = run.evaluations
    left = float(columns["total_mass"][-1]) / len(joins) if "total_mass" in columns else float("nan")
    joined = [np.nanmax(nodes[columns["time"] >= joins[i], i]) for i in late_nodes(run)]
    return {
        "accuracy (%)": 100 * float(mean[-1]),
        "best (%)": 100 * float(np.nanmax(mean)),
        "SD (%)": 100 * float(np.std(nodes[-1][here])),
        "late (%)": 100 * float(np.mean(joined)) if joined else float("nan"),
        "late SD (%)": 100 * float(np.std(joined)) if joined else float("nan"),
        "mass left (%)": 100 * left,
        "MB": sent,
        "MB a push": sent / events,
        "updates": float(events),
    }
