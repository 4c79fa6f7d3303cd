"""DP-FedAvg: accuracy and epsilon by the noise, with fixed clips and with an adaptive one.

    python experiments/privacy/dp_fedavg.py --scale laptop

The setting of Andrew et al. (2021) on EMNIST: 100 of 3,400 writers per round, 1,500 rounds, server momentum 0.9, equal
weights of clients, a clip that starts at C = 0.1 and adapts at the rate 0.2. EMNIST is in no package: the data here are
MNIST, divided among clients at random. The last rows have the same noise in FedBuff, where clients
are not drawn in rounds. Epsilon by "participations" and by "sampling" are those of ``results.guarantees``, at delta =
1e-5.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from variants import Rows, Variant, line, options, parse_seeds, report, run_variants

from fedjax_async.results import guarantees, tables
from fedjax_async.results.figure import empty, save_figure
from fedjax_async.results.metrics import final_accuracy
from fedjax_async.types import Run

DELTA = 1e-5
_COMMON: dict[str, Any] = {"partition": "iid", "delay": "lognormal:sigma=0.5", "batch_size": 20, "lr": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": _COMMON
    | {"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 12, "steps": 1, "server_steps": 3}
    | {"eval_examples": 100},
    "laptop": _COMMON
    | {"dataset": "mnist", "model": "logistic", "clients": 1000, "steps": 3, "server_steps": 60, "eval_steps": 6},
    "paper": _COMMON
    | {"dataset": "mnist", "model": "cnn", "clients": 3400, "epochs": 1, "server_steps": 1500, "eval_steps": 50},
}
COHORT = {"smoke": 4, "laptop": 100, "paper": 100}
NOISES = {"smoke": (1.0,), "laptop": (0.0, 0.3, 1.0), "paper": (0.0, 0.1, 0.3, 1.0)}
CLIPS = {"smoke": (0.3,), "laptop": (0.1, 0.3, 1.0), "paper": (0.1, 0.3, 1.0, 3.0)}
QUANTILES = {"smoke": (0.5,), "laptop": (0.1, 0.5, 0.9), "paper": (0.1, 0.3, 0.5, 0.7, 0.9)}
SEEDS = {"smoke": 1, "laptop": 2, "paper": 3}


def variants(scale: str) -> tuple[list[Variant], list[tuple[str, str, float]]]:
    """The variants, and of each the (method, clip, noise)."""
    size, found, cases = COHORT[scale], [], []
    dp_fedavg = f"fedavgm:server_lr=1,momentum=0.9,weighting=uniform@cohort:size={size}"
    dp_fedbuff = f"fedbuff:server_lr=1,staleness=constant+momentum@buffer:size={size}"
    methods = {"DP-FedAvg": dp_fedavg, "DP-FedBuff": dp_fedbuff}
    clips = {f"{clip:g}": f"clip={clip:g}" for clip in CLIPS[scale]}
    clips |= {f"quantile {q:g}": f"clip=0.1,quantile={q:g}" for q in QUANTILES[scale]}
    for name, method in methods.items():
        for clip, spec in clips.items():
            if name == "DP-FedBuff" and clip != "quantile 0.5":
                continue
            for noise in NOISES[scale]:
                cases.append((name, clip, noise))
                changes = {"method": method, "privacy": f"dp:{spec},noise={noise:g}"}
                found.append(Variant(f"{name}, {clip}, {noise:g}", changes))
    return found, cases


def rows_of(cases: list[tuple[str, str, float]], runs: dict[str, list[Run]]) -> Rows:
    """One row per variant: accuracy, the last clip, and the largest epsilon over the seeds."""
    rows: Rows = []
    for (name, clip, noise), seeds in zip(cases, runs.values()):
        found = [guarantees(run, delta=DELTA) for run in seeds]
        by_participation = [one[0].epsilon for one in found]
        known = None not in by_participation  # None: no bound is known for that seed
        by_sampling = [one[1].epsilon for one in found if len(one) > 1]
        rows.append(
            {"method": name, "clip": clip, "noise": noise}
            | {"accuracy (%)": tables.spread([100 * final_accuracy(run, "tail") for run in seeds])}
            | {"last clip": tables.spread([float(run.updates["clip"][-1]) for run in seeds])}
            | {"epsilon, participations": max(by_participation) if known else float("nan")}
            | {"epsilon, sampling": max(by_sampling) if by_sampling else float("nan")}
        )
    return rows


def draw(rows: Rows, given: argparse.Namespace) -> None:
    """Draw accuracy by the noise multiplier: a panel per method, a line per clip, equal ranges of accuracy."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    clips = list(dict.fromkeys(row["clip"] for row in rows))
    figure = empty(3.4 * len(methods), 3.8)
    panels = figure.subplots(1, len(methods), squeeze=False)[0]
    for panel, method in zip(panels, methods):
        for index, clip in enumerate(clips):
            own = [row for row in rows if (row["method"], row["clip"]) == (method, clip)]
            name = clip if clip.startswith("quantile") else f"clip {clip}"
            if own:
                line(panel, index, [row["noise"] for row in own], [row["accuracy (%)"] for row in own], name)
        panel.set_title(method, fontsize=10)
        panel.set_xticks(sorted({row["noise"] for row in rows}))
        panel.tick_params(labelsize=9)
        panel.set_xlabel("noise multiplier z", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test accuracy (%)", fontsize=9)
    half = max(high - low for low, high in (panel.get_ylim() for panel in panels)) / 2
    for panel in panels:
        middle = sum(panel.get_ylim()) / 2
        panel.set_ylim(middle - half, middle + half)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=2, fontsize=9, frameon=False)
    save_figure(figure, given.out / "dp_fedavg.png")


if __name__ == "__main__":
    given = parse_seeds(options(__doc__, "privacy", "dp_fedavg"), SEEDS)
    chosen, cases = variants(given.scale)
    rows = rows_of(cases, run_variants("all", SETTINGS[given.scale], chosen, given))
    report(rows, given, decimals={"noise": 1, "epsilon, participations": 1, "epsilon, sampling": 1})
    draw(rows, given)
