"""FEMNIST from LEAF's JSON files, for those who have them: 28 x 28 characters of 62 classes by their writers.

LEAF (Caldas et al. 2018) writes ``data/train/*.json`` and ``data/test/*.json`` with
``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784 floats]], "y": [labels]}}}``. The same
characters without their writers are ``tfds:name=emnist/byclass`` (``--tasks emnist``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_async.check import require
from fedjax_async.data import Dataset
from fedjax_async.data.decode import unit_images
from fedjax_async.data.federated import check_dataset

SIDE, CLASSES = 28, 62


def femnist(folder: Path) -> Dataset:
    """FEMNIST from LEAF's folder with ``train`` and ``test``; every writer is a group.

    Images become uint8 [M, 28, 28, 1], dark on light as LEAF has them. Raises ``ValueError`` naming the file, the
    writer and the entry that is wrong.
    """
    (x, y, groups), (test_x, test_y, _) = (_part(Path(folder).expanduser() / part) for part in ("train", "test"))
    return check_dataset(Dataset("femnist", x, y, test_x, test_y, unit_images, CLASSES, groups))


def _part(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and numbers of the writers of all files in a folder."""
    files = sorted(folder.glob("*.json"))
    require(bool(files), "leaf", str(folder), "a folder with LEAF's *.json files")
    writers = [(path, name, own) for path in files for name, own in _writers(path).items()]
    known = {name: number for number, name in enumerate(dict.fromkeys(name for _, name, _ in writers))}
    parts = [(*_examples(f"{path.name}, {name}", own), known[name]) for path, name, own in writers]
    x = np.concatenate([images for images, _, _ in parts])
    y = np.concatenate([labels for _, labels, _ in parts])
    return x, y, np.repeat([number for *_, number in parts], [len(labels) for _, labels, _ in parts]).astype(np.int32)


def _writers(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())["user_data"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: must be a JSON file of LEAF with user_data ({type(error).__name__})") from error
    require(isinstance(found, dict) and bool(found), f"user_data in {path}", type(found).__name__, "writers by name")
    return dict(found)


def _examples(where: str, own: Any) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [n, 28, 28, 1] and int32 [n] of one writer."""
    try:
        x, y = np.asarray(own["x"], np.float64), np.asarray(own["y"], np.float64)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: must have lists of numbers x and y ({type(error).__name__})") from error
    shape = f"[n, {SIDE * SIDE}] and [n]"
    require(x.ndim == 2 and x.shape[1] == SIDE**2 and y.shape == x.shape[:1], where, f"{x.shape}, {y.shape}", shape)
    require(bool(np.all((x >= 0) & (x <= 1))), f"x of {where}", "a value outside", "brightness in [0, 1]")
    whole = bool(np.all((y >= 0) & (y < CLASSES) & (y == np.round(y))))
    require(whole, f"y of {where}", "another value", f"whole numbers from 0 to {CLASSES - 1}")
    return np.rint(255 * x).astype(np.uint8).reshape(-1, SIDE, SIDE, 1), y.astype(np.int32)
