"""Staleness weights learned along the gradient of whole runs, beside polynomial and hinge; beyond the paper.

    python experiments/vector_fields/tuned_staleness.py --scale laptop

FedAsync mixes in an arriving model with the weight ``alpha s(tau)``. Four families of ``alpha s`` are tuned by
``config.tune``: one weight for each staleness; twelve weights, the last for all larger staleness; ``alpha (1 +
tau)^-a``; and the hinge (alpha, slope and threshold). Each gets the same number of steps of Adam at the same rate, on
the same validation part, runs and delays. All are then run with new seeds (other partitions, initial models and delays)
under two delay models: that of the tuning, and one that was not used in it. FedAsync with the weights of its paper is
the baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import jax.numpy as jnp
import numpy as np
import optax
import variants as shared
from variants import Variant

from fedjax_async import ServerAlgorithm, Settings, register, server
from fedjax_async.base import disk
from fedjax_async.config import tune
from fedjax_async.results import tables
from fedjax_async.results.figure import FAINT, GRID, PALETTE, label, new, save_figure
from fedjax_async.results.metrics import final_value
from fedjax_async.types import Run

FINAL = "tail:3"
TRAINING = "lognormal:mean=60,heterogeneity=1"
DELAYS = {"as in the tuning, new draws": TRAINING, "held out: measured devices": "rpi"}
SEEDS = {"smoke": 1, "laptop": 3, "paper": 3}
TUNING_SEEDS = {"smoke": (100,), "laptop": (100, 101), "paper": (100, 101, 102)}
STEPS, RATE = {"smoke": 1, "laptop": 15, "paper": 40}, 0.2  # steps and rate of Adam
_MNIST: dict[str, Any] = {
    **{"dataset": "mnist", "model": "mlp:hidden=64", "clients": 10, "partition": "dirichlet:alpha=0.1", "lr": 0.05},
    **{"steps": 5, "updates": 200, "eval_updates": 10, "eval_examples": 2000, "validation_fraction": 0.02},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "smoke": _MNIST | {"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 3, "steps": 1, "updates": 6}
    | {"eval_updates": 2, "eval_examples": 100, "validation_fraction": 0.1},
    "laptop": _MNIST,
    "paper": _MNIST | {"steps": 20, "updates": 1000, "eval_updates": 20, "eval_examples": 10_000},
}  # fmt: skip


class Family(NamedTuple):
    """A family of weights: the method at which the descent starts, and the numbers that it changes."""

    method: str
    names: dict[str, str]  # path -> how it varies, as for ``tune``
    values: int | None = None  # the largest number of weights by staleness


_CONSTANT = "fedasync:mixing=0.6,staleness=constant"
FAMILIES = {
    "learned": Family(_CONSTANT, {"method.mixing": "staleness"}),
    "polynomial": Family("fedasync:mixing=0.6,exponent=0.5", {"method.mixing": "run", "method.exponent": "run"}),
    "hinge": Family(
        "fedasync:mixing=0.6,staleness=hinge,slope=10,threshold=4",
        {"method.mixing": "run", "method.slope": "run", "method.threshold": "run"},
    ),
}
FEW = {"smoke": 3, "laptop": 12, "paper": 12}  # number of weights in the second learned family
PAPER = "polynomial, not tuned"  # Xie et al. (2019), section 5.2


@register("method", "fedasync_weights", timing="every")
def fedasync_weights(*, weights: str = "0.6") -> ServerAlgorithm:
    """FedAsync with ``alpha s(tau)`` from a list joined by slashes; all larger staleness has the last weight."""
    listed = [float(weight) for weight in str(weights).split("/")]

    def weight(tau: Any) -> Any:
        return jnp.asarray(listed, jnp.result_type(float))[jnp.minimum(tau, len(listed) - 1)]

    return server.rule(server.towards_client(), server.scale_by_staleness(weight), optimizer=optax.sgd(1.0))


def weights_at(name: str, values: Mapping[str, Any], tau: np.ndarray) -> np.ndarray:
    """``alpha s(tau)`` of the family ``name``, for ``values`` by path; [len(tau)]."""
    mixing = np.asarray(values["method.mixing"], float)
    if name == "hinge":
        late = np.maximum(tau - values["method.threshold"], 0.0)
        return mixing / (values["method.slope"] * late + 1.0)
    if name == "polynomial":
        return mixing * (1.0 + tau) ** -values["method.exponent"]
    return mixing[np.minimum(tau, len(mixing) - 1)]


def families(scale: str) -> dict[str, Family]:
    """Name -> family, in the order of the table."""
    few = {f"learned, {FEW[scale]} values": FAMILIES["learned"]._replace(values=FEW[scale])}
    hinge = FAMILIES["hinge"]
    if scale == "smoke":  # no update is later than the threshold of 4, so the slope would have no gradient
        hinge = hinge._replace(method=hinge.method.replace("threshold=4", "threshold=1"))
    return {"learned": FAMILIES["learned"], **few, **FAMILIES, "hinge": hinge}


def tuned(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The result of a family's descent: best values by path, losses before each step. Kept in a file."""
    family, kept = (
        families(given.scale)[name],
        given.out / "tuned" / f"{name.replace(', ', '_').replace(' ', '_')}.json",
    )
    plan: dict[str, Any] = {
        "settings": SETTINGS[given.scale] | {"delay": TRAINING, "eval_examples": 100, "method": family.method},
        "names": family.names,
        "options": {"steps": STEPS[given.scale], "rate": RATE, "last": 3, "seeds": list(TUNING_SEEDS[given.scale])},
    }
    if family.values is not None:
        plan["options"]["staleness_values"] = family.values
    if kept.is_file() and (found := json.loads(kept.read_text()))["plan"] == plan:
        return found
    done = tune(Settings(**plan["settings"]), family.names, **plan["options"])
    found = {
        "plan": plan,
        "values": {path: np.asarray(column[done.best]).tolist() for path, column in done.values.items()},
        "losses": done.losses.tolist(),
        "best": done.best,
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    disk.write(kept, json.dumps(found, indent=1).encode())
    return found


def method_of(name: str, values: Mapping[str, Any]) -> str:
    """The spec of FedAsync with these weights."""
    if name.startswith("learned"):
        return "fedasync_weights:weights=" + "/".join(f"{weight:.4f}" for weight in values["method.mixing"])
    options = {path.partition(".")[2]: f"{value:.6g}" for path, value in values.items()}
    kind = {"staleness": name} if name == "hinge" else {}
    return "fedasync:" + ",".join(f"{option}={value}" for option, value in (kind | options).items())


def drawn(found: Mapping[str, Mapping[str, Any]], runs: Sequence[Run], given: argparse.Namespace) -> None:
    """Save a figure of the weights and of the share of updates by staleness; and the weights as a table."""
    learned = found["learned"]["values"]["method.mixing"]
    tau = np.arange(len(learned))
    staleness = np.concatenate([run.updates["staleness"] for run in runs])
    share = np.bincount(np.minimum(staleness, len(learned) - 1), minlength=len(learned)) / len(staleness)
    columns = {name: weights_at(name, each["values"], tau) for name, each in found.items()}
    columns[PAPER] = 0.6 * (1.0 + tau) ** -0.5
    rows = [
        {"staleness": int(t), "share of updates (%)": 100 * share[t], **{name: w[t] for name, w in columns.items()}}
        for t in tau
    ]
    tables.write(rows, given.out / "tuned_staleness_weights.csv")
    figure, axes = new(6.4, 3.6)
    axes.bar(tau, share, color=GRID, width=0.9, label="share of the updates")
    for (name, weights), colour in zip(columns.items(), (*PALETTE[:4], FAINT)):
        axes.plot(tau, weights, color=colour, marker="o", markersize=3, linewidth=1.4, label=name)
    label(axes, "staleness (server steps)", "weight of the update")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    save_figure(figure, given.out / "tuned_staleness.png")


def main() -> None:
    """Tune the families, run them with new seeds under both delay models, write the tables and the picture."""
    parser = shared.options(__doc__, "vector_fields", "tuned_staleness")
    given = shared.parse_seeds(parser, SEEDS)
    setting = SETTINGS[given.scale]
    why = shared.missing(setting | {"method": "fedasync"})
    if why is not None:
        sys.exit(why)
    found = {name: tuned(name, given) for name in families(given.scale)}
    methods = {name: method_of(name, each["values"]) for name, each in found.items()}
    methods[PAPER] = "fedasync:mixing=0.6,exponent=0.5"
    rows = []
    for title, delay in DELAYS.items():
        variants = [Variant(name, {"method": method}) for name, method in methods.items()]
        runs = shared.run_variants(delay.partition(":")[0], setting | {"delay": delay}, variants, given)
        for name, seeds in runs.items():
            rows.append({
                "delays": title,
                "weights": name,
                "accuracy (%)": tables.spread([100 * final_value(run, "accuracy", FINAL) for run in seeds]),
                "loss": tables.spread([final_value(run, "loss", FINAL) for run in seeds]),
                "mean staleness": tables.spread([float(run.updates["staleness"].mean()) for run in seeds]),
                "tuned loss, before": found[name]["losses"][0] if name in found else None,
                "tuned loss, best": found[name]["losses"][found[name]["best"]] if name in found else None,
                "method": "tuned_staleness_weights.csv" if name.startswith("learned") else methods[name],
                "seeds": len(seeds),
            })  # fmt: skip
        if delay == TRAINING:
            drawn(found, runs[PAPER], given)
    shared.report(rows, given, decimals={"loss": 4, "tuned loss, before": 4, "tuned loss, best": 4})


if __name__ == "__main__":
    main()
