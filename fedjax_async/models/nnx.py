"""From a ``flax.nnx`` module, or a factory of such modules, to a ``Model``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.models.conv import conv_general_dilated
from fedjax_async.models.labels import cross_entropy
from fedjax_async.models.norm import STATISTICS, row_mask
from fedjax_async.models.wrap import SameStart, computed_with
from fedjax_async.types import Array, Key, Model, Params, Path

if TYPE_CHECKING:
    from flax import nnx

Copied = TypeVar("Copied")


def makes_nnx(thing: object) -> bool:
    """Whether ``thing`` makes nnx modules from random numbers: a function or class whose only needed input is ``rngs``.

    >>> from flax import nnx
    >>> makes_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs)), makes_nnx(lambda x: x)
    (True, False)
    """
    if "flax.nnx" not in sys.modules or not callable(thing) or isinstance(thing, sys.modules["flax.nnx"].Module):
        return False
    try:
        return _needed(thing) == ["rngs"]
    except ValueError:  # it has no signature
        return False


def _needed(thing: object) -> list[str]:
    """The parameters without defaults; those of an nnx class are hidden behind its metaclass."""
    if isinstance(thing, functools.partial):
        return [name for name in _needed(thing.func)[len(thing.args) :] if name not in thing.keywords]
    called: Any = vars(thing).get("__init__", thing.__init__) if isinstance(thing, type) else thing  # type: ignore[misc]
    accepted = list(inspect.signature(called).parameters.values())
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = accepted[1:] if isinstance(thing, type) else accepted
    return [p.name for p in own if p.default is p.empty and p.kind not in several]


def from_nnx(
    module: Any,
    *,
    loss: Callable[[Array, Array], Array] = cross_entropy,
    private: Callable[[Path], bool] | None = None,
) -> Model:
    """A ``Model`` from a ``flax.nnx`` module that maps a batch to outputs, or from a factory of such modules.

    Give a factory, ``lambda rngs: Net(rngs=rngs)`` or ``Net`` itself, for start weights by the seed of a run. A module
    starts from the values that it was made with, whatever the seed, and the run warns of it.

    The params are its ``nnx.Param`` values as nested dicts; with running statistics (``nnx.BatchNorm``) they are
    ``{"params": ..., "batch_stats": ...}``, and the model has ``train``. BatchNorm then leaves out the padded rows of a
    partial batch; it must see the batch as the first axis. With a key the module is in its training mode
    (``module.train()``) and the key seeds all its generators, such as those of dropout; without one it is in its
    evaluation mode. Other state, such as a table of positions, is a constant. ``private``: see ``Model``.

    Raises: ``ValueError`` for a module without ``nnx.Param``, for statistics of other layers than BatchNorm and, when
    it is traced, for other state that training would change.

    >>> from flax import nnx
    >>> model = from_nnx(lambda rngs: nnx.Linear(4, 2, rngs=rngs))
    >>> model.apply(model.init(jax.random.key(0)), jnp.ones((3, 4))).shape
    (3, 2)
    """
    from flax import nnx  # noqa: PLC0415 (takes a second)

    seeded = makes_nnx(module)
    allowed = "a flax.nnx module, or a factory of one such as lambda rngs: Net(rngs=rngs)"
    check.require(seeded or isinstance(module, nnx.Module), "module", module, allowed)
    example = module(rngs=nnx.Rngs(0)) if seeded else module
    check.require(isinstance(example, nnx.Module), "module", example, allowed)
    kinds = (nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    graphs, (start, statistics, generators, others) = _modes(example, kinds)
    check.require(bool(jax.tree.leaves(start)), "module state", "no nnx.Param", "at least one")
    _check_statistics(example)

    def params_of(weights: nnx.State, kept: nnx.State) -> Params:
        weights = _renamed(nnx.to_pure_dict(weights), str)
        return {"params": weights, STATISTICS: _renamed(nnx.to_pure_dict(kept), str)} if statistics else weights

    def state_of(module: nnx.Module) -> list[Any]:
        parts: Any = nnx.split(module, *kinds)
        return list(parts[1:])

    def call(params: Params, x: Array, key: Key | None, mask: Array | None = None) -> tuple[Array, Params]:
        given = (params["params"], params[STATISTICS]) if statistics else (params, {})
        states = [_filled(state, values) for state, values in zip((start, statistics), given)]
        fixed = computed_with(others, given[0], start)
        made = nnx.merge(graphs[key is not None], *states, _seeded(generators, key), _copy(fixed))
        first = jax.tree.leaves(given[0])[0]
        _as_here(made, mask, low=first.dtype != jax.tree.leaves(start)[0].dtype)
        outputs: Array = made(x.astype(first.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x)
        kept, after = state_of(made)[1::2]
        changed = [new is not old for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(fixed), strict=True)]
        allowed = "nnx.Param, nnx.BatchStat and what training does not change"
        check.require(not any(changed), "module state", sorted(_named_kinds(others)), allowed)
        return outputs, params_of(states[0], kept)

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return call(params, x, key)[0]

    def init(key: Key) -> Params:
        weights, kept, *_ = state_of(module(rngs=nnx.Rngs(key)))
        return params_of(weights, kept)

    start_at = (
        init if seeded else SameStart(params_of(start, statistics), "an nnx module", "lambda rngs: Net(rngs=rngs)")
    )
    return Model(start_at, apply, loss, call if statistics else None, private)


def _modes(example: nnx.Module, kinds: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """The graphs of a module in evaluation and in training, and its state by kind; the module stays as it is."""
    nnx = sys.modules["flax.nnx"]
    graphs = []
    for mode in ("eval", "train"):
        copy = nnx.clone(example)
        getattr(copy, mode)()
        graph, *states = nnx.split(copy, *kinds)
        graphs.append(graph)
    return graphs, states


def _named_kinds(state: object) -> set[str]:
    """The names of the classes of a state's variables."""
    return {type(variable).__name__ for _, variable in sys.modules["flax.nnx"].to_flat_state(state)}


def _check_statistics(example: nnx.Module) -> None:
    """``ValueError`` for running statistics of another layer: nothing would keep padded rows out of them."""
    nnx = sys.modules["flax.nnx"]
    nodes = dict(nnx.iter_graph(example))
    lists = nnx.List, nnx.Dict  # in a layer; they are modules, too
    layers = {p: node for p, node in nodes.items() if isinstance(node, nnx.Module) and not isinstance(node, lists)}
    kept = [path for path, node in nodes.items() if isinstance(node, nnx.BatchStat)]
    holders = [layers[next(path[:n] for n in range(len(path), -1, -1) if path[:n] in layers)] for path in kept]
    strange = sorted({type(layer).__name__ for layer in holders if not isinstance(layer, nnx.BatchNorm)})
    check.require(not strange, "nnx.BatchStat of", strange, "of nnx.BatchNorm, which leaves padded rows out")


def _copy(state: Copied) -> Copied:
    """A state with variables of its own: a module that is merged from it changes them."""
    return jax.tree.map(lambda leaf: leaf, state)


def _filled(state: nnx.State, values: object) -> nnx.State:
    """A copy of a state with these values: nested dicts whose keys are texts."""
    nnx, copy = sys.modules["flax.nnx"], _copy(state)
    nnx.replace_by_pure_dict(copy, _as_in(nnx.to_pure_dict(state), values))
    return copy


def _seeded(generators: object, key: Key | None) -> object:
    """The state of all generators from one key; as it is without a key, when nothing is drawn."""
    if key is None:
        return _copy(generators)
    leaves, structure = jax.tree.flatten(generators)

    def fresh(i: int, leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        own: Array = jax.random.fold_in(key, i)
        return jax.random.split(own, leaf.shape) if leaf.shape else own  # layers made by nnx.vmap have a key each

    return jax.tree.unflatten(structure, [fresh(i, leaf) for i, leaf in enumerate(leaves)])


def _as_here(module: object, mask: Array | None, *, low: bool) -> None:
    """Let each BatchNorm of a module leave out the rows with ``mask`` 0, and each Conv use our lowerings.

    ``low``: the module computes in another dtype than its own; statistics keep theirs, but outputs follow the inputs.
    """
    nnx = sys.modules["flax.nnx"]
    for _, layer in nnx.iter_graph(module):
        if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is jax.lax.conv_general_dilated:
            layer.conv_general_dilated = conv_general_dilated
        if isinstance(layer, nnx.BatchNorm) and (mask is not None or low):
            layer.__class__ = _changed(type(layer))  # type: ignore[arg-type]
            layer.batch = _Batch(mask, low and layer.dtype is None)


class _Batch:
    """The mask of a batch, and whether outputs have the dtype of inputs; nnx takes it for a plain attribute."""

    def __init__(self, mask: Array | None, low: bool) -> None:
        self.mask, self.low = mask, low


@functools.lru_cache(maxsize=64)
def _changed(layer: type) -> type:
    """A class of BatchNorm layers that do what ``self.batch`` says."""

    class Changed(layer):
        def __call__(self, x: Array, *args: object, mask: Array | None = None, **options: object) -> Array:
            of_batch, low = self.batch.mask, self.batch.low
            mask = row_mask(of_batch, x) if mask is None and of_batch is not None else mask
            outputs: Array = super().__call__(x, *args, mask=mask, **options)
            return outputs.astype(x.dtype) if low else outputs

    return Changed


def _renamed(values: object, name: Callable[[object], str]) -> Params:
    """Nested dicts with keys ``name(key)``: nnx numbers the layers of a list, and the names of params are texts."""
    return {name(k): _renamed(v, name) for k, v in values.items()} if isinstance(values, dict) else jnp.asarray(values)


def _as_in(values: object, params: Params) -> Params:
    """``params`` under the keys of ``values``."""
    return {k: _as_in(v, params[str(k)]) for k, v in values.items()} if isinstance(values, dict) else params
