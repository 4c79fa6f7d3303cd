"""The package's pytree helpers; where ``optax.tree`` has the operation, use that instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_async.types import Array, Params


def take(tree: Any, index: Any) -> Any:
    """Row(s) ``index`` (in range, unchecked) of every leaf: ``[S, ...] -> [W, ...]``, or ``[...]`` for a scalar."""
    return jax.tree.map(lambda leaf: leaf.at[index].get(mode="promise_in_bounds"), tree)


def put(tree: Any, index: Any, rows: Any) -> Any:
    """A copy of ``tree`` whose row(s) ``index`` are ``rows``; the indices must be in range (unchecked)."""
    return jax.tree.map(lambda leaf, row: leaf.at[index].set(row, mode="promise_in_bounds"), tree, rows)


def put_some(tree: Any, index: Any, rows: Any, active: Array) -> Any:
    """:func:`put` of several rows, of which only those where ``active`` (bool[W]) holds are written."""

    def one(leaf: Array, row: Array) -> Array:
        return leaf.at[jnp.where(active, index, leaf.shape[0])].set(row, mode="drop")

    return jax.tree.map(one, tree, rows)


def where(condition: Array, yes: Any, no: Any) -> Any:
    """Leafwise ``jnp.where`` with one scalar condition for the whole tree."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def norm(tree: Any) -> Array:
    """Euclidean norm over all leaves, in JAX's default float type; float[]."""
    real = jnp.result_type(float)
    squares = [jnp.sum(jnp.square(leaf.astype(real))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), real)))


def stack_zeros(tree: Any, rows: int) -> Any:
    """Zeros shaped like ``rows`` copies of ``tree`` (arrays, keys, or their shapes) on a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), tree)


def optimize(
    optimizer: optax.GradientTransformation, gradient: Params, state: Any, params: Params, factor: Any = None
) -> tuple[Params, Any]:
    """One optax step: ``(params + factor * updates, state)``.

    optax itself mixes integer step counts with floats, which JAX's strict promotion refuses; the
    exception is made here and nowhere else. The state keeps its dtypes, as a loop needs it, even where
    a traced float32 hyperparameter meets bfloat16 moments.
    """

    def kept(new: Any, old: Any) -> Any:
        return new if new.dtype == old.dtype else new.astype(old.dtype)

    with jax.numpy_dtype_promotion("standard"):
        updates, after = optimizer.update(gradient, state, params)
        if factor is not None:
            updates = jax.tree.map(lambda u: u * jnp.asarray(factor, u.dtype), updates)
        return optax.apply_updates(params, updates), jax.tree.map(kept, after, state)


def num_bytes(params: Params) -> int:
    """Bytes of all leaves as they are stored: the size of one uncompressed message."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def num_scalars(params: Params) -> int:
    """D, the number of scalars in the tree."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))
