"""Data sets, and their division among clients: ``Dataset`` in, ``FederatedData`` out.

Start with :func:`federate` (``federated.py``): it applies a partitioner (``partition.py``, ``drawing.py``) to a data
set. ``datasets.py`` lists the data sets and loads them by name. :func:`from_arrays` (``own.py``) takes arrays of your
own. :func:`check_data` (``checking.py``) checks the result of either before a run. Then, as needed:

- data in the package, generated problems, a population of any size: ``embedded.py``, ``problems.py``,
  ``population.py``;
- published data sets: ``published.py`` lists their sources and hashes; ``fetch.py`` downloads them and ``archive.py``
  unpacks them; ``images.py``, ``har.py``, ``text.py`` and ``shakespeare.py`` (with ``characters.py``) read their files;
  ``own_copy.py`` reads a copy that the user has; ``arrays.py`` and ``tfds.py`` store them;
- model inputs: ``decode.py`` makes them from raw rows, ``normalise.py`` standardises them with other constants,
  ``augment.py`` changes training images at random;
- files of other projects (LEAF, TFF, Flower ...), and data sets of PyTorch: ``formats/``;
- warnings of data that look unprepared: ``looks.py``; tables of class shares: ``shares.py``;
- clients larger than memory: ``memmap.py`` (on disk) and ``virtual.py`` (computed when read).
"""

from fedjax_async.data.augment import AUGMENTATIONS, augmentation
from fedjax_async.data.checking import check_data
from fedjax_async.data.datasets import DATASETS, list_datasets, load, verify
from fedjax_async.data.embedded import digits, fashion_mnist_6k
from fedjax_async.data.federated import Dataset, Federation, client_rows, federate
from fedjax_async.data.fetch import fetch
from fedjax_async.data.formats import FORMATS, from_torch
from fedjax_async.data.memmap import open_folder, pack, packed_offsets, write_clients, write_folder
from fedjax_async.data.own import from_arrays
from fedjax_async.data.partition import PARTITIONERS, split_clients
from fedjax_async.data.population import ceiling, population
from fedjax_async.data.problems import Quadratic, quadratic, quadratic_problem, synthetic
from fedjax_async.data.virtual import Generated, Identity, generate, generated

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "FORMATS",
    "PARTITIONERS",
    "Dataset",
    "Federation",
    "Generated",
    "Identity",
    "Quadratic",
    "augmentation",
    "ceiling",
    "check_data",
    "client_rows",
    "digits",
    "fashion_mnist_6k",
    "federate",
    "fetch",
    "from_arrays",
    "from_torch",
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
