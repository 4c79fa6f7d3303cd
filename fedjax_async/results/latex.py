"""Tables for papers: rows as a LaTeX ``tabular`` with the rules of booktabs; the best of each column is marked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_async.base import check
from fedjax_async.engine.client_scores import smaller_is_better
from fedjax_async.results import tables
from fedjax_async.results.measured import UNJUDGED
from fedjax_async.results.metrics import FINAL, Spread, final_title
from fedjax_async.results.significance import Interval
from fedjax_async.results.tables import Row

LEVEL = 0.05  # a corrected p at least as large: not significantly worse
# The columns that tables may have, by their short names; other metrics of a run have columns too.
KNOWN = (
    "accuracy", "loss", "interval", "time", "relative", "validation_accuracy", "validation_loss", "training_loss",
    "updates", "bytes", "energy", "carbon", "staleness", "seeds", "unused", "rejected", "attackers", "malicious",
    "dropped_stale", "lost", "late", "duplicates", "local_steps", "gradients", "runs_with_all_rejected",
    "stopped_early", "ended_before_budget",
)  # fmt: skip
SHORT = {"95% interval": "interval", "sent": "bytes", "MB": "bytes"}
LESS = ("time ", "relative ", "updates to ", "MB to ", "sent ", "energy ", "carbon ")  # costs: the least is the best
ESCAPED = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", **{character: f"\\{character}" for character in "&%$#_{}"},
}  # fmt: skip
DAGGER = r"^{\dagger}"


class PairedTests(NamedTuple):
    """Paired tests of the values in one column of a table."""

    column: str
    p: Mapping[frozenset[int], float]  # two rows -> p after correction


NO_TESTS = PairedTests("", {})


def escaped(text: str) -> str:
    r"""A text as LaTeX shows it. A ``[`` or ``*`` after the end of a row would be an option of that end.

    >>> escaped("50 % of C_1")
    '50 \\% of C\\_1'
    """
    return "".join(ESCAPED.get(character, character) for character in text)


# --- columns ------------------------------------------------------------------------------------------


def short_name(title: str) -> str:
    """The short name of a column of a table of methods or settings.

    >>> short_name("accuracy, mean of last tenth (%)"), short_name("time to target (s)"), short_name("sent (MB)")
    ('accuracy', 'time', 'bytes')
    """
    first = re.split(r",| \(| to ", title)[0]
    return SHORT.get(first, first).replace(" ", "_")


def require_columns(columns: object, more: bool = False) -> None:
    """``ValueError`` unless ``columns`` are None or different short names; ``more``: whether metrics add others."""
    if columns is None:
        return
    names = list(columns) if isinstance(columns, Sequence) and not isinstance(columns, str) else []
    listed = len(names) > 0 and all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    check.require(listed, "columns", columns, "a list of different names, such as ['accuracy', 'time', 'updates']")
    for name in names:
        if name not in KNOWN and not more:
            raise ValueError(f"columns = {name!r}: unknown{check.near_to(name, KNOWN, everything=', '.join(KNOWN))}")


def chosen(titles: Sequence[str], columns: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The titles of the ``columns``, all without them, and the names of known columns that the table does not have.

    ``ValueError`` for a name that no column of any table has.
    """
    if columns is None:
        return list(titles), []
    by_name: dict[str, str] = {}
    for title in titles:
        by_name.setdefault(short_name(title), title)  # of several final values the first
    for name in columns:
        known = [*by_name, *KNOWN]
        check.require(name in known, "columns", name, "among " + ", ".join(by_name))
    return [by_name[name] for name in columns if name in by_name], [name for name in columns if name not in by_name]


def _directions(titles: Sequence[str], scores: Sequence[str], final: str = FINAL) -> dict[str, bool]:
    """Column -> whether smaller is better, for the costs and for the final values of the ``scores``."""
    of_scores = {final_title(score, final): smaller_is_better(score) for score in scores if score not in UNJUDGED}
    costs = {title: True for title in titles if title.startswith(LESS)}
    return {title: smaller for title, smaller in (costs | of_scores).items() if title in titles}


def p_values(pairs: Sequence[Mapping[str, Any]], names: Sequence[object]) -> dict[frozenset[int], float]:
    """Two rows of a table -> the corrected p of the t test; ``names``: of each row, as ``pairs`` has them."""
    where = {name: index for index, name in enumerate(names)}
    found = {}
    for row in pairs:
        both = [(row["where"], row[side]) if "where" in row else row[side] for side in ("first", "second")]
        found[frozenset(where[each] for each in both)] = float(row["p (t, Holm)"])
    return found


# --- cells --------------------------------------------------------------------------------------------


def _mean(value: object) -> float:
    found = value.mean if isinstance(value, Spread) else value
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else math.nan


def _best(rows: Sequence[Row], members: Sequence[int], column: str, smaller: bool, decimals: int) -> list[int]:
    """The rows among ``members`` with the best mean as the table shows it; none if fewer than two have a mean."""
    means = {index: round(_mean(rows[index].get(column)), decimals) for index in members}
    known = {index: mean for index, mean in means.items() if math.isfinite(mean)}
    end = (min if smaller else max)(known.values(), default=math.nan)
    found = [index for index, mean in known.items() if mean == end]
    return found if len(known) > 1 and len(found) < len(known) else []


def _p_of_others(
    rows: Sequence[Row], members: Sequence[int], best: Sequence[int], tests: PairedTests, smaller: bool
) -> dict[int, float]:
    """The p value of each other row against the best one; NaN without a test."""
    if not best:
        return {}
    first = (min if smaller else max)(best, key=lambda index: _mean(rows[index][tests.column]))
    return {index: tests.p.get(frozenset((first, index)), math.nan) for index in members if index not in best}


def _cell(value: object, decimals: int, bold: bool, alike: bool) -> str:
    mark = DAGGER if alike else ""
    if isinstance(value, Spread) and math.isfinite(value.mean):
        text = tables.cell(value, decimals).replace("±", r"\pm").replace("nan", r"\mathrm{nan}")
        text = rf"\mathbf{{{text}}}" if bold else text
        return f"${text}{mark}$"
    if isinstance(value, Interval) and not math.isnan(value.low):
        text = tables.cell(value, decimals).replace("inf", r"\infty")
        return f"${text}$"
    text = tables.cell(value, decimals)
    text = "--" if text == tables.NOTHING else escaped(text)
    return rf"\textbf{{{text}}}" if bold else text + (f"${mark}$" if mark else "")


def latex(
    rows: Sequence[Row],
    heads: Sequence[str],
    scores: Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    final: str = FINAL,
    worlds: Sequence[object] | None = None,
    tests: PairedTests = NO_TESTS,
    notes: Sequence[str] = (),
) -> str:
    """``rows`` as a ``tabular`` (``\\usepackage{booktabs}``), with means and deviations in one cell.

    Of each column of ``scores`` (columns of the evaluations) and costs the best mean is bold, within each world. A
    dagger marks the rows that the paired ``tests`` do not find significantly worse. Comments above say so, and have the
    ``notes``.

    Args:
      heads: the columns with names of rows, which are always shown.
      columns: short names of the others, in order (see :func:`short_name`); None shows all.
      worlds: one for each row; rows of different worlds are not compared.
    """
    titles = [title for title in dict.fromkeys(name for row in rows for name in row) if title not in heads]
    shown, absent = chosen(titles, columns)
    decimals, smaller = tables.decimals_of(rows), _directions(shown, scores, final)
    bold: set[tuple[int, str]] = set()
    p: dict[int, float] = {}  # of the rows that are not the best of their world
    of_world = worlds or [None] * len(rows)
    for world in [each for i, each in enumerate(of_world) if each not in of_world[:i]]:
        members = [index for index, its in enumerate(of_world) if its == world]
        for column, less in smaller.items():
            best = _best(rows, members, column, less, decimals.get(column, 2))
            bold |= {(index, column) for index in best}
            p |= _p_of_others(rows, members, best, tests, less) if column == tests.column else {}
    alike = {index for index, value in p.items() if value >= LEVEL}
    lines = []
    for index, row in enumerate(rows):
        cells = [escaped(tables.cell(row.get(name), decimals.get(name, 2))) for name in heads]
        for name in shown:
            marks = (index, name) in bold, name == tests.column and index in alike
            cells.append(_cell(row.get(name), decimals.get(name, 2), *marks))
        lines.append(" & ".join(cells))
    seeds = sorted({value.seeds for row in rows for value in row.values() if isinstance(value, Spread)}) or [1]
    several = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else seeds[0]
    about = ["needs \\usepackage{booktabs}", *filter(None, notes)]
    about += [f"mean and sample standard deviation over {several} seeds"] if seeds[-1] > 1 else []
    within = ", within each world" if len(set(map(str, of_world))) > 1 else ""
    about += [f"bold: the best mean of its column{within}"] if bold else []
    how = f"paired t test, Holm's correction, p >= {LEVEL}"
    none = "; rows without a test have none" if any(map(math.isnan, p.values())) else ""
    about += [f"dagger: not significantly worse than the best ({how}){none}"] if alike else []
    about += [f"no such column here: {', '.join(absent)}"] if absent else []
    return "\n".join(
        [
            *(f"% {line}" for line in about),
            rf"\begin{{tabular}}{{{'l' * len(heads)}{'r' * len(shown)}}}",
            r"\toprule",
            " & ".join(map(escaped, [*heads, *shown])) + r" \\",
            r"\midrule",
            *(rf"{line} \\" for line in lines),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )
