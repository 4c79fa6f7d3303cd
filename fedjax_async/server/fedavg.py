"""FedAvg: the server steps by the mean of the clients' deltas."""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.options import guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.transforms import Transform
from fedjax_async.types import ServerAlgorithm, Traced


@takes(guards=guard_rails)
def fedavg(*, server_lr: Traced = 1.0, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Mean of the deltas, by examples or uniform (McMahan et al. 2017).

    ``x <- x + eta_g sum_i p_i Delta_i`` with ``p_i`` proportional to the client's examples
    (``weighting="examples"``, Algorithm 1 of the paper) or uniform. ``server_lr`` is ``eta_g > 0``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting)
