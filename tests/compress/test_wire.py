"""The wire format: exact round trips, true sizes, safe decoding of foreign bytes."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from fedjax_async.compress import (
    COMPRESSORS,
    Buckets,
    Centroids,
    Dense,
    Levels,
    Signs,
    Sparse,
    bits,
    cast,
    chain,
    codes,
    decode,
    encode,
    most_bits,
    on_tree,
    qsgd,
    scaled_sign,
    sizes,
    topk,
    wire_bytes,
)
from tests.compress import textbook
from tests.compress.programs import compiled

KEY = jax.random.key(3)
ANY_LENGTH = st.integers(0, 70)
REALS = ["float16", "bfloat16", "float32", "float64"]


def same(have, want):
    """Whether kind and static lengths are equal, and all arrays have the same type and bits."""
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want)):
        one, other = np.asarray(a), np.asarray(b)
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


# --- payloads made by hand: every number that a type can hold, without arithmetic of JAX -------------


@st.composite
def reals(draw, shape):
    """Finite floats: +-0, subnormals and the largest included."""
    dtype = np.dtype(draw(st.sampled_from(REALS)))
    word = np.dtype(f"u{dtype.itemsize}")
    top = int(np.array(jnp.finfo(dtype).max, dtype).view(word))  # patterns of magnitudes are 0 .. top
    patterns = draw(st_numpy.arrays(word, shape, elements=st.integers(0, top)))
    negative = draw(st_numpy.arrays(bool, shape))
    return (patterns | negative.astype(word) << (8 * dtype.itemsize - 1)).astype(word).view(dtype)


@st.composite
def payloads(draw, size=None, depth=0, lengths=ANY_LENGTH):
    size = draw(lengths) if size is None else size
    kind = draw(
        st.sampled_from(["dense", "signs", "unscaled", "levels", "buckets", "centroids"] + ["sparse"] * (depth < 2))
    )
    if kind == "dense":
        return Dense(draw(reals((size,))))
    if kind in ("signs", "unscaled"):
        scale = draw(reals(()))
        scaled = kind == "signs"
        return Signs(draw(st_numpy.arrays(bool, size)), scale if scaled else np.ones_like(scale), scaled)
    if kind in ("levels", "buckets"):
        steps = draw(st.integers(1, 32767) | st.sampled_from([1, 7, 127]))
        within = st.integers(-min(steps, draw(st.sampled_from([1, 9, 32767]))), steps)
        level = draw(st_numpy.arrays(np.int16, size, elements=within))
        if kind == "levels":
            return Levels(level, draw(reals(())), np.int32(steps))
        bucket = draw(st.sampled_from([1, 3, 64, 200]))
        return Buckets(level, draw(reals((-(-size // bucket),))), np.int32(steps), bucket)
    if kind == "centroids":
        centroid = np.sort(draw(reals((draw(st.sampled_from([0, 1, 3, 30, 31, 32, 255])),))))
        return Centroids(centroid, draw(st_numpy.arrays(np.uint8, size, elements=st.integers(0, len(centroid)))))
    index = sorted(draw(st.sets(st.integers(0, size - 1), max_size=size))) if size else []
    return Sparse(np.array(index, np.int32), draw(payloads(len(index), depth + 1)), size)


@settings(max_examples=150)
@given(payload=payloads() | st.lists(payloads(), max_size=4).map(tuple))
@example(payload=())
@example(payload=Dense(np.float32([0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38])))
@example(payload=Levels(np.full(300, -32767, np.int16), np.float64(1e308), np.int32(32767)))
@example(payload=Sparse(np.int32([2**31 - 2]), Dense(np.float32([1])), 2**31 - 1))
def test_round_trips_are_exact(payload):
    data = encode(payload)
    same(decode(data), payload)
    assert encode(decode(data)) == data
    assert type(data) is bytes


FEW = payloads(lengths=st.sampled_from([0, 1, 8, 65]))  # every length is a compilation


@pytest.mark.float64
@settings(max_examples=40)
@given(payload=FEW | st.tuples(FEW, FEW) | st.just(()))
def test_reported_bits_are_the_bytes(payload):
    length = len(encode(payload))
    assert int(bits(payload)) == 8 * length and int(wire_bytes(payload)) == length
    assert most_bits(payload) >= 8 * length


MADE = {
    **{name: (factory, {}) for name, factory in COMPRESSORS.items()},
    "cast float16": (cast, {"dtype": "float16"}), "qsgd 127": (qsgd, {"levels": 127}),
    "qsgd in buckets": (qsgd, {"levels": 7, "bucket": 64, "norm": "max"}), "topk of few": (topk, {"ratio": 0.001}),
    "topk of many": (topk, {"ratio": 0.7}), "chain": (lambda: chain(topk(ratio=0.3), scaled_sign()), {}),
}  # fmt: skip


CASES = [*((name, 1000) for name in MADE), *((name, size) for name in COMPRESSORS for size in (0, 1))]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_what_compressors_send_arrives(name, size):
    factory, options = MADE[name]
    for kind in ("gaussian", "ties", "constant"):
        payload, x_hat, reported = compiled(factory, **options)(KEY, textbook.vector(kind, size))
        data = encode(payload)
        assert reported == 8 * len(data) and most_bits(payload) >= reported
        same(decode(data), jax.device_get(payload))
        if size < 1000 or kind == "gaussian":
            np.testing.assert_allclose(factory(**options).decompress(decode(data)), x_hat, rtol=1e-6)


def test_what_trees_send_arrives():
    tree = {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(5)}
    wire = on_tree(scaled_sign(), tree, group=lambda path: path)
    payload = jax.jit(wire.compress)(KEY, tree)
    data = encode(payload)
    assert int(wire.bits(payload)) == 8 * len(data)
    arrived = decode(data)
    same(arrived, jax.device_get(payload))
    jax.tree.map(np.testing.assert_array_equal, wire.decompress(arrived), wire.decompress(payload))


# --- the codes themselves ---------------------------------------------------------------------


def test_the_shortest_code_is_chosen():
    rng = np.random.default_rng(0)

    def spent(k, size, given=None):
        index = np.sort(rng.choice(size, k, replace=False)) if given is None else given
        payload = Sparse(index.astype(np.int32), Signs(np.zeros(k, bool), np.float32(1), False), size)
        data = encode(payload)
        frame = len(encode(Signs(np.zeros(k, bool), np.float32(1), False)))
        head = 1 + sizes.varint_bytes(size) + sizes.varint_bytes(k)
        return data[3] >> 4, len(data) - frame - head

    assert spent(500, 1000) == (0, 125)  # a bitmap
    assert spent(1, 2**20, np.array([5])) == (1, 3)  # 20 bits
    code, rice = spent(1000, 100_000)  # gaps: an entropy of 8.08 bits per index
    assert code == 2 and 1010 < rice < 1060 and rice < 1000 * 17 / 8
    assert spent(0, 1000) == (1, 0)


def test_levels_that_are_mostly_zero_take_little_more_than_a_bit():
    level = np.zeros(10_000, np.int16)
    level[::100] = -3
    sparse, dense = (Levels(x, np.float32(1), np.int32(7)) for x in (level, np.full(10_000, -3, np.int16)))
    assert 8 * len(encode(sparse)) < 1.1 * 10_000
    assert 40_000 <= 8 * len(encode(dense)) < 40_200  # the fixed width


def test_numbers_by_hand():
    assert codes.varint(300) == bytes([0b10101100, 0b10])
    assert codes.unary(np.array([2, 0, 3])) == bytes([0b00110001])
    assert codes.fixed(np.array([5, 2]), 3) == bytes([0b10101000])
    assert codes.varying(np.array([0b1101, 0b1, 7]), np.array([3, 0, 2])) == bytes([0b10111000])
    payload = Sparse(np.int32([1, 4]), Signs(np.array([True, False]), np.float32(1), False), 5)
    body = b"FA\x01" + bytes([6, 5, 2, 0b01001000, 3 + 16 * 3, 2, 0b10000000])
    assert encode(payload) == body + zlib.crc32(body).to_bytes(4, "little")


def test_what_is_nested_too_deep_to_be_read_is_not_written():
    def nested(depth):
        inner = Dense(np.ones(1, np.float32)) if depth == 0 else nested(depth - 1)
        return Sparse(np.zeros(1, np.int32), inner, 1) if depth else inner

    assert decode(encode(nested(8))).size == 1
    with pytest.raises(ValueError, match="payload = '9 payloads within each other': must be at most 8"):
        encode(nested(9))
