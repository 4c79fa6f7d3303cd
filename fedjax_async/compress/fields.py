"""The fields of a message: numbers and vectors of one float type, and the numbers of a stream of bits (``wire.py``)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.compress.codes import ByteReader, Chunks

REALS = {1: np.dtype("float16"), 2: np.dtype(jnp.bfloat16), 3: np.dtype("float32"), 4: np.dtype("float64")}


def shaped(field: str, array: np.ndarray, dimensions: int, kind: str) -> None:
    """``ValueError`` naming the field unless the array has this ``ndim`` and this ``dtype.kind``."""
    fits = array.ndim == dimensions and array.dtype.kind == kind
    what = {0: "one number", 1: "a vector"}[dimensions]
    check.require(fits, field, f"{array.dtype}{list(array.shape)}", f"{what} of one payload, of dtype kind {kind!r}")


def real_bytes(field: str, array: np.ndarray, dimensions: int) -> tuple[int, bytes]:
    """The code of the float type, and the values as bytes; ``ValueError`` for other types and non-finite values."""
    known = {dtype: code for code, dtype in REALS.items()}
    fits = array.dtype in known and array.ndim == dimensions
    check.require(fits, field, f"{array.dtype}{list(array.shape)}", "floats of one payload")
    check.require(all_finite(array), field, "NaN or infinite", "finite")
    word = f"<u{array.dtype.itemsize}"
    return known[array.dtype], np.ascontiguousarray(array).view(word[1:]).astype(word).tobytes()


def all_finite(array: np.ndarray) -> bool:
    """Whether no entry is NaN or infinite."""
    with np.errstate(invalid="ignore"):  # NumPy warns of a bfloat16 NaN
        return bool(np.isfinite(array).all())


def read_real(source: ByteReader, code: int, count: int) -> np.ndarray:
    """float[count]; ``ValueError`` for an unknown type and for values that are not finite."""
    dtype = REALS.get(code)
    if dtype is None:
        raise ValueError(f"message: unknown float type {code}")
    word = f"<u{dtype.itemsize}"
    values = np.frombuffer(source.read(count * dtype.itemsize), word).astype(word[1:]).view(dtype)
    if not all_finite(values):
        raise ValueError("message: a value is NaN or infinite")
    return values


def read_whole(chunks: Chunks, count: int, dtype: type) -> np.ndarray:
    """The numbers of all chunks, dtype[count]; ``ValueError`` if there are fewer or more."""
    numbers: np.ndarray = np.empty(count, dtype)
    end = 0
    for chunk in chunks:
        low, end = end, end + len(chunk)
        if end > count:
            break
        numbers[low:end] = chunk
    if end != count:
        raise ValueError(f"message: {end} numbers or more, not {count}")
    return numbers
