"""The role of each setting that a sweep varies: tuned, compared, world or seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedjax_async.base import check
from fedjax_async.config.concerns import CONCERNS
from fedjax_async.config.paths import address

ROLES = {
    "tuned": "the best value is chosen on validation data, for each compared value in each world",
    "compared": "each value is a row of the results, such as a method",
    "world": "each value is another problem: nothing is chosen or compared across worlds",
    "seed": "results are averaged over it",
}

_OPTIONS_TUNED = ("method", "timing")  # they are compared, but their options are tuned


def usual_role(path: str) -> str:
    """The role of a swept setting unless another is given.

    >>> [usual_role(path) for path in ("lr", "method", "method.mixing", "partition.alpha", "seed")]
    ['tuned', 'compared', 'tuned', 'world', 'seed']
    """
    where = address(path)
    if where.option and where.field in _OPTIONS_TUNED:
        return "tuned"
    return CONCERNS[where.field].role


def roles_of(paths: Iterable[str], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Swept path -> role: the one ``given``, else the usual one; only the seed has the role ``seed``.

    Raises: ``ValueError`` for a role that does not exist, and for the role of a setting that is not swept.

    >>> roles_of(["method.mixing", "seed"], {"method.mixing": "compared"})
    {'method.mixing': 'compared', 'seed': 'seed'}
    """
    check.kind("roles", given, (Mapping, type(None)), "a mapping, swept setting -> role, such as {'lr': 'tuned'}")
    found = {path: usual_role(path) for path in paths}
    for path, role in (given or {}).items():
        check.one_of(f"roles[{path!r}]", role, ROLES)
        check.require(path in found, "roles", path, "a setting that is swept: " + (", ".join(found) or "none is"))
        allowed = "seed for the setting seed, and another role for other settings"
        check.require((path == "seed") == (role == "seed"), f"roles[{path!r}]", role, allowed)
        found[path] = role
    return found
