"""The tables of a sweep as files: CSV, Markdown and, with pyarrow, Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_async.base import disk
from fedjax_async.results import clients, comparisons, files, metrics, tables, tuning
from fedjax_async.results.sweep_table import (
    USUAL,
    SweptRun,
    TableColumns,
    TableOptions,
    by_setting,
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


def write_tables(found: Sequence[SweptRun], folder: Path, options: TableOptions = USUAL) -> list[str]:
    """Write ``runs`` and ``evaluations`` as CSV and Parquet; ``settings``, ``best`` and ``pairs`` as CSV and Markdown.

    Returns the names of the files.
    """
    final = options.final
    rows, long = run_rows(found, final), evaluation_columns(found)
    summary = setting_rows(found, options)
    folder.mkdir(parents=True, exist_ok=True)
    tables.write(rows, folder / "runs.csv")
    disk.write(folder / "evaluations.csv", files.csv_bytes(long))
    tables.write(setting_rows(found, options, further=True), folder / "settings.csv")
    tables.write(summary, folder / "settings.md", decimals=tables.decimals_of(summary))
    tables.write(tuning.chosen_rows(found, options, further=True), folder / "best.csv")
    disk.write(folder / "best.md", best(found, options).encode())
    written = ["runs.csv", "evaluations.csv", "settings.csv", "settings.md", "best.csv", "best.md"]
    title = metrics.final_title(metric_of(found), final)
    pairs = comparisons.write_pairs(tuning.pair_rows(found, options), folder, title)
    written += ["pairs.csv", "pairs.md"] if pairs else []
    groups = {name: [each.run for each in group] for name, group in by_setting(found).items()}
    written += ["clients.csv", "clients.md"] if clients.write_client_tables(groups, folder, final, "setting") else []
    parquet = parquet_writer()
    for name, columns in (("runs.parquet", as_columns(rows)), ("evaluations.parquet", long)):
        if parquet is None:
            (folder / name).unlink(missing_ok=True)  # an earlier call's file may hold other runs
        else:
            disk.write(folder / name, parquet(columns))
            written.append(name)
    return written
