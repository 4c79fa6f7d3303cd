"""One self-contained HTML page about folders of runs, comparisons and sweeps; it opens without a network.

The page is ``report_page.html`` with the source of plotly.js and the report's JSON inserted. Its script writes text by
``textContent``, so nothing in a setting or a name can become HTML or JavaScript. All numbers come from the functions
and files of the tables and pictures.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.engine.record import REAL_TIMES
from fedjax_async.results import files, html_figures, store, tables
from fedjax_async.results.claim import require_writable
from fedjax_async.results.figure import AXES, require_matplotlib
from fedjax_async.results.html_figures import MOST_LINES
from fedjax_async.results.html_folders import (
    Content,
    FolderContent,
    read,
    results_in,
    table_of,
)
from fedjax_async.results.measured import curve_columns, meanings
from fedjax_async.results.provenance import VERSIONS
from fedjax_async.results.worlds import differences, end_text, faults_text, warn_of_differences
from fedjax_async.types import Run

PAGE = Path(__file__).with_name("report_page.html")
JSON_HERE, PLOTLY_HERE = "<!-- the report's JSON -->", "<!-- plotly.js -->"
# Together with plotly.js (5 MB) these keep a page below 10 MB.
MOST_DETAILS = 24  # runs with a Gantt chart and a view of their clients
ALL_JOBS = 12_000  # bars of all Gantt charts together
ALL_SEEDS = 200  # lines of single seeds
ALL_POINTS = 100_000  # points of all curves together


def _settings(source: FolderContent) -> Content:
    """The settings that are the same in all runs, a table of those that differ, and the versions."""
    runs = {member.name: member.run for members in source.groups.values() for member in members}
    texts = {
        name: {key: json.dumps(files.plain(value)) for key, value in run.settings.items()} for name, run in runs.items()
    }
    keys = list(dict.fromkeys(key for each in texts.values() for key in each))
    differing = [key for key in keys if len({each.get(key) for each in texts.values()}) > 1]
    first = next(iter(texts.values()))
    rows = [{"run": name} | {key: each.get(key, tables.NOTHING) for key in differing} for name, each in texts.items()]
    versions: dict[str, int] = {}
    for member in itertools.chain(*source.groups.values()):
        text = json.dumps(json.loads((member.folder / VERSIONS).read_bytes()))
        versions[text] = versions.get(text, 0) + 1
    return {
        "common": {key: first[key] for key in keys if key not in differing},
        "differing": table_of("Settings that differ", rows) if differing else None,
        "versions": [{"runs": count, "of": json.loads(text)} for text, count in versions.items()],
    }


def _details(name: str, folder: Path, most_jobs: int) -> Content:
    """Gantt chart, clients and counters of one run."""
    run = store.load(folder)
    figures = [html_figures.schedule(run, most_jobs)] if run.schedule.client.size else []
    figures += html_figures.clients(run)
    notes = [meanings(f"client_{score}" for score in run.per_client)]
    if not run.per_client:
        notes = ["No scores of single clients: the run was made without --per-client."]
    notes += [f"{text.capitalize()}."] if (text := faults_text(run.counters)) else []
    notes += [f"The run {text}."] if (text := end_text(run)) else []
    kept = {key: value for key, value in run.counters.items() if key not in REAL_TIMES}
    counters = {key: json.dumps(files.plain(value)) for key, value in kept.items()}
    if run.stopped is not None:
        counters[f"stopped by {run.stopped.by}"] = run.stopped.why
    return {"name": name, "figures": [each._asdict() for each in figures], "notes": notes, "counters": counters}


def _labels(paths: Sequence[Path]) -> list[str]:
    """The last name of each folder, or its whole path if two folders have the same name."""
    names = [path.resolve().name for path in paths]
    return [str(path) if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]


def _chosen(
    sources: Sequence[FolderContent], labels: Sequence[str]
) -> tuple[dict[str, list[Run]], list[tuple[str, Path]], list[str]]:
    """Name -> runs with curves; name and folder of each run with details; notes on what the curves leave out."""
    share = max(1, MOST_LINES // len(sources))
    drawn: dict[str, list[Run]] = {}
    places: list[tuple[int, str, Path]] = []
    notes = []
    for label, source in zip(labels, sources, strict=True):
        for group, members in itertools.islice(source.groups.items(), share):
            name = group if len(sources) == 1 else f"{label}: {group}"
            drawn[name] = [member.run for member in members]
            for number, member in enumerate(members):
                places.append((number, f"{name}, seed {member.run.settings.get('seed', '?')}", member.folder))
        if len(source.groups) > share:
            order = "best" if source.kind == "sweep" else "first"
            notes.append(f"Curves: the {order} {share} of {len(source.groups)} of {label}.")
    places.sort(key=lambda each: each[0])  # the first seed of each group before the second
    return drawn, [(name, folder) for _, name, folder in places[:MOST_DETAILS]], notes


def content(folders: Sequence[str | Path]) -> Content:
    """Everything that the page shows, as its JSON; ``ValueError`` as in :func:`write_report`."""
    check.require(len(folders) > 0, "folders", list(folders), "at least one folder")
    check.require(len({Path(f).resolve() for f in folders}) == len(folders), "folders", list(folders), "different")
    found = {path.resolve(): path for folder in folders for path in results_in(folder)}
    sources = [read(path) for path in found.values()]
    labels = _labels([source.path for source in sources])
    together, details, notes = _chosen(sources, labels)
    total = sum(len(members) for source in sources for members in source.groups.values())
    left = f"{len(details)} of {total} runs, the first seeds first." if len(details) < total else ""
    most_jobs = min(1_500, ALL_JOBS // len(details))
    kind = "setting" if any(source.kind == "sweep" for source in sources) else "method"
    rows = [
        ({"folder": label} if len(sources) > 1 else {}) | {kind: group} | dict(member.row)
        for label, source in zip(labels, sources, strict=True)
        for group, members in source.groups.items()
        for member in members
    ]
    apart = f"The curves are of {different}." if (different := differences(together)) else ""
    warn_of_differences(together)
    curves, thinned = _curves(together)
    return {
        "title": ", ".join(labels if len(folders) == len(labels) else _labels([Path(folder) for folder in folders])),
        "about": f"{total} run{'s' if total > 1 else ''} in {len(sources)} folder{'s' if len(sources) > 1 else ''}",
        "sources": [
            {"name": label, "kind": source.kind, "notes": source.notes, "tables": source.tables} | _settings(source)
            for label, source in zip(labels, sources, strict=True)
        ],
        "runs": table_of("", rows),
        "curves": {"figures": curves, "notes": [*filter(None, [apart]), *notes, *thinned]},
        "details": {"runs": [_details(name, folder, most_jobs) for name, folder in details], "note": left},
    }


def _curves(runs: Mapping[str, Sequence[Run]]) -> tuple[Content, list[str]]:
    """``figures[metric][unit]`` for every metric with a finite value, and notes on what they leave out."""
    every = [run for seeds in runs.values() for run in seeds]
    metrics = ("accuracy", "loss")
    shown = [name for name in metrics if any(np.isfinite(run.evaluations[name]).any() for run in every)] or ["loss"]
    groups = {name: list(runs) for name in shown} | curve_columns(runs, shown[0])
    shown = list(groups)
    most_seeds = max(1, ALL_SEEDS // len(runs))
    units = [unit for unit in AXES if unit != "energy" or all("energy" in run.evaluations for run in every)]
    lines = sum(min(len(seeds), most_seeds) + 4 for seeds in runs.values()) * len(shown) * len(units)
    most = max(20, min(2_000, ALL_POINTS // lines))
    longest = max(len(run.evaluations["time"]) for run in every)
    seeds = max(map(len, runs.values()))
    notes = [f"Long curves: {most} of up to {longest:,} evaluations, evenly spread."] if longest > most else []
    notes += [f"Single seeds: the first {most_seeds} of {seeds}."] if seeds > most_seeds else []
    notes += [about] if (about := meanings(groups)) else []
    figures = {
        name: {
            unit: html_figures.curves({each: runs[each] for each in groups[name]}, unit, name, most, most_seeds)
            for unit in units
        }
        for name in shown
    }
    return figures, notes


def _embedded(value: object) -> str:
    """JSON that cannot end the element around it: ``<``, ``>`` and ``&`` are written as escapes."""
    text = json.dumps(files.plain(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def write_report(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one HTML page about ``folders``, each with a finished run, comparison or sweep; returns ``path``.

    Of a folder that only holds folders with results, such as ``runs``, these are shown.

    The page has sortable tables, curves with every seed, the schedule as a Gantt chart that can be zoomed, results of
    clients, settings and versions. It loads nothing from a network. Large results are cut, and the page says where.
    The same results give the same bytes. The tables of methods and settings in the folder are shown if they belong to
    its finished runs; otherwise new ones are made with the default options. :func:`fedjax_async.results.redraw` writes
    those in the folder with others, such as another target or final value.

    Raises: ``ValueError`` if plotly or matplotlib (extra ``report``) is missing, the path does not end in ``.html`` or
    cannot be written, or a folder holds no finished run.
    """
    path = check.path("path", path)
    check.one_of("file ending", path.suffix, (".html",))
    listed = isinstance(folders, Sequence) and not isinstance(folders, str)
    check.require(listed, "folders", folders, "a list of folders, such as ['runs/one']")
    found = [check.path("folder", folder) for folder in folders]
    for folder in found:
        if not folder.is_dir():
            state = "it is a file" if folder.exists() else "there is no such folder"
            raise ValueError(f"folder = {str(folder)!r}: must hold a finished run, comparison or sweep, but {state}")
    require_writable("file", path)
    html_figures.require_plotly()
    require_matplotlib()
    shown = content(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, page_of(shown))
    return path


def page_of(shown: Content) -> bytes:
    """The HTML page of a report's JSON, as :func:`content` returns it; its details may have no runs."""
    plotly = html_figures.require_plotly().offline.get_plotlyjs()
    head, rest = PAGE.read_text(encoding="utf-8").split(JSON_HERE)
    middle, tail = rest.split(PLOTLY_HERE)
    page: str = head + _embedded(shown) + middle + plotly + tail
    return page.encode()
