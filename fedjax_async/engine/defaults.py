"""How much is trained at a time where the caller does not say: widths, lanes and batching, by backend and model."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from fedjax_async.base import tree
from fedjax_async.engine.devices import device_memory
from fedjax_async.types import Array, Model, Params


def default_batching() -> str:
    """How a compiled call trains its jobs: one after the other on a CPU, all at once elsewhere.

    One client keeps a core with matrix instructions busy, and the matrices of a second one only spill its caches. With
    two lanes, looping was 1.0 (logistic regression) to 1.25 (an MLP) times as fast as ``vmap``.
    """
    return "loop" if jax.default_backend() == "cpu" else "vmap"


def default_width(params: Params) -> int:
    """The longest batch that pays on this backend.

    On a CPU 16 jobs hide the cost of a call; an accelerator needs wide batches, here up to 1024. Memory bounds both:
    about 64 MiB of uploads on a CPU, a quarter of the device's memory for all of a batch's buffers elsewhere.
    """
    size = max(tree.num_bytes(params), 1)
    if jax.default_backend() == "cpu":
        return max(1, min(16, 2**26 // size))
    return max(1, min(1024, device_memory() // 4 // (8 * size)))


def default_lanes() -> int:
    """How many batches are trained at the same time: on a CPU one per core, at most 8, and one on an accelerator.

    XLA runs the programs of one host thread one after the other, and a client's matrices are too small to keep several
    cores busy. Independent batches keep them busy if each has a thread of its own.
    """
    if jax.default_backend() != "cpu":
        return 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, usable)


# What a wave costs on an H100, fitted to seven models (``experiments/benchmarks/results/h100``): a local step takes
# STEP_OF_A_LEAF for each leaf of the model, as each is some launches, and JOB_OF_A_BYTE for each job and byte that a
# gradient keeps of EXAMPLES examples; CALL is for training and receiving a batch. Only widths depend on it. Seconds.
STEP_OF_A_LEAF, JOB_OF_A_BYTE, CALL, COMPILING, EXAMPLES = 23e-6, 2.6e-12, 200e-6, 2.5, 32


def width_costs(model: Model, params: Params, x: Array) -> dict[str, float]:
    """What :func:`~fedjax_async.engine.widths.fewest_widths` weighs on an accelerator; {} on a CPU.

    On an accelerator a step of a small model takes as long for a hundred jobs as for one, so one width will do. The
    costs depend on the model alone, neither on the device nor on a measurement, so that widths and bits do not either.
    """
    if jax.default_backend() == "cpu":
        return {}
    leaves = len(jax.tree.leaves(params))
    job = JOB_OF_A_BYTE * kept_by_a_gradient(model, params, (EXAMPLES, *x.shape[1:]), x.dtype)
    return {"overhead": STEP_OF_A_LEAF * leaves / job, "call": CALL / job, "compiling": COMPILING / job}


def kept_by_a_gradient(model: Model, params: Params, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes that a gradient keeps of inputs of this shape and dtype: the activations; at least 1.

    ``params``: arrays or their shapes.
    """
    kept = tree.shapes(_gradient, params, jax.ShapeDtypeStruct(shape, dtype), given=(model,))
    return max(tree.num_bytes(kept), 1)


def _gradient(model: Model, params: Params, x: Array) -> Any:
    return jax.vjp(lambda params: model.apply(params, x), params)
