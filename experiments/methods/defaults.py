"""Every method with a server: its default beside a small tuned grid.

    python experiments/methods/defaults.py --scale laptop                  # one process
    python experiments/methods/defaults.py --scale laptop --processes 8    # one method in each process

100 clients are in flight (asynchronous methods) or drawn ten at a time (synchronous ones), with Dirichlet(0.3) labels
and lognormal delays. All methods have the same virtual time, local steps and local rate; AsyncCurve keeps its own
optimiser. A method's grid has its default and a few values of its one or two most important options. The best point is
chosen on the clients' validation examples, the mean over the seeds; the table shows its test accuracy. ``paper`` is
larger (LeNet-5, four times as long); it is not from a paper.

Every finished run is kept under ``OUT/runs/METHOD``, and a second start of the same command continues from there.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from variants import Rows, Variant, options, parse_seeds, report, run_variants

from fedjax_async.results import tables
from fedjax_async.results.metrics import final_value
from fedjax_async.server import METHODS
from fedjax_async.types import Run

_COMMON: dict[str, Any] = {
    **{"dataset": "fashion_mnist_6k", "model": "mlp:hidden=64", "clients": 100, "steps": 10, "lr": 0.05},
    **{"partition": "dirichlet:alpha=0.3,min_size=10", "validation_fraction": 0.1, "delay": "lognormal:mean=60"},
    **{"time": 1200.0, "eval_time": 40.0},
}
SMALL = {"model": "logistic", "clients": 20, "time": 130.0, "eval_time": 60.0, "eval_examples": 100}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": {**_COMMON, **SMALL, "partition": "dirichlet:alpha=1,min_size=10"},
    "laptop": _COMMON,
    "paper": _COMMON | {"model": "lenet5", "time": 4800.0, "eval_time": 160.0},
}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 5}
OWN_OPTIMISER = {"asynccurve": {"lr": 0.001}}  # Adam, its default

COHORT = {"@cohort:size": (10, 30), "server_lr": (1, 1.5)}
ADAPTIVE = {"@cohort:size": (10, 30), "server_lr": (0.01, 0.003, 0.03)}
MIXED = {"mixing": (0.6, 0.1, 0.3)}
ARRIVAL = {"server_lr": (1, 0.1, 0.03)}
WINDOW = {"@window:length": (300, 30, 100)}
ROBUST = {"server_lr": (1, 0.3, 0.1)}
# Method -> option -> values, the default first; ``@TIMING:OPTION`` is an option of the timing.
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "fedavg": COHORT,
    "fedprox": COHORT,
    "fedavgm": {"server_lr": (1, 0.3), "momentum": (0.9, 0.5)},
    "fedadagrad": {"@cohort:size": (10, 30), "server_lr": (0.03, 0.01, 0.1)},
    "fedadam": ADAPTIVE,
    "fedyogi": ADAPTIVE,
    "fednova": COHORT,
    "feddyn": {"@cohort:size": (10, 30), "alpha": (0.01, 0.1)},
    "scaffold": COHORT,
    "fedasync": MIXED,
    "asgd": ARRIVAL,
    "delay_adaptive_asgd": ARRIVAL,
    "ringmaster": {"@fresh:threshold": (10, 100), "server_lr": (1, 0.1, 0.03)},
    "rennala": {"@fresh:size": (10, 30), "server_lr": (1, 0.3)},
    "malenia": {"server_lr": (1, 0.3)},
    "ringleader": {"server_lr": (1, 0.3, 0.1)},
    "fedbuff": {"@buffer:size": (10, 3, 30), "server_lr": (0.7, 0.3, 1)},
    "port": {"@hurry:size": (10, 30), "server_lr": (1, 0.3)},
    "pisces": {"@pace:bound": (20, 5), "server_lr": (1, 0.3)},
    "fedstaleweight": {"@buffer:size": (5, 10, 30), "server_lr": (1, 0.3)},
    "fedcompass": {"server_lr": (0.9, 0.3, 2.7)},
    "asynfl": WINDOW,
    "asynflc": WINDOW,
    "asynflc_ef": WINDOW,
    "ca2fl": {"@buffer:size": (10, 30), "server_lr": (0.3, 0.1)},
    "fedvarp": COHORT,
    "fedstale": {"@cohort:size": (10, 30), "beta": (0.5, 0.2, 0.8)},
    "mifa": {"@cohort:size": (10, 30), "server_lr": (1, 3)},
    "ace": {"server_lr": (1, 0.3, 0.1)},
    "area": {"@buffer:size": (3, 10, 30)},
    "fadas": {"server_lr": (0.001, 0.0003, 0.003)},
    "quafl": {"@polling:length": (60, 20)},
    "adpsgd": {"server_lr": (1, 0.3)},
    "orthofl": MIXED,
    "orthofl_released": MIXED,
    "orthofl_no_average": {"per": ("layer", "whole")},
    "orthofl_pairwise": MIXED,
    "dc_asgd": ARRIVAL,
    "dc_asgd_a": ARRIVAL,
    "orthograd": ARRIVAL,
    "orthopos": ARRIVAL,
    "orthostrict": ARRIVAL,
    "orthodyn": ARRIVAL,
    "fedmrur": COHORT,
    "floco": COHORT,
    "asynccurve": {"server_lr": (0.6, 0.3)},
    "fedmedian": ROBUST,
    "trimmed_mean": ROBUST,
    "krum": ROBUST,
}
SMALLEST = {"fedavg": {"server_lr": (1, 1.5)}, "fedbuff": {"server_lr": (0.7, 1)}}  # the grids of ``smoke``


def spec(method: str, values: dict[str, Any]) -> str:
    """The method with these options and timing, as text.

    >>> spec("fedbuff", {"@buffer:size": 10, "server_lr": 0.3})
    'fedbuff:server_lr=0.3@buffer:size=10'
    """
    given = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
    of_rule, of_timing = ([text for text in given if text.startswith("@") == timed] for timed in (False, True))
    return method + (f":{','.join(of_rule)}" if of_rule else "") + "".join(of_timing)


def points(method: str, scale: str) -> list[str]:
    """The specs of a method's grid, its default first, by its name alone."""
    grid = (SMALLEST if scale == "smoke" else GRIDS)[method]
    _, *others = itertools.product(*grid.values())
    return [method, *(spec(method, dict(zip(grid, values))) for values in others)]


def shown(method: str, point: str) -> str:
    """The options of a point that the method's grid varies, and its timing."""
    usual = {name: values[0] for name, values in GRIDS[method].items() if not name.startswith("@")}
    text = spec(method, usual) if point == method else point
    return (text if "@" in text else f"{text}@{METHODS[method].timing}").removeprefix(method).removeprefix(":")


def numbers(run: Run) -> dict[str, float]:
    """Test and validation accuracy at the end, and how much the test accuracy swings before it, in percent."""
    accuracy = 100 * np.asarray(run.evaluations["accuracy"])
    return {
        "test": 100 * final_value(run, "accuracy"),
        "validation": 100 * final_value(run, "validation_accuracy"),
        "swing": float(np.std(accuracy[-max(len(accuracy) // 3, 2) :])),
        "updates": float(run.counters["updates"]),
    }


def of_method(method: str, given: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Spec -> number -> its values, one a seed, of all points of a method's grid."""
    setting = SETTINGS[given.scale] | OWN_OPTIMISER.get(method, {})
    variants = [Variant(one, {"method": one}) for one in points(method, given.scale)]
    found = {
        name: [numbers(run) for run in runs] for name, runs in run_variants(method, setting, variants, given).items()
    }
    return {name: {key: [one[key] for one in each] for key in each[0]} for name, each in found.items()}


def row(method: str, found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """A method's row: its default, the point with the best validation accuracy, and what it gains on the test set."""
    means = {name: float(np.nan_to_num(np.mean(each["validation"]), nan=-1)) for name, each in found.items()}
    best = max(means, key=lambda name: means[name])  # of equal points the first: the default
    usual, tuned = found[method], found[best]
    gained = [after - before for before, after in zip(usual["test"], tuned["test"])]
    return {
        "method": method,
        "default": shown(method, method),
        "accuracy (%)": tables.spread(usual["test"]),
        "swing (points)": float(np.mean(usual["swing"])),
        "tuned": "the default" if best == method else shown(method, best),
        "tuned accuracy (%)": tables.spread(tuned["test"]),
        "tuned swing (points)": float(np.mean(tuned["swing"])),
        "gained (points)": tables.spread(gained),
        "updates": float(np.mean(usual["updates"])),
    }


def grid_rows(found: dict[str, dict[str, list[float]]]) -> Rows:
    """A row for each point of a method's grid."""
    names = {"test": "accuracy (%)", "validation": "validation accuracy (%)", "swing": "swing (points)"}
    return [{"point": one} | {names[key]: tables.spread(each[key]) for key in names} for one, each in found.items()]


def _take_cores(count: int) -> None:
    """Keep this process on its share of the cores, so that processes do not compete."""
    if hasattr(os, "sched_setaffinity"):
        index = multiprocessing.current_process()._identity[0] - 1
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[index % len(cores) :: count])


def all_found(methods: list[str], given: argparse.Namespace) -> list[dict[str, dict[str, list[float]]]]:
    """The results of all methods, trained in ``--processes`` processes."""
    if given.processes == 1:
        return [of_method(method, given) for method in methods]
    start = multiprocessing.get_context("spawn")
    shared = {"mp_context": start, "initializer": _take_cores, "initargs": (given.processes,)}
    with ProcessPoolExecutor(given.processes, **shared) as pool:
        return list(pool.map(of_method, methods, [given] * len(methods)))


if __name__ == "__main__":
    parser = options(__doc__, "methods", "defaults")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="methods trained at a time [1]")
    parser.add_argument("--methods", nargs="+", choices=list(GRIDS), default=None, help="only these [all]")
    given = parse_seeds(parser, SEEDS)
    if given.processes < 1:
        parser.error(f"argument --processes: must be a whole number >= 1, not {given.processes}")
    if given.methods and given.scale == "smoke":
        parser.error(f"argument --methods: must be left out at --scale smoke, which has {' and '.join(SMALLEST)}")
    methods = given.methods or list(SMALLEST if given.scale == "smoke" else METHODS)
    found = all_found(methods, given)
    rows = [row(method, each) for method, each in zip(methods, found)]
    decimals = {name: 1 for name in rows[0] if name.endswith(")")}
    named = given.name
    given.name = f"{named}_grid"
    report(
        [one for each in found for one in grid_rows(each)], given, decimals=decimals | {"validation accuracy (%)": 1}
    )
    given.name = named
    report(rows, given, decimals=decimals)
