"""Scripts of the papers' experiments, imported as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fedjax_async.base import registry

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"


def module(paper: str, name: str) -> ModuleType:
    """A file of an experiment's folder; what it imports from the folders beside it does not stay imported."""
    path, before = sys.path[:], set(sys.modules)
    sys.path.insert(0, str(EXPERIMENTS / paper))  # as for a script that is run
    spec = importlib.util.spec_from_file_location(f"{paper}_{name}", EXPERIMENTS / paper / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    sys.path[:] = path
    for other in {"variants", "common", "known_runs"} & (set(sys.modules) - before):
        del sys.modules[other]
    return loaded


COMPARED = {path.stem for paper in ("comparison", "lessons") for path in (EXPERIMENTS / paper).glob("*.py")}


def comparing(paper: str, *names: str) -> Iterator[SimpleNamespace]:
    """For a fixture: scripts of ``comparison`` or ``lessons`` and what they import from both; nothing of them stays."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "ADDED", {kind: dict(added) for kind, added in registry.ADDED.items()})
        scripts = {name: module(paper, name) for name in names}
        yield SimpleNamespace(**{name: sys.modules[name] for name in COMPARED & set(sys.modules)} | scripts)
    registry.forget()
    for name in COMPARED & (set(sys.modules) - before):
        del sys.modules[name]
