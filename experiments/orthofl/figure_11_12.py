"""Figures 11 and 12: delays by task, the staleness that they cause, and their distributions.

    python experiments/orthofl/figure_11_12.py

``figure_11_12.csv`` and ``.png`` (Figure 11): for each task and each of nine clients, one per profile, the mean seconds
of a round, split into compute and communication. Compute is scaled by the floating-point operations of a job,
communication by the bytes of a message, both relative to MNIST's task. The measured table is taken as that task's: its
clients trained on MNIST; their model is not named. ``figure_12.csv`` and ``.png``: 10,000 rounds of 100 clients under
the measured delays and the three distributions of Figure 8, not scaled to CIFAR-100's task as in the paper.
``staleness.csv``: the updates of ten clients under the measured delays. Nothing is trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import DELAY, TASKS, common, options, parse, report
from table_7 import distilbert

from fedjax_async.base import tree
from fedjax_async.clock import Until, bind_delays, plan
from fedjax_async.models import make
from fedjax_async.results.figure import PALETTE, new, save_figure
from fedjax_async.types import Params

CLIENTS = 10
UPDATES = {"smoke": 200, "laptop": 5000, "paper": 5000}
ROUNDS = {"smoke": 2, "laptop": 100, "paper": 100}  # per client in Figure 12, with 100 clients
SIZES: dict[str, tuple[tuple[int, ...], int]] = {  # task -> shape of an input, classes
    "mnist": ((28, 28, 1), 10),
    "har": ((128, 9), 6),
    "20newsgroups": ((512,), 20),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}
SLOW = 9  # number of measured profiles


def work_and_bytes(task: str) -> tuple[float, float]:
    """Floating-point operations of a job of the task's paper setting, and the bytes of a message.

    20 Newsgroups counts for DistilBERT, as in the paper; its weights are not needed.
    """
    shape, classes = SIZES[task]
    one, key = jnp.ones(1, bool), jax.random.key(0)
    if task == "20newsgroups":
        net, params = distilbert(shape, classes)
        weights = params["params"]

        def loss(weights: Params, params: Params, x: Any) -> Any:
            return -jax.nn.log_softmax(net.apply({**params, "params": weights}, x))[0, 0]

    else:
        model = make(TASKS[task].setting["model"], input_shape=shape, num_classes=classes)
        params = jax.eval_shape(model.init, key)
        weights = params if model.train is None else params["params"]

        def loss(weights: Params, params: Params, x: Any) -> Any:
            if model.train is None:
                return model.loss(model.apply(weights, x, key), jnp.zeros(1, jnp.int32)).sum()
            return model.loss(model.train({**params, "params": weights}, x, key, one)[0], jnp.zeros(1, jnp.int32)).sum()

    x = jax.ShapeDtypeStruct((1, *shape), jnp.int32 if len(shape) == 1 else jnp.float32)
    counted: Any = jax.jit(jax.grad(loss)).lower(weights, params, x).cost_analysis()
    examples = TASKS[task].setting["epochs"] * TASKS[task].examples
    return examples * float(counted["flops"]), tree.num_bytes(weights if task == "20newsgroups" else params)


def by_task(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Figure 11: one row per task and client, slowest last."""
    rows: list[dict[str, Any]] = []
    unit = work_and_bytes("mnist")
    for task in ("mnist",) if given.scale == "smoke" else SIZES:
        work, size = (mine / ones for mine, ones in zip(work_and_bytes(task), unit, strict=True))
        table = bind_delays("rpi:family=constant,reference_steps=1,reference_bytes=1000", SLOW, 0)
        clients = np.arange(SLOW)
        compute = table.durations(clients, 0, 1, 0, 0) * work
        communication = table.durations(clients, 0, 0, 1000, 0) * size
        for rank, client in enumerate(np.argsort(compute + communication)):
            rows.append({
                "task": task,
                "client": rank,
                "work / mnist": work,
                "bytes / mnist": size,
                "compute (s)": float(compute[client]),
                "communication (s)": float(communication[client]),
                "round (s)": float(compute[client] + communication[client]),
            })  # fmt: skip
    return rows


def draw_tasks(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean seconds of a round, by task and client: communication on top of compute."""
    figure, axes = new(8.0, 4.0)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for place, task in enumerate(tasks):
        own = [row for row in rows if row["task"] == task]
        at = place + 0.08 * (np.arange(len(own)) - len(own) / 2)
        compute = np.array([row["compute (s)"] for row in own])
        axes.bar(at, compute, 0.07, color=PALETTE[0], label="compute" if place == 0 else None)
        rest = [row["communication (s)"] for row in own]
        axes.bar(at, rest, 0.07, bottom=compute, color=PALETTE[1], label="communication" if place == 0 else None)
    axes.set_yscale("log")
    axes.set_ylim(bottom=10)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("mean seconds a round")
    axes.legend(frameon=False)
    save_figure(figure, path)


def distributions(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Figure 12: mean, deviation and percentiles of the rounds of 100 clients; draws the histograms."""
    specs = {"measured": DELAY, **{f: f"rpi:pooled=true,family={f}" for f in ("lognormal", "half_normal", "uniform")}}
    figure, axes = new(7.0, 4.0)
    rows: list[dict[str, Any]] = []
    edges = np.linspace(0, 1600, 81)
    for name, spec in specs.items():
        clients, numbers = np.arange(100)[:, None], np.arange(ROUNDS[given.scale])
        seconds = bind_delays(spec, 100, 0).durations(clients, numbers).ravel()
        axes.hist(seconds, edges, histtype="step", linewidth=1.4, label=name)
        percentiles = {f"{p} % (s)": float(np.percentile(seconds, p)) for p in (5, 50, 95, 99)}
        rows.append({"delays": name, "mean (s)": float(seconds.mean()), "std (s)": float(seconds.std())} | percentiles)
    axes.set_xlabel("seconds a round")
    axes.set_ylabel("rounds")
    axes.legend(frameon=False)
    save_figure(figure, given.out / "figure_12.png")
    return rows


def staleness(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Job times and staleness of ten clients under the measured delays: one row per client."""
    schedule = plan("every", DELAY, num_clients=CLIENTS, local_steps=1, until=Until(updates=UPDATES[given.scale]))
    seconds = schedule.upload_time - schedule.dispatch_time
    arrived = schedule.client[schedule.job]
    rows: list[dict[str, Any]] = []
    for client in range(CLIENTS):
        own, stale = seconds[schedule.client == client], schedule.staleness[arrived == client]
        rows.append({
            "client": client,
            "jobs": len(own),
            "mean (s)": float(own.mean()),
            "std (s)": float(own.std()),
            "longest (s)": float(own.max()),
            "mean staleness": float(stale.mean()) if len(stale) else float("nan"),
        })  # fmt: skip
    return rows


def main() -> None:
    """Plan, measure, draw and write."""
    given = parse(options(__doc__, "figure_11_12"))
    rows = by_task(given)
    draw_tasks(rows, given.out / "figure_11_12.png")
    common.write_table(distributions(given), given.out / "figure_12.csv")
    common.write_table(staleness(given), given.out / "staleness.csv")
    report(rows, given)


if __name__ == "__main__":
    main()
