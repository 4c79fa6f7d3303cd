"""Worlds drawn from the registries, for the test that the engine equals the oracle in any of them.

    python -m tests.worlds --days 7      # which pairs of values a week of draws covers; trains nothing, minutes

A world is one value for each axis. An axis is a setting, or how the engine runs it. Most axes are left at the default,
so that few worlds are refused for a combination in them; a refusal is one line, too.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections import Counter
from typing import Any

import jax
import numpy as np

from fedjax_async import Settings, named
from fedjax_async.clock import AVAILABILITY, DELAYS, EXCHANGES, FAULTS, POLICIES, TIMINGS, TOPOLOGIES
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import prepare
from fedjax_async.peers.methods import METHODS as PEER_METHODS
from fedjax_async.server import ATTACKS, METHODS, PARTS, PRIVACY
from tests.engine.problem import MODEL, data

World = dict[str, str | None]

# Options for names that need some, or whose defaults suit longer runs; clients take a second a job.
OPTIONS = {
    "timing": {"buffer": "size=2", "window": "length=0.7", "cohort": "size=3", "participation": "length=1"},
    "delay": {"pareto": "shape=2.5"} | dict.fromkeys(("lognormal", "exponential"), "heterogeneity=0.5"),
    "availability": {
        "joins": "share=0.4,by=3", "leaves": "share=0.4,by=6", "periodic": "on=3,off=2", "sessions": "on=3,off=2"
    },
    "faults": {
        "drop": "probability=0.3", "duplicate": "probability=0.3", "crash": "probability=0.3,restart=2",
        "late": "probability=0.3,factor=4", "corrupt": "probability=0.3", "groups": "count=2,up=4,down=2",
    },
    "compress": {"topk": "ratio=0.3", "topk_fast": "ratio=0.3", "randk": "ratio=0.3", "topk_qsgd": "ratio=0.3",
                 "centroids": "k=4"},
    "attack": dict.fromkeys(ATTACKS, "share=0.3"),
    "privacy": {"dp": "clip=1,noise=0.5", "dp_sgd": "clip=1,noise=0.5", "secure": "size=2"},
    "policy": {"power_of_choice": "d=3", "event_triggered": "norm=0.05"},
    "topology": {"gossip": "receivers=2", "random_regular": "degree=2", "small_world": "neighbours=2,p=0.3",
                 "erdos_renyi": "p=0.7"},
    "part": {"swa": "start=0.5", "momentum": "beta=0.5"},
}  # fmt: skip
# Values that read a file or are measured.
WITHOUT = {"csv", "rpi", "edges"}


def specs(axis: str, names: Any) -> list[str]:
    """A spec for each name of a registry."""
    options = OPTIONS.get(axis, {})
    return [f"{name}:{options[name]}" if name in options else name for name in names if name not in WITHOUT]


BOTH: dict[str, list[str]] = {
    "delay": specs("delay", DELAYS),
    "availability": specs("availability", AVAILABILITY),
    "faults": specs("faults", FAULTS),
    "network": ["link:down=1e3,up=5e2,latency=0.1,jitter=0.3,heterogeneity=0.5"],
    "optimizer": ["adam", "sam"],
    "batching": ["vmap", "loop"],
    "run": ["resumed", "swept"],
}
SERVER = BOTH | {
    "timing": [*specs("timing", TIMINGS), "every:concurrency=3", "buffer:size=2,concurrency=4"],
    "part": specs("part", PARTS),
    "compress": specs("compress", COMPRESSORS),
    "feedback": ["ef", "ef21", "off"],
    "privacy": specs("privacy", PRIVACY),
    "attack": specs("attack", ATTACKS),
    "policy": specs("policy", POLICIES),
    "max_staleness": ["2"],
    "norm_limit": ["0.5"],
}
NODES = BOTH | {"topology": specs("topology", TOPOLOGIES), "exchange": specs("exchange", EXCHANGES)}
CHANCE = 0.25  # of a value that is not the default


def drawn(day: int, number: int) -> World:
    """The world of this number on this day; every third one has no server."""
    rng = np.random.default_rng([day, number])
    nodes = number % 3 == 2
    world: World = {"method": str(rng.choice(list(PEER_METHODS if nodes else METHODS)))}
    for axis, values in (NODES if nodes else SERVER).items():
        always = axis in ("delay", "batching", "topology")
        world[axis] = str(rng.choice(values)) if always or rng.random() < CHANCE else None
    return world


def settings_of(world: World) -> dict[str, Any]:
    """Keywords of ``simulate``, without those that say how the engine runs it."""
    given: dict[str, Any] = {k: v for k, v in world.items() if v is not None and k not in ("batching", "run", "part")}
    given["method"] += f"+{world['part']}" if world.get("part") else ""
    for name, kind in (("max_staleness", int), ("norm_limit", float)):
        if name in given:
            given[name] = kind(given[name])
    # of a mean of one second
    name, _, options = given["delay"].partition(":")
    given["delay"] = f"{name}:mean=1" + (f",{options}" if options else "")
    return given | {
        "dataset": named("blobs", data()), "model": named("small", MODEL), "batch_size": 4, "epochs": 1.0, "lr": 0.1,
        "updates": 18, "eval_updates": 6, "seed": 3,
    }  # fmt: skip


def refusal(world: World) -> str | None:
    """Why the settings are refused, or None; nothing is trained."""
    try:
        prepare(Settings(**settings_of(world)))
    except ValueError as error:
        return str(error)
    return None


def pairs(world: World) -> set[tuple[str, str]]:
    """The pairs of values of a world, by name without options."""
    named = [f"{axis}={str(value).partition(':')[0]}" for axis, value in sorted(world.items())]
    return set(itertools.combinations(named, 2))


def main() -> None:
    """Print how many pairs the draws of some days cover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--draws", type=int, default=12)
    a = parser.parse_args()
    today = datetime.date.today().toordinal()
    found: Counter[tuple[str, str]] = Counter()
    refused: Counter[str] = Counter()
    for day, number in itertools.product(range(a.days), range(a.draws)):
        world = drawn(today + day, number)
        why = refusal(world)
        if why is None:
            found.update(pairs(world))
        else:
            refused[why.partition(":")[0]] += 1
    print(len(found), "pairs of values in", a.days * a.draws - refused.total(), "worlds;", refused.total(), "refused")


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
