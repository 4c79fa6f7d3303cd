"""Parameters under PyTorch's names and in its layouts, and back: the arrays of a ``state_dict``.

| params | ``state_dict`` |
| --- | --- |
| ``fc1/kernel`` [in, out] | ``fc1.weight`` [out, in] |
| ``conv1/kernel`` [kh, kw, in / groups, out] or [k, in / groups, out] | ``conv1.weight`` [out, in / groups, kh, kw] |
| ``norm/scale``, ``norm/bias`` | ``norm.weight``, ``norm.bias`` |
| ``batch_stats/norm/mean``, ``batch_stats/norm/var`` | ``norm.running_mean``, ``norm.running_var`` |
| ``embedding/table`` (flax: ``embed/embedding``) [V, D] | ``embedding.weight`` [V, D] |

BatchNorm's ``num_batches_tracked``, which PyTorch counts and does not use, is written as 0 and not read. All other
leaves keep their name, with dots, and their layout.

A kernel with more than two axes is treated as that of a convolution. Attention, transposed convolutions and all other
layers with such kernels have other layouts in PyTorch and are refused: by :func:`flattened`, which sees the types of
the layers, and by :func:`to_torch` and :func:`from_torch` if the bias has more than one axis, too.

**Flattening.** Images are ``[B, H, W, C]`` here and ``[B, C, H, W]`` in PyTorch, so the inputs of a dense layer behind
a flattened feature map have another order. :func:`flattened` finds these layers; the rows of their kernels are
permuted. Embeddings and dense layers put the channels last in PyTorch too, ``[B, T, C]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.typing import DTypeLike

from fedjax_async.base import check
from fedjax_async.models.conv import Conv, ConvPool
from fedjax_async.models.norm import STATISTICS
from fedjax_async.models.weights import arrays_of, filled
from fedjax_async.models.wrap import with_inputs
from fedjax_async.types import AnyArray, Array, Key, Model, Params, Path

if TYPE_CHECKING:
    from flax.linen.module import InterceptorContext

TRACKED = "num_batches_tracked"  # PyTorch's count of the batches that BatchNorm saw
LEAVES = {"kernel": "weight", "scale": "weight", "table": "weight", "embedding": "weight"}
STATISTIC = {"mean": "running_mean", "var": "running_var"}
CONVOLUTIONS = (nn.Conv, Conv, ConvPool)  # in PyTorch the channels of their outputs come first
CHANNELS_LAST = (nn.Embed, nn.Dense, nn.DenseGeneral, nn.RNN)  # come last, [B, T, C]; other layers keep the order


class Leaf(NamedTuple):
    """A leaf of the params in a state dict: its name there, and the conversions of its layout to PyTorch's and back."""

    name: str  # conv1.weight
    to_torch: Callable[[np.ndarray], np.ndarray]
    from_torch: Callable[[np.ndarray], np.ndarray]


def flattened(model: Model, input_shape: tuple[int, ...]) -> dict[str, int]:
    """The dense layers that read a flattened feature map (or image): ``{layer: channels C of the map}``.

    ``model``: of ``from_flax``, on decoded inputs of ``input_shape``. The model is traced with shapes only; what is
    computed is the way from the map to such a layer. A dense layer counts if its input is [B, S C], the last output
    with positions before it was [B, ..., C] of a convolution (or the image itself), normalised or not, and its input
    changes if the positions of that output change places. So means and maxima over the positions, joined or not, do
    not count; they need no permutation. Behind an embedding or a dense layer PyTorch has [B, T, C] as well.

    Raises: ``ValueError`` naming a layer that has a kernel with more than two axes and is not a convolution, such as
    attention or a transposed convolution, and a dense layer that reads a flattened map and such means side by side;
    and for a model of other layers than flax.linen's that may flatten a map.

    >>> from fedjax_async import models
    >>> flattened(models.make("lenet5"), (28, 28, 1))
    {'fc1': 16}
    """
    channels_first = len(input_shape) > 1  # whether PyTorch's last output with positions has its channels first
    channels = input_shape[-1] if channels_first else 0  # their number in that output; 0 if they are last
    found: dict[str, int] = {}
    maps: dict[str, Map] = {}
    latest, calls = Map(0, (1, *input_shape)), 0
    start = channels_first, channels, latest, calls
    shapes = jax.eval_shape(model.init, jax.eval_shape(jax.random.key, 0))
    if not any(name.rpartition("/")[2] == "kernel" for name in arrays_of(shapes)):
        return found  # such as a module of PyTorch, whose params are in its own layouts

    def follow(
        call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, object], context: InterceptorContext
    ) -> object:
        nonlocal channels, channels_first, latest, calls
        module = context.module
        x: Any = args[0] if args else None
        if isinstance(module, nn.Dense) and context.method_name == "__call__" and getattr(x, "ndim", 0) == 2:
            width = x.shape[-1]
            layer = "/".join(module.path)
            if layer and channels > 1 and width > channels and width % channels == 0:
                found[layer], maps[layer] = channels, latest
            channels = 0  # the next dense layer sees features
        out = call(*args, **kwargs)
        _require_counterpart(module)
        calls += 1
        if getattr(out, "ndim", 0) > 2:
            latest = Map(calls, out.shape)
            channels_first |= isinstance(module, CONVOLUTIONS)
            channels_first &= not isinstance(module, CHANNELS_LAST)
            channels = out.shape[-1] if channels_first else 0
        return out

    def forward(key: Key, x: object) -> object:
        params = model.init(key)
        with nn.intercept_methods(follow):
            return model.apply(params, x)

    def traced(dtype: DTypeLike) -> None:
        nonlocal channels, channels_first, latest, calls
        channels_first, channels, latest, calls = start
        found.clear()
        jax.eval_shape(forward, jax.eval_shape(jax.random.key, 0), jax.ShapeDtypeStruct((1, *input_shape), dtype))
        for layer, origin in maps.items():
            if layer in found and not _reads_positions(model, layer, origin, jnp.zeros((1, *input_shape), dtype)):
                del found[layer]

    with_inputs(traced)
    if not calls:
        _require_no_map(shapes, input_shape)
    return found


def _require_no_map(params: Params, input_shape: tuple[int, ...]) -> None:
    """``ValueError`` for a model of other layers than flax.linen's, as of nnx, that may flatten a map or an image."""
    axes = {np.ndim(leaf) for name, leaf in arrays_of(params).items() if name.rpartition("/")[2] == "kernel"}
    colours = len(input_shape) > 1 and input_shape[-1] > 1
    allowed = "{layer: channels of the map before it}, since the layers are not of flax.linen ({} if none reads a map"
    allowed += "; initial takes what models.from_torch(state, params, flattened=...) makes of a file)"
    check.require(2 not in axes or not (colours or max(axes) > 2), "flattened", None, allowed)


class Map(NamedTuple):
    """An output with positions, [1, ..., C]."""

    call: int  # its number among the calls of modules that have returned, from 1; 0: the model's input
    shape: tuple[int, ...]


def _reads_positions(model: Model, layer: str, origin: Map, inputs: Array) -> bool:
    """Whether the input of a dense layer, [1, S C], changes if the positions of a map change places.

    The map is replaced by random numbers, then by the same in other orders. Raises ``ValueError`` if only some of the S
    parts change.
    """
    chance, channels = np.random.default_rng(0), origin.shape[-1]
    rows = chance.uniform(0.5, 1.5, (int(np.prod(origin.shape[1:-1])), channels))
    orders = np.stack([rows, *(chance.permutation(rows) for _ in range(8))])

    @jax.jit
    def read(positions: Array) -> Array:
        replaced, seen, calls = positions.reshape(origin.shape), [], 0

        def replacing(
            call: Callable[..., Array], args: tuple[Array, ...], kwargs: dict[str, object], context: InterceptorContext
        ) -> object:
            nonlocal calls
            if "/".join(context.module.path) == layer and isinstance(context.module, nn.Dense):
                seen.append(args[0])
            out = call(*args, **kwargs)
            calls += 1
            return replaced.astype(out.dtype) if calls == origin.call else out

        params = model.init(jax.random.key(0))
        with nn.intercept_methods(replacing):
            model.apply(params, inputs if origin.call else replaced.astype(inputs.dtype))
        return seen[-1].reshape(-1, channels).astype(float)

    found = np.stack([np.asarray(read(jnp.asarray(order))) for order in orders])
    moved = (np.abs(found - found[0]) > 0.01 * np.abs(found).max()).any(axis=(0, 2))  # more than rounding
    allowed = "a flattened map alone: give flattened={layer: channels} yourself, or {} if nothing is to be permuted"
    check.require(bool(moved.all() or not moved.any()), f"input of {layer}", "a flattened map and its means", allowed)
    return bool(moved.any())


def layer_names(field: str, text: str | None) -> dict[str, str] | None:
    """``"conv1=features.0,fc1=classifier"`` -> ``{our layer: PyTorch's name}``; ``ValueError`` names the ``field``."""
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
      modules: PyTorch's names of layers, where they differ: ``{"conv1": "features.0", "fc1": "classifier"}``; the
        layers below a renamed layer are renamed with it.

    Raises: ``ValueError`` for layers that the params do not have, for a C that does not divide the inputs of its layer,
    for a layer in ``flattened`` that is not dense, for two leaves of one name, and for a kernel with more than two axes
    beside a bias with more than one, as in attention. From the params alone, other such kernels look like those of
    convolutions: :func:`flattened` refuses a model with transposed convolutions.
    """
    arrays = arrays_of(params)
    _require_convolutions(arrays)
    state: dict[str, np.ndarray] = {}
    for path, leaf in _leaves(arrays, flattened, modules).items():
        state[leaf.name] = np.ascontiguousarray(leaf.to_torch(arrays[path]))
        if leaf.name.endswith(".running_var"):
            state[leaf.name.removesuffix("running_var") + TRACKED] = np.zeros((), np.int64)
    return state


def from_torch(
    state: Mapping[str, object],
    like: Params,
    *,
    flattened: Mapping[str, int] | None = None,
    modules: Mapping[str, str] | None = None,
    source: str = "state",
) -> Params:
    """The params of a ``state_dict``, in the structure, shapes and dtypes of ``like``: the inverse of :func:`to_torch`.

    ``state``: name -> array or tensor. ``source``: its name in messages. Raises: ``ValueError`` as :func:`to_torch`,
    and naming an array that is missing, unused or of another shape.
    """
    arrays = {name: _numpy(value) for name, value in state.items() if not _is_count(name)}
    like_arrays = arrays_of(like)
    _require_convolutions(like_arrays)
    leaves = _leaves(like_arrays, flattened, modules)
    wanted = {leaf.name: leaf.to_torch(like_arrays[path]).shape for path, leaf in leaves.items()}
    found = {name: array.shape for name, array in arrays.items()}
    for name in sorted({*wanted, *found}):
        allowed = f"{wanted.get(name, 'none')}, as the model has it under PyTorch's names"
        check.require(found.get(name) == wanted.get(name), f"shape of {name} in {source}", found.get(name), allowed)
    return filled(like, {path: leaf.from_torch(arrays[leaf.name]) for path, leaf in leaves.items()}, source)


def has_torch_names(state: Mapping[str, object], like: Params) -> bool:
    """Whether the arrays have PyTorch's names for the leaves of ``like``, and not ours."""
    ours = arrays_of(like)
    theirs = {leaf.name for leaf in _leaves(ours, None, None).values()}
    return {name for name in state if not _is_count(name)} == theirs and theirs != set(ours)


def _is_count(name: str) -> bool:
    return name.rpartition(".")[2] == TRACKED


def _numpy(value: Any) -> np.ndarray:
    """A NumPy array from one of NumPy, JAX or torch; torch's bfloat16 becomes float32, since NumPy has no bfloat16."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value)


def _require_counterpart(module: nn.Module) -> None:
    """Raise ``ValueError`` for a layer that has a kernel with more than two axes and is not a convolution."""
    if isinstance(module, CONVOLUTIONS) or not module.has_variable("params", "kernel"):
        return
    shape = np.shape(module.get_variable("params", "kernel"))
    allowed = f"a convolution, as its kernel is {list(shape)}: other layers' kernels have another layout in PyTorch"
    check.require(len(shape) <= 2, f"layer {'/'.join(module.path)}", type(module).__name__, allowed)


def _require_convolutions(arrays: Mapping[str, AnyArray]) -> None:
    """Raise ``ValueError`` for a kernel beside a bias with more than one axis: it is not that of a convolution."""
    for name, kernel in arrays.items():
        layer, _, last = name.rpartition("/")
        bias = list(np.shape(arrays.get(f"{layer}/bias", ()))) if last == "kernel" else []
        allowed = f"[outputs] beside a kernel of {np.ndim(kernel)} axes: PyTorch has no such layer"
        check.require(len(bias) <= 1, f"shape of {layer}/bias", bias, allowed)


def _leaves(
    arrays: Mapping[str, AnyArray], flattened: Mapping[str, int] | None, modules: Mapping[str, str] | None
) -> dict[str, Leaf]:
    """Our name of each leaf -> its name and layouts in the state dict."""
    channels, renamed = {} if flattened is None else flattened, {} if modules is None else modules
    paths = {name: tuple(name.split("/")) for name in arrays}
    nested = {path[:1] for path in paths.values()} <= {("params",), (STATISTICS,)}
    layer_of = {name: "/".join(path[1:-1] if nested else path[:-1]) for name, path in paths.items()}
    kernels = [name for name, path in paths.items() if path[-1] == "kernel"]
    dense = {layer_of[name] for name in kernels if layer_of[name] and np.ndim(arrays[name]) == 2}
    _require_given(channels, renamed, {*layer_of.values()} - {""}, dense)
    leaves = {}
    for name, path in paths.items():
        leaves[name] = _leaf(path, layer_of[name], np.shape(arrays[name]), channels.get(layer_of[name], 1), renamed)
    taken = [leaf.name for leaf in leaves.values()]
    twice = next((name for name in taken if taken.count(name) > 1), None)
    check.require(twice is None, "modules", twice, "other names: two arrays would have this one")
    return leaves


def _require_given(channels: Mapping[str, int], renamed: Mapping[str, str], layers: set[str], dense: set[str]) -> None:
    """Raise ``ValueError`` unless ``flattened`` maps dense layers to channels and ``modules`` maps layers to names."""
    check.kind("flattened", channels, Mapping, "the channels of dense layers, such as {'fc1': 16}")
    check.kind("modules", renamed, Mapping, "names of layers, such as {'fc1': 'classifier'}")
    for name, count in channels.items():
        check.require(name in dense, "flattened", name, f"one of the dense layers: {', '.join(sorted(dense))}")
        check.whole(f"flattened[{name!r}]", count)
    parts = [layer.split("/") for layer in layers]
    known = sorted({"/".join(part[:n]) for part in parts for n in range(1, len(part) + 1)})
    for name, given in renamed.items():
        check.require(name in known, "modules", name, f"one of the layers: {', '.join(known)}")
        check.kind(f"modules[{name!r}]", given, str, "a name, such as 'features.0'")


def _leaf(path: Path, layer: str, shape: tuple[int, ...], channels: int, renamed: Mapping[str, str]) -> Leaf:
    last, rank = path[-1], len(shape)
    above = [given for given in renamed if layer == given or layer.startswith(given + "/")]
    longest = max(above, key=len, default="")
    module = (renamed.get(longest, "") + layer[len(longest) :]).replace("/", ".")
    statistic = path[0] == STATISTICS
    name = STATISTIC.get(last, last) if statistic else LEAVES.get(last, last)
    name = f"{module}.{name}" if module else name
    if last != "kernel" or rank < 2:
        return Leaf(name, lambda x: x, lambda x: x)
    if rank > 2:  # [*window, in, out] <-> [out, in, *window]
        to_axes, from_axes = (rank - 1, rank - 2, *range(rank - 2)), (*range(2, rank), 1, 0)
        return Leaf(name, lambda x: x.transpose(to_axes), lambda x: x.transpose(from_axes))
    rows, out = shape
    allowed = f"a divisor of the {rows} inputs of the layer"
    check.require(rows % channels == 0, f"flattened[{layer!r}]", channels, allowed)
    positions = rows // channels

    def moved(x: np.ndarray) -> np.ndarray:  # rows (position, channel) -> columns (channel, position)
        return x.reshape(positions, channels, out).transpose(2, 1, 0).reshape(out, rows)

    def restored(x: np.ndarray) -> np.ndarray:
        return x.reshape(out, channels, positions).transpose(2, 1, 0).reshape(rows, out)

    return Leaf(name, moved, restored)
