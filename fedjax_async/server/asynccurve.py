"""AsyncCurve: the server moves along curves that its clients have learned (AsyncManifold 2025, Algorithm 1).

On the arrival of ``(Theta^t, phi, Theta_i)`` at the server's ``Theta^tau``:

1. correct the end for delay: ``E = Theta^tau + d``, where d is the client's change, corrected by OrthoDyn;
2. turn the control point with the chord: ``phi' = (Theta^tau + E) / 2 + R (phi - (Theta^t + Theta_i) / 2)``;
3. choose the position on the curve: ``a = min(1, eta(tau) / (N p_i))``, p_i the client's share of accepted arrivals;
4. move: ``Theta^{tau+1} = B(a)`` on the curve from Theta^tau with control point phi' to E (or another curve, with
   several points like phi');
5. average the models (SWA) from ``tau >= sigma T`` on;
6. send ``Theta^{tau+1}``, and ``Theta^tau - Theta^{tau+1}`` for the moments of the client's Adam.

Each part has a file of its own: ``delay_correction.py`` (1), ``steps.py`` (2, 4), ``step_size.py`` (3), ``swa.py`` (5).
The client is ``local.curve_training``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, factories, registry, tree
from fedjax_async.base.factories import takes
from fedjax_async.geometry import CORRECTIONS, Correction, family
from fedjax_async.local import Curve
from fedjax_async.local.warm import READINGS
from fedjax_async.server.delay_correction import SWITCHES, delay_corrected
from fedjax_async.server.rule import closed, guard_rails, rule
from fedjax_async.server.running_statistics import weights_of
from fedjax_async.server.step_size import cyclic, moving_on, step_size
from fedjax_async.server.steps import STEPS, stepping
from fedjax_async.server.swa import averaged
from fedjax_async.server.transforms import Transform, begun
from fedjax_async.types import Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class CurveState(NamedTuple):
    """Server state of :func:`on_curves`."""

    inner: State  # of the rule that takes the steps
    last: Params  # Theta^tau - Theta^{tau+1} of the last step that moved, of the weights alone; () if it is not sent


def on_curves(inner: ServerAlgorithm, *, sends_steps: bool = True) -> ServerAlgorithm:
    """``inner`` with clients that upload a :class:`Curve`; ``inner`` finds its offset in ``arrival.extra``.

    ``sends_steps``: whether messages also hold the server's last step, which doubles their size.
    """

    def init(params: Params, facts: Facts = Facts()) -> tuple[CurveState, State]:
        state, memory = begun(inner, params, facts)
        return CurveState(state, jax.tree.map(jnp.zeros_like, weights_of(params)) if sends_steps else ()), memory

    def receive(state: CurveState, memory: State, arrival: Arrival) -> tuple[CurveState, State, Info]:
        curve: Curve = arrival.upload
        arrival = arrival._replace(upload=curve.params, extra=curve.offset)
        after, memory, info = inner.receive(state.inner, memory, arrival)
        return state._replace(inner=after), memory, info

    def close(state: CurveState, memory: State) -> tuple[CurveState, State]:
        after, memory = closed(inner, state.inner, memory)
        if not sends_steps:
            return CurveState(after, ()), memory
        before, now = (weights_of(inner.params(each)) for each in (state.inner, after))
        step = jax.tree.map(jnp.subtract, before, now)
        moved = jnp.any(jnp.stack([jnp.any(leaf != 0) for leaf in jax.tree.leaves(step)]))
        return CurveState(after, tree.where(moved, step, state.last)), memory

    def dispatch(state: CurveState, memory: State, request: Request) -> tuple[Message, State]:
        message, memory = inner.dispatch(state.inner, memory, request)
        return message._replace(extra=state.last), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: inner.params(state.inner), close)


def end_correction(
    *,
    correction: str = "orthodyn",
    switch: str | None = None,
    fraction: Traced | None = None,
    decay: Traced | None = None,
    per: str = "whole",
) -> Correction:
    """The delay correction of a client's end.

    Args:
      correction: a name in ``geometry.CORRECTIONS``: ``asgd``, ``fedasync``, ``orthodyn`` ...
      switch: for ``orthodyn``: OrthoGrad ends and OrthoPos begins when the moving average of ``|Delta|`` falls below
        ``fraction`` times its largest value (``norm``, the default), or after that share of the run's arrivals
        (``share``). Clients that train with Adam move about equally far all along a run, so ``norm`` rarely switches.
      fraction: of that switch; 0.5 by default.
      decay: of that average, 0.99 by default; for ``dc_asgd_a`` of its mean square, 0.95 by default.
      per: for the ortho corrections: the whole vector (``whole``), layers (``layer``) or tensors (``tensor``).
    """
    factory = registry.find("correction", CORRECTIONS, correction)
    takes_option = factories.options_of(factory).keys()
    for name, value in (("switch", switch), ("fraction", fraction)):
        check.require(value is None or "switch" in takes_option, name, value, "left out: only orthodyn has it")
    check.require(decay is None or "decay" in takes_option, "decay", decay, "left out: the correction has no average")
    check.require(per == "whole" or "per" in takes_option, "per", per, "left out: the correction has no projection")
    options: dict[str, object] = {"per": per} if "per" in takes_option else {}
    options |= {} if decay is None else {"decay": decay}
    if switch is None and fraction is None:
        return factory(**options)
    named, share = registry.find("switch", SWITCHES, switch or "norm"), 0.5 if fraction is None else fraction
    check.in_range("fraction", share, 0.0, 1.0)
    return factory(switch=named.make(share), **options)


@takes(corrected=end_correction, guards=guard_rails)
def asynccurve(
    *,
    server_lr: Traced = 0.6,
    lowest: Traced = 0.2,
    cycle: int = 10,
    dominance: bool = True,
    weighting: str = "uniform",
    corrected: Correction,
    control: str | None = "rotation",
    step: str = "curve",
    curve: str = "quadratic",
    bends: int | None = None,
    momentum: Traced = 0.0,
    momentum_on: str = "curve",
    swa: Traced = 0.75,
    overwrite: int | None = None,
    warm: str = "corrected",
    guards: Transform,
) -> ServerAlgorithm:
    """Move along the curves that clients have learned, corrected for delay (AsyncManifold 2025, AsyncCurve).

    ``Theta <- B(a)`` on the client's curve from Theta to the corrected end, see the top of this file. If a server step
    has several arrivals, each is corrected and stepped from the same Theta, and their steps are averaged. The paper
    gives no values for these options; all defaults are ours. ``updates`` have the phase of OrthoDyn of each arrival in
    the column ``correction_phase`` (0: OrthoGrad), and a run that never leaves the first phase warns.

    Args:
      server_lr: eta at the beginning of a cycle, > 0.
      lowest: eta at the end of a cycle, as a share of ``server_lr`` in (0, 1].
      cycle: c, accepted arrivals in a cycle of eta, and server steps from one averaged model to the next.
      dominance: whether a is divided by ``N p_i``, with p_i the client's share of all accepted arrivals so far.
      weighting: ``uniform``, or ``examples`` to multiply a by ``N w_i``, with w_i the client's share of all examples
        (eq. 32, which Algorithm 1 leaves out; see ``step_size``).
      control: how the control point follows the chord: ``rotation`` turns its offset from the midpoint with the chord,
        ``none`` keeps the offset. In a spec, ``control=none`` is read as ``None``, which means the same. If a curve has
        several inner points, the offset of each is turned or kept.
      step: ``curve``, ``line`` (the curve is not used) or ``geodesic`` (of hyperbolic space, instead of the line).
      curve: that clients learn: ``quadratic`` as in the paper; ``cubic``, which has two control points; or ``chain``,
        straight pieces between ``bends`` points. An upload holds the end and each of these points. The clients'
        training has the same options; a method's name sets both.
      bends: of ``chain`` alone, >= 1; 1 by default.
      momentum: beta in [0, 1).
      momentum_on: ``curve``: of the change, before the step, which then follows a curve along the momentum; or
        ``space``: of the steps themselves.
      swa: sigma, the share of the run's server steps before its models are averaged; 1: never.
      overwrite: C; every C server steps the average becomes the model (periodic SWA). ``None``: never.
      warm: the moments of the clients' Adam, see ``local.curve_training``; unless ``off``, messages also hold the last
        server step, which doubles their size.
    """
    check.positive("server_lr", server_lr)
    check.whole("cycle", cycle, high=2**31 - 1)
    check.one_of("dominance", dominance, (True, False))
    check.below_one("momentum", momentum)
    check.one_of("momentum_on", momentum_on, ("curve", "space"))
    check.in_range("swa", swa, 0.0, 1.0)
    check.one_of("warm", warm, READINGS)
    rate = cyclic(highest=server_lr, lowest=lowest, length=cycle)
    size = step_size(rate, dominance=dominance, weighting=weighting)
    still = isinstance(momentum, (int, float)) and momentum == 0
    before = [] if still or momentum_on == "space" else [moving_on(momentum)]
    moves = rule(
        delay_corrected(corrected),
        guards,
        *before,
        stepping(size, registry.find("step", STEPS, step), control or "none", family(curve, bends)),
        optimizer=optax.sgd(1.0, momentum=None if still or momentum_on == "curve" else momentum),
    )
    return averaged(on_curves(moves, sends_steps=warm != "off"), start=swa, every=cycle, overwrite=overwrite)
