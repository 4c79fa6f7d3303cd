"""Map-style data sets of PyTorch, one per client, such as ``Subset``s; torch itself is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_async.base.check import require
from fedjax_async.data.checking import type_name
from fedjax_async.data.own import as_numpy, from_arrays
from fedjax_async.types import Array, FederatedData

ColumnKey = int | str


def from_torch(
    clients: Sequence[object],
    test: object = None,
    *,
    client_tests: Sequence[object] | None = None,
    x: ColumnKey = 0,
    y: ColumnKey = 1,
    channels_first: bool = False,
    num_classes: int | None = None,
    decode: Callable[[Array], Array] | None = None,
    name: str = "own",
) -> FederatedData:
    """Client data from map-style data sets: ``len(d)`` and ``d[i] -> (x, y)``, or a dict, with tensors or images.

    Args:
      clients: one data set per client, for example ``torch.utils.data.Subset`` of one data set, or the partitions that
        Flower's partitioners load. Each item is read once, and its transforms run once.
      test: the global test set.
      client_tests: instead of ``test``, one test set per client.
      x, y: the positions of input and target in an item, or their keys in a dict.
      channels_first: whether images come as [C, H, W], as from torchvision's ``ToTensor``; they become [H, W, C].
      num_classes, decode, name: as for :func:`fedjax_async.data.from_arrays`.

    Returns data that have passed ``check_data``. Raises ``ValueError`` naming the client and the item that is wrong.

    >>> items = [(np.full((1, 2, 2), i, np.float32), i % 3) for i in range(6)]
    >>> data = from_torch([items[:4], items[4:]], test=items, channels_first=True)
    >>> data.x.shape, data.size.tolist(), data.y.tolist()
    ((6, 2, 2, 1), [4, 2], [0, 1, 2, 0, 1, 2])
    """
    require(isinstance(clients, (list, tuple)), "clients", type_name(clients), "a list of data sets, one per client")
    allowed = "a list of data sets, one per client"
    require(isinstance(client_tests or [], (list, tuple)), "client_tests", type_name(client_tests), allowed)

    def read(where: str, dataset: object) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = _columns(where, dataset, (x, y))
        if channels_first:
            require(inputs.ndim == 4, f"{where}: shape of x", list(inputs.shape), "[n, C, H, W] with channels_first")
            inputs = np.moveaxis(inputs, 1, -1)
        return inputs, targets

    tests = None
    if client_tests is not None:
        tests = [read(f"client_tests[{i}]", one) for i, one in enumerate(client_tests)]
    return from_arrays(
        [read(f"clients[{i}]", one) for i, one in enumerate(clients)],
        None if test is None else read("test", test),
        client_tests=tests,
        num_classes=num_classes,
        decode=decode,
        name=name,
    )


def _columns(where: str, dataset: Any, keys: tuple[ColumnKey, ColumnKey]) -> tuple[np.ndarray, np.ndarray]:
    """The two columns of a map-style data set, [n, ...] each."""
    good = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    require(good, where, type_name(dataset), "a map-style data set, with a length and items")
    require(len(dataset) > 0, where, "no items", "at least one item")
    columns: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for i in range(len(dataset)):
        item = dataset[i]
        for column, key in zip(columns, keys):
            column.append(_array(f"{where}[{i}]", item, key))
            alike = column[-1].shape == column[0].shape
            wanted = f"shape {list(column[0].shape)}, as of the first item"
            require(alike, f"{where}[{i}][{key!r}]", f"shape {list(column[-1].shape)}", wanted)
    x, y = (np.stack(column) for column in columns)
    return x, y


def _array(where: str, item: Any, key: ColumnKey) -> np.ndarray:
    """A component of an item as an array: a tensor, an array, an image or a number."""
    try:
        value = item[key]
    except (KeyError, IndexError, TypeError):
        known = list(item) if isinstance(item, Mapping) else list(range(len(item))) if isinstance(item, tuple) else []
        raise ValueError(f"{where}: {key!r} is not in it (known: {', '.join(map(str, known)) or 'none'})") from None
    if isinstance(value, (int, float, np.generic)) or hasattr(value, "__array_interface__"):
        return np.asarray(value)
    return as_numpy(f"{where}[{key!r}]", value)
