"""PushCen-ADFL's stationarity bound (Theorem C.7), as printed and as derived again from its proof.

The bound is on ``(1/T) sum_t E ||grad F(w_bar^t)||^2`` over T compute events, where ``w_bar`` is the push-sum average
of all models and messages. At event t, client i has the share ``gamma_t`` of the total mass, ``w_bar`` moves by
``gamma_t Delta + delta``, and ``||delta|| <= c_t eps_c`` with ``c_t = gamma_t d / (d + 1)`` (eqs. 102, 103).

What the paper does not say; all but the last two are shown by a test:

- Eq. 108 bounds ``<grad F, delta>`` by ``|grad F|^2 / 4 + |delta|^2``. The quarter cannot be absorbed, because the
  descent is only ``eta gamma E |grad F|^2 / 2``. With a weight that can be absorbed, the second term is
  ``2 |delta|^2 / (eta gamma E)``. So compression leaves a floor of ``eps_c^2 / (eta E)^2``, which the theorem lacks. A
  small learning rate raises this floor.
- The theorem divides eq. 125 by ``eta E gamma``, but not its terms of drift, compression and heterogeneity.
- Eq. 112 has 3/4 where its two products leave 1/2. Eq. 107 has half of the square of Delta.
- Eq. 104 loses the ``4 lambda^2 |w - anchor|^2`` of eq. 113: the anchor pulls to another point than the loss does.
- ``|w^(t+1/3) - w_bar|^2 <= N E_con`` before eq. 126 leaves out staleness and compression, which eq. 72 has.
- The mask is left out ("it can only reduce the step length"). A masked gradient is no descent direction for the pruned
  weights. Derived again, the bound is for training without a mask.
- Eq. 69 counts the change by a client's training between two events, but not that by its own aggregations. After eq. 74
  the move of ``w_bar`` is that by compression, without that by training (eq. 102). Eq. 81 claims a contraction at each
  event, which holds only over windows of B events. So Lemma C.3 is not proven. The bound derived again needs none of
  these if the distance of the mixed models is measured along a run.

Source: PushCen-ADFL (2026), appendix C.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from fedjax_async.base import check
from fedjax_async.theory.rates import Quantity, as_reals, check_each, larger, require_admissible


class PushCenConstants(NamedTuple):
    """The arguments of the bound; arrays that broadcast, for curves. Losses [l], parameters [w], gradients [l/w]."""

    gap: Quantity  # F(w_bar^0) - F* [l]
    events: Quantity  # T, compute events
    clients: Quantity  # N
    local_steps: Quantity  # E
    lr: Quantity  # eta [w^2/l]
    smoothness: Quantity  # L [l/w^2]
    variance: Quantity  # sigma^2 of one minibatch gradient [l^2/w^2]; only as printed
    heterogeneity: Quantity  # zeta^2 [l^2/w^2]
    squared_gradient: Quantity  # G^2, the second moment of a minibatch gradient [l^2/w^2]
    error: Quantity  # eps_c, of a message [w]
    share: Quantity  # the least gamma_t, the share of the mass at an event
    largest_share: Quantity = 1.0  # the largest gamma_t; only as derived again
    sent: Quantity = 1.0  # c, the largest share that is sent at an event, gamma_t d / (d + 1)
    weight: Quantity = 0.0  # lambda, of the regulariser [l/w^2]
    radius: Quantity = 0.0  # W, the largest norm of a model, also between local steps, and of an anchor [w]
    staleness: Quantity = 0.0  # tau, events
    disagreement: Quantity = 0.0  # E_con^0, the mean of |w_i - w_bar|^2 at the start [w^2]
    contraction: Quantity = 0.0  # rho of Lemma C.3
    of_drift: Quantity = 0.0  # C_1
    of_stale_drift: Quantity = 0.0  # C_2
    of_error: Quantity = 0.0  # C_3


class PushCenBound(NamedTuple):
    """The terms of the bound [l^2/w^2]."""

    optimisation: Quantity  # of the gap F(w_bar^0) - F*
    heterogeneity: Quantity  # of sigma^2 and zeta^2
    compression: Quantity  # of the error of messages in w_bar
    mixing: Quantity  # of the distance between the mixed model and w_bar
    drift: Quantity  # of local training
    anchor: Quantity  # of the regulariser

    @property
    def total(self) -> Quantity:
        """The sum: the bound itself."""
        return sum(self[1:], self[0])


def _checked(c: PushCenConstants) -> PushCenConstants:
    for name in ("events", "clients", "local_steps", "lr", "smoothness", "share"):
        check_each(check.positive, name, getattr(c, name))
    for name in PushCenConstants._fields[PushCenConstants._fields.index("variance") :]:
        check_each(check.non_negative, name, getattr(c, name))
    for name in ("share", "largest_share", "sent"):
        check_each(check.in_range, name, getattr(c, name), 0, 1)
    check_each(check.below_one, "contraction", c.contraction)
    require_admissible("share", c.share, c.largest_share, "the field largest_share")
    return as_reals(c)


def local_drift(c: PushCenConstants) -> Quantity:
    """``D = 2 E^2 eta^2 (G^2 + 16 lambda^2 W^2)``, the bound on ``E ||Delta||^2`` (eq. 120)."""
    return 2 * (c.local_steps * c.lr) ** 2 * (c.squared_gradient + 16 * (c.weight * c.radius) ** 2)


def consensus(c: PushCenConstants) -> Quantity:
    """The bound on the mean of E_con over the events, by Lemma C.3 (eqs. 121, 127)."""
    each = (c.of_drift + c.of_stale_drift * c.staleness**2) * local_drift(c) + c.of_error * c.error**2
    return (c.disagreement / c.events + each) / (1 - c.contraction)


def pushcen_bound(
    constants: PushCenConstants, *, printed: bool = False, distance: Quantity | None = None, beyond: bool = False
) -> PushCenBound:
    """Theorem C.7, derived again; or as ``printed`` (eqs. 118, 119).

    With ``g <= gamma_t <= g'``, D the local drift and A the distance, the bound derived again is

        2 gap / (eta E g T)  +  4 zeta^2 g' / g  +  (4 c / (eta E) + 2 L c^2) eps_c^2 / (eta E g)
        + 8 L^2 A g' / g  +  (8 L^2 s g' + 2 L g'^2 / (eta E)) D / g  +  64 lambda^2 W^2 g' / g

    with ``s = (E - 1)(2 E - 1) / (6 E^2)``, the mean over the steps of ``(e / E)^2``. It needs no condition on eta. It
    holds for runs that lose no mass and have no late clients, and for training without a mask.

    Args:
      distance: A, the mean over the events of ``||w_i^(t+1/3) - w_bar^t||^2`` [w^2], of the model after its
        aggregation, as measured along a run. ``None``: ``4 N E_con + 4 tau^2 D + 2 eps_c^2`` by eq. 72 and Lemma C.3.
        Not used if ``printed``.
      beyond: compute it as ``printed`` for learning rates above :func:`largest_lr_pushcen` too.

    Raises: ``ValueError`` with the first constant that is out of range, or, as ``printed``, with eta and its largest
      admissible value.
    """
    c = _checked(constants)
    drift, move = local_drift(c), c.lr * c.local_steps
    optimisation = 2 * c.gap / (move * c.share * c.events)
    if printed:
        if not beyond:
            require_admissible("lr", c.lr, largest_lr_pushcen(c), "Theorem C.7")
        return PushCenBound(
            optimisation,
            2 * (c.variance + c.heterogeneity),
            2 * c.smoothness * (c.sent * c.error) ** 2,
            4 * c.smoothness**2 * c.clients / c.share * consensus(c),
            c.smoothness / c.share * drift,
            0.0 * drift,
        )
    if distance is None:
        distance = 4 * c.clients * consensus(c) + 4 * c.staleness**2 * drift + 2 * c.error**2
    check_each(check.non_negative, "distance", distance)
    uneven = c.largest_share / c.share
    within = (c.local_steps - 1) * (2 * c.local_steps - 1) / (6 * c.local_steps**2)
    trained = 8 * c.smoothness**2 * within * uneven + 2 * c.smoothness * c.largest_share * uneven / move
    return PushCenBound(
        optimisation,
        4 * c.heterogeneity * uneven,
        (4 * c.sent / move + 2 * c.smoothness * c.sent**2) * c.error**2 / (move * c.share),
        8 * c.smoothness**2 * distance * uneven,
        trained * drift,
        64 * (c.weight * c.radius) ** 2 * uneven,
    )


def largest_lr_pushcen(constants: PushCenConstants) -> Quantity:
    """Largest eta that Theorem C.7 admits as printed: ``min(1 / (8 L E), 1 / (4 lambda))``. ``lr`` is not used."""
    c = _checked(constants._replace(lr=1.0))
    return 1 / larger(8 * c.smoothness * c.local_steps, 4 * c.weight)


def shares_of_masses(least: Quantity, most: Quantity, clients: Quantity) -> tuple[Quantity, Quantity]:
    """``(y_min / (N y_max), y_max / (N y_min))``: the paper's bounds of ``share`` and ``sent`` (eqs. 114, 116).

    The second may exceed 1; then use 1.
    """
    check_each(check.positive, "least", least)
    check_each(check.positive, "clients", clients)
    known = not any(isinstance(each, jax.core.Tracer) for each in (least, most))
    check.require(not known or bool(np.all(most >= least)), "most", most, f"a number >= {least}")
    return least / (clients * most), most / (clients * least)
