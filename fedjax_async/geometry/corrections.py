"""Delay corrections of a change that was learned from an older model (AsyncManifold 2025, eq. 15).

A client started from ``Theta^t`` and arrives when the server is at ``Theta^tau``. Its pseudo-gradient is
``Delta = Theta^t - Theta_i``, that of the server's drift since then is ``b = Theta^t - Theta^tau``. Every correction
gives ``Delta_hat = Delta - lambda M b`` with a matrix M of its own, and the server goes on to
``Theta^tau - eta Delta_hat``. All corrections are odd functions: the changes ``-Delta`` and ``-b`` give ``-Delta_hat``.
So uploads, which are trained params minus start, are corrected without a change of sign.

Start with :func:`ortho_correct`. :class:`Correction` is the form that all share, ``CORRECTIONS`` names them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, factories, registry, tree
from fedjax_async.geometry.projection import GROUPINGS, groups
from fedjax_async.geometry.vectors import inner, leaves, length, measure, rebuild
from fedjax_async.types import Array, Facts, Number, Params, State, Traced, Whole


def ortho_correct(
    delta: Params, shift: Params, *, alpha: Traced = 0.0, threshold: Traced = 0.0, per: str = "whole"
) -> Params:
    """OrthoCorrect(alpha, theta_0): ``Delta_hat = Delta - lambda b``, in each group of leaves by itself.

    If ``cos(Delta, b) <= theta_0``, ``lambda = <Delta, b> / |b|^2``, which leaves the part of Delta orthogonal to b;
    otherwise ``lambda = alpha``. If Delta or b is zero, ``Delta_hat = Delta``. Tiny and huge trees do not under- or
    overflow.

    Args:
      delta: Delta, the client's own change.
      shift: b, the server's change since the client's start, with the same sign as ``delta``.
      alpha: the share of b that is removed if the two agree: 0 trusts the client's displacement, 1 its position.
      threshold: theta_0, in [-1, 1] for the paper's rule; below -1 nothing is projected.
      per: one of ``GROUPINGS``: the whole vector, each layer or each tensor by itself.

    Returns: a pytree like ``delta``, in its dtypes.

    >>> print(ortho_correct(jnp.array([1.0, -1.0]), jnp.array([0.0, 1.0])))  # they disagree: orthogonal part
    [1. 0.]
    >>> print(ortho_correct(jnp.array([1.0, 1.0]), jnp.array([0.0, 1.0]), alpha=1.0))  # they agree: minus b
    [1. 0.]

    Source: AsyncManifold (2025), section 3. Deviation: the paper divides by ``|b|``, which does not remove the
    component along b.
    """
    changes, shifts = leaves(delta), leaves(shift)
    real = jnp.result_type(float)
    alpha, threshold = jnp.asarray(alpha, real), jnp.asarray(threshold, real)
    out = list(changes)
    for group in groups(delta, per):
        d, b = [changes[i] for i in group], [shifts[i] for i in group]
        (d_inverse, d_square), (b_inverse, b_square) = measure(d), measure(b)
        some = (d_square > 0) & (b_square > 0)
        along = inner([a * d_inverse for a in d], [a * b_inverse for a in b])
        squares = jnp.where(some, d_square * b_square, 1.0)
        cosine = jnp.minimum(along * jax.lax.rsqrt(squares), 1.0)  # rounding must not pass a threshold of 1
        projection = along / jnp.where(some, b_square, 1.0) / d_inverse
        share = jnp.where(some, jnp.where(cosine <= threshold, projection, alpha / b_inverse), 0.0)
        for i, a, c in zip(group, d, b, strict=True):
            out[i] = a - share * (c * b_inverse)
    return rebuild(out, delta)


def gradient_surgery(one: Params, other: Params, *, per: str = "whole") -> Params:
    """``d1`` without its conflict with ``d2``: if ``<d1, d2> < 0``, its part orthogonal to ``d2``; otherwise ``d1``.

    Args:
      one, other: d1 and d2, pytrees of the same structure and shapes.
      per: one of ``GROUPINGS``: the conflict is found and removed in the whole vector, in each layer or in each tensor.

    Returns: a pytree like ``one``, in its dtypes. Source: PCGrad, Yu et al. (2020), for one pair of gradients.
    """
    return ortho_correct(one, other, per=per)


class Correction(NamedTuple):
    """``init(params) -> state`` and ``correct(delta, shift, state) -> (corrected delta, state)``.

    ``init(params, facts)``, if it needs facts of the run, as a rule's.

    ``delta`` is the client's own change, ``shift`` the server's change since the client's start: either both as
    pseudo-gradients (Delta and b) or both as changes (``Theta_i - Theta^t`` and ``Theta^tau - Theta^t``). Both are
    pytrees like the params, and so is the result, in the dtypes of ``delta``. ``columns(state) -> {name: scalar}``,
    optional: columns that a run records after each arrival.
    """

    init: Callable[..., State]
    correct: Callable[[Params, Params, State], tuple[Params, State]]
    columns: Callable[[State], dict[str, Array]] | None = None


def asgd() -> Correction:
    """``Delta_hat = Delta``: trust the displacement. Source: Dean et al. (2012); eq. 8."""
    return _stateless(lambda delta, shift: delta)


def fedasync() -> Correction:
    """``Delta_hat = Delta - b``: trust the position, so that a step of 1 ends at ``Theta_i``. Source: eq. 9.

    A zero Delta becomes ``-b``, unlike in the other corrections: the step ``(1 - eta) Theta^tau + eta Theta_i`` holds
    without exception.
    """
    return _stateless(lambda delta, shift: jax.tree.map(jnp.subtract, delta, shift))


def dc_asgd(*, strength: Traced = 0.04) -> Correction:
    """DC-ASGD: ``Delta_hat = Delta - lambda Delta * Delta * b``, entry by entry.

    Args:
      strength: lambda >= 0; the default is that of Zheng et al. for CIFAR-10 and single gradients.

    Source: Zheng et al. (2017), eq. 10; AsyncManifold (2025), eq. 12, with the pseudo-gradient for the gradient.
    """
    check.non_negative("strength", strength)
    return _stateless(lambda delta, shift: _compensated(delta, shift, [strength] * len(jax.tree.leaves(delta))))


def dc_asgd_a(*, strength: Traced = 2.0, decay: Traced = 0.95, eps: Traced = 1e-7) -> Correction:
    """DC-ASGD-a: DC-ASGD with ``lambda = lambda_0 / sqrt(ms + eps)``, ``ms <- m ms + (1 - m) Delta * Delta`` first.

    Everything entry by entry. State: ms, zeros like the params.

    Args:
      strength: lambda_0 >= 0; the default is that of Zheng et al. The study of AsyncManifold multiplies it by 2.5.
      decay: m in [0, 1).
      eps: > 0.

    Source: Zheng et al. (2017), eq. 14 and Algorithm 2; AsyncManifold (2025), section 3.
    """
    check.non_negative("strength", strength)
    check.below_one("decay", decay)
    check.positive("eps", eps)

    def correct(delta: Params, shift: Params, state: list[Array]) -> tuple[Params, list[Array]]:
        real = jnp.result_type(float)
        m, floor, scale = (jnp.asarray(number, real) for number in (decay, eps, strength))
        state = [m * s + (1.0 - m) * jnp.square(d) for s, d in zip(state, leaves(delta), strict=True)]
        return _compensated(delta, shift, [scale * jax.lax.rsqrt(s + floor) for s in state]), state

    return Correction(lambda params: [jnp.zeros_like(leaf) for leaf in leaves(params)], correct)


def orthocorrect(*, alpha: Traced = 0.0, threshold: Traced = 0.0, per: str = "whole") -> Correction:
    """:func:`ortho_correct` as a correction; ``threshold`` in [-1, 1]."""
    check.in_range("alpha", alpha, -math.inf, math.inf)
    fits = not isinstance(alpha, numbers.Real) or check.is_real(alpha)
    check.require(fits, "alpha", alpha, "a finite number")
    check.in_range("threshold", threshold, -1.0, 1.0)
    registry.find("per", GROUPINGS, per)
    return _stateless(lambda delta, shift: ortho_correct(delta, shift, alpha=alpha, threshold=threshold, per=per))


def orthograd(*, per: str = "whole") -> Correction:
    """OrthoCorrect(0, 0): Delta, or its part orthogonal to b if the two disagree; gradient surgery against b."""
    return orthocorrect(alpha=0.0, threshold=0.0, per=per)


def orthopos(*, per: str = "whole") -> Correction:
    """OrthoCorrect(1, 0): ``Delta - b``, or the part of Delta orthogonal to b if the two disagree.

    The paper calls it gradient surgery of ``Delta - b`` against b. This holds only for ``<Delta, b> <= 0`` and for
    ``<Delta, b> >= |b|^2``.
    """
    return orthocorrect(alpha=1.0, threshold=0.0, per=per)


def orthostrict(*, per: str = "whole") -> Correction:
    """OrthoCorrect with theta_0 = 1: always the part of Delta orthogonal to b."""
    return orthocorrect(alpha=0.0, threshold=1.0, per=per)


class Trend(NamedTuple):
    """The argument of a switch of :func:`orthodyn`: statistics of the changes so far, this one included.

    ``average`` is ``a_n = (1 - decay) sum_k decay^(n - k) |Delta_k| / (1 - decay^n)`` after n arrivals: the moving
    average with the bias correction of Adam. After one arrival it is ``|Delta_1|``, and while n is small against
    ``1 / (1 - decay)`` it is close to the plain mean.
    """

    arrivals: Array  # int32[], n, the corrected changes; rejected ones do not count
    norm: Array  # float[], |Delta_n| of this arrival, all parameters as one vector
    average: Array  # float[], a_n
    largest: Array  # float[], the largest of a_1, ..., a_n


# ``switch(trend) -> phase``, int[] from 0 to the number of phases - 1, or bool[] for two phases;
# or ``switch(trend, updates)`` with the arrivals of the run, int32[], 0 if unknown
Switch = Callable[..., Whole]


def norm_falls(*fractions: Traced) -> Switch:
    """A phase ends when the moving average of ``|Delta|`` falls below a fraction, in [0, 1], of its largest value.

    ``fractions``: one for each change of phase.
    """
    for fraction in fractions:
        check.in_range("fraction", fraction, 0.0, 1.0)
    return lambda trend: _passed(trend.average < jnp.asarray(f, trend.average.dtype) * trend.largest for f in fractions)


def steps_pass(*counts: Traced) -> Switch:
    """A phase ends after that many arrivals in total; for a share of a run, give the share times its arrivals.

    ``counts``: one for each change of phase.
    """
    for count in counts:
        check.non_negative("count", count)
    real = jnp.result_type(float)
    return lambda trend: _passed(trend.arrivals.astype(real) > jnp.asarray(count, real) for count in counts)


def share_passes(*shares: Traced) -> Switch:
    """A phase ends after that share, in [0, 1], of the run's arrivals; never, if their number is unknown.

    ``shares``: one for each change of phase.
    """
    for share in shares:
        check.in_range("share", share, 0.0, 1.0)

    def switch(trend: Trend, updates: Array) -> Whole:
        counts = (tree.share_of(share, updates) for share in shares)
        return steps_pass(*(jnp.where(updates > 0, count, jnp.inf) for count in counts))(trend)

    return switch


# alpha and theta_0 of OrthoCorrect; no cosine is below -2, so nothing is projected there
PHASES: dict[str, tuple[float, float]] = {
    "asgd": (0.0, -2.0),
    "fedasync": (1.0, -2.0),
    "orthograd": (0.0, 0.0),
    "orthopos": (1.0, 0.0),
    "orthostrict": (0.0, 1.0),
}


PHASE_COLUMN = "correction_phase"  # in the updates of a run


class DriftState(NamedTuple):
    """State of :func:`orthodyn`."""

    phase: Array  # int32[], index into the phases
    weight: Array  # float[], 1 - decay^n, of the bias correction
    trend: Trend
    updates: State = ()  # int32[], arrivals of the run, 0 if unknown; () for a switch that does not ask for them


def orthodyn(
    *,
    switch: Switch | None = None,
    phases: Sequence[str] = ("orthograd", "orthopos"),
    decay: Traced = 0.99,
    per: str = "whole",
) -> Correction:
    """OrthoDyn: several corrections in turn, by default OrthoGrad, then OrthoPos. A run never goes back a phase.

    A run records the phase of each arrival in the column ``correction_phase`` of ``updates``: 0 for the first of
    ``phases``, and so on.

    Args:
      switch: ``switch(trend) -> phase``, any function of a :class:`Trend` in ``jax.numpy``. It returns the number of
        the phase, a whole number from 0 to ``len(phases) - 1``. For two phases it may also return a bool, whether the
        second has begun. A smaller number than before has no effect. A second argument is the number of arrivals of
        the run, int32[], or 0 if it is unknown. By default :func:`norm_falls` with equally spaced
        fractions (0.5 for two phases).
      phases: names in ``PHASES``, in order; ``("orthograd", "asgd", "orthopos")`` is the paper's longer schedule.
      decay: of the moving average of ``|Delta|``, in [0, 1).
      per: as in :func:`ortho_correct`.

    >>> late = orthodyn(switch=lambda trend: trend.arrivals > 100)  # OrthoPos from the 101st arrival on

    Raises: ``ValueError`` for a switch that returns anything else. It is tried on a first and a late trend when the
    correction is made, and checked in a run wherever the phase is known at tracing.

    Source: AsyncManifold (2025), eq. 16. The paper leaves the statistic open; the switch, 0.5 and 0.99 are ours.
    """
    check.require(len(phases) > 0, "phases", phases, "at least one phase")
    rules = [registry.find("phases", PHASES, name) for name in phases]
    check.below_one("decay", decay)
    registry.find("per", GROUPINGS, per)
    last = len(rules) - 1
    chosen = norm_falls(*(1.0 - (k + 1) / len(rules) for k in range(last))) if switch is None else switch
    _try_out(chosen, last)

    asks = factories.asks_for(chosen, "updates")

    def init(params: Params, facts: Facts = Facts()) -> DriftState:
        zero = jnp.zeros((), jnp.result_type(float))
        updates = jnp.asarray(facts.updates, jnp.int32) if asks else ()
        return DriftState(jnp.int32(0), zero, Trend(jnp.int32(0), zero, zero, zero), updates)

    def correct(delta: Params, shift: Params, state: DriftState) -> tuple[Params, DriftState]:
        norm = length(leaves(delta))
        keep = jnp.asarray(decay, norm.dtype)
        weight = keep * state.weight + (1.0 - keep)
        average = state.trend.average + (1.0 - keep) / weight * (norm - state.trend.average)
        trend = Trend(state.trend.arrivals + 1, norm, average, jnp.maximum(state.trend.largest, average))
        seen = (trend, state.updates) if asks else (trend,)
        phase = jnp.clip(_phase(chosen, seen, last), state.phase, last)
        alpha, threshold = (jnp.asarray(column, norm.dtype)[phase] for column in zip(*rules, strict=True))
        after = DriftState(phase, weight, trend, state.updates)
        return ortho_correct(delta, shift, alpha=alpha, threshold=threshold, per=per), after

    return Correction(init, correct, lambda state: {PHASE_COLUMN: state.phase})


CORRECTIONS: dict[str, Callable[..., Correction]] = {
    "asgd": asgd,
    "fedasync": fedasync,
    "dc_asgd": dc_asgd,
    "dc_asgd_a": dc_asgd_a,
    "orthocorrect": orthocorrect,
    "orthograd": orthograd,
    "orthopos": orthopos,
    "orthostrict": orthostrict,
    "orthodyn": orthodyn,
}


def _stateless(function: Callable[[Params, Params], Params]) -> Correction:
    return Correction(lambda params: (), lambda delta, shift, state: (function(delta, shift), state))


def _compensated(delta: Params, shift: Params, strengths: Sequence[Number]) -> Params:
    """``delta - lambda delta * delta * shift``, with a lambda for every leaf."""
    terms = zip(strengths, leaves(delta), leaves(shift), strict=True)
    return rebuild([d - jnp.asarray(strength, d.dtype) * d * d * b for strength, d, b in terms], delta)


def _try_out(switch: Switch, last: int) -> None:
    """Raise ``ValueError`` unless the switch returns a phase after one arrival, and after many with an average of 0."""
    check.require(callable(switch), "switch", switch, "a function of a Trend, such as geometry.norm_falls(0.5)")
    zero, one = np.zeros((), jnp.result_type(float)), np.ones((), jnp.result_type(float))
    for count, norm in ((1, one), (10**6, zero)):
        trend = Trend(*map(jnp.asarray, (np.int32(count), norm, norm, one)))
        _phase(switch, (trend, jnp.int32(0)) if factories.asks_for(switch, "updates") else (trend,), last)


def _phase(switch: Switch, seen: tuple[object, ...], last: int) -> Array:
    """The result of the switch, int32[]. Raises ``ValueError`` if it is no phase, as far as that is known."""
    phase = switch(*seen)
    number = isinstance(phase, (bool, int, np.generic, np.ndarray, jax.Array))
    allowed = f"a whole number from 0 to {last}, int32[]" + (", or bool[]" if last == 1 else "")
    check.require(number, "switch(trend)", phase, allowed)
    dtype, shape = jnp.result_type(phase), jnp.shape(phase)
    whole = jnp.issubdtype(dtype, jnp.integer) or (dtype == jnp.bool_ and last == 1)
    check.require(whole and shape == (), "switch(trend)", f"{dtype}{list(shape)}", allowed)
    if not isinstance(phase, jax.core.Tracer):
        check.require(0 <= int(phase) <= last, "switch(trend)", int(phase), allowed)
    return jnp.asarray(phase).astype(jnp.int32)


def _passed(marks: Iterable[Array]) -> Array:
    """How many of the conditions hold; int32[]."""
    return sum((mark.astype(jnp.int32) for mark in marks), jnp.int32(0))
