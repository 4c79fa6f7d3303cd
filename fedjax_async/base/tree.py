"""The pytree helpers of the package; use ``optax.tree`` if it has the operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.interpreters.partial_eval import dce_jaxpr

from fedjax_async.base import spec
from fedjax_async.types import Array, Facts, Number, Params, Path, State, Stays, Structure, Tree, Whole

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr
    from jax.tree_util import KeyPath

# what decides shapes and programs is a part of the structure; ``types.py`` knows no JAX
jax.tree_util.register_dataclass(Facts, ("updates", "server_steps"), ("num_clients", "every_closes", "longest_step"))

Kinds = tuple[tuple[tuple[int, ...], jnp.dtype], ...]  # shapes and dtypes of leaves
# Prefix of a column's name -> the setting that adds such columns.
ADDED_BY = {
    "validation": "validation_fraction",
    "energy": "energy",
    "carbon": "energy",
    "upload_": "compress",
    "values_bytes": "compress",
}


@jax.tree_util.register_pytree_with_keys_class
class Columns(dict[str, Any]):
    """The columns of a table by name; a dictionary whose ``KeyError`` lists the names that exist."""

    def __missing__(self, name: str) -> NoReturn:
        start = next((start for start in ADDED_BY if str(name).startswith(start)), "")
        there = not start or any(column.startswith(start) for column in self)
        hint = "" if there else f"; runs with the setting {ADDED_BY[start]} have it"
        raise KeyError(f"{name!r}: must be one of {', '.join(self)}{hint}")

    def tree_flatten_with_keys(self) -> tuple[tuple[object, ...], tuple[str, ...]]:
        """Values with their keys, and names, for JAX."""
        return tuple((jax.tree_util.DictKey(name), column) for name, column in self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[object]) -> Columns:
        """The inverse of :meth:`tree_flatten_with_keys`."""
        return cls(zip(names, values, strict=True))


def _with_keys(one: spec.Spec) -> tuple[list[tuple[object, object]], spec.Static]:
    leaves, static = spec.flatten(one)
    names = [*map(str, range(static.positional)), *static.options]
    keys = [jax.tree_util.GetAttrKey(name) for name, value in zip(names, static.values) if value is spec.LEAF]
    return list(zip(keys, leaves, strict=True)), static


jax.tree_util.register_pytree_with_keys(spec.Spec, _with_keys, spec.unflatten, spec.flatten)


def gather(tree: Tree, index: Whole | tuple[Array, ...]) -> Tree:
    """Row(s) ``index`` of every leaf: ``[S, ...] -> [W, ...]``, or ``[...]`` for a scalar; no range check."""
    return jax.tree.map(lambda leaf: leaf.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False), tree)


def read_rows(table: Tree, index: Array) -> Tree:
    """:func:`gather` behind a condition that always holds, for a table that the same loop iteration writes.

    XLA:CPU fuses a plain read into whatever uses it, also into operations after the write. For that it copies the
    whole table in every iteration (90 ms instead of 1 at 1,000 rows of 50,000). It does not fuse conditionals. On other
    backends this is :func:`gather`.
    """
    if jax.default_backend() != "cpu":
        return gather(table, index)

    def nothing() -> Tree:
        return jax.tree.map(lambda leaf: jnp.zeros(index.shape + leaf.shape[1:], leaf.dtype), table)

    return jax.lax.cond(jnp.min(index) >= 0, lambda: gather(table, index), nothing)


def scatter(tree: Tree, index: Whole, rows: Tree) -> Tree:
    """A copy of ``tree`` with ``rows`` written to the row(s) ``index``; no range check."""

    def written(leaf: Array, row: Array) -> Array:
        if jnp.ndim(index) == 0:
            row = jnp.asarray(row, leaf.dtype)
            return jax.lax.dynamic_update_index_in_dim(leaf, row, index, 0, allow_negative_indices=False)
        return leaf.at[index].set(row, mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.tree.map(written, tree, rows)


def scatter_where(tree: Tree, index: Array, rows: Tree, active: Array) -> Tree:
    """:func:`scatter` of several rows; rows with ``active`` (bool[W]) false are not written."""

    def written(leaf: Array, row: Array) -> Array:
        return leaf.at[jnp.where(active, index, leaf.shape[0])].set(row, mode="drop", wrap_negative_indices=False)

    return jax.tree.map(written, tree, rows)


def where(condition: Array, yes: Tree, no: Tree) -> Tree:
    """Leafwise ``jnp.where`` with one scalar condition for the whole tree."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def when(condition: Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """``change(tree)`` if ``condition`` (bool[]) holds, else ``tree``; ``change`` is computed only if it holds.

    On a CPU this is a loop of one or zero iterations, because a loop works in place: there ``lax.cond`` copies the
    whole tree in either branch (FedAdam with 2 million parameters: 3.9 ms per arrival instead of 1.1). Elsewhere a loop
    of unknown length would make the host wait for the device.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.cond(condition, change, lambda tree: tree, tree)
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, tree: change(tree), tree)


def num_operations(jaxpr: Jaxpr) -> int:
    """Operations of a traced function, those of the functions that it calls among them."""
    inner = [each for eqn in jaxpr.eqns for value in eqn.params.values() for each in _jaxprs(value)]
    return len(jaxpr.eqns) + sum(map(num_operations, inner))


def _jaxprs(value: Any) -> list[Jaxpr]:
    """The traced functions in a parameter of an operation."""
    if isinstance(value, tuple | list):
        return [found for one in value for found in _jaxprs(one)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []


def loop(name: str, first: Whole, last: Whole, body: Callable[[Array, Tree], Tree], start: Tree) -> Tree:
    """``jax.lax.fori_loop(first, last, body, start)`` with a name, by which a loop is known in a compiled program.

    ``experiments/benchmarks/gpu_programs.py`` reads from the run's plan how often a loop of this name runs.
    """
    with jax.named_scope(f"loop:{name}"):
        return jax.lax.fori_loop(first, last, body, start)


def path_of(path: KeyPath) -> Path:
    """A path of JAX's keys as names: ``("layer", "0", "kernel")``."""
    names = (
        next(value for field in ("key", "name", "idx") if (value := getattr(k, field, None)) is not None) for k in path
    )
    return tuple(map(str, names))


def split(tree: Tree, chosen: Callable[[Path], bool]) -> tuple[Tree, Tree]:
    """``(the other leaves, the chosen leaves)``: two trees, with ``None`` in place of the leaves that are missing."""
    others = jax.tree_util.tree_map_with_path(lambda path, leaf: None if chosen(path_of(path)) else leaf, tree)
    picked = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf if chosen(path_of(path)) else None, tree)
    return others, picked


def join(first: Tree, second: Tree) -> Tree:
    """The inverse of :func:`split`: the leaves of ``first``, and those of ``second`` where ``first`` has ``None``."""
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def shared(tree: Tree, params: Params, private: Stays | None) -> Tree:
    """``tree`` with ``None`` for the private leaves of each subtree that has the structure of ``params``.

    Also of subtrees that have only some of its entries, such as the weights without the running statistics.
    """
    if private is None:
        return tree
    structure: Structure = jax.tree.structure(params)
    entries = params if isinstance(params, dict) else {}

    def alike(part: object, other: Structure) -> bool:
        return bool(jax.tree.structure(part) == other)

    def is_model(part: object) -> bool:
        if isinstance(part, dict) and part and part.keys() < entries.keys():
            return all(alike(entry, jax.tree.structure(entries[name])) for name, entry in part.items())
        return alike(part, structure)

    return jax.tree.map(lambda part: split(part, private)[0] if is_model(part) else part, tree, is_leaf=is_model)


def leaves_read(function: Callable[..., object], *arguments: object) -> list[bool]:
    """For each leaf of the arguments (arrays, or their shapes): whether the results of ``function`` depend on it.

    The function is traced and not run.
    """
    traced = jax.make_jaxpr(function)(*thawed(frozen(arguments))).jaxpr
    return list(dce_jaxpr(traced, [True] * len(traced.outvars))[1])


def shapes(function: Callable[..., Tree], *arguments: object, given: tuple[object, ...] = ()) -> Tree:
    """``jax.eval_shape`` of ``function(*given, *arguments)``, traced once for a function, what is given, and shapes.

    Tracing takes milliseconds, and the runs of a sweep ask for the same shapes again and again. The function must last,
    not be made anew each time, and what is given must have a hash.
    """
    return _shapes(function, given, frozen(arguments), jnp.result_type(float))


@lru_cache(maxsize=256)
def _shapes(
    function: Callable[..., Tree], given: tuple[object, ...], arguments: tuple[Structure, Kinds], real: jnp.dtype
) -> Tree:
    del real  # in 64-bit mode the shapes are others
    return jax.eval_shape(partial(function, *given), *thawed(arguments))


def frozen(tree: object) -> tuple[Structure, Kinds]:
    """The structure of a tree, and the shapes and dtypes of its leaves: a value that has a hash."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def thawed(frozen: tuple[Structure, Kinds]) -> Any:
    """The tree of shapes that :func:`frozen` describes."""
    structure, leaves = frozen
    return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])


def norm(tree: object) -> Array:
    """Euclidean norm over all leaves, in JAX's default float type; float[]."""
    real = jnp.result_type(float)
    squares = [jnp.sum(jnp.square(leaf.astype(real))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), real)))


def is_finite(tree: object) -> Array:
    """Whether all floats of all leaves are finite; bool[]. Leaves of other types count as finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats], jnp.bool_))


def wide(tree: Tree) -> Tree:
    """Leaves of half precision in float32, for sums: in bfloat16 a sum of ones stops at 256."""

    def widened(leaf: Array) -> Array:
        half = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if half else leaf

    return jax.tree.map(widened, tree)


def cast_like(tree: Tree, like: Tree) -> Tree:
    """``tree`` with the dtypes of ``like``."""
    return jax.tree.map(lambda leaf, other: leaf.astype(other.dtype), tree, like)


def stack_zeros(tree: Tree, rows: int) -> Tree:
    """Zeros shaped like ``rows`` copies of ``tree`` (arrays, keys, or their shapes) on a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), tree)


def optimize(
    optimizer: optax.GradientTransformation,
    gradient: Params,
    state: State,
    params: Params,
    factor: Number | None = None,
    **given: object,
) -> tuple[Params, State]:
    """One optax step: ``(params + factor * updates, state)``; ``given``: further arguments of the optimiser's update.

    optax mixes integer step counts with floats, which strict promotion forbids; this is the only place of the package
    that allows it. The state keeps its dtypes, as a loop requires, even if a traced float32 hyperparameter is combined
    with bfloat16 moments.
    """

    def kept(new: Array, old: Array) -> Array:
        return new if new.dtype == old.dtype else new.astype(old.dtype)

    with jax.numpy_dtype_promotion("standard"):
        updates, after = optimizer.update(gradient, state, params, **given)
        if factor is not None:
            updates = jax.tree.map(lambda u: u * jnp.asarray(factor, u.dtype), updates)
        return optax.apply_updates(params, updates), jax.tree.map(kept, after, state)


def share_of(share: Number, total: Array) -> Array:
    """``share * total``, float[]; if only rounding keeps it from a whole number, that one: 0.15 * 100 is 15.000001."""
    real = jnp.result_type(float)
    product = jnp.asarray(share, real) * total.astype(real)
    whole = jnp.round(product)
    return jnp.where(jnp.abs(product - whole) <= 3e-7 * product, whole, product)


def num_bytes(params: Params) -> int:
    """Bytes of all leaves as stored: the size of one uncompressed message."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def num_scalars(params: Params) -> int:
    """D, the number of scalars in the tree."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(params))
