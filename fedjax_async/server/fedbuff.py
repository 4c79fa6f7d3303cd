"""FedBuff: a buffer of staleness-weighted deltas."""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness
from fedjax_async.types import ServerAlgorithm, Traced


@takes(discounted=discount, guards=guard_rails)
def fedbuff(*, server_lr: Traced = 1.0, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Mean of K staleness-weighted deltas (Nguyen et al. 2022).

    ``x <- x + eta_g (1/K) sum_{i in buffer} s(tau_i) Delta_i``, ``s = (1 + tau)^-0.5`` by default:
    Algorithm 1 of the paper. The buffer's size K is the timing policy's ``buffer:size=K``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr))
