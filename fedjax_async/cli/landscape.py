"""The command ``landscape``: the loss between saved runs, along paths and in the plane through their models."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import geometry, theory
from fedjax_async.base import check, disk, home
from fedjax_async.cli.parsing import in_free_folder
from fedjax_async.cli.runs import drawing_of
from fedjax_async.config import Settings
from fedjax_async.config.inputs import with_files
from fedjax_async.config.problem import data_of, initial, model_of, params_dtype
from fedjax_async.config.settings import from_dict
from fedjax_async.engine.devices import require_backend
from fedjax_async.models import arrays_of, filled
from fedjax_async.results import table, write
from fedjax_async.results.explaining import rows_of, spread_evenly
from fedjax_async.results.figure import Drawing, require_matplotlib, save_formats
from fedjax_async.results.files import applicable, csv_bytes
from fedjax_async.results.landscape import path_picture, plane_picture
from fedjax_async.results.running import precision
from fedjax_async.results.store import Occupied, load, require_folder
from fedjax_async.types import FederatedData, Model, Params, Run

LETTERS = "ABC"
TABLES = ("paths.csv", "barriers.csv", "plane.csv")
DATA_PARTS = ("test", "train", "validation")
LEARNED_FROM = 20_000  # most training examples for the curves
MARGIN = 0.25  # around the models, as a share of the larger side of their box


class Subject(NamedTuple):
    """What is measured: the model of the runs on some examples."""

    model: Model
    measure: theory.landscape.Measure
    rows: tuple[jax.Array, jax.Array]  # x and y
    training: tuple[jax.Array, jax.Array]  # x and y of all clients, to learn curves
    about: str  # the rows, in words


class Between(NamedTuple):
    """A path between two models."""

    name: str  # "A to B, line"
    points: tuple[Params, ...]  # the ends, and the control point of a Bezier curve between them
    scores: Mapping[str, np.ndarray]  # s, loss, accuracy [P]


def landscape(arguments: argparse.Namespace) -> None:
    """Measure, write tables and pictures into ``arguments.out``, and print the barriers."""
    drawing = drawing_of(arguments)
    require_matplotlib()
    _check_numbers(arguments)
    in_free_folder(arguments.out, "landscape", lambda out: _landscape_in(Path(out), arguments, drawing))


def _landscape_in(out: Path, arguments: argparse.Namespace, drawing: Drawing) -> None:
    require_folder(out)
    if found := [name for name in TABLES if (out / name).exists() and not arguments.overwrite]:
        allowed = f"a folder without a landscape, but it has {', '.join(found)}; --overwrite replaces it"
        raise Occupied(f"out = {str(out)!r}: must be {allowed}")
    runs = [load(folder) for folder in arguments.folders]
    require_backend()
    settings = _settings_of(runs, arguments.folders)
    home.require_datasets([str(settings.dataset)])
    with precision(settings):
        data = data_of(with_files(settings, only=("dataset", "partition", "model")))
        model = model_of(settings, data)
        like, _ = initial(model.init, params_dtype(settings.compute))(jax.random.key(settings.seed))
        models = [_params_of(*each, like, best=arguments.best) for each in zip(runs, arguments.folders)]
        _check_distinct(models, arguments.folders)
        subject = _subject(model, data, arguments)
        for letter, run, folder in zip(LETTERS, runs, arguments.folders):
            print(f"{letter}: {folder} ({run.settings.get('method')}, seed {run.settings.get('seed')})")
        print(f"measured on {subject.about}")
        paths = _paths(models, subject, arguments)
        _write_paths(paths, out, subject, drawing)
        corners = (
            models if len(models) == 3 else [*models, *(each.points[1] for each in paths if len(each.points) == 3)]
        )
        if len(corners) == 3:
            _write_plane(corners, paths, out, subject, arguments.grid, drawing)
        else:
            print("no plane: two runs without a curve (--steps 0) do not span a plane")
    disk.sweep_up(out)
    print(f"written: {out}")


def _check_numbers(arguments: argparse.Namespace) -> None:
    """``ValueError`` for numbers and combinations of flags that cannot be used, before anything is read."""
    check.require(2 <= len(arguments.folders) <= 3, "runs", len(arguments.folders), "two or three folders")
    check.whole("grid", arguments.grid, 2, 1000)
    check.whole("points", arguments.points, 2, 100_000)
    check.whole("examples", arguments.examples)
    check.whole("steps", arguments.steps, 0)
    check.real_positive("lr", arguments.lr)
    check.one_of("part", arguments.part, DATA_PARTS)
    check.optional(check.whole, "client", arguments.client, low=0)


def _settings_of(runs: list[Run], folders: list[str]) -> Settings:
    """The settings of the first run; ``ValueError`` if another run has another model or number format."""
    first = runs[0].settings
    for run, folder in zip(runs[1:], folders[1:]):
        for name in ("model", "compute"):
            here, there = run.settings.get(name), first.get(name)
            same = f"{there!r}, as in {folders[0]}: only runs of the same model have a plane in common"
            check.require(here == there, f"{name} of {folder}", here, same)
    return from_dict(first)


def _params_of(run: Run, folder: str, like: Params, *, best: bool) -> Params:
    """The last model of a run, or the best, in the structure of ``like``; ``ValueError`` for other shapes."""
    if best and run.best is None:
        raise ValueError(f"folder = {folder!r}: has no best model; run it with --keep-best, or leave --best out")
    saved = run.best.params if best and run.best is not None else run.params
    return filled(like, arrays_of(saved), folder)


def _check_distinct(models: list[Params], folders: list[str]) -> None:
    """``ValueError`` if two runs hold the same model: there is no path between them."""
    for (one, here), (two, there) in itertools.combinations(zip(models, folders), 2):
        if all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two))):
            raise ValueError(f"folder = {there!r}: must hold another model than {here}, but they are equal")


def _subject(model: Model, data: FederatedData, arguments: argparse.Namespace) -> Subject:
    """The examples that the flags choose, spread evenly over their order, and those that curves learn from."""
    part, client = arguments.part, arguments.client
    rows = rows_of(data, part, client)
    about = f"the {part} part" + ("" if client is None else f" of client {client}")
    check.require(len(rows) > 0, "part", part, f"a part with examples, but {about} of {data.name} has none")
    chosen = spread_evenly(rows, arguments.examples)
    pool = (data.test_x, data.test_y) if part == "test" else (data.x, data.y)
    measure = theory.scores(model, len(chosen), labels=data.num_classes is not None)
    training = spread_evenly(rows_of(data, "train"), LEARNED_FROM)
    text = f"{len(chosen)} of {len(rows)} examples of {about} of {data.name}"
    return Subject(model, measure, _taken(pool, chosen), _taken((data.x, data.y), training), text)


def _taken(pool: tuple[Any, Any], rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(np.asarray(pool[0][rows])), jnp.asarray(np.asarray(pool[1][rows]))


# --- paths ------------------------------------------------------------------------------------------


def _paths(models: list[Params], subject: Subject, arguments: argparse.Namespace) -> list[Between]:
    """The line and the learned curve between each pair of models, with their scores."""
    s = np.linspace(0.0, 1.0, arguments.points)
    loss = theory.batch_loss(subject.model)
    found = []
    for one, two in itertools.combinations(range(len(models)), 2):
        ends, name = (models[one], models[two]), f"{LETTERS[one]} to {LETTERS[two]}"
        shapes: dict[str, tuple[Params, ...]] = {"line": ends}
        if arguments.steps > 0:
            key = jax.random.key(arguments.seed)
            steps, lr = arguments.steps, arguments.lr
            control, _ = theory.learned_control_point(loss, *ends, key, subject.training, steps=steps, lr=lr)
            shapes["curve"] = (ends[0], control, ends[1])
        for shape, points in shapes.items():
            scores = theory.loss_along(subject.measure, points, s, subject.rows)
            found.append(Between(f"{name}, {shape}", points, {"s": s, **scores}))
    return found


def _write_paths(paths: list[Between], out: Path, subject: Subject, drawing: Drawing) -> None:
    """``paths.csv``, ``barriers.csv`` and the picture; prints the barriers."""
    each = [len(path.scores["s"]) for path in paths]
    columns: dict[str, np.ndarray] = {"path": np.repeat([path.name.replace(",", "") for path in paths], each)}
    columns |= {name: np.concatenate([path.scores[name] for path in paths]) for name in paths[0].scores}
    out.mkdir(parents=True, exist_ok=True)
    disk.write(out / "paths.csv", csv_bytes(applicable(columns)))
    rows = []
    for path in paths:
        loss = path.scores["loss"]
        length = float(geometry.bezier_length(path.points))
        ends = {"loss at start": float(loss[0]), "highest loss": float(np.max(loss)), "loss at end": float(loss[-1])}
        rows.append({"path": path.name, "length": length, **ends, "barrier": theory.barrier(path.scores["s"], loss)})
    write(rows, out / "barriers.csv")
    print(table(rows, decimals=dict.fromkeys(rows[0], 4)), end="")
    drawn = {path.name: (path.scores["s"], path.scores["loss"]) for path in paths}
    save_formats(path_picture(drawn, title=_title(subject), drawing=drawing), out / "paths", drawing)


def _title(subject: Subject) -> str:
    return "loss on " + subject.about.split(" examples of the ")[1].split(" part")[0] + " examples"


# --- the plane --------------------------------------------------------------------------------------


def _write_plane(
    corners: list[Params], paths: list[Between], out: Path, subject: Subject, size: int, drawing: Drawing
) -> None:
    """``plane.csv`` and its picture: the plane through three runs, or through two and the curve's control point."""
    plane = geometry.plane(*corners)
    at = [np.asarray(geometry.plane_coordinates(plane, corner), np.float64) for corner in corners]
    low, high = np.min(at, axis=0), np.max(at, axis=0)
    margin = MARGIN * float(np.max(high - low))
    x, y = (np.linspace(low[axis] - margin, high[axis] + margin, size) for axis in (0, 1))
    scores = theory.loss_surface(subject.measure, plane, x, y, subject.rows)
    grid = np.meshgrid(x, y)
    flat = {"x": grid[0].ravel(), "y": grid[1].ravel(), **{name: each.ravel() for name, each in scores.items()}}
    disk.write(out / "plane.csv", csv_bytes(applicable(flat)))
    three_runs = not any(corners[2] is point for path in paths for point in path.points[1:-1])
    names = LETTERS if three_runs else (*LETTERS[:2], "control point")
    loss = [float(subject.measure(corner, *subject.rows)["loss"]) for corner in corners]
    models = {name: (float(a), float(b), height) for name, (a, b), height in zip(names, at, loss)}
    lines = {}
    for path in paths:
        if len(path.points) == 2 or not three_runs:  # curves between three runs do not lie in their plane
            points = geometry.bezier_points(path.points, 60)
            inside = np.asarray(jax.vmap(lambda p: geometry.plane_coordinates(plane, p))(points))
            lines[path.name] = (inside[:, 0], inside[:, 1])
    picture = plane_picture(x, y, scores["loss"], models, lines, title=_title(subject), drawing=drawing)
    save_formats(picture, out / "plane", drawing)
