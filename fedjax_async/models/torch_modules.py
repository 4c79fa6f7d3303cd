"""From a ``torch.nn.Module``, as it is, to a ``Model``: its forward pass is exported by PyTorch and runs in JAX.

PyTorch is imported only for a module of PyTorch. ``torch_graphs.py`` exports and executes, ``torch_ops.py`` and
``torch_layers.py`` have the operations.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fedjax_async.base import check, lazy
from fedjax_async.models.labels import cross_entropy
from fedjax_async.models.norm import STATISTICS
from fedjax_async.models.torch_graphs import Exported, array_of, graph_of, run
from fedjax_async.models.torch_layers import ChannelsLast, Context
from fedjax_async.models.weights import arrays_of, nested
from fedjax_async.models.wrap import SameStart
from fedjax_async.types import Array, Key, Model, Params, Path

RUNNING = ("running_mean", "running_var")


def _module_class() -> Any:
    """``torch.nn.Module``; None if torch is not imported, when no module can exist."""
    return getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)


def is_torch_instance(thing: object) -> bool:
    """Whether it is a ``torch.nn.Module``, with the weights that it has."""
    module = _module_class()
    return module is not None and isinstance(thing, module)


def is_torch_module(thing: object) -> bool:
    """Whether it is a ``torch.nn.Module``, or a class of them, or a ``partial`` of one, that needs no arguments."""
    module = _module_class()
    if module is None:
        return False
    made = thing.func if isinstance(thing, functools.partial) else thing
    if isinstance(made, type) and issubclass(made, module):
        try:
            inspect.signature(thing).bind()  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return False
        return True
    return isinstance(thing, module)


def from_torch_module(
    module: Any,
    *,
    loss: Callable[[Array, Array], Array] = cross_entropy,
    private: Callable[[Path], bool] | None = None,
    channels_first: bool | None = None,
) -> Model:
    """A ``Model`` from a ``torch.nn.Module`` whose ``forward`` maps a batch to one tensor, or from a factory of such.

    Give a factory without arguments, ``lambda: Net()`` or ``Net`` itself, for start weights by the seed of a run: it is
    called under ``torch.manual_seed`` with a number from the run's key. A module starts from the weights that it has,
    whatever the seed, and the run warns of it. The module is copied, never changed.

    The params are its parameters under its own names and in its layouts, nested by their dots:
    ``{"conv1": {"weight": ..., "bias": ...}}``. With BatchNorm they are ``{"params": ..., "batch_stats": ...}``, the
    statistics as ``running_mean`` and ``running_var``, and the model has ``train``: then BatchNorm leaves out the
    padded rows of a partial batch, with PyTorch's momentum and unbiased variance. ``models.to_torch(params)`` is the
    ``state_dict`` (without buffers of the module's own: load it with ``strict=False`` if it has any), and
    ``models.from_torch`` reads one. Parameters without ``requires_grad`` and all other buffers are constants: neither
    trained nor sent. Parameters that are shared have the first of their names.

    With a key the module is in its training mode and the key seeds dropout; without one it is in its evaluation mode.
    Floats are computed in the parameters' dtype.

    Args:
      loss: in JAX, ``loss(outputs, y) -> [B]``.
      private: see ``Model``.
      channels_first: whether inputs, which are [H, W, C] or [H, W] here ([L, C] or [L] for sequences), are turned to
        PyTorch's [C, H, W] ([C, L]). By default they are if the first layer with parameters, in the order of the
        module's attributes, is ``Conv2d`` or ``Conv1d``.

    Raises: ``ValueError`` for a module without trained parameters and, when it is traced, before anything is compiled,
    for inputs that the module does not take and for operations that JAX has no counterpart of here. Source of the
    graph: ``torch.export``, with the number of examples left open.
    """
    torch = lazy.optional("torch", "a torch.nn.Module as model")
    allowed = "a torch.nn.Module, or a factory of one without arguments such as lambda: Net()"
    seeded = not isinstance(module, torch.nn.Module)
    check.require(not seeded or callable(module), "module", type(module).__name__, allowed)
    check.require(callable(loss), "loss", loss, "a function, loss(outputs, y) -> [B]")
    in_torch = isinstance(loss, torch.nn.Module) or getattr(loss, "__module__", "").startswith("torch")
    check.require(not in_torch, "loss", type(loss).__name__, "a function of JAX, loss(outputs, y) -> [B]")
    example = _made(module, 0) if seeded else module
    check.require(isinstance(example, torch.nn.Module), "module", type(example).__name__, allowed)
    network = _Network(copy.deepcopy(example).cpu().float(), channels_first)
    start = network.params_of(network.module)
    check.require(bool(network.trained), "module", type(example).__name__, "a module with parameters that are trained")

    def apply(params: Params, x: Array, key: Key | None = None) -> Array:
        return network.call(params, x, key)[0]

    def draw(seed: np.ndarray) -> Params:
        return network.params_of(_made(module, int(seed)))

    def init(key: Key) -> Params:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), start)
        drawn: Params = jax.pure_callback(draw, shapes, jax.random.bits(key, (), jnp.uint32), vmap_method="sequential")
        return drawn

    one = "a torch module", "models.from_torch_module(lambda: Net()), or the class Net"
    train = network.call if network.statistics else None
    return Model(init if seeded else SameStart(start, *one), apply, loss, train, private)


def _made(factory: Callable[[], Any], seed: int) -> Any:
    """What the factory makes under a seed; PyTorch's own generator goes on as if nothing was drawn."""
    torch = sys.modules["torch"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


class _Network:
    """A module with the names of what is trained, of running statistics and of constants."""

    def __init__(self, module: Any, channels_first: bool | None) -> None:
        nn = sys.modules["torch"].nn
        self.module, self.channels_first = module, channels_first
        self.same: dict[str, str] = {}  # name of a parameter -> the first name of the same
        first: dict[int, str] = {}
        for name, one in module.named_parameters(remove_duplicate=False):
            self.same[name] = first.setdefault(id(one), name)
        parameters = dict(module.named_parameters())
        self.trained = [name for name, one in parameters.items() if one.requires_grad]
        kind = nn.modules.batchnorm._BatchNorm
        norms = {path: layer for path, layer in module.named_modules() if isinstance(layer, kind)}
        for path, layer in norms.items():
            check.require(layer.momentum is not None, f"momentum of {path}", None, "a number, as 0.1")
        kept = [path for path, layer in norms.items() if layer.running_mean is not None]
        self.statistics = [f"{path}.{name}".removeprefix(".") for path in kept for name in RUNNING]
        held = {*self.trained, *self.statistics}
        tensors = {**parameters, **dict(module.named_buffers(remove_duplicate=False))}
        self.constants = {name: array_of(one) for name, one in tensors.items() if name not in held}
        if channels_first is None:
            layers = (one for one in module.modules() if not list(one.children()) and list(one.parameters()))
            self.channels_first = isinstance(next(layers, None), (nn.Conv1d, nn.Conv2d))

    def params_of(self, module: Any) -> Params:
        """The params with the values of a module, in NumPy."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        weights = _nested({name: array_of(tensors[name]) for name in self.trained})
        if not self.statistics:
            return weights
        return {"params": weights, STATISTICS: _nested({name: array_of(tensors[name]) for name in self.statistics})}

    def call(self, params: Params, x: Array, key: Key | None, mask: Array | None = None) -> tuple[Array, Params]:
        """Outputs, and the params with the statistics after the batch."""
        weights, kept = (params["params"], params[STATISTICS]) if self.statistics else (params, {})
        values, statistics = (_flat(part) for part in (weights, kept))
        dtype = next(iter(values.values())).dtype
        if x.dtype != jnp.bool_:  # whole numbers have 64 bits in PyTorch
            x = x.astype(dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(int))
        given = self._as_in_torch(x)
        of = self, given.shape[1:], x.dtype, key is not None
        graph = _graph(*of) or _graph(*of, len(x))
        if graph is None:
            raise ValueError(f"module = {type(self.module).__name__}: must be a module that torch.export takes")
        context = Context(key, mask, dtype, statistics)
        arrays = {**self.constants, **graph.constants}
        values |= statistics | {name: _constant(array, dtype) for name, array in arrays.items()}
        values |= {name: values[first] for name, first in self.same.items()}
        outputs = run(graph, values, given, context)
        return outputs, {"params": weights, STATISTICS: _nested(context.statistics)} if self.statistics else params

    def _as_in_torch(self, x: Array) -> Array | ChannelsLast:
        """Rows [H, W, C], [H, W], [L, C] or [L] as [C, H, W] or [C, L], if the module takes channels first."""
        if not self.channels_first:
            return x
        nn = sys.modules["torch"].nn
        layers = [one for one in self.module.modules() if isinstance(one, (nn.Conv1d, nn.Conv2d))]
        rank = 4 if not layers or isinstance(layers[0], nn.Conv2d) else 3
        x = x[..., None] if x.ndim == rank - 1 else x
        return ChannelsLast(x) if x.ndim == rank else x


@functools.lru_cache(maxsize=64)
def _graph(
    network: _Network, shape: tuple[int, ...], dtype: DTypeLike, train: bool, batch: int | None = None
) -> Exported | None:
    statistics = set(network.statistics)
    return graph_of(network.module, shape, dtype, train=train, statistics=statistics, batch=batch)


def _constant(array: np.ndarray, dtype: DTypeLike) -> Array:
    return jnp.asarray(array, dtype if np.issubdtype(array.dtype, np.floating) else None)


def _nested(flat: Mapping[str, object]) -> Params:
    """``{"a.b": x}`` -> ``{"a": {"b": x}}``."""
    return nested(flat, ".")


def _flat(nested: Params) -> dict[str, Array]:
    return {name.replace("/", "."): leaf for name, leaf in arrays_of(nested).items()}
