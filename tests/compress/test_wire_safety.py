"""Foreign, damaged and malicious bytes are refused, and no message costs more memory than stated."""

import tracemalloc
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.compress import Centroids, Dense, Levels, Signs, Sparse, codes, decode, encode, sizes
from tests.compress.test_wire import ANY_LENGTH, REALS, payloads, same
from tests.refusals import refusals


def refused(data, **expected):
    with pytest.raises(ValueError) as error:
        decode(data, **expected)
    text = str(error.value)
    assert text.startswith("message") or text.startswith("index"), text
    assert "\n" not in text and len(text) < 200


@settings(max_examples=100)
@given(payload=payloads() | st.lists(payloads(), max_size=3).map(tuple), data=st.data())
def test_damaged_messages_are_refused(payload, data):
    whole = encode(payload)
    refused(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(whole + data.draw(st.binary(min_size=1, max_size=5)))
    flipped = bytearray(whole)
    for bit in data.draw(st.sets(st.integers(0, 8 * len(whole) - 1), min_size=1, max_size=3)):
        flipped[bit // 8] ^= 1 << bit % 8
    refused(bytes(flipped))


@settings(max_examples=100)
@given(data=st.binary(max_size=60))
def test_foreign_bytes_are_refused(data):
    refused(data)
    refused(b"FA\x01" + data)


def signed(body):
    return body + zlib.crc32(body).to_bytes(4, "little")


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
@given(payload=payloads() | st.lists(payloads(), max_size=3).map(tuple), data=st.data())
def test_forged_messages_do_no_harm(payload, data):
    body = bytearray(encode(payload)[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        byte = data.draw(st.integers(3, len(body) - 1))
        body[byte] = data.draw(st.integers(0, 255))
    refused_or_sound(signed(bytes(body[: data.draw(st.integers(4, len(body)))])))


@settings(max_examples=200)
@given(kind=st.integers(0, 255), data=st.binary(max_size=40))
def test_forged_bytes_do_no_harm(kind, data):
    refused_or_sound(signed(b"FA\x01" + bytes([kind]) + data))


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
def test_malformed_messages_are_refused(body):
    refused(signed(b"FA\x01" + body))


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
                decode(signed(b"FA\x01" + body))


# --- what a receiver expects, and what a message may cost ---------------------------------------


def unscaled(size):
    return Signs(np.zeros(size, bool), np.float32(1), False)


def peak_of(function):
    """The peak memory of a call in bytes, and its result."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@settings(max_examples=60)
@given(payload=payloads() | st.lists(payloads(), max_size=4).map(tuple), other=ANY_LENGTH)
def test_only_the_expected_sizes_are_read(payload, other):
    data, lengths = encode(payload), [sizes.length_of(part) for part in sizes.parts(payload)]
    if isinstance(payload, tuple):
        for size in (lengths, tuple(lengths), np.int64(lengths).tolist()):
            same(decode(data, size=size), payload)
        refused(data, size=other)
        refused(data, size=[*lengths, 0])
        for i in range(len(lengths)):
            refused(data, size=[*lengths[:i], lengths[i] + 1 + other, *lengths[i + 1 :]])
    else:
        same(decode(data, size=lengths[0]), payload)
        same(decode(data, size=np.int64(lengths[0])), payload)
        refused(data, size=lengths[0] + 1 + other)
        refused(data, size=lengths)


ONE, TWO = encode(unscaled(5)), encode((unscaled(5), unscaled(7)))
NONSENSE = [-1, 2**31, 1.0, True, "5", [5, -1], [5, None], [[5]], np.array([5])]
test_what_does_not_fit_is_named = refusals(
    (TWO, [5, 8], "^message: a payload of 7 scalars, not 8$"),
    (TWO, [5], "^message: 2 payloads, not 1$"),
    (TWO, 12, "^message: a tuple of 2 payloads, not one payload$"),
    (ONE, [5], "^message: one payload, not a tuple of 1$"),
    *((ONE, size, "^size = .*: must be a whole number from 0 to 2147483647$") for size in NONSENSE),
    (signed(b"FA\x02" + ONE[3:-4]), None, "message version = 2: must be 1"),
    ("FA", None, "message = 'str': must be bytes"),
    by=lambda data, size: decode(data, size=size),
)


LONG = 1_000_000
FEW_BYTES = {
    "no indices": lambda: encode(Sparse(np.int32([]), unscaled(0), 2**31 - 1)),
    "one index": lambda: encode(Sparse(np.int32([2**31 - 2]), unscaled(1), 2**31 - 1)),
    "no values": lambda: signed(b"FA\x01" + bytes([1 + 16 * 3]) + HUGE),
    "sparse values": lambda: encode(Sparse(np.int32([3]), Sparse(np.int32([]), unscaled(0), 1), 2**31 - 1)),
    "zeros": lambda: encode(Levels(np.zeros(LONG, np.int16), np.float32(1), np.int32(1))),
    "many indices": lambda: encode(Sparse(np.arange(LONG, dtype=np.int32), unscaled(LONG), LONG)),
    "signs": lambda: encode(unscaled(LONG)), "floats": lambda: encode(Dense(np.zeros(LONG // 10, np.float64))),
    "centroids": lambda: encode(Centroids(np.float32([]), np.zeros(LONG, np.uint8))),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_BYTES)
def test_other_sizes_are_refused_before_anything_is_allocated(name):
    data = FEW_BYTES[name]()
    peak = peak_of(lambda: refused(data, size=1000))[1]
    assert peak < 100_000
    several = signed(b"FA\x01" + bytes([0, 2]) + encode(unscaled(8))[3:-4] + data[3:-4])
    assert peak_of(lambda: refused(several, size=[8, 1000]))[1] < 100_000


def test_few_indices_are_encoded_without_the_memory_of_a_whole_model():
    assert peak_of(FEW_BYTES["one index"])[1] < 100_000


def levels_of_few(steps, *values):
    return Levels(np.resize(np.int16(values), LONG), np.float32(1), np.int32(steps))


def first_indices(k, size):
    """The indices 0 to k - 1; the values are zeros, so only their number is sent."""
    return Sparse(np.arange(k, dtype=np.int32), Sparse(np.int32([]), unscaled(0), k), size)


COSTLY = {
    "gamma zeros": lambda: levels_of_few(7, 0), "gamma small": lambda: levels_of_few(7, 0, 1, 0, 0, -1),
    "gamma large": lambda: levels_of_few(32767, *[0] * 20, 32767),
    "fixed two bits": lambda: levels_of_few(1, 1, -1),
    "fixed sixteen bits": lambda: levels_of_few(32767, 32767, -32767),
    "bitmap": lambda: first_indices(LONG, LONG), "rice": lambda: first_indices(LONG, 4 * LONG),
    "rice of a bit": lambda: first_indices(LONG, LONG + LONG // 4),
    "fixed indices": lambda: Sparse(np.int32([2**31 - 2]), unscaled(1), 2**31 - 1),
    "signs": lambda: unscaled(LONG),
    "pruned": lambda: Centroids(np.float32([]), np.zeros(LONG, np.uint8)),
    "of 256 centroids": lambda: Centroids(
        np.arange(255, dtype=np.float32), np.resize(np.arange(256, dtype=np.uint8), LONG)
    ),
    "floats": lambda: Dense(np.ones(LONG, jnp.bfloat16)),
    "nested": lambda: Sparse(np.arange(LONG, dtype=np.int32), first_indices(LONG, LONG), LONG),
}  # fmt: skip


@pytest.mark.slow_cases("fixed indices")
@pytest.mark.parametrize("name", COSTLY)
def test_decoding_takes_no_more_memory_than_stated(name):
    payload = COSTLY[name]()
    data = encode(payload)
    decoded, peak = peak_of(lambda: decode(data))
    assert peak <= 40 * len(data) + 2 * 2**20
    same(decoded, payload)


def test_many_small_payloads_take_no_more_memory_than_stated():
    part = encode(Sparse(np.int32([]), Levels(np.int16([]), np.float32(1), np.int32(1)), 0))[3:-4]
    data = signed(b"FA\x01" + bytes([0]) + codes.varint(3000) + 3000 * part)
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
