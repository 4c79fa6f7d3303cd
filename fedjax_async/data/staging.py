"""The examples of a few clients, packed for the device: what a streamed run ships with every batch of jobs."""

from __future__ import annotations

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.virtual import MOST
from fedjax_async.types import FederatedData


def spans(offset: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The numbers ``offset[i] .. offset[i] + size[i] - 1`` of every i, one after the other; int64[sum of sizes].

    >>> spans(np.array([10, 3]), np.array([2, 3])).tolist()
    [10, 11, 3, 4, 5]
    """
    size = np.asarray(size, np.int64)
    before = np.cumsum(size) - size
    return np.repeat(offset - before, size) + np.arange(int(size.sum()))


def packed_offsets(data: FederatedData, clients: np.ndarray) -> np.ndarray:
    """Where :func:`pack` puts each of ``clients``, without reading anything; int32[W].

    >>> from fedjax_async.data.embedded import fashion_mnist_6k
    >>> from fedjax_async.data.federated import federate
    >>> data = federate(fashion_mnist_6k(), "iid", num_clients=10)
    >>> packed_offsets(data, np.array([7, 2, 2])).tolist()
    [1000, 0, 500]
    """
    turn, size = _in_disk_order(data, clients)
    offset = np.empty(len(turn), np.int32)
    offset[turn] = np.cumsum(size) - size
    return offset


def pack(data: FederatedData, clients: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy the examples of ``clients`` out of the pool: ``(x [rows, ...], y [rows, ...], offset int32[W])``.

    Args:
      clients: int[W], in any order, repeats allowed.
      rows: room for all of them together, at least the sum of their sizes; zeros at the end.

    Client i's j-th example lands in row ``offset[i] + j``. The arrays are fresh; with ``order = Identity((rows,))``
    they are ``ClientData`` like any other. Clients are read, and follow each other, in the order of the disk.
    """
    turn, size = _in_disk_order(data, clients)
    source = data.order[spans(data.offset[np.asarray(clients)[turn]], size)]
    total = len(source)
    require(total <= rows <= MOST, "rows", rows, f"from {total}, the sum of these clients' sizes, to {MOST}")
    x, y = (np.empty((rows, *pool.shape[1:]), pool.dtype) for pool in (data.x, data.y))
    for copy, pool in ((x, data.x), (y, data.y)):
        np.take(pool, source, axis=0, out=copy[:total], mode="clip")  # to "raise" would cost a second copy
        copy[total:] = 0
    return x, y, packed_offsets(data, clients)


def _in_disk_order(data: FederatedData, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places in ``clients`` in the order of their data, int64[W], and the sizes in that order, int64[W]."""
    clients = np.asarray(clients)
    good = clients.ndim == 1 and np.issubdtype(clients.dtype, np.integer)
    good = good and (len(clients) == 0 or 0 <= clients.min() <= clients.max() < len(data.size))
    require(bool(good), "clients", f"{clients.dtype}{list(clients.shape)}", f"numbers of {len(data.size)} clients")
    turn = np.argsort(data.offset[clients], kind="stable")
    return turn, data.size[clients[turn]].astype(np.int64)
