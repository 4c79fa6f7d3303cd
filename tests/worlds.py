"""Worlds drawn from the registries, for the test that the engine equals the oracle in any of them.

    python -m tests.worlds --days 7      # which pairs of values a week of draws covers; trains nothing, minutes

A world is one value for each axis; None is the default. An axis is a setting, or how the engine runs it. The values
of ``PROGRAM`` decide what is compiled, which takes seconds; those of ``CLOCK`` only when and to whom, which takes a
tenth of one. So a day draws programs, and several worlds for each.

All pairs of values of two axes are dealt among the seven days of a week, anew each week, and a day's worlds are chosen
to cover its share: each starts from an uncovered pair and takes, axis by axis, the value that covers most. What is
refused shows where the test runs it: the world then loses a value.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
from collections import Counter
from typing import Any

import jax
import numpy as np

from fedjax_async import Settings, named
from fedjax_async.clock import AVAILABILITY, DELAYS, EXCHANGES, FAULTS, NETWORKS, POLICIES, TIMINGS, TOPOLOGIES
from fedjax_async.clock.energy import ENERGY
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import prepare
from fedjax_async.data.augment import AUGMENTATIONS
from fedjax_async.local import DECAYS, FEEDBACKS, OPTIMIZERS
from fedjax_async.models.metrics import METRICS
from fedjax_async.peers.methods import METHODS as PEER_METHODS
from fedjax_async.server import ATTACKS, METHODS, PARTS, PRIVACY
from tests.engine.problem import FEATURES, MODEL, data

World = dict[str, str | None]
PROGRAMS, EIGHT, CLOCKS = 6, 1, 8  # a day's programs, those of them on eight devices, and the worlds of each
NODES = 4  # every fourth program has no server; which ones changes by day, as the last ones run on eight devices
# Most values that are not the default, of a program and of a world: more hide each other, and are refused more often.
MOST, MOST_IN_ALL = 7, 11

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
    "network": {"link": "down=1e3,up=5e2,latency=0.1,jitter=0.3,heterogeneity=0.5"},
    "compress": {"topk": "ratio=0.3", "topk_fast": "ratio=0.3", "randk": "ratio=0.3", "topk_qsgd": "ratio=0.3",
                 "centroids": "k=4"},
    "attack": dict.fromkeys(ATTACKS, "share=0.3"),
    "privacy": {"dp": "clip=1,noise=0.5", "dp_sgd": "clip=1,noise=0.5", "secure": "size=2"},
    "policy": {"power_of_choice": "d=3", "event_triggered": "norm=0.05"},
    "topology": {"gossip": "receivers=2", "random_regular": "degree=2", "small_world": "neighbours=2,p=0.3",
                 "erdos_renyi": "p=0.7"},
    "part": {"swa": "start=0.5", "momentum": "beta=0.5"},
    "decay": {"exponential": "rate=0.9", "cosine": "steps=8,floor=0.1", "warmup": "steps=4"},
    "metrics": {"top": "k=2"},
    "augment": {"crop": "padding=1"},
}  # fmt: skip
# Values that read a file or are measured.
WITHOUT = {"csv", "rpi", "edges"}


def specs(axis: str, names: Any, default: str = "") -> list[str]:
    """A spec for each name of a registry but the default, which None is."""
    options = OPTIONS.get(axis, {})
    given = [name for name in names if name not in WITHOUT and name != default]
    return [f"{name}:{options[name]}" if name in options else name for name in given]


# Several settings on one axis are texts SETTING=VALUE: they have little to do with each other, and compile longer.
PROGRAM: dict[str, list[str]] = {
    "optimizer": specs("optimizer", OPTIMIZERS, "sgd"),
    "decay": specs("decay", DECAYS, "constant"),
    "compress": specs("compress", COMPRESSORS),
    "personal": ["output"],
    "norm_limit": ["0.5"],
    "augment": specs("augment", AUGMENTATIONS),
    "batching": ["vmap", "loop"],
    "run": ["resumed", "swept"],
    "dataset": ["streamed"],
    "devices": ["8"],
}
SERVER_PROGRAM = PROGRAM | {
    "method": list(METHODS),
    "part": [*specs("part", PARTS), "cyclic:length=4+momentum:beta=0.3"],
    "feedback": [*FEEDBACKS, "off"],
    "compress_per": ["layer", "tensor"],
    "privacy": specs("privacy", PRIVACY),
    "attack": specs("attack", ATTACKS),
    "policy": specs("policy", POLICIES),
    "ditto": ["0.1"],
    "measures": [
        *(f"metrics={spec}" for spec in specs("metrics", METRICS)),
        *("train_loss=True", "fine_tune=2", "per_client=True", "validation_fraction=0.3"),
    ],
    "execution": ["max_width=1", "max_width=4", "lanes=2", "fixed_steps=True", "waves_per_call=2", "remat=True"],
}
NODES_PROGRAM = PROGRAM | {
    "method": list(PEER_METHODS),
    "measures": ["global_tests=all", "validation_fraction=0.3"],
    "execution": ["max_width=1", "max_width=4", "lanes=2", "remat=True"],
}
# Beside the names of the registries: options that go other ways.
TIMING = ["every:concurrency=3", "buffer:size=2,concurrency=4,sampling=round_robin",
          "cohort:size=3,over_selection=1,deadline=2"]  # fmt: skip
ABSENCE = ["sessions:on=3,off=2,leaving=pause", "sessions:on=3,off=2,leaving=lose",
           "joins:share=0.4,by=3+leaves:share=0.4,by=6"]  # fmt: skip
EXCHANGE = [*(f"push_sum:capacity=2,policy={policy}" for policy in ("carry", "merge", "discard")),
            "mean:policy=merge,aggregate_at=end", "swift:every=2"]  # fmt: skip
CLOCK: dict[str, list[str]] = {
    "delay": specs("delay", DELAYS),
    "availability": [*specs("availability", AVAILABILITY, "always"), *ABSENCE],
    "faults": [*specs("faults", FAULTS), "drop:probability=0.1+duplicate:probability=0.1+corrupt:probability=0.1"],
    "network": specs("network", NETWORKS),
    "steps": ["3"],
}
SERVER_CLOCK = CLOCK | {
    "timing": [*specs("timing", TIMINGS), *TIMING],
    "max_staleness": ["2"],
    "timeout": ["2", "2,drop"],
    "energy": specs("energy", ENERGY),
}
NODES_CLOCK = CLOCK | {
    "topology": [*specs("topology", TOPOLOGIES), "ring:directed=true", "exponential:one_peer=true"],
    "exchange": [*specs("exchange", EXCHANGES), *EXCHANGE],
}
AXES = {"server": (SERVER_PROGRAM, SERVER_CLOCK), "nodes": (NODES_PROGRAM, NODES_CLOCK)}
ALWAYS = {"method", "delay", "batching"}  # axes without a default
NUMBERS = {"steps": int, "max_staleness": int, "norm_limit": float, "ditto": float}
# What the engine refuses, when it is called with the settings.
NOT_TOGETHER = [
    ("execution", "waves_per_call=2", "devices", "8"), ("run", "swept", "devices", "8"),
    ("execution", "waves_per_call=2", "dataset", "streamed"), ("execution", "lanes=2", "run", "swept"),
]  # fmt: skip
# What a value may need beside it: a refusal that names the key is met with a companion first, if its axis is free.
COMPANIONS: dict[str, World] = {
    "feedback": {"compress": "topk:ratio=0.3"},
    "compress_per": {"compress": "topk:ratio=0.3"},
    "policy": {"timing": "every:concurrency=3"},  # clients to choose among
    "size": {"timing": "buffer:size=2"},  # a buffer that five clients fill
}


# --- what a world is in settings ----------------------------------------------------------------------


@functools.cache
def pictures(streamed: bool, held_out: bool) -> Any:
    """The blobs as pictures of one row, which can be augmented; one client has a single example if none is held out."""
    blobs = data((9, 4, 13, 6, 3)) if held_out else data()
    x, test_x = (np.asarray(rows, np.float64).reshape(-1, 1, FEATURES, 1) for rows in (blobs.x, blobs.test_x))
    name = f"blobs{'_streamed' * streamed}{'_held_out' * held_out}"
    return named(name, blobs._replace(name=name, x=x, test_x=test_x, streamed=streamed))


SMALL = named("small", MODEL._replace(apply=lambda params, x, key=None: MODEL.apply(params, x.reshape(len(x), -1))))


def settings_of(world: World) -> dict[str, Any]:
    """Keywords of ``simulate``, without those that say how the engine runs it."""
    given: dict[str, Any] = {k: v for k, v in world.items() if v is not None}
    for name in ("batching", "run", "execution", "devices"):
        given.pop(name, None)
    given["method"] += f"+{given.pop('part')}" if "part" in given else ""
    given |= {name: kind(given[name]) for name, kind in NUMBERS.items() if name in given}
    if "timeout" in given:
        given |= {"timeout": 2.0} | ({"late": "drop"} if given["timeout"].endswith("drop") else {})
    given |= setting_of(given.pop("measures", None))
    # of a mean of one second
    name, _, options = given["delay"].partition(":")
    given["delay"] = f"{name}:mean=1" + (f",{options}" if options else "")
    given["dataset"] = pictures(given.pop("dataset", None) is not None, "validation_fraction" in given)
    work = {} if "steps" in given else {"epochs": 1.0}
    return given | work | {
        "model": SMALL, "batch_size": 4, "lr": 0.1, "updates": 18, "eval_updates": 6, "seed": 3
    }  # fmt: skip


def engine_of(world: World) -> dict[str, Any]:
    """Keywords of ``simulate`` that say how the engine runs it."""
    devices = {"devices": int(world["devices"])} if world.get("devices") else {}
    return {"batching": world["batching"], "max_width": 8 if devices else 2} | devices | setting_of(world["execution"])


def setting_of(text: str | None) -> dict[str, Any]:
    """The setting that ``SETTING=VALUE`` gives."""
    if text is None:
        return {}
    name, _, value = text.partition("=")
    return {name: value if name in ("metrics", "global_tests") else json.loads(value.lower())}


def refusal(world: World) -> str | None:
    """Why the settings are refused, or None; nothing is trained."""
    for axis, value, other, its in NOT_TOGETHER:
        if world[axis] == value and world[other] == its:
            return f"{axis} = {value!r}: must be left out with {other} = {its}"
    engine = engine_of(world)
    engine.pop("devices", None)  # which there are in another process
    try:
        prepare(Settings(**settings_of(world), **engine))
        Settings(**settings_of(world), engine="reference")
    except ValueError as error:
        return str(error)
    return None


# --- the draws of a day --------------------------------------------------------------------------------


class Kind:
    """The values of runs with or of runs without a server, numbered, and which pairs a day has not covered yet."""

    def __init__(self, kind: str, day: int) -> None:
        program, clock = AXES[kind]
        self.axes = [*program, *clock]
        self.values = [(a, v) for a, values in (program | clock).items() for v in [None] * (a not in ALWAYS) + values]
        self.number = {value: i for i, value in enumerate(self.values)}
        self.axis = np.array([self.axes.index(a) for a, _ in self.values])
        self.of_clock = self.axis >= len(program)
        self.is_default = np.array([v is None for _, v in self.values])
        first, second = np.nonzero(self.axis[:, None] < self.axis[None, :])
        dealt = np.random.default_rng([day // 7, len(kind)]).permutation(len(first))
        share = np.zeros(len(first))
        share[dealt] = np.where(np.arange(len(first)) % 7 == day % 7, 64.0, 1.0)  # this day's share, or another day's
        self.left = np.zeros((len(self.values), len(self.values)))  # 0: covered
        self.left[first, second] = self.left[second, first] = share
        self.pairs = len(first)
        # pairs of long axes first: those of short ones come with them
        length = np.bincount(self.axis)[self.axis]
        own = sorted(dealt[day % 7 :: 7], key=lambda i: -length[first[i]] * length[second[i]])
        self.queue = [(int(first[i]), int(second[i])) for i in own]

    def numbers(self, world: World) -> list[int]:
        """The numbers of a world's values."""
        return sorted(self.number[value] for value in world.items())

    def grown(self, fixed: World, free: np.ndarray, rng: np.random.Generator) -> World:
        """A world with these fixed values, and of the ``free`` ones those that cover most; its pairs are covered."""
        chosen = dict(fixed)
        gain = self.left[:, self.numbers(chosen)].sum(axis=1) + rng.random(len(free))
        for _ in range(len(self.axes) - len(chosen)):
            usable = free & ~np.isin(self.axis, [self.axes.index(axis) for axis in chosen])
            given = [axis for axis, value in chosen.items() if value is not None and axis not in ALWAYS]
            spared = self.is_default | np.isin(self.axis, [self.axes.index(axis) for axis in ALWAYS])
            if sum(not _is_of_clock(axis) for axis in given) >= MOST:
                usable &= spared | self.of_clock
            if len(given) >= MOST_IN_ALL:
                usable &= spared
            best = int(np.argmax(np.where(usable, gain, -1)))
            axis, value = self.values[best]
            chosen[axis] = value
            gain += self.left[best]
        numbers = self.numbers(chosen)
        self.left[np.ix_(numbers, numbers)] = 0
        return chosen

    def seed(self, devices: str | None) -> World:
        """A pair of values to cover next, with this number of devices."""
        for pair in self.queue:
            given = dict(self.values[i] for i in pair)
            if self.left[pair] and not self.of_clock[list(pair)].all() and given.get("devices", devices) == devices:
                return given | {"devices": devices}
        return {"devices": devices}


@functools.cache
def drafts(day: int, programs: int = PROGRAMS, eight: int = EIGHT) -> list[list[World]]:
    """The worlds of each program of a day, before any is refused. The last ``eight`` programs run on eight devices."""
    rng = np.random.default_rng(day)
    kinds = {name: Kind(name, day) for name in AXES}
    found = []
    for number in range(programs):
        kind = kinds["nodes" if (day + number) % NODES == 0 else "server"]
        first = kind.grown(kind.seed("8" if number >= programs - eight else None), np.ones(len(kind.values), bool), rng)
        program = {axis: value for axis, value in first.items() if not kind.of_clock[kind.number[axis, value]]}
        found.append([first, *(kind.grown(program, kind.of_clock, rng) for _ in range(CLOCKS - 1))])
    return found


def allowed(worlds: list[World]) -> tuple[list[World], list[str]]:
    """The worlds of a program, each without what is refused, and the refusals.

    A refused world gets a companion of the value that the refusal names, or loses this value. The program's values are
    the same in all worlds.
    """
    found: list[World] = []
    refusals: list[str] = []
    lost: set[str] = set()
    for draft in worlds:
        world = draft | dict.fromkeys(lost)
        if found:
            world |= {axis: found[0][axis] for axis in world if not _is_of_clock(axis)}
        companions = dict(COMPANIONS)
        while (why := refusal(world)) is not None:
            refusals.append(why)
            name = why.replace(":", " ").partition(" ")[0]
            given = [a for a, v in world.items() if v is not None and a not in (*ALWAYS, "devices")]
            if found:
                given = [axis for axis in given if _is_of_clock(axis)]
            companion = companions.pop(name, {"method": "fedasync"})
            if all(axis in world and world[axis] is None for axis in companion):
                world |= companion
                continue
            named_axes = [a for a in given if name in (a, str(world[a]).partition("=")[0])]
            if not (named_axes or given):
                break
            # without a name it is mostly the policy or the part that does not fit
            axis = (named_axes or [a for a in ("policy", "part") if a in given] or given[::-1])[0]
            world[axis] = None
            lost |= set() if _is_of_clock(axis) else {axis}
        if why is None:
            found.append(world)
    return found, refusals


def _is_of_clock(axis: str) -> bool:
    return axis in SERVER_CLOCK or axis in NODES_CLOCK


def pairs(worlds: list[World]) -> set[Any]:
    """The pairs of values of these worlds, those of runs without a server apart."""
    return {
        ("topology" in world, *pair)
        for world in worlds
        for pair in itertools.combinations(sorted((axis, str(value)) for axis, value in world.items()), 2)
    }


def all_pairs() -> int:
    """How many pairs of values there are, those that are refused too."""
    return sum(Kind(name, 0).pairs for name in AXES)


def main() -> None:
    """Print how many pairs the draws of some days cover."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--eight", type=int, default=EIGHT)
    a = parser.parse_args()
    first = datetime.date.today().toordinal() // 7 * 7
    covered: set[Any] = set()
    for day in range(first, first + a.days):
        programs = [allowed(worlds) for worlds in drafts(day, a.programs, a.eight)]
        found = pairs([world for worlds, _ in programs for world in worlds])
        covered |= found
        worlds, refused = (sum(map(len, lists)) for lists in zip(*programs))
        line = f"{worlds} worlds, {refused} refused, {len(found)} pairs of {all_pairs()}; in all days {len(covered)}"
        print(f"day {day}: {line}", flush=True)
    left: Counter[str] = Counter()
    for name in AXES:
        for (a1, v1), (a2, v2) in itertools.combinations(Kind(name, first).values, 2):
            if a1 != a2 and (name == "nodes", *sorted([(a1, str(v1)), (a2, str(v2))])) not in covered:
                left[f"{name}: {a1} x {a2}"] += 1
    print("not covered, with those that are refused:", left.most_common(30))


if __name__ == "__main__":
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
