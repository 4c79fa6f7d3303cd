"""Sharpness-aware minimisation: descend along the gradient at the worst point nearby, to find flat minima."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check
from fedjax_async.geometry.vectors import leaves, rebuild, unit
from fedjax_async.types import Number, Params


class SharpnessAware(optax.GradientTransformationExtraArgs):
    """An optimiser that calls ``grad_fn`` once a step."""

    gradients = 2


def sharpness_aware(
    descent: optax.GradientTransformation, climb: Callable[[Params, Params], Params]
) -> optax.GradientTransformationExtraArgs:
    """``descent`` along the gradient at ``w + climb(gradient, w)``: ``optax.contrib.sam`` with one step up.

    Its ``update`` needs ``grad_fn(weights, 0) -> gradient``, on the same minibatch; ``local_training`` passes it. A
    step costs two gradients.
    """

    def up(gradient: Params, weights: Params) -> Params:
        return jax.tree.map(jnp.negative, climb(gradient, weights))  # optax takes a step down and reverses it

    return SharpnessAware(*optax.contrib.sam(descent, optax.stateless(up), opaque_mode=True))


def nearby(radius: Number) -> Callable[[Params, Params], Params]:
    """SAM: ``rho g / ||g||`` over all weights; zero if the gradient is zero (Foret et al. 2021, eq. 2)."""
    check.positive("rho", radius)

    def climb(gradient: Params, weights: Params) -> Params:
        del weights
        direction = unit(leaves(gradient))
        return rebuild([jnp.asarray(radius, d.dtype) * d for d in direction], gradient)

    return climb


def nearby_in_scale(radius: Number, floor: Number) -> Callable[[Params, Params], Params]:
    """ASAM: ``rho T^2 g / ||T g||`` with ``T = |w| + eta``, entry by entry; zero if the gradient is zero.

    The neighbourhood scales with the weights, so networks that differ in scale only have the same one (Kwon et al.
    2021, eq. 5 with the element-wise normalisation of section 5). ``floor``: eta.
    """
    check.positive("rho", radius)
    check.non_negative("eta", floor)

    def climb(gradient: Params, weights: Params) -> Params:
        sizes = [jnp.abs(w) + jnp.asarray(floor, w.dtype) for w in leaves(weights)]
        direction = unit([t * g for t, g in zip(sizes, leaves(gradient), strict=True)])
        return rebuild([jnp.asarray(radius, t.dtype) * t * d for t, d in zip(sizes, direction, strict=True)], gradient)

    return climb
