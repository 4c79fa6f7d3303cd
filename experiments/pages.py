"""The pages of the papers' experiments: whether every number of a table is in the CSV file that the table names."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, str]]
Table = tuple[str, list[str], list[bool], list[list[str]]]
PAPERS = Path(__file__).resolve().parent
PAGES = ["orthofl", "asynfl", "asynccurve", "policies", "methods", "comparison", "lessons"]
RENAMED = "pushcen"  # its tables have names of their own for methods and rows
LOOSE = ["benchmarks", "vector_fields", "robustness", "privacy"]  # the CSV files have other rows and units
CLAIMS = "claim of the paper"  # first header of a table whose last column names CSV files row by row
WITHOUT_RESULTS = {"command", "open", "question"}  # first headers of tables of settings, and of answers in words
SPREAD = re.compile(r"(\d[\d,]*(?:\.\d+)?) ± (\d[\d,]*(?:\.\d+)?)")
NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*(?:\.\d+)?")
LINK = re.compile(r"\]\((results/[\w./-]+\.csv)\)")
NAMED = re.compile(r"results/[\w./-]+\.csv")


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables_of(page: Path) -> list[Table]:
    """(text before it, header, whether a column holds labels, rows) of each table of a page."""
    found: list[Table] = []
    before: list[str] = []
    block: list[list[str]] = []
    for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            block.append(cells_of(line))
        elif block:
            header, rule, *rows = block
            found.append(("\n".join(before), header, [not cell.endswith(":") for cell in rule], rows))
            before, block = [line], []
        else:
            before.append(line)
    return found


def read(paper: str, names: Sequence[str]) -> Rows:
    """The rows of CSV files of a paper's folder."""
    rows: Rows = []
    for name in names:
        with (PAPERS / paper / name).open(encoding="utf-8", newline="") as file:
            rows += [{column: cell or "" for column, cell in row.items()} for row in csv.DictReader(file)]
    return rows


def shown(text: str) -> list[tuple[float, int]]:
    """The numbers of a cell, and the count of decimals of each; "1/103" has the number 103."""
    plain = LINK.sub("", re.sub(r"`[^`]*`", "", text))
    return [(float(number.replace(",", "")), len(number.partition(".")[2])) for number in NUMBER.findall(plain)]


def without_exponents(text: str) -> str:
    """ "5e-8" as "0.00000005"."""
    return re.sub(r"\b(\d)e-(\d+)\b", lambda found: f"{float(found[0]):.{found[2]}f}", text)


def numbers_in(rows: Rows) -> list[float]:
    """All numbers of the rows."""
    found: list[float] = []
    for row in rows:
        for cell in row.values():
            try:
                found.append(float(cell))
            except ValueError:
                found += [number for number, _ in shown(cell)]
    return found


def stands(number: float, digits: int, known: Iterable[float]) -> bool:
    """Whether a number with so many decimals is one of ``known``, rounded; signs do not count."""
    return any(abs(number - abs(value)) <= 0.5 * 10.0**-digits + 1e-9 * abs(value) for value in known)


def spreads_in(rows: Rows) -> list[tuple[float, float]]:
    """(mean, deviation) of every column of the rows that has both: "time (s)" and "time (s) std", or "time ±"."""
    pairs: list[tuple[Any, Any]] = []
    for row in rows:
        for column, mean in row.items():
            stems = (f"{column} std", f"{column.partition(' (')[0]} ±", f"{column.partition(' ')[0]} ±")
            pairs += [(mean, row.get(name)) for name in stems]
    return [(float(mean), float(std)) for mean, std in pairs if mean and std]


def rows_about(rows: Rows, labels: Sequence[str], column: str) -> Rows:
    """The rows of a CSV file with all labels of a table's row, or with the variant "COLUMN, LABEL"."""
    crossed = f"{column}, {labels[0]}"
    return [row for row in rows if set(labels) <= set(row.values()) or crossed in row.values()]


def numbers(paper: str) -> tuple[int, list[str]]:
    """How many numbers of the page's tables were looked up, and what is wrong: numbers that their CSV files lack."""
    checked, wrong = 0, []
    for before, header, is_label, rows in tables_of(PAPERS / paper / "README.md"):
        if header[0] in WITHOUT_RESULTS:
            continue
        claims = header[0] == CLAIMS
        for cells in rows:
            names = LINK.findall(cells[-1] if claims else before)
            source = read(paper, names if claims else names[-1:])
            if not source:
                wrong.append(f"no CSV file is named for: {cells}")
                continue
            labels = [cell.replace("`", "") for cell, label in zip(cells, is_label) if label and cell != "-"]
            for column, cell, label in zip(header, cells, is_label, strict=True):
                if label and not (claims and column == header[-1]):
                    continue
                about = source if claims else rows_about(source, labels, column)
                place = f"{labels}, {column}: not in {names}"
                wrong += [] if about else [f"no row of {names[-1]} is about {labels}, {column}"]
                known = numbers_in(about)
                wrong += [
                    f"{number:g} of {place}" for number, digits in shown(cell) if not stands(number, digits, known)
                ]
                together = [] if "paper" in column else spreads_in(about)
                wrong += [
                    f"{pair} of {place}" for pair in SPREAD.findall(cell) if together and not paired(pair, together)
                ]
                checked += len(shown(cell))
    return checked, wrong


def paired(pair: Sequence[str], known: Iterable[tuple[float, float]]) -> bool:
    """Whether a mean and its deviation, as text, are those of one entry of ``known``."""
    spread = [shown(number)[0] for number in pair]
    return any(all(stands(*one, [value]) for one, value in zip(spread, values)) for values in known)


def rows_of_csvs(paper: str) -> tuple[int, list[str]]:
    """As :func:`numbers` for pages whose rows have names of their own.

    All numbers of a row must be in one row of the CSV file, or those of a cell where columns are rows of the file.
    """
    checked, wrong = 0, []
    for before, header, is_label, rows in tables_of(PAPERS / paper / "README.md"):
        names = LINK.findall(before)
        if not names or header[0] == CLAIMS:
            continue
        source = [numbers_in([row]) for row in read(paper, names[-1:])]
        measured = [not label and "paper" not in column for column, label in zip(header, is_label, strict=True)]
        for cells in rows:
            found = [shown(without_exponents(cell)) for cell, known in zip(cells, measured, strict=True) if known]
            one_row = any(all(stands(*number, row) for cell in found for number in cell) for row in source)
            cell_by_cell = all(any(all(stands(*n, row) for n in cell) for row in source) for cell in found)
            if not (one_row or (cell_by_cell and "accuracy (%)" not in header)):
                wrong.append(f"{cells}: not in {names[-1]}")
            checked += sum(map(len, found))
    return checked, wrong


def rounded(text: str) -> list[tuple[float, int]]:
    """As :func:`shown`; the zeros at the end of a large number do not count: "1,630,000" has -4 decimals."""
    found = []
    for number, digits in shown(text):
        whole = f"{number:.0f}"
        zeros = len(whole) - len(whole.rstrip("0"))
        found.append((number, -zeros if number >= 1e5 and not digits else digits))
    return found


def loosely(paper: str) -> tuple[int, list[str]]:
    """As :func:`numbers` for tables of other rows than their CSV file's: the numbers of a cell stand in one row of it.

    A number in percent may be a share there. Tables before which no CSV file is named have no numbers of one.
    """
    checked, wrong = 0, []
    for before, header, is_label, rows in tables_of(PAPERS / paper / "README.md"):
        names = NAMED.findall(before)
        if not names or header[0] in {*WITHOUT_RESULTS, CLAIMS, "cost", ""}:
            continue
        source = [numbers_in([row]) for row in read(paper, names[-1:])]
        for cells in rows:
            for column, cell, label in zip(header, cells, is_label, strict=True):
                if label or column == "before":
                    continue
                for part in re.split(r", | / ", cell):  # numbers of several rows of the file
                    found = rounded(part)
                    shares = [(number / 100, digits + 2) for number, digits in found] if "%" in column else found
                    if not any(all(stands(*n, row) for n in each) for each in (found, shares) for row in source):
                        wrong.append(f"{part} of {cells[:3]}, {column}: not in {names[-1]}")
                    checked += len(found)
    return checked, wrong


def spreads(paper: str) -> tuple[int, list[str]]:
    """How many spreads (``MEAN ± DEVIATION``) the page has, and those that are in none of its CSV files."""
    page = without_exponents((PAPERS / paper / "README.md").read_text(encoding="utf-8"))
    known = [pair for name in set(LINK.findall(page)) for pair in spreads_in(read(paper, [name]))]
    pairs = SPREAD.findall(page)
    return len(pairs), [f"{' ± '.join(pair)}: not in the CSV files" for pair in pairs if not paired(pair, known)]


def wrong(paper: str) -> list[str]:
    """What is wrong on a page: numbers of its tables that are not in its CSV files."""
    if paper in LOOSE:
        return loosely(paper)[1]
    return [*rows_of_csvs(paper)[1], *spreads(paper)[1]] if paper == RENAMED else numbers(paper)[1]
