"""Table 7: the server's cost of orthogonalisation, for the sizes of the paper's models.

    python experiments/orthofl/table_7.py

Four measures of one projection, layer by layer, medians of rounds:

- ``projection (ms)``: by itself, repeated within one compiled call, so that the vectors stay in the caches. Beside it
  is the addition of two vectors of the same size, repeated in the same way.
- ``in a server step (ms)``: the time of a step of OrthoFL's server less that of the same step without the projection
  (``such a step (ms)``). The step is a loop like the engine's: it reads changes and start models from a batch, and
  reads and writes a row of weights for each client. One compiled call takes many arrivals, as in large batches (many
  clients, an accelerator, sweeps).
- ``in a lone step (ms)``: the same, where each arrival is a separate call and the caches were emptied before. This is
  the case on a CPU with batches of one or two clients (few clients or a large model), because training runs in between.
  Beside it is one addition under the same conditions, with a fresh result.
- ``a call (ms)``: one projection as a separate call, with a fresh result.

The steps with and without the projection are interleaved. The other calls are interleaved before them, because a step
evicts their data from the caches.

For DistilBERT the shapes of its adapters and its head are enough, because only these are projected. No pretrained
weights are needed.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import HERE, common, options, parse, report

from fedjax_async.base import tree
from fedjax_async.engine.sending import read_rows
from fedjax_async.geometry import project_out
from fedjax_async.models import make
from fedjax_async.models.encoder import Classifier
from fedjax_async.models.pretrained import EncoderConfig
from fedjax_async.results.figure import PALETTE, label, new, save_figure
from fedjax_async.server import closed
from fedjax_async.server.orthofl import Combine, by_average, moving_average, orthogonal, plus
from fedjax_async.server.transforms import chain, scale_by_staleness, staleness_weight
from fedjax_async.types import Array, Arrival, Facts, Params, State

# The paper's models: spec, shape of an input, classes.
MODELS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "mnist": ("lenet5_orthofl", (28, 28, 1), 10),
    "har": ("resnet18_1d:width=0.174", (128, 9), 6),
    "20newsgroups": ("distilbert_lora", (64,), 20),
    "cifar10": ("vgg11", (32, 32, 3), 10),
    "cifar100": ("mobilenetv2", (32, 32, 3), 100),
}
DISTILBERT = EncoderConfig(
    layers=6, width=768, heads=12, intermediate=3072, vocabulary=30522, positions=512, token_types=0
)
REPEATS = {"smoke": 3, "laptop": 50, "paper": 200}
ARRIVALS = 20  # in one compiled call
CLIENTS = 4  # the server has memory for each
BARS = ("addition", "projection", "in a server step", "in a lone step", "a call", "paper")
FILLER = 2**28  # bytes to read, and as many to write: together larger than the caches


def trained(spec: str, shape: tuple[int, ...], classes: int) -> Params:
    """The trainable parameters of a new model; for DistilBERT with LoRA (rank 8) random ones of the right shapes."""
    if spec != "distilbert_lora":
        return make(spec, input_shape=shape, num_classes=classes).init(jax.random.key(0))
    shapes = distilbert(shape, classes)[1]["params"]
    return jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype), shapes)


def distilbert(shape: tuple[int, ...], classes: int) -> tuple[Classifier, Params]:
    """DistilBERT with LoRA (rank 8) and the shapes of its variables; ``params`` are the trainable ones."""
    net = Classifier(DISTILBERT, classes, 8, 2.0, "cls", True)
    return net, jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, *shape), jnp.int32))


def in_turn(function: Callable[[Params, Params], Params]) -> Callable[[Params, Params], Params]:
    """A compiled call that repeats ``other <- function(one, other)`` ``ARRIVALS`` times."""
    return jax.jit(lambda one, other: jax.lax.fori_loop(0, ARRIVALS, lambda _, last: function(one, last), other))


def shifted(change: Params, now: Params, before: Params) -> Params:
    """The move of a client's start model without the projection: its own change plus the whole shift."""
    return jax.tree.map(lambda d, w, seen: d + (w - seen), change, now, before)


def serving(params: Params, combine: Combine) -> Callable[[int], State]:
    """``call(arrivals)`` applies that many arrivals of ``CLIENTS`` clients in turn, and keeps its state for the next
    call."""
    average = moving_average(chain(), scale_by_staleness(staleness_weight("polynomial"), 0.6))
    server = by_average(average, combine)

    def one(k: Array, served: State, changes: Params, starts: Params) -> State:
        state, rows = served
        client = k % CLIENTS
        arrival = Arrival(
            upload=tree.gather(changes, k % 2), start=tree.gather(starts, k % 2), staleness=k % 3, weight=jnp.ones(()),
            client=client, time=jnp.zeros(()), closes=jnp.bool_(True),
        )  # fmt: skip
        state, row, _ = server.receive(state, read_rows(rows, client), arrival)
        state, row = closed(server, state, row)
        return state, tree.scatter(rows, client, row)

    def all_of_them(served: State, changes: Params, starts: Params, span: Array) -> State:
        return jax.lax.fori_loop(span[0], span[1], lambda k, served: one(k, served, changes, starts), served)

    compiled = jax.jit(all_of_them, donate_argnums=0)
    begun = server.init(params, Facts(CLIENTS, every_closes=True))
    state, row = jax.tree.map(jnp.copy, begun)  # a buffer of its own for each leaf, since they are donated
    rows = jax.tree.map(lambda leaf: jnp.stack([leaf * (1 + 0.01 * m) for m in range(CLIENTS)]), row)
    changes = jax.tree.map(lambda leaf: jnp.stack([0.01 * jnp.cos(leaf + 1), 0.01 * jnp.sin(leaf + 1)]), params)
    starts = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.99 * leaf]), params)
    now, taken = (state, rows), 0

    def call(arrivals: int) -> State:
        nonlocal now, taken
        now = compiled(now, changes, starts, np.array([taken, taken + arrivals], np.int32))
        taken += arrivals
        return now

    return call


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Our milliseconds and the paper's on a logarithmic axis, one group of bars per task."""
    figure, axes = new(7.0, 3.8)
    place = np.arange(len(rows))
    bars = [f"{name} (ms)" for name in BARS]
    for index, column in enumerate(bars):
        axes.bar(
            place + 0.14 * index,
            [row[column] for row in rows],
            0.12,
            label=column.removesuffix(" (ms)"),
            color=PALETTE[index],
        )
    axes.set_yscale("log")
    axes.set_xticks(place + 0.07 * (len(bars) - 1), [f"{row['task']}\n{row['parameters']:,}" for row in rows])
    figure.legend(loc="outside upper center", frameon=False, ncols=3)
    label(axes, "task and number of parameters", "milliseconds")
    save_figure(figure, path)


def main() -> None:
    """Time the projection of every model, in one process."""
    given = parse(options(__doc__, "table_7"))
    with (HERE / "paper_table_7.csv").open(encoding="utf-8", newline="") as file:
        paper = {row["dataset"]: row for row in csv.DictReader(file)}
    chosen = ["mnist"] if given.scale == "smoke" else list(MODELS)
    rows: list[dict[str, Any]] = []
    alone, project = jax.jit(project_out), in_turn(project_out)
    lone_addition, add = jax.jit(plus), in_turn(plus)
    filler = jnp.ones(FILLER // 4)
    empty_caches = jax.jit(jnp.negative)
    for name in chosen:
        spec, shape, classes = MODELS[name]
        params = trained(spec, shape, classes)
        other = jax.tree.map(lambda leaf: jnp.cos(leaf + 1), params)
        calls = {
            "alone": lambda p=params, o=other: alone(p, o),
            "project": lambda p=params, o=other: project(p, o),
            "add": lambda p=params, o=other: add(p, o),
        }
        served = {"step": serving(params, orthogonal("layer")), "step without": serving(params, shifted)}
        steps = {key: partial(call, ARRIVALS) for key, call in served.items()}
        lone: dict[str, Callable[[], Any]] = {f"lone {key}": partial(call, 1) for key, call in served.items()}
        lone["lone add"] = lambda p=params, o=other: lone_addition(p, o)
        turns = REPEATS[given.scale]
        seconds = common.interleave(calls, turns) | common.interleave(steps, turns)
        seconds |= common.interleave(lone, turns, before=lambda: empty_caches(filler))
        seconds = {key: statistics.median(each) for key, each in seconds.items()}
        projected, summed, step, without = (
            seconds[key] / ARRIVALS for key in ("project", "add", "step", "step without")
        )
        lone_adds = seconds["lone step"] - seconds["lone step without"]
        theirs = float(paper[name]["seconds"])
        rows.append({
            "task": name,
            "model": spec,
            "parameters": tree.num_scalars(params),
            "projection (ms)": 1e3 * projected,
            "addition (ms)": 1e3 * summed,
            "projection / addition": projected / summed,
            "in a server step (ms)": 1e3 * (step - without),
            "such a step (ms)": 1e3 * step,
            "in a lone step (ms)": 1e3 * lone_adds,
            "such a lone step (ms)": 1e3 * seconds["lone step"],
            "a lone addition (ms)": 1e3 * seconds["lone add"],
            "in a lone step / lone addition": lone_adds / seconds["lone add"],
            "a call (ms)": 1e3 * seconds["alone"],
            "paper's parameters": int(paper[name]["trained_parameters"]),
            "paper (ms)": 1e3 * theirs,
            "projection / paper": projected / theirs,
            "in a server step / paper": (step - without) / theirs,
            "in a lone step / paper": lone_adds / theirs,
            "a call / paper": seconds["alone"] / theirs,
        })  # fmt: skip
    draw(rows, given.out / "table_7.png")
    report(rows, given)


if __name__ == "__main__":
    main()
