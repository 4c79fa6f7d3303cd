"""Made-up recordings, pickled as old pandas frames like the real ones."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.data.har import RAW


class Name(NamedTuple):
    """Something that a pickle refers to by module and name."""

    module: str
    name: str


class Call(NamedTuple):
    """A call, and the state that its result is set to."""

    function: Name
    arguments: tuple[Any, ...]
    state: Any = None


def pickled(value: Any) -> bytes:
    """A pickle of protocol 2, written instruction by instruction."""
    return b"\x80\x02" + code(value) + b"."


def code(value: Any) -> bytes:
    """The instructions that put a value on the stack."""
    parts = {
        Name: lambda v: f"c{v.module}\n{v.name}\n".encode(),
        Call: lambda v: code(v.function) + code(v.arguments) + b"R" + (code(v.state) + b"b" if v.state else b""),
        str: lambda v: b"X" + struct.pack("<I", len(v.encode())) + v.encode(),
        bool: lambda v: b"I01\n" if v else b"I00\n",
        int: lambda v: b"J" + struct.pack("<i", v),
        type(None): lambda v: b"N",
        tuple: lambda v: b"(" + b"".join(map(code, v)) + b"t",
        list: lambda v: b"](" + b"".join(map(code, v)) + b"e",
        dict: lambda v: b"}(" + b"".join(code(k) + code(item) for k, item in v.items()) + b"u",
        np.ndarray: lambda v: code(array(v)),
    }
    return parts[type(value)](value)


def array(values: np.ndarray) -> Call:
    """An array as NumPy 1 pickled it."""
    objects = values.dtype == object
    kind = Call(Name("numpy", "dtype"), ("O8" if objects else values.dtype.str[1:], 0, 1), (3, "<", None))
    by_columns = values.flags.f_contiguous and not values.flags.c_contiguous
    text = Call(Name("_codecs", "encode"), ("" if objects else values.tobytes(order="A").decode("latin1"), "latin1"))
    empty = (Name("numpy", "ndarray"), (0,), Call(Name("_codecs", "encode"), ("b", "latin1")))
    state = (1, values.shape, kind, by_columns, list(values) if objects else text)
    return Call(Name("numpy.core.multiarray", "_reconstruct"), empty, state)


def made(kind: Name, state: Any) -> Call:
    """An object of a class, as old Pythons pickled it."""
    return Call(Name("copy_reg", "_reconstructor"), (kind, Name("__builtin__", "object"), None), state)


def frame(columns: dict[str, np.ndarray]) -> Call:
    """A frame with two blocks stored by columns: one of the float columns and one of the integer columns."""
    names = np.array(list(columns), dtype=object)
    kinds = np.array([columns[name].dtype.kind for name in names])
    home = "pandas.core.indexes.base"
    index = Call(Name(home, "_new_Index"), (Name(home, "Index"), {"data": names, "name": None}))
    blocks = []
    for kind in ("f", "i"):
        places = np.flatnonzero(kinds == kind)
        if len(places):
            run = Call(Name("__builtin__", "slice"), (int(places[0]), int(places[-1]) + 1, 1))
            values = np.stack([columns[name] for name in names[places]])
            pair = (np.asfortranarray(values), run) if kind == "f" else (values, places)
            blocks.append(dict(zip(("values", "mgr_locs"), pair)))
    manager = Name("pandas.core.internals.managers", "BlockManager")
    axes = [index, Call(Name("pandas.core.indexes.range", "RangeIndex"), ())]
    state = (axes, [], [], {"0.14.1": {"axes": axes, "blocks": blocks}})
    return made(Name("pandas.core.frame", "DataFrame"), {"_data": made(manager, state)})


def recording(labels: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """A random recording with these labels."""
    signals = np.random.default_rng(seed).standard_normal((6, len(labels)))
    return {**dict(zip(RAW, signals)), "sequence": np.arange(len(labels)), "label": np.asarray(labels, np.int64)}


def small_har() -> bytes:
    """Training subjects 1 and 3 with 3 + 2 windows, and test subject 2 with 2 windows."""
    people = {
        1: [frame(recording(np.repeat([-1, 5, 7, 1], [20, 192, 130, 128]), 1))],
        2: [frame(recording(np.repeat([6], [200]), 2))],
        3: [frame(recording(np.repeat([2, 3], [128, 127]), 3)), frame(recording(np.repeat([4], [130]), 4))],
    }
    return pickled(people)
