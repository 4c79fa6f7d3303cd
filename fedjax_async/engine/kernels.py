"""The client side of a run as compiled programs: rows, train.

With ``serving.py`` the only place that knows rows, slots and tables of N clients; the algorithms they
call see one client at a time. A stack of R runs shares one set of tables: a job's run says which key
and which hyperparameters are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import tree
from fedjax_async.engine.components import ClientFamily, bound
from fedjax_async.engine.devices import JOBS
from fedjax_async.engine.world import World, client_data
from fedjax_async.local import job_key, run_steps
from fedjax_async.server.running_statistics import statistics_in, weights_in
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Message, State


class Live(NamedTuple):
    """What the server changes as it runs (donated from call to call)."""

    server: State  # [R, ...]; without the axis where R = 1
    memory: State  # [R * N, ...] rows, or ()
    clients: State  # the clients' own rows, [R * N, ...], or ()
    slots: Message  # start models, [S, ...]
    records: dict[str, Array]  # one column an info, [E']
    rejected: Array  # int32[], uploads refused so far
    probes: Mapping[str, dict[str, Array]] = {}  # probe -> column -> values, [E']


class Rows(NamedTuple):
    """Buffers of one batch of jobs, C rows each (donated from call to call)."""

    message: Message
    before: State  # the clients' rows as they were before the job; () where jobs are looped over
    work: State  # of unfinished jobs; () where jobs are looped over
    upload: Any
    after: State  # the clients' rows as the job leaves them
    norm: Array  # float[C]
    accepted: Array  # bool[C]
    info: dict[str, Array]  # what the client says of its uploads, one column [C] a name


def hyper_of(world: World, run: Array) -> dict[str, Array]:
    """The hyperparameters of a run; of the only one, without indexing, where R = 1."""
    return {name: values[0 if len(values) == 1 else run] for name, values in world.hyper.items()}


def make_rows(client: ClientAlgorithm | ClientFamily, capacity: int, batching: str) -> Any:
    """``rows(world, live) -> rows``: empty buffers of the right shapes."""

    def rows(world: World, live: Live) -> Rows:
        def one(world: World, live: Live) -> Rows:
            message, before = tree.gather(live.slots, 0), tree.gather(live.clients, 0)
            who = bound(client, hyper_of(world, jnp.int32(0)))
            work = who.begin(world.key[0], message, before, client_data(world, jnp.int32(0)))
            upload, after = who.finish(work, message, before)
            info = info_of(who, after)
            done = Rows(message, before, work, upload, after, jnp.zeros(()), jnp.bool_(False), info)
            return done if batching == "vmap" else done._replace(before=(), work=())

        shapes = jax.eval_shape(one, world, live)
        return tree.stack_zeros(shapes, capacity)

    return rows


def info_of(client: ClientAlgorithm, state: State) -> dict[str, Array]:
    """What the client records of an upload."""
    return {} if client.info is None else client.info(state)


def finished(
    client: ClientAlgorithm,
    work: State,
    message: Message,
    state: State,
    limit: Array,
    corrupt: Array,
    applied: Array,
) -> tuple[Any, State, Array, Array, dict[str, Array]]:
    """End one job: ``(upload, client state, norm of the upload, accepted, info)``.

    An upload is rejected if it, or the state that its client keeps, is not finite, or if its norm is above ``limit``:
    it is replaced by zeros, and the client keeps the state that it had before the job. The norm is Euclidean, over all
    that is uploaded but running statistics, as that of ``server.clip_by_norm``; it is recorded if finite, else 0.
    ``corrupt``: the upload is lost to non-finite values on its way. Where ``applied`` is false the server never
    applies it, and the client's state is what the client makes of that. ``info`` is of the upload as it was sent.
    """
    upload, after = client.finish(work, message, state)
    norm = tree.norm(weights_in(upload))
    finite = jnp.isfinite(norm) & tree.is_finite((statistics_in(upload), after)) & jnp.logical_not(corrupt)
    accepted = finite & (norm <= limit)
    upload = tree.where(accepted, upload, jax.tree.map(jnp.zeros_like, upload))
    norm = jnp.where(finite, norm, 0.0)
    kept = after if client.unsent is None else tree.where(applied, after, client.unsent(state, after))
    return upload, tree.where(accepted, kept, state), norm, accepted, info_of(client, after)


def _advance(client: ClientAlgorithm | ClientFamily, data: ClientData) -> Any:
    """One local step of one job, kept only while the job lasts; unchanged leaves cost nothing."""

    def advance(
        hyper: dict[str, Array], work: State, k: Array, steps: Array, message: Message, offset: Array, size: Array
    ) -> State:
        stepped = bound(client, hyper).step(work, k, message, data._replace(offset=offset, size=size))
        runs = k < steps
        return jax.tree.map(lambda old, new: old if new is old else jnp.where(runs, new, old), work, stepped)

    return advance


def _device(devices: int) -> Array:
    """Which of the devices that share a batch this is."""
    return jax.lax.axis_index(JOBS) if devices > 1 else jnp.int32(0)


def make_train(client: ClientAlgorithm | ClientFamily, width: int, devices: int = 1) -> Any:
    """``train(world, slots, clients, rows, span) -> rows`` for the ``width`` longest jobs of a batch.

    ``span`` = (first position of the batch, jobs in it, first local step, end of the steps). With
    several ``devices`` this is the part of one of them, which holds every ``devices``-th job.
    """
    own = width // devices

    def train(world: World, slots: Message, clients: State, rows: Rows, span: Array) -> Rows:
        low, count, first, last = span
        index = jnp.arange(own, dtype=jnp.int32) * devices + _device(devices)
        position = world.train_order[low + index]
        owner, run = world.owner[position], world.run[position]
        steps = jnp.where(index < count, world.steps[position], 0)
        data = client_data(world, position)
        one = ClientData._make((None, None, None, 0, 0))
        hyper = hyper_of(world, run)
        each = None if len(world.key) == 1 else 0  # the axis of hyper

        def begin(hyper: Any, key: Any, message: Message, before: State, data: ClientData) -> State:
            return bound(client, hyper).begin(key, message, before, data)

        def end(hyper: Any, *job: Any) -> Any:
            return finished(bound(client, hyper), *job)

        def fresh() -> tuple[Message, State, State]:
            message = tree.gather(slots, world.slot[position])._replace(version=world.version[position])
            before = tree.gather(clients, owner)
            keys = jax.vmap(job_key)(world.key[run], world.client[position], world.number[position])
            work = jax.vmap(begin, in_axes=(each, 0, 0, 0, one))(hyper, keys, message, before, data)
            return message, before, work

        def resumed() -> tuple[Message, State, State]:
            return jax.tree.map(lambda leaf: leaf[:own], (rows.message, rows.before, rows.work))

        message, before, work = jax.lax.cond(first == 0, fresh, resumed)
        advance = jax.vmap(_advance(client, data), in_axes=(each, 0, None, 0, 0, 0, 0))
        work = jax.lax.fori_loop(
            first, last, lambda k, work: advance(hyper, work, k, steps, message, data.offset, data.size), work
        )
        upload, after, norm, accepted, info = jax.vmap(end, in_axes=(each, *[0] * 6))(
            hyper, work, message, before, world.norm_limit[run], world.corrupt[position], world.applied[position]
        )
        done = Rows(message, before, work, upload, after, norm, accepted, info)
        return jax.tree.map(lambda buffer, new: buffer.at[:own].set(new), rows, done)

    return train


def make_loop(client: ClientAlgorithm | ClientFamily, devices: int = 1) -> Any:
    """The same signature and result as :func:`make_train`, one job after the other; any number of jobs."""

    def train(world: World, slots: Message, clients: State, rows: Rows, span: Array) -> Rows:
        low, count = span[0], span[1]

        def one(i: Array, rows: Rows) -> Rows:
            position = world.train_order[low + i * devices + _device(devices)]
            run = world.run[position]
            who = bound(client, hyper_of(world, run))
            message = tree.gather(slots, world.slot[position])._replace(version=world.version[position])
            before = tree.gather(clients, world.owner[position])
            key = job_key(world.key[run], world.client[position], world.number[position])
            work = run_steps(who, key, message, before, client_data(world, position), world.steps[position])
            outcome = (world.norm_limit[run], world.corrupt[position], world.applied[position])
            done = finished(who, work, message, before, *outcome)
            return tree.scatter(rows, i, Rows(message, (), (), *done))

        mine = (count - _device(devices) + devices - 1) // devices
        return jax.lax.fori_loop(0, mine, one, rows)

    return train
