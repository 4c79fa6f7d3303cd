"""How programs are compiled: on a CUDA GPU as graphs with fixed kernels, elsewhere as JAX does by default.

A CUDA *graph* is a sequence of kernels that the GPU replays without the host. XLA's default graphs hold no loops, so at
each pass of a loop of unknown length the host copies a flag and waits. With the options below a program is one graph,
loops included. On one H100 a run of FedAsync (100 clients, an MLP, 10 steps of batch 32) was 1.6 times as fast with
them (``experiments/benchmarks/README.md``).

XLA also times candidate kernels for each product while it compiles, so two processes may choose different ones and end
with different bits. The options fix the choice: products are cuBLAS's, with its own heuristic. Compilation is faster,
too.

On a CPU a program that runs once, such as the one that makes the parameters, is compiled with fewer optimisations: for
LeNet-5 in 0.9 s instead of 2.8 s, which was more than training took; the bits are the same.

An option that ``XLA_FLAGS`` names is left to it: ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` switches graphs off,
``XLA_FLAGS='--xla_gpu_autotune_level=4 --xla_gpu_enable_triton_gemm=true'`` lets XLA choose kernels by timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.stages import Wrapped

# ``+WHILE``, which adds to XLA's default, is understood in XLA_FLAGS only, so this lists everything.
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
CUDA: Mapping[str, str | int | bool] = {
    "xla_gpu_enable_command_buffer": IN_GRAPHS,
    "xla_gpu_graph_min_graph_size": 1,  # XLA's default leaves loops of few kernels outside
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,  # without autotuning its tiles would be arbitrary
}
# Level 0 compiles in two thirds of the time of level 1, but ends with other bits.
ONCE_ON_A_CPU: Mapping[str, str | int | bool] = {"xla_backend_optimization_level": 1}


def options(*, once: bool = False) -> dict[str, str | int | bool]:
    """XLA's options for JAX's default device, without those that ``XLA_FLAGS`` names; ``once``: see :func:`jitted`."""
    platform = jax.devices()[0].client.platform_version.lower()
    wanted = CUDA if "cuda" in platform and not once else ONCE_ON_A_CPU if platform == "cpu" and once else {}
    named = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in wanted.items() if f"--{name}" not in named}


def jitted(function: Callable[..., Any], *, once: bool = False, **arguments: Any) -> Wrapped:
    """``jax.jit(function, **arguments)``, compiled with :func:`options`. ``once``: it is not called often."""
    return jax.jit(function, compiler_options=options(once=once) or None, **arguments)
