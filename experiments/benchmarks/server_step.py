"""The server's cost of an arrival, in milliseconds, with the optimiser run once a step or at every arrival.

    python experiments/benchmarks/server_step.py             # half a minute on 2 idle cores
    python experiments/benchmarks/server_step.py --smoke     # seconds

One compiled call applies the uploads of several server steps one after the other, as in the engine: each is read from a
table and received, and every K-th closes a step. *Once a step* is the package's way: ``receive`` accumulates, and
``close`` runs where a step closes. *Every arrival* computes ``close`` at each arrival and uses its result only where
the step closes, as a rule of one function has to. The script checks that both end with the same params. Calls are
interleaved within one process. The ratio is computed within each repeat; the table has its median over the repeats.

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
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import hardware, interleave, write_table

from fedjax_async.base import tree
from fedjax_async.base.registry import spec as spec_of
from fedjax_async.server import SERVERS
from fedjax_async.types import Arrival, Facts, ServerAlgorithm

CLIENTS = 4  # number of uploads in the table, read in turn
WAYS = ("once a step", "every arrival")


def model_of(size: int) -> Any:
    """A kernel and a bias with ``size`` parameters together."""
    width = max(1, round(0.9 * size))
    return {"kernel": jnp.ones(width), "bias": jnp.ones(size - width)}


def close_in_step(rule: ServerAlgorithm, state: Any, closes: Any) -> Any:
    """Compute ``close`` only where the step closes."""
    assert rule.close is not None
    return tree.when(closes, lambda state: rule.close(state, ())[0], state)


def close_always(rule: ServerAlgorithm, state: Any, closes: Any) -> Any:
    """Compute ``close`` at every arrival, and use the result where the step closes."""
    assert rule.close is not None
    return tree.where(closes, rule.close(state, ())[0], state)


def call_of(way: str, method: str, size: int, buffer: int, steps: int) -> Callable[[], Any]:
    """A compiled call of ``steps`` server steps with ``buffer`` arrivals each."""
    rule = spec_of("method", SERVERS, method).make()
    close = close_in_step if way == "once a step" else close_always

    @jax.jit
    def run(params: Any, uploads: Any) -> Any:
        def arrive(p: Any, state: Any) -> Any:
            row, closes = p % CLIENTS, (p + 1) % buffer == 0
            upload = tree.gather(uploads, row)
            arrival = Arrival(upload, params, jnp.int32(1), jnp.float32(1), row, jnp.float32(p), closes)
            state, _, _ = rule.receive(state, (), arrival)
            return close(rule, state, closes)

        state, _ = rule.init(params, Facts(num_clients=CLIENTS, every_closes=buffer == 1))
        return rule.params(lax.fori_loop(0, steps * buffer, arrive, state))

    params = model_of(size)
    scales = 1e-3 * jnp.arange(1.0, CLIENTS + 1)
    uploads = jax.tree.map(lambda leaf: scales[:, None] * leaf[None], params)
    return lambda: run(params, uploads)


def rows_of(a: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method."""
    rows = []
    for method in a.methods:
        calls = {way: call_of(way, method, a.size, a.buffer, a.steps) for way in WAYS}
        for have, want in zip(*(jax.tree.leaves(call()) for call in calls.values()), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-6)
        seconds = {way: np.array(values) for way, values in interleave(calls, a.repeats).items()}
        ms = {way: 1e3 * float(np.median(values)) / (a.steps * a.buffer) for way, values in seconds.items()}
        ratio = float(np.median(seconds[WAYS[1]] / seconds[WAYS[0]]))
        rows.append({"method": method, "parameters": a.size, "buffer": a.buffer}
                    | {f"{way}, ms an arrival": ms[way] for way in WAYS} | {"ratio": ratio})  # fmt: skip
    return rows


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2_000_000, help="parameters of the model")
    parser.add_argument("--buffer", type=int, default=10, help="K, arrivals per server step")
    parser.add_argument("--steps", type=int, default=5, help="server steps per call")
    parser.add_argument("--methods", nargs="+", default=["fedbuff", "fedavgm", "fedadagrad", "fedadam", "fedyogi"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/server_step.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.size, a.buffer, a.steps, a.repeats = 1000, 3, 2, 1
    rows = rows_of(a)
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "server_step.csv")
    else:
        print(rows, hardware(), sep="\n")


if __name__ == "__main__":
    main()
