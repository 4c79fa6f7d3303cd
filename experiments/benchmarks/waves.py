"""How well schedules batch: planned widths, the lower bound, padding. Nothing is trained; takes half a minute.

    python experiments/benchmarks/waves.py

For each number of clients and delay model there are two measurements, averaged over seeds. The first is the mean wave
width as a share of the clients in flight, and the number of waves beside its lower bound (the longest chain of
dependent jobs). The second has waves of at most ``--max-width`` jobs and shards of unequal size: the widths that the
engine would compile, useful local steps over executed ones, and slots for start models.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import hardware, write_table

from fedjax_async.clock import Until, longest_chain, plan, wave_statistics
from fedjax_async.engine import Cutting, make_layout
from fedjax_async.results import table

DELAYS = {
    "constant": "constant",
    "normal, 10 % noise": "normal:std=0.1",
    "speeds lognormal(0.5)": "constant:heterogeneity=0.5",
    "speeds lognormal(1)": "constant:heterogeneity=1",
    "noise lognormal(0.5)": "lognormal:sigma=0.5",
    "exponential": "exponential",
    "rpi": "rpi",
}
TIMINGS = ("every", "buffer:size=10", "cohort:size=10")


def measure(timing: str, delay: str, clients: int, updates: int, seeds: int, max_width: int) -> dict[str, Any]:
    """The row of one timing, delay model and number of clients: means over seeds."""
    columns: dict[str, list[float]] = {}
    widths: set[int] = set()
    for seed in range(seeds):
        steps = np.random.default_rng(seed).integers(2, 40, clients)
        began = time.perf_counter()
        schedule = plan(
            timing, DELAYS[delay], num_clients=clients, local_steps=steps, until=Until(updates=updates), seed=seed
        )
        planned = time.perf_counter()
        made = make_layout([schedule], Cutting(max_width))
        statistics = wave_statistics(schedule)
        widths |= set(made.widths)
        values = {
            "waves": statistics.waves,
            "lower bound": longest_chain(schedule),
            "mean width": statistics.mean_width,
            "share of in flight": statistics.share,
            "useful / executed": made.useful_steps / made.executed_steps,
            "slots": made.slots.count,
            "events planned (1/s)": updates / (planned - began),
        }
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    row: dict[str, Any] = {"timing": timing, "delays": delay, "clients": clients}
    row |= {name: float(np.mean(values)) for name, values in columns.items()}
    return row | {"widths": " ".join(map(str, sorted(widths)))}


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--updates", type=int, default=50, help="updates per client")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-width", type=int, default=4, help="cap for the padded widths")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/waves.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.clients, a.updates, a.seeds = [10], 10, 1
    rows = [
        measure(timing, delay, clients, a.updates * clients, a.seeds, a.max_width)
        for timing in TIMINGS
        for delay in DELAYS
        for clients in a.clients
    ]
    print(table(rows, decimals={"events planned (1/s)": 0, "waves": 0, "lower bound": 0, "slots": 0}))
    print(hardware())
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "waves.csv")


if __name__ == "__main__":
    main()
