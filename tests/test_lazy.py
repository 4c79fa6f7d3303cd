"""Packages that import their public names at the first use."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedjax_async

ROOT = Path(__file__).resolve().parent.parent
LAZY = ("fedjax_async", "fedjax_async.engine")


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_is_there_and_listed(name):
    package = importlib.import_module(name)
    assert package.__all__ and set(package.__all__) <= set(dir(package))
    for public in package.__all__:
        assert getattr(package, public) is not None, public
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("name", LAZY)
def test_no_public_name_is_that_of_a_module(name):
    """Importing the module would replace the name."""
    package = importlib.import_module(name)
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)


USES = {
    "a name": "from fedjax_async import simulate; simulate.__call__",
    "an attribute": "import fedjax_async; fedjax_async.simulate.__call__",
    "a room": "import fedjax_async; fedjax_async.clock.DELAYS",
    "a module of a room": "import fedjax_async.config; fedjax_async.config.grid.expand",
    "all names": "from fedjax_async import *; simulate, sweep, Settings(updates=1)",
    "all names of the configuration": "from fedjax_async.config import *; prepare, execute",
}


@pytest.mark.parametrize("program", USES.values(), ids=USES)
def test_in_a_fresh_process(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert fedjax_async.__version__ == project["version"]
