"""Local training as compiled programs, whose results go into the buffers of a lane: one engine for all kinds of jobs.

A job reads what it starts from, trains, and leaves its results for another program to apply. How it reads and what it
leaves is its :class:`JobKind`. The jobs of clients start from a message in a slot and leave an upload, see
:class:`ClientJobs`; the events of nodes mix the slots of their inbox and leave messages, see ``peer_kernels.NodeJobs``.

The algorithms see one client at a time. A stack of R runs shares one set of tables; the run of a job selects its key
and hyperparameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.engine.components import Client, bound
from fedjax_async.engine.devices import JOBS
from fedjax_async.engine.tables import DeviceTables, client_data
from fedjax_async.local import job_key, run_steps
from fedjax_async.server.running_statistics import weights_and_statistics
from fedjax_async.types import Array, ClientAlgorithm, Key, Message, State, Tree


class Readable(NamedTuple):
    """What training reads of a carry."""

    slots: State
    memory: State  # the rows of nodes; () with a server
    clients: State


class Carry(NamedTuple):
    """The state that one compiled call changes and the next one gets (donated from call to call)."""

    server: State  # [R, ...]; without the axis where R = 1; () without a server
    memory: State  # the server's memory about each client, or the row of each node: [R * N, ...], or ()
    clients: State  # the state of each client, [R * N, ...], or ()
    slots: State  # what jobs start from, [S, ...]: messages of the server, or of nodes (``peer_kernels.Slots``)
    records: dict[str, Array]  # recorded columns of the arrivals, [E'] each
    rejected: Array  # int32[], uploads rejected so far
    probes: Mapping[str, dict[str, Array]] = {}  # probe -> column -> values, [E']

    @property
    def readable(self) -> Readable:
        """What training reads; with a server not its memory, so that rules with any memory share programs."""
        return Readable(self.slots, () if jax.tree.leaves(self.server) else self.memory, self.clients)


class JobBuffers(NamedTuple):
    """The results of the jobs of one lane; C rows each (donated from call to call)."""

    # the next three are for jobs that go on in the next call; () if each job ends in the call that begins it
    started: State  # what the job started from; also kept if the server reads start models
    before: State  # the clients' states before the job
    work: State  # of unfinished jobs
    left: State  # what the job leaves: its upload; of an event of a node, ``peer_kernels.Left``
    after: State  # the clients' states after the job
    norm: Array  # float[C]
    accepted: Array  # bool[C]
    info: dict[str, Array]  # columns that are recorded of uploads, [C] each


FinishedJob = tuple[State, State, Array, Array, dict[str, Array]]  # left, client state, norm, accepted, info
Unfinished = TypeVar("Unfinished")  # the state of unfinished jobs
Hypers = Mapping[str, Array]


class JobKind(Protocol):
    """How jobs begin and end. Programs depend on it, so it has a hash; ``hyper``: the numbers of the job's run."""

    def __hash__(self) -> int: ...
    @property
    def client(self) -> Client: ...

    def read(self, tables: Any, rows: Readable, position: Array, active: Array) -> tuple[State, State]:
        """What the job at ``position`` starts from, and its client's state; of jobs at once, int32[W], [W, ...].

        ``active``: bool of the same shape, false for rows of padding.
        """

    def message(self, hyper: Hypers, tables: Any, started: State, position: Array) -> Message:
        """The message that the job trains from."""

    def end(
        self, hyper: Hypers, tables: Any, started: State, before: State, work: State, position: Array
    ) -> FinishedJob:
        """The results of a job whose steps are done."""


class ClientJobs(NamedTuple):
    """Jobs of clients with a server."""

    client: Client

    def read(self, tables: DeviceTables, rows: Readable, position: Array, active: Array) -> tuple[Message, State]:
        """The message in the job's slot."""
        del active
        message = tree.gather(rows.slots, tables.slot[position])._replace(version=tables.version[position])
        return message, tree.gather(rows.clients, tables.owner[position])

    def message(self, hyper: Hypers, tables: DeviceTables, started: Message, position: Array) -> Message:
        """The message itself."""
        return started

    def end(
        self, hyper: Hypers, tables: DeviceTables, started: Message, before: State, work: State, position: Array
    ) -> FinishedJob:
        """The upload."""
        conditions = (tables.norm_limit[tables.run[position]], tables.corrupt[position], tables.applied[position])
        return finished(bound(self.client, hyper), work, started, before, *conditions)


def hyper_of(tables: Any, run: Array) -> dict[str, Array]:
    """The hyperparameters of a run. For R = 1 no index is traced."""
    return {name: values[0 if len(values) == 1 else run] for name, values in tables.hyper.items()}


def client_rows(runs: int, clients: int, leaf: Array) -> Array:
    """One row per client of each run, [R * N, ...], from one row per run, [R, ...]; without the axis where R = 1."""
    leaf = leaf[None] if runs == 1 else leaf
    each = jnp.broadcast_to(leaf[:, None], (runs, clients, *leaf.shape[1:]))
    return each.reshape(runs * clients, *leaf.shape[1:])


def mapped(function: Callable[..., Tree], hyper: Hypers, *jobs: object) -> Tree:
    """``function(hyper, *job)`` of jobs at once, ``jobs``: [W, ...]; ``hyper``: of each, or scalars where R = 1."""
    of_hyper = 0 if any(jnp.ndim(value) for value in hyper.values()) else None
    return jax.vmap(function, in_axes=(of_hyper, *[0] * len(jobs)))(hyper, *jobs)


def empty_buffers(kind: JobKind, capacity: int, whole: bool, tables: Any, rows: Readable) -> JobBuffers:
    """Empty buffers of the right shapes: those of a job without local steps.

    ``whole``: each job ends in the call that begins it.
    """
    zero = jnp.int32(0)
    hyper = hyper_of(tables, zero)
    started, before = kind.read(tables, rows, zero, jnp.bool_(True))
    message = kind.message(hyper, tables, started, zero)._replace(local_steps=jnp.int32(1))
    work = bound(kind.client, hyper).begin(tables.key[0], message, before, client_data(tables, zero))
    done = kind.end(hyper, tables, started, before, work, zero)
    one = JobBuffers(started, () if whole else before, () if whole else work, *done)
    empty: JobBuffers = tree.stack_zeros(one, capacity)
    return empty


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
    Euclidean, over the upload without running statistics, as in ``server.clip_by_norm``: that of the client's upload
    before anything happens to it, NaN if it or the new state is not finite. If ``applied`` is false, the server never
    applies the upload, and ``client.unsent`` gives the client's state. ``info`` is about the upload as it was sent.
    """
    upload, after = client.finish(work, message, state)
    weights, statistics = weights_and_statistics(upload)
    norm = tree.norm(weights)
    finite = jnp.isfinite(norm) & tree.is_finite((statistics, after))
    accepted = finite & jnp.logical_not(corrupt) & (norm <= limit)
    upload = tree.where(accepted, upload, jax.tree.map(jnp.zeros_like, upload))
    norm = jnp.where(finite, norm, jnp.nan)
    kept = after if client.unsent is None else tree.where(applied, after, client.unsent(state, after))
    info = {} if client.info is None else client.info(after)
    return upload, tree.where(accepted, kept, state), norm, accepted, info


def device_index(devices: int) -> Array:
    """The index of this device among those that share a batch."""
    return jax.lax.axis_index(JOBS) if devices > 1 else jnp.int32(0)


class Together(NamedTuple):
    """The program that trains the ``width`` longest jobs of a batch at once.

    With several ``devices``, each runs it on every ``devices``-th job.
    """

    kind: JobKind
    width: int
    devices: int = 1

    def train(self, tables: Any, rows: Readable, buffers: JobBuffers, span: Array) -> JobBuffers:
        """The buffers with the results of finished jobs.

        ``span`` = (index of the batch's first job in ``train_order``, number of its jobs, first local step, end of the
        steps).
        """
        own, kind, client = self.width // self.devices, self.kind, self.kind.client
        low, count, first, last = span
        index = jnp.arange(own, dtype=jnp.int32) * self.devices + device_index(self.devices)
        position, active = tables.train_order[low + index], index < count
        run, steps = tables.run[position], jnp.where(active, tables.steps[position], 0)
        hyper, data = hyper_of(tables, run), client_data(tables, position)

        def begin(
            hyper: Hypers,
            started: State,
            before: State,
            position: Array,
            key: Key,
            steps: Array,
            offset: Array,
            size: Array,
        ) -> State:
            message = kind.message(hyper, tables, started, position)._replace(local_steps=steps)
            return bound(client, hyper).begin(key, message, before, data._replace(offset=offset, size=size))

        def end(hyper: Hypers, *job: State) -> FinishedJob:
            return kind.end(hyper, tables, *job)

        def fresh() -> tuple[State, State, State]:
            started, before = kind.read(tables, rows, position, active)
            keys = jax.vmap(job_key)(tables.key[run], tables.client[position], tables.number[position])
            job = (started, before, position, keys, steps, data.offset, data.size)
            return started, before, mapped(begin, hyper, *job)

        def advance(k: Array, held: tuple[State, State, State]) -> tuple[State, State, State]:
            def step(
                hyper: Hypers, work: State, started: State, position: Array, steps: Array, offset: Array, size: Array
            ) -> State:
                """One local step, without effect once the job has done its steps. Unchanged leaves cost nothing."""
                message = kind.message(hyper, tables, started, position)._replace(local_steps=steps)
                stepped = bound(client, hyper).step(work, k, message, data._replace(offset=offset, size=size))
                runs = k < steps
                return jax.tree.map(lambda old, new: old if new is old else jnp.where(runs, new, old), work, stepped)

            started, before, work = held
            return started, before, mapped(step, hyper, work, started, position, steps, data.offset, data.size)

        def finish(some: Callable[[Any], Any], held: tuple[State, State, State]) -> FinishedJob:
            return mapped(end, hyper if len(tables.key) == 1 else some(hyper), *held, some(position))

        kept, done = run_segment((first, last), steps, buffers[:3], tuple(buffers[3:]), fresh, advance, finish)
        return JobBuffers(*kept, *done)


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


class OneByOne(NamedTuple):
    """The program that trains jobs one after the other, any number of them, all steps of each."""

    kind: JobKind
    devices: int = 1

    def train(self, tables: Any, rows: Readable, buffers: JobBuffers, span: Array) -> JobBuffers:
        """As :meth:`Together.train`; only the first two entries of ``span`` are read."""
        low, count, first, kind = span[0], span[1], device_index(self.devices), self.kind

        def one(i: Array, buffers: JobBuffers) -> JobBuffers:
            position = tables.train_order[low + i * self.devices + first]
            run = tables.run[position]
            hyper = hyper_of(tables, run)
            started, before = kind.read(tables, rows, position, jnp.bool_(True))
            message = kind.message(hyper, tables, started, position)
            key = job_key(tables.key[run], tables.client[position], tables.number[position])
            data, steps = client_data(tables, position), tables.steps[position]
            work = run_steps(bound(kind.client, hyper), key, message, before, data, steps)
            done = kind.end(hyper, tables, started, before, work, position)
            row = tables.row[position] % len(buffers.norm)
            return tree.scatter(buffers, row, JobBuffers(started if buffers.started else (), (), (), *done))

        mine = (count - first + self.devices - 1) // self.devices
        return tree.loop("jobs", 0, mine, one, buffers)
