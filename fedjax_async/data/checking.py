"""The check of clients' data before a run: :func:`check_data`. Its parts also check a ``Dataset`` and a user's arrays.

Every error is one line that names the first wrong entry: ``data.y[17] = 99: must be a label from 0 to 9``.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.check import require, whole
from fedjax_async.data.virtual import MOST_ROWS, Identity
from fedjax_async.types import FederatedData

BLOCK = 2**18  # entries tested for NaN and infinity at a time: they fit a processor's cache


def check_data(data: FederatedData) -> FederatedData:
    """Return the data with tables of int32; raises ``ValueError`` naming the first wrong field or entry.

    It refuses anything but arrays, no clients, a client without examples, no test set, NaN and infinity in inputs or
    targets, labels outside 0 .. ``num_classes`` - 1, labels that are not integers, x and y (or training and test
    examples) that do not fit together, and rows outside their array in ``order``, ``offset`` and ``size`` (training,
    test and validation parts).

    The values of x and y are not read, and so not checked, if they are virtual or ``data.streamed`` is true. The same
    holds for the values of a virtual ``order`` other than ``Identity``. Their shapes, types and lengths are checked,
    and so is the test set. ``write_clients`` has checked the labels of a folder. Only tables of another type than int32
    are copied.

    >>> from fedjax_async.data.embedded import fashion_mnist_6k
    >>> from fedjax_async.data.federated import federate
    >>> data = federate(fashion_mnist_6k(), "iid", num_clients=10)
    >>> check_data(data) is data
    True
    >>> data.offset[3] = 4999
    >>> check_data(data)
    Traceback (most recent call last):
    ValueError: data.offset[3] = 4999: must be from 0 to 4500, so that 500 rows lie within the 5000 of data.order
    """
    made = "FederatedData, made by data.federate or data.from_arrays"
    require(isinstance(data, FederatedData), "data", type_name(data), made)
    require(isinstance(data.name, str), "data.name", data.name, "text")
    require(callable(data.decode), "data.decode", data.decode, "a function of raw rows")
    if data.num_classes is not None:
        whole("data.num_classes", data.num_classes)
    for name in ("test_x", "test_y"):
        require(getattr(data, name) is not None, f"data.{name}", None, "an array: there is no run without a test set")
    check_examples(("data.x", "data.y"), data.x, data.y, data.num_classes, read=not data.streamed)
    check_examples(("data.test_x", "data.test_y"), data.test_x, data.test_y, data.num_classes)
    check_alike("data.test_x", data.test_x, "data.x", data.x)
    check_alike("data.test_y", data.test_y, "data.y", data.y)
    tables = _tables(data, "", "x", least=1)
    tables |= _tables(data, "test_", "test_x", least=0) | _tables(data, "validation_", "x", least=0)
    changed = {name: table for name, table in tables.items() if table is not getattr(data, name)}
    return data._replace(**changed) if changed else data


def check_examples(
    names: tuple[str, str], x: Any, y: Any, num_classes: int | None, *, least: int = 1, read: bool = True
) -> None:
    """Raise ``ValueError`` unless x ``[M, ...]`` and y are arrays that fit together; ``names``: names of x and y.

    With ``num_classes``, y must be labels [M], or [M, L] for sequences. ``least``: the smallest M. ``read``: whether
    values are checked too.
    """
    for name, array in zip(names, (x, y)):
        check_array(name, array)
    require(len(x) >= least, names[0], "no rows", "at least one row, one per example")
    require(len(x) <= MOST_ROWS, names[0], f"{len(x)} rows", f"at most {MOST_ROWS} rows, numbered by int32")
    require(0 not in x.shape[1:], names[0], _shape(x), "rows with at least one number each")
    require(len(y) == len(x), names[1], f"{len(y)} rows", f"one for each of the {len(x)} rows of {names[0]}")
    if num_classes is not None:
        labels = f"integer labels, since num_classes = {num_classes}"
        require(kind(y.dtype) == "integers", names[1], y.dtype.name, labels)
        sequence = len(y.shape) == 2 and y.shape[1] > 1
        allowed = f"one label per row, shape [{len(x)}], or a sequence of two or more, in which 0 is padding"
        require(len(y.shape) == 1 or sequence, names[1], _shape(y), allowed)
    if read:
        for name, array in zip(names, (x, y)):
            _check_finite(name, array)
        if num_classes is not None:
            _check_range(names[1], y, num_classes - 1, f"a label from 0 to {num_classes - 1}")


def check_alike(name: str, array: Any, like_name: str, like: Any) -> None:
    """Raise ``ValueError`` unless both arrays have rows of one shape and one kind of number, of any precision."""
    rows, wanted = list(array.shape[1:]), list(like.shape[1:])
    require(rows == wanted, name, f"rows of shape {rows}", f"rows of shape {wanted}, as in {like_name}")
    wanted_kind = f"{kind(like.dtype)}, as in {like_name}"
    require(kind(array.dtype) == kind(like.dtype), name, array.dtype.name, wanted_kind)


def check_array(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is an array of numbers with an axis of rows: NumPy's, JAX's or virtual."""
    good = is_array(value) or _is_virtual(value)
    require(good, name, type_name(value), "a NumPy or JAX array, such as np.asarray makes")
    require(kind(value.dtype) is not None, name, str(value.dtype), "an array of numbers")
    require(len(value.shape) > 0, name, _shape(value), "an array with an axis of rows")


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array of NumPy (not a masked one) or JAX."""
    return isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, np.ma.MaskedArray)


def kind(dtype: Any) -> str | None:
    """What an array of this dtype contains, in words; ``None`` if not numbers.

    >>> kind(np.dtype(np.uint8)), kind(jnp.bfloat16.dtype), kind(np.dtype("U3"))
    ('integers', 'floats', None)
    """
    if getattr(dtype, "kind", None) in ("m", "M"):  # times, which NumPy treats as integers
        return None
    kinds = {np.integer: "integers", np.floating: "floats", np.bool_: "truth values", np.complexfloating: "complex"}
    return next((word for of, word in kinds.items() if jnp.issubdtype(dtype, of)), None)


def type_name(value: Any) -> str:
    """The type of a value for an error message, such as ``"list"`` or ``"torch.Tensor"``."""
    module = type(value).__module__.partition(".")[0]
    return type(value).__name__ if module == "builtins" else f"{module}.{type(value).__name__}"


def _is_virtual(value: Any) -> bool:
    """Whether compiled programs can index ``value``: it looks like an array and is a pytree node."""
    looks = all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))
    return looks and not jax.tree_util.all_leaves([value])


def _shape(array: Any) -> str:
    return f"shape {list(array.shape)}"


def _check_finite(name: str, array: Any) -> None:
    """Raise ``ValueError`` for the first entry that is NaN or infinite; do not read virtual arrays and integers."""
    if not is_array(array) or not jnp.issubdtype(array.dtype, np.inexact):
        return
    array = np.asarray(array)
    rows = max(1, BLOCK // max(1, math.prod(array.shape[1:])))
    for start in range(0, len(array), rows):
        finite = np.isfinite(array[start : start + rows])
        if not finite.all():
            first = [int(i) for i in np.argwhere(~finite)[0]]
            position = (start + first[0], *first[1:])
            raise ValueError(f"{name}{list(position)} = {array[position]}: must be finite")


def _check_range(name: str, array: Any, high: Any, allowed: str) -> None:
    """Raise ``ValueError`` for the first integer outside 0 .. ``high``; do not read virtual arrays."""
    if not is_array(array) or len(array) == 0:
        return
    array = np.asarray(array)
    if array.min() < 0 or array.max() > high:
        first = tuple(int(i) for i in np.argwhere((array < 0) | (array > high))[0])
        raise ValueError(f"{name}{list(first)} = {array[first]}: must be {allowed}")


def _tables(data: FederatedData, part: str, pool: str, least: int) -> dict[str, Any]:
    """The checked ``order``, ``offset`` and ``size`` of a part, as int32, by name; ``{}`` if the data lack the part.

    ``part``: ``""``, ``"test_"`` or ``"validation_"``; ``pool``: the field with the rows; ``least``: the smallest size.
    """
    names = [f"{part}{name}" for name in ("order", "offset", "size")]
    values = [getattr(data, name) for name in names]
    if part and all(value is None for value in values):
        return {}
    order, offset, size = (f"data.{name}" for name in names)
    order_of, offset_of, size_of = (_integers(f"data.{name}", value) for name, value in zip(names, values))
    clients, length, rows = len(data.size), len(order_of), len(getattr(data, pool))
    require(clients > 0, "data.size", "no clients", "one entry per client, at least one")
    for name, table in ((offset, offset_of), (size, size_of)):
        require(len(table) == clients, name, f"{len(table)} entries", f"{clients} entries, one per client")
    require(length >= least, order, "no rows", "at least one row")
    require(length <= MOST_ROWS, order, f"{length} rows", f"at most {MOST_ROWS} rows, numbered by int32")
    if isinstance(order_of, Identity):
        require(length <= rows, order, f"Identity({length})", f"at most {rows} rows, those of data.{pool}")
    _check_range(order, order_of, rows - 1, f"a row of data.{pool}, from 0 to {rows - 1}")
    bad = (size_of < least) | (size_of > length)
    if bad.any():
        client = int(np.argmax(bad))
        allowed = f"from {least} to {length}, the length of {order}"
        require(False, f"{size}[{client}]", int(size_of[client]), allowed)
    last = length - size_of.astype(np.int64)
    bad = (offset_of < 0) | (offset_of > last)
    if bad.any():
        client = int(np.argmax(bad))
        allowed = f"from 0 to {last[client]}, so that {size_of[client]} rows lie within the {length} of {order}"
        require(False, f"{offset}[{client}]", int(offset_of[client]), allowed)
    tables = zip(names, (order_of, offset_of, size_of))
    return {name: table.astype(np.int32, copy=False) if is_array(table) else table for name, table in tables}


def _integers(name: str, value: Any) -> Any:
    """The table as a NumPy array of integers [n]; a virtual ``order`` unchanged."""
    check_array(name, value)
    good = kind(value.dtype) == "integers" and len(value.shape) == 1
    require(good, name, f"{value.dtype}{list(value.shape)}", "integers with one axis")
    require(is_array(value) or name.endswith("order"), name, type_name(value), "a NumPy array")
    return np.asarray(value) if is_array(value) else value
