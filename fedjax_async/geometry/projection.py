"""Projections of a pytree on the orthogonal complement of others.

The scalar products are taken within *groups* of leaves: ``"layer"`` (the leaves of one module: a kernel
and its bias), ``"tensor"`` (each leaf by itself) or ``"whole"`` (all leaves as one vector).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async import registry
from fedjax_async.types import Array, Params

GROUPINGS: dict[str, Callable[[tuple[Any, ...]], Hashable]] = {
    "layer": lambda path: path[:-1],
    "tensor": lambda path: path,
    "whole": lambda path: (),
}

# A row of which less than this share lies outside the span of those before it counts as dependent on them.
_DEPENDENT = 1e-5


def _groups(tree: Params, per: str) -> list[list[int]]:
    """Indices of the leaves of each group, in order of the leaves."""
    group_of = registry.find("per", GROUPINGS, per)
    groups: dict[Hashable, list[int]] = {}
    for index, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        groups.setdefault(group_of(path), []).append(index)
    return list(groups.values())


def _inner(one: list[Array], other: list[Array]) -> Array:
    real = jnp.result_type(float)
    products = [jnp.sum(a.astype(real) * b.astype(real)) for a, b in zip(one, other, strict=True)]
    return sum(products[1:], products[0])


def project_out(vector: Params, direction: Params, *, per: str = "layer") -> Params:
    """The part of ``vector`` orthogonal to ``direction``, in each group of leaves by itself.

    ``v - (<v, d> / <d, d>) d``; where ``d`` is zero, ``v`` itself. Of all vectors orthogonal to ``d`` it
    is the nearest to ``v``, and at the smallest angle to it. Neither tiny nor huge directions under- or
    overflow: where the products come near to it, they are taken again with ``d`` scaled to a largest entry of 1.

    Args:
      vector, direction: pytrees of the same structure and shapes.
      per: one of :data:`GROUPINGS`.

    Returns: a pytree like ``vector``, in its dtypes. Source: OrthoFL (2025), eq. 4 and Lemma 3.1.
    """
    vectors, structure = jax.tree.flatten(vector)
    directions = jax.tree.leaves(direction)
    groups, real = _groups(vector, per), jnp.result_type(float)
    if not groups:
        return vector
    pairs = [([vectors[i] for i in group], [directions[i] for i in group]) for group in groups]
    along = jnp.stack([_inner(v, d) for v, d in pairs])
    square = jnp.stack([_inner(d, d) for _, d in pairs])
    share, scale = jax.lax.cond(
        _far_from_limits(along) & _far_from_limits(square),
        lambda: (along / square, jnp.ones_like(square)),
        lambda: _scaled_shares(pairs),
    )
    out = list(vectors)
    for k, group in enumerate(groups):
        for i in group:
            unit = directions[i].astype(real) / scale[k]
            out[i] = (vectors[i].astype(real) - share[k] * unit).astype(vectors[i].dtype)
    return jax.tree.unflatten(structure, out)


def _far_from_limits(products: Array) -> Array:
    """Whether what under- or overflowed among the terms of these sums, if anything, is lost in their rounding."""
    limits = jnp.finfo(products.dtype)
    size = jnp.abs(products)
    return jnp.all((size > limits.tiny**0.5) & (size < limits.max**0.5))


def _scaled_shares(pairs: list[tuple[list[Array], list[Array]]]) -> tuple[Array, Array]:
    """``<v, u> / <u, u>`` (0 if u is zero) of ``u = d / scale``, and the scale: d's largest entry, or 1; [groups]."""
    real = jnp.result_type(float)
    shares, scales = [], []
    for vectors, directions in pairs:
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(d), initial=0.0).astype(real) for d in directions]))
        scale = jnp.where(largest > 0, largest, jnp.ones_like(largest))
        units = [d.astype(real) / scale for d in directions]
        square = _inner(units, units)
        shares.append(_inner(vectors, units) / jnp.where(square > 0, square, jnp.ones_like(square)))
        scales.append(scale)
    return jnp.stack(shares), jnp.stack(scales)


def orthonormalise(rows: Array) -> Array:
    """Rows [K, D] that are orthonormal and span what ``rows`` span; zeros in place of dependent ones.

    Gram and Schmidt, every row twice, which keeps them orthogonal to rounding (Giraud, Langou,
    Rozloznik 2005).
    """

    def from_row(k: Array, basis: Array) -> Array:
        row = rows[k]
        largest = jnp.max(jnp.abs(row))
        row = row / jnp.where(largest > 0, largest, jnp.ones_like(largest))
        rest = row
        for _ in range(2):
            rest = rest - (basis @ rest) @ basis
        length, before = jnp.linalg.norm(rest), jnp.linalg.norm(row)
        new = length > _DEPENDENT * before
        unit = rest / jnp.where(new, length, jnp.ones_like(length))
        return basis.at[k].set(jnp.where(new, unit, jnp.zeros_like(unit)))

    return jax.lax.fori_loop(0, rows.shape[0], from_row, jnp.zeros_like(rows))


def project_out_span(vector: Params, rows: Params, *, per: str = "layer") -> Params:
    """The part of ``vector`` orthogonal to all K trees ``rows`` [K, ...], in each group of leaves by itself.

    Zero and dependent rows are as good as absent. Costs ``O(K^2 D)``.
    """
    vectors, structure = jax.tree.flatten(vector)
    each = jax.tree.leaves(rows)
    out, real = list(vectors), jnp.result_type(float)
    for group in _groups(vector, per):
        flat = jnp.concatenate([vectors[i].reshape(-1).astype(real) for i in group])
        stacked = [each[i].reshape(each[i].shape[0], -1).astype(real) for i in group]
        basis = orthonormalise(jnp.concatenate(stacked, axis=1))
        for _ in range(2):
            flat = flat - (basis @ flat) @ basis
        low = 0
        for i in group:
            out[i] = flat[low : low + vectors[i].size].reshape(vectors[i].shape).astype(vectors[i].dtype)
            low += vectors[i].size
    return jax.tree.unflatten(structure, out)
