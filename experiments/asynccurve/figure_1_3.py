"""Figures 1 and 3, and Q: the losses that each delay correction would have reached at the arrivals of a run.

    python experiments/asynccurve/figure_1_3.py --scale laptop
    python experiments/asynccurve/figure_1_3.py --scale paper --tasks femnist --leaf FOLDER
    python experiments/asynccurve/figure_1_3.py --scale laptop --curve cubic

LeNet-5 on eight clients with amounts of data proportional to 1, ..., 8, one local epoch, job times proportional to the
examples. The runs are FedAsync and AsyncCurve without delay correction. At every tenth arrival a probe measures, for
each correction, the train, validation and test loss of the model to which it would lead. Losses are smoothed,
normalised and averaged as in the paper (``phases.py``); the script then searches for the phase change.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import corrections
import numpy as np
import phases
from study import add_curve, curve_suffix, options, report, shared

from fedjax_async import Method, Settings, Spec, geometry, named, results, simulate
from fedjax_async.config import prepare
from fedjax_async.config.settings import as_dict
from fedjax_async.data import Dataset, formats, load
from fedjax_async.data.federated import check_dataset
from fedjax_async.data.memmap import spans
from fedjax_async.local import curve_training
from fedjax_async.results import figure as canvas
from fedjax_async.results import store
from fedjax_async.results.figure import save_figure
from fedjax_async.server import asynccurve, fedasync
from fedjax_async.types import Probe, Run

TASKS = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "femnist": "FEMNIST, LEAF's JSON",
    "emnist": "EMNIST by class, TFDS",
    "smoke": "Fashion-MNIST (6,000 images)",
}
NAMES = {"smoke": "fashion_mnist_6k", "emnist": "tfds:name=emnist/byclass"}
POSITION = 0.5  # of a step on the way to the end, in runs and probes; a curve is farthest from its line there
EVERY = 10  # every tenth arrival is measured
SIGMA = 100  # of the Gaussian, in arrivals
PAPER_Q = (1.0275, 0.0139)
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"examples": 120, "updates": 60, "measured": 20, "model": "mlp:hidden=4", "control_epochs": 1},
    "laptop": {"examples": 4500, "updates": 2000, "measured": 800, "model": "lenet5", "control_epochs": 5},
    "paper": {"examples": 60000, "updates": 10000, "measured": 10000, "model": "lenet5", "control_epochs": 5},
}
SETTING: dict[str, Any] = {
    **{"partition": "quantity", "clients": 8, "epochs": 1.0, "batch_size": 32, "validation_fraction": 0.1},
    **{"delay": "normal:mean=1,std=0.1,reference_steps=1", "optimizer": "adam", "lr": 1e-3},
}


def methods(control_epochs: int, curve: str = "quadratic", bends: int | None = None) -> dict[str, Method]:
    """The methods of the two runs; each rule also keeps the states of all corrections."""
    shape: dict[str, Any] = {} if curve == "quadratic" else {"curve": curve, "bends": bends}
    still: dict[str, Any] = {"lowest": 1.0, "correction": "asgd", "swa": 1.0, "warm": "off"}
    rule = asynccurve(server_lr=POSITION, **still, **shape)
    client = Spec(curve_training, order="after", control_epochs=control_epochs, warm="off", **shape)
    return {
        "fedasync": Method(corrections.observed(fedasync(mixing=POSITION, staleness="constant"))),
        "asynccurve": Method(corrections.observed(rule), client=client),
    }


def dataset_of(task: str, given: argparse.Namespace) -> Dataset:
    """The data set, with a random part of its training examples and evenly spaced test examples."""
    return _part_of(task, given.leaf, given.scale)[0]


def used_of(task: str, given: argparse.Namespace) -> dict[str, str]:
    """How many of the data set's images :func:`dataset_of` takes: ``{"training images": "4500 of 60000", ...}``."""
    return _part_of(task, given.leaf, given.scale)[1]


@functools.lru_cache(maxsize=1)
def _part_of(task: str, folder: Path | None, size: str) -> tuple[Dataset, dict[str, str]]:
    whole = formats.leaf(path=str(folder)) if task == "femnist" else load(NAMES.get(task, task))
    scale = SCALES[size]
    rows = np.random.default_rng(0).permutation(len(whole.y))[: scale["examples"]]
    tests = np.linspace(0, len(whole.test_y), min(scale["measured"], len(whole.test_y)), endpoint=False).astype(int)
    part = whole._replace(x=whole.x[rows], y=whole.y[rows], test_x=whole.test_x[tests], test_y=whole.test_y[tests])
    used = {"training images": (rows, whole.y), "test images": (tests, whole.test_y)}
    said = {name: f"{len(some)} of {len(every)}" for name, (some, every) in used.items()}
    return check_dataset(part._replace(groups=None, test_groups=None)), said


def add_leaf(parser: argparse.ArgumentParser) -> None:
    """Add ``--leaf``."""
    text = "LEAF's femnist, for that task; at --scale smoke, its first examples in place of the package's images"
    parser.add_argument("--leaf", type=Path, default=None, metavar="DIR", help=text)


def check_leaf(parser: argparse.ArgumentParser, given: argparse.Namespace, tasks: Sequence[str]) -> None:
    """Refuse a ``--leaf`` that no task reads."""
    if given.leaf is not None and "femnist" not in tasks:
        parser.error(f"argument --leaf: must be given with the task femnist, instead of: {', '.join(tasks)}")


def missing(task: str, given: argparse.Namespace) -> str | None:
    """Why a task cannot be run here, in one line; ``None`` if it can."""
    if task == "femnist" and given.leaf is None:
        return "give --leaf, the folder of LEAF's femnist with train/*.json and test/*.json"
    try:
        dataset_of(task, given)
    except ValueError as error:
        return str(error)
    return None


def run_of(task: str, name: str, given: argparse.Namespace) -> Run:
    """One run with its probe; a finished one of these settings is loaded, an interrupted one continues.

    ``ValueError`` if the folder of the task, the method and the seed has a run of other settings.
    """
    called = name + (given.suffix if name == "asynccurve" else "")
    folder = given.out / "runs" / (f"{task}-{called}" + (f"-seed_{given.seed}" if given.seed else ""))
    scale = SCALES[given.scale]
    method = methods(scale["control_epochs"], given.curve, given.bends)[name]
    parts: dict[str, Any] = {
        "dataset": named(task, dataset_of(task, given)),
        "method": named(f"{called}-observed", method),
    }
    budget = {"updates": scale["updates"], "eval_updates": max(1, scale["updates"] // 20), "seed": given.seed}
    setting = {**SETTING, **parts, **budget, "model": scale["model"], "checkpoint": 200}
    store.require_room(folder, as_dict(Settings(**setting)))
    if not (folder / store.MANIFEST).exists():
        components = prepare(Settings(**setting)).components
        examples = examples_of(components.data, scale["measured"])
        family = geometry.family(given.curve, given.bends)
        measured = corrections.probe(method.rule, components.model, examples, POSITION, family)
        simulate(**setting, out=folder, plots=False, probes={"corrections": Probe(measured, EVERY)})
    return results.load(folder)


def examples_of(data: Any, count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Examples of all clients' training and validation parts, evenly spaced, and the test set."""
    parts = {"test": (data.test_x, data.test_y)}
    for name, prefix in (("train", ""), ("validation", "validation_")):
        order, offset, size = (np.asarray(getattr(data, f"{prefix}{part}")) for part in ("order", "offset", "size"))
        owned = order[spans(offset, size)]
        rows = owned[np.linspace(0, len(owned), min(count // 2, len(owned)), endpoint=False).astype(int)]
        parts[name] = (np.asarray(data.x)[rows], np.asarray(data.y)[rows])
    return parts


# --- tables from the probes ----------------------------------------------------------------------------


def losses_of(run: Run, part: str) -> dict[str, np.ndarray]:
    """Proposal -> its loss on a part, at each measured arrival."""
    ending = f" | {part}"
    return {
        name.removesuffix(ending): each for name, each in run.probes["corrections"].items() if name.endswith(ending)
    }


def ends_of(runs: Mapping[str, Run], part: str) -> dict[str, np.ndarray]:
    """Figure 1: the relative loss of each end correction, averaged over the runs."""
    each = [losses_of(run, part) for run in runs.values()]
    return phases.relative([{name: losses[name] for name in corrections.ENDS} for losses in each], SIGMA / EVERY)


def curves_of(run: Run, part: str, family: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Figure 3: the relative loss on the line and on the curves after the corrections of a family."""
    losses = losses_of(run, part)
    same = "asgd, rotated curve"  # its chord is the client's own, so the rotation changes nothing
    chosen = [name for name in losses if name.partition(", ")[0] in family and name != same]
    return phases.relative([{name: losses[name] for name in chosen}], SIGMA / EVERY)


def family_mean(relative: Mapping[str, np.ndarray], family: tuple[str, ...]) -> np.ndarray:
    """The mean relative loss of a family of corrections."""
    return np.mean([relative[name] for name in family], axis=0)


def end_rows(task: str, runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """One row per correction: its relative loss in the first and in the last third, and its test loss there."""
    relative = {part: ends_of(runs, part) for part in ("train", "validation", "test")}
    rows = []
    for name in corrections.ENDS:
        row: dict[str, Any] = {"task": task, "correction": name}
        for part, values in relative.items():
            third = max(1, len(values[name]) // 3)
            row |= {f"{part}, first third": float(values[name][:third].mean())}
            row |= {f"{part}, last third": float(values[name][-third:].mean())}
        for run, of_run in runs.items():
            loss = losses_of(of_run, "test")[name]
            third = max(1, len(loss) // 3)
            row |= {f"test loss of {run}, first third": float(loss[:third].mean())}
            row |= {f"test loss of {run}, last third": float(loss[-third:].mean())}
        rows.append(row)
    return rows


def phase_rows(task: str, runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Where corrections that trust the position become better than those that trust the displacement."""
    rows = []
    for title, chosen in {"both runs": runs, **{name: {name: run} for name, run in runs.items()}}.items():
        for part in ("train", "validation", "test"):
            relative = ends_of(chosen, part)
            families = (family_mean(relative, each) for each in (corrections.GRADIENT, corrections.POSITION))
            change = phases.phase_change(*families)
            rows.append({
                "task": task,
                "run": title,
                "part": part,
                "change found": "yes" if change.found else "no",
                "at server step": change.point * EVERY,
                "displacement better before (%)": 100 * change.before,
                "position better after (%)": 100 * change.after,
            })  # fmt: skip
    return rows


def quality_rows(task: str, run: Run) -> list[dict[str, Any]]:
    """Q, the test loss on the line over that on the curve, at ``POSITION``; 99 % Gaussian intervals."""
    losses = losses_of(run, "test")
    rows = []
    for name, loss in losses.items():
        base, _, shape = name.partition(", ")
        if f"{base}, curve" not in losses:
            continue
        mean, half = phases.interval(losses[base] / loss)
        rows.append({
            "task": task,
            "end": "the client's own, without delay" if base == "fresh" else base,
            "path": shape or "line",
            "Q": mean,
            "99 % +-": half,
            "paper's Q": PAPER_Q[0] if shape else None,
            "paper's +-": PAPER_Q[1] if shape else None,
            "test loss": float(loss.mean()),
            "curve better (%)": 100 * float(np.mean(loss < losses[base])) if shape else None,
            "measured": len(loss),
        })  # fmt: skip
    return rows


def loss_rows(task: str, runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """The test loss of every proposal at each measured arrival, before smoothing."""
    rows = []
    for name, run in runs.items():
        losses = losses_of(run, "test")
        for row, update in enumerate(run.probes["corrections"]["update"]):
            about = {"task": task, "run": name, "server step": int(update)}
            rows.append(about | {proposal: float(f"{loss[row]:.5g}") for proposal, loss in losses.items()})
    return rows


# --- pictures ----------------------------------------------------------------------------------------


def draw(relative: Mapping[str, np.ndarray], axes: Any, title: str) -> None:
    """Draw relative losses against server steps, one line per method."""
    for index, (name, values) in enumerate(relative.items()):
        colour, dash = canvas.line_style(index)
        axes.plot(EVERY * np.arange(len(values)), values, color=colour, linestyle=dash, linewidth=1.4, label=name)
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.label(axes, "server steps", "relative test loss")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def pictures(task: str, runs: Mapping[str, Run], given: argparse.Namespace) -> None:
    """Draw Figure 1 (corrections, both runs) and Figure 3 (curves, after corrections of either family)."""
    name = f"{task}{given.suffix}.png"
    figure, axes = canvas.new(7.0, 3.6)
    draw(ends_of(runs, "test"), axes, f"{TASKS[task]}: corrections of the end, both runs")
    save_figure(figure, given.out / f"figure_1_{name}")
    figure = canvas.empty(7.0, 6.4)
    families = {"trusting the displacement": corrections.GRADIENT, "trusting the position": corrections.POSITION}
    for (title, family), axes in zip(families.items(), figure.subplots(2), strict=True):
        draw(curves_of(runs["asynccurve"], "test", family), axes, f"{TASKS[task]}: {title}")
    save_figure(figure, given.out / f"figure_3_{name}")


def main() -> None:
    """Run task after task; write tables and pictures after each."""
    parser = options(__doc__, "figure_1_3")
    parser.add_argument(
        "--tasks", nargs="+", choices=[t for t in TASKS if t != "smoke"], default=["mnist", "fashion_mnist"]
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of data, delays and learning [0]")
    add_leaf(parser)
    add_curve(parser)
    given = shared.parse(parser)
    check_leaf(parser, given, given.tasks)
    given.suffix = curve_suffix(parser, given)
    tables: dict[str, list[dict[str, Any]]] = {"": [], "_phases": [], "_q": [], "_losses": []}
    for task in ["smoke"] if given.scale == "smoke" and given.leaf is None else given.tasks:
        reason = missing(task, given)
        if reason is not None:
            print(f"{task}: not run: {reason}", file=sys.stderr)
            tables[""].append({"task": task, "correction": "not run"})
            continue
        print(f"{task}: {used_of(task, given)}", file=sys.stderr)
        runs = {name: run_of(task, name, given) for name in ("fedasync", "asynccurve")}
        tables[""] += end_rows(task, runs)
        tables["_phases"] += phase_rows(task, runs)
        tables["_q"] += quality_rows(task, runs["asynccurve"])
        tables["_losses"] += loss_rows(task, runs)
        pictures(task, runs, given)
        for ending, rows in tables.items():
            if rows:
                name = f"{given.name}{given.suffix}{ending}"
                said = [row | {"seed": given.seed} for row in rows]
                report(said, argparse.Namespace(**{**vars(given), "name": name}), decimals=DECIMALS)


DECIMALS = {"Q": 4, "99 % +-": 4, "paper's Q": 4, "paper's +-": 4, "test loss": 4}


if __name__ == "__main__":
    main()
