"""Proximal metrics: how far a client's weights are from the model that it started from.

A proximal term is ``(mu / 2) metric(w, w_0)``. A metric is any differentiable function of two pytrees, such as those
made by the factories here; ``PROXIMAL_METRICS`` names these.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async.base import check, factories, registry
from fedjax_async.geometry import lorentz_penalty
from fedjax_async.types import Array, Params, Traced

ProximalMetric = Callable[[Params, Params], Array]  # (weights, those of the start) -> float[]


def euclidean() -> ProximalMetric:
    """``||w - w_0||^2`` (FedProx: Li et al. 2020, eq. 2)."""

    def metric(weights: Params, start: Params) -> Array:
        real = jnp.result_type(float)
        squares = jax.tree.map(lambda w, w0: jnp.sum(jnp.square(w.astype(real) - w0.astype(real))), weights, start)
        return sum(jax.tree.leaves(squares), jnp.zeros((), real))

    return metric


def hyperbolic(*, sigma: Traced = 1.0, beta: Traced = 1.0) -> ProximalMetric:
    """``exp(||pi_L(w) - pi_L(w_0)||_L^2 / sigma)`` in the Lorentz model (FedMRUR: An et al. 2023).

    Finite, with a finite gradient, for all finite weights: the exponent is bounded (``geometry.lorentz_penalty``).

    Args:
      sigma: > 0; near the start the proximal term is then about ``(mu / sigma) ||w - w_0||^2 / 2``.
      beta: minus one over the curvature, > 0.

    Source: AsyncManifold (2025), eq. 24. Deviation: An et al. compare features of both models, eq. 24 their weights.
    """
    lorentz_penalty(jnp.zeros(1), jnp.zeros(1), sigma=sigma, beta=beta)  # checks the ranges
    return lambda weights, start: lorentz_penalty(weights, start, sigma=sigma, beta=beta)


PROXIMAL_METRICS: dict[str, Callable[..., ProximalMetric]] = {"euclidean": euclidean, "hyperbolic": hyperbolic}


def metric_of(name: str, sigma: Traced | None = None, beta: Traced | None = None) -> ProximalMetric:
    """The metric called ``name``; an option that is ``None`` keeps its default.

    Raises ``ValueError`` for an unknown name, and for an option that the metric does not have.
    """
    given = {key: value for key, value in (("sigma", sigma), ("beta", beta)) if value is not None}
    factory = registry.find("metric", PROXIMAL_METRICS, name)
    known = factories.options_of(factory)
    for key, value in given.items():
        check.require(key in known, key, value, f"left out: the metric {name!r} does not take it")
    return factory(**given)
