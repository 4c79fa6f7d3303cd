"""The client side of a run as compiled programs: local training whose results go into the buffers of a lane.

The algorithms see one client at a time. Only this file, ``sending.py`` and ``serving.py`` know buffers, slots and
tables of N clients. A stack of R runs shares one set of tables; the run of a job selects its key and hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.engine.components import ClientFamily, bound
from fedjax_async.engine.devices import JOBS
from fedjax_async.engine.tables import DeviceTables, JobTables, client_data
from fedjax_async.local import job_key, run_steps
from fedjax_async.server.running_statistics import statistics_in, weights_in
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, State, Tree


class Carry(NamedTuple):
    """The state that one compiled call changes and the next one gets (donated from call to call)."""

    server: State  # [R, ...]; without the axis where R = 1
    memory: State  # the server's memory about each client, [R * N, ...], or ()
    clients: State  # the state of each client, [R * N, ...], or ()
    slots: Message  # start models, [S, ...]
    records: dict[str, Array]  # recorded columns of the arrivals, [E'] each
    rejected: Array  # int32[], uploads rejected so far
    probes: Mapping[str, dict[str, Array]] = {}  # probe -> column -> values, [E']


class JobBuffers(NamedTuple):
    """The results of the jobs of one lane, for the server; C rows each (donated from call to call)."""

    # the next three are for jobs that go on in the next call; () if each job ends in the call that begins it
    message: Message | tuple[()]  # also kept if the server reads start models
    before: State  # the clients' states before the job
    work: State  # of unfinished jobs
    upload: State
    after: State  # the clients' states after the job
    norm: Array  # float[C]
    accepted: Array  # bool[C]
    info: dict[str, Array]  # columns that clients record about their uploads, [C] each


FinishedJob = tuple[State, State, Array, Array, dict[str, Array]]  # upload, client state, norm, accepted, info
Unfinished = TypeVar("Unfinished")  # the state of unfinished jobs
MakeBuffers = Callable[[DeviceTables, Carry], JobBuffers]
TrainJobs = Callable[[DeviceTables, Message, State, JobBuffers, Array], JobBuffers]


def hyper_of(tables: JobTables, run: Array) -> dict[str, Array]:
    """The hyperparameters of a run. For R = 1 no index is traced."""
    return {name: values[0 if len(values) == 1 else run] for name, values in tables.hyper.items()}


def make_buffers(client: ClientAlgorithm | ClientFamily, capacity: int, whole: bool, starts: bool) -> MakeBuffers:
    """``buffers(tables, carry) -> buffers``: empty buffers of the right shapes.

    ``whole``: each job ends in the call that begins it. Then ``starts`` says whether start models are kept.
    """

    def buffers(tables: DeviceTables, carry: Carry) -> JobBuffers:
        def one(tables: DeviceTables, carry: Carry) -> JobBuffers:
            message, before = tree.gather(carry.slots, 0), tree.gather(carry.clients, 0)
            who = bound(client, hyper_of(tables, jnp.int32(0)))
            started = message._replace(local_steps=jnp.int32(1))
            work = who.begin(tables.key[0], started, before, client_data(tables, jnp.int32(0)))
            upload, after = who.finish(work, message, before)
            info = info_of(who, after)
            done = JobBuffers(message, before, work, upload, after, jnp.zeros(()), jnp.bool_(False), info)
            if not whole:
                return done
            return done._replace(message=message if starts else (), before=(), work=())

        shapes = jax.eval_shape(one, tables, carry)
        return tree.stack_zeros(shapes, capacity)

    return buffers


def info_of(client: ClientAlgorithm, state: State) -> dict[str, Array]:
    """What the client records about an upload; {} if nothing."""
    return {} if client.info is None else client.info(state)


def finished(
    client: ClientAlgorithm,
    work: State,
    message: Message,
    state: State,
    limit: Array,
    corrupt: Array,
    applied: Array,
) -> FinishedJob:
    """End one job: ``(upload, client state, norm of the upload, accepted, info)``.

    ``work``: after the last local step. ``state``: the client's state before the job. An upload is rejected if it or
    the new state of its client is not finite, if its norm is above ``limit``, or if it is ``corrupt``: turned into NaN
    on its way. A rejected upload is replaced by zeros, and the client keeps its state from before the job. The norm is
    Euclidean, over the upload without running statistics, as in ``server.clip_by_norm``. It is 0 if the upload is
    corrupt, or if it or the new state is not finite. If ``applied`` is false, the server never applies the upload, and
    ``client.unsent`` gives the client's state. ``info`` is about the upload as it was sent.
    """
    upload, after = client.finish(work, message, state)
    norm = tree.norm(weights_in(upload))
    finite = jnp.isfinite(norm) & tree.is_finite((statistics_in(upload), after)) & jnp.logical_not(corrupt)
    accepted = finite & (norm <= limit)
    upload = tree.where(accepted, upload, jax.tree.map(jnp.zeros_like, upload))
    norm = jnp.where(finite, norm, 0.0)
    kept = after if client.unsent is None else tree.where(applied, after, client.unsent(state, after))
    return upload, tree.where(accepted, kept, state), norm, accepted, info_of(client, after)


def make_advance(client: ClientAlgorithm | ClientFamily, data: ClientData) -> Callable[..., State]:
    """One local step of one job, without effect once the job has done its steps. Unchanged leaves cost nothing."""

    def advance(
        hyper: dict[str, Array], work: State, k: Array, steps: Array, message: Message, offset: Array, size: Array
    ) -> State:
        message = message._replace(local_steps=steps)
        stepped = bound(client, hyper).step(work, k, message, data._replace(offset=offset, size=size))
        runs = k < steps
        return jax.tree.map(lambda old, new: old if new is old else jnp.where(runs, new, old), work, stepped)

    return advance


def device_index(devices: int) -> Array:
    """The index of this device among those that share a batch."""
    return jax.lax.axis_index(JOBS) if devices > 1 else jnp.int32(0)


def make_train(client: ClientAlgorithm | ClientFamily, width: int, devices: int = 1) -> TrainJobs:
    """``train(tables, slots, clients, buffers, span) -> buffers`` for the ``width`` longest jobs of a batch.

    ``span`` = (index of the batch's first job in ``train_order``, number of its jobs, first local step, end of the
    steps). With several ``devices``, each runs this program on every ``devices``-th job.
    """
    own = width // devices

    def train(tables: DeviceTables, slots: Message, clients: State, buffers: JobBuffers, span: Array) -> JobBuffers:
        low, count, first, last = span
        index = jnp.arange(own, dtype=jnp.int32) * devices + device_index(devices)
        position = tables.train_order[low + index]
        owner, run = tables.owner[position], tables.run[position]
        steps = jnp.where(index < count, tables.steps[position], 0)
        data = client_data(tables, position)
        one = ClientData._make((None, None, None, 0, 0, None))
        hyper = hyper_of(tables, run)
        each = None if len(tables.key) == 1 else 0  # the axis of hyper

        def begin(
            hyper: dict[str, Array], key: Key, message: Message, before: State, data: ClientData, steps: Array
        ) -> State:
            return bound(client, hyper).begin(key, message._replace(local_steps=steps), before, data)

        def end(hyper: dict[str, Array], *job: Any) -> FinishedJob:
            return finished(bound(client, hyper), *job)

        def fresh() -> tuple[Message, State, State]:
            message = tree.gather(slots, tables.slot[position])._replace(version=tables.version[position])
            before = tree.gather(clients, owner)
            keys = jax.vmap(job_key)(tables.key[run], tables.client[position], tables.number[position])
            work = jax.vmap(begin, in_axes=(each, 0, 0, 0, one, 0))(hyper, keys, message, before, data, steps)
            return message, before, work

        step = jax.vmap(make_advance(client, data), in_axes=(each, 0, None, 0, 0, 0, 0))

        def advance(k: Array, held: tuple[Message, State, State]) -> tuple[Message, State, State]:
            message, before, work = held
            return message, before, step(hyper, work, k, steps, message, data.offset, data.size)

        def finish(rows: Callable[[Any], Any], held: tuple[Message, State, State]) -> tuple[State, ...]:
            message, before, work = held
            known = (tables.norm_limit[run], tables.corrupt[position], tables.applied[position])
            given = (hyper if each is None else rows(hyper), work, message, before, *rows(known))
            return jax.vmap(end, in_axes=(each, *[0] * 6))(*given)

        kept, done = run_segment((first, last), steps, buffers[:3], tuple(buffers[3:]), fresh, advance, finish)
        return JobBuffers(*kept, *done)

    return train


def run_segment(
    span: tuple[Array, Array],
    steps: Array,
    kept: State,
    done: Tree,
    fresh: Callable[[], Unfinished],
    advance: Callable[[Array, Unfinished], Unfinished],
    end: Callable[[Callable[[Any], Any], Unfinished], Tree],
) -> tuple[State, Tree]:
    """Run local steps ``span[0] .. span[1]-1`` of W jobs at once; returns ``(kept, done)`` afterwards.

    ``steps``: local steps of each job, from long to short, int32[W]. ``kept`` [C, ...]: the state of unfinished jobs
    between calls; ``fresh() -> held`` [W, ...] makes it at the first step, ``advance(k, held) -> held`` is one local
    step. ``done`` [C, ...]: the results of finished jobs; ``end(rows, held)`` computes those of some jobs, and ``rows``
    takes the rows of these jobs from any pytree [W, ...].
    """
    (first, last), own = span, len(steps)

    def resumed() -> Unfinished:
        return jax.tree.map(lambda leaf: leaf[:own], kept)

    held = tree.loop("local steps", first, last, advance, jax.lax.cond(first == 0, fresh, resumed))
    after = jax.tree.map(lambda buffer, new: buffer.at[:own].set(new), kept, held)

    def finish(i: Array, done: Tree) -> Tree:
        begin = jnp.minimum(i * part, own - part)

        def rows(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, begin, part), tree)

        new = end(rows, rows(held))
        return jax.tree.map(lambda leaf, row: jax.lax.dynamic_update_slice_in_dim(leaf, row, begin, 0), done, new)

    # The jobs are sorted from long to short, so the first ones go on. Only the others are finished, to save time.
    part = -(-own // 2)
    going_on = jnp.sum(steps > last)
    return after, tree.loop("finish", going_on // part, -(-own // part), finish, done)


def make_loop(client: ClientAlgorithm | ClientFamily, devices: int = 1) -> TrainJobs:
    """As :func:`make_train`, but any number of jobs, one after the other, all steps of each."""

    def train(tables: DeviceTables, slots: Message, clients: State, buffers: JobBuffers, span: Array) -> JobBuffers:
        low, count = span[0], span[1]

        def one(i: Array, buffers: JobBuffers) -> JobBuffers:
            position = tables.train_order[low + i * devices + device_index(devices)]
            run = tables.run[position]
            who = bound(client, hyper_of(tables, run))
            message = tree.gather(slots, tables.slot[position])._replace(version=tables.version[position])
            before = tree.gather(clients, tables.owner[position])
            key = job_key(tables.key[run], tables.client[position], tables.number[position])
            work = run_steps(who, key, message, before, client_data(tables, position), tables.steps[position])
            conditions = (tables.norm_limit[run], tables.corrupt[position], tables.applied[position])
            done = finished(who, work, message, before, *conditions)
            return tree.scatter(
                buffers,
                tables.row[position] % len(buffers.norm),
                JobBuffers(message if buffers.message else (), (), (), *done),
            )

        mine = (count - device_index(devices) + devices - 1) // devices
        return tree.loop("jobs", 0, mine, one, buffers)

    return train
