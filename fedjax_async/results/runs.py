"""Runs in folders: write one run or several, continue one that was cut off, run several methods and seeds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedjax_async import check, disk
from fedjax_async.config import Experiment, Settings, execute, prepare
from fedjax_async.config.settings import as_dict
from fedjax_async.engine.record import Progress
from fedjax_async.results import files, metrics, store, tables
from fedjax_async.results.claim import claimed
from fedjax_async.results.figure import save_figure
from fedjax_async.results.plots import accuracy_curve, gantt, loss_curve, staleness_histogram
from fedjax_async.results.progress import bar
from fedjax_async.results.store import CHECKPOINTS, MANIFEST, require_room
from fedjax_async.types import Run

# --- tables and pictures ------------------------------------------------------------------------------


def write_run(run: Run, folder: str | Path, plots: bool = True, *, overwrite: bool = False) -> Path:
    """Save ``run`` into ``folder`` (see :func:`fedjax_async.results.store.save`), with pictures beside it.

    Pictures: ``accuracy.png`` against virtual time (``loss.png`` for targets without classes) and, if any upload
    arrived, ``staleness.png`` and ``gantt.png``. The data are written first, so they are safe even if matplotlib is
    missing; ``ValueError`` then names the extra to install.
    """
    folder = store.save(run, folder, overwrite=overwrite)
    if plots:
        name = str(run.settings.get("method", "run"))
        _draw_curve({name: [run]}, folder)
    if plots and len(run.updates["staleness"]):
        save_figure(staleness_histogram(run), folder / "staleness.png")
        save_figure(gantt(run.schedule), folder / "gantt.png")
    return folder


def _draw_curve(runs: Mapping[str, Sequence[Run]], folder: Path) -> None:
    """Accuracy, or the loss if no run has class labels."""
    labelled = any(not np.isnan(run.evaluations["accuracy"]).all() for seeds in runs.values() for run in seeds)
    draw, name = (accuracy_curve, "accuracy.png") if labelled else (loss_curve, "loss.png")
    save_figure(draw(runs), folder / name)


def write_comparison(
    runs: Mapping[str, Sequence[Run]],
    folder: str | Path,
    plots: bool = True,
    *,
    baseline: str | None = None,
    target: str | float = metrics.SHARE,
) -> str:
    """Compare methods: ``comparison.csv``, ``comparison.md`` and ``accuracy.png`` in ``folder``.

    ``runs`` maps each method to its runs, one per seed, with the seeds in the same order. ``baseline`` and ``target``:
    as in :func:`fedjax_async.results.tables.comparison`. The CSV has the target too. Returns the table as text, to be
    printed, with the target below it.
    """
    folder = Path(folder)
    rows = tables.comparison(runs, baseline, target)
    final = {name: np.array([metrics.final_accuracy(run) for run in seeds]) for name, seeds in runs.items()}
    goal = tables.spread(100 * metrics.target_accuracy(final, target))
    labelled = "final accuracy (%)" in rows[0]
    extended = [row | ({"target (%)": goal} if labelled else {}) for row in rows]
    tables.write(extended, folder / "comparison.csv")
    tables.write(rows, folder / "comparison.md", decimals=tables.COMPARISON_DECIMALS)
    if plots:
        _draw_curve(runs, folder)
    disk.sweep_up(folder)
    text = tables.table(rows, decimals=tables.COMPARISON_DECIMALS)
    return f"{text}\ntarget: {tables.cell(goal)} % ({_described(target, final)})\n" if labelled else text


def _described(target: str | float, methods: Collection[str]) -> str:
    if target in methods:
        return f"the final accuracy of {target}"
    share = str(target).removesuffix("%")
    return "as asked for" if share == str(target) else f"{share} % of the lowest final accuracy among the methods"


# --- one run that can be continued --------------------------------------------------------------------


def run_into(
    experiment: Experiment,
    folder: Path,
    *,
    plots: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Run an experiment and save it in ``folder``; if it was killed before, continue from its last checkpoint.

    Checkpoints (``settings.checkpoint``) are kept in ``folder/checkpoints`` until the results are complete. The
    folder is locked meanwhile.

    Raises: ``ValueError`` as in :func:`claimed` and :func:`require_room`, before anything is compiled, and for
    checkpoints of other settings.
    """
    settings = as_dict(experiment.settings)
    with claimed(folder):
        folder = require_room(folder, settings, overwrite=overwrite)
        checkpoints = folder / CHECKPOINTS
        if overwrite and not _holds(checkpoints / "settings.json", settings):
            shutil.rmtree(checkpoints, ignore_errors=True)
        if experiment.settings.checkpoint is not None:
            checkpoints.mkdir(parents=True, exist_ok=True)
            disk.write(checkpoints / "settings.json", files.json_bytes(settings))
        run = execute(experiment, progress=progress, checkpoints=checkpoints)
        write_run(run, folder, plots=plots, overwrite=overwrite)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return run


def _holds(path: Path, settings: dict[str, object]) -> bool:
    return path.is_file() and path.read_bytes() == files.json_bytes(settings)


def unfinished(folder: Path) -> Settings:
    """The settings of the run that was cut off in ``folder``; ``ValueError`` if the folder holds no checkpoints."""
    saved = folder / CHECKPOINTS / "settings.json"
    if not saved.is_file():
        finished = (folder / MANIFEST).is_file()
        state = "the run in it is finished" if finished else f"it has no {CHECKPOINTS}/settings.json"
        raise ValueError(f"folder = {str(folder)!r}: must hold a run that was begun with --checkpoint, but {state}")
    try:
        return Settings(**json.loads(saved.read_bytes()))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{saved}: is not the settings of a run ({error})") from None


# --- several methods ----------------------------------------------------------------------------------


def compare(
    methods: Sequence[str],
    settings: Settings,
    *,
    seeds: int = 1,
    folder: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> dict[str, list[Run]]:
    """Run every method with the seeds ``settings.seed, settings.seed + 1, ...``.

    The partition, the minibatches and the delay of a client's n-th job depend on the seed alone, so all methods meet
    the same ones. Before the first run starts, every setting is checked, every schedule is planned, and every folder
    is made and checked. ``folder`` is locked until the end.

    Args:
      methods: specs such as ``"fedasync:mixing=0.4"`` or, with a timing of its own,
        ``"fedbuff@buffer:size=5"``; they name the rows.
      folder: if given, each run is saved under ``folder/runs/METHOD/seed_K`` as soon as it is finished.
      progress: show a bar for each run (default: on a terminal).

    Returns: method -> its runs, one per seed.
    """
    check.whole("seeds", seeds)
    check.require(len(methods) > 0, "methods", list(methods), "at least one method")
    check.require(len(set(methods)) == len(methods), "methods", list(methods), "different from each other")

    def settings_of(method: str, seed: int) -> Settings:
        return replace(settings, method=method, seed=seed)

    def folder_of(method: str, seed: int) -> Path:
        return Path(folder or "") / "runs" / re.sub(r"[^\w.-]+", "_", method) / f"seed_{seed}"

    def check_run(method: str, seed: int) -> None:
        with claimed(None if folder is None else folder_of(method, seed)):
            experiment = prepare(settings_of(method, seed))
            if folder is not None:
                require_room(folder_of(method, seed), as_dict(experiment.settings), overwrite=overwrite)

    def train(method: str, seed: int) -> Run:
        experiment = prepare(settings_of(method, seed))
        meter = bar(len(experiment.schedule.job), progress, label=f"{method} seed {seed}")
        try:
            if folder is None:
                return execute(experiment, progress=meter.report)
            target = folder_of(method, seed)
            return run_into(experiment, target, plots=False, overwrite=overwrite, progress=meter.report)
        finally:
            meter.close()

    all_seeds = range(settings.seed, settings.seed + seeds)
    with claimed(folder):
        for method in methods:
            for seed in all_seeds:
                check_run(method, seed)
        runs: dict[str, list[Run]] = {method: [] for method in methods}
        for seed in all_seeds:
            for method in methods:
                runs[method].append(train(method, seed))
    return runs
