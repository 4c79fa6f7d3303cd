"""One whole job of one client: the composition that the engine cuts into batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, State


def job_key(root: Key, client: Array, number: Array) -> Key:
    """The key of a client's ``number``-th job: independent of batching, timing and algorithm."""
    return jax.random.fold_in(jax.random.fold_in(root, client), number)


def run_steps(
    algorithm: ClientAlgorithm, key: Key, message: Message, client_state: State, data: ClientData, steps: Array | int
) -> State:
    """Begin a job and take ``steps`` local steps (may be traced): the job's work, not yet finished."""
    work = algorithm.begin(key, message, client_state, data)
    return jax.lax.fori_loop(
        0, jnp.asarray(steps, jnp.int32), lambda k, work: algorithm.step(work, k, message, data), work
    )


def run_job(
    algorithm: ClientAlgorithm, key: Key, message: Message, client_state: State, data: ClientData, steps: Array | int
) -> tuple[Params, State]:
    """Train ``steps`` local steps from ``message``: ``(upload, client_state)``.

    ``steps`` may be traced; nothing is compiled per step count.
    """
    work = run_steps(algorithm, key, message, client_state, data, steps)
    return algorithm.finish(work, message, client_state)
