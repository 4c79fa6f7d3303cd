"""A decentralised run of the size of PushCen-ADFL's CIFAR-10 experiment: the engine, its oracle and a PyTorch loop.

    python experiments/benchmarks/peers.py             # the first virtual seconds, in turn: three minutes
    python experiments/benchmarks/peers.py --whole     # the whole run once, with its 60 evaluations
    python experiments/benchmarks/peers.py --smoke     # seconds

100 nodes with 400 training images each on average (Dirichlet(0.4), 80 % of 50,000), the 256,830-parameter LeNet, K = 32
centroids, Adam, one epoch of batches of 32 an event at 0.1 virtual seconds a step, gossip to 10 receivers, a tenth of
the nodes late, horizon 60. The images are random with the shape of CIFAR-10's: speed does not depend on their values.

* engine: ``run_stack``, after planning and compiling: events in waves, one lane per core.
* oracle: ``run_peer_reference``, the same events one at a time.
* torch: ``torch_peers.py`` (extra ``bench``): the same steps and clusterings, one event at a time.

The three are interleaved within one process, and the table has the medians of the repeats' ratios, of elapsed and of
processor time. Evaluation is negligible in this short run. ``--whole`` also evaluates each node on its own 100 test
images, at 61 moments. The two commands write ``peers.csv`` and ``peers_whole.csv``. Measured numbers: README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import both_clocks, hardware, interleave, peak_memory, write_table

from fedjax_async.clock import Until
from fedjax_async.data import Dataset, decode, federate
from fedjax_async.engine import default_lanes
from fedjax_async.engine.components import Components
from fedjax_async.engine.peer_reference import run_peer_reference
from fedjax_async.engine.peer_run import PeerStack, make_peer_member, make_peer_stack, peer_layout_of
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stacking import shape_of
from fedjax_async.local import local_steps
from fedjax_async.local.anchored import anchored_training
from fedjax_async.models import decoded, make
from fedjax_async.peers import plan_peers, pushcen

BATCH, EVALUATIONS = 32, 60


def stays(path: Any) -> bool:
    """Nothing stays with its node: LeNet has no BatchNorm."""
    return False


def made_up(a: argparse.Namespace) -> Any:
    """Random images whose mean depends on the class, divided among the nodes; in the whole run also their tests."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, a.images).astype(np.int32)
    x = rng.integers(0, 156, (a.images, *a.shape), np.uint8) + (10 * y).astype(np.uint8)[:, None, None, None]
    data = federate(Dataset("made up", x, y, x[:20], y[:20], decode.unit_images, 10), "dirichlet:alpha=0.4,min_size=10",
                    a.nodes, seed=0, test_fraction=0.2)  # fmt: skip
    if not a.whole:
        data = data._replace(test_x=data.test_x[:20], test_y=data.test_y[:20], test_order=None)
    return data


def problem(a: argparse.Namespace) -> tuple[Any, ...]:
    """The arguments of either engine."""
    data = made_up(a)
    model = decoded(make(a.model), data.decode)
    steps = local_steps(data.size, batch_size=BATCH, epochs=1)
    plan = plan_peers(
        "push_sum",
        "constant:mean=0.1,reference_steps=1",
        num_clients=a.nodes,
        local_steps=steps,
        until=Until(time=a.horizon),
        topology=f"gossip:receivers={a.receivers}",
        availability="joins:share=0.1,by=35",
    )
    client = anchored_training(model, optimizer=optax.adam(1e-3), batch_size=BATCH)
    components = Components(pushcen(stays, k=a.k), client, model, data)
    points = np.linspace(0, a.horizon, EVALUATIONS + 1 if a.whole else 2)
    return components, plan, model.init(jax.random.key(0)), jax.random.key(1), points


def compiled(given: tuple[Any, ...], lanes: int | None) -> PeerStack:
    """The compiled run on the device, laid out as by ``run_peer_waves``."""
    members = [make_peer_member(*given, global_tests="never")]
    layout = peer_layout_of(members, lanes=lanes or default_lanes(), batching="loop")
    return make_peer_stack(members, layout, shape_of(layout))


def calls_of(given: tuple[Any, ...], a: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Program -> its call; all calls are interleaved."""
    run = compiled(given, a.lanes)
    calls: dict[str, Callable[[], Any]] = {
        "engine": lambda: run_stack(run)[0].params,
        "oracle": lambda: run_peer_reference(*given, global_tests="never").params,
    }
    if a.model == "lenet5_cifar" and importlib.util.find_spec("torch") is not None:
        from torch_peers import Loop  # noqa: PLC0415 (PyTorch is optional)

        loop = Loop(given[0].data, given[1], k=a.k, batch=BATCH)
        assert loop.parameters() == sum(leaf.size for leaf in jax.tree.leaves(given[2]))
        calls["torch"] = loop.run
    return calls


def measured_cut(a: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per program: seconds of the short run, and the median ratio to the engine."""
    given = problem(a)
    calls = calls_of(given, a)
    found = interleave(calls, a.repeats, clock=both_clocks)
    seconds, spent = ({name: np.array(times)[:, i] for name, times in found.items()} for i in (0, 1))
    events, steps = len(given[1].client), int(given[1].local_steps.sum())
    return [
        {
            "program": name,
            "nodes": a.nodes,
            "events": events,
            "steps": steps,
            "repeats": a.repeats,
            "seconds": float(np.median(times)),
            "ms a step": float(1e3 * np.median(times) / steps),
            "events a second": float(events / np.median(times)),
            "time / engine": float(np.median(times / seconds["engine"])),
            "CPU seconds": float(np.median(spent[name])),
            "CPU time / engine": float(np.median(spent[name] / spent["engine"])),
        }
        for name, times in seconds.items()
    ]


def measured_whole(a: argparse.Namespace) -> list[dict[str, Any]]:
    """The row of the whole run, executed once in this process."""
    began = time.perf_counter()
    given = problem(a)
    planned = time.perf_counter()
    run = compiled(given, a.lanes)
    ready, cpu = time.perf_counter(), time.process_time()

    def progress(done: int, total: int, **seen: Any) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} events, accuracy {seen['accuracy']:.3f}", end="", file=sys.stderr, flush=True)

    (found,) = run_stack(run, progress=progress)
    done, spent = time.perf_counter(), time.process_time() - cpu
    peak = peak_memory()
    schedule = given[1]
    return [
        {
            "nodes": a.nodes,
            "events": len(schedule.client),
            "steps": int(schedule.local_steps.sum()),
            "messages": len(schedule.receiver),
            "waves": found.counters["waves"],
            "slots": found.counters["slots"],
            "seconds to plan": planned - began,
            "to compile": ready - planned,
            "minutes": (done - ready) / 60,
            "CPU minutes": spent / 60,
            "peak memory (MiB)": peak,
            "accuracy": float(np.nanmean(found.scores["accuracy"][-1])),
        }
    ]


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5_cifar")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--k", type=int, default=32, help="centroids per layer")
    parser.add_argument("--receivers", type=int, default=10)
    parser.add_argument("--horizon", type=float, default=None, help="virtual seconds [2, with --whole 60]")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=None, help="batches trained at the same time [one per core]")
    parser.add_argument("--whole", action="store_true", help="the whole run once, only by the engine")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/peers.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    a.shape = (32, 32, 3)
    if a.smoke:
        a.model, a.nodes, a.images, a.k, a.repeats, a.shape, a.receivers = "logistic", 4, 400, 4, 1, (28, 28, 1), 2
    a.horizon = a.horizon or (60.0 if a.whole else 2.0)
    rows = measured_whole(a) if a.whole else measured_cut(a)
    if a.out is not None or not a.smoke:
        name = "peers_whole.csv" if a.whole else "peers.csv"
        write_table(rows, a.out or Path(__file__).parent / "results" / name)
    else:
        print(rows, hardware(), sep="\n")


if __name__ == "__main__":
    main()
