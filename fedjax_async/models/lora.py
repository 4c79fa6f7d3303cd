"""LoRA: fine-tune any model by low-rank changes of some of its weights; only these are trained and sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import prod

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.models.norm import STATISTICS
from fedjax_async.models.weights import arrays_of, nested
from fedjax_async.models.wrap import computed_with
from fedjax_async.types import AnyArray, Array, Key, Model, Params, Path


def lora(
    model: Model,
    base: Params,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    weights: str = "*/kernel,kernel",
    trained: str = "",
) -> Model:
    """``model`` with the weights ``base``, of which a matrix ``W`` [m, n] becomes ``W + (alpha / rank) A B``.

    ``A`` [m, rank] starts from a normal distribution with variance 1 / m, ``B`` [rank, n] from zero, so that the model
    starts as ``base``. A convolution's kernel counts as a matrix [height * width * inputs, outputs], PyTorch's as
    [outputs, inputs * height * width]. ``base`` is a constant: it is neither trained nor sent. Running statistics are
    trained and sent as in ``model``.

    Args:
      base: the pretrained params, such as ``Run.params`` or what ``models.read_arrays`` and ``models.filled`` give.
      weights: paths of the adapted weights, such as ``"attention*/kernel"``; patterns joined by commas, ``*`` for any
        characters, within the params proper.
      trained: paths of leaves that are trained in full, such as a new output layer: ``"output/*"``.

    Returns: a model whose params are ``{"a": ..., "b": ..., "full": ...}``, each nested as ``base``; under ``"params"``
    if ``base`` has running statistics. What changes a private leaf of ``model`` is private.

    Raises: ``ValueError`` for a pattern that matches nothing, and for a weight of fewer than two axes.

    Source: Hu et al. (2022, LoRA), section 4.1 and the code of its authors for ``alpha``.

    >>> from fedjax_async.models import make
    >>> plain = make("mlp:hidden=32", num_classes=4, input_shape=(8, 8, 1))
    >>> adapted = lora(plain, plain.init(jax.random.key(0)), rank=2, trained="output/*")
    >>> sorted(adapted.init(jax.random.key(1))["full"]["output"])
    ['bias', 'kernel']
    """
    check.whole("rank", rank)
    check.positive("alpha", alpha)
    keeps = model.train is not None
    proper = base["params"] if keeps else base
    known = arrays_of(proper)
    adapted, full = _chosen(weights, trained, known)
    constant = jax.tree.map(jnp.asarray, proper)

    def start(key: Key) -> Params:
        a, b = _factors(key, {name: known[name] for name in adapted}, rank)
        return {"a": nested(a), "b": nested(b), "full": nested({name: jnp.asarray(known[name]) for name in full})}

    def init(key: Key) -> Params:
        statistics = jax.tree.map(jnp.asarray, base[STATISTICS]) if keeps else None
        return {"params": start(key), STATISTICS: statistics} if keeps else start(key)

    shapes = jax.eval_shape(start, jax.eval_shape(jax.random.key, 0))

    def merged(given: Params) -> Params:
        factors_a, factors_b, in_full = (arrays_of(given[part]) for part in ("a", "b", "full"))

        def leaf(name: str, value: Array) -> Array:
            if name not in factors_a:
                given_in_full: Array = in_full.get(name, value)
                return given_in_full
            a, b = factors_a[name], factors_b[name]
            return value + (alpha / rank) * (a @ b).reshape(value.shape)

        rest = computed_with(constant, given, shapes)
        leaves = [leaf(name, value) for name, value in arrays_of(rest).items()]
        return jax.tree.unflatten(jax.tree.structure(constant), leaves)

    def whole(params: Params) -> Params:
        return {"params": merged(params["params"]), STATISTICS: params[STATISTICS]} if keeps else merged(params)

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        outputs: Array = model.apply(whole(params), x, key)
        return outputs

    def train(params: Params, x: Array, key: Key, mask: Array) -> tuple[Array, Params]:
        outputs, changed = model.train(whole(params), x, key, mask)  # type: ignore[misc]
        return outputs, {**params, STATISTICS: changed[STATISTICS]}

    return Model(init, apply, model.loss, train if keeps else None, _private(model, init))


def _chosen(weights: str, trained: str, known: Mapping[str, AnyArray]) -> tuple[list[str], list[str]]:
    """The paths of the adapted weights and of those trained in full; ``ValueError`` for a vector or for none."""
    full = list(_matching("trained", trained, list(known)))
    adapted = [name for name in _matching("weights", weights, list(known)) if name not in full]
    flat = [name for name in adapted if known[name].ndim < 2]
    check.require(not flat, "weights", flat, "of weights with two axes or more; give others in trained")
    check.require(bool(adapted or full), "weights", weights, "patterns that match a weight, or trained must")
    return adapted, full


def _private(model: Model, init: Callable[[Key], Params]) -> Callable[[Path], bool] | None:
    """``private`` of the adapted model: what ``model.private`` says of the leaf that a leaf of its params changes."""
    stays, above = model.private, int(model.train is not None)  # a, b and full are under "params" if there are others
    if stays is None:
        return None

    def private(path: Path) -> bool:
        return stays(path if path[0] == STATISTICS else (*path[:above], *path[above + 1 :]))

    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)))
    return private if any(private(tree.path_of(path)) for path, _ in leaves) else None


def _factors(key: Key, weights: Mapping[str, Array], rank: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """``A`` [m, rank] and ``B`` [rank, n] of each weight at the start."""
    a, b = {}, {}
    for i, (name, weight) in enumerate(weights.items()):
        rows, columns = _sides(name, weight.shape)
        draws = jax.random.normal(jax.random.fold_in(key, i), (rows, rank), weight.dtype)
        a[name] = draws / jnp.sqrt(jnp.asarray(rows, draws.dtype))
        b[name] = jnp.zeros((rank, columns), draws.dtype)
    return a, b


def _sides(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a weight as a matrix; PyTorch's ``weight`` is [outputs, inputs, ...]."""
    first = 1 if name.rpartition("/")[2] == "weight" else len(shape) - 1
    return prod(shape[:first]), prod(shape[first:])


def _matching(field: str, patterns: str, names: list[str]) -> list[str]:
    """The names that match one of the patterns, in the order of the model."""
    found: set[str] = set()
    for pattern in filter(None, patterns.split(",")):
        some = [name for name in names if fnmatchcase(name, pattern)]
        usual = field == "weights" and patterns == "*/kernel,kernel"
        check.require(
            bool(some) or usual, field, pattern, f"paths of the model (* for any characters): {', '.join(names)}"
        )
        found.update(some)
    return [name for name in names if name in found]
