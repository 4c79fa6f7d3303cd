"""Delay-adaptive ASGD: the step of a late delta is cut by its delay, or the delta is dropped.

Sources: Koloskova, Stich, Jaggi, "Sharper convergence guarantees for asynchronous SGD for distributed and federated
learning" (2022), Algorithm 1 with the step sizes of eq. 11; Mishchenko, Bach, Even, Woodworth, "Asynchronous SGD beats
minibatch SGD under arbitrary delays" (2022), whose released code has the same step sizes
(github.com/konstmish/asynchronous_sgd).
"""

from __future__ import annotations

import numbers

import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.base.factories import takes
from fedjax_async.server.rule import guard_rails, rule
from fedjax_async.server.transforms import Transform, scaled
from fedjax_async.types import Array, Arrival, Facts, Params, ServerAlgorithm, State, Traced

LATE = ("cut", "drop")


def scale_late(tolerated: Traced | None, late: str) -> Transform:
    """Multiply a direction of staleness tau > C by ``C / tau`` (``late="cut"``) or by 0 (``late="drop"``).

    ``tolerated`` is C >= 0; ``None``: the number N of clients.
    """
    if tolerated is not None:
        check.non_negative("tolerated", tolerated)
    check.one_of("late", late, LATE)

    def init(params: Params, facts: Facts = Facts()) -> Facts:
        return facts.static

    def update(direction: Params, state: Facts, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        tau = arrival.staleness.astype(arrival.weight.dtype)
        limit = jnp.asarray(state.num_clients if tolerated is None else tolerated, tau.dtype)
        short = limit / jnp.maximum(tau, 1.0) if late == "cut" else jnp.zeros_like(tau)
        factor = jnp.where(tau > limit, short, jnp.ones_like(tau))
        return scaled(direction, factor), state, factor

    drops = late == "drop" or (isinstance(tolerated, numbers.Real) and tolerated == 0)
    return Transform(init, update, sums=not drops)


@takes(guards=guard_rails)
def delay_adaptive_asgd(
    *, server_lr: Traced = 1.0, tolerated: Traced | None = None, late: str = "cut", guards: Transform
) -> ServerAlgorithm:
    """ASGD with a step that is cut by the delay of the delta (Koloskova et al. 2022, Mishchenko et al. 2022).

    ``x <- x + eta_t Delta_i`` with ``eta_t = eta`` if the delay ``tau_t <= tau_C``, and else ``eta tau_C / tau_t``
    (``late="cut"``) or 0 (``late="drop"``). Eq. 11 of Koloskova et al. admits any step from 0 to ``min(eta, 1 / (4 L
    tau_t))`` for a late gradient; with ``eta <= 1 / (4 L tau_C)`` both are within it. ``eta n / max(n, tau_t)`` is the
    step in the code of Mishchenko et al.

    Args:
      server_lr: ``eta > 0``.
      tolerated: ``tau_C >= 0``, the number of jobs in flight. By default the number of clients: set it where the
        timing's ``concurrency`` is smaller.
      late: ``cut`` or ``drop``; with ``tolerated = 0`` both drop. A dropped delta still closes its server step, which
        then changes nothing: a step of size 0 is an iteration in the papers too. With the setting ``max_staleness`` it
        would be none (``ringmaster``).

    Deviation: clients take local steps, and the delta is in place of the gradient. If a server step has several
    arrivals, their scaled deltas are averaged.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, scale_late(tolerated, late), optimizer=optax.sgd(server_lr))
