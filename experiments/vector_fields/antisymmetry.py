"""How conservative LeNet-5's local training is, and whether this predicts FedAvg's swings. Beyond the paper.

    python experiments/vector_fields/antisymmetry.py --scale laptop

FedAvg with all ten clients in every round, over local steps x learning rate x Dirichlet alpha. The relative
antisymmetry of the clients' jobs and of their mean, the server field, is measured at the model after some rounds; the
swing is the mean change of the test accuracy from one round to the next, over the second half of the run.

``antisymmetry.csv``: one row per cell, mean and deviation over the seeds. ``same_model.csv``: the antisymmetry of all
cells at one model, first seed. ``exponents.csv``: fitted powers of its growth, for both tables. ``prediction.csv``:
rank correlations of predictors with the swing, with 95 % intervals (bootstrap over cells). ``cost.csv``: CPU time of a
random pair of derivatives beside that of a local job.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import Rows, Variant, options, parse, picture, report, run_variants
from variants import common, known_runs

from fedjax_async import Settings
from fedjax_async.base import disk
from fedjax_async.config import Experiment, prepare
from fedjax_async.engine.components import bound
from fedjax_async.local import job_key, run_job
from fedjax_async.results import tables
from fedjax_async.results.figure import PALETTE, save_figure
from fedjax_async.theory import estimate_mean_curl, local_displacement
from fedjax_async.types import ClientData, Message, Run

SETTING: dict[str, Any] = {
    "dataset": "mnist",
    "model": "lenet5",
    "method": "fedavg",
    "delay": "constant:mean=60",
    "clients": 10,
    "batch_size": 32,
    "eval_examples": 1000,
}
SMALL: dict[str, Any] = {"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 3, "eval_examples": 500}
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"steps": (2,), "lr": (0.1, 0.2), "alpha": (0.1,), "early": 1, "rounds": 2, "seeds": 1, "pairs": 2},
    "laptop": {
        "steps": (2, 8), "lr": (0.02, 0.05, 0.15), "alpha": (0.1, 1.0, 100.0),
        "early": 5, "rounds": 16, "seeds": 3, "pairs": 3,
    },
    "paper": {
        "steps": (1, 2, 5, 20, 50), "lr": (0.01, 0.02, 0.05, 0.15, 0.3), "alpha": (0.1, 0.3, 1.0, 10.0, 100.0),
        "early": 20, "rounds": 200, "seeds": 5, "pairs": 8,
    },
}  # fmt: skip
PREDICTORS = ("server", "clients", "local steps x learning rate", "learning rate", "skew")


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The setting of the scale."""
    return SETTING | (SMALL if given.scale == "smoke" else {})


def trained(given: argparse.Namespace, rounds: int) -> dict[tuple[Any, ...], list[Run]]:
    """Cell -> its runs of ``rounds`` rounds, one per seed; finished ones are kept."""
    scale = SCALES[given.scale]
    given.seeds = scale["seeds"]
    # a round takes a virtual minute; the early runs are evaluated only at their end
    first = rounds if rounds == scale["early"] else rounds // 2
    budget = {"server_steps": rounds, "eval_at": ",".join(str(60 * r) for r in range(first, rounds + 1))}
    found: dict[tuple[Any, ...], list[Run]] = {}
    for k in scale["steps"]:
        cells = list(itertools.product((k,), scale["lr"], scale["alpha"]))
        variants = [Variant(str(c), {"lr": c[1], "partition": f"dirichlet:alpha={c[2]}"}) for c in cells]
        setting = settings_of(given) | budget | {"steps": k}
        runs = run_variants(f"{rounds}_rounds_of_{k}_steps", setting, variants, given)
        found |= {cell: runs[variant.name] for cell, variant in zip(cells, variants)}
    return found


# --- the measurement ---------------------------------------------------------------------------------


class Measure:
    """Antisymmetry of all clients' jobs and of the server field; one program for each number of local steps."""

    def __init__(self, pairs: int) -> None:
        self.pairs, self.programs = pairs, {}  # type: ignore[var-annotated]

    def __call__(self, key: Any, experiment: Experiment, params: Any) -> dict[str, float]:
        c, k = experiment.components, int(experiment.schedule.local_steps[0])
        if k not in self.programs:
            self.programs[k] = jax.jit(self.program(c.client, k))
        found = self.programs[k](
            key, experiment.key, dict(c.hyper), params, tuple(map(jnp.asarray, (c.data.x, c.data.y, c.data.order))),
            jnp.asarray(c.data.offset), jnp.asarray(c.data.size),
        )  # fmt: skip
        return {name: float(value) for name, value in found.items()}

    def program(self, family: Any, k: int) -> Callable[..., dict[str, Any]]:
        """The measurement as a function of everything that differs between two cells with k local steps."""

        def measured(key: Any, root: Any, hyper: Any, params: Any, pool: Any, offset: Any, size: Any) -> Any:
            client = bound(family, hyper)

            def field(c: Any, weights: Any) -> Any:
                own = ClientData(*pool, offset[c], size[c])
                return local_displacement(client, job_key(root, c, 0), Message(params), own, k)(weights)

            shares = size / size.sum()
            found = estimate_mean_curl(key, field, shares, params, pairs=self.pairs)
            return {
                "server": found.mean.value,
                "server error": found.mean.standard_error,
                "clients": found.parts.value.mean(),
                "largest client": found.parts.value.max(),
            }

        return measured


def measured(
    given: argparse.Namespace, early: Mapping[tuple[Any, ...], Sequence[Run]], model: Run | None = None
) -> dict[tuple[Any, ...], list[dict[str, float]]]:
    """Cell -> measurements at the model of each early run, or at that of ``model`` with the data of the first seed.

    Kept in a file for each number of steps and learning rate, named after all that the measurement depends on.
    """
    kind, scale = "own" if model is None else "same", SCALES[given.scale]
    depends = settings_of(given) | {"early": scale["early"], "pairs": scale["pairs"]}
    if model is not None:
        depends["model of"] = str((scale["steps"][-1], scale["lr"][0], scale["alpha"][-1]))
    about = known_runs.key(depends)
    measure = Measure(scale["pairs"])
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for cell, runs in early.items():
        found[cell] = []
        for seed, run in enumerate(runs if model is None else [model]):
            name, (k, lr, alpha) = f"{cell} {seed}", cell
            path = given.out / f"measured_{kind}_{k}_{lr}_{about}.json"
            kept = json.loads(path.read_text()) if path.exists() else {}
            if name not in kept:
                own = {"steps": k, "lr": lr, "partition": f"dirichlet:alpha={alpha}", "seed": seed, "server_steps": 1}
                kept[name] = measure(jax.random.key(seed), prepare(Settings(**settings_of(given) | own)), run.params)
                disk.write(path, json.dumps(kept, indent=1).encode())
            found[cell].append(kept[name])
    return found


def cost(given: argparse.Namespace, steps: int, rounds: int = 5) -> dict[str, Any]:
    """CPU seconds of a local job and of a random pair of derivatives, one client; medians of interleaved repeats."""
    experiment = prepare(Settings(**settings_of(given), steps=steps, lr=0.05, server_steps=1))
    c = experiment.components
    client = bound(c.client, c.hyper)
    own = ClientData(*map(jnp.asarray, (c.data.x, c.data.y, c.data.order, c.data.offset[0], c.data.size[0])))
    key = job_key(experiment.key, 0, 0)

    def estimate(pairs: int) -> Callable[[Any], Any]:
        def run(params: Any) -> Any:
            field = local_displacement(client, key, Message(params), own, steps)
            return estimate_mean_curl(key, lambda _, x: field(x), jnp.ones(1), params, pairs=pairs).mean

        return jax.jit(run)

    few, many = 2, 8
    job = jax.jit(lambda params: run_job(client, key, Message(params), (), own, steps)[0])
    calls = {"job": job, "few": estimate(few), "many": estimate(many)}
    seconds = common.interleave(
        {name: (lambda call=call: call(experiment.params)) for name, call in calls.items()}, rounds,
        clock=time.process_time,
    )  # fmt: skip
    taken = {name: np.array(each) for name, each in seconds.items()}
    pair = (taken["many"] - taken["few"]) / (many - few)
    return {
        "model": settings_of(given)["model"],
        "local steps": steps,
        "job (CPU ms)": 1e3 * float(np.median(taken["job"])),
        "pair (CPU ms)": 1e3 * float(np.median(pair)),
        "pair / job": float(np.median(pair / taken["job"])),
        "8 pairs, all / job": float(np.median(taken["many"] / taken["job"])),
        "rounds": rounds,
    }


# --- the analysis ------------------------------------------------------------------------------------


def swing(run: Run) -> float:
    """The mean change of the accuracy from one round to the next, over the second half of the run, in points."""
    accuracy = 100 * np.asarray(run.evaluations["accuracy"], float)
    return float(np.abs(np.diff(accuracy[1:])).mean())  # the first evaluation is that of the initial model


def ranks(values: Any) -> np.ndarray:
    """Ranks from 1, ties at their mean."""
    values = np.asarray(values, float)
    return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def correlation(a: np.ndarray, b: np.ndarray, given_that: np.ndarray | None = None) -> float:
    """Spearman's rank correlation; with ``given_that`` [n, m], of the residuals of a linear fit to their ranks."""
    a, b = ranks(a), ranks(b)
    if given_that is not None:
        known = np.column_stack([np.ones(len(a)), *[ranks(column) for column in given_that.T]])
        a, b = (v - known @ np.linalg.lstsq(known, v, rcond=None)[0] for v in (a, b))
    spread = np.std(a) * np.std(b)
    return float(np.mean((a - a.mean()) * (b - b.mean())) / spread) if spread > 1e-9 else float("nan")


def interval(statistic: Callable[[np.ndarray], float], count: int, draws: int = 2000) -> tuple[float, float]:
    """A 95 % percentile interval of ``statistic(indices)`` by bootstrap over ``count`` cells."""
    rng = np.random.default_rng(0)
    values = [statistic(rng.integers(0, count, count)) for _ in range(draws)]
    low, high = np.nanpercentile(values, [2.5, 97.5]) if np.isfinite(values).any() else (np.nan, np.nan)
    return float(low), float(high)


def table_of_cells(
    found: Mapping[tuple[Any, ...], Sequence[Mapping[str, float]]], runs: Mapping[tuple[Any, ...], Sequence[Run]]
) -> Rows:
    """One row per cell."""
    rows = []
    for (k, lr, alpha), seeds in found.items():
        own = runs[k, lr, alpha]
        rows.append({
            "local steps": k, "learning rate": lr, "alpha": alpha,
            "server": tables.spread([one["server"] for one in seeds]),
            "server error": float(np.mean([one["server error"] for one in seeds])),
            "clients": tables.spread([one["clients"] for one in seeds]),
            "swing (points)": tables.spread([swing(run) for run in own]),
            "accuracy (%)": tables.spread([100 * run.evaluations["accuracy"][-1] for run in own]),
            "seeds": len(seeds),
        })  # fmt: skip
    return rows


def table_of_same(found: Mapping[tuple[Any, ...], Sequence[Mapping[str, float]]]) -> Rows:
    """One row per cell, all measured at the same model."""
    names = ("server", "server error", "clients", "largest client")
    return [
        {"local steps": k, "learning rate": lr, "alpha": alpha} | {name: seeds[0][name] for name in names}
        for (k, lr, alpha), seeds in found.items()
    ]


def exponents(rows: Rows, model: str) -> Rows:
    """Powers of local steps, learning rate and alpha in a least-squares fit to the logarithm of the antisymmetry."""
    names = ("local steps", "learning rate", "alpha")
    varied = [name for name in names if len({row[name] for row in rows}) > 1]
    design = np.column_stack([np.ones(len(rows)), *[np.log([row[name] for row in rows]) for name in varied]])
    fits = []
    for target in ("server", "clients"):
        values = np.log([getattr(row[target], "mean", row[target]) for row in rows])

        def power(index: np.ndarray, j: int, values: np.ndarray = values) -> float:
            return float(np.linalg.lstsq(design[index], values[index], rcond=None)[0][j])

        for j, name in enumerate(varied, 1):
            low, high = interval(lambda index, j=j, power=power: power(index, j), len(rows))
            row = {"model": model, "antisymmetry of": target, "by": name, "power": power(np.arange(len(rows)), j)}
            fits.append(row | {"low": low, "high": high})
    return fits


def prediction(rows: Rows) -> Rows:
    """Rank correlation of each predictor with the swing: alone, given local steps and learning rate, and given skew
    too."""
    swings = np.array([row["swing (points)"].mean for row in rows])
    columns = {
        "server": [row["server"].mean for row in rows],
        "clients": [row["clients"].mean for row in rows],
        "local steps x learning rate": [row["local steps"] * row["learning rate"] for row in rows],
        "learning rate": [row["learning rate"] for row in rows],
        "skew": [-row["alpha"] for row in rows],
    }
    known = np.array([[row["local steps"], row["learning rate"]] for row in rows], float)
    everything = np.column_stack([known, [row["alpha"] for row in rows]])
    found = []
    for name in PREDICTORS:
        values = np.array(columns[name], float)
        alone = interval(lambda i, v=values: correlation(v[i], swings[i]), len(rows))
        row: dict[str, Any] = {
            "predictor": name,
            "correlation": correlation(values, swings),
            "low": alone[0],
            "high": alone[1],
        }
        for title, others in (("given steps and rate", known), ("given skew too", everything)):
            applies = name in ("server", "clients") or (name == "skew" and others is known)
            own = (lambda i, v=values, o=others: correlation(v[i], swings[i], o[i])) if applies else None
            low, high = interval(own, len(rows)) if own else (float("nan"), float("nan"))
            row |= {
                title: own(np.arange(len(rows))) if own else float("nan"),
                f"{title}, low": low,
                f"{title}, high": high,
            }
        found.append(row | {"cells": len(rows)})
    return found


def drawn(rows: Rows, at_same: Rows) -> Any:
    """Figure: antisymmetry at one model against the learning rate, and swing against the earlier antisymmetry."""
    figure, (left, right) = picture(2, 4.6, 3.8)
    alphas, steps, rates = (sorted({row[name] for row in rows}) for name in ("alpha", "local steps", "learning rate"))
    marks = dict(zip(steps, "osD^v"))
    for alpha, colour in zip(alphas, PALETTE):
        left.plot([], [], color=colour, label=f"alpha {alpha:g}")
        for k in steps:
            mine = [row for row in at_same if (row["alpha"], row["local steps"]) == (alpha, k)]
            line = [row["server"] for row in mine]
            left.semilogx([row["learning rate"] for row in mine], line, f"{marks[k]}-", color=colour, markersize=5)
            own = [row for row in rows if (row["alpha"], row["local steps"]) == (alpha, k)]
            swings = [row["swing (points)"].mean for row in own]
            right.semilogy([row["server"].mean for row in own], swings, marks[k], color=colour, markersize=6)
    for k in steps:
        left.plot([], [], marks[k], color="#666666", label=f"{k} steps")
    left.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.minorticks_off()
    left.set(xlabel="learning rate", ylabel="relative antisymmetry of the server field", ylim=(0, 1.35))
    left.set_title("all cells at one model")
    right.set(xlabel="relative antisymmetry of the server field", ylabel="swing of the accuracy (points)")
    right.set_title("measured early, the swing later")
    left.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return figure


def run(given: argparse.Namespace) -> None:
    """Train, measure, correlate, draw and write."""
    scale = SCALES[given.scale]
    early = trained(given, scale["early"])
    found = measured(given, early)
    rows = table_of_cells(found, trained(given, scale["rounds"]))
    report(rows, given, decimals=dict.fromkeys(("server", "server error", "clients", "swing (points)"), 4))
    same = early[scale["steps"][-1], scale["lr"][0], scale["alpha"][-1]][0]
    at_same = table_of_same(measured(given, early, same))
    common.write_table(at_same, given.out / "same_model.csv")
    fits = exponents(rows, "after the cell's own rounds") + exponents(at_same, "the same for all cells")
    common.write_table(fits, given.out / "exponents.csv")
    common.write_table(prediction(rows), given.out / "prediction.csv")
    if given.scale != "smoke":
        common.write_table([cost(given, scale["steps"][-1])], given.out / "cost.csv")
    save_figure(drawn(rows, at_same), given.out / "antisymmetry.png")


if __name__ == "__main__":
    run(parse(options(__doc__, "antisymmetry")))
