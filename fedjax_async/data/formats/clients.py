"""From the examples of named clients to a ``Dataset``, and checked readers of JSON, CSV and nested lists."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check, disk
from fedjax_async.base.check import require
from fedjax_async.base.inputs import reading
from fedjax_async.data.checking import LARGEST
from fedjax_async.data.federated import Dataset, check_dataset
from fedjax_async.types import Array

LARGEST_TEXT = 8 * 2**30  # bytes of the largest JSON or CSV file that is read


class ClientRows(NamedTuple):
    """The examples of one client."""

    client: str
    x: np.ndarray  # [n, ...]
    y: np.ndarray  # [n] or [n, ...]


def pooled(
    name: str,
    train: Iterable[ClientRows],
    test: Iterable[ClientRows] = (),
    *,
    decode: Callable[[Array], Array] | None = None,
    num_classes: int | None = None,
) -> Dataset:
    """The data set of these clients. Each is a natural owner; owners are numbered in the order of their first parts.

    Test examples keep their owners; owners without training examples are numbered last. Parts without examples are left
    out. ``group_names`` are the clients' names, with a question mark for what UTF-8 cannot hold. Raises ``ValueError``
    without any training example, or if parts do not fit together.

    >>> one, two = ClientRows("b", np.ones((2, 3)), np.array([0, 1])), ClientRows("a", np.ones((1, 3)), np.array([2]))
    >>> pooled("own", [one, two], [two]).groups.tolist(), pooled("own", [one], [two]).test_groups.tolist()
    ([0, 0, 1], [1])
    """
    kept, tested = ([part for part in parts if len(part.x)] for parts in (train, test))
    require(len(kept) > 0, name, "no examples", "at least one client with training examples")
    number = {client: i for i, client in enumerate(dict.fromkeys(part.client for part in [*kept, *tested]))}
    for part in [*kept, *tested]:
        alike = part.x.shape[1:] == kept[0].x.shape[1:] and part.y.shape[1:] == kept[0].y.shape[1:]
        wanted = f"rows like those of {kept[0].client!r}, {list(kept[0].x.shape[1:])} and {list(kept[0].y.shape[1:])}"
        require(alike, f"{name}, client {part.client!r}", f"x {part.x.shape}, y {part.y.shape}", wanted)
    names = tuple(client.encode(errors="replace").decode() for client in number)
    x, y, groups = _joined(kept, number)
    if not tested:
        return check_dataset(Dataset(name, x, y, x[:0], y[:0], decode, num_classes, groups, group_names=names))
    test_x, test_y, test_groups = _joined(tested, number)
    found = Dataset(name, x, y, test_x, test_y, decode, num_classes, groups, test_groups, group_names=names)
    return check_dataset(found)


def _joined(parts: list[ClientRows], number: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = (np.concatenate(arrays) for arrays in zip(*((part.x, part.y) for part in parts)))
    owners = np.repeat([number[part.client] for part in parts], [len(part.x) for part in parts])
    return x, y, owners.astype(np.int32)


def existing(path: object, field: str = "path") -> Path:
    """The path of an existing file or folder; raises ``ValueError`` naming ``field`` if it does not exist."""
    found = check.path(field, str(path))
    require(found.exists(), field, str(path), "a file or folder that exists")
    return found


def read_json(path: Path) -> Any:
    """The contents of a JSON file; raises ``ValueError`` naming it if it is not JSON, cut short or too large."""
    with _parsing(path, "JSON"):
        return json.loads(reading(path).read_bytes())


def read_csv(path: Path, names: Sequence[str]) -> list[tuple[object, ...]]:
    """The columns ``names`` of a CSV file, row by row; a field that its row lacks is ``None``.

    Raises ``ValueError`` naming the file if it is not CSV, too large or lacks a column.
    """
    with _parsing(path, "CSV"):
        found, *lines = [cells for _, cells in disk.csv_lines(reading(path))] or [[]]
    require(set(names) <= set(found), f"'{path}': columns", found, " and ".join(names))
    rows = [dict(zip(found, cells)) for cells in lines]
    return [tuple(row.get(name) for name in names) for row in rows]


@contextmanager
def _parsing(path: Path, kind: str) -> Iterator[None]:
    """Turn errors of a parser into ``ValueError`` naming the file; refuse a file that is too large."""
    size = path.stat().st_size
    require(size <= LARGEST_TEXT, str(path), f"{size} bytes", f"a {kind} file of at most {LARGEST_TEXT} bytes")
    try:
        yield
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"'{path}': must be a {kind} file ({type(error).__name__}: {reason})") from error


def labels_of(where: str, values: object, classes: int | None = None) -> np.ndarray:
    """Labels int32 [n] from a list of whole numbers >= 0; with ``classes``, at most classes - 1."""
    found = numbers(where, values, 1)
    high = LARGEST if classes is None else classes - 1
    good = (found >= 0) & (found <= high) & (found == np.round(found))
    if not good.all():
        first = int(np.argmin(good))
        require(False, f"{where}[{first}]", found[first].item(), f"a whole number from 0 to {high}")
    return found.astype(np.int32)


def numbers(where: str, values: object, axes: int) -> np.ndarray:
    """A float64 array with ``axes`` axes (1 or 2) from nested lists of finite numbers."""
    allowed = {1: "a list of numbers", 2: "a list of equally long lists of numbers"}[axes]
    try:
        found = np.asarray(values)
    except ValueError:  # lists of unequal length
        found = np.zeros(0, object)
    good = isinstance(values, list) and found.ndim == axes and found.dtype.kind in "biuf"
    shape = f"a {type(values).__name__}" if not isinstance(values, list) else f"{found.dtype}{list(found.shape)}"
    require(good, where, shape, allowed)
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        first = [int(i) for i in np.argwhere(~np.isfinite(found))[0]]
        require(False, f"{where}{first}", found[tuple(first)].item(), "finite")
    return found
