"""The server side of a run as compiled programs: start, receive."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async import check, tree
from fedjax_async.engine.kernels import Live, Rows, hyper_of, info_of
from fedjax_async.engine.pieces import ClientFamily, ServerFamily, bound
from fedjax_async.engine.world import World
from fedjax_async.types import Array, Arrival, ClientAlgorithm, Message, Params, ServerAlgorithm, State

Server = ServerAlgorithm | ServerFamily


def read_rows(table: Any, index: Array) -> Any:
    """:func:`tree.take`, as a loop of one turn of its own, from a table that the same turn of a loop writes.

    XLA:CPU fuses a plain read into whatever uses it, also into what comes after the write; to be able to, it
    copies the whole table at every turn (90 ms instead of 1 at 1,000 rows of 50,000). It does not fuse loops.
    """
    nothing = jax.tree.map(lambda leaf: jnp.zeros(index.shape + leaf.shape[1:], leaf.dtype), table)
    once = jnp.minimum(jnp.max(index) + 1, 1)  # one, though the compiler cannot know
    return jax.lax.fori_loop(0, once, lambda _, row: tree.take(table, index), nothing)


def state_of(world: World, states: State, run: Array) -> State:
    """The server state of a run."""
    return states if len(world.key) == 1 else tree.take(states, run)


def send_one(server: Server, world: World, state: State, memory: State, write: Array) -> tuple[Message, State]:
    """The message of write ``write`` and the server's row about its client afterwards."""
    run = world.write_run[write]
    before = read_rows(memory, world.write_owner[write])
    message, after = bound(server, hyper_of(world, run)).dispatch(state_of(world, state, run), before)
    return message._replace(version=jnp.int32(0)), after


def write_messages(server: Server, world: World, live: Live, position: Array) -> Live:
    """Send the messages due after ``position`` arrivals: write them to their slots."""

    def send(j: Array, live: Live) -> Live:
        message, memory = send_one(server, world, live.server, live.memory, j)
        return live._replace(
            memory=tree.put(live.memory, world.write_owner[j], memory),
            slots=tree.put(live.slots, world.write_slot[j], message),
        )

    return jax.lax.fori_loop(world.write_bounds[position], world.write_bounds[position + 1], send, live)


def make_start(server: Server, client: ClientAlgorithm | ClientFamily, num_clients: int, slots: int) -> Any:
    """``start(world, params) -> live``: server states, memory and client rows, and the first messages.

    ``params``: [R, ...], without the axis where R = 1.
    """

    def start(world: World, params: Params) -> Live:
        runs = len(world.key)

        def begin(hyper: dict[str, Array], params: Params) -> tuple[State, State, State]:
            return *bound(server, hyper).init(params), bound(client, hyper).init(params)

        def rows_of(one: State) -> State:
            """A row a client from a row a run."""

            def rows(leaf: Array) -> Array:
                leaf = leaf[None] if runs == 1 else leaf
                each = jnp.broadcast_to(leaf[:, None], (runs, num_clients, *leaf.shape[1:]))
                return each.reshape(runs * num_clients, *leaf.shape[1:])

            return jax.tree.map(rows, one)

        first = hyper_of(world, jnp.int32(0))
        if runs == 1:
            state, memory, own = begin(first, params)
            example = (state, memory, params, own)
        else:
            state, memory, own = jax.vmap(begin)(world.hyper, params)
            example = tree.take((state, memory, params, own), 0)
        message, _ = bound(server, first).dispatch(*example[:2])
        message = message._replace(version=jnp.zeros((), jnp.int32))

        def both(state: State, memory: State, params: Params, own: State) -> Any:
            one = jnp.ones(())
            arrival = Arrival(params, params, jnp.int32(0), one, jnp.int32(0), one, jnp.bool_(True))
            return bound(server, first).receive(state, memory, arrival)[2], info_of(bound(client, first), own)

        info, sent = jax.eval_shape(both, *example)
        check.require(not set(info) & set(sent), "client.info", list(sent), f"named other than {list(info)}")
        length = world.client.shape[0]
        records = {name: jnp.zeros((length, *leaf.shape), leaf.dtype) for name, leaf in (info | sent).items()}
        records |= {"upload_norm": jnp.zeros(length), "accepted": jnp.zeros(length, jnp.bool_)}
        table = tree.stack_zeros(message, slots)
        live = Live(state, rows_of(memory), rows_of(own), table, records, jnp.int32(0))
        return write_messages(server, world, live, jnp.int32(0))

    return start


def _arrived(world: World, rows: Rows, position: Array, always_closes: bool) -> Arrival:
    """What the server is given of the upload that arrives at ``position``."""
    row = world.row[position]
    real = jnp.result_type(float)
    return Arrival(
        upload=tree.take(rows.upload, row),
        start=tree.take(rows.message.params, row),
        staleness=world.staleness[position],
        weight=jnp.where(rows.accepted[row], world.size[position], 0).astype(real),
        client=world.client[position],
        time=world.time[position],
        closes=True if always_closes else world.closes[position],
    )


def make_receive(server: Server, always_closes: bool) -> Any:
    """``receive(world, live, rows, span) -> (live, rejected)``: apply the positions ``span[0] .. span[1]-1``.

    ``rejected`` (so far) is a copy that outlives the donation of ``live``: waiting for it tells the
    host how far the device has come.
    """

    def one(world: World, rows: Rows, p: Array, live: Live) -> Live:
        row, owner, run = world.row[p], world.owner[p], world.run[p]
        accepted = rows.accepted[row]
        before = read_rows(live.memory, owner)
        arrival = _arrived(world, rows, p, always_closes)
        rule = bound(server, hyper_of(world, run))
        state, memory, info = rule.receive(state_of(world, live.server, run), before, arrival)
        info = info | tree.take(rows.info, row) | {"upload_norm": rows.norm[row], "accepted": accepted}
        live = live._replace(
            server=state if len(world.key) == 1 else tree.put(live.server, run, state),
            memory=tree.put(live.memory, owner, tree.where(accepted, memory, before)),
            clients=tree.put(live.clients, owner, tree.take(rows.after, row)),
            records={name: live.records[name].at[p].set(value) for name, value in info.items()},
            rejected=live.rejected + jnp.logical_not(accepted).astype(jnp.int32),
        )
        return write_messages(server, world, live, p + 1)

    def receive(world: World, live: Live, rows: Rows, span: Array) -> tuple[Live, Array]:
        live = jax.lax.fori_loop(span[0], span[1], lambda p, live: one(world, rows, p, live), live)
        return live, live.rejected + 0

    return receive


def make_receive_rounds(server: Server, always_closes: bool) -> Any:
    """The same as :func:`make_receive` for the rounds ``span[0] .. span[1]-1``, all runs of a round at once."""

    def rule(hyper: Any, state: State, memory: State, arrival: Arrival) -> Any:
        return bound(server, hyper).receive(state, memory, arrival)

    def one_round(world: World, rows: Rows, k: Array, live: Live) -> Live:
        runs = len(world.key)
        lane = jnp.arange(runs, dtype=jnp.int32)
        low, high = world.rounds[k], world.rounds[k + 1]
        p = jnp.minimum(low + lane, high - 1)
        active = low + lane < high
        row, owner, run = world.row[p], world.owner[p], world.run[p]
        accepted = rows.accepted[row]
        before = read_rows(live.memory, owner)
        arrival = jax.vmap(lambda p: _arrived(world, rows, p, False))(p)
        arrival = arrival._replace(closes=True) if always_closes else arrival
        axes: Any = Arrival._make([0] * 6 + [None if always_closes else 0])
        state, memory, info = jax.vmap(rule, in_axes=(0, 0, 0, axes))(
            hyper_of(world, run), tree.take(live.server, run), before, arrival
        )
        info = info | tree.take(rows.info, row) | {"upload_norm": rows.norm[row], "accepted": accepted}
        kept = jax.vmap(tree.where)(accepted, memory, before)
        live = live._replace(
            server=tree.put_some(live.server, run, state, active),
            memory=tree.put_some(live.memory, owner, kept, active),
            clients=tree.put_some(live.clients, owner, tree.take(rows.after, row), active),
            records=tree.put_some(live.records, p, info, active),
            rejected=live.rejected + jnp.sum(active & ~accepted).astype(jnp.int32),
        )
        return write_due(world, live, world.write_bounds[low + 1], world.write_bounds[high + 1], lane)

    def write_due(world: World, live: Live, low: Array, high: Array, lane: Array) -> Live:
        """All messages due after a round, as many at a time as there are runs."""

        def some(i: Array, live: Live) -> Live:
            j = jnp.minimum(low + i * len(lane) + lane, high - 1)
            active = low + i * len(lane) + lane < high
            message, memory = jax.vmap(lambda j: send_one(server, world, live.server, live.memory, j))(j)
            return live._replace(
                memory=tree.put_some(live.memory, world.write_owner[j], memory, active),
                slots=tree.put_some(live.slots, world.write_slot[j], message, active),
            )

        return jax.lax.fori_loop(0, -((low - high) // len(lane)), some, live)

    def receive(world: World, live: Live, rows: Rows, span: Array) -> tuple[Live, Array]:
        live = jax.lax.fori_loop(span[0], span[1], lambda k, live: one_round(world, rows, k, live), live)
        return live, live.rejected + 0

    return receive
