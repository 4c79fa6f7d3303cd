"""The server side of a run as compiled programs: start, receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, tree
from fedjax_async.engine.components import Client, Server, bound, rule_of
from fedjax_async.engine.kernels import Live, Rows, hyper_of, info_of
from fedjax_async.engine.probing import noted as probed
from fedjax_async.engine.probing import noted_rounds as probed_rounds
from fedjax_async.engine.probing import values_of
from fedjax_async.engine.world import World, client_data
from fedjax_async.server import closed
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State


def read_rows(table: Any, index: Array) -> Any:
    """:func:`tree.gather`, as a loop of one turn of its own, from a table that the same turn of a loop writes.

    XLA:CPU fuses a plain read into whatever uses it, also into what comes after the write; to be able to, it
    copies the whole table at every turn (90 ms instead of 1 at 1,000 rows of 50,000). It does not fuse loops.
    """
    nothing = jax.tree.map(lambda leaf: jnp.zeros(index.shape + leaf.shape[1:], leaf.dtype), table)
    once = jnp.minimum(jnp.max(index) + 1, 1)  # one, though the compiler cannot know
    return jax.lax.fori_loop(0, once, lambda _, row: tree.gather(table, index), nothing)


def state_of(world: World, states: State, run: Array) -> State:
    """The server state of a run."""
    return states if len(world.key) == 1 else tree.gather(states, run)


class Known(NamedTuple):
    """What the compiled programs are told of a stack's runs; equal for all of them."""

    num_clients: int
    every_closes: bool  # every arrival completes its server step
    all_applied: bool  # there are no jobs that are trained in vain
    probes: tuple[tuple[str, Callable[..., Any]], ...] = ()  # names and functions


def rule_at(server: Server, world: World, known: Known, run: Array) -> ServerAlgorithm:
    """The server rule of a run."""
    only = len(world.key) == 1
    updates, steps = (column[0 if only else run] for column in (world.updates, world.server_steps))
    return rule_of(server, hyper_of(world, run), Facts(known.num_clients, known.every_closes, updates, steps))


def request_of(world: World, known: Known, write: Array) -> Request:
    """What the message of write ``write`` is asked for."""
    return Request(
        client=world.write_owner[write] % known.num_clients,
        time=world.write_time[write],
        version=world.write_version[write],
        local_steps=world.write_steps[write],
        weight=world.write_weight[write],
    )


def send_one(
    server: Server, world: World, known: Known, state: State, memory: State, write: Array
) -> tuple[Message, State]:
    """The message of write ``write`` and the server's row about its client afterwards."""
    run = world.write_run[write]
    before = read_rows(memory, world.write_owner[write])
    rule = rule_at(server, world, known, run)
    message, after = rule.dispatch(state_of(world, state, run), before, request_of(world, known, write))
    return message._replace(version=jnp.int32(0)), after


def write_messages(server: Server, world: World, known: Known, live: Live, position: Array) -> Live:
    """Send the messages due after ``position`` arrivals: write them to their slots."""

    def send(j: Array, live: Live) -> Live:
        message, memory = send_one(server, world, known, live.server, live.memory, j)
        return live._replace(
            memory=tree.scatter(live.memory, world.write_owner[j], memory),
            slots=tree.scatter(live.slots, world.write_slot[j], message),
        )

    return jax.lax.fori_loop(world.write_bounds[position], world.write_bounds[position + 1], send, live)


def make_start(server: Server, client: Client, known: Known, slots: int) -> Any:
    """``start(world, params) -> live``: server states, memory and client rows, and the first messages.

    ``params``: [R, ...], without the axis where R = 1.
    """

    def start(world: World, params: Params) -> Live:
        runs = len(world.key)

        def begin(hyper: dict[str, Array], run: Array, params: Params) -> tuple[State, State, State]:
            return *rule_at(server, world, known, run).init(params), bound(client, hyper).init(params)

        def rows_of(one: State) -> State:
            """A row a client from a row a run."""

            def rows(leaf: Array) -> Array:
                leaf = leaf[None] if runs == 1 else leaf
                each = jnp.broadcast_to(leaf[:, None], (runs, known.num_clients, *leaf.shape[1:]))
                return each.reshape(runs * known.num_clients, *leaf.shape[1:])

            return jax.tree.map(rows, one)

        first, zero = hyper_of(world, jnp.int32(0)), jnp.int32(0)
        if runs == 1:
            state, memory, own = begin(first, zero, params)
            example = (state, memory, own)
        else:
            state, memory, own = jax.vmap(begin)(world.hyper, jnp.arange(runs, dtype=jnp.int32), params)
            example = tree.gather((state, memory, own), 0)
        rule = rule_at(server, world, known, zero)
        message, _ = rule.dispatch(*example[:2], request_of(world, known, zero))
        message = message._replace(version=zero)

        def both(state: State, memory: State, own: State, message: Message) -> Any:
            who = bound(client, first)
            work = who.begin(world.key[0], message, own, client_data(world, zero))
            upload, after = who.finish(work, message, own)
            arrival = _arrival(world, upload, message, zero, jnp.bool_(True))
            seen = values_of(known.probes, world, zero, state, memory, arrival)
            return rule.receive(state, memory, arrival)[2], info_of(who, after), seen

        info, sent, seen = jax.eval_shape(both, *example, message)
        columns = _columns(info)
        check.require(not set(columns) & set(sent), "client.info", list(sent), f"named other than {list(columns)}")
        length = world.client.shape[0]
        records = {name: jnp.zeros((length, *leaf.shape), leaf.dtype) for name, leaf in (columns | sent).items()}
        records |= {"upload_norm": jnp.zeros(length), "accepted": jnp.zeros(length, jnp.bool_)}
        table = tree.stack_zeros(message, slots)
        live = Live(state, rows_of(memory), rows_of(own), table, records, zero, tree.stack_zeros(seen, length))
        return write_messages(server, world, known, live, zero)

    return start


def _columns(info: Info) -> dict[str, Any]:
    """What a rule records, by name."""
    return {"weight": info.weight, **info.columns}


def _arrival(world: World, upload: Any, message: Message, position: Array, accepted: Array) -> Arrival:
    """What the server is given of the upload that arrives at ``position``."""
    return Arrival(
        upload=upload,
        start=message.params,
        staleness=world.staleness[position],
        weight=jnp.where(accepted, world.size[position], 0).astype(jnp.result_type(float)),
        client=world.client[position],
        time=world.time[position],
        closes=world.closes[position],
        local_steps=world.steps[position],
        extra=message.extra,
    )


def _arrived(world: World, rows: Rows, position: Array) -> Arrival:
    """The same, from the buffers of its batch."""
    row = world.row[position]
    upload, message = tree.gather((rows.upload, rows.message), row)
    return _arrival(world, upload, message, position, rows.accepted[row])


def make_receive(server: Server, known: Known) -> Any:
    """``receive(world, live, rows, span) -> (live, rejected)``: apply the positions ``span[0] .. span[1]-1``.

    ``rejected`` (so far) is a copy that outlives the donation of ``live``: waiting for it tells the
    host how far the device has come.
    """

    def applied(world: World, rows: Rows, p: Array, live: Live) -> Live:
        row, owner, run = world.row[p], world.owner[p], world.run[p]
        accepted = rows.accepted[row]
        arrival = _arrived(world, rows, p)
        rule = rule_at(server, world, known, run)
        state, memory = state_of(world, live.server, run), read_rows(live.memory, owner)
        seen = probed(known.probes, world, live.probes, p, state, memory, arrival)
        state, memory, info = rule.receive(state, memory, arrival)
        if known.every_closes:
            state, memory = closed(rule, state, memory)
        elif rule.close is not None:
            state, memory = tree.when(arrival.closes, lambda both: closed(rule, *both), (state, memory))
        noted = _columns(info) | {"upload_norm": rows.norm[row], "accepted": accepted}
        return live._replace(
            server=state if len(world.key) == 1 else tree.scatter(live.server, run, state),
            memory=tree.scatter(live.memory, owner, memory),
            records=live.records | {name: live.records[name].at[p].set(value) for name, value in noted.items()},
            rejected=live.rejected + jnp.logical_not(accepted).astype(jnp.int32),
            probes=seen,
        )

    def one(world: World, rows: Rows, p: Array, live: Live) -> Live:
        row = world.row[p]
        if known.all_applied:
            live = applied(world, rows, p, live)
        else:
            live = tree.when(world.applied[p], lambda live: applied(world, rows, p, live), live)
        sent = {name: live.records[name].at[p].set(values[row]) for name, values in rows.info.items()}
        live = live._replace(
            clients=tree.scatter(live.clients, world.owner[p], tree.gather(rows.after, row)),
            records=live.records | sent,
        )
        return write_messages(server, world, known, live, p + 1)

    def receive(world: World, live: Live, rows: Rows, span: Array) -> tuple[Live, Array]:
        live = jax.lax.fori_loop(span[0], span[1], lambda p, live: one(world, rows, p, live), live)
        return live, live.rejected + 0

    return receive


def make_receive_rounds(server: Server, known: Known) -> Any:
    """The same as :func:`make_receive` for the rounds ``span[0] .. span[1]-1``, all runs of a round at once."""

    def gathered(world: World, run: Array, state: State, memory: State, arrival: Arrival) -> Any:
        rule = rule_at(server, world, known, run)
        state, memory, info = rule.receive(state, memory, arrival)
        return *(closed(rule, state, memory) if known.every_closes else (state, memory)), info

    def closing(world: World, run: Array, state: State, memory: State, closes: Array) -> Any:
        after = closed(rule_at(server, world, known, run), state, memory)
        return tree.where(closes, after, (state, memory))

    def one_round(world: World, rows: Rows, k: Array, live: Live) -> Live:
        runs = len(world.key)
        lane = jnp.arange(runs, dtype=jnp.int32)
        low, high = world.rounds[k], world.rounds[k + 1]
        p = jnp.minimum(low + lane, high - 1)
        active = low + lane < high
        row, owner, run = world.row[p], world.owner[p], world.run[p]
        arrives = active if known.all_applied else active & world.applied[p]
        accepted = rows.accepted[row]
        arrival = jax.vmap(lambda p: _arrived(world, rows, p))(p)
        before = tree.gather(live.server, run), read_rows(live.memory, owner)
        seen = probed_rounds(known.probes, world, live.probes, p, arrives, *before, arrival)
        state, memory, info = jax.vmap(gathered, in_axes=(None, 0, 0, 0, 0))(world, run, *before, arrival)
        if not known.every_closes:
            closes = arrival.closes & arrives

            def close(both: Any) -> Any:
                state, memory = both
                return jax.vmap(closing, in_axes=(None, 0, 0, 0, 0))(world, run, state, memory, closes)

            state, memory = tree.when(jnp.any(closes), close, (state, memory))
        noted = _columns(info) | {"upload_norm": rows.norm[row], "accepted": accepted}
        sent = tree.gather(rows.info, row)
        live = live._replace(
            server=tree.scatter_where(live.server, run, state, arrives),
            memory=tree.scatter_where(live.memory, owner, memory, arrives),
            clients=tree.scatter_where(live.clients, owner, tree.gather(rows.after, row), active),
            records=tree.scatter_where({n: live.records[n] for n in noted}, p, noted, arrives)
            | tree.scatter_where({n: live.records[n] for n in sent}, p, sent, active),
            rejected=live.rejected + jnp.sum(arrives & ~accepted).astype(jnp.int32),
            probes=seen,
        )
        return write_due(world, live, world.write_bounds[low + 1], world.write_bounds[high + 1], lane)

    def write_due(world: World, live: Live, low: Array, high: Array, lane: Array) -> Live:
        """All messages due after a round, as many at a time as there are runs."""

        def some(i: Array, live: Live) -> Live:
            j = jnp.minimum(low + i * len(lane) + lane, high - 1)
            active = low + i * len(lane) + lane < high
            message, memory = jax.vmap(lambda j: send_one(server, world, known, live.server, live.memory, j))(j)
            return live._replace(
                memory=tree.scatter_where(live.memory, world.write_owner[j], memory, active),
                slots=tree.scatter_where(live.slots, world.write_slot[j], message, active),
            )

        return jax.lax.fori_loop(0, -((low - high) // len(lane)), some, live)

    def receive(world: World, live: Live, rows: Rows, span: Array) -> tuple[Live, Array]:
        live = jax.lax.fori_loop(span[0], span[1], lambda k, live: one_round(world, rows, k, live), live)
        return live, live.rejected + 0

    return receive
