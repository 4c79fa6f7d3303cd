"""Warnings of data that a run accepts though they look as if a step of their preparation was forgotten."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from fedjax_async.base.notices import RunWarning
from fedjax_async.data.characters import PADDING
from fedjax_async.data.checking import SIDE, layout
from fedjax_async.data.decode import as_is, unit_images
from fedjax_async.types import FederatedData

SAMPLE = 256  # rows that are looked at, evenly spaced
BRIGHT = 20.0  # inputs scaled or standardised by usage stay below
LOST = 0.1  # the part of a deviation that rounding may cost
WHITE = 200  # vectors of whole numbers that reach it look like pixels, others like counts or token ids


class DataWarning(RunWarning):
    """Data look as if a step of their preparation was forgotten."""


def warn_of_owners(name: str, groups: np.ndarray | None, names: Sequence[str] | None, clients: int) -> None:
    """Warn of owners with names that share clients: tables and pictures cannot name such a client."""
    owners = 0 if groups is None or names is None else len(np.unique(groups))
    if owners > clients:
        _warn(
            name,
            f"its {owners} owners are dealt to {clients} clients, so no client has a name; clients={owners} keeps "
            "each apart",
        )


def warn_of_own_tests(name: str, rows: int, test_fraction: float) -> None:
    """Warn of test rows of the clients that ``test_fraction`` replaces by a part of their training rows."""
    _warn(
        name,
        f"its {rows} test rows are not used: test_fraction = {test_fraction} takes each client's test part from its "
        "training rows; left out, the clients are tested on their own test rows",
    )


def warn_of_looks(data: FederatedData) -> None:
    """Warn of pixels and columns that are not scaled, of channels that come first, and of labels that no client trains.

    Also of sequences of test labels that are padding alone, which lower the accuracy of any model, and of inputs and
    targets that differ by less than their last digit in float32 (the readers of tables warn of these, as they round
    themselves).

    Values are read only where they are in memory; at most 256 rows of x and of targets are.
    """
    plain = data.decode is as_is
    if (plain or data.decode is unit_images) and (said := layout(data.x.shape[1:])):
        _warn(data.name, said.removeprefix("; ").replace(": pass", "; the models take them last:"))
    names = ("x", "y") if data.num_classes is None else ("x",)
    unresolved = [said for name in names if (said := _unresolved(data, name))]
    if plain and (said := _pixels(data) or ("" if unresolved else _unscaled(data))):
        _warn(data.name, said)
    for said in unresolved:
        _warn(data.name, said)
    if isinstance(data.y, np.ndarray) and data.y.ndim == 1 and data.num_classes is not None and not data.streamed:
        _warn_of_labels(data)
    if data.num_classes is not None and np.ndim(data.test_y) == 2:
        empty = int((np.asarray(data.test_y) == PADDING).all(axis=1).sum())
        if empty > 0:
            said = f"{empty} of {len(data.test_y)} test examples have no label but padding ({PADDING})"
            _warn(data.name, f"{said}: they count as wrong, with loss 0")


def _warn(name: str, text: str) -> None:
    warnings.warn(f"data {name}: {text}", DataWarning, stacklevel=3)


def _pixels(data: FederatedData) -> str:
    """What the inputs are if they look like pixels from 0 to 255, and what to do; else ``""``."""
    x = data.x
    images = len(x.shape) >= 3 and min(x.shape[1:3]) >= SIDE
    if images and x.dtype == np.uint8:
        return "uint8 images come to the model as numbers up to 255: give decode=data.decode.unit_images"
    side = math.isqrt(x.shape[1]) if len(x.shape) == 2 else 0
    vectors = side >= SIDE and x.shape[1] in (side**2, 3 * math.isqrt(x.shape[1] // 3) ** 2)
    if not (images or vectors) or not isinstance(x, np.ndarray) or data.streamed or x.dtype.kind not in "iuf":
        return ""
    seen = x[:: max(1, len(x) // SAMPLE)][:SAMPLE].astype(np.float64)
    low, high = float(seen.min()), float(seen.max())
    whole = bool((seen == np.rint(seen)).all())
    if not 0 <= low <= high <= 255 or high <= (BRIGHT if images else WHITE) or not (images or whole):
        return ""
    advice = "divide them by 255"
    advice += ", or set normalise='training'" if x.dtype.kind == "f" else ", or pass them as uint8" if images else ""
    return f"the inputs are numbers from {low:g} to {high:g}, like pixels that are not scaled: {advice}"


def _unscaled(data: FederatedData) -> str:
    """Which column of numbers is far larger than others, such as an age beside shares, and what to do; else ``""``."""
    x = data.x
    if not isinstance(x, np.ndarray) or data.streamed or x.ndim != 2 or x.dtype.kind != "f" or x.shape[1] < 2:
        return ""
    seen = x[:: max(1, len(x) // SAMPLE)][:SAMPLE].astype(np.float64)
    sizes = np.sqrt(np.mean(seen**2, axis=0))
    large = int(np.argmax(sizes))
    if not np.isfinite(sizes).all() or sizes[large] < BRIGHT or sizes[large] < BRIGHT * np.median(sizes):
        return ""
    about = f"mean {seen[:, large].mean():.3g}, deviation {seen[:, large].std():.3g}"
    return f"column {large} of x is far larger than the others ({about}): set normalise='training', or standardise it"


def _unresolved(data: FederatedData, name: str) -> str:
    """Which number the device cannot tell apart in float32, such as a time in seconds since 1970; else ``""``."""
    x = getattr(data, name)
    exact = not isinstance(x, np.ndarray) or data.streamed or x.dtype.itemsize < 4 or x.dtype == np.float32
    return "" if exact or jnp.result_type(float) == np.float64 else rounded(name, x)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is refused elsewhere
def rounded(name: str, values: np.ndarray) -> str:
    """That float32 loses the differences of some numbers of [n, ...], and what to do; else ``""``. Reads 256 rows."""
    if not values.size:
        return ""
    seen = values[:: max(1, len(values) // SAMPLE)][:SAMPLE].reshape(-1, math.prod(values.shape[1:])).astype(np.float64)
    lost = np.abs(seen - seen.astype(np.float32)).max(axis=0) > seen.std(axis=0) * LOST
    if not (bad := np.flatnonzero(lost & (seen.max(axis=0) > seen.min(axis=0)))).size:
        return ""
    first = bad[0]
    place = ", ".join([":", *map(str, np.unravel_index(first, values.shape[1:]))])
    around = f"near {seen[:, first].mean():g}, the deviation is {seen[:, first].std():.3g}"
    where = f"{name}[{place}]" if values.ndim > 1 else name
    return f"{where} is rounded to float32, which loses its differences ({around}): subtract its mean first"


def warn_of_numbering(name: str, labels: Sequence[np.ndarray]) -> None:
    """Warn of labels that begin at 1 or later. For data whose classes are counted by their largest label.

    Labels [M, L] are sequences, in which 0 is padding.
    """
    parts = [y for y in labels if y.ndim == 1 and y.dtype.kind in "iu" and len(y) > 0]
    low = min((int(y.min()) for y in parts), default=0)
    if low > 0:
        high = max(int(y.max()) for y in parts)
        text = f"labels are from {low} to {high}, but the first class is 0: the model has {high + 1} outputs"
        _warn(name, f"{text}, and no example of class 0; pass y - {low} if the classes are numbered from {low}")


def _warn_of_labels(data: FederatedData) -> None:
    """Warn of test labels that are in no client's training part."""
    rows = np.concatenate([data.order[start : start + size] for start, size in zip(data.offset, data.size)])
    classes = int(data.num_classes or 0)
    if classes > 10**6:  # too many to count
        return
    labels = (data.y[rows], np.asarray(data.test_y))
    trained, tested = (np.bincount(each.astype(np.int64), minlength=classes) for each in labels)
    unseen = np.flatnonzero((tested > 0) & (trained == 0))
    if len(unseen) > 0:
        some = ", ".join(map(str, unseen[:5])) + (", ..." if len(unseen) > 5 else "")
        text = f"{tested[unseen].sum()} of {tested.sum()} test examples have a label that no client trains ({some})"
        _warn(data.name, f"{text}: no run can learn it")
