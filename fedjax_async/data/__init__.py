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
- texts of your own as token ids: ``tokens.py``;
- files of other projects (LEAF, TFF, Flower ...), and data sets of PyTorch: ``formats/``;
- warnings of data that look unprepared: ``looks.py``; tables of class shares: ``shares.py``;
- clients larger than memory: ``memmap.py`` (on disk) and ``virtual.py`` (computed when read).
"""

# fmt: off
from fedjax_async.base import lazy
from fedjax_async.data.augment import AUGMENTATIONS as AUGMENTATIONS, augmentation as augmentation
from fedjax_async.data.checking import check_data as check_data
from fedjax_async.data.datasets import (DATASETS as DATASETS, list_datasets as list_datasets, load as load,
    verify as verify)
from fedjax_async.data.embedded import digits as digits, fashion_mnist_6k as fashion_mnist_6k
from fedjax_async.data.federated import (Dataset as Dataset, Federation as Federation, client_rows as client_rows,
    federate as federate)
from fedjax_async.data.fetch import fetch as fetch
from fedjax_async.data.formats import FORMATS as FORMATS, from_torch as from_torch
from fedjax_async.data.memmap import (open_folder as open_folder, pack as pack, packed_offsets as packed_offsets,
    write_clients as write_clients, write_folder as write_folder)
from fedjax_async.data.own import from_arrays as from_arrays
from fedjax_async.data.partition import PARTITIONERS as PARTITIONERS, split_clients as split_clients
from fedjax_async.data.population import ceiling as ceiling, population as population
from fedjax_async.data.problems import (Quadratic as Quadratic, quadratic as quadratic,
    quadratic_problem as quadratic_problem, synthetic as synthetic)
from fedjax_async.data.tokens import tokenize as tokenize
from fedjax_async.data.virtual import (Generated as Generated, Identity as Identity, generate as generate,
    generated as generated)

lazy.set_all(__name__)
