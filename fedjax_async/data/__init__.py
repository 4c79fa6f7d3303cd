"""Data sets, partitioners, and ``federate``, which joins them into ``FederatedData``."""

from fedjax_async.data.dataset import Dataset
from fedjax_async.data.datasets import DATASETS, list_datasets, load, verify
from fedjax_async.data.embedded import digits, fashion_mnist_6k
from fedjax_async.data.federated import client_rows, federate
from fedjax_async.data.fetch import fetch
from fedjax_async.data.partition import PARTITIONERS, split_clients
from fedjax_async.data.quadratic import Quadratic, quadratic, quadratic_model, quadratic_problem
from fedjax_async.data.synthetic import synthetic

__all__ = [
    "DATASETS",
    "PARTITIONERS",
    "Dataset",
    "Quadratic",
    "client_rows",
    "digits",
    "fashion_mnist_6k",
    "federate",
    "fetch",
    "list_datasets",
    "load",
    "quadratic",
    "quadratic_model",
    "quadratic_problem",
    "split_clients",
    "synthetic",
    "verify",
]
