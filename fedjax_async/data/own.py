"""Data of your own: :func:`from_arrays` makes ``FederatedData`` from the arrays of each client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fedjax_async.base.check import require, whole
from fedjax_async.data import decode as decoders
from fedjax_async.data.checking import (
    MOST_CLASSES,
    as_labels,
    check_alike,
    check_data,
    check_examples,
    is_array,
    kind,
    type_name,
)
from fedjax_async.data.looks import warn_of_numbering
from fedjax_async.types import Array, FederatedData

NAME, NAMES = r"[\w.-]*\w[\w.-]*", "of letters, digits, '_', '-' and '.', and not only of '-' and '.'"
ExampleArrays = tuple[object, object]  # x [n, ...] and y [n] or [n, ...] of one client or of a test set


def from_arrays(
    clients: Sequence[ExampleArrays],
    test: ExampleArrays | None = None,
    *,
    num_classes: int | None = None,
    decode: Callable[[Array], Array] | None = None,
    name: str = "own",
    client_tests: Sequence[ExampleArrays] | None = None,
) -> FederatedData:
    """Client data from the arrays ``(x, y)`` of each client, for ``simulate(data=...)``.

    Args:
      clients: one pair per client, x [n, ...] and y, each with at least one example. They may be arrays of NumPy, JAX
        or torch (on the CPU), or other objects that NumPy reads as an array of numbers, such as a pandas frame, but not
        lists. Frames must have the columns of the first client, in this order. Integer y [n] are labels
        (classification), integer y [n, L] are sequences of labels, in which 0 is padding; float y are targets, [n] or
        [n, ...] (regression).
      test: the pair (x, y) of the global test set.
      client_tests: instead of ``test``, one pair per client, in the order of ``clients``; a pair may have no rows. All
        of them together are the test set.
      num_classes: the number of classes; by default the largest label + 1, or None for float targets.
      decode: raw rows -> model inputs, a pure function at module level. By default uint8 rows with two or three axes
        are images (``data.decode.unit_images`` scales them to [0, 1]), and other rows stay as they are.
      name: the name of the data in settings and results.

    The arrays are copied into one pool, client after client. Returns data that have passed ``check_data``. Raises
    ``ValueError`` naming the first wrong array or entry.

    >>> x, y = np.ones((5, 3), np.float32), np.array([0, 1, 2, 1, 0])
    >>> data = from_arrays([(x, y), (x[:2], y[:2])], test=(x, y))
    >>> data.size.tolist(), data.x.shape, data.num_classes
    ([5, 2], (7, 3), 3)
    >>> from_arrays([(x, y), (x[:2], y[:1])], test=(x, y))
    Traceback (most recent call last):
    ValueError: clients[1].y = '1 rows': must be one for each of the 2 rows of clients[1].x
    """
    require(isinstance(name, str) and re.fullmatch(NAME, name) is not None, "name", name, NAMES)
    train = _pairs("clients", clients)
    require(len(train) > 0, "clients", "no pairs", "one pair (x, y) per client, at least one")
    require(test is not None or client_tests is not None, "test", None, "a pair (x, y), or client_tests must be given")
    require(test is None or client_tests is None, "client_tests", "given", "left out, since test is given")
    tests = [_pair("test", test)] if client_tests is None else _pairs("client_tests", client_tests)
    if client_tests is not None:
        allowed = f"{len(train)} pairs, one per client"
        require(len(tests) == len(train), "client_tests", f"{len(tests)} pairs", allowed)
    named = {f"clients[{i}]": pair for i, pair in enumerate(train)}
    named |= {"test": tests[0]} if client_tests is None else {f"client_tests[{i}]": p for i, p in enumerate(tests)}
    if num_classes is not None:
        whole("num_classes", num_classes, high=MOST_CLASSES)
    elif kind(train[0][1].dtype) == "integers":
        labels = [y for _, y in named.values() if kind(y.dtype) == "integers"]
        warn_of_numbering(name, labels)
        num_classes = min(1 + max(int(y.max(initial=0)) for y in labels), MOST_CLASSES)
    for title, given in zip(named, [*clients, *([test] if client_tests is None else client_tests)], strict=True):
        for part, frame, first in zip("xy", given, clients[0]):  # type: ignore[call-overload]
            _check_columns(f"{title}.{part}", frame, f"clients[0].{part}", first)
    for title, (x, y) in named.items():
        least = 0 if title.startswith("client_tests") else 1
        check_examples((f"{title}.x", f"{title}.y"), x, y, num_classes, least=least)
        check_alike(f"{title}.x", x, "clients[0].x", train[0][0])
        check_alike(f"{title}.y", y, "clients[0].y", train[0][1])
    (x, y, offset, size), (test_x, test_y, *test_table) = (_pooled(pairs, num_classes) for pairs in (train, tests))
    require(len(test_x) > 0, "client_tests", "no rows", "at least one row in all")
    decode = decoders.usual(x) if decode is None else decode
    order = np.arange(len(x), dtype=np.int32)
    data = FederatedData(name, x, y, order, offset, size, test_x, test_y, decode=decode, num_classes=num_classes)
    if client_tests is not None:
        test_order = np.arange(len(test_x), dtype=np.int32)
        data = data._replace(test_order=test_order, test_offset=test_table[0], test_size=test_table[1])
    return check_data(data)


def _pairs(name: str, pairs: Sequence[object]) -> list[tuple[np.ndarray, np.ndarray]]:
    require(isinstance(pairs, (list, tuple)), name, type_name(pairs), "a list of pairs (x, y), one per client")
    return [_pair(f"{name}[{i}]", pair) for i, pair in enumerate(pairs)]


def _pair(name: str, pair: Any) -> tuple[np.ndarray, np.ndarray]:
    good = isinstance(pair, (list, tuple)) and len(pair) == 2
    require(good, name, type_name(pair), "a pair (x, y) of arrays")
    return as_numpy(f"{name}.x", pair[0]), as_numpy(f"{name}.y", pair[1])


def _check_columns(name: str, frame: object, like_name: str, like: object) -> None:
    """Raise ``ValueError`` for a frame whose columns are not those of ``like``: arrays are joined by position."""
    found, wanted = ([*map(str, columns)] for columns in (_columns(frame), _columns(like)))
    if found and wanted:
        require(found == wanted, f"columns of {name}", found, f"{wanted}, in this order, as in {like_name}")


def _columns(frame: object) -> Iterable[object]:
    """The names of a frame's columns (of pandas, polars or Arrow); none for an array."""
    return getattr(frame, "column_names", getattr(frame, "columns", ()))


def as_numpy(name: str, value: object) -> np.ndarray:
    """Convert an array of NumPy, JAX or torch to NumPy, copied only if needed; raises ``ValueError`` for others."""
    if any(base.__module__.partition(".")[0] == "torch" for base in type(value).__mro__):
        return _of_torch(name, value)
    good = is_array(value) or (hasattr(value, "__array__") and not isinstance(value, np.ma.MaskedArray))
    require(good, name, type_name(value), "a NumPy, JAX or torch array, such as np.asarray makes")
    return np.asarray(value)


def _of_torch(name: str, tensor: Any) -> np.ndarray:
    """A torch tensor as a NumPy array on the same memory, without importing torch."""
    require(hasattr(tensor, "numpy"), name, type_name(tensor), "a tensor, since its type is torch's")
    require(tensor.device.type == "cpu", name, f"a tensor on {tensor.device}", "on the CPU: pass tensor.cpu()")
    found = str(tensor.dtype)
    require(found != "torch.bfloat16", name, found, "of a type that NumPy has: pass tensor.float()")
    try:
        return np.asarray(tensor.detach().numpy())
    except (TypeError, RuntimeError):
        allowed = "a dense tensor that tensor.numpy() can read"
        raise ValueError(f"{name} = '{tensor.layout} tensor of {found}': must be {allowed}") from None


def _pooled(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The pairs joined: x, y, the offset of each pair, int32[N], and its size, int32[N]."""
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs))
    size = np.array([len(own) for own, _ in pairs], np.int32)
    offset = (np.cumsum(size) - size).astype(np.int32)
    return x, y if num_classes is None else as_labels("y", y), offset, size
