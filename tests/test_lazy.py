"""Packages that import their public names at the first use."""

from __future__ import annotations

import importlib
import pkgutil
import re
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


@pytest.mark.slow_cases("all names of the configuration", "an attribute", "a name")
@pytest.mark.parametrize("program", USES.values(), ids=USES)
def test_in_a_fresh_process(program):
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert fedjax_async.__version__ == project["version"]


def _arrow():
    from fedjax_async.data.formats.tables import arrow

    arrow()


def _hdf5():
    from fedjax_async.data.formats import tff

    tff(path=__file__)


def _pillow():
    from fedjax_async.data.images import import_pillow

    import_pillow("PNG files")


def _weights():
    from fedjax_async.models import weights

    weights._torch(Path("a.pt"))


def _strategy():
    from fedjax_async.config.flower import strategy

    strategy("fedbuff", clients=2, rounds=1)


def _submitted():
    from fedjax_async.results import cluster

    cluster._submitit(Path("a"), "local")


def _ray():
    from fedjax_async.results import ray_tasks

    ray_tasks.connected()


def _report():
    from fedjax_async.results.html_figures import require_plotly

    require_plotly()


def _pictures():
    from fedjax_async.results.figure import require_matplotlib

    require_matplotlib()


def _epsilon():
    from fedjax_async.results.privacy import require_library

    require_library()


def _stream(name):
    from fedjax_async.results.streams import require_streams

    require_streams([name], ".")


# package -> the module that is missing, and what needs it
OPTIONAL = {
    "pyarrow": ("pyarrow", _arrow),
    "h5py": ("h5py", _hdf5),
    "pillow": ("PIL", _pillow),
    "torch": ("torch", _weights),
    "'flwr[simulation]'": ("flwr", _strategy),
    "submitit": ("submitit", _submitted),
    "ray": ("ray", _ray),
    "plotly": ("plotly", _report),
    "matplotlib": ("matplotlib", _pictures),
    "dp-accounting": ("dp_accounting", _epsilon),
    "tensorboard": ("tensorboard", lambda: _stream("tensorboard")),
    "wandb": ("wandb", lambda: _stream("wandb")),
}


@pytest.mark.parametrize("package", OPTIONAL)
def test_a_missing_package_is_named_with_an_advice_that_works_everywhere(package, monkeypatch):
    module, use = OPTIONAL[package]
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    plain, quoted = re.escape(package.strip("'")), re.escape(package)
    with pytest.raises(ValueError, match=f"^{plain} = not installed: needed for .*; run: pip install {quoted}$"):
        use()


def test_there_is_one_form_of_this_advice():
    """The advice is written in one place; data sets of TFDS and scikit-learn's digits have tests of their own."""
    files = (ROOT / "fedjax_async").rglob("*.py")
    assert [path.name for path in files if "pip install" in path.read_text(encoding="utf-8")] == ["lazy.py"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    ours = [each for name, listed in extras.items() if name not in ("test", "dev") for each in listed]
    given = [re.split(r"[>;\[ ]", each)[0] for each in ours]
    others = {"tensorflow-datasets", "importlib_resources", "array-record", "fedjax-async"}
    assert set(given) == {re.split(r"[\['\]]", package.strip("'"))[0] for package in OPTIONAL} | others
