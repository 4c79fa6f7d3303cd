"""Layers that stay with their client, by name: heads, feature extractors, and the normalisation layers of FedBN."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache

from fedjax_async.base import check
from fedjax_async.models.norm import STATISTICS
from fedjax_async.models.weights import arrays_of
from fedjax_async.types import Model, Params, Path

NORMS = "norms"  # the pattern that stands for all normalisation layers


def personal_paths(names: str, params: Params) -> frozenset[Path]:
    """The paths of the leaves of ``params`` that match ``names``.

    ``names``: patterns joined by commas, ``*`` for any characters. A pattern matches a layer by its path
    (``conv1/norm``) or by any name on the path (``norm``), with all leaves below it, running statistics included.
    ``norms`` matches all normalisation layers: those with a ``scale`` or with running statistics (PyTorch's BatchNorm).

    Raises: ``ValueError`` for a pattern that matches nothing (it lists the model's layers), and if all leaves match.

    Source: Li et al. (2021, FedBN: normalisation layers); Arivazhagan et al. (2019, FedPer: the last layers); Liang et
    al. (2020: the first layers).

    >>> sorted(personal_paths("out*", {"fc1": {"kernel": 0}, "output": {"kernel": 0, "bias": 0}}))
    [('output', 'bias'), ('output', 'kernel')]
    """
    paths = [tuple(name.split("/")) for name in arrays_of(params)]
    nested = {path[0] for path in paths} == {"params", STATISTICS}
    layers = {path: path[1:] if nested else path for path in paths}
    scaled = {layer[:-1] for path, layer in layers.items() if layer[-1] == "scale" or path[0] == STATISTICS}
    known = sorted({"/".join(layer[:-1]) or layer[-1] for layer in layers.values()})
    found: set[Path] = set()
    for name in names.split(","):
        if name == NORMS:
            meant = {path for path, layer in layers.items() if layer[:-1] in scaled}
        else:
            meant = {path for path, layer in layers.items() if _matches(name, layer)}
        norms = f", or {NORMS}" if scaled else ""
        allowed = f"layers of the model, by name (* for any characters){norms}; it has {', '.join(known)}"
        check.require(bool(meant), "personal", name, allowed)
        found |= meant
    allowed = f"some of the layers, not all that the model has ({', '.join(known)}): the server would have none"
    check.require(len(found) < len(paths), "personal", names, allowed)
    return frozenset(found)


def _matches(pattern: str, layer: Path) -> bool:
    above = ("/".join(layer[:n]) for n in range(1, len(layer) + 1))
    return any(fnmatchcase(name, pattern) for name in (*layer, *above))


@lru_cache(maxsize=64)
def with_personal(model: Model, paths: frozenset[Path]) -> Model:
    """``model`` with the leaves at ``paths`` private to their client, in addition to those that already are."""
    own = model.private
    return model._replace(private=lambda path: path in paths or (own is not None and own(path)))
