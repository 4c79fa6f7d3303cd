"""Parquet files, one or a folder of them, such as those of the Hugging Face hub or of pandas."""

from __future__ import annotations

import importlib
from pathlib import Path

from fedjax_async.base.check import require
from fedjax_async.base.factories import takes
from fedjax_async.base.inputs import reading
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.clients import existing
from fedjax_async.data.formats.tables import (
    ReadColumns,
    Rows,
    arrow,
    dataset_of,
    read_columns,
    require_columns,
    rows_of,
)


@takes(columns=read_columns)
def parquet(*, path: str, test: str | None = None, client: str | None = None, columns: ReadColumns) -> Dataset:
    """Parquet files: parquet:path=FILE,x=image,y=label,client=writer; a folder with train*.parquet and test*.parquet.

    ``path``: a file or a folder. In a folder, files with a name that begins with ``test``, or in a folder of such a
    name, are the test set, the others the training set. ``test``: a file or folder with the test set; all other files
    of ``path`` are then the training set.

    ``x``: a column of images, lists of numbers or texts, or several columns of numbers joined by +. ``y``: a column of
    labels, names of classes or targets. ``client``: the column with the natural owner of each row; without it, a
    partitioner deals the rows. Only these columns are read. Texts become codes (``data.characters``), cut to
    ``length``; with ``y=none`` the task is to predict the next character, in windows of ``length`` (see shakespeare).
    With ``vocabulary``, ``minilm`` or the path of a vocab.txt, they become ``length`` token ids (``data.tokenize``).

    Raises ``ValueError`` naming file, column and row. Needs pyarrow (extra ``formats``), and Pillow for images.
    """
    columns = columns._replace(client=client)
    root = existing(path)
    files, tests = _files(root), [] if test is None else _files(existing(test, "test"))
    if root.is_dir() and test is None:
        tests = [file for file in files if any(one.startswith("test") for one in file.relative_to(root).parts)]
    held_out = {file.resolve() for file in tests}
    files = [file for file in files if file.resolve() not in held_out]
    require(bool(files), "path", str(root), "files of a training set beside those of the test set")
    train, tested = ([read(file, columns) for file in some] for some in (files, tests))
    return dataset_of(root.stem, train, tested, columns)


def _files(path: Path) -> list[Path]:
    found = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    require(bool(found), "path", str(path), "a Parquet file, or a folder with *.parquet")
    return found


def read(file: Path, columns: ReadColumns) -> Rows:
    """The columns of one file; raises ``ValueError`` if it is damaged or lacks a column."""
    pa = arrow()
    parquet_module = importlib.import_module("pyarrow.parquet")
    try:
        with parquet_module.ParquetFile(reading(file)) as content:
            require_columns(file, content.schema_arrow, columns)
            table = content.read(columns=columns.names)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"'{file}': must be a Parquet file ({reason})") from error
    return rows_of(file, table, columns)
