"""Plans in files: exact ``.npz`` archives with a header (format and version) and one column per field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import check, disk


class Format(NamedTuple):
    """The header of an archive: its format and the version of the format."""

    name: str
    version: int


def write_archive(path: str | Path, kind: Format, columns: Mapping[str, object]) -> None:
    """Write columns; a reader sees the whole old or the whole new file, never a part."""
    header: dict[str, object] = {"format": np.array(kind.name), "format_version": np.array(kind.version)}
    with disk.replacing(check.path("path", path)) as file:
        disk.write_npz(file, header | {name: np.asarray(value) for name, value in columns.items()})


def is_archive(path: str | Path, kind: Format) -> bool:
    """Whether a file has this format, in any version; false if it cannot be read."""
    found = check.path("path", path)
    try:
        return str(disk.read_npz(found).get("format", "")) == kind.name
    except (OSError, ValueError):
        return False


def read_archive(
    path: str | Path, kind: Format, names: Iterable[str], later: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """The columns ``names`` of what ``write_archive`` wrote; ``ValueError`` if the file is truncated or foreign.

    ``later``: columns that older files lack, with the values that these then have.
    """
    file = check.path("path", path)
    try:
        found = disk.read_npz(file)
    except FileNotFoundError:
        raise ValueError(f"path = {str(path)!r}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a schedule, or truncated ({error})") from None
    if str(found.get("format", "")) != kind.name:
        raise ValueError(f"{path}: not a file of the format {kind.name!r}")
    version = found["format_version"].item() if "format_version" in found else None
    if version != kind.version:
        raise ValueError(f"{path}: format version {version}, but only {kind.version} is known")
    found = dict(later or {}) | found
    wanted = list(names)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{path}: column {missing[0]!r} is missing")
    return {name: found[name] for name in wanted}


def single_numbers(path: str | Path, columns: Mapping[str, np.ndarray], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The columns in ``kinds`` as one number each; ``ValueError`` for any that is not. All others must be arrays."""
    for name, column in columns.items():
        if name in kinds and (np.shape(column) != () or np.asarray(column).dtype.kind not in "biu"):
            raise ValueError(f"{path}: column {name!r} must be one whole number; the file is damaged")
        if name not in kinds and np.ndim(column) == 0:
            raise ValueError(f"{path}: column {name!r} must be an array; the file is damaged")
    return {name: kind(columns[name]) for name, kind in kinds.items()}


def check_columns(path: str | Path, plan: NamedTuple, kinds: Mapping[str, type], length: int) -> None:
    """Raise ``ValueError`` for the first column of a plan without this length or without its dtype in ``kinds``."""
    for name, kind in kinds.items():
        column = getattr(plan, name)
        if column.shape != (length,) or column.dtype != kind:
            raise ValueError(
                f"{path}: column {name!r} is {column.dtype}{list(column.shape)}, must be {np.dtype(kind)}[{length}]"
            )
