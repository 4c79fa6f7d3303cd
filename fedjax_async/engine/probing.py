"""Probes on the device: called inside the compiled ``receive``, on chosen arrivals, before each is received."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from fedjax_async.base import tree
from fedjax_async.engine.flat import opened
from fedjax_async.engine.probes import checked
from fedjax_async.engine.tables import DeviceTables, parts_at
from fedjax_async.types import Array, Arrival, State

ProbeTables = Mapping[str, dict[str, Array]]  # probe -> column -> values, [E']
Functions = Sequence[tuple[str, Callable[..., Mapping[str, Array]]]]  # names of probes and their functions


def values_of(functions: Functions, tables: DeviceTables, position: Array, *given: State) -> ProbeTables:
    """The columns of every probe at the arrival at ``position``; ``given``: state, memory and arrival."""
    given = opened(given)
    return {name: checked(name, function)(*given, parts_at(tables, position)) for name, function in functions}


def noted(
    functions: Functions,
    tables: DeviceTables,
    columns: ProbeTables,
    position: Array,
    state: State,
    memory: State,
    arrival: Arrival,
) -> ProbeTables:
    """The probes' tables with a row for one arrival, in the tables of the probes that see it."""
    after = {}
    for name, function in functions:
        table = columns[name]

        def values(name: str = name, function: Callable[..., Mapping[str, Array]] = function) -> dict[str, Array]:
            return values_of([(name, function)], tables, position, state, memory, arrival)[name]

        nothing = {column: jnp.zeros((), rows.dtype) for column, rows in table.items()}
        found = jax.lax.cond(tables.chosen[name][position], values, lambda same=nothing: same)
        after[name] = tree.scatter(table, position, found)
    return after


def noted_ranks(
    functions: Functions, tables: DeviceTables, columns: ProbeTables, position: Array, active: Array, *given: State
) -> ProbeTables:
    """:func:`noted` for one arrival per run, where ``active``; a probe that sees one of them is called for all."""
    after = {}
    for name, function in functions:
        table = columns[name]
        chosen = tables.chosen[name][position] & active

        def one(
            position: Array, *given: State, name: str = name, function: Callable[..., Mapping[str, Array]] = function
        ) -> dict[str, Array]:
            return values_of([(name, function)], tables, position, *given)[name]

        nothing = {column: jnp.zeros(position.shape, rows.dtype) for column, rows in table.items()}
        found = jax.lax.cond(
            jnp.any(chosen), lambda one=one: jax.vmap(one)(position, *given), lambda same=nothing: same
        )
        after[name] = tree.scatter_where(table, position, found, chosen)
    return after
