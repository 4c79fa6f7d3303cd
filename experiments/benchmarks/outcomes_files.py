"""The files of ``outcomes.py``: those of two folders compared to the last bit, column by column.

Tables are compared by their texts, arrays by their bytes, JSON value by value, other texts without their folder and
without seconds.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# what two versions may differ in: file -> its keys
LEFT_OUT = {"versions.json": {"revision", "fedjax-async"}, "manifest.json": {"sha256"}}
LISTED = 6  # differences that are named


def read_csv(path: Path) -> dict[str, list[str]]:
    """Column -> its texts."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def read_json(path: Path) -> dict[str, Any]:
    """Path of a value -> the value."""
    found: dict[str, Any] = {}

    def walk(at: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{at}.{key}" if at else key, inner)
        elif isinstance(value, list) and value:
            for index, inner in enumerate(value):
                walk(f"{at}[{index}]", inner)
        else:
            found[at] = value

    content = json.loads(path.read_text(encoding="utf-8"))
    left_out = LEFT_OUT.get(path.name, set())
    walk("", {key: value for key, value in content.items() if key not in left_out} if left_out else content)
    return found


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Name -> array."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


READERS: dict[str, Callable[[Path], Mapping[str, Any]]] = {".csv": read_csv, ".json": read_json, ".npz": read_npz}


def contents(folder: Path) -> dict[str, Any]:
    """``FILE:COLUMN`` -> content of all files of a folder; texts without their folder and without seconds."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.suffix in READERS:
            found |= {f"{name}:{column}": value for column, value in READERS[path.suffix](path).items()}
        elif path.is_file() and path.suffix in (".txt", ".md"):
            text = path.read_text(encoding="utf-8").replace(str(folder), "FOLDER")
            found[f"{name}:text"] = re.sub(r"\d[\d.,]* (s|ms)\b", r"N \1", text)
        elif path.is_file():
            found[f"{name}:bytes"] = path.read_bytes()
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two contents are equal to the last bit."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other)


def apart(one: Any, other: Any) -> float:
    """The largest difference between two contents; infinite where they are no numbers of one shape."""
    try:
        first, second = (np.asarray(value, np.float64) for value in (one, other))
    except (TypeError, ValueError):
        return float("inf")
    return float("inf") if first.shape != second.shape else float(np.nanmax(np.abs(first - second), initial=0.0))


def differences(before: Path, after: Path, ignored: list[str]) -> dict[str, Any]:
    """Compare the files of two folders, without columns whose names contain one of the ``ignored`` texts."""
    old, new = (
        {name: value for name, value in contents(folder).items() if not any(text in name for text in ignored)}
        for folder in (before, after)
    )
    one_only = set(old) ^ set(new)
    unequal = [name for name in old if name in new and not same(old[name], new[name])]
    short = {name: name.rpartition(":")[0].rpartition("/")[2] + ":" + name.rpartition(":")[2] for name in {*old, *new}}
    texts = [*dict.fromkeys(short[name] for name in unequal)]
    texts += [f"{text} (in one only)" for text in dict.fromkeys(short[name] for name in sorted(one_only))]
    more = f" and {len(texts) - LISTED} more" if len(texts) > LISTED else ""
    largest = max((apart(old[name], new[name]) for name in unequal), default=float("inf") if one_only else 0.0)
    return {
        "result": " ".join(texts[:LISTED]) + more if texts else "equal",
        "largest": largest,
        "files": len({name.rpartition(":")[0] for name in new}),
    }
