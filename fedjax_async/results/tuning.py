"""The chosen settings of a sweep: in each world, for each compared method, the best on validation data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedjax_async.base import check
from fedjax_async.config.grid import setting_title
from fedjax_async.config.roles import roles_of
from fedjax_async.config.settings import Settings
from fedjax_async.results import metrics, significance
from fedjax_async.results.comparisons import finals_of
from fedjax_async.results.metrics import FINAL
from fedjax_async.results.sweep_table import (
    USUAL,
    SweptRun,
    TableOptions,
    by_setting,
    columns_of,
    has_validation,
    metric_of,
    runs_of,
    setting_rows,
    spread_of,
    swept_runs,
)
from fedjax_async.results.sweeps import Sweep
from fedjax_async.results.tables import NOTHING, Cell

SHOWN = 5  # best settings in the table, if there is a single tuning
MOST_PAIRS = 500  # paired tests; more cannot be read, and Holm's correction would be too strict

ON_TEST = (
    "WARNING: the test set chose these settings, because the runs have no validation part: their test scores are too "
    "good. Set validation_fraction = 0.1 to choose on training examples that are held out."
)

Roles = Mapping[str, str]  # path -> role, where it is not the default


class Tuning(NamedTuple):
    """The settings tried for one compared method in one world; they differ only in tuned axes."""

    world: dict[str, object]  # path -> value of each axis with the role ``world``
    compared: dict[str, object]  # path -> value of each axis with the role ``compared``
    order: list[int]  # the settings by their index in ``by_setting``, the chosen one first
    settings: list[Settings]  # of the first seed, in the same order
    runs: int  # over all settings and seeds
    part: str  # the part that orders them: ``validation``, or ``test`` if any run has no validation part
    labelled: tuple[str, ...] = ()  # the paths whose values are labels
    metric: str = "accuracy"  # that orders them, or ``loss`` if no run of them has class labels

    @property
    def trials(self) -> int:
        """How many settings were tried."""
        return len(self.order)

    @property
    def best(self) -> Settings:
        """The chosen settings, with the seed of the first run."""
        return self.settings[0]


class Ranked(NamedTuple):
    """Settings ordered by their rank within their tuning: first the chosen ones of all tunings."""

    metric: str  # "validation accuracy, mean of last tenth (%)"; "accuracy, ..." if the test set chose
    order: list[int]  # indices of the settings as in ``by_setting``


def tunings(found: Sequence[SweptRun], final: str = FINAL, roles: Roles | None = None) -> list[Tuning]:
    """One :class:`Tuning` for each method in each world; worlds and methods in order of first use.

    Settings are ordered by the mean over seeds of the final accuracy on the validation part, or of the loss if no run
    of the tuning has class labels; ties go to the smaller deviation. Settings without a finite mean come last. If any
    run of a tuning has no validation scores, those on the test set order its settings.

    ``final`` as in :func:`fedjax_async.results.metrics.final_value`, ``roles`` as in
    :func:`fedjax_async.config.roles.roles_of`.
    """
    columns = columns_of(found)
    known = _roles(columns, roles)
    groups = list(by_setting(found).values())
    values = [group[0].point.shown(columns) for group in groups]
    axes = {role: [path for path in columns if known[path] == role] for role in ("world", "compared")}
    together: dict[tuple[str, ...], list[int]] = {}
    for index, of_setting in enumerate(values):
        same = tuple(repr(of_setting[path]) for path in (*axes["world"], *axes["compared"]))
        together.setdefault(same, []).append(index)
    made = []
    for members in together.values():
        part = "validation" if all(has_validation(groups[index]) for index in members) else "test"
        metric = metric_of(each for index in members for each in groups[index])  # one world may have class labels
        column = f"validation_{metric}" if part == "validation" else metric
        spreads = {index: spread_of(groups[index], column, final) for index in members}
        order = sorted(members, key=lambda index: _merit(spreads[index], metric))
        world, compared = ({path: values[members[0]][path] for path in axes[role]} for role in ("world", "compared"))
        settings = [groups[index][0].point.settings for index in order]
        count, labelled = sum(len(groups[index]) for index in members), groups[members[0]][0].point.labelled
        made.append(Tuning(world, compared, order, settings, count, part, labelled, metric))
    worlds = [tuning.world for tuning in made]
    return sorted(made, key=lambda tuning: worlds.index(tuning.world))  # tunings of one world follow each other


def _roles(columns: Mapping[str, str], roles: Roles | None) -> dict[str, str]:
    """The roles of the swept paths, without paths that only unfinished runs set."""
    return roles_of(columns, {path: role for path, role in (roles or {}).items() if path in columns})


def _merit(spread: metrics.Spread, metric: str) -> tuple[bool, float, float]:
    """The sorting key of settings: the best mean first, then the smaller deviation."""
    finite = math.isfinite(spread.mean)
    sign = -1.0 if metric == "accuracy" else 1.0
    return not finite, sign * spread.mean if finite else 0.0, 0.0 if math.isnan(spread.std) else spread.std


def choose(sweep: Sweep, final: str = FINAL, roles: Roles | None = None) -> list[Tuning]:
    """The tunings of a sweep; ``.best`` of each has the chosen settings. ``roles``: by default those of the sweep.

    >>> from fedjax_async.results import sweep
    >>> base = dict(model="logistic", clients=4, steps=1, updates=8, validation_fraction=0.2)
    >>> (tuning,) = choose(sweep(base, {"lr": [1e-9, 0.1]}, progress=False))
    >>> tuning.best.lr, tuning.part, tuning.trials
    (0.1, 'validation', 2)
    """
    check.kind("sweep", sweep, Sweep, "a Sweep, as sweep returns")
    return tunings(swept_runs(sweep), final, sweep.roles if roles is None else roles)


def rank(found: Sequence[SweptRun], final: str = FINAL, roles: Roles | None = None) -> Ranked:
    """The chosen settings of all tunings, then the second of each, and so on; see :func:`tunings`."""
    return _ranked(tunings(found, final, roles), metric_of(found), final)


def _ranked(made: Sequence[Tuning], metric: str, final: str) -> Ranked:
    """The order of the settings of all tunings."""
    on_test = any(tuning.part == "test" for tuning in made)
    title = metrics.final_title(metric if on_test else f"validation_{metric}", final)
    most = max(tuning.trials for tuning in made)
    return Ranked(title, [tuning.order[k] for k in range(most) for tuning in made if k < tuning.trials])


# --- tables and texts -----------------------------------------------------------------------------------


def chosen_rows(
    found: Sequence[SweptRun], options: TableOptions = USUAL, *, further: bool = False
) -> list[dict[str, Cell]]:
    """One row for the chosen setting of each tuning: world, method and tuned values, part, trials and runs, scores.

    With one or two tunings, the next best settings follow, with their rank. ``further``: add the other two final
    values.
    """
    columns, made = columns_of(found), tunings(found, options.final, options.roles)
    rows = setting_rows(found, options, further=further)
    shown = max(1, SHOWN // len(made))
    chosen = []
    for tuning in made:
        head = [columns[path] for path in (*tuning.world, *tuning.compared)]
        tuned = [name for name in columns.values() if name not in head]
        for rank, index in enumerate(tuning.order[:shown], 1):
            row = rows[index]
            chosen.append(
                ({"rank": rank} if any(other.trials > 1 for other in made) and shown > 1 else {})
                | {name: row[name] for name in (*head, *tuned)}
                | {"chosen on": tuning.part if tuning.trials > 1 else NOTHING}
                | {"trials": tuning.trials, "runs": tuning.runs}
                | {name: cell for name, cell in row.items() if name not in columns.values()}
            )
    return chosen


def explained(found: Sequence[SweptRun], options: TableOptions = USUAL) -> str:
    """The text above :func:`chosen_rows`: how settings were chosen, with warnings if the choice is not fair."""
    columns, made = columns_of(found), tunings(found, options.final, options.roles)
    rows = sorted({len(group) for group in by_setting(found).values()})
    over = f"{rows[0]} seed{'s' if rows[0] > 1 else ''}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]} seeds"
    count = sum(tuning.trials for tuning in made)
    if count == len(made):
        return f"{count} setting{'s' if count > 1 else ''}, none tuned: nothing was chosen. Means over {over}."
    of = {role: ", ".join(columns[path] for path in axes) for role, axes in axes_of(found, options.roles).items()}
    each = f"; separately for each {of['compared']}" if of["compared"] else ""
    within = f"; within each world ({of['world']})" if of["world"] else ""
    part = {tuning.part for tuning in made if tuning.trials > 1}
    metric = plain(_ranked(made, metric_of(found), options.final).metric)
    by = metric if part == {"validation"} else f"test {metric}"
    by += ", or the loss where there are no class labels" if len({tuning.metric for tuning in made}) > 1 else ""
    lines = [
        f"Best of {count} settings by the {by}, averaged over {over}; ties by the smaller standard deviation.",
        f"Tuned: {of['tuned']}{each}{within}.",
    ]
    lines += [ON_TEST] if "test" in part else []
    return "\n".join([*lines, *_unequal(made, columns)])


def _unequal(made: Sequence[Tuning], columns: Mapping[str, str]) -> list[str]:
    """Warnings for worlds in which methods were tuned with unequal numbers of trials."""
    worlds: dict[str, dict[str, int]] = {}
    for tuning in made:
        both = (tuning.world, tuning.compared)
        where, method = (setting_title(values, columns, tuning.labelled) for values in both)
        worlds.setdefault(where, {})[method] = tuning.trials
    by_counts: dict[str, list[str]] = {}  # the worlds that have the same counts
    for where, trials in worlds.items():
        if len(set(trials.values())) > 1:
            counts = ", ".join(f"{count} for {method}" for method, count in trials.items())
            by_counts.setdefault(counts, []).append(where)
    return [
        f"WARNING: unequal effort{'' if len(where) == len(worlds) else ' in ' + ' and '.join(where)}, "
        f"which favours methods with more trials: {counts}."
        for counts, where in by_counts.items()
    ]


def axes_of(found: Sequence[SweptRun], roles: Roles | None = None) -> dict[str, list[str]]:
    """Role -> the swept paths that have it, without the seed."""
    known = _roles(columns_of(found), roles)
    return {role: [path for path, its in known.items() if its == role] for role in ("tuned", "compared", "world")}


def plain(metric: str) -> str:
    """``accuracy (mean of last tenth)`` for a column's ``accuracy, mean of last tenth (%)``."""
    return metric.removesuffix(" (%)").replace(", ", " (") + ")"


def pair_rows(found: Sequence[SweptRun], options: TableOptions = USUAL) -> list[dict[str, object]]:
    """Paired tests as in :func:`fedjax_async.results.significance.pairs` between the chosen settings of a world.

    They compare the final value on the test set. Settings of different worlds are not compared, because their data and
    delays may differ. Empty if there are more than ``MOST_PAIRS`` pairs.
    """
    metric = metric_of(found)
    groups = list(by_setting(found).values())
    worlds: dict[str, dict[str, dict[int, float]]] = {}
    for index, (where, name) in pair_names(found, options).items():
        seeds = [each.point.settings.seed for each in groups[index]]
        scores = dict(zip(seeds, finals_of(runs_of(groups[index]), metric, options.final), strict=True))
        worlds.setdefault(where, {})[name] = scores
    if sum(math.comb(len(methods), 2) for methods in worlds.values()) > MOST_PAIRS:
        return []
    better = metric == "accuracy"
    return significance.pairs(worlds, larger_is_better=better, limits=metrics.limits(metric))


def pair_names(found: Sequence[SweptRun], options: TableOptions = USUAL) -> dict[int, tuple[str, str]]:
    """The chosen settings, by their index, with the names of world and method that :func:`pair_rows` gives them."""
    columns, names = columns_of(found), {}
    for tuning in tunings(found, options.final, options.roles):
        where = setting_title(tuning.world, columns, tuning.labelled) if tuning.world else ""
        given = {path: value for path, value in tuning.compared.items() if value is not None}
        names[tuning.order[0]] = where, setting_title(given, columns, tuning.labelled)
    return names
