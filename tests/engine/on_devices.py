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
    from tests.engine.peer_problem import halves, peer_case
    from tests.engine.problem import case, client, noisy_client
    from tests.engine.test_contract import carrying, remembering

    personal = case(remembering(), "cohort:size=4", "exponential:mean=1", updates=20)
    personal = personal._replace(components=personal.components._replace(client=carrying(client())))
    yield "memory vmap", run_waves, personal, {"batching": "vmap", "max_width": 8}
    many = case("fedasync", "every", "exponential:mean=1", sizes=tuple(range(1, 24, 2)), updates=60)
    many = many._replace(components=many.components._replace(client=noisy_client()))
    yield "fedasync loop", run_waves, many, {"batching": "loop", "max_width": 16}
    gossip = peer_case(halves(), sizes=(5, 3, 8, 2, 6, 4, 7, 9, 1, 3, 2, 5), fragments=2, corrupt=0.1, horizon=6.0)
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
