"""The data that settings name: a data set, dealt to clients."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np

from fedjax_async import check, registry
from fedjax_async.config.settings import USUAL_PARTITION, Settings
from fedjax_async.data import DATASETS, Federation, check_data, federate
from fedjax_async.types import FederatedData

# What says how a named data set is cut: of no use for data that come as clients already.
OF_NAMED_DATA = ("eval_examples", "test_fraction", "validation_fraction")


@lru_cache(maxsize=4)
def _dataset(dataset: str) -> Any:
    return registry.bind("dataset", DATASETS, dataset)()


@lru_cache(maxsize=4)
def _with_fewer_tests(dataset: str, count: int | None) -> Any:
    """The data set with ``count`` of its test examples, spread evenly over their order."""
    whole = _dataset(dataset)
    if count is None:
        return whole
    check.require(not isinstance(whole, Federation), "eval_examples", count, f"left out: {dataset} comes by clients")
    check.whole("eval_examples", count, high=len(whole.test_y))
    chosen = np.linspace(0, len(whole.test_y), count, endpoint=False).astype(np.int64)
    return whole._replace(test_x=whole.test_x[chosen], test_y=whole.test_y[chosen])


@lru_cache(maxsize=64)
def _data(dataset: str, tests: int | None, *options: Any) -> FederatedData:
    return check_data(federate(_with_fewer_tests(dataset, tests), *options))


def data_of(s: Settings, given: FederatedData | None = None) -> FederatedData:
    """The clients' data: those given, or those that the settings name.

    Equal settings give the same object, so that runs share what is on the device. ``ValueError`` where data are given
    and the settings say how to cut a data set.
    """
    if given is not None:
        for name in OF_NAMED_DATA:
            check.require(getattr(s, name) is None, name, getattr(s, name), "left out with data of your own")
        return check_data(given)
    options = (s.partition, s.clients, s.seed, s.test_fraction, s.validation_fraction)
    return _data(s.dataset, s.eval_examples, *options)


def with_owners(settings: Settings) -> Settings:
    """The settings with their partition filled in: natural owners, where the data set has them."""
    dataset = _dataset(settings.dataset)
    natural = isinstance(dataset, Federation) or dataset.groups is not None
    usual = "natural" if natural else USUAL_PARTITION
    return dataclasses.replace(settings, partition=settings.partition or usual)
