"""A sweep of 64 runs (16 settings x 4 seeds) beside the same runs one after the other, and as single commands.

    python experiments/benchmarks/sweep.py                        # three models, about half an hour on 2 cores
    python experiments/benchmarks/sweep.py --models mlp --commands 8
    python experiments/benchmarks/sweep.py --smoke                # does it run

FedAsync on ``fashion_mnist_6k``, 10 clients, ``rpi`` delays; mixing rate x learning rate, four seeds.

* sweep: ``plan_groups`` and ``execute_group``, from settings to results, compilation included.
* in turn: ``execute(prepare(s))`` for the same settings in one process that has compiled already.
* commands: ``fedjax-async run``, one process per run. ``--commands`` runs, spread over the settings, are timed, and
  their time is scaled to 64.

Sweep and in turn are interleaved; ratios are medians over the repeats. ``compilations`` counts the training programs
that XLA compiled during the first sweep: one per group.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import interleave, write_table

from fedjax_async import Run, Settings
from fedjax_async.config import execute, execute_group, plan_groups, prepare

MIXING, RATES = (0.2, 0.4, 0.6, 0.8), (0.01, 0.02, 0.05, 0.1)


def settings(model: str, updates: int, seeds: int) -> list[Settings]:
    """The settings of all runs: 64 with four seeds."""
    return [
        Settings(
            method=f"fedasync:mixing={mixing}", model=model, lr=lr, seed=seed, updates=updates, eval_updates=updates
        )
        for mixing, lr, seed in itertools.product(MIXING, RATES, range(seeds))
    ]


def sweep(runs: list[Settings]) -> dict[int, Run]:
    """Execute all runs side by side; index -> run."""
    found: dict[int, Run] = {}
    for group in plan_groups(runs):
        execute_group(runs, group, on_finished=found.__setitem__)
    assert len(found) == len(runs)
    return found


def in_turn(runs: list[Settings]) -> list[Run]:
    """Execute all runs one after the other."""
    return [execute(prepare(one)) for one in runs]


def command(one: Settings) -> float:
    """Seconds of one ``fedjax-async run``."""
    line = [sys.executable, "-m", "fedjax_async", "run", "--quiet", "--method", one.method, "--model", one.model]
    line += ["--lr", one.lr, "--seed", one.seed, "--updates", one.updates, "--eval-updates", one.eval_updates]
    began = time.perf_counter()
    subprocess.run([str(word) for word in line], check=True, capture_output=True)
    return time.perf_counter() - began


def count_compilations(call: Any) -> int:
    """The number of training programs that XLA compiles during ``call``."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details: Any) -> None:
        del seconds
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    call()
    jax.monitoring.unregister_event_duration_listener(listen)
    return sum("train" in name for name in seen)


def measure(model: str, updates: int, seeds: int, repeats: int, commands: int) -> dict[str, Any]:
    """The row of one model."""
    runs = settings(model, updates, seeds)
    compilations = count_compilations(lambda: sweep(runs))
    began = time.perf_counter()
    jax.clear_caches()
    sweep(runs)
    cold = time.perf_counter() - began
    seconds = interleave({"sweep": lambda: sweep(runs) and None, "in turn": lambda: in_turn(runs) and None}, repeats)
    chosen = runs[:: max(1, len(runs) // commands)][:commands] if commands else []
    single = len(runs) * float(np.mean([command(one) for one in chosen])) if chosen else float("nan")
    warm, turn = (np.asarray(seconds[name]) for name in ("sweep", "in turn"))
    return {
        "model": model,
        "runs": len(runs),
        "updates a run": updates,
        "sweep (s)": float(np.median(warm)),
        "sweep, compiling (s)": cold,
        "in turn (s)": float(np.median(turn)),
        "commands (s)": single,
        "in turn / sweep": float(np.median(turn / warm)),
        "commands / sweep, compiling": single / cold,
        "groups": len(plan_groups(runs)),
        "compilations": compilations,
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["logistic", "mlp", "lenet5"])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commands", type=int, default=4, help="number of single commands to time, 0 for none [4]")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/sweep.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, one repeat; writes if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.models, a.updates, a.seeds, a.repeats, a.commands = ["logistic"], 10, 1, 1, 1
    rows = []
    for model in a.models:
        rows.append(measure(model, a.updates, a.seeds, a.repeats, a.commands))
        print(rows[-1], flush=True)
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "sweep.csv")


if __name__ == "__main__":
    main()
