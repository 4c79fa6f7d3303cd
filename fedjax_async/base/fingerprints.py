"""``fingerprint``: a hash of what an object does, equal in every process that runs the same source.

Functions are hashed by their byte code, constants, defaults and closures, and so is everything that they use of the
user's own modules; their docstrings, comments, file names and line numbers do not count. What an installed package
defines is hashed by its name and the package's version. Byte code, and so the hashes, differ between Python's versions.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import functools
import hashlib
import importlib
import importlib.machinery
import logging
import numbers
import pathlib
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_async.base import code, inputs
from fedjax_async.base.code import Contents

LENGTH = 32  # characters
_ADDED_LATER = ("class_names", "group_names", "client_names", "joint", "policy")  # fields that do not count if None


def fingerprint(thing: object) -> str:
    """Hash what ``thing`` does: its code, constants, options and arrays; 32 hexadecimal characters.

    Takes functions, closures, ``functools.partial``, jitted and cached functions, bound methods, classes, NamedTuples,
    dataclasses, flax modules, containers, numbers, text and arrays. The hash changes with every constant, default,
    closure value and array entry, and with every function and global variable that is used of the user's own modules.

    Raises ``ValueError``, naming the part, for an object with a hidden state: open files, locks, iterators, traced
    values.

    >>> fingerprint({"limit": 2}) == fingerprint({"limit": 2}) != fingerprint({"limit": 2.0})
    True
    """
    return _Reader().digest("it", thing).hex()


class _Reader:
    """Digests of objects. Each object is read once; where it contains itself, its depth stands for it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, bytes]] = {}  # the object too: while it lives, no other has its id
        self._open: dict[int, int] = {}
        self._path: list[str] = []

    def digest(self, name: str, thing: object) -> bytes:
        if (known := self._known.get(id(thing))) is not None:
            return known[1]
        if id(thing) in self._open:
            return b"inside itself, at depth %d" % self._open[id(thing)]
        self._open[id(thing)] = len(self._open)
        self._path.append(name)
        total = hashlib.blake2b(digest_size=LENGTH // 2)
        try:
            for content in self._contents(thing):
                data = content if isinstance(content, bytes) else self.digest(*content)
                total.update(b"%d:" % len(data) + data)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            found = f"{' -> '.join(self._path[1:]) or 'the object'} = {_shown(thing)}"
            allowed = "of functions, dataclasses, containers, numbers, text and arrays"
            raise ValueError(f"fingerprint of {found}: must be {allowed}; {error}") from None
        self._path.pop()
        del self._open[id(thing)]
        self._known[id(thing)] = (thing, total.digest())
        return total.digest()

    def _contents(self, thing: object) -> Contents:
        """The contents of an object: bytes, and parts that are read recursively."""
        for kinds, read in _READERS:
            if isinstance(thing, kinds):
                yield from read(thing)
                return
        if isinstance(thing, (set, frozenset)):  # their order may differ between processes
            yield type(thing).__name__.encode()
            yield from sorted(self.digest("an element", element) for element in thing)
        elif (contents := _special(thing) or _instance(thing)) is not None:
            yield from contents
        else:
            raise TypeError("it has a state that cannot be seen from outside")


def _shown(thing: object) -> str:
    try:
        text = repr(thing)
    except Exception:  # an object of the user's own may raise anything
        return f"a {type(thing).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(thing: object) -> Contents:
    yield type(thing).__name__.encode()
    yield repr(thing).encode(errors="surrogatepass")
    yield from _beside(thing)


def _items(thing: Mapping[object, object]) -> Contents:
    yield from _class_part(thing, dict)
    if isinstance(thing, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        return  # a memory of what was computed, as that of functools.singledispatch
    for key, value in thing.items():
        yield "a key", key
        yield str(key), value
    if (default := getattr(thing, "default_factory", None)) is not None:
        yield "default_factory", default
    yield from _beside(thing)


def _sequence(thing: Sequence[object]) -> Contents:
    yield from _class_part(thing, tuple, list, collections.deque)
    names = getattr(thing, "_fields", map(str, range(len(thing))))
    yield from ((of, one) for of, one in zip(names, thing) if one is not None or of not in _ADDED_LATER)
    if (longest := getattr(thing, "maxlen", None)) is not None:
        yield "maxlen", longest
    yield from _beside(thing)


def _beside(thing: object) -> Contents:
    """The attributes of a container, a text or a number, if its class is the user's own."""
    kind = type(thing)
    if code.package_of(kind.__module__) is None and (names := _own_names(thing)):
        yield from _attributes(kind, {name: vars(thing)[name] for name in names})


def _class_part(thing: object, *plain: type) -> Contents:
    yield type(thing).__name__.encode()
    if type(thing) not in plain:
        yield "class", type(thing)


# --- arrays -----------------------------------------------------------------------------------------


def _array(thing: Any) -> Contents:
    """Type, shape and entries; JAX's random keys by their data."""
    if (jax := sys.modules.get("jax")) is not None:
        if isinstance(thing, jax.core.Tracer):
            raise ValueError(f"fingerprint of {_shown(thing)}: must be taken of values, not inside a traced function")
        if str(thing.dtype).startswith("key<"):  # an array of keys, or a variable of flax.nnx that holds one
            yield str(thing.dtype).encode()
            thing = jax.random.key_data(thing[...])
    if isinstance(thing, np.memmap) and (found := inputs.mapped(thing)) is not None:
        yield found.encode()
        return
    if isinstance(thing, np.ma.MaskedArray):
        yield "mask", np.ma.getmaskarray(thing)
    array = np.asarray(thing.detach().cpu().numpy() if hasattr(thing, "detach") else thing)  # PyTorch
    yield f"array {array.dtype.str} {array.dtype} {array.shape}".encode()
    if array.dtype.hasobject:
        yield "entries", array.tolist()
    else:
        yield hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


# --- instances --------------------------------------------------------------------------------------


def _described(*parts: object) -> Contents:
    """Strings as bytes, anything else as a part."""
    for number, part in enumerate(parts):
        yield part.encode() if isinstance(part, str) else (f"part {number}", part)


def _builtin(thing: types.BuiltinFunctionType) -> Contents:
    yield f"built-in {thing.__module__} {thing.__qualname__}".encode()
    if thing.__self__ is not None and not isinstance(thing.__self__, types.ModuleType):
        yield thing.__qualname__, thing.__self__


def _ufunc(thing: np.ufunc) -> Contents:
    """One of NumPy or SciPy, by its name; ``np.frompyfunc`` hides the function that it was made of."""
    if {*"".join(thing.types)} <= {*"O->"}:
        raise TypeError("it hides its function: give np.vectorize in place of np.frompyfunc")
    return _described("ufunc", thing.__name__)


def _generator(thing: np.random.Generator) -> Contents:
    return _described("random generator", thing.bit_generator.state)


_DESCRIPTORS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_CALENDAR = (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)

_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)

# The first entry with a matching type reads the object.
_READERS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Contents]], ...] = (
    (type, code.class_of),
    (enum.Enum, lambda thing: _described("enum", thing.name, type(thing))),
    ((type(None), bool, type(...), type(NotImplemented)), _plain),
    ((np.ndarray, np.generic), _array),
    ((str, bytes, bytearray, numbers.Number, range, slice, *_CALENDAR), _plain),
    (types.CodeType, code.code_of),
    (types.FunctionType, code.function_of),
    (types.MethodType, lambda thing: _described("method", thing.__self__, thing.__func__)),
    (functools.partial, lambda thing: _described("partial", thing.func, thing.args, thing.keywords)),
    (types.BuiltinFunctionType, _builtin),
    (types.MethodWrapperType, lambda thing: _described("method", thing.__name__, thing.__self__)),
    (_DESCRIPTORS, lambda thing: _described("descriptor", thing.__qualname__)),
    ((staticmethod, classmethod), lambda thing: _described(type(thing).__name__, thing.__func__)),
    (property, lambda thing: _described("property", thing.fget, thing.fset)),
    (functools.cached_property, lambda thing: _described("property", thing.func)),
    (types.ModuleType, code.module_of),
    (np.ufunc, _ufunc),
    # without its memory, which fills when it is called
    (np.vectorize, lambda v: _described("vectorize", v.pyfunc, v.signature, v.otypes, v.excluded)),
    (np.dtype, lambda thing: _described("dtype", str(thing))),
    (np.random.Generator, _generator),
    (logging.Logger, lambda thing: _described("logger", thing.name)),
    (re.Pattern, lambda thing: _described("pattern", thing.pattern, thing.flags)),
    (pathlib.PurePath, lambda thing: _described("path", str(thing))),
    (Mapping, _items),
    ((tuple, list, collections.deque), _sequence),
)


def _special(thing: object) -> Contents | None:
    """Sentinels, types, JAX's tree structures, nnx modules, wrappers (jitted functions), arrays of other libraries."""
    if type(thing) is object:  # a sentinel
        return _described("object")
    is_type = isinstance(thing, (types.UnionType, types.GenericAlias)) or type(thing).__module__ == "typing"
    if is_type or type(thing).__name__ == "PyTreeDef":
        return _described(type(thing).__name__, str(thing))
    if (nnx := sys.modules.get("flax.nnx")) is not None and isinstance(thing, nnx.Module):
        return _described("nnx", type(thing), nnx.split(thing))
    if hasattr(thing, "__wrapped__"):
        return _wrapper(thing)
    if hasattr(thing, "__array__") and hasattr(thing, "dtype"):
        return _array(thing)
    return None


def _wrapper(thing: Any) -> Contents:
    """The function inside, and what else a wrapper in Python has, such as the rules of ``jax.custom_vjp``."""
    kind = type(thing)
    yield from _described("wrapper", kind.__qualname__, thing.__wrapped__)
    if not any(map(_written_in_c, kind.__mro__[:-1])) and not _is_of_package(thing):
        yield from _attributes(kind, {name: v for name, v in vars(thing).items() if not name.startswith("__")})


def _is_of_package(wrapper: object) -> bool:
    """Whether an installed package has made this very wrapper, as ``jax.nn.relu``: then its name is enough."""
    module, name = str(getattr(wrapper, "__module__", "")), str(getattr(wrapper, "__qualname__", ""))
    found = getattr(sys.modules.get(module), name, None) if code.package_of(module) is not None else None
    while found is not None and found is not wrapper:
        found = getattr(found, "__wrapped__", None)
    return found is wrapper


def _instance(thing: object) -> Contents | None:
    """Class and attributes of an object; ``None`` if a part of its state cannot be read."""
    kind = type(thing)
    if any(map(_written_in_c, kind.__mro__[:-1])):
        return None
    fields = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else None
    if any(base.__module__.startswith("flax.linen") for base in kind.__mro__):
        names = [name for name in fields or () if name != "parent"]
    elif not hasattr(thing, "__dict__") and not any("__slots__" in vars(base) for base in kind.__mro__):
        return None
    else:
        names = [*(fields or ()), *(name for base in kind.__mro__ for name in _slots(base)), *_own_names(thing)]
    names = sorted(set(names) - {"__dict__", "__weakref__"})
    return _attributes(kind, {name: getattr(thing, name) for name in names if hasattr(thing, name)})


def _own_names(thing: object) -> list[str]:
    """The names of the attributes of an object itself, without those of ``functools.cached_property``."""
    bases = type(thing).__mro__
    cached = {n for base in bases for n, v in vars(base).items() if isinstance(v, functools.cached_property)}
    return [name for name in getattr(thing, "__dict__", ()) if name not in cached]


def _slots(kind: type) -> list[str]:
    """The names of the slots of a class; of ``__private`` ones, the names that Python gives them."""
    named = vars(kind).get("__slots__", ())
    start = f"_{kind.__name__.lstrip('_')}"
    each = [named] if isinstance(named, str) else list(named)
    return [start + name if name.startswith("__") and not name.endswith("__") else name for name in each]


def _written_in_c(kind: type) -> bool:
    """Whether a class is not written in Python, so that it may keep a state that Python cannot read."""
    spec = getattr(sys.modules.get(kind.__module__), "__spec__", None)
    origin = str(getattr(spec, "origin", None))
    return "__module__" not in vars(kind) or origin == "built-in" or origin.endswith(_SUFFIXES)


def _attributes(kind: type, named: Mapping[str, object]) -> Contents:
    yield "class", kind
    for name, value in named.items():
        yield name.encode()
        yield f"{kind.__name__}.{name}", value
