"""Normalisation layers of the image models: BatchNorm with a row mask, with shared or local statistics; GroupNorm."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from fedjax_async.base import check, factories, registry
from fedjax_async.types import Array, Path

BatchMoments = tuple[Array, Array, Array]  # mean, variance and count
Saved = tuple[Array, Array | None, Array, BatchMoments]

STATISTICS = "batch_stats"


def batch_moments(x: Array, mask: Array | None = None) -> tuple[Array, Array, Array]:
    """Mean and variance of every channel over the rows with mask 1, and the number of values averaged per channel.

    Args: ``x [B, ..., C]``; ``mask [B]`` (bool or 0/1), ``None`` for all rows.
    Returns: ``mean [C]``, ``variance [C]`` (in two passes; biased, that is, divided by the count), ``count []`` >= 1.
    """
    axes, per_row = tuple(range(x.ndim - 1)), math.prod(x.shape[1:-1])
    if mask is None:
        mean = x.mean(axis=axes)
        return mean, jnp.square(x - _expand(mean, x.ndim)).mean(axis=axes), jnp.asarray(x.shape[0] * per_row, x.dtype)
    valid = _valid(mask, x.ndim)
    count = jnp.maximum(mask.astype(x.dtype).sum() * per_row, 1)
    mean = jnp.where(valid, x, 0).sum(axis=axes) / count
    centred = jnp.where(valid, x - _expand(mean, x.ndim), 0)
    return mean, jnp.square(centred).sum(axis=axes) / count, count


def standardised(x: Array, mean: Array, variance: Array, scale: Array, bias: Array, eps: float) -> Array:
    """``scale * (x - mean) / sqrt(variance + eps) + bias`` of every channel."""
    factor = lax.rsqrt(variance + eps) * scale
    return (x - _expand(mean, x.ndim)) * _expand(factor, x.ndim) + _expand(bias, x.ndim)


def _valid(mask: Array, rank: int) -> Array:
    """``[B] -> bool[B, 1, ..., 1]``."""
    return mask.astype(bool).reshape(-1, *(1,) * (rank - 1))


def row_mask(mask: Array, x: Array) -> Array:
    """``mask`` [B] for flax's BatchNorm, bool[B, 1, ..., 1]; all rows where it has none, since they are not used then.

    Raises ``ValueError`` if the first axis of ``x`` is not that of the batch.
    """
    allowed = f"{len(mask)}, the examples of the batch: layers before it must keep the batch as the first axis"
    check.require(x.shape[0] == len(mask), "first axis of BatchNorm's input", x.shape[0], allowed)
    rows = mask.astype(bool)
    return _valid(rows | ~jnp.any(rows), x.ndim)


def precise(x: Array) -> Array:
    """``x`` in float32 or better."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def _expand(per_channel: Array, rank: int) -> Array:
    """``[C] -> [1, ..., 1, C]``."""
    return per_channel.reshape(*(1,) * (rank - 1), -1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def batch_normalised(
    eps: float, x: Array, mask: Array | None, scale: Array, bias: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """``scale * (x - mean) / sqrt(variance + eps) + bias`` with the batch's own moments, and these moments.

    The gradient is written by hand: it keeps only ``x``, while automatic differentiation keeps several arrays of that
    size. Reverse mode only; the returned moments have no gradient.
    """
    return _normalised_forward(eps, x, mask, scale, bias)[0]


def _normalised_forward(
    eps: float, x: Array, mask: Array | None, scale: Array, bias: Array
) -> tuple[tuple[Array, BatchMoments], Saved]:
    moments = batch_moments(x, mask)
    return (standardised(x, moments[0], moments[1], scale, bias, eps), moments), (x, mask, scale, moments)


def _normalised_backward(
    eps: float, saved: Saved, given: tuple[Array, BatchMoments]
) -> tuple[Array, Array | None, Array, Array]:
    """With ``u`` the standardised x and sums over all rows: ``factor (dy - valid (sum dy + u sum(dy u)) / count)``."""
    (x, mask, scale, (mean, var, count)), dy = saved, given[0]
    axes, rank, inverse = tuple(range(x.ndim - 1)), x.ndim, lax.rsqrt(var + eps)
    unit = (x - _expand(mean, rank)) * _expand(inverse, rank)
    dbias, dscale = dy.sum(axis=axes), (dy * unit).sum(axis=axes)
    shared = _expand(dbias / count, rank) + unit * _expand(dscale / count, rank)
    if mask is not None:
        shared = jnp.where(_valid(mask, rank), shared, 0)
    dx = _expand(inverse * scale, rank) * (dy - shared)
    return dx, None if mask is None else jnp.zeros_like(mask), dscale, dbias


batch_normalised.defvjp(_normalised_forward, _normalised_backward)


class BatchNorm(nn.Module):
    """``scale * (x - mean) / sqrt(variance + eps) + bias`` of every channel; ``x [B, ..., C]``.

    In training, mean and variance are those of the batch, without the rows with ``mask`` 0, and the running statistics
    are updated: ``running = momentum * running + (1 - momentum) * batch`` (PyTorch's momentum 0.1 is 0.9 here), with
    the unbiased variance of the batch, as in PyTorch. In evaluation the running statistics are used; with
    ``running=False``, those of the batch. A running variance below zero, which a server's extrapolation may produce,
    counts as zero. Statistics are computed in float32 or better. Local training does not take the update of a batch of
    fewer than two examples.

    Source: Ioffe and Szegedy (2015), algorithm 1.
    """

    momentum: float = 0.9
    eps: float = 1e-5
    running: bool = True

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        shape, given = (x.shape[-1],), x.dtype
        mean = self.variable(STATISTICS, "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable(STATISTICS, "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", nn.initializers.ones_init(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), shape, jnp.float32)
        x = precise(x)
        scale, bias = scale.astype(x.dtype), bias.astype(x.dtype)
        if not train and self.running:
            variance = jnp.maximum(var.value, 0).astype(x.dtype)
            return standardised(x, mean.value.astype(x.dtype), variance, scale, bias, self.eps).astype(given)
        floats = None if mask is None else mask.astype(x.dtype)
        out, (centre, spread, count) = batch_normalised(self.eps, x, floats, scale, bias)
        if train and self.is_mutable_collection(STATISTICS):
            unbiased = spread * (count / jnp.maximum(count - 1, 1))
            mean.value, var.value = self._updated(mean.value, centre), self._updated(var.value, unbiased)
        return out.astype(given)

    def _updated(self, old: Array, new: Array) -> Array:
        return self.momentum * old + (1 - self.momentum) * lax.stop_gradient(new).astype(old.dtype)


class GroupNorm(nn.Module):
    """Normalisation of each example over groups of channels: ``x [B, ..., C]``, no running statistics.

    ``groups``: the largest number of groups; the number used is the largest divisor of C that is not above it.

    Source: Wu and He (2018).
    """

    groups: int = 32
    eps: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        channels, given, full = x.shape[-1], x.dtype, x.shape
        groups = next(g for g in range(min(self.groups, channels), 0, -1) if channels % g == 0)
        scale = self.param("scale", nn.initializers.ones_init(), (channels,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (channels,), jnp.float32)
        x = precise(x).reshape(full[0], -1, groups, channels // groups)
        x = x - x.mean(axis=(1, 3), keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(axis=(1, 3), keepdims=True) + self.eps)
        out = x.reshape(full) * _expand(scale.astype(x.dtype), len(full)) + _expand(bias.astype(x.dtype), len(full))
        return out.astype(given)


class Nothing(nn.Module):
    """No normalisation: the layer returns its input."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        return x


class Norm(NamedTuple):
    """A kind of normalisation: ``layer(name=...)`` makes one layer; ``private``: see ``Model``."""

    layer: Callable[..., nn.Module]
    private: Callable[[Path], bool] | None = None


def batch(*, momentum: float = 0.9) -> Norm:
    """BatchNorm; its statistics are sent, uploaded and aggregated like all other params."""
    return Norm(partial(BatchNorm, momentum=momentum))


def is_statistic(path: Path) -> bool:
    """Whether a leaf of the params is one of BatchNorm's running statistics."""
    return path[0] == STATISTICS


def local() -> Norm:
    """BatchNorm with statistics that stay with each client (``Model.private``).

    The server then has none: ``apply`` without a key, and so every evaluation of a run, normalises by the statistics of
    the given batch, and its outputs depend on that batch. To evaluate a client's own statistics, use the same network
    with ``batch``.

    Source: Andreux et al. (2020), SiloBN: scale and bias are shared, statistics are not.
    """
    return Norm(partial(BatchNorm, running=False), is_statistic)


def group(*, groups: int = 32) -> Norm:
    """GroupNorm with at most ``groups`` groups."""
    return Norm(partial(GroupNorm, groups=groups))


def off() -> Norm:
    """No normalisation."""
    return Norm(Nothing)


NORMS: dict[str, Callable[..., Norm]] = {"batch": batch, "local": local, "group": group, "off": off}


def normalisation(name: str, *, momentum: float | None = None, groups: int | None = None) -> Norm:
    """The entry ``name`` of ``NORMS`` with the options that are not ``None``.

    Raises ``ValueError`` for an option that the entry does not have.
    """
    factory = registry.find("norm", NORMS, name)
    given = {key: value for key, value in (("momentum", momentum), ("groups", groups)) if value is not None}
    for key, value in given.items():
        check.require(key in factories.options_of(factory), key, value, f"left out: norm {name!r} does not take it")
    if momentum is not None:
        check.below_one("momentum", momentum)
    if groups is not None:
        check.whole("groups", groups)
    made: Norm = factory(**given)
    return made
