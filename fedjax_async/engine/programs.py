"""Compiled programs, shared between runs that have the same components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Wrapped

from fedjax_async.base import tree
from fedjax_async.engine import kernels, serving
from fedjax_async.engine.compiling import jitted
from fedjax_async.engine.components import Client, Server
from fedjax_async.engine.devices import as_bytes, everywhere, placed, spread
from fedjax_async.engine.evaluation import Metrics, RunTests, most_at_once
from fedjax_async.engine.kernels import ClientJobs, JobKind
from fedjax_async.engine.measures import FineTuning, training_loss
from fedjax_async.engine.scoring import Scoring, evaluate, evaluate_runs
from fedjax_async.engine.sending import rule_at, state_of, write_messages
from fedjax_async.engine.stack import Stack
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import DeviceTables
from fedjax_async.types import Array, Model, Params, State, Structure

# (tables, carry, buffers, span) -> (carry, uploads rejected so far)
Apply = Callable[[Any, kernels.Carry, kernels.JobBuffers, Array], tuple[kernels.Carry, Array]]

MOST_MAPS = 25_000  # memory maps of the process; above that, compiled programs are forgotten


@lru_cache(maxsize=64)
def start(server: Server, client: Client, facts: StackFacts, slots: int, mesh: Mesh | None) -> Wrapped:
    """Jitted ``serving.Starting.start``."""
    return jitted(serving.Starting(server, client, facts, slots).start, out_shardings=everywhere(mesh))


@lru_cache(maxsize=64)
def zeros(shapes: tuple[Structure, tree.Kinds], mesh: Mesh | None) -> Wrapped:
    """Jitted ``zeros() -> buffers`` of these frozen shapes; no client is traced for it. Each device holds its rows."""

    def zeros() -> kernels.JobBuffers:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree.thawed(shapes))

    return jitted(zeros, out_shardings=spread(mesh))


@lru_cache(maxsize=256)
def train(kind: JobKind, width: int, batching: str, mesh: Mesh | None) -> Wrapped:
    """Jitted ``kernels.Together.train`` or ``kernels.OneByOne.train``; donates the batch's buffers.

    A loop has no width: it is 0.
    """
    devices, vmapped = 1 if mesh is None else mesh.size, batching == "vmap"
    made = kernels.Together(kind, width, devices).train if vmapped else kernels.OneByOne(kind, devices).train
    if mesh is not None:
        whole, share = everywhere(mesh).spec, spread(mesh).spec  # type: ignore[union-attr]
        # every device runs its own loops, of its own length: nothing is exchanged while training
        made = jax.shard_map(made, mesh=mesh, in_specs=(whole, whole, share, whole), out_specs=share, check_vma=False)
    return jitted(made, donate_argnums=2)


def compiled_training(
    kind: JobKind,
    widths: Sequence[int],
    batching: str,
    tables: Any,
    carry: kernels.Carry,
    empty: kernels.JobBuffers,
    mesh: Mesh | None = None,
) -> dict[int, Compiled]:
    """The compiled programs that train, by width; ``carry`` and ``empty`` may be shapes."""
    given = tables, carry.readable, empty, np.zeros(4, np.int32)
    return {
        width: train(kind, width if batching == "vmap" else 0, batching, mesh).lower(*given).compile()
        for width in widths
    }


def applying(made: Apply, mesh: Mesh | None) -> Wrapped:
    """Jitted ``made(tables, carry, buffers, span) -> (carry, rejected)``, which applies what jobs leave.

    Donates the carry. Every device applies all: it holds the whole carry.
    """

    def gathered(
        tables: Any, carry: kernels.Carry, buffers: kernels.JobBuffers, span: Array
    ) -> tuple[kernels.Carry, Array]:
        return made(tables, carry, jax.lax.with_sharding_constraint(buffers, everywhere(mesh)), span)

    return jitted(made if mesh is None else gathered, donate_argnums=1, out_shardings=everywhere(mesh))


@lru_cache(maxsize=64)
def receive(server: Server, facts: StackFacts, ranks: bool, mesh: Mesh | None, shows: bool = False) -> Wrapped:
    """Jitted ``serving.Receiver.receive`` or ``serving.RankReceiver.receive``.

    ``shows``: in place of ``rejected`` it returns ``(rejected, records and probes as bytes)``.
    """
    made = (serving.RankReceiver if ranks else serving.Receiver)(server, facts).receive

    @wraps(made)  # programs are known by their names
    def showing(*given: Any) -> Any:
        carry, rejected = made(*given)
        return carry, (rejected, as_bytes((carry.records, carry.probes)))

    return applying(showing if shows else made, mesh)


@lru_cache(maxsize=64)
def model_of(server: Server) -> Wrapped:
    """Jitted ``model_of(tables, states, run) -> params``: a copy that outlives the donation of the states."""

    def model(tables: DeviceTables, states: State, run: Array) -> Params:
        params = rule_at(server, tables, run).params(state_of(tables, states, run))
        return jax.tree.map(jnp.copy, params)

    return jitted(model)


@lru_cache(maxsize=64)
def send(server: Server, facts: StackFacts, most: int | None) -> Wrapped:
    """Jitted ``send(tables, carry) -> carry``: send the messages due before the first position; donates ``carry``.

    They are at most ``most``; ``None``: any number, one after the other.
    """

    def send(tables: DeviceTables, carry: kernels.Carry) -> kernels.Carry:
        low, high = tables.write_bounds[0], tables.write_bounds[1]
        return write_messages(server, tables, facts, carry, low, high, most)

    return jitted(send, donate_argnums=1)


@lru_cache(maxsize=64)
def keep(capacity: int) -> Wrapped:
    """Jitted ``keep(tables, store, buffers, span) -> store``: copy the results of a batch; donates the store.

    ``span``: index of the batch's first job in ``train_order``, number of its jobs. They are in the first of the
    ``capacity`` rows of the buffers, and go to their rows of the store.
    """

    def keep(
        tables: DeviceTables, store: kernels.JobBuffers, buffers: kernels.JobBuffers, span: Array
    ) -> kernels.JobBuffers:
        index = jnp.arange(capacity, dtype=jnp.int32)
        rows = jnp.where(index < span[1], tables.row[tables.train_order[span[0] + index]], len(store.norm))
        left = buffers._replace(before=(), work=())
        return jax.tree.map(lambda kept, new: kept.at[rows].set(new, mode="drop"), store, left)

    return jitted(keep, donate_argnums=1)


@lru_cache(maxsize=64)
def losses(model: Model, server: Server) -> Wrapped:
    """Jitted ``losses(tables, states, run, rows) -> float[n, B]``: a run's model at the examples ``rows``, int32[n, B].

    B of them are read at a time.
    """

    def losses(tables: DeviceTables, states: State, run: Array, rows: Array) -> Array:
        params = rule_at(server, tables, run).params(state_of(tables, states, run))
        return jax.lax.map(lambda some: model.loss(model.apply(params, tables.x[some]), tables.y[some]), rows)

    return jitted(losses)


def shed() -> None:
    """Forget all compiled programs before there are too many for one process.

    A CPU program of XLA takes hundreds of memory maps, and JAX keeps every program. At Linux's limit (65,530 maps by
    default) XLA ends the process. A loop over a few hundred different methods and models reaches it.
    """
    maps = Path("/proc/self/maps")
    if maps.is_file() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


class Programs(NamedTuple):
    """All programs that a stack of runs calls: compiled, so that no thread traces. ``None``: the stack needs none."""

    start: Compiled
    buffers: Compiled
    train: dict[int, Compiled]  # by width
    receive: Callable[..., Any]  # compiled
    scores: list[tuple[Scoring, Compiled]]  # for loss and accuracy and, if more is measured, for that
    by_ranks: bool  # whether the spans of ``receive`` count ranks, not positions
    model: Compiled | None = None  # copies the model of an evaluation, for observers
    evaluate_runs: Compiled | None = None  # evaluates all runs at once; off a CPU
    keep: Compiled | None = None  # copies results to a lane's store


class Shapes(NamedTuple):
    """Shapes of what is allocated during the runs of a stack."""

    carry: kernels.Carry
    buffers: kernels.JobBuffers  # of one lane
    store: kernels.JobBuffers | None = None  # of one lane, if uploads outlive the buffers that they are trained in


def shapes_of(stack: Stack, mesh: Mesh | None = None) -> Shapes:
    """What a stack will allocate on the device; nothing is compiled."""
    components, facts, tables, whole = stack.members[0].components, stack.facts, stack.tables, stack.layout.whole
    made = start(components.rule, components.client, facts, stack.shape.slot_count, mesh)
    carry = jax.eval_shape(made, tables, stack.params)
    given = (ClientJobs(components.client), stack.shape.capacity, whole)
    empty = tree.shapes(kernels.empty_buffers, tables, carry.readable, given=given)
    if whole and not _keeps_starts(components.rule, facts, tree.frozen((tables, carry, empty))):
        empty = empty._replace(started=())
    if mesh is not None:
        carry, empty = placed(carry, everywhere(mesh)), placed(empty, spread(mesh))
    return Shapes(carry, empty)


@lru_cache(maxsize=64)
def _keeps_starts(server: Server, facts: StackFacts, shapes: tuple[Structure, tree.Kinds]) -> bool:
    """Whether buffers keep start models; ``ValueError`` for a rule that must not share its messages.

    ``shapes``: of tables, carry and buffers, frozen. Tracing takes 50 ms, so results are cached.
    """
    tables, carry, buffers = tree.thawed(shapes)
    serving.check_shared_messages(server, facts, tables, carry, buffers)
    return serving.reads_starts(server, facts, tables, carry, buffers)


def compile_programs(stack: Stack, shapes: Shapes, *, mesh: Mesh | None = None, models: bool = False) -> Programs:
    """Compile ahead of time, since JAX keeps settings such as ``enable_x64`` per thread, and lanes are threads.

    ``models``: also the program that copies a model.
    """
    shed()
    components, layout, shape = stack.members[0].components, stack.layout, stack.shape
    server, client, facts, tables = components.rule, components.client, stack.facts, stack.tables
    by_ranks = shape.runs > 1 and layout.batching == "vmap"
    span = np.zeros(4, np.int32)
    carry, empty, store = shapes
    scores, every = compiled_scores(stack, carry), stack.every_test
    return Programs(
        start=start(server, client, facts, shape.slot_count, mesh).lower(tables, stack.params).compile(),
        buffers=zeros(tree.frozen(empty), mesh).lower().compile(),
        train=compiled_training(ClientJobs(client), layout.widths, layout.batching, tables, carry, empty, mesh),
        receive=receive(server, facts, by_ranks, mesh, stack.grows)
        .lower(tables, carry, store or empty, span[:2])
        .compile(),
        scores=scores,
        by_ranks=by_ranks,
        model=model_of(server).lower(tables, carry.server, span[0]).compile() if models else None,
        evaluate_runs=every and compiled_together(scores[0][0], stack, carry, every),
        keep=None if store is None else keep(shape.capacity).lower(tables, store, empty, span[:2]).compile(),
    )


def compiled_scores(stack: Stack, carry: kernels.Carry) -> list[tuple[Scoring, Compiled]]:
    """The programs that score the runs of a stack: for loss and accuracy and, if more is measured, for that."""
    first, (x, y, owner, inputs) = stack.members[0], stack.tests[0]
    components, measures, own = first.components, first.measures, inputs.tests is not None
    model, labels = components.model, bool(jnp.issubdtype(y.dtype, jnp.integer))
    metrics, others = Metrics(model, labels), Metrics(model, None, measures.metrics)
    rule, client, facts = components.rule, components.client, (stack.facts, len(y))
    wanted = [(Scoring(metrics, metrics, rule, client if own else None, *facts, own), inputs)]
    if stack.inputs[0] is not None:
        tuning = None
        if measures.fine_tune:
            width = stack.layout.capacity if stack.layout.batching == "vmap" else 1
            tuning = FineTuning(metrics._replace(others=others.others), measures.tuner, measures.fine_tune, width)
        own = own and bool(measures.metrics)
        who = client if own or tuning is not None else None
        wanted.append((Scoring(others, training_loss(model), rule, who, *facts, own, tuning), stack.inputs[0]))
    now, found = (np.zeros((), stack.tables.norm_limit.dtype), np.zeros((), np.int32)), []
    for what, more in wanted:
        given = what.reads(carry), np.int32(0), now, x, y, owner, more
        program = evaluate(what).lower(stack.tables, *given).compile()
        found.append((what, program))
    return found


def compiled_together(what: Scoring, stack: Stack, carry: kernels.Carry, every_test: RunTests) -> Compiled:
    """The compiled :func:`evaluate_runs`; ``every_test``: the tests of all runs, which have one test set."""
    tables, runs = stack.tables, stack.shape.runs
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack.params)
    made = evaluate_runs(what, most_at_once(what.metrics.model, one, every_test[0], runs))
    now = (np.zeros(runs, tables.norm_limit.dtype), np.zeros(runs, np.int32))
    given = what.reads(carry), np.arange(runs, dtype=np.int32), now, *every_test
    return made.lower(tables, *given).compile()
