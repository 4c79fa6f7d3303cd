"""The check of clients' data before a run: :func:`check_data`. Its parts also check a ``Dataset`` and a user's arrays.

Every error is one line that names the first wrong entry: ``data.y[17] = 99: must be a label from 0 to 9``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base.check import require, whole
from fedjax_async.data.virtual import MOST_ROWS, Identity
from fedjax_async.types import AnyArray, FederatedData

BLOCK = 2**18  # entries tested for NaN and infinity at a time: they fit a processor's cache
LARGEST = 2**31 - 1  # the largest int32, in which the device keeps labels
MOST_CLASSES = LARGEST + 1
CHANNELS = (1, 3, 4)  # of images: grey, colour, colour with opacity
SIDE = 8  # pixels: the shortest side of images
_SURROGATES = re.compile("[\ud800-\udfff]")


def check_data(data: FederatedData) -> FederatedData:
    """Return the data with tables of int32; raises ``ValueError`` naming the first wrong field or entry.

    It refuses anything but arrays, no clients, a client without examples, no test set, NaN and infinity in inputs or
    targets, labels outside 0 .. ``num_classes`` - 1, labels that are not integers, x and y (or training and test
    examples) that do not fit together, rows outside their array in ``order``, ``offset`` and ``size`` (training,
    test and validation parts), validation rows that are trained on, and names that are not one text per client.

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
    check_about(data.name, data.decode, data.num_classes)
    for name in ("test_x", "test_y"):
        require(getattr(data, name) is not None, f"data.{name}", None, "an array: there is no run without a test set")
    check_examples(("data.x", "data.y"), data.x, data.y, data.num_classes, read=not data.streamed)
    check_examples(("data.test_x", "data.test_y"), data.test_x, data.test_y, data.num_classes)
    check_alike("data.test_x", data.test_x, "data.x", data.x)
    check_alike("data.test_y", data.test_y, "data.y", data.y)
    tables = _tables(data, "", "x", least=1)
    tables |= _tables(data, "test_", "test_x", least=0) | _tables(data, "validation_", "x", least=0)
    if data.client_names is not None:
        check_names("data.client_names", data.client_names, len(data.size))
    if not data.streamed:
        _check_held_out(tables, len(data.x))
    changed = {name: table for name, table in tables.items() if table is not getattr(data, name)}
    return data._replace(**changed) if changed else data


def _check_held_out(tables: Mapping[str, Any], rows: int) -> None:
    """Raise ``ValueError`` for a validation row that a client trains on; virtual tables are not read."""
    if "validation_order" not in tables or not is_array(tables["order"]) or not is_array(tables["validation_order"]):
        return
    trained_on, held_out = (np.zeros(rows, np.bool_) for _ in range(2))
    for marked, part in ((trained_on, ""), (held_out, "validation_")):
        order, offset, size = (tables[f"{part}{name}"] for name in ("order", "offset", "size"))
        begun = np.zeros(len(order) + 1, np.int64)  # spans that begin, minus those that end, at a position
        np.add.at(begun, offset, 1)
        np.add.at(begun, offset + size, -1)
        marked[order[np.cumsum(begun[:-1]) > 0]] = True
    if (trained_on & held_out).any():
        row = int(np.argmax(trained_on & held_out))
        require(False, "data.validation_order", row, "a row that no client trains on")


def check_about(name: object, decode: object, num_classes: object) -> None:
    """Raise ``ValueError`` for the first wrong one of these fields of data."""
    require(isinstance(name, str), "data.name", name, "text")
    require(callable(decode), "data.decode", decode, "a function of raw rows")
    if num_classes is not None:
        whole("data.num_classes", num_classes, high=MOST_CLASSES)


def check_examples(
    names: tuple[str, str], x: AnyArray, y: AnyArray, num_classes: int | None, *, least: int = 1, read: bool = True
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
        if kind(y.dtype) != "integers":
            advice = remedy(y) if read else ""
            require(False, names[1], y.dtype.name, f"integer labels, since num_classes = {num_classes}{advice}")
        sequence = len(y.shape) == 2 and y.shape[1] > 1
        allowed = f"one label per row, shape [{len(x)}], or a sequence of two or more, in which 0 is padding"
        require(len(y.shape) == 1 or sequence, names[1], _shape(y), allowed)
        require(not read or not is_one_hot(y), names[1], "one-hot rows", "labels: pass y.argmax(axis=1)")
    if read:
        for name, array in zip(names, (x, y)):
            _check_finite(name, array)
        if num_classes is not None:
            _check_labels(names[1], y, num_classes)
        for name, array in zip(names, (x, y)):
            check_fits(name, array)


def check_names(field: str, names: Sequence[str], count: int | None = None) -> None:
    """Raise ``ValueError`` unless ``names`` are texts that files can hold; with ``count``, so many, one per client."""
    allowed = f"a list or tuple of {'texts' if count is None else f'{count} texts, one per client'}"
    require(isinstance(names, (list, tuple)), field, type_name(names), allowed)
    require(count in (None, len(names)), field, f"{len(names)} names", allowed)
    for i, name in enumerate(names):
        require(isinstance(name, str), f"{field}[{i}]", name, "a text")
        require(not _SURROGATES.search(name), f"{field}[{i}]", ascii(name), "a text that UTF-8 can hold")


def is_one_hot(y: object) -> bool:
    """Whether y [M, C], C >= 2, has a single one in each row and zeros else; False for virtual arrays.

    >>> is_one_hot(np.eye(3)), is_one_hot(np.array([[0, 1], [2, 0]]))
    (True, False)
    """
    if not is_array(y) or y.ndim != 2 or y.shape[1] < 2 or len(y) == 0 or kind(y.dtype) in (None, "complex"):
        return False
    y = np.asarray(y)
    return bool(((y == 0) | (y == 1)).all() and ((y == 1).sum(axis=1) == 1).all())


def remedy(y: object) -> str:
    """The end of a message that asks for integer labels: what y is instead, and how it becomes labels; else ``""``.

    >>> remedy(np.eye(3)), remedy(np.array([True, False])), remedy(np.array([0.0, 2.0])), remedy(np.array([0.5]))
    ('; these are one-hot rows: pass y.argmax(axis=1)', '; these are truth values: pass y.astype(int)', \
'; these are labels as floats: pass y.astype(int)', '')
    """
    if is_one_hot(y):
        return "; these are one-hot rows: pass y.argmax(axis=1)"
    if not is_array(y) or y.ndim != 1 or len(y) == 0:
        return ""
    if kind(y.dtype) == "truth values":
        return "; these are truth values: pass y.astype(int)"
    y = np.asarray(y)
    whole = kind(y.dtype) == "floats" and bool(((y >= 0) & (y == np.floor(y))).all())
    return "; these are labels as floats: pass y.astype(int)" if whole else ""


def layout(shape: Sequence[int]) -> str:
    """The end of a message about inputs of ``shape`` (one example) whose channels seem to come first; else ``""``.

    >>> layout((3, 32, 32))
    '; rows of shape [3, 32, 32] look like images with the channels first: pass np.moveaxis(x, 1, -1)'
    >>> layout((32, 32, 3)), layout((28, 28))
    ('', '')
    """
    first = len(shape) == 3 and shape[0] in CHANNELS and shape[2] not in CHANNELS and min(shape[1:]) >= SIDE
    of = f"rows of shape {list(shape)} look like images with the channels first"
    return f"; {of}: pass np.moveaxis(x, 1, -1)" if first else ""


def as_labels(name: str, y: np.ndarray, num_classes: int | None = None) -> np.ndarray:
    """Integers or truth values as labels int32, without a change of value.

    ``num_classes``: if known; without it any label up to the largest int32 fits. Every reader of files makes its labels
    here, because a plain ``astype`` wraps: 2**40 becomes 0. Raises ``ValueError`` naming the first label out of range.

    >>> as_labels("y", np.array([0, 2**31 - 1])).dtype.name
    'int32'
    >>> as_labels("y", np.array([3, 2**40]))
    Traceback (most recent call last):
    ValueError: y[1] = 1099511627776: must be a label from 0 to 2147483647; targets that are no labels are floats
    """
    _check_labels(name, y, num_classes)
    return y.astype(np.int32)


def check_alike(name: str, array: AnyArray, like_name: str, like: AnyArray) -> None:
    """Raise ``ValueError`` unless both arrays have rows of one shape and one kind of number, of any precision."""
    rows, wanted = list(array.shape[1:]), list(like.shape[1:])
    require(rows == wanted, name, f"rows of shape {rows}", f"rows of shape {wanted}, as in {like_name}")
    wanted_kind = f"{kind(like.dtype)}, as in {like_name}"
    require(kind(array.dtype) == kind(like.dtype), name, array.dtype.name, wanted_kind)


def check_array(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless ``value`` is an array of numbers with an axis of rows: NumPy's, JAX's or virtual."""
    if not is_array(value) and not _is_virtual(value):
        require(False, name, type_name(value), "a NumPy or JAX array, such as np.asarray makes")
    require(kind(value.dtype) is not None, name, str(value.dtype), "an array of numbers")
    require(len(value.shape) > 0, name, _shape(value), "an array with an axis of rows")


def is_array(value: object) -> TypeGuard[AnyArray]:
    """Whether ``value`` is an array of NumPy (not a masked one) or JAX."""
    return isinstance(value, (np.ndarray, jax.Array)) and not isinstance(value, np.ma.MaskedArray)


def kind(dtype: np.dtype) -> str | None:
    """What an array of this dtype contains, in words; ``None`` if not numbers.

    >>> kind(np.dtype(np.uint8)), kind(jnp.bfloat16.dtype), kind(np.dtype("U3"))
    ('integers', 'floats', None)
    """
    if getattr(dtype, "kind", None) in ("m", "M"):  # times, which NumPy treats as integers
        return None
    kinds = {np.integer: "integers", np.floating: "floats", np.bool_: "truth values", np.complexfloating: "complex"}
    return next((word for of, word in kinds.items() if jnp.issubdtype(dtype, of)), None)


def type_name(value: object) -> str:
    """The type of a value for an error message, such as ``"list"`` or ``"torch.Tensor"``."""
    module = type(value).__module__.partition(".")[0]
    return type(value).__name__ if module == "builtins" else f"{module}.{type(value).__name__}"


def _is_virtual(value: object) -> bool:
    """Whether compiled programs can index ``value``: it looks like an array and is a pytree node."""
    looks = all(hasattr(value, name) for name in ("shape", "dtype", "__getitem__"))
    return looks and not jax.tree_util.all_leaves([value])


def _shape(array: AnyArray) -> str:
    return f"shape {list(array.shape)}"


def _check_finite(name: str, array: object) -> None:
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


def _check_labels(name: str, y: object, num_classes: int | None) -> None:
    """Raise ``ValueError`` for the first label outside 0 .. ``num_classes`` - 1, or that int32 cannot hold."""
    high = LARGEST if num_classes is None else min(num_classes - 1, LARGEST)
    more = "; targets that are no labels are floats" if num_classes is None else ""
    if num_classes is not None and is_array(y) and len(y) > 0 and int(y.min()) == 1 and int(y.max()) == num_classes:
        more = "; labels count from 0: pass y - 1"
    _check_range(name, y, high, f"a label from 0 to {high}{more}")


def _check_range(name: str, array: object, high: float, allowed: str, low: float = 0) -> None:
    """Raise ``ValueError`` for the first number outside ``low`` .. ``high``; do not read virtual arrays."""
    if not is_array(array) or len(array) == 0:
        return
    array = np.asarray(array)
    if array.min() < low or array.max() > high:
        first = tuple(int(i) for i in np.argwhere((array < low) | (array > high))[0])
        raise ValueError(f"{name}{list(first)} = {array[first]}: must be {allowed}")


def check_fits(name: str, array: object) -> None:
    """Raise ``ValueError`` for the first number that the device's 32 bits cannot hold.

    There integers would wrap, and floats become infinite.
    """
    if is_array(array) and array.dtype == np.float64 and jnp.result_type(float) != jnp.float64:
        most = float(np.finfo(np.float32).max)
        _check_range(name, array, most, f"from {-most:.4g} to {most:.4g}: floats have 32 bits", -most)
    if is_array(array) and array.dtype.kind in "iu" and array.dtype.itemsize > 4 and jnp.result_type(int) != jnp.int64:
        low, high = (0, 2**32 - 1) if array.dtype.kind == "u" else (-LARGEST - 1, LARGEST)
        _check_range(name, array, high, f"from {low} to {high}, or a float: integers have 32 bits", low)


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
