"""The forward pass of a ``torch.nn.Module`` in JAX: its graph by ``torch.export``, and its operations one by one.

``graph_of`` exports a module for inputs of one shape, with the number of examples left open, and refuses what has no
counterpart in ``torch_ops.py`` or ``torch_layers.py`` by name, before anything is compiled. ``run`` executes the graph.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fedjax_async.base import check
from fedjax_async.models.torch_layers import GIVEN, GIVEN_ARRAYS, LAYERS, ChannelsLast, Context
from fedjax_async.models.torch_ops import ELEMENTWISE, OPS
from fedjax_async.types import Array

ASSERTIONS = ("_assert_scalar", "_assert_async", "_assert_tensor_metadata", "sym_constrain_range_for_size",
              "sym_constrain_range")  # fmt: skip
MAY_ALIAS = ("dropout", "feature_dropout", "contiguous", "to")  # return their input itself where nothing is to do
COUNT = "num_batches_tracked"  # of BatchNorm, which does not use it
SAMPLE = 2  # examples of the batch that is exported; PyTorch takes 0 and 1 for constants


class Node(Protocol):
    """A node of ``torch.fx``."""

    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, object]
    meta: Mapping[str, Any]
    users: Mapping[Node, None]


class Exported(NamedTuple):
    """An exported forward pass.

    nodes: of ``torch.fx``, in their order. names: placeholder -> name of a parameter or buffer; ``None`` for the input.
    constants: name -> array, of what PyTorch lifted out of ``forward``.
    """

    nodes: list[Node]
    names: Mapping[str, str | None]
    constants: Mapping[str, np.ndarray]


def array_of(tensor: Any) -> np.ndarray:
    """A copy of a tensor in NumPy; floats in 32 bits."""
    tensor = tensor.detach().cpu()
    found: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's log lines and warnings: what went wrong is in the error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def graph_of(
    module: Any,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    train: bool,
    statistics: set[str],
    batch: int | None = None,
) -> Exported | None:
    """The graph for inputs [B, *shape] of JAX's ``dtype``, in training or evaluation; ``statistics``: names of buffers.

    ``batch``: B; without it the graph is for any B, and there is none (``None``) of a module that makes a constant of
    B, as ``len(x)`` does in PyTorch, or that does different things for different B.

    Raises ``ValueError`` naming what the module cannot do here.
    """
    torch = sys.modules["torch"]
    kind = torch.float32 if jnp.issubdtype(dtype, jnp.floating) else torch.bool if dtype == jnp.bool_ else torch.int64
    sample = torch.zeros((SAMPLE if batch is None else batch, *shape), dtype=kind)
    free = ({0: torch.export.Dim.DYNAMIC},) if batch is None else None
    module = copy.deepcopy(module).train(train)
    name = type(module).__name__
    try:
        with _quiet(), torch.enable_grad():
            program = torch.export.export(module, (sample,), dynamic_shapes=free, strict=False)
    except Exception as error:  # any kind: it is raised by the module's own code or by PyTorch
        if batch is None and str(error).startswith("Constraints violated"):
            return None
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        shown = f"({', '.join(map(str, ('B' if batch is None else batch, *shape)))})"
        allowed = f"a module that torch.export takes, for inputs of the shape {shown}"
        raise ValueError(
            f"module = {name}: must be {allowed}; it raised {type(error).__name__}: {line[:300]}"
        ) from None
    conditions: object = getattr(program, "_guards_code", "not known")  # on B, which PyTorch took for true
    if batch is None and conditions:
        return None
    inputs = program.graph_signature.input_specs
    names = {one.arg.name: None if one.kind.name == "USER_INPUT" else str(one.target) for one in inputs}
    lifted = {one.target for one in inputs if one.kind.name == "CONSTANT_TENSOR"}
    graph = Exported(list(program.graph.nodes), names, {one: array_of(program.constants[one]) for one in lifted})
    _check(graph, name, statistics)
    return graph


def _parts(node: Node) -> tuple[str, str]:
    """``("max", "max.dim")`` of ``aten.max.dim``; in-place operations lose their ``_``."""
    schema = node.target._schema
    packet = schema.name.partition("::")[2]
    packet = packet.removesuffix("_") if schema.is_mutable and not packet.startswith("_") else packet
    return packet, f"{packet}.{schema.overload_name or 'default'}"


def _is_plain(node: Node) -> bool:
    """Whether it is arithmetic of Python, with sizes, or takes one of several results."""
    target = node.target
    sizes = getattr(target, "__module__", "") in ("_operator", "math", "builtins") or target is operator.getitem
    return sizes or (getattr(target, "__name__", "").startswith("sym_") and not hasattr(target, "_schema"))


def _entry(node: Node) -> tuple[str, Callable[..., Any]] | None:
    """The table of an operation and its function, ``None`` without any."""
    for table, functions in (("given", GIVEN), ("arrays", GIVEN_ARRAYS), ("layers", LAYERS), ("ops", OPS)):
        for name in reversed(_parts(node)):
            if name in functions:
                return ("any" if functions is OPS and name in ELEMENTWISE else table), functions[name]
    return None


def _where(node: Node) -> str:
    """The submodule that an operation belongs to: ``features.0 (Conv2d)``."""
    stack = [one for one in (node.meta.get("nn_module_stack") or {}).values() if "." in str(one[1])]
    path, kind = stack[-1] if stack else ("", "")
    return f"{path or 'forward'} ({str(kind).rpartition('.')[2] or 'Module'})"


def _check(graph: Exported, module: str, statistics: set[str]) -> None:
    """``ValueError`` for an operation without a counterpart, and for one that changes what is used later."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known = node.op == "call_function" and (_is_plain(node) or hasattr(node.target, "_schema"))
        label = f"{node.target} in {_where(node)}"
        allowed = f"one that fedjax_async.models.torch_ops has; write this part of {module} with others, or in flax"
        check.require(known, "operation of module", label, allowed)
        if _is_plain(node):
            continue
        packet, _ = _parts(node)
        check.require(packet in ASSERTIONS or _entry(node) is not None, "operation of module", label, allowed)
        if packet == "batch_norm":
            _check_batch_norm(node, graph, statistics)
        if node.target._schema.is_mutable:
            _check_in_place(node, graph)
    (output,) = (node for node in graph.nodes if node.op == "output")
    (results,) = output.args
    alone = isinstance(results, (tuple, list)) and len(results) == 1
    check.require(alone, "outputs of module", f"{len(results)} of {module}", "one tensor")


def _check_batch_norm(node: Node, graph: Exported, statistics: set[str]) -> None:
    """``ValueError`` for moments of a batch whose running statistics are not those of a layer of BatchNorm."""
    names = [graph.names.get(getattr(one, "name", "")) for one in node.args[3:5]]
    allowed = "those of a layer of BatchNorm, with track_running_stats=True"
    check.require(not node.args[5] or set(names) <= statistics, f"running statistics of {_where(node)}", names, allowed)


def _check_in_place(node: Node, graph: Exported) -> None:
    """``ValueError`` where another name of a changed tensor is used later, or a buffer is changed."""
    changed = node.args[0]
    root = _root(changed)
    held = graph.names.get(root.name) if root.op == "placeholder" else None
    if changed is root and held is not None and held.rpartition(".")[2] == COUNT:
        return
    label, allowed = f"{node.target} in {_where(node)}", "without a change of a tensor in place"
    check.require(held is None, "operation of module", f"{label}, which changes {held}", allowed)
    when = {one: number for number, one in enumerate(graph.nodes)}
    for other in graph.nodes[: when[node]]:
        shared = other is not changed and other.op != "output" and _root(other) is root
        later = shared and any(when[user] > when[node] for user in other.users)
        check.require(not later, "operation of module", f"{label}, of which {other.name} is another name", allowed)


def _root(node: Node) -> Node:
    """The tensor that a view shows, through views of views."""
    while node.op == "call_function" and node.args and hasattr(node.args[0], "op"):
        if _is_plain(node):
            shares = node.target is operator.getitem
        else:
            shares = any(one.alias_info for one in node.target._schema.returns) or _parts(node)[0] in MAY_ALIAS
        if not shares:
            break
        node = node.args[0]
    return node


# --- execution --------------------------------------------------------------------------------------


def run(graph: Exported, values: Mapping[str, Array], x: Array | ChannelsLast, context: Context) -> Array:
    """The output for the input ``x``; ``values``: name -> parameter, buffer or constant.

    ``context.statistics`` holds the running statistics afterwards.
    """
    held: dict[object, object] = {}

    def value(argument: object) -> Any:
        if isinstance(argument, (list, tuple)):
            return [value(one) for one in argument]
        return held[argument] if hasattr(argument, "op") and argument in held else argument

    for node in graph.nodes:
        if node.op == "placeholder":
            name = graph.names[node.name]
            held[node] = x if name is None else values[name]
        elif node.op == "output":
            (result,) = node.args[0]
            return _first(value(result))
        elif _is_plain(node):
            held[node] = node.target(*value(node.args))
        elif _parts(node)[0] not in ASSERTIONS and not _counts(node, graph):
            context.layer = _where(node)
            context.names = tuple(graph.names.get(one.name, "") or "" for one in node.args[3:5] if hasattr(one, "op"))
            held[node] = _called(node, value(node.args), {k: value(v) for k, v in node.kwargs.items()}, context)
            if node.target._schema.is_mutable:
                held[node.args[0]] = held[node]
    raise ValueError("module = no output: must return a tensor")


def _counts(node: Node, graph: Exported) -> bool:
    """Whether it only counts BatchNorm's batches."""
    name = graph.names.get(getattr(node.args[0], "name", "")) if node.args else None
    return bool(node.target._schema.is_mutable and name is not None and name.rpartition(".")[2] == COUNT)


def _called(node: Node, args: list[Any], named: dict[str, Any], context: Context) -> object:
    """The result of one operation; its tensors come in the layout that it takes."""
    table, function = _entry(node)  # type: ignore[misc]
    if table == "given":
        return function(context, *args, **named)
    if table == "layers":
        return function(*args, **named)
    if table == "any" and (last := _all_last(args)) is not None:
        return ChannelsLast(function(*last, **named))
    args, named = _first(args), {name: _first(one) for name, one in named.items()}
    try:
        return function(context, *args, **named) if table == "arrays" else function(*args, **named)
    except TypeError as error:
        line = " ".join(str(error).split())
        raise ValueError(f"operation of module = {node.target} in {_where(node)}: {line}") from error


def _all_last(args: Sequence[object]) -> list[object] | None:
    """The arrays of tensors that all have their channels last; ``None`` if they do not."""
    tensors = [one for one in args if isinstance(one, ChannelsLast) or (isinstance(one, jax.Array) and one.ndim > 0)]
    if {isinstance(one, ChannelsLast) for one in tensors} != {True} or len({len(one.shape) for one in tensors}) > 1:
        return None
    return [one.data if isinstance(one, ChannelsLast) else one for one in args]


def _first(value: object) -> Any:
    """PyTorch's layout, also within lists."""
    if isinstance(value, (list, tuple)):
        return [_first(one) for one in value]
    return value.first() if isinstance(value, ChannelsLast) else value
