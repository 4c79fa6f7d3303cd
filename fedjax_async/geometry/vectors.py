"""A pytree as one vector: scalar products, lengths and unit vectors that neither under- nor overflow.

All of them compute in JAX's default float type. Lengths and unit vectors have finite gradients at zero, where they are
defined as zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.types import Array, Params


def leaves(tree: Params) -> list[Array]:
    """The leaves in JAX's default float type."""
    real = jnp.result_type(float)
    return [leaf.astype(real) for leaf in jax.tree.leaves(tree)]


def rebuild(values: list[Array], tree: Params) -> Params:
    """The inverse of :func:`leaves`: a pytree like ``tree``, in its dtypes, from the list of its leaves."""
    kept = [value.astype(leaf.dtype) for value, leaf in zip(values, jax.tree.leaves(tree), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), kept)


def joined(tree: Params) -> Array:
    """All leaves end to end as one array [D], in JAX's default float type, for one pass instead of one a leaf."""
    flat = [leaf.reshape(-1) for leaf in leaves(tree)]
    return jnp.concatenate(flat) if flat else jnp.zeros(0, jnp.result_type(float))


def parted(vector: Array, tree: Params) -> Params:
    """The inverse of :func:`joined`: a pytree like ``tree``, in its dtypes, from an array [D]."""
    like = jax.tree.leaves(tree)
    ends = np.cumsum([leaf.size for leaf in like])
    parts = [vector[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(like, ends, strict=True)]
    return rebuild(parts, tree)


def require_alike(trees: Mapping[str, Params]) -> None:
    """Raise ``ValueError`` with the name of a tree unless all hold float arrays of the same structure and shapes."""
    first, like = next(iter(trees.items()))
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(like)]
    for name, tree in trees.items():
        fits = str(jax.tree.structure(tree)) == str(jax.tree.structure(like))
        check.require(fits, name, jax.tree.map(_form, tree), f"like {first}, {jax.tree.map(_form, like)}")
        for (path, leaf), shape in zip(jax.tree.leaves_with_path(tree), shapes, strict=True):
            at = jax.tree_util.keystr(path)
            floats = isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating)
            check.require(floats, name + at, _form(leaf), "an array of floats")
            check.require(leaf.shape == shape, f"{name}{at}.shape", leaf.shape, f"that of {first}{at}, {shape}")


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def _form(leaf: object) -> object:
    """A leaf as messages show it: type and shape of an array, any other value as it is."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, _ARRAYS) else leaf


def inner(one: list[Array], other: list[Array]) -> Array:
    """The scalar product of two vectors, each given as a list of arrays; float[]."""
    products = [jnp.sum(a * b) for a, b in zip(one, other, strict=True)]
    return sum(products[1:], products[0]) if products else jnp.zeros(())


def measure(arrays: list[Array]) -> tuple[Array, Array]:
    """``1 / s`` and ``|d / s|^2`` of all arrays as one vector d; s is a power of two near its length, 1 if d is zero.

    s is taken from the length, unless its square is near the limits of the dtype. Then it is taken from the largest
    entry, at the cost of two more passes. Gradients treat s as a constant: any other scale gives the same result.
    """
    square = inner(arrays, arrays)
    limits = jnp.finfo(square.dtype)

    def usual() -> tuple[Array, Array]:
        inverse = 1.0 / power_of_two(jnp.sqrt(jax.lax.stop_gradient(square)))
        return inverse, square * inverse * inverse

    def by_largest() -> tuple[Array, Array]:
        inverse = 1.0 / power_of_two(largest(arrays))
        units = [a * inverse for a in arrays]
        return inverse, inner(units, units)

    return jax.lax.cond((square > limits.tiny**0.5) & (square < limits.max**0.5), usual, by_largest)


def largest(arrays: list[Array]) -> Array:
    """The largest absolute value of all entries, as a constant for gradients; float[]."""
    return jax.lax.stop_gradient(
        jnp.max(jnp.stack([jnp.zeros(()), *(jnp.max(jnp.abs(a), initial=0.0) for a in arrays)]))
    )


def power_of_two(size: Array) -> Array:
    """The power of two nearest to ``size``, among those with a normal number as inverse; 1 for 0."""
    limits = jnp.finfo(size.dtype)
    power = jax.lax.reduce_precision(jnp.minimum(size, limits.max / 8), limits.nexp, 0)
    return jnp.where(power > 0, power, jnp.ones_like(power))


def root(square: Array) -> Array:
    """The square root, with gradient 0 instead of infinity at 0."""
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, jnp.ones_like(square))), jnp.zeros_like(square))


def hypotenuse(a: Array, b: Array) -> Array:
    """``sqrt(a^2 + b^2)`` of scalars, which overflows only if the result does, with gradient 0 if both are 0."""
    scale = jax.lax.stop_gradient(jnp.maximum(jnp.abs(a), jnp.abs(b)))
    scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    return scale * root(jnp.square(a / scale) + jnp.square(b / scale))


def length(arrays: list[Array]) -> Array:
    """The Euclidean length of all arrays as one vector; float[]. It overflows only if the length itself does."""
    inverse, square = measure(arrays)
    return root(square) / inverse


def unit(arrays: list[Array]) -> list[Array]:
    """The vector over its length; a zero vector stays zero."""
    inverse, square = measure(arrays)
    size = jnp.where(square > 0, root(square), jnp.ones_like(square))
    return [a * inverse / size for a in arrays]
