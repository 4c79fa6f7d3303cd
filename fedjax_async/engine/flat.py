"""States, messages and uploads as vectors: for an accelerator, where each leaf of a model costs several launches.

Rules and clients see pytrees; between their calls the engine holds each of their states as a :class:`Flat`. So a copy
of a model, a sum of two or a norm is one kernel, whatever the number of its leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, KeyPath
from jax.typing import ArrayLike

from fedjax_async.base import tree
from fedjax_async.engine.components import Client, Components, Hyper, Peer, Server, bound
from fedjax_async.models import STATISTICS
from fedjax_async.server import begun
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    ClientData,
    Event,
    Facts,
    Info,
    Key,
    Message,
    Params,
    PeerAlgorithm,
    Request,
    ServerAlgorithm,
    State,
    Structure,
    Tree,
)


class LeafPlace(NamedTuple):
    """Where a leaf is: in which vector, and from where."""

    vector: int
    begin: int
    shape: tuple[int, ...]


class Plan(NamedTuple):
    """How the leaves of a pytree are laid out in vectors."""

    structure: Structure
    places: tuple[LeafPlace, ...]
    names: tuple[str, ...]  # of the vectors


@jax.tree_util.register_pytree_with_keys_class
class Flat:
    """The leaves of a pytree end to end, in one vector for each dtype; running statistics have vectors of their own.

    A pytree of its vectors. They may get further axes in front, such as one of clients.
    """

    def __init__(self, vectors: tuple[Array, ...], plan: Plan) -> None:
        self.vectors, self.plan = vectors, plan

    def tree_flatten(self) -> tuple[tuple[Array, ...], Plan]:
        """Vectors and plan, for JAX."""
        return self.vectors, self.plan

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[DictKey, Array], ...], Plan]:
        """Vectors with their names, and the plan, for JAX."""
        return tuple(zip(map(jax.tree_util.DictKey, self.plan.names), self.vectors, strict=True)), self.plan

    @classmethod
    def tree_unflatten(cls, plan: Plan, vectors: Iterable[Array]) -> Flat:
        """The inverse of :meth:`tree_flatten_with_keys`."""
        return cls(tuple(vectors), plan)

    def tree(self) -> State:
        """The pytree again; its leaves get the axes in front of the vectors."""

        def leaf(place: LeafPlace) -> Array:
            vector, end = self.vectors[place.vector], place.begin + math.prod(place.shape)
            return vector[..., place.begin : end].reshape((*vector.shape[:-1], *place.shape))  # NumPy's stay NumPy's

        return jax.tree.unflatten(self.plan.structure, [leaf(place) for place in self.plan.places])


def flat(tree: State) -> State:
    """A pytree of arrays as a :class:`Flat`; one without leaves stays as it is."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not found:
        return tree
    kinds = [_kind(path, leaf) for path, leaf in found]
    parts: list[list[Array]] = [[] for _ in dict.fromkeys(kinds)]
    order, ends, places = list(dict.fromkeys(kinds)), [0] * len(parts), []
    for kind, (_, leaf) in zip(kinds, found):
        vector = order.index(kind)
        places.append(LeafPlace(vector, ends[vector], jnp.shape(leaf)))
        parts[vector].append(jnp.ravel(leaf))
        ends[vector] += jnp.size(leaf)
    vectors = tuple(part[0] if len(part) == 1 else jnp.concatenate(part) for part in parts)
    return Flat(vectors, Plan(structure, tuple(places), tuple(name for name, _ in order)))


def _kind(path: KeyPath, leaf: ArrayLike) -> tuple[str, jnp.dtype]:
    """What the leaves of a vector have in common: its name, by which running statistics are known, and their dtype."""
    dtype = jnp.asarray(leaf).dtype
    return (STATISTICS if STATISTICS in tree.path_of(path) else str(dtype)), dtype


def opened(value: Tree) -> Tree:
    """``value``, a pytree, with the pytrees themselves in place of each :class:`Flat`."""

    def is_flat(part: object) -> bool:
        return isinstance(part, Flat)

    return jax.tree.map(lambda part: part.tree() if is_flat(part) else part, value, is_leaf=is_flat)


def flattened(components: Components, *, nodes: bool = False) -> Components:
    """The components as this backend runs them: on a CPU as they are, elsewhere with flat states.

    ``nodes``: whether the rule is that of nodes.
    """
    if jax.default_backend() == "cpu":
        return components
    rule = FlatPeer(components.rule) if nodes else FlatServer(components.rule)
    return components._replace(rule=rule, client=FlatClient(components.client))


def said_of(components: Components) -> dict[str, object]:
    """What a checkpoint must know of the form of states."""
    return {"arrays": "flat states"} if isinstance(components.client, FlatClient) else {}


@dataclass(frozen=True)
class FlatServer:
    """A family of rules: ``plain``, with flat states and messages."""

    plain: Server

    def __call__(self, hyper: Hyper) -> ServerAlgorithm:
        """The rule with these hyperparameters."""
        return _flat_rule(bound(self.plain, hyper))


def _both(states: tuple[State, State]) -> tuple[State, State]:
    return flat(states[0]), flat(states[1])


def _flat_rule(rule: ServerAlgorithm) -> ServerAlgorithm:
    def init(params: Params, facts: Facts = Facts()) -> tuple[State, State]:
        return _both(begun(rule, params, facts))

    def receive(state: State, memory: State, arrival: Arrival) -> tuple[State, State, Info]:
        state, memory, info = rule.receive(*opened((state, memory, arrival)))
        return flat(state), flat(memory), info

    def dispatch(state: State, memory: State, request: Request) -> tuple[Message, State]:
        message, memory = rule.dispatch(opened(state), opened(memory), request)
        return message._replace(params=flat(message.params), extra=flat(message.extra)), flat(memory)

    close = rule.close
    return ServerAlgorithm(
        init=init,
        receive=receive,
        dispatch=dispatch,
        params=lambda state: rule.params(opened(state)),
        close=None if close is None else lambda state, memory: _both(close(*opened((state, memory)))),
        sums=rule.sums,
    )


@dataclass(frozen=True)
class FlatPeer:
    """A family of rules of nodes: ``plain``, with flat rows and messages; an inbox stays a pytree."""

    plain: Peer

    def __call__(self, hyper: Hyper) -> PeerAlgorithm:
        """The rule with these hyperparameters."""
        return _flat_peer(bound(self.plain, hyper))


def _flat_peer(peer: PeerAlgorithm) -> PeerAlgorithm:
    def add(inbox: State, row: State, message: State, weight: Array) -> State:
        return peer.add(inbox, opened(row), opened(message), weight)

    def push(row: State, upload: State, event: Event) -> tuple[State, State, Mapping[str, Array]]:
        row, messages, columns = peer.push(opened(row), opened(upload), event)
        return flat(row), jax.vmap(flat)(messages), columns

    return peer._replace(
        init=lambda params: flat(peer.init(params)),
        open=lambda row: peer.open(opened(row)),
        add=add,
        wake=lambda row, inbox, event: flat(peer.wake(opened(row), inbox, event)),
        start=lambda row: peer.start(opened(row)),
        push=push,
        params=lambda row: peer.params(opened(row)),
    )


@dataclass(frozen=True)
class FlatClient:
    """A family of clients: ``plain``, with flat states, messages and uploads; unfinished work stays a pytree."""

    plain: Client

    def __call__(self, hyper: Hyper) -> ClientAlgorithm:
        """The client with these hyperparameters."""
        return _flat_client(bound(self.plain, hyper))


def _flat_client(client: ClientAlgorithm) -> ClientAlgorithm:
    def begin(key: Key, message: Message, state: State, data: ClientData) -> State:
        return client.begin(key, opened(message), opened(state), data)

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        return client.step(work, k, opened(message), data)

    def finish(work: State, message: Message, state: State) -> tuple[State, State]:
        return _both(client.finish(work, opened(message), opened(state)))

    def taking_flat(function: Callable[..., Tree]) -> Callable[..., Tree]:
        return lambda *given: function(*opened(given))

    kept = client.unsent
    return client._replace(
        init=lambda params: flat(client.init(params)),
        begin=begin,
        step=step,
        finish=finish,
        info=None if client.info is None else taking_flat(client.info),
        unsent=None if kept is None else lambda before, after: flat(kept(*opened((before, after)))),
        own=None if client.own is None else taking_flat(client.own),
    )
