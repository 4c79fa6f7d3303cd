"""FedBuff: a buffer of staleness-weighted deltas."""

from __future__ import annotations

from typing import Any

import optax

from fedjax_async import check
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import staleness_weight
from fedjax_async.server.transforms import scale_by_staleness
from fedjax_async.types import ServerAlgorithm


def fedbuff(
    *,
    server_lr: Any = 1.0,
    staleness: str = "polynomial",
    exponent: Any = None,
    slope: Any = None,
    threshold: Any = None,
) -> ServerAlgorithm:
    """Mean of K staleness-weighted deltas (Nguyen et al. 2022).

    ``x <- x + eta_g (1/K) sum_{i in buffer} s(tau_i) Delta_i``, ``s = (1 + tau)^-0.5`` by default:
    Algorithm 1 of the paper. The buffer's size K is the timing policy's ``buffer:size=K``.
    """
    check.positive("server_lr", server_lr)
    weight = staleness_weight(staleness, exponent=exponent, slope=slope, threshold=threshold)
    return rule(scale_by_staleness(weight), optimizer=optax.sgd(server_lr))
