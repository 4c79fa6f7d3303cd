"""Random numbers by hashing: uniform, normal and nearly independent; the same in any order and any batch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import hashing

ROOT = (jnp.uint32(1), jnp.uint32(2))


def unmixed(x):
    """The inverse of ``mix``: shifts are undone, factors are replaced by their inverses modulo 2^32."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(0x7FEB352D, -1, 2**32) % 2**32
    return x ^ (x >> 16)


def test_mixing_can_be_undone():
    words = np.random.default_rng(0).integers(2**32, size=100_000, dtype=np.uint64)
    mixed = np.asarray(hashing.mix(jnp.asarray(words, jnp.uint32))).astype(np.uint64)
    np.testing.assert_array_equal(unmixed(mixed), words)


def test_normal_numbers_have_the_moments_of_the_normal_distribution():
    """Exactly, over all words: they depend only on the sum of four bytes, and its distribution is a convolution."""
    byte = np.full(256, 1 / 256)
    weight = np.convolve(np.convolve(byte, byte), np.convolve(byte, byte))
    sums = np.arange(1021)
    bytes_ = np.stack([np.clip(sums - 255 * k, 0, 255) for k in range(4)])
    value = np.asarray(hashing.normal(jnp.asarray((bytes_ << (8 * np.arange(4)[:, None])).sum(axis=0), jnp.uint32)))
    value = value.astype(np.float64)
    moments = [weight @ value**k for k in range(1, 5)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=2e-6)
    exact = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in value])
    assert np.abs(np.cumsum(weight) - weight / 2 - exact).max() < 0.0021
    assert np.all(np.diff(value) > 0) and value.max() < 4.05


def test_uniform_numbers_fill_the_unit_interval():
    ends = hashing.uniform(jnp.array([0, 2**32 - 1, 2**31], jnp.uint32))
    np.testing.assert_array_equal(ends, np.float32([0, 1 - 2**-24, 0.5]))


def test_children_differ_and_do_not_know_each_other():
    """A table of 300 examples by 64 numbers for each of 20 clients: no row, column or neighbour predicts another."""

    def row(client, position):
        return hashing.normal(hashing.words(hashing.fold(hashing.fold(ROOT, client), position), 64))

    clients, positions = jnp.arange(20, dtype=jnp.int32), jnp.arange(300, dtype=jnp.int32)
    table = np.asarray(jax.jit(jax.vmap(jax.vmap(row, (None, 0)), (0, None)))(clients, positions), np.float64)
    flat = table.reshape(-1)
    assert abs(flat.mean()) < 4 / math.sqrt(flat.size)
    for axis in range(3):
        for lag in (1, 2, 3, 7):
            along = np.moveaxis(table, axis, 0)
            a, b = along[lag:], along[:-lag]
            assert abs(np.mean(a * b)) < 4.5 / math.sqrt(a.size), (axis, lag)
    assert len(np.unique(table[..., :4].reshape(-1, 4), axis=0)) == 6000


def test_children_of_one_parent_are_all_different():
    numbers = jnp.arange(100_000, dtype=jnp.int32)
    first, _ = jax.vmap(lambda n: hashing.fold(ROOT, n))(numbers)
    assert len(np.unique(first)) == len(numbers)
