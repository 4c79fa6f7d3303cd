"""The command ``sweep``: read the file, then train, submit or collect its runs, and print what happens."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async import check
from fedjax_async.cli.runs import callbacks_of, check_finals, drawing_of
from fedjax_async.cli.sweep_file import sweep_content
from fedjax_async.config.grid import Point, expand, labels, swept
from fedjax_async.config.paths import values_of
from fedjax_async.engine.devices import parse_size
from fedjax_async.results import cluster, sweep_folder
from fedjax_async.results.claim import claimed, require_writable
from fedjax_async.results.figure import require_matplotlib
from fedjax_async.results.sweep_report import write_sweep
from fedjax_async.results.sweeps import Sweep, Work, collect, plan_sweep, resolved, run_work
from fedjax_async.results.tables import table


class File(NamedTuple):
    """The sweep that a file describes."""

    points: list[Point]
    target: float | None


def read(path: str | Path) -> File:
    """Read a sweep's file; ``ValueError`` for anything that cannot be used."""
    content = sweep_content(path)
    target = content.get("target")
    if target is not None:
        check.positive("target", target)
        check.in_range("target", target, 0, 1)
    points = expand(
        content.get("base", {}), content.get("grid"), points=content.get("points"), seeds=content.get("seeds")
    )
    return File(resolved(points), target)


def _axes(points: list[Point]) -> str:
    """The number of values of each swept path: ``mixing (4), exponent (4), seed (4)``."""
    paths = swept(points)
    short = labels(paths)
    values = [values_of(point.settings, paths) for point in points]
    counts = {path: len({str(each[path]) for each in values}) for path in paths}
    return ", ".join(f"{short[path]} ({count})" for path, count in counts.items())


def size_text(size: float) -> str:
    """Bytes as readable text.

    >>> size_text(1_234_000_000), size_text(20_000_000)
    ('1.2 GB', '20 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.{0 if size >= 1e7 else 1}f} MB"


def describe(work: Work) -> str:
    """The plan as text: groups, runs, stacks, memory, updates."""
    lines = [f"{len(work.points)} runs: {_axes(list(work.points))}"]
    left = len(work.points) - len(work.finished)
    lines.append(f"{len(work.finished)} finished, {left} to train: {work.updates:,} updates")
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
            "what": group.about,
        }
        for number, group in enumerate(work.groups, 1)
    ]
    count = len(work.groups)
    lines.append(f"{count} group{'s' if count > 1 else ''}, one compilation each:\n")
    return "\n".join(lines) + "\n" + table(rows)


def _report(found: Sweep, target: float | None, arguments: argparse.Namespace) -> None:
    out, drawing = arguments.out, drawing_of(arguments)
    text = write_sweep(found, out, target=target, final=arguments.final, interval=arguments.interval, drawing=drawing)
    print(text, end="")
    print(f"\nsaved in {out}: runs.csv, evaluations.csv, settings.md, best.md, pictures and runs/")


def _collect(arguments: argparse.Namespace, file: File) -> None:
    sweep_folder.require_room(arguments.out, file.points)
    require_writable("file", Path(arguments.out) / "runs.csv")
    found, missing = collect(arguments.out)
    if missing:
        shown = ", ".join(point.name for point in missing[:3]) + (", ..." if len(missing) > 3 else "")
        print(f"{len(found.points)} of {len(file.points)} runs are finished; missing: {shown}\n")
    _report(found, file.target, arguments)


def _submit(arguments: argparse.Namespace, work: Work, limits: dict[str, int | None]) -> None:
    jobs = cluster.submit(work, arguments.out, arguments.submit, **limits)
    for job in jobs:
        print(f"job {job.id}: {len(job.runs)} run{'s' if len(job.runs) > 1 else ''}, {job.runs[0]}...")
    where = f"; logs in {Path(arguments.out) / cluster.LOGS}" if jobs else ": everything is finished"
    print(f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}{where}")
    print(f"when they are done: fedjax-async sweep {arguments.file} --out {arguments.out} --collect")


def _train(arguments: argparse.Namespace, work: Work, target: float | None) -> None:
    try:
        progress = False if arguments.quiet else None
        found = run_work(work, folder=arguments.out, progress=progress)
    except KeyboardInterrupt:
        print(f"\ninterrupted: finished runs are kept in {arguments.out}; the same command goes on", file=sys.stderr)
        sys.exit(130)
    _report(found, target, arguments)


def sweep(arguments: argparse.Namespace) -> None:
    """Train, submit or collect the sweep of a file."""
    began = time.perf_counter()
    check_finals(arguments)
    drawing_of(arguments)  # before the work
    arguments.out = arguments.out or str(Path("runs") / Path(arguments.file).stem)
    limits = {
        "memory_limit": None if arguments.memory_limit is None else parse_size("memory_limit", arguments.memory_limit),
        "lanes": arguments.lanes,
    }
    if arguments.submit is not None:
        cluster.parse_target(arguments.submit)
    elif not arguments.dry_run:
        require_matplotlib()
    if arguments.collect:
        _collect(arguments, read(arguments.file))
        return
    callbacks = callbacks_of(arguments)
    with claimed(None if arguments.dry_run else arguments.out):
        file = read(arguments.file)
        sweep_folder.require_room(arguments.out, file.points, overwrite=arguments.overwrite)
        options: dict[str, Any] = {"progress": False if arguments.quiet else None, "callbacks": callbacks}
        work = plan_sweep(file.points, folder=arguments.out, **options, **limits)
        print(describe(work), flush=True)
        if not arguments.dry_run and arguments.submit is None:
            _train(arguments, work, file.target)
            print(f"{time.perf_counter() - began:.0f} s")
    if not arguments.dry_run and arguments.submit is not None:  # jobs need the folder unlocked
        _submit(arguments, work, limits)
