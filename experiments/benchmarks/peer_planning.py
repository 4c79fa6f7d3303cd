"""Planning decentralised runs: pushes planned a second, and the memory of a plan of a million nodes.

    python experiments/benchmarks/peer_planning.py             # about three minutes, and 3 GB of memory
    python experiments/benchmarks/peer_planning.py --smoke     # seconds

A push is one message from one node to one receiver. A plan has the compute events, the receivers of each push, its
arrival, its treatment by the buffers, the masses and the coefficients; *with waves* also counts the waves. Each row is
planned in a separate process, so that its peak memory can be measured; times are processor times, the minimum of
``--repeats`` (one for the million nodes). Measured numbers: README.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import hardware, one_process, peak_memory, write_table

from fedjax_async.clock import Until
from fedjax_async.peers import peer_waves, plan_peers

USUAL = {
    "exchange": "push_sum",
    "delays": "lognormal:sigma=0.5,heterogeneity=0.5",
    "topology": "gossip:receivers=10",
    "nodes": 1000,
    "events": 100_000,
}
LINK = "link:up=1e6,down=1e6,latency=0.05"
ROWS: list[dict[str, Any]] = [
    {"nodes": 100, "events": 50_000},
    {},
    {"nodes": 10_000},
    {"exchange": "push_sum:policy=merge"},
    {"exchange": "push_sum:policy=discard"},
    {"exchange": "push_sum:reference=released,newest=false"},
    {"exchange": "mean"},
    {"exchange": "divshare", "topology": "gossip:receivers=2"},
    {"exchange": "swift", "topology": "random_regular:degree=10"},
    {"exchange": "dpsgd", "topology": "random_regular:degree=10"},
    {"network": LINK},
    {"faults": "drop:probability=0.1"},
    {"availability": "sessions:on=20,off=5"},
    {"nodes": 1_000_000, "events": 2_000_000},
]
SMOKE: list[dict[str, Any]] = [{"nodes": 50, "events": 500}, {"nodes": 50, "events": 500, "network": LINK}]


def measure(row: dict[str, Any], repeats: int) -> dict[str, Any]:
    """The row of one plan, made in this process."""
    given = USUAL | row
    options = {key: given[key] for key in ("topology", "network", "faults", "availability") if key in given}
    seconds, waving = [], 0.0
    for _ in range(repeats):
        began = time.process_time()
        plan = plan_peers(
            given["exchange"],
            given["delays"],
            num_clients=given["nodes"],
            local_steps=10,
            until=Until(updates=given["events"]),
            message_bytes=100_000,
            **options,
        )
        seconds.append(time.process_time() - began)
    peak = peak_memory()  # before the waves
    began = time.process_time()
    waves = int(peer_waves(plan).max()) + 1
    waving = time.process_time() - began
    pushes = len(plan.receiver)
    conditions = ", ".join(str(given[key]) for key in ("network", "faults", "availability") if key in given)
    return {
        "exchange": given["exchange"],
        "topology": given["topology"],
        "conditions": conditions,
        "nodes": given["nodes"],
        "events": len(plan.client),
        "pushes": pushes,
        "waves": waves,
        "seconds": min(seconds),
        "pushes / s": pushes / min(seconds),
        "with waves": pushes / (min(seconds) + waving),
        "peak memory (MiB)": peak,
    }


def main() -> None:
    """Parse, measure each plan in its own process, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/peer_planning.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    parser.add_argument("--one", type=json.loads, default=None, help="measure this row here and print it as JSON")
    a = parser.parse_args()
    if a.one is not None:
        print(json.dumps(measure(a.one, a.repeats)))
        return
    rows = []
    for row in SMOKE if a.smoke else ROWS:
        once = a.smoke or row.get("nodes") == 1_000_000
        rows.append(one_process(__file__, json.dumps(row), "--repeats", 1 if once else a.repeats))
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "peer_planning.csv")
    else:
        print(rows, hardware(), sep="\n")


if __name__ == "__main__":
    main()
