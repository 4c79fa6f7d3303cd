"""Robustness: server rules against attacks, by the share of clients that attack.

    python experiments/robustness/table.py --scale laptop

Every rule runs under every attack with the same clients, delays, attackers and seeds. A row has a rule, an attack and a
share of attackers: its test accuracy, and the loss against the same run without attackers. The picture has one panel
per attack. ``paper`` is larger (LeNet-5, 50 clients, ten seeds); it is not from a paper.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from variants import Rows, Variant, line, options, parse_seeds, report, run_variants

from fedjax_async.results import tables
from fedjax_async.results.figure import empty, save_figure
from fedjax_async.results.metrics import final_accuracy
from fedjax_async.types import Run

# FedAsync and OrthoFL step at every upload, the others at every tenth. Krum expects three bad uploads of ten.
BUFFER = "@buffer:size=10"
RULES = {
    "FedAsync": "fedasync",
    "OrthoFL": "orthofl",
    "FedBuff": f"fedbuff:server_lr=1{BUFFER}",
    "FedBuff, clipped": f"fedbuff:server_lr=1,clip=1{BUFFER}",
    "median": f"fedmedian{BUFFER}",
    "trimmed mean": f"trimmed_mean:trim=0.3{BUFFER}",
    "Krum": f"krum:byzantine=3{BUFFER}",
}
ATTACKS = {
    "label flip": "label_flip:",
    "sign flip": "sign_flip:scale=3,",
    "scaled": "scaled:factor=20,",
    "ALIE": "alie:z=1.5,",
    "inner product": "inner_product:epsilon=3,",
}
_COMMON: dict[str, Any] = {
    **{"clients": 20, "partition": "dirichlet:alpha=1", "delay": "lognormal:sigma=0.5", "batch_size": 32},
    **{"steps": 10, "lr": 0.1, "eval_examples": 2000},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": _COMMON | {"dataset": "fashion_mnist_6k", "model": "logistic", "updates": 20, "eval_examples": 100},
    "laptop": _COMMON | {"dataset": "mnist", "model": "mlp:hidden=32", "updates": 600, "eval_updates": 30},
    "paper": _COMMON | {"dataset": "mnist", "model": "lenet5", "clients": 50, "updates": 5000, "eval_updates": 100},
}
SEEDS = {"smoke": 1, "laptop": 2, "paper": 10}
SHARES = {"smoke": (0.2,), "laptop": (0.2, 0.4), "paper": (0.1, 0.2, 0.3, 0.4)}
SMALL = (("FedBuff", "median"), ("sign flip", "ALIE"))  # rules and attacks of the smallest scale


def variants(scale: str) -> tuple[list[Variant], list[tuple[str, str, float]]]:
    """The variants, and of each the (rule, attack, share of attackers)."""
    rules, attacks = SMALL if scale == "smoke" else (tuple(RULES), tuple(ATTACKS))
    cases = [(rule, "none", 0.0) for rule in rules]
    cases += [(rule, attack, share) for attack in attacks for share in SHARES[scale] for rule in rules]
    found = []
    for rule, attack, share in cases:
        spec = None if attack == "none" else f"{ATTACKS[attack]}share={share}"
        found.append(Variant(f"{rule}, {attack}, {share:g}", {"method": RULES[rule], "attack": spec}))
    return found, cases


def rows_of(cases: list[tuple[str, str, float]], runs: dict[str, list[Run]]) -> Rows:
    """One row per variant, in percent; ``lost`` is computed seed by seed."""
    found = {case: [100 * final_accuracy(run, "tail") for run in seeds] for case, seeds in zip(cases, runs.values())}
    rows: Rows = []
    for (rule, attack, share), each in found.items():
        lost = [usual - now for usual, now in zip(found[rule, "none", 0.0], each)]
        row = {"attack": attack, "share": share, "rule": rule}
        rows.append(row | {"accuracy (%)": tables.spread(each), "lost (points)": tables.spread(lost)})
    return rows


def draw(rows: Rows, given: argparse.Namespace) -> None:
    """Draw one panel per attack: accuracy of each rule by the share of attackers; the last panel has the legend."""
    attacks = [name for name in dict.fromkeys(row["attack"] for row in rows) if name != "none"]
    across = min(3, len(attacks) + 1)
    down = math.ceil((len(attacks) + 1) / across)
    figure = empty(2.5 * across, 2.3 * down)
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for panel, attack in zip(panels, attacks):
        for index, rule in enumerate(dict.fromkeys(row["rule"] for row in rows)):
            own = [row for row in rows if row["rule"] == rule and row["attack"] in ("none", attack)]
            line(panel, index, [100 * row["share"] for row in own], [row["accuracy (%)"] for row in own], rule)
        panel.set_title(attack, fontsize=10)
        panel.set_xticks(sorted({100 * row["share"] for row in rows}))
        panel.tick_params(labelsize=9, labelbottom=True)
        panel.set_xlabel("attackers (%)", fontsize=9)
        panel.set_ylim(0, 100)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(attacks) :]:
        panel.set_axis_off()
    for panel in panels[::across]:
        panel.set_ylabel("test accuracy (%)", fontsize=9)
    panels[len(attacks)].legend(*panels[0].get_legend_handles_labels(), fontsize=9, frameon=False, loc="center")
    save_figure(figure, given.out / "table.png")


if __name__ == "__main__":
    given = parse_seeds(options(__doc__, "robustness", "table"), SEEDS)
    chosen, cases = variants(given.scale)
    rows = rows_of(cases, run_variants("all", SETTINGS[given.scale], chosen, given))
    report(rows, given, decimals={"accuracy (%)": 1, "lost (points)": 1})
    draw(rows, given)
