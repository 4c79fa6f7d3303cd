"""``fingerprint``: a hash of what an object does, equal in every process that runs the same source.

Functions are hashed by their byte code, constants, defaults and closures, and so is everything that they use of the
user's own modules; their docstrings, comments, file names and line numbers do not count. What an installed package
defines is hashed by its name and the package's version. Byte code, and so the hashes, differ between Python's versions.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import dis
import enum
import functools
import hashlib
import importlib
import importlib.machinery
import logging
import numbers
import os
import pathlib
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from fedjax_async.base import inputs

LENGTH = 32  # characters
_ADDED_LATER = ("class_names", "group_names", "client_names", "joint", "policy")  # fields that do not count if None

Contents = Iterator[bytes | tuple[str, object]]  # bytes, and objects with a name for error messages


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


@functools.cache
def package_of(module: str) -> str | None:
    """Name and version of the installed package that a module belongs to; ``None`` for the user's own code."""
    top = module.partition(".")[0]
    if top == "__main__":
        return None
    loaded = sys.modules.get(top)
    file = getattr(loaded, "__file__", None) or next(iter(getattr(loaded, "__path__", ())), None)
    if top in sys.stdlib_module_names:
        library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
        if file is None or os.path.realpath(file).startswith(tuple(map(os.path.realpath, library))):
            return top
    installed = file is not None and {"site-packages", "dist-packages"} & set(pathlib.PurePath(file).parts)
    if top != __name__.partition(".")[0] and not installed:
        return None
    try:
        version = metadata.version(top)
    except metadata.PackageNotFoundError:
        owners = metadata.packages_distributions().get(top)
        version = metadata.version(owners[0]) if owners else str(getattr(loaded, "__version__", ""))
    return f"{top} {version}"


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


def _items(thing: Mapping[object, object]) -> Contents:
    yield from _class_part(thing, dict)
    for key, value in thing.items():
        yield "a key", key
        yield str(key), value


def _sequence(thing: Sequence[object]) -> Contents:
    yield from _class_part(thing, tuple, list, collections.deque)
    names = getattr(thing, "_fields", map(str, range(len(thing))))
    yield from ((of, one) for of, one in zip(names, thing) if one is not None or of not in _ADDED_LATER)


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
    array = np.asarray(thing.detach().cpu().numpy() if hasattr(thing, "detach") else thing)  # PyTorch
    yield f"array {array.dtype.str} {array.dtype} {array.shape}".encode()
    if array.dtype.hasobject:
        yield "entries", array.tolist()
    else:
        yield hashlib.blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()


# --- code -------------------------------------------------------------------------------------------

_HAS_DOCSTRING = 0x4000000  # a flag of code objects, from Python 3.14 on
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def _code(code: types.CodeType) -> Contents:
    yield code.co_code
    yield code.co_exceptiontable
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield repr((counts, arguments, code.co_names, len(code.co_freevars))).encode()
    constants = list(code.co_consts)
    function = code.co_flags & 1 and code.co_name not in _COMPREHENSIONS
    if sys.version_info >= (3, 14):
        function = code.co_flags & _HAS_DOCSTRING
    if function and constants and isinstance(constants[0], str):
        constants[0] = None  # the docstring
    for constant in constants:
        yield "a constant", constant


def _function(thing: types.FunctionType) -> Contents:
    module = thing.__globals__.get("__name__") or "__main__"
    package, inner = package_of(module), "<locals>" in thing.__code__.co_qualname
    if package is not None:
        yield f"{package} {module} {thing.__code__.co_qualname} {thing.__code__.co_firstlineno}".encode()
        if not inner:
            return
    for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or ()):
        try:
            yield f"{thing.__qualname__}'s {name}", cell.cell_contents
        except ValueError:  # not yet set
            yield b"an empty cell"
    for number, default in enumerate(thing.__defaults__ or ()):
        yield f"{thing.__qualname__}'s default {number}", default
    for name, default in (thing.__kwdefaults__ or {}).items():
        yield name.encode()
        yield f"{thing.__qualname__}'s default of {name}", default
    if package is None:
        yield f"code of {thing.__qualname__}", thing.__code__
        yield from _used(thing.__code__, thing.__globals__)


def _used(code: types.CodeType, variables: Mapping[str, Any]) -> Contents:
    """What code takes from its module: global variables, and what it imports itself."""
    modules: dict[str, types.ModuleType | None] = {}
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL and step.argval in variables:
            found = variables[step.argval]
            if isinstance(found, types.ModuleType):
                modules[found.__name__] = found
            else:
                yield step.argval.encode()
                yield f"global variable {step.argval}", found
        elif step.opname == "IMPORT_NAME" and step.argval:
            try:
                modules[step.argval] = importlib.import_module(step.argval)
            except ImportError:
                modules[step.argval] = None
    for name, module in sorted(modules.items()):
        yield from _from_module(name, module, code.co_names, set())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used(constant, variables)


def _from_module(name: str, module: types.ModuleType | None, names: Iterable[str], seen: set[str]) -> Contents:
    """A module, as used by code that mentions ``names``; of the user's own module, the attributes with these names."""
    package = package_of(name)
    yield f"{package or ''} {name}".encode()
    if package is not None or module is None or name in seen:
        return
    for attribute in sorted(set(names) & set(vars(module))):
        found = vars(module)[attribute]
        yield attribute.encode()
        if isinstance(found, types.ModuleType):
            yield from _from_module(found.__name__, found, names, {*seen, name})
        else:
            yield f"{name}.{attribute}", found


def _module(thing: types.ModuleType) -> Contents:
    yield f"{package_of(thing.__name__) or ''} {thing.__name__}".encode()


# What Python and the abstract base classes add to a class.
_OF_CLASSES = frozenset((
    "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__",
    "_abc_impl", "__orig_bases__", "__parameters__", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__slotnames__", "__subclasshook__",
))  # fmt: skip


def _class(thing: type) -> Contents:
    package = package_of(thing.__module__)
    yield f"class {package or ''} {thing.__qualname__}".encode()
    if package is not None:
        return
    for base in thing.__bases__:
        yield "a base class", base
    members = {name: member for name, member in vars(thing).items() if name not in _OF_CLASSES}
    if issubclass(thing, tuple) and hasattr(thing, "_fields"):
        yield "fields", (thing._fields, vars(thing).get("_field_defaults"))
        made = (types.FunctionType, property, classmethod, staticmethod)
        members = {name: m for name, m in members.items() if isinstance(m, made) and not name.startswith("_")}
    for name in sorted(members):
        if not isinstance(members[name], (types.MemberDescriptorType, types.GetSetDescriptorType)):
            yield name.encode()
            yield f"{thing.__qualname__}.{name}", members[name]
    for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        if field.default_factory is not dataclasses.MISSING:
            yield f"default of {field.name}", field.default_factory


# --- instances --------------------------------------------------------------------------------------


def _described(*parts: object) -> Contents:
    """Strings as bytes, anything else as a part."""
    for number, part in enumerate(parts):
        yield part.encode() if isinstance(part, str) else (f"part {number}", part)


def _builtin(thing: types.BuiltinFunctionType) -> Contents:
    yield f"built-in {thing.__module__} {thing.__qualname__}".encode()
    if thing.__self__ is not None and not isinstance(thing.__self__, types.ModuleType):
        yield thing.__qualname__, thing.__self__


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
_READERS: tuple[tuple[Any, Any], ...] = (
    (type, _class),
    (enum.Enum, lambda thing: _described("enum", thing.name, type(thing))),
    ((type(None), bool, type(...), type(NotImplemented)), _plain),
    ((np.ndarray, np.generic), _array),
    ((str, bytes, bytearray, numbers.Number, range, slice, *_CALENDAR), _plain),
    (types.CodeType, _code),
    (types.FunctionType, _function),
    (types.MethodType, lambda thing: _described("method", thing.__self__, thing.__func__)),
    (functools.partial, lambda thing: _described("partial", thing.func, thing.args, thing.keywords)),
    (types.BuiltinFunctionType, _builtin),
    (types.MethodWrapperType, lambda thing: _described("method", thing.__name__, thing.__self__)),
    (_DESCRIPTORS, lambda thing: _described("descriptor", thing.__qualname__)),
    ((staticmethod, classmethod), lambda thing: _described(type(thing).__name__, thing.__func__)),
    (property, lambda thing: _described("property", thing.fget, thing.fset)),
    (functools.cached_property, lambda thing: _described("property", thing.func)),
    (types.ModuleType, _module),
    (np.ufunc, lambda thing: _described("ufunc", thing.__name__)),
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
        return _described("wrapper", type(thing).__qualname__, thing.__wrapped__)
    if hasattr(thing, "__array__") and hasattr(thing, "dtype"):
        return _array(thing)
    return None


def _instance(thing: object) -> Contents | None:
    """Class and attributes of an object; ``None`` if a part of its state cannot be read."""
    kind = type(thing)
    if any(map(_written_in_c, kind.__mro__[:-1])):
        return None
    if dataclasses.is_dataclass(thing):
        linen = any(base.__module__.startswith("flax.linen") for base in kind.__mro__)
        names = [field.name for field in dataclasses.fields(thing) if not (linen and field.name == "parent")]
    else:
        slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
        names = [name for one in slots for name in ((one,) if isinstance(one, str) else one)]
        if not hasattr(thing, "__dict__") and not any("__slots__" in vars(base) for base in kind.__mro__):
            return None
        cached = {n for base in kind.__mro__ for n, v in vars(base).items() if isinstance(v, functools.cached_property)}
        names += [name for name in vars(thing) if name not in cached] if hasattr(thing, "__dict__") else []
    names = sorted(set(names) - {"__dict__", "__weakref__"})
    return _attributes(kind, {name: getattr(thing, name) for name in names if hasattr(thing, name)})


def _written_in_c(kind: type) -> bool:
    """Whether a class is not written in Python, so that it may keep a state that Python cannot read."""
    spec = getattr(sys.modules.get(kind.__module__), "__spec__", None)
    origin = str(getattr(spec, "origin", None))
    return "__module__" not in vars(kind) or origin == "built-in" or origin.endswith(_SUFFIXES)


def _attributes(kind: type, named: Mapping[str, Any]) -> Contents:
    yield "class", kind
    for name, value in named.items():
        yield name.encode()
        yield f"{kind.__name__}.{name}", value
