"""The wrong calls of ``outcomes.py``, in Python and on the command line; all are refused before anything trains.

``CALLS``: id -> a function, or the arguments of a command. ``INPUTS`` in a text stands for the folder of input files,
which :func:`write_inputs` makes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
from flax import linen as nn
from outcomes_own import OF_NODES

from fedjax_async import (
    Info,
    Message,
    Method,
    Settings,
    cli,
    clock,
    compare,
    compress,
    data,
    local,
    models,
    named,
    register,
    resume,
    server,
    simulate,
    sweep,
)

DATA = "synthetic:clients=4,features=6,classes=3,least_size=12,mean_log_size=2,std_log_size=0.5"
SMALL: dict[str, Any] = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "dataset": DATA}
RULE: Any = server.fedasync()
X, Y = np.linspace(-1, 1, 200, dtype=np.float32).reshape(40, 5), np.arange(40) % 3
DEALT = data.from_arrays([(X[:20], Y[:20]), (X[20:30], Y[20:30])], test=(X[30:], Y[30:]))
PLUGINS = {
    "silent.py": "x = 1\n",
    "broken.py": "import fedjax_async\nraise RuntimeError('no luck')\n",
    "taken.py": "from fedjax_async import register, server\nregister('method', 'fedavg')(lambda: server.fedavg())\n",
    "positional.py": "from fedjax_async import register\n@register('delay', 'mine')\ndef mine(mean): return None\n",
    "not_python.py": "def (:\n",
}
SWEEPS = {
    "unknown.toml": "[base]\nupdates = 6\n[grid]\nlearning_rate = [0.1]\n",
    "no_option.toml": '[base]\nupdates = 6\nmethod = "fedbuff"\n[grid]\nmethod.mixing = [0.1]\n',
    "late_seeds.toml": "[base]\nupdates = 6\n[grid]\nlr = [0.1]\nseeds = [1]\n",
    "roles.toml": '[base]\nupdates = 6\n[grid]\nlr = [0.1]\n[roles]\nlr = "tunned"\n',
    "broken.toml": "[base\nupdates = 6\n",
}


def write_inputs(folder: Path) -> None:
    """The files that the calls name."""
    for name, text in {**PLUGINS, **SWEEPS}.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "file").write_text("no folder", encoding="utf-8")


def run(**given: Any) -> Callable[[], Any]:
    """A call of ``simulate`` with these settings."""
    return lambda: simulate(**{name: value for name, value in {**SMALL, **given}.items() if value is not ...})


def swept(grid: Any, base: Any = None, **given: Any) -> Callable[[], Any]:
    """A call of ``sweep``."""
    return lambda: sweep({**SMALL, **(base or {})}, grid, progress=False, **given)


def rule(**changes: Any) -> Callable[[], Any]:
    """A run with a changed rule."""
    before: dict[str, Any] = {"given": None} if "given" in RULE._fields else {}  # a version without init(params, facts)
    return run(method=Method(RULE._replace(**before, **changes)))


def client(**changes: Any) -> Callable[[], Any]:
    """A run with a changed client algorithm."""
    model = models.decoded(models.make("logistic", num_classes=3, input_shape=(5,)), data.decode.as_is)
    made = local.local_training(model, optimizer=optax.sgd(0.1), batch_size=8)._replace(**changes)
    return run(client=made, dataset=DEALT, clients=...)


def model(**changes: Any) -> Callable[[], Any]:
    """A run with a changed model."""
    made = models.make("logistic", num_classes=3, input_shape=(5,))
    return run(model=made._replace(**changes), dataset=DEALT, clients=...)


def delays(durations: Callable[..., Any]) -> Callable[[], Any]:
    """A run with these durations."""
    return run(delay=lambda num_clients, seed: clock.Delays(num_clients, durations))


def by_order(num_clients: int, seed: int) -> clock.Delays:
    """Durations that depend on the order of calls."""
    rng = np.random.default_rng(seed)

    def durations(clients: Any, numbers: Any, *sizes: Any) -> np.ndarray:
        return 1 + rng.random(np.broadcast(clients, numbers).shape)

    return clock.Delays(num_clients, durations)


def raising(*given: Any) -> Any:
    """A part with a fault."""
    raise KeyError("mine")


def without_default(model: Any, *, lr: Any, alpha: Any) -> Any:
    """A factory that lacks a default."""
    return local.local_training(model, optimizer=optax.sgd(lr * alpha), batch_size=8)


def command(*given: str) -> tuple[str, ...]:
    """A ``run`` of a small problem."""
    return ("run", "--model", "logistic", "--clients", "4", "--updates", "6", "--quiet", *given)


NAMES: dict[str, Any] = {
    "method-misspelled": run(method="fedasink"),
    "method-of-nothing": run(method="quux"),
    "method-empty": run(method=""),
    "method-colon-only": run(method="fedasync:"),
    "method-option-misspelled": run(method="fedasync:mixin=0.4"),
    "method-option-of-another": run(method="fedbuff:mixing=0.4"),
    "method-option-of-timing": run(method="fedbuff:size=5"),
    "method-option-twice": run(method="fedasync:mixing=0.4,mixing=0.5"),
    "method-option-without-key": run(method="fedasync:0.4"),
    "method-option-without-value": run(method="fedasync:mixing"),
    "method-option-empty-value": run(method="fedasync:mixing="),
    "method-option-range": run(method="fedasync:mixing=1.5"),
    "method-option-type": run(method="fedasync:mixing=high"),
    "method-option-underscore": run(method="fedasync:mixing=0_5"),
    "method-comma": run(method="fedavg,fedasync"),
    "method-two-at": run(method="fedbuff@buffer:size=2@every"),
    "method-at-nothing": run(method="fedbuff@"),
    "method-at-exchange": run(method="fedbuff@push_sum"),
    "method-at-misspelled": run(method="fedbuff@bufer:size=2"),
    "method-plus-nothing": run(method="fedbuff+"),
    "method-plus-misspelled": run(method="fedbuff+swaa"),
    "method-plus-after-at": run(method="fedbuff@buffer:size=2+swa"),
    "method-part-option": run(method="fedbuff+swa:begin=0.5"),
    "method-part-refused": run(method="fedasync+correction"),
    "method-part-on-nodes": run(method="swift+swa"),
    "timing-and-at": run(method="fedbuff@buffer:size=2", timing="every"),
    "timing-key-only": run(timing="size=5"),
    "timing-too-large": run(method="fedbuff@buffer:size=2,concurrency=9"),
    "timing-of-nodes": run(method="swift", timing="every"),
    "topology-with-server": run(method="fedavg", topology="ring"),
    "topology-option": run(method="dpsgd", topology="gossip:recievers=2"),
    "topology-of-independent": run(method="independent", topology="ring"),
    "topology-degree": run(method="dpsgd", topology="random_regular:degree=9"),
    "exchange-with-server": run(exchange="push_sum"),
    "exchange-misspelled": run(method="pushcen", exchange="push_summ"),
    "delay-unknown": run(delay="lognormall"),
    "delay-option": run(delay="lognormal:sgima=0.5"),
    "delay-negative": run(delay="lognormal:mean=-1"),
    "delay-missing-option": run(delay="csv"),
    "delay-quoted-comma": run(delay="csv:path=a,b.csv"),
    "delay-no-file": run(delay="csv:path=nowhere.csv"),
    "availability-joined": run(availability="sessions:on=3+joinz"),
    "faults-range": run(faults="drop:probability=2"),
    "faults-twice": run(faults="drop:probability=0.1,probability=0.2"),
    "network-of-nodes": run(network="edges:path=nowhere.csv"),
    "partition-option-first": run(partition="alpha=0.3"),
    "partition-natural": run(dataset="fashion_mnist_6k", partition="natural"),
    "dataset-not-fetched": run(dataset="har"),
    "model-does-not-fit": run(model="resnet18"),
    "optimizer-option": run(optimizer="sgd:momentun=0.9"),
    "optimizer-plain-sgd": run(method="scaffold", optimizer="adam"),
    "decay-missing": run(decay="cosine:step=5"),
    "compress-range": run(compress="topk:ratio=0"),
    "feedback-without": run(feedback="ef"),
    "attack-share": run(attack="sign_flip:share=1.5"),
    "attack-on-nodes": run(method="swift", attack="sign_flip"),
    "privacy-secure-median": run(method="fedmedian:size=2@buffer:size=2", privacy="secure:size=2"),
    "privacy-with-policy": run(method="fedbuff@buffer:size=2", privacy="dp", policy="uniform"),
    "policy-nothing-idle": run(policy="power_of_choice:d=3"),
    "policy-option-missing": run(policy="event_triggered"),
    "metrics-list": run(metrics="top:k=5,macro_f2"),
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "setting-of-other-programs": run(learning_rate=0.1),
    "setting-rounds": run(rounds=5),
    "setting-gibberish": run(gibberish=1),
    "setting-of-method": run(proximal=0.1),
    "setting-seeds": run(seeds=3),
    "no-budget": run(updates=...),
    "two-lengths": run(epochs=1.0),
    "two-evaluations": run(eval_time=1.0, eval_updates=2),
    "lr-list": run(lr=[0.1, 0.2]),
    "lr-text": run(lr="0.1"),
    "clients-zero": run(clients=0),
    "late-without-timeout": run(late="drop"),
    "personal-unknown-layer": run(personal="conv9"),
    "per-client-without-tests": run(per_client=True, dataset="fashion_mnist_6k"),
    "max-staleness-of-nodes": run(method="swift", max_staleness=2),
    "reference-lanes": run(engine="reference", lanes=2),
    "settings-text": lambda: simulate("fedavg"),  # type: ignore[arg-type]
    "resume-nothing": lambda: resume("nowhere"),
    "compare-text": lambda: compare("fedavg", Settings(**SMALL)),
    "compare-twice": lambda: compare(["asgd", "asgd:"], **SMALL),
    "sweep-path": swept({"method.mixin": [0.1]}),
    "sweep-path-of-timing": swept({"method.size": [3]}, {"method": "fedbuff"}),
    "sweep-scalar": swept({"lr": 0.1}),
    "sweep-role": swept({"lr": [0.1]}, roles={"lr": "tunned"}),
    "sweep-equal-points": swept({"lr": [0.1, 0.1]}),
    "sweep-list-in-base": swept({"seed": [1]}, {"lr": [0.1, 0.2]}),
    "sweep-path-of-object": swept({"method.mixing": [0.1]}, {"method": named("mine", Method(RULE))}),
}  # fmt: skip
PARTS: dict[str, Any] = {
    "own-unnamed-in-folder": run(method=Method(RULE), out="never"),
    "own-bare-rule": run(method=RULE),
    "own-method-timing": run(method=Method(RULE, timing="bufer:size=2")),
    "own-peer-method": run(method=OF_NODES(raising, exchange="meen")),
    "own-receive": rule(receive=lambda state, memory, arrival: (state, memory)),
    "own-weight": rule(receive=lambda state, memory, arrival: (state, memory, Info(jnp.ones(2)))),
    "own-dispatch": rule(dispatch=lambda state, memory, request: (Message({"w": jnp.zeros(2)}), memory)),
    "own-client-raises": client(begin=raising),
    "own-client-upload": client(finish=lambda work, message, state: (1.0, state)),
    "own-client-default": run(client=without_default),
    "own-client-and-lr": lambda: simulate(**SMALL, client=local.local_training(
        models.make("logistic"), optimizer=optax.sgd(0.1)), lr=0.3),
    "own-model-class": run(model=nn.Dense),
    "own-model-mean-loss": model(loss=lambda outputs, y: jnp.mean(outputs)),
    "own-model-shape": run(model=nn.Dense(0), dataset=DEALT, clients=...),
    "own-delay-shape": delays(lambda clients, numbers, *sizes: np.ones(len(clients))),
    "own-delay-order": run(delay=by_order),
    "own-timing": run(timing=lambda scenario: None),
    "own-partition": run(dataset="fashion_mnist_6k", partition=lambda y, n, rng: [np.arange(3)] * n),
    "own-topology": run(method="swift", topology=nx.path_graph(9)),
    "own-compressor": run(compress=compress.topk),
    "own-metric": run(metrics={"mine": lambda outputs, y: outputs.mean()}),
    "own-data-list": lambda: simulate(data=[(X, Y)], updates=4),
    "own-data-clients": run(dataset=DEALT, clients=9),
    "own-name": lambda: named("a b", Method(RULE)),
    "register-taken": lambda: register("method", "fedavg")(server.fedavg),
    "register-kind": lambda: register("methods", "mine")(server.fedavg),
    "register-object": lambda: register("method", "mine")(Method(RULE)),  # type: ignore[type-var]
}  # fmt: skip
COMMANDS: dict[str, Any] = {
    "command-unknown": ("train",),
    "command-flag-misspelled": command("--clints", "3"),
    "command-learning-rate": command("--learning-rate", "0.1"),
    "command-twice": command("--lr", "0.1", "--lr", "0.2"),
    "command-option-as-flag": command("--mixing", "0.4"),
    "command-method": command("--method", "fedasink"),
    "command-not-a-number": command("--lr", "1_0"),
    "command-value-of-flag": command("--per-client", "yes"),
    "command-overwrite": command("--overwrite"),
    "command-plugin-missing": command("--plugin", "INPUTS/nowhere.py"),
    "command-plugin-silent": command("--plugin", "INPUTS/silent.py"),
    "command-plugin-broken": command("--plugin", "INPUTS/broken.py"),
    "command-plugin-taken": command("--plugin", "INPUTS/taken.py"),
    "command-plugin-positional": command("--plugin", "INPUTS/positional.py"),
    "command-plugin-syntax": command("--plugin", "INPUTS/not_python.py"),
    "command-plugin-advice": command("--delay", "tidess"),
    "command-report-file": ("report", "INPUTS/file"),
    "command-compare-seeds": ("compare", "fedavg", "asgd", "--seeds", "9" * 13),
    "command-sweep-unknown": ("sweep", "INPUTS/unknown.toml", "--dry-run"),
    "command-sweep-option": ("sweep", "INPUTS/no_option.toml", "--dry-run"),
    "command-sweep-seeds": ("sweep", "INPUTS/late_seeds.toml", "--dry-run"),
    "command-sweep-role": ("sweep", "INPUTS/roles.toml", "--dry-run"),
    "command-sweep-broken": ("sweep", "INPUTS/broken.toml", "--dry-run"),
    "command-list": ("list", "metods"),
}  # fmt: skip
CALLS: dict[str, Any] = {**NAMES, **SETTINGS, **PARTS, **COMMANDS}


def said(name: str, inputs: Path) -> tuple[str, str]:
    """(type of the error or exit code, message) of a wrong call; ``accepted`` if it is none."""
    call = CALLS[name]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if not isinstance(call, tuple):
                call()
                return "accepted", ""
            code: Any = cli.main([text.replace("INPUTS", str(inputs)) for text in call])
    except SystemExit as ended:
        code = ended.code
    except Exception as error:
        return type(error).__name__, str(error)
    return (f"exit {code}" if code else "accepted"), (out.getvalue() + err.getvalue()).strip()
