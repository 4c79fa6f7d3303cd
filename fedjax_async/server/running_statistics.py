"""Running statistics among the params: no rule treats them as weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedjax_async import tree
from fedjax_async.models import STATISTICS
from fedjax_async.types import Arrival, Params


def has_statistics(params: Params) -> bool:
    """Whether the top level of the params has an entry of BatchNorm's running statistics."""
    return isinstance(params, dict) and STATISTICS in params


def weights_of(params: Params) -> Params:
    """The params without their running statistics."""
    return {k: entry for k, entry in params.items() if k != STATISTICS} if has_statistics(params) else params


def with_statistics(weights: Params, source: Params) -> Params:
    """``weights``, with the running statistics of ``source`` where it has any."""
    return {**weights, STATISTICS: source[STATISTICS]} if has_statistics(source) else weights


def weights_in(upload: Any) -> Any:
    """What counts in the norm of an upload, a pytree of any kind: all of its leaves but running statistics."""
    return tree.split(upload, lambda path: STATISTICS in path)[0]


def statistics_in(upload: Any) -> Any:
    """The rest of it."""
    return tree.split(upload, lambda path: STATISTICS in path)[1]


def rebased(arrival: Arrival, params: Params) -> Arrival:
    """The arrival as if its client had started from the running statistics of ``params``.

    A client's statistics say where it stands, ``start + upload``: a few steps take them most of the way whatever
    they were before. Added as changes, those of several stale clients would overshoot, down to negative variances.
    """
    if not has_statistics(params):
        return arrival
    start, upload = arrival.start, arrival.upload
    way = jax.tree.map(lambda w0, d, x: w0 + d - x, start, upload, params)
    return arrival._replace(start=with_statistics(start, params), upload=with_statistics(upload, way))


def on_weights(function: Callable[..., Params]) -> Callable[..., Params]:
    """``function(one, *others)`` of the weights alone; statistics are those of ``one``."""
    return lambda one, *others: with_statistics(function(weights_of(one), *map(weights_of, others)), one)
