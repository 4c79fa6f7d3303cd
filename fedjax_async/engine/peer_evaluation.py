"""Scores of all nodes' models: on their own tests, on the global test set, and their consensus distance.

The programs score one run of a stack at a time. Its nodes have rows ``run * N .. run * N + N - 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import tree
from fedjax_async.engine.evaluation import Metrics, over
from fedjax_async.engine.flat import opened
from fedjax_async.engine.members import Member
from fedjax_async.engine.peer_kernels import NodeJobs
from fedjax_async.engine.peer_probes import NodesProbe, nodes_values
from fedjax_async.engine.peer_tables import PeerTables
from fedjax_async.engine.tables import held_parts
from fedjax_async.server.running_statistics import weights_in
from fedjax_async.types import Array, ClientData, Params, State

# Candidate batch sizes for a node's own tests, and the fixed cost of a batch, in rows.
BATCHES, OVERHEAD = (32, 64, 128, 256), 8


class PeerScoring(NamedTuple):
    """What the programs that evaluate depend on, and the programs."""

    what: NodeJobs
    metrics: Metrics
    total: int  # rows of the global test set
    batch: int  # rows of a node's own tests that are read at a time
    width: int  # nodes that are evaluated at the same time
    validation: bool  # whether there are validation parts
    globally: bool  # whether the global test set is read at all
    probes: tuple[tuple[str, NodesProbe], ...]

    def models(self, tables: PeerTables, rows: State, nodes: Array) -> Callable[[Array], Params]:
        """``params_of(i)``: the model of node ``nodes[i]``."""
        peer, _ = self.what.at(tables, _run_of(tables, rows, nodes))
        return lambda i: peer.params(tree.gather(rows, nodes[i]))

    def own(self, tables: PeerTables, rows: State, nodes: Array) -> dict[str, Array]:
        """``loss`` and ``accuracy`` of each node on its own tests.

        Also ``validation_loss`` and ``validation_accuracy`` where there are validation parts. ``nodes``: int32[n],
        their rows, all of one run; the scores: float[n].
        """

        def parts_of(i: Array) -> dict[str, ClientData]:
            test, validation = held_parts(tables, nodes[i])
            return {"": test} | ({"validation_": validation} if self.validation else {})

        return self.metrics.each(self.models(tables, rows, nodes), parts_of, len(nodes), self.batch, self.width)

    def whole(self, tables: PeerTables, rows: State, nodes: Array) -> dict[str, Array]:
        """``global_loss`` and ``global_accuracy``: as own scores, on the global test set."""
        params_of, tests = self.models(tables, rows, nodes), tests_of(tables, _run_of(tables, rows, nodes), self.total)
        found = over(lambda i: self.metrics.whole(params_of(i), *tests, self.total), len(nodes), self.width)
        return {f"global_{name}": values for name, values in found.items()}

    def together(
        self, tables: PeerTables, rows: State, run: Array, online: Array, parts: Sequence[dict[str, Array]], now: Array
    ) -> dict[str, Array]:
        """The scores of each node, and of a run's nodes together.

        The latter are the consensus distance, the scores of the mean model and the columns of the probes of nodes.
        ``parts``: the scores of consecutive nodes, which are joined to [N]. ``now``: bool[], whether the mean model is
        evaluated on the global test set; NaN where it is not.
        """
        peer, _ = self.what.at(tables, run)
        rows = rows_of_run(rows, run, len(online), len(tables.key))
        params = jax.vmap(peer.params)(rows)
        count = jnp.sum(online)
        mean = jax.tree.map(lambda leaf: _mean(leaf, online), params)
        leaves = (jax.tree.leaves(weights_in(models)) for models in (params, mean))
        found = {"consensus": sum(map(_apart(online), *leaves), jnp.zeros((), jnp.result_type(float)))}
        if self.globally:
            # a conditional skips the whole global test set where the score is not wanted
            x, y = tests_of(tables, run, self.total)
            score = partial(self.metrics.whole, x=x, y=y, total=self.total)
            nothing = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), jax.eval_shape(score, mean))
            average = jax.lax.cond(now, score, lambda _: nothing, mean)
            found |= {f"average_{name}": value for name, value in average.items()}
        found = {name: jnp.where(count > 0, value, jnp.nan) for name, value in found.items()}
        each = {name: jnp.concatenate([part[name] for part in parts])[: len(online)] for name in parts[0]}
        return each | found | nodes_values(dict(self.probes), opened(rows), online)


def scoring_of(what: NodeJobs, members: Sequence[Member], width: int) -> PeerScoring:
    """How the models of these runs are evaluated, ``width`` nodes at a time."""
    first, data = members[0], [m.components.data for m in members]
    sizes = np.concatenate([np.zeros(1) if d.test_size is None else np.asarray(d.test_size) for d in data])
    batch = min(BATCHES, key=lambda b: float((np.ceil(sizes / b) * (b + OVERHEAD)).sum()))
    metrics = Metrics(first.components.model, bool(np.issubdtype(data[0].test_y.dtype, np.integer)))
    validation = any(d.validation_size is not None and bool(np.any(d.validation_size)) for d in data)
    globally, probes = first.global_tests != "never", tuple(first.nodes_probes.items())
    return PeerScoring(what, metrics, len(data[0].test_y), batch, width, validation, globally, probes)


def _run_of(tables: PeerTables, rows: State, nodes: Array) -> Array:
    """The run of these rows. For R = 1 no index is traced."""
    if len(tables.key) == 1:
        return jnp.int32(0)
    return nodes[0] // (len(jax.tree.leaves(rows)[0]) // len(tables.key))


def rows_of_run(rows: State, run: Array, nodes: int, runs: int) -> State:
    """The rows of the nodes of one run, [N, ...]."""
    if runs == 1:
        return rows
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, run * nodes, nodes), rows)


def tests_of(tables: PeerTables, run: Array, total: int) -> tuple[Array, Array]:
    """The ``total`` examples of a run's test set."""
    held = tables.held
    if len(held.y) == total:  # the runs share one
        return held.x, held.y
    x, y = (jax.lax.dynamic_slice_in_dim(rows, held.begin[run], total) for rows in (held.x, held.y))
    return x, y


def _mean(leaf: Array, online: Array) -> Array:
    """The mean over the nodes online, in the dtype of the leaf; NaN if no node is."""
    real = jnp.result_type(float)
    chosen = jnp.where(online.reshape(-1, *(1 for _ in leaf.shape[1:])), leaf.astype(real), 0)
    return (jnp.sum(chosen, axis=0) / jnp.sum(online).astype(real)).astype(leaf.dtype)


def _apart(online: Array) -> Callable[[Array, Array], Array]:
    """``apart(leaf, mean)``: the mean of ``||leaf_i - mean||^2`` over the nodes online."""
    real = jnp.result_type(float)

    def apart(leaf: Array, mean: Array) -> Array:
        squares = jnp.sum(jnp.square((leaf - mean[None]).astype(real)).reshape(len(leaf), -1), axis=1)
        return jnp.sum(jnp.where(online, squares, 0)) / jnp.sum(online).astype(real)

    return apart
