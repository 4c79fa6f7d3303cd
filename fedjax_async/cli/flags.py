"""All commands and their flags; the module of a command is imported when the command starts."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_async import __version__
from fedjax_async.base import compiled, home
from fedjax_async.cli.config_file import (
    ALONE_EPILOG,
    CONFIG_EPILOG,
    METHODS_EPILOG,
    dataset_in,
    methods_in,
    refuse_none,
    settings_in,
)
from fedjax_async.cli.data_flags import add_data
from fedjax_async.cli.landscape_flags import add_landscape
from fedjax_async.cli.listing import REGISTRIES
from fedjax_async.cli.output_flags import (
    add_columns,
    add_comparison,
    add_drawing,
    add_final,
    add_outputs,
    add_watching,
)
from fedjax_async.cli.parsing import NO_PLOTS, Parser, file, folder, real, whole
from fedjax_async.cli.saved_flags import add_explain, add_export, add_privacy, add_redraw
from fedjax_async.cli.sweep_file import SWEEP_EPILOG, sweep_content, sweep_datasets
from fedjax_async.config.concerns import GROUPS
from fedjax_async.config.labelling import by_label
from fedjax_async.config.settings import EVALUATIONS, Settings

Action = Callable[[argparse.Namespace], None]
Command = Callable[[str, str, Action], argparse.ArgumentParser]  # adds the command of that name and description

EPILOG = """examples:
  fedjax-async quickstart --out runs/quickstart
  fedjax-async run --method fedasync:mixing=0.4 --delay lognormal:mean=60,sigma=0.5 --time 5000 --out runs/one
  fedjax-async run --config runs/one/settings.json --seed 1 --out runs/again
  fedjax-async run --method fedbuff --timing buffer:size=10 --clients 100 --model mlp --updates 2000
  fedjax-async compare fedavg fedasync fedbuff@buffer:size=5 --seeds 3 --time 10000 --out runs/three
  fedjax-async compare "Ours=fedasync:mixing=0.4" FedBuff=fedbuff --seeds 3 --out runs/paper
  fedjax-async compare fedbuff fedbuff+swa orthofl orthofl+dominance --seeds 3 --updates 500 --out runs/parts
  fedjax-async sweep mixing.toml --out runs/mixing
  fedjax-async redraw runs/three --x bytes --format pdf --width column --columns accuracy,time
  fedjax-async report runs/three runs/mixing --out report.html
  fedjax-async landscape runs/three/runs/fedavg/seed_0 runs/three/runs/fedavg/seed_1
  fedjax-async explain runs/one
  fedjax-async export runs/one --to model.safetensors --names torch
  fedjax-async data fetch mnist

A name takes options after a colon: NAME:key=value,key=value. A method may be joined with server parts and a timing:
METHOD+PART@TIMING. `fedjax-async list --options` shows all names and their options. A value with a comma or a + is
quoted, also from the shell: --dataset 'parquet:path="a,b.parquet"'.

words:
  job          the local training of one client, from dispatch to upload
  update       an upload that the server takes in, also one that it rejects
  server step  a new model of the server, made from one update (fedasync) or several (fedbuff, fedavg)
  staleness    server steps between the sending of a job's start model and the application of its upload
  wave         arrivals that are trained as one batch; the results are those of training one by one
  virtual time the simulated time of clients and network, in seconds; the program never waits for it

Compiled programs are kept in $FEDJAX_ASYNC_DATA/compiled or ~/.cache/fedjax_async/compiled, at most 512 MB.
JAX_ENABLE_COMPILATION_CACHE=false turns this off; JAX_COMPILATION_CACHE_DIR=DIR uses JAX's own cache instead.
"""

# The quickstart: real data and delays of real devices; all methods and seeds take less than a minute on two cores.
QUICKSTART = Settings(
    dataset="fashion_mnist_6k", partition="dirichlet:alpha=0.1", clients=10, model="mlp",
    delay="rpi", lr=0.05, epochs=1, time=7500.0, eval_time=300.0,
)  # fmt: skip
SMALL_BUFFERS = ("fedbuff:server_lr=1@buffer:size=3", "ca2fl:server_lr=1@buffer:size=3")  # for ten clients
QUICKSTART_METHODS = ("fedavg", "fedprox", "fedadam", "fedasync", *SMALL_BUFFERS, "orthofl", "orthofl_released")
QUICKSTART_SEEDS = 3
RUN_BASE: dict[str, Any] = {"updates": 200}
# Commands whose settings are given otherwise than by flags: what the message about a setting's flag says.
INSTEAD = {
    "sweep": "{name} stands in FILE.toml: a setting under [base] or, as a list, [grid]; seeds, target, ... above both",
    "resume": "a run is continued with the settings that its folder has; for others begin a new run",
    "compare": "the methods are given without a flag: fedjax-async compare fedavg fedasync",
    "quickstart": "the quickstart has its own methods; compare takes others: fedjax-async compare fedavg fedasync",
}


def _later(module: str, name: str) -> Action:
    """The function ``name`` of a module of this package that is imported at the call, because most modules need JAX."""

    def act(arguments: argparse.Namespace) -> None:
        getattr(importlib.import_module(f"fedjax_async.cli.{module}"), name)(arguments)

    return act


def _compiling(module: str, name: str) -> Action:
    """As :func:`_later`, with compiled programs kept on disk."""

    def act(arguments: argparse.Namespace) -> None:
        compiled.keep_compiled()
        _later(module, name)(arguments)

    return act


def _simulating(name: str, dataset: str = str(Settings.dataset), module: str = "runs") -> Action:
    """The function ``name`` of a module (:func:`_compiling`), after a check that the files of the data set exist."""

    def act(arguments: argparse.Namespace) -> None:
        in_file = dataset_in(getattr(arguments, "config", None))
        home.require_datasets([getattr(arguments, "dataset", in_file or dataset)])
        _compiling(module, name)(arguments)

    return act


def _sweep(arguments: argparse.Namespace) -> None:
    home.require_datasets(sweep_datasets(sweep_content(arguments.file), str(Settings.dataset)))
    _compiling("sweep", "sweep")(arguments)


def _add_settings(parser: argparse.ArgumentParser, *, base: Mapping[str, object], without: Sequence[str] = ()) -> None:
    """Add a flag for each setting, in groups; the namespace has only the flags that were given."""
    fields = [(title, field) for title, group in GROUPS.items() for field in dataclasses.fields(group)]
    groups: dict[str, argparse._ArgumentGroup] = {}
    for title, field in fields:
        if field.name in without:
            continue
        group = groups.setdefault(title, parser.add_argument_group(title))
        default = base.get(field.name, field.default)
        about = field.metadata["about"]
        if default not in (None, False):  # it replaces the default that the help text states
            about = f"{about.partition(' [')[0]} [{default}]"
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=about)
        else:
            kind = {"int": whole, "float": real}.get(str(field.type).split(" ", maxsplit=1)[0], str)
            letters: dict[object, str] = {whole: "N", real: "X"}
            metavar = letters.get(kind, "NAME")
            group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about)


def settings_of(arguments: argparse.Namespace, base: dict[str, Any]) -> Settings:
    """``base`` changed by the file of ``--config``, then by the given flags.

    A budget in the file or on the command line replaces every budget before it.
    """
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Settings) if hasattr(arguments, f.name)}
    file, compares = getattr(arguments, "config", None), hasattr(arguments, "methods")
    in_file = {} if file is None else settings_in(file, base, compares=compares)
    for layer in (in_file, given):
        for rivals in (("time", "updates", "server_steps"), EVALUATIONS, ("epochs", "steps")):
            if any(layer.get(name) is not None for name in rivals):
                base = {name: value for name, value in base.items() if name not in rivals}
        base = base | layer
    if file is not None:
        listed = [*(by_label(arguments.methods) or methods_in(file)).values()] if compares else []
        refuse_none(file, in_file | given, listed or [base.get("method", Settings.method)])
    return Settings(**base)


def _add_config(parser: argparse.ArgumentParser, methods: bool = False) -> None:
    """Add ``--config``, also with ``methods`` in the file."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = CONFIG_EPILOG + (METHODS_EPILOG if methods else ALONE_EPILOG)
    text = (
        "settings and methods (see below)" if methods else "settings (see below), or the settings.json of a saved run"
    )
    parser.add_argument("--config", metavar="FILE", help=f"a TOML file of {text}; given flags win")


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    """Add ``--plugin``."""
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a Python file or module that registers your own parts (fedjax_async.register); may be repeated",
    )


def _add_sweep(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``sweep``."""
    sub.epilog, sub.formatter_class = SWEEP_EPILOG, argparse.RawDescriptionHelpFormatter
    sub.add_argument("file", metavar="FILE.toml", help="the file that describes the sweep")
    sub.add_argument("--out", type=folder, metavar="DIR", help="folder for the results [runs/FILE]")
    sub.add_argument("--dry-run", action="store_true", help="check everything and print the plan, train nothing")
    sub.add_argument(
        "--memory-limit", metavar="SIZE", help="most device memory in use at a time, e.g. 4GB [half of the device's]"
    )
    sub.add_argument(
        "--lanes", type=whole, metavar="N", help="stacks of runs trained at the same time [one per CPU core]"
    )
    sub.add_argument(
        "--overwrite", action="store_true", help="replace another sweep in DIR; runs of the same settings are kept"
    )
    sub.add_argument("--quiet", action="store_true", help="no progress bar")
    sub.add_argument("--no-plots", **NO_PLOTS)
    add_watching(sub)
    sub.add_argument(
        "--submit",
        metavar="SCHEDULER",
        help="train as jobs of a scheduler: slurm or local, with options partition=, time= (minutes), memory= (GB), "
        "cpus=, gpus=, account=, qos=, constraint=, at_once=; ray, with cpus=, gpus=, memory=, retries=; or array, "
        "which numbers the jobs for the command `job`",
    )
    sub.add_argument(
        "--collect", action="store_true", help="train nothing; write tables and pictures of the finished runs"
    )
    text = "measure the cost of reaching this test accuracy [as in FILE]"
    sub.add_argument("--target", type=real, metavar="ACCURACY", help=text)
    add_final(sub, "as in FILE, else tail")
    add_columns(sub, "settings.tex and best.tex")
    add_drawing(sub, curves=True)


def _add_runs(command: Command) -> None:
    """Add the commands that train or plan: quickstart, run, resume, compare, sweep and plan."""
    quick = command(
        "quickstart",
        "compare eight methods over three seeds on real data in less than a minute",
        _simulating("quickstart", str(QUICKSTART.dataset)),
    )
    quick.set_defaults(methods=list(QUICKSTART_METHODS))
    add_comparison(quick, "fedavg", QUICKSTART_SEEDS)
    _add_settings(quick, base=dataclasses.asdict(QUICKSTART), without=("method",))
    add_outputs(quick, "runs/quickstart")

    run = command("run", "simulate one method; with --out, save its tables and pictures", _simulating("run"))
    _add_config(run)
    _add_settings(run, base=RUN_BASE)
    add_outputs(run, None)

    resume = command(
        "resume", "continue an interrupted run that was started with --checkpoint", _compiling("runs", "resume")
    )
    resume.add_argument("folder", type=folder, metavar="DIR", help="the --out of the run")
    resume.add_argument("--quiet", action="store_true", help="no progress bar")
    resume.add_argument("--no-plots", **NO_PLOTS)
    add_drawing(resume, curves=True)

    compare = command("compare", "run the same experiment with several methods and seeds", _simulating("compare"))
    compare.add_argument(
        "methods",
        nargs="*",
        metavar="METHOD",
        help="e.g. fedavg fedasync:mixing=0.4 fedbuff@buffer:size=5; LABEL=METHOD, such as Ours=fedasync:mixing=0.4, "
        "shows a method as LABEL in tables, pictures and folders",
    )
    add_comparison(compare, None)
    _add_config(compare, methods=True)
    _add_settings(compare, base=RUN_BASE, without=("method",))
    add_outputs(compare, "runs/compare")

    _add_sweep(command("sweep", "train many runs from one file: a grid over any settings, side by side", _sweep))
    job = command("job", "train one job of a sweep that was submitted as an array", _later("sweep", "job"))
    job.add_argument("folder", type=folder, metavar="DIR", help="the --out of the sweep, or a copy of it")
    job.add_argument("index", type=whole, metavar="N", help="the number of the job, from 0")

    plan = command(
        "plan",
        "plan a run without training: print staleness and waves, draw a Gantt chart",
        _simulating("plan", module="planned"),
    )
    plan.add_argument(
        "--gantt", type=file, metavar="FILE", help="draw a Gantt chart of the clients' jobs into FILE.png, .pdf or .svg"
    )
    plan.add_argument(
        "--since", type=real, metavar="SECONDS", help="with --gantt: the virtual time of its left edge [0]"
    )
    text = "with --gantt: that of its right edge [about eight jobs per client later, five without a server]"
    plan.add_argument("--until", type=real, metavar="SECONDS", help=text)
    add_drawing(plan, formats=False)
    _add_config(plan)
    _add_settings(plan, base=RUN_BASE)


def _add_report(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``report``."""
    sub.add_argument(
        "folders",
        type=folder,
        nargs="+",
        metavar="DIR",
        help="the --out of a run, a comparison or a sweep, or a folder of them",
    )
    sub.add_argument(
        "--out",
        type=file,
        metavar="FILE.html",
        help="file of the page [DIR/report.html, or report.html for several folders]",
    )


def _add_list(sub: argparse.ArgumentParser) -> None:
    """Add the flags of ``list``."""
    sub.add_argument("what", nargs="?", metavar="KIND", help="show only one kind: " + ", ".join(REGISTRIES))
    sub.add_argument("names", nargs="*", metavar="NAME", help="explain these names of the kind and their options")
    sub.add_argument("--options", action="store_true", help="show the options of each name")


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = Parser(
        prog="fedjax-async",
        description="Simulate asynchronous federated learning in virtual time: many clients train in one batch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedjax-async {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, action: Action) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.instead, sub.commands = INSTEAD.get(name, ""), commands.choices
        sub.set_defaults(action=action)
        if name != "data":
            _add_plugins(sub)
        return sub

    _add_runs(command)
    _add_report(command("report", "write an interactive HTML page about folders of results", _later("saved", "report")))
    about = "make the tables and pictures of a saved run, comparison or sweep again, with other options"
    redraw = command("redraw", about, _later("saved", "redrawn"))
    add_redraw(redraw)
    add_drawing(redraw, curves=True)
    landscape = command(
        "landscape",
        "measure the loss between the models of two or three saved runs",
        _compiling("landscape", "landscape"),
    )
    add_landscape(landscape)
    add_drawing(landscape)
    explain = command(
        "explain", "show which arrivals of a saved run raised or lowered the loss", _compiling("saved", "explained")
    )
    add_explain(explain)
    add_drawing(explain)
    add_privacy(
        command("privacy", "compute epsilon of saved runs with differential privacy", _later("saved", "privacy"))
    )
    written = "write the model of a saved run as .safetensors or .npz, with this package's names or PyTorch's"
    add_export(command("export", written, _later("saved", "exported")))
    everything = "list all names: methods, timings, delays, partitions, data sets, models and other parts"
    _add_list(command("list", everything, _later("listing", "list_names")))
    data = command("data", "list, fetch, verify or import data sets; import device traces", _later("data", "list_data"))
    add_data(data, _later, _add_plugins)
    return top
