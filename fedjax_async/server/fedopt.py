"""Adaptive federated optimisation: the negative mean delta is the gradient of a server optimiser.

Source: Reddi et al., "Adaptive federated optimization" (2021), Algorithm 2; FedAvgM: Hsu, Qi,
Brown (2019), section 3.2. Deviation: the optimisers are optax's, so Adam corrects the bias of its
moments, which the paper's algorithm leaves out.
"""

from __future__ import annotations

import optax

from fedjax_async import check
from fedjax_async.registry import takes
from fedjax_async.server.options import Adaptive, adaptive, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.transforms import Transform
from fedjax_async.types import ServerAlgorithm, Traced


@takes(guards=guard_rails)
def fedavgm(
    *, server_lr: Traced = 1.0, momentum: Traced = 0.9, weighting: str = "examples", guards: Transform
) -> ServerAlgorithm:
    """FedAvg with heavy-ball momentum at the server (Hsu et al. 2019).

    ``m <- momentum m - mean``, ``x <- x - server_lr m``. ``momentum`` in [0, 1).
    """
    check.positive("server_lr", server_lr)
    check.below_one("momentum", momentum)
    return rule(guards, optimizer=optax.sgd(server_lr, momentum=momentum), weighting=weighting)


@takes(guards=guard_rails)
def fedadagrad(
    *,
    server_lr: Traced = 0.03,
    eps: Traced = 1e-3,
    initial: Traced = 1e-6,
    weighting: str = "examples",
    guards: Transform,
) -> ServerAlgorithm:
    """Adagrad on the mean delta (Reddi et al. 2021).

    ``v <- v + mean^2``, ``x <- x + server_lr mean / sqrt(v + eps)``; ``v`` starts at ``initial``.
    """
    check.positive("server_lr", server_lr)
    check.positive("eps", eps)
    check.non_negative("initial", initial)
    optimizer = optax.adagrad(server_lr, initial_accumulator_value=initial, eps=eps)
    return rule(guards, optimizer=optimizer, weighting=weighting)


@takes(options=adaptive, guards=guard_rails)
def fedadam(*, options: Adaptive, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Adam on the mean delta (Reddi et al. 2021; their b1, b2 and adaptivity eps)."""
    return rule(guards, optimizer=optax.adam(*options), weighting=weighting)


@takes(options=adaptive, guards=guard_rails)
def fedyogi(*, options: Adaptive, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Yogi on the mean delta: a second moment that changes additively (Reddi et al. 2021).

    Optax starts both moments at 1e-6, the paper the first at 0.
    """
    return rule(guards, optimizer=optax.yogi(*options), weighting=weighting)
