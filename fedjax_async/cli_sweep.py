"""``fedjax-async sweep FILE.toml``: its flags, its file, and what it says."""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedjax_async import check, registry
from fedjax_async.engine.grid import Point, expand, labels, swept
from fedjax_async.engine.memory import parse_size
from fedjax_async.engine.paths import values_of
from fedjax_async.results import cluster, sweep_folder
from fedjax_async.results.figure import require_matplotlib
from fedjax_async.results.sweep_report import write_sweep
from fedjax_async.results.sweeps import Sweep, Work, collect, plan_sweep, resolved, run_work
from fedjax_async.results.tables import table

EXAMPLE = """\
# mixing.toml: how much of an arriving model FedAsync should mix in. (16 + 2) settings x 4 seeds = 72 runs.
seeds = 4                      # 0, 1, 2, 3; or a list: seeds = [0, 7]
target = 0.7                   # optional: what it takes to this test accuracy

[base]                         # what all runs share: any flag of `fedjax-async run`, with _ for -
method = "fedasync"
dataset = "fashion_mnist_6k"
model = "lenet5"
clients = 10
lr = 0.05
updates = 500
eval_updates = 50

[grid]                         # every combination is a run
method.mixing = [0.2, 0.4, 0.6, 0.8]
method.exponent = [0.0, 0.5, 1.0, 2.0]

[[points]]                     # optional: runs beside the grid; a list of values makes a small grid
method = "fedavg"
lr = [0.05, 0.1]
"""

EPILOG = f"""a complete FILE.toml:

{"".join(f"  {line}".rstrip() + chr(10) for line in EXAMPLE.splitlines())}
What is swept is named as under [base]: lr, batch_size, delay, partition, model... An option inside a name
is reached by a dot: method.mixing, timing.size, delay.sigma, partition.alpha, optimizer.momentum.
TOML's rules: seeds and target stand above the first [table], and beside method = ... in the same table
its options are quoted: "method.mixing" = [0.2, 0.4].

  fedjax-async sweep mixing.toml --dry-run
  fedjax-async sweep mixing.toml --out runs/mixing --memory-limit 4GB
  fedjax-async sweep mixing.toml --submit slurm:partition=gpu,gpus=1,time=120
  fedjax-async sweep mixing.toml --collect

Each finished run is saved at once; the same command again goes on with what is missing. With --submit
every stack of runs becomes a job, and --collect makes the tables of what the jobs have finished so far.
"""

KEYS = ("base", "grid", "points", "seeds", "target")


class File(NamedTuple):
    """What a sweep's file says."""

    points: list[Point]
    target: float | None


def read(path: str | Path) -> File:
    """Read a sweep's file; ``ValueError`` naming the file for anything that cannot be used."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"sweep file = {str(path)!r}: must be a TOML file (fedjax-async sweep --help shows one)")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # method = ... and method.mixing = ... in one table
        hint = '; quote an option beside its name, as in "method.mixing" = [0.4]' if "Cannot" in str(error) else ""
        raise ValueError(f"sweep file = {str(path)!r}: must be TOML; {error}{hint}") from error
    for key in content:
        registry.find(f"key of {path.name}", dict.fromkeys(KEYS), key)
    for key, kind, example in (("base", dict, "[base]"), ("grid", dict, "[grid]"), ("points", list, "[[points]]")):
        check.require(isinstance(content.get(key, kind()), kind), key, content.get(key), f"a table, {example}")
    target = content.get("target")
    if target is not None:
        check.positive("target", target)
        check.in_range("target", target, 0, 1)
    points = expand(
        content.get("base", {}), content.get("grid"), points=content.get("points"), seeds=content.get("seeds")
    )
    return File(resolved(points), target)


def _axes(points: list[Point]) -> str:
    """How many values each swept path takes: ``mixing (4), exponent (4), seed (4)``."""
    paths = swept(points)
    short = labels(paths)
    values = [values_of(point.settings, paths) for point in points]
    counts = {path: len({str(each[path]) for each in values}) for path in paths}
    return ", ".join(f"{short[path]} ({count})" for path, count in counts.items())


def size_text(size: float) -> str:
    """Bytes for people.

    >>> size_text(1_234_000_000), size_text(20_000_000)
    ('1.2 GB', '20 MB')
    """
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.{0 if size >= 1e7 else 1}f} MB"


def describe(work: Work) -> str:
    """What will happen: groups, runs, stacks, memory, updates."""
    lines = [f"{len(work.points)} runs: {_axes(list(work.points))}"]
    left = len(work.points) - len(work.finished)
    lines.append(f"{len(work.finished)} finished, {left} to train: {work.updates:,} updates")
    if not work.groups:
        return "\n".join(lines) + "\n"
    rows = [
        {
            "group": place + 1,
            "runs": len([member for member in group.members if member not in work.finished]),
            "stacks": len(group.stacks),
            "side by side": max(map(len, group.stacks)),
            "memory": size_text(group.num_bytes),
            "updates": group.updates,
            "what": group.about,
        }
        for place, group in enumerate(work.groups)
    ]
    count = len(work.groups)
    lines.append(f"{count} group{'s' if count > 1 else ''}, one compilation each:\n")
    return "\n".join(lines) + "\n" + table(rows)


def _report(found: Sweep, target: float | None, out: str) -> None:
    print(write_sweep(found, out, target=target), end="")
    print(f"\nsaved in {out}: runs.csv, evaluations.csv, settings.md, best.md, pictures and runs/")


def _collect(arguments: argparse.Namespace, file: File) -> None:
    sweep_folder.require_room(arguments.out, file.points)
    found, missing = collect(arguments.out)
    if missing:
        shown = ", ".join(point.name for point in missing[:3]) + (", ..." if len(missing) > 3 else "")
        print(f"{len(found.points)} of {len(file.points)} runs are finished; missing: {shown}\n")
    _report(found, file.target, arguments.out)


def _submit(arguments: argparse.Namespace, work: Work, limits: dict[str, int | None]) -> None:
    jobs = cluster.submit(work, arguments.out, arguments.submit, **limits)
    for job in jobs:
        print(f"job {job.id}: {len(job.runs)} run{'s' if len(job.runs) > 1 else ''}, {job.runs[0]}...")
    where = f"; logs in {Path(arguments.out) / cluster.LOGS}" if jobs else ": everything is finished"
    print(f"{len(jobs)} job{'' if len(jobs) == 1 else 's'}{where}")
    print(f"when they are done: fedjax-async sweep {arguments.file} --out {arguments.out} --collect")


def _sweep(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    file = read(arguments.file)
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
        _collect(arguments, file)
        return
    sweep_folder.require_room(arguments.out, file.points, overwrite=arguments.overwrite)
    work = plan_sweep(file.points, folder=arguments.out, **limits)
    print(describe(work), flush=True)
    if arguments.dry_run:
        return
    if arguments.submit is not None:
        _submit(arguments, work, limits)
        return
    try:
        progress = False if arguments.quiet else None
        found = run_work(work, folder=arguments.out, lanes=arguments.lanes, progress=progress)
    except KeyboardInterrupt:
        print(f"\ninterrupted: finished runs are kept in {arguments.out}; the same command goes on", file=sys.stderr)
        sys.exit(130)
    _report(found, file.target, arguments.out)
    print(f"{time.perf_counter() - began:.0f} s")


def add(command: Callable[[str, str, Callable[[argparse.Namespace], None]], argparse.ArgumentParser]) -> None:
    """Add the command; ``command(name, about, action)`` makes a parser."""
    sub = command("sweep", "many runs from one file: a grid over any settings, side by side", _sweep)
    sub.epilog, sub.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("file", metavar="FILE.toml", help="what to sweep")
    sub.add_argument("--out", metavar="DIR", help="folder for the results [runs/FILE]")
    sub.add_argument("--dry-run", action="store_true", help="check and plan everything, say what would happen, stop")
    sub.add_argument("--memory-limit", metavar="SIZE", help="device memory in use at a time, e.g. 4GB [the device's]")
    sub.add_argument("--lanes", type=int, metavar="N", help="stacks trained at the same time [one a CPU core]")
    sub.add_argument(
        "--overwrite", action="store_true", help="take the place of another sweep in DIR; equal runs are kept"
    )
    sub.add_argument("--quiet", action="store_true", help="no progress bar")
    sub.add_argument(
        "--submit",
        metavar="SCHEDULER",
        help="as jobs: slurm or local, with options partition=, time= "
        "(minutes), memory= (GB), cpus=, gpus=, account=, qos=, constraint=, at_once=",
    )
    sub.add_argument("--collect", action="store_true", help="train nothing: tables and pictures of what is finished")
