"""Which arrivals raised or lowered the loss of a run: by client, by staleness and by class."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check, disk, home
from fedjax_async.clock import check_schedule
from fedjax_async.config import Settings, execute
from fedjax_async.config.concerns import without_effect
from fedjax_async.config.experiment import built, planned, resolve
from fedjax_async.config.inputs import with_files
from fedjax_async.config.prepared import Resolved
from fedjax_async.config.resolving import every_of
from fedjax_async.config.settings import DEFAULTS, EVALUATIONS, as_dict, from_dict
from fedjax_async.config.watching import Watch
from fedjax_async.data.memmap import spans
from fedjax_async.engine.attribution import divided, is_shared, make_attribution
from fedjax_async.engine.components import Components, bound, facts_of
from fedjax_async.engine.evaluation import EvaluationPoints, evaluation_points
from fedjax_async.engine.probes import held_out_rows
from fedjax_async.engine.record import Progress
from fedjax_async.results import files
from fedjax_async.results.client_names import COLUMN, markdown_rows, shown_name, titled
from fedjax_async.results.figure import SCREEN, Drawing, save_formats
from fedjax_async.results.metrics import require_run
from fedjax_async.results.progress import ProgressShown, bar, require_progress
from fedjax_async.results.provenance import causes
from fedjax_async.results.running import precision
from fedjax_async.results.store import MANIFEST, Occupied, flatten, load, require_folder
from fedjax_async.results.swings import swings
from fedjax_async.results.tables import Row, write
from fedjax_async.types import Facts, FederatedData, Run, Schedule

PROBE = "explain"
ARRIVALS, ABOUT = "arrivals.csv", "explained.json"
DATA_PARTS = ("validation", "test")
NO_VALIDATION = "'test', or left out: the run holds no validation examples out (validation_fraction)"
MOST_CLASSES = 100  # with more, the classes have no columns of their own


class Explanation(NamedTuple):
    """How each arrival of a run changed the mean loss of some examples.

    ``arrivals``, one row per arrival: update (its number, from 0), client, time, step, staleness, loss and accuracy
    after it, the ``change`` of the loss that it caused, ``first_order`` (``<grad F(x), step>``) and, with class labels,
    ``class_C``, the part of ``change`` on the examples of class C; the classes sum to ``change``. Over all arrivals,
    ``change`` sums to the change of the loss from the start to the end.
    """

    arrivals: dict[str, np.ndarray]
    start: tuple[float, float]  # loss and accuracy at the start
    class_sizes: tuple[int, ...]  # examples of each class; () without classes
    part: str  # of the data: validation or test
    drift: float  # relative distance between the final parameters of both runs; NaN if a callback stopped the first
    why: str = ""  # what may have caused it: input files of unknown content, other versions
    client_names: Sequence[str] | None = None  # of the run


def explain(
    run: Run | str | Path,
    *,
    part: str | None = None,
    examples: int = 1000,
    out: str | Path | None = None,
    overwrite: bool = False,
    drawing: Drawing = SCREEN,
    progress: ProgressShown = None,
    say: Callable[[str], None] = print,
    **objects: object,
) -> Explanation:
    """Attribute the changes of a run's loss to its arrivals, by training it once more with a probe.

    An arrival's ``change`` is exact: ``F(x') - F(x)`` where it moves the server's model from x to x'. Arrivals of one
    server step divide its change: each gets the first-order effect of its own upload, and the rest of the exact change
    (curvature, momentum, aggregation other than a mean) is divided evenly.

    Args:
      run: as ``simulate`` returns it, or the folder of a saved one.
      part: ``validation`` or ``test``; by default validation if the run has such a part.
      examples: F is the mean loss of at most so many examples, spread evenly over the part.
      out: folder for tables and picture. If it has the arrivals of the same run and examples, they
        are read and drawn anew.
      overwrite: replace the explanation of another run, or of other examples, in ``out``.
      drawing: formats, width and title of the picture.
      progress: as in :func:`fedjax_async.simulate`. ``say`` gets one line about what is done.
      objects: the run's own objects by setting, ``method=Method(rule)``, because a run keeps only their names. Load a
        plugin before (``--plugin FILE.py``), because a finished run does not name its file.

    Raises: ``ValueError`` for a run without a server, without arrivals or without the part, for streamed data, for an
    input file that has changed since the run, and as in ``load``.

    >>> from fedjax_async import simulate
    >>> run = simulate(model="logistic", clients=3, updates=5, validation_fraction=0.1)
    >>> found = explain(run, say=lambda line: None).arrivals
    >>> bool(abs(sum(found["change"]) - (found["loss"][-1] - explain(run, say=lambda line: None).start[0])) < 1e-6)
    True
    """
    check.whole("examples", examples)
    require_progress(progress)
    check.optional(check.one_of, "part", part, allowed=DATA_PARTS)
    folder = None
    if not isinstance(run, Run):
        folder = check.path("run", run)
        run = load(folder)
    require_run(run)
    where = "run" if folder is None else f"run {folder}"
    allowed = "one with a server: nodes have a model each, which no single arrival moves"
    check.require(run.has_server, where, run.settings.get("method"), allowed)
    check.require(len(run.updates["client"]) > 0, where, "no arrivals", "one with at least one arrival")
    check.require(part != "validation" or "validation_loss" in run.evaluations, "part", part, NO_VALIDATION)
    about = {"run": _digest(run, folder), "part": part, "examples": examples}
    out = None if out is None else require_folder(out)
    if out is not None and (kept := _kept(out, about, overwrite=overwrite)) is not None:
        say(f"{out}: has the arrivals of this run, which were read")
        _draw(kept, out, drawing)
        return kept
    say(f"{where}: does not keep the models between its arrivals; training it once more with a probe")
    settings = _plain(from_dict(run.settings, objects), len(run.updates["client"]))
    home.require_datasets([str(settings.dataset)])
    with precision(settings):
        found = _repeated(run, settings, part, examples, progress)
        why = causes(folder, run.settings, as_dict(with_files(settings)))
        found = found._replace(why=why, client_names=run.client_names)
    if out is not None:
        _write(found, out, about, drawing)
    return found


def _digest(run: Run, folder: Path | None) -> str:
    """A hash that differs between runs: of the manifest or, without a folder, of the settings and an early stop."""
    known = run.settings if run.stopped is None else [run.settings, run.stopped]
    content = files.json_bytes(known) if folder is None else (folder / MANIFEST).read_bytes()
    return hashlib.sha256(content).hexdigest()


def _plain(settings: Settings, arrivals: int) -> Settings:
    """The settings of the same run, without those that do not change it."""
    stops = settings.stop_at is not None or settings.patience is not None
    without = [name for name in without_effect("explain") if not (stops and name in EVALUATIONS)]
    plain = dataclasses.replace(settings, **{name: DEFAULTS[name] for name in without})
    return plain if stops else dataclasses.replace(plain, eval_updates=arrivals)


# --- the run once more --------------------------------------------------------------------------------


def _repeated(run: Run, settings: Settings, part: str | None, examples: int, progress: ProgressShown) -> Explanation:
    """Train once more with the probe, and divide the changes that it measured among the arrivals."""
    resolved = resolve(settings)
    components, data = resolved.components, resolved.components.data
    allowed = "one that fits into memory: the losses are computed on the device"
    check.require(not data.streamed, "dataset", settings.dataset, allowed)
    held_out = rows_of(data, "validation")
    check.require(len(held_out) > 0 or part != "validation", "part", part, NO_VALIDATION)
    part = part or ("validation" if len(held_out) else "test")
    pool = (data.test_x, data.test_y) if part == "test" else (data.x, data.y)
    chosen = spread_evenly(rows_of(data, part), examples)
    x, y = (np.asarray(values[chosen]) for values in pool)
    classes = data.num_classes if np.issubdtype(y.dtype, np.integer) and y.ndim == 1 else None
    groups = classes if classes is not None and classes <= MOST_CLASSES else None
    schedule, points = _plan_of(run, resolved)
    facts = facts_of(schedule)
    probe = make_attribution(components, facts, (x, y), groups)
    experiment = built(resolved, schedule, points, {PROBE: probe})
    meter = bar(experiment.total, progress, label="explain")
    try:
        again = execute(experiment, progress=_quiet(meter.report), watch=Watch(experiment))
    finally:
        meter.close()
    return _explanation(run, again, components, facts, part, () if groups is None else np.bincount(y, minlength=groups))


def _plan_of(run: Run, resolved: Resolved) -> tuple[Schedule, EvaluationPoints]:
    """The schedule and the evaluation points of the run: planned again; with a policy, the schedule that it made."""
    if resolved.settings.policy is None:
        return planned(resolved)
    return run.schedule, evaluation_points(check_schedule(run.schedule), every_of(resolved.settings))


def _quiet(report: Progress) -> Progress:
    """Report no accuracy: until the end, only that at the start is known."""

    def reported(done: int, total: int, **shown: object) -> None:
        report(done, total, **shown | {"accuracy": float("nan")})

    return reported


def rows_of(data: FederatedData, part: str, client: int | None = None) -> np.ndarray:
    """The rows of ``train`` or ``validation`` in ``data.x``, of ``test`` in ``data.test_x``; of a client, or of all."""
    if part == "test" and client is None:
        return np.arange(len(data.test_y))
    if part == "test" and data.test_order is None:
        raise ValueError(f"client = {client}: {data.name} has one test set for all; its clients have train parts only")
    order, offset, size = (data.order, data.offset, data.size) if part == "train" else held_out_rows(data, part)
    if client is not None:
        check.whole("client", client, 0, len(data.size) - 1)
        offset, size = offset[client : client + 1], size[client : client + 1]
    return np.asarray(order[spans(offset, size)])


def spread_evenly(rows: np.ndarray, most: int) -> np.ndarray:
    """At most ``most`` of the rows, at equal distances."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows), most, endpoint=False).astype(np.int64)]


def _explanation(
    run: Run, again: Run, components: Components, facts: Facts, part: str, class_sizes: np.ndarray | tuple[()]
) -> Explanation:
    """The explanation from the probe's table, up to the end of ``run``: a callback may have stopped it."""
    count = len(run.updates["client"])
    table = {name: values[:count] for name, values in again.probes[PROBE].items()}
    step, closes = (np.asarray(again.updates[name][:count]) for name in ("step", "closes"))
    shared = is_shared(bound(components.rule, components.hyper), facts)
    exact, linear = divided(table, step, closes, shared=shared)
    before = _sum_of(table, "before")
    after = np.where(closes, _sum_of(table, "after"), before) if shared else _sum_of(table, "after")
    right = np.asarray(table["accuracy after"], np.float64)
    right = np.where(closes, right, table["accuracy before"]) if shared else right
    arrivals = {
        "update": table["update"],
        "client": table["client"],
        "time": table["time"],
        "step": step,
        "staleness": np.asarray(again.updates["staleness"][:count]),
        "loss": after,
        "accuracy": right,
        "change": exact.sum(axis=1),
        "first_order": linear.sum(axis=1),
    }
    arrivals |= {f"class_{c}": exact[:, c] for c in range(exact.shape[1])} if len(class_sizes) else {}
    whole = run.stopped is None or count == len(again.updates["client"])
    start = (float(before[0]), float(table["accuracy before"][0]))
    return Explanation(arrivals, start, tuple(map(int, class_sizes)), part, _drift(run, again) if whole else math.nan)


def _sum_of(table: dict[str, np.ndarray], name: str) -> np.ndarray:
    columns = [np.asarray(v, np.float64) for column, v in table.items() if column.startswith(f"{name} ")]
    return np.asarray(np.sum(columns, axis=0))


def _drift(run: Run, again: Run) -> float:
    """``||w' - w|| / ||w||`` of the parameters at the end; 0 where all are 0, as at the start of a linear model."""
    one, two = (flatten(each.params) for each in (run, again))
    apart = sum(float(np.sum((np.asarray(one[name], float) - np.asarray(two[name], float)) ** 2)) for name in one)
    size = sum(float(np.sum(np.asarray(v, float) ** 2)) for v in one.values())
    return math.sqrt(apart / size) if size else math.sqrt(apart)


# --- tables -------------------------------------------------------------------------------------------


def _totals(found: Explanation, of: np.ndarray) -> dict[str, float]:
    """The sums over the arrivals with the indices ``of``."""
    change, linear = found.arrivals["change"][of], found.arrivals["first_order"][of]
    return {
        "arrivals": len(of),
        "change of loss": float(change.sum()),
        "up": float(change[change > 0].sum()),
        "down": float(change[change < 0].sum()),
        "first order": float(linear.sum()),
        "largest rise": float(max(change.max(initial=0.0), 0.0)),
    }


def client_rows(found: Explanation) -> list[dict[str, Any]]:
    """One row per client: arrivals, and sums of their changes: of all, of rises, of falls, to first order.

    Clients whose arrivals raised the loss most come first.
    """
    client, staleness, names = found.arrivals["client"], found.arrivals["staleness"], found.client_names
    rows = []
    for each in np.unique(client):
        of = np.flatnonzero(client == each)
        row: dict[str, Any] = {"client": int(each)} | ({} if names is None else {COLUMN: shown_name(names, int(each))})
        row |= {**_totals(found, of), "mean staleness": float(staleness[of].mean())}
        if found.class_sizes:
            sums = [float(found.arrivals[f"class_{c}"][of].sum()) for c in range(len(found.class_sizes))]
            row |= {"most up": _named(sums, np.argmax, 1), "most down": _named(sums, np.argmin, -1)}
        rows.append(row)
    return sorted(rows, key=lambda row: -row["up"])


def _named(sums: list[float], best: Callable[[list[float]], np.intp], sign: int) -> str:
    """``class 3``, or ``-`` if no class changed in this direction."""
    where = int(best(sums))
    return f"class {where}" if sign * sums[where] > 0 else "-"


def staleness_rows(found: Explanation, most: int = 12) -> list[dict[str, object]]:
    """One row per staleness, or per range of growing width if there are more than ``most``."""
    staleness = found.arrivals["staleness"]
    largest = int(staleness.max())
    low = list(range(largest + 1))
    if largest >= most:
        low = [0, 1, *(2**k for k in range(1, largest.bit_length()))]
    rows = []
    for first, after in zip(low, [*low[1:], largest + 1]):
        of = np.flatnonzero((staleness >= first) & (staleness < after))
        if len(of):
            title = str(first) if after == first + 1 else f"{first} to {after - 1}"
            totals = _totals(found, of)
            rows.append({"staleness": title, **totals, "change an arrival": totals["change of loss"] / len(of)})
    return rows


def class_rows(found: Explanation) -> list[dict[str, object]]:
    """One row per class: its examples, the change of its part of the loss, and the clients that changed it most.

    ``change of loss`` is the change of the sum of its examples' losses divided by the number of all examples, so the
    classes sum to the total change; ``of its own mean`` is the change of the mean loss of its examples. Empty without
    class labels.
    """
    client, names, total, rows = found.arrivals["client"], found.client_names, sum(found.class_sizes), []
    for c, size in enumerate(found.class_sizes):
        change = found.arrivals[f"class_{c}"]
        by_client = np.bincount(client, change)
        up, down = int(by_client.argmax()), int(by_client.argmin())
        rows.append({
            "class": c,
            "examples": size,
            "change of loss": float(change.sum()),
            "of its own mean": float(change.sum()) * total / size if size else float("nan"),
            "up": float(change[change > 0].sum()),
            "down": float(change[change < 0].sum()),
            "raised most by": titled(names, up) if by_client[up] > 0 else "-",
            "lowered most by": titled(names, down) if by_client[down] < 0 else "-",
        })  # fmt: skip
    return rows


TABLES: dict[str, Callable[[Explanation], Sequence[Row]]] = {
    "clients": client_rows,
    "staleness": staleness_rows,
    "classes": class_rows,
}
PLACES = {"mean staleness": 1}


def decimals_of(rows: Sequence[Row]) -> dict[str, int]:
    """Four decimal places for losses."""
    return {name: PLACES.get(name, 4) for name in rows[0]}


# --- the folder ---------------------------------------------------------------------------------------


def _write(found: Explanation, out: Path, about: Mapping[str, object], drawing: Drawing) -> None:
    """``arrivals.csv``, a CSV and a Markdown file of each table, the picture; ``explained.json`` last."""
    out.mkdir(parents=True, exist_ok=True)
    (out / ABOUT).unlink(missing_ok=True)
    disk.write(out / ARRIVALS, files.csv_bytes(files.applicable(found.arrivals)))
    for name, rows_of in TABLES.items():
        rows = rows_of(found)
        for ending in ("csv", "md"):
            (out / f"{name}.{ending}").unlink(missing_ok=True)
            if rows:
                shown = markdown_rows(rows) if ending == "md" else rows
                write(shown, out / f"{name}.{ending}", decimals=decimals_of(rows))
    _draw(found, out, drawing)
    types = {name: np.asarray(values).dtype.str for name, values in found.arrivals.items()}
    kept = {name: value for name, value in found._asdict().items() if name != "arrivals" and value is not None}
    disk.write(out / ABOUT, files.json_bytes({"about": about, "types": types, "kept": kept}))
    disk.sweep_up(out)


def _draw(found: Explanation, out: Path, drawing: Drawing) -> None:
    """The picture, also of an explanation that was read: it is drawn as asked for now."""
    figure = swings(found.arrivals, found.start, found.part, names=found.client_names, drawing=drawing)
    save_formats(figure, out / "swings", drawing)


def _kept(out: Path, about: Mapping[str, object], *, overwrite: bool) -> Explanation | None:
    """The explanation in ``out`` of the same run and examples; ``ValueError`` if ``out`` has another one."""
    if not (out / ABOUT).is_file():
        return None
    try:
        saved = json.loads((out / ABOUT).read_bytes())
        same = saved["about"] == about
        if same:
            arrivals = files.csv_columns((out / ARRIVALS).read_bytes(), saved["types"])
            kept = saved["kept"]
            pairs = {name: tuple(kept[name]) for name in ("start", "class_sizes", "client_names") if name in kept}
            drift = math.nan if kept["drift"] is None else kept["drift"]  # JSON has no NaN
            return Explanation(arrivals, **kept | pairs | {"drift": drift})
    except (ValueError, KeyError, TypeError, OSError):
        same = False
    if not overwrite:
        allowed = "a folder without the explanation of another run or of other examples (or overwrite)"
        raise Occupied(f"out = {str(out)!r}: must be {allowed}")
    return None
