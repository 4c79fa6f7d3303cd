"""Compiled programs, shared between runs that have the same pieces."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from fedjax_async.engine import kernels
from fedjax_async.engine.evaluation import make_evaluate
from fedjax_async.types import ClientAlgorithm, Model, ServerAlgorithm


@lru_cache(maxsize=64)
def start(server: ServerAlgorithm, client: ClientAlgorithm, num_clients: int, slots: int) -> Any:
    """Jitted :func:`kernels.make_start`."""
    return jax.jit(kernels.make_start(server, client, num_clients, slots))


@lru_cache(maxsize=64)
def rows(client: ClientAlgorithm, capacity: int, batching: str) -> Any:
    """Jitted :func:`kernels.make_rows`."""
    return jax.jit(kernels.make_rows(client, capacity, batching))


@lru_cache(maxsize=256)
def train(client: ClientAlgorithm, width: int) -> Any:
    """Jitted :func:`kernels.make_train`; donates the batch's buffers."""
    return jax.jit(kernels.make_train(client, width), donate_argnums=3)


@lru_cache(maxsize=64)
def loop(client: ClientAlgorithm) -> Any:
    """Jitted :func:`kernels.make_loop`; donates the batch's buffers."""
    return jax.jit(kernels.make_loop(client), donate_argnums=3)


@lru_cache(maxsize=64)
def receive(server: ServerAlgorithm, always_closes: bool) -> Any:
    """Jitted :func:`kernels.make_receive`; donates what the server changes."""
    return jax.jit(kernels.make_receive(server, always_closes), donate_argnums=1)


@lru_cache(maxsize=64)
def evaluate(model: Model, server: ServerAlgorithm, total: int, labels: bool, num_clients: int | None) -> Any:
    """Jitted :func:`make_evaluate`."""
    return jax.jit(make_evaluate(model, server.params, total=total, labels=labels, num_clients=num_clients))
