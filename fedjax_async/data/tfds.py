"""TensorFlow Datasets (TFDS) without TensorFlow: write a published data set under its official name, and read any.

``tensorflow_datasets`` is an extra and takes a second to import, so it is imported only when used. Written folders have
the official name, version and features, so that ``tfds.data_source(name, data_dir=..., download=False)`` reads them
without TensorFlow or a network.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.base.check import require
from fedjax_async.data.arrays import Arrays
from fedjax_async.data.checking import as_labels
from fedjax_async.data.published import Published

NEEDED = {  # module -> its package
    "tensorflow_datasets": "tensorflow-datasets",
    "array_record": "array-record",
    "importlib_resources": "importlib_resources",
    "PIL": "pillow",
}


def installed() -> bool:
    """Whether the extra ``data`` is installed; nothing is imported."""
    return all(importlib.util.find_spec(module) for module in NEEDED)


def import_tfds() -> ModuleType:
    """The module ``tensorflow_datasets``; raises ``ValueError`` for the first missing package of those it needs."""
    for module, package in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise lazy.missing(package, "folders of TFDS")
    return importlib.import_module("tensorflow_datasets")


def require_tensorflow(name: str) -> None:
    """Raise ``ValueError`` if TensorFlow is not installed; TFDS needs it to prepare ``name`` after the download."""
    if importlib.util.find_spec("tensorflow") is None:
        raise lazy.missing("tensorflow", f"TFDS to prepare {name}")


def hashed_order(split: str, count: int) -> np.ndarray:
    """int64[count]: the key at each position of a TFDS split with the keys 0, 1, 2, ...

    TFDS stores examples in the order of md5(split name + key).
    """
    digests = [hashlib.md5(f"{split}{key}".encode(), usedforsecurity=False).digest() for key in range(count)]
    return np.array(sorted(range(count), key=digests.__getitem__), np.int64)


def build(published: Published, arrays: Arrays, data_dir: Path) -> Path:
    """Write ``DATA_DIR/NAME/VERSION`` in TFDS's array-record format; returns that folder.

    The folder is built under a temporary name and then replaces an older one.
    """
    tfds = import_tfds()
    data_dir.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tfds-", dir=data_dir))
    try:
        builder = _builder_class(tfds, published, arrays)
        with _quiet():
            builder(data_dir=temporary, file_format="array_record").download_and_prepare()
        folder = data_dir / published.name / published.version
        if folder.exists():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        (temporary / published.name / published.version).rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def read(name: str, home: Path, train: str = "train", test: str = "test") -> Arrays:
    """All images and labels of a prepared image classification data set, in TFDS's order.

    Raises ``ValueError`` for a damaged folder, without features ``image`` and ``label``, or for images of several
    shapes.
    """
    tfds = import_tfds()
    try:
        with _quiet():
            sources = tfds.data_source(name, split=[train, test], data_dir=home, download=False)
            (x, y), (test_x, test_y) = (_stack(name, source) for source in sources)
    except Exception as error:  # TFDS and its reader raise any kind of error for a damaged folder
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"dataset = {name!r}: its TFDS folder in {home} cannot be read ({reason})") from error
    return Arrays(x, y, test_x, test_y)


def read_in_order(name: str, home: Path) -> Arrays:
    """Read a data set with TFDS keys 0, 1, 2, ... from its TFDS folder, in the order of the keys."""
    hashed = read(name, home)
    train, test = (np.argsort(hashed_order(s, len(a))) for s, a in (("train", hashed.y), ("test", hashed.test_y)))
    return Arrays(hashed.x[train], hashed.y[train], hashed.test_x[test], hashed.test_y[test])


def download(name: str, data_dir: Path) -> None:
    """Let TFDS download and prepare ``name`` in ``data_dir``; needs a network and, for some data sets, TensorFlow."""
    tfds = import_tfds()
    try:
        tfds.builder(name, data_dir=data_dir, file_format="array_record").download_and_prepare()
    except Exception as error:  # downloaders and lazy imports raise any kind of error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"dataset = {name!r}: the official download failed ({reason})") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide TFDS's progress bars and messages; the caller reports progress itself."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _stack(name: str, source: Sequence[Mapping[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """uint8[M, H, W] or [M, H, W, C] and int32[M]; a channel axis of one is dropped."""
    require(len(source) > 0, name, "an empty split", "a split with examples")
    require({"image", "label"} <= set(source[0]), name, sorted(source[0]), "a data set with image and label")
    shape, kind = np.shape(source[0]["image"]), np.asarray(source[0]["image"]).dtype
    require(kind == np.uint8, name, f"images of {kind}", "images of 8 bits")
    x = np.empty((len(source), *shape), np.uint8)
    y = np.empty(len(source), np.int64)
    for i, example in enumerate(source):
        require(np.shape(example["image"]) == shape, name, "images of several shapes", "images of one shape")
        x[i], y[i] = example["image"], example["label"]
    return (x[..., 0] if shape[-1:] == (1,) else x), as_labels(f"{name}: label", y)


def _builder_class(tfds: ModuleType, published: Published, arrays: Arrays) -> Callable[..., Any]:
    """A builder with the official name, version and features; its examples come from ``arrays``."""
    cifar_like = published.shape[-1] == 3
    image_shape = published.shape if cifar_like else (*published.shape, 1)
    features = {"image": tfds.features.Image(shape=image_shape)}
    features |= {"label": tfds.features.ClassLabel(names=list(published.class_names))}
    features |= {"id": tfds.features.Text()} if published.has_id else {}

    def info(self: object) -> object:
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage=published.homepage,
            disable_shuffling=False,
        )

    def split_generators(self: Any, dl_manager: object) -> dict[str, object]:
        return {
            "train": self._generate_examples("train", arrays.x, arrays.y),
            "test": self._generate_examples("test", arrays.test_x, arrays.test_y),
        }

    def generate_examples(
        self: object, split: str, x: np.ndarray, y: np.ndarray
    ) -> Iterator[tuple[int, dict[str, object]]]:
        for i in range(len(y)):
            ident = {"id": f"{split}_{i:05d}"} if published.has_id else {}
            yield i, {"image": _png(x[i]), "label": int(y[i]), **ident}

    body = {
        "name": published.name,
        "VERSION": tfds.core.Version(published.version),
        "_info": info,
        "_split_generators": split_generators,
        "_generate_examples": generate_examples,
        "__module__": __name__,
    }
    with tfds.core.registered.skip_registration():
        return type(published.name, (tfds.core.GeneratorBasedBuilder,), body)


def _png(image: np.ndarray) -> io.BytesIO:
    """One image as a PNG file in memory. TFDS stores PNG bytes unchanged, without TensorFlow."""
    from PIL import Image  # noqa: PLC0415 - an extra

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    file.seek(0)
    return file
