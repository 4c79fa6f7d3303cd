"""Convergence bounds of AsynFL, AsynFLC and AsynFLC-EF as functions of a problem's constants.

Each function bounds ``(1/T) sum_t E ||grad f(x_t)||^2`` over T server steps. Fields of ``Constants`` may be NumPy
arrays that broadcast (for curves), except ``clients`` and ``local_steps``. A theorem claims its bound only for learning
rates up to ``largest_lr_...``. Larger ones raise ``ValueError`` unless ``beyond`` is true.

What the printed theorems do not say, each point shown by a test:

- All theorems divide by delays or need positive delays. Synchronous training has delay 1 here, so use
  ``clock.delay_statistics(schedule, fresh=1)``.
- Theorem 1 (and 3) is about Algorithm 1 as written: a client that misses a step continues training, so an upload of
  delay tau contains tau K local steps (timing ``participation``). If every upload contains K steps (timing ``window``)
  and faster clients take part more often, the model converges to a stationary point of another weighting of the
  clients. Then eq. 11 fails for heterogeneous clients if T is large and eta small.
- Eq. 13 does not depend on gamma, keeps a floor of ``2 (tau_max + 1)^2 sigma_g^2`` for gamma = 1, and lacks any term
  in ``eta eta_g L sigma^2``. It fails for plain SGD on a quadratic (one client, K = 1, no compression). With that
  term the rates of Corollaries 2 and 3 would be ``T^(-1/3)``, not ``T^(-2/3)``.
- Eq. 17 at gamma = 1 differs from eq. 11. It has other coefficients, and instead of eq. 11's
  ``(33 tau_avg0 + 72 tau_avg1) eta_g^2 sigma^2 / n`` it prints sigma_g^2 (probably a misprint of sigma^2). So for
  sigma_g = 0 and eta_g = sqrt(K n) it bounds the same algorithm by less than eq. 11. Its condition on the learning
  rate at gamma = 1 is Theorem 1's divided by sqrt(2).
- Corollary 4 omits the delays that eq. 17 has without compression: at gamma = 1 it would be stronger than Corollary 1.

Source: Yang, Hou, Wu, "Convergence Analysis of Asynchronous Federated Learning with Gradient Compression for
Non-Convex Optimization" (2025), eqs. 11 to 18.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_async.base import check
from fedjax_async.clock import DelayStatistics
from fedjax_async.types import Tree

Quantity = float | NDArray[np.float64]  # one number, or several that broadcast


class Constants(NamedTuple):
    """The arguments of the bounds. Losses have the unit [l], parameters [w], gradients [l/w].

    T is ``delays.server_steps``. ``heterogeneity`` is a mean of squares over all n clients, equally weighted.
    """

    gap: Quantity  # Delta = f(x_0) - f(x*) [l]
    smoothness: Quantity  # L, the largest over clients [l/w^2]
    variance: Quantity  # sigma^2 of one minibatch gradient [l^2/w^2]
    heterogeneity: Quantity  # sigma_g^2 [l^2/w^2]
    clients: int  # n
    local_steps: int  # K, of one round
    lr: Quantity  # eta, local [w^2/l]
    server_lr: Quantity  # eta_g [1]
    delays: DelayStatistics  # with fresh=1
    gamma: Quantity = 1.0  # E||C(x) - x||^2 <= (1 - gamma) ||x||^2; 1: no compression error


class Bound(NamedTuple):
    """The terms of a bound, by the constant to which they are proportional [l^2/w^2]."""

    optimisation: Quantity  # Delta
    variance: Quantity  # sigma^2
    heterogeneity: Quantity  # sigma_g^2

    @property
    def total(self) -> Quantity:
        """The sum: the bound itself."""
        return self.optimisation + self.variance + self.heterogeneity


def constant_delays(server_steps: int, delay: float = 1.0) -> DelayStatistics:
    """Every client ``delay`` >= 1 steps late in each of ``server_steps`` server steps; 1 is synchronous."""
    check_each(check.positive, "server_steps", server_steps)
    check_each(check.in_range, "delay", delay, 1, float("inf"))
    return DelayStatistics(server_steps, delay, delay, delay, delay, delay)  # type: ignore[arg-type]


def checked(c: Constants) -> Constants:
    """``c``, see :func:`as_reals`. Raises ``ValueError`` with the first field or entry that is out of range."""
    for field in ("gap", "variance", "heterogeneity"):
        check_each(check.non_negative, field, getattr(c, field))
    for field in ("smoothness", "lr", "server_lr", "gamma"):
        check_each(check.positive, field, getattr(c, field))
    check_each(check.in_range, "gamma", c.gamma, 0, 1)
    check.whole("clients", c.clients)
    check.whole("local_steps", c.local_steps)
    check_each(check.positive, "delays.server_steps", c.delays.server_steps)
    for field in ("tau_max", "tau_avg0"):  # of delays counted from 0, the mean is often the only one below 1
        check_each(check.in_range, f"delays.{field} (fresh=1)", getattr(c.delays, field), 1, float("inf"))
    return as_reals(c._replace(clients=int(c.clients), local_steps=int(c.local_steps)))


def as_reals(quantities: Tree) -> Tree:
    """Quantities with whole numbers of NumPy and JAX as floats: products of int32, as in tables of runs, overflow."""

    def real(value: object) -> object:
        if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.dtype.kind in "iu":
            return value.astype(float)
        return value

    return jax.tree.map(real, quantities)


def check_each(test: Callable[..., None], field: str, value: Quantity, *limits: float) -> None:
    """``test(field, number, *limits)`` of a number or of each entry of an array; not of a tracer, which has none."""
    for index, number in numbers_of(value):
        test(field + index, number, *limits)


def numbers_of(value: Quantity) -> list[tuple[str, Quantity]]:
    """The numbers of a quantity with their indices as text; none for a tracer, because its values are not known."""
    if isinstance(value, jax.core.Tracer):
        return []
    if not isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return [("", value)]
    return [(str(list(index)) if index else "", number.item()) for index, number in np.ndenumerate(np.asarray(value))]


def require_admissible(field: str, value: Quantity, largest: Quantity, of: str) -> None:
    """Raise ``ValueError`` with the largest admissible value if ``value``, or an entry of an array, is above it."""
    if not any(isinstance(each, jax.core.Tracer) for each in (value, largest)):
        values, most = np.broadcast_arrays(np.asarray(value), np.asarray(largest))
        above = values > (most.astype(values.dtype) if values.dtype.kind == "f" else most)  # as rounded as ``value``
        if above.any():
            allowed = f"at most {most[above][0]:.6g}, the largest that {of} admits"
            check.require(False, field, float(values[above][0]), allowed)


def compression_factor(gamma: Quantity) -> Quantity:
    """``c = (1 - gamma)(2 - gamma) / gamma^2``, the cost of compression with error feedback; 0 at gamma = 1."""
    check_each(check.positive, "gamma", gamma)
    check_each(check.in_range, "gamma", gamma, 0, 1)
    return (1 - gamma) * (2 - gamma) / gamma**2


def asynfl_bound(constants: Constants, *, beyond: bool = False) -> Bound:
    """Theorem 1, eq. 11: AsynFL, without compression.

    ``beyond``: compute it for learning rates above :func:`largest_lr_asynfl` too, where the theorem claims nothing.
    """
    c = checked(constants)
    if not beyond:
        require_admissible("lr", c.lr, largest_lr_asynfl(c), "Theorem 1")
    lambda_1, lambda_2, phi_1, phi_2, phi_3 = _factors(c)
    d, drift = c.delays, c.lr**2 * c.local_steps * c.smoothness**2
    late = (33 * d.tau_avg0 + 72 * d.tau_avg1) * c.server_lr**2 / c.clients
    variance = 4 * c.lr * c.server_lr * c.smoothness / c.clients + drift * (4 + late + lambda_1 + lambda_2)
    spread = drift * c.local_steps * (24 + phi_1 + phi_2 + phi_3)
    return Bound(_optimisation(c, 8), variance * c.variance, spread * c.heterogeneity)


def asynflc_bound(constants: Constants, *, beyond: bool = False) -> Bound:
    """Theorem 2, eq. 13: AsynFLC, compressed without error feedback; tau_avg is the larger of tau_avg0, tau_avg1.

    As printed, the bound is too small for sigma > 0 (see the docstring of this file). ``beyond``: compute it for
    learning rates above :func:`largest_lr_asynflc` and for gamma below :func:`smallest_gamma_asynflc` too.
    """
    c = checked(constants)
    if not beyond:
        require_admissible("lr", c.lr, largest_lr_asynflc(c), "Theorem 2")
        require_weak_compression(c)
    steps, top, mean = c.local_steps, c.delays.tau_max, larger(c.delays.tau_avg0, c.delays.tau_avg1)
    move = c.lr**2 * steps * c.smoothness**2
    square = move * steps  # (eta K L)^2
    variance = 4 * (top + 1) * (mean + 1) * move + 16 * (top + 1) * mean * top * move * (1 + 2 * top * square)
    spread = 16 * (top + 1) * top**3 * square * (4 + 24 * square) + (top + 1) ** 2 * (48 * square + 2)
    return Bound(_optimisation(c, 4), variance * c.variance, spread * c.heterogeneity)


def asynflc_ef_bound(constants: Constants, *, beyond: bool = False) -> Bound:
    """Theorem 3, eq. 17: AsynFLC-EF, compressed with error feedback; as printed (see the docstring of this file).

    ``beyond``: compute it for learning rates above :func:`largest_lr_asynflc_ef` too.
    """
    c = checked(constants)
    if not beyond:
        require_admissible("lr", c.lr, largest_lr_asynflc_ef(c), "Theorem 3")
    lambda_1, lambda_2, phi_1, phi_2, phi_3 = _factors(c)
    d, drift = c.delays, c.lr**2 * c.local_steps * c.smoothness**2
    square, global2 = drift * c.local_steps, c.server_lr**2
    lost = 108 * compression_factor(c.gamma) * d.tau_max * global2
    lambda_3 = lost * (3 + 6 * d.tau_max * square)
    phi_4 = lost * d.tau_max * (12 + 72 * square)
    late = (42 * d.tau_avg0 + 144 * d.tau_avg1) * global2 / c.clients
    variance = 4 * c.lr * c.server_lr * c.smoothness / c.clients + drift * (4 + lambda_1 + 2 * lambda_2 + lambda_3)
    spread = drift * (24 * c.local_steps + late) + square * (phi_1 + 2 * phi_2 + 2 * phi_3 + phi_4)
    return Bound(_optimisation(c, 8), variance * c.variance, spread * c.heterogeneity)


def largest_lr_asynfl(constants: Constants) -> Quantity:
    """Largest eta that Theorem 1 admits: ``1 / (36 sqrt(2) tau_max^1.5 eta_g K L)``; the field ``lr`` is not used."""
    c = checked(constants)
    return 1 / (36 * 2**0.5 * c.delays.tau_max**1.5 * c.server_lr * c.local_steps * c.smoothness)


def largest_lr_asynflc(constants: Constants) -> Quantity:
    """Largest eta that Theorem 2 admits: ``1 / (4 sqrt(2 - gamma) (tau_max + 1)^1.5 tau_max eta_g K L)``.

    The theorem also requires ``gamma >= smallest_gamma_asynflc(tau_max)``.
    """
    c = checked(constants)
    delay = (c.delays.tau_max + 1) ** 1.5 * c.delays.tau_max
    return 1 / (4 * (2 - c.gamma) ** 0.5 * delay * c.server_lr * c.local_steps * c.smoothness)


def smallest_gamma_asynflc(tau_max: Quantity) -> Quantity:
    """Smallest gamma that Theorem 2 admits: ``1 - 1 / (2 (tau_max + 1))``. Long delays allow weak compression only.

    >>> smallest_gamma_asynflc(1)  # synchronous: at most a quarter of the energy may be lost
    0.75
    """
    check_each(check.non_negative, "tau_max", tau_max)
    return 1 - 1 / (2 * (tau_max + 1))


def require_weak_compression(c: Constants) -> None:
    """Raise ``ValueError`` for gamma below :func:`smallest_gamma_asynflc`."""
    least = smallest_gamma_asynflc(c.delays.tau_max)
    require_admissible("1 - gamma", 1 - c.gamma, 1 - least, "Theorem 2 (gamma from smallest_gamma_asynflc)")


def largest_lr_asynflc_ef(constants: Constants) -> Quantity:
    """Largest eta that Theorem 3 admits: ``gamma / (72 sqrt(3 (gamma - 1)^2 + 1) tau_max^1.5 eta_g K L)``.

    The radical is broken in print: the root covers the 3 alone, then ``(gamma - 1)^2 + 1 tau_max^1.5`` follows. Read
    literally, it would allow over 50 times Theorem 1's learning rate at gamma = 1, where both algorithms are the same.
    """
    c = checked(constants)
    root = (3 * (c.gamma - 1) ** 2 + 1) ** 0.5
    return c.gamma / (72 * root * c.delays.tau_max**1.5 * c.server_lr * c.local_steps * c.smoothness)


def _optimisation(c: Constants, factor: float) -> Quantity:
    return factor * c.gap / (c.lr * c.server_lr * c.local_steps * c.delays.server_steps)


def _factors(c: Constants) -> tuple[Quantity, ...]:
    """lambda_1, lambda_2, phi_1, phi_2, phi_3 of Theorem 1."""
    d, square = c.delays, (c.lr * c.local_steps * c.smoothness) ** 2
    global2 = c.server_lr**2
    lambda_1 = 72 * d.tau_avg0 + 144 * d.tau_avg0 * d.tau_max * square
    lambda_2 = (18 * d.tau_avg0 * d.tau_max + 144 * d.tau_max * d.tau_avg1) * global2 * square
    local = 288 + 1728 * square
    phi_1 = d.tau_max * d.tau_avgm0 * local
    phi_2 = d.tau_max * d.tau_avgm1 * global2 * local
    phi_3 = d.tau_max * d.tau_avgm0 * global2 * local / 8  # 36 and 216
    return lambda_1, lambda_2, phi_1, phi_2, phi_3


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or of two arrays element by element."""
    return (a + b + abs(a - b)) / 2
