"""FedAsync: each arriving model is mixed into the server's."""

from __future__ import annotations

from typing import Any

import optax

from fedjax_async import check
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import staleness_weight
from fedjax_async.server.transforms import scale_by_staleness, towards_client
from fedjax_async.types import ServerAlgorithm


def fedasync(
    *,
    mixing: Any = 0.6,
    staleness: str = "polynomial",
    exponent: Any = None,
    slope: Any = None,
    threshold: Any = None,
) -> ServerAlgorithm:
    """Mix each arriving model in, less the staler it is (Xie et al. 2019).

    ``x <- (1 - a_t) x + a_t x_i``, ``a_t = mixing * s(tau)``: Algorithm 1 of the paper. Under a
    timing policy that gathers several arrivals in a server step, their mixing steps are averaged.

    Args:
      mixing: alpha in (0, 1].
      staleness: ``constant``, ``hinge`` (options ``slope`` a = 10, ``threshold`` b = 4) or
        ``polynomial`` (option ``exponent`` = 0.5).
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    weight = staleness_weight(staleness, exponent=exponent, slope=slope, threshold=threshold)
    return rule(towards_client(), scale_by_staleness(weight, mixing), optimizer=optax.sgd(1.0))
