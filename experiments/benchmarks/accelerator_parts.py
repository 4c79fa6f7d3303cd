"""The measurements of ``accelerator.py``. A part lists ``(name, call)``; a call takes seconds and returns rows."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import conv
import jax
import numpy as np
import population
import sweep
import throughput
from common import interleave

from fedjax_async import Settings
from fedjax_async.config import execute, prepare
from fedjax_async.engine.devices import device_memory, temporary_bytes
from fedjax_async.models import LOWERINGS

Row = dict[str, Any]
Item = tuple[str, Callable[[], list[Row]]]
ORACLE_METHODS = ("fedasync", "fedbuff@buffer:size=3", "fedavg@cohort:size=3", "scaffold", "orthofl")
TOLERANCE = {"cpu": 1e-4}  # largest allowed distance to the oracle, relative to the distance travelled
PRECISIONS = ("highest", "tensorfloat32", "bfloat16")  # values of jax_default_matmul_precision
SLOW = ("cnn", *throughput.LARGE)  # measured in one repeat, because a call takes many seconds on a CPU
ELSEWHERE = 1e-3  # tolerance on other devices: their products add in another order and may round their factors


@dataclass(frozen=True)
class Size:
    """The sizes of all measurements."""

    repeats: int = 3
    seconds: float = 0.5  # approximate length of one timed call
    clients: int = 100
    widths: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    sweeps: tuple[int, ...] = (1, 4, 16)  # numbers of seeds, each with 16 settings
    populations: tuple[int, ...] = (1000, 100_000, 1_000_000)
    updates: int = 2000
    models: tuple[str, ...] = tuple(throughput.SHAPES)
    lowerings: tuple[str, ...] = tuple(LOWERINGS)
    layers: tuple[str, ...] = tuple(conv.LAYERS)
    methods: tuple[str, ...] = ORACLE_METHODS


SMOKE = Size(
    repeats=1,
    seconds=0.02,
    clients=10,
    widths=(1, 4),
    sweeps=(1,),
    populations=(1000,),
    updates=40,
    models=("logistic",),
    lowerings=("im2col",),
    layers=("lenet5 conv1 + pool",),
    methods=("fedbuff@buffer:size=3",),
)


def oracle(size: Size) -> Iterator[Item]:
    """Distance of the engine's final parameters from the oracle's, relative to the distance travelled."""
    allowed = TOLERANCE.get(jax.default_backend(), ELSEWHERE)

    def compare(method: str, model: str) -> list[Row]:
        settings = Settings(method=method, model=model, clients=6, updates=18, steps=3, delay="constant")
        with jax.default_matmul_precision("highest"):
            start = prepare(settings).params
            found = execute(prepare(replace(settings, batching="vmap"))).params  # the default on accelerators
            expected = execute(prepare(replace(settings, engine="reference"))).params
        flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (start, found, expected)]
        distance = float(np.linalg.norm(flat[1] - flat[2]) / np.linalg.norm(flat[2] - flat[0]))
        return [{"method": method, "model": model, "distance": distance, "allowed": allowed, "ok": distance <= allowed}]

    for model in ("logistic", "lenet5") if len(size.methods) > 1 else ("logistic",):
        for method in size.methods:
            yield f"{method}, {model}", lambda method=method, model=model: compare(method, model)


def lowerings(size: Size) -> Iterator[Item]:
    """Forward and backward of a layer for 1 and 8 clients, each with its own kernels (``conv.py``)."""

    def layer(name: str, clients: int) -> list[Row]:
        calls = {how: conv.layer_call(name, how, clients, 32) for how in size.lowerings}
        times = interleave(calls, size.repeats)
        ms = {how: 1e3 * float(np.median(t)) / clients for how, t in times.items()}
        best = min(ms.values())
        return [
            {"layer": name, "clients": clients, "lowering": how, "ms a client": ms[how], "/ best": ms[how] / best}
            for how in calls
        ]

    for name in size.layers:
        for clients in (1, 8):
            yield f"{name}, {clients}", lambda name=name, clients=clients: layer(name, clients)


def rates(size: Size) -> Iterator[Item]:
    """FedAsync beside the bare kernel, the oracle and the PyTorch loop (``throughput.py``)."""
    for model in size.models:
        call = lambda model=model: throughput.measure(  # noqa: E731
            model,
            size.clients,
            ["constant", "lognormal"],
            ["fedasync"],
            1 if model in SLOW else size.repeats,
            size.seconds,
        )
        yield f"{model}, {size.clients} clients", call


def _run(updates: int, model: str, clients: int = 100, **settings: Any) -> Callable[[], Any]:
    """A call that executes a planned run of FedAsync."""
    usual = {"method": "fedasync", "steps": throughput.STEPS, "batch_size": throughput.BATCH, "clients": clients}
    data = throughput.make_data(model.partition(":")[0], clients)
    experiment = prepare(Settings(model=model, updates=updates, eval_updates=updates, **usual, **settings), data=data)
    return lambda: execute(experiment)


def _updates(size: Size, model: str) -> int:
    cost = {"lenet5": 10, "cnn": 100} | dict.fromkeys(throughput.LARGE, 100)
    return max(20, size.updates // cost.get(model.partition(":")[0], 1))


def widths(size: Size) -> Iterator[Item]:
    """Speed by the cap on the wave's width, vmapped; 100 clients with constant delays fill any width up to 100."""
    for model in [name for name in ("logistic", "mlp", "lenet5") if name in size.models]:
        for width in [w for w in size.widths if w <= 100] or [1]:

            def call(model: str = model, width: int = width) -> list[Row]:
                n = _updates(size, model)
                run = _run(n, model, max_width=width, delay="constant", batching="vmap")
                rate = n / float(np.median(interleave({0: run}, size.repeats)[0]))
                return [{"model": model, "width": width, "updates / s": rate}]

            yield f"{model}, width {width}", call


def sweeps(size: Size) -> Iterator[Item]:
    """Sweeps of 16, 64 and 256 runs beside the same runs in turn (``sweep.py``)."""
    for seeds in size.sweeps:

        def call(seeds: int = seeds) -> list[Row]:
            row = sweep.measure("logistic", 20 if size.repeats == 1 else 100, seeds, 1, 0)
            return [{name: value for name, value in row.items() if "commands" not in name}]

        yield f"{16 * seeds} runs", call


def populations(size: Size) -> Iterator[Item]:
    """Time per update by the size of the population (``population.py``), in this process."""
    for clients in size.populations:

        def call(clients: int = clients) -> list[Row]:
            row = population.measure("logistic", clients, 2 * size.updates, size.repeats, None)
            return [{name: value for name, value in row.items() if "peak" not in name}]

        yield f"{clients} clients", call


def memory(size: Size) -> Iterator[Item]:
    """Memory of the vmapped kernel according to XLA: per client, and the width that would fill the device."""

    def call(model: str) -> list[Row]:
        base = throughput.experiment(model, throughput.make_data(model, 8), "constant", "fedasync", 8)
        need = []
        for width in (2, 8):
            compiled = throughput.bare_program(base, "vmap").lower(*throughput.bare_jobs(base, width)).compile()
            found = compiled.memory_analysis()
            need.append(temporary_bytes(compiled) + (0 if found is None else int(found.output_size_in_bytes)))
        each = max(1.0, (need[1] - need[0]) / 6)
        widest = int((device_memory() - need[0]) // each)
        return [{"model": model, "MiB a client": each / 2**20, "memory (GiB)": device_memory() / 2**30, "fits": widest}]

    for model in size.models:
        yield model, lambda model=model: call(model)


def choices(size: Size) -> Iterator[Item]:
    """Options of the engine, each beside plain `vmap`, interleaved: ten clients of scattered speeds, one lane.

    Waves are narrow here, so the overhead of a call is visible. The rows *kernel* train 16 clients in one call.
    """
    ways: dict[str, dict[str, Any]] = {
        "batching = loop": {"batching": "loop"},
        "compute = bfloat16": {"compute": "bfloat16"},
    }
    usual = {"delay": throughput.DELAYS["lognormal"], "batching": "vmap", "lanes": 1, "clients": 10}

    def engine(model: str, way: str) -> list[Row]:
        n = max(20, _updates(size, model) // 4)
        plain = _run(n, model, **usual)
        if way in PRECISIONS:

            def run() -> Any:  # JAX reads its precision option when it compiles a program
                with jax.default_matmul_precision(way):
                    return plain()
        else:
            run = _run(n, model, **usual | ways[way])
        times = {name: np.array(t) for name, t in interleave({"vmap": plain, way: run}, size.repeats).items()}
        ratio = float(np.median(times["vmap"] / times[way]))
        rate = n / float(np.median(times[way]))
        return [{"what": "engine", "model": model, "choice": way, "updates / s": rate, "/ plain": ratio}]

    def trips(model: str) -> list[Row]:
        base = throughput.experiment(model, throughput.make_data(model, 16), "constant", "fedasync", 16)
        jobs, width = throughput.bare_jobs(base, 16), 16
        fixed, counted = (throughput.bare_program(base, "vmap", counted=how) for how in (False, True))
        calls = {"fixed trip count": lambda: fixed(*jobs), "counted at run time": lambda: counted(*jobs, 10)}
        times = interleave(calls, 2 * size.repeats)
        seconds = {name: float(np.median(t)) for name, t in times.items()}
        return [
            {"what": "kernel", "model": model, "choice": name, "updates / s": width / s}
            | {"/ plain": seconds["counted at run time"] / s}
            for name, s in seconds.items()
        ]

    models = [name for name in ("mlp", "lenet5") if name in size.models] or list(size.models)
    for model in models:
        yield f"kernel, {model}", lambda model=model: trips(model)
        for way in (*ways, *PRECISIONS):
            yield f"{model}, {way}", lambda model=model, way=way: engine(model, way)
        if model == "lenet5":
            spec = f"{model}:lowering=lax"
            for way in ("compute = bfloat16", *PRECISIONS):
                yield f"{spec}, {way}", lambda spec=spec, way=way: engine(spec, way)


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


def shares(events: list[Mapping[str, Any]], wall: float) -> Row:
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


def profile(size: Size, folder: Path) -> Iterator[Item]:
    """Shares of the time of a run, from a trace of JAX's profiler, kept in `profile`."""

    def call(model: str, delay: str) -> list[Row]:
        updates = _updates(size, model) // 4
        data = throughput.make_data(model, size.clients)
        experiment = throughput.experiment(model, data, delay, "fedasync", updates)
        execute(experiment)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # tracing Python would double the time
        here = folder / f"{model}_{delay}"
        with jax.profiler.trace(str(here), profiler_options=options):
            began = time.perf_counter()
            execute(experiment)
            wall = 1e6 * (time.perf_counter() - began)
        trace = max(here.rglob("*.trace.json.gz"))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        return [{"model": model, "delays": delay, "updates / s": 1e6 * updates / wall} | shares(events, wall)]

    for model in size.models:
        for delay in ("constant", "lognormal"):
            yield f"{model}, {delay}", lambda model=model, delay=delay: call(model, delay)
