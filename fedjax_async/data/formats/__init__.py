"""Data from the files of other projects. A format is a function ``f(*, path, ...) -> Dataset`` in a file here.

Its name works in ``data.load`` and ``--dataset``: ``leaf:task=femnist,path=DIR``. To add a format, write its function
and a line in ``FORMATS``. ``clients.py`` joins the examples of named clients, ``tables.py`` reads columns of Arrow
tables. ``torch.py`` takes objects instead of files: :func:`from_torch`.
"""

from collections.abc import Callable

from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.flower import flower
from fedjax_async.data.formats.hugging_face import hugging_face
from fedjax_async.data.formats.leaf import leaf
from fedjax_async.data.formats.parquet import parquet
from fedjax_async.data.formats.tff import tff
from fedjax_async.data.formats.torch import from_torch

FORMATS: dict[str, Callable[..., Dataset]] = {
    "leaf": leaf,
    "tff": tff,
    "hugging_face": hugging_face,
    "parquet": parquet,
    "flower": flower,
}

__all__ = ["FORMATS", "flower", "from_torch", "hugging_face", "leaf", "parquet", "tff"]
