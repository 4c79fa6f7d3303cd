"""Client updates per second: the engine beside its bare kernel, the reference engine and a short PyTorch loop.

    python experiments/benchmarks/throughput.py                     # everything, about 45 minutes on 2 cores
    python experiments/benchmarks/throughput.py --clients 100 --delays constant --methods fedasync
    python experiments/benchmarks/throughput.py --models vgg11 --clients 10 --beside torch --repeats 7
    python experiments/benchmarks/throughput.py --smoke             # a minute: does it run

A job is 10 local SGD steps of batch 32 (2 steps of VGG-11 and ResNet-18). Inputs are random images (speed does not
depend on their values): 28 x 28 x 1, for the CNN and these two 32 x 32 x 3; 96 examples per client, so that every batch
is full. All programs for one model and number of clients are interleaved, repeat after repeat, in one process. A ratio
is computed within each repeat, because the machine's speed drifts; the table has its median over the repeats, and the
minimum and maximum of engine / torch.

* engine: ``execute``, everything after the schedule is known: waves, slots, transfers, training,
  server steps, records, two evaluations.
* bare: only gather, decode, dropout, gradient and SGD step in one compiled call; the fastest of three: vmapped over 4
  clients, vmapped over all of them, and one client after the other.
* bare in lanes: the same arithmetic, batched as in the engine (``default_batching``) and run from as many host threads;
  the ratio to it shows the overhead of the engine.
* reference: the plain event loop of ``engine/reference.py``.
* torch: ``torch_loop.py`` (extra ``bench``), where PyTorch is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import hardware, interleave, write_table

from fedjax_async import Settings
from fedjax_async.config import execute, prepare
from fedjax_async.config.prepared import Experiment
from fedjax_async.data import Dataset, federate
from fedjax_async.engine import default_batching, default_lanes, default_width
from fedjax_async.results import table

STEPS, BATCH, SHARD = 10, 32, 96
SHAPES = {"logistic": (28, 28, 1), "mlp": (28, 28, 1), "lenet5": (28, 28, 1), "cnn": (32, 32, 3)}
LARGE = ("vgg11", "resnet18")  # a step takes most of a second on one core
SHAPES |= dict.fromkeys(LARGE, (32, 32, 3))
DELAYS = {"constant": "constant", "lognormal": "constant:heterogeneity=0.5", "exponential": "exponential"}
TIMINGS = {"fedasync": "every", "fedbuff": "buffer:size=10", "fedavg": "cohort:size=10"}
WIDE = {"lenet5": 100, "cnn": 8, "vgg11": 4, "resnet18": 4}  # most clients that fit into memory at once
BESIDE = ("bare", "lanes", "reference", "torch")  # what the engine is compared with
UNIT = 20  # the number of jobs of a timed call is a multiple of this
SECONDS = 1.0  # approximate length of a timed call


def steps_of(model: str) -> int:
    """Local steps of a job."""
    return 2 if model in LARGE else STEPS


def decode(x: jax.Array) -> jax.Array:
    """uint8 -> [-0.5, 0.5]."""
    return x.astype(jnp.float32) / 255.0 - 0.5


def make_data(model: str, clients: int) -> Any:
    """Random images, ``SHARD`` per client."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * SHARD, *SHAPES[model]), np.uint8)
    y = rng.integers(0, 10, clients * SHARD).astype(np.int32)
    data = federate(Dataset("random", x, y, x[:100], y[:100], decode, 10), "iid", clients, seed=0)
    assert (data.size == SHARD).all(), "every batch must be full"
    return data


def experiment(model: str, data: Any, delay: str, method: str, updates: int, engine: str = "waves") -> Experiment:
    """A run of ``updates`` jobs, planned and ready to execute."""
    settings = Settings(
        method=f"{method}@{TIMINGS[method]}",
        delay=DELAYS[delay],
        model=model,
        steps=steps_of(model),
        batch_size=BATCH,
        updates=updates,
        eval_updates=updates,
        engine=engine,
    )
    return prepare(settings, data=data)


def bare_jobs(base: Experiment, width: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Arguments for :func:`bare_program`: start model, minibatches [width, K, B], begin of each shard [width]."""
    steps = steps_of(base.settings.model)
    positions = np.random.default_rng(0).integers(0, SHARD, (width, steps, BATCH), np.int32)
    return base.params, positions, np.arange(width, dtype=np.int32) % len(base.components.data.size) * SHARD


def bare_program(base: Experiment, batching: str = "vmap", *, counted: bool = False) -> Any:
    """The arithmetic alone, compiled; with ``counted`` the number of steps is an argument, unknown at compile time."""
    model, data = base.components.model, base.components.data
    x, y, order = jax.device_put((data.x, data.y, data.order))
    usual = steps_of(base.settings.model)

    def job(params: Any, positions: jax.Array, offset: jax.Array, steps: Any = usual) -> Any:
        key = jax.random.key(offset)

        def step(k: jax.Array, params: Any) -> Any:
            index, chance = order[offset + positions[k]], jax.random.fold_in(key, k)  # dropout: a new mask each step

            def objective(params: Any) -> jax.Array:
                return jnp.mean(model.loss(model.apply(params, x[index], chance), y[index]))

            return jax.tree.map(lambda w, g: w - 0.01 * g, params, jax.grad(objective)(params))

        return jax.lax.fori_loop(0, steps, step, params)

    def looped(params: Any, *jobs: jax.Array) -> Any:
        return jax.lax.map(lambda one: job(params, *one), jobs)

    shared = (None, 0, 0, None) if counted else (None, 0, 0)
    return jax.jit(jax.vmap(job, in_axes=shared) if batching == "vmap" else looped)


def bare(base: Experiment, width: int, jobs: int, batching: str = "vmap") -> Any:
    """A call of the arithmetic alone: ``jobs`` jobs in batches of ``width``."""
    train, arguments = bare_program(base, batching), bare_jobs(base, width)

    def run() -> None:
        for _ in range(-(-jobs // width)):
            out = train(*arguments)
        jax.block_until_ready(out)

    return run


def bare_in_lanes(base: Experiment, width: int, jobs: int) -> Any:
    """:func:`bare` with the engine's batching, split over ``default_lanes()`` host threads."""
    lanes = default_lanes()
    run = bare(base, width, jobs // lanes, default_batching())

    def together() -> None:
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(lambda _: run(), range(lanes)))

    return together


def torch_loop(model: str, data: Any, jobs: int) -> Any:
    """A call of the PyTorch loop over ``jobs`` jobs; ``None`` without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from torch_loop import Loop  # noqa: PLC0415 (PyTorch is optional)

    shards = [data.order[a : a + n] for a, n in zip(data.offset, data.size)]
    loop = Loop(model, data.x, data.y, shards, BATCH, steps_of(model))
    clients = np.random.default_rng(0).integers(0, len(shards), jobs)
    return lambda: loop.run(clients)


def calibrated(make: Any, unit: int, seconds: float) -> int:
    """The number of jobs that take about ``seconds``, a multiple of ``unit``."""
    run = make(unit)
    run()
    began = time.perf_counter()
    run()
    return max(1, round(seconds / (time.perf_counter() - began))) * unit


def measure(
    model: str,
    clients: int,
    delays: list[str],
    methods: list[str],
    repeats: int,
    seconds: float,
    beside: Collection[str] = BESIDE,
) -> list[dict[str, Any]]:
    """Time one model and number of clients, all programs interleaved; one row per (delay, method)."""
    data = make_data(model, clients)
    base = experiment(model, data, "constant", "fedasync", clients)
    width = min(UNIT // default_lanes(), default_width(base.params))
    jobs = UNIT if model in ("cnn", *LARGE) else calibrated(lambda n: bare(base, width, n, "loop"), UNIT, seconds)
    contenders: dict[Any, Any] = {}
    counts: dict[Any, int] = {}

    def add(name: Any, run: Any, count: int) -> None:
        if run is not None:
            contenders[name], counts[name] = run, count

    def rounded(jobs: int, unit: int) -> int:
        return -(-jobs // unit) * unit

    wide = min(clients, WIDE.get(model, clients))
    if "bare" in beside:
        for name, at_once, batching in (("vmap", 4, "vmap"), ("wide", wide, "vmap"), ("loop", width, "loop")):
            add(("bare", name), bare(base, at_once, jobs, batching), rounded(jobs, at_once))
    lanes = default_lanes()
    if "lanes" in beside:
        add("bare in lanes", bare_in_lanes(base, width, jobs), rounded(jobs // lanes, width) * lanes)
    few = max(UNIT // 2, jobs // 4)  # fewer jobs for the slow programs
    if "torch" in beside:
        add("torch", torch_loop(model, data, few), few)
    for delay in delays:
        if "reference" in beside:
            slow = experiment(model, data, delay, "fedasync", few, engine="reference")
            add(("reference", delay), lambda e=slow: execute(e), few)
        for method in methods:
            one = experiment(model, data, delay, method, jobs)
            add((delay, method), lambda e=one: execute(e), jobs)
    rate = {name: counts[name] / np.asarray(times) for name, times in interleave(contenders, repeats).items()}
    if "bare" in beside:
        rate["fastest"] = np.max([rate["bare", name] for name in ("vmap", "wide", "loop")], axis=0)
    missing = np.full(repeats, np.nan)  # not measured, or PyTorch is not installed
    fastest, torch = (rate.get(name, missing) for name in ("fastest", "torch"))

    return [
        {
            "model": model,
            "clients": clients,
            "delays": delay,
            "method": method,
            "engine (1/s)": float(np.median(rate[delay, method])),
            "bare (1/s)": float(np.median(fastest)),
            "reference (1/s)": float(np.median(rate.get(("reference", delay), missing))),
            "torch (1/s)": float(np.median(torch)),
            "engine / bare": float(np.median(rate[delay, method] / fastest)),
            "engine / bare in lanes": float(np.median(rate[delay, method] / rate.get("bare in lanes", missing))),
            "engine / reference": float(np.median(rate[delay, method] / rate.get(("reference", delay), missing))),
            "engine / torch": float(np.median(rate[delay, method] / torch)),
            "least": float(np.min(rate[delay, method] / torch)),
            "largest": float(np.max(rate[delay, method] / torch)),
        }
        for delay in delays
        for method in methods
    ]


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--delays", nargs="+", choices=DELAYS, default=list(DELAYS))
    parser.add_argument("--methods", nargs="+", choices=TIMINGS, default=list(TIMINGS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--beside", nargs="+", choices=BESIDE, default=list(BESIDE), help="compare with these [all]")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/throughput.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, one repeat; writes if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.models, a.clients, a.delays, a.methods, a.repeats = ["logistic"], [10], ["exponential"], ["fedbuff"], 1
    rows: list[dict[str, Any]] = []
    for model in a.models:
        for clients in a.clients:
            rows += measure(model, clients, a.delays, a.methods, a.repeats, 0.02 if a.smoke else SECONDS, a.beside)
            if a.out is not None or not a.smoke:
                write_table(rows, a.out or Path(__file__).parent / "results" / "throughput.csv")
            else:
                print(table(rows), hardware(), sep="")


if __name__ == "__main__":
    main()
