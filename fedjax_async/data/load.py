"""``load``: a spec to a ``Dataset``, and the published data sets' way from disk to memory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from fedjax_async.check import require
from fedjax_async.data import decode, tfds
from fedjax_async.data.cache import check_cache, read_cache, write_cache
from fedjax_async.data.dataset import Dataset
from fedjax_async.data.published import Arrays, check_arrays
from fedjax_async.data.sources import SOURCES
from fedjax_async.data.wordpiece import shortened
from fedjax_async.home import KEPT, arrays_folder, missing, resolve_data_dir, tfds_home

DataDir = str | os.PathLike[str] | None


def mnist(*, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """MNIST: 60,000 + 10,000 grey 28 x 28 images of handwritten digits; fetched once.

    ``data_dir``: where it was fetched to; ``download``: let TFDS download it if it is not there.
    Source: LeCun, Bottou, Bengio and Haffner (1998).
    """
    return load_published("mnist", data_dir, download)


def fashion_mnist(*, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 grey 28 x 28 images of ten kinds of clothing; fetched once.

    Options as for ``mnist``. Source: Xiao, Rasul and Vollgraf (2017).
    """
    return load_published("fashion_mnist", data_dir, download)


def cifar10(*, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour 32 x 32 images of ten kinds of things; fetched once.

    Options as for ``mnist``. Source: Krizhevsky (2009).
    """
    return load_published("cifar10", data_dir, download)


def cifar100(*, data_dir: DataDir = None, download: bool = False) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour 32 x 32 images of a hundred kinds of things; through TFDS only.

    It is read from a folder that TFDS has prepared as array records, and kept as prepared arrays in the published
    order. ``download``: let TFDS download and prepare it first, for which it needs a network and TensorFlow.
    Source: Krizhevsky (2009).
    """
    home = resolve_data_dir(data_dir)
    folder = arrays_folder("cifar100", KEPT["cifar100"].version, home)
    remedy = f"remove {folder} and load cifar100:download=true"
    arrays = read_cache(folder, remedy)
    if arrays is None:
        if download and tfds_home("cifar100", home) is None:
            tfds.require_tensorflow("cifar100")
        arrays = tfds.read_in_order("cifar100", _prepared("cifar100", home, download))
        _keep(arrays, folder)
    x, y, test_x, test_y, _ = arrays
    check_cache(arrays, folder, remedy, shape=(32, 32, 3), dtype="uint8", examples=(y.size, test_y.size))
    return Dataset("cifar100", x, y, test_x, test_y, decode.cifar100, num_classes=100)


def har(*, data_dir: DataDir = None) -> Dataset:
    """HAR: 7,415 + 2,996 windows of a phone's motion, six activities, natural clients are 21 people; fetched once.

    float32 [M, 128, 9]: 2.56 s at 50 Hz of acceleration with and without gravity (g) and rotation (rad/s), cut with
    half overlap from UCI's raw recordings (HAPT) and filtered as its paper says; test windows are nine other people's.
    The signals stand in the order in which OrthoFL's released code stacks the published ones.

    Not the published 7,352 + 2,947 windows with their 561 features, which are cut by older labels that no package has.
    These are as many for walking (1,722) and walking upstairs (1,544), 1 more for walking downstairs, 24 for sitting,
    73 for standing and 14 for laying.
    Source: Anguita et al. (2013); Reyes-Ortiz et al. (2016).
    """
    return load_published("har", data_dir, False)


def newsgroups20(*, max_length: int = 128, data_dir: DataDir = None) -> Dataset:
    """20 Newsgroups: 11,293 + 7,528 letters-only lower-case documents as token ids; fetched once, after minilm.

    int32 [M, ``max_length``], at most 512: [CLS], WordPiece ids of BERT's uncased vocabulary (that of MiniLM and
    DistilBERT), [SEP], zeros. The split is by date; digits, punctuation and headers' layout are gone from this variant.
    Source: Lang (1995); Cardoso-Cachopo (2007), "all terms".
    """
    data = load_published("newsgroups20", data_dir, False)
    return data._replace(x=shortened(data.x, max_length), test_x=shortened(data.test_x, max_length))


def load_published(name: str, data_dir: DataDir, download: bool) -> Dataset:
    """A published data set, the same rows in the same order whichever way it comes.

    First the prepared arrays; then a folder prepared by TFDS, here or in TFDS's own directory, whose
    arrays are put back into the published order, checked against the published hashes and kept as
    prepared arrays; then, only with ``download``, TFDS's download. Otherwise a ``ValueError`` at once, naming
    the command that fetches it. Other data never takes its place.
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
    return Dataset(name, x, y, test_x, test_y, published.decode, len(published.class_names), groups)


def load_tfds(
    *, name: str = "", train: str = "train", test: str = "test", data_dir: DataDir = None, download: bool = False
) -> Dataset:
    """Any image classification data set that TFDS has prepared, by its TFDS name, e.g. tfds:name=kmnist.

    ``name`` may be ``name/config``. It needs features ``image`` (one shape, 8 bits) and ``label``, prepared as
    array records. ``train``, ``test``: TFDS splits. ``download``: let TFDS download and prepare it first.
    Rows are in TFDS's order, inputs are scaled to [0, 1] and not standardised.
    """
    well_formed = re.fullmatch(r"\w+(/[\w.-]+)?", name) is not None
    require(well_formed, "name", name, "a TFDS name, as in tfds:name=kmnist")
    home = resolve_data_dir(data_dir)
    prepared = _prepared(name, home, download)
    x, y, test_x, test_y, _ = tfds.read(name, prepared, train, test)
    classes = int(max(y.max(), test_y.max())) + 1
    return Dataset(name, x, y, test_x, test_y, decode.unit_images, num_classes=classes)


def _prepared(name: str, home: Path, download: bool) -> Path:
    """The TFDS directory in which ``name`` is prepared, after a download if that is wanted and needed."""
    if download and tfds_home(name, home) is None:
        tfds.download(name, home)
    found = tfds_home(name, home)
    if found is None:
        raise missing(name, home)
    return found


def _keep(arrays: Arrays, folder: Path) -> None:
    """Write the cache if the place can be written: reading again from TFDS is slow but not wrong."""
    with contextlib.suppress(OSError):
        write_cache(arrays, folder)
