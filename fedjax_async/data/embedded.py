"""Data that need no network: the Fashion-MNIST subset inside the package, and scikit-learn's digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from fedjax_async.base import lazy
from fedjax_async.data import decode
from fedjax_async.data.federated import Dataset
from fedjax_async.data.published import SOURCES

FILE = Path(__file__).with_name("fashion_mnist_6k.npz")


def fashion_mnist_6k() -> Dataset:
    """5,000 + 1,000 Fashion-MNIST images inside the package: the first 500 and 100 of each class; MIT licence.

    28 x 28 grey images of ten kinds of clothing, uint8. The original split into training and test and the original
    order are kept. The file has the text of the licence as well. Source: Xiao, Rasul and Vollgraf (2017).
    """
    with np.load(FILE, allow_pickle=False) as file:
        x, y, test_x, test_y = (file[key] for key in ("x", "y", "test_x", "test_y"))
    return Dataset(
        "fashion_mnist_6k", x, y.astype(np.int32), test_x, test_y.astype(np.int32), decode.fashion_mnist, 10,
        class_names=SOURCES["fashion_mnist"].class_names,
    )  # fmt: skip


def digits() -> Dataset:
    """1,797 handwritten 8 x 8 digits from scikit-learn's package, for smoke tests; every fifth is a test image.

    Values 0..16 as uint8. Needs scikit-learn to be installed; only its data file is read, the package is not imported.
    Source: Alpaydin and Kaynak (1998), UCI repository.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise lazy.missing("scikit-learn", "dataset = 'digits', whose file it has")
    return read_digits(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz")


def read_digits(path: Path) -> Dataset:
    """The digits from a comma-separated file, which may be gzipped; each row has 64 pixels, then the label."""
    table = np.loadtxt(path, delimiter=",", dtype=np.int32, ndmin=2)
    x, y = table[:, :64].reshape(-1, 8, 8).astype(np.uint8), table[:, 64]
    test = np.arange(len(x)) % 5 == 4
    return Dataset("digits", x[~test], y[~test], x[test], y[test], decode.digits, num_classes=10)
