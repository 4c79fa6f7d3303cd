"""A client's examples: random minibatches for training, and means over all of them.

Every local epoch visits a client's examples in a new random order, without a shuffle buffer: a keyed permutation is
evaluated one index at a time. Sorting random numbers would need a buffer as long as the largest client, and a sort for
each job. The *swap-or-not* network maps a position to an example in O(1) memory. It is a permutation of exactly
``size`` elements for every ``size``, and it vectorises over clients of different sizes.

Source: Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle" (2012), figure 2. Deviation: instead of
a cryptographic function, each pass (the paper's round) draws a new strongly universal hash bit, ``(a x + b) >> 31``
(Dietzfelbinger 1996). A pass halves the dependence of an index on its first position, so 24 passes are enough for
shards of millions of examples.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.base.hashing import GOLDEN, mix
from fedjax_async.types import Array, ClientData, Model, Params, Tree

PASSES = 24


def permute(seed: Array, epoch: Array, position: Array, size: Array) -> Array:
    """The value of a random permutation of ``0 .. size-1`` at ``position``.

    Args: seed uint32[2]; epoch int32[]; position int32[B], each in [0, size); size int32[].
    Returns: int32[B]. For fixed (seed, epoch) the map is a bijection of ``range(size)``.
    """
    size = size.astype(jnp.uint32)
    x = position.astype(jnp.uint32)
    base = mix(seed[0] ^ mix(seed[1] + epoch.astype(jnp.uint32) * jnp.uint32(GOLDEN)))
    words = mix(base + jnp.arange(3 * PASSES, dtype=jnp.uint32) * jnp.uint32(GOLDEN))
    a, b, pivots = words[:PASSES], words[PASSES : 2 * PASSES], words[2 * PASSES :] % size

    def one_pass(r: Array, x: Array) -> Array:
        partner = jnp.where(pivots[r] >= x, pivots[r] - x, pivots[r] + size - x)
        swap = (a[r] * jnp.maximum(x, partner) + b[r]) >> 31
        return jnp.where(swap == 1, partner, x)

    # XLA:CPU would fuse unrolled passes into one expression, which doubles with every use of x. Elsewhere they are one
    # kernel, and a loop would be a launch or more for each pass of each local step.
    unroll = 1 if jax.default_backend() == "cpu" else PASSES
    return jax.lax.fori_loop(0, PASSES, one_pass, x, unroll=unroll).astype(jnp.int32)


def batch(seed: Array, k: Array, size: Array, batch_size: int) -> tuple[Array, Array]:
    """Examples of local step ``k``: positions int32[B] within the client's shard and their mask bool[B].

    An epoch has ``ceil(size / batch_size)`` steps. Its last batch holds the remaining examples; the mask is false for
    the unused rows, so that a masked mean is unbiased. Every epoch has a new permutation.
    """
    per_epoch = (size + batch_size - 1) // batch_size
    epoch, within = k // per_epoch, k % per_epoch
    position = within * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    mask = position < size
    return permute(seed, epoch, jnp.where(mask, position, 0), size), mask


def stored_batch(k: Array, size: Array, batch_size: int) -> tuple[Array, Array]:
    """As :func:`batch`, but in stored order: all epochs are the same, and the last partial batch is left out.

    An epoch has ``size // batch_size`` steps. A client with fewer examples than B takes all of them in every step.
    """
    per_epoch = jnp.maximum(1, size // batch_size)
    position = k % per_epoch * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    mask = position < size
    return jnp.where(mask, position, 0), mask


def seed_of(key: Array) -> Array:
    """Two 32-bit words of a JAX key, the seed of :func:`permute`; uint32[2]."""
    words = jax.random.key_data(key)
    return jnp.stack([words[0], words[-1]])


def rows_at_a_time(total: int, parts: int) -> int:
    """The rows of a part that :func:`part_mean` should read at a time, for ``parts`` with ``total`` rows together.

    The power of two at or above the mean part, from 32 to 256: a client with 60 examples costs 64 rows, not 256.
    """
    mean = -(-total // max(parts, 1))
    return max(32, min(256, 1 << max(mean - 1, 0).bit_length()))


def part_mean(measure: Callable[[Array, Array], Tree], part: ClientData, batch_size: int = 256) -> Tree:
    """Mean of ``measure(x, y)`` (a pytree of ``[B, ...]``) over all rows of ``part``; NaN for an empty part.

    The rows are read ``batch_size`` at a time. The last batch is filled up with the first rows, which are not counted
    again; if the part is shorter, with all of them in turn, so that a ``measure`` that normalises by its batch sees the
    part's own moments. ``part.size`` may be traced.
    """
    check.whole("batch_size", batch_size)
    real = jnp.result_type(float)
    offset = jnp.arange(batch_size, dtype=jnp.int32)

    def measured(start: Array) -> Tree:
        position = start + offset
        mask = position < part.size
        rows = part.order[part.offset + position % jnp.maximum(part.size, 1)]

        def total_of(leaf: Array) -> Array:
            used = mask.reshape(batch_size, *(1 for _ in leaf.shape[1:]))
            return jnp.sum(jnp.where(used, leaf, 0).astype(real), axis=0)

        return jax.tree.map(total_of, measure(part.x[rows], part.y[rows]))

    zero = jax.tree.map(lambda total: jnp.zeros(total.shape, real), jax.eval_shape(measured, jnp.int32(0)))
    batches = (part.size + batch_size - 1) // batch_size
    total = tree.loop(
        "batches", 0, batches, lambda i, total: jax.tree.map(jnp.add, total, measured(jnp.int32(batch_size) * i)), zero
    )
    return jax.tree.map(lambda leaf: leaf / part.size.astype(real), total)


def mean_loss(model: Model, params: Params, part: ClientData, batch_size: int = 256) -> Array:
    """Mean loss of ``params`` over all examples of ``part``; float[], NaN for an empty part.

    ``model`` receives the rows as the data store them. If they need decoding, pass
    ``models.decoded(model, data.decode)``.
    """
    return part_mean(lambda x, y: model.loss(model.apply(params, x), y), part, batch_size)
