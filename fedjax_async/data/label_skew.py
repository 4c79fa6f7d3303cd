"""Partitioners that make the clients' class mixes differ: Dirichlet, shards, disjoint halves."""

from __future__ import annotations

import numpy as np

from fedjax_async.check import positive, require, whole
from fedjax_async.data.ownership import (
    Partitioner,
    apportion,
    check_clients,
    check_min_size,
    classes_of,
    cut,
    deal_classes,
)


def dirichlet(*, alpha: float = 0.1, min_size: int = 1, max_tries: int = 1000) -> Partitioner:
    """Dirichlet label skew: every class is spread over the clients by a draw from Dir(alpha); sizes differ.

    For each class c: p_c ~ Dir(alpha * 1_N), client i gets the share p_c[i] of its examples. Small
    ``alpha`` > 0: few classes a client; large: IID. All draws are repeated until every client has at least
    ``min_size`` examples; after ``max_tries`` draws it is a ``ValueError``.

    Source: the per-class draw of Yurochkin et al. (2019), with the minimum size of Li et al. (2022).
    """
    positive("alpha", alpha)
    whole("min_size", min_size, 1)
    whole("max_tries", max_tries, 1)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        check_min_size(min_size, len(labels), num_clients)
        classes, sizes = classes_of(labels)
        for _ in range(max_tries):
            shares = rng.dirichlet(np.full(num_clients, float(alpha)), len(sizes))  # [C, N]
            # apportioning is the slow part: draws that are hopeless before rounding are not worth it
            if np.min(sizes @ shares) + len(sizes) < min_size:
                continue
            counts = np.stack([apportion(int(n), p) for n, p in zip(sizes, shares)], axis=1)
            if counts.sum(axis=1).min() >= min_size:
                return deal_classes(classes, counts, rng)
        raise ValueError(
            f"alpha = {alpha!r}: no draw of {max_tries} gave each of {num_clients} clients {min_size} of "
            f"{len(labels)} examples; use a larger alpha, fewer clients or dirichlet_balanced"
        )

    return partition


def dirichlet_balanced(*, alpha: float = 0.1) -> Partitioner:
    """Dirichlet label skew with equal client sizes: every client draws its class mix from Dir(alpha * prior).

    q_i ~ Dir(alpha * C * prior), prior = class shares of the whole, so that balanced classes mean
    Dir(alpha * 1_C); ``alpha`` > 0. Client sizes differ by at most one. Clients then draw from their mixes;
    a class in too much demand is shared fairly among those who want it (a hypergeometric draw), and who
    is left short draws again from the classes that remain, whatever his mix.

    Source: Hsu, Qi and Brown (2019), with sampling without replacement.
    """
    positive("alpha", alpha)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        classes, sizes = classes_of(labels)
        prior = sizes / sizes.sum()
        mixes = rng.dirichlet(float(alpha) * len(sizes) * prior, num_clients)  # [N, C]
        counts = _draw_counts(mixes, apportion(len(labels), np.ones(num_clients)), sizes, rng)
        return deal_classes(classes, counts, rng)

    return partition


def _draw_counts(mixes: np.ndarray, need: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Counts int[N, C] with row sums ``need`` and column sums ``sizes``, rows drawn from ``mixes``."""
    counts = np.zeros(mixes.shape, np.int64)
    left = sizes.astype(np.int64)
    while left.any():
        short = need - counts.sum(axis=1)
        wish = mixes * (left > 0)
        total = wish.sum(axis=1, keepdims=True)
        wish = np.where(total > 1e-12, wish / np.maximum(total, 1e-12), left / left.sum())
        demand = rng.multinomial(short, wish)
        for c in np.flatnonzero(demand.sum(axis=0)):
            supply = min(int(left[c]), int(demand[:, c].sum()))
            # the "marginals" method is exact at any size; "count" would list every example
            given = rng.multivariate_hypergeometric(demand[:, c], supply, method="marginals")
            counts[:, c] += given
            left[c] -= supply
    return counts


def shards(*, classes_per_client: int = 2) -> Partitioner:
    """k classes a client: each client holds ``classes_per_client`` classes, a class is cut equally among its holders.

    Holders are chosen at random among the least held classes, so that every class has about as many.
    Needs ``num_clients * classes_per_client`` >= C, so that no class is left out. Unlike the shards of
    McMahan et al. (2017), cuts follow the classes, so a client never has more than k of them.
    """
    whole("classes_per_client", classes_per_client, 1)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        classes, sizes = classes_of(labels)
        k, kinds = classes_per_client, len(sizes)
        require(k <= kinds, "classes_per_client", k, f"at most the number of classes, {kinds}")
        allowed = f"at least {-(-kinds // num_clients)} for {num_clients} clients to hold all {kinds} classes"
        require(num_clients * k >= kinds, "classes_per_client", k, allowed)
        holds = np.zeros((num_clients, kinds), bool)  # [N, C]
        for client in range(num_clients):
            random_ties = np.lexsort((rng.random(kinds), holds.sum(axis=0)))
            holds[client, random_ties[:k]] = True
        counts = np.stack([_equal_cut(int(n), held, rng) for n, held in zip(sizes, holds.T)], axis=1)
        poorest = int(np.argmin(counts.sum(axis=1)))
        allowed = f"fewer: client {poorest} would get no example of its {k} classes"
        require(counts[poorest].any(), "num_clients", num_clients, allowed)
        return deal_classes(classes, counts, rng)

    return partition


def _equal_cut(total: int, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """``total`` examples cut equally among the holders, the odd ones at random; int64[N]."""
    holders = rng.permutation(np.flatnonzero(held))
    counts = np.zeros(len(held), np.int64)
    counts[holders] = apportion(total, np.ones(len(holders)))
    return counts


def halves(*, blocks: int = 2) -> Partitioner:
    """Disjoint halves of the classes: as many blocks of classes as given, each owned by its own group of clients.

    The classes in ascending order are cut into ``blocks`` consecutive blocks and so are the clients; a
    block is dealt IID among its clients. Two clients and two blocks: client 0 has the lower half of the
    classes, client 1 the upper, as in OrthoFL's two-client study. Needs ``blocks`` <= clients, classes.
    """
    whole("blocks", blocks, 1)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        classes, sizes = classes_of(labels)
        most = min(num_clients, len(sizes))
        require(blocks <= most, "blocks", blocks, f"at most {most}: {num_clients} clients, {len(sizes)} classes")
        parts: list[np.ndarray] = []
        clients = np.array_split(np.arange(num_clients), blocks)
        for members, block in zip(clients, np.array_split(np.arange(len(sizes)), blocks)):
            rows = np.flatnonzero(np.isin(classes, block))
            allowed = f"fewer: {len(rows)} examples of classes {block.tolist()} for {len(members)} clients"
            require(len(rows) >= len(members), "num_clients", num_clients, allowed)
            parts += cut(rng.permutation(rows), apportion(len(rows), np.ones(len(members))))
        return parts

    return partition
