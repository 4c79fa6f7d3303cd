"""Params that never leave their client."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async import tree
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, Path, State


def keeping(client: ClientAlgorithm, private: Callable[[Path], bool]) -> ClientAlgorithm:
    """``client``, whose ``private`` leaves of the params stay with it from job to job and are uploaded as zeros.

    Every client starts with the leaves of the run's first params; those in a message are ignored. ``client`` must
    upload ``trained - start``; wrappers that change uploads (compression, control variates) go outside of this one.
    """

    def with_own(message: Message, own: Params) -> Message:
        return message._replace(params=tree.join(tree.split(message.params, private)[0], own))

    def init(params: Params) -> State:
        return client.init(params), tree.split(params, private)[1]

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> State:
        rest, own = client_state
        return client.begin(key, with_own(message, own), rest, data), own

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        inner, own = work
        return client.step(inner, k, with_own(message, own), data), own

    def finish(work: State, message: Message, client_state: State) -> tuple[Params, State]:
        nothing = jax.tree.map(jnp.zeros_like, work[1])
        # its change since zero is the leaf itself, to the last bit
        upload, rest = client.finish(work[0], with_own(message, nothing), client_state[0])
        sent, own = tree.split(upload, private)
        return tree.join(sent, nothing), (rest, own)

    def info(client_state: State) -> dict[str, Array]:
        return {} if client.info is None else client.info(client_state[0])

    def unsent(before: State, after: State) -> State:
        return (after[0] if client.unsent is None else client.unsent(before[0], after[0])), after[1]

    def own_model(message: Message, client_state: State) -> Params:
        message = with_own(message, client_state[1])
        return message.params if client.own is None else client.own(message, client_state[0])

    return ClientAlgorithm(init, begin, step, finish, None if client.info is None else info, unsent, own_model)
