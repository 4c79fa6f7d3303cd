"""Data from the files of other projects. A format is a function ``f(*, path, ...) -> Dataset`` in a file here.

Its name works in ``data.load`` and ``--dataset``: ``leaf:task=femnist,path=DIR``. To add a format, write its function
and a line in ``FORMATS``. ``clients.py`` joins the examples of named clients, ``tables.py`` reads columns of Arrow
tables. ``torch.py`` takes objects instead of files: :func:`from_torch`.
"""

from collections.abc import Callable

from fedjax_async.base import lazy
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.csv_files import csv as csv
from fedjax_async.data.formats.flower import flower as flower
from fedjax_async.data.formats.hugging_face import hugging_face as hugging_face
from fedjax_async.data.formats.leaf import leaf as leaf
from fedjax_async.data.formats.parquet import parquet as parquet
from fedjax_async.data.formats.tff import tff as tff
from fedjax_async.data.formats.torch import from_torch as from_torch

FORMATS: dict[str, Callable[..., Dataset]] = {
    "leaf": leaf,
    "tff": tff,
    "hugging_face": hugging_face,
    "parquet": parquet,
    "csv": csv,
    "flower": flower,
}

lazy.set_all(__name__)
