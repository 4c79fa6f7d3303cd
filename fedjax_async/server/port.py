"""Port: uploads weighted by their age and by whether they lead where the server went meanwhile.

Source: Su, Li, "How asynchronous can federated learning be?" (2022), read in the authors' code (``examples/async/port``
of github.com/TL-System/plato).
"""

from __future__ import annotations

import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.base.factories import takes
from fedjax_async.geometry.vectors import inner, leaves
from fedjax_async.server.rule import Weighting, guard_rails, rule
from fedjax_async.server.running_statistics import weights_of
from fedjax_async.server.transforms import Transform, Transformed
from fedjax_async.types import Array, Params, ServerAlgorithm, State, Traced


def likeness(direction: Params, start: Params, end: Params) -> Array:
    """The cosine of a direction and the way from ``start`` to ``end``, of the weights; 1 if one of them is zero."""
    along, first, last = (leaves(weights_of(each)) for each in (direction, start, end))
    way = [b - a for a, b in zip(first, last, strict=True)]
    product = jnp.sqrt(inner(along, along)) * jnp.sqrt(inner(way, way))
    sound = (product > 0) & jnp.isfinite(product)
    cosine = inner(along, way) / jnp.where(sound, product, 1.0)
    return jnp.where(sound & jnp.isfinite(cosine), jnp.clip(cosine, -1.0, 1.0), 1.0)


@takes(guards=guard_rails)
def port(
    *,
    server_lr: Traced = 1.0,
    likeness_weight: Traced = 1.0,
    age_weight: Traced = 3.0,
    bound: Traced = 10.0,
    guards: Transform,
) -> ServerAlgorithm:
    """Mean of deltas weighted by age and by likeness to the server's own change (Port, Su and Li 2022).

    ``x <- x + eta sum_i p_i Delta_i / sum_i p_i``, ``p_i = n_i (a (cos_i + 1) / 2 + b S / (tau_i + S))``: n_i examples,
    cos_i the cosine between Delta_i and the way that the server has gone since the client's start. A fresh upload, or
    one after which the server has not moved, has ``cos_i = 1``. The timing ``hurry`` keeps ``tau_i <= S``.

    Args:
      server_lr: ``eta > 0``.
      likeness_weight: ``a >= 0``.
      age_weight: ``b > 0``. 1 and 3 are those of the authors' example (``port_cifar10.yml``).
      bound: ``S > 0``, the ``bound`` of the timing.

    Deviations: the authors' code compares with the way of the last two steps, whatever the age; here it is the way
    since the client's start. The recorded weight is p_i.
    """
    for name, value in (("server_lr", server_lr), ("age_weight", age_weight), ("bound", bound)):
        check.positive(name, value)
    check.non_negative("likeness_weight", likeness_weight)

    def fits(result: Transformed, params: Params, memory: State) -> tuple[Array, State]:
        real, tau = result.arrival.weight.dtype, result.arrival.staleness
        alike = likeness(result.direction, result.arrival.start, params)
        cosine = jnp.where(tau > 0, alike, 1.0).astype(real)
        a, b, limit = (jnp.asarray(value, real) for value in (likeness_weight, age_weight, bound))
        return result.arrival.weight * (a * (cosine + 1.0) / 2.0 + b * limit / (tau.astype(real) + limit)), memory

    return rule(guards, optimizer=optax.sgd(server_lr), weighting=Weighting(fits))
