"""The report on a sweep: tables, curves, heat maps and the best settings, written into its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedjax_async.base import check, disk, lazy
from fedjax_async.results import figure as canvas
from fedjax_async.results import latex
from fedjax_async.results.curves import measured_curve
from fedjax_async.results.figure import SCREEN, Drawing, save_formats
from fedjax_async.results.heat_map import cells, heat_map
from fedjax_async.results.measured import curve_columns
from fedjax_async.results.metrics import FINAL, has_accuracy
from fedjax_async.results.sweep_files import best, write_tables
from fedjax_async.results.sweep_table import USUAL, SweptRun, TableOptions, by_setting, metric_of, swept_runs
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tuning import plain, rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_PARQUET = f"no Parquet files: {lazy.missing('pyarrow', 'them')}"
MOST_CURVES = 10  # more cannot be told apart


def curves(
    found: Sequence[SweptRun],
    metric: str,
    x: str | None = None,
    options: TableOptions = USUAL,
    *,
    drawing: Drawing = SCREEN,
) -> Figure:
    """Mean and standard deviation over seeds of each setting, or of the ``MOST_CURVES`` best ones."""
    grouped = by_setting(found)
    names = list(grouped)
    ranked = rank(found, options.final, options.roles)
    shown = [names[index] for index in sorted(ranked.order[:MOST_CURVES])]
    runs = {name: [each.run for each in grouped[name]] for name in shown}
    figure = measured_curve(runs, metric, x, final=options.final, drawing=drawing)
    if len(shown) < len(names):
        by = ranked.metric if ranked.metric.startswith("validation") else f"test {ranked.metric}"
        title = f"best {len(shown)} of {len(names)} settings by {plain(by)}"
        above = figure.axes[0].get_title(loc="left")  # that the worlds differ
        title = "\n".join(filter(None, [above, title]))
        figure.axes[0].set_title(title, loc="left", fontsize=8, color=canvas.FAINT)
    return figure


def pictures(
    found: Sequence[SweptRun], options: TableOptions = USUAL, drawing: Drawing = SCREEN
) -> Mapping[str, Figure]:
    """Name -> picture: curves of each metric, and heat maps if two settings or more were swept."""
    drawn: dict[str, Figure] = {}
    for metric in ("accuracy", "loss") if has_accuracy(each.run for each in found) else ("loss",):
        drawn[metric] = curves(found, metric, options=options, drawing=drawing)
        maps = cells(found, metric, options.final, options.roles)
        if maps:
            drawn[f"{metric}_map"] = heat_map(maps, metric, options.final, drawing=drawing)
    for column in curve_columns({"all": [each.run for each in found]}, metric_of(found)):  # columns that all runs have
        drawn[column] = curves(found, column, options=options, drawing=drawing)
    return drawn


def write_sweep(
    sweep: Sweep,
    folder: str | Path | None = None,
    plots: bool = True,
    *,
    target: float | None = None,
    final: str = FINAL,
    interval: str = "t",
    columns: Sequence[str] | None = None,
    drawing: Drawing = SCREEN,
) -> str:
    """Write the tables and pictures of a sweep; returns the best settings as text, to be printed.

    - ``runs.csv``: one row per run; ``evaluations.csv``: one row per evaluation; both also as ``.parquet`` if pyarrow
      is installed.
    - ``settings.csv``, ``settings.md``, ``settings.tex``: mean and standard deviation over seeds, one row per setting;
      ``columns`` are the short names of those of the LaTeX table, such as ``["accuracy", "staleness"]``.
    - ``best.csv``, ``best.md``: for each compared method in each world, the chosen values of the tuned settings, the
      part of the data that chose them, and the number of trials; the sweep's ``roles`` say which settings are tuned.
      ``best.tex`` has the chosen settings alone.
    - ``pairs.csv``, ``pairs.md``: paired tests between the chosen settings of each world, from three seeds on.
    - ``accuracy.png``, ``loss.png``: curves with their deviation; ``accuracy_map.png``, ``loss_map.png`` if two or more
      settings were swept.

    Other columns that all runs have (training loss, metrics) have their final values in the tables, and a curve each.
    With scores of single clients there are ``clients.csv`` and ``clients.md``, and curves of the worst tenth.

    The same results give the same bytes. ``folder``: by default the sweep's own. ``target``: an accuracy in (0, 1];
    adds the virtual time, updates and bytes until it is reached. ``final`` and ``interval``: as in
    :func:`fedjax_async.results.comparisons.comparison`. ``drawing``: formats, width and title of the pictures.
    """
    folder = sweep.folder if folder is None else check.path("folder", folder)
    if folder is None:
        raise ValueError("folder = None: must be given for a sweep that was not kept in one")
    if not sweep.points:
        raise ValueError(f"folder = {str(folder)!r}: must hold at least one finished run")
    latex.require_columns(columns, more=True)
    found = swept_runs(sweep, target)
    options = TableOptions(target, final, interval, sweep.roles, columns)
    written = write_tables(found, folder, options)
    text = best(found, options)
    if plots:
        for name, figure in pictures(found, options, drawing).items():
            save_formats(figure, folder / name, drawing)
    disk.sweep_up(folder)
    return text if "runs.parquet" in written else f"{text}\n{NO_PARQUET}\n"
