"""A synchronous round in DrJAX beside the engine: client updates a second, and a second of processor time.

    python experiments/benchmarks/drjax_round.py               # three models, some minutes
    python experiments/benchmarks/drjax_round.py --smoke       # does it run

DrJAX (``pip install drjax``) has primitives of rounds and no clock: broadcast, a map over clients, a mean. Its program
here is a compiled round of FedAvg as its users write it, with models of flax: every client makes 10 SGD steps of batch
32 on its own 96 random images. The engine trains as many jobs of FedAsync with constant delays, as in
``throughput.py``. *vmap* is the same round written with ``jax.vmap`` alone. A timed call is 10 rounds, of LeNet-5 two.
All take turns in one process, after a first call that compiles.

Where other programs use the machine, compare the processor times: they count all threads of this process alone.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import both_clocks, interleave, write_table
from flax import linen as nn
from throughput import BATCH, SHARD, STEPS, decode, experiment, make_data

from fedjax_async.config import execute

CLIENTS = 100
ROUNDS = {"logistic": 10, "mlp": 10, "lenet5": 2}  # of a timed call


class Lenet5(nn.Module):
    """Classic LeNet-5 with ReLU and max-pooling, 61,706 parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, 28, 28, 1] -> [B, 10]``."""
        for channels, padding in ((6, "SAME"), (16, "VALID")):
            x = nn.max_pool(nn.relu(nn.Conv(channels, (5, 5), padding=padding)(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class Dense(nn.Module):
    """Dense layers with ReLU between them; the last has 10 outputs."""

    hidden: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[B, 28, 28, 1] -> [B, 10]``."""
        x = x.reshape(len(x), -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


WAYS = ("engine", "vmap", "DrJAX")
MODELS: dict[str, nn.Module] = {"logistic": Dense(), "mlp": Dense((64,)), "lenet5": Lenet5()}


def local_training(model: nn.Module) -> Callable[..., Any]:
    """``(params, x [n, ...], y [n], key) -> params`` after the local steps of one client."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        scores: Any = model.apply({"params": params}, decode(x))
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    def train(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        per_epoch = SHARD // BATCH
        keys = jax.random.split(key, -(-STEPS // per_epoch))
        batches = jax.vmap(lambda key: jax.random.permutation(key, SHARD))(keys).reshape(-1, BATCH)[:STEPS]

        def step(params: Any, rows: jax.Array) -> tuple[Any, None]:
            slope = jax.grad(loss)(params, x[rows], y[rows])
            return jax.tree.map(lambda w, g: w - 0.01 * g, params, slope), None

        return jax.lax.scan(step, params, batches)[0]

    return train


def rounds(model: nn.Module, clients: int) -> dict[str, Callable[..., Any]]:
    """A compiled round ``(params, x [N, n, ...], y [N, n], keys [N]) -> params``, by how it is written."""
    train = local_training(model)

    def plain(params: Any, x: jax.Array, y: jax.Array, keys: jax.Array) -> Any:
        trained = jax.vmap(train, in_axes=(None, 0, 0, 0))(params, x, y, keys)
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), trained)

    found = {"vmap": jax.jit(plain)}
    if importlib.util.find_spec("drjax") is not None:
        drjax = importlib.import_module("drjax")

        @drjax.program(placements={"clients": clients})
        def program(params: Any, x: jax.Array, y: jax.Array, keys: jax.Array) -> Any:
            return drjax.reduce_mean(drjax.map_fn(train, (drjax.broadcast(params), x, y, keys)))

        found["DrJAX"] = jax.jit(program)
    return found


def measure(name: str, clients: int, repeats: int) -> dict[str, Any]:
    """One row: the rates of the engine and of the rounds, in wall and in processor seconds."""
    data = make_data(name, clients)
    rows = np.stack([data.order[start : start + SHARD] for start in data.offset])
    x, y, key = jnp.asarray(data.x[rows]), jnp.asarray(data.y[rows]), jax.random.key(0)
    jobs = clients * ROUNDS[name]
    model, run = MODELS[name], experiment(name, data, "constant", "fedasync", jobs)
    params = model.init(key, decode(x[0, :1]))["params"]
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, run.params)]
    assert sizes[0] == sizes[1], "the models must have the same size"

    def repeated(one: Callable[..., Any]) -> Any:
        trained = params
        for k in range(ROUNDS[name]):
            trained = one(trained, x, y, jax.random.split(jax.random.fold_in(key, k), clients))
        return trained

    calls: dict[str, Callable[[], Any]] = {"engine": lambda: execute(run)}
    calls |= {way: partial(repeated, one) for way, one in rounds(model, clients).items()}
    found = {way: jobs / np.asarray(times) for way, times in interleave(calls, repeats, clock=both_clocks).items()}
    row: dict[str, Any] = {"model": name, "clients": clients}
    for clock, unit in enumerate(("1/s", "1/processor s")):
        rates = {way: found[way][:, clock] if way in found else np.full(repeats, np.nan) for way in WAYS}
        row |= {f"{way} ({unit})": float(np.median(rates[way])) for way in WAYS}
        row[f"engine / DrJAX ({unit})"] = float(np.median(rates["engine"] / rates["DrJAX"]))
    return row


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/drjax_round.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="one small model, one repeat; writes if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.models, a.clients, a.repeats = ["logistic"], 4, 1
    table: list[dict[str, Any]] = []
    for name in a.models:
        table.append(measure(name, a.clients, a.repeats))
        if a.out is not None or not a.smoke:
            write_table(table, a.out or Path(__file__).parent / "results" / "drjax_round.csv")
        else:
            print(table)


if __name__ == "__main__":
    main()
