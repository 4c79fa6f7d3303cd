"""How far a server step goes: a cyclic rate, and a penalty for clients that arrive more often than others.

:func:`step_size` gives each arrival its position on the way from the server's params to the corrected end of its
client; ``steps.py`` takes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, weighted
from fedjax_async.types import Array, Arrival, Facts, Params, State, Traced


def cyclic(*, highest: Traced, lowest: Traced, length: int) -> Callable[[Array], Array]:
    """``eta(tau)``: in cycles of ``length`` values, linearly from ``highest`` down to ``lowest`` times ``highest``.

    With ``length = 1`` it is constant at ``highest``.
    Source: Izmailov et al. (2018), section 3.1. Deviation: there a cycle ends with the lowest rate where tau is a
    multiple of ``length``, and models are averaged there. AsyncManifold (2025), Algorithm 1, averages there too, and
    leaves the phase of the rate open; here those steps are the first of a cycle, with the highest rate.

    >>> rate = cyclic(highest=1.0, lowest=0.5, length=3)
    >>> [float(rate(jnp.int32(tau))) for tau in range(4)]
    [1.0, 0.75, 0.5, 1.0]
    """
    check.positive("highest", highest)
    check.positive("lowest", lowest)
    check.in_range("lowest", lowest, 0, 1)
    check.whole("length", length, high=2**31 - 1)

    def rate(tau: Array) -> Array:
        real = jnp.result_type(float)
        top, share = jnp.asarray(highest, real), jnp.asarray(lowest, real)
        return top * (1.0 + (share - 1.0) * ((tau % length).astype(real) / max(length - 1, 1)))

    return rate


class Participation(NamedTuple):
    """Which clients the accepted arrivals came from."""

    counts: Array  # int32[N]
    total: Array  # int32[]


def _nobody(facts: Facts) -> Participation:
    return Participation(jnp.zeros(facts.num_clients, jnp.int32), jnp.int32(0))


def _counted(seen: Participation, client: Array) -> tuple[Array, Participation]:
    """``1 / (N p_i)`` of the arriving client, and the counts; both with this arrival."""
    real = jnp.result_type(float)
    counts = seen.counts.at[client].add(1)
    own = jnp.maximum(counts[client], 1).astype(real)
    total = seen.total + 1
    return total.astype(real) / (own * len(counts)), Participation(counts, total)


def _relative_size(sizes: Array, arrival: Arrival) -> tuple[Array, Array]:
    """``N w_i`` of the arriving client, and the sizes n_i of the clients seen so far, float[N] (0: not seen).

    ``N w_i`` is n_i over the mean of the sizes of the clients seen; 1 for a rejected arrival, whose n_i is 0.
    """
    own = arrival.weight.astype(sizes.dtype)
    sizes = sizes.at[arrival.client].set(own)
    seen = jnp.maximum(jnp.sum((sizes > 0).astype(sizes.dtype)), 1.0)
    mean = jnp.sum(sizes) / seen
    return jnp.where(own > 0, own / jnp.where(mean > 0, mean, 1.0), 1.0), sizes


WEIGHTINGS = ("uniform", "examples")


class StepSize(NamedTuple):
    """``init(facts) -> state``; ``of(arrival, state) -> (position in [0, 1], state if the arrival is accepted)``."""

    init: Callable[[Facts], State]
    of: Callable[[Arrival, State], tuple[Array, State]]


def step_size(rate: Callable[[Array], Array], *, dominance: bool = True, weighting: str = "uniform") -> StepSize:
    """The position ``min(1, eta(tau) / (N p_i))``, with p_i the client's share of all accepted arrivals so far.

    A client with p_i > 1 / N dominates and takes shorter steps, a rare client longer ones: the dominance penalty.
    ``tau`` is the number of arrivals accepted before. With ``weighting="examples"`` the position is
    ``min(1, w_i eta(tau) / p_i)``, with w_i the client's share of the examples, and without the penalty
    ``min(1, N w_i eta(tau))``. Eq. 32 prints ``w_i eta(tau)``: it is the latter with eta over N.

    Args:
      rate: eta, a function of int32[], such as :func:`cyclic`.
      dominance: whether to divide by ``N p_i``.
      weighting: ``uniform``, or ``examples`` to multiply by ``N w_i``. The server learns a client's number of examples
        at its first arrival; until all clients have arrived, the others count as the mean of those that have.

    Source: AsyncManifold (2025), section 5.1 and Algorithm 1, after Leconte et al. (2024); eq. 32 for ``examples``.
    Deviations: the step is bounded by 1, the end of the curve; N w_i in place of w_i, so that equal clients step as
    with ``uniform``. Eq. 32 refers to eq. 1 for w_i, which has none; shares of the examples are the usual ones.
    """
    check.one_of("dominance", dominance, (True, False))
    check.one_of("weighting", weighting, WEIGHTINGS)
    by_size = weighting == "examples"

    def init(facts: Facts) -> State:
        seen = _nobody(facts) if dominance else ()
        return jnp.int32(0), seen, jnp.zeros(facts.num_clients) if by_size else ()

    def of(arrival: Arrival, state: State) -> tuple[Array, State]:
        tau, seen, sizes = state
        factor, seen = _counted(seen, arrival.client) if dominance else (jnp.ones((), jnp.result_type(float)), ())
        if by_size:
            share, sizes = _relative_size(sizes, arrival)
            factor = factor * share
        return jnp.minimum(rate(tau) * factor, 1.0), (tau + 1, seen, sizes)

    return StepSize(init, of)


def scale_by_dominance(limit: Traced = 1.0) -> Transform:
    """Multiply the direction by ``min(limit, 1 / (N p_i))``: the dominance penalty for any rule.

    With a limit of 1, frequent clients count less and rare ones no more than before. For a rule that steps by eta, a
    limit of ``1 / eta`` bounds each step by the direction, as in :func:`step_size`. Running statistics move by no more
    than their whole change. Source: as there.
    """
    check.positive("dominance", limit)

    def init(params: Params, facts: Facts = Facts()) -> Participation:
        return _nobody(facts)

    def update(
        direction: Params, state: Participation, params: Params, arrival: Arrival
    ) -> tuple[Params, Participation, Array]:
        factor, after = _counted(state, arrival.client)
        factor = jnp.minimum(factor, jnp.asarray(limit, factor.dtype))
        return weighted(direction, factor), after, factor

    return Transform(init, update, sums=True)


def moving_on(beta: Traced) -> Transform:
    """Momentum of the direction: ``u <- beta u + d``. If a step along a curve follows in the chain, its chord is u.

    On a line, with one arrival a server step and a constant step size, it is the optimiser's heavy ball.
    """
    check.below_one("momentum", beta)

    def update(direction: Params, state: Params, params: Params, arrival: Arrival) -> tuple[Params, Params, Array]:
        change = weights_of(direction)
        moved = jax.tree.map(lambda u, d: jnp.asarray(beta, d.dtype) * u + d, state, change)
        return with_statistics(moved, direction), moved, jnp.ones_like(arrival.weight)

    return Transform(lambda params: jax.tree.map(jnp.zeros_like, weights_of(params)), update)
