"""Minibatches without a shuffle buffer: a keyed permutation evaluated one index at a time.

Every local epoch visits a client's examples in a fresh random order. Sorting random numbers would
need a buffer as long as the largest client and a sort a job; the *swap-or-not* network instead maps
position to example in O(1) memory, is a permutation of exactly ``size`` elements whatever ``size``
is, and vectorises over clients of different sizes.

Source: Hoang, Morris, Rogaway, "An enciphering scheme based on a card shuffle" (2012), figure 2.
In place of a cryptographic round function each round draws a fresh strongly universal hash bit,
``(a x + b) >> 31`` (Dietzfelbinger 1996). A round halves what an index still remembers of its place,
so 24 rounds serve shards of up to millions of examples.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.data.hashing import GOLDEN, mix
from fedjax_async.types import Array

ROUNDS = 24


def permute(seed: Array, epoch: Array, position: Array, size: Array) -> Array:
    """Where ``position`` lands in a random permutation of ``0 .. size-1``.

    Args: seed uint32[2]; epoch int32[]; position int32[B], each in [0, size); size int32[].
    Returns: int32[B]. For fixed (seed, epoch) the map is a bijection of ``range(size)``.
    """
    size = size.astype(jnp.uint32)
    x = position.astype(jnp.uint32)
    base = mix(seed[0] ^ mix(seed[1] + epoch.astype(jnp.uint32) * jnp.uint32(GOLDEN)))
    words = mix(base + jnp.arange(3 * ROUNDS, dtype=jnp.uint32) * jnp.uint32(GOLDEN))
    a, b, pivots = words[:ROUNDS], words[ROUNDS : 2 * ROUNDS], words[2 * ROUNDS :] % size

    def one_round(r: Array, x: Array) -> Array:
        partner = jnp.where(pivots[r] >= x, pivots[r] - x, pivots[r] + size - x)
        swap = (a[r] * jnp.maximum(x, partner) + b[r]) >> 31
        return jnp.where(swap == 1, partner, x)

    # A loop, not unrolled: XLA would fuse all rounds into one expression, which doubles with every use of x.
    return jax.lax.fori_loop(0, ROUNDS, one_round, x).astype(jnp.int32)


def batch(seed: Array, k: Array, size: Array, batch_size: int) -> tuple[Array, Array]:
    """Examples of local step ``k``: positions int32[B] within the client's shard and their mask bool[B].

    An epoch has ``ceil(size / batch_size)`` steps; its last batch holds the remainder and masks the
    rest, so that a masked mean is unbiased. Epochs follow each other with fresh permutations.
    """
    per_epoch = (size + batch_size - 1) // batch_size
    epoch, within = k // per_epoch, k % per_epoch
    position = within * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    mask = position < size
    return permute(seed, epoch, jnp.where(mask, position, 0), size), mask


def seed_of(key: Array) -> Array:
    """Two 32-bit words of a JAX key, the seed of :func:`permute`; uint32[2]."""
    words = jax.random.key_data(key)
    return jnp.stack([words[0], words[-1]])
