"""The compute events of nodes as jobs of the engine: they mix, train and push; ``write`` stores what they leave.

``kernels.py`` trains them, into the buffers of a lane; ``write`` copies the results to the nodes and to the slots. The
algorithms that both call see one node at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.engine.components import Client, Peer, bound
from fedjax_async.engine.flat import opened
from fedjax_async.engine.kernels import (
    Carry,
    FinishedJob,
    Hypers,
    JobBuffers,
    Readable,
    client_rows,
    finished,
    hyper_of,
    mapped,
)
from fedjax_async.engine.peer_points import RESERVED
from fedjax_async.engine.peer_probes import EVENT
from fedjax_async.engine.probes import checked
from fedjax_async.engine.tables import PeerTables, client_data, parts_at
from fedjax_async.local import job_key
from fedjax_async.peers import Event, PeerAlgorithm
from fedjax_async.types import Array, ClientAlgorithm, Message, Params, State

Noted = dict[str, dict[str, Array]]  # probe -> column -> value


class Slots(NamedTuple):
    """Messages that will still be read, as they were sent."""

    message: State  # [S, ...]
    finite: Array  # bool[S]; a message that is not finite is never mixed


class Woken(NamedTuple):
    """An event between mixing and pushing."""

    row: State
    refused: Array  # int32[], messages of its inbox that were not added
    seen: Noted


class Left(NamedTuple):
    """What an event leaves."""

    messages: State  # [F, ...]
    finite: Array  # bool[F]
    row: State  # of the node, after the event
    seen: Noted


class NodeJobs(NamedTuple):
    """The events of nodes: a ``kernels.JobKind``. The ``memory`` of a carry is the nodes' rows, slots hold messages."""

    peer: Peer
    client: Client
    probes: tuple[tuple[str, Callable[..., Mapping[str, Array]]], ...] = ()  # names and functions
    longest: int = 1  # the longest inbox, or more, where programs depend on it: off a CPU, and for probes

    def at(self, tables: PeerTables, run: Array) -> tuple[PeerAlgorithm, ClientAlgorithm]:
        """Peer and client with the hyperparameters of a run."""
        hyper = hyper_of(tables, run)
        return bound(self.peer, hyper), bound(self.client, hyper)

    def read(self, tables: PeerTables, rows: Readable, position: Array, active: Array) -> tuple[Woken, State]:
        """The node's row after it has mixed its inbox."""
        row, before = tree.gather((rows.memory, rows.clients), tables.owner[position])
        low = tables.inbox_bounds[position]
        high = jnp.where(active, tables.inbox_bounds[position + 1], low)

        def wakes(hyper: Hypers, row: State, position: Array, low: Array, high: Array) -> tuple[State, Array]:
            return mixed(bound(self.peer, hyper), tables, rows.slots, row, position, low, high, self.longest)

        hyper = hyper_of(tables, tables.run[position])
        if jnp.ndim(position):
            seen = _probed(self, tables, rows.slots, row, position, active)
            row, refused = mapped(wakes, hyper, row, position, low, high)
            return Woken(row, refused, seen), before
        alone = jax.tree.map(lambda leaf: leaf[None], row)
        seen = _probed(self, tables, rows.slots, alone, position[None], active[None])
        row, refused = wakes(hyper, row, position, low, high)
        return Woken(row, refused, tree.gather(seen, 0)), before

    def message(self, hyper: Hypers, tables: PeerTables, started: Woken, position: Array) -> Message:
        """The message from which a woken node trains; its version counts the node's own events."""
        message: Message = bound(self.peer, hyper).start(started.row)._replace(version=tables.number[position])
        return message

    def end(
        self, hyper: Hypers, tables: PeerTables, started: Woken, before: State, work: State, position: Array
    ) -> FinishedJob:
        """The node's row and its messages after the push."""
        peer, client = bound(self.peer, hyper), bound(self.client, hyper)
        message = self.message(hyper, tables, started, position)
        yes, no, limit = jnp.bool_(True), jnp.bool_(False), tables.norm_limit[tables.run[position]]
        upload, after, norm, accepted, info = finished(client, work, message, before, limit, no, yes)
        row, messages, columns = peer.push(started.row, upload, event_of(tables, position))
        both = set(columns) & set(info) | (set(columns) | set(info)) & set(RESERVED)
        check.require(not both, "columns of peer.push and client.info", sorted(both), "named differently")
        columns = {**info, **columns, "refused_messages": started.refused}
        finite = jax.vmap(tree.is_finite)(messages)
        norm = jnp.where(jnp.isfinite(norm), norm, 0.0)
        return Left(messages, finite, row, started.seen), after, norm, accepted, columns


# --- one event -------------------------------------------------------------------------------
def mixed(
    peer: PeerAlgorithm, tables: PeerTables, slots: Slots, row: State, position: Array, low: Array, high: Array,
    longest: int,
) -> tuple[State, Array]:  # fmt: skip
    """The node's row after the event at ``position`` has mixed the entries ``low .. high-1`` of the inboxes.

    Also how many of them it refused. They are at most ``longest``: off a CPU the loop has this length, because an
    accelerator would ask the host after each pass of a loop whose length it does not know. Then short inboxes take as
    many passes as the longest one of the plan.
    """

    def one(d: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        inbox, refused = carry
        there, d = d < high, jnp.minimum(d, len(tables.inbox_slot) - 1)
        slot, weight = tables.inbox_slot[d], tables.inbox_weight[d]
        good = there & slots.finite[slot] & jnp.logical_not(tables.inbox_corrupt[d])

        def added(inbox: State) -> State:
            return peer.add(inbox, row, tree.gather(slots.message, slot), weight)

        return tree.when(good, added, inbox), refused + (there & jnp.logical_not(good)).astype(jnp.int32)

    start = peer.open(row), jnp.int32(0)
    if jax.default_backend() == "cpu":
        inbox, refused = tree.loop("inbox", low, high, one, start)
    else:
        inbox, refused = tree.loop("inbox", 0, longest, lambda k, carry: one(low + k, carry), start)
    return peer.wake(row, inbox, event_of(tables, position)), refused


def event_of(tables: PeerTables, position: Array) -> Event:
    """What a node knows of its event at ``position``."""
    key = job_key(tables.key[tables.run[position]], tables.client[position], tables.number[position])
    return Event(key, tables.mass[position], tables.kept[position])


def values_of(what: NodeJobs, tables: PeerTables, slots: Slots, row: State, position: Array) -> Noted:
    """The columns of every probe at the event at ``position``."""
    low, high = tables.inbox_bounds[position], tables.inbox_bounds[position + 1]
    entry = jnp.minimum(low + jnp.arange(what.longest, dtype=jnp.int32), len(tables.inbox_slot) - 1)
    slot = tables.inbox_slot[entry]
    good = (entry < high) & slots.finite[slot] & jnp.logical_not(tables.inbox_corrupt[entry])
    weights = jnp.where(good, tables.inbox_weight[entry], 0)
    messages = opened(tree.gather(slots.message, slot))
    given = (opened(row), messages, weights, parts_at(tables, position))
    return {name: checked(name, function, EVENT)(*given) for name, function in what.probes}


def _probed(what: NodeJobs, tables: PeerTables, slots: Slots, rows: State, position: Array, active: Array) -> Noted:
    """The columns of every probe at the events at ``position`` (int32[W]); zeros where none of them is chosen."""
    seen = {}
    for name, function in what.probes:
        one = what._replace(probes=((name, function),))

        def values(rows: State, one: NodeJobs = one, name: str = name) -> dict[str, Array]:
            return jax.vmap(lambda row, position: values_of(one, tables, slots, row, position)[name])(rows, position)

        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(values, rows))
        chosen = jnp.any(tables.chosen[name][position] & active)
        seen[name] = jax.lax.cond(chosen, values, lambda _, nothing=nothing: nothing, rows)
    return seen


# --- what events leave, and the beginning ----------------------------------------------------
def make_write(one_by_one: bool) -> Callable[[PeerTables, Carry, JobBuffers, Array], tuple[Carry, Array]]:
    """``write(tables, carry, buffers, span) -> (carry, rejected)``: apply the positions ``span[0] .. span[1]-1``.

    ``rejected``: int32[], uploads rejected so far; a copy that outlives the donation of ``carry``. ``one_by_one``: one
    event after the other, which is best on a CPU; else all at once, where each launch costs more than a row. The
    positions belong to one turn, so they write to different nodes and slots.
    """

    def at_once(tables: PeerTables, buffers: JobBuffers, low: Array, high: Array, carry: Carry) -> Carry:
        p = low + jnp.arange(len(buffers.norm), dtype=jnp.int32)
        active, row, left, slot = p < high, tables.row[p], buffers.left, tables.slot[p]
        after = tree.gather((left.row, buffers.after), row)
        sent = tree.gather(Slots(left.messages, left.finite), row)
        sent = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), sent)
        accepted = buffers.accepted[row]
        noted = tree.gather(buffers.info, row) | {"upload_norm": buffers.norm[row], "accepted": accepted}
        seen = tree.gather(left.seen, row)
        memory, clients = tree.scatter_where((carry.memory, carry.clients), tables.owner[p], after, active)
        records, probes = tree.scatter_where((carry.records, carry.probes), p, (noted, seen), active)
        return Carry(
            server=(),
            memory=memory,
            clients=clients,
            slots=tree.scatter_where(carry.slots, slot.ravel(), sent, (active[:, None] & (slot >= 0)).ravel()),
            records=records,
            rejected=carry.rejected + jnp.sum(active & ~accepted).astype(jnp.int32),
            probes=probes,
        )

    def one(tables: PeerTables, buffers: JobBuffers, p: Array, carry: Carry) -> Carry:
        row, left = tables.row[p], buffers.left
        accepted = buffers.accepted[row]

        def send(fragment: Array, slots: Slots) -> Slots:
            slot = tables.slot[p, fragment]

            def put(slots: Slots) -> Slots:
                return tree.scatter(slots, slot, Slots(*tree.gather((left.messages, left.finite), (row, fragment))))

            return tree.when(slot >= 0, put, slots)

        noted = tree.gather(buffers.info, row) | {"upload_norm": buffers.norm[row], "accepted": accepted}
        after = tree.gather((left.row, buffers.after), row)
        memory, clients = tree.scatter((carry.memory, carry.clients), tables.owner[p], after)
        return Carry(
            server=(),
            memory=memory,
            clients=clients,
            slots=jax.lax.fori_loop(0, tables.slot.shape[1], send, carry.slots),
            records=tree.scatter(carry.records, p, noted),
            rejected=carry.rejected + jnp.logical_not(accepted).astype(jnp.int32),
            probes=tree.scatter(carry.probes, p, tree.gather(left.seen, row)),
        )

    def write(tables: PeerTables, carry: Carry, buffers: JobBuffers, span: Array) -> tuple[Carry, Array]:
        if one_by_one:
            carry = tree.loop("arrivals", span[0], span[1], lambda p, carry: one(tables, buffers, p, carry), carry)
        else:
            carry = at_once(tables, buffers, span[0], span[1], carry)
        return carry, carry.rejected + 0

    return write


def first_event(what: NodeJobs, tables: PeerTables, params: Params) -> FinishedJob:
    """What the first event leaves, without mixing and local steps; used only for its shapes."""
    if len(tables.key) > 1:
        params = tree.gather(params, 0)
    zero = jnp.int32(0)
    peer, client = what.at(tables, zero)
    before, row, hyper = client.init(params), peer.init(params), hyper_of(tables, zero)
    woken = Woken(peer.wake(row, peer.open(row), event_of(tables, zero)), zero, {})
    message = what.message(hyper, tables, woken, zero)._replace(local_steps=zero)
    work = client.begin(tables.key[0], message, before, client_data(tables, zero))
    sent = what.end(hyper, tables, woken, before, work, zero)[0].messages
    woken = woken._replace(seen=values_of(what, tables, Slots(sent, jnp.ones(1, jnp.bool_)), row, zero))
    return what.end(hyper, tables, woken, before, work, zero)


def make_peer_start(what: NodeJobs, nodes: int, slots: int) -> Callable[[PeerTables, Params], Carry]:
    """``start(tables, params) -> carry``: all nodes of a run have the same model, and nothing has been sent.

    ``params``: [R, ...]; without the axis where R = 1.
    """

    def start(tables: PeerTables, params: Params) -> Carry:
        runs, length = len(tables.key), len(tables.client)
        shapes = jax.eval_shape(lambda tables, params: first_event(what, tables, params), tables, params)
        left, _, norm, accepted, columns = shapes

        def node(run: Array, params: Params) -> tuple[State, State]:
            peer, client = what.at(tables, run)
            return peer.init(params), client.init(params)

        made = node(jnp.int32(0), params) if runs == 1 else jax.vmap(node)(jnp.arange(runs, dtype=jnp.int32), params)
        message = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), left.messages)
        memory, clients = jax.tree.map(lambda leaf: client_rows(runs, nodes, jnp.asarray(leaf)), made)
        return Carry(
            server=(),
            memory=memory,
            clients=clients,
            slots=Slots(tree.stack_zeros(message, slots), jnp.zeros(slots, jnp.bool_)),
            records=tree.stack_zeros(columns | {"upload_norm": norm, "accepted": accepted}, length),
            rejected=jnp.int32(0),
            probes=tree.stack_zeros(left.seen, length),
        )

    return start
