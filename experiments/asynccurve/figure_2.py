"""Figure 2: the loss in the plane through a client's start, its end and the control point of its curve.

    python experiments/asynccurve/figure_2.py --scale laptop
    python experiments/asynccurve/figure_2.py --scale paper --task femnist --leaf FOLDER

The start is the global model after some server steps of FedAsync in the setting of Figures 1 and 3. One client trains
for 10 and for 250 local epochs, in turn with epochs of its control point (Algorithm 2). The loss is measured on the
client's training set and on the global test set: four landscapes, with the line and the curve. With ``--curve`` other
curves are learned; the plane of a curve with several inner points goes through its middle, and the curve is projected.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import figure_1_3
import jax
import jax.numpy as jnp
import numpy as np
import optax
from study import add_curve, curve_suffix, options, parse, report

from fedjax_async import Settings, geometry, named, simulate, theory
from fedjax_async.config import prepare
from fedjax_async.data.memmap import spans
from fedjax_async.local import curve_training, run_job
from fedjax_async.local.job import local_steps
from fedjax_async.results.figure import save_figure
from fedjax_async.results.landscape import plane_picture
from fedjax_async.types import ClientData, FederatedData, Message, Model, Params

EPOCHS = {"smoke": (1, 2), "laptop": (10, 250), "paper": (10, 250)}
STEPS = {"smoke": 8, "laptop": 200, "paper": 1000}  # server steps before the client's job
GRID = {"smoke": 4, "laptop": 25, "paper": 41}
CLIENT = 3  # the client that trains: of eight, with 4/36 of the examples
POINTS = 21  # points on each path
MARGIN = 0.25  # around the box of the three models, as a share of its larger side
PARTS = {"train": "training set of the client", "test": "global test set"}


class Trained(NamedTuple):
    """A client's curve."""

    points: tuple[Params, ...]  # the start, the inner points and the end
    family: geometry.CurveFamily

    @property
    def models(self) -> dict[str, Params]:
        """The three models that span the plane."""
        start, *inner, end = self.points
        if len(inner) == 1:
            return {"start": start, "control point": inner[0], "end": end}
        return {"start": start, "middle of the curve": self.family.path(self.points, 0.5), "end": end}


def global_model(task: str, given: argparse.Namespace, setting: Mapping[str, Any]) -> Params:
    """The model after some server steps of FedAsync; a finished run of these settings is read, another one refused."""
    method = f"fedasync:mixing={figure_1_3.POSITION},staleness=constant"
    folder = given.out / "runs" / f"{task}-start"
    return simulate(**setting, method=method, out=folder, plots=False).params


def train(model: Model, data: FederatedData, start: Params, epochs: int, given: argparse.Namespace) -> Trained:
    """The client's curve after ``epochs`` epochs of its end and as many of its control point."""
    shape = {"curve": given.curve, "bends": given.bends}
    batch_size = int(figure_1_3.SETTING["batch_size"])
    adam = optax.adam(figure_1_3.SETTING["lr"])
    client = curve_training(model, optimizer=adam, batch_size=batch_size, warm="off", **shape)
    own = ClientData(*map(jnp.asarray, (data.x, data.y, data.order, data.offset[CLIENT], data.size[CLIENT])))
    steps = int(local_steps(data.size, batch_size=batch_size, epochs=epochs)[CLIENT])
    job = jax.jit(lambda params, steps: run_job(client, jax.random.key(0), Message(params), (), own, steps)[0])
    curve = job(start, steps)
    end = jax.tree.map(jnp.add, start, curve.params)
    family = geometry.family(**shape)
    return Trained(family.points(start, end, curve.offset), family)


def landscape(measure: Any, rows: tuple[Any, Any], curve: Trained, size: int) -> dict[str, Any]:
    """Coordinates and losses on the grid, at the three models, and along the line and the curve."""
    start, middle, end = curve.models.values()
    plane = geometry.plane(start, end, middle)
    at = np.array([geometry.plane_coordinates(plane, params) for params in (start, middle, end)], np.float64)
    low, high = at.min(axis=0), at.max(axis=0)
    margin = MARGIN * float(np.max(high - low))
    x, y = (np.linspace(low[axis] - margin, high[axis] + margin, size) for axis in (0, 1))
    s = np.linspace(0.0, 1.0, POINTS)
    paths = {"line": ((start, end), geometry.bezier), "curve": (curve.points, curve.family.path)}
    found: dict[str, Any] = {"x": x, "y": y, "at": at, "s": s, "names": tuple(curve.models)}
    found["loss"] = theory.loss_surface(measure, plane, x, y, rows)["loss"]
    found["models"] = np.array([float(measure(params, *rows)["loss"]) for params in (start, middle, end)])
    for name, (points, path) in paths.items():
        found[f"{name} loss"] = theory.loss_along(measure, points, s, rows, path=path)["loss"]
        on_path = jax.vmap(lambda at, points=points, path=path: path(points, at))(jnp.linspace(0.0, 1.0, POINTS))
        inside = jax.vmap(lambda params: geometry.plane_coordinates(plane, params))(on_path)
        found[f"{name} position"] = np.asarray(inside)
        found[f"{name} length"] = length_of(points, path)
    return found


def length_of(points: tuple[Params, ...], path: Any) -> float:
    """The length of a curve; of a chain, the sum of its sides."""
    pieces = list(itertools.pairwise(points)) if path is geometry.polygon else [points]
    return sum(float(geometry.bezier_length(piece)) for piece in pieces)


def picture(found: Mapping[str, Any], title: str) -> Any:
    """The landscape with its models and paths."""
    rows = zip(found["names"], found["at"], found["models"], strict=True)
    models = {name: (float(a), float(b), float(height)) for name, (a, b), height in rows}
    lines = {name: tuple(found[f"{name} position"].T) for name in ("line", "curve")}
    return plane_picture(found["x"], found["y"], found["loss"], models, lines, title=title)


def row_of(task: str, epochs: int, part: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Losses at the ends and along both paths."""
    line, curve = found["line loss"], found["curve loss"]
    inner = slice(1, -1)
    return {
        "task": task,
        "local epochs": epochs,
        "part": part,
        "loss at start": float(line[0]),
        "loss at end": float(line[-1]),
        "mean on line": float(line[inner].mean()),
        "mean on curve": float(curve[inner].mean()),
        "line / curve": float((line[inner] / curve[inner]).mean()),
        "curve better at (%)": 100 * float(np.mean(curve[inner] < line[inner])),
        "barrier of line": theory.barrier(found["s"], line),
        "barrier of curve": theory.barrier(found["s"], curve),
        "length of curve / line": found["curve length"] / found["line length"],
    }


def main() -> None:
    """Train, measure, draw and write."""
    parser = options(__doc__, "figure_2")
    tasks = [task for task in figure_1_3.TASKS if task != "smoke"]
    parser.add_argument("--task", choices=tasks, default="fashion_mnist", help="data set [fashion_mnist]")
    figure_1_3.add_leaf(parser)
    add_curve(parser)
    given = parse(parser)
    figure_1_3.check_leaf(parser, given, [given.task])
    suffix = curve_suffix(parser, given)
    task = "smoke" if given.scale == "smoke" and given.leaf is None else given.task
    if (reason := figure_1_3.missing(task, given)) is not None:
        parser.error(f"argument --task: {task}: {reason}")
    scale = figure_1_3.SCALES[given.scale]
    updates = STEPS[given.scale]
    dataset = named(task, figure_1_3.dataset_of(task, given))
    setting = {
        **figure_1_3.SETTING,
        "dataset": dataset,
        "model": scale["model"],
        "updates": updates,
        "eval_updates": updates,
    }
    start = global_model(task, given, setting)
    components = prepare(Settings(**setting)).components
    data = components.data
    own = np.asarray(data.order)[spans(data.offset[[CLIENT]], data.size[[CLIENT]])]
    rows_by_part = {"train": (data.x[own], data.y[own]), "test": (data.test_x, data.test_y)}
    rows = []
    for epochs in EPOCHS[given.scale]:
        curve = train(components.model, data, start, epochs, given)
        for part, pair in rows_by_part.items():
            measure = theory.scores(components.model, len(pair[1]))
            found = landscape(measure, tuple(map(jnp.asarray, pair)), curve, GRID[given.scale])
            title = f"loss on the {PARTS[part]}, {epochs} epochs"
            save_figure(picture(found, title), given.out / f"figure_2_{part}_{epochs}{suffix}.png")
            rows.append(row_of(task, epochs, part, found) | figure_1_3.used_of(task, given))
    named_so = argparse.Namespace(**{**vars(given), "name": f"{given.name}{suffix}"})
    report(rows, named_so, decimals=dict.fromkeys(rows[0], 4))


if __name__ == "__main__":
    main()
