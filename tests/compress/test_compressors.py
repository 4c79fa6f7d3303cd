"""Compressors: compared with NumPy, and with the theory of their errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import compress
from fedjax_async.base import registry
from fedjax_async.compress import COMPRESSORS, Sparse, chain, levels_of, on_tree, qsgd, scaled_sign, topk, values_bits
from fedjax_async.geometry import GROUPINGS
from tests.compress import textbook
from tests.compress.programs import compiled
from tests.refusals import refusals

KEY = jax.random.key(5)
SIZES = [0, 1, 32, 101]
RATIOS = [(0, 0.3), (1, 0.01), (32, 0.3), (64, 0.97), (65, 0.97), (101, 0.01)]  # sizes and ratios
MANTISSAS = [(0, 3), (1, 0), (32, 7), (101, 0), (101, 3), (101, 7)]
kinds, seeds = st.sampled_from(list(textbook.MAKERS)), st.integers(0, 2**32 - 1)


def passed(name, x, **options):
    """The payload and x_hat."""
    return compiled(COMPRESSORS[name], **options)(KEY, x)[:2]


@functools.cache
def many(compressor, count):
    """``x -> x_hat`` under ``count`` keys."""
    keys = jax.random.split(KEY, count)
    return jax.jit(lambda x: jax.vmap(lambda key: compressor.decompress(compressor.compress(key, x)))(keys))


# --- against NumPy ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(kind=kinds, seed=seeds, case=st.sampled_from(RATIOS))
def test_topk_keeps_the_largest_and_of_equals_the_first(kind, seed, case):
    size, ratio = case
    x = textbook.vector(kind, size, seed)
    payload, x_hat = passed("topk", x, ratio=ratio)
    k = int(np.ceil(ratio * size))
    np.testing.assert_array_equal(payload.index, textbook.largest(x, k))
    np.testing.assert_array_equal(x_hat, textbook.topk(x, k))
    assert payload.index.shape == (k,) and x_hat.dtype == jnp.float32


@pytest.mark.parametrize("kind", ["gaussian", "ties", "zeros"])
@pytest.mark.parametrize("ratio", [0.00001, 0.03, 0.6])
def test_topk_of_long_vectors(kind, ratio):
    """Long enough for wide digits, and with so many equal numbers that they fill many words."""
    x = textbook.vector(kind, 70_001)
    payload, _ = passed("topk", x, ratio=ratio)
    np.testing.assert_array_equal(payload.index, textbook.largest(x, len(payload.index)))


@pytest.mark.slow_cases("float64")
@pytest.mark.float64
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_topk_in_other_float_types(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=501)).astype(dtype)
    x = x.at[:4].set(jnp.array([1e-7, -0.0, 6.1e4, 0]).astype(dtype))
    for name in ("topk", "topk_fast"):
        payload, x_hat = passed(name, x, ratio=0.9)
        assert x_hat.dtype == dtype and payload.values.values.dtype == dtype
        if name == "topk":
            np.testing.assert_array_equal(payload.index, textbook.largest(x.astype(float), 451))


def test_k_is_the_ceiling_but_for_rounding():
    for ratio, size, k in [(0.07, 100, 7), (0.1, 1000, 100), (0.1, 1001, 101), (0.03, 1_000_000, 30_000), (1e-9, 5, 1)]:
        x = jax.ShapeDtypeStruct((size,), jnp.float32)
        assert jax.eval_shape(topk(ratio=ratio).compress, KEY, x).index.shape == (k,)


@settings(max_examples=40)
@given(kind=kinds, seed=seeds, case=st.sampled_from(MANTISSAS))
def test_fast_topk_is_topk_up_to_its_stated_factor(kind, seed, case):
    size, mantissa = case
    x = textbook.vector(kind, size, seed)
    payload, x_hat = passed("topk_fast", x, ratio=0.2, mantissa=mantissa)
    k, eps = int(np.ceil(0.2 * size)), 2.0**-mantissa
    index = np.asarray(payload.index)
    assert len(index) == k and (np.diff(index) > 0).all()
    kept, left = np.abs(x[index]), np.abs(np.delete(x, index))
    if 0 < k < size:
        assert left.max() <= (1 + eps) * kept.min()
    error = textbook.square(x - np.asarray(x_hat))
    assert error <= (1 + eps) ** 2 * textbook.square(x - textbook.topk(x, k)) * (1 + 1e-12)


def test_fast_topk_does_lose_something():
    x = textbook.vector("gaussian", 1000)
    index = passed("topk_fast", x, ratio=0.1, mantissa=0)[0].index
    assert 0 < len(np.setdiff1d(textbook.largest(x, 100), index)) < 60


@settings(max_examples=30)
@given(kind=kinds, seed=seeds, size=st.sampled_from(SIZES))
def test_signs(kind, seed, size):
    x = textbook.vector(kind, size, seed)
    np.testing.assert_array_equal(passed("sign", x)[1], textbook.sign(x))
    np.testing.assert_allclose(passed("scaled_sign", x)[1], textbook.scaled_sign(x), rtol=1e-5)


@jax.jit
def quantised(key, x, levels):
    payload = qsgd(levels=levels).compress(key, x)
    return payload, qsgd().decompress(payload)


@settings(max_examples=40)
@given(kind=kinds, seed=seeds, size=st.sampled_from(SIZES), levels=st.sampled_from([1, 7, 127, 32767]))
def test_qsgd_rounds_up_or_down(kind, seed, size, levels):
    x = textbook.vector(kind, size, seed)
    payload, x_hat = quantised(jax.random.key(seed), x, levels)
    norm = np.sqrt(textbook.square(x))
    np.testing.assert_allclose(payload.norm, norm, rtol=1e-5)
    share = np.abs(x.astype(np.float64)) / (norm or 1) * levels
    level = np.asarray(payload.level, np.float64)
    assert (np.abs(np.abs(level) - share) <= 1 + 1e-5 * levels).all() and (np.abs(level) <= levels).all()
    assert (level * x >= 0).all()
    np.testing.assert_allclose(x_hat, norm * level / levels, rtol=1e-5)


EXTREMES = np.float32([0, -0.0, 1e-45, 3.4e38, -3.4e38, 65519, 65520])


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_cast_rounds_to_nearest_and_saturates_and_the_identity_changes_no_bit(dtype, rounding):
    x = np.concatenate([textbook.vector("heavy tails", 200), EXTREMES])
    payload, x_hat = passed("cast", x, dtype=dtype)
    most = float(jnp.finfo(dtype).max)
    np.testing.assert_array_equal(x_hat, np.clip(x, -most, most).astype(jnp.dtype(dtype)).astype(np.float32))
    assert payload.values.dtype == dtype and np.isfinite(x_hat).all()
    np.testing.assert_allclose(x_hat[:200], x[:200], rtol=rounding, atol=1e-7)
    assert np.asarray(passed("identity", x)[1]).tobytes() == x.tobytes()


# --- theory -----------------------------------------------------------------------------------


def test_the_composition_is_scaled_by_its_variance_so_that_it_contracts():
    """Basu et al. (2019), lemmas 1 and 2: ``1 / (1 + beta)`` times top-k followed by QSGD."""
    x, steps = jnp.asarray(textbook.vector("heavy tails", 200)), [1, 7, 127]

    @jax.jit
    @jax.vmap
    def swept(levels):
        made = [compress.topk_qsgd(ratio=0.2, levels=levels, scaled=scaled) for scaled in (True, False)]
        each = [*made, chain(topk(ratio=0.2), qsgd(levels=levels))]
        return [one.decompress(one.compress(KEY, x)) for one in each]

    for levels, scaled, plain, alone in zip(steps, *swept(jnp.array(steps))):
        np.testing.assert_allclose(scaled, plain / (1 + textbook.beta(40, levels)), rtol=1e-5)
        np.testing.assert_array_equal(plain, alone)


# levels, entries of a bucket, norm
HOW = [(1, None, "euclidean"), (7, None, "euclidean"), (127, None, "euclidean"), (3, 16, "euclidean"), (3, 25, "max"),
       (1, None, "max")]  # fmt: skip
QUANTISERS = {how: qsgd(levels=how[0], bucket=how[1], norm=how[2]) for how in HOW}


@pytest.mark.parametrize("how", QUANTISERS, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "heavy tails", "one spike"])
def test_qsgd_is_unbiased_and_its_variance_bounded(how, kind):
    levels, bucket, norm = how
    x = textbook.vector(kind, 60)
    variance, bound = [], 0.0
    for part in (x[low : low + (bucket or 60)].astype(np.float64) for low in range(0, 60, bucket or 60)):
        unit = np.abs(part).max() if norm == "max" else np.sqrt(textbook.square(part))
        share = np.abs(part) / (unit or 1) * levels
        variance.append((unit / levels) ** 2 * (share % 1) * (1 - share % 1))
        bound += textbook.beta(bucket or 60, levels, norm) * textbook.square(part)
    deviation = np.sqrt(np.concatenate(variance) / 4000)
    outcomes = np.asarray(many(QUANTISERS[how], 4000)(x), np.float64)
    assert (np.abs(outcomes.mean(axis=0) - x) <= 5 * deviation + 1e-5 * np.abs(x).max()).all()
    exact = sum(map(np.sum, variance))  # of independent roundings
    errors = np.sum((outcomes - x) ** 2, axis=1)
    deviation = errors.std() / 4000**0.5
    assert abs(errors.mean() - exact) <= 5 * deviation + 1e-6 * textbook.square(x)
    assert errors.mean() <= bound + 4 * deviation


def test_buckets_are_vectors_of_their_own_and_one_bucket_is_the_whole():
    x = textbook.vector("gaussian", 50)
    whole, alone = (passed("qsgd", x, levels=7, bucket=b)[0] for b in (None, 50))
    np.testing.assert_array_equal(whole.level, alone.level)
    assert alone.norm.shape == (1,) and alone.norm[0] == whole.norm
    found = passed("qsgd", x, levels=7, bucket=20, norm="max")[0]
    np.testing.assert_array_equal(found.norm, [np.abs(x[low : low + 20]).max() for low in (0, 20, 40)])
    assert np.abs(found.level).max() == 7, "the largest entry of a bucket keeps its value"


def test_randk_is_unbiased_and_every_entry_equally_likely():
    x, count, k = textbook.vector("gaussian", 50), 4000, 10
    outcomes = np.asarray(many(compress.randk(ratio=0.2), count)(x), np.float64)
    chosen = outcomes != 0
    assert (chosen.sum(axis=1) == k).all()
    expected = count * k / 50
    chi_square = np.sum((chosen.sum(axis=0) - expected) ** 2) / (expected * (1 - k / 50)) * 49 / 50
    assert 20 < chi_square < 90  # 49 degrees of freedom: a probability of less than 1e-3 on either side
    np.testing.assert_allclose(outcomes[chosen], np.broadcast_to(5 * x, outcomes.shape)[chosen], rtol=1e-6)
    together = np.corrcoef(chosen[:, :10].T) + 1 / 49  # a uniform subset has correlations of -1/49
    assert np.abs(together[~np.eye(10, dtype=bool)]).max() < 5 / count**0.5
    biased, unbiased = (np.asarray(passed("randk", x, ratio=0.2, unbiased=way)[1]) for way in (False, True))
    np.testing.assert_allclose(biased, unbiased * k / 50, rtol=1e-6)


ERRORS = [("qsgd:levels=1", 500), ("qsgd", 500), ("qsgd", 8000), ("qsgd:levels=127", 8000), ("qsgd:norm=max", 500),
          ("qsgd:norm=max", 8000), ("qsgd:bucket=64", 8000), ("randk:ratio=0.2", 500), ("randk", 8000)]  # fmt: skip


@pytest.mark.parametrize(("spec", "size"), ERRORS)
def test_the_error_of_normal_numbers_is_about_what_a_compressor_says(spec, size):
    compressor = registry.spec("compress", COMPRESSORS, spec).make()
    x = 1e-3 * jax.random.normal(jax.random.key(3), (size,))
    decoded = jax.jit(lambda key: compressor.decompress(compressor.compress(key, x)))(KEY)
    assert compressor.error(size) == pytest.approx(float(jnp.sum((decoded - x) ** 2) / jnp.sum(x**2)), rel=0.4)


# --- the contract -----------------------------------------------------------------------------


def powers(count, size):
    """Rows whose sums and squares are exact in float32, in any order."""
    rows = np.random.default_rng(1).integers(-8, 9, size=(count, size)).astype(np.float32)
    rows[:, 0] = 8
    return rows


@pytest.mark.slow_cases("topk", "topk_qsgd", "topk_fast", "centroids", "randk")
@pytest.mark.parametrize("name", COMPRESSORS)
def test_batched_compiled_and_one_at_a_time_are_the_same(name):
    compressor, rows, keys = COMPRESSORS[name](), powers(5, 77), jax.random.split(KEY, 5)

    def everything(key, x):
        payload = compressor.compress(key, x)
        return payload, compressor.decompress(payload), compressor.bits(payload), values_bits(payload)

    batched, single = jax.jit(jax.vmap(everything))(keys, rows), jax.jit(everything)
    assert batched[1].shape == rows.shape and batched[2].dtype == jnp.int32
    for i in range(5):
        plain = [everything(keys[i], rows[i])] if i == 0 else []
        for one in (*plain, single(keys[i], rows[i])):
            assert jax.tree.structure(one) == jax.tree.structure(batched)
            for many_leaf, leaf in zip(jax.tree.leaves(batched), jax.tree.leaves(one)):
                assert many_leaf.dtype == leaf.dtype
                np.testing.assert_allclose(many_leaf[i], leaf, rtol=3e-7 if leaf.dtype == jnp.float32 else 0)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_not_finite_can_be_refused_and_extremes_stay_finite(name):
    for bad, index in itertools.product([np.nan, np.inf, -np.inf], [0, 999]):
        x = powers(1, 1000)[0]
        x[index] = bad
        payload, x_hat = passed(name, x)
        assert not np.isfinite(x_hat).all()
        with pytest.raises(ValueError, match="must be finite"):
            compress.encode(payload)
    for x in [3.4e38], [-3.4e38, 1e-45, 1e-45], [2e38, -2e38, 1e38], [1e-45, -1e-45, 0], [1e-40] * 3:
        factor = len(x) if name == "randk" else 1  # D/k
        assert np.isfinite(passed(name, np.float32(x) / np.float32(factor))[1]).all()


def test_values_only_accounting_is_the_papers_and_levels_may_be_traced():
    """As the AsynFLC paper counts: 10 times fewer bits for top-10 %, 32 for signs, 32/b for b bits; values only."""
    x = jnp.asarray(textbook.vector("gaussian", 1000))

    def share(compressor):
        return 32_000 / int(jax.jit(lambda x: values_bits(compressor.compress(KEY, x)))(x))

    assert share(topk(ratio=0.1)) == 10 and share(compress.sign()) == share(scaled_sign()) == 32
    assert share(compress.topk_qsgd(ratio=0.1, levels=1)) == pytest.approx(160)
    assert int(compress.bits(passed("topk", x, ratio=0.1)[0])) > 3200  # the encoded message is longer
    steps = [levels_of(width) for width in (2, 4, 8)]
    assert steps == [1, 7, 127] and [share(qsgd(levels=s)) for s in steps] == [16, 8, 4]
    swept = jax.jit(jax.vmap(lambda s: qsgd(levels=s).compress(KEY, x)))(jnp.array(steps))
    np.testing.assert_array_equal(jax.vmap(values_bits)(swept), [2000, 4000, 8000])
    np.testing.assert_array_equal(swept.level, [passed("qsgd", x, levels=s)[0].level for s in steps])


# --- composition and trees --------------------------------------------------------------------


def test_a_chain_compresses_what_is_kept():
    x = textbook.vector("gaussian", 90)
    kept = textbook.topk(x, 18)
    x_hat = np.asarray(many(chain(topk(ratio=0.2), scaled_sign()), 1)(x))[0]
    mean = np.abs(kept[kept != 0]).mean()
    np.testing.assert_allclose(x_hat, np.where(kept != 0, mean * np.sign(kept), 0), rtol=1e-5)
    thrice = chain(compress.randk(ratio=0.5, unbiased=False), chain(topk(ratio=0.5), compress.cast()))
    assert isinstance(jax.eval_shape(thrice.compress, KEY, x).values, Sparse)
    assert np.count_nonzero(many(thrice, 1)(x)) == 23
    with pytest.raises(ValueError, match="sparsifier = 'Signs'"):
        chain(compress.sign(), topk()).compress(KEY, x)


def test_the_parts_of_a_chain_draw_with_keys_of_their_own():
    def drawn(key, x):
        keys = [key]

        def noted(inner):
            return inner._replace(compress=lambda key, x: (keys.append(key), inner.compress(key, x))[1])

        chain(noted(compress.randk(ratio=0.5)), noted(qsgd())).compress(key, x)
        return jax.random.key_data(jnp.stack(keys))

    keys = jax.jit(drawn)(KEY, textbook.vector("gaussian", 90))
    assert len(keys) == len(np.unique(keys, axis=0)) == 3


TREE = {
    "a": {"kernel": np.arange(-6, 6, dtype=np.float32).reshape(3, 4), "bias": np.float32([9, -9])},
    "b": {"kernel": 100 * np.ones((2, 2), np.float32), "empty": np.zeros((0, 3), np.float32)},
    "c": np.float32(0.5),
}  # fmt: skip
GROUPS = {"whole": ["abc"], "layer": ["a", "b", "c"], "tensor": ["a/bias", "a/kernel", "b/empty", "b/kernel", "c"]}


def named(tree):
    """Leaves as vectors, by their paths."""
    return {"/".join(part.key for part in path): np.ravel(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize("per", GROUPINGS)
def test_trees_are_compressed_group_by_group_and_arrive(per):
    tree = on_tree(scaled_sign(), TREE, group=GROUPINGS[per])  # by the mean magnitude of a group
    payload = jax.jit(tree.compress)(KEY, TREE)
    data = compress.encode(payload)
    assert len(payload) == len(GROUPS[per]) and int(tree.bits(payload)) == 8 * len(data)
    out = tree.decompress(payload)
    jax.tree.map(np.testing.assert_array_equal, tree.decompress(compress.decode(data)), out)
    assert jax.tree.map(np.shape, out) == jax.tree.map(np.shape, TREE)
    leaves, found = named(TREE), named(out)
    for group in GROUPS[per]:
        mine = [name for name in leaves if name == group or name.startswith(f"{group}/") or per == "whole"]
        x = np.concatenate([leaves[name] for name in mine])
        np.testing.assert_allclose(np.concatenate([found[name] for name in mine]), textbook.scaled_sign(x), rtol=1e-6)


def test_leaves_of_several_types_and_groups_with_keys_of_their_own():
    tree = {"a": jnp.ones(40, jnp.bfloat16), "b": jnp.full(40, 0.5)}
    whole = on_tree(qsgd(levels=1), tree)
    out = jax.jit(lambda tree: whole.decompress(whole.compress(KEY, tree)))(tree)
    assert out["a"].dtype == jnp.bfloat16 and out["b"].dtype == jnp.float32
    each = jax.jit(on_tree(qsgd(levels=1), tree, group=GROUPINGS["tensor"]).compress)(KEY, tree)
    assert (np.asarray(each[0].level) != np.asarray(each[1].level)).any()
    together = jax.eval_shape(whole.compress, KEY, tree)[0]
    assert [part.norm.dtype for part in (each[0], each[1], together)] == [jnp.bfloat16, jnp.float32, jnp.float32]


test_options_out_of_range_are_refused = refusals(
    ("topk", {"ratio": 0}, "ratio = 0: must be a number above 0 and at most 1"),
    ("topk", {"ratio": 1.5}, "ratio = 1.5"), ("randk", {"ratio": float("nan")}, "ratio = nan"),
    ("randk", {"unbiased": "no"}, "unbiased = 'no': must be one of True, False"),
    ("topk_fast", {"ratio": True}, "ratio = True"),
    ("topk_fast", {"mantissa": 8}, "mantissa = 8: must be a whole number from 0 to 7"),
    ("qsgd", {"levels": 0}, "levels = 0: must be a whole number from 1 to 32767"),
    ("qsgd", {"levels": 2.5}, "levels = 2.5"), ("qsgd", {"levels": np.int64(0)}, "levels = "),
    ("topk_qsgd", {"levels": 32768}, "levels = 32768"), ("qsgd", {"scaled": 2}, "scaled = 2"),
    ("qsgd", {"bucket": 0}, "bucket = 0"),
    ("topk_qsgd", {"norm": "l1"}, "norm = 'l1': must be one of euclidean, max"),
    ("cast", {"dtype": "float8"}, "dtype = 'float8': must be one of float16, bfloat16"),
    by=lambda name, options: COMPRESSORS[name](**options),
)  # fmt: skip
test_only_vectors_of_floats = refusals(
    *((name, np.zeros((2, 3), np.float32), r"x = .*must be a vector of floats") for name in COMPRESSORS),
    *((name, np.zeros(4, np.int32), r"x = .*must be a vector of floats") for name in COMPRESSORS),
    by=lambda name, x: COMPRESSORS[name]().compress(KEY, x),
)
HUGE = compress.Dense(jax.ShapeDtypeStruct((2**26,), jnp.float32))
test_what_cannot_be_counted_is_refused = refusals(
    (lambda: compress.bits(HUGE), "bits = 2147483744: must be between 0 and 2147483647"),
    (lambda: levels_of(1), "width = 1: must be a whole number from 2 to 16"),
)
