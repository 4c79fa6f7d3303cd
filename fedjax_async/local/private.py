"""Params that never leave their client."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, State


def keeping(client: ClientAlgorithm, entry: str) -> ClientAlgorithm:
    """``client``, whose params' top-level ``entry`` stays with it from job to job and is uploaded as zeros.

    Every client starts with the entry of the run's first params; the one in a message is ignored. ``client`` must
    upload ``trained - start``; wrappers that change uploads (compression) go outside of this one.
    """

    def with_own(message: Message, own: Params) -> Message:
        return message._replace(params={**message.params, entry: own})

    def init(params: Params) -> State:
        return client.init(params), params[entry]

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> State:
        rest, own = client_state
        return client.begin(key, with_own(message, own), rest, data), own

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        inner, own = work
        return client.step(inner, k, with_own(message, own), data), own

    def finish(work: State, message: Message, client_state: State) -> tuple[Params, State]:
        nothing = jax.tree.map(jnp.zeros_like, work[1])
        # its change since zero is the entry itself, to the last bit
        upload, rest = client.finish(work[0], with_own(message, nothing), client_state[0])
        return {**upload, entry: nothing}, (rest, upload[entry])

    def info(client_state: State) -> dict[str, Array]:
        return {} if client.info is None else client.info(client_state[0])

    return ClientAlgorithm(init, begin, step, finish, None if client.info is None else info)
