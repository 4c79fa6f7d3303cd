"""Compiled programs that score the models of a stack: loss and accuracy, and whatever else is measured.

Without a server they score all nodes' models, of one run at a time: on their own tests, on the global test set, and
their consensus distance. The nodes of a run have the rows ``run * N .. run * N + N - 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from fedjax_async.base import tree
from fedjax_async.engine import kernels
from fedjax_async.engine.compiling import jitted
from fedjax_async.engine.components import Client, Server, bound
from fedjax_async.engine.evaluation import BATCH, Inputs, Metrics, Owned, over, own_models, rows_at
from fedjax_async.engine.flat import opened
from fedjax_async.engine.measures import FineTuning
from fedjax_async.engine.members import Member
from fedjax_async.engine.peer_kernels import NodeJobs
from fedjax_async.engine.peer_probes import NodesProbe, nodes_values
from fedjax_async.engine.sending import rule_at, state_of
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import DeviceTables, PeerTables, held_parts
from fedjax_async.server.running_statistics import weights_in
from fedjax_async.types import Array, ClientData, Message, Params, State

Read = tuple[State, State, State]  # what an evaluation reads: states of the server, its memory and the clients' rows
Now = tuple[Array, Array]  # virtual time and server steps closed


class Scoring(NamedTuple):
    """What a program that scores the models of a run depends on, and the program.

    Loss and accuracy have one, whatever else is measured another: so the first are the same to the last bit.
    """

    metrics: Metrics
    of_parts: Metrics  # on the parts of ``Inputs``
    server: Server
    client: Client | None  # None where no models of clients are scored: stacks of other clients share the program
    facts: StackFacts
    total: int  # test examples
    own: bool  # whether clients have models of their own, which are scored
    tuning: FineTuning | None = None

    def reads(self, carry: kernels.Carry) -> Read:
        """The part of the carry that the program reads: memory and clients only if it scores models of the clients."""
        private = self.tuning is not None and self.metrics.model.private is not None
        return (carry.server, carry.memory, carry.clients) if self.own or private else (carry.server, (), ())

    def evaluate(
        self, tables: DeviceTables, seen: Read, run: Array, now: Now, x: Array, y: Array, owner: Owned | None,
        inputs: Inputs,
    ) -> dict[str, Array]:  # fmt: skip
        """Scores by name. ``x``, ``y``: the test set, with the ``owner`` of each example, if clients are told apart.

        ``seen``: what :meth:`reads` returns.
        """
        rule, state = rule_at(self.server, tables, run), state_of(tables, seen[0], run)
        params, count = rule.params(state), self.facts.num_clients
        scores = dict[str, Array]()
        if self.metrics.labels is not None or self.metrics.others:
            scores = self.metrics.whole(params, x, y, self.total, owner, count)
        for prefix, part in inputs.parts.items():
            whole = part if part.x is not None else part._replace(x=tables.x, y=tables.y)
            scores |= self.of_parts.parts(params, {prefix: whole}, BATCH)
        if self.client is None:
            return scores
        memory, kept = (rows_at(table, run * jnp.int32(count)) for table in seen[1:])
        hyper = kernels.hyper_of(tables, run)
        who, tests = bound(self.client, hyper), inputs.tests
        if self.own:
            models = own_models(rule, who, state, memory, kept, now, tests)
            scores |= self.metrics.each(models, tests.of("client_own_", x, y), count, tests.rows())
        if self.tuning is None:
            return scores
        model = self.metrics.model

        def start_of(i: Array) -> Params:
            """The global model, with the leaves that the model declares private as the client has them."""
            return params if model.private is None else who.own(Message(params, (), now[1]), kept(i))

        training, key = inputs.training._replace(x=tables.x, y=tables.y), tables.key[0 if len(tables.key) == 1 else run]
        tuner = bound(self.tuning.tuner, hyper)
        return scores | self.tuning.scores(tuner, start_of, key, now[1], training, tests, (x, y))


@lru_cache(maxsize=64)
def evaluate(what: Scoring) -> Wrapped:
    """Jitted :meth:`Scoring.evaluate`."""
    return jitted(what.evaluate)


@lru_cache(maxsize=64)
def evaluate_runs(what: Scoring, at_once: int) -> Wrapped:
    """As :meth:`Scoring.evaluate` for all runs of a stack, ``at_once`` of them side by side; scores [R] by name.

    ``run``, ``now``, ``owner`` and ``inputs`` have an axis of runs in front; the test set is shared.
    """

    def evaluate_runs(
        tables: DeviceTables, seen: Read, run: Array, now: Now, x: Array, y: Array, *own: State
    ) -> dict[str, Array]:
        def of_one(run: Array, now: Now, own: State) -> dict[str, Array]:
            return what.evaluate(tables, seen, run, now, x, y, *own)

        def of_some(some: tuple[Array, Now, State]) -> dict[str, Array]:
            found: dict[str, Array] = jax.vmap(of_one)(*some)
            return found

        parts = jax.tree.map(lambda leaf: leaf.reshape(-1, at_once, *leaf.shape[1:]), (run, now, own))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), jax.lax.map(of_some, parts))

    return jitted(evaluate_runs)


# --- runs without a server ----------------------------------------------------------------------------
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
