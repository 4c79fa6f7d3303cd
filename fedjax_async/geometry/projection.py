"""Projections of a pytree on the orthogonal complement of others.

The scalar products are taken within *groups* of leaves: ``"layer"`` (the leaves of one module: a kernel
and its bias), ``"tensor"`` (each leaf by itself) or ``"whole"`` (all leaves as one vector).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp

from fedjax_async.base import registry
from fedjax_async.geometry.vectors import inner, leaves, measure, rebuild
from fedjax_async.types import Array, Params, Traced

GROUPINGS: dict[str, Callable[[tuple[object, ...]], Hashable]] = {
    "layer": lambda path: path[:-1],
    "tensor": lambda path: path,
    "whole": lambda path: (),
}

# A row counts as dependent on those before it if less than this share of it lies outside their span.
_DEPENDENT = 1e-5


def groups(tree: Params, per: str) -> list[list[int]]:
    """Indices of the leaves of each group, in order of the leaves."""
    group_of = registry.find("per", GROUPINGS, per)
    found: dict[Hashable, list[int]] = {}
    for index, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(tree)):
        found.setdefault(group_of(path), []).append(index)
    return list(found.values())


def project_out(
    vector: Params,
    direction: Params,
    *,
    minus: Params | None = None,
    per: str = "layer",
    gamma: Traced | None = None,
) -> Params:
    """The part of ``vector`` orthogonal to ``direction``, in each group of leaves by itself.

    ``v - (<v, d> / <d, d>) d``; if ``d`` is zero, ``v`` itself. It is the vector orthogonal to ``d`` that is
    nearest to ``v`` and has the smallest angle to it. Tiny and huge directions do not under- or overflow: the
    products are taken with ``d`` over a power of two near its length, which is exact.

    Args:
      vector, direction: pytrees of the same structure and shapes.
      minus: if given, also of that structure, and v is ``vector - minus``. The result is the same as after a
        subtraction, but the difference is never written to memory, which is faster for large trees.
      per: one of :data:`GROUPINGS`.
      gamma: the share of the projection that is removed, in [0, 1]; all of it by default.

    Returns: a pytree like ``vector``, in its dtypes. Source: OrthoFL (2025), eq. 4 and Lemma 3.1.
    """
    vectors, directions = leaves(vector), leaves(direction)
    origins = None if minus is None else leaves(minus)
    out = list(vectors)
    for group in groups(vector, per):
        v, d = [vectors[i] for i in group], [directions[i] for i in group]
        inverse, square = measure(d)
        # XLA:CPU stores a value that is used twice. So the products have operands of their own: -v, and half of d.
        half = 0.5 * inverse
        if origins is None:
            along = inner(v, [a * half for a in d])
        else:
            o = [origins[i] for i in group]
            along = -inner(list(map(jnp.subtract, o, v)), [a * half for a in d])
            v = list(map(jnp.subtract, v, o))
        share = 2.0 * along / jnp.where(square > 0, square, jnp.ones_like(square))
        share = share if gamma is None else share * jnp.asarray(gamma, share.dtype)
        for i, a, b in zip(group, v, d, strict=True):
            out[i] = a - share * (b * inverse)
    return rebuild(out, vector)


def orthonormalise(rows: Array) -> Array:
    """Orthonormal rows [K, D] with the same span as ``rows``; zeros in place of dependent rows.

    Gram-Schmidt, twice for every row, which keeps the rows orthogonal to rounding (Giraud, Langou,
    Rozloznik 2005).
    """

    def from_row(k: Array, basis: Array) -> Array:
        row = rows[k]
        largest = jnp.max(jnp.abs(row), initial=0)  # of an empty leaf, too
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

    Zero and dependent rows have no effect. Costs ``O(K^2 D)``.
    """
    vectors, structure = jax.tree.flatten(vector)
    each = jax.tree.leaves(rows)
    out, real = list(vectors), jnp.result_type(float)
    for group in groups(vector, per):
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
