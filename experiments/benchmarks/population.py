"""From a hundred clients to a million: time per update, planning time per event and peak memory.

    python experiments/benchmarks/population.py
    python experiments/benchmarks/population.py --model mlp logistic
    python experiments/benchmarks/population.py --smoke    # does it run

FedAsync, MLP-64 on 784 features by default; ``--model logistic`` shows the cost of the engine itself. The data set is
the generated ``population``, delays are exponential, 1,000 clients are in flight (all, if there are fewer). Each size
runs in a separate process, so that its peak memory can be measured. The first run compiles; later ones are timed. The
time per update should depend on the clients in flight, not on the population. The last column is its ratio to that of
1,000 clients with the same model, where as many are in flight. Planning is timed twice: for this run, and with at least
one client waiting. If no client waits, clients do not depend on each other and are planned without the event queue, in
about a third of the time. With one client waiting, every size is planned with the event queue.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import one_process, peak_memory, write_table

from fedjax_async import Settings
from fedjax_async.clock import Until, plan, waves
from fedjax_async.config import execute, prepare
from fedjax_async.engine import default_lanes

IN_FLIGHT = 1000


def settings(model: str, clients: int, updates: int, lanes: int | None = None) -> Settings:
    """The settings of one run of the benchmark."""
    concurrency = min(clients, IN_FLIGHT)
    return Settings(
        method=f"fedasync@every:concurrency={concurrency}",
        delay="exponential",
        dataset="population:features=784",
        clients=clients,
        model=model,
        steps=10,
        updates=updates,
        eval_updates=updates,
        lanes=lanes,
    )


def planning_time(s: Settings, timing: str, updates: int) -> float:
    """Seconds per event to plan ``updates`` updates, waves included."""
    began = time.perf_counter()
    planned = plan(timing, s.delay, num_clients=s.clients, local_steps=10, until=Until(updates=updates))
    waves(planned)
    return (time.perf_counter() - began) / len(planned.job)


def measure(model: str, clients: int, updates: int, repeats: int, lanes: int | None) -> dict[str, Any]:
    """The row of one model and size, measured in this process."""
    s = settings(model, clients, updates, lanes)
    timing = s.method.partition("@")[2]
    usual = planning_time(s, timing, 10 * updates)
    queued = planning_time(s, f"every:concurrency={min(clients - 1, IN_FLIGHT)}", 10 * updates)
    experiment = prepare(s)
    execute(experiment)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        execute(experiment)
        seconds.append(time.perf_counter() - began)
    return {
        "model": model,
        "clients": clients,
        "in flight": min(clients, IN_FLIGHT),
        "lanes": lanes or default_lanes(),
        "updates": updates,
        "us / update": 1e6 * min(seconds) / updates,
        "us / planned event": 1e6 * usual,
        "one waiting": 1e6 * queued,
        "peak memory (MiB)": peak_memory(),
    }


def main() -> None:
    """Parse, measure each model and size in its own process, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["mlp"], metavar="SPEC", help="models, one table each [mlp]")
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=None, help="batches trained at the same time [one per core]")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/population.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    parser.add_argument("--one", action="store_true", help="measure the first model and size here and print it as JSON")
    a = parser.parse_args()
    if a.smoke:
        a.clients, a.updates, a.repeats = [100, 2000], 200, 1
    if a.one:
        print(json.dumps(measure(a.model[0], a.clients[0], a.updates, a.repeats, a.lanes)))
        return
    rows = []
    for model in a.model:
        usual = ["--updates", a.updates, "--repeats", a.repeats, *([] if a.lanes is None else ["--lanes", a.lanes])]
        sizes = [one_process(__file__, "--model", model, "--clients", clients, *usual) for clients in a.clients]
        base = {row["clients"]: row["us / update"] for row in sizes}.get(IN_FLIGHT, sizes[0]["us / update"])
        rows += [row | {"to 1,000 clients": row["us / update"] / base} for row in sizes]
    folder = Path(__file__).parent / "results"
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or folder / "population.csv")


if __name__ == "__main__":
    main()
