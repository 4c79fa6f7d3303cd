"""Probes on the device: evaluated inside the receive step, on chosen arrivals, before these are received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_async import tree
from fedjax_async.engine.probes import checked
from fedjax_async.engine.world import World, client_data
from fedjax_async.types import Array, Arrival, ClientData, Parts, State

Tables = Mapping[str, dict[str, Array]]  # probe -> column -> values, [E']


def parts_at(world: World, position: Array) -> Parts:
    """The parts of the client that arrives at ``position``."""
    p = world.probing
    validation = ClientData(
        world.x, world.y, p.validation_order, p.validation_offset[position], p.validation_size[position]
    )
    test = ClientData(p.test_x, p.test_y, p.test_order, p.test_offset[position], p.test_size[position])
    return Parts(client_data(world, position), validation, test)


def values_of(functions: Any, world: World, position: Array, *given: Any) -> Tables:
    """What every probe says of the arrival at ``position``; ``given``: state, memory and arrival."""
    return {name: checked(name, function)(*given, parts_at(world, position)) for name, function in functions}


def noted(
    functions: Any, world: World, tables: Tables, position: Array, state: State, memory: State, arrival: Arrival
) -> Tables:
    """The tables with the row of one arrival, where a probe has chosen it."""
    after = {}
    for name, function in functions:
        table = tables[name]

        def values(name: str = name, function: Any = function) -> dict[str, Array]:
            return values_of([(name, function)], world, position, state, memory, arrival)[name]

        nothing = {column: jnp.zeros((), rows.dtype) for column, rows in table.items()}
        found = jax.lax.cond(world.probing.chosen[name][position], values, lambda same=nothing: same)
        after[name] = tree.scatter(table, position, found)
    return after


def noted_rounds(functions: Any, world: World, tables: Tables, position: Array, active: Array, *given: Any) -> Tables:
    """The same for one arrival a run, where ``active``; evaluated for all runs as soon as one of them has chosen it."""
    after = {}
    for name, function in functions:
        table = tables[name]
        chosen = world.probing.chosen[name][position] & active

        def one(position: Array, *given: Any, name: str = name, function: Any = function) -> dict[str, Array]:
            return values_of([(name, function)], world, position, *given)[name]

        nothing = {column: jnp.zeros(position.shape, rows.dtype) for column, rows in table.items()}
        found = jax.lax.cond(
            jnp.any(chosen), lambda one=one: jax.vmap(one)(position, *given), lambda same=nothing: same
        )
        after[name] = tree.scatter_where(table, position, found, chosen)
    return after
