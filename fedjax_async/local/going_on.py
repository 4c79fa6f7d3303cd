"""Training that goes on: a client that gets a second message in mid-job mixes its model into the unfinished one.

The timing ``midway`` cuts each job into two parts. The upload of the first one is never sent, so that its trained model
stays with the client, and the second part begins from a mixture of this model and the message.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.local.training import Scale, local_training
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Model, Params, State, Traced


class MidJob(NamedTuple):
    """What a client that goes on keeps, from message to message."""

    inner: State  # of the wrapped client
    model: Params  # as trained so far
    open: Array  # bool[], whether the last part was not uploaded


class Mixed(NamedTuple):
    """Local variables of one part."""

    inner: State
    start: Params  # from which it trains


def going_on(client: ClientAlgorithm, share: Traced = 0.5) -> ClientAlgorithm:
    """Wrap ``client``: where its last upload was not sent, it starts from its own model and the message, mixed.

    ``w <- (1 - b) w + b x``, w the model that it has trained, x that of the message, b the ``share`` in [0, 1]; then
    ``client`` trains from w. Its upload is the change from x, so that the server finds the client's model as ever.
    Otherwise, at the first message of a job, it trains from the message.

    ``client`` must upload the change of its params. Its own state goes on from part to part; its proximal term, if any,
    is drawn to the model from which the part began. Where an upload is rejected, the client goes on from the first part
    of that job. Wrappers that change uploads go around this one.
    """
    check.non_negative("share", share)
    check.in_range("share", share, 0.0, 1.0)

    def init(params: Params) -> MidJob:
        return MidJob(client.init(params), params, jnp.zeros((), jnp.bool_))

    def begin(key: Key, message: Message, kept: MidJob, data: ClientData) -> Mixed:
        def mixed(own: Array, fresh: Array) -> Array:
            return own + jnp.asarray(share, own.dtype) * (fresh - own)

        start = tree.where(kept.open, jax.tree.map(mixed, kept.model, message.params), message.params)
        return Mixed(client.begin(key, message._replace(params=start), kept.inner, data), start)

    def step(work: Mixed, k: Array, message: Message, data: ClientData) -> Mixed:
        return work._replace(inner=client.step(work.inner, k, message._replace(params=work.start), data))

    def finish(work: Mixed, message: Message, kept: MidJob) -> tuple[Params, MidJob]:
        change, inner = client.finish(work.inner, message._replace(params=work.start), kept.inner)
        have, want = (str(jax.tree.structure(each)) for each in (change, message.params))
        check.require(have == want, "what the client uploads", have, "the change of its params: it cannot go on")
        model = jax.tree.map(jnp.add, work.start, change)
        after = MidJob(inner, model, jnp.zeros_like(kept.open))
        return jax.tree.map(jnp.subtract, model, message.params), after

    def unsent(before: MidJob, after: MidJob) -> MidJob:
        return after._replace(open=jnp.ones_like(after.open))

    def info(kept: MidJob) -> dict[str, Array]:
        return client.info(kept.inner)  # type: ignore[misc]

    def own(message: Message, kept: MidJob) -> Params:
        return client.own(message, kept.inner)  # type: ignore[misc]

    of_client = client.info and info, unsent, client.own and own, client.gradients
    return ClientAlgorithm(init, begin, step, finish, *of_client)


def going_on_training(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    share: Traced = 0.5,
) -> ClientAlgorithm:
    """:func:`local_training` that mixes the ``share`` of a second message into its unfinished model."""
    plain = local_training(model, optimizer=optimizer, batch_size=batch_size, proximal=proximal, scale=scale)
    return going_on(plain, share)
