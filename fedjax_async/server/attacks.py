"""Attacks by name: forged uploads and forged labels of malicious clients.

``ATTACKS`` names them. An upload is forged when it arrives, from the honest one that the client computed and from the
honest uploads of others: the attackers know all that arrived before. :func:`attacked` is the wrapper around a rule;
attacks on the data change the labels before the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.rule import closed
from fedjax_async.server.running_statistics import weights_and_statistics
from fedjax_async.server.transforms import begun
from fedjax_async.types import (
    Array,
    Arrival,
    Facts,
    Info,
    Message,
    Number,
    Params,
    Request,
    ServerAlgorithm,
    State,
    Traced,
    Tree,
)

MEMORY = 10  # length of the attackers' moving averages, in honest uploads


class Attackers(NamedTuple):
    """Which clients attack."""

    share: float
    clients: tuple[int, ...] | None

    def drawn(self, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Mark the attackers; bool[N].

        Raises ``ValueError`` for a client number out of range, and for a share above 0 that rounds to no client.
        """
        marked = np.zeros(num_clients, np.bool_)
        if self.clients is None:
            count = round(self.share * num_clients)
            allowed = f"0, or above {0.5 / num_clients:.3g}: it rounds to no attacker among {num_clients} clients"
            check.require(count > 0 or self.share == 0, "share", self.share, allowed)
            marked[rng.permutation(num_clients)[:count]] = True
            return marked
        for client in self.clients:
            check.whole("clients", client, low=0, high=num_clients - 1)
        marked[list(self.clients)] = True
        return marked


def attackers(*, share: float = 0.2, clients: str | int | None = None) -> Attackers:
    """The clients that attack.

    Args:
      share: of all clients, drawn by the seed; from 0 to 1, rounded to a number of clients.
      clients: their numbers joined by ``+``, such as ``0+3+7``, instead of a share.
    """
    check.share("share", share)
    if clients is None:
        return Attackers(share, None)
    parts = str(clients).split("+")
    fits = not isinstance(clients, bool) and all(part.isascii() and part.isdigit() for part in parts)
    check.require(fits, "clients", clients, "numbers of clients joined by +, such as 0+3+7")
    return Attackers(share, tuple(map(int, parts)))


class Seen(NamedTuple):
    """What the attackers know of the honest uploads so far: moving averages in which each new one has weight 1/10."""

    mean: State  # like an upload
    variance: State  # of each coordinate
    uploads: Array  # float[], honest uploads so far


class Attack(NamedTuple):
    """``forge(upload, seen) -> upload`` forges an attacker's upload; ``relabel(y, classes) -> y`` forges its labels.

    ``watches``: whether ``forge`` reads ``seen``, which is ``()`` otherwise.
    """

    who: Attackers
    forge: Callable[[State, Seen], State] | None = None
    watches: bool = False
    relabel: Callable[[np.ndarray, int], np.ndarray] | None = None


@takes(who=attackers)
def label_flip(*, who: Attackers) -> Attack:
    """Attackers train on wrong labels: ``y -> C - 1 - y`` (Fang et al. 2020)."""
    return Attack(who, relabel=lambda y, classes: classes - 1 - y)


@takes(who=attackers)
def sign_flip(*, who: Attackers, scale: Traced = 1.0) -> Attack:
    """Attackers upload ``-scale Delta`` (Li et al. 2019).

    Args:
      scale: > 0.
    """
    check.positive("scale", scale)
    return Attack(who, lambda upload, seen: _times(upload, -jnp.asarray(scale, jnp.result_type(float))))


@takes(who=attackers)
def scaled(*, who: Attackers, factor: Traced = 10.0) -> Attack:
    """Attackers upload ``factor Delta``, to outweigh the others (Bagdasaryan et al. 2020).

    Args:
      factor: > 0.
    """
    check.positive("factor", factor)
    return Attack(who, lambda upload, seen: _times(upload, factor))


@takes(who=attackers)
def alie(*, who: Attackers, z: Traced = 1.5) -> Attack:
    """Colluding attackers upload ``mean - z std`` of the honest uploads (Baruch et al. 2019, "A little is enough").

    All attackers upload nearly the same, so that they look like the majority. Mean and standard deviation of each
    coordinate are moving averages of honest uploads (see :class:`Seen`), since an asynchronous run has no rounds; the
    paper's are of one round.

    Args:
      z: > 0, how far the forged upload is from the mean; the paper's z_max depends on the number of attackers.
    """
    check.positive("z", z)

    def forge(upload: Tree, seen: Seen) -> Tree:
        away = jax.tree.map(
            lambda m, v: m - jnp.asarray(z, m.dtype) * jnp.sqrt(jnp.maximum(v, 0)), seen.mean, seen.variance
        )
        return tree.where(seen.uploads > 0, away, upload)

    return Attack(who, forge, watches=True)


@takes(who=attackers)
def inner_product(*, who: Attackers, epsilon: Traced = 0.5) -> Attack:
    """Colluding attackers upload ``-epsilon mean`` of the honest uploads (Xie et al. 2020).

    The mean is a moving average of honest uploads (see :class:`Seen`).

    Args:
      epsilon: > 0; with a small one the upload looks honest to Krum, with a large one it reverses a mean.
    """
    check.positive("epsilon", epsilon)

    def forge(upload: Tree, seen: Seen) -> Tree:
        return tree.where(seen.uploads > 0, _times(seen.mean, -jnp.asarray(epsilon, jnp.result_type(float))), upload)

    return Attack(who, forge, watches=True)


ATTACKS: dict[str, Callable[..., Attack]] = {
    "label_flip": label_flip,
    "sign_flip": sign_flip,
    "scaled": scaled,
    "alie": alie,
    "inner_product": inner_product,
}


def _times(upload: Tree, factor: Number) -> Tree:
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), upload)


# --- around a rule ------------------------------------------------------------------------------


class AttackedState(NamedTuple):
    """Server state of :func:`attacked`."""

    inner: State  # of the wrapped rule
    seen: Any  # Seen; () if the attack does not watch


def attacked(
    rule: ServerAlgorithm, attack: Attack, upload: State = None, norm_limit: Number | None = None
) -> ServerAlgorithm:
    """``rule`` in a run whose malicious clients attack.

    ``upload``: the shapes of an upload, if the attack watches. ``norm_limit``: the norm limit of the run, for forged
    uploads too. A forged upload above it, or one that is not finite, is rejected: ``rule`` gets zeros of weight 0. The
    run records ``malicious``, and ``sent_norm``, the norm of what was sent, 0 if that is not finite;
    ``upload_norm`` is the norm of the honest upload.
    """
    real = jnp.result_type(float)

    def init(params: Params, facts: Facts = Facts()) -> tuple[AttackedState, State]:
        state, memory = begun(rule, params, facts)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), upload)
        return AttackedState(state, Seen(zeros, zeros, jnp.zeros((), real)) if attack.watches else ()), memory

    def receive(state: AttackedState, memory: State, arrival: Arrival) -> tuple[AttackedState, State, Info]:
        honest, attacks = arrival.upload, jnp.asarray(arrival.malicious)
        accepted = arrival.weight > 0
        sent = honest
        if attack.forge is not None:
            sent = tree.where(attacks & accepted, attack.forge(honest, state.seen), honest)
        weights, statistics = weights_and_statistics(sent)
        norm = tree.norm(weights)
        finite = jnp.isfinite(norm) & tree.is_finite(statistics)
        kept = accepted & finite
        if norm_limit is not None:
            kept &= norm <= jnp.asarray(norm_limit, norm.dtype)
        sent = tree.where(kept, sent, jax.tree.map(jnp.zeros_like, sent))
        weight = jnp.where(kept, arrival.weight, jnp.zeros_like(arrival.weight))
        inner, memory, info = rule.receive(state.inner, memory, arrival._replace(upload=sent, weight=weight))
        seen = tree.where(accepted & ~attacks, _watched(state.seen, honest), state.seen) if attack.watches else ()
        columns = {"malicious": attacks, "sent_norm": jnp.where(finite, norm, 0.0)}
        return AttackedState(inner, seen), memory, info._replace(columns={**info.columns, **columns})

    def close(state: AttackedState, memory: State) -> tuple[AttackedState, State]:
        inner, memory = closed(rule, state.inner, memory)
        return state._replace(inner=inner), memory

    def dispatch(state: AttackedState, memory: State, request: Request) -> tuple[Message, State]:
        return rule.dispatch(state.inner, memory, request)

    closes = None if rule.close is None else close
    return ServerAlgorithm(init, receive, dispatch, lambda state: rule.params(state.inner), closes, rule.sums)


def _watched(seen: Seen, upload: State) -> Seen:
    """The averages with one more honest upload: plain means of the first ten, then the new one has weight 1/10."""
    uploads = seen.uploads + 1.0
    gain = 1.0 / jnp.minimum(uploads, float(MEMORY))
    off = jax.tree.map(jnp.subtract, upload, seen.mean)
    mean = jax.tree.map(lambda m, d: m + gain.astype(m.dtype) * d, seen.mean, off)
    variance = jax.tree.map(
        lambda v, d: (1 - gain.astype(v.dtype)) * (v + gain.astype(v.dtype) * jnp.square(d)), seen.variance, off
    )
    return Seen(mean, variance, uploads)
