"""Runs from Python, in memory or into a folder: ``simulate``, ``compare``, and ``resume`` for an interrupted run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack

import jax

from fedjax_async.base import check, notices
from fedjax_async.config import Experiment, Settings, execute, prepare, sweeping
from fedjax_async.config.concerns import without_effect
from fedjax_async.config.experiment import check_method
from fedjax_async.config.grid import MOST_RUNS
from fedjax_async.config.keywords import OfComparisons, OfRuns, signed
from fedjax_async.config.resolving import resolved, settings_from, settings_in_comparison
from fedjax_async.config.settings import given_in
from fedjax_async.config.sweeping import SweepGroup
from fedjax_async.config.watching import Callback
from fedjax_async.results.begun import as_begun, load_plugins, unfinished
from fedjax_async.results.beside import commanded, labelled
from fedjax_async.results.callbacks import NO_CALLBACKS, Callbacks, as_callbacks, resumed, watch_of
from fedjax_async.results.claim import claimed
from fedjax_async.results.compared import Comparison, folder_name, methods_by_name
from fedjax_async.results.figure import SCREEN, Drawing, require_matplotlib
from fedjax_async.results.progress import ProgressShown, bar, planning_bar, require_progress
from fedjax_async.results.running import OneRun, precision, require_rooms, require_same_settings, run_kept
from fedjax_async.results.runs import write_comparison
from fedjax_async.results.store import CHECKPOINTS, become_comparison, require_comparison
from fedjax_async.types import Run


@signed(OfRuns)
def simulate(
    settings: Settings | None = None,
    *,
    out: str | Path | None = None,
    plots: bool = True,
    drawing: Drawing = SCREEN,
    overwrite: bool = False,
    again: bool = False,
    probes: Mapping[str, object] | None = None,
    progress: ProgressShown = None,
    callbacks: Iterable[Callback] | None = None,
    stream: str | Iterable[str] | None = None,
    keep_best: bool = False,
    **changes: Unpack[OfRuns],
) -> Run:
    """Simulate one asynchronous (or synchronous) federated run.

    Every field of :class:`Settings` is a keyword, and changes ``settings`` where they are given too. Give an object of
    your own instead of the name of a part (``method``, ``model``, ``dataset``, ``partition``, ``delay``, ...). ``data``
    takes ``FederatedData`` that are partitioned already. ``client`` may be a factory ``f(model, *, lr, batch_size,
    ...)``, which gets a model that decodes raw rows (images), or a ``ClientAlgorithm``, which gets the raw rows: build
    it from ``models.decoded(model, data.decode)``. ``probes`` (see ``config.prepare``) return ``Run.probes``.

    Args:
      out: the folder for settings, tables, parameters, schedule and pictures (as ``fedjax-async run --out``). With
        ``checkpoint=N`` the same call, or :func:`resume`, continues a run that was killed. A finished run of the same
        settings and input files is read, not trained again; changed files are refused. Objects need a name:
        ``named("fair", Method(rule))``. In a folder that was begun before a method's defaults changed, the method goes
        on with the earlier ones, and a printed line says so.
      plots: draw the pictures too (needs matplotlib). ``drawing``: their formats, width, title and axis.
      overwrite: replace results of other settings in ``out``.
      again: train a finished run once more; input files may have changed since.
      progress: None shows a bar on a terminal and in a notebook, and elsewhere a line a minute; True always shows the
        bar, False nothing. A function takes its place: ``f(done, total, *, time, staleness, accuracy)`` gets the
        updates done, the virtual seconds, the mean staleness and the last accuracy (NaN if unknown).
      callbacks: functions ``f(evaluation)``, called with each :class:`Evaluation` as soon as it is computed. A function
        that returns ``Stop("why")`` ends the run there. They change no number. If a run is resumed, or is finished and
        read, they get the earlier evaluations once more, with ``evaluation.again`` set; a function that counts must
        start again at ``evaluation.number == 0``.
      stream: ``"csv"``, ``"tensorboard"`` or ``"wandb"``, or several: write each evaluation as soon as it is computed.
      keep_best: keep the best model in ``Run.best`` and ``best.npz``, by validation accuracy where there is a
        validation part, else by test accuracy (by the loss where there are no class labels).

    >>> run = simulate(method="fedbuff", dataset="fashion_mnist_6k", model="logistic", clients=20, updates=20)
    >>> run.counters["updates"]
    20

    Raises: ``ValueError`` naming field, value and range, before anything is compiled.

    Warns (``base.notices.RunWarning``) of uploads that were not used because the run ended within a server step, and
    (``base.notices.AllRejected``) if every upload was rejected.
    """
    settings = settings_from(settings, changes)
    require_progress(progress)
    for name, value in (("plots", plots), ("overwrite", overwrite), ("again", again)):
        check.require(isinstance(value, bool), name, value, "True or False")
    for name, value in (("overwrite", overwrite), ("again", again)):
        check.require(out is not None or not value, name, value, "left out without a folder (out)")
    drawn = out is not None and plots
    check.require(drawn or drawing == SCREEN, "drawing", drawing, "left out without a folder (out) or with plots=False")
    folder = None if out is None else check.path("out", out)
    if folder is not None and plots:
        require_matplotlib("plots=False")
    chosen = NO_CALLBACKS
    with nullcontext() if folder is None else claimed(folder):
        settings = settings if folder is None or overwrite else as_begun(settings, [folder])
        if callbacks is not None or stream is not None or keep_best is not False:
            chosen = as_callbacks(callbacks, stream, keep_best, folder)
        run = run_alone(
            _prepared(settings, probes, progress),
            folder,
            plots=plots,
            overwrite=overwrite,
            again=again,
            progress=progress,
            drawing=drawing,
            callbacks=chosen,
        )
    notices.warn_about({"": run.counters})
    return run


def resume(
    folder: str | Path,
    *,
    plots: bool = True,
    drawing: Drawing = SCREEN,
    probes: Mapping[str, object] | None = None,
    progress: ProgressShown = None,
    callbacks: Iterable[Callback] | None = None,
    **objects: object,
) -> Run:
    """Continue the unfinished run in ``folder`` that was begun with ``checkpoint=N``; it ends with the same files.

    ``objects``: the run's own objects by setting, ``method=Method(rule)``, ``data=...``, because a folder keeps no
    code. Give the same ``probes`` and ``callbacks`` as at the beginning. The names that a plugin registers, the streams
    and ``keep_best`` are restored from the folder. ``progress``: as in :func:`simulate`.

    Raises: ``ValueError`` if there is nothing to continue, or naming an object or plugin with other code, or an input
    file with other content, than at the beginning of the run.
    """
    folder = check.path("folder", folder)
    require_progress(progress)
    if "data" in objects:
        objects["dataset"] = objects.pop("data")
    unfinished(folder, objects)  # before the folder is made: the name may be wrong
    if plots:
        require_matplotlib("plots=False")
    with claimed(folder):
        load_plugins(folder)
        settings = unfinished(folder, objects)
        begun_with = resumed(folder, callbacks)
        with precision(settings):
            run = run_alone(
                _prepared(settings, probes, progress),
                folder,
                plots=plots,
                progress=progress,
                drawing=drawing,
                callbacks=begun_with,
            )
    notices.warn_about({"": run.counters})
    return run


@signed(OfComparisons)
def compare(
    methods: Sequence[object] | Mapping[str, object],
    settings: Settings | None = None,
    *,
    seeds: int = 1,
    out: str | Path | None = None,
    plots: bool = True,
    overwrite: bool = False,
    again: bool = False,
    progress: ProgressShown = None,
    callbacks: Iterable[Callback] | None = None,
    stream: str | Iterable[str] | None = None,
    keep_best: bool = False,
    **changes: Unpack[OfComparisons],
) -> Comparison:
    """Run every method with the seeds ``settings.seed, settings.seed + 1, ...``.

    The partition, the minibatches and the delay of a client's n-th job depend on the seed alone, so they are the same
    for all methods. Before the first run starts, every setting is checked, every schedule is planned, and every folder
    is made and checked. ``out`` is locked until the end.

    Runs that differ only in numbers, such as the seeds of a method, are trained together, as in :func:`sweep`. The runs
    are trained one after the other if ``callbacks`` are given, or one of the settings that belong to a single run:
    ``checkpoint``, ``lanes``, ``devices``, ``memory_limit``.

    Args:
      methods: specs such as ``"fedasync:mixing=0.4"`` or, with a timing of its own,
        ``"fedbuff@buffer:size=5"``; they name the rows. A dict gives them labels, which name rows, curves and folders
        instead: ``{"Ours": "fedasync:mixing=0.4", "FedBuff": Spec(...), "Fair": Method(...)}``. In a list, give a
        ``Method`` of your own a name, ``named("fair", Method(...))``. ``settings.timing`` (``exchange`` for methods
        without a server) applies to methods that have none of their own. Methods with and without a server may be
        compared: a setting that only one kind has applies to that kind, and ``test_fraction`` is 0.2 for all unless
        you set it.
      settings, changes: as in :func:`fedjax_async.simulate`; every other setting is a keyword.
      out: if given, each run is saved under ``out/runs/METHOD/seed_K``, or under its label, as soon as it is finished;
        finished runs of the same settings are read. When all are finished, their tables are written beside them as by
        the command ``compare``, with the defaults of ``results.write_comparison``; ``results.redraw(out, ...)`` writes
        them again with a target, a baseline or other options. If a comparison is killed, the same call continues it; no
        more is trained again than the updates of one run.
      plots: with ``out``, draw the pictures of the comparison too (needs matplotlib).
      again: train finished runs once more; input files may have changed since.
      progress: as in :func:`fedjax_async.simulate`, over the updates of all runs that are trained.
      callbacks, stream, keep_best: as in :func:`fedjax_async.simulate`, for every run; ``evaluation.run`` names it.

    Returns: a dict, method or label -> its runs, one per seed. Raises: ``ValueError`` as ``simulate``, and for methods
    that are equal, or whose folders would have the same name.
    """
    check.require("method" not in changes, "method", changes.get("method"), "left out beside methods")
    check.require(isinstance(plots, bool), "plots", plots, "True or False")
    require_progress(progress)
    common = settings_from(settings, changes)
    folder = None if out is None else check.path("out", out)
    if folder is not None and plots:
        require_matplotlib("plots=False")
    return train_compared(
        methods,
        common,
        seeds=seeds,
        out=folder,
        overwrite=overwrite,
        again=again,
        progress=progress,
        callbacks=as_callbacks(callbacks, stream, keep_best, folder),
        write=partial(write_comparison, plots=plots),
    )


def train_compared(
    methods: Sequence[object] | Mapping[str, object],
    common: Settings,
    *,
    seeds: int,
    out: Path | None,
    overwrite: bool,
    again: bool,
    progress: ProgressShown,
    callbacks: Callbacks,
    write: Callable[[Comparison, Path], object] | None = None,
) -> Comparison:
    """The runs of :func:`compare`; ``write(runs, out)`` writes their tables while the folder ``out`` is locked."""
    meaning = "the number of seeds, from the setting seed on: seed=10, seeds=3 are 10, 11, 12"
    known = isinstance(seeds, Integral) and not isinstance(seeds, bool) and 1 <= seeds <= MOST_RUNS
    check.require(known, "seeds", seeds, f"a whole number from 1 to {MOST_RUNS}, {meaning}")
    by_name = methods_by_name(methods)
    all_seeds = range(common.seed, common.seed + seeds)

    def settings_of(method: str, seed: int) -> Settings:
        return replace(settings_in_comparison(common, by_name[method], list(by_name.values())), seed=seed)

    def folder_of(method: str, seed: int) -> Path | None:
        return None if out is None else out / "runs" / folder_name(method) / f"seed_{seed}"

    for method in by_name:
        check_method(settings_of(method, common.seed))  # finds a wrong name before the first run is planned
    in_turn = bool(callbacks.functions or jax.process_count() > 1 or given_in(common).keys() & without_effect("sweep"))

    with claimed(out):
        if out is not None:
            require_comparison(out, overwrite=overwrite)
        if out is not None and not overwrite:
            for name in by_name:
                others = sorted((out / "runs" / folder_name(name)).glob("seed_*"))
                folders = [*(folder_of(name, seed) for seed in all_seeds), *others]
                by_name[name] = as_begun(settings_of(name, common.seed), folders).method
        in_order = list(itertools.product(all_seeds, by_name))
        runs = [
            OneRun(f"{method} seed {seed}", resolved(settings_of(method, seed)), folder_of(method, seed))
            for seed, method in in_order
        ]
        options: dict[str, Any] = {"overwrite": overwrite, "again": again, "progress": progress}
        options |= {"callbacks": callbacks, "checkpoints": None if out is None else out / CHECKPOINTS}
        require_rooms(runs, overwrite=overwrite, again=again)
        if not overwrite:
            require_same_settings(runs, again=again)
        if out is not None and overwrite:
            become_comparison(out)
        with labelled(out, by_name), commanded(out, anew=overwrite or again):
            found = dict(zip(in_order, run_kept(runs, partial(_planned, in_turn, progress), **options), strict=True))
        by_method = Comparison({method: [found[seed, method] for seed in all_seeds] for method in by_name})
        notices.warn_about(
            {f"{method} seed {seed}": found[seed, method].counters for method in by_name for seed in all_seeds}
        )
        if out is not None and write is not None:
            write(by_method, out)
    return by_method


def _planned(in_turn: bool, progress: ProgressShown, runs: Sequence[OneRun]) -> list[SweepGroup]:
    """Which runs of a comparison are trained together."""
    with planning_bar(len(runs), progress) as part:
        if not in_turn:
            return sweeping.plan_groups([one.settings for one in runs], planning=part)
        return [sweeping.alone(i, prepare(one.settings, planning=part(i))) for i, one in enumerate(runs)]


def _prepared(settings: Settings, probes: Mapping[str, object] | None, progress: ProgressShown) -> Experiment:
    with planning_bar(enabled=progress) as part:
        return prepare(settings, probes=probes, planning=part(0))


def run_alone(
    experiment: Experiment,
    folder: Path | None,
    *,
    plots: bool = False,
    overwrite: bool = False,
    again: bool = False,
    progress: ProgressShown = None,
    drawing: Drawing = SCREEN,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Run:
    """Train one run as its settings say, or read it; in memory without a folder. Options are as in ``run_kept``."""
    if folder is None:
        return _in_memory(experiment, callbacks, progress)
    one = OneRun(str(experiment.settings.method), experiment.settings, folder, experiment)
    with claimed(folder):
        require_rooms([one], overwrite=overwrite, again=again)
        with commanded(folder, anew=overwrite or again):
            return run_kept(
                [one],
                lambda runs: [sweeping.alone(0, experiment)],
                plots=plots,
                overwrite=overwrite,
                again=again,
                progress=progress,
                drawing=drawing,
                callbacks=callbacks,
            )[0]


def _in_memory(experiment: Experiment, callbacks: Callbacks, progress: ProgressShown) -> Run:
    name = str(experiment.settings.method)
    watch = None if callbacks == NO_CALLBACKS else watch_of(callbacks, experiment, None, name)
    meter = bar(experiment.total, progress, label=name)
    try:
        return execute(experiment, progress=meter.report, watch=watch)
    finally:
        meter.close()
        if watch is not None:
            watch.close()
