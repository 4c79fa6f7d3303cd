"""TensorFlow Federated's HDF5 files: ``examples/CLIENT/FEATURE``, as in its federated EMNIST and Shakespeare.

They are read with h5py (extra ``formats``). Links to other files are not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.base.check import require
from fedjax_async.base.inputs import reading
from fedjax_async.data.characters import VOCABULARY, windows
from fedjax_async.data.checking import as_labels
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.clients import ClientRows, existing, pooled

EXAMPLES = "examples"
MOST_COMPRESSED = 2000  # the largest compression ratio that is accepted: gzip reaches 1,032


def tff(*, path: str, test: str | None = None, x: str = "pixels", y: str = "label", length: int = 80) -> Dataset:
    """TensorFlow Federated's HDF5 files: tff:path=fed_emnist_train.h5,test=fed_emnist_test.h5. Natural clients.

    ``x``, ``y``: names of the features (federated CIFAR-100: x=image). Images of two axes get a channel axis; integer y
    are labels. With ``y=none``, x is text (Shakespeare: x=snippets) and the task is to predict the next character, in
    windows of ``length`` (see shakespeare). Without ``test`` there is no test set: give a ``test_fraction``.

    Raises ``ValueError`` naming file, client and feature. Source: TensorFlow Federated, ``HDF5ClientData``.
    """
    features = (str(x), None if y is None else str(y))
    files = [existing(path), *([] if test is None else [existing(test, "test")])]
    train, tested = ([*map(list, (_parts(file, *features, length) for file in files)), []])[:2]
    classes = len(VOCABULARY) if y is None else None
    return pooled(files[0].stem, train, tested, num_classes=classes)


def _parts(file: Path, x: str, y: str | None, length: int) -> Iterator[ClientRows]:
    """The clients of a file, in order of their names."""
    h5py = lazy.optional("h5py", "HDF5 files")
    try:
        with h5py.File(reading(file), "r") as content:
            group = _own(content, EXAMPLES, str(file), h5py)
            require(isinstance(group, h5py.Group), f"'{file}'", f"no group {EXAMPLES!r}", "an HDF5 file of TFF")
            for client in sorted(group):
                where = f"'{file}', {client}"
                own = _own(group, client, where, h5py)
                require(isinstance(own, h5py.Group), where, "no group", "a group with one data set per feature")
                if y is None:
                    texts = [text.decode("utf-8", "replace") for text in _values(own, x, where, file, h5py, text=True)]
                    cut = windows("\n".join(texts) + "\n", length)
                    yield ClientRows(client, cut[:, :-1], cut[:, 1:].astype(np.int32))
                    continue
                inputs, targets = (_values(own, name, where, file, h5py) for name in (x, y))
                require(len(inputs) == len(targets), where, f"{len(inputs)} {x}, {len(targets)} {y}", "as many of both")
                inputs = inputs[..., None] if inputs.ndim == 3 and inputs.dtype.kind == "f" else inputs  # grey images
                labels = targets.dtype.kind in "biu"
                targets = as_labels(f"{where}, {y}", targets) if labels else targets.astype(np.float32)
                yield ClientRows(client, inputs, targets)
    except (OSError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"'{file}': must be an HDF5 file of TFF ({reason})") from error


def _own(group: Any, name: str, where: str, h5py: ModuleType) -> Any:
    """The member of a group, or None; raises ``ValueError`` for a link, which could lead to another file."""
    if name not in group:
        return None
    link = group.get(name, getlink=True)
    require(isinstance(link, h5py.HardLink), where, f"{name} is a link", "contents of the file itself")
    return group[name]


def _values(own: Any, name: str, where: str, file: Path, h5py: ModuleType, *, text: bool = False) -> Any:
    """A feature of one client: an array [n, ...], or a list of bytes."""
    found = _own(own, name, where, h5py)
    given = ", ".join(own) or "none"
    require(isinstance(found, h5py.Dataset) and found.ndim > 0, where, f"no data set {name!r}", f"one of {given}")
    inside = not found.is_virtual and not found.external
    require(inside, f"{where}, {name}", "stored in other files", "contents of the file itself")
    kind = "text" if h5py.check_string_dtype(found.dtype) else "numbers" if found.dtype.kind in "biuf" else "others"
    wanted = "text" if text else "numbers"
    require(kind == wanted, f"{where}, {name}", f"{kind} ({found.dtype})", wanted)
    size, most = found.size * found.dtype.itemsize, MOST_COMPRESSED * file.stat().st_size
    require(size <= most, f"{where}, {name}", f"{size} bytes", f"at most {most}, by the size of the file")
    return [bytes(value) for value in found[()]] if text else found[()]
