"""From a flax module to a ``Model``, and two wrappers around models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_async import check
from fedjax_async.types import Array, Key, Model, Params


def cross_entropy(outputs: Array, y: Array) -> Array:
    """``-log softmax(outputs)[y]`` of each example: ``[B, classes], int [B] -> [B]``, in nats.

    The label's logit is picked by a mask, not by an index: the gradient of indexing is a scatter, slow on a CPU.

    >>> [round(float(v), 4) for v in cross_entropy(jnp.zeros((2, 10)), jnp.array([3, 7]))]
    [2.3026, 2.3026]
    """
    is_label = jnp.arange(outputs.shape[-1], dtype=y.dtype)[None, :] == y[:, None]
    picked = jnp.where(is_label, outputs, jnp.zeros((), outputs.dtype)).sum(axis=-1)
    return jax.nn.logsumexp(outputs, axis=-1) - picked


def from_flax(
    module: nn.Module, *, input_shape: tuple[int, ...], loss: Callable[[Array, Array], Array] = cross_entropy
) -> Model:
    """A ``Model`` from any ``flax.linen`` module that maps ``[B, *input_shape]`` to outputs.

    If the module's ``__call__`` takes ``train`` (or ``deterministic``), it is told whether a key was given; the key is
    its ``dropout`` generator. Parameters start as float32; inputs are cast to the parameters' dtype.
    Modules with state besides parameters (BatchNorm) are refused at ``init``: running averages have no owner in
    federated training; use GroupNorm or LayerNorm.
    """
    check_shape(input_shape)
    accepted = inspect.signature(type(module).__call__).parameters
    mode = next((name for name in ("train", "deterministic") if name in accepted), None)

    def mode_of(key: Key | None) -> dict[str, Any]:
        return {} if mode is None else {mode: (key is not None) == (mode == "train")}

    def init(key: Key) -> Params:
        variables = module.init(key, jnp.zeros((1, *input_shape), jnp.float32), **mode_of(None))
        others = sorted(set(variables) - {"params"})
        check.require(not others, "module state", others, "empty (parameters only; use GroupNorm for BatchNorm)")
        return variables["params"]

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        rngs = None if key is None else {"dropout": key}
        x = x.astype(jax.tree.leaves(params)[0].dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        outputs: Any = module.apply({"params": params}, x, rngs=rngs, **mode_of(key))
        return outputs

    return Model(init, apply, loss)


def decoded(model: Model, decode: Callable[[Array], Array]) -> Model:
    """``model`` for raw rows: ``decode`` (for images uint8 -> float) runs inside the compiled step."""

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return model.apply(params, decode(x), key)

    return model._replace(apply=apply)


def in_dtype(model: Model, dtype: Any) -> Model:
    """``model`` computing in ``dtype`` (bfloat16, say); gradients and outputs keep the parameters' dtype."""

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        kept = jnp.result_type(*jax.tree.leaves(params))
        return model.apply(jax.tree.map(cast, params), cast(x), key).astype(kept)

    return model._replace(apply=apply)


def rematerialised(model: Model) -> Model:
    """A flax ``model`` that recomputes, layer by layer, in the backward pass what a layer would keep for it.

    Only the inputs of the module's direct submodules are kept: less memory, and up to a third more work.
    A whole model under one ``jax.checkpoint`` would save nothing, as everything is recomputed at once.
    XLA on a CPU merges the recomputation with the first one again: there nothing is saved either.
    """

    def layer(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        if context.method_name != "__call__" or len(context.module.path) != 1:
            return call(*args, **kwargs)
        return jax.checkpoint(lambda *inputs: call(*inputs, **kwargs))(*args)

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        with nn.intercept_methods(layer):
            return model.apply(params, x, key)

    return model._replace(apply=apply)


def check_shape(input_shape: Any, rank: int | None = None) -> None:
    """A tuple of positive whole numbers (of length ``rank`` if given), else ``ValueError``."""
    allowed = "a tuple of positive whole numbers" if rank is None else "(height, width, channels)"
    ok = isinstance(input_shape, (tuple, list)) and all(isinstance(n, int) and n > 0 for n in input_shape)
    check.require(ok and rank in (None, len(input_shape)), "input_shape", input_shape, allowed)
