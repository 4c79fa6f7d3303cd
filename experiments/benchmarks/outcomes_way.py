"""The way of ``outcomes.py``: the package's functions that run from the call of ``simulate`` to the first local step.

``sys.setprofile`` sees them. The way ends where JAX first executes a program that contains a gradient: XLA's text of
such a program has the name that JAX gives to a transposed derivative. So nothing here depends on names in the package;
it depends on a class of JAX that is not public, ``ExecuteReplicated``, which executes compiled programs. Comprehensions
and lambdas do not count as functions.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from jax._src.interpreters import pxla

import fedjax_async
from fedjax_async import simulate

ROOT = str(Path(fedjax_async.__file__).parent) + "/"
GRADIENT = "transpose(jvp"
SETTINGS: dict[str, Any] = {"method": "fedbuff@buffer:size=2", "model": "logistic", "clients": 4, "updates": 4}
# parameter -> its value, and a number in it that nothing else in the run has
VALUES: dict[str, tuple[Any, float]] = {
    "delay": ("lognormal:sigma=0.5123", 0.5123),
    "timing": ("window:length=7.513", 7.513),
    "lr": (0.0512345, 0.0512345),
}


def import_all() -> None:
    """Import every module of the package, so that no import counts; those that need an extra are left out."""
    for module in pkgutil.walk_packages(fedjax_async.__path__, "fedjax_async."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


@contextlib.contextmanager
def watched(look: Callable[[FrameType], None]) -> Iterator[None]:
    """Call ``look(frame)`` at each call and return of the package's functions until a gradient is executed.

    ``RuntimeError`` if none is: JAX executes programs in another way, or the package calls a program again.
    """
    before, on = pxla.ExecuteReplicated.__call__, True

    def execute(self: Any, *given: Any) -> Any:
        nonlocal on
        on = on and GRADIENT not in self.xla_executable.hlo_modules()[0].to_string()
        return before(self, *given)

    def hook(frame: FrameType, event: str, given: Any) -> None:
        del given
        if on and event in ("call", "return") and frame.f_code.co_filename.startswith(ROOT):
            look(frame)

    pxla.ExecuteReplicated.__call__ = execute  # type: ignore[method-assign]
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        pxla.ExecuteReplicated.__call__ = before  # type: ignore[method-assign]
    if on:
        raise RuntimeError("no program with a gradient was executed")


def counted(codes: set[CodeType]) -> dict[str, int]:
    """The number of files and of functions of these code objects."""
    functions = {code for code in codes if not code.co_name.startswith("<")}
    return {"files": len({code.co_filename for code in codes}), "functions": len(functions), "code objects": len(codes)}


def of_run(**settings: Any) -> dict[str, int]:
    """The way of one run."""
    found: set[CodeType] = set()
    with watched(lambda frame: found.add(frame.f_code)):
        simulate(**settings)
    return counted(found)


def of_values() -> dict[str, dict[str, int]]:
    """Parameter -> the functions of the way that have its value among their arguments or variables."""
    found: dict[str, set[CodeType]] = {name: set() for name in VALUES}
    given = {name: value for name, (value, _) in VALUES.items()}

    def look(frame: FrameType) -> None:
        local = list(frame.f_locals.values())
        for name, (_, number) in VALUES.items():
            if any(holds(value, number) for value in local):
                found[name].add(frame.f_code)

    with watched(look):
        simulate(**SETTINGS | {"method": "fedbuff"} | given)
    return {name: counted(codes) for name, codes in found.items()}


def holds(value: Any, number: float) -> bool:
    """Whether a variable is the number, or a text with it."""
    if isinstance(value, str):
        return str(number) in value
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def measure(what: str) -> dict[str, dict[str, int]]:
    """``runs``: the way of the first run of a process, and of the same run once more; ``values``: of parameters."""
    import_all()
    if what == "runs":
        return {name: of_run(**SETTINGS) for name in ("first run", "same run again")}
    return {f"value of {name}": way for name, way in of_values().items()}
