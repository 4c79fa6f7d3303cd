"""Compiled programs that score the models of a stack: loss and accuracy, and whatever else is measured."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Wrapped

from fedjax_async.engine import kernels, measures
from fedjax_async.engine.compiling import jitted
from fedjax_async.engine.components import Client, Server, bound
from fedjax_async.engine.evaluation import (
    Owned,
    client_scores,
    mean_scores,
    most_at_once,
    own_models,
    rows_at,
    validation_scores,
)
from fedjax_async.engine.measures import Inputs, Measures
from fedjax_async.engine.sending import rule_at, state_of
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import DeviceTables
from fedjax_async.types import Array, ClientData, Message, Model, Params, State

Read = tuple[State, State, State]  # what an evaluation reads: states of the server, its memory and the clients' rows
Now = tuple[Array, Array]  # virtual time and server steps closed


def evaluated(carry: kernels.Carry, own: bool) -> Read:
    """The part of the carry that an evaluation reads; ``own``: whether it evaluates models of the clients."""
    return (carry.server, carry.memory, carry.clients) if own else (carry.server, (), ())


class Scoring(NamedTuple):
    """What the program that computes losses and accuracies depends on, and the program, for one run.

    Without a ``client`` no models of clients are evaluated; ``total``: test examples; ``labels``: whether targets are
    classes; ``per_client``: whether the global model is also scored on each client's tests.
    """

    model: Model
    server: Server
    client: Client | None
    facts: StackFacts
    total: int
    labels: bool
    per_client: bool

    def evaluate(
        self,
        tables: DeviceTables,
        seen: Read,
        run: Array,
        now: Now,
        x: Array,
        y: Array,
        owner: Owned | None,
        tests: Any,
        validation: ClientData | None,
    ) -> dict[str, Array]:
        """Scores by name. ``x``, ``y``: the test set, with the ``owner`` of each example; ``tests``: the clients' own.

        Without a ``client``, memory and clients of ``seen`` are ``()``. ``validation``: None without such a part.
        """
        model, labels, count = self.model, self.labels, self.facts.num_clients
        rule, state = rule_at(self.server, tables, run), state_of(tables, seen[0], run)
        each = count if self.per_client else None
        params = rule.params(state)
        scores = mean_scores(model, params, x, y, owner, total=self.total, labels=labels, num_clients=each)
        if validation is not None:
            pool = validation if validation.x is not None else validation._replace(x=tables.x, y=tables.y)
            scores |= validation_scores(model, labels, params, pool)
        if self.client is None:
            return scores
        memory, kept = (rows_at(table, run * jnp.int32(count)) for table in seen[1:])
        who = bound(self.client, kernels.hyper_of(tables, run))
        models = own_models(rule, who, state, memory, kept, now, tests)
        return scores | client_scores(model, labels, models, x, y, tests)


@lru_cache(maxsize=64)
def evaluate(what: Scoring) -> Wrapped:
    """Jitted :meth:`Scoring.evaluate`."""
    return jitted(what.evaluate)


@lru_cache(maxsize=64)
def evaluate_runs(what: Scoring, at_once: int) -> Wrapped:
    """As :meth:`Scoring.evaluate` for all runs of a stack, ``at_once`` of them side by side; scores [R] by name.

    ``run``, ``now``, ``owner``, ``tests`` and ``validation`` have an axis of runs in front; the test set is shared.
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


class Measuring(NamedTuple):
    """What the programs that score depend on."""

    measures: Measures
    own_models: bool  # whether clients have models of their own, which are scored
    per_client: bool  # whether the global model is scored on each client's tests
    labels: bool  # whether targets are class labels; accuracy is NaN otherwise
    total: int  # test examples
    width: int  # clients that are fine-tuned at a time


@lru_cache(maxsize=64)
def measure(model: Model, server: Server, client: Client, facts: StackFacts, what: Measuring) -> Wrapped:
    """Jitted ``measure(tables, (states, memory, clients), run, now, test_x, test_y, owner, inputs) -> scores``.

    Memory and clients are ``()`` unless :func:`reads_clients` is true.
    """
    wanted, count = what.measures, facts.num_clients
    metrics = measures.make_metrics(model, wanted.metrics, what.total, count if what.per_client else None)
    training_loss, own = measures.make_training_loss(model), measures.make_own_metrics(model, wanted.metrics)
    tuned = measures.make_tuned(model, what.labels, wanted, count, what.width)

    def measure(
        tables: DeviceTables, seen: Read, run: Array, now: Now, x: Array, y: Array, owner: Owned | None, inputs: Inputs
    ) -> dict[str, Array]:
        rule, state = rule_at(server, tables, run), state_of(tables, seen[0], run)
        params, hyper = rule.params(state), kernels.hyper_of(tables, run)
        scores = metrics(params, x, y, owner) if wanted.metrics else {}
        if inputs.sample is not None:
            pooled = inputs.sample.x is None
            sample = inputs.sample._replace(x=tables.x, y=tables.y) if pooled else inputs.sample
            scores |= training_loss(params, sample)
        memory, kept = (rows_at(table, run * jnp.int32(count)) for table in seen[1:])
        who = bound(client, hyper)
        if what.own_models and wanted.metrics:
            scores |= own(own_models(rule, who, state, memory, kept, now, inputs.tests), x, y, inputs.tests)
        if wanted.fine_tune:

            def start_of(i: Array) -> Params:
                """The global model, with the leaves that the model declares private as the client has them."""
                return params if model.private is None else who.own(Message(params, (), now[1]), kept(i))

            training = inputs.training._replace(x=tables.x, y=tables.y)
            key = tables.key[0 if len(tables.key) == 1 else run]
            scores |= tuned(bound(wanted.tuner, hyper), start_of, key, now[1], training, x, y, inputs.tests)
        return scores

    return jitted(measure)


def reads_clients(model: Model, what: Measuring) -> bool:
    """Whether the program ``measure`` reads the server's memory and the clients' states."""
    return (what.own_models and bool(what.measures.metrics)) or (
        what.measures.fine_tune > 0 and model.private is not None
    )


def compiled_together(
    what: Scoring, runs: int, tables: DeviceTables, params: Params, carry: kernels.Carry, every_test: Any
) -> Compiled:
    """The compiled :func:`evaluate_runs`."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    made = evaluate_runs(what, most_at_once(what.model, one, every_test[0], runs))
    now = (np.zeros(runs, tables.norm_limit.dtype), np.zeros(runs, np.int32))
    given = evaluated(carry, what.client is not None), np.arange(runs, dtype=np.int32), now, *every_test
    return made.lower(tables, *given).compile()
