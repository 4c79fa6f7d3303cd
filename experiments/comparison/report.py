"""The HTML page of a comparison: curves of every block, and its tables; it opens without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import summary
from kept import Kept, Results
from scenes import TASKS

from fedjax_async.base import check, disk
from fedjax_async.results import html_figures
from fedjax_async.results.claim import require_writable
from fedjax_async.results.html_folders import table_of
from fedjax_async.results.html_report import page_of
from fedjax_async.types import Run

UNITS = ("time", "bytes")


def as_run(kept: Kept) -> Run:
    """The curve of a kept run as the evaluations of a ``Run``, which the figures draw."""
    count = len(kept.scores)
    evaluations = {
        "time": np.linspace(0.0, kept.time, count),
        "update": np.zeros(count, np.int64),  # not kept
        "bytes_up": 1e6 * kept.sent,
        "bytes_down": np.zeros(count),
        "loss" if TASKS[kept.task].gap else "accuracy": kept.scores,
    }
    server = SimpleNamespace(closes=np.zeros(0, bool))  # what tells a run with a server from one without
    return Run({"seed": kept.seed}, (), evaluations, {}, {}, {}, server)


def _figure(runs: Mapping[str, Sequence[Run]], unit: str, *, gap: bool) -> html_figures.Json:
    figure: Any = html_figures.curves(runs, unit, "loss" if gap else "accuracy", 1000, 1000)
    if gap:
        figure["layout"]["yaxis"]["title"]["text"] = "loss above the smallest one (decimal logarithm)"
    return figure


def content(found: Results, about: str) -> dict[str, Any]:
    """What the page shows, as ``html_report.content`` describes a report."""
    blocks: dict[str, dict[str, list[Run]]] = {}
    for (world, task, method), runs in summary.grouped(found.runs).items():
        blocks.setdefault(f"{world}, {task}", {})[method] = [as_run(run) for run in runs]
    gaps = {f"{run.world}, {run.task}": TASKS[run.task].gap for run in found.runs}
    figures = {name: {unit: _figure(runs, unit, gap=gaps[name]) for unit in UNITS} for name, runs in blocks.items()}
    rows, numbers = summary.rank_rows(found)
    tables = [table_of("Mean ranks", rows), table_of("Tests", [numbers])] if rows else []
    further = {"Tuning": found.tried, "Not run": found.refused}
    tables += [table_of(title, [row._asdict() for row in each]) for title, each in further.items() if each]
    notes = ["Scores are test accuracies, or for the logistic problem decimal logarithms of the loss gap."]
    return {
        "title": "Comparison of methods with a server",
        "about": about,
        "sources": [
            {"name": "all blocks", "kind": "comparison", "notes": notes, "tables": tables}
            | {"common": {}, "differing": None, "versions": []}
        ],
        "runs": table_of("", summary.method_rows(found)),
        "curves": {"figures": figures, "notes": []},
        "details": {"runs": [], "note": ""},
    }


def require(path: Path) -> None:
    """``ValueError`` unless a page can be written to ``path``: without plotly, and if it is no ``.html`` file."""
    check.one_of("html", path.suffix, (".html",))
    require_writable("html", path)
    html_figures.require_plotly()


def write(found: Results, path: Path, about: str) -> None:
    """Write the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.write(path, page_of(content(found, about)))
