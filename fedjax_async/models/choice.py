"""Choose the lowering of a convolution from a table of measurements.

``lowerings.csv`` has the milliseconds of each lowering by backend and shape, written by
``experiments/benchmarks/lowerings.py``. A shape that is not in the table gets the lowering of the nearest shape with
the same kernel and strides. If the table has no such shape, the kernel's size decides (:func:`rule`).
"""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax

from fedjax_async.base import registry
from fedjax_async.models.lowerings import LOWERINGS

Pair = tuple[int, int]
TABLE = Path(__file__).with_name("lowerings.csv")
KEY = ("backend", "kernel", "stride", "outputs", "c_in", "c_out")


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
    """Raise ``ValueError`` unless ``name`` is a lowering or ``None``."""
    if name is not None:
        registry.find("lowering", LOWERINGS, name)


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
