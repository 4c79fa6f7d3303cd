"""``run``: train prepared runs, alone or side by side; ``simulate``, ``compare`` and ``sweep`` all train with it.

:func:`run_kept` is around it for single runs and comparisons: runs that are finished are read, the others are trained,
and each is saved in a folder of its own.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import jax

from fedjax_async.base import check, disk, identity
from fedjax_async.config import Experiment, Settings, sweeping
from fedjax_async.config.settings import as_dict, require_named
from fedjax_async.config.sweeping import SweepGroup
from fedjax_async.config.watching import Watch
from fedjax_async.engine.checkpoint import completed
from fedjax_async.models.weights import arrays_of
from fedjax_async.results import begun, files, provenance, store, streams
from fedjax_async.results.callbacks import (
    NO_CALLBACKS,
    Callbacks,
    is_covered,
    save_callbacks,
    stream_again,
    watch_of,
)
from fedjax_async.results.claim import claimed
from fedjax_async.results.figure import SCREEN, Drawing
from fedjax_async.results.progress import ProgressShown, bar
from fedjax_async.results.runs import draw_missing, write_run
from fedjax_async.results.store import CHECKPOINTS, MEMBERS
from fedjax_async.types import Run


class OneRun(NamedTuple):
    """One of the runs that are trained by the same call."""

    name: str  # in evaluations and messages
    settings: Settings  # complete: config.resolving.resolved, or those of the prepared run
    folder: Path | None = None  # where it is saved
    experiment: Experiment | None = None  # None: it is prepared when it is its turn


def run(
    runs: Sequence[OneRun],
    groups: Sequence[SweepGroup],
    *,
    on_finished: Callable[[int, Run], None],
    begin: Callable[[int], None] | None = None,
    finished: Collection[int] = (),
    checkpoints: Path | None = None,
    often: bool = False,
    probes: Mapping[str, object] | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
    progress: ProgressShown = None,
) -> None:
    """Train the runs of ``groups``, group by group; ``groups`` have indices into ``runs``.

    ``begin(i)`` is called when the group of run ``i`` begins, ``on_finished(i, run)`` as soon as it is finished. Runs
    in ``finished`` are trained again with their stack, and neither these functions nor ``callbacks`` are told of them.
    ``checkpoints``: the folder for those of stacks; a run that is trained as its settings say has them in its own
    folder, which is locked meanwhile. ``often`` and ``probes``: as in ``execute_group``.
    """
    if not groups:
        return
    total, before = sum(group.updates for group in groups), 0
    new = [member for group in groups for member in group.members if member not in finished]
    label = runs[new[0]].name if len(runs) == 1 else f"{len(new)} runs"
    meter = bar(total, progress, label=label, several=len(new) > 1)
    watches: list[Watch] = []

    def report(done: int, of: int, **status: object) -> None:
        shown = {name: status.get(name, math.nan) for name in ("staleness", "accuracy")}
        shown["time"] = status.get("time", 0.0)
        meter.report(before + done, of if len(runs) == 1 else total, **shown)

    def watch(member: int, experiment: Experiment) -> Watch:
        interrupted = runs[member].folder if group.alone and _is_begun(runs[member].folder) else None
        if begin is not None and member not in finished:
            begin(member)  # which removes checkpoints of other settings
        if interrupted is not None:
            _say_where(interrupted, group.updates)
        chosen, one = NO_CALLBACKS if member in finished else callbacks, runs[member]
        if one.folder is not None:
            arrays_of(experiment.params)  # refuses names that a file of parameters cannot have, before the training
        watches.append(watch_of(chosen, experiment, one.folder, one.name))
        return watches[-1]

    def finish(member: int, run: Run) -> None:
        if member not in finished:
            on_finished(member, run)

    try:
        for group in groups:
            own = runs[group.members[0]].folder if group.alone else None
            place = checkpoints if own is None else own / CHECKPOINTS
            with claimed(own):
                experiments = [one.experiment or one.settings for one in runs]
                sweeping.execute_group(
                    experiments,
                    group,
                    on_finished=finish,
                    folder=place,
                    progress=report,
                    often=often,
                    probes=probes,
                    watch=watch,
                )
            before += group.updates
    finally:
        meter.close()
        for each in watches:
            each.close()


def _is_begun(folder: Path | None) -> bool:
    """Whether the folder has an unfinished run, with checkpoints or before the first one."""
    return folder is not None and (folder / CHECKPOINTS / "settings.json").is_file()


def _say_where(folder: Path, updates: int) -> None:
    """Say from where an interrupted run goes on: from its last checkpoint, or from the start."""
    if done := completed(folder / CHECKPOINTS):
        print(f"{folder}: goes on from update {done[-1]:,} of {updates:,}")
    else:
        print(f"{folder}: has no checkpoint, and begins anew")


def precision(*settings: Settings) -> AbstractContextManager[object]:
    """JAX's 64-bit mode if the runs compute in float64; ``ValueError`` if only some of them do."""
    wide = [each.compute == "float64" for each in settings]
    check.require(all(wide) or not any(wide), "compute", "float64", "that of all runs of a sweep or of none")
    return jax.enable_x64(True) if any(wide) else nullcontext()


# --- runs in folders of their own ---------------------------------------------------------------------


def run_kept(
    runs: Sequence[OneRun],
    plan: Callable[[Sequence[OneRun]], Sequence[SweepGroup]],
    *,
    checkpoints: Path | None = None,
    plots: bool = False,
    overwrite: bool = False,
    again: bool = False,
    progress: ProgressShown = None,
    drawing: Drawing = SCREEN,
    callbacks: Callbacks = NO_CALLBACKS,
) -> list[Run]:
    """The results of runs, in order: read where they are finished, else trained and saved in the folder of the run.

    A finished run of the same settings is read, and one printed line says so. It is trained again in three cases:
    ``again`` is set, there are probes, or ``callbacks`` would have stopped it elsewhere or keep a best model that it
    lacks. ``plan(some)`` groups some of the runs. ``checkpoints``: the folder for those of stacks, until all runs are
    finished. A run that is trained as its settings say has them in its own folder until it is saved.

    Raises: ``ValueError`` as in :func:`claimed` and ``store.require_room``, before anything is compiled, for objects
    without a name, and for checkpoints of other settings.
    """
    described = require_rooms(runs, overwrite=overwrite, again=again)
    found: dict[str, Run] = {}
    for one in runs:
        if not again and (read := _read(one, described[one.name], callbacks, plots, overwrite, drawing)) is not None:
            found[one.name] = read
    # a group that an interrupted call has begun keeps its finished runs, so that its stacks find their checkpoints
    begun_before = {} if checkpoints is None else begun.read(checkpoints / MEMBERS)
    ours = json.loads(files.json_bytes(described))
    left = [one for one in runs if one.name not in found or begun_before.get(one.name) == ours[one.name]]
    finished = frozenset(k for k, one in enumerate(left) if one.name in found)
    planned = plan(left) if len(finished) < len(left) else []
    groups = [some for group in planned if (some := group.left(finished)).stacks]
    new: list[str] = []

    def begin(k: int) -> None:
        _begin(left[k], described[left[k].name], callbacks, replaces=overwrite or again)

    def save(k: int, run: Run) -> None:
        if checkpoints is not None and not new:
            _remember(checkpoints, begun_before | {one.name: ours[one.name] for one in left})
        new.append(left[k].name)
        found[left[k].name] = run
        if (folder := left[k].folder) is not None:
            with claimed(folder):
                write_run(run, folder, plots=plots, overwrite=overwrite or again, drawing=drawing)
                shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    # checkpoints with the models of evaluations are of no use without keep_best, and others not with it
    place = checkpoints / "best" if checkpoints is not None and callbacks.keep_best else checkpoints
    run(
        left,
        groups,
        on_finished=save,
        begin=begin,
        checkpoints=place,
        often=True,
        finished=finished,
        callbacks=callbacks,
        progress=progress,
    )
    if checkpoints is not None:
        _remember(checkpoints, {name: about for name, about in begun_before.items() if name not in ours})
    return [found[one.name] for one in runs]


def require_rooms(
    runs: Sequence[OneRun], *, overwrite: bool = False, again: bool = False
) -> dict[str, dict[str, object]]:
    """Check that each run may be saved in its folder, as :func:`run_kept` does; returns their settings by name."""
    described = {one.name: as_dict(one.settings) for one in runs}
    for one in runs:
        with claimed(one.folder):
            if one.folder is not None:
                require_named(one.settings)
                store.require_room(one.folder, described[one.name], overwrite=overwrite, again=again)
    return described


def require_same_settings(runs: Sequence[OneRun], *, again: bool = False) -> None:
    """``store.Occupied`` if the folder of a run stands beside one of the same method with other settings.

    ``again``: input files may have another content.
    """
    for folder, one in {one.folder.parent: one for one in runs if one.folder is not None}.items():
        ours = {name: value for name, value in as_dict(one.settings).items() if not (again and name == identity.FILES)}
        for path in sorted(folder.glob("seed_*/settings.json")):
            wanted = ours | {"seed": begun.read(path).get("seed")}
            if found := store.differing(path.read_bytes(), wanted, path.name):
                allowed = (
                    "must hold runs that differ in their seed only (choose another folder, or move the others away)"
                )
                raise store.Occupied(f"folder = {str(folder)!r}: {allowed}, but {path.parent.name} holds {found}")


def _remember(checkpoints: Path, members: dict[str, object]) -> None:
    """Keep the settings of the runs whose group has begun, by name; without any, remove the folder."""
    if members:
        checkpoints.mkdir(parents=True, exist_ok=True)
        disk.write(checkpoints / MEMBERS, files.json_bytes(members))
    else:
        shutil.rmtree(checkpoints, ignore_errors=True)


def _read(
    one: OneRun, settings: dict[str, object], callbacks: Callbacks, plots: bool, overwrite: bool, drawing: Drawing
) -> Run | None:
    """The run as its folder holds it; None if it has to be trained."""
    folder, has_probes = one.folder, one.experiment is not None and bool(one.experiment.probes)
    if folder is None or has_probes or not store.is_finished(folder, settings):
        return None
    if not provenance.has_numbers(folder, overwrite=overwrite):
        return None
    if not is_covered(run := store.load(folder), callbacks, one.name):
        return None
    advice = "--again, in Python again=True, trains it once more"
    remarks = "".join(f"; {each}" for each in provenance.remarks(folder, settings))
    print(f"{folder}: this run is finished already and was read ({advice}){remarks}")
    stream_again(run, callbacks, folder, one.name)
    if plots:
        draw_missing(run, folder, drawing)
    disk.sweep_up(folder)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return run


def _begin(one: OneRun, settings: dict[str, object], callbacks: Callbacks, *, replaces: bool) -> None:
    """Remove from the folder what another run has left; note with what this run begins.

    ``replaces``: whether it replaces a finished run.
    """
    if one.folder is None:
        return
    checkpoints = one.folder / CHECKPOINTS
    known = _holds(checkpoints / "settings.json", settings)
    if replaces and not known:
        shutil.rmtree(checkpoints, ignore_errors=True)
    if not known and (store.is_finished(one.folder, settings) or not _holds(one.folder / "settings.json", settings)):
        streams.clear(one.folder)
    if one.settings.checkpoint is not None or callbacks.streams:
        checkpoints.mkdir(parents=True, exist_ok=True)
        disk.write(checkpoints / "settings.json", files.json_bytes(settings))
        begun.save_plugins(checkpoints)
        save_callbacks(callbacks, checkpoints)


def _holds(path: Path, settings: dict[str, object]) -> bool:
    return path.is_file() and not store.differing(path.read_bytes(), settings)
