"""EF21: compress the change of an estimate instead of keeping what was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async.compress import Compressor
from fedjax_async.local.feedback import Exchanged, Send, sending
from fedjax_async.types import ClientAlgorithm, Params, Path


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
