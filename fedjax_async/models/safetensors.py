"""Files in the safetensors format: arrays by name, without code.

A file has eight bytes with the length of its header, a JSON header, and the raw bytes of the arrays. Sizes and names
are in the header, so that a reader can check everything before it touches an array. Source: the format's description
by Hugging Face, https://huggingface.co/docs/safetensors; the tests also read and write with its official library.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.base.check import require

DTYPES: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
METADATA = "__metadata__"  # an entry of the header that is not an array
LONGEST = 100_000_000  # the format's limit on the bytes of a header


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All arrays of a ``.safetensors`` file by name, memory-mapped and read-only.

    Everything is checked: the length of the header, dtype and shape of every array, and that the arrays fill the file
    without gap or overlap. Raises ``ValueError`` naming the file and what is wrong.
    """
    path = check.path("path", path)
    field = path.name
    require(os.path.isfile(path), "path", os.fspath(path), "a file that exists")
    size = os.path.getsize(path)
    require(size > 8, field, f"{size} bytes", "a safetensors file")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        require(length <= min(size - 8, LONGEST), field, f"a header of {length} bytes", f"within its {size} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{field} = a header of {length} bytes: must be JSON") from error
    require(isinstance(header, dict), field, "a header that is not an object", "a safetensors file")
    content = np.memmap(path, np.uint8, "r", 8 + length) if size > 8 + length else np.empty(0, np.uint8)
    entries = {name: entry for name, entry in header.items() if name != METADATA}
    spans = [_checked(field, name, entry) for name, entry in entries.items()]
    end = 0
    for first, last in sorted(spans):
        require(first == end, field, f"bytes {first} to {last}", f"arrays that follow each other, here from {end}")
        end = last
    require(end == len(content), field, f"{len(content)} bytes of arrays", f"{end}, as its header says")
    pairs = zip(entries.items(), spans)
    return {name: content[a:b].view(DTYPES[e["dtype"]]).reshape(e["shape"]) for (name, e), (a, b) in pairs}


def _checked(field: str, name: str, entry: Any) -> tuple[int, int]:
    """The first byte of an array and the byte after its last; raises ``ValueError`` for an invalid header entry."""
    wanted = isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= set(entry)
    wanted = wanted and isinstance(entry["dtype"], str) and entry["dtype"] in DTYPES
    require(wanted, f"{field}: {name}", entry, f"an array of {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    numbers = numbers and all(type(n) is int and n >= 0 for n in [*shape, *offsets])
    size = math.prod(shape) * np.dtype(DTYPES[entry["dtype"]]).itemsize if numbers else -1
    good = numbers and offsets[1] - offsets[0] == size
    require(good, f"{field}: {name}", f"shape {shape}, bytes {offsets}", "a shape that fills its bytes")
    return offsets[0], offsets[1]


def safetensors_bytes(arrays: Mapping[str, object], metadata: Mapping[str, str] | None = None) -> bytes:
    """The content of a ``.safetensors`` file; equal arrays give equal bytes.

    The header is padded with spaces to a multiple of eight bytes, and larger types come first, so that every array is
    aligned. Raises ``ValueError`` for a type that the format does not have.
    """
    found = {name: np.asarray(value, order="C") for name, value in arrays.items()}
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    for name, array in found.items():
        require(array.dtype in names and name != METADATA, f"array {name}", array.dtype.name, f"{', '.join(DTYPES)}")
    order = sorted(found, key=lambda name: (-found[name].dtype.itemsize, name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        first, end = end, end + found[name].nbytes
        header[name] = {"dtype": names[found[name].dtype], "shape": found[name].shape, "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(found[name].tobytes() for name in order)])
