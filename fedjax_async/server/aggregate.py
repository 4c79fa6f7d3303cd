"""Aggregates: combine the directions of one server step into one, by their mean or by a function of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.server.running_statistics import with_statistics
from fedjax_async.server.transforms import scaled
from fedjax_async.types import Array, Arrival, Params, State, Traced


class Aggregate(NamedTuple):
    """How the directions of a server step are accumulated.

    ``init(params) -> accumulated``, empty, or ``init(params, facts)`` with the static facts of the run;
    ``add(accumulated, direction, share, arrival) -> accumulated``, where an arrival of ``share`` 0 does not count;
    ``close(accumulated) -> (direction, weight, accumulated)`` when the step closes. The direction is used only if
    ``weight > 0``, and the new ``accumulated`` is empty. Where params have half precision it may be in float32.
    ``sums``: whether the result depends on the directions of the arrivals only through ``sum share_i d_i``.
    """

    init: Callable[..., State]
    add: Callable[[State, Params, Array, Arrival], State]
    close: Callable[[State], tuple[Params, Array, State]]
    sums: bool = False


class Sum(NamedTuple):
    """What :func:`mean` accumulates."""

    total: Params  # weighted sum of the directions since the last close
    weight: Array  # float[], sum of their weights


def mean(*, divisor: Traced | None = None) -> Aggregate:
    """``sum w_i d_i / sum w_i``, or ``sum w_i d_i / divisor`` (AsynFL divides by n).

    Running statistics are divided by ``sum w_i`` where it is above ``divisor``: they never leave the clients' range.
    """
    if divisor is not None:
        check.positive("divisor", divisor)

    def init(params: Params) -> Sum:
        return Sum(jax.tree.map(jnp.zeros_like, tree.wide(params)), jnp.zeros((), jnp.result_type(float)))

    def add(accumulated: Sum, direction: Params, share: Array, arrival: Arrival) -> Sum:
        total = jax.tree.map(jnp.add, accumulated.total, scaled(tree.wide(direction), share))
        return Sum(total, accumulated.weight + share)

    def close(accumulated: Sum) -> tuple[Params, Array, Sum]:
        total, weight = accumulated
        below = jnp.where(weight > 0, weight, 1.0) if divisor is None else jnp.asarray(divisor, weight.dtype)
        direction = with_statistics(scaled(total, 1.0 / below), scaled(total, 1.0 / jnp.maximum(below, weight)))
        return direction, weight, jax.tree.map(jnp.zeros_like, accumulated)

    return Aggregate(init, add, close, sums=True)


class Buffer(NamedTuple):
    """What :func:`buffered` accumulates: the accepted directions of the step, in order of arrival."""

    rows: Params  # [K, ...]; the rows from ``filled`` on are undefined
    filled: Array  # int32[]


def buffered(size: int, combine: Callable[[Params, Array], Params]) -> Aggregate:
    """``combine(rows [K, ...], count)`` of the ``count`` <= K = ``size`` accepted directions, each counted once.

    ``rows`` are like the params, with a leading axis; the first ``count`` are of this step, the others are old.
    The buffer must hold the longest server step; :func:`check_capacity` tests this before a run. In a longer step the
    result is NaN. ``combine`` runs only when a step closes. It may be called with a count of 0; the result is then
    not used.
    """
    check.whole("size", size)

    def init(params: Params) -> Buffer:
        return Buffer(tree.stack_zeros(params, size), jnp.int32(0))

    def add(accumulated: Buffer, direction: Params, share: Array, arrival: Arrival) -> Buffer:
        def written(rows: Array, row: Array) -> Array:
            return rows.at[accumulated.filled].set(row, mode="drop")

        rows = jax.tree.map(written, accumulated.rows, direction)
        return Buffer(rows, accumulated.filled + (share > 0).astype(jnp.int32))

    def close(accumulated: Buffer) -> tuple[Params, Array, Buffer]:
        rows, count = accumulated
        fits = count <= size
        direction = jax.tree.map(lambda leaf: jnp.where(fits, leaf, jnp.full_like(leaf, jnp.nan)), combine(rows, count))
        return direction, count.astype(jnp.result_type(float)), Buffer(rows, jnp.zeros_like(count))

    return Aggregate(init, add, close)


def along(vector: Array, rows: Array) -> Array:
    """``vector`` [K] as [K, 1, ...], so that it broadcasts against ``rows`` [K, ...]."""
    return vector.reshape((-1,) + (1,) * (rows.ndim - 1))


def check_capacity(state: State, longest: int) -> None:
    """Raise ``ValueError`` if the ``longest`` server step has more arrivals than a buffer of the rule has rows.

    ``state``: the state of the rule, or its shapes (``jax.eval_shape(server.init, params)[0]``).
    """
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Buffer)):
        if isinstance(node, Buffer):
            size = jax.tree.leaves(node.rows)[0].shape[0]
            allowed = f"at least {longest}, the most arrivals of one server step of this run (option size)"
            check.require(size >= longest, "size of the rule's buffer", size, allowed)
