"""Lowerings of the convolution as an H100 would execute them, compiled on a machine without one (``gpu_programs.py``).

    python experiments/benchmarks/gpu_lowerings.py                    # the layers of LeNet-5, CNN, VGG-11 and ResNet-18
    python experiments/benchmarks/gpu_lowerings.py --smoke            # the sizes of one small layer; no GPU compiler

Forward and both gradients of one layer and the operations after it, 16 clients with kernels of their own under
``vmap``, batch 32 (``lowerings.job_of``). For each lowering: launches of a step; bytes that its kernels read and
write, and the time that this takes at the full bandwidth of the card, a bound from below; temporary memory. What a
product costs is not counted, so this orders the lowerings only where memory decides; ``lowerings.py`` measures them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_listing
import jax
from common import save_table
from gpu_programs import HERE, Noted, Notes, compiled_for, shown
from jax.experimental.topologies import get_topology_desc
from lowerings import CLIENTS, SHAPES, STEPS, candidates, job_of

from fedjax_async.engine import compiling
from fedjax_async.models.choice import ConvShape

BANDWIDTH = 3.35e12  # bytes a second of an H100


def row(card: Any, dump: Path, sizes: tuple[int, ...], name: str) -> dict[str, Any]:
    """One lowering of one layer; ``card`` None: its sizes alone."""
    kernel, stride, outputs, c_in, c_out = sizes
    shape = ConvShape((kernel, kernel), (stride, stride), (outputs, outputs), (c_in, c_out))
    layer = f"{kernel} x {kernel}, stride {stride}, {outputs} x {outputs} x {c_out} from {c_in}"
    with mock.patch.object(jax, "default_backend", lambda: "gpu"):
        job, given = job_of(name, shape, 1 if card is None else CLIENTS)
        found: dict[str, Any] = {"layer": layer, "lowering": name}
        if card is None:
            return found | {"outputs": jax.eval_shape(jax.vmap(job), *given)[0].size}
        program = Noted(Notes(), jax.vmap(job), {})
        made = compiled_for(card, program, given, dict(compiling.CUDA), dump)
    total, _ = gpu_listing.count(made["thunks"], made["loops"], made["names"], lambda loop, reached: STEPS * reached, 1)
    return found | {
        "launches a step": round(total.launches / STEPS, 1),
        "traffic a step (MB)": round(made["traffic"] / 1e6),
        "at least (ms)": round(1e3 * made["traffic"] / BANDWIDTH, 2),
        "temporary (MiB)": round(made["temporary"] / 2**20),
    }


def main() -> None:
    """Compile and count every lowering of the layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=HERE / "h100.txtpb", help="the card, as XLA's text proto")
    parser.add_argument("--smoke", action="store_true", help="the sizes of one small layer; needs no GPU compiler")
    parser.add_argument("--out", type=Path, help="a CSV file for the table")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        card, dump = None, Path(scratch)
        if not chosen.smoke:
            os.environ["XLA_FLAGS"] = (
                f"--xla_dump_to={dump} --xla_dump_hlo_as_text"  # XLA reads it when it starts, below
            )
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_enable_compilation_cache", False)
            target = chosen.target.read_text()
            card = get_topology_desc(platform="cuda", target_config=target, topology="1x1x1").devices[0]
        table: list[dict[str, Any]] = []
        for sizes in [(3, 1, 4, 4, 4)] if chosen.smoke else SHAPES:
            kernel, stride, outputs, c_in, c_out = sizes
            shape = ConvShape((kernel, kernel), (stride, stride), (outputs, outputs), (c_in, c_out))
            rows = [row(card, dump, sizes, name) for name in candidates(shape, "gpu")]
            print(f"\n{shown(rows)}", flush=True)
            table += rows
    if chosen.out is not None:
        save_table(table, chosen.out)


if __name__ == "__main__":
    main()
