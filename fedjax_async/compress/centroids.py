"""Weight clustering with pruning (WCP): every weight layer of a model as K centroids and one index per weight.

:func:`wcp` encodes, :func:`lookup` decodes, :func:`mask` tells which weights are not pruned. They are pure functions,
for methods that keep tables from message to message. :func:`payloads` turns an encoded model into payloads for
``encode``, and :func:`from_payloads` back. :func:`nearest_centroids` is a compressor for uploads of any method.
``clustering.py`` has the k-means of one layer.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, registry, tree
from fedjax_async.compress import clustering, sizes
from fedjax_async.compress.payload import MOST_CENTROIDS, Centroids, Compressor, Dense, Payload, require_vector
from fedjax_async.types import Array, Key, Params, Path, Structure, Traced

IsClustered = Callable[[Path, Array], bool]


class Clustered(NamedTuple):
    """A model as centroids: the message ``(V, A, U)`` of PushCen-ADFL. ``None`` stands for missing leaves."""

    tables: Params  # V: like the params, for each clustered leaf float[K]: zero in slot 0, the others ascending
    indices: Params  # A: like the params, for each clustered leaf uint8 of its shape
    rest: Params  # U: the leaves that are not clustered


def is_weight(path: Path, leaf: Array) -> bool:
    """Whether a leaf is a weight layer: floats with two axes or more. Biases and scales have one."""
    del path
    return jnp.ndim(leaf) >= 2 and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def is_weight_released(path: Path, leaf: Array) -> bool:
    """As :func:`is_weight`, but the convolutions of a ResNet's shortcuts are not clustered, as in the released code."""
    return is_weight(path, leaf) and "shortcut" not in path


def parts_of(params: Params, chosen: IsClustered = is_weight) -> tuple[Params, Params]:
    """``(rest, weights)``: the leaves that are not clustered, and those that are; ``None`` replaces the others."""
    paths = [(tree.path_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    picked = {path for path, leaf in paths if chosen(path, leaf)}
    return tree.split(params, picked.__contains__)


def random_tables(
    params: Params, k: int, key: Key, *, reference: str = "paper", chosen: IsClustered = is_weight
) -> Params:
    """Tables to start from: zero in slot 0, and K - 1 random entries of each weight layer, ascending.

    ``wcp`` starts from them by default. If the reference subtracts the mean, it is subtracted here too.
    """
    check.whole("k", k, 1, MOST_CENTROIDS)
    rules = registry.find("reference", clustering.REFERENCES, reference)
    leaves, structure = jax.tree.flatten(parts_of(params, chosen)[1])

    def table(number: int, leaf: Array) -> Array:
        x = clustering.centred(leaf.reshape(-1), rules)
        drawn = clustering.random_entries(jax.random.fold_in(key, number), x, k - 1)
        return jnp.concatenate([jnp.zeros(1, leaf.dtype), jnp.sort(drawn)])

    return jax.tree.unflatten(structure, [table(number, leaf) for number, leaf in enumerate(leaves)])


def wcp(
    params: Params,
    k: int,
    *,
    init: Params | None = None,
    key: Key | None = None,
    max_iter: Traced = 3,
    tolerance: Traced = 0.05,
    reference: str = "paper",
    chosen: IsClustered = is_weight,
) -> Clustered:
    """Weight clustering with pruning: one-dimensional k-means of each weight layer, one centroid fixed at zero.

    ``a <- argmin_j |theta - mu_j|``, ``mu_j <- mean(theta[a = j])`` for ``j > 0``, ``mu_0 = 0``, until ``max_iter`` or
    until the loss changes by at most the share ``tolerance``, see ``clustering.cluster``. An empty cluster keeps its
    centroid.

    Args:
      k: K centroids per layer, from 1 (all weights are pruned) to 256.
      init: tables to start from, such as a dictionary G of ``Clustered.tables`` or a mean of several; slot 0 counts as
        zero, whatever it holds. ``None``: random entries of each layer, drawn from ``key``.
      reference: ``"paper"``, or ``"released"`` as the authors' code does it: the mean of the layer is subtracted and
        never added again, an empty cluster gets a random entry (``key`` is needed), and the table is sorted with its
        zero in between. So slot 0 of ``init`` is often its most negative centroid; it takes part in the first
        assignment as it is, and the first update of the means replaces it by zero.
      chosen: ``chosen(path, leaf)``, whether a leaf is clustered.

    Returns: ``Clustered``. A layer with an entry that is not finite has a table of NaN.

    Source: PushCen-ADFL (2026), algorithm 3. Deviations: the zero is always in slot 0, only the other K - 1 are sorted
    (the printed warm start and the averages of tables need that); the indices are those after the last update.
    """
    check.whole("k", k, 1, MOST_CENTROIDS)
    check.non_negative("tolerance", tolerance)
    if isinstance(max_iter, numbers.Real):
        check.whole("max_iter", max_iter, 1, 2**31 - 1)
    rules = registry.find("reference", clustering.REFERENCES, reference)
    needed = init is None or rules.refilled
    check.require(key is not None or not needed, "key", key, "a random key (unless init is given and nothing refilled)")
    rest, weights = parts_of(params, chosen)
    tables = init
    if init is None and key is not None:
        tables = random_tables(params, k, key, reference=reference, chosen=chosen)
    leaves, structure = jax.tree.leaves(weights), _structure(weights)
    tables_found, indices = [], []
    for number, (leaf, start) in enumerate(zip(leaves, structure.flatten_up_to(tables), strict=True)):
        check.require(jnp.shape(start) == (k,), "init", f"a table of shape {list(jnp.shape(start))}", f"of shape [{k}]")
        own = None if key is None else jax.random.fold_in(key, 2**31 + number)
        table, index = clustering.cluster(
            leaf.reshape(-1), start, key=own, max_iter=max_iter, tolerance=tolerance, reference=rules
        )
        tables_found.append(table)
        indices.append(index.reshape(leaf.shape))
    return Clustered(structure.unflatten(tables_found), structure.unflatten(indices), rest)


def _structure(params: Params) -> Structure:
    return jax.tree.structure(params)


def lookup(clustered: Clustered, like: Params = None) -> Params:
    """The decoded model: ``w_hat = V[A]`` for each weight layer, the other leaves as they were sent.

    With ``like``, leaves that the message lacks (such as private ones) are those of ``like``. The anchor of a
    dictionary G is ``lookup(clustered._replace(tables=G))``.
    """
    weights = jax.tree.map(lambda table, index: table.at[index].get(mode="clip"), clustered.tables, clustered.indices)
    whole = tree.join(clustered.rest, weights)
    return whole if like is None else tree.join(whole, like)


def mask(clustered: Clustered) -> Params:
    """Which weights are not pruned: bool, like the params; the leaves that are not clustered are all true."""
    ones = jax.tree.map(lambda leaf: jnp.ones(jnp.shape(leaf), jnp.bool_), clustered.rest)
    kept = jax.tree.map(lambda table, index: (table != 0)[index], clustered.tables, clustered.indices)
    return tree.join(ones, kept)


# --- messages ---------------------------------------------------------------------------------


def payloads(clustered: Clustered) -> tuple[Payload, ...]:
    """One payload per leaf, in the order of the model: ``Centroids`` for weight layers, ``Dense`` for the others.

    ``encode`` makes one message of them. Their ``values_bits`` is eq. 13 of PushCen-ADFL: ``32 (K - 1)`` bits per
    weight layer, ``ceil(log2 K)`` per weight (but at least one) and 32 per other scalar, in float32. ``wire_bytes``
    adds the header, the kind and the length of each leaf, the padding of its last byte, and the checksum. A table of
    ``reference="released"`` is sent as one with zero in slot 0; the decoded model is the same.
    """

    def weights(table: Array, index: Array) -> Centroids:
        zero = jnp.argmax(table == 0).astype(jnp.int32)
        old = index.reshape(-1).astype(jnp.int32)
        slot = jnp.where(old == zero, 0, old + jnp.less(old, zero).astype(jnp.int32))
        return Centroids(clustering.without(table, zero), slot.astype(jnp.uint8))

    dense = jax.tree.map(lambda leaf: Dense(jnp.reshape(leaf, -1)), clustered.rest)
    coded = jax.tree.map(weights, clustered.tables, clustered.indices)
    kinds = (Dense, Centroids)
    whole = jax.tree.map(
        lambda a, b: b if a is None else a, dense, coded, is_leaf=lambda part: part is None or isinstance(part, kinds)
    )
    return tuple(jax.tree.leaves(whole, is_leaf=lambda part: isinstance(part, kinds)))


def from_payloads(message: tuple[Payload, ...], like: Params, *, chosen: IsClustered = is_weight) -> Clustered:
    """The inverse of :func:`payloads`: ``like`` has the shapes of the model, ``chosen`` is that of ``wcp``.

    A receiver passes what ``decode(data, size=[leaf.size for leaf in leaves])`` returns. Raises ``ValueError`` for
    payloads of other kinds or lengths.
    """
    structure = _structure(like)
    check.require(
        len(message) == structure.num_leaves, "message", f"{len(message)} payloads", f"{structure.num_leaves}"
    )
    tables, indices, rest = [], [], []
    for (path, leaf), part in zip(jax.tree.leaves_with_path(like), message, strict=True):
        kind = Centroids if chosen(tree.path_of(path), leaf) else Dense
        check.kind("message", part, kind, kind.__name__)
        shape = jnp.shape(leaf)
        check.require(sizes.length_of(part) == math.prod(shape), "message", sizes.length_of(part), f"of shape {shape}")
        is_coded = isinstance(part, Centroids)
        tables.append(_with_zero(jnp.asarray(part.centroid)) if is_coded else None)
        indices.append(jnp.asarray(part.index).reshape(shape) if is_coded else None)
        rest.append(None if is_coded else jnp.asarray(part.values).reshape(shape))
    return Clustered(*(jax.tree.unflatten(structure, column) for column in (tables, indices, rest)))


def _with_zero(centroid: Array) -> Array:
    """The table [K] of the K - 1 centroids that are sent; its zero is NaN if any of them is not finite."""
    zero = jnp.where(jnp.all(jnp.isfinite(centroid)), jnp.zeros((), centroid.dtype), jnp.nan)
    return jnp.append(zero, centroid)


def nearest_centroids(*, k: int = 32, max_iter: int = 3, tolerance: Traced = 0.05) -> Compressor:
    """Every entry as the nearest of `k` centroids, zero among them: k-means from random entries (WCP of PushCen-ADFL).

    Meant for ``per="tensor"``: a table for each tensor. It sends ``ceil(log2 k)`` bits per entry and k - 1 numbers; a
    vector too short to gain by that is sent unchanged. Entries of small magnitude become zero. No entry changes by more
    than its own magnitude, so ``||C(x) - x||^2 <= ||x||^2``. How much it contracts depends on x: K = 32 centroids keep
    98 to 99.7 % of ||x||^2 of Gaussian numbers. ``max_iter`` and ``tolerance`` as in ``wcp``.
    """
    check.whole("k", k, 2, MOST_CENTROIDS)
    check.whole("max_iter", max_iter, 1, 2**31 - 1)
    check.non_negative("tolerance", tolerance)
    rules = clustering.REFERENCES["paper"]

    def compress(key: Key, x: Array) -> Payload:
        require_vector(x)
        real = sizes.BYTE * x.dtype.itemsize
        if (k - 1) * real + len(x) * sizes.centroid_width(k) >= len(x) * real:
            return Dense(x)
        start = jnp.append(jnp.zeros(1, x.dtype), clustering.random_entries(key, x, k - 1))
        table, index = clustering.cluster(x, start, key=None, max_iter=max_iter, tolerance=tolerance, reference=rules)
        return Centroids(table[1:], index)

    def decompress(payload: Payload) -> Array:
        if isinstance(payload, Dense):
            return jnp.asarray(payload.values)
        return _with_zero(jnp.asarray(payload.centroid)).at[jnp.asarray(payload.index)].get(mode="clip")

    return Compressor(compress, decompress, sizes.bits)
