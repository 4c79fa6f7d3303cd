"""The paper's examples: which are k-conservative, and Figure 1, the clients on which FedAvg cycles.

    python experiments/vector_fields/examples.py --scale laptop

``examples.csv``: the largest relative antisymmetry of each example's k-th iterate at random points, beside the paper's
statement. ``orbits.csv``: the period of FedAvg's cycle by server learning rate, and the share of starting points that
end in a cycle. ``figure_1.png``: the server field with its regions and the orbit of period 8.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import Rows, options, parse, picture, report
from variants import common

from fedjax_async.results.figure import FAINT, INK, PALETTE, save_figure
from fedjax_async.theory import EXAMPLES, closed_orbit, curl, iterate, orbit

LARGEST = {"smoke": 2, "laptop": 6, "paper": 8}  # k
POINTS = {"smoke": 20, "laptop": 500, "paper": 5000}
GRID = {"smoke": 9, "laptop": 41, "paper": 81}  # starting points along each side of the square
RATES = (1.0, 0.75, 0.5, 0.25, 0.1)  # of the server
HALF = 2.0  # half of the square's side
ZERO, ENDLESS = 1e-9, 1e9


def antisymmetries(name: str, points: np.ndarray, most: int) -> list[float]:
    """The largest relative antisymmetry of ``V^k`` at the points, k = 1 .. most; NaN where an iterate overflows."""
    field = EXAMPLES[name].field
    # iterated exponentials overflow early, even from -4
    shift = -3.0 if name.startswith("exponential") else 0.0
    measured = jax.jit(jax.vmap(lambda x: jnp.stack([curl(iterate(field, k), x) for k in range(1, most + 1)])))
    largest = np.asarray(measured(jnp.asarray(points + shift))).max(axis=0)
    return [float(value) if value < ENDLESS or np.isnan(value) else float("inf") for value in largest]


def stated(answer: bool | None) -> str:
    """The paper's statement as one word."""
    return {True: "yes", False: "no", None: "open"}[answer]


def table_of_examples(scale: str) -> Rows:
    """One row per example: measured values and the paper's statement."""
    points = np.random.default_rng(0).uniform(-1, 1, (POINTS[scale], 2))
    rows = []
    for name, example in EXAMPLES.items():
        values = antisymmetries(name, points, LARGEST[scale])
        known = [example.conservative(k) for k in range(1, LARGEST[scale] + 1)]
        agree = all(a is None or np.isnan(v) or (v < ZERO) == a for a, v in zip(known, values))
        rows.append(
            {"example": name, "source": example.source}
            | {f"k = {k}": v for k, v in enumerate(values, 1)}
            | {"stated": " ".join(stated(a) for a in known), "agrees": agree}
        )
    return rows


def table_of_orbits(scale: str) -> Rows:
    """One row per server learning rate: the period from (0, 1), and where starting points on a grid end."""
    field = closed_orbit().server_field
    side = jnp.linspace(-HALF, HALF, GRID[scale])
    starts = jnp.stack(jnp.meshgrid(side, side), axis=-1).reshape(-1, 2)
    starts = jnp.concatenate([jnp.array([[0.0, 1.0]]), starts])
    rows = []
    for rate in RATES[: 1 if scale == "smoke" else None]:
        steps = int(80 / rate)  # the distance to the cycle falls as (1 - rate)^t

        def period(x: Any, rate: float = rate, steps: int = steps) -> Any:
            return orbit(field, x, lr=rate, server_steps=steps).period

        top, *rest = np.asarray(jax.jit(lambda x, period=period: jax.lax.map(period, x))(starts))
        found = np.array(rest)
        rows.append({
            "server learning rate": rate,
            "period from (0, 1)": int(top),
            "starts that end in a cycle (%)": 100 * float(np.mean(found > 1)),
            "starts that stop (%)": 100 * float(np.mean(found == 1)),
            "neither found (%)": 100 * float(np.mean(found == 0)),
            "longest period": int(found.max()),
            "starts": len(found),
        })  # fmt: skip
    return rows


def figure_1() -> Any:
    """The server field as arrows, its regions I to IV and the orbit."""
    orbit_of = closed_orbit()
    figure, (axes,) = picture(width=6.0, height=5.6)
    side = np.linspace(-HALF, HALF, 25)
    points = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    arrows = -np.asarray(jax.vmap(orbit_of.server_field)(jnp.asarray(points)))
    fine = np.linspace(-HALF - 0.15, HALF + 0.15, 400)
    mesh = jnp.asarray(np.stack(np.meshgrid(fine, fine), axis=-1).reshape(-1, 2))
    inside = np.asarray(jax.vmap(orbit_of.regions)(mesh), float).reshape(400, 400, 4)
    labels = {"I": (0.62, 1.92), "II": (-0.62, -1.92), "III": (-1.92, 0.62), "IV": (1.92, -0.62)}
    for index, (name, place) in enumerate(labels.items()):
        colour = PALETTE[index]
        axes.contourf(fine, fine, inside[..., index], levels=[0.5, 1.5], colors=[colour], alpha=0.13)
        axes.contour(fine, fine, inside[..., index], levels=[0.5], colors=[colour], linewidths=1)
        axes.text(*place, name, color=colour, ha="center", va="center", fontsize=13, fontweight="bold")
    moving = np.linalg.norm(arrows, axis=1) > 0
    axes.quiver(*points[moving].T, *arrows[moving].T, color=FAINT, angles="xy", width=0.0022, scale=22)
    axes.plot(*points[~moving].T, ".", color=FAINT, markersize=2)
    corners = np.array([*orbit_of.points, orbit_of.points[0]])
    for a, b in itertools.pairwise(corners):
        axes.annotate(
            "", b, a, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
        )
    axes.plot(*corners.T, "o", color=INK, markersize=4)
    axes.set(xlim=(fine[0], fine[-1]), ylim=(fine[0], fine[-1]), aspect="equal", xlabel="x", ylabel="y")
    axes.set_title("FedAvg's step, and its orbit of period 8 for server learning rate 1", fontsize=10)
    return figure


def run(given: argparse.Namespace) -> None:
    """Measure, draw and write."""
    rows = table_of_examples(given.scale)
    report(rows, given, decimals={f"k = {k}": 4 for k in range(1, 9)})
    common.write_table(table_of_orbits(given.scale), given.out / "orbits.csv")
    save_figure(figure_1(), given.out / "figure_1.png")


if __name__ == "__main__":
    with jax.enable_x64(True):
        run(parse(options(__doc__, "examples")))
