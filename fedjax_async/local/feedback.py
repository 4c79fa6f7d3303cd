"""Compressed uploads: error feedback and EF21, wrappers around any client algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, registry, tree
from fedjax_async.compress import Compressor, on_tree, values_bits
from fedjax_async.geometry import GROUPINGS
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, Path, State

_SENDING = 2**31  # no local step has this number


class Sending(NamedTuple):
    """What a client that compresses keeps from job to job."""

    inner: State  # of the client algorithm it wraps
    kept: Params  # the residual e of error feedback, the estimate g of EF21; () where there is neither
    bits: Array  # int32[], of its last accepted upload on the wire; 0 before the first
    values_bits: Array  # int32[], of the values alone


Sizes = tuple[Array, Array]
Send = Callable[[Params], tuple[Params, Sizes]]
Exchanged = tuple[Params, Params, Sizes]


def feedback(
    client: ClientAlgorithm,
    compressor: Compressor,
    *,
    per: str = "whole",
    private: Callable[[Path], bool] | None = None,
    like: Any = None,
    error_feedback: bool = True,
) -> ClientAlgorithm:
    """``client``, whose upload passes through ``compressor``; what is lost is added to its next upload.

    ``Delta_hat = C(Delta + e)``, ``e <- e + Delta - Delta_hat``; the upload is the Delta_hat that the server decodes.

    Args:
      client: any client algorithm. Wrappers that change what is uploaded (``keeping``) go inside of this one.
      per: one of ``geometry.GROUPINGS``: compress the whole upload as one vector, each layer or each tensor. Running
        statistics (BatchNorm) are compressed with the rest: mind what unscaled signs or top-k make of them.
      private: the leaves of the params that are not sent (``keeping`` uploads them as zeros): they pass by.
      like: an upload, or its shapes, where it is not a pytree like the params.
      error_feedback: without it ``Delta_hat = C(Delta)``, and nothing is kept.

    Returns: a ``ClientAlgorithm`` whose state is :class:`Sending`. The residual stays as it is while the client is
    away, and while its uploads are refused: one that is not finite is not finite decoded either. Sums telescope:
    decoded uploads + residual = true uploads, to rounding. Source: Seide et al. (2014); Karimireddy et al. (2019);
    AsynFLC-EF, algorithm 1 with eq. 8. An upload that is lost takes what it held with it: the client does not know.
    """
    check.one_of("error_feedback", error_feedback, [True, False])

    def plain(upload: Params, kept: Params, send: Send) -> Exchanged:
        decoded, sizes = send(upload)
        return decoded, kept, sizes

    def corrected(upload: Params, kept: Params, send: Send) -> Exchanged:
        total = jax.tree.map(jnp.add, upload, kept)
        decoded, sizes = send(total)
        return decoded, jax.tree.map(jnp.subtract, total, decoded), sizes

    exchange = corrected if error_feedback else plain
    return sending(client, compressor, exchange, per=per, private=private, like=like, keeps=error_feedback)


def sending(
    client: ClientAlgorithm,
    compressor: Compressor,
    exchange: Callable[[Params, Params, Send], Exchanged],
    *,
    per: str,
    private: Callable[[Path], bool] | None,
    like: Any,
    keeps: bool,
    returned: bool = False,
) -> ClientAlgorithm:
    """``client`` with ``exchange(upload, kept, send) -> (upload, kept, sizes)`` between it and the server.

    ``send(tree) -> (decoded tree, (bits, values_bits))`` is one message through the compressor, once a job. ``kept``
    starts at zeros like an upload, or is ``()``; ``returned``: it does not change by an upload that is never applied.
    """
    group = registry.find("per", GROUPINGS, per)

    def init(params: Params) -> Sending:
        upload = tree.shared(params if like is None else like, params, private)
        kept = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), upload) if keeps else ()
        return Sending(client.init(params), kept, jnp.int32(0), jnp.int32(0))

    def begin(key: Key, message: Message, client_state: Sending, data: ClientData) -> State:
        # the job's own key stays the wrapped client's, so that it trains as if it were alone
        return client.begin(key, message, client_state.inner, data), jax.random.fold_in(key, _SENDING)

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        inner, key = work
        return client.step(inner, k, message, data), key

    def finish(work: State, message: Message, client_state: Sending) -> tuple[Params, Sending]:
        whole, inner = client.finish(work[0], message, client_state.inner)
        upload = tree.shared(whole, message.params, private)
        wire = on_tree(compressor, upload, group=group)

        def send(what: Params) -> tuple[Params, Sizes]:
            # without the barrier XLA compresses again for each of the uses of a payload
            payload = jax.lax.optimization_barrier(wire.compress(work[1], what))
            return wire.decompress(payload), (wire.bits(payload), values_bits(payload))

        decoded, kept, sizes = exchange(upload, client_state.kept, send)
        return tree.join(decoded, whole), Sending(inner, kept, *sizes)

    def info(client_state: Sending) -> dict[str, Array]:
        return ({} if client.info is None else client.info(client_state.inner)) | sent(client_state)

    def unsent(before: Sending, after: Sending) -> Sending:
        inner = after.inner if client.unsent is None else client.unsent(before.inner, after.inner)
        return after._replace(inner=inner, kept=before.kept if returned else after.kept)

    def own(message: Message, client_state: Sending) -> Params:
        return message.params if client.own is None else client.own(message, client_state.inner)

    return ClientAlgorithm(init, begin, step, finish, info, unsent, None if client.own is None else own)


def sent(client_state: Sending) -> dict[str, Array]:
    """Columns to record of an upload, from the state as its job left it: ``bits`` and ``values_bits``, int32[]."""
    return {"bits": client_state.bits, "values_bits": client_state.values_bits}


def ef21(
    client: ClientAlgorithm,
    compressor: Compressor,
    *,
    per: str = "whole",
    private: Callable[[Path], bool] | None = None,
    like: Any = None,
) -> ClientAlgorithm:
    """``client``, whose upload is an estimate g of its true one, moved by compressed differences.

    ``c = C(Delta - g)``, ``g <- g + c``: only c is sent, and the server, which holds the same g of every client,
    applies the new g. Where Delta settles, g reaches it, whatever the compressor loses at a time; the compressor
    should contract (unscaled signs do not). Both ends start from g = 0.

    Args: as of ``feedback``.

    Returns: a ``ClientAlgorithm``; its state is ``Sending`` with g as ``kept``. Source: Richtarik, Sokolov, Fatkhullin
    (2021), algorithm 2, with model deltas in place of gradients. Deviations: the paper's server steps along the mean g
    of all clients in every round; here that is the server rule's choice (``ca2fl`` keeps the last upload of each, and
    so is the partial-participation form), and others use the g of whoever arrives. An upload that is lost on its way
    is taken as noticed: neither end moves its g.
    """

    def exchange(upload: Params, kept: Params, send: Send) -> Exchanged:
        change, sizes = send(jax.tree.map(jnp.subtract, upload, kept))
        estimate = jax.tree.map(jnp.add, kept, change)
        return estimate, estimate, sizes

    return sending(client, compressor, exchange, per=per, private=private, like=like, keeps=True, returned=True)
