"""The arrays of params by name, and files of weights: ``.npz``, ``.safetensors``, PyTorch's ``.pt`` and ``.pth``.

A leaf is named by its path, ``conv1/kernel``. No pickled objects are loaded: ``.npz`` files with objects are refused,
and PyTorch's files are read by ``torch.load(weights_only=True)`` if torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, disk, lazy, tree
from fedjax_async.models.safetensors import read_safetensors, safetensors_bytes
from fedjax_async.types import AnyArray, Params

BARE = "."  # the name of params that are a single array


def arrays_of(params: Params) -> dict[str, Any]:
    """``{"a": {"kernel": K}}`` -> ``{"a/kernel": K}``; entries of lists and tuples are named by their index.

    Raises: ``ValueError`` for a name that is no text, is empty, or has ``/`` or ``:``.
    """
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        for name in (key.key for key in path if isinstance(key, jax.tree_util.DictKey)):
            fits = isinstance(name, str) and name and not set(name) & set("/:")
            check.require(bool(fits), "parameter name", name, "a string without '/' and ':'")
        found["/".join(tree.path_of(path)) or BARE] = leaf
    return found


def nested(arrays: Mapping[str, Any], joint: str = "/") -> Params:
    """The inverse of :func:`arrays_of`, as nested dicts (lists and tuples become dicts by index)."""
    if set(arrays) == {BARE}:
        return arrays[BARE]
    found: dict[str, Any] = {}
    for name, value in arrays.items():
        *path, last = name.split(joint)
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def filled(like: Params, arrays: Mapping[str, AnyArray], source: str) -> Params:
    """The ``arrays`` in the structure and dtypes of ``like``, on the device.

    Raises: ``ValueError`` naming an array of ``source`` that is missing, unused, of another shape or not real.
    """
    wanted = arrays_of(like)
    for name in sorted({*arrays, *wanted}):
        found, want = (np.shape(each[name]) if name in each else "none" for each in (arrays, wanted))
        check.require(found == want, f"shape of {name} in {source}", found, f"{want}, as the model has it")
    made = []
    for name, leaf in wanted.items():
        found = np.asarray(arrays[name])
        check.require(found.dtype.kind not in "cSUO", f"type of {name} in {source}", found.dtype.name, "real numbers")
        made.append(jnp.asarray(found.astype(leaf.dtype)))
    return jax.tree.unflatten(jax.tree.structure(like), made)


def _npz(path: Path) -> Mapping[str, np.ndarray]:
    try:
        return disk.read_npz(path)
    except ValueError as error:
        raise ValueError(f"{path.name} = a damaged file: must be an .npz archive of arrays ({error})") from None


def _torch(path: Path) -> Mapping[str, Any]:
    torch = lazy.optional("torch", f"{path.name} (safetensors.torch.save_file writes a file that needs no torch)")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any kind of error: the file is damaged, or contains more than tensors
        allowed = "tensors by name alone, as torch.save(module.state_dict(), FILE) writes them"
        raise ValueError(f"{path.name} = {type(error).__name__}: must hold {allowed}") from None
    tensors = isinstance(found, Mapping) and all(isinstance(value, torch.Tensor) for value in found.values())
    check.require(tensors, path.name, type(found).__name__, "tensors by name: torch.save(module.state_dict(), FILE)")
    return found


READERS: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    ".npz": _npz,
    ".safetensors": read_safetensors,
    ".pt": _torch,
    ".pth": _torch,
}
WRITERS: dict[str, Callable[..., bytes]] = {
    ".npz": lambda arrays, torch: disk.npz_bytes(arrays),
    ".safetensors": lambda arrays, torch: safetensors_bytes(arrays, {"format": "pt" if torch else "flax"}),
}


def read_arrays(path: str | Path) -> Mapping[str, Any]:
    """The arrays of a file of weights by name; raises ``ValueError`` for another extension and for a damaged file."""
    path = check.path("path", path)
    check.one_of("extension of the file of weights", path.suffix, READERS)
    if not path.is_file():
        raise ValueError(f"weights = {str(path)!r}: must be a file, but there is none")
    return READERS[path.suffix](path)


def check_target(path: str | Path) -> Path:
    """Return the path; raises ``ValueError`` unless weights can be written to a file with this extension."""
    path = check.path("path", path)
    check.one_of("extension of the file of weights", path.suffix, WRITERS)
    return path


def write_arrays(path: str | Path, arrays: Mapping[str, object], *, torch: bool = False) -> Path:
    """Write arrays by name to an ``.npz`` or ``.safetensors`` file, whole or not at all; returns its path.

    ``torch``: whether the names are PyTorch's; the header of a ``.safetensors`` file states it.
    """
    path = check_target(path)
    disk.write(path, WRITERS[path.suffix](arrays, torch))
    return path
