"""LEAF's JSON files: FEMNIST, Shakespeare, Sent140 and vectors of numbers; every user is a natural client.

LEAF (Caldas et al. 2018) writes ``data/train/*.json`` and ``data/test/*.json`` with
``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_async.base import registry
from fedjax_async.base.check import require
from fedjax_async.data import characters
from fedjax_async.data.decode import as_is, unit_images
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.clients import ClientRows, existing, labels_of, numbers, pooled, read_json
from fedjax_async.types import Array

SIDE, WINDOW, TWEET = 28, 80, 140
TEXT_OF_A_TWEET = 4  # index of the text in [id, date, query, user, text]


class Task(NamedTuple):
    """How the lists of a user are read: ``read(where, x, y) -> (x [n, ...], y [n])``; ``where`` is for errors."""

    read: Callable[[str, object, object], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[Array], Array] = as_is
    num_classes: int | None = None


def _images(where: str, x: object, y: object) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 28, 28, 1] from rows of 784 brightnesses, and labels int32 [n] of 62 classes."""
    found = numbers(f"{where}, x", x, 2)
    require(found.shape[1] == SIDE**2, f"{where}, x", f"rows of {found.shape[1]}", f"rows of {SIDE**2} numbers")
    require(bool(np.all((found >= 0) & (found <= 1))), f"{where}, x", "a value outside", "brightness in [0, 1]")
    return np.rint(255 * found).astype(np.uint8).reshape(-1, SIDE, SIDE, 1), labels_of(f"{where}, y", y, 62)


def _next_characters(where: str, x: object, y: object) -> tuple[np.ndarray, np.ndarray]:
    """Codes of 80 characters, uint8 [n, 80], and the code of the character after them, int32 [n]."""
    texts, next_one = _texts(f"{where}, x", x), _texts(f"{where}, y", y)
    for name, found, length in (("x", texts, WINDOW), ("y", next_one, 1)):
        wrong = next((i for i, text in enumerate(found) if len(text) != length), None)
        if wrong is not None:
            require(False, f"{where}, {name}[{wrong}]", found[wrong], f"a text of {length} characters")
    return characters.rows(texts, WINDOW), characters.rows(next_one, 1)[:, 0].astype(np.int32)


def _tweets(where: str, x: object, y: object) -> tuple[np.ndarray, np.ndarray]:
    """Codes of the tweets, uint8 [n, 140], and labels int32 [n]: 1 for a positive tweet, else 0."""
    rows = x if isinstance(x, list) else []
    good = isinstance(x, list) and all(isinstance(row, list) and len(row) > TEXT_OF_A_TWEET for row in rows)
    require(good, f"{where}, x", f"a {type(x).__name__}", "lists of id, date, query, user and text")
    texts = _texts(f"{where}, x", [row[TEXT_OF_A_TWEET] for row in rows])
    return characters.rows(texts, TWEET), labels_of(f"{where}, y", y, 2)


def _vectors(where: str, x: object, y: object) -> tuple[np.ndarray, np.ndarray]:
    """Vectors float32 [n, D] and labels int32 [n]."""
    return numbers(f"{where}, x", x, 2).astype(np.float32), labels_of(f"{where}, y", y)


def _texts(where: str, values: Any) -> list[str]:
    good = isinstance(values, list) and all(isinstance(value, str) for value in values)
    require(good, where, f"a {type(values).__name__}", "a list of texts")
    return list(values)


TASKS: dict[str, Task] = {
    "femnist": Task(_images, unit_images, 62),
    "shakespeare": Task(_next_characters, num_classes=len(characters.VOCABULARY)),
    "sent140": Task(_tweets, num_classes=2),
    "vectors": Task(_vectors),
}


def leaf(*, path: str, task: str = "femnist") -> Dataset:
    """LEAF's JSON files: leaf:task=femnist,path=DIR; tasks femnist, shakespeare, sent140, vectors. Natural clients.

    ``path``: a folder with ``train`` and ``test``, a folder of ``*.json`` without a test set, or one such file.

    - femnist: uint8 [M, 28, 28, 1], dark on light as in LEAF, and 62 classes;
    - shakespeare: codes of 80 characters (``data.characters``) and of the next one, for ``char_gru:last=true``;
    - sent140: codes of the tweets, cut to 140 characters, and 2 classes, for ``char_gru:last=true``;
    - vectors: float32 [M, D] and labels, as in LEAF's synthetic data.

    Raises ``ValueError`` naming file, user and entry. CelebA and Reddit are not supported. Source: Caldas et al.
    (2018).
    """
    chosen: Task = registry.find("task", TASKS, task)
    root = existing(path)
    split = root.is_dir() and (root / "train").is_dir()
    train, test = (root / "train", root / "test") if split else (root, None)
    parts = [[] if folder is None else list(_parts(folder, chosen)) for folder in (train, test)]
    return pooled(task, *parts, decode=chosen.decode, num_classes=chosen.num_classes)


def _parts(source: Path, task: Task) -> Iterator[ClientRows]:
    """The users of a file, or of all files in a folder."""
    files = sorted(source.glob("*.json")) if source.is_dir() else [source]
    require(bool(files), "path", str(source), "a folder with LEAF's *.json files")
    for file in files:
        for user, own in _users(file).items():
            where = f"{file}, {user}"
            good = isinstance(own, dict) and {"x", "y"} <= own.keys()
            require(good, where, f"a {type(own).__name__}", "an object with x and y")
            if own["x"] == own["y"] == []:
                continue  # a user without examples in this part
            x, y = task.read(where, own["x"], own["y"])
            require(len(x) == len(y), where, f"{len(x)} x and {len(y)} y", "as many x as y")
            yield ClientRows(user, x, y)


def _users(file: Path) -> dict[str, Any]:
    """``user_data`` of a file, checked against ``users`` and ``num_samples`` where the file has them."""
    content = read_json(file)
    found: Any = content.get("user_data") if isinstance(content, dict) else None
    good = isinstance(found, dict) and bool(found)
    require(good, f"'{file}': user_data", f"a {type(found).__name__}", "an object with the users' names as keys")
    users, counts = content.get("users", list(found)), content.get("num_samples")
    good = isinstance(users, list) and all(isinstance(user, str) for user in users) and sorted(users) == sorted(found)
    require(good, f"'{file}': users", f"others than the {len(found)} of user_data", "the names in user_data")
    if counts is not None:
        given = f"{len(counts)} numbers" if isinstance(counts, list) else f"a {type(counts).__name__}"
        good = isinstance(counts, list) and len(counts) == len(users)
        require(good, f"'{file}': num_samples", given, f"a list of {len(users)}, one number per user, or left out")
        stated = dict(zip(users, counts))
        for user, own in found.items():
            size = len(own["y"]) if isinstance(own, dict) and isinstance(own.get("y"), list) else None
            wanted = stated.get(user)
            require(wanted == size, f"'{file}': examples of {user}", size, f"{wanted} (num_samples)")
    return dict(found)
