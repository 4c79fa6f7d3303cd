"""Choose the lowering of a convolution: from a table of measurements, or by measuring once on this machine.

``lowerings.csv`` has the milliseconds of each lowering by backend and shape, written by
``experiments/benchmarks/lowerings.py``. A shape that is not in the table gets the lowering of the nearest shape with
the same kernel and strides. If the table has no such shape, the kernel's size decides (:func:`rule`).

``lowering="auto"`` measures every shape of a network once on this machine, some seconds each, and keeps the result in
the user's cache folder (``$FEDJAX_ASYNC_DATA`` or ``~/.cache/fedjax_async``), one file per kind of device. Two
machines may then choose differently, so runs on them differ by rounding.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import disk, registry
from fedjax_async.home import NO_HOME, default_data_dir, say_not_kept
from fedjax_async.models.lowerings import LOWERINGS
from fedjax_async.types import Array

Pair = tuple[int, int]
AUTO = "auto"
TABLE = Path(__file__).with_name("lowerings.csv")
KEY = ("backend", "kernel", "stride", "outputs", "c_in", "c_out")
BATCH, STEPS, CLIENTS = 32, 2, 16  # of a measurement; clients side by side on an accelerator, where waves are wide
FOLLOWING = 8  # output channels of the product that follows the measured convolution
LEAST_GAIN = 0.9  # another lowering must take at most this share of the usual one's time, since measurements vary


class ConvShape(NamedTuple):
    """The sizes that a convolution's time depends on: kernel, strides, outputs (rows, columns), channels (in, out)."""

    kernel: Pair
    strides: Pair
    outputs: Pair
    channels: Pair


class MeasuredShape(NamedTuple):
    """A line of the table: a backend, a shape and the fastest lowering."""

    backend: str
    shape: ConvShape
    lowering: str


def check_lowering(name: str | None) -> None:
    """Raise ``ValueError`` unless ``name`` is a lowering, ``"auto"`` or ``None``."""
    if name is not None:
        registry.find("lowering", {AUTO: None, **LOWERINGS}, name)


@functools.cache
def table(path: Path = TABLE) -> tuple[MeasuredShape, ...]:
    """The measurements that come with the package."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            kernel, stride, outputs, c_in, c_out = (int(line[name]) for name in KEY[1:])
            shape = ConvShape((kernel, kernel), (stride, stride), (outputs, outputs), (c_in, c_out))
            rows.append(MeasuredShape(line["backend"], shape, line["lowering"]))
    return tuple(rows)


def distance(a: ConvShape, b: ConvShape) -> float:
    """The sum of ``|log(n / m)|`` over the outputs and channels of two shapes; channels count twice."""
    pairs = zip((*a.outputs, *a.channels, *a.channels), (*b.outputs, *b.channels, *b.channels))
    return sum(abs(math.log(n / m)) for n, m in pairs)


def rule(kernel: Pair, backend: str) -> str:
    """The lowering for kernels and strides that are not in the table.

    ``tiled`` needs ``(kh + 1)(kw + 1) / (kh * kw)`` times as many multiplications as ``im2col`` and a third of its
    copies. It is chosen on a CPU or GPU if that factor is at most 1.5 (5 x 5: 1.44); otherwise ``im2col`` is chosen.
    On an H100 LeNet-5 trains 2.5 times as fast with ``tiled`` as with ``im2col``: the latter's first weight gradient
    is a product with 25 x 6 results and sums over all positions, which few multiprocessors share.
    """
    kh, kw = kernel
    large = 2 * (kh + 1) * (kw + 1) <= 3 * kh * kw
    return "tiled" if large and backend in ("cpu", "gpu") else "im2col"


def default_lowering(
    kernel_shape: tuple[int, ...],
    *,
    strides: tuple[int, ...] = (1, 1),
    outputs: tuple[int, ...] | None = None,
    groups: int = 1,
    depthwise: bool = False,
    backend: str | None = None,
) -> str:
    """The fastest lowering in the table for backend and shape; without ``outputs`` (rows, columns), by :func:`rule`.

    Depthwise convolutions use ``taps``; other groups use ``lax``, which is slow inside a loop on a CPU.

    >>> default_lowering((5, 5, 1, 6), backend="cpu"), default_lowering((3, 3, 32, 64), backend="cpu")
    ('tiled', 'im2col')
    >>> default_lowering((3, 3, 64, 64), outputs=(32, 32), backend="cpu")
    'winograd'
    """
    if groups > 1:
        return "taps" if depthwise else "lax"
    backend = backend or jax.default_backend()
    if outputs is not None:
        shape = _shape(kernel_shape, strides, outputs)
        same = [r for r in table() if r.backend == backend and r.shape[:2] == shape[:2]]
        if same:
            return min(same, key=lambda row: distance(row.shape, shape)).lowering
    return rule((kernel_shape[0], kernel_shape[1]), backend)


def _shape(kernel_shape: tuple[int, ...], strides: tuple[int, ...], outputs: tuple[int, ...]) -> ConvShape:
    kh, kw, c_in, c_out = kernel_shape
    return ConvShape((kh, kw), (strides[0], strides[1]), (outputs[0], outputs[1]), (c_in, c_out))


def candidates(shape: ConvShape, backend: str) -> list[str]:
    """Lowerings worth measuring.

    ``lax`` is not measured on a CPU, since it takes seconds inside a loop. ``banded`` is measured only if its matrix
    has up to a million entries. Winograd's are measured only at stride 1, for 3 x 3 kernels or (``winograd_tiled``)
    5 x 5.
    """
    (kh, kw), _, (_, columns), (c_in, c_out) = shape
    names = ["im2col", "tiled"] if backend == "cpu" else ["lax", "im2col", "tiled"]
    if kh * columns**2 * c_in * c_out <= 2**20:
        names.append("banded")
    if (kh, kw) == (3, 3) and shape.strides == (1, 1):
        names += ["winograd", "winograd_small"]
    if (kh, kw) == (5, 5) and shape.strides == (1, 1):
        names.append("winograd_tiled")
    return names


def job_of(name: str, shape: ConvShape, clients: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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

    def job(x: Array, kernel: Array, following: Array) -> tuple[Array, Array, Array]:
        def layer(x: Array, kernel: Array, following: Array) -> Array:
            y = LOWERINGS[name](x, kernel, strides, ((0, 0), (0, 0)))
            return jax.nn.relu(y).reshape(-1, c_out) @ following

        def step(_: Array, given: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            y, back = jax.vjp(layer, *given)
            return jax.tree.map(lambda a, b: a - 1e-6 * b, given, back(y))

        return jax.lax.fori_loop(0, STEPS, step, (x, kernel, following))

    return job, (x, kernel, following)


def _call(name: str, shape: ConvShape, backend: str) -> Callable[[], Any]:
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


_chosen: dict[tuple[str, ConvShape], str] = {}


def cache_file(device: str) -> Path | None:
    """The file with the choices for a kind of device; None without a home directory."""
    plain = "".join(c if c.isalnum() else "-" for c in device)
    home = default_data_dir()
    return None if home is None else home / "lowerings" / f"{plain}.json"


def _read(path: Path | None) -> dict[str, str]:
    """The choices in ``path``; none if it is missing or damaged."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if v in LOWERINGS} if isinstance(found, dict) else {}


def measured_lowering(kernel_shape: tuple[int, ...], strides: tuple[int, ...], outputs: tuple[int, ...]) -> str:
    """The fastest lowering on this device: from the cache folder, else measured now and kept there."""
    device, shape = jax.devices()[0].device_kind, _shape(kernel_shape, strides, outputs)
    if (device, shape) in _chosen:
        return _chosen[device, shape]
    path, name = cache_file(device), json.dumps(shape)
    kept = _read(path)
    if name not in kept:
        # in another thread, since this one may be tracing a model
        with ThreadPoolExecutor(1) as pool:
            times = pool.submit(measured, shape).result()
        kept = {**_read(path), name: fastest(times, rule(shape.kernel, jax.default_backend()))}
        _keep(path, kept)
    _chosen[device, shape] = kept[name]
    return kept[name]


def _keep(path: Path | None, choices: dict[str, str]) -> None:
    """Write the choices; warn where that fails: the next process measures again."""
    if path is None:
        say_not_kept("measured lowerings", NO_HOME)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write(path, json.dumps(choices, indent=1, sort_keys=True).encode())
    except OSError as error:
        say_not_kept("measured lowerings", str(error))


def lowering_of(
    name: str | None, kernel_shape: tuple[int, ...], strides: tuple[int, ...], outputs: tuple[int, ...]
) -> str:
    """The lowering of a convolution without groups: from the table (``None``), measured (``"auto"``), else ``name``."""
    if name == AUTO:
        return measured_lowering(kernel_shape, strides, outputs)
    return name or default_lowering(kernel_shape, strides=strides, outputs=outputs)
