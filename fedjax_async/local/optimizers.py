"""Local optimisers and learning-rate decays by name; in Python, pass any optax transformation instead."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, factories, registry, tree
from fedjax_async.geometry import MANIFOLDS
from fedjax_async.geometry import manifold as manifolds
from fedjax_async.local.sharpness import nearby, nearby_in_scale, sharpness_aware
from fedjax_async.local.training import WithinJob
from fedjax_async.types import Array, Number, Params, Traced

LearningRate = Number | Callable[[Array], Array]  # or a schedule of optax


def sgd(
    lr: LearningRate, *, momentum: Traced = 0.0, nesterov: bool = False, weight_decay: Traced = 0.0
) -> optax.GradientTransformation:
    """Stochastic gradient descent, with optional momentum and L2 weight decay."""
    check.positive("lr", lr)
    check.below_one("momentum", momentum)
    check.non_negative("weight_decay", weight_decay)
    check.one_of("nesterov", nesterov, (False, True))
    has_momentum = not (isinstance(momentum, (int, float)) and momentum == 0)
    check.require(has_momentum or not nesterov, "nesterov", nesterov, "false without momentum")
    descent = optax.sgd(lr, momentum=momentum if has_momentum else None, nesterov=nesterov)
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return descent
    return optax.chain(optax.add_decayed_weights(weight_decay), descent)


def _moments(lr: LearningRate, b1: Number, b2: Number, eps: Number) -> None:
    check.positive("lr", lr)
    check.below_one("b1", b1)
    check.below_one("b2", b2)
    check.positive("eps", eps)


def adam(lr: LearningRate, *, b1: Traced = 0.9, b2: Traced = 0.999, eps: Traced = 1e-8) -> optax.GradientTransformation:
    """Adam; its moments start at zero in every job."""
    _moments(lr, b1, b2, eps)
    return optax.adam(lr, b1=b1, b2=b2, eps=eps)


def adamw(
    lr: LearningRate,
    *,
    b1: Traced = 0.9,
    b2: Traced = 0.999,
    eps: Traced = 1e-8,
    weight_decay: Traced = 1e-4,
    clip: Traced | None = None,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay; a gradient longer than ``clip`` > 0 is shortened to it first.

    Hugging Face's ``Trainer`` fine-tunes with ``adamw:weight_decay=0,clip=1`` and ``decay="linear"``.
    """
    _moments(lr, b1, b2, eps)
    check.non_negative("weight_decay", weight_decay)
    check.optional(check.positive, "clip", clip)
    descent = optax.adamw(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return descent if clip is None else optax.chain(_shortened(clip), descent)


def _shortened(longest: Traced) -> optax.GradientTransformation:
    """``optax.clip_by_global_norm``, which sums leaves of 16 bits in 16 bits, and fails where ``longest`` is traced."""

    def update(gradient: Params, _: Params) -> Params:
        norm = tree.norm(gradient)

        def shortened(leaf: Array) -> Array:
            wide = tree.wide(leaf)
            short = wide / norm.astype(wide.dtype) * jnp.asarray(longest, wide.dtype)
            return jnp.where(norm < longest, leaf, short.astype(leaf.dtype))

        return jax.tree.map(shortened, gradient)

    return optax.stateless(update)


BASES: dict[str, Callable[..., optax.GradientTransformation]] = {"sgd": sgd, "adam": adam, "adamw": adamw}


def sam(lr: LearningRate, *, rho: Traced = 0.05, base: str = "sgd") -> optax.GradientTransformation:
    """Sharpness-aware minimisation (Foret et al. 2021): steps of ``base`` along ``grad F(w + rho g / ||g||)``.

    Args:
      rho: radius of the neighbourhood, > 0.
      base: ``sgd``, ``adam`` or ``adamw``, with its default options. A step costs two gradients.
    """
    return sharpness_aware(registry.find("base", BASES, base)(lr), nearby(rho))


def asam(lr: LearningRate, *, rho: Traced = 0.5, eta: Traced = 0.01, base: str = "sgd") -> optax.GradientTransformation:
    """Adaptive SAM (Kwon et al. 2021): the neighbourhood scales with ``|w| + eta``, entry by entry.

    Args:
      rho: radius of the neighbourhood, > 0.
      eta: >= 0.
      base: as in :func:`sam`.
    """
    return sharpness_aware(registry.find("base", BASES, base)(lr), nearby_in_scale(rho, eta))


def riemannian_sgd(
    lr: LearningRate, *, manifold: str = "lorentz", beta: Traced | None = None
) -> optax.GradientTransformation:
    """Riemannian SGD (Bonnabel 2013): steps along geodesics, ``w <- exp_w(-lr grad F(w))``.

    The weights of the model are one point of the manifold. On ``lorentz``, hyperbolic space in the coordinates of
    AsyncManifold's eq. 27, the gradient is ``g + w <w, g> / beta``: its part along the weights is ``1 + |w|^2 / beta``
    times that of SGD, so stable rates are lower. A decay multiplies the step in coordinates.

    Args:
      manifold: ``lorentz`` or ``euclidean``, on which it is SGD.
      beta: of ``lorentz`` alone, minus one over the curvature, > 0; 1 by default.

    Source: AsyncManifold (2025), sections 2.3 and 5.1, which leave the ambient manifold of the local steps open and
    name hyperbolic space (Nickel and Kiela 2018) as the example. So metric and exact exponential map are those of the
    Lorentz model, without a retraction. The paper's AsyncCurve takes no such steps.
    """
    check.positive("lr", lr)
    make = registry.find("manifold", MANIFOLDS, manifold)
    curved = "beta" in factories.options_of(make)
    check.require(curved or beta is None, "beta", beta, f"left out: manifold {manifold} has no curvature")
    return manifolds.riemannian_sgd(lr, make() if beta is None else make(beta=beta))


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    **BASES,
    "sam": sam,
    "asam": asam,
    "riemannian_sgd": riemannian_sgd,
}


def _of_version(schedule: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``schedule`` of the version as a float; strict promotion forbids optax to mix an integer version with floats."""
    return lambda version: schedule(jnp.asarray(version, jnp.result_type(float)))


def constant() -> Callable[[Array], Array] | None:
    """The same learning rate throughout."""
    return None


def exponential(*, rate: float = 0.99, every: int = 1) -> Callable[[Array], Array]:
    """Multiply the local learning rate by ``rate ** (version / every)``: by ``rate`` every ``every`` server steps."""
    check.positive("rate", rate)
    check.whole("every", every, high=2**31 - 1)
    return _of_version(optax.exponential_decay(1.0, transition_steps=every, decay_rate=rate))


def cosine(*, steps: int = 500, floor: float = 0.0) -> Callable[[Array], Array]:
    """Multiply the learning rate by half a cosine from 1 to ``floor`` in ``steps`` server steps, then by ``floor``."""
    check.whole("steps", steps, high=2**31 - 1)
    check.in_range("floor", floor, 0.0, 1.0)
    return _of_version(optax.cosine_decay_schedule(1.0, decay_steps=steps, alpha=floor))


def warmup(*, steps: int = 10) -> Callable[[Array], Array]:
    """Increase the learning rate linearly to its full value over the first ``steps`` server steps."""
    check.whole("steps", steps, high=2**31 - 1)
    return _of_version(lambda version: jnp.minimum(1.0, (version + 1.0) / steps))


def linear(*, floor: float = 0.0) -> WithinJob:
    """Within each job, lower the learning rate linearly from its full value to ``floor`` times it.

    Local step k = 0, 1, ... of K has the factor ``1 - (1 - floor) k / K``. Every job begins anew. K is what the job has
    in the schedule, also with timings whose clients cannot know it (``hurry``, ``participation``, ``polling``), and
    what a part of a job has with ``midway``.
    """
    check.in_range("floor", floor, 0.0, 1.0)

    def factor(k: Array, steps: Array) -> Array:
        real = jnp.result_type(float)
        return 1 - (1 - floor) * k.astype(real) / steps.astype(real)

    return WithinJob(factor)


DECAYS: dict[str, Callable[..., Callable[[Array], Array] | WithinJob | None]] = {
    "constant": constant,
    "linear": linear,
    "exponential": exponential,
    "cosine": cosine,
    "warmup": warmup,
}
