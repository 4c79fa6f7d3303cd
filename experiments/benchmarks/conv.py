"""Lowerings of the convolution: time per client of forward + backward, layer by layer and for a whole training step.

    python experiments/benchmarks/conv.py                # some minutes on 2 idle cores
    python experiments/benchmarks/conv.py --smoke        # seconds

Layers: value and gradients with respect to kernel, bias and (except in first layers) input, for one client and for 8
clients with their own kernels, batch 32. Steps: LeNet-5, K local SGD steps in one ``fori_loop``, for clients
stacked (``vmap``), one after the other in one program (``map``), and one after the other on each of several CPU devices
(``map on D devices``), beside a lean PyTorch loop where PyTorch is installed.

Expected on 2 AVX-512 cores (ms per LeNet-5 client step): lax 12-19, im2col 4-6, tiled 1.2-1.4,
tiled + map on 2 devices 0.7, PyTorch 2.2-2.8.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import interleave, write_table

from fedjax_async.models import LOWERINGS, MODELS, Conv, ConvPool

# name: module, input shape, whether the input needs a gradient
LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, int, int], bool]] = {
    "lenet5 conv1 + pool": (lambda how: ConvPool(6, 5, "SAME", lowering=how), (28, 28, 1), False),
    "lenet5 conv2 + pool": (lambda how: ConvPool(16, 5, "VALID", lowering=how), (14, 14, 6), True),
    "cnn conv1": (lambda how: Conv(32, 3, padding="VALID", lowering=how), (32, 32, 3), False),
    "cnn conv2 + pool": (lambda how: ConvPool(64, 3, "VALID", lowering=how), (30, 30, 32), True),
}


def layer_call(name: str, lowering: str, clients: int, batch: int) -> Callable[[], Any]:
    """A compiled call: forward and backward of one layer for ``clients`` clients, on random numbers."""
    make, shape, needs_dx = LAYERS[name]
    module = make(lowering)
    keys = jax.random.split(jax.random.key(0), clients)
    x = jax.random.normal(jax.random.key(1), (clients, batch, *shape))
    params = jax.vmap(lambda key: module.init(key, jnp.zeros((1, *shape)))["params"])(keys)

    def one(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.square(module.apply({"params": params}, x)).sum()

        return jax.value_and_grad(loss, argnums=(0, 1) if needs_dx else 0)(params, x)

    run = jax.jit(jax.vmap(one))
    return lambda: run(params, x)


def layer_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name in arguments.layers:
        for clients in arguments.clients:
            calls = {how: layer_call(name, how, clients, arguments.batch) for how in arguments.lowerings}
            times = interleave(calls, arguments.repeats)
            for how, seconds in times.items():
                ms = 1e3 * float(np.median(seconds)) / clients
                rows.append({"what": name, "lowering": how, "clients": clients, "run": "vmap", "ms": ms})
    return rows


def step_calls(lowering: str, clients: int, batch: int, steps: int) -> dict[str, Callable[[], Any]]:
    """Calls of ``steps`` local SGD steps of LeNet-5 for every client, one for each way of running several clients."""
    model = MODELS["lenet5"](lowering=lowering)
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), clients))
    x = jax.random.normal(jax.random.key(1), (clients, steps, batch, 28, 28, 1))
    y = jax.random.randint(jax.random.key(2), (clients, steps, batch), 0, 10)

    def job(params: Any, x: Any, y: Any) -> Any:
        def body(k: Any, params: Any) -> Any:
            gradient = jax.grad(lambda p: model.loss(model.apply(p, x[k]), y[k]).mean())(params)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)

        return lax.fori_loop(0, steps, body, params)

    def in_turn(*arrays: Any) -> Any:
        return lax.map(lambda row: job(*row), arrays)

    stacked, mapped, data = jax.jit(jax.vmap(job)), jax.jit(in_turn), (params, x, y)
    calls = {"vmap": lambda: stacked(*data), "map": lambda: mapped(*data)}
    devices = jax.devices()
    if len(devices) > 1 and clients % len(devices) == 0:
        mesh = Mesh(np.array(devices), ("jobs",))
        spread = jax.jit(jax.shard_map(in_turn, mesh=mesh, in_specs=P("jobs"), out_specs=P("jobs"), check_vma=False))
        placed = jax.device_put(data, NamedSharding(mesh, P("jobs")))
        calls[f"map on {len(devices)} devices"] = lambda: spread(*placed)
    return calls


def step_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for clients in arguments.widths:
        calls: dict[str, Callable[[], Any]] = {}
        for how in arguments.lowerings:
            for run, call in step_calls(how, clients, arguments.batch, arguments.steps).items():
                calls[f"{how}/{run}"] = call
        for name, seconds in interleave(calls, arguments.repeats).items():
            how, run = name.split("/")
            ms = 1e3 * float(np.median(seconds)) / clients / arguments.steps
            rows.append({"what": "lenet5 step", "lowering": how, "clients": clients, "run": run, "ms": ms})
    return rows


TORCH = """
import sys, time, torch
from torch import nn
batch, steps, repeats = map(int, sys.argv[1:])
net = nn.Sequential(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
                    nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(),
                    nn.Linear(84, 10))
params = list(net.parameters())
x, y = torch.randn(steps, batch, 1, 28, 28), torch.randint(0, 10, (steps, batch))
times = []
for _ in range(repeats + 2):
    start = time.perf_counter()
    for k in range(steps):
        gradient = torch.autograd.grad(nn.functional.cross_entropy(net(x[k]), y[k]), params)
        with torch.no_grad():
            for p, g in zip(params, gradient):
                p.sub_(g, alpha=0.01)
    times.append((time.perf_counter() - start) / steps * 1e3)
print(sorted(times[2:])[repeats // 2])
"""


def torch_row(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The row of PyTorch, from a separate process: in one process its threads and those of JAX slow each other down."""
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: no row for it (pip install torch)")
        return []
    numbers = [str(n) for n in (arguments.batch, arguments.steps, arguments.repeats)]
    done = subprocess.run([sys.executable, "-c", TORCH, *numbers], check=True, capture_output=True, text=True)
    return [{"what": "lenet5 step", "lowering": "PyTorch", "clients": 1, "run": "loop", "ms": float(done.stdout)}]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", default="conv.csv", help="CSV file (default conv.csv)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats; medians are reported")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="local steps in one fori_loop")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="clients in the table of layers")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[1, 2, 4, 8, 100], help="clients in the table of steps"
    )
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--lowerings", nargs="+", default=list(LOWERINGS), choices=list(LOWERINGS))
    parser.add_argument("--devices", type=int, default=os.cpu_count(), help="virtual CPU devices (default: cores)")
    parser.add_argument("--smoke", action="store_true", help="a tiny run that only shows that everything works")
    arguments = parser.parse_args(argv)
    if arguments.smoke:
        arguments.repeats, arguments.batch, arguments.steps = 1, 2, 2
        arguments.clients, arguments.widths, arguments.lowerings = [2], [2], ["im2col", "tiled"]
        arguments.layers = arguments.layers[:1]
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    write_table([*layer_rows(arguments), *step_rows(arguments), *torch_row(arguments)], arguments.out)


if __name__ == "__main__":
    main()
