"""A program, not a test: run a few cases on DEVICES devices and save the results.

python on_devices.py OUT.npz DEVICES [COORDINATOR PROCESSES RANK]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np


def cases():
    """Yield (name, engine, its arguments, options) of each case."""
    from fedjax_async.engine import run_peer_waves, run_waves
    from tests.engine.peer_problem import FRAGMENTS, halves, peer_case
    from tests.engine.problem import case, changed, noisy_client, personal

    kept = personal("cohort:size=4", updates=20)
    yield "memory vmap", run_waves, kept, {"batching": "vmap", "max_width": 8}
    many = case("fedasync", "every", "exponential:mean=1", sizes=tuple(range(1, 24, 2)), updates=60)
    many = changed(many, client=noisy_client())
    yield "fedasync loop", run_waves, many, {"batching": "loop", "max_width": 16}
    sizes = (5, 3, 8, 2, 6, 4, 7, 9, 1, 3, 2, 5)
    gossip = peer_case(halves(), FRAGMENTS, sizes=sizes, horizon=6.0, faults="corrupt:probability=0.1")
    for batching in ("vmap", "loop"):
        yield f"peers {batching}", run_peer_waves, gossip, {"batching": batching, "max_width": 8}


def outcomes(devices: int) -> dict[str, np.ndarray]:
    """Params, losses and upload norms of every case."""
    found = {}
    for name, run, given, options in cases():
        outcome = run(*given, devices=devices, **options)
        leaves = jax.tree.leaves(outcome.params)
        found |= {f"{name} {i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        found[f"{name} loss"] = outcome.scores["loss"]
        found[f"{name} norm"] = outcome.records["upload_norm"]
    return found


def main(out: str, devices: int, *distributed: str) -> None:
    """Run every case and save the results."""
    if distributed:
        coordinator, processes, rank = distributed
        jax.distributed.initialize(coordinator, int(processes), int(rank))
    jax.config.update("jax_enable_x64", True)
    assert len(jax.devices()) >= devices
    np.savez(out, **outcomes(devices))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
