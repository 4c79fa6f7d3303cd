"""Simplices of models: all mixtures of a few vertices, as FLOCO trains them.

A simplex is one pytree, whose leaves hold the V vertices on a leading axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.types import Array, Key, Params


def simplex(vertices: Sequence[Params]) -> Params:
    """The simplex of V >= 1 vertices, pytrees of one structure: a pytree with leaves [V, ...].

    Raises ``ValueError`` if there is no vertex.
    """
    check.require(len(vertices) > 0, "vertices", list(vertices), "at least one vertex")
    return jax.tree.map(lambda *rows: jnp.stack(rows), *vertices)


def simplex_point(vertices: Params, weights: Array) -> Params:
    """The mixture ``sum_v lambda_v Phi_v`` of the vertices.

    Args:
      vertices: Phi, leaves [V, ...].
      weights: lambda, float[V]; a point of the simplex if none is negative and they sum to 1.

    Returns: a pytree with leaves [...], in the dtypes of the vertices. Source: AsyncManifold (2025), section 5.1.1.
    """
    real = jnp.result_type(float)
    weights = weights.astype(real)
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf.astype(real), 1).astype(leaf.dtype), vertices)


def centroid(vertices: Params) -> Params:
    """The mean of the vertices, which is the model that FLOCO evaluates."""
    count = jax.tree.leaves(vertices)[0].shape[0]
    return simplex_point(vertices, jnp.full(count, 1.0 / count))


def sample_weights(key: Key, count: int) -> Array:
    """Weights of a point that is uniform in a simplex of ``count`` vertices: Dirichlet(1, ..., 1), float[V].

    The weights are independent exponential variables over their sum. The logarithm of an exponential variable is minus
    a Gumbel variable, so a softmax computes them and never divides by zero.
    """
    check.whole("count", count)
    return jax.nn.softmax(-jax.random.gumbel(key, (count,)))


def sample_simplex(key: Key, vertices: Params) -> Params:
    """A point drawn uniformly from the simplex; a pytree with leaves [...].

    Source: FLOCO, Grinwald et al. (2025): a client trains at sampled points of the whole simplex.
    """
    count = jax.tree.leaves(vertices)[0].shape[0]
    return simplex_point(vertices, sample_weights(key, count))
