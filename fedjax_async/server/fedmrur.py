"""FedMRUR: a hyperbolic proximal term at the clients, a lengthened mean of their deltas at the server.

Source: An et al., "Federated learning with manifold regularization and normalized update reaggregation" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.local import Scale, hyperbolic, local_training
from fedjax_async.server.aggregate import Aggregate, mean
from fedjax_async.server.rule import guard_rails, rule
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, scaled
from fedjax_async.types import Array, Arrival, ClientAlgorithm, Model, Params, ServerAlgorithm, State, Traced


class Lengths(NamedTuple):
    """What :func:`reaggregated` accumulates."""

    mean: State  # of :func:`mean`
    total: Array  # float[], weighted sum of the lengths of the directions


def reaggregated() -> Aggregate:
    """The mean direction, lengthened to the mean length of the directions: ``d mean |d_i| / |d|``, d their mean.

    The mean of different directions is shorter than they are; this undoes the shortening. For equal directions, or a
    single one, the result is the mean. Running statistics are averaged. A mean of length zero stays zero. Source: An et
    al. (2023), normalised update reaggregation.
    """
    average = mean()

    def init(params: Params) -> Lengths:
        return Lengths(average.init(params), jnp.zeros((), jnp.result_type(float)))

    def add(accumulated: Lengths, direction: Params, share: Array, arrival: Arrival) -> Lengths:
        total = accumulated.total + share * tree.norm(weights_of(direction))
        return Lengths(average.add(accumulated.mean, direction, share, arrival), total)

    def close(accumulated: Lengths) -> tuple[Params, Array, Lengths]:
        direction, weight, emptied = average.close(accumulated.mean)
        length = tree.norm(weights_of(direction))
        typical = accumulated.total / jnp.where(weight > 0, weight, 1.0)
        factor = jnp.where(length > 0, typical / jnp.where(length > 0, length, 1.0), 1.0)
        longer = with_statistics(scaled(weights_of(direction), factor), direction)
        return longer, weight, Lengths(emptied, jnp.zeros_like(accumulated.total))

    return Aggregate(init, add, close)


@takes(guards=guard_rails)
def fedmrur(
    *, server_lr: Traced = 1.0, reaggregate: bool = True, weighting: str = "uniform", guards: Transform
) -> ServerAlgorithm:
    """Mean of the deltas, lengthened to their mean length; clients with a hyperbolic proximal term (An et al. 2023).

    ``x <- x + eta d (mean_i |Delta_i|) / |d|``, d the mean of the deltas. The clients run :func:`fedmrur_client`. The
    paper's clients take SAM steps: ``--optimizer sam``.

    Args:
      server_lr: ``eta > 0``.
      reaggregate: whether the mean is lengthened; if not, the server step is FedAvg's.
      weighting: ``uniform``, or by ``examples``.
    """
    check.positive("server_lr", server_lr)
    check.one_of("reaggregate", reaggregate, (True, False))
    aggregate = reaggregated() if reaggregate else mean()
    return rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting, aggregate=aggregate)


def fedmrur_client(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    sigma: Traced = 1.0,
    beta: Traced = 1.0,
) -> ClientAlgorithm:
    """``local_training`` with the proximal term ``(mu / 2) hyperbolic(w, w_0)``.

    Args:
      optimizer, batch_size, proximal, scale: as in ``local_training``.
      sigma, beta: of ``local.hyperbolic``, > 0.
    """
    metric = hyperbolic(sigma=sigma, beta=beta)
    return local_training(
        model, optimizer=optimizer, batch_size=batch_size, proximal=proximal, scale=scale, metric=metric
    )
