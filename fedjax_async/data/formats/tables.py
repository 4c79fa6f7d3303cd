"""Columns of Arrow tables as arrays: numbers, lists of equal length, images, texts, names of clients.

The readers of Parquet files and of Hugging Face folders use this file and pyarrow (extra ``formats``). Only the
columns that are asked for are read.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.base.check import require, whole
from fedjax_async.data import characters, tokens
from fedjax_async.data.checking import as_labels
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.clients import ClientRows, pooled
from fedjax_async.data.images import import_pillow
from fedjax_async.data.looks import DataWarning, rounded

IMAGES = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # the image formats that Pillow may decode
MOST_PIXELS = 2**26  # of one image
DEEP = ("I", "F")  # with these, Pillow's modes of more than 8 bits a channel begin; it would cut their values at 255


class ReadColumns(NamedTuple):
    """Which columns are read, and how."""

    x: str  # or several columns of numbers, joined by +
    y: str | None  # None: x is text, and the task is its next character
    client: str | None  # the natural owner of a row
    length: int  # texts are cut to this number of characters, or tokens
    vocabulary: str | None  # of token ids; None: texts become codes of characters

    @property
    def inputs(self) -> list[str]:
        """The columns of x."""
        return str(self.x).split("+")

    @property
    def names(self) -> list[str]:
        """The columns of x, then those of y and client."""
        return [*self.inputs, *(str(name) for name in (self.y, self.client) if name is not None)]


def read_columns(
    *, x: str = "image", y: str | None = "label", length: int = 80, vocabulary: str | None = None
) -> ReadColumns:
    """The columns of inputs and targets; options that the readers of tables share."""
    whole("length", length, 1 if vocabulary is None else tokens.SHORTEST)
    alone = vocabulary is None or y is not None
    require(alone, "vocabulary", vocabulary, "left out with y=none: the next characters are predicted, not tokens")
    return ReadColumns(x, y, None, length, vocabulary)


class Rows(NamedTuple):
    """The contents of the columns of one table."""

    x: Any  # an array [n, ...], or a list of texts
    y: Any  # an array [n, ...], a list of names, or None
    client: list[str] | None
    classes: list[str] | None  # the names of y's classes in the schema, if it has them


def arrow() -> ModuleType:
    """The module ``pyarrow``; raises ``ValueError`` if it is missing."""
    return lazy.optional("pyarrow", "files of CSV, Parquet and Arrow")


def require_columns(where: Path, schema: Any, columns: ReadColumns) -> None:
    """Raise ``ValueError`` for the first column that a table lacks, or if one is asked for twice."""
    for name in columns.names:
        require(name in schema.names, f"'{where}': column", name, f"one of {', '.join(schema.names)}")
    require(len(set(columns.names)) == len(columns.names), f"'{where}': columns", columns.names, "different columns")


def rows_of(where: Path, table: Any, columns: ReadColumns) -> Rows:
    """The contents of a table that has at least these columns."""
    require_columns(where, table.schema, columns)
    parts = [_values(where, name, table.column(name)) for name in columns.inputs]
    if len(parts) > 1:
        for name, part in zip(columns.inputs, parts):
            require(isinstance(part, np.ndarray) and part.ndim == 1, f"'{where}': {name}", "no numbers", "numbers")
        parts = [np.stack([_as_float32(f"'{where}': {n}", part) for n, part in zip(columns.inputs, parts)], axis=1)]
    if columns.vocabulary is not None:
        texts = isinstance(parts[0], list)
        require(texts, f"'{where}': {columns.x}", "no texts", "a column of texts, since a vocabulary is given")
        parts = [tokens.tokenize(parts[0], columns.length, vocabulary=columns.vocabulary)]
    y = None if columns.y is None else _values(where, columns.y, table.column(columns.y))
    if isinstance(y, np.ndarray) and y.dtype.kind in "biu":
        y = as_labels(f"'{where}': {columns.y}", y)
    owner = None if columns.client is None else _values(where, columns.client, table.column(columns.client))
    if owner is not None and not isinstance(owner, list):
        require(owner.ndim == 1, f"'{where}': {columns.client}", f"shape {owner.shape}", "a name or number per row")
        owner = [str(value) for value in owner.tolist()]
    return Rows(parts[0], y, owner, _class_names(table.schema, columns.y))


def _class_names(schema: Any, y: str | None) -> list[str] | None:
    """The names of the classes that Hugging Face's ``datasets`` keeps in a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[y]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return list(names) if isinstance(names, list) and names else None


def _values(where: Path, name: str, column: Any) -> Any:
    """A column as an array [n, ...] of numbers, or a list of texts; images are decoded."""
    pa, column_name = arrow(), f"'{where}': {name}"
    types = pa.types
    column = column.combine_chunks()
    column = column.chunk(0) if isinstance(column, pa.ChunkedArray) and column.num_chunks else column
    if isinstance(column, pa.ChunkedArray):  # no rows at all
        column = pa.array([], column.type)
    while isinstance(column, pa.ExtensionArray):
        column = column.storage
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        row = int(np.argmax(np.asarray(column.is_null())))
        require(False, f"{column_name}[{row}]", None, "a value: rows without one are not filled in")
    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind):
        return list(column.to_pylist())
    if types.is_struct(kind) and "bytes" in [kind.field(i).name for i in range(kind.num_fields)]:
        return _images(column_name, column.field("bytes"))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _images(column_name, column)
    return _numbers(column_name, column)


def _numbers(column_name: str, column: Any) -> np.ndarray:
    """Numbers, or lists of them, of equal lengths on each level."""
    types, shape = arrow().types, [len(column)]
    while types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        lengths = np.unique(np.asarray(column.value_lengths())) if len(column) else np.zeros(1, int)
        require(len(lengths) == 1, column_name, f"lists of {lengths.min()} to {lengths.max()}", "lists of one length")
        shape.append(int(lengths[0]))
        column = column.flatten()
        require(column.null_count == 0, column_name, "lists with missing values", "numbers")
    kind = column.type
    good = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    require(good, column_name, str(kind), "numbers, lists of numbers, images or texts")
    found = np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)
    return _as_float32(column_name, found) if found.dtype.kind == "f" else found


def _as_float32(column_name: str, values: np.ndarray) -> np.ndarray:
    """Numbers as the device has them; warns if their differences are lost."""
    if values.dtype.itemsize >= 4 and (said := rounded(column_name, values)):
        warnings.warn(said, DataWarning, stacklevel=2)
    return values.astype(np.float32)


def _images(column_name: str, column: Any) -> np.ndarray:
    """uint8 [n, H, W] or [n, H, W, C] from encoded images of one size."""
    image_module = import_pillow("encoded images")
    require(column.null_count == 0, column_name, "paths without contents", "images embedded in the file")
    found = []
    for row, content in enumerate(column):
        try:
            with image_module.open(io.BytesIO(content.as_py()), formats=IMAGES) as image:
                pixels = image.size[0] * image.size[1]
                require(pixels <= MOST_PIXELS, f"{column_name}[{row}]", f"{pixels} pixels", f"at most {MOST_PIXELS}")
                allowed = "an image of 8 bits a channel"
                require(not image.mode.startswith(DEEP), f"{column_name}[{row}]", f"mode {image.mode}", allowed)
                plain = image if image.mode in ("L", "RGB") else image.convert("RGB")
                found.append(np.asarray(plain, np.uint8))
        except (OSError, SyntaxError, image_module.DecompressionBombError) as error:
            reason = " ".join(str(error).split())[:100]
            raise ValueError(f"{column_name}[{row}]: must be an image ({reason})") from error
        alike = found[row].shape == found[0].shape
        require(alike, f"{column_name}[{row}]", f"shape {found[row].shape}", f"{found[0].shape}, as the first")
    return np.stack(found) if found else np.zeros((0, 1, 1), np.uint8)


def dataset_of(name: str, train: Sequence[Rows], test: Sequence[Rows], columns: ReadColumns) -> Dataset:
    """The data set of the rows of some tables; it has natural owners only if there is a column of clients."""
    train, test = list(train), list(test)
    every = _of_one_kind([*train, *test], columns)
    train, test = every[: len(train)], every[len(train) :]
    names = _class_order(name, every, columns)
    count = None if names is None else len(names)
    number = {value: i for i, value in enumerate(names or ())}
    parts = [[part for rows in some for part in _parts(rows, columns, number)] for some in (train, test)]
    classes = len(characters.VOCABULARY) if columns.y is None else count
    found = pooled(name, *parts, num_classes=classes)
    if names is not None and columns.y is not None:
        found = found._replace(class_names=tuple(map(str, names)))
    return found if columns.client is not None else found._replace(groups=None, test_groups=None, group_names=None)


def _of_one_kind(every: Sequence[Rows], columns: ReadColumns) -> list[Rows]:
    """The tables, with whole numbers as float32 in a column of which another table has floats."""
    x = _floats_in_all(columns.x, [rows.x for rows in every])
    y = _floats_in_all(str(columns.y), [rows.y for rows in every])
    return [rows._replace(x=own_x, y=own_y) for rows, own_x, own_y in zip(every, x, y, strict=True)]


def _floats_in_all(name: str, parts: Sequence[object]) -> list[object]:
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if all(array.dtype.kind != "f" for array in arrays):
        return list(parts)
    return [_as_float32(name, p) if isinstance(p, np.ndarray) and p.dtype.kind in "iu" else p for p in parts]


def _class_order(name: str, every: Sequence[Rows], columns: ReadColumns) -> list[str] | None:
    """The names of the classes in the order of their labels; None if labels are numbers without names."""
    field = f"{name}: {columns.y}"
    schemas = [rows.classes for rows in every if rows.classes is not None]
    for other in schemas:
        require(other == schemas[0], f"{field}, classes of a table", other, f"{schemas[0]}, as in the first table")
    named = [isinstance(rows.y, list) for rows in every if len(rows.x)]
    if not any(named):
        return schemas[0] if schemas else None
    values = sorted({value for rows in every if isinstance(rows.y, list) for value in rows.y})
    if not schemas:
        require(all(named), field, "names in one table and numbers in another", "names in all tables, or numbers")
        return values
    unknown = [value for value in values if value not in schemas[0]]
    require(not unknown, field, unknown[:3], f"names of the classes in the schema, {', '.join(map(str, schemas[0]))}")
    return schemas[0]


def _parts(rows: Rows, columns: ReadColumns, number: dict[str, int]) -> list[ClientRows]:
    """The rows of a table by client; without clients, all rows under one name."""
    names = rows.client if rows.client is not None else ["all"] * len(rows.x)
    client = {name: i for i, name in enumerate(dict.fromkeys(names))}
    owner = np.array([client[name] for name in names], np.int64)
    own = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=len(client)))[:-1])
    return [_part(name, rows, of, columns, number) for name, of in zip(client, own)]


def _part(client: str, rows: Rows, of: np.ndarray, columns: ReadColumns, number: dict[str, int]) -> ClientRows:
    """The rows with the indices ``of`` as the part of one client."""
    texts = isinstance(rows.x, list)
    if rows.y is None:
        require(texts, "y", None, "given: without it x is text, and the task is its next character")
        cut = characters.windows("\n".join(rows.x[i] for i in of) + "\n", columns.length)
        return ClientRows(client, cut[:, :-1], cut[:, 1:].astype(np.int32))
    x = characters.rows([rows.x[i] for i in of], columns.length) if texts else rows.x[of]
    if isinstance(rows.y, list):
        return ClientRows(client, x, np.array([number[rows.y[i]] for i in of], np.int32))
    return ClientRows(client, x, rows.y[of])
