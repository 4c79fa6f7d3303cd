"""FedAsync: each arriving model is mixed into the server's."""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness, towards_client
from fedjax_async.types import ServerAlgorithm, Traced


@takes(discounted=discount, guards=guard_rails)
def fedasync(*, mixing: Traced = 0.6, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Mix each arriving model in, less the staler it is (Xie et al. 2019).

    ``x <- (1 - a_t) x + a_t x_i``, ``a_t = mixing * s(tau)``: Algorithm 1 of the paper. Under a
    timing policy that gathers several arrivals in a server step, their mixing steps are averaged.
    ``mixing`` is alpha in (0, 1]. The guard rails see ``x_i - x``, the way to the client's model.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    return rule(towards_client(), guards, scale_by_staleness(discounted, mixing), optimizer=optax.sgd(1.0))
