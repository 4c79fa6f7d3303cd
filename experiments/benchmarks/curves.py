"""The cost of curves: a job of AsyncCurve beside one of FedAvg, and the landscape of a small network.

    python experiments/benchmarks/curves.py             # two minutes
    python experiments/benchmarks/curves.py --smoke     # seconds

*Job*: one local epoch of LeNet-5 on 600 images in batches of 32, with Adam, in one compiled call. AsyncCurve's job
trains the end and the control point, with two gradients per step, the hyperbolic proximal term and warm moments. The
calls are interleaved; ratios are computed within each repeat, and the table has their quartiles, for wall time and for
the processor time of all threads, which other processes disturb less.

*Landscape*: the test loss and accuracy of LeNet-5 at 25 x 25 points of the plane through three models, on 1,000 images,
as in the command ``landscape``; wall and processor seconds, with and without compiling.

Measured numbers: README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import both_clocks, hardware, interleave, write_table

from fedjax_async import Settings, geometry, theory
from fedjax_async.config.problem import data_of, model_of
from fedjax_async.local import OPTIMIZERS, curve_training, local_training, run_job
from fedjax_async.server import METHODS
from fedjax_async.types import ClientData, Message, Model

RESULTS = Path(__file__).parent / "results"


def problem(name: str) -> tuple[Model, Any]:
    """The model, which decodes raw examples, and the data."""
    settings = Settings(dataset="fashion_mnist_6k", model=name, updates=1)
    data = data_of(settings)
    return model_of(settings, data), data


def calls_of(model: Model, data: Any, a: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """A job of each method as one compiled call."""
    lr, mu = METHODS["asynccurve"].lr, METHODS["asynccurve"].proximal
    adam = OPTIMIZERS["adam"](lr)
    clients = {
        "fedavg": local_training(model, optimizer=adam, batch_size=a.batch),
        "asynccurve": curve_training(model, optimizer=adam, batch_size=a.batch, proximal=mu),
    }
    params = model.init(jax.random.key(0))
    part = ClientData(
        jnp.asarray(data.x), jnp.asarray(data.y), jnp.asarray(data.order), jnp.int32(0), jnp.int32(a.examples)
    )
    steps = jnp.int32(-(-a.examples // a.batch))
    step = jax.tree.map(lambda leaf: 1e-3 * leaf, params)  # the server's step, for the warm moments

    def call(name: str) -> Callable[[], Any]:
        @jax.jit
        def job(params: Any, step: Any, part: ClientData, steps: Any) -> Any:
            message = Message(params, step if name == "asynccurve" else (), jnp.int32(0))
            return run_job(clients[name], jax.random.key(1), message, (), part, steps)[0]

        return lambda: job(params, step, part, steps)

    return {name: call(name) for name in clients}


def jobs(a: argparse.Namespace) -> dict[str, Any]:
    """The row of the jobs."""
    found = interleave(calls_of(*problem(a.model), a), a.repeats, clock=both_clocks)
    row: dict[str, Any] = {"model": a.model, "examples": a.examples, "batch": a.batch, "repeats": a.repeats}
    for k, clock in enumerate(("wall", "processor")):
        fedavg, curve = (1e3 * np.array(found[name])[:, k] for name in ("fedavg", "asynccurve"))
        low, middle, high = np.quantile(curve / fedavg, [0.25, 0.5, 0.75])
        row |= {
            f"fedavg, {clock} ms a job": float(np.median(fedavg)),
            f"asynccurve, {clock} ms a job": float(np.median(curve)),
            f"{clock} ratio": float(middle),
            f"{clock} ratio, lower quartile": float(low),
            f"{clock} ratio, upper quartile": float(high),
        }
    return row


def surface(a: argparse.Namespace) -> dict[str, Any]:
    """The row of the landscape."""
    model, data = problem(a.model)
    corners = [model.init(jax.random.key(seed)) for seed in range(3)]
    rows = jnp.asarray(data.test_x[: a.images]), jnp.asarray(data.test_y[: a.images])
    plane = geometry.plane(*corners)
    axis = np.linspace(-1.0, 2.0, a.grid)

    def measured() -> np.ndarray:
        start = both_clocks()
        theory.loss_surface(theory.scores(model, a.images), plane, axis, axis, rows)
        return both_clocks() - start

    first, *others = [measured() for _ in range(1 + min(a.repeats, 3))]
    wall, processor = np.median(others, axis=0)
    return {
        "model": a.model,
        "points": a.grid**2,
        "images": a.images,
        "first time, wall s": float(first[0]),
        "first time, processor s": float(first[1]),
        "compiled, wall s": float(wall),
        "compiled, processor s": float(processor),
    }


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--examples", type=int, default=600, help="examples of the client")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--grid", type=int, default=25, help="points along each side of the landscape")
    parser.add_argument("--images", type=int, default=1000, help="test images for the landscape")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=["jobs", "landscape"], default=None)
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/curves.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.model, a.examples, a.grid, a.images, a.repeats = "mlp:hidden=4", 40, 3, 20, 1
    out = a.out or RESULTS / "curves.csv"
    for name, measure in {"jobs": jobs, "landscape": surface}.items():
        if a.only not in (None, name):
            continue
        if a.smoke and a.out is None:
            print(measure(a), hardware(), sep="\n")
            continue
        write_table([measure(a)], out if name == "jobs" else out.with_stem(f"{out.stem}_landscape"))


if __name__ == "__main__":
    main()
