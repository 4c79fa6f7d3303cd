"""From a data set to ``FederatedData``: ``federate`` gives every client its examples.

A ``Dataset`` is a pool of examples that a partitioner divides. The clients of a ``Federation`` have their own examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_async.base import registry
from fedjax_async.base.check import kind, require, whole
from fedjax_async.data.checking import check_about, check_alike, check_array, check_examples, check_names
from fedjax_async.data.decode import usual
from fedjax_async.data.looks import warn_of_numbering, warn_of_own_tests, warn_of_owners
from fedjax_async.data.partition import PARTITIONERS, Partitioner, check_partition, split_clients
from fedjax_async.types import Array, FederatedData

_NO_TEST = np.zeros(0, np.float32), np.zeros(0, np.int32)


class Dataset(NamedTuple):
    """Examples that no client owns yet: host arrays in their raw dtype (images: uint8), and their decoder.

    ``decode``: a pure function ``[B, ...raw] -> [B, ...inputs]`` at module level: the same object in every call, so
    that compiled programs are reused; ``data.decode.usual`` if left out. ``num_classes``: 1 + the largest label if left
    out; None for float targets. ``groups``: the natural owner of every training example (a person, a device), if there
    is one. ``test_groups``: the owner of every test example, with the numbers of ``groups``; test examples of owners
    without training examples belong to no client. ``class_names``: the name of each class, which a partition by a table
    may use. ``group_names``: the name of each owner, by its number in ``groups``, for tables and pictures.
    """

    name: str
    x: np.ndarray  # [M, ...]
    y: np.ndarray  # int32[M] labels, int32[M, L] sequences of labels (0: padding), or float targets
    test_x: np.ndarray = _NO_TEST[0]  # [T, ...]; may be left out with test_y: federate then needs a test_fraction
    test_y: np.ndarray = _NO_TEST[1]  # [T, ...]
    decode: Callable[[Array], Array] | None = None
    num_classes: int | None = None
    groups: np.ndarray | None = None  # int32[M]
    test_groups: np.ndarray | None = None  # int32[T]
    class_names: tuple[str, ...] | None = None  # one per class
    group_names: tuple[str, ...] | None = None  # one per owner


class Federation(NamedTuple):
    """Data in which every client already has its own examples.

    ``deal(num_clients, seed) -> FederatedData``; ``num_clients=None`` stands for all clients. Raises ``ValueError`` for
    more clients than the data have.
    """

    name: str
    deal: Callable[[int | None, int], FederatedData]


def check_dataset(dataset: Dataset) -> Dataset:
    """Return the data set, or raise ``ValueError`` naming the first wrong field or entry. The test set may be empty."""
    d = dataset
    x, y, test_x, test_y = (f"{d.name}.{field}" for field in ("x", "y", "test_x", "test_y"))
    for name, array in zip((test_x, test_y), (d.test_x, d.test_y)):
        require(array is not None, name, None, "an array; both are left out for a data set without a test set")
    for name, array in zip((y, test_y), (d.y, d.test_y)):
        check_array(name, array)
    check_examples((x, y), d.x, d.y, _classes(d))
    check_examples((test_x, test_y), d.test_x, d.test_y, _classes(d), least=0)
    if len(d.test_x) > 0:
        check_alike(test_x, d.test_x, x, d.x)
        check_alike(test_y, d.test_y, y, d.y)
    for field, owners, rows in (("groups", d.groups, d.x), ("test_groups", d.test_groups, d.test_x)):
        if owners is not None:
            require(len(owners) == len(rows), f"{d.name}.{field}", f"{len(owners)} entries", f"{len(rows)} entries")
            _check_owners(f"{d.name}.{field}", np.asarray(owners), field == "groups" and d.group_names is not None)
    if d.class_names is not None:
        count = _classes(d) or 0
        allowed = f"{count} names, one per class"
        require(len(d.class_names) == count, f"{d.name}.class_names", f"{len(d.class_names)} names", allowed)
    allowed = "left out without groups, the owners of the training examples"
    require(d.test_groups is None or d.groups is not None, f"{d.name}.test_groups", "given", allowed)
    if d.group_names is not None:
        check_names(f"{d.name}.group_names", d.group_names)
        require(d.groups is not None, f"{d.name}.group_names", "given", allowed)
        count = 0 if d.groups is None else int(np.max(d.groups, initial=-1)) + 1
        allowed = f"at least {count} names, one per owner"
        require(len(d.group_names) >= count, f"{d.name}.group_names", f"{len(d.group_names)} names", allowed)
    check_about(d.name, d.decode or usual(d.x), _classes(d))
    return dataset


def _check_owners(name: str, owners: np.ndarray, named: bool) -> None:
    """``ValueError`` for an owner that is NaN, and, with ``named``, for one that is no index of the names."""
    if owners.dtype.kind == "f" and np.isnan(owners).any():
        first = int(np.argmax(np.isnan(owners)))
        require(False, f"{name}[{first}]", "nan", "an owner: all rows without one would be one client")
    if named and len(owners):
        require(owners.dtype.kind in "iu", name, owners.dtype.name, "numbers of group_names")
        require(int(owners.min()) >= 0, f"{name}, smallest", int(owners.min()), "at least 0, an index of group_names")


def federate(
    dataset: Dataset | Federation,
    partitioner: str | Partitioner | None = None,
    num_clients: int | None = None,
    seed: int = 0,
    test_fraction: float | None = None,
    validation_fraction: float | None = None,
) -> FederatedData:
    """Divide the training examples of ``dataset`` among ``num_clients`` clients.

    Args:
      partitioner: a function or a spec such as ``"dirichlet:alpha=0.1"``, by default ``"iid"``. A ``Federation`` has
        its own clients and accepts only ``"natural"``.
      num_clients: may be left out for a data set with natural owners; there are then as many clients as owners.
      seed: seeds the NumPy Generator that makes every random choice here.
      test_fraction: this share of every client's examples becomes its test part. The test parts of all clients together
        replace the test set of the data set. Without it, the test set is global. With ``"natural"``, the test examples
        of a client's owners (``test_groups``) are also its test part.
      validation_fraction: this share of every client's other examples becomes its validation part. It is not trained
        on. Evaluations report loss and accuracy on all validation parts together; probes see each client's.

    Returns ``FederatedData``; the pool is copied only if ``test_fraction`` is given. Raises ``ValueError`` for
    impossible partitions.

    >>> from fedjax_async.data.embedded import fashion_mnist_6k
    >>> data = federate(fashion_mnist_6k(), "dirichlet:alpha=0.1", num_clients=10, seed=1)
    >>> len(data.size), int(data.size.sum()), data.x.dtype.name
    (10, 5000, 'uint8')
    """
    kind("dataset", dataset, (Dataset, Federation), "a Dataset or a Federation, as data.load returns")
    whole("seed", seed, 0)
    if num_clients is not None:
        whole("num_clients", num_clients, 1)
    if isinstance(dataset, Federation):
        natural = partitioner in (None, "natural")
        require(natural, "partitioner", partitioner, f"natural: clients of {dataset.name} have examples of their own")
        require(test_fraction is None, "test_fraction", test_fraction, f"None: {dataset.name} has its own test set")
        return with_validation(dataset.deal(num_clients, seed), validation_fraction, np.random.default_rng((seed, 1)))
    return dealt(check_dataset(dataset), partitioner, num_clients, seed, test_fraction, validation_fraction)


def dealt(
    dataset: Dataset,
    partitioner: str | Partitioner | None,
    num_clients: int | None,
    seed: int,
    test_fraction: float | None,
    validation_fraction: float | None,
) -> FederatedData:
    """:func:`federate` for a data set that has been checked; the result needs no check."""
    if dataset.num_classes is None:
        warn_of_numbering(dataset.name, (dataset.y, dataset.test_y))
    rng = np.random.default_rng(seed)
    parts = _deal(dataset, partitioner or "iid", num_clients, rng)
    names = _names(dataset, len(parts)) if partitioner == "natural" else None
    if partitioner == "natural":
        warn_of_owners(dataset.name, dataset.groups, dataset.group_names, len(parts))
    if test_fraction is None:
        allowed = f"given, such as 0.2: the data set {dataset.name} has no test set (test_x and test_y)"
        require(len(dataset.test_x) > 0, "test_fraction", None, allowed)
        pool = _pool(dataset, parts, names)
        pool = _own_tests(pool, dataset) if partitioner == "natural" else pool
        return pool if validation_fraction is None else with_validation(pool, validation_fraction, rng)
    if partitioner == "natural" and _own_tests(_pool(dataset, parts, names), dataset).test_size is not None:
        warn_of_own_tests(dataset.name, len(dataset.test_x), test_fraction)
    train, test = split_clients(parts, test_fraction, rng)
    held_out, test_offset, test_size = _joined(test)
    # the pool is copied without the held-out examples, so that none can be trained on
    kept = np.sort(np.concatenate(train))
    split = dataset._replace(
        x=dataset.x[kept], y=dataset.y[kept], test_x=dataset.x[held_out], test_y=dataset.y[held_out]
    )
    renumbered = [np.searchsorted(kept, part) for part in train]
    return with_validation(_pool(split, renumbered, names), validation_fraction, rng, min_size=3)._replace(
        test_order=np.arange(len(held_out), dtype=np.int32), test_offset=test_offset, test_size=test_size
    )


def _deal(
    dataset: Dataset, partitioner: str | Partitioner, num_clients: int | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """The checked partition of the training examples."""
    if num_clients is None:
        if dataset.groups is None:
            raise ValueError(f"num_clients = None: must be given, since {dataset.name} has no natural owners")
        num_clients = len(np.unique(dataset.groups))
    if isinstance(partitioner, str):
        known = {"groups": dataset.groups, "class_names": dataset.class_names}
        partitioner = registry.spec("partitioner", PARTITIONERS, partitioner, **known).make()
    partition: Partitioner = partitioner  # type: ignore[assignment]
    parts = partition(dataset.y, num_clients, rng)
    check_partition(parts, len(dataset.x), num_clients)
    return parts


def with_validation(
    data: FederatedData, fraction: float | None, rng: np.random.Generator, *, min_size: int = 2
) -> FederatedData:
    """Hold out ``fraction`` of every client's examples as its validation part; None: return ``data`` unchanged.

    ``min_size``: what an error asks of a partition: the examples of a client that leave one for each of its parts.
    Raises: ``ValueError`` for a fraction outside (0, 1), a client with a single example, data that have validation
    parts already, data that are too large for memory (``streamed``, or with a virtual ``order``), and rows of
    several clients, of which one holds out what another trains on.
    """
    if fraction is None:
        return data
    field, in_memory = "validation_fraction", isinstance(data.order, np.ndarray) and not data.streamed
    require(in_memory, field, fraction, f"None: the clients of {data.name} are not in memory")
    require(data.validation_order is None, field, fraction, f"None: the clients of {data.name} have validation parts")
    parts = [client_rows(data, client) for client in range(len(data.size))]
    train, held_out = split_clients(parts, fraction, rng, field, min_size=min_size)
    twice = np.isin(np.concatenate(held_out), np.concatenate(train)).any()
    allowed = f"None: rows of {data.name} belong to several clients, so that some held out by one are trained on"
    require(not twice, field, fraction, allowed)
    # one table for both, of the same length for every seed: runs of equal shapes share compiled programs
    order, offset, size = _joined([*train, *held_out])
    count = len(parts)
    data = data._replace(order=order, offset=offset[:count], size=size[:count])
    return data._replace(validation_order=order, validation_offset=offset[count:], validation_size=size[count:])


def _names(dataset: Dataset, count: int) -> tuple[str, ...] | None:
    """The names of the owners, if each of ``count`` clients is one of them; None if names are only client numbers."""
    if dataset.groups is None or dataset.group_names is None:
        return None
    owners = np.unique(dataset.groups)  # client i of as many clients as owners is the i-th owner
    found = tuple(dataset.group_names[owner] for owner in owners)
    return found if len(owners) == count and found != tuple(map(str, range(count))) else None


def _pool(dataset: Dataset, parts: Sequence[np.ndarray], names: tuple[str, ...] | None) -> FederatedData:
    """``FederatedData`` with training part ``parts[i]`` of client i and a global test set."""
    order, offset, size = _joined(parts)
    d = dataset
    decode = d.decode or usual(d.x)
    return FederatedData(
        d.name, d.x, d.y, order, offset, size, d.test_x, d.test_y, decode=decode, num_classes=_classes(d),
        client_names=names,
    )  # fmt: skip


def _own_tests(data: FederatedData, dataset: Dataset) -> FederatedData:
    """With ``test_groups``, give each client the test examples of its owners as its test part."""
    if dataset.groups is None or dataset.test_groups is None:
        return data
    tested, owner = np.asarray(dataset.test_groups), np.asarray(dataset.groups)[data.order]
    # order lists the clients' parts one after the other
    client_of = dict(zip(owner.tolist(), np.repeat(np.arange(len(data.size)), data.size).tolist()))
    client = np.array([client_of.get(owner, len(data.size)) for owner in tested.tolist()], np.int64)
    size = np.bincount(client, minlength=len(data.size) + 1)[:-1].astype(np.int32)
    if not size.any():  # the test rows belong to nobody who trains: they stay the global test set
        return data
    order = np.argsort(client, kind="stable")[: int(size.sum())].astype(np.int32)
    return data._replace(test_order=order, test_offset=(np.cumsum(size) - size).astype(np.int32), test_size=size)


def _classes(d: Dataset) -> int | None:
    """The number of classes; ``None`` if the targets are floats."""
    if d.num_classes is not None or not np.issubdtype(np.asarray(d.y).dtype, np.integer):
        return d.num_classes
    return 1 + max(int(np.max(labels, initial=0)) for labels in (d.y, d.test_y))


def client_rows(data: FederatedData, client: int) -> np.ndarray:
    """The rows of ``data.x`` that ``client`` owns; int32[size]."""
    whole("client", client, 0, len(data.size) - 1)
    return data.order[data.offset[client] : data.offset[client] + data.size[client]]


def _joined(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The concatenated index arrays, their offsets and their sizes; int32[M], int32[N], int32[N]."""
    size = np.array([len(part) for part in parts], np.int32)
    offset = (np.cumsum(size) - size).astype(np.int32)
    return np.concatenate(parts).astype(np.int32), offset, size
