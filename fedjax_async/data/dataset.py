"""``Dataset``: a pool of examples before anybody owns anything; ``Federation``: clients with examples of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedjax_async.check import require
from fedjax_async.types import Array, FederatedData


class Dataset(NamedTuple):
    """Host arrays in their raw dtype (images: uint8) and the function that turns them into inputs.

    ``decode`` is a module-level pure function ``[B, ...raw] -> [B, ...inputs]`` and therefore hashable
    and equal from call to call, so that compiled programs are found again. ``groups`` names the natural
    owner of every training example (a person, a device), if there is one.
    """

    name: str
    x: np.ndarray  # [M, ...]
    y: np.ndarray  # int32[M] labels or float targets
    test_x: np.ndarray  # [T, ...]
    test_y: np.ndarray  # [T]
    decode: Callable[[Array], Array]
    num_classes: int | None = None
    groups: np.ndarray | None = None  # int32[M]


class Federation(NamedTuple):
    """Data that come client by client, so that there is nothing to partition.

    ``deal(num_clients, seed) -> FederatedData``; with ``None``, all clients there are. It raises ``ValueError`` for
    a number that cannot be had.
    """

    name: str
    deal: Callable[[int | None, int], FederatedData]


def check_dataset(dataset: Dataset) -> Dataset:
    """The data set itself, or a ``ValueError`` naming the first inconsistent field."""
    d = dataset
    require(len(d.x) > 0, f"{d.name}.x", f"{len(d.x)} examples", "at least one example")
    require(len(d.y) == len(d.x), f"{d.name}.y", f"{len(d.y)} targets", f"one for each of {len(d.x)} examples")
    require(len(d.test_x) == len(d.test_y), f"{d.name}.test_y", f"{len(d.test_y)} targets", f"{len(d.test_x)}")
    if d.groups is not None:
        require(len(d.groups) == len(d.x), f"{d.name}.groups", f"{len(d.groups)} entries", f"{len(d.x)} entries")
    if d.num_classes is not None:
        for field, labels in (("y", d.y), ("test_y", d.test_y)):
            good = np.issubdtype(labels.dtype, np.integer) and (
                len(labels) == 0 or (labels.min() >= 0 and labels.max() < d.num_classes)
            )
            require(bool(good), f"{d.name}.{field}", labels.dtype.name, f"integer labels in [0, {d.num_classes})")
    return dataset
