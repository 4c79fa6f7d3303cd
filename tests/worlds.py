"""Worlds made of the registries, for the test that the engine equals the oracle in any of them.

A world is one value for each axis; None is the default. An axis is a setting, or how the engine runs it. The values
of ``PROGRAM`` decide what is compiled, which takes seconds; those of ``CLOCK`` only when and to whom, which takes a
tenth of one. ``draws.py`` draws the worlds of a day.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import numpy as np

from fedjax_async import Settings, named
from fedjax_async.base import factories
from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import AVAILABILITY, DELAYS, FAULTS, NETWORKS, POLICIES, TIMINGS
from fedjax_async.clock.energy import ENERGY
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import budget, prepare
from fedjax_async.data.augment import AUGMENTATIONS
from fedjax_async.local import DECAYS, FEEDBACKS, OPTIMIZERS, going_on_training
from fedjax_async.models.metrics import METRICS
from fedjax_async.peers import EXCHANGES, TOPOLOGIES
from fedjax_async.peers.methods import METHODS as PEER_METHODS
from fedjax_async.server import ATTACKS, METHODS, PARTS, PRIVACY
from tests.engine.problem import FEATURES, MODEL, data

World = dict[str, str | None]

# Options for names that need some, or whose defaults suit longer runs; clients take a second a job.
OPTIONS = {
    "method": {"quafl": "size=2"},
    "timing": {
        "buffer": "size=2", "fresh": "size=2", "window": "length=0.7", "cohort": "size=3", "participation": "length=1",
        "polling": "length=0.7,size=2", "hurry": "size=2,bound=2", "pace": "bound=3,length=0.3,unknown=2",
    },
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
    "policy": {"power_of_choice": "d=3", "adaptive_window": "length=0.7,recent=4", "event_triggered": "norm=0.05"},
    "topology": {"gossip": "receivers=2", "random_regular": "degree=2", "small_world": "neighbours=2,p=0.3",
                 "erdos_renyi": "p=0.7"},
    "part": {"swa": "start=0.5", "momentum": "beta=0.5"},
    "decay": {"exponential": "rate=0.9", "cosine": "steps=8,floor=0.1", "warmup": "steps=4"},
    "metrics": {"top": "k=2"},
    "augment": {"crop": "padding=1"},
}  # fmt: skip
MEASURED = "rpi"  # which has a mean of its own


def spec(axis: str, name: str) -> str:
    """A name of a registry with the options that it needs."""
    options = OPTIONS.get(axis, {})
    return f"{name}:{options[name]}" if name in options else name


def specs(axis: str, registry: Mapping[str, Any], default: str = "") -> list[str]:
    """A spec for each name of a registry but the default, which None is, and those that read a file."""
    without = {name for name, factory in registry.items() if "path" in factories.options_of(factory)}
    return [spec(axis, name) for name in registry if name not in without | {default, MEASURED}]


ACCELERATOR = "accelerator"  # vmap, and the engine's programs as for an accelerator
# A node of this method first clusters means of centroids, which lie midway between centroids: rounding decides where
# they go, and vmapped products round otherwise. So it is compared without vmap.
MIDWAY = "pushcen_released"

# Several settings on one axis are texts SETTING=VALUE: they have little to do with each other, and compile longer.
PROGRAM: dict[str, list[str]] = {
    "optimizer": specs("optimizer", OPTIMIZERS, "sgd"),
    "decay": specs("decay", DECAYS, "constant"),
    "compress": specs("compress", COMPRESSORS),
    "personal": ["output"],
    "norm_limit": ["0.5"],
    "augment": specs("augment", AUGMENTATIONS),
    "batching": ["vmap", "loop", ACCELERATOR],
    "run": ["resumed", "swept"],
    "dataset": ["streamed"],
    "devices": ["8"],
}
SERVER_PROGRAM = PROGRAM | {
    "method": [spec("method", name) for name in METHODS],
    "part": [*specs("part", PARTS), "cyclic:length=4+momentum:beta=0.3"],
    "feedback": list(FEEDBACKS),
    "compress_per": ["layer", "tensor"],
    "privacy": [*specs("privacy", PRIVACY), "dp:clip=1,noise=0.5,quantile=0.5+dp_sgd:clip=1,noise=0.5"],
    "attack": specs("attack", ATTACKS),
    "policy": [*specs("policy", POLICIES), "power_of_choice:d=4+adaptive_buffer:size=1,recent=4"],
    "ditto": ["0.1"],
    "client": ["going_on"],
    "measures": [
        *(f"metrics={spec}" for spec in specs("metrics", METRICS)),
        *("train_loss=True", "fine_tune=2", "per_client=True", "validation_fraction=0.3"),
    ],
    "execution": ["max_width=1", "max_width=4", "lanes=2", "remat=True"],
}
NODES_PROGRAM = PROGRAM | {
    "method": [*PEER_METHODS, "dpsgd:trigger=0.1", "choco:trigger=0.3"],
    "measures": ["global_tests=all", "validation_fraction=0.3"],
    "execution": ["max_width=1", "max_width=4", "lanes=2", "remat=True"],
}
# Beside the names of the registries: options that go other ways.
TIMING = ["every:concurrency=3", "fresh:threshold=3", "buffer:size=2,concurrency=4,sampling=round_robin",
          "cohort:size=3,over_selection=1,deadline=2", "midway:at=0.3,size=2"]  # fmt: skip
ABSENCE = ["sessions:on=3,off=2,leaving=pause", "sessions:on=3,off=2,leaving=lose",
           "joins:share=0.4,by=3+leaves:share=0.4,by=6"]  # fmt: skip
EXCHANGE = [*(f"push_sum:capacity=2,policy={policy}" for policy in ("carry", "merge", "discard")),
            "mean:policy=merge,aggregate_at=end", "swift:every=2",
            "push_sum:reference=baseline,late_mass=0,policy=merge"]  # fmt: skip
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
    "topology": [
        *specs("topology", TOPOLOGIES),
        "ring:directed=true",
        "exponential:one_peer=true",
        "random_regular:degree=2,redraw=true",
    ],
    "exchange": [*specs("exchange", EXCHANGES), *EXCHANGE],
}
AXES = {"server": (SERVER_PROGRAM, SERVER_CLOCK), "nodes": (NODES_PROGRAM, NODES_CLOCK)}
ALWAYS = {"method", "delay", "batching"}  # axes without a default
NUMBERS = {"steps": int, "max_staleness": int, "norm_limit": float, "ditto": float}
# Values that are one kind: they come through the same interface, so the engine cannot tell them apart, and what they
# compute is tested where they are. A value that is not here is a kind of its own, and so is every new one.
ALIKE: dict[str, list[str]] = {
    "optimizer": ["adam adamw", "sam asam"],
    "decay": ["linear exponential cosine warmup"],
    # without and with a key
    "compress": ["identity cast sign scaled_sign topk topk_fast", "randk qsgd topk_qsgd centroids"],
    "method": [
        "fedavg fedprox fedavgm fedadagrad fedadam fedyogi fedasync asgd delay_adaptive_asgd ringmaster rennala fedbuff"
        " fadas fedcompass asynfl asynflc asynflc_ef",
        # the uploads of a step do not enter through their sum alone
        "fednova port fedmrur fedmedian trimmed_mean krum dc_asgd dc_asgd_a orthograd orthopos orthostrict orthodyn",
        # a memory of each client
        "ca2fl fedvarp fedstale fedstaleweight mifa ace area malenia ringleader quafl adpsgd orthofl orthofl_released"
        " orthofl_no_average orthofl_pairwise",
        "scaffold feddyn",  # a state of each client
        "floco asynccurve",  # messages and uploads of more than one model
        "pushcen pushcen_no_anchor pushcen_no_buffer pushcen_no_push_sum",
        # an exchange is an axis of its own, but that of osgp goes with no other method
        "pushcen_full_models async_dfedavg swift swift_adflab push_sum_adflab independent dpsgd el_oracle el_local sgp",
    ],
    "part": ["dominance momentum", "cyclic geodesic"],  # at one place
    "attack": ["sign_flip scaled", "alie inner_product"],
    "policy": ["power_of_choice oort pisces linear"],  # choose clients by their losses
    "measures": ["metrics"],
    "execution": ["max_width"],
    "augment": ["crop flip"],
    "energy": ["boards flat"],
    "delay": ["normal half_normal uniform gamma pareto", "lognormal exponential"],
    "topology": ["torus complete star exponential", "random_regular erdos_renyi small_world"],
}


@functools.cache
def kind(axis: str, value: str | None) -> str:
    """The kind of a value: the first of those that are like it, or itself. Other options make another kind."""
    setting = str(value).partition("=")[0]
    name = setting if axis in ("measures", "execution") else str(value).partition(":")[0]
    if value is not None and (name == setting or value == spec(axis, name)):
        return next((alike.split()[0] for alike in ALIKE.get(axis, []) if name in alike.split()), value)
    return str(value)


ADAPTIVE = [name for name, method in METHODS.items() if method.policy is not None]  # they bring a policy
# What the engine refuses, when it is called with the settings.
NOT_TOGETHER = [
    ("run", "swept", "devices", "8"), ("execution", "lanes=2", "run", "swept"),
    *(("policy", policy, "devices", "8") for policy in SERVER_PROGRAM["policy"]),
    *(("method", name, "devices", "8") for name in ADAPTIVE),
]  # fmt: skip
# What a value may need beside it: a refusal that names the key is met with a companion first, if its axis is free.
COMPANIONS: dict[str, World] = {
    "feedback": {"compress": "topk:ratio=0.3"},
    "compress_per": {"compress": "topk:ratio=0.3"},
    "policy": {"timing": "every:concurrency=3"},  # clients to choose among
    "timing": {"timing": "window:length=0.7"},  # a policy that decides the windows
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
    if "client" in given:
        given["client"] = named("going_on", going_on_training)  # which the timing midway needs
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
    how = {"batching": "vmap" if world["batching"] == ACCELERATOR else world["batching"]}
    if world["method"] == MIDWAY:
        how = {"batching": "loop"}
    return how | {"max_width": 8 if devices else 2} | devices | setting_of(world["execution"])


def setting_of(text: str | None) -> dict[str, Any]:
    """The setting that ``SETTING=VALUE`` gives."""
    if text is None:
        return {}
    name, _, value = text.partition("=")
    return {name: value if name in ("metrics", "global_tests") else json.loads(value.lower())}


def refusal(world: World) -> str | None:
    """Why the settings are refused, or None; nothing is trained."""
    for axis, value, other, its in NOT_TOGETHER:
        if world.get(axis) == value and world.get(other) == its:
            return f"{axis} = {value!r}: must be left out with {other} = {its}"
    engine = engine_of(world)
    engine.pop("devices", None)  # which there are in another process
    try:
        with warnings.catch_warnings(), patch.object(budget, "MOST", 0):  # a refusal may plan for minutes to say more
            warnings.simplefilter("ignore", RunWarning)
            prepare(Settings(**settings_of(world), **engine))
            Settings(**settings_of(world), engine="reference")
    except ValueError as error:
        return str(error)
    return None


def is_of_clock(axis: str) -> bool:
    """Whether an axis says when and to whom, so that its values share a program."""
    return axis in SERVER_CLOCK or axis in NODES_CLOCK
