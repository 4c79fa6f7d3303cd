"""CSV files: a row an example, with columns for inputs, label, client and split."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.base.check import near_to, require
from fedjax_async.base.factories import takes
from fedjax_async.base.inputs import reading
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.clients import existing
from fedjax_async.data.formats.tables import ReadColumns, arrow, dataset_of, read_columns, rows_of

SEPARATORS = ",;\t|"
_WITH_COMMA = re.compile(r" *[+-]?\d+(,\d+)? *")
_NUMBER = re.compile(r" *[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? *")
SPLITS = {"train": False, "training": False, "test": True, "testing": True}  # whether such a row is a test example


@takes(columns=read_columns)
def csv(
    *,
    path: str,
    test: str | None = None,
    client: str | None = None,
    split: str | None = None,
    separator: str | None = None,
    columns: ReadColumns,
) -> Dataset:
    """CSV files with a header: csv:path=FILE,x=height+weight,y=kind,client=shop,split=part.

    ``path``: the file; ``test``: another one with the test set. ``split``: a column that says which rows are test
    examples, ``train`` or ``test``. Without either the data have no test set: give ``test_fraction``. ``x``: a column
    of numbers or texts, several of numbers joined by +, or ``x=others``, all columns that nothing else names.
    ``y``: a column of labels, names of classes or numbers. ``client``: the column with the owner of each row, read as
    text (007 stays 007); without it, a partitioner deals the rows. Spaces around names of classes and owners do not
    count, numbers have a decimal point. ``separator``: by default the one of ``, ; TAB |``
    that cuts the header into most names. ``length``, ``y=none``: as for ``parquet``.

    Raises ``ValueError`` naming file, column and row, also for missing values, and for a stray text such as ``?`` in a
    column of numbers. Needs pyarrow (extra ``formats``).
    """
    require(test is None or split is None, "split", split, "left out with a file for test")
    if separator is not None:
        require(separator in tuple(SEPARATORS), "separator", separator, "one of , ; | or a tab")
    columns = columns._replace(client=client)
    file, other = existing(path), None if test is None else existing(test, "test")
    table = _read(file, separator, columns)
    columns = _named(file, table.column_names, columns, split)
    if other is not None:
        tests = rows_of(other, _read(other, separator, columns), columns)
        return dataset_of(file.stem, [rows_of(file, table, columns)], [tests], columns)
    if split is None:
        return dataset_of(file.stem, [rows_of(file, table, columns)], [], columns)
    held_out = _held_out(file, table, split)
    parts = [rows_of(file, table.filter(np.asarray(chosen)), columns) for chosen in (~held_out, held_out)]
    return dataset_of(file.stem, parts[:1], parts[1:], columns)


def _read(file: Path, separator: str | None, columns: ReadColumns) -> Any:
    """The table of a file, with the texts of its column of clients; ``ValueError`` if it is none."""
    pa, client = arrow(), columns.client
    reader = importlib.import_module("pyarrow.csv")
    try:
        with open(reading(file), encoding="utf-8-sig") as lines:
            header = lines.readline()
        chosen = separator or max(SEPARATORS, key=header.count)
        parsing = reader.ParseOptions(delimiter=chosen, newlines_in_values=True)
        texts = {} if client is None else {client: pa.string()}  # a number would lose its zeros: 007
        converting = reader.ConvertOptions(strings_can_be_null=True, column_types=texts)
        table = reader.read_csv(file, parse_options=parsing, convert_options=converting)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"'{file}': must be a CSV file with a header ({reason})") from error
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"'{file}': columns", twice, "named differently")
    for name in {client, columns.y} & {*names}:
        if pa.types.is_string(table.column(name).type):
            trimmed = importlib.import_module("pyarrow.compute").utf8_trim_whitespace(table.column(name))
            table = table.set_column(names.index(name), name, trimmed)
    for name in (one for one in dict.fromkeys([*columns.inputs, columns.y]) if one in names):
        _check_decimals(f"'{file}': {name}", table.column(name))
    for name in (one for one in dict.fromkeys([*columns.inputs, columns.y]) if one in names):
        _check_numbers(f"'{file}': {name}", table.column(name), labels=name == columns.y)
    return table


def _check_decimals(where: str, column: Any) -> None:
    """Raise ``ValueError`` for numbers with a decimal comma, which are texts to the reader."""
    texts = column.to_pylist() if arrow().types.is_string(column.type) else []
    found = [_WITH_COMMA.fullmatch(text or "") for text in texts]
    first = next((row for row, match in enumerate(found) if match and match[1]), None)
    allowed = "written with a decimal point"
    require(first is None or not all(found), f"{where}[{first}]", texts[first or 0] if texts else None, allowed)


def _check_numbers(where: str, column: Any, *, labels: bool) -> None:
    """Raise ``ValueError`` for a few texts among numbers, such as ``?``: the whole column would be read as texts.

    ``labels``: whole numbers and texts with letters or digits, 1 and 2b, are names of classes.
    """
    cells = column.to_pylist() if arrow().types.is_string(column.type) else []
    texts = {row: text for row, text in enumerate(cells) if text is not None}
    strays = [row for row, text in texts.items() if _NUMBER.fullmatch(text) is None]
    if strays and 2 * len(strays) <= len(texts):
        first = texts[strays[0]]
        names = labels and any(map(str.isalnum, first)) and not any("." in text for text in texts.values())
        require(names, f"{where}[{strays[0]}]", first, "a number, as most of the column")


def _named(file: Path, names: list[str], columns: ReadColumns, split: str | None) -> ReadColumns:
    """The columns, with ``x=others`` as the names that it stands for."""
    for name in (columns.y, columns.client, split):
        known = name is None or name in names
        require(
            known, f"'{file}': column", name, f"one of the file's{near_to(name, names, everything='its first line')}"
        )
    if columns.x != "others" or "others" in names:
        return columns
    rest = [name for name in names if name not in (columns.y, columns.client, split)]
    return columns._replace(x="+".join(rest))


def _held_out(file: Path, table: Any, split: str) -> np.ndarray:
    """Which rows are test examples; bool[n]."""
    values = [str(value).strip().lower() for value in table.column(split).to_pylist()]
    for row, value in enumerate(values):
        require(value in SPLITS, f"'{file}': {split}[{row}]", value, "train or test")
    return np.array([SPLITS[value] for value in values], np.bool_)
