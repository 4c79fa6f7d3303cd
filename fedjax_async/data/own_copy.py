"""Data sets read from the user's own copy of the published files: CIFAR-100 and Tiny-ImageNet.

Neither has a licence, and no package contains them, so they are not fetched. The user gets the files from the publisher
and names their folder once, as in ``cifar100:path=FOLDER``. The numbers of images and classes are checked.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_async.base import check
from fedjax_async.base.check import require
from fedjax_async.data.archive import read_files
from fedjax_async.data.arrays import Arrays
from fedjax_async.data.images import import_pillow

PathLike = str | os.PathLike[str]


class Counts(NamedTuple):
    """The numbers of classes and images in a published data set."""

    classes: int
    train: int  # images of each class
    test: int  # images of each class


CIFAR100 = Counts(100, 500, 100)
TINY_IMAGENET = Counts(200, 500, 50)
SIDE = {"cifar100": 32, "tiny_imagenet": 64}  # pixels


def read_cifar100(path: PathLike) -> Arrays:
    """CIFAR-100 from ``train.bin`` and ``test.bin``, in a folder or in the published archive.

    A record is a coarse label, a fine label and 3 x 32 x 32 bytes, channel by channel; the fine labels are used. Raises
    ``ValueError`` for other files. Source: Krizhevsky, "CIFAR-100 binary version".
    """
    files = read_files(check.path("path", path), ["train.bin", "test.bin"])
    parts = [_records(name, files[name]) for name in ("train.bin", "test.bin")]
    for (_, labels), each, name in zip(parts, CIFAR100[1:], ("train.bin", "test.bin")):
        _require_balance(name, labels, CIFAR100.classes, each)
    return Arrays(*parts[0], *parts[1])


def _records(name: str, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8[M, 32, 32, 3] and labels int32[M]."""
    side = SIDE["cifar100"]
    length = 2 + 3 * side**2
    require(len(data) % length == 0, name, f"{len(data)} bytes", f"records of {length} bytes, as CIFAR-100 publishes")
    rows = np.frombuffer(data, np.uint8).reshape(-1, length)
    return rows[:, 2:].reshape(-1, 3, side, side).transpose(0, 2, 3, 1), rows[:, 1].astype(np.int32)


def _require_balance(what: str, labels: np.ndarray, classes: int, each: int) -> None:
    """Raise ``ValueError`` unless every class has ``each`` images."""
    counts = np.bincount(labels, minlength=classes)
    good = len(counts) == classes and bool((counts == each).all())
    found = f"{len(labels)} images of {np.count_nonzero(counts)} classes"
    require(good, what, found, f"{each} images of each of {classes} classes, as published")


def read_tiny_imagenet(path: PathLike) -> Arrays:
    """Tiny-ImageNet from its unpacked folder ``tiny-imagenet-200``; its 10,000 validation images are the test set.

    Classes are in the order of their WordNet ids, training images in the order of classes and file names, validation
    images in the order of ``val_annotations.txt``. Grey images become three equal channels. The published test images
    have no labels and are not read. Raises ``ValueError`` for another layout and for a damaged image; needs Pillow.
    Source: Le and Yang (2015).
    """
    root = check.path("path", path)
    root = root / "tiny-imagenet-200" if (root / "tiny-imagenet-200").is_dir() else root
    notes = root / "val" / "val_annotations.txt"
    layout = "the unpacked folder tiny-imagenet-200, with train and val/val_annotations.txt"
    require((root / "train").is_dir() and notes.is_file(), "path", str(path), layout)
    kinds = sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir())
    number = {kind: i for i, kind in enumerate(kinds)}
    train = [
        (file, number[kind]) for kind in kinds for file in sorted((root / "train" / kind / "images").glob("*.JPEG"))
    ]
    test = []
    for line in notes.read_text(encoding="utf-8-sig").splitlines():
        name, kind = [*line.split("\t"), "", ""][:2]
        good = kind in number and name == Path(name).name
        require(good, str(notes), line, "a file name and one of the classes in train")
        test.append((root / "val" / "images" / name, number[kind]))
    for part, chosen, each in (("train", train, TINY_IMAGENET.train), ("val", test, TINY_IMAGENET.test)):
        _require_balance(f"{root / part}", np.array([y for _, y in chosen], np.int64), TINY_IMAGENET.classes, each)
    return Arrays(*_images(train), *_images(test))


def _images(chosen: Sequence[tuple[Path, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8[M, 64, 64, 3] and labels int32[M]."""
    side = SIDE["tiny_imagenet"]
    x = np.empty((len(chosen), side, side, 3), np.uint8)
    for i, (file, _) in enumerate(chosen):
        x[i] = _jpeg(file, side)
    return x, np.array([label for _, label in chosen], np.int32)


def _jpeg(file: Path, side: int) -> np.ndarray:
    """One JPEG as uint8[side, side, 3]."""
    image_module = import_pillow("JPEG files")
    try:
        with image_module.open(io.BytesIO(file.read_bytes()), formats=("JPEG",)) as image:
            require(image.size == (side, side), str(file), f"{image.size} pixels", f"{side} x {side} pixels")
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError) as error:  # a missing file, and Pillow's errors for damaged ones
        reason = " ".join(str(error).split())
        raise ValueError(f"image = '{file}': cannot be read ({reason})") from error
