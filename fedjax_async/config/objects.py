"""What a setting takes besides a text: the objects of the user's own, and how messages show them."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

from fedjax_async.base import check

# Settings that may hold an object, with what it may be.
KINDS = {
    "method": "a Method, or the Spec of a rule",
    "timing": "a timing, timing(scenario) -> Schedule",
    "policy": "a policy model, model(prior) -> clock.Policy",
    "topology": "a networkx graph, a list of graphs, or a topology model, model(num_clients, seed) -> peers.Topology",
    "exchange": "an exchange, exchange(setup) -> peers.PeerSchedule",
    "delay": "a delay model, model(num_clients, seed) -> clock.Delays",
    "availability": "an availability model, model(num_clients, seed, part) -> clock.Availability",
    "faults": "a fault model, model(num_clients, seed, part) -> clock.Faults",
    "network": "a network model, model(num_clients, seed) -> clock.Network",
    "dataset": "a Dataset, a Federation or FederatedData (data.from_arrays makes one from arrays)",
    "partition": "a partitioner, f(labels, num_clients, rng) -> [indices of client 0, ...]",
    "augment": "a function of raw images, augment(key, x) -> x",
    "model": "a Model, or a module of flax (of flax.nnx also a factory, f(rngs)) or torch.nn",
    "initial": "a pytree of arrays, as Run.params",
    "optimizer": "an optax transformation, or a factory of one, f(lr), such as optax.adam",
    "client": "a ClientAlgorithm, or a factory of one, f(model, *, ...)",
    "compress": "a Compressor",
    "metrics": "a dict of names and metrics, f(outputs, y) -> [B] or a Metric",
}
# Settings that take the Spec of a factory of the user's own: ``delay=Spec(rush_hour, long=600.0)``.
SPECS = (
    "method", "timing", "policy", "topology", "exchange", "delay", "availability", "faults", "network", "partition",
    "augment", "client", "optimizer",
)  # fmt: skip
PLAIN = (numbers.Number, bytes, list, dict, set, frozenset, range)  # types that settings do not take as objects


def shown(thing: object) -> str:
    """How error messages show an object."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    return f"a {type(thing).__name__}" if not isinstance(thing, PLAIN) else check.shown(thing)


def is_params(thing: object) -> bool:
    """Whether it is an array or a container of arrays, such as ``Run.params``."""
    parts = list(thing.values()) if isinstance(thing, Mapping) else thing
    if not isinstance(parts, (list, tuple)):
        number = not str(getattr(thing, "dtype", "key<")).startswith("key<")  # random keys are no numbers
        return isinstance(getattr(thing, "shape", None), tuple) and number
    return len(parts) > 0 and all(map(is_params, parts))
