"""Table 7: what orthogonalisation costs the server, for the sizes of the paper's models.

    python experiments/orthofl/table_7.py

The projection of one model's shift on the complement of another change, layer by layer, and for comparison the
addition of two vectors of the same size, interleaved in one process. Median of the rounds. Both are repeated within one
compiled call, by themselves, so that the vectors stay in the caches; a whole server step goes through more memory and
pays more for them. ``a call (ms)`` is one projection by itself, with a fresh result. Of
DistilBERT the shapes are enough: those of its adapters and its head, which are what is projected; no pretrained weights
are needed.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import HERE, common, options, parse, report

from fedjax_async import tree
from fedjax_async.geometry import project_out
from fedjax_async.models import make
from fedjax_async.models.checkpoint import EncoderConfig
from fedjax_async.models.encoder import Classifier
from fedjax_async.results.figure import PALETTE, label, new, save_figure
from fedjax_async.types import Params

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
ROUNDS = {"smoke": 3, "laptop": 50, "paper": 200}
ARRIVALS = 20  # of one compiled call


def trained(spec: str, shape: tuple[int, ...], classes: int) -> Params:
    """The parameters of a model that are trained; of DistilBERT with LoRA (rank 8) drawn by shape."""
    if spec != "distilbert_lora":
        return make(spec, input_shape=shape, num_classes=classes).init(jax.random.key(0))
    net = Classifier(DISTILBERT, classes, 8, 2.0, "cls", True)
    shapes = jax.eval_shape(net.init, jax.random.key(0), jnp.zeros((1, *shape), jnp.int32))["params"]
    return jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype), shapes)


def added(one: Params, other: Params) -> Params:
    """Leafwise sum."""
    return jax.tree.map(jnp.add, one, other)


def in_turn(function: Callable[[Params, Params], Params]) -> Callable[[Params, Params], Params]:
    """``other <- function(one, other)``, for each of the arrivals of one compiled call."""
    return jax.jit(lambda one, other: jax.lax.fori_loop(0, ARRIVALS, lambda _, last: function(one, last), other))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds of ours and of the paper's, a task a group of bars, on a logarithmic axis."""
    figure, axes = new(7.0, 3.6)
    place = np.arange(len(rows))
    bars = ("projection (ms)", "addition (ms)", "a call (ms)", "paper (ms)")
    for index, column in enumerate(bars):
        axes.bar(
            place + 0.2 * index,
            [row[column] for row in rows],
            0.18,
            label=column.removesuffix(" (ms)"),
            color=PALETTE[index],
        )
    axes.set_yscale("log")
    axes.set_xticks(place + 0.3, [f"{row['task']}\n{row['parameters']:,}" for row in rows])
    figure.legend(loc="outside upper center", frameon=False, ncols=len(bars))
    label(axes, "task and number of parameters", "milliseconds")
    save_figure(figure, path)


def main() -> None:
    """Time every model's tree, in one process."""
    given = parse(options(__doc__, "table_7"))
    with (HERE / "paper_table_7.csv").open(encoding="utf-8", newline="") as file:
        paper = {row["dataset"]: row for row in csv.DictReader(file)}
    chosen = ["mnist"] if given.scale == "smoke" else list(MODELS)
    rows: list[dict[str, Any]] = []
    alone, project, add = jax.jit(project_out), in_turn(project_out), in_turn(added)
    for name in chosen:
        spec, shape, classes = MODELS[name]
        params = trained(spec, shape, classes)
        other = jax.tree.map(lambda leaf: jnp.cos(leaf + 1), params)
        calls = {
            "alone": lambda p=params, o=other: alone(p, o),
            "project": lambda p=params, o=other: project(p, o),
            "add": lambda p=params, o=other: add(p, o),
        }
        seconds = {key: statistics.median(each) for key, each in common.interleave(calls, ROUNDS[given.scale]).items()}
        projected, summed = seconds["project"] / ARRIVALS, seconds["add"] / ARRIVALS
        rows.append({
            "task": name,
            "model": spec,
            "parameters": tree.num_scalars(params),
            "projection (ms)": 1e3 * projected,
            "a call (ms)": 1e3 * seconds["alone"],
            "addition (ms)": 1e3 * summed,
            "projection / addition": projected / summed,
            "paper's parameters": int(paper[name]["trained_parameters"]),
            "paper (ms)": 1e3 * float(paper[name]["seconds"]),
            "ours / paper": projected / float(paper[name]["seconds"]),
            "a call / paper": seconds["alone"] / float(paper[name]["seconds"]),
        })  # fmt: skip
    draw(rows, given.out / "table_7.png")
    report(rows, given)


if __name__ == "__main__":
    main()
