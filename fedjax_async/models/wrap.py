"""From a flax module to a ``Model``; wrappers of models: decoding, augmentation, another dtype, rematerialisation."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fedjax_async.base import check, tree
from fedjax_async.models.conv import conv_general_dilated
from fedjax_async.models.labels import cross_entropy
from fedjax_async.models.norm import STATISTICS, BatchNorm, row_mask
from fedjax_async.types import Array, Key, Model, Params, Path

if TYPE_CHECKING:
    from flax.linen.module import InterceptorContext

NORMALISING = (nn.BatchNorm, BatchNorm)  # the layers with running statistics that leave padded rows out
Result = TypeVar("Result")
_GIVEN = ("train", "deterministic", "mask")  # the arguments that a run passes to a module's __call__
_MISNAMED = ("training", "is_training", "is_train")  # refused: a run would never set them


def _check_arguments(module: str, others: list[inspect.Parameter]) -> None:
    """Raise ``ValueError`` for an argument, other than the input, that a module needs and no run passes."""
    allowed = "called train (or deterministic) if it says whether to train; others need a default"
    for one in others:
        several = one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        lacks = one.default is one.empty and not several and one.name not in _GIVEN
        check.require(not lacks and one.name not in _MISNAMED, f"argument of {module}.__call__", one.name, allowed)


def from_flax(
    module: nn.Module,
    *,
    input_shape: tuple[int, ...],
    loss: Callable[[Array, Array], Array] = cross_entropy,
    private: Callable[[Path], bool] | None = None,
) -> Model:
    """A ``Model`` from a ``flax.linen`` module that maps ``[B, *input_shape]`` to outputs.

    If the module's ``__call__`` takes ``train``, it is true when a key is given (``deterministic``: false); the key
    seeds ``dropout``. Any other argument than the input needs a default; ``training`` is refused, since no run sets it.
    Parameters start as float32; floating-point inputs are cast to the parameters' dtype, whole numbers (codes for an
    ``nn.Embed``) stay as they are. ``private``: see ``Model``.

    The params are flax's parameters. If the module keeps running statistics, they are ``{"params": ...,
    "batch_stats": ...}``, and the model has ``train``: then BatchNorm, flax's own or ``models.BatchNorm``, leaves out
    the padded rows of a partial batch. It must see the batch as the first axis. Another layer with statistics must be
    given ``mask`` [B] by a ``__call__`` that takes it. ``apply`` with a key then normalises by the whole batch and
    updates no statistics.

    Raises ``ValueError`` for other state, other arguments, and an ``input_shape`` that the module does not accept.
    """
    check.kind("module", module, nn.Module, "a flax.linen module, such as nn.Dense(10)")
    check.require(callable(loss), "loss", loss, "a function, loss(outputs, y) -> [B]")
    check.require(private is None or callable(private), "private", private, "a function, private(path) -> bool")
    check_shape(input_shape)
    accepted = inspect.signature(type(module).__call__).parameters
    modes = [name for name in ("train", "deterministic") if name in accepted]
    _check_arguments(type(module).__name__, list(accepted.values())[2:])  # after self and the input

    def mode_of(key: Key | None) -> dict[str, Any]:
        return {name: (key is not None) == (name == "train") for name in modes}

    def made(dtype: DTypeLike) -> Callable[[Key], Params]:
        return lambda key: module.init(key, jnp.zeros((1, *input_shape), dtype), **mode_of(None))

    variables, (shapes, layers) = with_inputs(lambda dtype: (made(dtype), _shapes(module, input_shape, made(dtype))))
    check.require("params" in shapes, "module", type(module).__name__, "a module with parameters")
    kept, masks = set(shapes) - {"params"}, "mask" in accepted
    held = [tree.path_of(path)[:-1] for path, _ in jax.tree.leaves_with_path(shapes.get(STATISTICS, {}))]
    allowed = "none, or batch_stats of BatchNorm or, where __call__ takes mask, of other layers"
    check.require(kept <= {STATISTICS}, "module state", sorted(kept), allowed)
    strange = [] if masks else ["/".join(path) for path in held if path not in layers]
    check.require(not strange, "batch_stats of", strange, allowed)

    def cast(variables: Params, x: Array) -> Array:
        first = jax.tree.leaves(variables["params"])[0]
        return x.astype(first.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def init(key: Key) -> Params:
        return variables(key) if kept else variables(key)["params"]

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        rngs = None if key is None else {"dropout": key}
        # flax's BatchNorm updates them whether that is wanted or not
        mutable: list[str] | bool = [STATISTICS] if kept else False
        inside: Params = params if kept else {"params": params}
        with nn.intercept_methods(partial(_as_here, None)):
            outputs: Any = module.apply(inside, cast(inside, x), rngs=rngs, mutable=mutable, **mode_of(key))
        return outputs[0] if kept else outputs

    def train(params: Params, x: Array, key: Key, mask: Array) -> tuple[Array, Params]:
        options: dict[str, Any] = mode_of(key) | ({"mask": mask} if masks else {})

        with nn.intercept_methods(partial(_as_here, mask)):
            rngs = {"dropout": key}
            outputs, updated = module.apply(params, cast(params, x), rngs=rngs, mutable=[STATISTICS], **options)
        return outputs, {**params, **updated}

    return Model(init, apply, loss, train if kept else None, private)


def with_inputs(call: Callable[[DTypeLike], Result]) -> Result:
    """``call`` with float32 as the dtype of inputs; with int32 if that raises, since embeddings read no floats."""
    try:
        return call(jnp.float32)
    except ValueError as error:
        with contextlib.suppress(ValueError):
            return call(jnp.int32)
        raise error


def _shapes(module: nn.Module, input_shape: tuple[int, ...], init: Callable[[Key], Params]) -> tuple[Params, set[Path]]:
    """The shapes of the module's variables, and the paths of its layers of BatchNorm; ``ValueError`` if it raises."""
    layers: set[Path] = set()

    def noting(
        call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], context: InterceptorContext
    ) -> object:
        if isinstance(context.module, NORMALISING):
            layers.add(context.module.path)
        return call(*args, **kwargs)

    try:
        with nn.intercept_methods(noting):
            return jax.eval_shape(lambda: init(jax.random.key(0))), layers
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        line = " ".join(str(error).split())
        allowed = f"a module that takes inputs of the shape (1, *{tuple(input_shape)})"
        raised = f"{type(module).__name__}: must be {allowed}; it raised {type(error).__name__}: {line}"
        raise ValueError(f"module = {raised}") from error


def _as_here(
    mask: Array | None,
    call: Callable[..., object],
    args: tuple[Array, ...],
    kwargs: dict[str, object],
    context: InterceptorContext,
) -> object:
    """For ``nn.intercept_methods``: BatchNorm leaves out the rows with ``mask`` 0; flax's Conv uses our lowerings."""
    layer = context.module
    if context.method_name != "__call__":
        return call(*args, **kwargs)
    if isinstance(layer, NORMALISING) and mask is not None and kwargs.get("mask") is None and len(args) < 3:
        kwargs = kwargs | {"mask": mask if isinstance(layer, BatchNorm) else row_mask(mask, args[0])}
    elif isinstance(layer, nn.Conv) and not (layer.conv_general_dilated or layer.conv_general_dilated_cls):
        object.__setattr__(layer, "conv_general_dilated", conv_general_dilated)  # a flax module is frozen
    return call(*args, **kwargs)


class SameStart:
    """``init`` of a module that already has its values; a class, so that :func:`starts_alike` can tell it.

    ``kind``, ``factory``: for the warning, what the module is and what to give for start weights by the seed.
    """

    def __init__(self, values: Params, kind: str, factory: str) -> None:
        self._values, self.kind, self.factory = values, kind, factory

    def __call__(self, key: Key) -> Params:
        del key
        return jax.tree.map(jnp.asarray, self._values)


def starts_alike(model: Model) -> SameStart | None:
    """The start of a model that has the weights of a module, the same for every seed; ``None`` for other models."""
    start = inspect.unwrap(model.init)
    return start if isinstance(start, SameStart) else None


Train = Callable[[Params, Array, Key, Array], tuple[Array, Params]]


def _wrapped(model: Model, apply: Callable[..., Array], train: Callable[[Train], Train]) -> Model:
    """``model`` with another ``apply`` and, if it has a ``train``, that function wrapped by the argument ``train``."""
    return model._replace(apply=apply, train=None if model.train is None else train(model.train))


def decoded(model: Model, decode: Callable[[Array], Array]) -> Model:
    """``model`` on raw rows: ``decode`` (for images: uint8 to float) runs inside the compiled step."""

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return model.apply(params, decode(x), key)

    return _wrapped(model, apply, lambda train: lambda params, x, key, mask: train(params, decode(x), key, mask))


_AUGMENT = 0xA06  # folded into the key of a local step, so that dropout draws the same numbers as without augmentation


def augmented(model: Model, augment: Callable[[Key, Array], Array]) -> Model:
    """``model`` on raw rows, which ``augment`` changes at random in training, that is, only when a key is given.

    ``augment(key, x) -> x``, as in ``data.AUGMENTATIONS``; its key is derived from that of the local step.
    """

    def changed(key: Key, x: Array) -> Array:
        return augment(jax.random.fold_in(key, _AUGMENT), x)

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return model.apply(params, x if key is None else changed(key, x), key)

    return _wrapped(model, apply, lambda train: lambda params, x, key, mask: train(params, changed(key, x), key, mask))


def in_dtype(model: Model, dtype: DTypeLike) -> Model:
    """``model`` computing in ``dtype``, such as bfloat16; gradients and outputs keep the parameters' dtype.

    Running statistics keep their own dtype.
    """

    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def low(params: Params) -> Params:
        if model.train is None:
            return jax.tree.map(cast, params)
        return {**params, "params": jax.tree.map(cast, params["params"])}

    def restored(outputs: Array, params: Params) -> Array:
        return outputs.astype(jnp.result_type(*jax.tree.leaves(params)))

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return restored(model.apply(low(params), cast(x), key), params)

    def low_train(train: Train) -> Train:
        def run(params: Params, x: Array, key: Key, mask: Array) -> tuple[Array, Params]:
            outputs, updated = train(low(params), cast(x), key, mask)
            return restored(outputs, params), {**updated, "params": params["params"]}

        return run

    return _wrapped(model, apply, low_train)


def computed_with(constants: Result, params: Params, like: Params) -> Result:
    """``constants`` of a model with floats in the dtype of ``params``, if that is not ``like``'s (:func:`in_dtype`).

    Constants in float32 would turn all sums and products with them into float32.
    """
    before, now = (jnp.result_type(*jax.tree.leaves(each)) for each in (like, params))
    if before == now:
        return constants
    return jax.tree.map(lambda leaf: leaf.astype(now) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, constants)


def rematerialised(model: Model) -> Model:
    """A flax ``model`` that recomputes activations in the backward pass, layer by layer, instead of keeping them.

    Only the outputs of the module's direct submodules are kept. This takes less memory and up to a third more work.
    Keeping none at all would save nothing, since all of them would be recomputed at once. On a CPU nothing is saved:
    XLA merges the recomputation with the first computation.
    """
    policy = jax.checkpoint_policies.save_only_these_names("layer")

    def layer(
        call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], context: InterceptorContext
    ) -> object:
        out = call(*args, **kwargs)
        direct = context.method_name == "__call__" and len(context.module.path) == 1
        return checkpoint_name(out, "layer") if direct else out

    def recomputed(function: Callable[..., Result]) -> Callable[..., Result]:
        def run(*args: object) -> Result:
            with nn.intercept_methods(layer):
                return jax.checkpoint(function, policy=policy)(*args)

        return run

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return recomputed(model.apply)(params, x, key)

    return _wrapped(model, apply, recomputed)


def check_shape(input_shape: Sequence[int], rank: int | None = None) -> None:
    """Raise ``ValueError`` unless ``input_shape`` is a tuple of positive whole numbers, of length ``rank`` if given."""
    names = {1: "(length,)", 2: "(length, channels)", 3: "(height, width, channels)"}
    allowed = names.get(rank or 0, "a tuple of positive whole numbers")
    ok = isinstance(input_shape, (tuple, list)) and all(isinstance(n, int) and n > 0 for n in input_shape)
    check.require(ok and rank in (None, len(input_shape)), "input_shape", input_shape, allowed)
