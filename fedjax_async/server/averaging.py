"""Rules that step by a weighted mean of the deltas: FedAvg, FedBuff, FedAsync, ASGD, AsynFL."""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.aggregate import mean
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness, towards_client
from fedjax_async.types import ServerAlgorithm, Traced


@takes(guards=guard_rails)
def fedavg(*, server_lr: Traced = 1.0, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Mean of the deltas, by examples or uniform (McMahan et al. 2017).

    ``x <- x + eta_g sum_i p_i Delta_i`` with ``p_i`` proportional to the client's examples
    (``weighting="examples"``, Algorithm 1 of the paper) or uniform. ``server_lr`` is ``eta_g > 0``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting)


@takes(discounted=discount, guards=guard_rails)
def fedbuff(*, server_lr: Traced = 1.0, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Mean of K staleness-weighted deltas (Nguyen et al. 2022).

    ``x <- x + eta_g (1/K) sum_{i in buffer} s(tau_i) Delta_i``, ``s = (1 + tau)^-0.5`` by default:
    Algorithm 1 of the paper. The buffer's size K is the timing policy's ``buffer:size=K``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr))


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


@takes(guards=guard_rails)
def asgd(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Add each arriving delta, ``x <- x + eta Delta_i`` (asynchronous SGD with local steps).

    ``server_lr`` is ``eta > 0``. Under a timing policy that gathers several arrivals in a server
    step, their deltas are averaged.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr))


@takes(guards=guard_rails)
def asynfl(*, server_lr: Traced = 1.0, num_clients: int = 10, guards: Transform) -> ServerAlgorithm:
    """Sum of the deltas of whoever finished, divided by the number of all clients (AsynFL 2025).

    ``x <- x + (eta_g / n) sum_{i in S_t} Delta_i``, where ``S_t`` are the clients of the server step, however many;
    n divides, not ``|S_t|``: who takes part more often counts more. With compressed uploads (``Delta_i`` as it is
    decoded) this is AsynFLC, with error feedback AsynFLC-EF. When a step closes is the timing policy's affair:
    ``window:length=W``, or ``participation``, Algorithm 1 of the paper to the letter.

    Args:
      server_lr: ``eta_g > 0``.
      num_clients: n; a run by name fills it in.
    """
    check.positive("server_lr", server_lr)
    check.whole("num_clients", num_clients)
    return rule(guards, optimizer=optax.sgd(server_lr), aggregate=mean(divisor=num_clients))
