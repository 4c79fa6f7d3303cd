"""The registry of data sets: ``load`` by name, each published data set, and the list for the command line."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async.base import registry
from fedjax_async.base.check import optional, require, whole
from fedjax_async.base.factories import summary
from fedjax_async.base.home import (
    KEPT,
    arrays_folder,
    default_data_dir,
    missing,
    pretrained_folder,
    require_pretrained,
    resolve_data_dir,
    say_not_kept,
    tfds_home,
    tfds_version_folder,
)
from fedjax_async.base.inputs import below, reading
from fedjax_async.base.registry import find
from fedjax_async.data import decode, own_copy, tfds
from fedjax_async.data.archive import read_files
from fedjax_async.data.arrays import Arrays, array_hash, check_cache, file_hash, read_cache, write_cache
from fedjax_async.data.embedded import digits, fashion_mnist_6k
from fedjax_async.data.federated import Dataset, Federation
from fedjax_async.data.formats import FORMATS
from fedjax_async.data.memmap import folder
from fedjax_async.data.population import population
from fedjax_async.data.problems import quadratic, synthetic
from fedjax_async.data.published import PRETRAINED, SOURCES, Package, Pretrained, Published, check_arrays
from fedjax_async.data.text import shortened
from fedjax_async.types import Array

DataDir = str | os.PathLike[str] | None


def mnist(*, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """MNIST: 60,000 + 10,000 grey 28 x 28 images of handwritten digits; fetched once.

    ``data_dir``: the folder of fetched data sets; ``download``: let TFDS download the data if they are not there.
    Source: LeCun, Bottou, Bengio and Haffner (1998).
    """
    return load_published("mnist", data_dir, download)


def fashion_mnist(*, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 grey 28 x 28 images of ten kinds of clothing; fetched once.

    Options as for ``mnist``. Source: Xiao, Rasul and Vollgraf (2017).
    """
    return load_published("fashion_mnist", data_dir, download)


def cifar10(*, train: int | None = None, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour 32 x 32 images of ten kinds of things; fetched once.

    ``train``: keep only this many training images, the first ones [all] (their published order is random). Other
    options as for ``mnist``. Source: Krizhevsky (2009).
    """
    return _first(load_published("cifar10", data_dir, download), train)


def _first(data: Dataset, train: int | None) -> Dataset:
    """The data set with its first ``train`` training examples; ``None``: all."""
    if train is None:
        return data
    whole("train", train, high=len(data.y))
    return data._replace(x=data.x[:train], y=data.y[:train])


def cifar100(
    *, train: int | None = None, path: DataDir = None, data_dir: DataDir = None, download: bool = False
) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour 32 x 32 images of a hundred kinds of things; through TFDS or your folder.

    It is read from a folder that TFDS has prepared as array records, or from the published binary files, and kept as
    prepared arrays in the published order. ``train``: keep only this many training images, the first ones [all].
    ``path``: a folder or archive with ``train.bin`` and ``test.bin``, needed once. ``download``: let TFDS download and
    prepare it first; this needs a network and TensorFlow.
    Source: Krizhevsky (2009).
    """

    def read(home: Path) -> Arrays:
        if path is not None:
            return own_copy.read_cifar100(path)
        if download and tfds_home("cifar100", home) is None:
            tfds.require_tensorflow("cifar100")
        return tfds.read_in_order("cifar100", _prepared("cifar100", home, download))

    return _first(_kept("cifar100", data_dir, read, decode.cifar100, 100, "load cifar100:download=true"), train)


def tiny_imagenet(*, path: DataDir = None, data_dir: DataDir = None) -> Dataset:
    """Tiny-ImageNet: 100,000 + 10,000 colour 64 x 64 images of two hundred kinds of things; from your folder.

    ``path``: the unpacked folder ``tiny-imagenet-200``; it and Pillow are needed once, then prepared arrays are kept.
    The test images are the published validation images. A copy that TFDS has prepared under another name is read as
    ``tfds:name=NAME,test=validation``. Source: Le and Yang (2015).
    """

    def read(home: Path) -> Arrays:
        if path is None:
            raise missing("tiny_imagenet", home)
        return own_copy.read_tiny_imagenet(path)

    return _kept("tiny_imagenet", data_dir, read, decode.tiny_imagenet, 200, "load tiny_imagenet:path=FOLDER")


def _kept(
    name: str,
    data_dir: DataDir,
    read: Callable[[Path], Arrays],
    decoded: Callable[[Array], Array],
    num_classes: int,
    again: str,
) -> Dataset:
    """Load a data set from its prepared arrays; without them, call ``read(data directory)`` and keep its result."""
    home = resolve_data_dir(data_dir)
    folder = arrays_folder(name, KEPT[name].version, home)
    remedy = f"remove {folder} and {again}"
    arrays = read_cache(folder, remedy)
    if arrays is None:
        arrays = read(home)
        _keep(arrays, folder)
    x, y, test_x, test_y, _ = arrays
    side = own_copy.SIDE[name]
    check_cache(arrays, folder, remedy, shape=(side, side, 3), dtype="uint8", examples=(y.size, test_y.size))
    return Dataset(name, x, y, test_x, test_y, decoded, num_classes=num_classes)


def har(*, data_dir: DataDir = None) -> Dataset:
    """HAR: 7,415 + 2,996 windows of a phone's motion, six activities, natural clients are 21 people; fetched once.

    float32 [M, 128, 9]: 2.56 s at 50 Hz of acceleration with and without gravity (g) and rotation (rad/s), cut with
    half overlap from UCI's raw recordings (HAPT) and filtered as its paper says. The test windows are of nine other
    people. The signals have the order of OrthoFL's released code.

    Deviation: these are not the published 7,352 + 2,947 windows with 561 features. Those were cut by older labels,
    which no package contains. There are as many windows here for walking (1,722) and walking upstairs (1,544), 1 more
    for walking downstairs, 24 more for sitting, 73 for standing and 14 for laying.

    Source: Anguita et al. (2013); Reyes-Ortiz et al. (2016).
    """
    return load_published("har", data_dir, False)


def newsgroups20(*, max_length: int = 128, data_dir: DataDir = None) -> Dataset:
    """20 Newsgroups: 11,293 + 7,528 letters-only lower-case documents as token ids; fetched once, after minilm.

    int32 [M, ``max_length``], at most 512: [CLS], WordPiece ids of BERT's uncased vocabulary (that of MiniLM and
    DistilBERT), [SEP], zeros. The split is by date. This variant has no digits, punctuation or header layout.
    Source: Lang (1995); Cardoso-Cachopo (2007), "all terms".
    """
    data = load_published("newsgroups20", data_dir, False)
    return data._replace(x=shortened(data.x, max_length), test_x=shortened(data.test_x, max_length))


def shakespeare(*, roles: int | None = None, data_dir: DataDir = None) -> Dataset:
    """Shakespeare's 37 plays, next characters: 42,800 + 10,856 windows of 80, natural clients are 1,165 roles; fetched.

    Inputs uint8 [M, 80] and targets int32 [M, 80] are codes of characters (``data.characters``, 82 with padding). The
    target at a position is the character after the input. Every character that a role says is the target of one
    position. The last fifth of each role's windows is its test part. ``roles``: keep only this many roles, those with
    the most windows. The 217 roles with a single window are left out.

    Deviation: not LEAF's 1,129 or TFF's 715 roles, which come from another edition; LEAF's windows overlap and have one
    target each. Source: Project Gutenberg; the task of McMahan et al. (2017) and Caldas et al. (2018).
    """
    data = load_published("shakespeare", data_dir, False)
    windows = np.bincount(data.y)
    optional(whole, "roles", roles, high=len(windows))
    largest = np.argsort(-windows, kind="stable")[:roles]
    train, test = np.isin(data.y, largest), np.isin(data.test_y, largest)
    rows, test_rows = np.asarray(data.x[train]), np.asarray(data.test_x[test])
    x, test_x = (np.ascontiguousarray(each[:, :-1]) for each in (rows, test_rows))
    y, test_y = (each[:, 1:].astype(np.int32) for each in (rows, test_rows))
    return data._replace(x=x, y=y, test_x=test_x, test_y=test_y, groups=data.y[train], test_groups=data.test_y[test])


def load_published(name: str, data_dir: DataDir, download: bool) -> Dataset:
    """A published data set, with the same rows in the same order from every source.

    The first of these sources that exists is used: the prepared arrays; a folder prepared by TFDS, here or in TFDS's
    own directory; with ``download``, TFDS's download. Arrays from TFDS are put into the published order, checked
    against the published hashes and kept as prepared arrays. Without any source, a ``ValueError`` names the command
    that fetches the data set; no other data are used instead.
    """
    published = SOURCES[name]
    home = resolve_data_dir(data_dir)
    folder = arrays_folder(name, published.version, home)
    remedy = f"run: fedjax-async data fetch {name}"
    arrays = read_cache(folder, remedy)
    if arrays is None:
        prepared = _prepared(name, home, download)
        arrays = check_arrays(published, tfds.read_in_order(name, prepared), f"the TFDS copy in {prepared}")
        _keep(arrays, folder)
    shape, dtype, examples, owned = published.shape, published.dtype, published.examples, "groups" in published.arrays
    check_cache(arrays, folder, remedy, shape=shape, dtype=dtype, examples=examples, owned=owned)
    x, y, test_x, test_y, groups = arrays
    names = published.class_names
    return Dataset(name, x, y, test_x, test_y, published.decode, len(names), groups, class_names=names)


def load_tfds(
    *, name: str = "", train: str = "train", test: str = "test", data_dir: DataDir = None, download: bool = False
) -> Dataset:
    """Any image classification data set that TFDS has prepared, by its TFDS name, e.g. tfds:name=kmnist.

    ``name`` may be ``name/config``. The data set needs features ``image`` (one shape, 8 bits) and ``label``, and must
    be prepared as array records. ``train``, ``test``: TFDS splits. ``download``: let TFDS download and prepare it
    first. Rows are in TFDS's order, inputs are scaled to [0, 1] and not standardised.
    """
    well_formed = isinstance(name, str) and re.fullmatch(r"\w+(/[\w.-]+)?", name) is not None
    require(well_formed, "name", name, "a TFDS name, as in tfds:name=kmnist")
    home = resolve_data_dir(data_dir)
    prepared = _prepared(name, home, download)
    version = tfds_version_folder(name, prepared)
    for file in () if version is None else below(version):
        reading(file)
    x, y, test_x, test_y, _ = tfds.read(name, prepared, train, test)
    classes = int(max(y.max(), test_y.max())) + 1
    return Dataset(name, x, y, test_x, test_y, decode.unit_images, num_classes=classes)


def _prepared(name: str, home: Path, download: bool) -> Path:
    """The TFDS directory that has ``name`` prepared; with ``download``, download and prepare it first if missing."""
    if download and tfds_home(name, home) is None:
        tfds.download(name, home)
    found = tfds_home(name, home)
    if found is None:
        raise missing(name, home)
    return found


def _keep(arrays: Arrays, folder: Path) -> None:
    """Write the prepared arrays. Warn of an error: without the arrays the next load is only slower."""
    try:
        write_cache(arrays, folder)
        for field in arrays.present():  # the next load reads these files
            reading(folder / f"{field}.npy")
    except OSError as error:
        say_not_kept("prepared arrays", str(error))


DATASETS: dict[str, Callable[..., Dataset | Federation]] = {
    "fashion_mnist_6k": fashion_mnist_6k,
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tiny_imagenet": tiny_imagenet,
    "har": har,
    "newsgroups20": newsgroups20,
    "shakespeare": shakespeare,
    "quadratic": quadratic,
    "synthetic": synthetic,
    "population": population,
    "folder": folder,
    "tfds": load_tfds,
    **FORMATS,
}


class Listed(NamedTuple):
    """One line of the list of data sets."""

    name: str
    size: str  # training + test examples
    state: str  # embedded | generated | in its folder | in its files | ready | to fetch | needs ... | not available ...
    source: str
    licence: str
    about: str


class Checked(NamedTuple):
    """One comparison of a hash with the published one."""

    what: str
    expected: str
    found: str

    @property
    def ok(self) -> bool:
        """Whether the hashes agree."""
        return self.expected == self.found


def load(spec: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset | Federation:
    """The ``Dataset`` or ``Federation`` of a spec, such as ``"mnist"`` or ``"synthetic:alpha=1,beta=1"``.

    ``data_dir``: where fetched data sets are; by default ``$FEDJAX_ASYNC_DATA``, else
    ``~/.cache/fedjax_async``. Raises ``ValueError`` for unknown names and for data that must be fetched first.

    >>> load("fashion_mnist_6k").x.shape
    (5000, 28, 28)
    """
    require(isinstance(spec, str), "dataset", spec, "a text such as 'mnist'")
    return registry.spec("dataset", DATASETS, spec, data_dir=data_dir).make()


def list_datasets(data_dir: str | os.PathLike[str] | None = None) -> list[Listed]:
    """All data sets, then the pretrained models, with their state on this machine; nothing is loaded."""
    home = None if data_dir is None and default_data_dir() is None else resolve_data_dir(data_dir)
    digits_state = "ready" if importlib.util.find_spec("sklearn") else "needs scikit-learn"
    cifar100_state = "ready" if _is_here("cifar100", home) else "not available offline"
    tiny_imagenet_state = "ready" if _is_here("tiny_imagenet", home) else "needs your folder"
    facts = {
        "fashion_mnist_6k": ("5,000 + 1,000", "embedded", "this package", "MIT"),
        "digits": ("1,438 + 359", digits_state, "scikit-learn's package", "CC BY 4.0"),
        "cifar100": ("50,000 + 10,000", cifar100_state, "TensorFlow Datasets or your folder", "none stated"),
        "tiny_imagenet": ("100,000 + 10,000", tiny_imagenet_state, "your folder", "none stated"),
        "quadratic": ("any", "generated", "this package", "-"),
        "synthetic": ("any", "generated", "this package", "-"),
        "population": ("any", "generated", "this package", "-"),
        "folder": ("any", "in its folder", "data.write_folder", "each its own"),
        "tfds": ("any", "not available offline", "TensorFlow Datasets", "each its own"),
    }
    facts |= dict.fromkeys(FORMATS, ("any", "in its files", "your files", "each its own"))
    for name, published in SOURCES.items():
        state = "ready" if _is_here(name, home) else "to fetch"
        size = " + ".join(f"{n:,}" for n in published.examples)
        facts[name] = (size, state, _source(published.package), published.licence)
    rows = [Listed(name, *facts[name], about=summary(entry)) for name, entry in DATASETS.items()]
    for name, model in PRETRAINED.items():
        state = "ready" if home and pretrained_folder(name, model.version, home).is_dir() else "to fetch"
        rows.append(Listed(name, "weights", state, _source(model.package), model.licence, model.about))
    return rows


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Checked]:
    """Compare the hashes of a fetched data set or pretrained model with the published ones.

    For a data set, these are the hashes of the prepared arrays and of the TFDS folder; for a pretrained model, those of
    its files. Returns one row per array or file. Raises ``ValueError`` if there is nothing to verify.
    """
    known: dict[str, Published | Pretrained] = {**SOURCES, **PRETRAINED}
    published = find("name", known, name)
    home = resolve_data_dir(data_dir)
    if isinstance(published, Pretrained):
        return _verify_pretrained(name, home)
    cached = read_cache(arrays_folder(name, published.version, home), f"run: fedjax-async data fetch {name}")
    rows = [] if cached is None else _compare("arrays", published, cached)
    if published.in_tfds and tfds.installed() and tfds_version_folder(name, home):
        rows += _compare("tfds", published, tfds.read_in_order(name, home))
    if not rows:
        raise missing(name, home)
    return rows


def _verify_pretrained(name: str, home: Path) -> list[Checked]:
    """One row per file of a pretrained model."""
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


def _is_here(name: str, home: Path | None) -> bool:
    """Whether a published data set can be loaded without a network."""
    if home is None:
        return False
    prepared = tfds.installed() and tfds_home(name, home) is not None
    return prepared or arrays_folder(name, KEPT[name].version, home).is_dir()
