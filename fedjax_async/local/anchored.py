"""Centroid-anchored training: local steps that stay near centroids, on which a node and its neighbours agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, registry, tree
from fedjax_async.compress import centroids
from fedjax_async.local.private import keeping
from fedjax_async.local.training import Scale, local_training, without_statistics
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Model, Params, Path, State, Traced

_CLUSTERING = 2**31 + 2  # folded into the job's key: the random entries of a clustering


class Dictionary(NamedTuple):
    """The centroids that a client receives, in the message's ``extra``."""

    tables: Params  # G: like the params, float[K] for each leaf that is clustered, ``None`` for the others
    known: Array  # bool[], whether G has values yet


class Rules(NamedTuple):
    """How weights are clustered: options of ``compress.centroids.wcp``."""

    max_iter: Traced = 3
    tolerance: Traced = 0.05
    reference: str = "paper"


class Anchor(NamedTuple):
    """What the steps of one job are pulled to."""

    weights: Params  # w~: of the clustered leaves, ``None`` for the others
    mask: Params  # bool, like them: the weights that are not pruned


class Work(NamedTuple):
    """Local variables of one job."""

    inner: State  # of plain local training
    anchor: Anchor


# From a layer's gap w - w~: half the gradient of the sum of its squares (``paper``) or of their mean (``released``).
REFERENCES: dict[str, Callable[[Array], Array]] = {
    "paper": lambda gap: gap,
    "released": lambda gap: gap / max(1, gap.size),
}


def anchored_training(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    anchor: Traced = 0.1,
    mask: bool = True,
    max_iter: int = 3,
    tolerance: Traced = 0.05,
    reference: str = "paper",
    keep_optimizer: bool = True,
    shuffle: bool | None = None,
) -> ClientAlgorithm:
    """Minimise ``F_i(w) + lambda ||w - w~||^2`` with pruned weights (PushCen-ADFL 2026, LocalUpdate).

    A job begins with ``(V, A, M) = WCP(w, K, init=G)`` and ``w~ = G[A]`` (V[A] while G has no values). G is the
    :class:`Dictionary` in the message's ``extra``; leaves with a table in it are clustered. At the start of each epoch
    ``w <- w M``. Uploads ``w_K - w_0``.

    Args:
      optimizer, batch_size, proximal, scale, keep_optimizer: as in ``local_training``. Mixing with other nodes' models
        does not change a kept state of Adam.
      anchor: lambda >= 0.
      mask: whether pruned weights are set to zero.
      max_iter, tolerance: of the clustering.
      reference: ``paper``, or ``released``: lambda times the sum over layers of the mean of ``(w - w~)^2``, another
        clustering (``compress.centroids.wcp``), and batches in stored order without the last partial one.
      shuffle: as in ``local_training``; by default true for ``paper`` and false for ``released``.
    """
    check.non_negative("anchor", anchor)
    check.one_of("mask", mask, (False, True))
    check.whole("max_iter", max_iter, 1)
    check.non_negative("tolerance", tolerance)
    pull = registry.find("reference", REFERENCES, reference)
    shuffled = reference == "paper" if shuffle is None else shuffle
    rules = Rules(max_iter, tolerance, reference)
    pulls = not (isinstance(anchor, (int, float)) and anchor == 0)

    def correct(gradient: Params, weights: Params, message: Message) -> Params:
        def added(target: Array | None, slope: Array, weight: Array) -> Array:
            return slope if target is None else slope + jnp.asarray(2 * anchor, slope.dtype) * pull(weight - target)

        return jax.tree.map(added, message.extra.weights, gradient, weights, is_leaf=lambda leaf: leaf is None)

    inner = local_training(  # without private leaves: ``keeping`` wraps the whole algorithm below
        model._replace(private=None),
        optimizer=optimizer,
        batch_size=batch_size,
        proximal=proximal,
        scale=scale,
        correct=correct if pulls else None,
        keep_optimizer=keep_optimizer,
        shuffle=shuffled,
    )

    def begin(key: Key, message: Message, client_state: State, data: ClientData) -> Work:
        found = clustered(message.params, message.extra, key, rules)
        own, given = found.tables, message.extra.tables
        tables = jax.tree.map(lambda v, g: jnp.where(message.extra.known, g, v), own, given)
        weights = jax.tree.map(lambda table, index: table.at[index].get(mode="clip"), tables, found.indices)
        kept = jax.tree.map(lambda table, index: (table != 0)[index], own, found.indices)
        aims = Anchor(without_statistics(model, weights), without_statistics(model, kept))
        return Work(inner.begin(key, message, client_state, data), aims)

    def step(work: Work, k: Array, message: Message, data: ClientData) -> Work:
        before = work.inner
        if mask:
            size = jnp.asarray(data.size)
            per_epoch = (size + batch_size - 1) // batch_size if shuffled else jnp.maximum(1, size // batch_size)
            before = before._replace(params=_pruned(before.params, work.anchor.mask, k % per_epoch == 0, model))
        return work._replace(inner=inner.step(before, k, message._replace(extra=work.anchor), data))

    def finish(work: Work, message: Message, client_state: State) -> tuple[Params, State]:
        return inner.finish(work.inner, message, client_state)

    anchored = ClientAlgorithm(inner.init, begin, step, finish, gradients=inner.gradients)
    return anchored if model.private is None else keeping(anchored, model.private)


def _pruned(params: Params, mask: Params, now: Array, model: Model) -> Params:
    """The params; if ``now``, with zeros for pruned weights."""

    def pruned(kept: Array | None, weight: Array) -> Array:
        return weight if kept is None else jnp.where(now & ~kept, jnp.zeros_like(weight), weight)

    weights = jax.tree.map(pruned, mask, without_statistics(model, params), is_leaf=lambda leaf: leaf is None)
    return weights if model.train is None else {**params, "params": weights}


def clustered(params: Params, given: Dictionary, key: Key, rules: Rules) -> centroids.Clustered:
    """WCP of the leaves with a table in the dictionary, from these tables or, before G has values, random ones."""
    tables = [(tree.path_of(path), table) for path, table in jax.tree_util.tree_leaves_with_path(given.tables)]
    paths = {path for path, _ in tables}
    sizes = {table.shape[0] for _, table in tables}
    check.require(len(sizes) == 1, "tables", f"of {len(sizes)} lengths", "at least one, all of the same length")

    def chosen(path: Path, leaf: Array) -> bool:
        return path in paths

    own = jax.random.fold_in(key, _CLUSTERING)
    (k,) = sizes
    start = centroids.random_tables(params, k, own, reference=rules.reference, chosen=chosen)
    start = jax.tree.map(lambda drawn, table: jnp.where(given.known, table, drawn), start, given.tables)
    return centroids.wcp(
        params, k, init=start, key=own, chosen=chosen, max_iter=rules.max_iter, tolerance=rules.tolerance,
        reference=rules.reference,
    )  # fmt: skip
