"""The registry of data sets, and what ``fedjax-async data list`` and ``verify`` show."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async.data import tfds
from fedjax_async.data.archive import read_files
from fedjax_async.data.cache import read_cache
from fedjax_async.data.dataset import Dataset, Federation
from fedjax_async.data.embedded import digits, fashion_mnist_6k
from fedjax_async.data.load import cifar10, cifar100, fashion_mnist, har, load_tfds, mnist, newsgroups20
from fedjax_async.data.memmap import folder
from fedjax_async.data.population import population
from fedjax_async.data.published import Arrays, Package, Published, array_hash, file_hash
from fedjax_async.data.quadratic import quadratic
from fedjax_async.data.sources import PRETRAINED, SOURCES
from fedjax_async.data.synthetic import synthetic
from fedjax_async.home import (
    arrays_folder,
    missing,
    pretrained_folder,
    require_pretrained,
    resolve_data_dir,
    tfds_home,
    tfds_version_folder,
)
from fedjax_async.registry import bind, find, summary

DATASETS: dict[str, Callable[..., Dataset | Federation]] = {
    "fashion_mnist_6k": fashion_mnist_6k,
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "har": har,
    "newsgroups20": newsgroups20,
    "quadratic": quadratic,
    "synthetic": synthetic,
    "population": population,
    "folder": folder,
    "tfds": load_tfds,
}


class Listed(NamedTuple):
    """One line of the list of data sets."""

    name: str
    size: str  # training + test examples
    state: str  # embedded | generated | in its folder | ready | to fetch | needs ... | not available offline
    source: str
    licence: str
    about: str


class Checked(NamedTuple):
    """One hash that was compared."""

    what: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        """Whether they agree."""
        return self.expected == self.found


def load(spec: str, data_dir: str | os.PathLike[str] | None = None) -> Any:
    """The ``Dataset`` or ``Federation`` of a spec, such as ``"mnist"`` or ``"synthetic:alpha=1,beta=1"``.

    ``data_dir``: where fetched data sets are; by default ``$FEDJAX_ASYNC_DATA``, else
    ``~/.cache/fedjax_async``. Raises ``ValueError`` for unknown names and for data that must be fetched first.

    >>> load("fashion_mnist_6k").x.shape
    (5000, 28, 28)
    """
    return bind("dataset", DATASETS, spec, data_dir=data_dir)()


def list_datasets(data_dir: str | os.PathLike[str] | None = None) -> list[Listed]:
    """All data sets, then the pretrained models, with their state on this machine; nothing is loaded."""
    home = resolve_data_dir(data_dir)
    digits_state = "ready" if importlib.util.find_spec("sklearn") else "needs scikit-learn"
    cifar100_state = "ready" if _has_cifar100(home) else "not available offline"
    facts = {
        "fashion_mnist_6k": ("5,000 + 1,000", "embedded", "this package", "MIT"),
        "digits": ("1,438 + 359", digits_state, "scikit-learn's package", "CC BY 4.0"),
        "cifar100": ("50,000 + 10,000", cifar100_state, "TensorFlow Datasets", "none stated"),
        "quadratic": ("any", "generated", "this package", "-"),
        "synthetic": ("any", "generated", "this package", "-"),
        "population": ("any", "generated", "this package", "-"),
        "folder": ("any", "in its folder", "data.write_folder", "each its own"),
        "tfds": ("any", "not available offline", "TensorFlow Datasets", "each its own"),
    }
    for name, published in SOURCES.items():
        state = "ready" if _is_here(name, home) else "to fetch"
        size = " + ".join(f"{n:,}" for n in published.examples)
        facts[name] = (size, state, _source(published.package), published.licence)
    rows = [Listed(name, *facts[name], about=summary(entry)) for name, entry in DATASETS.items()]
    for name, model in PRETRAINED.items():
        state = "ready" if pretrained_folder(name, model.version, home).is_dir() else "to fetch"
        rows.append(Listed(name, "weights", state, _source(model.package), model.licence, model.about))
    return rows


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Checked]:
    """Hash a fetched data set again, the prepared arrays and the TFDS folder, against the published values.

    Of a pretrained model, its files. Returns a row for each; raises ``ValueError`` if there is nothing to verify.
    """
    published = find("dataset", SOURCES | PRETRAINED, name)
    home = resolve_data_dir(data_dir)
    if name in PRETRAINED:
        return _verify_pretrained(name, home)
    cached = read_cache(arrays_folder(name, published.version, home), f"run: fedjax-async data fetch {name}")
    rows = [] if cached is None else _compare("arrays", published, cached)
    if published.in_tfds and tfds.installed() and tfds_version_folder(name, home):
        rows += _compare("tfds", published, tfds.read_in_order(name, home))
    if not rows:
        raise missing(name, home)
    return rows


def _verify_pretrained(name: str, home: Path) -> list[Checked]:
    """A row for each file of a pretrained model."""
    pretrained = PRETRAINED[name]
    folder = require_pretrained(name, home)
    files = read_files(folder, pretrained.files)
    hashes = pretrained.files.items()
    return [Checked(f"files/{file}", expected, file_hash(files[file], expected)) for file, expected in hashes]


def _compare(kind: str, published: Published, arrays: Arrays) -> list[Checked]:
    pairs = arrays.present().items()
    return [Checked(f"{kind}/{field}", published.arrays[field], array_hash(array)) for field, array in pairs]


def _source(package: Package) -> str:
    return f"{package.client}: {package.name} {package.version} ({package.megabytes} MB)"


def _has_cifar100(home: Path) -> bool:
    prepared = tfds.installed() and tfds_home("cifar100", home) is not None
    return prepared or (home / "arrays" / "cifar100").is_dir()


def _is_here(name: str, home: Path) -> bool:
    """Whether a published data set can be loaded without a network."""
    prepared = tfds.installed() and tfds_home(name, home) is not None
    return prepared or arrays_folder(name, SOURCES[name].version, home).is_dir()
