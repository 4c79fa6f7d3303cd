"""What all partitioners share: their contract, its checks, and whole-number arithmetic.

A partitioner is ``(labels[M], num_clients, rng) -> [index array of client 0, of client 1, ...]``. Every
index 0..M-1 appears exactly once, no client is empty, and each client's indices ascend. What cannot
be done is a ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedjax_async.check import require, whole

Partitioner = Callable[[np.ndarray, int, np.random.Generator], list[np.ndarray]]


def check_clients(num_examples: int, num_clients: int) -> None:
    """``ValueError`` unless 1 <= num_clients <= num_examples."""
    whole("num_clients", num_clients, 1)
    require(num_clients <= num_examples, "num_clients", num_clients, f"at most the number of examples, {num_examples}")


def check_min_size(min_size: int, num_examples: int, num_clients: int) -> None:
    """``ValueError`` unless ``num_clients`` clients can have ``min_size`` examples each."""
    most = num_examples // num_clients
    allowed = f"at most {most}: there are {num_examples} examples for {num_clients} clients"
    require(min_size <= most, "min_size", min_size, allowed)


def check_partition(parts: Sequence[np.ndarray], num_examples: int, num_clients: int) -> None:
    """``ValueError`` unless ``parts`` are ``num_clients`` non-empty arrays that use each index exactly once."""
    require(len(parts) == num_clients, "partition", f"{len(parts)} clients", f"{num_clients} clients")
    for client, part in enumerate(parts):
        require(len(part) > 0, "partition", f"no example for client {client}", "at least one example a client")
    used = np.sort(np.concatenate(parts))
    good = bool(np.array_equal(used, np.arange(num_examples)))
    require(good, "partition", f"{len(used)} indices", f"each of 0..{num_examples - 1} exactly once")


def apportion(total: int, shares: np.ndarray, minimum: int = 0) -> np.ndarray:
    """Whole numbers that sum to ``total``, proportional to ``shares``, none below ``minimum``.

    Those whose share is below the minimum get the minimum; the rest is shared among the others by
    largest remainders (Hamilton's method). Needs ``total >= minimum * len(shares)``. Returns int64[N].

    >>> apportion(10, np.array([0.5, 0.3, 0.2])).tolist()
    [5, 3, 2]
    >>> apportion(10, np.array([0.98, 0.01, 0.01]), minimum=1).tolist()
    [8, 1, 1]
    """
    tiny = 1e-9  # a share that is whole but for rounding counts as whole
    free = np.ones(len(shares), bool)
    while True:
        left = total - minimum * int(np.sum(~free))
        exact = left * np.asarray(shares, np.float64) / np.sum(shares[free])
        low = free & (exact < minimum - tiny)
        if not low.any():
            break
        free &= ~low
    counts = np.where(free, np.floor(exact + tiny), minimum).astype(np.int64)
    remainder = np.where(free, exact - counts, -np.inf)
    counts[np.argsort(-remainder, kind="stable")[: total - int(counts.sum())]] += 1
    return counts


def cut(order: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Consecutive pieces of ``order`` of the given sizes, each sorted."""
    return [np.sort(piece) for piece in np.split(order, np.cumsum(sizes)[:-1])]


def deal_classes(classes: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Give client i ``counts[i, c]`` random examples of class c.

    ``classes``: int[M] in 0..C-1; ``counts``: int[N, C] whose columns sum to the classes' sizes.
    """
    owned: list[list[np.ndarray]] = [[] for _ in counts]
    for c in range(counts.shape[1]):
        pieces = cut(rng.permutation(np.flatnonzero(classes == c)), counts[:, c])
        for client, piece in enumerate(pieces):
            owned[client].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in owned]


def classes_of(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Class numbers 0..C-1 of all examples, int[M], and the classes' sizes, int[C]; labels must be integers."""
    labels = np.asarray(labels)
    good = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    require(good, "labels", f"{labels.dtype}{list(labels.shape)}", "one integer an example to partition by class")
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return classes, sizes
