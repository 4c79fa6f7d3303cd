"""The tables of a sweep as files: CSV, Markdown and, with pyarrow, Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_async.base import disk
from fedjax_async.results import clients, comparisons, files, latex, metrics, nodes_scores, tables, tuning
from fedjax_async.results.measured import measured
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
)


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
    return f"{head}\n\n{tables.table(rows, 'markdown', decimals=tables.decimals_of(rows))}"


def as_latex(
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
    about = nodes_scores.note(groups)
    text = tables.table(summary, "markdown", decimals=tables.decimals_of(summary))
    disk.write(folder / "settings.md", (text + (f"\n{about}\n" if about else "")).encode())
    tables.write(tuning.chosen_rows(found, options, further=True), folder / "best.csv")
    disk.write(folder / "best.md", best(found, options).encode())
    written = ["runs.csv", "evaluations.csv", "settings.csv", "settings.md", "best.csv", "best.md"]
    title, tests = metrics.final_title(metric_of(found), final), tuning.pair_rows(found, options)
    for name, chosen in (("settings.tex", False), ("best.tex", True)):
        disk.write(folder / name, as_latex(found, summary, tests, options, chosen=chosen).encode())
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
