"""Partitioners, which divide the training examples among the clients.

A partitioner is ``(labels[M], num_clients, rng) -> [index array of client 0, of client 1, ...]``. Every index 0..M-1
appears exactly once, no client is empty, and the indices of each client ascend. An impossible request raises
``ValueError``.

``PARTITIONERS`` at the end lists them. First come the shared checks and whole-number arithmetic, then the partitioners
that ignore the labels (IID, unequal sizes, natural owners), then those that give the clients different class mixes
(Dirichlet, shards, disjoint halves, a table).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedjax_async.base.check import non_negative, positive, require, whole
from fedjax_async.data.checking import remedy
from fedjax_async.data.drawing import draw_at_once, draw_in_turns
from fedjax_async.data.shares import order_of, read_shares

Partitioner = Callable[[np.ndarray, int, np.random.Generator], list[np.ndarray]]


def check_clients(num_examples: int, num_clients: int) -> None:
    """Raise ``ValueError`` unless 1 <= num_clients <= num_examples."""
    whole("num_clients", num_clients, 1)
    require(num_clients <= num_examples, "num_clients", num_clients, f"at most the number of examples, {num_examples}")


def check_min_size(min_size: int, num_examples: int, num_clients: int) -> None:
    """Raise ``ValueError`` unless ``num_clients`` clients can have ``min_size`` examples each."""
    most = num_examples // num_clients
    allowed = f"at most {most}: there are {num_examples} examples for {num_clients} clients"
    require(min_size <= most, "min_size", min_size, allowed)


def check_partition(parts: Sequence[np.ndarray], num_examples: int, num_clients: int) -> None:
    """Raise ``ValueError`` unless ``parts`` are ``num_clients`` non-empty arrays that use each index exactly once."""
    require(len(parts) == num_clients, "partition", f"{len(parts)} clients", f"{num_clients} clients")
    for client, part in enumerate(parts):
        require(len(part) > 0, "partition", f"no example for client {client}", "at least one example per client")
    used = np.sort(np.concatenate(parts))
    good = bool(np.array_equal(used, np.arange(num_examples)))
    require(good, "partition", f"{len(used)} indices", f"each of 0..{num_examples - 1} exactly once")


def apportion(total: int, shares: np.ndarray, minimum: int = 0) -> np.ndarray:
    """Whole numbers that sum to ``total``, proportional to ``shares``, none below ``minimum``.

    An entry with a share below the minimum gets the minimum. The rest is divided among the others by largest remainders
    (Hamilton's method). Needs ``total >= minimum * len(shares)``. Returns int64[N].

    >>> apportion(10, np.array([0.5, 0.3, 0.2])).tolist()
    [5, 3, 2]
    >>> apportion(10, np.array([0.98, 0.01, 0.01]), minimum=1).tolist()
    [8, 1, 1]
    """
    tiny = 1e-9  # a share within a rounding error of a whole number counts as that number
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

    ``classes``: int[M] in 0..C-1; ``counts``: int[N, C], each column sums to the size of its class.
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
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        allowed = f"one integer per example to partition by class{remedy(labels)}"
        require(False, "labels", f"{labels.dtype}{list(labels.shape)}", allowed)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return classes, sizes


def iid() -> Partitioner:
    """IID: examples are dealt at random; client sizes differ by at most one."""
    return _by_shares(np.ones, 1)


def quantity(*, min_size: int = 1) -> Partitioner:
    """Quantity skew: client i owns a share proportional to i + 1; labels IID.

    ``min_size``: least number of examples of a client.
    """
    return _by_shares(lambda num_clients: np.arange(1.0, num_clients + 1), min_size)


def power_law(*, exponent: float = 1.0, min_size: int = 1) -> Partitioner:
    """Power-law sizes: client i owns a share proportional to (i + 1)^-exponent; labels IID.

    ``exponent`` >= 0: 0 gives equal sizes, 1 is Zipf's law. ``min_size``: least number of examples of a client.
    """
    non_negative("exponent", exponent)
    return _by_shares(lambda num_clients: np.arange(1.0, num_clients + 1) ** -float(exponent), min_size)


def natural(*, groups: np.ndarray | None = None) -> Partitioner:
    """Natural clients: the data set's own owners (subjects, devices, roles), never split.

    ``groups``: int[M], the owner of each example; ``federate`` passes those of the data set. With as many clients as
    owners, client i is the i-th owner in sorted order. With fewer clients, owners are dealt to them at random, as
    evenly as possible. More clients than owners raise ``ValueError``.
    """

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        if groups is None:
            raise ValueError("partitioner = 'natural': needs groups, and this data set has no natural owners")
        require(np.ndim(groups) == 1, "groups", groups, "an array: the owner of each example, which a text cannot give")
        require(len(groups) == len(labels), "groups", f"{len(groups)} entries", f"one for each of {len(labels)}")
        owners, owner = np.unique(groups, return_inverse=True)
        require(num_clients <= len(owners), "num_clients", num_clients, f"at most the {len(owners)} natural owners")
        number = np.arange(len(owners)) if num_clients == len(owners) else rng.permutation(len(owners))
        client = (number % num_clients)[owner]
        return cut(np.argsort(client, kind="stable"), np.bincount(client, minlength=num_clients))

    return partition


def _by_shares(shares: Callable[[int], np.ndarray], min_size: int) -> Partitioner:
    """Give each client random examples; their number is proportional to its entry of ``shares(num_clients)``."""
    whole("min_size", min_size, 1)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        check_min_size(min_size, len(labels), num_clients)
        return cut(rng.permutation(len(labels)), apportion(len(labels), shares(num_clients), min_size))

    return partition


def dirichlet(*, alpha: float = 0.1, min_size: int = 1, max_tries: int = 1000) -> Partitioner:
    """Dirichlet label skew: every class is spread over the clients by a draw from Dir(alpha); sizes differ.

    For each class c: p_c ~ Dir(alpha * 1_N), client i gets the share p_c[i] of its examples. A small ``alpha`` > 0
    gives each client few classes, a large one approaches IID. All classes are drawn again until every client has at
    least ``min_size`` examples. Raises ``ValueError`` after ``max_tries`` draws.

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
            # apportioning is slow: skip draws that no rounding can bring to min_size
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


def dirichlet_balanced(*, alpha: float = 0.1, at_a_time: int | None = None) -> Partitioner:
    """Dirichlet label skew with equal client sizes: every client draws its class mix from Dir(alpha * prior).

    q_i ~ Dir(alpha * C * prior), where prior is the class shares of the whole data set (Dir(alpha * 1_C) for balanced
    classes); ``alpha`` > 0. Client sizes differ by at most one. Each client draws its examples from its mix. If more
    examples of a class are drawn than exist, a hypergeometric draw divides them among the clients that drew them.
    Clients with too few examples draw again from the classes that are left: by their mix, or in proportion to what is
    left of each class if the mix has none of these classes.

    ``at_a_time``: clients draw in turns instead, as in the code released with OrthoFL (2025), which draws 3 at a time,
    or 1 for CIFAR. A random client with too few examples draws one class from its mix and takes up to ``at_a_time``
    examples of it. If the class is exhausted, it takes the next class that is not; class 0 follows the last. All
    clients that draw an exhausted class thus go on to the same class. Deviation: the code begins again only with class
    0, and may give a client too many examples.

    Source: Hsu, Qi and Brown (2019), with sampling without replacement.
    """
    positive("alpha", alpha)
    if at_a_time is not None:
        whole("at_a_time", at_a_time, 1)

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        classes, sizes = classes_of(labels)
        prior = sizes / sizes.sum()
        mixes = rng.dirichlet(float(alpha) * len(sizes) * prior, num_clients)  # [N, C]
        need = apportion(len(labels), np.ones(num_clients))
        if at_a_time is None:
            counts = draw_at_once(mixes, need, sizes, rng)
        else:
            counts = draw_in_turns(mixes, need, sizes, at_a_time, rng)
        return deal_classes(classes, counts, rng)

    return partition


def shards(*, classes_per_client: int = 2) -> Partitioner:
    """k classes per client: a client holds ``classes_per_client`` classes; holders share a class equally.

    Each client in turn gets the classes with the fewest holders so far, with ties broken at random, so that all classes
    have about equally many holders. Needs ``num_clients * classes_per_client`` >= C, so that no class is left out.
    Deviation from the shards of McMahan et al. (2017): a shard never contains two classes, so a client never has more
    than k classes.
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
        smallest = int(np.argmin(counts.sum(axis=1)))
        allowed = f"fewer: client {smallest} would get no example of its {k} classes"
        require(counts[smallest].any(), "num_clients", num_clients, allowed)
        return deal_classes(classes, counts, rng)

    return partition


def _equal_cut(total: int, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` examples equally among the holders, the remainder at random; int64[N]."""
    holders = rng.permutation(np.flatnonzero(held))
    counts = np.zeros(len(held), np.int64)
    counts[holders] = apportion(total, np.ones(len(holders)))
    return counts


def halves(*, blocks: int = 2) -> Partitioner:
    """Disjoint halves of the classes: ``blocks`` blocks of classes, each owned by its own group of clients.

    The classes in ascending order are cut into ``blocks`` consecutive blocks, and so are the clients. Each block of
    classes is dealt IID among one group of clients. With two clients and two blocks, client 0 has the lower half of the
    classes and client 1 the upper, as in OrthoFL's two-client study. ``blocks`` must be at most the number of clients
    and the number of classes.
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


def table(*, path: str, class_names: Sequence[str] | None = None) -> Partitioner:
    """Label skew from a table: each class is dealt in proportion to its column of a CSV file, one row per client.

    ``path``: a file such as ``compute_counts(...).to_csv(path)`` of flwr-datasets. Its header names the column of
    clients, then the classes. Columns with numbers for names are taken in the order of these numbers, the smallest for
    the smallest label. Columns with other names may have any order, and their names must be those of the data set's
    classes (``class_names``, which ``federate`` passes). Each row has a client's name, then its counts or shares.
    Counts of a partition of the same data set are met exactly. There must be as many rows as clients.
    """
    names, shares = read_shares(str(path))
    order, named = order_of(str(path), names, class_names)
    shares = shares[:, order]

    def partition(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        check_clients(len(labels), num_clients)
        classes, sizes = classes_of(labels)
        require(len(shares) == num_clients, "num_clients", num_clients, f"{len(shares)}, the rows of '{path}'")
        count = shares.shape[1]
        require(
            count == len(sizes),
            f"'{path}': classes",
            count,
            f"{len(sizes)}, those of the data set, after a first column of clients",
        )
        held = np.unique(labels).tolist()
        require(named in (None, held), f"'{path}': labels of its classes", named, f"those with examples, {held}")
        counts = np.stack([apportion(int(n), column) for n, column in zip(sizes, shares.T)], axis=1)
        empty = int(np.argmin(counts.sum(axis=1)))
        require(bool(counts[empty].any()), f"'{path}': row {empty + 1}", "no example", "shares that give at least one")
        return deal_classes(classes, counts, rng)

    return partition


PARTITIONERS: dict[str, Callable[..., Partitioner]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet_balanced": dirichlet_balanced,
    "shards": shards,
    "halves": halves,
    "quantity": quantity,
    "power_law": power_law,
    "natural": natural,
    "table": table,
}


def split_clients(
    parts: Sequence[np.ndarray],
    fraction: float,
    rng: np.random.Generator,
    field: str = "test_fraction",
    *,
    min_size: int = 2,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's examples at random into a training part and a held-out part.

    ``fraction`` in (0, 1) of every client's examples is held out, rounded, with at least one example in each part.
    Returns ``(train, held out)``, each a list of ascending index arrays. A client with a single example raises
    ``ValueError`` naming ``field``, and ``min_size`` as the option of a partition that prevents it.
    """
    require(0 < fraction < 1, field, fraction, "a number between 0 and 1, both excluded")
    train, test = [], []
    for client, part in enumerate(parts):
        allowed = (
            f"used with at least 2 examples per client, but client {client} has {len(part)}: ask for fewer clients, or "
            f"for min_size={min_size} in the partition, as in dirichlet:alpha=0.1,min_size={min_size} (quantity and "
            "power_law have it too)"
        )
        require(len(part) >= 2, field, fraction, allowed)
        held_out = min(max(round(fraction * len(part)), 1), len(part) - 1)
        shuffled = rng.permutation(part)
        test.append(np.sort(shuffled[:held_out]))
        train.append(np.sort(shuffled[held_out:]))
    return train, test
