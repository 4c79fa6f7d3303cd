"""Staleness weights ``s(tau)``: how much an update that is ``tau`` server steps old still counts.

Source: Xie, Koyejo, Gupta, "Asynchronous federated optimization" (2019), section 5.2; the
polynomial with exponent 1/2 is also FedBuff's (Nguyen et al. 2022, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedjax_async import check, registry
from fedjax_async.types import Array, Traced

Weight = Callable[[Array], Array]  # int32[] -> float[]


def constant() -> Weight:
    """``s = 1``."""
    return lambda tau: jnp.ones_like(tau, dtype=jnp.result_type(float))


def hinge(*, slope: Traced = 10.0, threshold: Traced = 4.0) -> Weight:
    """``s = 1`` up to ``threshold`` b, then ``1 / (slope (tau - b) + 1)``."""
    check.positive("slope", slope)
    check.non_negative("threshold", threshold)

    def weight(tau: Array) -> Array:
        real = jnp.result_type(float)
        late = jnp.maximum(tau.astype(real) - jnp.asarray(threshold, real), 0.0)
        return 1.0 / (jnp.asarray(slope, real) * late + 1.0)

    return weight


def polynomial(*, exponent: Traced = 0.5) -> Weight:
    """``s = (1 + tau)^(-exponent)``."""
    check.non_negative("exponent", exponent)

    def weight(tau: Array) -> Array:
        real = jnp.result_type(float)
        return (1.0 + tau.astype(real)) ** -jnp.asarray(exponent, real)

    return weight


STALENESS: dict[str, Callable[..., Weight]] = {"constant": constant, "hinge": hinge, "polynomial": polynomial}


def staleness_weight(name: str, **options: Any) -> Weight:
    """The weight called ``name``; options that are ``None`` keep the weight's own default."""
    given = {k: v for k, v in options.items() if v is not None}
    factory = registry.find("staleness", STALENESS, name)
    known = registry.options_of(factory)
    for key, value in given.items():
        check.require(key in known, key, value, f"left out: staleness weight {name!r} does not take it")
    return factory(**given)
