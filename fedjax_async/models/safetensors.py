"""Read a ``.safetensors`` file: eight bytes with the header's length, a JSON header, and the arrays' raw bytes."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fedjax_async.check import require

DTYPES: dict[str, Any] = {
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
LONGEST = 100_000_000  # bytes of a header, the format's own limit


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All arrays of a file by name, memory-mapped and read-only.

    Nothing is trusted: the header must fit the file, every array its dtype and shape, and together they must fill the
    file without gap or overlap. Raises ``ValueError`` naming the file and what is wrong.
    """
    field = f"{Path(path).name}"
    size = os.path.getsize(path)
    require(size > 8, field, f"{size} bytes", "a safetensors file")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        require(length <= min(size - 8, LONGEST), field, f"a header of {length} bytes", f"within its {size} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{field} = a header of {length} bytes: must be JSON") from error
    require(isinstance(header, dict), field, "a header that is no object", "a safetensors file")
    content = np.memmap(path, np.uint8, "r", 8 + length) if size > 8 + length else np.empty(0, np.uint8)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    spans = [_checked(field, name, entry) for name, entry in entries.items()]
    end = 0
    for first, last in sorted(spans):
        require(first == end, field, f"bytes {first} to {last}", f"arrays that follow each other, here from {end}")
        end = last
    require(end == len(content), field, f"{len(content)} bytes of arrays", f"{end}, as its header says")
    pairs = zip(entries.items(), spans)
    return {name: content[a:b].view(DTYPES[e["dtype"]]).reshape(e["shape"]) for (name, e), (a, b) in pairs}


def _checked(field: str, name: str, entry: Any) -> tuple[int, int]:
    """The first byte of an array and the one after its last, if its entry in the header makes sense."""
    wanted = isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= set(entry)
    require(wanted and entry["dtype"] in DTYPES, f"{field}: {name}", entry, f"an array of {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    numbers = numbers and all(type(n) is int and n >= 0 for n in [*shape, *offsets])
    size = math.prod(shape) * np.dtype(DTYPES[entry["dtype"]]).itemsize if numbers else -1
    good = numbers and offsets[1] - offsets[0] == size
    require(good, f"{field}: {name}", f"shape {shape}, bytes {offsets}", "a shape that fills its bytes")
    return offsets[0], offsets[1]
