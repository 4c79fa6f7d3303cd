"""The compute events of nodes as compiled programs: ``train`` mixes, trains and pushes; ``write`` stores the results.

``train`` leaves the results in the buffers of its lane, ``write`` copies them to the nodes and to the slots. The
algorithms that both call see one node at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.engine.components import Client, Peer, bound
from fedjax_async.engine.kernels import device_index, finished, hyper_of, make_advance, run_segment
from fedjax_async.engine.peer_probes import EVENT
from fedjax_async.engine.peer_result import RESERVED
from fedjax_async.engine.peer_tables import PeerTables
from fedjax_async.engine.probes import checked
from fedjax_async.engine.tables import client_data
from fedjax_async.local import job_key, run_steps
from fedjax_async.peers import Event, PeerAlgorithm
from fedjax_async.types import Array, ClientAlgorithm, ClientData, DataParts, Key, Message, Params, State

Noted = dict[str, dict[str, Array]]  # probe -> column -> value


class Algorithms(NamedTuple):
    """What the compiled programs of a run depend on."""

    peer: Peer
    client: Client
    probes: tuple[tuple[str, Callable[..., Any]], ...] = ()  # names and functions
    longest: int = 1  # L, the longest inbox that a probe sees

    def at(self, tables: PeerTables, run: Array) -> tuple[PeerAlgorithm, ClientAlgorithm]:
        """Peer and client with the hyperparameters of a run."""
        return self.given(hyper_of(tables, run))

    def given(self, hyper: Mapping[str, Array]) -> tuple[PeerAlgorithm, ClientAlgorithm]:
        """Peer and client with these hyperparameters."""
        return bound(self.peer, hyper), bound(self.client, hyper)


class Nodes(NamedTuple):
    """What every node keeps between events; [R * N, ...], without the axis for a single node."""

    row: State  # of the peer algorithm
    client: State  # of its local training


class Slots(NamedTuple):
    """Messages that will still be read, as they were sent."""

    message: State  # [S, ...]
    finite: Array  # bool[S]; a message that is not finite is never mixed


class PeerCarry(NamedTuple):
    """What a compiled write changes and hands on to the next (donated from call to call)."""

    nodes: Nodes
    slots: Slots
    records: dict[str, Array]  # what is recorded of events, [E'] per column
    rejected: Array  # int32[], uploads rejected so far
    probes: Mapping[str, dict[str, Array]]  # probe -> column -> values, [E']


class Woken(NamedTuple):
    """An event between mixing and pushing."""

    row: State
    refused: Array  # int32[], messages of its inbox that were not added
    seen: Noted


class PeerBuffers(NamedTuple):
    """What the events of one lane leave, C rows each (donated from call to call).

    The first three fields are of unfinished events, and ``()`` where events are looped over.
    """

    woken: Woken | tuple[()]
    before: State  # the clients' states before the event
    work: State
    messages: State  # [C, F, ...]
    finite: Array  # bool[C, F]
    nodes: Nodes  # after the event
    norm: Array  # float[C]
    accepted: Array  # bool[C]
    columns: dict[str, Array]  # what algorithm and client record, [C] each
    probes: Noted


TrainPeers = Callable[[PeerTables, Slots, Nodes, PeerBuffers, Array], PeerBuffers]


# --- one event -------------------------------------------------------------------------------
def mixed(
    peer: PeerAlgorithm, tables: PeerTables, slots: Slots, row: State, position: Array, entries: tuple[Array, Array]
) -> tuple[State, Array]:
    """The node's row after the event at ``position`` has mixed inbox entries ``entries[0] .. entries[1]-1``.

    Also how many of them it refused.
    """

    def one(d: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        inbox, refused = carry
        slot, weight = tables.inbox_slot[d], tables.inbox_weight[d]
        good = slots.finite[slot] & jnp.logical_not(tables.inbox_corrupt[d])

        def added(inbox: State) -> State:
            return peer.add(inbox, row, tree.gather(slots.message, slot), weight)

        return tree.when(good, added, inbox), refused + jnp.logical_not(good).astype(jnp.int32)

    inbox, refused = tree.loop("inbox", *entries, one, (peer.open(row), jnp.int32(0)))
    return peer.wake(row, inbox, event_of(tables, position)), refused


def key_of(tables: PeerTables, position: Array) -> Key:
    """The key of the event at ``position``."""
    return job_key(tables.key[tables.run[position]], tables.client[position], tables.number[position])


def event_of(tables: PeerTables, position: Array) -> Event:
    """What a node knows of its event at ``position``."""
    return Event(key_of(tables, position), tables.mass[position])


def message_of(peer: PeerAlgorithm, row: State, number: Array) -> Message:
    """The message from which a woken node trains; its version counts the node's own events."""
    message: Message = peer.start(row)._replace(version=number)
    return message


def ended(
    peer: PeerAlgorithm,
    client: ClientAlgorithm,
    tables: PeerTables,
    woken: Woken,
    before: State,
    work: State,
    position: Array,
) -> tuple[Any, ...]:
    """The fields of ``PeerBuffers`` from ``messages`` on, of one event whose steps are done."""
    message = message_of(peer, woken.row, tables.number[position])
    yes, no = jnp.bool_(True), jnp.bool_(False)
    limit = tables.norm_limit[tables.run[position]]
    upload, after, norm, accepted, info = finished(client, work, message, before, limit, no, yes)
    row, messages, columns = peer.push(woken.row, upload, event_of(tables, position))
    both = set(columns) & set(info) | (set(columns) | set(info)) & set(RESERVED)
    check.require(not both, "columns of peer.push and client.info", sorted(both), "named differently")
    columns = {**info, **columns, "refused_messages": woken.refused}
    return messages, jax.vmap(tree.is_finite)(messages), Nodes(row, after), norm, accepted, columns, woken.seen


def values_of(what: Algorithms, tables: PeerTables, slots: Slots, row: State, position: Array) -> Noted:
    """The columns of every probe at the event at ``position``."""
    low, high = tables.inbox_bounds[position], tables.inbox_bounds[position + 1]
    entry = jnp.minimum(low + jnp.arange(what.longest, dtype=jnp.int32), len(tables.inbox_slot) - 1)
    slot = tables.inbox_slot[entry]
    good = (entry < high) & slots.finite[slot] & jnp.logical_not(tables.inbox_corrupt[entry])
    weights = jnp.where(good, tables.inbox_weight[entry], 0)
    held, who = tables.held, tables.owner[position]

    def part(x: Array, y: Array, rows: tuple[Array, Array, Array]) -> ClientData:
        return ClientData(x, y, rows[0], rows[1][who], rows[2][who])

    validation, test = part(tables.x, tables.y, held.validation), part(held.x, held.y, held.test)
    given = (row, tree.gather(slots.message, slot), weights, DataParts(client_data(tables, position), validation, test))
    return {name: checked(name, function, EVENT)(*given) for name, function in what.probes}


def _probed(what: Algorithms, tables: PeerTables, slots: Slots, rows: State, position: Array, active: Array) -> Noted:
    """The columns of every probe at the events at ``position`` (int32[W]); zeros where none of them is chosen."""
    seen = {}
    for name, function in what.probes:
        one = what._replace(probes=((name, function),))

        def values(rows: State, one: Algorithms = one, name: str = name) -> dict[str, Array]:
            return jax.vmap(lambda row, position: values_of(one, tables, slots, row, position)[name])(rows, position)

        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(values, rows))
        chosen = jnp.any(tables.chosen[name][position] & active)
        seen[name] = jax.lax.cond(chosen, values, lambda _, nothing=nothing: nothing, rows)
    return seen


# --- batches of events -----------------------------------------------------------------------
def make_peer_train(what: Algorithms, width: int, devices: int = 1) -> TrainPeers:
    """``train(tables, slots, nodes, buffers, span) -> buffers`` for the ``width`` longest events of a batch.

    ``span`` = (index of the batch's first event in ``train_order``, number of its events, first local step, end of the
    steps). With several ``devices`` each runs this program on its share: every ``devices``-th event.
    """
    own = width // devices

    def train(tables: PeerTables, slots: Slots, nodes: Nodes, buffers: PeerBuffers, span: Array) -> PeerBuffers:
        low, count, first, last = span
        index = jnp.arange(own, dtype=jnp.int32) * devices + device_index(devices)
        position, active = tables.train_order[low + index], index < count
        steps = jnp.where(active, tables.steps[position], 0)
        number, data = tables.number[position], client_data(tables, position)
        one = ClientData._make((None, None, None, 0, 0, None))
        hyper = hyper_of(tables, tables.run[position])
        each = None if len(tables.key) == 1 else 0  # the axis of hyper

        def begin(
            hyper: Any, key: Key, row: State, number: Array, before: State, data: ClientData, steps: Array
        ) -> State:
            peer, client = what.given(hyper)
            message = message_of(peer, row, number)._replace(local_steps=steps)
            return client.begin(key, message, before, data)

        def wakes(hyper: Any, row: State, position: Array, low: Array, high: Array) -> tuple[State, Array]:
            return mixed(what.given(hyper)[0], tables, slots, row, position, (low, high))

        def starts(hyper: Any, row: State, number: Array) -> Message:
            return message_of(what.given(hyper)[0], row, number)

        def ends(hyper: Any, *event: Any) -> tuple[Any, ...]:
            return ended(*what.given(hyper), tables, *event)

        def fresh() -> tuple[Woken, State, State]:
            rows, before = tree.gather(tuple(nodes), tables.owner[position])
            seen = _probed(what, tables, slots, rows, position, active)
            low = tables.inbox_bounds[position]
            high = jnp.where(active, tables.inbox_bounds[position + 1], low)
            rows, refused = jax.vmap(wakes, in_axes=(each, 0, 0, 0, 0))(hyper, rows, position, low, high)
            keys = jax.vmap(lambda position: key_of(tables, position))(position)
            work = jax.vmap(begin, in_axes=(each, 0, 0, 0, 0, one, 0))(hyper, keys, rows, number, before, data, steps)
            return Woken(rows, refused, seen), before, work

        step = jax.vmap(make_advance(what.client, data), in_axes=(each, 0, None, 0, 0, 0, 0))

        def advance(k: Array, held: tuple[Woken, State, State]) -> tuple[Woken, State, State]:
            woken, before, work = held
            message = jax.vmap(starts, in_axes=(each, 0, 0))(hyper, woken.row, number)
            return woken, before, step(hyper, work, k, steps, message, data.offset, data.size)

        def finish(rows: Callable[[Any], Any], held: tuple[Woken, State, State]) -> tuple[Any, ...]:
            given = (hyper if each is None else rows(hyper), *held, rows(position))
            return jax.vmap(ends, in_axes=(each, *[0] * 4))(*given)

        kept, done = run_segment((first, last), steps, buffers[:3], tuple(buffers[3:]), fresh, advance, finish)
        return PeerBuffers(*kept, *done)

    return train


def make_peer_loop(what: Algorithms, devices: int = 1) -> TrainPeers:
    """As :func:`make_peer_train`, for batches of any number of events: one event after the other, all their steps."""

    def train(tables: PeerTables, slots: Slots, nodes: Nodes, buffers: PeerBuffers, span: Array) -> PeerBuffers:
        low, count = span[0], span[1]

        def one(i: Array, buffers: PeerBuffers) -> PeerBuffers:
            position = tables.train_order[low + i * devices + device_index(devices)]
            number = tables.number[position]
            peer, client = what.at(tables, tables.run[position])
            row, before = tree.gather(tuple(nodes), tables.owner[position])
            rows = jax.tree.map(lambda leaf: leaf[None], row)
            seen = _probed(what, tables, slots, rows, position[None], jnp.ones(1, jnp.bool_))
            entries = tables.inbox_bounds[position], tables.inbox_bounds[position + 1]
            row, refused = mixed(peer, tables, slots, row, position, entries)
            woken = Woken(row, refused, jax.tree.map(lambda leaf: leaf[0], seen))
            message, key = message_of(peer, row, number), key_of(tables, position)
            work = run_steps(client, key, message, before, client_data(tables, position), tables.steps[position])
            done = ended(peer, client, tables, woken, before, work, position)
            return tree.scatter(buffers, tables.row[position] % len(buffers.norm), PeerBuffers((), (), (), *done))

        mine = (count - device_index(devices) + devices - 1) // devices
        return tree.loop("jobs", 0, mine, one, buffers)

    return train


def make_peer_write() -> Callable[[PeerTables, PeerCarry, PeerBuffers, Array], tuple[PeerCarry, Array]]:
    """``write(tables, carry, buffers, span) -> (carry, rejected)``: apply the positions ``span[0] .. span[1]-1``.

    ``rejected``: int32[], uploads rejected so far; a copy that outlives the donation of ``carry``.
    """

    def one(tables: PeerTables, buffers: PeerBuffers, p: Array, carry: PeerCarry) -> PeerCarry:
        row, accepted = tables.row[p], buffers.accepted[tables.row[p]]

        def send(fragment: Array, slots: Slots) -> Slots:
            slot = tables.slot[p, fragment]

            def put(slots: Slots) -> Slots:
                sent = tree.gather((buffers.messages, buffers.finite), (row, fragment))
                return tree.scatter(slots, slot, Slots(*sent))

            return tree.when(slot >= 0, put, slots)

        noted = tree.gather(buffers.columns, row) | {"upload_norm": buffers.norm[row], "accepted": accepted}
        return PeerCarry(
            nodes=tree.scatter(carry.nodes, tables.owner[p], tree.gather(buffers.nodes, row)),
            slots=jax.lax.fori_loop(0, tables.slot.shape[1], send, carry.slots),
            records=tree.scatter(carry.records, p, noted),
            rejected=carry.rejected + jnp.logical_not(accepted).astype(jnp.int32),
            probes=tree.scatter(carry.probes, p, tree.gather(buffers.probes, row)),
        )

    def write(tables: PeerTables, carry: PeerCarry, buffers: PeerBuffers, span: Array) -> tuple[PeerCarry, Array]:
        carry = tree.loop("arrivals", span[0], span[1], lambda p, carry: one(tables, buffers, p, carry), carry)
        return carry, carry.rejected + 0

    return write


# --- the beginning ---------------------------------------------------------------------------
def one_event(what: Algorithms, tables: PeerTables, params: Params) -> PeerBuffers:
    """The first event without mixing and local steps; used only for the shapes of what events leave."""
    zero = jnp.int32(0)
    peer, client = what.at(tables, zero)
    before = client.init(params)
    row = peer.init(params)
    woken = Woken(peer.wake(row, peer.open(row), event_of(tables, zero)), zero, {})
    message = message_of(peer, woken.row, zero)._replace(local_steps=zero)
    work = client.begin(tables.key[0], message, before, client_data(tables, zero))
    messages = ended(peer, client, tables, woken, before, work, zero)[0]
    woken = woken._replace(seen=values_of(what, tables, Slots(messages, jnp.ones(1, jnp.bool_)), row, zero))
    return PeerBuffers(woken, before, work, *ended(peer, client, tables, woken, before, work, zero))


def make_peer_buffers(what: Algorithms, capacity: int, batching: str) -> Callable[[PeerTables, Params], PeerBuffers]:
    """``buffers(tables, params) -> buffers``: empty buffers of the right shapes."""

    def buffers(tables: PeerTables, params: Params) -> PeerBuffers:
        one = _shapes_of_event(what, tables, params)
        if batching == "loop":
            one = one._replace(woken=(), before=(), work=())
        empty: PeerBuffers = tree.stack_zeros(one, capacity)
        return empty

    return buffers


def _shapes_of_event(what: Algorithms, tables: PeerTables, params: Params) -> PeerBuffers:
    """Shapes of what one event leaves."""
    if len(tables.key) > 1:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    return jax.eval_shape(lambda tables, params: one_event(what, tables, params), tables, params)


def make_peer_start(what: Algorithms, nodes: int, slots: int) -> Callable[[PeerTables, Params], PeerCarry]:
    """``start(tables, params) -> carry``: all nodes of a run have the same model, and nothing has been sent.

    ``params``: [R, ...]; without the axis where R = 1.
    """

    def start(tables: PeerTables, params: Params) -> PeerCarry:
        one, runs, length = _shapes_of_event(what, tables, params), len(tables.key), len(tables.client)

        def node(run: Array, params: Params) -> Nodes:
            peer, client = what.at(tables, run)
            return Nodes(peer.init(params), client.init(params))

        def each(leaf: Array) -> Array:
            leaf = jnp.asarray(leaf)
            if runs == 1:
                return jnp.broadcast_to(leaf[None], (nodes, *leaf.shape))
            return jnp.repeat(leaf, nodes, axis=0)

        made = node(jnp.int32(0), params) if runs == 1 else jax.vmap(node)(jnp.arange(runs, dtype=jnp.int32), params)
        message = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), one.messages)
        noted = one.columns | {"upload_norm": one.norm, "accepted": one.accepted}
        return PeerCarry(
            nodes=jax.tree.map(each, made),
            slots=Slots(tree.stack_zeros(message, slots), jnp.zeros(slots, jnp.bool_)),
            records=tree.stack_zeros(noted, length),
            rejected=jnp.int32(0),
            probes=tree.stack_zeros(one.probes, length),
        )

    return start
