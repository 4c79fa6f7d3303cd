"""Input checks: each raises a one-line ``ValueError`` that names field, value and allowed range."""

from __future__ import annotations

import contextlib
import difflib
import heapq
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat, TypeGuard

LONGEST = 200  # characters of a value in a message
MANY = 20  # names; a message that suggests one does not list more
NEAR = 0.6  # the least similarity (of difflib) of a name that is suggested
MOST = 2**63 - 1  # the largest int64


def shown(value: object) -> str:
    """A value as error messages show it: its ``repr`` on one line, without the middle if it is long.

    >>> shown(0.5), shown("9" * 1000)[-40:]
    ('0.5', "999999999999999999999' (1002 characters)")
    """
    try:
        text = re.sub(r" at 0x[0-9A-Fa-f]+", "", " ".join(repr(value).splitlines()))  # no memory addresses
    except Exception:  # an object of the user's own may raise anything; Python writes at most 4300 digits of a number
        return "a whole number of too many digits" if isinstance(value, int) else f"a {type(value).__name__}"
    half = LONGEST // 5
    return text if len(text) <= LONGEST else f"{text[:half]}...{text[-half:]} ({len(text)} characters)"


def plain(value: Any) -> Any:
    """A value in the types of Python: numbers and texts of NumPy and JAX, a path as text; any other as it is."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    random_key = str(getattr(value, "dtype", "")).startswith("key<")
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)) and not random_key:
        return value.item()
    return value


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``ValueError("{field} = {value}: must be {allowed}")`` unless ``condition``."""
    if not condition:
        raise ValueError(f"{field} = {shown(value)}: must be {allowed}")


def _is_number(value: object, field: str, allowed: str) -> TypeGuard[float]:
    """Whether ``value`` is a number; False for tracers, arrays and schedules. Text, None and booleans are refused."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return True
    is_array = hasattr(value, "dtype") and value.dtype != bool
    require(is_array or callable(value) or hasattr(value, "_fields"), field, value, allowed)
    return False


@contextlib.contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field that a ``ValueError`` is about to the caller's name for it: ``{"num_clients": "clients"}``."""
    try:
        yield
    except ValueError as error:
        field, is_field, rest = str(error).partition(" = ")
        if not is_field or field not in names:
            raise
        raise ValueError(f"{names[field]} = {rest}") from None


def kind(field: str, value: object, kinds: type | tuple[type, ...], allowed: str) -> None:
    """An object of one of these types; the message shows numbers and strings, of other objects only the type."""
    if not isinstance(value, kinds):
        plain = value is None or isinstance(value, (numbers.Number, str))
        require(False, field, value if plain else f"a {type(value).__name__}", allowed)


def positive(field: str, value: object) -> None:
    """A finite number > 0 (tracers, arrays and schedules pass)."""
    allowed = "a finite number > 0"
    if _is_number(value, field, allowed):
        require(_is_finite(value) and value > 0, field, value, allowed)


def non_negative(field: str, value: object) -> None:
    """A finite number >= 0 (tracers, arrays and schedules pass)."""
    allowed = "a finite number >= 0"
    if _is_number(value, field, allowed):
        require(_is_finite(value) and value >= 0, field, value, allowed)


def in_range(field: str, value: object, low: float, high: float) -> None:
    """A number in the closed range [low, high] (tracers, arrays and schedules pass)."""
    allowed = f"between {low} and {high}"
    if _is_number(value, field, allowed):
        require(low <= value <= high, field, value, allowed)


def below_one(field: str, value: object) -> None:
    """A number in [0, 1), such as a decay rate of moments (tracers, arrays and schedules pass)."""
    allowed = "at least 0 and below 1"
    if _is_number(value, field, allowed):
        require(0 <= value < 1, field, value, allowed)


def whole(field: str, value: object, low: int = 1, high: float = math.inf) -> None:
    """An integer in [low, high]."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    top = min(high, MOST)
    open_ended = high == math.inf and not (number is not None and number > MOST)
    allowed = f"a whole number >= {low}" if open_ended else f"a whole number from {low} to {top}"
    require(number is not None and low <= number <= top, field, value, allowed)


def is_real(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite real number; False for booleans and for integers above the largest float."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: SupportsFloat) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number above the largest float
        return False


def real_positive(field: str, value: object) -> None:
    """A finite real number > 0; tracers, arrays and schedules are refused too."""
    require(is_real(value) and value > 0, field, value, "a finite number > 0")


def real_non_negative(field: str, value: object) -> None:
    """A finite real number >= 0; tracers, arrays and schedules are refused too."""
    require(is_real(value) and value >= 0, field, value, "a finite number >= 0")


def share(field: str, value: object) -> None:
    """A finite real number in [0, 1]; tracers, arrays and schedules are refused too."""
    require(is_real(value) and 0 <= value <= 1, field, value, "between 0 and 1")


def optional(checked: Callable[..., None], field: str, value: object, **bounds: object) -> None:
    """``None`` passes, any other value is checked: ``optional(whole, "updates", value, low=1)``."""
    if value is not None:
        checked(field, value, **bounds)


def one_of(field: str, value: object, allowed: Iterable[object]) -> None:
    """One of the listed values."""
    allowed = list(allowed)
    known = getattr(value, "shape", ()) == () and value in allowed
    require(known, field, value, "one of " + ", ".join(map(str, allowed)))


def path(field: str, value: str | os.PathLike[str]) -> Path:
    """A path: a non-empty string or a ``pathlib.Path``, without control characters such as a line break.

    Returns it with ``~`` and ``~user`` expanded; refused if there is no such user, or no home directory.
    """
    fits = isinstance(value, (str, os.PathLike)) and bool(str(value))
    require(fits, field, value, "a path, such as 'runs/one'")
    require(not has_control(str(value)), field, str(value), "a path without control characters")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        allowed = f"a path without {Path(value).parts[0]} (no such user, or no home directory)"
        raise ValueError(f"{field} = {shown(str(value))}: must be {allowed}") from None


def has_control(text: str) -> bool:
    """Whether a string has control characters, such as a line break."""
    return any(character < " " or character == "\x7f" for character in text)


def near_to(
    name: object,
    known: Collection[str],
    written: Callable[[str], str] = repr,
    everything: str = "`fedjax-async list` shows all",
) -> str:
    """The end of a message about an unknown name: the nearest of the ``known`` ones, and all of them if they are few.

    ``written``: how a message writes a name. ``everything``: what shows all names, where they are many.

    >>> near_to("fedavgg", ["fedavg", "asgd"]), near_to("x" * 9, ["fedavg"])
    ("; did you mean 'fedavg'? (known: fedavg, asgd)", ' (known: fedavg)')
    """
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=NEAR)
    near = [] if str(name).lower().startswith("non") else near  # non-iid is not iid
    hint = f"; did you mean {written(near[0])}?" if near else ""
    before = str(name).partition("=")[0]
    hint = f"; options follow a colon, as in {before}:OPTION=VALUE" if before in known and "=" in str(name) else hint
    if len(known) <= MANY:
        return f"{hint} (known: {', '.join(known) or 'none'})"
    return hint or f"; the nearest names are {', '.join(map(written, nearest(name, known)))} ({everything})"


def nearest(name: object, known: Iterable[str], count: int = 3) -> list[str]:
    """The ``count`` names that look most like ``name``: first those that contain it or are contained in it.

    >>> nearest("size", ["time", "batch_size", "seed"], 2)
    ['batch_size', 'time']
    """
    text = str(name).lower()

    def likeness(other: str) -> float:
        within = len(text) > 2 and (text in other or (len(other) > 2 and other in text))
        return within + difflib.SequenceMatcher(None, other, text).ratio()

    return heapq.nlargest(count, known, key=likeness)
