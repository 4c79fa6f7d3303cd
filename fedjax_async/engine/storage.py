"""Start models stored at half precision, so that the slots of a large model take half the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_async.engine.components import Client, Hyper, Server, bound
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    ClientData,
    DataParts,
    Info,
    Key,
    Message,
    Params,
    Probe,
    Request,
    ServerAlgorithm,
    State,
)

SLOT_DTYPES = ("full", "bfloat16")


def _cast(params: Params, dtype: DTypeLike) -> Params:
    """Floating-point leaves in another dtype."""
    return jax.tree.map(lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, params)


@dataclass(frozen=True)
class StoringServer:
    """The rule ``full`` with messages in ``dtype``: clients start from the rounded model and extra."""

    full: Server
    dtype: str

    def __call__(self, hyper: Hyper) -> ServerAlgorithm:
        """The rule with these hyperparameters."""
        return _storing(bound(self.full, hyper), self.dtype)


def _storing(rule: ServerAlgorithm, dtype: str) -> ServerAlgorithm:
    def dispatch(state: State, memory: State, request: Request) -> tuple[Message, State]:
        message, memory = rule.dispatch(state, memory, request)
        return message._replace(params=_cast(message.params, dtype), extra=_cast(message.extra, dtype)), memory

    def receive(state: State, memory: State, arrival: Arrival) -> tuple[State, State, Info]:
        start = jax.tree.map(lambda s, w: s.astype(w.dtype), arrival.start, rule.params(state))
        extra = _cast(arrival.extra, jax.tree.leaves(rule.params(state))[0].dtype)
        return rule.receive(state, memory, arrival._replace(start=start, extra=extra))

    return rule._replace(dispatch=dispatch, receive=receive)


@dataclass(frozen=True)
class RestoringClient:
    """The client ``full`` with messages converted to ``dtype`` before local training."""

    full: Client
    dtype: str

    def __call__(self, hyper: Hyper) -> ClientAlgorithm:
        """The client with these hyperparameters."""
        return _restoring(bound(self.full, hyper), self.dtype)


def _restoring(one: ClientAlgorithm, dtype: str) -> ClientAlgorithm:
    def full(message: Message) -> Message:
        return message._replace(params=_cast(message.params, dtype), extra=_cast(message.extra, dtype))

    def begin(key: Key, message: Message, state: State, data: ClientData) -> State:
        return one.begin(key, full(message), state, data)

    def step(work: State, k: Array, message: Message, data: ClientData) -> State:
        return one.step(work, k, full(message), data)

    def finish(work: State, message: Message, state: State) -> tuple[Params, State]:
        return one.finish(work, full(message), state)

    def own(message: Message, state: State) -> Params:
        return full(message).params if one.own is None else one.own(full(message), state)

    return one._replace(begin=begin, step=step, finish=finish, own=None if one.own is None else own)


def probe_restoring(probe: Probe, dtype: str) -> Probe:
    """The probe with the start model and extra of arrivals converted to ``dtype``."""
    return probe._replace(function=_seeing(probe.function, dtype))


@lru_cache(maxsize=64)
def _seeing(function: Callable[..., Mapping[str, Array]], dtype: str) -> Callable[..., Mapping[str, Array]]:
    def restored(state: State, memory: State, arrival: Arrival, parts: DataParts) -> Mapping[str, Array]:
        full = arrival._replace(start=_cast(arrival.start, dtype), extra=_cast(arrival.extra, dtype))
        return function(state, memory, full, parts)

    return restored
