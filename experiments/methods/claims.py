"""The simplest claim of the papers of newer asynchronous methods, each in one small world.

    python experiments/methods/claims.py --scale laptop     # about forty minutes of processor time

Each world has what its papers are about: a client that is very slow, speeds that differ, labels that differ with
speeds, a half that is slow and has labels of its own, clients that are absent, few silos with long jobs, nodes on a
ring, graphs that change, slow links. A method's rate is the best of a small grid by validation accuracy, the mean over
the seeds; test examples choose nothing. All methods of a world have the same virtual time. A second table has the
differences that the papers claim, seed by seed. ``paper`` has a larger model; it is not from a paper.

Every finished run is kept under ``OUT/runs/WORLD``, and a second start of the same command continues from there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from variants import Variant, options, parse_seeds, report, run_variants

from fedjax_async import register
from fedjax_async.clock import DelayModel, Delays, bind_delays
from fedjax_async.results import tables
from fedjax_async.results.metrics import final_value
from fedjax_async.types import Run

RATES = (0.3, 0.1, 0.03)
_COMMON: dict[str, Any] = {
    **{"dataset": "fashion_mnist_6k", "model": "mlp:hidden=32", "clients": 20, "steps": 5, "lr": 0.05},
    **{"validation_fraction": 0.1, "partition": "iid"},
}
_UNEQUAL = {"partition": "dirichlet:alpha=0.1,min_size=10", "delay": "lognormal:mean=60,heterogeneity=1"}
# World -> its settings, and its methods: label -> (spec with a place for the rate, rates). After a spec may stand
# settings of the method alone, SETTING=VALUE.
Methods = dict[str, tuple[str, tuple[float, ...]]]
ASGD: Methods = {
    "ASGD": ("asgd:server_lr={}", RATES),
    "delay-adaptive ASGD, cut": ("delay_adaptive_asgd:server_lr={}", RATES),
    "delay-adaptive ASGD, drop": ("delay_adaptive_asgd:server_lr={},late=drop", RATES),
    "Ringmaster, R = 20": ("ringmaster:server_lr={}@fresh:threshold=20", RATES),
    "Ringmaster, R = 20, no stops": ("ringmaster:server_lr={}@fresh:threshold=20,stop=false", RATES),
    "Rennala, K = 10": ("rennala:server_lr={}@fresh:size=10", RATES),
}
WORLDS: dict[str, tuple[dict[str, Any], Methods]] = {
    "one slow client": (
        {"delay": "one_slow", "time": 7200.0, "eval_time": 120.0},
        ASGD
        | {
            "FedAvg, all clients": ("fedavg:server_lr={}@cohort:size=20", (1, 1.5)),
            "AD-PSGD": ("adpsgd:server_lr={}", (1, 0.3)),
            "QuAFL, s = 5": ("quafl:size=5@polling:size=5,length={}", (20, 60)),
        },
    ),
    "unequal speeds": (
        {"delay": "lognormal:mean=60,heterogeneity=1.5", "time": 600.0, "eval_time": 10.0},
        ASGD
        | {
            "Ringmaster, R = 5": ("ringmaster:server_lr={}@fresh:threshold=5", RATES),
            "FedBuff, K = 10": ("fedbuff:server_lr={}@buffer:size=10", (1, 0.3)),
            "Port, K = 10, S = 3": ("port:server_lr={},bound=3@hurry:size=10,bound=3", (1, 0.3)),
        },
    ),
    "unequal labels and speeds": (
        _UNEQUAL | {"time": 3000.0, "eval_time": 60.0},
        {
            "FedAvg, all clients": ("fedavg:server_lr={}@cohort:size=20", (1, 1.5)),
            "FedAsync": ("fedasync:mixing={}", (0.6, 0.3, 0.1)),
            "FedBuff, K = 5": ("fedbuff:server_lr={}@buffer:size=5", RATES),
            "CA2FL, K = 5": ("ca2fl:server_lr={}@buffer:size=5", RATES),
            "ASGD": ("asgd:server_lr={}", RATES),
            "ACE": ("ace:server_lr={}", RATES),
            "ACE, no waiting": ("ace:server_lr={},wait=false", RATES),
            "FedCompass": ("fedcompass:server_lr={}", (0.9, 0.3, 2.7)),
            "Malenia": ("malenia:server_lr={}", (1, 0.3)),
            "Ringleader": ("ringleader:server_lr={}", RATES),
            "AREA": ("area@buffer:size={}", (1, 3, 10)),
            "FedStaleWeight, K = 5": ("fedstaleweight:server_lr={}@buffer:size=5", RATES),
            "FedBuff, K = 2, 10 in flight": ("fedbuff:server_lr={}@buffer:size=2,concurrency=10", (1, *RATES)),
            "Pisces, 10 in flight": ("pisces:server_lr={}", (1, *RATES)),
            "FedBuff at the pace of Pisces": ("fedbuff:server_lr={}@pace", (1, *RATES)),
            "QuAFL, s = 5": ("quafl:size=5@polling:size=5,length={}", (5, 10, 20)),
        },
    ),
    "eight silos": (
        _UNEQUAL
        | {
            **{"clients": 8, "steps": 50, "delay": "lognormal:mean=60,heterogeneity=0.8"},
            **{"time": 1800.0, "eval_time": 30.0},
        },
        {
            "FedAvg, all clients": ("fedavg:server_lr={}@cohort:size=8", (1, 1.5)),
            "FedAsync": ("fedasync:mixing={}", (0.6, 0.3, 0.1)),
            "FedBuff, K = 3": ("fedbuff:server_lr={}@buffer:size=3", (2, 1, 0.5)),
            "FedCompass": ("fedcompass:server_lr={}", (4.5, 2.7, 0.9)),
        },
    ),
    "ten of sixty clients": (
        {
            **{"clients": 60, "partition": "dirichlet:alpha=0.1,min_size=5"},
            **{"delay": "lognormal:mean=60,heterogeneity=1", "time": 2000.0, "eval_time": 40.0},
        },
        {
            "FedAvg, ten a round": ("fedavg:server_lr={}@cohort:size=10", (1, 1.5)),
            "FedBuff, K = 2": ("fedbuff:server_lr={}@buffer:size=2,concurrency=10", (1, *RATES)),
            "FedBuff, K = 4": ("fedbuff:server_lr={}@buffer:size=4,concurrency=10", (1, *RATES)),
            "FedBuff at the pace of Pisces": ("fedbuff:server_lr={}@pace", (1, *RATES)),
            "Pisces": ("pisces:server_lr={}", (1, *RATES)),
        },
    ),
    "noisy gradients": (
        _UNEQUAL
        | {
            **{"delay": "lognormal:mean=60,heterogeneity=1.5", "batch_size": 1, "steps": 1},
            **{"time": 6000.0, "eval_time": 200.0},
        },
        {
            "FedAvg, all clients": ("fedavg:server_lr={}@cohort:size=20", (3, 1, 0.3)),
            "Malenia": ("malenia:server_lr={}", (3, 1, 0.3)),
        },
    ),
    "long jobs at unequal speeds": (
        _UNEQUAL
        | {
            **{"delay": "lognormal:mean=60,heterogeneity=1.5", "steps": 20},
            **{"time": 1800.0, "eval_time": 60.0},
        },
        {
            "FedBuff, K = 10": ("fedbuff:server_lr={}@buffer:size=10", (2, 1, 0.3)),
            "FedBuff, K = 10, rate 1": ("fedbuff:server_lr=1@buffer:size=10", ("",)),
            "Port, K = 10, S = 3": ("port:server_lr={},bound=3@hurry:size=10,bound=3", (2, 1, 0.3)),
            "Port, K = 10, S = 10": ("port:server_lr={},bound=10@hurry:size=10,bound=10", (2, 1, 0.3)),
        },
    ),
    "slow half with other labels": (
        {"partition": "halves", "delay": "half_slow", "time": 12000.0, "eval_time": 240.0},
        {
            "FedAsync": ("fedasync:mixing={}", (0.6, 0.3, 0.1)),
            "FedBuff, K = 5": ("fedbuff:server_lr={}@buffer:size=5", (2, 1, *RATES)),
            "Port, K = 5, S = 3": ("port:server_lr={},bound=3@hurry:size=5,bound=3", (2, 1, *RATES)),
            "ASGD": ("asgd:server_lr={}", RATES),
            "AREA": ("area@buffer:size={}", (1, 3, 10)),
            "ACE": ("ace:server_lr={}", (1, *RATES)),
            "CA2FL, K = 5": ("ca2fl:server_lr={}@buffer:size=5", (1, *RATES)),
            "FedStaleWeight, K = 5": ("fedstaleweight:server_lr={}@buffer:size=5", (1, *RATES)),
        },
    ),
    "absent clients": (
        _UNEQUAL
        | {
            "delay": "lognormal:mean=60",
            "availability": "sessions:on=600,off=1800",
            "time": 18000.0,
            "eval_time": 360.0,
        },
        {
            "FedAvg": ("fedavg:server_lr={},weighting=uniform@cohort:size=20", (1, 0.3)),
            "FedVARP": ("fedvarp:server_lr={}@cohort:size=20", (1, 0.3)),
            "FedStale, beta = 0.5": ("fedstale:server_lr={}@cohort:size=20", (1, 0.3)),
            "MIFA": ("mifa:server_lr={}@cohort:size=20", (1, 0.3)),
            "MIFA, first round waits": ("mifa:server_lr={},wait=true@cohort:size=20", (1, 0.3)),
        },
    ),
    "nodes on a ring": (
        {
            **{"partition": "dirichlet:alpha=0.3,min_size=10", "delay": "lognormal:mean=60", "topology": "ring"},
            **{"time": 6000.0, "eval_time": 120.0},
        },
        {
            "D-PSGD": ("dpsgd", ("",)),
            "CHOCO, top 10 %": ("choco", ("",)),
            "SPARQ, top 10 %, trigger 1": ("choco:trigger=1", ("",)),
            "SPARQ, top 10 %, trigger 2": ("choco:trigger=2", ("",)),
            "SPARQ, top 10 %, trigger 4": ("choco:trigger=4", ("",)),
        },
    ),
    "nodes with four neighbours": (
        {
            **{"partition": "dirichlet:alpha=0.1,min_size=10", "delay": "lognormal:mean=60", "global_tests": "all"},
            **{"time": 6000.0, "eval_time": 120.0},
        },
        {
            "D-PSGD, one graph": ("dpsgd topology=random_regular:degree=4", ("",)),
            "EL-Oracle, s = 4": ("el_oracle topology=random_regular:degree=4,redraw=true", ("",)),
            "EL-Local, s = 4": ("el_local topology=gossip:receivers=4", ("",)),
            "EL-Local, no rounds": ("el_local@mean topology=gossip:receivers=4", ("",)),
            "D-PSGD, all with all": ("dpsgd topology=complete", ("",)),
        },
    ),
    "nodes with slow links": (
        {
            **{"delay": "lognormal:mean=60", "network": "link:latency=40", "global_tests": "all", "steps": 1},
            **{"time": 12000.0, "eval_time": 240.0},
        },
        {
            "SGP": ("sgp lr={}", (0.1, 0.05, 0.025)),
            "overlap SGP": ("osgp lr={}", (0.1, 0.05, 0.025)),
            "SGP, no rounds": ("sgp@push_sum lr={}", (0.1, 0.05, 0.025)),
        },
    ),
    "mean of nodes with slow links": (
        {
            **{"delay": "lognormal:mean=60", "network": "link:latency=40", "global_tests": "all", "steps": 1},
            **{"batch_size": 256, "time": 12000.0, "eval_time": 240.0},
        },
        {f"{name}, rate {lr}": (f"{method} lr={lr}", ("",))
         for lr in (0.1, 0.2) for name, method in (("SGP", "sgp"), ("overlap SGP", "osgp"))},
    ),
}  # fmt: skip
MEAN = "mean of nodes with slow links"  # its accuracy is that of the mean of the nodes' models
SMOKE = {"model": "logistic", "time": 240.0, "eval_time": 120.0, "eval_examples": 100}
SETTINGS = {"smoke": _COMMON | SMOKE, "laptop": _COMMON, "paper": _COMMON | {"model": "lenet5"}}
SEEDS = {"smoke": 1, "laptop": 5, "paper": 5}
# World -> what a paper says is ahead, and what it is ahead of.
CLAIMS: dict[str, tuple[tuple[str, str], ...]] = {
    "one slow client": (
        *((label, "ASGD") for label in ASGD if label not in ("ASGD", "Rennala, K = 10")),
        *((label, "FedAvg, all clients") for label in ("Rennala, K = 10", "AD-PSGD", "QuAFL, s = 5")),
    ),
    "unequal labels and speeds": (
        ("ACE", "FedAsync"),
        ("ACE", "FedBuff, K = 5"),
        ("Ringleader", "Malenia"),
        ("FedStaleWeight, K = 5", "FedBuff, K = 5"),
    ),
    "eight silos": tuple(("FedCompass", other) for other in ("FedAvg, all clients", "FedAsync", "FedBuff, K = 3")),
    "ten of sixty clients": tuple(
        ("Pisces", other)
        for other in ("FedAvg, ten a round", "FedBuff, K = 2", "FedBuff, K = 4", "FedBuff at the pace of Pisces")
    ),
    "noisy gradients": (("Malenia", "FedAvg, all clients"),),
    "long jobs at unequal speeds": tuple(
        ("Port, K = 10, S = 3", other) for other in ("FedBuff, K = 10, rate 1", "FedBuff, K = 10")
    ),
    "slow half with other labels": (
        *(("AREA", other) for other in ("FedAsync", "FedBuff, K = 5")),
        ("Port, K = 5, S = 3", "FedBuff, K = 5"),
    ),
    "absent clients": tuple((label, "FedAvg") for label in ("FedVARP", "FedStale, beta = 0.5", "MIFA")),
    "nodes on a ring": (("SPARQ, top 10 %, trigger 4", "CHOCO, top 10 %"),),
    "nodes with four neighbours": tuple(
        (label, "D-PSGD, one graph") for label in ("EL-Oracle, s = 4", "EL-Local, s = 4")
    ),
    MEAN: tuple((f"overlap SGP, rate {lr}", f"SGP, rate {lr}") for lr in (0.1, 0.2)),
}


@register("delay", "one_slow")
def one_slow(*, mean: float = 60.0, times: float = 50.0) -> DelayModel:
    """Lognormal jobs of ``mean`` seconds; those of client 0 take ``times`` as long."""
    return _usual_but(mean, times, lambda clients, count: clients == 0)


@register("delay", "half_slow")
def half_slow(*, mean: float = 60.0, times: float = 10.0) -> DelayModel:
    """Lognormal jobs of ``mean`` seconds; those of the second half of the clients take ``times`` as long."""
    return _usual_but(mean, times, lambda clients, count: clients >= count // 2)


def _usual_but(mean: float, times: float, slow: Callable[[np.ndarray, int], np.ndarray]) -> DelayModel:
    def model(num_clients: int, seed: int) -> Delays:
        usual = bind_delays(f"lognormal:mean={mean},sigma=0.3", num_clients, seed)

        def durations(clients: np.ndarray, numbers: np.ndarray, *sizes: Any, **named: Any) -> np.ndarray:
            longer = np.where(slow(np.asarray(clients), num_clients), times, 1.0)
            return usual.durations(clients, numbers, *sizes, **named) * longer

        return Delays(num_clients, durations)

    return model


def last_bytes(run: Run) -> float:
    """Megabytes that were sent in both directions; between nodes each message once."""
    up, down = (float(run.evaluations[name][-1]) for name in ("bytes_up", "bytes_down"))
    return (up + down if run.has_server else up) / 1e6


def variant(spec: str) -> Variant:
    """A method, with the settings after it."""
    method, *settings = spec.split()
    given = dict(one.split("=", 1) for one in settings)
    return Variant(spec, {"method": method} | given | {name: float(given[name]) for name in given if name == "lr"})


def trained(world: str, scale: str, given: Any) -> dict[str, tuple[str, list[Run]]]:
    """Each method of a world at the rate that validation examples choose: label -> (its spec, the run of each seed)."""
    own, methods = WORLDS[world]
    setting = {**SETTINGS["smoke"], **{k: v for k, v in own.items() if "time" not in k}} if scale == "smoke" else {
        **SETTINGS[scale], **own
    }  # fmt: skip
    points = {label: [spec.format(rate) for rate in rates] for label, (spec, rates) in methods.items()}
    if scale == "smoke":
        points = {label: specs[-1:] for label, specs in list(points.items())[:2]}
    variants = [variant(spec) for spec in dict.fromkeys(spec for specs in points.values() for spec in specs)]
    found = run_variants(world.replace(" ", "_"), setting, variants, given)
    validation = {
        spec: np.nan_to_num(np.mean([final_value(run, "validation_accuracy") for run in runs]), nan=-1.0)
        for spec, runs in found.items()
    }
    best = {label: max(specs, key=lambda one: float(validation[one])) for label, specs in points.items()}
    return {label: (spec, found[spec]) for label, spec in best.items()}


def measured(world: str, runs: list[Run]) -> dict[str, np.ndarray]:
    """The accuracies of a method in per cent: at the end, at half time and on average over the run; each [seeds]."""
    nodes = "average_accuracy" if world == MEAN else "global_accuracy"
    shown = nodes if WORLDS[world][0].get("global_tests") == "all" else "accuracy"
    every = [100 * np.asarray(run.evaluations[shown], np.float64) for run in runs]
    return {
        "accuracy (%)": np.array([100 * final_value(run, shown) for run in runs]),
        "accuracy at half time (%)": np.array([one[len(one) // 2] for one in every]),
        "mean accuracy (%)": np.array([one.mean() for one in every]),
        "swing (points)": np.array([np.std(one[-max(len(one) // 3, 2) :]) for one in every]),
    }


def table(world: str, found: dict[str, tuple[str, list[Run]]]) -> list[dict[str, Any]]:
    """A row for each method of a world."""
    rows = []
    for label, (best, runs) in found.items():
        values = measured(world, runs)
        swing = float(values.pop("swing (points)").mean())
        rows.append({
            **{"world": world, "method": label, "best": best},
            **{name: tables.spread(list(each)) for name, each in values.items()},
            "swing (points)": swing,
            "sent (MB)": float(np.mean([last_bytes(run) for run in runs])),
            "updates": float(np.mean([run.counters["updates"] for run in runs])),
            "server steps": float(np.mean([run.counters["server_steps"] for run in runs])),
        })  # fmt: skip
    return rows


def differences(world: str, found: dict[str, tuple[str, list[Run]]]) -> list[dict[str, Any]]:
    """A row for each claim of a world: how far the method is ahead of the other one, and in how many seeds."""
    rows = []
    for label, other in CLAIMS.get(world, ()):
        if not {label, other} <= {*found}:  # at the smallest scale
            continue
        ours, theirs = (measured(world, found[one][1]) for one in (label, other))
        row: dict[str, Any] = {"world": world, "method": label, "ahead of": other}
        for name, title in (("accuracy (%)", "at the end"), ("mean accuracy (%)", "over the run")):
            ahead = ours[name] - theirs[name]
            row |= {
                f"{title} (points)": tables.spread(list(ahead)),
                f"{title}, seeds": f"{(ahead > 0).sum()} of {len(ahead)}",
            }
        rows.append(row)
    return rows


if __name__ == "__main__":
    given = parse_seeds(options(__doc__, "methods", "claims"), SEEDS)
    rows, claims = [], []
    for world in WORLDS:
        found = trained(world, given.scale, given)
        rows += table(world, found)
        claims += differences(world, found)
    report(rows, given, decimals={name: 1 for name in rows[0] if name.endswith(")")})
    given.name = "claims_differences"
    report(claims, given, decimals={name: 1 for name in claims[0] if name.endswith(")")})
