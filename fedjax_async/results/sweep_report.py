"""The report on a sweep in its folder: tables (CSV, Markdown, LaTeX and, with pyarrow, Parquet), curves, heat maps."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_async.base import check, disk, lazy
from fedjax_async.results import clients, comparisons, files, latex, metrics, sweep_folder, tables, tuning
from fedjax_async.results import figure as canvas
from fedjax_async.results.curves import measured_curve
from fedjax_async.results.figure import SCREEN, Drawing, curve_stem, remove_pictures, save_formats
from fedjax_async.results.heat_map import cells, heat_map
from fedjax_async.results.measured import curve_columns, measured
from fedjax_async.results.metrics import FINAL, has_accuracy
from fedjax_async.results.sweep_table import (
    USUAL,
    SweptRun,
    TableColumns,
    TableOptions,
    by_setting,
    columns_of,
    evaluation_columns,
    metric_of,
    run_rows,
    setting_rows,
    swept_runs,
)
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tuning import plain, rank
from fedjax_async.results.worlds import note_on_nodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NO_PARQUET = f"no Parquet files: {lazy.missing('pyarrow', 'them')}"
MOST_CURVES = 10  # more cannot be told apart


# --- tables -------------------------------------------------------------------------------------------


def as_columns(rows: Sequence[tables.Row]) -> TableColumns:
    """Rows as columns; None where a row lacks the cell."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _arrow(column: Any) -> Any:
    """A list with one type, as Parquet needs: mixed integers and floats become floats, other mixtures strings."""
    kinds = {type(value) for value in column if value is not None} if isinstance(column, list) else set()
    if len(kinds) > 1:
        convert: Callable[[Any], object] = float if kinds == {int, float} else str
        return [None if value is None else convert(value) for value in column]
    return column


def parquet_writer() -> Callable[[TableColumns], bytes] | None:
    """A function from columns to the bytes of a Parquet file; None if pyarrow (extra ``sweep``) is not installed."""
    try:
        import pyarrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        return None

    def content(columns: TableColumns) -> bytes:
        stream = io.BytesIO()
        arrays = {name: pyarrow.array(_arrow(column)) for name, column in columns.items()}
        parquet.write_table(pyarrow.table(arrays), stream)
        return stream.getvalue()

    return content


def best(found: Sequence[SweptRun], options: TableOptions = USUAL) -> str:
    """The chosen settings as Markdown: a paragraph that says how they were chosen, and a table; see ``tuning.py``."""
    rows = tuning.chosen_rows(found, options)
    head = tuning.explained(found, options)
    if options.target is not None and metric_of(found) == "loss":
        head += f"\nNo costs of the target {options.target}: no run has class labels."
    return f"{head}\n\n{tables.table(rows, 'markdown', decimals=tables.decimals_of(rows))}"


def _as_latex(
    found: Sequence[SweptRun],
    rows: Sequence[tables.Row],
    tests: Sequence[tables.Row],
    options: TableOptions = USUAL,
    *,
    chosen: bool = False,
) -> str:
    """The settings for a paper, or the ``chosen`` one of each tuning; ``rows``: of all settings, in order.

    ``tests``: the paired tests between the chosen settings of each world.
    """
    every, metric = [each.run for each in found], metric_of(found)
    names = tuning.pair_names(found, options)
    shown = list(names) if chosen else range(len(rows))
    of_rows = [names.get(index, (index, "")) for index in shown]
    worlds = tuning.axes_of(found, options.roles)["world"]
    groups = [str(group[0].point.shown(worlds)) for group in by_setting(found).values()]
    p_values = latex.p_values(tests, [each if each[0] else each[1] for each in of_rows])
    return latex.latex(
        [rows[index] for index in shown],
        list(columns_of(found).values()),
        [metric, f"validation_{metric}", "loss", *measured(every)],
        columns=options.columns,
        final=options.final,
        worlds=[groups[index] for index in shown],
        tests=latex.PairedTests(metrics.final_title(metric, options.final), p_values),
    )


def write_tables(found: Sequence[SweptRun], folder: Path, options: TableOptions = USUAL) -> list[str]:
    """Write ``runs``, ``evaluations`` as CSV and Parquet; ``settings``, ``best``, ``pairs`` as CSV and Markdown.

    ``settings`` and ``best`` are written as LaTeX too, the latter with the chosen settings alone. Returns the names of
    the files.
    """
    final = options.final
    rows, long = run_rows(found, final), evaluation_columns(found)
    summary = setting_rows(found, options)
    folder.mkdir(parents=True, exist_ok=True)
    tables.write(rows, folder / "runs.csv")
    disk.write(folder / "evaluations.csv", files.csv_bytes(long))
    tables.write(setting_rows(found, options, further=True), folder / "settings.csv")
    groups = {name: [each.run for each in group] for name, group in by_setting(found).items()}
    about = note_on_nodes(groups)
    text = tables.table(summary, "markdown", decimals=tables.decimals_of(summary))
    disk.write(folder / "settings.md", (text + (f"\n{about}\n" if about else "")).encode())
    tables.write(tuning.chosen_rows(found, options, further=True), folder / "best.csv")
    disk.write(folder / "best.md", best(found, options).encode())
    written = ["runs.csv", "evaluations.csv", "settings.csv", "settings.md", "best.csv", "best.md"]
    title, tests = metrics.final_title(metric_of(found), final), tuning.pair_rows(found, options)
    for name, chosen in (("settings.tex", False), ("best.tex", True)):
        disk.write(folder / name, _as_latex(found, summary, tests, options, chosen=chosen).encode())
        written.append(name)
    written += ["pairs.csv", "pairs.md"] if comparisons.write_pairs(tests, folder, title) else []
    written += ["clients.csv", "clients.md"] if clients.write_client_tables(groups, folder, final, "setting") else []
    parquet = parquet_writer()
    for name, columns in (("runs.parquet", as_columns(rows)), ("evaluations.parquet", long)):
        if parquet is None:
            (folder / name).unlink(missing_ok=True)  # an earlier call's file may hold other runs
        else:
            disk.write(folder / name, parquet(columns))
            written.append(name)
    return written


# --- pictures -----------------------------------------------------------------------------------------


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
        several = len(tuning.tunings(found, options.final, options.roles)) > 1  # then others may be better
        which = "{} of {} settings, the best of each tuning by {}" if several else "best {} of {} settings by {}"
        title = which.format(len(shown), len(names), plain(by))
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
    adds the virtual time, updates and bytes until it is reached. ``final``: as in
    :func:`fedjax_async.results.comparisons.comparison`. ``drawing``: formats, width and title of the pictures.
    """
    folder = sweep.folder if folder is None else check.path("folder", folder)
    if folder is None:
        raise ValueError("folder = None: must be given for a sweep that was not kept in one")
    if not sweep.points:
        raise ValueError(f"folder = {str(folder)!r}: must hold at least one finished run")
    latex.require_columns(columns, more=True)
    found = swept_runs(sweep, target)
    options = TableOptions(target, final, sweep.roles, columns)
    written = write_tables(found, folder, options)
    text = best(found, options)
    if plots:
        drawn = pictures(found, options, drawing)
        remove_pictures(folder, set(sweep_folder.PICTURES) - set(drawn))  # of fewer runs, or of other ones
        for name, figure in drawn.items():
            stem = name if name.endswith("_map") else curve_stem(name, drawing)
            save_formats(figure, folder / stem, drawing)
    disk.sweep_up(folder)
    return text if "runs.parquet" in written else f"{text}\n{NO_PARQUET}\n"
