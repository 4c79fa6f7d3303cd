"""The cost of compressing an update: seconds of each compressor beside one local epoch of LeNet-5.

    python experiments/benchmarks/compressors.py             # minutes on 2 idle cores
    python experiments/benchmarks/compressors.py --smoke     # seconds

*One* is an update of a million parameters compressed, measured and decompressed in one compiled call, as in a run with
error feedback. *In turn* and *vmapped* are several clients' updates in one compiled call, ms per client: one after the
other within the program (``lax.scan``, as in the engine on a CPU), and batched. Nothing leaves the device. An *epoch*
is the local training of one client, ceil(images / batch) SGD steps of LeNet-5 (61,706 parameters) on 28 x 28 images by
the package's own client algorithm, alone in one compiled call. Calls are interleaved within one process. A share is
computed within each repeat; the table has its median over the repeats.

Measured numbers: README.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import hardware, interleave, write_table

from fedjax_async.base.registry import spec as spec_of
from fedjax_async.compress import COMPRESSORS, Compressor
from fedjax_async.local import local_training, run_job
from fedjax_async.models import MODELS
from fedjax_async.results import table
from fedjax_async.types import ClientData, Message

COMPRESSED = [*COMPRESSORS, "topk:ratio=0.03", "qsgd:levels=127"]


def exchange(compressor: Compressor) -> Callable[[Any, Any], Any]:
    """``(key, x) -> (x_hat, bits)``; the payload is computed once."""

    def one(key: Any, x: Any) -> Any:
        payload = lax.optimization_barrier(compressor.compress(key, x))
        return compressor.decompress(payload), compressor.bits(payload)

    return one


def update(size: int) -> Any:
    """Random numbers with magnitudes as uneven as those of an update; float32[size]."""
    first, second = jax.random.split(jax.random.key(0))
    return 1e-3 * jax.random.normal(first, (size,)) * jnp.exp(jax.random.normal(second, (size,)))


def one_call(compressor: Compressor, size: int) -> Callable[[], Any]:
    """A compiled call that compresses and decompresses one client's update."""
    run, key, x = jax.jit(exchange(compressor)), jax.random.key(1), update(size)
    return lambda: run(key, x)


def many_calls(compressor: Compressor, size: int, clients: int) -> dict[str, Callable[[], Any]]:
    """Several clients' updates in one compiled call; in turn, the decoded updates are summed, as on a server."""
    one, keys = exchange(compressor), jax.random.split(jax.random.key(1), clients)
    x = update(size)[None] * jnp.linspace(0.5, 2.0, clients)[:, None]

    def in_turn(keys: Any, x: Any) -> Any:
        def add(total: Any, row: Any) -> Any:
            decoded, bits = one(*row)
            return total + decoded, bits

        return lax.scan(add, jnp.zeros(size), (keys, x))

    stacked, looped = jax.jit(jax.vmap(one)), jax.jit(in_turn)
    return {"in turn": lambda: looped(keys, x), "vmapped": lambda: stacked(keys, x)}


def epoch_call(images: int, batch: int) -> Callable[[], Any]:
    """A compiled call that trains one local epoch of LeNet-5, as a job of the package."""
    model = MODELS["lenet5"](input_shape=(28, 28, 1), num_classes=10)
    client = local_training(model, optimizer=optax.sgd(0.01), batch_size=batch)
    key = jax.random.key(2)
    x, y = jax.random.normal(key, (images, 28, 28, 1)), jax.random.randint(key, (images,), 0, 10)
    own = ClientData(x, y, jnp.arange(images, dtype=jnp.int32), jnp.int32(0), jnp.int32(images))
    params, steps = model.init(key), math.ceil(images / batch)

    @jax.jit
    def train(params: Any, x: Any, y: Any) -> Any:
        return run_job(client, key, Message(params), (), own._replace(x=x, y=y), steps)[0]

    return lambda: train(params, x, y)


def alone_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per compressor (one update), and one for the epochs."""
    epochs = [(images, batch) for images in arguments.images for batch in arguments.batches]
    calls = {
        spec: one_call(spec_of("compress", COMPRESSORS, spec).make(), arguments.size) for spec in arguments.compressors
    }
    for images, batch in epochs:
        calls[f"{images}/{batch}"] = epoch_call(images, batch)
    seconds = {name: np.array(values) for name, values in interleave(calls, arguments.repeats).items()}
    rows = []
    for spec in arguments.compressors:
        row = {"what": spec, "run": "one", "clients": 1, "ms": 1e3 * float(np.median(seconds[spec]))}
        for images, batch in epochs:
            share = np.median(seconds[spec] / seconds[f"{images}/{batch}"])
            row[f"% of epoch {images}/{batch}"] = 100 * float(share)
        rows.append(row)
    for images, batch in epochs:
        ms = 1e3 * float(np.median(seconds[f"{images}/{batch}"]))
        name = f"epoch of {images} images, batch {batch}"
        rows.append({"what": name, "run": "one", "clients": 1, "ms": ms} | dict.fromkeys(list(rows[0])[4:], ""))
    return rows


def together_rows(arguments: argparse.Namespace, columns: list[str]) -> list[dict[str, Any]]:
    """One row per compressor for several clients, ms per client; compiled, measured and freed in turn."""
    rows = []
    for spec in arguments.together:
        calls = many_calls(spec_of("compress", COMPRESSORS, spec).make(), arguments.size, arguments.clients)
        for run, seconds in interleave(calls, arguments.repeats_together).items():
            ms = 1e3 * float(np.median(seconds)) / arguments.clients
            row = {"what": spec, "run": run, "clients": arguments.clients, "ms": ms}
            rows.append(row | dict.fromkeys(columns[4:], ""))
    return rows


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1_000_000, help="parameters of an update")
    parser.add_argument("--clients", type=int, default=100, help="clients compressed in one call (400 MB at 100)")
    parser.add_argument("--images", type=int, nargs="+", default=[600, 6000], help="images of a client")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128], help="batch sizes of the epochs")
    parser.add_argument("--compressors", nargs="+", default=COMPRESSED)
    parser.add_argument("--together", nargs="+", default=["topk", "qsgd"], help="compressors of several clients")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--repeats-together", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="CSV [results/compressors.csv beside this file]")
    parser.add_argument("--smoke", action="store_true", help="smallest sizes; writes only if --out is given")
    a = parser.parse_args()
    if a.smoke:
        a.size, a.clients, a.images, a.batches, a.repeats, a.repeats_together = 1000, 3, [20], [10], 1, 1
        a.compressors = ["topk", "qsgd"]
    rows = alone_rows(a)
    rows += together_rows(a, list(rows[0]))
    print(table(rows))
    print(hardware())
    if a.out is not None or not a.smoke:
        write_table(rows, a.out or Path(__file__).parent / "results" / "compressors.csv")


if __name__ == "__main__":
    main()
