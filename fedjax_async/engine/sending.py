"""What the server sends, inside compiled programs: its rule, the messages it makes, and their slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.base.tree import read_rows
from fedjax_async.engine.components import Server, bound
from fedjax_async.engine.kernels import Carry, hyper_of
from fedjax_async.engine.stack_facts import StackFacts
from fedjax_async.engine.tables import DeviceTables
from fedjax_async.types import Array, Facts, Message, Request, ServerAlgorithm, State


def state_of(tables: DeviceTables, states: State, run: Array) -> State:
    """The server state of a run."""
    return states if len(tables.key) == 1 else tree.gather(states, run)


def rule_at(server: Server, tables: DeviceTables, run: Array) -> ServerAlgorithm:
    """The server rule of a run."""
    rule: ServerAlgorithm = bound(server, hyper_of(tables, run))
    return rule


def facts_at(tables: DeviceTables, facts: StackFacts, run: Array) -> Facts:
    """What a rule may know of a run."""
    only = len(tables.key) == 1
    updates, steps = (column[0 if only else run] for column in (tables.updates, tables.server_steps))
    return Facts(facts.num_clients, facts.every_closes, updates, steps)


def request_of(tables: DeviceTables, facts: StackFacts, write: Array) -> Request:
    """The request for the message of number ``write``."""
    return Request(
        client=tables.write_owner[write] % facts.num_clients,
        time=tables.write_time[write],
        version=tables.write_version[write],
        local_steps=tables.write_steps[write],
        weight=tables.write_weight[write],
    )


def send_one(
    server: Server, tables: DeviceTables, facts: StackFacts, state: State, memory: State, write: Array
) -> tuple[Message, State]:
    """The message of number ``write``, and the server's row about its client afterwards."""
    run = tables.write_run[write]
    before = read_rows(memory, tables.write_owner[write])
    rule = rule_at(server, tables, run)
    message, after = rule.dispatch(state_of(tables, state, run), before, request_of(tables, facts, write))
    return message._replace(version=jnp.int32(0)), after


def write_messages(
    server: Server,
    tables: DeviceTables,
    facts: StackFacts,
    carry: Carry,
    low: Array,
    high: Array,
    most: int | None = None,
) -> Carry:
    """Send the messages ``low .. high-1``: write them to their slots.

    One after the other, in a loop; or at once, if they are known to be at most ``most``, each to another client.
    """

    def send(j: Array, carry: Carry) -> Carry:
        message, memory = send_one(server, tables, facts, carry.server, carry.memory, j)
        return carry._replace(
            memory=tree.scatter(carry.memory, tables.write_owner[j], memory),
            slots=tree.scatter(carry.slots, tables.write_slot[j], message),
        )

    if most is None:
        return tree.loop("messages", low, high, send, carry)

    def together(carry: Carry) -> Carry:
        return write_together(server, tables, facts, carry, low, high, most)

    if most > 1:
        return tree.when(low < high, together, carry)
    # one message is sent in vain more cheaply than it is left out: it is written to the last slot, which is never read
    j, due = jnp.maximum(jnp.minimum(low, high - 1), 0), low < high
    owner, before = tables.write_owner[j], tree.gather(carry.memory, tables.write_owner[j])
    message, memory = send_one(server, tables, facts, carry.server, carry.memory, j)
    slot = jnp.where(due, tables.write_slot[j], len(jax.tree.leaves(carry.slots)[0]) - 1)
    return carry._replace(
        memory=tree.scatter(carry.memory, owner, tree.where(due, memory, before)),
        slots=tree.scatter(carry.slots, slot, message),
    )


def write_together(
    server: Server, tables: DeviceTables, facts: StackFacts, carry: Carry, low: Array, high: Array, most: int
) -> Carry:
    """Send the messages ``low .. high-1``, or the first ``most`` of them, at once; each must be to another client."""
    index = low + jnp.arange(most, dtype=jnp.int32)
    j, active = jnp.maximum(jnp.minimum(index, high - 1), 0), index < high
    message, memory = jax.vmap(lambda j: send_one(server, tables, facts, carry.server, carry.memory, j))(j)
    return carry._replace(
        memory=tree.scatter_where(carry.memory, tables.write_owner[j], memory, active),
        slots=tree.scatter_where(carry.slots, tables.write_slot[j], message, active),
    )
