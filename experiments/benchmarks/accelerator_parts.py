"""The measurements of ``accelerator.py``; ``accelerator_queue.py`` has their order.

A measurement is a generator: it prepares itself and compiles, yields once, and is timed after that; it returns rows. So
several can be prepared side by side, and one at a time is timed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import conv
import jax
import numpy as np
import population
import throughput
from common import interleave

from fedjax_async import Settings, named, simulate, sweep
from fedjax_async.config import execute, prepare
from fedjax_async.data import Dataset
from fedjax_async.engine.devices import device_memory, temporary_bytes
from fedjax_async.models import LOWERINGS

Row = dict[str, Any]
Rows = Generator[None, None, list[Row]]
ORACLE_METHODS = ("fedasync", "fedbuff@buffer:size=3", "fedavg@cohort:size=3", "scaffold", "orthofl")
ALLOWED = {"cpu": 1e-4}  # largest distance to the oracle, relative to the distance travelled
ELSEWHERE = 1e-3  # on other devices: their products add in another order and may round their factors
CONSTANT, LOGNORMAL = "constant:mean=10", "lognormal:mean=60,sigma=0.5"
REPEATS = 3
NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
TUNED = {"XLA_FLAGS": "--xla_gpu_autotune_level=4 --xla_gpu_enable_triton_gemm=true"}
TRACED = {"XLA_FLAGS": "--xla_enable_command_buffers_during_profiling"}
FLOAT32 = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
CHARACTERS, LENGTH = 82, 80  # of the texts that a character model reads


class Measurement(NamedTuple):
    """One entry of the queue."""

    name: str
    seconds: float  # what it takes on an H100 once it is prepared, as a guess
    make: Callable[[bool], Rows]  # from whether it is to be as small as possible
    environment: Mapping[str, str] = {}  # further variables of its process; XLA_FLAGS are added to those that are set


def rows_of(rates: list[float], **more: Any) -> list[Row]:
    """One row: the median of the rates, the least and the most."""
    row = {"quantity": "updates / s", "value": float(np.median(rates)), "least": min(rates), "most": max(rates)}
    return [row | more]


# --- does it run, and right --------------------------------------------------------------------------


def oracle(method: str, model: str) -> Callable[[bool], Rows]:
    """Distance of the engine's final parameters from the oracle's, relative to the distance travelled."""

    def measure(smoke: bool) -> Rows:
        updates = 6 if smoke else 18
        settings = Settings(method=method, model=model, clients=6, updates=updates, steps=3, delay="constant")
        yield
        with jax.default_matmul_precision("highest"):
            start = prepare(settings).params
            found = execute(prepare(replace(settings, batching="vmap"))).params  # the default on accelerators
            expected = execute(prepare(replace(settings, engine="reference"))).params
        flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (start, found, expected)]
        distance = float(np.linalg.norm(flat[1] - flat[2]) / np.linalg.norm(flat[2] - flat[0]))
        allowed = ALLOWED.get(jax.default_backend(), ELSEWHERE)
        name = f"distance to the oracle, at most {allowed:g}"
        return [{"quantity": name, "value": distance, "ok": distance <= allowed}]

    return measure


# --- client updates a second ----------------------------------------------------------------------------


def made_up(shape: tuple[int, ...], total: int, classes: int = 10) -> Any:
    """Random images of a shape, as the dataset of a setting."""
    rng = np.random.default_rng(0)
    x, y = rng.random((total, *shape), np.float32), rng.integers(0, classes, total).astype(np.int32)
    return named("made_up", Dataset(name="made_up", x=x, y=y, test_x=x[:1000], test_y=y[:1000], num_classes=classes))


def made_up_texts(total: int) -> Any:
    """Random texts whose next characters are to be predicted, as the dataset of a setting."""
    text = np.random.default_rng(0).integers(1, CHARACTERS, (total, LENGTH + 1))
    x, y = text[:, :-1].astype(np.uint8), text[:, 1:].astype(np.int32)
    return named("made_up", Dataset(name="made_up", x=x, y=y, test_x=x[:64], test_y=y[:64], num_classes=CHARACTERS))


def given(method: str, model: str, clients: int, updates: int, smoke: bool, **more: Any) -> dict[str, Any]:
    """The settings of a run of the queue: 10 local SGD steps of batch 32 on random data."""
    examples = 600 if more.get("batch_size", 32) == 128 else 64
    clients, updates, steps = (min(clients, 24), 24, 1) if smoke else (clients, updates, 10)
    usual = {
        "delay": CONSTANT,
        "steps": steps,
        "batch_size": 32,
        "lr": 0.05,
        "partition": "iid",
        "eval_updates": updates,
    }
    run = {"method": method, "model": model, "clients": clients, "updates": updates}
    more |= {"batch_size": 4} if smoke else {}
    total, texts = clients * examples, model.startswith("char")
    data = made_up_texts(total) if texts else made_up(throughput.SHAPES[model.partition(":")[0]], total)
    return usual | run | {"dataset": data} | more


def timed(call: Callable[[], int]) -> Rows:
    """Rows of updates a second; ``call`` returns how many updates it made."""
    call()
    yield
    rates = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        done = call()
        rates.append(done / (time.perf_counter() - began))
    return rows_of(rates, updates=done)


def rate(method: str, model: str, clients: int, updates: int, **more: Any) -> Callable[[bool], Rows]:
    """Client updates a second of ``simulate``: planning, training, one evaluation at either end."""

    def measure(smoke: bool) -> Rows:
        settings = given(method, model, clients, updates, smoke, **more)

        def call() -> int:
            run = simulate(**settings)
            jax.block_until_ready(run.params)
            return len(run.updates["client"])

        return (yield from timed(call))

    return measure


def swept(runs: int) -> Callable[[bool], Rows]:
    """Client updates a second of all runs of a sweep of seeds: MLP-64, 10 clients, FedAsync."""

    def measure(smoke: bool) -> Rows:
        settings = given("fedasync", "mlp:hidden=64", 10, 200, smoke)
        seeds = min(runs, 4) if smoke else runs

        def call() -> int:
            found = sweep(settings, {"lr": [0.05]}, seeds=seeds, progress=False).runs
            return sum(len(run.updates["client"]) for run in found)

        return (yield from timed(call))

    return measure


def torch_loop(model: str) -> Callable[[bool], Rows]:
    """Client updates a second of PyTorch by hand, one client after the other (``torch_loop.py``)."""

    def measure(smoke: bool) -> Rows:
        data = throughput.make_data(model, 8 if smoke else 100)
        jobs = 4 if smoke else 40 if model in throughput.LARGE else 200
        loop = throughput.torch_loop(model, data, jobs)

        def call() -> int:
            loop()
            return jobs

        return (yield from timed(call))

    return measure


def torch_waves(model: str) -> Callable[[bool], Rows]:
    """Client updates a second of PyTorch by hand, clients side by side (``torch_waves.py``)."""

    def measure(smoke: bool) -> Rows:
        from torch_waves import Waves  # noqa: PLC0415 (PyTorch is optional)

        data = throughput.make_data(model, 8 if smoke else 100)
        shards = np.stack([data.order[a : a + n] for a, n in zip(data.offset, data.size)])
        waves = Waves(model, data.x, data.y, shards, 32, 10, compiled=not smoke)
        count = 1 if smoke else 20
        return (yield from timed(lambda: waves.run(count)))

    return measure


# --- the same bits ------------------------------------------------------------------------------------------


BITS: Mapping[str, dict[str, Any]] = {
    "MLP-64": {"method": "fedasync", "model": "mlp:hidden=64", "updates": 500},
    "LeNet-5": {"method": "fedasync", "model": "lenet5", "updates": 200},
    "GRU": {"method": "fedasync", "model": "char_gru", "updates": 100, "batch_size": 8},
    "PushCen": {"method": "pushcen", "model": "mlp:hidden=64", "updates": 100, "delay": LOGNORMAL},
}


def bits(name: str, smoke: bool) -> str:
    """A digest of the final parameters."""
    run = simulate(**given(clients=40, smoke=smoke, **BITS[name]))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.params))).hexdigest()[:12]


def same_bits(name: str) -> Callable[[bool], Rows]:
    """Whether another process ends with the same parameters."""

    def measure(smoke: bool) -> Rows:
        here = bits(name, smoke)
        yield
        line = [sys.executable, str(Path(__file__).with_name("accelerator.py")), "--bits", name]
        line += ["--smoke"] if smoke else []
        there = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        return [{"quantity": "equal bits in two processes", "value": float(here == there), "ok": here == there}]

    return measure


# --- jobs of other simulators -----------------------------------------------------------------------------


class Job(NamedTuple):
    """A synchronous job whose time its authors published."""

    rounds: int
    users: int  # of a cohort
    examples: int  # of a user; one epoch of them is a user's training
    batch: int
    shape: tuple[int, ...]
    classes: int


CIFAR10 = Job(1500, 50, 50, 10, (32, 32, 3), 10)  # pfl-research
FEMNIST = Job(1500, 10, 220, 20, (28, 28, 1), 62)  # FLUTE


def cohorts(job: Job, share: int) -> Callable[[bool], Rows]:
    """Seconds of a job with the CNN, from the rate of its first rounds: 1/``share`` of them are trained."""

    def measure(smoke: bool) -> Rows:
        users, some = (3, 2) if smoke else (job.users, job.rounds // share)
        settings = {
            "method": f"fedavg@cohort:size={users}",
            "model": "cnn",
            "clients": 20 * users,
            "delay": CONSTANT,
            "steps": -(-job.examples // job.batch),
            "batch_size": job.batch,
            "lr": 0.05,
            "partition": "iid",
            "updates": some * users,
            "eval_updates": some * users,
            "dataset": made_up(job.shape, 20 * users * job.examples, job.classes),
        }

        def call() -> int:
            jax.block_until_ready(simulate(**settings).params)
            return some * users

        rows = yield from timed(call)
        seconds = [job.rounds * job.users / rows[0][name] for name in ("value", "most", "least")]
        whole = dict(zip(("value", "least", "most"), seconds))
        return [*rows, {"quantity": f"seconds of {job.rounds} rounds by this rate"} | whole]

    return measure


# --- populations, memory, lowerings, profile ------------------------------------------------------------------


def populations(clients: int) -> Callable[[bool], Rows]:
    """Time per update by the size of the population (``population.py``)."""

    def measure(smoke: bool) -> Rows:
        yield
        row = population.measure("logistic", 100 if smoke else clients, 200 if smoke else 4000, 1, None)
        return [{"quantity": name, "value": row[name]} for name in ("us / update", "us / planned event")]

    return measure


def memory(model: str) -> Callable[[bool], Rows]:
    """Memory of the vmapped kernel according to XLA: per client, and the width that would fill the device."""

    def measure(smoke: bool) -> Rows:
        del smoke
        base = throughput.experiment(model, throughput.make_data(model, 8), "constant", "fedasync", 8)
        need = []
        for width in (2, 8):
            compiled = throughput.bare_program(base, "vmap").lower(*throughput.bare_jobs(base, width)).compile()
            found = compiled.memory_analysis()
            need.append(temporary_bytes(compiled) + (0 if found is None else int(found.output_size_in_bytes)))
        yield
        each = max(1.0, (need[1] - need[0]) / 6)
        widest = (device_memory() - need[0]) // each
        return [
            {"quantity": "MiB a client", "value": each / 2**20},
            {"quantity": "clients that fit", "value": float(widest)},
        ]

    return measure


def lowerings(layer: str, clients: int) -> Callable[[bool], Rows]:
    """Forward and backward of a layer for clients with kernels of their own (``conv.py``), by lowering."""

    def measure(smoke: bool) -> Rows:
        calls = {how: conv.layer_call(layer, how, clients, 2 if smoke else 32) for how in LOWERINGS}
        for call in calls.values():
            jax.block_until_ready(call())
        yield
        found = {how: 1e3 * np.array(t) / clients for how, t in interleave(calls, REPEATS).items()}
        return [
            {"quantity": f"ms a client, {how}", "value": float(np.median(t))}
            | {"least": float(t.min()), "most": float(t.max())}
            for how, t in found.items()
        ]

    return measure


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, -np.inf
    for low, high in sorted(spans):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return float(total)


def shares(events: list[Mapping[str, Any]], wall: float) -> dict[str, float]:
    """Shares of ``wall`` (microseconds): training; server steps without training; other programs; none of these."""
    spans: dict[str, list[tuple[float, float]]] = {"train": [], "receive": [], "other": []}
    for event in events:
        module = str(event.get("args", {}).get("hlo_module", ""))
        if event.get("ph") == "X" and module:
            kind = next((name for name in ("train", "receive") if name in module), "other")
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    train = covered(spans["train"])
    receive = covered(spans["train"] + spans["receive"]) - train
    other = covered([span for found in spans.values() for span in found]) - train - receive
    parts = {"training": train, "receive": receive, "evaluation and others": other}
    host = {"host alone": max(0.0, wall - sum(parts.values()))}
    return {f"{name} (%)": 100 * part / wall for name, part in (parts | host).items()}


def profile(model: str, delay: str, updates: int) -> Callable[[bool], Rows]:
    """Shares of the time of a run, from a trace of JAX's profiler."""

    def measure(smoke: bool) -> Rows:
        settings = given("fedasync", model, 100, updates, smoke, delay=delay)
        simulate(**settings)
        yield
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python would double the time
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                began = time.perf_counter()
                simulate(**settings)
                wall = 1e6 * (time.perf_counter() - began)
            with gzip.open(max(Path(folder).rglob("*.trace.json.gz")), "rt", encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
        return [{"quantity": name, "value": value} for name, value in shares(events, wall).items()]

    return measure
