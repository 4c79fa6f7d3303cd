"""Parameters under PyTorch's names and in its layouts, and back: the arrays of a ``state_dict``.

| here | there |
| --- | --- |
| ``fc1/kernel`` [in, out] | ``fc1.weight`` [out, in] |
| ``conv1/kernel`` [kh, kw, in / groups, out] or [k, in / groups, out] | ``conv1.weight`` [out, in / groups, kh, kw] |
| ``norm/scale``, ``norm/bias`` | ``norm.weight``, ``norm.bias`` |
| ``batch_stats/norm/mean``, ``batch_stats/norm/var`` | ``norm.running_mean``, ``norm.running_var`` |
| ``embedding/table`` (flax: ``embed/embedding``) [V, D] | ``embedding.weight`` [V, D] |

BatchNorm's ``num_batches_tracked``, which PyTorch counts and does not use, is written as 0 and not read. All other
leaves keep their name, with dots, and their layout.

**Flattening.** Images are ``[B, H, W, C]`` here and ``[B, C, H, W]`` there, so the inputs of a dense layer behind a
flattened feature map come in another order. :func:`flattened` finds these layers; the rows of their kernels are
permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from fedjax_async import check
from fedjax_async.models.norm import STATISTICS
from fedjax_async.models.weights import arrays_of, filled
from fedjax_async.types import Model, Params, Path

TRACKED = "num_batches_tracked"  # PyTorch's count of the batches that BatchNorm saw
LEAVES = {"kernel": "weight", "scale": "weight", "table": "weight", "embedding": "weight"}
STATISTIC = {"mean": "running_mean", "var": "running_var"}


class Place(NamedTuple):
    """Where a leaf is found in a state dict, and how to get it there and back."""

    name: str  # conv1.weight
    there: Callable[[np.ndarray], np.ndarray]
    back: Callable[[np.ndarray], np.ndarray]


def flattened(model: Model, input_shape: tuple[int, ...]) -> dict[str, int]:
    """Dense layers whose input is a flattened feature map (or image), each with the channels C of the map.

    ``model``: of ``from_flax``, on decoded inputs of ``input_shape``. Nothing is computed: the layers are followed with
    shapes alone. A dense layer counts if it sees rows [B, S C] and the last output with positions before it was
    [B, ..., C]; a mean over the positions leaves S = 1, which needs no permutation.

    >>> from fedjax_async import models
    >>> flattened(models.make("lenet5"), (28, 28, 1))
    {'fc1': 16}
    """
    channels = input_shape[-1] if len(input_shape) > 1 else 0
    found: dict[str, int] = {}

    def follow(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        nonlocal channels
        x: Any = args[0] if args else None
        if isinstance(context.module, nn.Dense) and context.method_name == "__call__" and getattr(x, "ndim", 0) == 2:
            width = x.shape[-1]
            layer = "/".join(context.module.path)
            if layer and channels > 1 and width > channels and width % channels == 0:
                found[layer] = channels
            channels = 0  # the next dense layer sees features
        out = call(*args, **kwargs)
        if getattr(out, "ndim", 0) > 2:
            channels = out.shape[-1]
        return out

    def forward(key: Any, x: Any) -> Any:
        params = model.init(key)
        with nn.intercept_methods(follow):
            return model.apply(params, x)

    jax.eval_shape(forward, jax.random.key(0), jax.ShapeDtypeStruct((1, *input_shape), np.float32))
    return found


def layer_names(field: str, text: str | None) -> dict[str, str] | None:
    """``"conv1=features.0,fc1=classifier"`` -> names of layers there by ours; ``ValueError`` naming the ``field``."""
    if text is None:
        return None
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    check.require(all(map(all, pairs)), field, text, "LAYER=NAME, several joined by commas")
    layers = [layer for layer, _ in pairs]
    check.require(len(set(layers)) == len(layers), field, text, "LAYER=NAME, each layer once")
    return dict(pairs)


def to_torch(
    params: Params, *, flattened: Mapping[str, int] | None = None, modules: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """The ``state_dict`` of a PyTorch module with the same layers, as NumPy arrays.

    ``module.load_state_dict({name: torch.from_numpy(array) for name, array in to_torch(...).items()})``

    Args:
      params: of a model of ``from_flax``.
      flattened: dense layers behind a flattened map of C channels, ``{"fc1": C}``, as :func:`flattened` finds them.
      modules: names of layers there, where they differ: ``{"conv1": "features.0", "fc1": "classifier"}``; what is below
        a layer moves with it.

    Raises: ``ValueError`` for layers that the params do not have, for a C that does not divide the inputs of its layer,
    and for two leaves of one name.
    """
    arrays = arrays_of(params)
    state: dict[str, np.ndarray] = {}
    for path, place in _places(arrays, flattened, modules).items():
        state[place.name] = np.ascontiguousarray(place.there(arrays[path]))
        if place.name.endswith(".running_var"):
            state[place.name.removesuffix("running_var") + TRACKED] = np.zeros((), np.int64)
    return state


def from_torch(
    state: Mapping[str, Any],
    like: Params,
    *,
    flattened: Mapping[str, int] | None = None,
    modules: Mapping[str, str] | None = None,
    source: str = "state",
) -> Params:
    """The params of a ``state_dict``, in the structure, shapes and dtypes of ``like``: the inverse of :func:`to_torch`.

    ``state``: name -> array or tensor (of the CPU). ``source``: what messages call it. Raises: ``ValueError`` as
    :func:`to_torch`, and naming an array that is missing, that nothing takes, or that has another shape.
    """
    arrays = {name: _numpy(value) for name, value in state.items() if not _is_count(name)}
    like_arrays = arrays_of(like)
    places = _places(like_arrays, flattened, modules)
    wanted = {place.name: place.there(like_arrays[path]).shape for path, place in places.items()}
    found = {name: array.shape for name, array in arrays.items()}
    for name in sorted({*wanted, *found}):
        allowed = f"{wanted.get(name, 'none')}, as the model has it under PyTorch's names"
        check.require(found.get(name) == wanted.get(name), f"shape of {name} in {source}", found.get(name), allowed)
    return filled(like, {path: place.back(arrays[place.name]) for path, place in places.items()}, source)


def has_torch_names(state: Mapping[str, Any], like: Params) -> bool:
    """Whether the arrays have PyTorch's names for the leaves of ``like``, and not ours."""
    ours = arrays_of(like)
    there = {place.name for place in _places(ours, None, None).values()}
    return {name for name in state if not _is_count(name)} == there and there != set(ours)


def _is_count(name: str) -> bool:
    return name.rpartition(".")[2] == TRACKED


def _numpy(value: Any) -> np.ndarray:
    """An array of NumPy, JAX or torch; NumPy has no bfloat16, so torch gives such tensors as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _places(
    arrays: Mapping[str, Any], flattened: Mapping[str, int] | None, modules: Mapping[str, str] | None
) -> dict[str, Place]:
    """Our name of each leaf -> its place in the state dict."""
    channels, renamed = dict(flattened or {}), dict(modules or {})
    paths = {name: tuple(name.split("/")) for name in arrays}
    nested = {path[:1] for path in paths.values()} <= {("params",), (STATISTICS,)}
    layers = {path[1:-1] if nested else path[:-1] for path in paths.values()}
    above = {"/".join(layer[:n]) for layer in layers for n in range(1, len(layer) + 1)}
    for field, given in (("flattened", channels), ("modules", renamed)):
        for name in given:
            check.require(name in above, field, name, f"one of the layers: {', '.join(sorted(above))}")
    places = {}
    for name, path in paths.items():
        layer = "/".join(path[1:-1] if nested else path[:-1])
        places[name] = _place(path, layer, np.shape(arrays[name]), channels.get(layer, 1), renamed)
    taken = [place.name for place in places.values()]
    twice = next((name for name in taken if taken.count(name) > 1), None)
    check.require(twice is None, "modules", twice, "other names: two arrays would have this one")
    return places


def _place(path: Path, layer: str, shape: tuple[int, ...], channels: int, renamed: Mapping[str, str]) -> Place:
    leaf, rank = path[-1], len(shape)
    above = [given for given in renamed if layer == given or layer.startswith(given + "/")]
    longest = max(above, key=len, default="")
    module = (renamed.get(longest, "") + layer[len(longest) :]).replace("/", ".")
    statistic = path[0] == STATISTICS
    name = STATISTIC.get(leaf, leaf) if statistic else LEAVES.get(leaf, leaf)
    name = f"{module}.{name}" if module else name
    if leaf != "kernel" or rank < 2:
        return Place(name, lambda x: x, lambda x: x)
    if rank > 2:  # [*window, in, out] <-> [out, in, *window]
        there, back = (rank - 1, rank - 2, *range(rank - 2)), (*range(2, rank), 1, 0)
        return Place(name, lambda x: x.transpose(there), lambda x: x.transpose(back))
    rows, out = shape
    allowed = f"a divisor of the {rows} inputs of the layer"
    check.require(channels >= 1 and rows % channels == 0, f"flattened[{layer!r}]", channels, allowed)
    positions = rows // channels

    def moved(x: np.ndarray) -> np.ndarray:  # rows (position, channel) -> columns (channel, position)
        return x.reshape(positions, channels, out).transpose(2, 1, 0).reshape(out, rows)

    def restored(x: np.ndarray) -> np.ndarray:
        return x.reshape(out, channels, positions).transpose(2, 1, 0).reshape(rows, out)

    return Place(name, moved, restored)
