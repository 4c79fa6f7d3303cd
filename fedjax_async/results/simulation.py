"""One run from Python: ``simulate``, in memory or into a folder; ``resume`` continues the run in a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Unpack

import jax

from fedjax_async import check, notices
from fedjax_async.config import Experiment, Settings, execute, prepare
from fedjax_async.config.keywords import OfRuns, signed
from fedjax_async.config.resolving import settings_from
from fedjax_async.config.watching import Callback
from fedjax_async.engine.record import Progress
from fedjax_async.results.begun import as_begun, load_plugins, unfinished
from fedjax_async.results.callbacks import chosen, resumed, watch_of
from fedjax_async.results.claim import claimed
from fedjax_async.results.figure import require_matplotlib
from fedjax_async.results.progress import ProgressShown, bar, planning_bar, require_progress
from fedjax_async.results.runs import run_into
from fedjax_async.types import Run


@signed(OfRuns)
def simulate(
    settings: Settings | None = None,
    *,
    out: str | Path | None = None,
    plots: bool = True,
    overwrite: bool = False,
    again: bool = False,
    probes: Mapping[str, Any] | None = None,
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
      plots: draw the pictures too (needs matplotlib).
      overwrite: replace results of other settings in ``out``.
      again: train a finished run once more; input files may have changed since.
      progress: None shows a bar on a terminal only, True always, False never. A function takes its place:
        ``f(done, total, *, time, staleness, accuracy)`` gets the updates done, the virtual seconds, the mean staleness
        and the last accuracy (NaN if unknown).
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

    Warns (``notices.RunWarning``) of uploads that were not used because the run ended within a server step, and
    (``notices.AllRejected``) if every upload was rejected.
    """
    settings = settings_from(settings, changes)
    require_progress(progress)
    for name, value in (("plots", plots), ("overwrite", overwrite), ("again", again)):
        check.require(isinstance(value, bool), name, value, "True or False")
    if out is None:
        for name, value in (("overwrite", overwrite), ("again", again)):
            check.require(not value, name, value, "left out without a folder (out)")
        watching = chosen(callbacks, stream, keep_best, None)
        experiment = _prepared(settings, probes, progress)
        watch = watch_of(watching, experiment, None)
        try:
            with shown(experiment, progress) as report:
                run = execute(experiment, progress=report, watch=watch)
        finally:
            watch.close()
        notices.warn_about({"": run.counters})
        return run
    folder = check.path("out", out)
    if plots:
        require_matplotlib("plots=False")
    with claimed(folder):
        settings = settings if overwrite else as_begun(settings, [folder])
        options: dict[str, Any] = {"plots": plots, "overwrite": overwrite, "again": again}
        options["callbacks"] = chosen(callbacks, stream, keep_best, folder)
        experiment = _prepared(settings, probes, progress)
        with shown(experiment, progress) as report:
            run = run_into(experiment, folder, progress=report, **options)
    notices.warn_about({"": run.counters})
    return run


def resume(
    folder: str | Path,
    *,
    plots: bool = True,
    probes: Mapping[str, Any] | None = None,
    progress: ProgressShown = None,
    callbacks: Iterable[Callback] | None = None,
    **objects: Any,
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
        options: dict[str, Any] = {"plots": plots, "callbacks": resumed(folder, callbacks)}
        with precision(settings):
            experiment = _prepared(settings, probes, progress)
            with shown(experiment, progress) as report:
                run = run_into(experiment, folder, progress=report, **options)
    notices.warn_about({"": run.counters})
    return run


def _prepared(settings: Settings, probes: Mapping[str, Any] | None, progress: ProgressShown) -> Experiment:
    with planning_bar(enabled=progress) as part:
        return prepare(settings, probes=probes, planning=part(0))


@contextmanager
def shown(experiment: Experiment, progress: ProgressShown) -> Iterator[Progress]:
    """Yields what the engine reports its progress to: a bar, or a function of the user's own."""
    meter = bar(experiment.total, progress, label=str(experiment.settings.method))
    try:
        yield meter.report
    finally:
        meter.close()


def precision(settings: Settings) -> AbstractContextManager[Any]:
    """JAX's 64-bit mode if the run computes in float64."""
    return jax.enable_x64(True) if settings.compute == "float64" else nullcontext()
