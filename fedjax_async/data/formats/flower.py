"""Partitions made by Flower's partitioners (``flwr-datasets``): a folder of partitions, or partition ids of rows.

A partitioner divides a data set into partitions, each a Hugging Face data set. ``flwr-datasets create`` writes them as
``partition_0``, ``partition_1``, ... with ``save_to_disk``; Parquet and Arrow files work too. If a partition is itself
split into training and test examples, its client keeps this split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.base.check import require
from fedjax_async.base.factories import takes
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats import hugging_face as folders
from fedjax_async.data.formats import parquet
from fedjax_async.data.formats.clients import existing, read_csv, read_json
from fedjax_async.data.formats.tables import ReadColumns, Rows, dataset_of, read_columns

_NUMBERED = re.compile(r"(?:.*[^\d])?(\d+)")


@takes(columns=read_columns)
def flower(*, path: str, partitions: str | None = None, test: str | None = None, columns: ReadColumns) -> Dataset:
    """Partitions of Flower's partitioners: flower:path=DIR,x=img,y=label; natural clients are the partitions.

    ``path``: a folder with the numbered partitions, each a folder of save_to_disk (``flwr-datasets create``), a Parquet
    file or an Arrow file. A name ends in the partition's number; clients have the order of these numbers, and those
    without training rows come last.

    ``partitions``: a file that assigns the rows of one data set (``path`` is then such a folder or file). It is JSON, a
    list of ids with one per row, or an object id -> list of rows; or CSV with the columns example and partition.
    Clients have the order of the ids, rows without a partition are left out, and the split ``test`` of the data set is
    the global test set.

    ``test``: another data set. Its split ``test``, or all its rows if it has one split or none, are global test
    examples. They are added to the test rows of numbered partitions; with ``partitions``, they replace the split
    ``test``. Other options as for ``parquet``.

    Raises ``ValueError`` naming file, column and row.
    """
    root = existing(path)
    if partitions is not None:
        rows, tested = _read(root, columns)
        train = _assigned(rows, existing(partitions, "partitions"))
        tested = tested if test is None else []
    else:
        train, tested = _numbered(root, columns)
    tested += [] if test is None else _global_test(existing(test, "test"), columns)
    owned = columns._replace(client="partition")
    return dataset_of(root.stem, train, [_owned(rows, "nobody") for rows in tested], owned)


def _numbered(root: Path, columns: ReadColumns) -> tuple[list[Rows], list[Rows]]:
    """Training and test rows of the partitions in a folder, in order of their numbers."""
    several = root.is_dir() and not folders.is_data_set(root)
    require(several, "path", str(root), "a folder of partitions, or given with partitions=FILE: it is one data set")
    entries: dict[int, Path] = {}
    for entry in sorted(root.iterdir()):
        found = _NUMBERED.fullmatch(entry.stem)
        if found is None:
            continue
        number = int(found[1])
        require(number not in entries, f"'{root}': partition {number}", entry.name, "one file or folder per partition")
        entries[number] = entry
    require(bool(entries), "path", str(root), "a folder of numbered partitions, such as partition_0")
    train: list[Rows] = []
    test: list[Rows] = []
    for number, entry in sorted(entries.items()):
        own, held_out = _read(entry, columns)
        train += [_owned(rows, str(number)) for rows in own]
        test += [_owned(rows, str(number)) for rows in held_out]
    return train, test


def _read(path: Path, columns: ReadColumns) -> tuple[list[Rows], list[Rows]]:
    """Training and test rows of one data set: a folder of save_to_disk, a Parquet file or an Arrow file."""
    if path.is_dir():
        parts = folders.splits(path, ("train", "test"), columns)
        return parts.get("train", []), parts.get("test", [])
    readers = {".parquet": parquet.read, ".arrow": folders.read_arrow}
    require(path.suffix in readers, "partition", str(path), "a folder of save_to_disk, *.parquet or *.arrow")
    return [readers[path.suffix](path, columns)], []


def _global_test(path: Path, columns: ReadColumns) -> list[Rows]:
    """The rows of the split ``test``, of the only split, or of a data set without splits."""
    if path.is_dir() and folders.is_split(path):
        names = folders.split_names(path)
        name = "test" if "test" in names or len(names) != 1 else names[0]
        parts = folders.splits(path, (name, name), columns)
        require(name in parts, f"test = '{path}': splits", names, "one called test, or a single one")
        found = parts[name]
    else:
        found = _read(path, columns)[0]
    require(any(len(rows.x) for rows in found), "test", str(path), "a data set with examples")
    return found


def _owned(rows: Rows, client: str) -> Rows:
    """The rows with ``client`` as their owner, unless they have owners already."""
    return rows if rows.client is not None else rows._replace(client=[client] * len(rows.x))


def _assigned(tables: list[Rows], file: Path) -> list[Rows]:
    """The rows that the file assigns, in order of their partitions, with these as their owners."""
    total = sum(len(rows.x) for rows in tables)
    if file.suffix == ".csv":
        partition = _placed(str(file), read_csv(file, ("example", "partition")), total)
    else:
        partition = _json(file, total)
    found: list[tuple[int, Rows]] = []
    start = 0
    for rows in tables:
        own = partition[start : start + len(rows.x)]
        order = np.argsort(own, kind="stable")
        numbers, first = np.unique(own[order], return_index=True)
        pieces = zip(numbers.tolist(), np.split(order, first[1:]))
        found += [(number, _chosen(rows, of, str(number))) for number, of in pieces if number >= 0]
        start += len(rows.x)
    return [rows for _, rows in sorted(found, key=itemgetter(0))]


def _chosen(rows: Rows, of: np.ndarray, client: str) -> Rows:
    """The rows with the indices ``of``, with ``client`` as their owner."""

    def own(values: Any) -> Any:
        return [values[i] for i in of] if isinstance(values, list) else values[of]

    return rows._replace(x=own(rows.x), y=None if rows.y is None else own(rows.y), client=[client] * len(of))


def _json(file: Path, total: int) -> np.ndarray:
    """The partition of each row, int64 [total], -1 for none."""
    content = read_json(file)
    if isinstance(content, list):
        require(len(content) == total, f"'{file}'", f"{len(content)} ids", f"one for each of {total} rows")
        pairs: list[tuple[object, ...]] = list(enumerate(content))
    else:
        good = isinstance(content, dict) and all(isinstance(rows, list) for rows in content.values())
        require(good, f"'{file}'", f"a {type(content).__name__}", "a list of ids, or an object id -> list of rows")
        pairs = [(row, client) for client, rows in content.items() for row in rows]
    return _placed(str(file), pairs, total)


def _placed(where: str, pairs: Sequence[tuple[object, ...]], total: int) -> np.ndarray:
    """The partition of each row, -1 for none, from pairs (row, partition)."""
    found = np.full(total, -1, np.int64)
    for entry, (row, client) in enumerate(pairs):
        number, owner = (_whole(where, entry, value) for value in (row, client))
        require(number < total, f"'{where}': row", number, f"below {total}, the rows of the data set")
        require(found[number] < 0, f"'{where}': row", number, "in one partition only")
        found[number] = owner
    return found


def _whole(where: str, entry: int, value: Any) -> int:
    good = str(value).isdecimal() and str(value).isascii() and len(str(value)) < 19
    require(good and not isinstance(value, bool), f"'{where}': entry {entry}", value, "a whole number >= 0")
    return int(value)
