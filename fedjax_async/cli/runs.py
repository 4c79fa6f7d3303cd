"""The commands ``run``, ``resume``, ``compare`` and ``quickstart``."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from fedjax_async.base import check
from fedjax_async.cli.config_file import methods_in
from fedjax_async.cli.flags import QUICKSTART, RUN_BASE, settings_of
from fedjax_async.cli.parsing import in_free_folder
from fedjax_async.config import Settings
from fedjax_async.config.labelling import by_label
from fedjax_async.config.resolving import settings_in_comparison
from fedjax_async.config.settings import as_dict
from fedjax_async.results import simulation, write_comparison
from fedjax_async.results.begun import unfinished
from fedjax_async.results.callbacks import Callbacks, as_callbacks
from fedjax_async.results.claim import claimed
from fedjax_async.results.compared import baseline_of, folder_name
from fedjax_async.results.figure import Drawing, require_matplotlib
from fedjax_async.results.latex import require_columns
from fedjax_async.results.measured import COSTS, client_scores, of_metric, of_model
from fedjax_async.results.metrics import (
    FINAL,
    FINALS,
    final_value,
    has_accuracy,
    percent,
    require_final,
    target_accuracy,
    window,
)
from fedjax_async.results.redrawing import require_energy
from fedjax_async.results.running import precision
from fedjax_async.results.simulation import simulate, train_compared
from fedjax_async.results.store import CHECKPOINTS, MANIFEST, NotSaved, Occupied
from fedjax_async.results.worlds import end_text, faults_text
from fedjax_async.types import Run


def drawing_of(arguments: argparse.Namespace) -> Drawing:
    """Formats, width, title and axis of the pictures; ``ValueError`` for unknown ones."""
    x = getattr(arguments, "x", None)
    formats = getattr(arguments, "format", Drawing.formats)
    return Drawing(formats, arguments.width, arguments.title, Drawing.x if x is None else x)


def plots_of(arguments: argparse.Namespace) -> bool:
    """Whether pictures are drawn; ``ValueError`` without matplotlib, or for a form of pictures with ``--no-plots``."""
    if arguments.no_plots:
        for name, usual in (("width", None), ("title", None), ("x", None), ("format", Drawing.formats)):
            given = getattr(arguments, name, usual)
            check.require(given == usual, name, given, "left out with --no-plots")
        return False
    require_matplotlib("--no-plots")
    return True


def resume(arguments: argparse.Namespace) -> None:
    """Continue the run in ``arguments.folder``."""
    arguments.out = arguments.folder
    settings = unfinished(Path(arguments.folder))
    _train(arguments, settings, partial(simulation.resume, arguments.folder))


def run(arguments: argparse.Namespace) -> None:
    """Simulate one method."""
    settings = settings_of(arguments, RUN_BASE)
    for name in ("overwrite", "again", "width", "title", "x", "keep_best"):
        value = getattr(arguments, name)
        check.require(arguments.out is not None or not value, name, value, "left out without a folder (--out)")
    drawn = arguments.out is not None or arguments.format == Drawing.formats
    check.require(drawn, "format", ",".join(arguments.format), "left out without a folder (--out)")
    names = ("out", "overwrite", "again", "stream", "keep_best")
    _train(arguments, settings, partial(simulate, settings, **{name: getattr(arguments, name) for name in names}))


def callbacks_of(arguments: argparse.Namespace) -> Callbacks:
    """What ``--stream`` and ``--keep-best`` ask for; ``ValueError`` for an unknown stream or a missing package."""
    return as_callbacks(None, arguments.stream, arguments.keep_best, arguments.out)


def _train(arguments: argparse.Namespace, settings: Settings, train: Callable[..., Run]) -> None:
    """``train`` one run of these settings, and print its results."""
    began, drawing = time.perf_counter(), drawing_of(arguments)
    require_energy(drawing, [{"energy": settings.energy}])  # raises before any training
    plots = bool(arguments.out) and plots_of(arguments)
    try:
        with precision(settings):
            run = train(plots=plots, drawing=drawing, progress=False if arguments.quiet else None)
    except (KeyboardInterrupt, MemoryError) as error:
        kept = arguments.out and any((Path(arguments.out) / CHECKPOINTS).glob("*.npz"))
        advice = f"; continue with: fedjax-async resume {shlex.quote(arguments.out)}" if kept else ""
        if isinstance(error, MemoryError):
            raise MemoryError(f"{error}{advice}") from error
        raise KeyboardInterrupt(advice or f"; {_no_checkpoint(arguments, settings)}") from None
    except NotSaved as error:
        _print_result(error.run, began)  # all that is known of a long run
        raise
    _print_result(run, began)
    print(
        f"saved in {arguments.out}" if arguments.out else "nothing is saved: --out DIR keeps tables, pictures and model"
    )


def _print_result(run: Run, began: float) -> None:
    """Print scores, costs and counters of a run; ``began``: the performance counter at its start."""
    counters, end, rows = run.counters, run.evaluations["time"][-1], len(run.evaluations["time"])
    steps = f"{counters['server_steps']} server steps" if run.has_server else f"{counters['messages']} messages"
    print(
        f"{run.settings['method']}: {scores_text(run)} ({FINALS[FINAL]}) after {counters['updates']} updates, "
        f"{steps}, {end:{'.0f' if end >= 10 else '.3g'}} virtual seconds" + unused_text(counters.get("unused", 0))
    )
    lines = [*([] if run.has_server else [nodes_text(run)]), *clients_text(run), *attackers_text(run), *costs_text(run)]
    lines += filter(None, [faults_text(counters), end_text(run)])
    print("".join(f"{line}\n" for line in lines), end="")
    if window(FINAL, rows) > 1:
        print(f"last of {rows} evaluations: {scores_text(run, 'last')}")
    useful = counters.get("useful_steps", 1) / max(counters.get("executed_steps", 1), 1)
    print(
        f"{counters['waves']} waves of {counters['mean_width']:.1f} jobs, {counters['gradients']} gradients in "
        f"{counters['local_steps']} local steps, {100 * useful:.0f} % useful steps, "
        f"{counters['rejected']} rejected, {time.perf_counter() - began:.1f} s"
    )
    if "look_seconds" in counters:  # not in a run that was read from its folder
        took = 1000 * counters["look_seconds"] / max(counters["looks"], 1)
        print(f"{counters['looks']} looks of the policy, {took:.1f} ms each on average, besides training")
    if run.best is not None:
        shown = f"{100 * run.best.value:.2f} %" if run.best.by.endswith("accuracy") else f"{run.best.value:.4f}"
        print(f"best model: {run.best.by} {shown}, evaluation {run.best.evaluation}")


def _no_checkpoint(arguments: argparse.Namespace, settings: Settings) -> str:
    """Why an interrupted run cannot be continued."""
    if not arguments.out:
        return "nothing is kept without a folder (see --out and --checkpoint)"
    if settings.checkpoint is None:
        return "there is no checkpoint (see --checkpoint)"
    return f"no checkpoint was due yet (one is due every {settings.checkpoint} updates)"


def nodes_text(run: Run) -> str:
    """A line about the nodes at the end: accuracy of all and of the mean model, consensus distance, masses."""
    last = {name: column[-1] for name, column in run.evaluations.items()}
    metric = "accuracy" if has_accuracy([run]) else "loss"
    shown = (lambda value: f"{100 * value:.2f} %") if metric == "accuracy" else (lambda value: f"{value:.4f}")
    names = {"global": f"{metric} on all tests", "average": f"mean model's {metric}"}
    found = {name: last.get(f"{name}_{metric}", np.nan) for name in names}
    parts = [f"{names[name]} {shown(value)}" for name, value in found.items() if not np.isnan(value)]
    parts.append(f"consensus distance {last['consensus']:.4g}")
    if "total_mass" in last:
        parts.append(f"mass {last['total_mass']:.4g} of {last['total_mass'] + last['lost_mass']:.4g}")
        parts.append(f"from {last['smallest_mass']:.3g} to {last['largest_mass']:.3g} a node")
    return ", ".join(parts)


def clients_text(run: Run) -> list[str]:
    """A line for each kind of model, global or the clients' own: final scores on the clients' own tests."""
    metric = "accuracy" if has_accuracy([run]) else "loss"
    lines = []
    for score in of_metric(client_scores([run]), metric):
        model, factor = of_model(score)[0], percent(score)
        mean, deviation, worst = (
            factor * final_value(run, f"client_{score}{end}", FINAL) for end in ("", "_std", "_worst")
        )
        if run.has_server or model != of_model(metric)[0]:
            lines.append(f"{model}, clients' mean {metric}: {mean:.4g} ± {deviation:.3g}, worst tenth {worst:.4g}")
    return lines or _unscored(run)


def _unscored(run: Run) -> list[str]:
    """If nothing scores the clients' own models, a line that says how to score them."""
    personal = [f"--{name}" for name in ("personal", "ditto") if run.settings.get(name) is not None]
    if not personal or not run.has_server or run.per_client:
        return []
    flags = "--per-client" + (" --test-fraction 0.2" if run.settings.get("test_fraction") is None else "")
    return [f"the clients' models of {' and '.join(personal)} are not scored: {flags} does it"]


def attackers_text(run: Run) -> list[str]:
    """A line with the numbers of attackers and malicious uploads, if the run has an attack."""
    count = run.counters
    if "attackers" not in count:
        return []
    return [
        f"attackers: {count['attackers']} of {run.schedule.num_clients} clients; "
        f"{count['malicious']} of {len(run.updates['client'])} uploads malicious"
    ]


def costs_text(run: Run) -> list[str]:
    """A line with energy and carbon of all clients, if they are counted."""
    if "energy" not in run.evaluations:
        return []
    spent = []
    for title, (column, factor) in COSTS.items():
        name, _, unit = title.rstrip(")").partition(" (")
        spent.append(f"{name} {factor * run.evaluations[column][-1]:.4g} {unit}")
    return [f"spent by all clients: {', '.join(spent)}"]


def unused_text(count: int) -> str:
    """How many uploads were not used, as the end of a line; empty if all were."""
    return f"; {count} upload{'s' if count > 1 else ''} unused" if count else ""


def scores_text(run: Run, final: str = FINAL) -> str:
    """The final scores of a run on the test set and the validation part, if there is one, as in tables."""
    names = ["accuracy", "loss"] if has_accuracy([run]) else ["loss"]
    names += [f"validation_{name}" for name in names if f"validation_{name}" in run.evaluations]
    values = {name: percent(name) * final_value(run, name, final) for name in names}
    texts = (f"{v:.2f} %" if name.endswith("accuracy") else f"{v:.4f}" for name, v in values.items())
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in zip(names, texts))


def quickstart(arguments: argparse.Namespace) -> None:
    """Compare eight methods over three seeds, with the settings of the quickstart."""
    _compare(arguments, settings_of(arguments, as_dict(QUICKSTART)), by_label(arguments.methods))


def compare(arguments: argparse.Namespace) -> None:
    """Run the same experiment with several methods and seeds."""
    methods = by_label(arguments.methods) or methods_in(arguments.config)
    allowed = "at least one METHOD, such as fedavg, or methods in --config FILE"
    check.require(len(methods) > 0, "methods", [], allowed)
    _compare(arguments, settings_of(arguments, RUN_BASE), methods)


def _compare(arguments: argparse.Namespace, settings: Settings, methods: dict[str, str]) -> None:
    given = arguments.out

    def compare_in(out: str) -> None:
        found = {path.name for path in Path(out, "runs").glob("*") if path.is_dir()}
        others = found - set(map(folder_name, methods))
        if given is None and others and not arguments.overwrite:
            raise Occupied(f"out = {out!r}: has other methods")
        _compare_in(out, arguments, settings, methods)

    in_free_folder(given, arguments.usual_out, compare_in)


def _compare_in(out: str, arguments: argparse.Namespace, settings: Settings, methods: dict[str, str]) -> None:
    began, arguments.out = time.perf_counter(), out
    baseline_of(methods, arguments.baseline)  # raises before any training
    require_final(arguments.final)
    require_columns(arguments.columns, more=settings.metrics is not None)
    drawing = drawing_of(arguments)
    each = [settings_in_comparison(settings, method, [*methods.values()]) for method in methods.values()]
    require_energy(drawing, [{"energy": one.energy} for one in each])  # nodes without a server count none
    target_accuracy(dict.fromkeys(methods, np.ones(1)), arguments.target, methods)  # raises before any training
    plots = plots_of(arguments)
    callbacks = callbacks_of(arguments)  # raises before any training
    with precision(settings), claimed(arguments.out):
        try:
            runs = train_compared(
                methods,
                settings,
                seeds=arguments.seeds,
                out=Path(arguments.out),
                overwrite=arguments.overwrite,
                again=arguments.again,
                progress=False if arguments.quiet else None,
                callbacks=callbacks,
            )
        except KeyboardInterrupt:
            finished = any(Path(arguments.out).glob(f"runs/*/*/{MANIFEST}"))
            advice = f"finished runs are kept in {arguments.out}" if finished else "no run was finished"
            raise KeyboardInterrupt(f"; {advice}") from None
        comparison = write_comparison(
            runs,
            arguments.out,
            plots=plots,
            baseline=arguments.baseline,
            target=arguments.target,
            final=arguments.final,
            columns=arguments.columns,
            drawing=drawing,
        )
    partition = next(iter(runs.values()))[0].settings["partition"]
    where = f"{settings.dataset}, {settings.model}, {settings.clients} clients, {partition}, {settings.delay}"
    print(f"\n{where} delays; {arguments.seeds} seed(s), {time.perf_counter() - began:.0f} s")
    print(_training_text({method: each[0] for method, each in runs.items()}))
    print(comparison)
    for line in {line for each in runs.values() for line in _unscored(each[0])}:
        print(f"{line}\n")
    tables = [f"{name}.{kind}" for name in ("comparison", "pairs", "clients") for kind in ("csv", "md", "tex")]
    written = [name for name in tables if (Path(arguments.out) / name).exists()] + (drawn(arguments) if plots else [])
    print(f"saved in {arguments.out}: {', '.join([*written, 'runs/'])}")


def drawn(arguments: argparse.Namespace) -> list[str]:
    """The names of the pictures in the folder ``--out``."""
    suffixes = tuple(f".{kind}" for kind in drawing_of(arguments).formats)
    return sorted(path.name for path in Path(arguments.out).iterdir() if path.name.endswith(suffixes))


def _training_text(runs: Mapping[str, Run]) -> str:
    """A line with the clients' optimisers and learning rates, if they differ between methods."""
    methods: dict[str, list[str]] = {}
    for method, run in runs.items():
        optimizer, lr = run.settings["optimizer"], run.settings["lr"]
        training = f"a rate of {lr:g}" if optimizer is None else f"{optimizer} at {lr:g}"
        methods.setdefault(training if lr is not None else "an optimiser of their own", []).append(method)
    if len(methods) == 1:
        return ""
    each = "; ".join(f"{training}: {', '.join(names)}" for training, names in methods.items())
    return f"clients train with {each} (--optimizer and --lr set them for all)\n"
