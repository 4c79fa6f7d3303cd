"""The push-sum mass that is left at the end of the paper's runs, by buffer policy; nothing is trained.

    python experiments/pushcen/mass_plans.py                    # the paper's setting, seconds

All three data sets at the paper's setting: masses depend only on the sizes of the nodes' parts, so balanced labels
replace CIFAR-10, CIFAR-100 and Tiny-ImageNet. ``--scale laptop`` has one seed, ``smoke`` two short plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from study import LATE, TASKS, parse_costs, report

from fedjax_async import clock, peers
from fedjax_async.data import Dataset, federate
from fedjax_async.data.decode import unit_images
from fedjax_async.local import local_steps
from fedjax_async.peers import Delivery
from fedjax_async.results import tables

WINDOW = 5  # events a node, on average, in the windows over which Lemma C.3's rho is estimated
SEEDS = {"smoke": 1, "laptop": 1, "paper": 3}
CLASSES = {"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200}  # number of classes
EACH = {"cifar10": 5000, "cifar100": 500, "tiny_imagenet": 500}


class Buffer(NamedTuple):
    """A compared buffer: its name, its exchange, and whether partial batches are dropped as in the released code."""

    name: str
    exchange: str
    whole_batches: bool = False


RELEASED = "aggregate_at=end,reference=released"
BUFFERS = (
    Buffer("carry", "push_sum:policy=carry"),
    Buffer("merge", "push_sum:policy=merge"),
    Buffer("discard", "push_sum:policy=discard"),
    Buffer("discard, repeated senders", "push_sum:policy=discard,newest=false"),
    Buffer("released", f"push_sum:policy=discard,newest=false,{RELEASED}", True),
    Buffer("released, newest of each sender", f"push_sum:policy=discard,{RELEASED}", True),
    Buffer("released, merge", f"push_sum:policy=merge,{RELEASED}", True),
)


def sizes(task: str, alpha: float, seed: int) -> np.ndarray:
    """The number of training images of each node, for balanced classes partitioned as in the tables; int64[N]."""
    labels = np.repeat(np.arange(CLASSES[task], dtype=np.int32), EACH[task])
    images = np.zeros((len(labels), 1), np.uint8)
    whole = Dataset(task, images, labels, images[:1], labels[:1], unit_images, CLASSES[task])
    partition = f"dirichlet:alpha={alpha:g},min_size=10"
    return np.asarray(federate(whole, partition, TASKS[task].setting["clients"], seed, test_fraction=0.2).size)


def planned(buffer: Buffer, size: np.ndarray, seed: int, horizon: float) -> dict[str, float]:
    """The columns of one plan: counts, masses, and the largest mixing coefficient of a late node's message."""
    steps = local_steps(size, batch_size=32, epochs=1.0, whole_batches=buffer.whole_batches)
    plan = peers.plan_peers(
        buffer.exchange,
        "constant:mean=0.1,reference_steps=1",
        num_clients=len(size),
        local_steps=steps,
        until=clock.Until(time=horizon),
        topology="gossip:receivers=10",
        availability=LATE.format(0.54 * horizon),
        seed=seed,
    )
    counts = np.bincount(plan.outcome, minlength=len(Delivery))
    late = np.flatnonzero((plan.joined > 0) & np.isfinite(plan.joined))
    theirs = np.isin(plan.client[plan.source], late)
    lost = float(peers.masses(plan, np.array([horizon])).lost[0])
    return {
        "updates": len(plan.client),
        "local steps": int(plan.local_steps.sum()),
        "messages": len(plan.receiver),
        "superseded": int(counts[Delivery.SUPERSEDED]),
        "overflowed": int(counts[Delivery.OVERFLOWED]),
        "mass left": len(size) - lost,
        "of": len(size),
        "smallest": float(plan.mass.min()),
        "rho": peers.contraction(plan, WINDOW * len(size)).rate if len(plan.client) >= WINDOW * len(size) else np.nan,
        "largest weight of a late node": float(plan.weight[theirs].max(initial=0.0)),
    }


def rows(scale: str) -> Iterator[dict[str, Any]]:
    """One row per data set, alpha and buffer, over the seeds."""
    smoke = scale == "smoke"
    for task in ["cifar10"] if smoke else CLASSES:
        for alpha in (0.4,) if smoke else (0.1, 0.4, 1.0):
            parts = [sizes(task, alpha, seed) for seed in range(SEEDS[scale])]
            for buffer in BUFFERS[:2] if smoke else BUFFERS:
                found = [planned(buffer, part, seed, 6.0 if smoke else 60.0) for seed, part in enumerate(parts)]
                spread = {name: tables.spread([one[name] for one in found]) for name in found[0]}
                yield {"data set": task, "alpha": alpha, "buffer": buffer.name} | spread | {"seeds": len(parts)}


def main() -> None:
    """Plan, print, write."""
    given = parse_costs(__doc__, "mass_plans")
    decimals = {"smallest": 4, "rho": 5, "largest weight of a late node": 3, "mass left": 3, "of": 0}
    decimals |= dict.fromkeys(("updates", "local steps", "messages", "superseded", "overflowed"), 0)
    report(list(rows(given.scale)), given, decimals=decimals)


if __name__ == "__main__":
    main()
