"""The gradient of a whole run beside the run itself: time and memory of ``config.trajectory``.

    python experiments/benchmarks/trajectory.py             # minutes on 2 cores
    python experiments/benchmarks/trajectory.py --smoke     # seconds

FedAsync with MLP-64 and ten clients. *Forward* is the compiled function that gives the final test loss; *gradient*
gives its derivatives with respect to mixing rate, local learning rate and all initial parameters. Both are timed in CPU
seconds of this process, interleaved; the ratio is computed within each repeat, and the table has its median. *Memory*
is XLA's plan for the gradient's temporary buffers.

Measured numbers: README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import hardware, interleave, write_table

from fedjax_async.config import Settings, trajectory

BASE: dict[str, Any] = {"method": "fedasync", "model": "mlp:hidden=64", "lr": 0.05, "partition": "iid"}
JOBS: dict[str, dict[str, Any]] = {
    "1 step": {"steps": 1},
    "5 steps": {"steps": 5},
    "1 epoch": {"epochs": 1.0},
    "1 epoch, Dirichlet 0.1": {"epochs": 1.0, "partition": "dirichlet:alpha=0.1"},
}


def row_of(job: str, a: argparse.Namespace) -> dict[str, Any]:
    """The row of one kind of job: times and memory."""
    settings = Settings(**BASE | JOBS[job], clients=a.clients, updates=a.updates, eval_updates=a.updates // 10)
    function, hyper, params, *_ = trajectory(settings, segment=a.segment)

    def loss(hyper: Any, params: Any) -> jax.Array:
        return function(hyper, params)["loss"][-1]

    forward = jax.jit(loss).lower(hyper, params).compile()
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(hyper, params).compile()
    calls = {"forward": lambda: forward(hyper, params), "gradient": lambda: gradient(hyper, params)}
    seconds = {name: np.array(each) for name, each in interleave(calls, a.repeats, clock=time.process_time).items()}
    return {
        "job": job,
        "clients": a.clients,
        "arrivals": a.updates,
        "forward (s)": float(np.median(seconds["forward"])),
        "gradient (s)": float(np.median(seconds["gradient"])),
        "ratio": float(np.median(seconds["gradient"] / seconds["forward"])),
        "memory (MiB)": gradient.memory_analysis().temp_size_in_bytes / 2**20,
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000, help="arrivals of the run")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--segment", type=int, default=None, help="arrivals between checkpoints [all]")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/trajectory.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.updates, a.clients, a.repeats, a.jobs = 10, 3, 1, ["1 step"]
    rows = [row_of(job, a) for job in a.jobs]
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "trajectory.csv")
    else:
        print(rows, hardware(), sep="\n")


if __name__ == "__main__":
    main()
