"""OrthoFL: every client keeps weights of its own, to which it adds what others did orthogonally to its change."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import optax

from fedjax_async import check, registry, tree
from fedjax_async.geometry import GROUPINGS, project_out
from fedjax_async.registry import takes
from fedjax_async.server.calibration import Combine, by_average, by_last, plus
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.rule import rule
from fedjax_async.server.staleness import Weight
from fedjax_async.server.statistics import on_weights
from fedjax_async.server.transforms import Transform, scale_by_staleness, towards_client
from fedjax_async.types import Array, Arrival, Params, ServerAlgorithm, State, Traced


def orthogonal(per: str) -> Combine:
    """``Delta + shift_perp``: of the others' shift, what is orthogonal to the client's own change; statistics its own.

    Source: OrthoFL (2025), eqs. 3-5.
    """
    registry.find("per", GROUPINGS, per)

    return on_weights(lambda change, now, before: plus(change, project_out(now, change, minus=before, per=per)))


def after_the_first(transform: Transform) -> Transform:
    """``transform`` for all accepted arrivals but the first, which is left as it is."""

    def init(params: Params) -> State:
        return jnp.zeros((), jnp.bool_), transform.init(params)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        begun, before = state
        changed, after, weight = transform.update(direction, before, params, arrival)
        kept = tree.where(begun, changed, direction)
        return kept, (jnp.ones_like(begun), after), jnp.where(begun, weight, jnp.ones_like(weight))

    return Transform(init, update)


def moving_average(guards: Transform, mixed: Transform) -> ServerAlgorithm:
    """``W <- W + mixed(w_i - W)``."""
    return rule(towards_client(), guards, mixed, optimizer=optax.sgd(1.0))


def _by_average(guards: Transform, mixed: Transform, combine: Combine) -> ServerAlgorithm:
    return by_average(moving_average(guards, mixed), combine)


def _by_last(guards: Transform, mixed: Transform, combine: Combine) -> ServerAlgorithm:
    return by_last(moving_average(guards, after_the_first(mixed)), combine)


REFERENCES: dict[str, Callable[[Transform, Transform, Combine], ServerAlgorithm]] = {
    "average": _by_average,
    "shared": _by_last,
}


@takes(discounted=discount, guards=guard_rails)
def orthofl(
    *, mixing: Traced = 0.6, per: str = "layer", reference: str = "average", discounted: Weight, guards: Transform
) -> ServerAlgorithm:
    """Clients keep their own weights and take over what is orthogonal to their own change (OrthoFL, 2025).

    ``W <- (1 - b_t) W + b_t w_m``, ``b_t = mixing * s(tau)``; client m goes on from ``w_m + dW_perp``, where
    ``dW`` is the shift of the global model since its last upload, before ``w_m`` is mixed in, and
    ``dW_perp`` the part of it orthogonal to the client's change in each layer. A client that nobody
    overtook keeps its own weights. Memory: two models a client.

    Args:
      mixing: b in (0, 1].
      per: layers (``layer``), single tensors (``tensor``) or all parameters as one vector (``whole``).
      reference: ``average``, the paper's shift, of the moving average ``W``; or ``shared``, that of the
        released code: the shift of the weights last calibrated, for any client, while ``W``, whose first
        update has weight 1, is only evaluated.

    BatchNorm's running statistics stay those of the client. ``clip`` bounds what the average takes over, not
    what the client goes on from; an upload that is rejected leaves its client where it was. The staleness
    tau counts server steps since the client received its model; the paper's s, counted from its last
    upload, is 1 + tau where clients leave as they return.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    build = registry.find("reference", REFERENCES, reference)
    return build(guards, scale_by_staleness(discounted, mixing), orthogonal(per))
