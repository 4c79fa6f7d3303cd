"""OrthoFL as its authors released it, which is not what the paper's text says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async import check, tree
from fedjax_async.geometry import project_out
from fedjax_async.models import STATISTICS
from fedjax_async.registry import takes
from fedjax_async.server.options import discount, guard_rails
from fedjax_async.server.orthofl import after_the_first, handed_on, moving_average
from fedjax_async.server.rule import closed, known
from fedjax_async.server.running_statistics import has_statistics
from fedjax_async.server.staleness import Weight
from fedjax_async.server.transforms import Transform, scale_by_staleness
from fedjax_async.types import (
    Array,
    Arrival,
    Facts,
    Info,
    Message,
    Params,
    Path,
    Request,
    ServerAlgorithm,
    State,
    Traced,
)


class Released(NamedTuple):
    """Server state."""

    average: State  # of the moving average W, which is evaluated
    weights: Params  # S, what the last client of all was sent
    accepted: Array  # int32[], arrivals that counted so far


def combined(change: Params, now: Params, before: Params) -> Params:
    """``Delta + (now - before)_perp`` tensor by tensor; of BatchNorm's tensors, scale and bias too, ``Delta`` alone."""
    kept = _is_normalisation(change)
    shifted = jax.tree.map(jnp.add, change, project_out(now, change, minus=before, per="tensor"))
    own, _ = tree.split(change, lambda path: not kept(path))
    return tree.join(own, shifted)


def _is_normalisation(params: Params) -> Callable[[Path], bool]:
    """Which paths are tensors of a BatchNorm: of the modules that keep running statistics."""
    if not has_statistics(params):
        return lambda path: False
    paths = [tree.path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params[STATISTICS])]
    modules = {path[:-1] for path in paths}
    return lambda path: path[0] == STATISTICS or path[1:-1] in modules


@takes(discounted=discount, guards=guard_rails)
def orthofl_released(*, mixing: Traced = 0.6, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """OrthoFL by its released code: clients share one calibrated state, tensor by tensor (OrthoFL 2025).

    ``S <- w_m + (S - start_m)_perp``, where ``start_m`` is what client m was sent, and S is what it is sent next. The
    part orthogonal to ``w_m - start_m`` is taken in every tensor by itself: a weight and its bias apart, LoRA's two
    factors apart. BatchNorm's tensors, scale and bias too, come back as the client has them. Evaluated is the moving
    average ``W <- (1 - b_t) W + b_t w_m``, ``b_t = mixing * s(tau)``; its first weight is 1, and tau counts the updates
    of others since the client's last. ``orthofl`` is the paper's text. The code's ``1e-19`` below the fraction is left
    out: a tensor that does not change at all takes the whole shift over in both.

    Args:
      mixing: b in (0, 1].

    ``clip`` bounds what the average takes over; a rejected upload leaves S as it is. Memory: one number a client.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    return _shared(moving_average(guards, after_the_first(scale_by_staleness(discounted, mixing))))


def _shared(average: ServerAlgorithm) -> ServerAlgorithm:
    def init(params: Params) -> tuple[Released, Array]:
        return Released(average.init(params)[0], params, jnp.int32(0)), jnp.int32(0)

    def receive(state: Released, memory: Array, arrival: Arrival) -> tuple[Released, Array, Info]:
        others = state.accepted - memory  # memory: how many had counted after this client's last
        after, _, info = average.receive(state.average, (), arrival._replace(staleness=others))
        weights = handed_on(state.weights, arrival.start, arrival.upload, combined)
        counts = info.weight > 0
        accepted = state.accepted + counts.astype(jnp.int32)
        new = Released(after, tree.where(counts, weights, state.weights), accepted)
        return new, jnp.where(counts, accepted, memory), info

    def close(state: Released, memory: Array) -> tuple[Released, Array]:
        return state._replace(average=closed(average, state.average, ())[0]), memory

    def dispatch(state: Released, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(state.weights), memory

    def given(facts: Facts) -> ServerAlgorithm:
        return _shared(known(average, facts))

    return ServerAlgorithm(init, receive, dispatch, lambda state: average.params(state.average), close, given)
