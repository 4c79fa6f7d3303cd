"""The registry of partitioners, and the per-client train/test split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.label_skew import dirichlet, dirichlet_balanced, halves, shards
from fedjax_async.data.ownership import Partitioner
from fedjax_async.data.size_skew import iid, natural, power_law, quantity

PARTITIONERS: dict[str, Callable[..., Partitioner]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet_balanced": dirichlet_balanced,
    "shards": shards,
    "halves": halves,
    "quantity": quantity,
    "power_law": power_law,
    "natural": natural,
}


def split_clients(
    parts: Sequence[np.ndarray], fraction: float, rng: np.random.Generator, field: str = "test_fraction"
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's examples at random into a training part and a part that is held out.

    ``fraction`` in (0, 1) of every client is held out, rounded, at least one example to either
    side; a client with a single example is a ``ValueError`` naming ``field``. Returns ``(train, held out)``, ascending.
    """
    require(0 < fraction < 1, field, fraction, "a number between 0 and 1, both excluded")
    train, test = [], []
    for client, part in enumerate(parts):
        allowed = f"used with at least 2 examples a client; client {client} has {len(part)}"
        require(len(part) >= 2, field, fraction, allowed)
        held_out = min(max(round(fraction * len(part)), 1), len(part) - 1)
        shuffled = rng.permutation(part)
        test.append(np.sort(shuffled[:held_out]))
        train.append(np.sort(shuffled[held_out:]))
    return train, test
