"""Shared by the papers' experiments: scales, variants of a setting that train in one sweep, and their tables.

Every script takes ``--scale smoke|laptop|paper``. It keeps each finished run under ``OUT/runs``, and a second start of
the same command continues from there. ``paper`` is the paper's setting, and ``laptop`` is smaller. ``smoke`` only shows
that the script runs; it uses the data in the package.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import common
import known_runs
import numpy as np

from fedjax_async import Settings
from fedjax_async.base.notices import RunWarning
from fedjax_async.config import prepare
from fedjax_async.results import tables
from fedjax_async.results.curves import accuracy_curve
from fedjax_async.results.figure import line_style, require_matplotlib, save_figure
from fedjax_async.results.sweeps import sweep
from fedjax_async.types import Run

SCALES = ("smoke", "laptop", "paper")
Rows = list[dict[str, Any]]
T = TypeVar("T")


class Variant(NamedTuple):
    """One row of a table: its name and its changes to the task's setting."""

    name: str
    changes: dict[str, Any]
    picture: str = ""  # picture with the row, by title; empty if there is only one


def options(about: str | None, paper: str, name: str) -> argparse.ArgumentParser:
    """The parser of the options that all scripts share; ``paper`` is the folder's name, ``name`` the script's."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="laptop", help="size of the experiment [laptop]")
    parser.add_argument("--out", type=Path, default=None, metavar="DIR", help=f"results [runs/{paper}/{name}-SCALE]")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(paper=paper, name=name)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options; the default of ``--out`` depends on the scale."""
    given = parser.parse_args()
    given.out = given.out or Path("runs") / given.paper / f"{given.name}-{given.scale}"
    return given


def parse_seeds(parser: argparse.ArgumentParser, seeds: Mapping[str, int]) -> argparse.Namespace:
    """Parse also ``--seeds``; ``seeds``: scale -> default number."""
    parser.add_argument("--seeds", type=int, default=None, metavar="N", help="number of seeds [by scale]")
    given = parse(parser)
    given.seeds = seeds[given.scale] if given.seeds is None else given.seeds
    if given.seeds < 1:
        parser.error(f"argument --seeds: must be a whole number >= 1, not {given.seeds}")
    return given


def parse_tasks(
    parser: argparse.ArgumentParser, known: Iterable[str], usual: Sequence[str], seeds: Mapping[str, int]
) -> argparse.Namespace:
    """Parse also ``--tasks`` and ``--seeds``; the task of the smallest scale is always ``smoke``."""
    names, shown = [task for task in known if task != "smoke"], " ".join(usual)
    text = f"data sets [{shown}]; the scale smoke has one of its own"
    parser.add_argument("--tasks", nargs="+", choices=names, default=list(usual), help=text)
    given = parse_seeds(parser, seeds)
    given.tasks = ["smoke"] if given.scale == "smoke" else given.tasks
    return given


def with_variants(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with ``--variants``, for scripts that call :func:`asked_for`."""
    parser.add_argument("--variants", nargs="+", default=None, metavar="NAME", help="run only these variants [all]")
    return parser


def asked_for(variants: Sequence[Variant], given: argparse.Namespace) -> list[Variant]:
    """The variants named by ``--variants``, by default all; exits with an error for an unknown name."""
    names = given.variants or [variant.name for variant in variants]
    for name in names:
        if name not in [variant.name for variant in variants]:
            known = ", ".join(variant.name for variant in variants)
            scope = " (the rows at --scale smoke)" if given.scale == "smoke" else ""
            sys.exit(f"--variants {name!r}: must be one of {known}{scope}")
    return [variant for variant in variants if variant.name in names]


def run_variants(
    task: str,
    setting: Mapping[str, Any],
    variants: Sequence[Variant],
    given: argparse.Namespace,
    numbers: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = lambda own, seed: {},
    clients: Callable[[Run], Mapping[str, np.ndarray]] | None = None,
) -> dict[str, list[Run]]:
    """The runs of every variant of a setting with every seed, trained in one sweep; returns variant -> its runs.

    Finished runs of the same settings are kept, even if the rest of the sweep changes, for example to more seeds.
    Variants with the same settings share their runs.
    Scripts with the option ``--known`` do not train the runs in its files. They write the curves of all runs, beside
    those that are in these files or were in the file before.

    ``numbers(setting, seed)`` returns further settings of one run. ``clients(run)`` returns what the table needs of
    single clients, columns [clients] or [evaluations, clients]; it is kept with the curves and becomes the run's
    ``per_client``.

    With ``--minutes`` the runs are trained one after the other, and the curves are written after each. Raises
    :class:`known_runs.TimeIsUp` if runs are missing then.
    """
    changed = {key for variant in variants for key in variant.changes}
    points = []
    for variant in variants:
        own = {**setting, **variant.changes}
        for seed in range(given.seeds):
            points.append({key: own[key] for key in own if key in changed} | {"seed": seed} | dict(numbers(own, seed)))
    base = {key: value for key, value in setting.items() if key not in changed}
    known = _known(task, given, with_clients=clients is not None)
    keys = [known_runs.key(base | point) for point in points]
    names = [variant.name for variant in variants for _ in range(given.seeds)]
    absent = {key: point for key, point in zip(keys, points) if key not in known}
    limited = getattr(given, "minutes", None) is not None
    if known or limited:
        print(f"{task}: {len({*keys}) - len(absent)} of {len({*keys})} runs are known", file=sys.stderr)
    if known and not any(key in known for key in keys):
        print("  none of the runs in --known has these settings: is it a file of this scale?", file=sys.stderr)
    of_key = {key: found.run for key, found in known.items()}
    machines = {key: known[key].machine if key in known else common.machine() for key in keys}
    if known:
        given.trained_on = {*getattr(given, "trained_on", ()), *(each or "not recorded" for each in machines.values())}
    folder = given.out / "runs" / task

    def keep(key: str, run: Run) -> None:
        of_key[key] = run if clients is None else run._replace(per_client=dict(clients(run)))

    def write() -> None:
        path = given.out / f"{given.name}_{task}{known_runs.CURVES_END}"
        before = known_runs.read([path] if path.is_file() else []) | known
        made = {
            key: known_runs.Known(name, point["seed"], of_key[key], machines[key])
            for key, name, point in zip(keys, names, points)
            if key in of_key
        }
        if clients is None:
            made = {key: one._replace(run=one.run._replace(per_client={})) for key, one in made.items()}
        if made:
            known_runs.write(path, before | made)

    if limited:
        for key, point in absent.items():
            if known_runs.time_left(given):
                keep(key, *_train(base, [point], folder / key, given))
                write()
    elif absent:
        for key, run in zip(absent, _train(base, list(absent.values()), folder, given), strict=True):
            keep(key, run)
    if hasattr(given, "known"):
        write()
    if left := sum(key not in of_key for key in absent):
        print(f"{task}: time is up, {left} runs are missing", file=sys.stderr)
        raise known_runs.TimeIsUp
    runs = [of_key[key] for key in keys]
    return {variant.name: [run for run, name in zip(runs, names) if name == variant.name] for variant in variants}


def _known(task: str, given: argparse.Namespace, *, with_clients: bool) -> dict[str, known_runs.Known]:
    """The runs in the files of ``--known``, by key; if the table needs single clients, those with their columns."""
    known = known_runs.read(getattr(given, "known", ()))
    if not with_clients:
        return known
    whole = {key: found for key, found in known.items() if found.run.per_client}
    if len(whole) < len(known):
        print(f"{task}: {len(known) - len(whole)} runs in --known lack the clients beside them", file=sys.stderr)
    return whole


def all_of(calls: Iterable[Callable[[], T]]) -> list[T]:
    """What the calls return. If the time is up in some, the others still count or train; the script ends after them."""
    found, up = [], None
    for call in calls:
        try:
            found.append(call())
        except known_runs.TimeIsUp as error:
            up = error
    if up is not None:
        raise up
    return found


def _train(base: Mapping[str, Any], points: Rows, folder: Path, given: argparse.Namespace) -> Iterable[Run]:
    """The runs of a sweep over ``points``."""
    return sweep(base, points=points, out=folder, progress=False if given.quiet else None, overwrite=True).runs


def pictures(given: argparse.Namespace) -> bool:
    """Whether pictures can be drawn and are wanted; says on stderr if matplotlib is missing."""
    if getattr(given, "no_pictures", False):
        return False
    try:
        require_matplotlib()
    except ValueError as error:
        print(f"no pictures: {error}", file=sys.stderr)
        return False
    return True


def draw(
    stem: str,
    title: str,
    variants: Sequence[Variant],
    runs: Mapping[str, list[Run]],
    given: argparse.Namespace,
    curves: Callable[[Mapping[str, list[Run]]], Any] | None = None,
) -> None:
    """Save one figure per picture of the variants, ``STEM_PICTURE.png``. The picture's title is left out of the labels.

    ``curves``: makes the figure from the runs; by default accuracy curves.
    """
    if not pictures(given):
        return
    for picture in dict.fromkeys(variant.picture for variant in variants):
        shown = {v.name.removesuffix(f", {picture}"): runs[v.name] for v in variants if v.picture == picture}
        figure = accuracy_curve(shown, final="last") if curves is None else curves(shown)
        figure.axes[0].set_title(", ".join(filter(None, (title, picture))), fontsize=10)
        save_figure(figure, given.out / f"{'_'.join([stem, *picture.replace('/', ' ').split()])}.png")


def line(axes: Any, index: int, at: Sequence[float], values: Sequence[tables.Spread], label: str) -> None:
    """Draw the ``index``-th line of a picture: means at ``at``, with error bars of one standard deviation."""
    colour, dashes = line_style(index)
    marks: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.4, "capsize": 2, "elinewidth": 1}
    bars = [value.std for value in values]
    axes.errorbar(at, [value.mean for value in values], bars, color=colour, linestyle=dashes, label=label, **marks)


def missing(setting: Mapping[str, Any], **budget: Any) -> str | None:
    """Why a setting cannot be run here for ``budget`` (by default one server step), in one line; ``None`` if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)  # about this budget, which no run has
        try:
            prepare(Settings(**{**setting, **(budget or {"server_steps": 1})}))
        except ValueError as error:
            return str(error)
    return None


def over_tasks(given: argparse.Namespace, reason: Callable[[str], str | None], rows_of: Callable[[str], Rows]) -> Rows:
    """The rows of all tasks. A task that cannot be run here gets one row "not run"; the reason goes to stderr."""

    def rows(task: str) -> Rows:
        why = reason(task)
        if why is None:
            return rows_of(task)
        print(f"{task}: not run: {why}", file=sys.stderr)
        return [{"task": task, "variant": "not run"}]

    return [row for found in all_of(functools.partial(rows, task) for task in given.tasks) for row in found]


def report(
    rows: Sequence[Mapping[str, Any]],
    given: argparse.Namespace,
    *,
    decimals: Mapping[str, int] | None = None,
    shown: bool = True,
) -> None:
    """Write ``NAME.csv``, which names the hardware, and ``NAME.md`` in the output folder; print the table if ``shown``.

    A table with runs of ``--known`` files also has the column ``trained on``: the machines of its runs.
    """
    flat, of_runs = [], "; ".join(sorted(getattr(given, "trained_on", ())))
    for row in rows:
        cells: dict[str, Any] = {}
        for column, value in row.items():
            spread = isinstance(value, tables.Spread)
            cells[column] = value.mean if spread else value
            if spread:
                cells[f"{column} std"] = value.std
        flat.append(cells | {"scale": given.scale} | ({"trained on": of_runs} if of_runs else {}))
    columns = list(dict.fromkeys(column for row in flat for column in row))
    common.save_table(
        [{column: row.get(column) for column in columns} for row in flat], given.out / f"{given.name}.csv"
    )
    page = tables.write(list(rows), given.out / f"{given.name}.md", decimals={"updates": 0} | dict(decimals or {}))
    if shown:
        print(page.read_text(encoding="utf-8"))
    print(f"{common.hardware()}; written to {page.with_suffix('.csv')} and {page.name}")
