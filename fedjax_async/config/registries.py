"""The package's registries by the setting whose text names their entries; the user's: ``base.registry.ADDED``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_async.base.method import Method
from fedjax_async.clock import AVAILABILITY, DELAYS, FAULTS, NETWORKS, POLICIES, TIMINGS
from fedjax_async.compress import COMPRESSORS
from fedjax_async.data import AUGMENTATIONS, DATASETS, PARTITIONERS
from fedjax_async.local import DECAYS, OPTIMIZERS, local_training
from fedjax_async.models import METRICS, MODELS
from fedjax_async.peers import EXCHANGES, TOPOLOGIES
from fedjax_async.peers import METHODS as NODES
from fedjax_async.server import ATTACKS, PARTS, PRIVACY
from fedjax_async.server import METHODS as SERVERS
from fedjax_async.types import ClientAlgorithm

# the state of a node's optimiser stays with the node: it trains on, whatever it mixes in
_AT_NODES = functools.partial(local_training, keep_optimizer=True)


def filled(given: Method) -> Method:
    """The method with the defaults that depend on whether it has a server."""
    if given.has_server:
        return given._replace(timing=given.timing or "every", client=given.client or local_training)
    exchange, topology = given.exchange or "push_sum", given.topology or "gossip"
    return given._replace(client=given.client or _AT_NODES, exchange=exchange, topology=topology)


METHODS: dict[str, Method] = {name: filled(each) for name, each in (SERVERS | NODES).items()}
CLIENTS: dict[str, Callable[..., ClientAlgorithm]] = {}  # the package has none by name: a method brings its own
REGISTRIES: dict[str, Mapping[str, Any]] = {
    "method": METHODS,
    "part": PARTS,
    "timing": TIMINGS,
    "policy": POLICIES,
    "topology": TOPOLOGIES,
    "exchange": EXCHANGES,
    "delay": DELAYS,
    "availability": AVAILABILITY,
    "faults": FAULTS,
    "network": NETWORKS,
    "dataset": DATASETS,
    "partition": PARTITIONERS,
    "augment": AUGMENTATIONS,
    "attack": ATTACKS,
    "privacy": PRIVACY,
    "model": MODELS,
    "client": CLIENTS,
    "optimizer": OPTIMIZERS,
    "decay": DECAYS,
    "compress": COMPRESSORS,
    "metrics": METRICS,
}
