"""One setting as a field: its default, help and role, where it has no effect, and what its values must be."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from fedjax_async.base import check

MOMENTS = "a text of virtual seconds >= 0 joined by commas, such as '100,500'"


Requirement = Callable[[str, Any], object]  # f(field, value) raises ValueError for a value that is not allowed


def setting(
    default: object,
    about: str,
    role: str,
    *,
    without: str = "",
    requires: Requirement | None = None,
    example: str | None = None,
    rare: bool = False,
) -> Any:
    """A field of a group of settings.

    ``about``: its line of help. ``role``: what a sweep varies it for (``roles.py``). ``without``: the uses of settings
    in which it has no effect (``concerns.py``), separated by spaces. ``requires``: a check of values other than the
    default. ``example``: what a message shows of a text, by default the first text after "e.g." in ``about``, or the
    default. ``rare``: files leave it out where it has its default.
    """
    found = re.search(r"e\.g\. (\S+?)[;,:)]*(?:\s|$)", about)
    shown = example or (f"a text such as {found[1]!r}" if found else f"a text such as {default!r}")
    metadata = {"about": about, "role": role, "without": without.split(), "requires": requires}
    return dataclasses.field(default=default, metadata={**metadata, "example": shown, "rare": rare})


def one_of(*names: str) -> Requirement:
    """One of these texts."""
    return lambda field, value: check.one_of(field, value, names)


def known(field: str, value: object) -> None:
    """One of the names of a registry. The registries need JAX, so they are imported only for a given value."""
    from fedjax_async.data.normalise import NORMALISATIONS  # noqa: PLC0415
    from fedjax_async.engine.batches import BATCHINGS  # noqa: PLC0415
    from fedjax_async.engine.peer_points import GLOBAL_TESTS  # noqa: PLC0415
    from fedjax_async.engine.storage import SLOT_DTYPES  # noqa: PLC0415
    from fedjax_async.geometry import GROUPINGS  # noqa: PLC0415
    from fedjax_async.local import FEEDBACKS  # noqa: PLC0415

    registries: dict[str, Iterable[str]] = {
        "global_tests": GLOBAL_TESTS,
        "feedback": FEEDBACKS,
        "compress_per": GROUPINGS,
        "slots": SLOT_DTYPES,
        "batching": BATCHINGS,
        "normalise": NORMALISATIONS,
    }
    check.one_of(field, value, registries[field])


def size(field: str, value: str) -> None:
    """A size of memory, such as ``4GB``."""
    from fedjax_async.engine.devices import parse_size  # noqa: PLC0415

    parse_size(field, value)


def whole(low: int = 1, high: float = math.inf) -> Requirement:
    """A whole number in [low, high]."""
    return lambda field, value: check.whole(field, value, low, high)


def fraction(field: str, value: object) -> None:
    """A number in (0, 1)."""
    check.require(check.is_real(value) and 0 < value < 1, field, value, "a number between 0 and 1, both excluded")


def moments(text: str) -> list[float]:
    """``"100,500"`` -> [100.0, 500.0]; ``ValueError`` naming ``eval_at``."""
    try:
        plain = text.isascii() and "_" not in text
        found = [float(part) if plain else -1.0 for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    check.require(all(check.is_real(moment) and moment >= 0 for moment in found), "eval_at", text, MOMENTS)
    check.require(
        all(a < b for a, b in itertools.pairwise(found)), "eval_at", text, "in increasing order, each moment once"
    )
    return found


MOST_LANES = 1024  # each is a thread of the host
