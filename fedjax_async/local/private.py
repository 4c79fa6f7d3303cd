"""Private params: leaves that stay on their client. Also the common part of all wrappers around a client."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, Path, State


def keeping(client: ClientAlgorithm, private: Callable[[Path], bool], part: str | None = None) -> ClientAlgorithm:
    """Wrap ``client``: the ``private`` leaves of its params stay with it from job to job, and zeros are uploaded.

    Every client starts with the leaves of the run's first params; those in a message are ignored. ``client`` must
    upload ``trained - start``, or a ``NamedTuple`` that has this change in the field ``part``. Wrappers that change
    uploads (compression, control variates) go around this one.
    """

    def with_private(message: Message, leaves: Params) -> Message:
        return message._replace(params=tree.join(tree.split(message.params, private)[0], leaves))

    def init(params: Params) -> State:
        return client.init(params), tree.split(params, private)[1]

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> State:
        inner, leaves = client_state
        return client.begin(key, with_private(message, leaves), inner, data), leaves

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        inner, leaves = work
        return client.step(inner, k, with_private(message, leaves), data), leaves

    def finish(work: State, message: Message, client_state: State) -> tuple[Params, State]:
        zeros = jax.tree.map(jnp.zeros_like, work[1])
        # counted from zero, the change of a private leaf is the trained leaf itself, to the last bit
        upload, inner = client.finish(work[0], with_private(message, zeros), client_state[0])
        sent, leaves = tree.split(upload if part is None else getattr(upload, part), private)
        shared = tree.join(sent, zeros)
        return (shared if part is None else upload._replace(**{part: shared})), (inner, leaves)

    def own_model(message: Message, client_state: State) -> Params:
        message = with_private(message, client_state[1])
        return message.params if client.own is None else client.own(message, client_state[0])

    return wrapping(client, init=init, begin=begin, step=step, finish=finish, own=own_model)


def wrapping(client: ClientAlgorithm, **parts: Callable[..., object]) -> ClientAlgorithm:
    """``client`` with the functions ``parts`` of a wrapper; its state is ``(state of client, state of wrapper)``.

    Unless ``parts`` replace them, ``info``, ``unsent`` and ``own`` are those of ``client`` on the state of ``client``.
    """

    def info(client_state: State) -> dict[str, Array]:
        return client.info(client_state[0])  # type: ignore[misc]

    def unsent(before: State, after: State) -> State:
        return client.unsent(before[0], after[0]), after[1]  # type: ignore[misc]

    def own(message: Message, client_state: State) -> Params:
        return client.own(message, client_state[0])  # type: ignore[misc]

    of_client = {"info": client.info and info, "unsent": client.unsent and unsent, "own": client.own and own}
    return client._replace(**{**of_client, **parts})  # type: ignore[arg-type]
