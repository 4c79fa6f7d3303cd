"""Public names of packages, and lazy imports (PEP 562): ``--help`` needs no JAX. Also optional packages.

An ``__init__.py`` has each public name once, as ``from module import name as name``: type checkers take this form for a
public name. :func:`names` reads it from the source text.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import shlex
import sys
import types
from collections.abc import Callable, Iterable


def names(package: str) -> dict[str, str]:
    """The public names of a package, each with its module: those imported ``as`` themselves, and those defined in it.

    Raises ``OSError`` if the package is installed without its source text.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found = {each.name: str(node.module) for node in imports for each in node.names if each.name == each.asname}
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.FunctionDef(name=name)
            ) if not name.startswith("_") or name == "__version__":
                found[name] = package
    return found


def set_all(package: str, more: Iterable[str] = ()) -> dict[str, str]:
    """Set ``__all__`` of a package to its public names and ``more``; returns :func:`names`.

    ``__init__.py`` must not assign ``__all__`` itself: type checkers cannot read a computed list, and mypy then takes
    every name for private.
    """
    found = names(package)
    sys.modules[package].__all__ = sorted({*found, *more})  # type: ignore[attr-defined]
    return found


def attach(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that imports its public names at their first use; sets ``__all__``.

    Its imports are under ``if TYPE_CHECKING``. Modules of the package are found too. No public name may equal the name
    of a module: importing the module would hide it.
    """
    modules = set_all(package)

    def find(name: str) -> object:
        if name in modules:
            value = getattr(importlib.import_module(modules[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # so that this function is not called again
        return value

    return find, lambda: sorted({*modules, *vars(sys.modules[package])})


def optional(module: str, purpose: str, package: str | None = None) -> types.ModuleType:
    """Import a module of an optional package; ``package``: its name for pip, if that is not ``module``'s first part.

    Raises: :func:`missing` if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(package or module.partition(".")[0], purpose) from error


def missing(package: str, purpose: str) -> ValueError:
    """The error for an optional package that is not installed.

    The advice names the package itself and not an extra of this one: so it is the same, and right, whether this package
    was installed from a folder, from a wheel or not at all.
    """
    advice = f"run: pip install {shlex.quote(package)}"
    return ValueError(f"{package} = not installed: needed for {purpose}; {advice}")
