"""Estimates of AsyncManifold's constants from a run: Q, D and S, as a probe on the curves that clients upload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedjax_async.base import check
from fedjax_async.config.prepared import Experiment
from fedjax_async.geometry import bezier, family, line
from fedjax_async.geometry.families import CurvePath
from fedjax_async.geometry.vectors import leaves, length
from fedjax_async.local import Curve
from fedjax_async.local.batches import mean_loss
from fedjax_async.types import Array, Arrival, DataParts, Params, State

Estimate = Callable[[State, State, Arrival, DataParts], dict[str, Array]]


def quality(
    loss: Callable[[Params], Array], points: Sequence[Params], s: ArrayLike, *, path: CurvePath = bezier
) -> Array:
    """Q at each position: the loss on the line over the loss on the curve; [P].

    Args:
      loss: ``loss(params) -> float[]``, > 0.
      points: of a curve; of a quadratic Bezier curve A, phi, E.
      s: positions [P].
      path: ``geometry.bezier``, or ``geometry.polygon`` for a chain.

    Source: AsyncManifold (2025), Assumption 6.
    """
    ends = points[0], points[-1]
    return jax.lax.map(lambda at: loss(line(*ends, at)) / loss(path(points, at)), jnp.asarray(s, float))


def divergence(points: Sequence[Params], s: ArrayLike, *, path: CurvePath = bezier) -> Array:
    """D at each position s > 0: the distance from A along the curve over that along the line; [P]. NaN if A is E.

    Arguments as in :func:`quality`. Source: AsyncManifold (2025), Assumption 7, for a Euclidean ambient space.
    """

    def far(params: Params) -> Array:
        return length(leaves(jax.tree.map(jnp.subtract, params, points[0])))

    chord = far(points[-1])
    return jax.lax.map(lambda at: far(path(points, at)) / (at * chord), jnp.asarray(s, float))


def curve_probe(
    experiment: Experiment,
    *,
    position: float = 0.5,
    grid: int = 9,
    part: str = "test",
    curve: str = "quadratic",
    bends: int | None = None,
) -> Estimate:
    """A probe of the curves that clients upload (method ``asynccurve``); give it in ``probes`` of ``simulate``.

    ``simulate(settings, probes={"curve": curve_probe(config.prepare(settings))})``, with ``settings =
    Settings(method="asynccurve", test_fraction=0.2)``. Each client needs examples of ``part``: ``test_fraction`` holds
    back a test part, ``validation_fraction`` a validation part.

    Columns: ``quality`` and ``divergence`` are Q and D at ``position``, ``quality_grid`` is the mean of Q at ``grid``
    positions evenly spaced strictly between the ends, ``divergence_grid`` the largest D at these. The largest
    ``staleness`` of the run is a valid S (Assumption 4).

    Args:
      experiment: ``config.prepare`` of the settings of the run. Its model must have no running statistics.
      position: on the curve, in (0, 1].
      grid: number of positions, at least 1.
      part: of the client's own data: ``test``, ``validation`` or ``train``; NaN at arrivals of a client that has none.
        A run in which no client has one is refused.
      curve, bends: as in the method, ``quadratic``, ``cubic`` or ``chain``.
    """
    check.kind("experiment", experiment, Experiment, "that of config.prepare(settings)")
    model = experiment.components.model  # it decodes the raw rows that a probe gets
    check.require(model.train is None, "model", "with running statistics", "without running statistics")
    check.positive("position", position)
    check.in_range("position", position, 0.0, 1.0)
    check.whole("grid", grid)
    check.one_of("part", part, DataParts._fields)
    shape = family(curve, bends)

    def probe(state: State, memory: State, arrival: Arrival, parts: DataParts) -> dict[str, Array]:
        uploaded = arrival.upload
        check.require(isinstance(uploaded, Curve), "upload", type(uploaded).__name__, "a Curve, as of asynccurve")
        end = jax.tree.map(jnp.add, arrival.start, uploaded.params)
        shape.require_offsets(uploaded.offset, end)
        points = shape.points(arrival.start, end, uploaded.offset)
        at = jnp.concatenate([jnp.asarray([position], float), jnp.linspace(0.0, 1.0, grid + 2)[1:-1]])
        examples = getattr(parts, part)
        better = quality(lambda params: mean_loss(model, params, examples), points, at, path=shape.path)
        longer = divergence(points, at, path=shape.path)
        return {
            "quality": better[0],
            "quality_grid": jnp.mean(better[1:]),
            "divergence": longer[0],
            "divergence_grid": jnp.max(longer[1:]),
            "staleness": arrival.staleness,
        }

    probe.needs = (part,)  # type: ignore[attr-defined]
    return probe
