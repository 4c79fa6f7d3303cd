"""Packages that import their public names at the first use (in a fresh process: ``test_compiled.py``)."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from pathlib import Path

import pytest

import fedjax_async

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = sorted(set((ROOT / "fedjax_async").rglob("__init__.py")) - {ROOT / "fedjax_async/base/__init__.py"})
PACKAGES = {".".join(path.relative_to(ROOT).parent.parts): path.read_text(encoding="utf-8") for path in SOURCES}


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_there_and_listed(name):
    package = importlib.import_module(name)
    assert package.__all__ and set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None, public
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
    assert "__all__" not in PACKAGES[name]  # computed: mypy would take all names for private
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert "lazy.attach(" not in PACKAGES[name] or not modules & set(package.__all__), "an import replaces the name"


FORMS = """
from typing import TYPE_CHECKING
from fedjax_async import lazy
if TYPE_CHECKING:
    from made_up_names.one import Two as Two, one as one, other, third as renamed
TABLE: dict = {}
LIST = []
_private = 1
def function(): pass
__getattr__, __dir__ = lazy.attach(__name__)
"""


def test_public_names_are_those_imported_as_themselves_or_defined(tmp_path, monkeypatch):
    folder = tmp_path / "made_up_names"
    folder.mkdir()
    (folder / "__init__.py").write_text(FORMS, encoding="utf-8")
    (folder / "one.py").write_text("one, Two, other, third = 1, 2, 3, 4", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("made_up_names")
    assert package.__all__ == ["LIST", "TABLE", "Two", "function", "one"]
    assert set(package.__all__) <= set(dir(package)) and "made_up_names.one" not in sys.modules
    for name in ("other", "third", "renamed"):
        assert not hasattr(package, name)
    assert package.Two == 2 and vars(package)["Two"] == 2


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert fedjax_async.__version__ == project["version"]


# package -> the module that is missing, what needs it, and its arguments
OPTIONAL = {
    "pyarrow": ("pyarrow", "data.formats.tables:arrow"),
    "h5py": ("h5py", "data.formats:tff", __file__),
    "pillow": ("PIL", "data.images:import_pillow", "PNG files"),
    "torch": ("torch", "models.weights:_torch", Path("a.pt")),
    "'flwr[simulation]'": ("flwr", "bridges.flower:strategy", "fedbuff", 2, 1),
    "submitit": ("submitit", "results.cluster:_submitit", Path("a"), "local"),
    "ray": ("ray", "results.cluster:connected"),
    "plotly": ("plotly", "results.html_figures:require_plotly"),
    "matplotlib": ("matplotlib", "results.figure:require_matplotlib"),
    "dp-accounting": ("dp_accounting", "results.privacy:require_library"),
    "tensorboard": ("tensorboard", "results.streams:require_streams", ["tensorboard"], "."),
    "wandb": ("wandb", "results.streams:require_streams", ["wandb"], "."),
}


@pytest.mark.parametrize("package", OPTIONAL)
def test_a_missing_package_is_named_with_an_advice_that_works_everywhere(package, monkeypatch):
    module, name, *given = OPTIONAL[package]
    use = pkgutil.resolve_name(f"fedjax_async.{name}")
    names = list(inspect.signature(use).parameters)
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    plain, quoted = re.escape(package.strip("'")), re.escape(package)
    with pytest.raises(ValueError, match=f"^{plain} = not installed: needed for .*; run: pip install {quoted}$"):
        use(**dict(zip(names, given)))


def test_there_is_one_form_of_this_advice():
    """The advice is written in one place; data sets of TFDS and scikit-learn's digits have tests of their own."""
    files = (ROOT / "fedjax_async").rglob("*.py")
    assert [path.name for path in files if "pip install" in path.read_text(encoding="utf-8")] == ["lazy.py"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    ours = extras.keys() - {"test", "dev", "docs", "recipes"}
    given = [re.split(r"[>;\[ ]", each)[0] for name in ours for each in extras[name]]
    others = {"tensorflow-datasets", "importlib_resources", "array-record", "fedjax-async"}
    assert set(given) == {re.split(r"[\['\]]", package.strip("'"))[0] for package in OPTIONAL} | others
