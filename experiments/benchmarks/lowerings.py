"""Which lowering is fastest for each shape of convolution: writes the table that ``default_lowering`` reads.

    python experiments/benchmarks/lowerings.py                  # two minutes on 2 cores, the table beside this file
    python experiments/benchmarks/lowerings.py --install        # also into the package, as this backend's default
    python experiments/benchmarks/lowerings.py --smoke          # seconds: does it run

Forward and both gradients of one layer and the operations after it (``job_of``), batch 32, two steps in one
``fori_loop``; ms per step, the minimum of interleaved repeats. On a CPU it measures one client, in processor time;
elsewhere 16 clients under ``vmap``. Rows of other backends in the package's table are kept.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import write_table

from fedjax_async.models import LOWERINGS
from fedjax_async.models.choice import KEY, TABLE, ConvShape, rule

BATCH, STEPS, CLIENTS = 32, 2, 16  # of a measurement; clients side by side on an accelerator, where waves are wide
FOLLOWING = 8  # output channels of the product that follows the measured convolution
LEAST_GAIN = 0.9  # another lowering must take at most this share of the usual one's time, since measurements vary
NAMES = ("lax", "im2col", "tiled", "winograd", "winograd_small", "winograd_tiled")
# kernel, stride, outputs, channels in and out: the 3 x 3 and 5 x 5 layers of the package's networks
SHAPES = (
    (3, 1, 32, 3, 64), (3, 1, 30, 3, 32), (3, 1, 28, 32, 64), (3, 1, 32, 64, 64), (3, 1, 16, 64, 128),
    (3, 1, 16, 128, 128), (3, 1, 8, 128, 256), (3, 1, 8, 256, 256), (3, 1, 4, 256, 512), (3, 1, 4, 512, 512),
    (3, 1, 2, 512, 512), (3, 2, 16, 64, 128), (3, 2, 8, 128, 256), (3, 2, 4, 256, 512), (5, 1, 28, 1, 6),
    (5, 1, 24, 1, 6), (5, 1, 10, 6, 16), (5, 1, 8, 6, 16), (5, 1, 28, 3, 32), (5, 1, 10, 32, 64),
)  # fmt: skip


def candidates(shape: ConvShape, backend: str) -> list[str]:
    """Lowerings worth measuring.

    ``lax`` is not measured on a CPU, since it takes seconds inside a loop. Winograd's are measured only at stride 1,
    for 3 x 3 kernels or (``winograd_tiled``) 5 x 5.
    """
    names = ["im2col", "tiled"] if backend == "cpu" else ["lax", "im2col", "tiled"]
    if shape.strides == (1, 1):
        names += {(3, 3): ["winograd", "winograd_small"], (5, 5): ["winograd_tiled"]}.get(shape.kernel, [])
    return names


def job_of(
    name: str, shape: ConvShape, clients: int
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[np.ndarray, ...]]:
    """A function of one client, and its arguments for ``clients``, [clients, ...]: what is timed of a lowering.

    Forward pass and both gradients, ``STEPS`` times in a loop as in local training. ReLU and a product over the
    channels follow, as in a network, so that it includes the change from the lowering's own layout to
    ``[B, H, W, C]`` and back.
    """
    (kh, kw), strides, outputs, (c_in, c_out) = shape
    size = [(n - 1) * s + k for n, s, k in zip(outputs, strides, (kh, kw))]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients, BATCH, *size, c_in)).astype(np.float32)
    kernel = rng.normal(size=(clients, kh, kw, c_in, c_out)).astype(np.float32)
    following = rng.normal(size=(clients, c_out, FOLLOWING)).astype(np.float32)

    def job(x: jax.Array, kernel: jax.Array, following: jax.Array) -> tuple[jax.Array, ...]:
        def layer(x: jax.Array, kernel: jax.Array, following: jax.Array) -> jax.Array:
            y = LOWERINGS[name](x, kernel, strides, ((0, 0), (0, 0)))
            return jax.nn.relu(y).reshape(-1, c_out) @ following

        def step(_: int, given: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            y, back = jax.vjp(layer, *given)
            return jax.tree.map(lambda a, b: a - 1e-6 * b, given, back(y))

        return jax.lax.fori_loop(0, STEPS, step, (x, kernel, following))

    return job, (x, kernel, following)


def _call(name: str, shape: ConvShape, backend: str) -> Callable[[], object]:
    """A call of :func:`job_of`, compiled; vmapped over several clients off a CPU."""
    job, given = job_of(name, shape, 1 if backend == "cpu" else CLIENTS)
    run = jax.jit(jax.vmap(job)).lower(*given).compile()
    return lambda: jax.block_until_ready(run(*map(jnp.asarray, given)))


def measured(shape: ConvShape, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of one step, forward and backward, of each candidate: least of `repeats` interleaved measurements.

    On a CPU this is processor time, since each core trains other clients.
    """
    backend = jax.default_backend()
    clock = time.process_time if backend == "cpu" else time.perf_counter
    calls = {name: _call(name, shape, backend) for name in candidates(shape, backend)}
    best = dict.fromkeys(calls, math.inf)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            began = clock()
            call()
            if turn > 0:
                best[name] = min(best[name], 1e3 * (clock() - began) / STEPS)
    return best


def fastest(milliseconds: dict[str, float], usual: str) -> str:
    """The lowering with the least time; ``usual`` if it is nearly as fast."""
    best = min(milliseconds, key=lambda name: milliseconds[name])
    return best if milliseconds[best] <= LEAST_GAIN * milliseconds.get(usual, math.inf) else usual


def row(shape: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Measure one shape."""
    kernel, stride, outputs, c_in, c_out = shape
    times = measured(ConvShape((kernel, kernel), (stride, stride), (outputs, outputs), (c_in, c_out)), repeats)
    backend = jax.default_backend()
    chosen = fastest(times, rule((kernel, kernel), backend))
    return {**dict(zip(KEY, (backend, *shape))), "lowering": chosen, **{n: times.get(n, float("nan")) for n in NAMES}}


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "lowerings.csv", help="CSV file"
    )
    parser.add_argument("--install", action="store_true", help="replace this backend's rows of the package's table")
    parser.add_argument("--smoke", action="store_true", help="one small shape, one repeat")
    a = parser.parse_args()
    shapes = [(3, 1, 4, 4, 4)] if a.smoke else SHAPES
    rows = [row(shape, 1 if a.smoke else a.repeats) for shape in shapes]
    write_table(rows, a.out)
    if a.install and not a.smoke:
        with TABLE.open(newline="", encoding="utf-8") as file:
            others = [line for line in csv.DictReader(file) if line["backend"] != jax.default_backend()]
        with a.out.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        with TABLE.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(others + lines)


if __name__ == "__main__":
    main()
