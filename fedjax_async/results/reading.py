"""Folders of results read back: which kind a folder is of, and the runs of a comparison under its labels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedjax_async.base import check, identity, lazy
from fedjax_async.results import store, sweep_folder
from fedjax_async.results.beside import labels_in
from fedjax_async.results.client_names import with_names
from fedjax_async.results.compared import Comparison
from fedjax_async.results.metrics import require_runs
from fedjax_async.results.sweeps import Sweep, collect
from fedjax_async.results.worlds import listed_in
from fedjax_async.types import Run

if TYPE_CHECKING:
    import pandas

OfRun = TypeVar("OfRun")
IN_COMPARISON = f"runs/*/*/{store.MANIFEST}"  # the manifests of a comparison's runs


def kind_of(path: Path) -> str:
    """What a folder holds: ``run``, ``comparison``, ``sweep``, or nothing of these, an empty text."""
    if (path / sweep_folder.DEFINITION).is_file():
        return "sweep"
    if (path / store.MANIFEST).is_file():
        return "run"
    return "comparison" if any(path.glob(IN_COMPARISON)) else ""


def require_results(folder: str | Path) -> str:
    """The kind of a folder of results; ``ValueError`` for any other."""
    path = check.path("folder", folder)
    kind = kind_of(path) if path.is_dir() else ""
    state = "" if path.is_dir() else ", but it is a file" if path.exists() else ", but there is no such folder"
    if not kind:
        raise ValueError(f"folder = {str(folder)!r}: must hold a finished run, comparison or sweep{state}")
    return kind


def _in_order(path: Path, names: Collection[str]) -> list[str]:
    """All ``names``: first those that the table lists, then labels in the order in which they were compared."""
    first = [*listed_in(path, names), *(label for label in labels_in(path).values() if label in names)]
    return list(dict.fromkeys([*first, *names]))


def grouped_in(path: Path, keep: Callable[[Path, Run], OfRun]) -> dict[str, list[OfRun]]:
    """Method or label -> ``keep(folder, run)`` of the finished runs of the comparison in ``path``, by seed.

    Only one whole run is in memory at a time. ``ValueError`` if the folder holds none, or for a damaged file of a run.
    """
    manifests, labels = sorted(path.glob(IN_COMPARISON)), labels_in(path)
    check.require(bool(manifests), "folder", str(path), "a folder with a finished comparison")
    found: dict[str, list[tuple[int, OfRun]]] = {}
    for manifest in manifests:
        run, place = store.load(manifest.parent), manifest.parent.parent.name
        name = labels.get(place, str(run.settings.get("method", place)))
        found.setdefault(name, []).append((int(run.settings.get("seed", 0)), keep(manifest.parent, run)))
    return {
        name: [kept for _, kept in sorted(found[name], key=lambda each: each[0])] for name in _in_order(path, found)
    }


def comparison_in(folder: str | Path) -> Comparison:
    """The finished runs of the comparison in ``folder``; see :func:`grouped_in`."""
    return Comparison(grouped_in(check.path("folder", folder), lambda folder, run: run))


def require_same_seeds(folder: str | Path, runs: Mapping[str, Sequence[Run]]) -> None:
    """``ValueError`` unless all methods have runs of the same seeds, as tables need."""
    seeds = {name: [run.settings.get("seed") for run in group] for name, group in runs.items()}
    first, *others = seeds.items()
    other = next((each for each in others if each[1] != first[1]), first)
    allowed = "a comparison with the same finished seeds of all methods"
    found = f"but {first[0]} has {first[1]} and {other[0]} has {other[1]}"
    check.require(other == first, "folder", str(folder), f"{allowed}, {found}")


def mixed_settings(runs: Mapping[str, Sequence[Run]]) -> str:
    """How the settings of a method's runs differ besides the seed, or which seed is there twice; empty if all is well.

    A folder has runs of several settings if it was used for other seeds with other settings, and a run twice if it was
    copied.
    """
    for name, (first, *others) in runs.items():
        seeds = [run.settings.get("seed") for run in runs[name]]
        for index, other in enumerate(others, 1):
            if seeds[index] in seeds[:index]:
                return f"{name} has seed {seeds[index]} twice"
            found, wanted = (run.settings | {"seed": None} for run in (first, other))
            if text := identity.difference(found, wanted):
                return f"{name}, seed {other.settings.get('seed')} against {first.settings.get('seed')}: {text}"
    return ""


def require_same_settings(folder: str | Path, runs: Mapping[str, Sequence[Run]]) -> None:
    """``ValueError`` unless the runs of each method differ in their seed only: their means would be of nothing."""
    found = mixed_settings(runs)
    allowed = f"a comparison whose runs of a method differ in their seed only, but {found} (move the others away)"
    check.require(not found, "folder", str(folder), allowed)


def load(folder: str | Path) -> Run | Comparison | Sweep:
    """The results in a folder: a :class:`~fedjax_async.types.Run`, a :class:`Comparison` or a :class:`Sweep`.

    A run as ``store.load`` reads it; of a comparison or a sweep the finished runs. ``ValueError`` naming the file if
    the folder is missing, foreign, incomplete, truncated or edited.
    """
    path = check.path("folder", folder)
    kind = kind_of(path) if path.is_dir() else ""
    if kind == "sweep":
        return collect(path)[0]
    return comparison_in(path) if kind == "comparison" else store.load(path)


def frame(results: Run | Comparison | Sweep, table: str = "evaluations") -> pandas.DataFrame:
    """A pandas data frame of ``evaluations`` or ``updates``: one row for each, of all runs below each other.

    A comparison's rows begin with ``method`` and ``seed``, a sweep's with ``run`` and ``seed``. (Of one run,
    ``pandas.DataFrame(run.evaluations)`` is the same.) Updates have a column ``client_name`` if the data name their
    clients. ``ValueError`` where pandas is missing.
    """
    check.one_of("table", table, ("evaluations", "updates"))
    kinds = (Run, Mapping, Sweep)
    check.kind("results", results, kinds, "a Run, what compare returns, or a Sweep")
    if isinstance(results, Mapping):
        require_runs(results)
    pandas = lazy.optional("pandas", "data frames")
    if isinstance(results, Run):
        return pandas.DataFrame(with_names(results, getattr(results, table)))
    if isinstance(results, Sweep):
        first, parts = "run", [(point.name, run) for point, run in zip(results.points, results.runs)]
    else:
        first, parts = "method", [(name, run) for name, seeds in results.items() for run in seeds]
    frames = [
        pandas.DataFrame({first: name, "seed": run.settings.get("seed"), **with_names(run, getattr(run, table))})
        for name, run in parts
    ]
    return pandas.concat(frames, ignore_index=True)
