"""Compiled programs that score the models of a stack: loss and accuracy, and whatever else is measured."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.stages import Wrapped

from fedjax_async.engine import kernels
from fedjax_async.engine.compiling import jitted
from fedjax_async.engine.components import Client, Server, bound
from fedjax_async.engine.evaluation import BATCH, Inputs, Metrics, Owned, own_models, rows_at
from fedjax_async.engine.measures import FineTuning
from fedjax_async.engine.sending import rule_at, state_of
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import DeviceTables
from fedjax_async.types import Array, Message, Params, State

Read = tuple[State, State, State]  # what an evaluation reads: states of the server, its memory and the clients' rows
Now = tuple[Array, Array]  # virtual time and server steps closed


class Scoring(NamedTuple):
    """What a program that scores the models of a run depends on, and the program.

    Loss and accuracy have one, whatever else is measured another: so the first are the same to the last bit.
    """

    metrics: Metrics
    of_parts: Metrics  # on the parts of ``Inputs``
    server: Server
    client: Client
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
        if not (self.own or self.tuning):
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
