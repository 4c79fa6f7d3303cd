"""What functions, classes and modules do, as the contents of a fingerprint (``fingerprints.py``).

Of the user's own code: byte code, constants, defaults, closures and attributes, and everything that it uses of the
user's own modules. Of an installed package: names, and the package's version.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import dis
import functools
import importlib
import os
import pathlib
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

Contents = Iterator[bytes | tuple[str, object]]  # bytes, and objects with a name for error messages


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


_HAS_DOCSTRING = 0x4000000  # a flag of code objects, from Python 3.14 on
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def code_of(code: types.CodeType) -> Contents:
    """Byte code, arguments, names and constants, without the docstring."""
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


_MARKS = ("compact", "nowrap")  # what flax sets on methods says no more than their code


def function_of(thing: types.FunctionType) -> Contents:
    """Closure, defaults and, of the user's own code, the code, what it uses, and attributes of the function."""
    module = thing.__globals__.get("__name__") or "__main__"
    package, inner = package_of(module), "<locals>" in thing.__code__.co_qualname
    if package is not None:
        yield f"{package} {module} {thing.__code__.co_qualname}".encode()
        if not inner and thing.__name__ != "<lambda>":
            return
        yield "code", thing.__code__  # others may have this name; a line number would change with the text above it
    names = _names(thing.__code__)
    for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or ()):
        try:
            yield from _held(f"{thing.__qualname__}'s {name}", cell.cell_contents, names)
        except ValueError:  # not yet set
            yield b"an empty cell"
    for number, default in enumerate(thing.__defaults__ or ()):
        yield from _held(f"{thing.__qualname__}'s default {number}", default, names)
    for name, default in (thing.__kwdefaults__ or {}).items():
        yield name.encode()
        yield from _held(f"{thing.__qualname__}'s default of {name}", default, names)
    if package is None:
        yield f"code of {thing.__qualname__}", thing.__code__
        yield from _used(thing.__code__, thing.__globals__)
        for name, value in sorted(vars(thing).items()):
            if not name.startswith("__") and name not in _MARKS:
                yield f"attribute {name}".encode()
                yield f"{thing.__qualname__}.{name}", value


def _names(code: types.CodeType) -> set[str]:
    """The names of attributes and globals in a function and in those inside it."""
    inside = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inside)


def _held(name: str, value: object, names: Collection[str]) -> Contents:
    """What a function holds; of a module of the user's own, what the function uses of it."""
    if isinstance(value, types.ModuleType) and package_of(value.__name__) is None:
        yield from _from_module(value.__name__, value, names, set())
    else:
        yield name, value


def _used(code: types.CodeType, variables: Mapping[str, object]) -> Contents:
    """What code takes from its module: global variables, and what it imports itself."""
    modules: dict[str, types.ModuleType | None] = {}
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
    for place, step in enumerate(steps):
        if step.opname in _GLOBAL and step.argval in variables:
            found = variables[step.argval]
            if isinstance(found, types.ModuleType):
                modules[found.__name__] = found
            else:
                yield step.argval.encode()
                yield f"global variable {step.argval}", found
        elif step.opname == "IMPORT_NAME":
            level, members = (before.argval for before in steps[place - 2 : place])
            found = _imported("." * level + step.argval, members or (), variables)
            modules[step.argval if found is None else found.__name__] = found
    for name, module in sorted(modules.items()):
        yield from _from_module(name, module, _names(code), set())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used(constant, variables)


def _imported(name: str, members: Collection[str], variables: Mapping[str, Any]) -> types.ModuleType | None:
    """The module of an import statement, ``.name`` for a relative one, with those of its ``members`` that are modules.

    None if there is no such module.
    """
    package = variables.get("__package__") or str(variables.get("__name__")).rpartition(".")[0]
    try:
        module = importlib.import_module(name, package)
    except ImportError:
        return None
    for member in members if package_of(module.__name__) is None else ():
        if not hasattr(module, member):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{module.__name__}.{member}")
    return module


def _from_module(name: str, module: types.ModuleType | None, names: Collection[str], seen: set[str]) -> Contents:
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


def module_of(thing: types.ModuleType) -> Contents:
    """A module that an object holds, of which it may use anything; of an installed package only its name."""
    package = package_of(thing.__name__)
    yield f"{package or ''} {thing.__name__}".encode()
    for name, value in sorted(vars(thing).items()) if package is None else ():
        if not name.startswith("__"):
            yield name.encode()
            yield f"{thing.__name__}.{name}", value


# What Python and the abstract base classes add to a class.
_OF_CLASSES = frozenset((
    "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__",
    "_abc_impl", "__orig_bases__", "__parameters__", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__slotnames__", "__subclasshook__",
))  # fmt: skip


# What NamedTuple adds to a class, in functions of its own.
_OF_TUPLES = frozenset(vars(collections.namedtuple("_OF_TUPLES", "")))


def _is_of_tuples(name: str, member: object) -> bool:
    """Whether a member of a NamedTuple is one that every NamedTuple has: its fields, and functions to make it."""
    if name in _OF_TUPLES and not callable(getattr(member, "__func__", member)):
        return True
    code = getattr(member, "__func__", member)
    home = getattr(code, "__globals__", {}).get("__name__", "")
    generated = name in _OF_TUPLES and (home == "collections" or str(home).startswith("namedtuple_"))
    return generated or type(member).__name__ == "_tuplegetter"


def class_of(thing: type) -> Contents:
    """Its bases, methods and values, if it is the user's own; else its name."""
    package = package_of(thing.__module__)
    yield f"class {package or ''} {thing.__qualname__}".encode()
    if package is not None:
        return
    for base in thing.__bases__:
        yield "a base class", base
    members = {name: member for name, member in vars(thing).items() if name not in _OF_CLASSES}
    if issubclass(thing, tuple) and hasattr(thing, "_fields"):
        yield "fields", (thing._fields, vars(thing).get("_field_defaults"))
        members = {name: member for name, member in members.items() if not _is_of_tuples(name, member)}
    for name in sorted(members):
        if not isinstance(members[name], (types.MemberDescriptorType, types.GetSetDescriptorType)):
            yield name.encode()
            yield f"{thing.__qualname__}.{name}", members[name]
    for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        if field.default_factory is not dataclasses.MISSING:
            yield f"default of {field.name}", field.default_factory
