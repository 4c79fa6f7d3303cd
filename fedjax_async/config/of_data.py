"""The settings of the data, of attacks and of privacy."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypedDict

from fedjax_async.base import check
from fedjax_async.config.fields import fraction, known, setting

if TYPE_CHECKING:
    from fedjax_async.config.own import Named
    from fedjax_async.data import Dataset, Federation
    from fedjax_async.data.augment import Augment
    from fedjax_async.data.partition import Partitioner
    from fedjax_async.types import FederatedData

USUAL_PARTITION = "dirichlet:alpha=0.1"  # for data sets that name no owners of their examples


@dataclasses.dataclass(frozen=True)
class OfData:
    """The examples, and how they are divided among clients."""

    dataset: str | Named = setting("fashion_mnist_6k", "data set (`list datasets` shows all)", "world")
    partition: str | Named | None = setting(
        None, f"how examples are divided among clients, e.g. iid [{USUAL_PARTITION}, or the natural owners]", "world"
    )
    clients: int = setting(10, "number of clients", "world", requires=check.whole)
    test_fraction: float | None = setting(
        None,
        "fraction of each client's examples kept for its own test [none; without a server 0.2]",
        "world",
        without="dealt",
        requires=fraction,
    )
    validation_fraction: float | None = setting(
        None,
        "fraction of each client's training examples held out for tuning: evaluated, never trained on",
        "world",
        requires=fraction,
    )
    normalise: str | None = setting(
        None,
        "how inputs are standardised: published (with the data set's published constants; the default if it has "
        "some), training (with the mean and deviation of the training part) or none",
        "world",
        without="own_client",
        requires=known,
        example="a text such as 'training'",
        rare=True,
    )
    augment: str | Named | None = setting(
        None, "random changes of training images, e.g. crop:padding=4+flip", "tuned", without="own_client", rare=True
    )


@dataclasses.dataclass(frozen=True)
class OfSecurity:
    """Attackers, and what protects against them and against the server."""

    attack: str | None = setting(
        None,
        "attack by some of the clients, e.g. sign_flip:share=0.2 (`list attacks` shows all)",
        "world",
        without="nodes",
        rare=True,
    )
    privacy: str | None = setting(
        None,
        "clip and noise for uploads (dp:clip=1,noise=0.5) or for gradients (dp_sgd), or secure aggregation "
        "(secure:size=10); + joins several",
        "compared",
        without="nodes adaptive",
        example="a text such as 'dp:clip=1,noise=0.5'",
        rare=True,
    )


class DataKeywords(TypedDict, total=False):
    """The same as typed keywords."""

    dataset: str | Named | Dataset | Federation | FederatedData
    partition: str | Named | Partitioner | None
    clients: int
    test_fraction: float | None
    validation_fraction: float | None
    normalise: str | None
    augment: str | Named | Augment | None
    attack: str | None
    privacy: str | None
