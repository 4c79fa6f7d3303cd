"""Arrays that are computed when they are read: client data of any size from two stored tables of N numbers.

Client code reads ``data.order[data.offset + position]``, then ``data.x[index]`` and ``data.y[index]``. Here ``x``,
``y`` and ``order`` are virtual: they compute these rows inside the compiled step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base.check import require
from fedjax_async.data import decode as decoders
from fedjax_async.types import Array, FederatedData

# (parameters, client int32[], position int32[]) -> (x, y)
MakeExample = Callable[[Any, Array, Array], tuple[Array, Array]]

MOST_ROWS = 2**31 - 1  # row numbers are int32


def _rows(index: object, length: int) -> object:
    """The row numbers of an index; a slice becomes an int32 range."""
    return np.arange(*index.indices(length), dtype=np.int32) if isinstance(index, slice) else index


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("shape",))
@dataclasses.dataclass(frozen=True)
class Identity:
    """The array 0, 1, 2, ..., which needs no storage; int32[shape]."""

    shape: tuple[int]
    dtype = np.dtype(np.int32)
    __iter__ = None  # not iterable: no index raises IndexError, so a loop would not end

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: object) -> object:
        return _rows(index, len(self))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("parameters",),
    meta_fields=("function", "column", "stride", "shape", "dtype"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """A column of examples, x or y: row ``client * stride + position`` is ``function(parameters, client, position)``.

    A pytree with the ``parameters`` as its only leaves, so that it passes through ``jit``, ``vmap`` and ``device_put``.
    Columns of one function share compiled programs, whatever their parameters. Rows beyond a client's size are unused.
    """

    parameters: object
    function: MakeExample
    column: int  # which of the function's two results
    stride: int  # rows from one client's first example to the next one's
    shape: tuple[int, ...]  # [M, ...]
    dtype: np.dtype
    __iter__ = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: object) -> Array:
        """``[*index.shape, ...]``: the rows of an integer, an array of them or a slice; in range, unchecked."""
        return _read(self, jnp.asarray(_rows(index, len(self))).astype(jnp.int32))


@functools.partial(jax.jit, inline=True)
def _read(column: Generated, row: Array) -> Array:
    flat = row.reshape(-1)
    # The remainder changes no number, but it stops XLA from computing the row number again for every element of a row.
    # With the permutation of the minibatches in that computation, a step took 4.5 times as long on a CPU. An
    # optimisation barrier does not help: XLA drops it before it fuses.
    flat = jax.lax.rem(flat, jnp.full_like(flat, MOST_ROWS))
    client = flat // column.stride
    rows = jax.vmap(column.function, in_axes=(None, 0, 0))(column.parameters, client, flat - client * column.stride)
    return rows[column.column].reshape(*row.shape, *column.shape[1:])


def generated(
    function: MakeExample,
    *,
    sizes: np.ndarray,
    test_x: np.ndarray,
    test_y: np.ndarray,
    parameters: object = (),
    decode: Callable[[Array], Array] = decoders.as_is,
    num_classes: int | None = None,
    name: str = "generated",
) -> FederatedData:
    """Client data from a function of your own, evaluated on the device whenever an example is needed.

    Args:
      function: ``(parameters, client, position) -> (x, y)``: the example at ``position`` of ``client``, both int32[].
        It must be pure and traceable. It should be a function at module level, since compiled programs are cached by
        it. Its random numbers may depend only on its arguments (``jax.random.fold_in``, or for speed
        ``fedjax_async.base.hashing``).
      sizes: examples of each client, int[N], each at least 1; N times the largest must stay below 2^31.
      test_x, test_y: an ordinary test set of the same shapes; :func:`generate` makes one from further clients.
      parameters: a pytree of arrays or a key, passed to every call; new values need no new compilation.
      decode: raw rows -> model inputs, as for any data set.
      num_classes: ``None`` if y is not a class.
      name: the name of the data in settings and results.

    Raises ``ValueError`` naming the argument that is wrong.

    >>> def example(key, client, position):
    ...     key = jax.random.fold_in(jax.random.fold_in(key, client), position)
    ...     y = client % 2
    ...     return jax.random.normal(key, (3,)) + y.astype(float), y
    >>> x, y = generate(example, np.arange(10, 20), np.zeros(10), jax.random.key(0))
    >>> data = generated(
    ...     example, sizes=np.array([5, 7]), test_x=x, test_y=y, parameters=jax.random.key(0), num_classes=2
    ... )
    >>> data.x.shape, data.y[data.offset + 4].tolist()
    ((14, 3), [0, 1])
    """
    size = np.asarray(sizes)
    good = size.ndim == 1 and len(size) > 0 and np.issubdtype(size.dtype, np.integer) and bool(size.min() >= 1)
    require(good, "sizes", f"{size.dtype}{list(size.shape)}", "one whole number >= 1 per client")
    stride = int(size.max())
    total = len(size) * stride
    allowed = f"at most {MOST_ROWS} clients x largest size, since rows are numbered by int32"
    require(total <= MOST_ROWS, "sizes", f"{len(size)} clients, the largest of {stride} examples", allowed)
    x, y = _example_shapes(function, parameters)
    require(len(test_x) == len(test_y), "test_y", f"{len(test_y)} targets", f"one for each of {len(test_x)} rows")
    require(len(test_x) > 0, "test_x", "no rows", "at least one row")
    shape = tuple(np.shape(test_x)[1:])
    require(shape == x.shape, "test_x", f"rows of shape {shape}", f"rows of shape {x.shape}, as the function's x")
    offset = np.arange(len(size), dtype=np.int32) * np.int32(stride)

    def column(number: int, example: jax.ShapeDtypeStruct) -> Generated:
        return Generated(parameters, function, number, stride, (total, *example.shape), np.dtype(example.dtype))

    return FederatedData(
        name, column(0, x), column(1, y), Identity((total,)), offset, size.astype(np.int32),
        np.asarray(test_x), np.asarray(test_y), decode=decode, num_classes=num_classes,
    )  # fmt: skip


def _example_shapes(function: MakeExample, parameters: object) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of one example; raises ``ValueError`` unless the function returns a pair of arrays."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    result = jax.eval_shape(function, parameters, number, number)
    good = isinstance(result, tuple) and len(result) == 2 and all(hasattr(array, "shape") for array in result)
    require(good, "function", jax.tree.structure(result), "a function that returns a pair of arrays (x, y)")
    return result


def generate(
    function: MakeExample, client: object, position: object, parameters: object = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Examples as ordinary host arrays: x ``[T, ...]``, y ``[T, ...]`` for clients and positions int[T].

    Client numbers of N or more give further clients, for a test set from clients that do not train.
    """
    examples = _batched(function)
    return jax.device_get(examples(parameters, *(jnp.asarray(np.asarray(n, np.int32)) for n in (client, position))))


@functools.lru_cache(maxsize=16)
def _batched(function: MakeExample) -> Callable[..., tuple[Array, Array]]:
    return jax.jit(jax.vmap(function, in_axes=(None, 0, 0)))
