"""Rules that correct a stale delta for the server's drift since the client's start (AsyncManifold 2025).

Start with :func:`delay_corrected`, which makes a transform of any correction in ``geometry/corrections.py``. All
methods below are this transform, the guard rails and a step of SGD: ``x <- x + eta d_i`` with
``d_i = correct(Delta_i, b)``, where ``b = x - start`` is the drift of the server's params x since the client's start.
If a server step has several arrivals, each delta is corrected when it arrives and the corrected deltas are averaged
when the step closes. Params only change when a step closes, so all deltas of a step are corrected against the same x.

Guard rails limit the corrected delta. A rejected arrival leaves the state of the correction as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, registry, tree
from fedjax_async.base.factories import takes
from fedjax_async.geometry import PHASES, Correction, corrections, norm_falls, share_passes
from fedjax_async.server.rule import guard_rails, rule
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, begun
from fedjax_async.types import Array, Arrival, Facts, Params, ServerAlgorithm, State, Traced


def delay_corrected(correction: Correction) -> Transform:
    """Correct the arriving delta by ``correction``, for the drift ``b = x - start`` of the server's params x.

    The transform must be the first in a chain, or follow one that keeps the direction a change from the client's
    start, such as ``clip_by_norm``. Uploads and drift are changes, not pseudo-gradients. Corrections are odd functions,
    so they need no change of sign. Running statistics pass unchanged. The run records the columns of the correction.

    The weight is 1. It is 0, which rejects the arrival, if the corrected delta or the new state of the correction is
    not finite. DC-ASGD squares the delta, so the result may overflow although the delta is finite.

    >>> from fedjax_async.geometry import orthocorrect, orthodyn
    >>> server = rule(delay_corrected(orthocorrect(alpha=0.5)), optimizer=optax.sgd(1.0))
    >>> own_switch = orthodyn(switch=lambda trend: trend.arrivals > 100)
    >>> server = rule(delay_corrected(own_switch), optimizer=optax.sgd(1.0))
    """

    def init(params: Params, facts: Facts = Facts()) -> State:
        return begun(correction, weights_of(params), facts)

    def update(direction: Params, state: State, params: Params, arrival: Arrival) -> tuple[Params, State, Array]:
        delta = weights_of(direction)
        drift = jax.tree.map(jnp.subtract, weights_of(params), weights_of(arrival.start))
        corrected, after = correction.correct(delta, drift, state)
        finite = tree.is_finite((corrected, after))
        kept = tree.where(finite, corrected, jax.tree.map(jnp.zeros_like, corrected))
        return with_statistics(kept, direction), after, finite.astype(arrival.weight.dtype)

    return Transform(init, update, columns=correction.columns)


def _corrected(correction: Correction, server_lr: Traced, guards: Transform) -> ServerAlgorithm:
    check.positive("server_lr", server_lr)
    return rule(delay_corrected(correction), guards, optimizer=optax.sgd(server_lr))


# --- DC-ASGD ----------------------------------------------------------------------------------


@takes(guards=guard_rails)
def dc_asgd(*, strength: Traced = 0.04, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """ASGD with deltas compensated for delay (Zheng et al. 2017).

    ``x <- x + eta d``, ``d = Delta - lambda Delta * Delta * (x - start)``, entry by entry: eq. 10 of "Asynchronous
    stochastic gradient descent with delay compensation", with the delta for the gradient (AsyncManifold 2025, eq. 12).

    Args:
      strength: lambda >= 0; 0 gives ``asgd``. The default is that of Zheng et al. for single gradients. Since Delta is
        the sum of K local steps of size lr, lambda for gradients corresponds to ``lambda / (K lr)`` here.
      server_lr: ``eta > 0``.
    """
    return _corrected(corrections.dc_asgd(strength=strength), server_lr, guards)


@takes(guards=guard_rails)
def dc_asgd_a(
    *, strength: Traced = 2.0, decay: Traced = 0.95, eps: Traced = 1e-7, server_lr: Traced = 1.0, guards: Transform
) -> ServerAlgorithm:
    """DC-ASGD with a strength that adapts to the size of the deltas (Zheng et al. 2017).

    ``ms <- m ms + (1 - m) Delta * Delta``, then DC-ASGD with ``lambda = lambda_0 / sqrt(ms + eps)``, entry by entry:
    eq. 14 of the paper. State: ms, zeros at first, updated by every accepted arrival.

    Args:
      strength: lambda_0 >= 0. The default is that of Zheng et al.; the study of AsyncManifold multiplies it by 2.5.
        Unlike lambda of ``dc_asgd``, it means the same for deltas as for gradients, apart from eps.
      decay: m in [0, 1).
      eps: > 0.
      server_lr: ``eta > 0``.
    """
    return _corrected(corrections.dc_asgd_a(strength=strength, decay=decay, eps=eps), server_lr, guards)


# --- OrthoCorrect -----------------------------------------------------------------------------


@takes(guards=guard_rails)
def orthograd(*, server_lr: Traced = 1.0, per: str = "whole", guards: Transform) -> ServerAlgorithm:
    """ASGD without the part of a delta that undoes the drift (AsyncManifold 2025, OrthoGrad).

    ``x <- x + eta d``: d is Delta, or its part orthogonal to ``b = x - start`` if ``<Delta, b> < 0``.

    Args:
      server_lr: ``eta > 0``.
      per: the whole vector (``whole``), layers (``layer``) or single tensors (``tensor``), each corrected by itself.
    """
    return _corrected(corrections.orthograd(per=per), server_lr, guards)


@takes(guards=guard_rails)
def orthopos(*, server_lr: Traced = 1.0, per: str = "whole", guards: Transform) -> ServerAlgorithm:
    """Steps towards the client's model that do not undo the drift (AsyncManifold 2025, OrthoPos).

    ``x <- x + eta d``: d is ``Delta - b``, from the server's params to the client's, or the part of Delta orthogonal
    to ``b = x - start`` if ``<Delta, b> <= 0``. With ``<Delta, b> > 0`` it is FedAsync's step.

    Args:
      server_lr: ``eta > 0``; 1 goes all the way.
      per: the whole vector (``whole``), layers (``layer``) or single tensors (``tensor``), each corrected by itself.
    """
    return _corrected(corrections.orthopos(per=per), server_lr, guards)


@takes(guards=guard_rails)
def orthostrict(*, server_lr: Traced = 1.0, per: str = "whole", guards: Transform) -> ServerAlgorithm:
    """ASGD with the part of a delta that is orthogonal to the drift (AsyncManifold 2025, OrthoStrict).

    ``x <- x + eta (Delta - <Delta, b> / |b|^2 b)``, ``b = x - start``; if b is 0, ``x <- x + eta Delta``.

    Args:
      server_lr: ``eta > 0``.
      per: the whole vector (``whole``), layers (``layer``) or single tensors (``tensor``), each corrected by itself.
    """
    return _corrected(corrections.orthostrict(per=per), server_lr, guards)


# --- OrthoDyn ---------------------------------------------------------------------------------


class NamedSwitch(NamedTuple):
    """A switch of ``orthodyn`` by name."""

    make: Callable[..., corrections.Switch]  # from one fraction for each change of phase
    second: Callable[[Traced], Traced]  # the default of the second fraction, from the first


SWITCHES: dict[str, NamedSwitch] = {
    "norm": NamedSwitch(norm_falls, lambda first: first / 2),
    "share": NamedSwitch(share_passes, lambda first: (1 + first) / 2),
}


@takes(guards=guard_rails)
def orthodyn(
    *,
    switch: str = "norm",
    fraction: Traced = 0.5,
    second_fraction: Traced | None = None,
    phases: str = "orthograd+orthopos",
    decay: Traced = 0.99,
    server_lr: Traced = 1.0,
    per: str = "whole",
    guards: Transform,
) -> ServerAlgorithm:
    """OrthoGrad, then OrthoPos: trust the client's displacement first, its position later (AsyncManifold 2025, eq. 16).

    ``x <- x + eta d``, where d is corrected by the rule of the present phase. The run never goes back to an earlier
    phase. Its ``updates`` have the phase of each arrival in the column ``correction_phase``: 0 for the first name in
    ``phases``. A run that ends in its first phase warns. The paper leaves the switch open; the defaults here are ours.

    Args:
      switch: ``norm``: the first phase ends when the moving average of ``|Delta|`` falls below ``fraction`` times its
        largest value so far. ``share``: it ends after this share of the run's arrivals; rejected arrivals do not count
        as passed. Outside a run the number of arrivals is unknown, so ``share`` never switches.
      fraction: where the first phase ends, in [0, 1].
      second_fraction: where the second of three phases ends; by default ``fraction / 2`` for ``norm`` and
        ``(1 + fraction) / 2`` for ``share``.
      phases: two or three names of ``geometry.PHASES`` joined by ``+``: ``asgd``, ``fedasync``, ``orthograd``,
        ``orthopos``, ``orthostrict``. The paper also has ``orthograd+asgd+orthopos``.
      decay: of the moving average, in [0, 1): about the last ``1 / (1 - decay)`` arrivals count. Before as many have
        come, it is close to their plain mean (bias correction, as in Adam). Deltas count as they arrive, unclipped.
      server_lr: ``eta > 0``.
      per: the whole vector (``whole``), layers (``layer``) or single tensors (``tensor``), each corrected by itself.
    """
    check.kind("phases", phases, str, "two or three names joined by +")
    names = phases.split("+")
    for name in names:
        registry.find("phases", PHASES, name)
    check.require(len(names) in (2, 3), "phases", phases, "two or three names joined by +")
    named = registry.find("switch", SWITCHES, switch)
    check.in_range("fraction", fraction, 0.0, 1.0)
    if second_fraction is not None:
        check.in_range("second_fraction", second_fraction, 0.0, 1.0)
        check.require(len(names) == 3, "second_fraction", second_fraction, "left out: it needs three phases")

    second = named.second(fraction) if second_fraction is None else second_fraction
    chosen = named.make(*(fraction, second)[: len(names) - 1])
    return _corrected(corrections.orthodyn(switch=chosen, phases=names, decay=decay, per=per), server_lr, guards)
