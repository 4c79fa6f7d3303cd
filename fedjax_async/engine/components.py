"""The components of a run, and which of its numbers are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import tree
from fedjax_async.base.spec import Spec, leaf_names
from fedjax_async.peers import PeerAlgorithm, PeerSchedule
from fedjax_async.server import begun
from fedjax_async.types import (
    ClientAlgorithm,
    Facts,
    FederatedData,
    Model,
    Number,
    Params,
    Schedule,
    ServerAlgorithm,
    State,
    Structure,
)

Hyper = Mapping[str, Number]  # name -> number (host), or a scalar array inside a compiled program
ServerFamily = Callable[[Hyper], ServerAlgorithm]
ClientFamily = Callable[[Hyper], ClientAlgorithm]


Server = ServerAlgorithm | ServerFamily
Client = ClientAlgorithm | ClientFamily
Peer = PeerAlgorithm | Callable[[Hyper], PeerAlgorithm]


class Components(NamedTuple):
    """Rule, client, model and data of a run.

    ``rule`` is that of the server, or of each node where there is none. ``rule`` and ``client`` are algorithms, or
    functions that return one from ``hyper``. Runs share compiled programs and may run side by side if their components
    differ only in ``hyper`` and ``data``.
    """

    rule: Any  # Server, or Peer
    client: Client
    model: Model
    data: FederatedData
    hyper: Mapping[str, float] = {}


def components_of(rule: Any, client: Any, model: Model, data: FederatedData) -> Components:
    """The components of two algorithms, each an algorithm or a ``Spec`` of one."""
    (rule, of_rule), (client, of_client) = parted(rule), parted(client)
    return Components(rule, client, model, data, of_rule | of_client)


class Template(NamedTuple):
    """A spec without its numbers: a function of them, equal by value, so that equal ones share compiled programs."""

    structure: Structure  # of the spec
    names: tuple[str, ...]  # of its leaves; leaves of one name are one number

    def __call__(self, hyper: Mapping[str, Any]) -> Any:
        """What the spec makes with these numbers."""
        return jax.tree.unflatten(self.structure, [hyper[name] for name in self.names]).make()


def parted(made: Any) -> tuple[Any, dict[str, float]]:
    """A spec without its numbers, and these by name.

    An algorithm, or a function of ``hyper``, has no numbers and is returned as it is.
    """
    if not isinstance(made, Spec):
        return made, {}
    leaves, structure = jax.tree.flatten(made)
    names = tuple(leaf_names(made))
    return Template(structure, names), {name: float(leaf) for name, leaf in zip(names, leaves, strict=True)}


def bound(algorithm: Any, hyper: Mapping[str, Any]) -> Any:
    """The algorithm with these hyperparameters; an algorithm that takes none is returned as it is."""
    return algorithm(hyper) if callable(algorithm) else algorithm


def waits_for_close(components: Components) -> bool:
    """Whether uploads change the model only when their server step closes: whether the rule has a ``close``."""
    return bound(components.rule, components.hyper).close is not None


def facts_of(schedule: Schedule) -> Facts:
    """The facts about a run that its schedule determines."""
    steps = int(schedule.closes.sum())
    return Facts(schedule.num_clients, bool(np.all(schedule.closes)), len(schedule.job), steps)


def abstract(hyper: Iterable[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of hyperparameters: programs know no more of them."""
    return {name: jax.ShapeDtypeStruct((), jnp.result_type(float)) for name in hyper}


def first_states(components: Components, params: Params, facts: Facts) -> tuple[State, State, State]:
    """Shapes at the start of a run with these facts: the server's state, its memory about one client, a client's state.

    The client keeps its state between jobs.
    """
    given = (components.rule, components.client, facts)
    found: tuple[State, State, State] = tree.shapes(_first_states, abstract(components.hyper), params, given=given)
    return found


def _first_states(
    server: Server, client: Client, facts: Facts, hyper: Hyper, params: Params
) -> tuple[State, State, State]:
    return *begun(bound(server, hyper), params, facts), bound(client, hyper).init(params)


def gradients_of(components: Components, schedule: Schedule | PeerSchedule) -> np.ndarray:
    """How many gradients of the loss each job computes (without a server: each event); int64[J]."""
    steps = np.asarray(schedule.local_steps, np.int64)
    client = bound(components.client, components.hyper)
    if client.gradients is None:
        return steps
    examples = np.asarray(components.data.size, np.int64)[schedule.client]
    return np.asarray(client.gradients(steps, examples), np.int64)


def row_of(rows: np.ndarray) -> jax.ShapeDtypeStruct:
    """Shape [1, ...] and dtype of a row as a program sees it: 64-bit types only where JAX has them enabled."""
    return jax.ShapeDtypeStruct((1, *rows.shape[1:]), jax.dtypes.canonicalize_dtype(rows.dtype))
