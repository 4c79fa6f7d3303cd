"""Which lowering is fastest for each shape of convolution: writes the table that ``default_lowering`` reads.

    python experiments/benchmarks/lowerings.py                  # two minutes on 2 cores, the table beside this file
    python experiments/benchmarks/lowerings.py --install        # also into the package, as this backend's default
    python experiments/benchmarks/lowerings.py --smoke          # seconds: does it run

Forward and both gradients of one layer and the operations after it (``choice.py``), batch 32, two steps in one
``fori_loop``; ms per step, the minimum of interleaved repeats. On a CPU it measures one client, in processor time;
elsewhere 16 clients under ``vmap``. Rows of other backends in the package's table are kept.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import jax
from common import write_table

from fedjax_async.models.choice import KEY, TABLE, ConvShape, fastest, measured, rule

NAMES = ("lax", "im2col", "tiled", "winograd", "winograd_small", "winograd_tiled")
# kernel, stride, outputs, channels in and out: the 3 x 3 and 5 x 5 layers of the package's networks
SHAPES = (
    (3, 1, 32, 3, 64), (3, 1, 30, 3, 32), (3, 1, 28, 32, 64), (3, 1, 32, 64, 64), (3, 1, 16, 64, 128),
    (3, 1, 16, 128, 128), (3, 1, 8, 128, 256), (3, 1, 8, 256, 256), (3, 1, 4, 256, 512), (3, 1, 4, 512, 512),
    (3, 1, 2, 512, 512), (3, 2, 16, 64, 128), (3, 2, 8, 128, 256), (3, 2, 4, 256, 512), (5, 1, 28, 1, 6),
    (5, 1, 24, 1, 6), (5, 1, 10, 6, 16), (5, 1, 8, 6, 16), (5, 1, 28, 3, 32), (5, 1, 10, 32, 64),
)  # fmt: skip


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
