"""The commands ``sweep`` (read the file, then train, submit or collect its runs) and ``job``."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_async.base import check, notices
from fedjax_async.cli.runs import callbacks_of, drawing_of, drawn, plots_of
from fedjax_async.cli.sweep_file import sweep_content
from fedjax_async.config.grid import GridPoint, expand, labels, swept
from fedjax_async.config.paths import flat
from fedjax_async.config.roles import ROLES, roles_of
from fedjax_async.config.sweeping import SweepGroup
from fedjax_async.engine.devices import parse_size
from fedjax_async.results import cluster, sweep_folder
from fedjax_async.results.claim import claimed, require_writable
from fedjax_async.results.figure import Drawing
from fedjax_async.results.latex import require_columns
from fedjax_async.results.metrics import FINAL, require_final
from fedjax_async.results.redrawing import require_energy
from fedjax_async.results.sweep_report import write_sweep
from fedjax_async.results.sweeps import Sweep, SweepWork, collect, plan_sweep, resolved, run_work
from fedjax_async.results.tables import table

MOST_VALUES = 3  # of a setting in the title of a group
NO_VALIDATION = (
    "WARNING: there is no validation part, so the test set will choose the tuned settings; "
    "set validation_fraction = 0.1 under [base]"
)


class File(NamedTuple):
    """The sweep that a file describes, and how its tables are made."""

    points: list[GridPoint]
    target: float | None = None
    final: str = FINAL
    roles: Mapping[str, str] = {}


def read(path: str | Path) -> File:
    """Read a sweep's file; ``ValueError`` for anything that cannot be used."""
    content = sweep_content(path)
    points = expand(
        content.get("base", {}), content.get("grid"), points=content.get("points"), seeds=content.get("seeds")
    )
    roles = flat(content.get("roles", {}))
    roles_of(swept(points), roles)  # refuses roles that do not exist
    return _checked(File(resolved(points), content.get("target"), content.get("final", FINAL), roles))


def _checked(file: File) -> File:
    """The file; ``ValueError`` for an invalid target or final value."""
    if file.target is not None:
        check.positive("target", file.target)
        check.in_range("target", file.target, 0, 1)
    require_final(file.final)
    return file


def _with_flags(file: File, arguments: argparse.Namespace) -> File:
    """The file with its options replaced by the flags that were given."""
    given = {name: getattr(arguments, name) for name in ("target", "final")}
    return _checked(file._replace(**{name: value for name, value in given.items() if value is not None}))


def _axes(points: Sequence[GridPoint]) -> str:
    """The number of values of each swept path: ``mixing (4), exponent (4), seed (4)``.

    An option that a point's name does not have is no value.
    """
    paths = swept(points)
    short = labels(paths)
    values = [point.shown(paths) for point in points]
    counts = {
        path: len({str(each[path]) for each in values if each[path] is not None or "." not in path}) for path in paths
    }
    return ", ".join(f"{short[path]} ({count})" for path, count in counts.items())


def _roles(points: Sequence[GridPoint], given: Mapping[str, str]) -> list[str]:
    """The settings of each role, and a warning if the test set would choose the tuned ones."""
    roles = roles_of(swept(points), given)
    short = labels(roles)
    names = {role: [short[path] for path, its in roles.items() if its == role] for role in ROLES}
    lines = ["; ".join(f"{role}: {', '.join(named)}" for role, named in names.items() if named)]
    if names["tuned"] and any(point.settings.validation_fraction is None for point in points):
        lines.append(NO_VALIDATION)
    return lines


def size_text(size: float) -> str:
    """Bytes as readable text.

    >>> size_text(1_234_000_000), size_text(20_000_000)
    ('1.2 GB', '20 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.{0 if size >= 1e7 else 1}f} MB"


def titles(work: SweepWork) -> list[str]:
    """What each group trains, all different: what its runs share, then the swept values that no other group has.

    Groups with the same values, in other combinations, are told apart by their first run.
    """
    paths = swept(work.points)
    short = labels(paths)

    def values(group: SweepGroup) -> dict[str, list[str]]:
        each = [work.points[member].shown(paths) for member in group.members]
        return {path: list(dict.fromkeys(str(one[path]) for one in each)) for path in paths}

    every = [values(group) for group in work.groups]

    def title(group: SweepGroup, own: Mapping[str, Sequence[str]]) -> str:
        like = [found for other, found in zip(work.groups, every) if other.about == group.about]
        differing = [path for path in paths if any(set(found[path]) != set(own[path]) for found in like)]
        return ", ".join([group.about, *(f"{short[path]} {_listed(own[path])}" for path in differing)])

    found = [title(group, own) for group, own in zip(work.groups, every)]
    first = [work.points[group.members[0]].name for group in work.groups]
    return [f"{text}, from {name}" if found.count(text) > 1 else text for text, name in zip(found, first)]


def _listed(values: Sequence[str]) -> str:
    return " or ".join(values) if len(values) <= MOST_VALUES else f"({len(values)} values)"


def describe(work: SweepWork) -> str:
    """The plan as text: groups, runs, stacks, memory, updates."""
    lines = [f"{len(work.points)} runs: {_axes(work.points)}"]
    left = len(work.points) - len(work.finished)
    lines.append(f"{len(work.finished)} finished, {left} to train: {work.updates:,} updates")
    lines += _roles(work.points, work.roles)
    if not work.groups:
        return "\n".join(lines) + "\n"
    rows = [
        {
            "group": number,
            "runs": len([member for member in group.members if member not in work.finished]),
            "stacks": len(group.stacks),
            "side by side": max(map(len, group.stacks)),
            "memory": size_text(group.num_bytes),
            "updates": group.updates,
            "what": title,
        }
        for number, (group, title) in enumerate(zip(work.groups, titles(work)), 1)
    ]
    count = len(work.groups)
    lines.append(f"{count} group{'s' if count > 1 else ''}, one compilation each:\n")
    return "\n".join(lines) + "\n" + table(rows)


def _report(found: Sweep, file: File, arguments: argparse.Namespace) -> None:
    out, drawing = arguments.out, drawing_of(arguments)
    columns, plots = arguments.columns, not arguments.no_plots
    text = write_sweep(found, out, plots, target=file.target, final=file.final, drawing=drawing, columns=columns)
    print(text, end="")
    notices.warn_about(found.counters)
    pictures = [] if arguments.no_plots else drawn(arguments)
    names = ["runs.csv", "evaluations.csv", "settings.md", "best.md", *pictures, "runs/"]
    print(f"\nsaved in {out}: {', '.join(names)}")


def _collect(arguments: argparse.Namespace, file: File) -> None:
    file = file._replace(points=sweep_folder.as_begun(file.points, arguments.out))
    sweep_folder.require_room(arguments.out, file.points)
    require_writable("file", Path(arguments.out) / "runs.csv")
    found, missing = collect(arguments.out)
    if missing:
        shown = ", ".join(point.name for point in missing[:3]) + (", ..." if len(missing) > 3 else "")
        print(f"{len(found.points)} of {len(file.points)} runs are finished; missing: {shown}\n")
    sweep_folder.save_roles(Path(arguments.out), file.roles)
    _report(found._replace(roles=file.roles), file, arguments)


def _is_waited_for(arguments: argparse.Namespace) -> bool:
    """Whether this process waits for the scheduler's jobs; ``ValueError`` for a scheduler that cannot be used."""
    return arguments.submit is not None and cluster.parse_target(arguments.submit)[0] in cluster.WAITED


def _submit(arguments: argparse.Namespace, file: File, work: SweepWork, limits: dict[str, int | None]) -> None:
    jobs = cluster.submit(work, arguments.out, arguments.submit, **limits)
    for job in jobs:
        print(f"job {job.id}: {_shown(job)}")
    if _is_waited_for(arguments):
        _wait(jobs)
        _collect(arguments, file)
        return
    where = f"; logs in {Path(arguments.out) / cluster.LOGS}" if jobs else ": everything is finished"
    if jobs and jobs[0].handle is None:
        where = f"; of each number N above: fedjax-async job {shlex.quote(arguments.out)} N"
    print(f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}{where}")
    plugins = [word for source in arguments.plugin for word in ("--plugin", source)]
    again = ["fedjax-async", "sweep", arguments.file, "--out", arguments.out, *plugins, "--collect"]
    print(f"when they are done: {shlex.join([*again, *_report_words(arguments)])}")


def _report_words(arguments: argparse.Namespace) -> list[str]:
    """The flags of tables and pictures that were given, for the command that makes them."""
    words = ["--no-plots"] if arguments.no_plots else []
    usual = {"format": Drawing.formats}
    for name in ("target", "final", "columns", "format", "width", "title", "x"):
        value = getattr(arguments, name)
        if value != usual.get(name):
            words += [f"--{name}", ",".join(value) if isinstance(value, tuple) else str(value)]
    return words


def _shown(job: cluster.Job) -> str:
    return f"{len(job.runs)} run{'s' if len(job.runs) > 1 else ''}, {job.runs[0]}..."


def _wait(jobs: Sequence[cluster.Job]) -> None:
    """Wait for Ray's tasks; ``ValueError`` after all have ended, if any failed."""
    failed = []
    for number, (index, reason) in enumerate(cluster.finished([job.handle for job in jobs]), 1):
        failed += [] if reason is None else [f"job {jobs[index].id} ({_shown(jobs[index])}): {reason}"]
        print(f"{number} of {len(jobs)}: job {jobs[index].id} {'failed' if reason else 'is done'}", flush=True)
    how = f"successful in all jobs, but {len(failed)} of {len(jobs)} failed, the first of them {' '.join(failed[:1])}"
    check.require(not failed, "submit", "ray", f"{how}; the same command goes on, and with --collect writes tables")


def _train(arguments: argparse.Namespace, work: SweepWork, file: File) -> None:
    try:
        progress = False if arguments.quiet else None
        found = run_work(work, folder=arguments.out, progress=progress)
    except KeyboardInterrupt:
        print(f"\ninterrupted: finished runs are kept in {arguments.out}; the same command goes on", file=sys.stderr)
        sys.exit(130)
    _report(found, file, arguments)


def sweep(arguments: argparse.Namespace) -> None:
    """Train, submit or collect the sweep of a file."""
    began = time.perf_counter()
    check.optional(lambda field, value: require_final(value), "final", arguments.final)
    require_columns(arguments.columns, more=True)
    drawing_of(arguments)  # raises before any training
    arguments.out = arguments.out or str(Path("runs") / Path(arguments.file).stem)
    limits = {
        "memory_limit": None if arguments.memory_limit is None else parse_size("memory_limit", arguments.memory_limit),
        "lanes": arguments.lanes,
    }
    alone = "left out with --collect, which trains nothing"
    check.require(not (arguments.collect and arguments.dry_run), "dry_run", True, alone)
    for name in ("submit", "overwrite", "memory_limit", "lanes", "stream", "keep_best"):
        given = getattr(arguments, name)
        check.require(not (arguments.collect and given), name, given, alone)
    if (arguments.submit is None or _is_waited_for(arguments)) and not arguments.dry_run:
        plots_of(arguments)
    if arguments.collect:
        _collect(arguments, _with_flags(read(arguments.file), arguments))
        return
    callbacks = callbacks_of(arguments)
    with claimed(None if arguments.dry_run else arguments.out):
        file = _with_flags(read(arguments.file), arguments)
        require_energy(drawing_of(arguments), [{"energy": point.settings.energy} for point in file.points])
        if not arguments.overwrite:
            file = file._replace(points=sweep_folder.as_begun(file.points, arguments.out))
        sweep_folder.require_room(arguments.out, file.points, overwrite=arguments.overwrite)
        progress = False if arguments.quiet else None
        work = plan_sweep(file.points, folder=arguments.out, progress=progress, callbacks=callbacks, **limits)
        work = work._replace(roles=file.roles)
        print(describe(work), flush=True)
        if not arguments.dry_run and arguments.submit is None:
            _train(arguments, work, file)
            print(f"{time.perf_counter() - began:.0f} s")
    if not arguments.dry_run and arguments.submit is not None:  # jobs need the folder unlocked
        _submit(arguments, file, work, limits)


def job(arguments: argparse.Namespace) -> None:
    """Train the runs of one job of a sweep that was submitted as an array."""
    print(cluster.train_job(arguments.folder, arguments.index))
