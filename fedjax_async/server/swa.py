"""Stochastic weight averaging at the server: a wrapper around any rule."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.server.rule import closed
from fedjax_async.server.transforms import begun
from fedjax_async.types import Array, Arrival, Facts, Info, Message, Params, Request, ServerAlgorithm, State, Traced


class AveragedState(NamedTuple):
    """Server state of :func:`averaged`."""

    inner: State  # of the wrapped rule
    average: Params  # in float32 where the params have half precision
    models: Array  # int32[], models in the average
    steps: Array  # int32[], server steps so far that changed the model
    changed: Array  # bool[], whether an arrival was accepted since the last step
    total: Array  # int32[], T, server steps of the run; 0: unknown


def averaged(
    rule: ServerAlgorithm,
    *,
    start: Traced = 0.75,
    every: int = 1,
    overwrite: int | None = None,
) -> ServerAlgorithm:
    """``rule`` with the average of its models as the evaluated model: stochastic weight averaging (SWA).

    After the server step number tau (counted from 0), if ``tau >= sigma T`` and c divides tau:
    ``SWA <- (n SWA + x) / (n + 1)``, ``n <- n + 1``. Steps without accepted uploads do not count. Clients get the
    messages of ``rule``. The current model is evaluated until the average holds a model, the average from then on.

    Args:
      rule: any rule.
      start: sigma in [0, 1], the share of the run's T server steps before the first average. Outside a run, where T
        is unknown, nothing is averaged.
      every: c, server steps from one averaged model to the next; for a cyclic learning rate, the length of its cycle.
      overwrite: C; every C server steps the average becomes the rule's model: periodic SWA. It does not change
        weights that a rule keeps for single clients. ``None``: never.

    Raises ``ValueError`` for ``overwrite`` if the params of ``rule`` are computed rather than part of its state.

    Source: Izmailov et al. (2018), Algorithm 1; Guo et al. (2022) for the periodic form; AsyncManifold (2025), section
    5.1 and Algorithm 1.
    """
    check.in_range("start", start, 0.0, 1.0)
    check.whole("every", every, high=2**31 - 1)
    if overwrite is not None:
        check.whole("overwrite", overwrite, high=2**31 - 1)

    def init(params: Params, facts: Facts = Facts()) -> tuple[AveragedState, State]:
        state, memory = begun(rule, params, facts)
        if overwrite is not None:
            with_params(rule, state, params)  # refuses a rule that computes its params before anything compiles
        total = jnp.asarray(facts.server_steps, jnp.int32)
        first, none = tree.wide(rule.params(state)), jnp.int32(0)
        return AveragedState(state, first, none, none, jnp.bool_(False), total), memory

    def receive(state: AveragedState, memory: State, arrival: Arrival) -> tuple[AveragedState, State, Info]:
        inner, memory, info = rule.receive(state.inner, memory, arrival)
        return state._replace(inner=inner, changed=state.changed | (info.weight > 0)), memory, info

    def close(state: AveragedState, memory: State) -> tuple[AveragedState, State]:
        inner, memory = closed(rule, state.inner, memory)
        real, tau, total = jnp.result_type(float), state.steps, state.total
        late = tau.astype(real) >= tree.share_of(start, total)
        counts = late & (total > 0) & (tau % every == 0) & state.changed
        models = state.models + counts.astype(jnp.int32)
        share = jnp.where(counts, 1.0 / jnp.maximum(models, 1).astype(real), 0.0)

        def mixed(mean: Array, x: Array) -> Array:
            # a model of weight 1 replaces the mean, which may be far from it
            return jnp.where(share == 1.0, x, mean + share.astype(mean.dtype) * (x - mean))

        now = rule.params(inner)
        average = jax.tree.map(mixed, state.average, tree.wide(now))
        if overwrite is not None:
            written = with_params(rule, inner, tree.cast_like(average, now))
            inner = tree.where((models > 0) & (tau % overwrite == 0) & state.changed, written, inner)
        steps = tau + state.changed.astype(jnp.int32)
        return AveragedState(inner, average, models, steps, jnp.zeros_like(state.changed), total), memory

    def dispatch(state: AveragedState, memory: State, request: Request) -> tuple[Message, State]:
        return rule.dispatch(state.inner, memory, request)

    def params(state: AveragedState) -> Params:
        now = rule.params(state.inner)
        return tree.where(state.models > 0, tree.cast_like(state.average, now), now)

    return ServerAlgorithm(init, receive, dispatch, params, close, rule.sums)


def with_params(rule: ServerAlgorithm, state: State, params: Params) -> State:
    """The state of ``rule`` with other params. Raises ``ValueError`` if the params are not a part of the state."""
    leaves, structure = jax.tree.flatten(state)
    numbered = jax.tree.unflatten(structure, [_Leaf(i) for i in range(len(leaves))])
    try:
        found: list[Any] = jax.tree.leaves(rule.params(numbered))
    except TypeError:
        found = [None]
    check.require(all(isinstance(leaf, _Leaf) for leaf in found), "rule", "one that computes its params", _PART)
    for description, leaf in zip(found, jax.tree.leaves(params), strict=True):
        leaves[description.number] = leaf
    return jax.tree.unflatten(structure, leaves)


_PART = "one whose params are a part of its state"


class _Leaf:
    """Stands for a leaf of a state; arithmetic on it raises ``TypeError``."""

    def __init__(self, number: int) -> None:
        self.number = number
