"""BatchNorm's running statistics are part of the params; these functions keep rules from treating them as weights."""

from __future__ import annotations

from collections.abc import Callable

import jax

from fedjax_async.base import tree
from fedjax_async.models import STATISTICS
from fedjax_async.types import Arrival, Params, Tree


def has_statistics(params: Params) -> bool:
    """Whether the params contain running statistics, an entry at their top level."""
    return isinstance(params, dict) and STATISTICS in params


def weights_of(params: Params) -> Params:
    """The params without their running statistics."""
    return {k: entry for k, entry in params.items() if k != STATISTICS} if has_statistics(params) else params


def with_statistics(weights: Params, source: Params) -> Params:
    """``weights`` with the running statistics of ``source``, if it has any."""
    return {**weights, STATISTICS: source[STATISTICS]} if has_statistics(source) else weights


def only_statistics(params: Params) -> Params:
    """The running statistics alone, as params; empty if there are none."""
    return {STATISTICS: params[STATISTICS]} if has_statistics(params) else {}


def weights_in(upload: Tree) -> Tree:
    """The weights in an upload, which may be any pytree; ``None`` in place of running statistics."""
    return weights_and_statistics(upload)[0]


def weights_and_statistics(upload: Tree) -> tuple[Tree, Tree]:
    """The weights in an upload, which may be any pytree, and its running statistics; ``None`` in place of others."""
    return tree.split(upload, lambda path: STATISTICS in path)


def rebased(arrival: Arrival, params: Params) -> Arrival:
    """The arrival as if its client had started from the running statistics of ``params``.

    A client's statistics matter by their value, ``start + upload``, because a few local steps replace most of the old
    statistics. If the changes of several stale clients were added, the sum would overshoot: variances could even become
    negative.
    """
    if not has_statistics(params):
        return arrival
    start, upload = arrival.start, arrival.upload
    change = jax.tree.map(lambda w0, d, x: w0 + d - x, start, upload, params)
    return arrival._replace(start=with_statistics(start, params), upload=with_statistics(upload, change))


def on_weights(function: Callable[..., Params]) -> Callable[..., Params]:
    """``function(first, *others)`` applied to the weights alone; the result has the running statistics of ``first``."""
    return lambda first, *others: with_statistics(function(weights_of(first), *map(weights_of, others)), first)
