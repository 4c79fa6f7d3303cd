"""Products that sum over many positions and have few results: weight gradients of convolutions.

A GPU gives each block of results to one of its multiprocessors. The gradient of a 5 x 5 kernel from 1 to 6 channels is
one block a client, whose sum over 100,000 positions keeps one of 132 multiprocessors busy. In parts, which are added
afterwards, it keeps as many busy as there are parts. On a CPU one core trains a client, and a sum is taken whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_async.types import Array

POSITIONS = 2048  # of a part, at least
RESULTS = 2**15  # a product with more keeps a GPU busy as it is


def parts_of(positions: int, results: int) -> int:
    """How many parts a sum over so many positions has, a divisor; 1 on a CPU, and for a product with many results.

    It depends on the shapes alone, neither on the device nor on a measurement, so that the same bits come out.
    """
    if jax.default_backend() == "cpu" or results > RESULTS:
        return 1
    most = max(1, positions // POSITIONS)
    return next(parts for parts in range(most, 0, -1) if positions % parts == 0)


def product(rows: Array, kernel: Array) -> Array:
    """``rows [M, K] @ kernel [K, N]``, the gradient of whose kernel is summed in parts."""
    (positions, k), n = rows.shape, kernel.shape[1]
    parts = parts_of(positions, k * n)
    if parts == 1:
        return rows @ kernel
    # each part has a copy of the kernel, and the gradient of the copies' source is the sum of theirs
    copies = jnp.broadcast_to(kernel[None], (parts, k, n))
    out = lax.dot_general(rows.reshape(parts, -1, k), copies, (((2,), (1,)), ((0,), (0,))))
    return out.reshape(positions, n)


def summed_over_positions(left: Array, right: Array) -> Array:
    """``left [R, M] @ right [K, M].T``, in parts."""
    (r, positions), k = left.shape, right.shape[0]
    parts = parts_of(positions, r * k)
    if parts == 1:
        return lax.dot_general(left, right, (((1,), (1,)), ((), ())))
    one, other = (each.reshape(-1, parts, positions // parts) for each in (left, right))
    return lax.dot_general(one, other, (((2,), (2,)), ((1,), (1,)))).sum(axis=0)
