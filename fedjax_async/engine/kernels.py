"""The pure functions that a run compiles: start, train, receive.

They are the only place that knows rows, slots and tables of N clients; the algorithms they call
see one client at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import tree
from fedjax_async.engine.world import World, client_data
from fedjax_async.local import job_key, run_steps
from fedjax_async.types import Array, Arrival, ClientAlgorithm, ClientData, Message, Params, ServerAlgorithm, State


class Live(NamedTuple):
    """What the server changes as it runs (donated from call to call)."""

    server: State
    memory: State  # [N, ...] rows, or ()
    clients: State  # the clients' own rows, [N, ...], or ()
    slots: Message  # start models, [S, ...]
    records: dict[str, Array]  # one column an info, [E']
    rejected: Array  # int32[], uploads refused so far


class Rows(NamedTuple):
    """Buffers of one batch of jobs, C rows each (donated from call to call)."""

    message: Message
    before: State  # the clients' rows as they were before the job; () where jobs are looped over
    work: State  # of unfinished jobs; () where jobs are looped over
    upload: Params
    after: State  # the clients' rows as the job leaves them
    norm: Array  # float[C]
    accepted: Array  # bool[C]


def write_messages(server: ServerAlgorithm, world: World, live: Live, position: Array) -> Live:
    """Send the messages due after ``position`` arrivals: write them to their slots."""

    def send(i: Array, live: Live) -> Live:
        client, slot = world.write_client[i], world.write_slot[i]
        message, memory = server.dispatch(live.server, tree.take(live.memory, client))
        message = message._replace(version=live.slots.version[slot])
        return live._replace(memory=tree.put(live.memory, client, memory), slots=tree.put(live.slots, slot, message))

    return jax.lax.fori_loop(world.write_bounds[position], world.write_bounds[position + 1], send, live)


def make_start(server: ServerAlgorithm, client: ClientAlgorithm, num_clients: int, slots: int) -> Any:
    """``start(world, params) -> live``: server state, memory and client rows, and the first messages."""

    def rows_of(one: State) -> State:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), one)

    def info_of(server_state: State, memory: State, params: Params) -> Any:
        one = jnp.ones(())
        arrival = Arrival(params, params, jnp.int32(0), one, jnp.int32(0), one, jnp.bool_(True))
        return server.receive(server_state, memory, arrival)[2]

    def start(world: World, params: Params) -> Live:
        state, memory = server.init(params)
        message, _ = server.dispatch(state, memory)
        message = message._replace(version=jnp.zeros((), jnp.int32))
        info = jax.eval_shape(info_of, state, memory, params)
        length = world.client.shape[0]
        records = {name: jnp.zeros((length, *leaf.shape), leaf.dtype) for name, leaf in info.items()}
        records |= {"upload_norm": jnp.zeros(length), "accepted": jnp.zeros(length, jnp.bool_)}
        own = rows_of(client.init(params))
        live = Live(state, rows_of(memory), own, tree.stack_zeros(message, slots), records, jnp.int32(0))
        return write_messages(server, world, live, jnp.int32(0))

    return start


def make_rows(client: ClientAlgorithm, capacity: int, batching: str) -> Any:
    """``rows(world, live) -> rows``: empty buffers of the right shapes."""

    def rows(world: World, live: Live) -> Rows:
        def one(world: World, live: Live) -> Rows:
            message, before = tree.take(live.slots, 0), tree.take(live.clients, 0)
            work = client.begin(world.key, message, before, client_data(world, jnp.int32(0)))
            upload, after = client.finish(work, message, before)
            done = Rows(message, before, work, upload, after, jnp.zeros(()), jnp.bool_(False))
            return done if batching == "vmap" else done._replace(before=(), work=())

        shapes = jax.eval_shape(one, world, live)
        return tree.stack_zeros(shapes, capacity)

    return rows


def _advance(client: ClientAlgorithm, data: ClientData) -> Any:
    """One local step of one job, kept only while the job lasts; unchanged leaves cost nothing."""

    def advance(work: State, k: Array, steps: Array, message: Message, offset: Array, size: Array) -> State:
        stepped = client.step(work, k, message, data._replace(offset=offset, size=size))
        runs = k < steps
        return jax.tree.map(lambda old, new: old if new is old else jnp.where(runs, new, old), work, stepped)

    return jax.vmap(advance, in_axes=(0, None, 0, 0, 0, 0))


def finished(
    client: ClientAlgorithm, work: State, message: Message, state: State
) -> tuple[Params, State, Array, Array]:
    """End one job: ``(upload, client state, norm of the upload, accepted)``.

    An upload whose Euclidean norm is not finite is rejected: replaced by zeros, with norm 0, and
    the client keeps the state that it had before the job.
    """
    upload, after = client.finish(work, message, state)
    norm = tree.norm(upload)
    accepted = jnp.isfinite(norm)
    upload = tree.where(accepted, upload, jax.tree.map(jnp.zeros_like, upload))
    return upload, tree.where(accepted, after, state), jnp.where(accepted, norm, 0.0), accepted


def make_train(client: ClientAlgorithm, width: int) -> Any:
    """``train(world, slots, clients, rows, span) -> rows`` for the leading ``width`` rows of a batch.

    ``span`` = (first arrival of the batch, jobs in it, first local step, end of the steps).
    """

    def train(world: World, slots: Message, clients: State, rows: Rows, span: Array) -> Rows:
        low, count, first, last = span
        index = jnp.arange(width, dtype=jnp.int32)
        event = world.train_order[low + index]
        who = world.client[event]
        steps = jnp.where(index < count, world.steps[event], 0)
        data = client_data(world, who)
        lanes = ClientData._make((None, None, None, 0, 0))

        def fresh() -> tuple[Message, State, State]:
            message = tree.take(slots, world.slot[event])._replace(version=world.version[event])
            before = tree.take(clients, who)
            keys = jax.vmap(job_key, in_axes=(None, 0, 0))(world.key, who, world.number[event])
            return message, before, jax.vmap(client.begin, in_axes=(0, 0, 0, lanes))(keys, message, before, data)

        def resumed() -> tuple[Message, State, State]:
            return jax.tree.map(lambda leaf: leaf[:width], (rows.message, rows.before, rows.work))

        message, before, work = jax.lax.cond(first == 0, fresh, resumed)
        advance = _advance(client, data)
        work = jax.lax.fori_loop(
            first, last, lambda k, work: advance(work, k, steps, message, data.offset, data.size), work
        )
        upload, after, norm, accepted = jax.vmap(finished, in_axes=(None, 0, 0, 0))(client, work, message, before)
        done = Rows(message, before, work, upload, after, norm, accepted)
        return jax.tree.map(lambda buffer, new: buffer.at[:width].set(new), rows, done)

    return train


def make_loop(client: ClientAlgorithm) -> Any:
    """The same signature and result as :func:`make_train`, one job after the other; any number of jobs."""

    def train(world: World, slots: Message, clients: State, rows: Rows, span: Array) -> Rows:
        low, count = span[0], span[1]

        def one(i: Array, rows: Rows) -> Rows:
            event = world.train_order[low + i]
            who = world.client[event]
            message = tree.take(slots, world.slot[event])._replace(version=world.version[event])
            before = tree.take(clients, who)
            key = job_key(world.key, who, world.number[event])
            work = run_steps(client, key, message, before, client_data(world, who), world.steps[event])
            upload, after, norm, accepted = finished(client, work, message, before)
            return tree.put(rows, i, Rows(message, (), (), upload, after, norm, accepted))

        return jax.lax.fori_loop(0, count, one, rows)

    return train


def make_receive(server: ServerAlgorithm, always_closes: bool) -> Any:
    """``receive(world, live, rows, span) -> (live, rejected)``: apply the arrivals ``span[0] .. span[1]-1``.

    ``rejected`` (so far) is a copy that outlives the donation of ``live``: waiting for it tells the
    host how far the device has come.
    """

    def one(world: World, rows: Rows, e: Array, live: Live) -> Live:
        row, client = world.row[e], world.client[e]
        accepted = rows.accepted[row]
        arrival = Arrival(
            upload=tree.take(rows.upload, row),
            start=tree.take(rows.message.params, row),
            staleness=world.staleness[e],
            weight=jnp.where(accepted, world.size[client], 0).astype(jnp.result_type(float)),
            client=client,
            time=world.time[e],
            closes=True if always_closes else world.closes[e],
        )
        before = tree.take(live.memory, client)
        state, memory, info = server.receive(live.server, before, arrival)
        info = info | {"upload_norm": rows.norm[row], "accepted": accepted}
        live = live._replace(
            server=state,
            memory=tree.put(live.memory, client, tree.where(accepted, memory, before)),
            clients=tree.put(live.clients, client, tree.take(rows.after, row)),
            records={name: live.records[name].at[e].set(value) for name, value in info.items()},
            rejected=live.rejected + jnp.logical_not(accepted).astype(jnp.int32),
        )
        return write_messages(server, world, live, e + 1)

    def receive(world: World, live: Live, rows: Rows, span: Array) -> tuple[Live, Array]:
        live = jax.lax.fori_loop(span[0], span[1], lambda e, live: one(world, rows, e, live), live)
        return live, live.rejected + 0

    return receive
