"""The tables and pictures of a folder once more, with other options; nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_async.base import check
from fedjax_async.config.settings import as_dict
from fedjax_async.results import latex, reading, store
from fedjax_async.results.begun import load_plugins
from fedjax_async.results.beside import commanded
from fedjax_async.results.claim import claimed
from fedjax_async.results.figure import SCREEN, Drawing, require_matplotlib
from fedjax_async.results.metrics import FINAL, TARGET, require_final
from fedjax_async.results.runs import redraw_run, write_comparison
from fedjax_async.results.sweep_report import write_sweep
from fedjax_async.results.sweeps import collect
from fedjax_async.results.worlds import listed_in


def redraw(
    folder: str | Path,
    plots: bool = True,
    *,
    baseline: str | None = None,
    target: str | float | None = None,
    final: str = FINAL,
    columns: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> str:
    """Write the tables and pictures of a saved run, comparison or sweep again; returns the tables as text.

    The options are those of :func:`write_run`, :func:`write_comparison` and :func:`write_sweep`; those that are left
    out have their defaults, whatever an earlier call was given. Files of the same names are replaced. Of a comparison
    the methods that ``comparison.csv`` lists are compared, in its order, or else all. A run has no table of methods,
    so it takes ``final`` and ``drawing`` only.

    Raises: ``ValueError`` for a folder without finished results or with unequal seeds, and for wrong options.
    """
    path, kind = check.path("folder", folder), reading.require_results(folder)
    require_final(final)
    latex.require_columns(columns, more=True)
    if plots:
        require_matplotlib("plots=False")
    given = {"baseline": baseline, "target": target, "columns": columns}
    taken = {"run": (), "sweep": ("target", "columns"), "comparison": tuple(given)}[kind]
    for name, value in given.items():
        check.require(name in taken or value is None, name, value, f"left out for a {kind}")
    with claimed(path):
        if kind == "run":
            text = _run(path, plots, final, drawing)
        elif kind == "comparison":
            text = _comparison(path, plots, baseline, TARGET if target is None else target, final, columns, drawing)
        else:
            text = _sweep(path, plots, drawing, target=target, final=final, columns=columns)
        with commanded(path):
            return text


def require_energy(drawing: Drawing, settings: Iterable[Mapping[str, object]]) -> None:
    """``ValueError`` for curves against the energy of runs, given by their settings, that do not count it."""
    counted = drawing.x != "energy" or all(each.get("energy") is not None for each in settings)
    check.require(counted, "x", drawing.x, "time, update, step or bytes, as the run counts no energy (see --energy)")


def _run(path: Path, plots: bool, final: str, drawing: Drawing) -> str:
    run = store.load(path)
    require_energy(drawing, [run.settings])
    redraw_run(run, path, plots, final=final, drawing=drawing)
    return ""


def _comparison(
    path: Path,
    plots: bool,
    baseline: str | None,
    target: str | float,
    final: str,
    columns: Sequence[str] | None,
    drawing: Drawing,
) -> str:
    found = reading.comparison_in(path)
    runs = {name: found[name] for name in listed_in(path, found) or found}
    reading.require_same_seeds(path, runs)
    reading.require_same_settings(path, runs)
    require_energy(drawing, [run.settings for seeds in runs.values() for run in seeds])
    return write_comparison(
        runs, path, plots, baseline=baseline, target=target, final=final, columns=columns, drawing=drawing
    )


def _sweep(path: Path, plots: bool, drawing: Drawing, **options: Any) -> str:
    with contextlib.suppress(ValueError):  # collect warns of those that are not loaded
        load_plugins(path)
    sweep, missing = collect(path)
    require_energy(drawing, [as_dict(each) for each in sweep.settings])
    text = write_sweep(sweep, path, plots, drawing=drawing, **options)
    count = len(sweep.points)
    return f"{count} of {count + len(missing)} runs are finished\n\n{text}" if missing else text
