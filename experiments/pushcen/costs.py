"""Tables 2 and 3, bytes of Table 6: the cost of a push and of a local step, at the paper's setting; no training.

    python experiments/pushcen/costs.py

Bytes of the messages to 10 receivers: by eq. 13 (``compress.values_bits``), and as sent, with header, lengths and
checksum (``most_bits``). The paper's ResNet-18 rows come from its released code, which clusters only weight matrices,
without the shortcuts. DivShare sends one of its five fragments to each receiver.

Operations: two for every multiplication of a convolution or matrix product, counted from the shapes in the traced
model. The backward pass has twice the operations of the forward pass, less the gradient with respect to the inputs.
XLA's count is for one unrolled step with ``lax`` convolutions. It includes all other operations of a step and leaves
out products with padding.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from study import HERE, parse_costs, report

from fedjax_async.compress import centroids, most_bits, values_bits
from fedjax_async.models import make
from fedjax_async.theory import training_over_clustering
from fedjax_async.types import Model, Params

RECEIVERS, BATCH, FRAGMENTS, CENTROIDS, ITERATIONS = 10, 32, 5, 32, 3

# data set -> model, its options, and the mean number of training examples of a client (80 % of its part)
NETWORKS = {
    "cifar10": ("lenet5_cifar:lowering=lax", {"num_classes": 10, "input_shape": (32, 32, 3)}, 400),
    "cifar100": ("resnet18:variant=full,lowering=lax", {"num_classes": 100, "input_shape": (32, 32, 3)}, 800),
    "tiny_imagenet": ("resnet18:variant=full,lowering=lax", {"num_classes": 200, "input_shape": (64, 64, 3)}, 1600),
}
SMOKE = {"smoke": ("logistic", {"num_classes": 10, "input_shape": (28, 28, 1)}, 400)}


def paper() -> dict[tuple[str, str, str, str], float]:
    """The paper's numbers, by (what, dataset, setting, method)."""
    with (HERE / "paper_values.csv").open(encoding="utf-8", newline="") as file:
        return {tuple(list(row.values())[:4]): float(row["value"]) for row in csv.DictReader(file)}  # type: ignore[misc]


# --- bytes --------------------------------------------------------------------------------------


def shared(model: Model) -> Params:
    """Shapes of the parameters that are sent: all but running statistics."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    return params if model.train is None else params["params"]


def megabytes(params: Params, k: int, chosen: Callable[..., bool]) -> tuple[float, float]:
    """MB of one push of a clustered model: by eq. 13, and as sent."""

    def message(params: Params) -> Any:
        start = jax.tree.map(lambda leaf: jnp.zeros(k), centroids.parts_of(params, chosen)[1])
        return centroids.payloads(centroids.wcp(params, k, init=start, chosen=chosen))

    payload = jax.eval_shape(message, params)
    scale = RECEIVERS / 8 / 1e6
    return int(values_bits(payload)) * scale, int(most_bits(payload)) * scale


def sizes(dataset: str, model: Model) -> Iterator[dict[str, Any]]:
    """Rows of Table 2 (K = 32) and of Table 6 (other K)."""
    params, known = shared(model), paper()
    dense = RECEIVERS * 4 * sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    base = megabytes(params, 32, centroids.is_weight_released)[0]

    def row(method: str, k: int | None, values: float, wire: float, theirs: float | None) -> dict[str, Any]:
        return {
            "table": "2" if k in (None, 32) else "6",
            "dataset": dataset,
            "method": method,
            "K": k,
            "ours": values,
            "sent": wire,
            "paper": theirs,
            "unit": "MB a push",
            "ours / paper": None if theirs is None else values / theirs,
            "to PushCen's": values / base,
        }

    for k in (8, 16, 32, 64):
        released = megabytes(params, k, centroids.is_weight_released)
        theirs = known.get(("per_push_10_neighbours", dataset, f"K={k}", "pushcen"))
        yield row("pushcen, as released", k, *released, theirs)
        if (ours := megabytes(params, k, centroids.is_weight)) != released:
            yield row("pushcen, all weights clustered", k, *ours, None)
    for method, share in (("divshare", 1 / FRAGMENTS), ("async_dfedavg", 1.0), ("swift", 1.0)):
        theirs = known.get(("per_push_10_neighbours", dataset, "", method))
        yield row(method, None, dense * share, dense * share, theirs)


# --- operations ---------------------------------------------------------------------------------


def products(jaxpr: Any, with_padding: bool = True) -> Iterator[float]:
    """Operations of every convolution and matrix product of a traced function, in order."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from products(getattr(inner, "jaxpr", inner), with_padding)
        name = equation.primitive.name
        if name in ("conv_general_dilated", "dot_general"):
            left, right, out = (tuple(v.aval.shape) for v in (*equation.invars, *equation.outvars))
            if name == "dot_general":
                inside = math.prod(left[axis] for axis in equation.params["dimension_numbers"][0][0])
            else:
                inside = math.prod(right) // right[equation.params["dimension_numbers"].rhs_spec[0]]
                inside *= 1.0 if with_padding else valid_share(equation.params, left, right)
            yield 2.0 * math.prod(out) * inside


def valid_share(params: Any, image: tuple[int, ...], kernel: tuple[int, ...]) -> float:
    """The share of a convolution's products without a factor from the padding."""
    numbers, share = params["dimension_numbers"], 1.0
    sides = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], params["window_strides"], params["padding"])
    for image_axis, kernel_axis, stride, (before, after) in sides:
        size, width = image[image_axis], kernel[kernel_axis]
        places = (size + before + after - width) // stride + 1
        at = stride * np.arange(places)[:, None] + np.arange(width) - before
        share *= float(((at >= 0) & (at < size)).mean())
    return share


def step_of(model: Model, x: Any, y: Any) -> Callable[[Params], Params]:
    """One SGD step on a batch, as a function of the parameters."""

    def loss(params: Params) -> Any:
        if model.train is None:
            outputs = model.apply(params, x)
        else:
            outputs = model.train(params, x, jax.random.key(0), jnp.ones(len(y), jnp.bool_))[0]
        return jnp.mean(model.loss(outputs, y))

    return lambda params: jax.tree.map(lambda w, g: w - 0.001 * g, params, jax.grad(loss)(params))


def operations(dataset: str, model: Model, shape: tuple[int, ...], examples: int) -> Iterator[dict[str, Any]]:
    """The row of Table 3 for a data set."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    x, y = np.zeros((BATCH, *shape), np.float32), np.zeros(BATCH, np.int32)
    traced = jax.make_jaxpr(lambda params: model.apply(params, x))(params).jaxpr
    counted, valid = list(products(traced)), list(products(traced, with_padding=False))
    forward = sum(counted)
    step, without = 3 * forward - counted[0], 3 * sum(valid) - valid[0]
    analysis = jax.jit(step_of(model, x, y)).lower(params).cost_analysis()
    update = step * math.ceil(examples / BATCH)
    theirs = paper().get(("compute", dataset, "per update", "pushcen"))
    yield {
        "table": "3",
        "dataset": dataset,
        "method": "local training",
        "unit": "GFLOP",
        "forward, one example": forward / BATCH / 1e9,
        "a step": step / 1e9,
        "without padding": without / 1e9,
        "XLA's count": float(analysis["flops"]) / 1e9,
        "XLA / ours": float(analysis["flops"]) / without,
        "ours": update / 1e9,
        "paper": theirs,
        "ours / paper": None if theirs is None else update / 1e9 / theirs,
        "training / clustering (eq. 21)": training_over_clustering(examples, 1, ITERATIONS, CENTROIDS),
        "paper, in forward passes": None if theirs is None else theirs * 1e9 / (forward / BATCH),
    }


def main() -> None:
    """Count, print, write."""
    given = parse_costs(__doc__, "costs")
    rows: list[dict[str, Any]] = []
    for count in (sizes, operations):
        for dataset, (spec, options, examples) in (SMOKE if given.scale == "smoke" else NETWORKS).items():
            model = make(spec, **options)
            more = () if count is sizes else (options["input_shape"], examples)
            rows += partial(count, dataset, model)(*more)
    columns = dict.fromkeys(key for row in rows for key in row)
    report([{key: row.get(key) for key in columns} for row in rows], given)


if __name__ == "__main__":
    main()
