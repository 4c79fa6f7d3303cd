"""From a flax module of either kind to a ``Model``: ``flax.linen`` by ``from_flax``, ``flax.nnx`` by ``from_nnx``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from fedjax_async.base import check
from fedjax_async.models.wrap import cross_entropy, from_flax
from fedjax_async.types import Array, Key, Model, Params, Path


def is_module(thing: object) -> bool:
    """Whether ``thing`` is a ``flax.linen`` or ``flax.nnx`` module."""
    nnx = sys.modules.get("flax.nnx")  # an nnx module exists only if flax.nnx is imported
    return isinstance(thing, linen.Module) or (nnx is not None and isinstance(thing, nnx.Module))


def from_module(module: object, *, input_shape: tuple[int, ...]) -> Model:
    """A classifier from a module of either kind, with the cross entropy as its loss; ``input_shape`` is for linen."""
    if isinstance(module, linen.Module):
        return from_flax(module, input_shape=input_shape)
    return from_nnx(module)


def from_nnx(
    module: Any,
    *,
    loss: Callable[[Array, Array], Array] = cross_entropy,
    private: Callable[[Path], bool] | None = None,
) -> Model:
    """A ``Model`` from a ``flax.nnx`` module that maps a batch to outputs.

    The params are its ``nnx.Param`` values as nested dicts. They start with the values in ``module``; the seed of a run
    does not change them, and the run warns of it. For weights by the seed, replace ``init``:
    ``from_nnx(Net(nnx.Rngs(0)))._replace(init=lambda key: from_nnx(Net(nnx.Rngs(key))).init(key))``. ``private``: see
    ``Model``. Raises ``ValueError`` for a module with other state (running statistics, generators of dropout);
    ``from_flax`` accepts it in a ``flax.linen`` module.
    """
    from flax import nnx  # noqa: PLC0415 (takes a second)

    check.require(isinstance(module, nnx.Module), "module", module, "a flax.nnx module")
    parts: Any = nnx.split(module, nnx.Param, ...)
    graph, start, rest = parts
    kept = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)})
    check.require(not kept, "module state", kept, "nnx.Param alone (use a flax.linen module for other state)")
    values = nnx.to_pure_dict(start)
    check.require(len(jax.tree.leaves(values)) > 0, "module state", "no nnx.Param", "at least one")

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        del key
        first = jax.tree.leaves(params)[0]
        _, state = nnx.split(nnx.merge(graph, start), nnx.Param)
        nnx.replace_by_pure_dict(state, _as_in(values, params))
        outputs: Array = nnx.merge(graph, state)(x.astype(first.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x)
        return outputs

    return Model(_Start(values), apply, loss, None, private)


class _Start:
    """``init`` of a module that already has its values; a class, so that :func:`starts_alike` can tell it."""

    def __init__(self, values: object) -> None:
        self._values = values

    def __call__(self, key: Key) -> Params:
        del key
        return _renamed(self._values, str)


def starts_alike(model: Model) -> bool:
    """Whether the model starts from the weights of an nnx module, the same for every seed."""
    return isinstance(inspect.unwrap(model.init), _Start)


def _renamed(values: object, name: Callable[[object], str]) -> Any:
    """Nested dicts with keys ``name(key)``: nnx numbers the layers of a list, and the names of params are texts."""
    return {name(k): _renamed(v, name) for k, v in values.items()} if isinstance(values, dict) else jnp.asarray(values)


def _as_in(values: object, params: Any) -> Any:
    """``params`` under the keys of ``values``."""
    return {k: _as_in(v, params[str(k)]) for k, v in values.items()} if isinstance(values, dict) else params
