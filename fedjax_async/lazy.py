"""Lazy imports (PEP 562): a package imports a public name at its first use, so that ``--help`` needs no JAX.

Also optional packages, which are imported where they are needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for ``package``; ``names``: public name -> the module of ``package`` that has it.

    Modules of the package are found too. No public name may equal the name of a module: importing the module would
    hide it.
    """

    def find(name: str) -> Any:
        if name in names:
            value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # so that this function is not called again
        return value

    return find, lambda: sorted({*names, *vars(sys.modules[package])})


def optional(module: str, purpose: str, package: str | None = None) -> Any:
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
