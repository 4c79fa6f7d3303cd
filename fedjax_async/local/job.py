"""One job of one client: its key, its number of local steps, and the loop over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import check, tree
from fedjax_async.types import Array, ClientAlgorithm, ClientData, Key, Message, Params, State


def gradients_a_step(optimizer: optax.GradientTransformation) -> int:
    """Gradients of the loss in a local step: the optimiser's attribute ``gradients``, by default 1."""
    return int(getattr(optimizer, "gradients", 1))


def local_steps(
    size: np.ndarray,
    *,
    batch_size: int,
    epochs: float | None = None,
    steps: int | None = None,
    whole_batches: bool = False,
) -> np.ndarray:
    """Local steps of each client's job; int32[N].

    Either a fixed number of ``steps``, or a number of ``epochs``, which may be a fraction: one epoch over n examples
    has ``b = ceil(n / batch_size)`` steps, e epochs have ``floor(e) b + ceil(frac(e) b)``. With
    ``whole_batches``, the last partial batch of an epoch is left out: ``b = max(1, floor(n / batch_size))``.

    >>> local_steps(np.array([100, 10]), batch_size=32, epochs=1.5).tolist()
    [6, 2]
    """
    check.whole("batch_size", batch_size)
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs = {epochs!r}, steps = {steps!r}: give exactly one of the two")
    if steps is not None:
        check.whole("steps", steps, high=2**31 - 1)
        return np.full(len(size), steps, np.int32)
    check.positive("epochs", epochs)
    examples = np.asarray(size, np.int64)
    per_epoch = np.maximum(1, examples // batch_size) if whole_batches else -(-examples // batch_size)
    whole, part = divmod(float(epochs or 0), 1.0)
    extra = np.ceil(part * per_epoch - 1e-6)  # 0.07 * 100 must give 7, although it is 7.000000000000001 in floats
    total = np.maximum(1, whole * per_epoch + extra)
    check.require(bool((total < 2**31).all()), "epochs", epochs, "fewer than 2**31 local steps")
    return total.astype(np.int32)


def job_key(root: Key, client: Array, number: Array) -> Key:
    """The key of a client's ``number``-th job: independent of batching, timing and algorithm."""
    return jax.random.fold_in(jax.random.fold_in(root, client), number)


# Folded into the job's key for random numbers other than minibatches. Numbers of local steps, which are folded in too,
# are smaller. ``feedback`` takes 2**31, ``floco`` 2**31 + 3. ``curve`` shares a number with the noise of DP-SGD, and
# ``anchored`` with arrivals, which never occur in its runs: changing these would change published results.
_NOISE, _ARRIVAL = 2**31 + 1, 2**31 + 2


def noise_key(job: Key, k: Array) -> Key:
    """The key of the noise of local step ``k``, from the key of its job."""
    return jax.random.fold_in(jax.random.fold_in(job, _NOISE), k)


def arrival_key(root: Key, client: Array, number: Array) -> Key:
    """The key of the arrival of a job's upload, for what the server draws at this arrival."""
    return jax.random.fold_in(job_key(root, client, number), _ARRIVAL)


def run_steps(
    algorithm: ClientAlgorithm, key: Key, message: Message, client_state: State, data: ClientData, steps: Array | int
) -> State:
    """Begin a job and run ``steps`` local steps; returns the work, before ``finish``.

    ``steps`` may be traced. A Python int is compiled in, as the trip count of the loop.
    """
    message = message._replace(local_steps=jnp.asarray(steps, jnp.int32))
    work = algorithm.begin(key, message, client_state, data)
    end = np.int32(steps) if isinstance(steps, int) else jnp.asarray(steps, jnp.int32)
    return tree.loop("local steps", np.int32(0), end, lambda k, work: algorithm.step(work, k, message, data), work)


def run_job(
    algorithm: ClientAlgorithm, key: Key, message: Message, client_state: State, data: ClientData, steps: Array | int
) -> tuple[Params, State]:
    """Train ``steps`` local steps from ``message``; returns ``(upload, client_state)``.

    ``steps`` may be traced, so one compiled program serves all numbers of steps.
    """
    work = run_steps(algorithm, key, message, client_state, data, steps)
    return algorithm.finish(work, message, client_state)
