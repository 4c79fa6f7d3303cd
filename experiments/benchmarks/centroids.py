"""The cost of weight clustering with pruning: ms per call for the 256,830-parameter LeNet, on one core.

    python experiments/benchmarks/centroids.py             # half a minute
    python experiments/benchmarks/centroids.py --smoke     # seconds

A call clusters the five weight layers of one node (``compress.wcp``). *Cold* starts from random entries, *warm* from
the tables of earlier weights, a tenth of their spread away. All iterations run (tolerance 0), except in the rows *stops
at 5 %* and *as released*, where the loop stops when the loss changes little. *One* is one node in one compiled call;
*in turn* and *vmapped* are several nodes in one compiled call, one after the other within the program or batched.
*Matrix* is a plain PyTorch version that compares every weight with every centroid, with the same iterations. Calls are
interleaved within one process. Times are processor times: equal to elapsed times on an idle core, and not increased by
other processes. The table has the median and the minimum over the repeats.

Measured numbers: README.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import hardware, interleave, write_table

from fedjax_async.compress import is_weight, lookup, wcp
from fedjax_async.models import make

Call = Callable[[], Any]


def one_core() -> None:
    """Bind this process to one core; call it before JAX starts its threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def moved(params: Any, key: Any) -> Any:
    """The params after a random change of a tenth of each layer's standard deviation."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    changed = [x + 0.1 * jnp.std(x) * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)]
    return jax.tree.unflatten(structure, changed)


def ways(run: Callable[..., Any], nodes: int, *stacked: Any) -> dict[str, tuple[int, Call]]:
    """One node alone, and all nodes in turn and vmapped: way -> (number of nodes, call)."""
    first = jax.tree.map(lambda leaf: leaf[0], stacked)
    alone, looped, batched = jax.jit(run), jax.jit(lambda *a: lax.map(lambda row: run(*row), a)), jax.jit(jax.vmap(run))
    return {
        "one": (1, lambda: alone(*first)),
        "in turn": (nodes, lambda: looped(*stacked)),
        "vmapped": (nodes, lambda: batched(*stacked)),
    }


def matrix_call(params: Any, k: int, max_iter: int) -> Call:
    """PyTorch with a matrix of distances ``[D, K]`` for each layer."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    layers = [torch.from_numpy(np.array(leaf).ravel()) for leaf in jax.tree.leaves(params) if is_weight((), leaf)]
    starts = [torch.from_numpy(rng.choice(layer.numpy(), k - 1)) for layer in layers]

    def cluster(x: Any, start: Any) -> Any:
        table = torch.cat([torch.zeros(1), start])
        for _ in range(max_iter):
            label = (x[:, None] - table[None, :]).abs().argmin(dim=1)
            for j in range(1, k):
                members = x[label == j]
                if len(members):
                    table[j] = members.mean()
        return table, (x[:, None] - table[None, :]).abs().argmin(dim=1)

    return lambda: [cluster(x, start) for x, start in zip(layers, starts)]


def calls_of(a: argparse.Namespace) -> dict[tuple[str, str], tuple[int, Call]]:
    """(What, way) -> the number of models that a call clusters, and the call."""
    model = make(a.model)
    keys = jax.random.split(jax.random.key(0), a.nodes)
    params = jax.jit(jax.vmap(model.init))(keys)
    weigh = partial(wcp, k=a.k, max_iter=a.max_iter)
    tables = jax.jit(jax.vmap(lambda p, key: weigh(p, key=key, max_iter=20).tables))(params, keys)
    later = jax.vmap(moved)(params, keys)
    clustered = jax.jit(jax.vmap(lambda p, g: weigh(p, init=g)))(later, tables)
    found: dict[tuple[str, str], tuple[int, Call]] = {}

    def add(what: str, run: Callable[..., Any], *stacked: Any) -> None:
        found.update({(what, way): call for way, call in ways(run, a.nodes, *stacked).items()})

    add("cold", lambda p, key: weigh(p, key=key, tolerance=0.0), params, keys)
    add("warm", lambda p, g: weigh(p, init=g, tolerance=0.0), later, tables)
    add("warm, stops at 5 %", lambda p, g: weigh(p, init=g), later, tables)
    add("warm, as released", lambda p, g, key: weigh(p, init=g, key=key, reference="released"), later, tables, keys)
    add("lookup", lookup, clustered)
    if importlib.util.find_spec("torch") is not None:
        found["matrix, cold", "one"] = (1, matrix_call(jax.tree.map(lambda leaf: leaf[0], params), a.k, a.max_iter))
    return found


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5_cifar")
    parser.add_argument("--k", type=int, default=32, help="centroids per layer")
    parser.add_argument("--max-iter", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--all-cores", action="store_true", help="use all cores [one]")
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/centroids.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.model, a.k, a.nodes, a.repeats = "logistic", 4, 2, 1
    if not a.all_cores:
        one_core()
    calls = calls_of(a)
    seconds = interleave({name: call for name, (_, call) in calls.items()}, a.repeats, clock=time.process_time)
    rows = []
    for (what, way), (count, _) in calls.items():
        values = 1e3 * np.array(seconds[what, way]) / count
        rows.append({"what": what, "run": way, "model": a.model, "k": a.k, "nodes": count,
                     "ms a call": float(np.median(values)), "least": float(values.min())})  # fmt: skip
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "centroids.csv")
    else:
        print(rows, hardware(), sep="\n")


if __name__ == "__main__":
    main()
