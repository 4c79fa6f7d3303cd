"""The wire format: exact round trips, true sizes; foreign bytes are refused, and cost no more memory than stated."""

import tracemalloc
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from fedjax_async import compress
from fedjax_async.compress import Buckets, Centroids, Dense, Levels, Signs, Sparse, codes, decode, encode, sizes
from tests.compress import textbook
from tests.compress.programs import compiled
from tests.refusals import refusals

KEY = jax.random.key(3)
ANY_LENGTH = st.integers(0, 70)
REALS = ["float16", "bfloat16", "float32", "float64"]


def same(have, want):
    """Whether kind and static lengths are equal, and all arrays have the same type and bits."""
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want)):
        one, other = np.asarray(a), np.asarray(b)
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def signed(body):
    """A message with a true checksum."""
    whole = b"FA\x01" + body
    return whole + zlib.crc32(whole).to_bytes(4, "little")


def refused(data, **expected):
    with pytest.raises(ValueError) as error:
        decode(data, **expected)
    text = str(error.value)
    assert text.startswith(("message", "index")), text
    assert "\n" not in text and len(text) < 200


def unscaled(size):
    return Signs(np.zeros(size, bool), np.float32(1), False)


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
    kinds = ["dense", "signs", "unscaled", "levels", "buckets", "centroids"] + ["sparse"] * (depth < 2)
    kind = draw(st.sampled_from(kinds))
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


ANY = payloads() | st.lists(payloads(), max_size=4).map(tuple)


@settings(max_examples=150)
@given(payload=ANY, other=ANY_LENGTH)
@example(payload=(), other=0)
@example(payload=Dense(np.float32([0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38])), other=1)
@example(payload=Levels(np.full(300, -32767, np.int16), np.float64(1e308), np.int32(32767)), other=2)
@example(payload=Sparse(np.int32([2**31 - 2]), Dense(np.float32([1])), 2**31 - 1), other=3)
def test_round_trips_are_exact_and_only_of_the_expected_sizes(payload, other):
    data, lengths = encode(payload), [sizes.length_of(part) for part in sizes.parts(payload)]
    assert type(data) is bytes and encode(decode(data)) == data
    if isinstance(payload, tuple):
        right, wrong = [lengths, tuple(lengths), np.int64(lengths).tolist()], [other, [*lengths, 0]]
        wrong += [[*lengths[:i], size + 1 + other, *lengths[i + 1 :]] for i, size in enumerate(lengths)]
    else:
        right, wrong = [*lengths, *np.int64(lengths)], [lengths, *((size + 1 + other) % 2**31 for size in lengths)]
    for size in (None, *right):
        same(decode(data, size=size), payload)
    for size in wrong:
        refused(data, size=size)


FEW = payloads(lengths=st.sampled_from([0, 1, 8, 65]))  # every length is a compilation


@pytest.mark.float64
@settings(max_examples=40)
@given(payload=FEW | st.tuples(FEW, FEW) | st.just(()))
def test_reported_bits_are_the_bytes(payload):
    length = len(encode(payload))
    assert int(compress.bits(payload)) == 8 * length and int(compress.wire_bytes(payload)) == length
    assert compress.most_bits(payload) >= 8 * length


MADE = {
    **{name: (factory, {}) for name, factory in compress.COMPRESSORS.items()},
    "cast float16": (compress.cast, {"dtype": "float16"}), "qsgd 127": (compress.qsgd, {"levels": 127}),
    "qsgd in buckets": (compress.qsgd, {"levels": 7, "bucket": 64, "norm": "max"}),
    "topk of few": (compress.topk, {"ratio": 0.001}), "topk of many": (compress.topk, {"ratio": 0.7}),
    "chain": (lambda: compress.chain(compress.topk(ratio=0.3), compress.scaled_sign()), {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 1000) for name in MADE), *((name, size) for name in compress.COMPRESSORS for size in (0, 1))],
)
def test_what_compressors_send_arrives(name, size):
    factory, options = MADE[name]
    for kind in ("gaussian", "ties", "constant"):
        payload, x_hat, reported = compiled(factory, **options)(KEY, textbook.vector(kind, size))
        data = encode(payload)
        assert reported == 8 * len(data) and compress.most_bits(payload) >= reported
        same(decode(data), jax.device_get(payload))
        if size < 1000 or kind == "gaussian":
            np.testing.assert_allclose(factory(**options).decompress(decode(data)), x_hat, rtol=1e-6)


# --- the codes themselves ---------------------------------------------------------------------


def test_the_shortest_code_is_chosen():
    rng = np.random.default_rng(0)

    def spent(k, size, given=None):
        index = np.sort(rng.choice(size, k, replace=False)) if given is None else given
        data = encode(Sparse(index.astype(np.int32), unscaled(k), size))
        head = 1 + sizes.varint_bytes(size) + sizes.varint_bytes(k)
        return data[3] >> 4, len(data) - len(encode(unscaled(k))) - head

    assert spent(500, 1000) == (0, 125)  # a bitmap
    assert spent(1, 2**20, np.array([5])) == (1, 3)  # 20 bits
    code, rice = spent(1000, 100_000)  # gaps: an entropy of 8.08 bits per index
    assert code == 2 and 1010 < rice < 1060 and rice < 1000 * 17 / 8
    assert spent(0, 1000) == (1, 0)
    # levels that are mostly zero take little more than a bit each, others their fixed width
    level = np.zeros(10_000, np.int16)
    level[::100] = -3
    sparse, dense = (Levels(x, np.float32(1), np.int32(7)) for x in (level, np.full(10_000, -3, np.int16)))
    assert 8 * len(encode(sparse)) < 1.1 * 10_000
    assert 40_000 <= 8 * len(encode(dense)) < 40_200


def test_numbers_by_hand():
    assert codes.varint(300) == bytes([0b10101100, 0b10])
    assert (codes.varint(127), codes.varint(128)) == (bytes([127]), bytes([128, 1]))
    assert codes.unary(np.array([2, 0, 3])) == bytes([0b00110001])
    assert codes.fixed(np.array([5, 2]), 3) == bytes([0b10101000])
    assert codes.varying(np.array([0b1101, 0b1, 7]), np.array([3, 0, 2])) == bytes([0b10111000])
    payload = Sparse(np.int32([1, 4]), Signs(np.array([True, False]), np.float32(1), False), 5)
    assert encode(payload) == signed(bytes([6, 5, 2, 0b01001000, 3 + 16 * 3, 2, 0b10000000]))


def test_what_is_nested_too_deep_to_be_read_is_not_written():
    def nested(depth):
        inner = Dense(np.ones(1, np.float32)) if depth == 0 else nested(depth - 1)
        return Sparse(np.zeros(1, np.int32), inner, 1) if depth else inner

    assert decode(encode(nested(8))).size == 1
    with pytest.raises(ValueError, match="payload = '9 payloads within each other': must be at most 8"):
        encode(nested(9))


# --- damaged, foreign and malicious bytes -------------------------------------------------------


def refused_or_sound(data):
    """A message with a forged checksum gives a ``ValueError`` or a payload that can be encoded again, never a crash."""
    try:
        payload = decode(data)
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        same(decode(encode(payload)), payload)
        assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in jax.tree.leaves(payload))


@settings(max_examples=150)
@given(payload=ANY, data=st.data())
def test_damaged_messages_are_refused_and_forged_ones_do_no_harm(payload, data):
    whole = encode(payload)
    refused(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(whole + data.draw(st.binary(min_size=1, max_size=5)))
    flipped = bytearray(whole)
    for bit in data.draw(st.sets(st.integers(0, 8 * len(whole) - 1), min_size=1, max_size=3)):
        flipped[bit // 8] ^= 1 << bit % 8
    refused(bytes(flipped))
    body = bytearray(whole[3:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    refused_or_sound(signed(bytes(body[: data.draw(st.integers(1, len(body)))])))


@settings(max_examples=200)
@given(kind=st.integers(0, 255), data=st.binary(max_size=60))
def test_foreign_bytes_are_refused_and_signed_ones_do_no_harm(kind, data):
    refused(data)
    refused(b"FA\x01" + data)
    refused_or_sound(signed(bytes([kind]) + data))


def peak_of(function):
    """The peak memory of a call in bytes, and its result."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


HUGE = codes.varint(2**31 - 1)


@pytest.mark.parametrize("body", [
    bytes([1 + 16 * 3]) + HUGE,  # claims two billion values
    bytes([3 + 16 * 3]) + HUGE, bytes([4 + 16 * 3]) + HUGE + bytes([1, 0]) + bytes(4),
    bytes([5 + 16 * 3]) + HUGE + bytes([1, 0]) + bytes(4) + b"\xff",
    bytes([6]) + HUGE + HUGE, bytes([6 + 32]) + HUGE + HUGE + b"\xff", bytes([0]) + codes.varint(65535),
    bytes([1 + 16 * 3, 0x81, 0x00]) + bytes(4),  # 1, not in its shortest form
    bytes([1 + 16 * 3, 1]) + np.float32(np.nan).tobytes(), bytes([1 + 16 * 3, 1]) + np.float32(np.inf).tobytes(),
    bytes([4 + 16 * 3, 0, 0, 0]) + bytes(4),  # no steps
    bytes([4 + 16 * 3, 1, 1, 0]) + bytes(4) + bytes([0b11000000]),  # level 2 of 1
    bytes([3 + 16 * 3, 1, 0b01000000]),  # padding
    bytes([3 + 16 * 9, 0]),  # no such float type
    bytes([6 + 16 * 3, 1, 0]) + bytes([3 + 16 * 3, 0]),  # no such code
    bytes([6 + 16, 4, 2, 0b01010000]) + bytes([3 + 16 * 3, 2, 0]),  # the same index twice
    bytes([6, 5, 2, 0b01001000, 3 + 16 * 3, 1, 0]),  # one value for two indices
    bytes([6, 0, 0]) * 5000 + bytes([3 + 16 * 3, 0]),  # nested too deeply
    bytes([0, 1, 0, 1]) + bytes([3 + 16 * 3, 0]),  # tuples in tuples
    bytes([7 + 16 * 3]) + HUGE + bytes([0]),  # claims two billion zeros
    bytes([7 + 16 * 3]) + HUGE + bytes([255]) + np.arange(255, dtype="<f4").tobytes(),
    bytes([7 + 16 * 3, 1, 2]) + np.float32([1, 2]).tobytes() + bytes([0b11000000]),  # index 3 of 0, 1, 2
    bytes([7 + 16 * 3, 1, 0, 0b10000000]),  # index 1 of 0
    bytes([7 + 16 * 3, 1, 2]) + np.float32([2, 1]).tobytes() + bytes([0]),  # not ascending
    bytes([7 + 16 * 3, 1, 1]) + np.float32([np.nan]).tobytes() + bytes([0]),
    bytes([7 + 16 * 3, 1, 1]) + np.float32([1]).tobytes() + bytes([0b00100000]),  # padding
    bytes([7 + 16 * 9, 1, 0, 0]),  # no such float type
    b"",
])  # fmt: skip
def test_malformed_messages_are_refused_before_anything_is_allocated(body):
    data = signed(body)
    for expected in ({}, {"size": 1000}):
        assert peak_of(lambda expected=expected: refused(data, **expected))[1] < 100_000


def words_that_are_not_finite(dtype):
    """Infinity, a quiet NaN, a signalling one and their negatives, as the float's own bytes."""
    word = np.dtype(f"u{np.dtype(dtype).itemsize}")
    infinite = int(np.array(np.inf, dtype).view(word))
    quiet = infinite | infinite >> 1
    sign = 1 << 8 * word.itemsize - 1
    return [np.array(bits | s, word).tobytes() for bits in (infinite, quiet, infinite + 1) for s in (0, sign)]


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("kind", ["values", "scale", "norm", "centroid"])
def test_no_value_that_is_not_finite_is_sent_or_read(dtype, kind):
    """A ``ValueError``, also if warnings are errors: NumPy warns of a bfloat16 NaN."""
    for word in words_that_are_not_finite(dtype):
        number = np.frombuffer(word, dtype)
        code = 16 * (REALS.index(dtype) + 1)
        payload, body = {
            "values": (Dense(number), bytes([1 + code, 1]) + word),
            "scale": (Signs(np.array([True]), number[0], True), bytes([2 + code, 1, 0b10000000]) + word),
            "centroid": (Centroids(number, np.uint8([1])), bytes([7 + code, 1, 1]) + word + b"\x80"),
            "norm": (Levels(np.int16([0]), number[0], np.int32(1)), bytes([4 + code, 1, 1, 0]) + word + b"\x40"),
        }[kind]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(ValueError, match=f"^{kind} = 'NaN or infinite': must be finite$"):
                encode(payload)
            with pytest.raises(ValueError, match=r"^message: a value is NaN or infinite$"):
                decode(signed(body))


ONE, TWO = encode(unscaled(5)), encode((unscaled(5), unscaled(7)))
NONSENSE = [-1, 2**31, 1.0, True, "5", [5, -1], [5, None], [[5]], np.array([5])]
OTHER_VERSION = b"FA\x02" + ONE[3:-4]
test_what_does_not_fit_is_named = refusals(
    (TWO, [5, 8], "^message: a payload of 7 scalars, not 8$"),
    (TWO, [5], "^message: 2 payloads, not 1$"),
    (TWO, 12, "^message: a tuple of 2 payloads, not one payload$"),
    (ONE, [5], "^message: one payload, not a tuple of 1$"),
    *((ONE, size, "^size = .*: must be a whole number from 0 to 2147483647$") for size in NONSENSE),
    (OTHER_VERSION + zlib.crc32(OTHER_VERSION).to_bytes(4, "little"), None, "message version = 2: must be 1"),
    ("FA", None, "message = 'str': must be bytes"),
    by=lambda data, size: decode(data, size=size),
)


# --- what a message may cost ----------------------------------------------------------------------

LONG = 1_000_000


def levels_of_few(steps, *values):
    return Levels(np.resize(np.int16(values), LONG), np.float32(1), np.int32(steps))


def first_indices(k, size):
    """The indices 0 to k - 1; the values are zeros, so only their number is sent."""
    return Sparse(np.arange(k, dtype=np.int32), Sparse(np.int32([]), unscaled(0), k), size)


ONE_INDEX = Sparse(np.int32([2**31 - 2]), unscaled(1), 2**31 - 1)
COSTLY = {
    "gamma zeros": lambda: levels_of_few(7, 0), "gamma small": lambda: levels_of_few(7, 0, 1, 0, 0, -1),
    "gamma large": lambda: levels_of_few(32767, *[0] * 20, 32767),
    "fixed two bits": lambda: levels_of_few(1, 1, -1),
    "fixed sixteen bits": lambda: levels_of_few(32767, 32767, -32767),
    "bitmap": lambda: first_indices(LONG, LONG), "rice": lambda: first_indices(LONG, 4 * LONG),
    "rice of a bit": lambda: first_indices(LONG, LONG + LONG // 4),
    "no indices": lambda: Sparse(np.int32([]), unscaled(0), 2**31 - 1), "fixed indices": lambda: ONE_INDEX,
    "sparse values": lambda: Sparse(np.int32([3]), Sparse(np.int32([]), unscaled(0), 1), 2**31 - 1),
    "signs": lambda: unscaled(LONG),
    "pruned": lambda: Centroids(np.float32([]), np.zeros(LONG, np.uint8)),
    "of 256 centroids": lambda: Centroids(
        np.arange(255, dtype=np.float32), np.resize(np.arange(256, dtype=np.uint8), LONG)
    ),
    "floats": lambda: Dense(np.ones(LONG, jnp.bfloat16)),
    "nested": lambda: Sparse(np.arange(LONG, dtype=np.int32), first_indices(LONG, LONG), LONG),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_decoding_takes_no_more_memory_than_stated_and_other_sizes_are_refused_before(name):
    payload = COSTLY[name]()
    data = encode(payload)
    several = signed(bytes([0, 2]) + encode(unscaled(8))[3:-4] + data[3:-4])
    assert peak_of(lambda: refused(data, size=1000))[1] < 100_000
    assert peak_of(lambda: refused(several, size=[8, 1000]))[1] < 100_000
    decoded, peak = peak_of(lambda: decode(data))
    assert peak <= 40 * len(data) + 2 * 2**20
    same(decoded, payload)


def test_few_indices_are_encoded_without_the_memory_of_a_whole_model():
    assert peak_of(lambda: encode(ONE_INDEX))[1] < 100_000


def test_many_small_payloads_take_no_more_memory_than_stated():
    part = encode(Sparse(np.int32([]), Levels(np.int16([]), np.float32(1), np.int32(1)), 0))[3:-4]
    data = signed(bytes([0]) + codes.varint(3000) + 3000 * part)
    decoded, peak = peak_of(lambda: decode(data))
    assert len(decoded) == 3000 and peak <= 40 * len(data) + 2 * 3000 * 1024 + 2 * 2**20


test_payloads_that_make_no_sense_are_refused = refusals(
    (Signs(np.array([True]), np.float32(2), False), "scale = 2.0: must be 1"),
    (Levels(np.int16([2]), np.float32(1), np.int32(1)), "level = 2: must be within 1"),
    (Levels(np.int16([0]), np.float32(1), np.int32(0)), "steps = 0"),
    (Dense(np.zeros((2, 3), np.float32)), "values = 'float32.2, 3.': must be floats of one payload"),
    (Dense(np.zeros(2, np.int32)), "values = 'int32"),
    (Sparse(np.int32([2, 1]), Dense(np.float32([1, 1])), 3), "index = '2 integers': must be ascending"),
    (Sparse(np.int32([1, 3]), Dense(np.float32([1, 1])), 3), "index = '2 integers': must be ascending, from 0 to 2"),
    (Sparse(np.int32([1]), Dense(np.float32([1, 1])), 3), "values = 2: must be 1, one for each index"),
    (Centroids(np.float32([2, 1]), np.uint8([0])), "centroid = '2 numbers': must be ascending"),
    (Centroids(np.arange(256, dtype=np.float32), np.uint8([0])), "centroid = '256 numbers': must be at most 255"),
    (Centroids(np.float32([1]), np.uint8([2])), "index = 2: must be at most 1"),
    (Centroids(np.float32([1]), np.int32([1])), "index = 'int32.1.': must be a vector of one payload"),
    (np.zeros(3), "payload = ndarray: must be one of"),
    by=encode,
)  # fmt: skip
