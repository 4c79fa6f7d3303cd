"""The registry of data sets, and what ``fedjax-async data list`` and ``verify`` show."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_async.data import tfds
from fedjax_async.data.cache import cache_folder, read_cache, resolve_data_dir
from fedjax_async.data.dataset import Dataset, Federation
from fedjax_async.data.embedded import digits, fashion_mnist_6k
from fedjax_async.data.load import cifar10, fashion_mnist, load_tfds, mnist
from fedjax_async.data.memmap import folder
from fedjax_async.data.population import population
from fedjax_async.data.published import Arrays, Published, array_hash
from fedjax_async.data.quadratic import quadratic
from fedjax_async.data.sources import SOURCES
from fedjax_async.data.synthetic import synthetic
from fedjax_async.registry import bind, find, summary

DATASETS: dict[str, Callable[..., Dataset | Federation]] = {
    "fashion_mnist_6k": fashion_mnist_6k,
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
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
    """All data sets with their state on this machine; nothing is loaded."""
    home = resolve_data_dir(data_dir)
    digits_state = "ready" if importlib.util.find_spec("sklearn") else "needs scikit-learn"
    facts = {
        "fashion_mnist_6k": ("5,000 + 1,000", "embedded", "this package", "MIT"),
        "digits": ("1,438 + 359", digits_state, "scikit-learn's package", "CC BY 4.0"),
        "quadratic": ("any", "generated", "this package", "-"),
        "synthetic": ("any", "generated", "this package", "-"),
        "population": ("any", "generated", "this package", "-"),
        "folder": ("any", "in its folder", "data.write_folder", "each its own"),
        "tfds": ("any", "not available offline", "TensorFlow Datasets", "each its own"),
    }
    for name, published in SOURCES.items():
        package = published.package
        state = "ready" if _is_here(name, home) else "to fetch"
        source = f"{package.client}: {package.name} {package.version} ({package.megabytes} MB)"
        facts[name] = (" + ".join(f"{n:,}" for n in published.examples), state, source, published.licence)
    return [Listed(name, *facts[name], about=summary(entry)) for name, entry in DATASETS.items()]


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Checked]:
    """Hash a fetched data set again, the prepared arrays and the TFDS folder, against the published values.

    Returns a row for each array compared; ``ValueError`` if there is nothing to verify.
    """
    published = find("dataset", SOURCES, name)
    home = resolve_data_dir(data_dir)
    cached = read_cache(cache_folder(name, published.version, home))
    rows = [] if cached is None else _compare("arrays", published, cached)
    if tfds.installed() and tfds.version_folder(name, home):
        rows += _compare("tfds", published, tfds.read_published(published, home))
    if not rows:
        raise ValueError(f"dataset = {name!r}: not in {home}; run: fedjax-async data fetch {name}")
    return rows


def _compare(kind: str, published: Published, arrays: Arrays) -> list[Checked]:
    pairs = arrays._asdict().items()
    return [Checked(f"{kind}/{field}", published.arrays[field], array_hash(array)) for field, array in pairs]


def _is_here(name: str, home: Path) -> bool:
    """Whether a published data set can be loaded without a network."""
    prepared = tfds.installed() and tfds.find_prepared(name, home) is not None
    return prepared or cache_folder(name, SOURCES[name].version, home).is_dir()
