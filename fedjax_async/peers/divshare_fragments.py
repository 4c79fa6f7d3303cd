"""DivShare: models cut into fragments, each to receivers of its own, averaged entry by entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.peers.full_mixing import changed, no_change
from fedjax_async.types import Array, Event, Message, Params, PeerAlgorithm, Stays


class Fragment(NamedTuple):
    """A message: some entries of every tensor."""

    number: Array  # int32[]
    values: Params  # like the params, the fragment's entries of each leaf, padded with zeros


def cut(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Entries of each of ``count`` fragments of a vector: int32[F, longest], padded with ``size``.

    A random permutation is cut into pieces of ``size // F`` entries; the last piece takes the rest.

    >>> cut(5, 2, np.random.default_rng(0)).tolist()
    [[2, 4, 5], [3, 0, 1]]
    """
    order, each = rng.permutation(size), size // count
    found = np.full((count, size - (count - 1) * each), size, np.int32)
    for number in range(count):
        piece = order[number * each : (number + 1) * each if number < count - 1 else size]
        found[number, : len(piece)] = piece
    return found


def divshare(stays: Stays, *, omega: float = 0.2, cut_seed: int = 0) -> PeerAlgorithm:
    """Fragments of ``omega`` of each tensor; the mean of the own and all received values, entry by entry.

    ``w[d] <- (w[d] + sum_{j in R_d} w_j[d]) / (1 + |R_d|)``, where R_d are the received fragments that hold entry d.
    The clock plans ``1 / (1 + |R_d|)``, which is the same for all entries of a fragment.

    Args:
      omega: in (0, 1]; there are ``F = floor(1 / omega)`` fragments.
      cut_seed: of the permutations, the same for all nodes and throughout the run.

    Source: Biswas et al., "Boosting asynchronous decentralized learning with model fragmentation" (2025).
    """
    fragments = fragments_of(omega)
    check.whole("cut_seed", cut_seed, low=0)

    def entries(params: Params) -> Params:
        rng = np.random.default_rng(cut_seed)
        return jax.tree.map(lambda leaf: cut(leaf.size, fragments, rng), tree.split(params, stays)[0])

    def add(inbox: Params, row: Params, message: Fragment, weight: Array) -> Params:
        def added(total: Array, own: Array, values: Array, table: np.ndarray) -> Array:
            where = jnp.asarray(table)[message.number]
            gap = (values - own.reshape(-1).at[where].get(mode="fill", fill_value=0)).astype(total.dtype)
            return total.reshape(-1).at[where].add(weight.astype(total.dtype) * gap, mode="drop").reshape(total.shape)

        return jax.tree.map(added, inbox, tree.split(row, stays)[0], message.values, entries(row))

    def push(row: Params, upload: Params, event: Event) -> tuple[Params, Fragment, Mapping[str, Array]]:
        del event
        params = jax.tree.map(jnp.add, row, upload)

        def pieces(leaf: Array, table: np.ndarray) -> Array:
            return leaf.reshape(-1).at[table].get(mode="fill", fill_value=0)

        values = jax.tree.map(pieces, tree.split(params, stays)[0], entries(params))
        return params, Fragment(jnp.arange(fragments, dtype=jnp.int32), values), {}

    return PeerAlgorithm(
        init=lambda params: params,
        open=lambda row: no_change(row, stays),
        add=add,
        wake=lambda row, inbox, event: changed(row, inbox),
        start=Message,
        push=push,
        params=lambda row: row,
        fragments=fragments,
    )


def fragments_of(omega: float) -> int:
    """F = floor(1 / omega), up to rounding: 0.2 gives 5."""
    check.require(check.is_real(omega) and 0 < omega <= 1, "omega", omega, "a number in (0, 1]")
    return int(1 / omega + 1e-9)
