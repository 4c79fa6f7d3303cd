"""Runs in folders: write one run or several, continue an interrupted run, run several methods and seeds."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedjax_async import check, disk, notices
from fedjax_async.config import Experiment, Settings, execute, prepare
from fedjax_async.config.experiment import check_method
from fedjax_async.config.grid import MOST_RUNS
from fedjax_async.config.keywords import OfComparisons, signed
from fedjax_async.config.resolving import settings_from, settings_in_comparison
from fedjax_async.config.settings import as_dict, require_named
from fedjax_async.config.watching import Callback
from fedjax_async.engine.record import Progress
from fedjax_async.results import callbacks as looking
from fedjax_async.results import clients, comparisons, files, metrics, provenance, store, streams, tables
from fedjax_async.results.begun import as_begun, save_plugins
from fedjax_async.results.callbacks import NO_CALLBACKS, Callbacks
from fedjax_async.results.claim import claimed
from fedjax_async.results.compared import folder_name, method_in, methods_by_name
from fedjax_async.results.curves import accuracy_curve, loss_curve, measured_curve
from fedjax_async.results.figure import SCREEN, Drawing, save_formats
from fedjax_async.results.measured import curve_columns
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.peer_gantt import age_histogram, peer_gantt
from fedjax_async.results.plots import gantt, staleness_histogram
from fedjax_async.results.progress import ProgressShown, bar, in_turn, planning_bar, require_progress
from fedjax_async.results.store import CHECKPOINTS, is_finished, load, require_comparison, require_room
from fedjax_async.types import Run

# --- tables and pictures ------------------------------------------------------------------------------


def write_run(
    run: Run, folder: str | Path, plots: bool = True, *, overwrite: bool = False, drawing: Drawing = SCREEN
) -> Path:
    """Save ``run`` into ``folder`` (see :func:`fedjax_async.results.store.save`), with pictures; returns the folder.

    Pictures: ``accuracy.png`` against virtual time (``loss.png`` for targets without classes); if any upload arrived,
    ``staleness.png`` and ``gantt.png``; a curve of the training loss and of each metric. With scores of single clients
    also ``clients.png``, the curve of their worst tenth, and the tables ``clients.csv`` and ``clients.md``. ``drawing``
    chooses other formats, a width and a title. The data are written first, so they are saved even if matplotlib is
    missing; ``ValueError`` then names the extra to install.
    """
    folder = store.save(run, folder, overwrite=overwrite)
    clients.write_clients_of_run(run, folder)
    if plots:
        _draw_run(run, folder, drawing)
    return folder


def _draw_run(run: Run, folder: Path, drawing: Drawing) -> None:
    name = str(run.settings.get("method", "run"))
    _draw_curve({name: [run]}, folder, FINAL, drawing)
    if not run.has_server:
        if len(run.schedule.source):
            save_formats(age_histogram(run.schedule, drawing), folder / "staleness", drawing)
        save_formats(peer_gantt(run.schedule, drawing=drawing), folder / "gantt", drawing)
    elif len(run.updates["staleness"]):
        save_formats(staleness_histogram(run, drawing), folder / "staleness", drawing)
        save_formats(gantt(run.schedule, used=run.updates.get("used"), drawing=drawing), folder / "gantt", drawing)


def _is_drawn(run: Run, folder: Path, drawing: Drawing) -> bool:
    """Whether the pictures exist; with any but the default ``drawing``, they are always drawn again."""
    curve = any((folder / name).exists() for name in ("accuracy.png", "loss.png"))
    mixing = run.has_server or len(run.schedule.source) > 0
    others = (*(("staleness.png",) if mixing else ()), "gantt.png") if len(run.updates["staleness"]) else ()
    return drawing == SCREEN and curve and all((folder / name).exists() for name in others)


def _draw_curve(runs: Mapping[str, Sequence[Run]], folder: Path, final: str, drawing: Drawing) -> None:
    """Accuracy, or the loss if no run has class labels; then the other measured columns, and the clients."""
    labelled = any(not np.isnan(run.evaluations["accuracy"]).all() for seeds in runs.values() for run in seeds)
    draw, name = (accuracy_curve, "accuracy") if labelled else (loss_curve, "loss")
    save_formats(draw(runs, final=final, drawing=drawing), folder / name, drawing)
    for column, having in curve_columns(runs, name).items():
        some = {each: runs[each] for each in having}
        save_formats(measured_curve(some, column, final=final, drawing=drawing), folder / column, drawing)
    clients.draw_clients(runs, folder, drawing)


def write_comparison(
    runs: Mapping[str, Sequence[Run]],
    folder: str | Path,
    plots: bool = True,
    *,
    baseline: str | None = None,
    target: str | float = metrics.TARGET,
    final: str = FINAL,
    interval: str = "t",
    drawing: Drawing = SCREEN,
) -> str:
    """Compare methods: ``comparison.csv``, ``comparison.md`` and ``accuracy.png`` in ``folder``.

    Other measured columns have their final values in the tables, and a curve each. With scores of single clients there
    are ``clients.csv``, ``clients.md`` and ``clients.png`` too.

    ``runs`` maps each method to its runs, one per seed, with the seeds in the same order. ``baseline``, ``target``,
    ``final`` and ``interval``: as in :func:`fedjax_async.results.comparisons.comparison`. The CSV also has the target
    and all three final values. From three seeds on, ``pairs.csv`` and ``pairs.md`` have paired tests of the final
    value between the methods. Returns the tables as text, with the target above the first one.

    Raises: ``ValueError`` if ``folder`` is a file, or for another wrong argument.
    """
    folder = check.path("folder", folder)
    check.require(folder.is_dir() or not folder.exists(), "folder", str(folder), "a folder, but it is a file")
    rows = comparisons.comparison(runs, baseline, target, final, interval)
    extended = comparisons.comparison(runs, baseline, target, final, interval, further=True)
    decimals = tables.decimals_of(rows)
    tables.write(extended, folder / "comparison.csv")
    header = ""
    if "target (%)" in extended[0]:
        header = f"target: {tables.cell(extended[0]['target (%)'])} % ({_described(target, runs)})\n\n"
    disk.write(folder / "comparison.md", (header + tables.table(rows, "markdown", decimals=decimals)).encode())
    title = next(name for name in rows[0] if name != "method")
    tested = comparisons.write_pairs(comparisons.method_pairs(runs, final, interval), folder, title)
    unequal = clients.write_client_tables(runs, folder, final)
    if plots:
        _draw_curve(runs, folder, final, drawing)
    disk.sweep_up(folder)
    return "\n".join(filter(None, [header + tables.table(rows, decimals=decimals), unequal, tested]))


def _described(target: str | float, methods: Collection[str]) -> str:
    if (method := method_in(target, methods)) is not None:
        return f"the final accuracy of {method}"
    share = str(target).removesuffix("%")
    lowest = f"{share} % of the lowest final accuracy among these methods; with others it may differ, --target fixes it"
    return "as asked for" if share == str(target) else lowest


# --- one run that can be continued --------------------------------------------------------------------


def run_into(
    experiment: Experiment,
    folder: Path,
    *,
    plots: bool = True,
    overwrite: bool = False,
    again: bool = False,
    progress: Progress | None = None,
    drawing: Drawing = SCREEN,
    callbacks: Callbacks = NO_CALLBACKS,
    name: str | None = None,
) -> Run:
    """Run an experiment and save it in ``folder``; if it was killed before, continue from its last checkpoint.

    Checkpoints (``settings.checkpoint``) are kept in ``folder/checkpoints`` until the results are complete. The
    folder is locked meanwhile. A finished run of the same settings is read, and one printed line says so. It is
    trained again in three cases: ``again`` is set, there are probes, or ``callbacks`` would have stopped it elsewhere
    or keep a best model that it lacks. ``callbacks`` get the evaluations of the run under the name ``name``.

    Raises: ``ValueError`` as in :func:`claimed` and :func:`require_room`, before anything is compiled, for objects
    without a name, and for checkpoints of other settings.
    """
    require_named(experiment.settings)
    settings = as_dict(experiment.settings)
    with claimed(folder):
        folder = require_room(folder, settings, overwrite=overwrite, again=again)
        checkpoints = folder / CHECKPOINTS
        shown = str(experiment.settings.method) if name is None else name
        readable = not again and not experiment.probes and is_finished(folder, settings)
        readable = readable and provenance.has_numbers(folder, overwrite=overwrite)
        if readable and looking.is_covered(run := load(folder), callbacks, shown):
            advice = "--again, in Python again=True, trains it once more"
            remarks = "".join(f"; {each}" for each in provenance.remarks(folder, settings))
            print(f"{folder}: this run is finished already and was read ({advice}){remarks}")
            looking.stream_again(run, callbacks, folder, shown)
            if plots and not _is_drawn(run, folder, drawing):  # killed before all were drawn, or saved without
                _draw_run(run, folder, drawing)
            disk.sweep_up(folder)
            shutil.rmtree(checkpoints, ignore_errors=True)
            return run
        known = [_holds(path / "settings.json", settings) for path in (checkpoints, folder)]
        if (overwrite or again) and not known[0]:
            shutil.rmtree(checkpoints, ignore_errors=True)
        if not known[0] and (again or readable or not known[1]):
            streams.clear(folder)
        if experiment.settings.checkpoint is not None or callbacks.streams:
            checkpoints.mkdir(parents=True, exist_ok=True)
            disk.write(checkpoints / "settings.json", files.json_bytes(settings))
            save_plugins(checkpoints)
            looking.save(callbacks, checkpoints)
        watch = looking.watch_of(callbacks, experiment, folder, shown)
        try:
            run = execute(experiment, progress=progress, checkpoints=checkpoints, watch=watch)
        finally:
            watch.close()
        write_run(run, folder, plots=plots, overwrite=overwrite or again, drawing=drawing)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return run


def _holds(path: Path, settings: dict[str, object]) -> bool:
    return path.is_file() and not store.differing(path.read_bytes(), settings)


# --- several methods ----------------------------------------------------------------------------------


def _train_one(
    settings: Settings,
    name: str,
    folder: Path | None,
    callbacks: Callbacks,
    progress: ProgressShown,
    *,
    overwrite: bool,
    again: bool,
) -> Run:
    """One run of a comparison, with progress bars; saved in ``folder`` unless it is None."""
    with planning_bar(1, progress) as part:
        experiment = prepare(settings, planning=part(0))
    meter = bar(experiment.total, progress, label=name)
    watch = looking.watch_of(callbacks, experiment, None, name) if folder is None else None
    try:
        if folder is None:
            return execute(experiment, progress=meter.report, watch=watch)
        options: dict[str, Any] = {"overwrite": overwrite, "again": again, "progress": meter.report}
        return run_into(experiment, folder, plots=False, callbacks=callbacks, name=name, **options)
    finally:
        meter.close()
        if watch is not None:
            watch.close()


def _check_one(
    settings: Settings, folder: Path | None, planning: Callable[[float], None], *, overwrite: bool, again: bool
) -> int:
    """Plan one run of a comparison; make and check its folder unless it is None. Returns its number of updates."""
    with claimed(folder):
        experiment = prepare(settings, planning=planning)
        if folder is not None:
            require_named(experiment.settings)
            described = as_dict(experiment.settings)
            require_room(folder, described, overwrite=overwrite, again=again)
            if not again and is_finished(folder, described):
                provenance.has_numbers(folder, overwrite=overwrite)
    return experiment.total


@signed(OfComparisons)
def compare(
    methods: Sequence[Any] | Mapping[str, Any],
    settings: Settings | None = None,
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    overwrite: bool = False,
    again: bool = False,
    progress: ProgressShown = None,
    callbacks: Iterable[Callback] | None = None,
    stream: str | Iterable[str] | None = None,
    keep_best: bool = False,
    **changes: Unpack[OfComparisons],
) -> dict[str, list[Run]]:
    """Run every method with the seeds ``settings.seed, settings.seed + 1, ...``.

    The partition, the minibatches and the delay of a client's n-th job depend on the seed alone, so they are the same
    for all methods. Before the first run starts, every setting is checked, every schedule is planned, and every folder
    is made and checked. ``out`` is locked until the end.

    Args:
      methods: specs such as ``"fedasync:mixing=0.4"`` or, with a timing of its own,
        ``"fedbuff@buffer:size=5"``; they name the rows. Give a ``Method`` of your own a name, by ``named("fair", ...)``
        or by a dict, ``{"fair": Method(...)}``. ``settings.timing`` (``exchange`` for methods without a server) applies
        to methods that have none of their own. Methods with and without a server may be compared: a setting that only
        one kind has applies to that kind, and ``test_fraction`` is 0.2 for all unless you set it.
      settings, changes: as in :func:`fedjax_async.simulate`; every other setting is a keyword.
      out: if given, each run is saved under ``out/runs/METHOD/seed_K`` as soon as it is finished; finished runs
        of the same settings are read.
      again: train finished runs once more; input files may have changed since.
      progress: as in :func:`fedjax_async.simulate`: a bar for each run, or a function, which gets the updates done by
        all runs together.
      callbacks, stream, keep_best: as in :func:`fedjax_async.simulate`, for every run; ``evaluation.run`` names it.

    Returns: method -> its runs, one per seed. Raises: ``ValueError`` as ``simulate``, and for methods that are equal.
    """
    check.whole("seeds", seeds, high=MOST_RUNS)
    check.require("method" not in changes, "method", changes.get("method"), "left out beside methods")
    require_progress(progress)
    common = settings_from(settings, changes)
    out = None if out is None else check.path("out", out)
    looking_on = looking.chosen(callbacks, stream, keep_best, out)
    by_name = methods_by_name(methods)
    names = list(by_name)

    def settings_of(method: str, seed: int) -> Settings:
        return replace(settings_in_comparison(common, by_name[method], list(by_name.values())), seed=seed)

    for method in names:
        check_method(settings_of(method, common.seed))  # finds a wrong name before the first run is planned

    def folder_of(method: str, seed: int) -> Path | None:
        return None if out is None else out / "runs" / folder_name(method) / f"seed_{seed}"

    def train(method: str, seed: int, progress: ProgressShown) -> Run:
        given, name, options = settings_of(method, seed), f"{method} seed {seed}", {"overwrite": overwrite}
        return _train_one(given, name, folder_of(method, seed), looking_on, progress, again=again, **options)

    all_seeds = range(common.seed, common.seed + seeds)
    in_order = list(itertools.product(all_seeds, names))
    with claimed(out):
        if out is not None:
            require_comparison(out, overwrite=overwrite)
        if out is not None and not overwrite:
            for name in names:
                begun = as_begun(settings_of(name, common.seed), [folder_of(name, seed) for seed in all_seeds])
                by_name[name] = begun.method
        totals = []
        with planning_bar(len(in_order), progress) as part:
            for index, (seed, method) in enumerate(in_order):
                given, options = settings_of(method, seed), {"overwrite": overwrite, "again": again}
                totals.append(_check_one(given, folder_of(method, seed), part(index), **options))
        progress_of = in_turn(progress, totals)
        runs: dict[str, list[Run]] = {method: [] for method in names}
        for index, (seed, method) in enumerate(in_order):
            runs[method].append(train(method, seed, progress_of(index)))
    notices.warn_about(
        {f"{method} seed {seed}": run.counters for method in names for seed, run in zip(all_seeds, runs[method])}
    )
    return runs
