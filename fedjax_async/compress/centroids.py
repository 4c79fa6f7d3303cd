"""Weight clustering with pruning (WCP): every weight layer of a model as K centroids and one index a weight.

:func:`wcp` encodes, :func:`lookup` decodes, :func:`mask` tells which weights are not pruned. ``clustering.py`` has the
k-means of one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, registry, tree
from fedjax_async.compress import clustering
from fedjax_async.types import Array, Key, Params, Path, Traced

Chosen = Callable[[Path, Any], bool]


class Clustered(NamedTuple):
    """A model as centroids: the message ``(V, A, U)`` of PushCen-ADFL. ``None`` stands for missing leaves."""

    tables: Any  # V: like the params, for each clustered leaf float[K]: zero in slot 0, the others ascending
    indices: Any  # A: like the params, for each clustered leaf uint8 of its shape
    rest: Any  # U: the leaves that are not clustered


def is_weight(path: Path, leaf: Any) -> bool:
    """Whether a leaf is a weight layer: floats with two axes or more. Biases and scales of norms have one."""
    del path
    return jnp.ndim(leaf) >= 2 and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def parts_of(params: Params, chosen: Chosen = is_weight) -> tuple[Params, Params]:
    """``(rest, weights)``: the leaves that are not clustered and those that are, ``None`` in place of the others."""
    paths = [(tree.path_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    picked = {path for path, leaf in paths if chosen(path, leaf)}
    return tree.split(params, picked.__contains__)


def random_tables(params: Params, k: int, key: Key, *, chosen: Chosen = is_weight) -> Any:
    """Tables to start from: zero in slot 0, and K - 1 random entries of each weight layer, ascending."""
    check.whole("k", k, 1, clustering.MOST_CENTROIDS)
    leaves, structure = jax.tree.flatten(parts_of(params, chosen)[1])

    def table(number: int, leaf: Array) -> Array:
        drawn = clustering.random_entries(jax.random.fold_in(key, number), leaf.reshape(-1), k - 1)
        return jnp.concatenate([jnp.zeros(1, leaf.dtype), jnp.sort(drawn)])

    return jax.tree.unflatten(structure, [table(number, leaf) for number, leaf in enumerate(leaves)])


def wcp(
    params: Params,
    k: int,
    *,
    init: Any = None,
    key: Key | None = None,
    max_iter: Traced = 3,
    tolerance: Traced = 0.05,
    reference: str = "paper",
    chosen: Chosen = is_weight,
) -> Clustered:
    """Weight clustering with pruning: one-dimensional k-means of each weight layer, one centroid fixed at zero.

    ``a <- argmin_j |theta - mu_j|``, ``mu_j <- mean(theta[a = j])`` for ``j > 0``, ``mu_0 = 0``, until ``max_iter`` or
    until the loss changes by at most the share ``tolerance``, see ``clustering.cluster``. An empty cluster keeps its
    centroid.

    Args:
      k: K centroids a layer, from 1 (all weights are pruned) to 256.
      init: tables to start from, such as a dictionary G of ``Clustered.tables`` or a mean of several; slot 0 is
        ignored. ``None``: random entries of each layer, drawn from ``key``.
      reference: ``"paper"``, or ``"released"`` as the authors' code does it: the mean of the layer is subtracted and
        never added again, an empty cluster gets a random entry (``key`` is needed), and the table is sorted with its
        zero in between, so that a warm start replaces the most negative centroid by zero.
      chosen: ``chosen(path, leaf)``, which leaves are clustered.

    Returns: ``Clustered``. A layer with an entry that is not finite has a table of NaN.

    Source: PushCen-ADFL (2026), algorithm 3. Deviations: the zero is always in slot 0, only the other K - 1 are sorted
    (the printed warm start and the averages of tables need that); the indices are those after the last update.
    """
    check.whole("k", k, 1, clustering.MOST_CENTROIDS)
    check.non_negative("tolerance", tolerance)
    if isinstance(max_iter, (int, float)):
        check.whole("max_iter", max_iter, 0)
    rules = registry.find("reference", clustering.REFERENCES, reference)
    needed = init is None or rules.refilled
    check.require(key is not None or not needed, "key", key, "a random key, unless init is given and nothing refilled")
    rest, weights = parts_of(params, chosen)
    tables = random_tables(params, k, key, chosen=chosen) if init is None else init
    leaves, structure = jax.tree.leaves(weights), _structure(weights)
    tables_found, indices = [], []
    for number, (leaf, start) in enumerate(zip(leaves, structure.flatten_up_to(tables), strict=True)):
        check.require(jnp.shape(start) == (k,), "init", f"a table of shape {list(jnp.shape(start))}", f"of shape [{k}]")
        own = None if key is None else jax.random.fold_in(key, 2**31 + number)
        table, index = clustering.cluster(
            leaf.reshape(-1), start[1:], key=own, max_iter=max_iter, tolerance=tolerance, reference=rules
        )
        tables_found.append(table)
        indices.append(index.reshape(leaf.shape))
    return Clustered(structure.unflatten(tables_found), structure.unflatten(indices), rest)


def _structure(params: Params) -> Any:
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
