"""Everything about one run, or about several methods side by side, into one folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_async import disk
from fedjax_async.results import store, tables
from fedjax_async.results.figure import save_figure
from fedjax_async.results.plots import accuracy_curve, loss_curve, staleness_histogram
from fedjax_async.results.timeline import gantt
from fedjax_async.types import Run


def write_run(run: Run, folder: str | Path, plots: bool = True, *, overwrite: bool = False) -> Path:
    """Save ``run`` into ``folder`` (see :func:`fedjax_async.results.store.save`), with pictures beside it.

    Pictures: ``accuracy.png`` against virtual time (``loss.png`` for targets without classes), and, if
    anything arrived, ``staleness.png`` and ``gantt.png``. Data is written first: it is safe even where
    matplotlib is missing, which then raises ``ValueError`` naming the extra to install.
    """
    folder = store.save(run, folder, overwrite=overwrite)
    if plots:
        name = str(run.settings.get("method", "run"))
        _draw_curve({name: [run]}, folder)
    if plots and len(run.updates["staleness"]):
        save_figure(staleness_histogram(run), folder / "staleness.png")
        save_figure(gantt(run.schedule), folder / "gantt.png")
    return folder


def _draw_curve(runs: Mapping[str, Sequence[Run]], folder: Path) -> None:
    """Accuracy, or loss where nothing has classes."""
    labelled = any(not np.isnan(run.evaluations["accuracy"]).all() for seeds in runs.values() for run in seeds)
    draw, name = (accuracy_curve, "accuracy.png") if labelled else (loss_curve, "loss.png")
    save_figure(draw(runs), folder / name)


def write_comparison(
    runs: Mapping[str, Sequence[Run]], folder: str | Path, plots: bool = True, *, baseline: str | None = None
) -> str:
    """Compare methods: ``comparison.csv``, ``comparison.md`` and ``accuracy.png`` in ``folder``.

    ``runs`` maps each method to its runs, one a seed, in the same order of seeds; ``baseline`` as in
    :func:`fedjax_async.results.tables.comparison`. Returns the table as text, to be printed.
    """
    folder = Path(folder)
    rows = tables.comparison(runs, baseline)
    for name in ("comparison.csv", "comparison.md"):
        tables.write(rows, folder / name, decimals=tables.COMPARISON_DECIMALS)
    if plots:
        _draw_curve(runs, folder)
    disk.sweep_up(folder)
    return tables.table(rows, decimals=tables.COMPARISON_DECIMALS)
