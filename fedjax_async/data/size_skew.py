"""Partitioners that do not look at the labels: IID, sizes that differ, natural owners."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedjax_async.check import non_negative, require, whole
from fedjax_async.data.ownership import Partitioner, apportion, check_clients, check_min_size, cut


def iid() -> Partitioner:
    """IID: a random deal; client sizes differ by at most one."""
    return _by_shares(np.ones, 1)


def quantity(*, min_size: int = 1) -> Partitioner:
    """Quantity skew: client i owns a share proportional to i + 1; labels IID.

    ``min_size``: examples that a client has at least.
    """
    return _by_shares(lambda num_clients: np.arange(1.0, num_clients + 1), min_size)


def power_law(*, exponent: float = 1.0, min_size: int = 1) -> Partitioner:
    """Power-law sizes: client i owns a share proportional to (i + 1)^-exponent; labels IID.

    ``exponent`` >= 0: 0 is the equal deal, 1 is Zipf's law. ``min_size``: examples a client has at least.
    """
    non_negative("exponent", exponent)
    return _by_shares(lambda num_clients: np.arange(1.0, num_clients + 1) ** -float(exponent), min_size)


def natural(*, groups: np.ndarray | None = None) -> Partitioner:
    """Natural clients: the data set's own owners (subjects, devices, roles), never split.

    ``groups``: int[M], the owner of each example; ``federate`` fills in the data set's. With as many
    clients as owners, client i is the i-th owner in sorted order; with fewer clients the owners are
    dealt to them at random, as evenly as their number allows; with more it is a ``ValueError``.
    """

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        if groups is None:
            raise ValueError("partitioner = 'natural': needs groups, and this data set has no natural owners")
        require(len(groups) == len(labels), "groups", f"{len(groups)} entries", f"one for each of {len(labels)}")
        owners, owner = np.unique(groups, return_inverse=True)
        require(num_clients <= len(owners), "num_clients", num_clients, f"at most the {len(owners)} natural owners")
        turn = np.arange(len(owners)) if num_clients == len(owners) else rng.permutation(len(owners))
        client = (turn % num_clients)[owner]
        return cut(np.argsort(client, kind="stable"), np.bincount(client, minlength=num_clients))

    return partition


def _by_shares(shares: Callable[[int], np.ndarray], min_size: int) -> Partitioner:
    whole("min_size", min_size, 1)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        check_min_size(min_size, len(labels), num_clients)
        return cut(rng.permutation(len(labels)), apportion(len(labels), shares(num_clients), min_size))

    return partition
