"""Compressed uploads: error feedback and EF21, wrappers around any client algorithm."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, registry, tree
from fedjax_async.compress import Compressor, on_tree, values_bits
from fedjax_async.geometry import GROUPINGS
from fedjax_async.models import STATISTICS
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, Path, State

_SENDING = 2**31  # folded into the job's key; the numbers of local steps, folded in too, are smaller


class Sending(NamedTuple):
    """State of a client that compresses its uploads, from job to job."""

    inner: State  # of the wrapped client algorithm
    kept: Params  # the residual e of error feedback or the estimate g of EF21; () without feedback
    bits: Array  # int32[], size of its last accepted upload as a message; 0 before the first
    values_bits: Array  # int32[], size of the values alone


def grouping(per: str, upload: State, params: Params) -> Callable[[tuple[object, ...]], Hashable]:
    """A function from a leaf's path to its group; an upload unlike ``params`` is grouped in each of its parts.

    The parts may have different scales, and top-k of all parts together might send only the largest one.
    """
    group: Callable[[tuple[object, ...]], Hashable] = GROUPINGS[per]
    like_params: bool = jax.tree.structure(upload) == jax.tree.structure(params)  # type: ignore[operator]
    if like_params:
        return group
    return lambda path: (path[:1], group(path[1:]))


Bits = tuple[Array, Array]
Send = Callable[[Params], tuple[Params, Bits]]
SentUpload = tuple[Params, Params, Bits]


def feedback(
    client: ClientAlgorithm,
    compressor: Compressor,
    *,
    per: str = "whole",
    private: Callable[[Path], bool] | None = None,
    like: State = None,
    error_feedback: bool = True,
) -> ClientAlgorithm:
    """Wrap ``client``: compress its uploads, and add the compression error to its next upload.

    ``Delta_hat = C(Delta + e)``, ``e <- e + Delta - Delta_hat``; the upload is Delta_hat, as the server decodes it.

    Args:
      client: any client algorithm. Wrappers that change the upload (``keeping``) go inside this one.
      per: one of ``geometry.GROUPINGS``: compress the whole upload as one vector, each layer or each tensor. If an
        upload has several parts (SCAFFOLD's deltas and control variates), each part is compressed by itself. Running
        statistics (BatchNorm) are compressed too, without feedback; unscaled signs may damage them.
      private: the leaves of the params that are not sent (``keeping`` uploads them as zeros); they are not compressed.
      like: an upload, or its shapes, if it is not a pytree like the params.
      error_feedback: if false, ``Delta_hat = C(Delta)``, and there is no residual.

    Returns: a ``ClientAlgorithm`` with state :class:`Sending`. The residual does not change while the client is away,
    nor through a rejected upload (an upload that is not finite is not finite after decoding either). Sums telescope:
    decoded uploads + residual = true uploads, up to rounding. If an upload is lost, its content is lost too, because
    the client does not know of the loss. Source: Seide et al. (2014); Karimireddy et al. (2019); AsynFLC-EF, algorithm
    1 with eq. 8.
    """
    check.one_of("error_feedback", error_feedback, [True, False])

    def plain(upload: Params, kept: Params, send: Send) -> SentUpload:
        decoded, sizes = send(upload)
        return decoded, kept, sizes

    def corrected(upload: Params, kept: Params, send: Send) -> SentUpload:
        total = jax.tree.map(jnp.add, upload, kept)
        decoded, sizes = send(total)
        return decoded, jax.tree.map(jnp.subtract, total, decoded), sizes

    scheme = corrected if error_feedback else plain
    return sending(client, compressor, scheme, per=per, private=private, like=like, keeps=error_feedback)


def sending(
    client: ClientAlgorithm,
    compressor: Compressor,
    scheme: Callable[[Params, Params, Send], SentUpload],
    *,
    per: str,
    private: Callable[[Path], bool] | None,
    like: State,
    keeps: bool,
    returned: bool = False,
) -> ClientAlgorithm:
    """Wrap ``client``: ``scheme(upload, kept, send) -> (upload, kept, sizes)`` turns its upload into the sent one.

    ``send(tree) -> (decoded tree, (bits, values_bits))`` passes one message through the compressor; ``scheme`` calls
    it once a job. If ``keeps``, ``kept`` starts as zeros like an upload, else it is ``()``. If ``returned``, an upload
    that the server never applies does not change ``kept``.
    """
    registry.find("per", GROUPINGS, per)

    def init(params: Params) -> Sending:
        upload = tree.shared(params if like is None else like, params, private)
        kept = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), upload) if keeps else ()
        return Sending(client.init(params), kept, jnp.int32(0), jnp.int32(0))

    def begin(key: Key, message: Message, client_state: Sending, data: ClientData) -> State:
        # the wrapped client gets the job's key itself, so that it trains as without compression
        return client.begin(key, message, client_state.inner, data), jax.random.fold_in(key, _SENDING)

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        inner, key = work
        return client.step(inner, k, message, data), key

    def finish(work: State, message: Message, client_state: Sending) -> tuple[Params, Sending]:
        whole, inner = client.finish(work[0], message, client_state.inner)
        upload = tree.shared(whole, message.params, private)
        group = grouping(per, upload, tree.shared(message.params, message.params, private))
        wire = on_tree(compressor, upload, group=group)

        def send(content: Params) -> tuple[Params, Bits]:
            # without the barrier XLA compresses again for each use of the payload
            payload = jax.lax.optimization_barrier(wire.compress(work[1], content))
            return wire.decompress(payload), (wire.bits(payload), values_bits(payload))

        decoded, kept, sizes = scheme(upload, client_state.kept, send)
        return tree.join(decoded, whole), Sending(inner, _of_weights(kept), *sizes)

    def info(client_state: Sending) -> dict[str, Array]:
        return ({} if client.info is None else client.info(client_state.inner)) | sent(client_state)

    def unsent(before: Sending, after: Sending) -> Sending:
        inner = after.inner if client.unsent is None else client.unsent(before.inner, after.inner)
        return after._replace(inner=inner, kept=before.kept if returned else after.kept)

    def own(message: Message, client_state: Sending) -> Params:
        return message.params if client.own is None else client.own(message, client_state.inner)

    own_or_none = None if client.own is None else own
    return ClientAlgorithm(init, begin, step, finish, info, unsent, own_or_none, client.gradients)


def _of_weights(kept: State) -> State:
    """What is kept, with zeros for running statistics.

    They matter by their value, so old changes of them are useless later: added to a new change, they would lead past
    what the client has, and variances could become negative.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if STATISTICS in tree.path_of(path) else leaf, kept
    )


def sent(client_state: Sending) -> dict[str, Array]:
    """The recorded columns of an upload, from the state after its job: ``bits`` and ``values_bits``, int32[]."""
    return {"bits": client_state.bits, "values_bits": client_state.values_bits}


def ef21(
    client: ClientAlgorithm,
    compressor: Compressor,
    *,
    per: str = "whole",
    private: Callable[[Path], bool] | None = None,
    like: State = None,
) -> ClientAlgorithm:
    """Wrap ``client``: its upload is an estimate g of the true upload, updated by compressed differences.

    ``c = C(Delta - g)``, ``g <- g + c``: only c is sent. The server holds the same g of every client and applies the
    new g. If Delta converges, g converges to it with any compressor that is a contraction (unscaled signs are not).
    Client and server start from g = 0.

    Args: as in ``feedback``.

    Returns: a ``ClientAlgorithm`` with state ``Sending``, where ``kept`` is g. Source: Richtarik, Sokolov, Fatkhullin
    (2021), algorithm 2, with model deltas instead of gradients. Deviations: the paper's server steps along the mean g
    of all clients in every round. Here the server rule decides: ``ca2fl`` keeps the last upload of each client, which
    is the form with partial participation; other rules use the g of the clients that arrive. The client is assumed to
    notice that an upload was lost: client and server both keep their g.
    """

    def scheme(upload: Params, kept: Params, send: Send) -> SentUpload:
        change, sizes = send(jax.tree.map(jnp.subtract, upload, kept))
        estimate = jax.tree.map(jnp.add, kept, change)
        return estimate, estimate, sizes

    return sending(client, compressor, scheme, per=per, private=private, like=like, keeps=True, returned=True)
