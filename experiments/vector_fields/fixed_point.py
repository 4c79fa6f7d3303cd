"""The distance of FedAvg's fixed point from the minimiser of the mean loss, for logistic regression. Beyond the paper.

    python experiments/vector_fields/fixed_point.py --scale laptop

Clients with Dirichlet label skew take k full-batch steps on 7 x 7 images, with weight decay. ``fixed_point.csv``: the
distance between FedAvg's fixed point and the minimiser, its first order in the learning rate
(``theory.fixed_point_shift``), the relative antisymmetry of the server field at the fixed point, and the test accuracy
at both points.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import Rows, options, parse, picture, report

from fedjax_async.base import tree
from fedjax_async.config import Settings, prepare
from fedjax_async.results.figure import PALETTE, save_figure
from fedjax_async.theory import estimate_curl, fixed_point, fixed_point_shift, minimiser, server_field

DECAY = 0.05
SMALL = {"dataset": "fashion_mnist_6k", "clients": 3, "examples": 20, "pool": 14}
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {**SMALL, "alpha": (0.1,), "steps": (2,), "lr": (0.1,)},
    "laptop": {
        "dataset": "fashion_mnist_6k", "clients": 6, "examples": 100, "pool": 4,
        "alpha": (0.1, 100.0), "steps": (2, 20), "lr": (0.1, 0.3),
    },
    "paper": {
        "dataset": "mnist", "clients": 10, "examples": 6000, "pool": 4,
        "alpha": (0.1, 1.0, 100.0), "steps": (2, 5, 20, 100), "lr": (0.02, 0.1, 0.3),
    },
}  # fmt: skip


def images(x: Any, pool: int) -> jax.Array:
    """Means over squares of ``pool`` x ``pool`` pixels, in [0, 1]; [images, (28 / pool)^2]."""
    pixels = np.asarray(x, np.float64).reshape(len(x), 28 // pool, pool, 28 // pool, pool) / 255
    return jnp.asarray(pixels.mean(axis=(2, 4)).reshape(len(x), -1))


def losses_of(data: Any, pool: int, examples: int) -> list[Any]:
    """Each client's mean logistic loss with weight decay, a function of ``{"w": [F, 10], "b": [10]}``."""

    def loss_of(x: Any, y: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            scores = x @ params["w"] + params["b"][None]
            chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)
            return -chosen.mean() + DECAY / 2 * sum(jnp.sum(leaf**2) for leaf in params.values())

        return loss

    losses = []
    for offset, size in zip(data.offset, data.size):
        rows = np.asarray(data.order)[offset : offset + min(size, examples)]
        losses.append(loss_of(images(np.asarray(data.x)[rows], pool), jnp.asarray(np.asarray(data.y)[rows])))
    return losses


def rows_of(scale: dict[str, Any], alpha: float) -> Rows:
    """One row for each number of local steps and learning rate, for one skew."""
    setting = {"dataset": scale["dataset"], "clients": scale["clients"], "model": "logistic", "server_steps": 1}
    data = prepare(Settings(**setting, partition=f"dirichlet:alpha={alpha}", method="fedavg")).components.data
    losses, tests = losses_of(data, scale["pool"], scale["examples"]), images(data.test_x, scale["pool"])
    start = {"w": jnp.zeros((tests.shape[1], 10)), "b": jnp.zeros(10)}

    def mean_loss(params: Any) -> jax.Array:
        return sum(loss(params) for loss in losses) / len(losses)  # type: ignore[return-value]

    def accuracy(params: Any) -> float:
        return 100 * float(np.mean(np.argmax(tests @ params["w"] + params["b"][None], axis=1) == data.test_y))

    lowest = jax.jit(lambda x: minimiser(mean_loss, x, tol=1e-8))(start).point
    size = float(tree.norm(lowest))
    rows = []
    for k, lr in itertools.product(scale["steps"], scale["lr"]):
        field = server_field(losses, lr, k)
        first = jax.jit(lambda x, k=k, lr=lr: fixed_point_shift(losses, lr, k, x))(lowest)
        near = jax.tree.map(jnp.add, lowest, first)
        found = jax.jit(lambda x, field=field: fixed_point(field, x, tol=1e-6, steps=5000))(near)
        antisymmetry = jax.jit(lambda x, field=field: estimate_curl(jax.random.key(0), field, x, pairs=16))(found.point)
        away = jax.tree.map(jnp.subtract, found.point, lowest)
        error = jax.tree.map(jnp.subtract, away, first)
        rows.append({
            "alpha": alpha, "local steps": k, "learning rate": lr,
            "distance / norm of minimiser": float(tree.norm(away)) / size,
            "first order / norm": float(tree.norm(first)) / size,
            "error of first order / distance": float(tree.norm(error) / tree.norm(away)),
            "mean loss, excess": float(mean_loss(found.point) - mean_loss(lowest)),
            "antisymmetry at the fixed point": float(antisymmetry.value),
            "its error": float(antisymmetry.standard_error),
            "accuracy at the fixed point (%)": accuracy(found.point),
            "accuracy at the minimiser (%)": accuracy(lowest),
            "rounds": int(found.steps), "residual": float(found.residual),
        })  # fmt: skip
    return rows


def drawn(rows: Rows) -> Any:
    """Figure: distance against (local steps - 1) x learning rate, with its first order."""
    figure, (axes,) = picture(width=5.2, height=4.0)
    for alpha, colour in zip(sorted({row["alpha"] for row in rows}), PALETTE):
        own = sorted((row["local steps"] * row["learning rate"], row) for row in rows if row["alpha"] == alpha)
        for product, row in own:
            del product
            at = (row["local steps"] - 1) * row["learning rate"]
            axes.loglog(at, row["distance / norm of minimiser"], "o", color=colour)
            axes.loglog(at, row["first order / norm"], "+", color=colour)
        axes.plot([], [], "o", color=colour, label=f"alpha {alpha:g}")
    axes.plot([], [], "+", color="#666666", label="first order")
    axes.set(xlabel="(local steps - 1) x learning rate", ylabel="distance to the minimiser, relative")
    axes.legend(frameon=False, fontsize=8)
    return figure


def run(given: argparse.Namespace) -> None:
    """Measure, draw and write."""
    scale = SCALES[given.scale]
    rows = [row for alpha in scale["alpha"] for row in rows_of(scale, alpha)]
    report(rows, given, decimals=dict.fromkeys(rows[0], 4) | {"mean loss, excess": 6, "residual": 12})
    save_figure(drawn(rows), given.out / "fixed_point.png")


if __name__ == "__main__":
    with jax.enable_x64(True):
        run(parse(options(__doc__, "fixed_point")))
