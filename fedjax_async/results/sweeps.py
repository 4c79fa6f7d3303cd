"""Sweeps: many runs from one description, trained side by side, each saved as soon as it is finished."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_async import check
from fedjax_async.config import sweeping
from fedjax_async.config.experiment import resolved as resolved_settings
from fedjax_async.config.grid import Point, expand
from fedjax_async.config.settings import Settings
from fedjax_async.config.sweeping import Group
from fedjax_async.results import sweep_folder
from fedjax_async.results.claim import claimed
from fedjax_async.results.progress import bar
from fedjax_async.types import Run

CHECKPOINTS = "checkpoints"  # of stacks under way, inside the sweep's folder


class Sweep(NamedTuple):
    """Finished runs, in the order of ``points``: in memory, or read from their folder one at a time."""

    points: tuple[Point, ...]
    folder: Path | None
    kept: tuple[Run, ...] = ()

    @property
    def settings(self) -> list[Settings]:
        """The settings of each run."""
        return [point.settings for point in self.points]

    @property
    def values(self) -> list[dict[str, Any]]:
        """What the sweep set in each run, by path."""
        return [point.values for point in self.points]

    @property
    def runs(self) -> Iterator[Run]:
        """The runs, loaded as they are asked for; an iterator that starts afresh with every use."""
        return (self.run(index) for index in range(len(self.points)))

    def run(self, index: int) -> Run:
        """One run by its place among the points."""
        return self.kept[index] if self.folder is None else sweep_folder.load_run(self.folder, self.points[index])


class Work(NamedTuple):
    """What is left of a sweep, and how it will be done."""

    points: tuple[Point, ...]
    finished: frozenset[int]  # places among the points
    groups: tuple[Group, ...]  # the stacks with something left to train; members are places among the points
    probes: Mapping[str, Any] | None = None  # of every run

    @property
    def updates(self) -> int:
        """Of everything that will be trained."""
        return sum(group.updates for group in self.groups)


def resolved(points: Iterable[Point]) -> list[Point]:
    """The points with the settings that their runs will have: what follows from the data set filled in."""
    return [point._replace(settings=resolved_settings(point.settings)) for point in points]


def precision(points: Sequence[Point]) -> AbstractContextManager[Any]:
    """JAX's 64-bit mode for a sweep in float64; ``ValueError`` where only a part of it is."""
    wide = [point.settings.compute == "float64" for point in points]
    check.require(all(wide) or not any(wide), "compute", "float64", "that of all runs of a sweep or of none")
    return jax.enable_x64(True) if any(wide) else nullcontext()


def plan_sweep(
    points: Sequence[Point],
    *,
    folder: str | Path | None = None,
    memory_limit: int | None = None,
    lanes: int | None = None,
    probes: Mapping[str, Any] | None = None,
) -> Work:
    """Look at everything, change nothing: which runs are finished, and how the others are grouped.

    Finished runs are planned too: so the stacks of a sweep that goes on are those it began with, and its
    results the same bit for bit. A stack that was interrupted between two writes is trained as a whole.

    Raises: ``ValueError`` if the settings of any run cannot be used.
    """
    check.require(len(points) > 0, "points", points, "at least one run")
    for name, value in (("memory_limit", memory_limit), ("lanes", lanes)):
        if value is not None:
            check.whole(name, value)
    with precision(points):
        settings = [point.settings for point in points]
        groups = sweeping.plan_groups(settings, memory_limit=memory_limit, lanes=lanes, probes=probes)
    if folder is None:
        return Work(tuple(points), frozenset(), tuple(groups), probes)
    home = Path(folder)
    done = [sweep_folder.is_finished(sweep_folder.run_folder(home, point), point.settings) for point in points]
    finished = frozenset(place for place, yes in enumerate(done) if yes)
    left = (_left(group, finished, points, home) for group in groups)
    return Work(tuple(points), finished, tuple(group for group in left if group.stacks), probes)


def _left(group: Group, finished: frozenset[int], points: Sequence[Point], folder: Path) -> Group:
    """The group without the stacks whose runs are all finished."""
    stacks = tuple(stack for stack in group.stacks if not finished.issuperset(stack))
    kept = {place for stack in stacks for place in stack}
    members = tuple(place for place in group.members if place in kept)
    gone = sum(sweep_folder.saved_updates(folder, points[place]) for place in group.members if place not in kept)
    return group._replace(members=members, stacks=stacks, updates=group.updates - gone)


def train(
    work: Work,
    *,
    on_finished: Callable[[int, Run], None],
    folder: Path | None = None,
    progress: bool | None = None,
) -> None:
    """Train what is left, group after group; ``on_finished(place among the points, run)`` for each new run."""
    total, before = work.updates, 0
    new = sum(place not in work.finished for group in work.groups for place in group.members)
    meter = bar(total, progress, label=f"{new} runs")

    def report(done: int, of: int, **status: Any) -> None:
        shown = {name: status.get(name, math.nan) for name in ("staleness", "accuracy")}
        meter.report(before + done, total, time=status.get("time", 0.0), **shown)

    def finish(place: int, run: Run) -> None:
        if place not in work.finished:
            on_finished(place, run)

    settings = [point.settings for point in work.points]
    kept = None if folder is None else folder / CHECKPOINTS
    try:
        with precision(work.points):
            for group in work.groups:
                options: dict[str, Any] = {"progress": report, "folder": kept, "probes": work.probes}
                sweeping.execute_group(settings, group, on_finished=finish, **options)
                before += group.updates
    finally:
        meter.close()


def run_work(work: Work, *, folder: str | Path | None = None, progress: bool | None = None) -> Sweep:
    """Train what :func:`plan_sweep` found left, in memory or into ``folder``, which was looked at before.

    The folder is locked meanwhile; ``ValueError`` as in :func:`claimed`.
    """
    if folder is None:
        finished: dict[int, Run] = {}
        train(work, on_finished=finished.__setitem__, progress=progress)
        return Sweep(work.points, None, tuple(finished[place] for place in range(len(work.points))))
    home = Path(folder)
    with claimed(home):
        sweep_folder.begin(home, work.points, work.probes)
        train_into(home, work, progress=progress)
        shutil.rmtree(home / CHECKPOINTS, ignore_errors=True)
    return Sweep(work.points, home)


def train_into(folder: Path, work: Work, *, progress: bool | None = None) -> None:
    """Train what is left, and write each run into the sweep's folder at once."""

    def save(place: int, run: Run) -> None:
        sweep_folder.save_run(run, folder, work.points[place])

    train(work, on_finished=save, folder=folder, progress=progress)


def sweep(
    base: Settings | Mapping[str, Any],
    grid: Mapping[str, Any] | None = None,
    *,
    points: Iterable[Mapping[str, Any]] | None = None,
    seeds: int | Iterable[int] | None = None,
    folder: str | Path | None = None,
    memory_limit: int | None = None,
    lanes: int | None = None,
    progress: bool | None = None,
    overwrite: bool = False,
    probes: Mapping[str, Any] | None = None,
) -> Sweep:
    """Run every combination of a grid; runs that differ only in numbers are trained side by side.

    Every setting is checked and every schedule planned before the first run starts. A result equals that
    of the same settings run alone, to rounding.

    Args:
      base, grid, points, seeds: see :func:`fedjax_async.config.grid.expand`.
      folder: if given, each run is saved as soon as it is finished, under ``folder/runs/NAME``, and a sweep
        that is started again goes on where it was, even after a kill. A folder of another sweep is refused, and
        so is one that cannot be written or is in use, before anything is compiled.
      memory_limit: bytes of device memory that may be in use (default: what the device has).
      lanes: see ``Settings.lanes``.
      progress: show a bar over all updates (default: on a terminal).
      overwrite: let the sweep take the place of another in ``folder``; finished runs of the same settings stay.
      probes: of every run, as in :func:`fedjax_async.simulate`. A folder of the same sweep with others is refused.

    Returns: the finished runs; with a folder they are read from it when asked for.

    >>> found = sweep(
    ...     dict(model="logistic", clients=4, steps=1, updates=8), {"method.mixing": [0.4, 0.8]}, progress=False
    ... )
    >>> [point.name for point in found.points], [run.counters["updates"] for run in found.runs]
    (['mixing=0.4', 'mixing=0.8'], [8, 8])
    """
    check.require(probes is None or isinstance(probes, Mapping), "probes", probes, "a dict of names and probes")
    with claimed(folder):
        expanded = resolved(expand(base, grid, points=points, seeds=seeds))
        if folder is not None:
            sweep_folder.require_room(folder, expanded, probes, overwrite=overwrite)
        work = plan_sweep(expanded, folder=folder, memory_limit=memory_limit, lanes=lanes, probes=probes)
        return run_work(work, folder=folder, progress=progress)


def collect(folder: str | Path) -> tuple[Sweep, tuple[Point, ...]]:
    """What is finished of the sweep in a folder, and the points that are still missing."""
    folder = Path(folder)
    points = sweep_folder.read_definition(folder)
    done = [sweep_folder.is_finished(sweep_folder.run_folder(folder, point), point.settings) for point in points]
    here = tuple(point for point, yes in zip(points, done) if yes)
    return Sweep(here, folder), tuple(point for point, yes in zip(points, done) if not yes)
