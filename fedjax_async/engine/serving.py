"""The server's part of a run as compiled programs: start and receive."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.engine.components import Client, Server, bound
from fedjax_async.engine.flat import FlatServer, opened
from fedjax_async.engine.kernels import Carry, JobBuffers, client_rows, hyper_of
from fedjax_async.engine.probing import ProbeTables, values_of
from fedjax_async.engine.probing import noted as probed
from fedjax_async.engine.probing import noted_ranks as probed_ranks
from fedjax_async.engine.sending import (
    facts_at,
    read_rows,
    request_of,
    rule_at,
    state_of,
    write_messages,
    write_together,
)
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import DeviceTables, client_data
from fedjax_async.local import arrival_key
from fedjax_async.server import begun, closed
from fedjax_async.types import Array, Arrival, Info, Message, Params, State

Received = tuple[State, State, Info]  # what a rule's ``receive`` returns


class Starting(NamedTuple):
    """The beginning of runs."""

    server: Server
    client: Client
    facts: StackFacts
    slots: int

    def start(self, tables: DeviceTables, params: Params) -> Carry:
        """The carry: server states, memory and client rows, and the first messages.

        ``params``: [R, ...], without the axis where R = 1.
        """
        facts, runs = self.facts, len(tables.key)
        zero, begin = jnp.int32(0), partial(self.begin, tables)
        if runs == 1:
            state, memory, own = begin(hyper_of(tables, zero), zero, params)
            example = (state, memory, own)
        else:
            state, memory, own = jax.vmap(begin)(tables.hyper, jnp.arange(runs, dtype=jnp.int32), params)
            example = tree.gather((state, memory, own), 0)
        rule = rule_at(self.server, tables, zero)
        message, _ = rule.dispatch(*example[:2], request_of(tables, facts, zero))
        message = message._replace(version=zero)
        info, sent, seen = jax.eval_shape(partial(self.one_job, tables), *example, message)
        columns = _columns(info)
        check.require(not set(columns) & set(sent), "client.info", list(sent), f"named other than {list(columns)}")
        length = tables.client.shape[0]
        records = {name: jnp.zeros((length, *leaf.shape), leaf.dtype) for name, leaf in (columns | sent).items()}
        records |= {"upload_norm": jnp.zeros(length), "accepted": jnp.zeros(length, jnp.bool_)}
        memory, own = jax.tree.map(partial(client_rows, runs, facts.num_clients), (memory, own))
        table = tree.stack_zeros(message, self.slots)
        carry = Carry(state, memory, own, table, records, zero, tree.stack_zeros(seen, length))
        return write_messages(self.server, tables, facts, carry, tables.write_bounds[0], tables.write_bounds[1])

    def begin(
        self, tables: DeviceTables, hyper: dict[str, Array], run: Array, params: Params
    ) -> tuple[State, State, State]:
        """The server's state, its memory about a client, and the state of a client of a run."""
        rule, facts = rule_at(self.server, tables, run), facts_at(tables, self.facts, run)
        return *begun(rule, params, facts), bound(self.client, hyper).init(params)

    def one_job(
        self, tables: DeviceTables, state: State, memory: State, kept: State, message: Message
    ) -> tuple[Info, dict[str, Array], ProbeTables]:
        """What is recorded of a job without local steps; used only for its shapes."""
        zero, facts = jnp.int32(0), self.facts
        who = bound(self.client, hyper_of(tables, zero))
        started = message._replace(local_steps=zero)
        work = who.begin(tables.key[0], started, kept, client_data(tables, zero))
        upload, after = who.finish(work, message, kept)
        arrival = _arrival(tables, upload, message, zero, jnp.bool_(True))
        seen = values_of(facts.probes, tables, zero, state, memory, arrival) if facts.probes else {}
        info = rule_at(self.server, tables, zero).receive(state, memory, arrival)[2]
        return info, {} if who.info is None else who.info(after), seen


def _columns(info: Info) -> dict[str, Array]:
    """The columns that a rule records."""
    return {"weight": info.weight, **info.columns}


def _arrival(tables: DeviceTables, upload: State, message: Message, position: Array, accepted: Array) -> Arrival:
    """The arrival of an upload at ``position``."""
    return Arrival(
        upload=upload,
        start=message.params,
        staleness=tables.staleness[position],
        weight=jnp.where(accepted, tables.size[position], 0).astype(jnp.result_type(float)),
        client=tables.client[position],
        time=tables.time[position],
        closes=tables.closes[position],
        local_steps=tables.steps[position],
        extra=message.extra,
        key=arrival_key(tables.key[tables.run[position]], tables.client[position], tables.number[position]),
        malicious=tables.malicious[position],
    )


def _arrived(tables: DeviceTables, carry: Carry, buffers: JobBuffers, position: Array) -> Arrival:
    """The arrival at ``position``, from the buffers of its lane."""
    row = tables.row[position]
    upload = tree.gather(buffers.left, row)
    # buffers hold no start models if the rule reads none: any message of the right shape will do
    message = tree.gather(*((buffers.started, row) if buffers.started else (carry.slots, 0)))
    return _arrival(tables, upload, message, position, buffers.accepted[row])


def check_shared_messages(
    server: Server, facts: StackFacts, tables: DeviceTables, carry: Carry, buffers: JobBuffers
) -> None:
    """Raise ``ValueError`` for a rule without memory whose messages change within a server step.

    All jobs of one version share the message of the first one. The arguments are arrays or their shapes.
    """
    if facts.every_closes or jax.tree.leaves(carry.memory):
        return

    flat = isinstance(server, FlatServer)
    plain = server.plain if isinstance(server, FlatServer) else server  # flat, a state would be read as a whole

    def received(state: State, tables: DeviceTables, carry: Carry, buffers: JobBuffers) -> State:
        arrival = _arrived(tables, carry, buffers, jnp.int32(0))
        arrival = opened(arrival) if flat else arrival
        return rule_at(plain, tables, jnp.int32(0)).receive(state, (), arrival)[0]

    def sent(state: State, tables: DeviceTables) -> Message:
        request = request_of(tables, facts, jnp.int32(0))
        return rule_at(plain, tables, jnp.int32(0)).dispatch(state, (), request)[0]

    state = jax.eval_shape(lambda tables, states: state_of(tables, states, jnp.int32(0)), tables, carry.server)
    state = jax.eval_shape(opened, state) if flat else state
    count = len(jax.tree.leaves(state))
    receiving = jax.make_jaxpr(received)(state, tables, carry, buffers).jaxpr
    read = tree.leaves_read(sent, state, tables)
    changed = [out is not given for out, given in zip(receiving.outvars, receiving.invars[:count])]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    both = [path for path, moves, seen in zip(paths, changed, read[:count]) if moves and seen]
    check.require(
        not both,
        "rule",
        f"state{both[0]} changes in receive and is read by dispatch" if both else "",
        "one that changes what it sends only in close, or that has a memory (jnp.zeros(()) will do), where a server "
        "step has several arrivals",
    )


def reads_starts(server: Server, facts: StackFacts, tables: DeviceTables, carry: Carry, buffers: JobBuffers) -> bool:
    """Whether the rule, or a probe, may read the messages that jobs started from; takes arrays or their shapes."""

    def received(message: Message, tables: DeviceTables, carry: Carry, buffers: JobBuffers) -> Received:
        position = jnp.int32(0)
        run = tables.run[position]
        state, memory = state_of(tables, carry.server, run), tree.gather(carry.memory, 0)
        arrival = _arrived(tables, carry, buffers._replace(started=message), position)
        return rule_at(server, tables, run).receive(state, memory, arrival)

    read = tree.leaves_read(received, buffers.started, tables, carry, buffers)
    return bool(facts.probes) or any(read[: len(jax.tree.leaves(buffers.started))])


# Operations of an arrival, as traced. Several longer ones (ResNet-18 has 2,333) in a pass would take long to compile,
# and the pass of the loop is the smaller part of what they cost.
SHORT = 500


class Receiver(NamedTuple):
    """Receives uploads one after the other."""

    server: Server
    facts: StackFacts

    def receive(self, tables: DeviceTables, carry: Carry, buffers: JobBuffers, span: Array) -> tuple[Carry, Array]:
        """``(carry, rejected)``: apply the positions ``span[0] .. span[1]-1``.

        ``rejected``: int32[], uploads rejected so far; a copy that outlives the donation of ``carry``. By waiting for
        it, the host learns how far the device has come.
        """
        low, high = span[0], span[1]
        if self.facts.grouped:

            def further(held: tuple[Array, Carry]) -> tuple[Array, Carry]:
                return self.group(tables, buffers, held[0], high, held[1])

            with jax.named_scope("loop:groups"):
                _, carry = jax.lax.while_loop(lambda held: held[0] < high, further, (low, carry))
        else:
            carry = self.arrivals(tables, buffers, low, high, carry)
        if jax.default_backend() != "cpu":  # there a call's share of several costs less than a write
            carry = noted_jobs(tables, buffers, low, high, len(buffers.norm), carry)
        return carry, carry.rejected + 0

    def group(
        self, tables: DeviceTables, buffers: JobBuffers, low: Array, high: Array, carry: Carry
    ) -> tuple[Array, Carry]:
        """Receive the positions from ``low`` to the end of its group, or to ``high``; then close and send."""
        end = jnp.minimum(tables.group_end[low], high)
        carry = self.arrivals(tables, buffers, low, end, carry)
        p = end - 1  # if the group goes on after it, it closes nothing and nothing is due
        rule, owner = rule_at(self.server, tables, tables.run[p]), tables.owner[p]
        if not self.facts.every_closes and rule.close is not None:
            before = carry.server, tree.gather(carry.memory, owner)
            closes = tables.closes[p] & tables.applied[p]
            state, memory = tree.where(closes, closed(rule, *before), before)
            carry = carry._replace(server=state, memory=tree.scatter(carry.memory, owner, memory))
        return end, self.answered(tables, p, carry)

    def arrivals(self, tables: DeviceTables, buffers: JobBuffers, low: Array, high: Array, carry: Carry) -> Carry:
        """Receive the positions ``low .. high-1``, ``facts.at_once`` of them in a pass if an arrival is ``SHORT``."""
        many = self.facts.at_once
        if many > 1:
            traced = jax.make_jaxpr(lambda p, carry: self.one(tables, buffers, p, carry))(low, carry)
            many = many if tree.num_operations(traced.jaxpr) <= SHORT else 1
        if many == 1:
            return tree.loop("arrivals", low, high, lambda p, carry: self.one(tables, buffers, p, carry), carry)

        def some(i: Array, carry: Carry) -> Carry:
            for p in [low + many * i + k for k in range(many)]:
                carry = self.one(tables, buffers, jnp.minimum(p, high - 1), carry, p < high)
            return carry

        name = f"arrivals {'of a group ' if self.facts.grouped else ''}by {many}"
        return tree.loop(name, 0, (high - low + many - 1) // many, some, carry)

    def one(
        self, tables: DeviceTables, buffers: JobBuffers, p: Array, carry: Carry, active: Array | None = None
    ) -> Carry:
        """Receive position ``p``; if not ``active``, receive it once more without effect."""
        if self.facts.all_applied:
            carry = self.applied(tables, buffers, p, active, carry)
        else:
            carry = tree.when(tables.applied[p], lambda carry: self.applied(tables, buffers, p, None, carry), carry)
        if jax.default_backend() == "cpu":
            carry = noted_jobs(tables, buffers, p, p + 1, 1, carry)
        after = tree.gather(buffers.after, tables.row[p])
        carry = carry._replace(clients=tree.scatter(carry.clients, tables.owner[p], after))
        return carry if self.facts.grouped else self.answered(tables, p, carry, active)

    def applied(self, tables: DeviceTables, buffers: JobBuffers, p: Array, active: Array | None, carry: Carry) -> Carry:
        """Apply the upload of position ``p`` to the server's state."""
        facts, owner, run = self.facts, tables.owner[p], tables.run[p]
        arrival = _arrived(tables, carry, buffers, p)
        rule = rule_at(self.server, tables, run)
        before = state_of(tables, carry.server, run), read_rows(carry.memory, owner)
        seen = probed(facts.probes, tables, carry.probes, p, *before, arrival) if facts.probes else carry.probes
        state, memory, info = rule.receive(*before, arrival)
        if facts.every_closes:
            state, memory = closed(rule, state, memory)
        elif rule.close is not None and not facts.grouped:
            state, memory = tree.when(arrival.closes, lambda both: closed(rule, *both), (state, memory))
        if active is not None:
            state, memory = tree.where(active, (state, memory), before)
            p = jnp.where(active, p, len(tables.row) - 1)  # a row of padding
        noted = {name: carry.records[name].at[p].set(value) for name, value in _columns(info).items()}
        return carry._replace(
            server=state if len(tables.key) == 1 else tree.scatter(carry.server, run, state),
            memory=tree.scatter(carry.memory, owner, memory),
            records=carry.records | noted,
            probes=seen,
        )

    def answered(self, tables: DeviceTables, p: Array, carry: Carry, active: Array | None = None) -> Carry:
        """Send what is due after position ``p``; nothing if not ``active``."""
        low, high = tables.write_bounds[p + 1], tables.write_bounds[p + 2]
        high = high if active is None else jnp.where(active, high, low)
        return write_messages(self.server, tables, self.facts, carry, low, high, self.facts.messages)


def noted_jobs(tables: DeviceTables, buffers: JobBuffers, low: Array, high: Array, most: int, carry: Carry) -> Carry:
    """Record, for the positions ``low .. high-1``, what was known of their jobs before the server received them.

    They are at most ``most``, which is at most the number of rows: the columns have room for that many more positions.
    """
    p = low + jnp.arange(most, dtype=jnp.int32)
    row, inside = tables.row[p], p < high
    arrived = inside & tables.applied[p]

    def written(name: str, values: Array, there: Array) -> Array:
        column = carry.records[name]
        before = jax.lax.dynamic_slice_in_dim(column, low, most)
        after = jnp.where(there.reshape(most, *(1 for _ in before.shape[1:])), values, before)
        return jax.lax.dynamic_update_slice_in_dim(column, after, low, 0)

    norm = buffers.norm[row]
    records = {name: written(name, values[row], inside) for name, values in buffers.info.items()}
    came = jnp.isfinite(norm) & jnp.logical_not(tables.corrupt[p])  # of other uploads, no norm is known: 0
    records["upload_norm"] = written("upload_norm", jnp.where(came, norm, 0.0), arrived)
    records["accepted"] = written("accepted", buffers.accepted[row], arrived)
    rejected = jnp.sum(arrived & ~buffers.accepted[row]).astype(jnp.int32)
    return carry._replace(records=carry.records | records, rejected=carry.rejected + rejected)


class RankReceiver(NamedTuple):
    """As :class:`Receiver`, for the ranks ``span[0] .. span[1]-1``; the arrivals of a rank are applied at once."""

    server: Server
    facts: StackFacts

    def received(self, tables: DeviceTables, run: Array, state: State, memory: State, arrival: Arrival) -> Received:
        """What a run's rule makes of an arrival."""
        rule = rule_at(self.server, tables, run)
        state, memory, info = rule.receive(state, memory, arrival)
        return *(closed(rule, state, memory) if self.facts.every_closes else (state, memory)), info

    def closing(
        self, tables: DeviceTables, run: Array, state: State, memory: State, closes: Array
    ) -> tuple[State, State]:
        """State and memory, after the step is closed where it ``closes``."""
        after = closed(rule_at(self.server, tables, run), state, memory)
        return tree.where(closes, after, (state, memory))

    def one_rank(self, tables: DeviceTables, buffers: JobBuffers, k: Array, carry: Carry) -> Carry:
        """Receive rank ``k``."""
        runs = len(tables.key)
        index = jnp.arange(runs, dtype=jnp.int32)
        low, high = tables.ranks[k], tables.ranks[k + 1]
        p = jnp.minimum(low + index, high - 1)
        active = low + index < high
        row, owner, run = tables.row[p], tables.owner[p], tables.run[p]
        arrives = active if self.facts.all_applied else active & tables.applied[p]
        arrival = jax.vmap(lambda p: _arrived(tables, carry, buffers, p))(p)
        before = tree.gather(carry.server, run), read_rows(carry.memory, owner)
        seen = probed_ranks(self.facts.probes, tables, carry.probes, p, arrives, *before, arrival)
        state, memory, info = jax.vmap(self.received, in_axes=(None, 0, 0, 0, 0))(tables, run, *before, arrival)
        if not self.facts.every_closes:
            closes = arrival.closes & arrives

            def close(both: tuple[State, State]) -> tuple[State, State]:
                state, memory = both
                return jax.vmap(self.closing, in_axes=(None, 0, 0, 0, 0))(tables, run, state, memory, closes)

            state, memory = tree.when(jnp.any(closes), close, (state, memory))
        noted = _columns(info)
        carry = carry._replace(
            server=tree.scatter_where(carry.server, run, state, arrives),
            memory=tree.scatter_where(carry.memory, owner, memory, arrives),
            clients=tree.scatter_where(carry.clients, owner, tree.gather(buffers.after, row), active),
            records=carry.records | tree.scatter_where({n: carry.records[n] for n in noted}, p, noted, arrives),
            probes=seen,
        )
        due = tables.write_bounds[low + 1], tables.write_bounds[high + 1]
        if self.facts.messages is not None or self.facts.in_turn:
            return write_messages(self.server, tables, self.facts, carry, *due, self.facts.messages)

        def some(i: Array, carry: Carry) -> Carry:
            return write_together(self.server, tables, self.facts, carry, due[0] + i * runs, due[1], runs)

        return tree.loop("messages of a rank", 0, -((due[0] - due[1]) // runs), some, carry)

    def receive(self, tables: DeviceTables, carry: Carry, buffers: JobBuffers, span: Array) -> tuple[Carry, Array]:
        """The program."""
        carry = tree.loop("ranks", span[0], span[1], lambda k, carry: self.one_rank(tables, buffers, k, carry), carry)
        low, high = tables.ranks[span[0]], tables.ranks[span[1]]
        carry = noted_jobs(tables, buffers, low, high, len(buffers.norm), carry)
        return carry, carry.rejected + 0
