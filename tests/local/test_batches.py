"""The minibatch shuffle: exact permutations, the right distribution, and complete epochs."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.local import batch, permute
from fedjax_async.local.batches import part_mean, seed_of
from fedjax_async.types import ClientData
from tests.local import textbook

LONGEST = 300
words = st.integers(0, 2**32 - 1)
_permute = jax.jit(permute)


def permutation(seed, epoch, size):
    """The whole permutation of ``size`` <= LONGEST elements, from one compiled program."""
    position = jnp.minimum(jnp.arange(LONGEST, dtype=jnp.int32), size - 1)
    return np.asarray(_permute(jnp.asarray(seed, jnp.uint32), jnp.int32(epoch), position, jnp.int32(size)))[:size]


def test_permute_is_a_bijection_of_a_large_shard():
    positions = jnp.arange(60_000, dtype=jnp.int32)
    found = _permute(jnp.array([1, 2], jnp.uint32), jnp.int32(0), positions, jnp.int32(60_000))
    np.testing.assert_array_equal(np.sort(found), positions)


@settings(max_examples=40)
@given(seed=st.tuples(words, words), epoch=st.integers(0, 2**31 - 1), size=st.integers(1, LONGEST))
def test_permute_equals_swap_or_not_in_python_integers(seed, epoch, size):
    assert permutation(seed, epoch, size).tolist() == textbook.swap_or_not(seed, epoch, size)


def test_off_a_cpu_the_permutation_is_the_same_without_a_loop(monkeypatch):
    given = jnp.array([3, 5], jnp.uint32), jnp.int32(2), jnp.arange(40, dtype=jnp.int32), jnp.int32(41)
    assert "stablehlo.while" in jax.jit(partial(permute)).lower(*given).as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "stablehlo.while" not in jax.jit(partial(permute)).lower(*given).as_text()
    with jax.disable_jit():
        assert permute(*given).tolist() == textbook.swap_or_not((3, 5), 2, 41)[:40]


def chi_square(counts):
    """Pearson's statistic against equal cells, in standard deviations above its mean."""
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


DRAWS = 20_000
_many = jax.jit(jax.vmap(permute, in_axes=(0, 0, None, None)))


@cache
def many(size, epochs=False, positions=None):
    """Permutations [DRAWS, size]: of random seeds in epoch 0, or of one seed in successive epochs."""
    seeds, epoch = np.full((DRAWS, 2), 12345), np.arange(DRAWS) * epochs
    if not epochs:
        seeds = jax.vmap(seed_of)(jax.random.split(jax.random.key(7), DRAWS))
    position = jnp.arange(size if positions is None else positions, dtype=jnp.int32)
    return np.asarray(_many(jnp.asarray(seeds, jnp.uint32), jnp.asarray(epoch, jnp.int32), position, jnp.int32(size)))


@pytest.mark.parametrize("epochs", [False, True], ids=["seeds", "epochs"])
@pytest.mark.parametrize("size", [2, 3, 4, 10])
def test_permutations_are_uniform(size, epochs):
    """The image of each position, pairs of the first and last image, and for small sizes whole permutations."""
    found = many(size, epochs)
    for position in range(size):
        assert chi_square(np.bincount(found[:, position], minlength=size)) < 4
    pairs = np.bincount(found[:, 0] * size + found[:, -1], minlength=size * size).reshape(size, size)
    assert np.all(np.diag(pairs) == 0) and chi_square(pairs[~np.eye(size, dtype=bool)]) < 4
    if size <= 4:
        codes = np.unique(found @ size ** np.arange(size), return_counts=True)[1]
        assert codes.size == math.factorial(size) and chi_square(codes) < 4
    if epochs:  # successive ones are independent
        after = found[:-1:2, 0] * size + found[1::2, 0]
        assert chi_square(np.bincount(after, minlength=size * size)) < 4


@pytest.mark.parametrize("epochs", [False, True], ids=["seeds", "epochs"])
def test_the_first_batch_is_a_fair_sample_of_a_large_shard(epochs):
    """Neighbouring positions map to independent values: twelfths of a shard of 60,000."""
    first, second = (many(60_000, epochs, positions=2) // 5_000).T
    for cells, size in ((first, 12), (second, 12), (12 * first + second, 144)):
        assert chi_square(np.bincount(cells, minlength=size)) < 4


def test_the_chi_square_test_can_fail():
    biased = np.random.default_rng(0).choice(10, DRAWS, p=[0.11, *[0.89 / 9] * 9])
    assert chi_square(np.bincount(biased, minlength=10)) > 4


MOST_STEPS = 130
_batches = jax.jit(jax.vmap(batch, in_axes=(None, 0, None, None)), static_argnums=3)


@pytest.mark.parametrize("batch_size", [1, 7, 200])
@settings(max_examples=25)
@given(seed=st.tuples(words, words), size=st.integers(1, 64))
def test_every_epoch_is_cut_from_its_permutation(batch_size, seed, size):
    given = jnp.asarray(seed, jnp.uint32), jnp.arange(MOST_STEPS, dtype=jnp.int32), jnp.int32(size), batch_size
    position, mask = map(np.asarray, _batches(*given))
    per_epoch = -(-size // batch_size)
    assert position.shape == mask.shape == (MOST_STEPS, batch_size)
    assert position.min() >= 0 and position.max() < size
    for epoch in range(2):
        rows = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        full, rest = divmod(size, batch_size)
        np.testing.assert_array_equal(mask[rows].sum(axis=1), [batch_size] * full + [rest] * (rest > 0))
        np.testing.assert_array_equal(position[rows][mask[rows]], textbook.swap_or_not(seed, epoch, size))


def test_seed_of_keeps_two_words_of_any_kind_of_key():
    for impl in ("threefry2x32", "rbg"):
        keys = jax.random.split(jax.random.key(3, impl=impl), 50)
        seeds = np.asarray(jax.vmap(seed_of)(keys))
        assert seeds.shape == (50, 2) and seeds.dtype == np.uint32
        assert len(np.unique(seeds, axis=0)) == 50


def test_a_last_batch_is_filled_with_all_rows_for_measures_that_look_at_their_batch():
    x = jnp.asarray([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0])
    order = jnp.array([1, 2, 3, 4, 5, 0, 6, 7], jnp.int32)
    part = ClientData(x, x, order, jnp.int32(1), jnp.int32(5))  # 2, 3, 4, 5, 9

    def squared(x, y):
        return jnp.square(y - x.mean())

    found = [float(part_mean(squared, part, batch_size)) for batch_size in (5, 10, 20)]
    np.testing.assert_allclose(found, np.var([2.0, 3.0, 4.0, 5.0, 9.0]), rtol=1e-6)
    second = 9 - np.mean([9, 2, 3, 4])  # the last row is filled up with the first ones
    first = np.square(np.array([2.0, 3.0, 4.0, 5.0]) - 3.5).sum()
    np.testing.assert_allclose(part_mean(squared, part, 4), (first + second**2) / 5, rtol=1e-6)
