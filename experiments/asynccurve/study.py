"""Shared by the experiments of this folder: tasks, compared methods, scales, and the choice of rates.

Every script takes ``--scale smoke|laptop|paper``. It keeps each finished run under ``OUT/runs``, and a second start of
the same command continues from there. The paper reports no accuracy, so we chose the setting of the table at every
scale; ``laptop`` is smaller. ``smoke`` only shows that a script runs; it uses the data in the package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import numpy as np
import variants as shared
from variants import parse, report

from fedjax_async import register
from fedjax_async.geometry import FAMILIES, PHASE_COLUMN, family
from fedjax_async.results import choose, sweep, tables
from fedjax_async.results.metrics import final_accuracy, to_target
from fedjax_async.server import fedasync
from fedjax_async.server.fedmrur import fedmrur_client
from fedjax_async.types import Run, ServerAlgorithm, Traced

__all__ = ["ABLATIONS", "METHODS", "SEEDS", "TASKS", "Compared", "options", "parse", "report"]

FINAL = "tail:5"  # the compared accuracy: the mean of the last five evaluations


@register("method", "fedasync_fedmrur", proximal=0.01, client=fedmrur_client)
def fedasync_fedmrur(*, mixing: Traced = 0.6) -> ServerAlgorithm:
    """FedAsync whose clients have FedMRUR's hyperbolic proximal term."""
    return fedasync(mixing=mixing)


class Task(NamedTuple):
    """A data set with its model and setting; ``laptop`` has the changes of the smaller scale."""

    title: str
    setting: dict[str, Any]
    target: float  # accuracy until which the time is measured
    laptop: dict[str, Any]


_COMMON: dict[str, Any] = {"delay": "rpi", "batch_size": 32, "validation_fraction": 0.02}
_IMAGES = {**_COMMON, "partition": "dirichlet:alpha=0.1", "clients": 10, "model": "lenet5", "eval_examples": 2000}
_SMALL = {"epochs": 0.1, "updates": 120, "eval_updates": 4}
TASKS: dict[str, Task] = {
    "mnist": Task(
        "MNIST, LeNet-5",
        {**_IMAGES, "dataset": "mnist", "epochs": 1.0, "updates": 1000, "eval_updates": 20},
        0.8,
        _SMALL,
    ),
    "fashion_mnist": Task(
        "Fashion-MNIST, LeNet-5",
        {**_IMAGES, "dataset": "fashion_mnist", "epochs": 1.0, "updates": 1000, "eval_updates": 20},
        0.65,
        _SMALL,
    ),
    "har": Task(
        "HAR, multilayer perceptron",
        {
            **{**_COMMON, "dataset": "har", "partition": "natural", "clients": 21, "model": "mlp:hidden=128"},
            **{"validation_fraction": 0.1, "epochs": 1.0, "updates": 1000, "eval_updates": 20},
        },
        0.65,
        {"updates": 210, "eval_updates": 7},
    ),
    "smoke": Task(
        "Fashion-MNIST (6,000 images), logistic regression",
        {
            **{**_COMMON, "dataset": "fashion_mnist_6k", "partition": "dirichlet:alpha=0.1", "clients": 4},
            **{"model": "logistic", "steps": 2, "updates": 8, "eval_updates": 2, "eval_examples": 100},
        },
        0.2,
        {},
    ),
}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 3}


class Compared(NamedTuple):
    """A row of the table: its name in pictures, its method, the option for its server rate, its local optimiser."""

    title: str
    method: str
    rate: str
    optimizer: str = "sgd"


METHODS: dict[str, Compared] = {
    "fedasync": Compared("FedAsync", "fedasync", "mixing"),
    "fedbuff": Compared("FedBuff", "fedbuff@buffer:size=3", "server_lr"),
    "dc_asgd_a": Compared("DC-ASGD-a", "dc_asgd_a", "server_lr"),
    "orthograd": Compared("OrthoGrad", "orthograd", "server_lr"),
    "orthopos": Compared("OrthoPos", "orthopos", "server_lr"),
    "orthodyn": Compared("OrthoDyn", "orthodyn", "server_lr"),
    "fedasync, FedMRUR term": Compared("FedAsync + FedMRUR term", "fedasync_fedmrur", "mixing"),
    "orthofl_released": Compared("OrthoFL, released", "orthofl_released", "mixing"),
    "asynccurve, sgd": Compared("AsyncCurve, SGD", "asynccurve:warm=off", "server_lr"),
    "asynccurve, adam": Compared("AsyncCurve, Adam", "asynccurve", "server_lr", "adam"),
    "asynccurve, sam": Compared("AsyncCurve, SAM", "asynccurve", "server_lr", "sam:base=adam"),
}
WHOLE = "asynccurve, adam"  # the ablations remove parts of this row and use its rates
ABLATIONS: dict[str, str] = {
    "no delay correction": "correction=asgd",
    "steps on the line": "step=line",
    "no rotation": "control=none",
    "no dominance penalty": "dominance=false",
    "constant rate": "lowest=1",
    "no SWA": "swa=1",
    "no warm moments": "warm=off",
    "warm moments as printed": "warm=printed",
    "no proximal term": "proximal=0",
}
CURVES: dict[str, str] = {  # other curves than the quadratic one, at the same rates
    "cubic curve": "curve=cubic",
    "chain of one bend": "curve=chain",
    "chain of three bends": "curve=chain,bends=3",
}
LOCAL_RATES = {"sgd": (0.03, 0.1), "adam": (3e-4, 1e-3), "sam:base=adam": (3e-4, 1e-3)}
SERVER_RATES = (0.4, 0.8)


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of the options that all scripts share; ``name`` is the script's."""
    return shared.options(about, "asynccurve", name)


def add_curve(parser: argparse.ArgumentParser) -> None:
    """Add ``--curve`` and ``--bends``, the curves that AsyncCurve's clients learn."""
    parser.add_argument("--curve", choices=list(FAMILIES), default="quadratic", help="of the clients [quadratic]")
    parser.add_argument("--bends", type=int, default=None, metavar="M", help="inner points of a chain [1]")


def curve_suffix(parser: argparse.ArgumentParser, given: argparse.Namespace) -> str:
    """What names of files have more than those of the paper's curve: nothing for ``quadratic``, ``_chain_3``."""
    try:
        inner = family(given.curve, given.bends).inner
    except ValueError as error:
        parser.error(f"argument --bends: {error}")
    if given.curve == "quadratic":
        return ""
    return f"_{given.curve}_{inner}" if given.curve == "chain" else f"_{given.curve}"


def setting_of(task: str, scale: str) -> dict[str, Any]:
    """The settings of a task at a scale."""
    return TASKS[task].setting | (TASKS[task].laptop if scale == "laptop" else {})


def missing(task: str, scale: str) -> str | None:
    """Why a task cannot be run here, in one line; ``None`` if it can."""
    return shared.missing(setting_of(task, scale) | {"method": "fedasync"})


def trials(row: Compared) -> list[dict[str, Any]]:
    """The settings that are tried for a row: two local rates times two server rates."""
    fixed = {"method": row.method, "optimizer": row.optimizer}
    return [
        {**fixed, f"method.{row.rate}": server, "lr": local}
        for local in LOCAL_RATES[row.optimizer]
        for server in SERVER_RATES
    ]


def tuned(
    task: str, rows: Mapping[str, Compared], given: argparse.Namespace
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Row -> its best trial on the validation part, with seed 0; and all trials, as points of a sweep."""
    tried = {name: trials(row) for name, row in rows.items()}
    points = [point | {"seed": 0} for each in tried.values() for point in each]
    done = _swept(task, points, given)
    found = choose(done, FINAL, roles={"optimizer": "compared"})
    settings, chosen = iter(done.settings), {}
    for name, each in tried.items():
        own = [next(settings) for _ in each]
        chosen[name] = each[next(own.index(tuning.best) for tuning in found if tuning.best in own)]
    return chosen, points


def _swept(task: str, points: Sequence[Mapping[str, Any]], given: argparse.Namespace) -> Any:
    """The runs of ``points``, one after the other in one folder per task; finished ones are kept."""
    progress = False if given.quiet else None
    folder = given.out / "runs" / task
    return sweep(setting_of(task, given.scale), points=points, out=folder, progress=progress, overwrite=True)


def runs_of(
    task: str,
    chosen: Mapping[str, Mapping[str, Any]],
    given: argparse.Namespace,
    known: Sequence[Mapping[str, Any]] = (),
) -> dict[str, list[Run]]:
    """Row -> its runs, one per seed. ``known``: earlier points, which are kept in the same sweep."""
    points = list(known)
    for point in chosen.values():
        points += [p for seed in range(given.seeds) if (p := {**point, "seed": seed}) not in points]
    done = _swept(task, points, given)
    indices = {
        name: [points.index({**point, "seed": seed}) for seed in range(given.seeds)] for name, point in chosen.items()
    }
    return {name: [done.run(index) for index in where] for name, where in indices.items()}


def without(point: Mapping[str, Any], option: str) -> dict[str, Any]:
    """The point with ``option`` added to its method's spec."""
    name, _, given = str(point["method"]).partition(":")
    return {**point, "method": f"{name}:{','.join(filter(None, (given, option)))}"}


def swing(accuracy: np.ndarray) -> float:
    """Mean absolute change of an accuracy [evaluations] between evaluations, over the second half; NaN if too short."""
    late = np.asarray(accuracy, np.float64)[len(accuracy) // 2 :]
    return float(np.mean(np.abs(np.diff(late)))) if len(late) > 1 else float("nan")


def rows_of(
    task: str, runs: Mapping[str, Sequence[Run]], chosen: Mapping[str, Mapping[str, Any]], target: float
) -> list[dict[str, Any]]:
    """One row per variant: final accuracy and swing in %, virtual time to the target, its rates."""
    rows = []
    for name, seeds in runs.items():
        point = chosen[name]
        server = next(value for key, value in point.items() if key.startswith("method."))
        rows.append({
            "task": task,
            "variant": name,
            "accuracy (%)": tables.spread([100 * final_accuracy(run, FINAL) for run in seeds]),
            f"minutes to {100 * target:g} %": tables.spread_or_count([to_target(run, target) / 60 for run in seeds]),
            "swing (points)": tables.spread([100 * swing(run.evaluations["accuracy"]) for run in seeds]),
            "local rate": point["lr"],
            "server rate": server,
            "updates": len(seeds[0].updates["client"]),
            "seeds": len(seeds),
        })  # fmt: skip
    return rows


def rows_of_seeds(task: str, runs: Mapping[str, Sequence[Run]], target: float) -> list[dict[str, Any]]:
    """One row per run: final accuracy, virtual time to the target, rejected uploads, updates before OrthoDyn's
    switch."""
    rows = []
    for name, seeds in runs.items():
        for seed, run in enumerate(seeds):
            phase = run.updates.get(PHASE_COLUMN)
            rows.append({
                "task": task,
                "variant": name,
                "seed": seed,
                "accuracy (%)": 100 * final_accuracy(run, FINAL),
                f"minutes to {100 * target:g} %": to_target(run, target) / 60,
                "rejected uploads": run.counters["rejected"],
                "updates before the switch": None if phase is None else int(np.sum(phase == 0)),
                "updates": len(run.updates["client"]),
            })  # fmt: skip
    return rows
