"""Which parts of methods matter: one part is added at a time, to several methods, at equal tuning budgets.

    python experiments/lessons/ablation.py --scale small    # half an hour of a core; goes on where it stopped
    python experiments/lessons/ablation.py --scale full     # on a GPU

A *part* is staleness weights, a buffer, a memory of all clients, a correction, a choice of clients, or Adam at the
server. ``PAIRS`` names for each part the configurations without and with it, which differ in nothing else. Every
configuration gets the same number of tuning runs in each block, over the server's rate and the local one, each kind of
timing over the same two decades; the best by validation examples runs with fresh seeds on test examples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "comparison"))

import effects
import kept
import parts
import study
from scenes import Block, blocks


class Configuration(NamedTuple):
    """A method with places: ``rate`` for the server's, ``few`` for clients at a time; its policy has ``asked``."""

    spec: str
    kind: str  # of the range of rates
    policy: str = ""
    discounts: int = 0  # arrivals of a step, if the rule weights by staleness without a limit on its rate; else 0


BUFFER, FEW, ROUNDS = "buffer:size=5", "buffer:size=5,concurrency={few}", "cohort:size={few}"
CONFIGURATIONS = {
    "arrivals": Configuration("asgd:server_lr={rate}", "every"),
    "arrivals, weights": Configuration("fedbuff:server_lr={rate}@every", "every", discounts=1),
    "arrivals, last deltas": Configuration("ace:server_lr={rate}", "every"),
    "arrivals, memory": Configuration("ca2fl:server_lr={rate}@every", "every"),
    "arrivals, delay": Configuration("dc_asgd_a:server_lr={rate}", "every"),
    "arrivals, orthogonal": Configuration("orthograd:server_lr={rate}", "every"),
    "arrivals, scaffold": Configuration("scaffold:server_lr={rate}@every", "every"),
    "arrivals, adam": Configuration("fedadam:server_lr={rate},weighting=uniform@every", "every, adam"),
    "mixing": Configuration("fedasync:mixing={rate},staleness=constant", "every"),
    "mixing, weights": Configuration("fedasync:mixing={rate}", "every"),
    "buffer": Configuration(f"asgd:server_lr={{rate}}@{BUFFER}", "buffer"),
    "buffer, weights": Configuration(f"fedbuff:server_lr={{rate}}@{BUFFER}", "buffer", discounts=5),
    "buffer, memory": Configuration(f"ca2fl:server_lr={{rate}}@{BUFFER}", "buffer"),
    "buffer, delay": Configuration(f"dc_asgd_a:server_lr={{rate}}@{BUFFER}", "buffer"),
    "buffer, orthogonal": Configuration(f"orthograd:server_lr={{rate}}@{BUFFER}", "buffer"),
    "buffer, scaffold": Configuration(f"scaffold:server_lr={{rate}}@{BUFFER}", "buffer"),
    "buffer, adam": Configuration(f"fedadam:server_lr={{rate}},weighting=uniform@{BUFFER}", "buffer, adam"),
    "few": Configuration(f"asgd:server_lr={{rate}}@{FEW}", "buffer"),
    "few, oort": Configuration(f"asgd:server_lr={{rate}}@{FEW}", "buffer", "oort"),
    "few, power of choice": Configuration(f"asgd:server_lr={{rate}}@{FEW}", "buffer", "power_of_choice:d={asked}"),
    "rounds": Configuration(f"fedavg:server_lr={{rate}},weighting=uniform@{ROUNDS}", "rounds"),
    "rounds, memory": Configuration(f"fedvarp:server_lr={{rate}}@{ROUNDS}", "rounds"),
    "rounds, scaffold": Configuration(f"scaffold:server_lr={{rate}}@{ROUNDS}", "rounds"),
    "rounds, adam": Configuration(f"fedadam:server_lr={{rate}},weighting=uniform@{ROUNDS}", "rounds, adam"),
}
# Part -> its pairs (without, with).
PAIRS: dict[str, list[tuple[str, str]]] = {
    "staleness weights": [(one, f"{one}, weights") for one in ("arrivals", "mixing", "buffer")],
    "buffer of five": [
        (f"arrivals{part}", f"buffer{part}")
        for part in ("", ", weights", ", memory", ", delay", ", orthogonal", ", scaffold", ", adam")
    ],
    "memory of all clients": [
        *((one, f"{one}, memory") for one in ("arrivals", "buffer", "rounds")),
        ("arrivals", "arrivals, last deltas"),
    ],
    "delay correction": [(one, f"{one}, {kind}") for kind in ("delay", "orthogonal") for one in ("arrivals", "buffer")],
    "SCAFFOLD": [(one, f"{one}, scaffold") for one in ("arrivals", "buffer", "rounds")],
    "Oort": [("few", "few, oort")],
    "power of choice": [("few", "few, power of choice")],
    "Adam at the server": [(one, f"{one}, adam") for one in ("arrivals", "buffer", "rounds")],
}
COUNTS = {"smoke": 2, "small": 8, "full": 16}  # tuning runs
SEEDS = {"smoke": 2, "small": 5, "full": 5}
SMOKE = ("arrivals", "arrivals, weights")


def asked(given: argparse.Namespace) -> list[study.Tuned]:
    """All configurations in all blocks of the scale."""
    names = SMOKE if given.scale == "smoke" else tuple(CONFIGURATIONS)
    return [part_of(name, block, given) for block in blocks(given.scale) for name in names]


def part_of(name: str, block: Block, given: argparse.Namespace) -> study.Tuned:
    """A configuration in a block.

    Where weights shrink late deltas, the range of rates is longer by as much as a delta of mean staleness is shrunk.
    """
    spec, kind, policy, discounts = CONFIGURATIONS[name]
    clients = block.settings()["clients"]
    few, most_asked = max(5, clients // 3), max(3, clients // 5)
    changes = (("policy", policy.format(asked=most_asked)),) if policy else ()
    spec = spec.replace("{few}", str(few)).replace("{rate}", "{:g}")
    factor = (1 + clients / discounts) ** 0.5 if discounts else 1.0
    return study.Tuned(name, spec, kind, block, given.out, COUNTS[given.scale], SEEDS[given.scale], changes, factor)


def part_rows(runs: Sequence[kept.Kept]) -> list[dict[str, Any]]:
    """A row for each part: its effect, a mean over its pairs."""
    return effects.rows(runs, _present(runs), "part")


def pair_rows(runs: Sequence[kept.Kept]) -> list[dict[str, Any]]:
    """A row for each pair of configurations."""
    single = {(part, *pair): [pair] for part, pairs in _present(runs).items() for pair in pairs}
    rows = effects.rows(runs, {" / ".join(names): pair for names, pair in single.items()}, "pair")
    return [
        {"part": names[0], "without": names[1], "with": names[2]}
        | {k: v for k, v in row.items() if k not in ("pair", "pairs")}
        for names, row in zip(single, rows, strict=True)
    ]


def _present(runs: Sequence[kept.Kept]) -> dict[str, list[tuple[str, str]]]:
    """The pairs that ran."""
    have = {run.method for run in runs}
    found = {part: [pair for pair in pairs if have >= {*pair}] for part, pairs in PAIRS.items()}
    return {part: pairs for part, pairs in found.items() if pairs}


def main() -> None:
    """Run what is missing, and write the tables."""
    given = study.parsed(study.with_processes(study.options(__doc__, "ablation")))
    about = parts.definition(given.scale) | {"seeds": SEEDS[given.scale], "points": COUNTS[given.scale], "knobs": 2}
    parts.begin(given.out, about | {"configurations": {name: list(one) for name, one in CONFIGURATIONS.items()}})
    found = parts.train_all(asked(given), given.processes, quiet=given.quiet)
    study.publish_runs(found, given, "ablation")
    study.publish(part_rows(found.runs), given, "ablation")
    study.publish(pair_rows(found.runs), given, "pairs")
    study.publish(effects.score_rows(found.runs), given, "configurations", [])


if __name__ == "__main__":
    main()
