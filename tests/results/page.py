"""Folders for the HTML report, made without training, and the JSON of a page."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.config.grid import GridPoint, expand
from fedjax_async.config.settings import as_dict
from fedjax_async.results import html_report, store, sweep_folder, write_comparison, write_sweep
from fedjax_async.results.files import plain
from fedjax_async.results.sweeps import Sweep
from fedjax_async.types import Run
from tests.results.made_up import make_run

NASTY = "</script><img src=x onerror=\"document.title='owned'\"><b>%{x}</b>&lt;\u2028|\"'"


def seeded(accuracies: list[list[float]], method: str = "fedavg", times: list[list[float]] | None = None) -> list[Run]:
    """A run of ``method`` for each seed 0, 1, ..."""
    found = []
    for seed, accuracy in enumerate(accuracies):
        run = make_run(accuracy, None if times is None else times[seed], method)
        found.append(run._replace(settings=run.settings | {"seed": seed}))
    return found


def save_comparison(folder: Path, runs: dict[str, list[Run]], **options: Any) -> Path:
    """What ``compare`` writes into a folder, without pictures."""
    for name, seeds in runs.items():
        for run in seeds:
            store.save(run, folder / "runs" / re.sub(r"[^\w.-]+", "_", name) / f"seed_{run.settings['seed']}")
    write_comparison(runs, folder, plots=False, **options)
    return folder


def save_sweep(folder: Path, finished: int | None = None, target: float | None = None) -> tuple[Path, list[GridPoint]]:
    """What a sweep over two values and two seeds writes; ``finished``: how many of its four runs are finished."""
    points = expand({"method": "fedasync", "updates": 9}, {"method.mixing": [0.2, 0.9]}, seeds=2)
    sweep_folder.begin(folder, points)
    for index, point in enumerate(points[:finished]):
        run = make_run([0.1, 0.2 + 0.1 * index, 0.3 + 0.15 * index])
        sweep_folder.save_run(run._replace(settings=as_dict(point.settings)), folder, point)
    write_sweep(Sweep(tuple(points[:finished]), folder), plots=False, target=target)
    return folder, points


def content(*folders: Path) -> dict[str, Any]:
    """The JSON in the page about these folders, without writing it."""
    return plain(html_report.content(folders))


def content_of(path: Path) -> dict[str, Any]:
    """The JSON in a page."""
    text = path.read_text(encoding="utf-8")
    (found,) = re.findall(r'<script id="report" type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def array(value: Any) -> np.ndarray:
    """A column of a figure: a list, or base64 with its type."""
    if not isinstance(value, dict):
        return np.array(value)
    shape = [int(size) for size in value.get("shape", "-1").split(",")]
    return np.frombuffer(base64.b64decode(value["bdata"]), np.dtype(value["dtype"])).reshape(shape)


def columns(table: dict[str, Any]) -> dict[str, list[Any]]:
    """Column of the CSV file -> its cells in a table of a page: numbers (None for NaN) or strings."""
    found: dict[str, list[Any]] = {}
    for at, column in enumerate(table["columns"]):
        for part, name in enumerate(column["of"]):
            cells = [row[at] for row in table["rows"]]
            found[name] = [cell[part + 1] if len(cell) > 1 else cell[0] for cell in cells]
    return found


def traces(page: dict[str, Any], metric: str, unit: str, part: str) -> list[dict[str, Any]]:
    """The traces of one kind in a figure of the curves."""
    return [each for each in page["curves"]["figures"][metric][unit]["data"] if each["meta"]["part"] == part]
