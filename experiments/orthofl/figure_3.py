"""Figure 3: the trajectories of one client and of the server in the plane, with FedAsync's and OrthoFL's next message.

    python experiments/orthofl/figure_3.py

Client A and the others have quadratic losses with different minima. A starts at the global model; two updates of others
are mixed in before its own arrives. FedAsync would send A the global model. OrthoFL (``server.orthofl`` with one layer)
sends A's own weights plus the part of the global shift that is orthogonal to A's change. The table has the loss of A
and that of the others at the important points.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from study import options, parse, report

from fedjax_async.results.figure import FAINT, PALETTE, label, new, save_figure
from fedjax_async.server import closed, orthofl
from fedjax_async.types import Array, Arrival, Request

# Losses of client A and of the others: half the squared distance to a minimum, with a curvature along each axis.
MINIMA = {"A": jnp.array([3.0, 0.5]), "others": jnp.array([0.0, 3.5])}
CURVATURE = {"A": jnp.array([0.5, 1.0]), "others": jnp.array([1.0, 0.4])}
START = jnp.zeros(2)
STEPS, RATE = 12, 0.15


def loss(who: str, w: Array) -> float:
    """The loss of client A, or of the others."""
    return float(0.5 * jnp.sum(CURVATURE[who] * (w - MINIMA[who]) ** 2))


def trained(who: str, w: Array) -> list[Array]:
    """The points of a client's local steps from ``w``."""
    points = [w]
    for _ in range(STEPS):
        points.append(points[-1] - RATE * CURVATURE[who] * (points[-1] - MINIMA[who]))
    return points


def trajectories() -> dict[str, list[Array]]:
    """Name -> points: A's local steps, the global model, and A's next start under both methods."""
    rule = orthofl(mixing=0.6, exponent=0.5)
    state, fresh = rule.init(START)
    rows = dict.fromkeys(("A", "B", "C"), fresh)
    _, rows["A"] = rule.dispatch(state, rows["A"], Request(0))
    shared = [START]
    own = trained("A", START)

    def arrive(state: Any, who: str, upload: Array, start: Array, staleness: int) -> Any:
        arrival = Arrival(upload, start, jnp.int32(staleness), jnp.ones(()), 0, jnp.zeros(()), jnp.bool_(True))
        state, row, _ = rule.receive(state, rows[who], arrival)
        state, rows[who] = closed(rule, state, row)
        shared.append(rule.params(state))
        return state

    for who in ("B", "C"):
        state = arrive(state, who, trained("others", START)[-1] - START, START, len(shared) - 1)
    state = arrive(state, "A", own[-1] - START, START, 2)
    message, _ = rule.dispatch(state, rows["A"], Request(0))
    return {
        "client A": own,
        "global model": shared,
        "FedAsync's message": [own[-1], shared[-1]],
        "OrthoFL's message": [own[-1], message.params],
    }


def draw(found: dict[str, list[Array]], path: Path) -> None:
    """Draw the trajectories over the contours of both losses."""
    figure, axes = new(5.6, 5.0)
    grid = np.stack(np.meshgrid(np.linspace(-1, 4, 80), np.linspace(-1, 4.5, 80)), axis=-1)
    for who, colour in (("A", PALETTE[4]), ("others", FAINT)):
        values = 0.5 * np.sum(np.asarray(CURVATURE[who]) * (grid - np.asarray(MINIMA[who])) ** 2, axis=-1)
        axes.contour(grid[..., 0], grid[..., 1], values, levels=8, colors=colour, linewidths=0.7, alpha=0.6)
        axes.plot([], color=colour, linewidth=0.7, label=f"loss of {who}")
    for (name, points), colour in zip(found.items(), PALETTE):
        line = np.stack(points)
        dash = "--" if "message" in name else "-"
        axes.plot(*line.T, dash, color=colour, marker="o", markersize=3, label=name)
    label(axes, "first weight", "second weight")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, path)


def main() -> None:
    """Compute, draw and write."""
    given = parse(options(__doc__, "figure_3"))
    found = trajectories()
    points = {
        "start": START,
        "A's weights as uploaded": found["client A"][-1],
        "global model before A's update": found["global model"][-2],
        "global model after it, FedAsync's message": found["global model"][-1],
        "OrthoFL's message": found["OrthoFL's message"][-1],
    }
    rows = [
        {"point": name, "first": float(w[0]), "second": float(w[1])}
        | {f"loss of {who}": loss(who, w) for who in ("A", "others")}
        for name, w in points.items()
    ]
    draw(found, given.out / "figure_3.png")
    report(rows, given, decimals={"first": 3, "second": 3, "loss of A": 3, "loss of others": 3})


if __name__ == "__main__":
    main()
