"""Sweeps: many runs from one description, trained together, each saved as soon as it is finished."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

from fedjax_async.base import check, notices
from fedjax_async.config import sweeping
from fedjax_async.config.grid import GridPoint, expand, swept, with_changes
from fedjax_async.config.keywords import OfSweeps, signed
from fedjax_async.config.own import ABSENT, Named
from fedjax_async.config.resolving import resolved as resolved_settings
from fedjax_async.config.roles import roles_of
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.config.sweeping import SweepGroup
from fedjax_async.config.watching import Callback
from fedjax_async.results import provenance, store, streams, sweep_folder
from fedjax_async.results.callbacks import NO_CALLBACKS, Callbacks, as_callbacks, is_covered_in, stream_again
from fedjax_async.results.claim import claimed
from fedjax_async.results.progress import ProgressShown, planning_bar, require_progress
from fedjax_async.results.running import OneRun, precision, run
from fedjax_async.results.store import CHECKPOINTS, is_finished
from fedjax_async.types import Run


class Sweep(NamedTuple):
    """Finished runs in the order of ``points``: kept in memory, or read from the folder one at a time."""

    points: tuple[GridPoint, ...]
    folder: Path | None
    kept: tuple[Run, ...] = ()
    roles: Mapping[str, str] = {}  # path -> role, where it is not the default; see ``config/roles.py``

    def __repr__(self) -> str:
        """One line: the number of runs, what they differ in, and the folder."""
        where = "" if self.folder is None else f", in {self.folder}"
        return f"<Sweep: {len(self.points)} runs of {', '.join(swept(self.points)) or 'one setting'}{where}>"

    @property
    def settings(self) -> list[Settings]:
        """The settings of each run."""
        return [point.settings for point in self.points]

    @property
    def values(self) -> list[dict[str, object]]:
        """The values that the sweep sets in each run: path -> value."""
        return [point.values for point in self.points]

    @property
    def runs(self) -> Iterator[Run]:
        """An iterator over the runs, each loaded when it is needed; every access gives a new iterator."""
        return (self.run(index) for index in range(len(self.points)))

    @property
    def counters(self) -> dict[str, dict[str, object]]:
        """Name of a run -> its counters."""
        names = [point.name for point in self.points]
        if self.folder is None:
            return {name: run.counters for name, run in zip(names, self.kept, strict=True)}
        return {point.name: sweep_folder.saved_counters(self.folder, point) for point in self.points}

    def run(self, index: int) -> Run:
        """The run of ``points[index]``."""
        return self.kept[index] if self.folder is None else sweep_folder.load_run(self.folder, self.points[index])


class SweepWork(NamedTuple):
    """The runs of a sweep that are left to train. Runs are given by their index into ``points``."""

    points: tuple[GridPoint, ...]
    finished: frozenset[int]
    groups: tuple[SweepGroup, ...]  # the stacks with a run that is left to train
    probes: Mapping[str, object] | None = None  # evaluated in every run
    callbacks: Callbacks = NO_CALLBACKS  # get the evaluations of every run
    roles: Mapping[str, str] = {}  # as in :class:`Sweep`

    @property
    def updates(self) -> int:
        """The number of updates that will be trained."""
        return sum(group.updates for group in self.groups)


def resolved(points: Iterable[GridPoint]) -> list[GridPoint]:
    """The points with the settings of their runs: defaults that depend on the data set are filled in."""
    return [point._replace(settings=resolved_settings(point.settings)) for point in points]


def plan_sweep(
    points: Sequence[GridPoint],
    *,
    folder: str | Path | None = None,
    memory_limit: int | None = None,
    lanes: int | None = None,
    probes: Mapping[str, object] | None = None,
    progress: ProgressShown = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> SweepWork:
    """Find which runs are finished, and group the others; writes nothing.

    Finished runs are planned too, so that a continued sweep has the same stacks as before, and therefore the same
    results bit for bit. If only some runs of a stack are saved, the whole stack is trained again. ``progress``: as in
    :func:`sweep`.

    Raises: ``ValueError`` if the settings of any run cannot be used.
    """
    check.require(len(points) > 0, "points", points, "at least one run")
    for name, value in (("memory_limit", memory_limit), ("lanes", lanes)):
        if value is not None:
            check.whole(name, value)
    with precision(*(point.settings for point in points)), planning_bar(len(points), progress) as part:
        groups = sweeping.plan_groups(
            [point.settings for point in points], memory_limit=memory_limit, lanes=lanes, probes=probes, planning=part
        )
    if folder is None:
        return SweepWork(tuple(points), frozenset(), tuple(groups), probes, callbacks)
    folder = check.path("folder", folder)
    finished = _finished(points, folder, callbacks)
    with precision(*(point.settings for point in points)):  # as the runs were computed
        _remark(points, finished, folder)
    left = (group.left(finished) for group in groups)
    return SweepWork(tuple(points), finished, tuple(group for group in left if group.stacks), probes, callbacks)


def _finished(points: Sequence[GridPoint], folder: Path, callbacks: Callbacks | None = None) -> frozenset[int]:
    """The indices of the points with a finished run in ``folder`` that ``callbacks``, if given, would not change."""

    def whole(point: GridPoint) -> bool:
        run_folder = sweep_folder.run_folder(folder, point)
        if not is_finished(run_folder, as_dict(point.settings)):
            return False
        return callbacks is None or is_covered_in(run_folder, callbacks, point.name)

    return frozenset(index for index, point in enumerate(points) if whole(point))


def _remark(points: Sequence[GridPoint], finished: frozenset[int], folder: Path) -> None:
    """``ValueError`` for a finished run of other JAX settings; one warning for each remark about finished runs."""
    found: dict[str, None] = {}
    for index in sorted(finished):
        run_folder = sweep_folder.run_folder(folder, points[index])
        provenance.has_numbers(run_folder)
        found |= dict.fromkeys(provenance.remarks(run_folder, as_dict(points[index].settings)))
    for text in found:
        warnings.warn(f"{folder}: its finished runs are read; {text}", notices.RunWarning, stacklevel=3)


def run_work(work: SweepWork, *, folder: str | Path | None = None, progress: ProgressShown = None) -> Sweep:
    """Train what is left, in memory or into ``folder``, which must be the folder given to :func:`plan_sweep`.

    The folder is locked meanwhile; ``ValueError`` as in :func:`claimed`.
    """
    if folder is None:
        kept = train(work, None, progress=progress)
        return Sweep(work.points, None, tuple(kept[index] for index in range(len(work.points))), work.roles)
    folder = check.path("folder", folder)
    with claimed(folder):
        begin_streams(folder, work)
        sweep_folder.begin(folder, work.points, work.probes, work.roles)
        train(work, folder, progress=progress)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return Sweep(work.points, folder, roles=work.roles)


def begin_streams(folder: Path, work: SweepWork) -> None:
    """Remove what other runs streamed into the folders of this sweep; stream finished runs that were not streamed yet.

    Call it before ``sweep_folder.begin``: a folder without the definition of this sweep holds other runs.
    """
    known = sweep_folder.is_defined(folder, work.points, work.probes)
    for index, point in enumerate(work.points):
        run_folder = sweep_folder.run_folder(folder, point)
        if index in work.finished:
            if work.callbacks.streams:
                stream_again(store.load(run_folder), work.callbacks, run_folder, point.name)
        elif not known or (run_folder / store.MANIFEST).is_file():  # a run of other settings or callbacks
            streams.clear(run_folder)


def train(work: SweepWork, folder: Path | None, *, progress: ProgressShown = None) -> dict[int, Run]:
    """Train the runs that are left: each is written into the sweep's folder as soon as it is finished.

    Without a folder they are returned, by their index.
    """
    kept: dict[int, Run] = {}
    folders = [None if folder is None else sweep_folder.run_folder(folder, point) for point in work.points]
    runs = [OneRun(point.name, point.settings, one) for point, one in zip(work.points, folders, strict=True)]

    def save(index: int, run: Run) -> None:
        if folder is None:
            kept[index] = run
        else:
            sweep_folder.save_run(run, folder, work.points[index])

    with precision(*(point.settings for point in work.points)):
        run(
            runs,
            work.groups,
            on_finished=save,
            checkpoints=None if folder is None else folder / CHECKPOINTS,
            probes=work.probes,
            finished=work.finished,
            callbacks=work.callbacks,
            progress=progress,
        )
    return kept


@signed(OfSweeps)
def sweep(
    base: Settings | Mapping[str, object] | None = None,
    grid: Mapping[str, object] | None = None,
    *,
    points: Iterable[Mapping[str, object]] | None = None,
    seeds: int | Iterable[int] | None = None,
    out: str | Path | None = None,
    memory_limit: int | None = None,
    lanes: int | None = None,
    progress: ProgressShown = None,
    overwrite: bool = False,
    probes: Mapping[str, object] | None = None,
    roles: Mapping[str, str] | None = None,
    callbacks: Iterable[Callback] | None = None,
    stream: str | Iterable[str] | None = None,
    keep_best: bool = False,
    **changes: Unpack[OfSweeps],
) -> Sweep:
    """Run every combination of a grid; runs that differ only in numbers are trained together.

    Every setting is checked and every schedule planned before the first run starts. Each result equals that of the
    same settings run alone, to rounding.

    Args:
      base, grid, points, seeds: see :func:`fedjax_async.config.grid.expand`. Every setting of a run is a keyword too,
        and changes ``base``.
      out: if given, each run is saved under ``out/runs/NAME`` as soon as it is finished. A sweep that was
        interrupted or killed continues when it is started again. Tables and pictures are written by
        ``results.write_sweep(found)``. ``ValueError``, before anything is compiled, for a folder that holds another
        sweep, cannot be written or is in use.
      memory_limit: bytes of device memory that may be in use (default: depends on the device).
      lanes: see ``Settings.lanes``.
      progress: as in :func:`fedjax_async.simulate`, over the updates of all runs together.
      overwrite: replace another sweep in ``out``; finished runs of the same settings are kept.
      probes: evaluated in every run, as in :func:`fedjax_async.simulate`. A folder of the same sweep with other
        probes is refused.
      roles: swept path -> ``tuned``, ``compared`` or ``world``, to replace the default role. By default method and
        timing are compared; learning rate, batch size and options of the method are tuned; data, delays and budgets
        are worlds. The best tuned values are chosen on the validation part (``validation_fraction``), for each compared
        value in each world; see :func:`fedjax_async.results.choose`.
      callbacks, stream, keep_best: as in :func:`fedjax_async.simulate`, for every run; ``evaluation.run`` is its name.
        Runs that are trained together stop one by one; what the device trains of a stopped run is discarded.

    Returns: the finished runs; with a folder, each is read from it when it is needed.

    >>> found = sweep(grid={"method.mixing": [0.4, 0.8]}, model="logistic", clients=4, steps=1, updates=8)
    >>> [point.name for point in found.points], [run.counters["updates"] for run in found.runs]
    (['mixing=0.4', 'mixing=0.8'], [8, 8])
    """
    out = None if out is None else check.path("out", out)
    callbacks_of_runs = as_callbacks(callbacks, stream, keep_best, out)
    check.require(probes is None or isinstance(probes, Mapping), "probes", probes, "a dict of names and probes")
    require_progress(progress)
    with claimed(out):
        expanded = resolved(expand(with_changes(base, changes), grid, points=points, seeds=seeds))
        roles_of(swept(expanded), roles)  # refuses roles that do not exist
        if out is not None:
            expanded = expanded if overwrite else sweep_folder.as_begun(expanded, out)
            sweep_folder.require_room(out, expanded, probes, overwrite=overwrite)
        work = plan_sweep(
            expanded,
            folder=out,
            probes=probes,
            callbacks=callbacks_of_runs,
            memory_limit=memory_limit,
            lanes=lanes,
            progress=progress,
        )
        found = run_work(work._replace(roles={**(roles or {})}), folder=out, progress=progress)
    notices.warn_about(found.counters)
    return found


def collect(folder: str | Path) -> tuple[Sweep, tuple[GridPoint, ...]]:
    """The finished runs of the sweep in ``folder``, and the points of the missing ones."""
    folder = check.path("folder", folder)
    points = sweep_folder.read_definition(folder)
    _warn_of_unknown_methods(folder, points)
    finished = _finished(points, folder)
    missing = tuple(point for index, point in enumerate(points) if index not in finished)
    kept = tuple(points[index] for index in sorted(finished))
    return Sweep(kept, folder, roles=sweep_folder.read_roles(folder, points)), missing


def _warn_of_unknown_methods(folder: Path, points: Sequence[GridPoint]) -> None:
    """Warn of swept methods that are not known here: their texts are not split into a method and its swept options."""
    paths = swept(points)
    if "method" not in paths or not any(path.startswith("method.") for path in paths):
        return
    methods = [point.settings.method for point in points]
    unknown = list(dict.fromkeys(str(one) for one in methods if isinstance(one, Named) and one.thing is ABSENT))
    if unknown:
        shown = ", ".join(unknown[:3]) + ", ..." * (len(unknown) > 3)
        warnings.warn(
            f"{folder}: {shown}: unknown here, so that each text counts as a method of its own and its options are not "
            "tuned (load the plugin: --plugin FILE.py; in Python, run the file first)",
            notices.RunWarning,
            stacklevel=3,
        )
