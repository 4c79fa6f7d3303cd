"""The cases of ``outcomes.py``: forty settings that cover what users combine.

Each is run by ``simulate``; some also as a sweep, a comparison or a command. ``INPUTS`` in a text stands for the folder
of input files, which ``outcomes_own.write_inputs`` makes. ``outcomes_own.py`` has the parts of a user's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import networkx as nx
import outcomes_own as own
from outcomes_own import synthetic

from fedjax_async import Method, Metric, cli, compare, named, simulate, sweep


class Case(NamedTuple):
    """Settings, and what else is run with them besides ``simulate``."""

    settings: Mapping[str, Any]
    grid: Mapping[str, Any] | None = None  # for a sweep with two seeds
    methods: tuple[Any, ...] = ()  # to compare
    command: tuple[str, ...] = ()  # ``run`` with further flags, beside the settings; or another command, as it stands
    loads: bool = False  # whether the command loads a plugin, so that it comes first


SMALL: dict[str, Any] = {
    "model": "logistic", "clients": 8, "steps": 2, "batch_size": 4, "lr": 0.1, "updates": 16, "eval_updates": 8,
    "seed": 3, "delay": "lognormal:mean=1,sigma=0.5",
}  # fmt: skip


def small(**given: Any) -> dict[str, Any]:
    """Settings of a run with a server."""
    return {**SMALL, "dataset": synthetic(given.get("clients", 8)), **given}


def pictures(**given: Any) -> dict[str, Any]:
    """Settings of a run with images."""
    return {**SMALL, "dataset": "fashion_mnist_6k", "eval_examples": 60, **given}


def nodes(**given: Any) -> dict[str, Any]:
    """Settings of a run without a server."""
    clients = given.get("clients", 6)
    return {**SMALL, "dataset": synthetic(clients), "clients": clients, "updates": 18, "eval_updates": 9, **given}


def dealt(**given: Any) -> dict[str, Any]:
    """Settings of a run with the user's own data and model; the data have a number of clients."""
    found = {**SMALL, "dataset": own.DEALT, "model": named("net", own.NET), **given}
    return {key: value for key, value in found.items() if key != "clients"}


SERVER = {
    "fedasync": Case(
        small(method="fedasync:mixing=0.4,staleness=hinge,slope=2,threshold=1"),
        grid={"method.mixing": [0.3, 0.6], "delay.sigma": [0.2, 0.5]},
        command=("sweep", "INPUTS/mixing.toml"),
    ),
    "fedavg": Case(
        pictures(method="fedavg@cohort:size=3,over_selection=1,deadline=2", augment="crop:padding=2+flip",
                 partition="dirichlet:alpha=0.5", normalise="training", updates=12, eval_updates=None,
                 eval_steps=2),
        methods=("fedprox:proximal=0.1", "fednova@cohort:size=4", "fedasync:mixing=0.5"),
    ),
    "fedadam": Case(small(method="fedadam:server_lr=0.05,b1=0.8@cohort:size=4", optimizer="adamw:clip=1.0,b1=0.8",
                          decay="linear:floor=0.1", epochs=0.5, steps=None, checkpoint=8)),
    "fedbuff-parts": Case(
        small(method="fedbuff:server_lr=0.5+swa:start=0.5+momentum:beta=0.4@buffer:size=3", max_staleness=3,
              timeout=4.0, late="drop", optimizer="sgd:momentum=0.5,nesterov=true"),
        command=("compare", "fedbuff@buffer:size=3", "fedbuff:server_lr=0.9@buffer:size=3", "fedyogi@cohort:size=4",
                 "--seeds", "3", "--model", "logistic", "--dataset", synthetic(8), "--clients", "8", "--updates", "12"),
    ),
    "topk": Case(small(method="fedbuff", timing="buffer:size=2", compress="topk:ratio=0.3", feedback="ef",
                       compress_per="tensor"),
                 grid={"compress.ratio": [0.2, 0.5]}),
    "asynflc_ef": Case(small(method="asynflc_ef@window:length=1.5", network="link:down=1e3,up=5e2,latency=0.1",
                             energy="flat:training=4,idle=1,up=0.01", delay="csv:path=INPUTS/delays.csv",
                             compute="float64"),
                       command=("run",)),
    "ca2fl": Case(small(method="ca2fl+dominance:limit=2@buffer:size=2", delay="gamma:std=0.4",
                        faults="drop:probability=0.2+duplicate:probability=0.2+crash:probability=0.2,restart=2",
                        availability="joins:share=0.4,by=2+sessions:on=8,off=2")),
    "orthodyn": Case(small(method="orthodyn:phases=orthograd+orthopos,switch=norm+cyclic:length=4",
                           decay="warmup:steps=4", compress="qsgd:levels=15", feedback="ef21", compress_per="layer"),
                     grid={"method.server_lr": [0.5, 1.0]}),
    "feddyn": Case(small(method="feddyn:alpha=0.1@cohort:size=4", stop_at=0.99, patience=3, test_fraction=0.3,
                         per_client=True),
                   grid={"method.alpha": [0.05, 0.2]},
                   methods=("feddyn@cohort:size=3", "scaffold@cohort:size=3", "floco:vertices=2@cohort:size=3")),
    "asynccurve": Case(small(method="asynccurve:control_lr=0.01,cycle=4", model="mlp:hidden=4", updates=12)),
    "fedmrur": Case(small(method="fedmrur:sigma=0.5@cohort:size=4", optimizer="sam:rho=0.1", decay="cosine:steps=4",
                          batching="vmap")),
    "krum": Case(small(method="krum:byzantine=1,size=8@buffer:size=5", attack="alie:share=0.25,z=1.2", norm_limit=5.0,
                       memory_limit="1GB", faults="corrupt:probability=0.1+late:probability=0.2,extra=1"),
                 command=("run",)),
    "private": Case(small(method="fedbuff@buffer:size=4", privacy="dp:clip=0.5,noise=0.4+secure:size=3"),
                    grid={"privacy.dp.noise": [0.3, 0.6]}),
    "dp_sgd": Case(small(method="asgd:server_lr=0.5", privacy="dp_sgd:clip=1,noise=0.3", attack="label_flip:share=0.3",
                         timing="participation:length=1.5,probability=0.6"), command=("run",)),
    "ditto": Case(small(method="orthofl:per=layer,mixing=0.5", ditto=0.2, per_client=True, test_fraction=0.3,
                        slots="bfloat16", compute="bfloat16", max_width=2, eval_updates=None,
                        eval_at="0.5,1,1.5")),
    "personal": Case(small(method="scaffold@cohort:size=4", model="mlp:hidden=4", personal="output", per_client=True,
                           test_fraction=0.3, metrics="macro_f1,top:k=2", train_examples=20,
                           validation_fraction=0.2, remat=True)),
}  # fmt: skip
OWN = {
    "own-rule": Case(dealt(method=named("halving", Method(own.halving())), delay=named("rush_hour", own.rush_hour)),
                     methods=("fedasync", named("adam", Method(own.halving(), optimizer="adam")))),
    "own-hyper": Case(
        dealt(dataset=own.DEALT_WITH_TESTS, per_client=True, timing=named("by_twos", own.by_twos),
            method=named("pulled", own.with_server(0.6, 0.3)),
            metrics={"margin": own.margin, "spread": Metric(lambda outputs, y: outputs.std(-1), lambda mean: 2 * mean)})
    ),
    "own-client": Case({key: value for key, value in dealt(
        client=named("mine", own.client_of_dealt()), compress=named("halves", own.halves()), feedback="off",
        method="fedbuff@buffer:size=2", engine="reference").items() if key != "lr"}),
    "registered": Case(
        {**SMALL, "method": "fair:limit=3+shrunk:factor=0.8", "delay": "tides:mean=2,by=3", "client": "pulling:pull=.3",
         "model": "narrow:width=3", "dataset": "blobs:size=140", "partition": named("in_turn", own.dealt_in_turn)},
        grid={"method.limit": [2.0, 3.0], "method.shrunk.factor": [0.5, 1.0]},
    ),
}  # fmt: skip
POLICIES = {
    "uniform": Case(small(method="fedasync@every:concurrency=4", policy="uniform", optimizer="clipped:norm=0.5")),
    "power_of_choice": Case(small(method="fedbuff+swa:start=0.5@buffer:size=2,concurrency=4",
                                  policy="power_of_choice:d=3", compress="topk_qsgd:ratio=0.4", updates=None,
                                  server_steps=8)),
    "oort": Case(small(method="orthofl_released@every:concurrency=3", policy="oort:window=4,every=2",
                       faults="drop:probability=0.2"), command=("run",)),
    "linear": Case(small(method="fedprox:proximal=0.1@cohort:size=3", policy="linear:loss=1,speed=0.5,age=0.1",
                         optimizer="sgd:momentum=0.5"),
                   grid={"method.server_lr": [0.7, 1.0]}),
    "adaptive_buffer": Case(small(method="fadas:server_lr=0.02@buffer:size=2", policy="adaptive_buffer:size=2,most=4",
                                  optimizer="adam:b1=0.8", decay="exponential:rate=0.9,every=2")),
    "event_triggered": Case(small(method="fedbuff@buffer:size=2", policy="event_triggered:norm=0.05+true_bytes",
                                  compress="randk:ratio=0.4", network="link:down=1e3,up=3e2")),
    "own-policy": Case(dealt(method="trimmed_mean:size=3@buffer:size=3,concurrency=4", attack="sign_flip:clients=2",
                           policy=named("lossy_first", own.lossy_first))),
    "registered-policy": Case(small(method="dc_asgd_a@every:concurrency=4", policy="patient:every=2",
                                    availability="periodic:on=6,off=1", updates=None, time=4.0)),
}  # fmt: skip
NODES = {
    "pushcen": Case(nodes(method="pushcen:k=8,anchor=0.2", topology="ring"), grid={"method.anchor": [0.1, 0.3]}),
    "pushcen_released": Case(nodes(method="pushcen_released:k=8", topology="gossip:receivers=2",
                                   validation_fraction=0.2)),
    "pushcen-merge": Case(nodes(method="pushcen:k=8@push_sum:policy=merge,capacity=2", faults="drop:probability=0.2",
                                topology="exponential:one_peer=true"), command=("run",)),
    "networkx": Case(nodes(method="pushcen_full_models", topology=named("wheel", nx.wheel_graph(6)),
                           global_tests="all", compute="bfloat16", initial=named("start", own.START))),
    "async_dfedavg": Case(nodes(method="async_dfedavg", topology="csv:path=INPUTS/graph.csv", network="edges:"
                                "path=INPUTS/links.csv", exchange="mean:policy=merge,aggregate_at=end")),
    "swift": Case(nodes(method="swift:keep_optimizer=false", topology="small_world:neighbours=2,p=0.3",
                        availability="sessions:on=6,off=1", optimizer="sgd:momentum=0.8")),
    "divshare": Case(nodes(method="divshare:omega=0.5", topology="complete")),
    "independent": Case(dealt(method="independent", test_fraction=None, updates=12)),
    "dpsgd": Case(nodes(method="dpsgd", topology="erdos_renyi:p=0.7", optimizer="adam:b2=0.9", norm_limit=4.0),
                  methods=("sgp", "fedavg@cohort:size=3")),
    "choco": Case(nodes(method="choco:gamma=0.3", compress="topk:ratio=0.3", topology="random_regular:degree=2"),
                  grid={"method.gamma": [0.2, 0.4]}),
    "graphs": Case(nodes(method=named("part_way", own.of_nodes(0.5)),
                         topology=named("turns", own.turns), personal="output", model="mlp:hidden=4")),
    "plugin": Case(nodes(method="gossiping:step=0.7", decay="steps_down:factor=0.6,every=3", partition="iid",
                         dataset="blobs"), command=("run", "--plugin", "INPUTS/plugin.py"), loads=True),
}  # fmt: skip
CASES: dict[str, Case] = {**SERVER, **OWN, **POLICIES, **NODES}


# --- how a case is run --------------------------------------------------------------------------------


def runs() -> Iterator[tuple[str, str]]:
    """(case, way) of all runs, a way being simulate, sweep, compare or command."""
    for name, case in CASES.items():
        ways = {"simulate": True, "sweep": case.grid, "compare": case.methods, "command": case.command}
        chosen = [way for way, given in ways.items() if given]
        yield from ((name, way) for way in (reversed(chosen) if case.loads else chosen))


def placed(value: Any, inputs: Path) -> Any:
    """A setting with the folder of input files."""
    return value.replace("INPUTS", str(inputs)) if type(value) is str else value


def run(name: str, way: str, folder: Path, inputs: Path) -> None:
    """One run, with all that it writes in ``folder``."""
    case = CASES[name]
    settings = {key: placed(value, inputs) for key, value in case.settings.items() if value is not None}
    if way == "simulate":
        with jax.enable_x64(True) if settings.get("compute") == "float64" else nullcontext():
            simulate(**settings, out=folder, plots=False)
    elif way == "sweep":
        sweep(settings, case.grid, seeds=2, out=folder, progress=False)
    elif way == "compare":
        compare(case.methods, **{k: v for k, v in settings.items() if k != "method"}, out=folder, progress=False)
    else:
        flags = [text for key, value in settings.items() for text in flag(key, value)]
        chosen = [*(placed(text, inputs) for text in case.command), *(flags if case.command[0] == "run" else [])]
        code = cli.main([*chosen, "--out", str(folder), "--no-plots", "--quiet"])
        if code:
            raise RuntimeError(f"the command ended with {code}")


def flag(key: str, value: Any) -> list[str]:
    """A setting on the command line."""
    name = "--" + key.replace("_", "-")
    return [name] if value is True else [name, str(value)]
