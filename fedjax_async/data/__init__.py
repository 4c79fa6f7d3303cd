"""Data sets, partitions of them, and ``federate``, which joins both into ``FederatedData``.

Start with :func:`federate` (``federated.py``). ``datasets.py`` lists the data sets, ``partition.py`` the partitions
(``label_skew.py``, ``size_skew.py``); ``memmap.py`` and ``virtual.py`` are for populations that do not fit into
memory.
"""

from fedjax_async.data.datasets import DATASETS, list_datasets, load, verify
from fedjax_async.data.embedded import digits, fashion_mnist_6k
from fedjax_async.data.federated import Dataset, Federation, client_rows, federate
from fedjax_async.data.fetch import fetch
from fedjax_async.data.memmap import open_folder, pack, packed_offsets, write_clients, write_folder
from fedjax_async.data.partition import PARTITIONERS, split_clients
from fedjax_async.data.population import ceiling, population
from fedjax_async.data.problems import Quadratic, quadratic, quadratic_problem, synthetic
from fedjax_async.data.virtual import Generated, Identity, generate, generated

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "Dataset",
    "Federation",
    "Generated",
    "Identity",
    "Quadratic",
    "ceiling",
    "client_rows",
    "digits",
    "fashion_mnist_6k",
    "federate",
    "fetch",
    "generate",
    "generated",
    "list_datasets",
    "load",
    "open_folder",
    "pack",
    "packed_offsets",
    "population",
    "quadratic",
    "quadratic_problem",
    "split_clients",
    "synthetic",
    "verify",
    "write_clients",
    "write_folder",
]
