"""The package's pytree helpers; where ``optax.tree`` has the operation, use that instead."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async.types import Array, Params


def take(tree: Any, index: Any) -> Any:
    """Row(s) ``index`` of every leaf: ``[S, ...] -> [W, ...]`` for an index array, ``[...]`` for a scalar."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def put(tree: Any, index: Any, rows: Any) -> Any:
    """A copy of ``tree`` whose row(s) ``index`` are ``rows``; indices out of range write nothing."""
    return jax.tree.map(lambda leaf, row: leaf.at[index].set(row, mode="drop"), tree, rows)


def where(condition: Array, yes: Any, no: Any) -> Any:
    """Leafwise ``jnp.where`` with one scalar condition for the whole tree."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def all_finite(tree: Any) -> Array:
    """True if no leaf holds a NaN or an infinity; bool[]."""
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves)) if leaves else jnp.bool_(True)


def stack_zeros(tree: Any, rows: int) -> Any:
    """Zeros shaped like ``rows`` copies of ``tree`` on a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *jnp.shape(leaf)), jnp.result_type(leaf)), tree)


def num_bytes(params: Params) -> int:
    """Bytes of all leaves as they are stored: the size of one uncompressed message."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def num_scalars(params: Params) -> int:
    """D, the number of scalars in the tree."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))
