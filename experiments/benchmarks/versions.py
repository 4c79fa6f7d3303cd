"""Two checkouts of the package side by side: are the results the same, and which is faster?

    git worktree add ../before HEAD~1
    python experiments/benchmarks/versions.py --before ../before          # twelve rows, about six minutes on 2 cores
    python experiments/benchmarks/versions.py --before ../before --rows mlp-10-orthofl sweep-8 --repeats 15
    python experiments/benchmarks/versions.py --before . --smoke          # does it run

Each checkout has a process of its own, which stays for all rows; both use this environment, on a CPU. First each
executes the row with ``--updates`` updates, and the results are compared: every column of numbers in the schedule, in
``updates`` and in ``evaluations`` (bytes among them), and the final parameters. Then the two take turns, repeat after
repeat, at a run of about a second. The ratio is the time before divided by the time after, so above 1 the new version
is faster. The table has its median over the repeats and the 90 % interval of this median (bootstrap). Compilation is
not timed; preparation is timed only in ``sweep-8``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from checkout_worker import Worker
from common import write_table

import fedjax_async
from fedjax_async import Settings


def row(method: str, model: str, clients: int, delay: str, updates: int) -> dict[str, Any]:
    """Settings of one row; ``updates`` take about a second."""
    return {"method": method, "model": model, "clients": clients, "delay": delay, "updates": updates}


SPREAD = "constant:heterogeneity=0.5"  # a log-normal speed for each client
ROWS = {
    "logistic-10-exponential": row("fedasync", "logistic", 10, "exponential", 2000),
    "mlp-10-exponential": row("fedasync", "mlp", 10, "exponential", 1200),
    "lenet5-10-exponential": row("fedasync", "lenet5", 10, "exponential", 120),
    "logistic-100-fedbuff": row("fedbuff@buffer:size=10", "logistic", 100, "constant", 2400),
    "mlp-100-lognormal": row("fedasync", "mlp", 100, SPREAD, 1400),
    "lenet5-100-fedavg": row("fedavg@cohort:size=10", "lenet5", 100, "constant", 120),
    "mlp-10-fedbuff": row("fedbuff@buffer:size=10", "mlp", 10, SPREAD, 1200),
    "mlp-10-orthofl": row("orthofl", "mlp", 10, "exponential", 600),
    "mlp-100-fedadam": row("fedadam@cohort:size=10", "mlp", 100, "constant", 1400),
    "logistic-100-asynflc": row("asynflc_ef@window:length=0.1", "logistic", 100, "exponential", 1200),
    "lenet5-10-ca2fl": row("ca2fl@buffer:size=5", "lenet5", 10, "exponential", 100),
    "sweep-8": row("fedasync", "mlp", 10, "exponential", 160),
}


def load(options: dict[str, Any]) -> Callable[[], list[Any]]:
    """Prepare a row in this process's version of the package; a call executes it and returns its runs."""
    newer = (Path(fedjax_async.__file__).parent / "config").is_dir()  # older versions have these in engine
    package = importlib.import_module("fedjax_async.config" if newer else "fedjax_async.engine")
    options = dict(options)
    seeds = options.pop("seeds")
    common = {"partition": "iid", "steps": 10, "batch_size": 32, "lr": 0.01, "eval_updates": options["updates"]}
    runs = [Settings(**common, **options, seed=seed) for seed in range(seeds)]
    if seeds == 1:
        experiment = package.prepare(runs[0])
        return lambda: [package.execute(experiment)]

    def swept() -> list[Any]:
        found: dict[int, Any] = {}
        for group in package.plan_groups(runs):
            package.execute_group(runs, group, on_finished=found.__setitem__)
        return [found[index] for index in range(seeds)]

    return swept


def columns(run: Any) -> dict[str, np.ndarray]:
    """The numbers of a run that two versions should agree on, by name."""
    found = {f"schedule/{name}": value for name, value in run.schedule._asdict().items()}
    for table in ("updates", "evaluations"):
        found |= {f"{table}/{name}": value for name, value in getattr(run, table).items()}
    leaves = jax.tree_util.tree_leaves_with_path(run.params)
    found |= {f"params{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
    arrays = {name: np.asarray(value) for name, value in found.items()}
    return {name: value for name, value in arrays.items() if value.dtype.kind in "biuf"}


def work() -> None:
    """Answer requests, one JSON object per line: ``load`` a row, ``save`` its result, ``time`` it."""
    answers, sys.stdout = sys.stdout, sys.stderr
    assert Path(fedjax_async.__file__).is_relative_to(Path.cwd()), f"{fedjax_async.__file__} is not in this checkout"
    call: Callable[[], list[Any]] = list
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any = None
        if request["do"] == "load":
            call = load(request["options"])
        elif request["do"] == "save":
            runs = enumerate(call())
            np.savez(
                request["path"], **{f"{i}/{name}": value for i, run in runs for name, value in columns(run).items()}
            )
        else:
            began = time.perf_counter()
            call()
            answer = time.perf_counter() - began
        print(json.dumps(answer), file=answers, flush=True)


def differences(before: Path, after: Path) -> dict[str, Any]:
    """Compare two saved results: columns of schedules and tables that differ, the largest difference of a parameter."""
    with np.load(before) as old, np.load(after) as new:
        shared = sorted(set(old.files) & set(new.files))
        weights = [name for name in shared if "/params" in name]
        unequal = {name for name in shared if not np.array_equal(old[name], new[name], equal_nan=True)}
        apart = [np.abs(old[name] - new[name]).max() for name in weights if old[name].shape == new[name].shape]
        unequal -= {name for name in weights if old[name].shape == new[name].shape}
        one_only = set(old.files) ^ set(new.files)
    return {
        "columns": len(shared) - len(weights),
        "differ": listed(unequal),
        "in one only": listed(one_only),
        "parameters": float(np.max(apart, initial=0.0)),
    }


def listed(names: Iterable[str]) -> str:
    """Names of columns, each once for all runs, or a dash."""
    return " ".join(sorted({name.partition("/")[2] for name in names})) or "-"


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """Median of ``ratios`` and the 90 % bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [5, 95])
    return float(np.median(ratios)), float(low), float(high)


def measure(name: str, workers: dict[str, Worker], a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The line of one row."""
    seeds = 8 if name.startswith("sweep") else 1
    for version, worker in workers.items():
        worker.ask(do="load", options={**ROWS[name], "seeds": seeds, "updates": a.updates})
        worker.ask(do="save", path=str(folder / f"{version}.npz"))
    found = differences(folder / "before.npz", folder / "after.npz")
    for worker in workers.values():
        worker.ask(do="load", options={**ROWS[name], "seeds": seeds, **({"updates": a.updates} if a.smoke else {})})
        worker.ask(do="time")  # compiles
    seconds: dict[str, list[float]] = {version: [] for version in workers}
    for turn in range(a.repeats):
        for version in sorted(workers, reverse=bool(turn % 2)):
            seconds[version].append(workers[version].ask(do="time"))
    before, after = (np.asarray(seconds[version]) for version in ("before", "after"))
    ratio, low, high = interval(before / after)
    return {
        "row": name,
        "before (s)": float(np.median(before)),
        "after (s)": float(np.median(after)),
        "before / after": ratio,
        "90 % from": low,
        "to": high,
        **found,
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--before", type=Path, default=here, help="the other checkout [this one, compared with itself]")
    parser.add_argument("--after", type=Path, default=here, help="the checkout to judge [this one]")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--updates", type=int, default=20, help="length of the runs whose results are compared [20]")
    parser.add_argument("--out", type=Path, default=None, help="CSV [runs/versions.csv in the working directory]")
    parser.add_argument("--smoke", action="store_true", help="one row, one repeat of a few updates")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        work()
        return
    if a.smoke:
        a.rows, a.repeats, a.updates = ["logistic-10-exponential"], 1, 4
    for field, checkout in (("--before", a.before), ("--after", a.after)):
        if not (checkout / "fedjax_async" / "__init__.py").is_file():
            parser.error(f"{field} = {checkout}: must be the root of a checkout, with the folder fedjax_async")
    script = [str(Path(__file__).resolve()), "--worker"]
    workers = {
        version: Worker(checkout, script, checkout) for version, checkout in (("before", a.before), ("after", a.after))
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in a.rows:
            rows.append(measure(name, workers, a, Path(folder)))
            write_table(rows, a.out or Path("runs") / "versions.csv")


if __name__ == "__main__":
    main()
