"""Reverse mode for loops of any length (local training), and for table rows that it changes in place.

JAX differentiates a loop in reverse only if its length is fixed, and keeps all that its steps need. Here the reverse of
a job computes the job once more, keeps what is passed from step to step, and goes back step by step. So a job costs its
own steps, not those of the longest job, and only the inputs of an arrival are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, linear_call, zero_from_primal

from fedjax_async.base import tree
from fedjax_async.types import Array, Tree

Leaves = list[Array]
JobState = tuple[Leaves, Leaves]  # leaves with derivatives, and the others
JobLeaves = tuple[Leaves, Leaves, Leaves, Leaves, Array]  # floats of work and of inputs, the others of both, steps
Given = TypeVar("Given")


def separated(values: Tree) -> tuple[Leaves, Leaves, Callable[[Leaves, Leaves], Tree]]:
    """``(floats, others, join)``: the leaves with derivatives, the others, and ``join(floats, others) -> values``."""
    leaves, structure = jax.tree.flatten(values)
    smooth = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

    def join(floats: Leaves, others: Leaves) -> Tree:
        one, two = iter(floats), iter(others)
        return jax.tree.unflatten(structure, [next(one) if is_float else next(two) for is_float in smooth])

    floats = [leaf for leaf, is_float in zip(leaves, smooth) if is_float]
    return floats, [leaf for leaf, is_float in zip(leaves, smooth) if not is_float], join


def nonzero(tangents: Tree, primals: Tree) -> tuple[Leaves, Callable[[Leaves], Tree], Callable[[Tree], Leaves]]:
    """``(some, spread, chosen)``: the tangents that are not zero by construction.

    ``spread(some)`` adds zeros for the others, ``chosen(all)`` leaves these out. Needed since JAX has no reverse of a
    ``linear_call`` with a constant among its linear arguments.
    """
    leaves, structure = jax.tree.flatten(tangents, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    real = [not isinstance(leaf, SymbolicZero) for leaf in leaves]
    zeros = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(primals)]

    def spread(some: Leaves) -> Tree:
        given = iter(some)
        whole = [next(given) if here else jnp.zeros(*zero) for here, zero in zip(real, zeros, strict=True)]
        return jax.tree.unflatten(structure, whole)

    def chosen(whole: Tree) -> Leaves:
        return [leaf for leaf, here in zip(jax.tree.leaves(whole), real, strict=True) if here]

    return chosen(tangents), spread, chosen


def repeated(step: Callable[[Tree, Array, Given], Tree], work: Tree, inputs: Given, steps: Array, longest: int) -> Tree:
    """The work after ``work <- step(work, k, inputs)`` for k = 0 .. steps - 1, with derivatives in both modes.

    Args:
      step: its derivatives are with respect to the floats of work and inputs. It must not close over traced values.
      steps: int32[], from 1 to ``longest``.
    """
    work_floats, work_others, join_work = separated(work)
    input_floats, input_others, join_inputs = separated(inputs)

    def once(work: JobState, k: Array, given: Leaves, fixed: Leaves) -> JobState:
        return separated(step(join_work(*work), k, join_inputs(given, fixed)))[:2]

    def loop(floats: Leaves, given: Leaves, others: Leaves, fixed: Leaves, steps: Array) -> JobState:
        return jax.lax.fori_loop(0, steps, lambda k, work: once(work, k, given, fixed), (floats, others))

    def backward(known: JobLeaves, slope: Leaves) -> JobState:
        floats, given, others, fixed, steps = known
        kept = tree.scatter(tree.stack_zeros((floats, others), longest), 0, (floats, others))

        def forth(k: Array, held: tuple[JobState, JobState]) -> tuple[JobState, JobState]:
            work, kept = held
            work = once(work, k, given, fixed)
            return work, tree.scatter(kept, k + 1, work)

        _, kept = jax.lax.fori_loop(0, steps - 1, forth, ((floats, others), kept))

        def back(j: Array, held: JobState) -> JobState:
            slope, total = held
            k = steps - 1 - j
            floats, others = tree.gather(kept, k)
            _, pull = jax.vjp(lambda floats, given: once((floats, others), k, given, fixed)[0], floats, given)
            slope, more = pull(slope)
            return slope, jax.tree.map(jnp.add, total, more)

        return jax.lax.fori_loop(0, steps, back, (slope, jax.tree.map(jnp.zeros_like, given)))

    whole = jax.custom_jvp(loop)

    def derivative(primals: JobLeaves, tangents: JobLeaves) -> tuple[JobState, JobState]:
        floats, others = whole(*primals)
        some, spread, chosen = nonzero(tuple(tangents[:2]), primals[:2])

        def forward(known: tuple[Any, ...], some: Leaves) -> Leaves:
            moved: Leaves = jax.jvp(lambda *smooth: loop(*smooth, *known[2:])[0], known[:2], spread(some))[1]
            return moved

        def reverse(known: JobLeaves, slope: Leaves) -> Leaves:
            return chosen(backward(known, slope))

        moved = linear_call(forward, reverse, primals, some)
        return (floats, others), (moved, [zero_from_primal(leaf) for leaf in others])

    whole.defjvp(derivative, symbolic_zeros=True)

    return join_work(*whole(work_floats, input_floats, work_others, input_others, steps))


# --- rows of tables -----------------------------------------------------------------------------------


def take(table: Tree, row: Array) -> tuple[Tree, Tree]:
    """``(row, table)``: a row of every leaf, and the same table, which the caller must use from here on.

    So the reverse adds the row's derivative to that of the table in place. JAX's own reverse makes a table of zeros
    with one row for each read, and adds these tables up.
    """
    leaves, structure = jax.tree.flatten(table)
    pairs = [_taken(leaf, row) for leaf in leaves]
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    return jax.tree.unflatten(structure, first), jax.tree.unflatten(structure, second)


def put(table: Tree, row: Array, values: Tree) -> Tree:
    """``table`` with ``values`` in row ``row`` of every leaf."""
    return jax.tree.map(lambda leaf, one: _put(leaf, one, row), table, values)


def _read(leaf: Array, row: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False)


def _write(leaf: Array, one: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, one, row, 0)


def _guarded(leaf: Array, row: Array) -> tuple[Array, Array]:
    """:func:`_read` and ``row`` behind a condition that always holds, so that XLA:CPU does not copy the whole table.

    XLA would fuse a plain read into operations after a write to the table. A write that uses this ``row`` cannot come
    before the read.
    """

    def nothing() -> tuple[Array, Array]:
        return jnp.zeros(leaf.shape[1:], leaf.dtype), row + 1

    return jax.lax.cond(row >= 0, lambda: (_read(leaf, row), row), nothing)


@jax.custom_jvp
def _taken(leaf: Array, row: Array) -> tuple[Array, Array]:
    return _guarded(leaf, row)[0], leaf


@jax.custom_jvp
def _put(leaf: Array, one: Array, row: Array) -> Array:
    return _write(leaf, one, row)


def _taken_derivative(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    (leaf, row), moved = primals, tangents[0]
    found = _taken(leaf, row)

    def backward(row: Array, slopes: tuple[Array, Array]) -> Array:
        so_far, row = _guarded(slopes[1], row)
        return _write(slopes[1], so_far + slopes[0], row)

    if isinstance(moved, SymbolicZero):
        return found, tuple(zero_from_primal(each) for each in found)
    return found, linear_call(lambda row, t: (_read(t, row), t), backward, row, moved)


def _put_derivative(primals: tuple[Array, Array, Array], tangents: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    leaf, one, row = primals
    table, value = tangents[:2]
    found = _put(leaf, one, row)

    def erased(row: Array, slope: Array) -> Array:
        return _write(slope, jnp.zeros(slope.shape[1:], slope.dtype), row)

    if isinstance(table, SymbolicZero):
        return found, zero_from_primal(found) if isinstance(value, SymbolicZero) else _write(
            jnp.zeros_like(leaf), value, row
        )
    if isinstance(value, SymbolicZero):
        return found, linear_call(erased, erased, row, table)

    def backward(row: Array, slope: Array) -> tuple[Array, Array]:
        value, row = _guarded(slope, row)
        return erased(row, slope), value

    return found, linear_call(lambda row, t: _write(t[0], t[1], row), backward, row, (table, value))


_taken.defjvp(_taken_derivative, symbolic_zeros=True)
_put.defjvp(_put_derivative, symbolic_zeros=True)
