"""The pages of the papers' experiments: every number in a table is in the CSV file that the table names."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

PAPERS = Path(__file__).resolve().parent.parent / "experiments"
PAGES = ["orthofl", "asynfl", "asynccurve", "policies", "methods"]
RENAMED = "pushcen"  # its tables have names of their own for methods and rows
CLAIMS = "claim of the paper"  # first header of a table whose last column names CSV files row by row
WITHOUT_RESULTS = {"command", "open", "question"}  # first headers of tables of settings, and of answers in words
SPREAD = re.compile(r"(\d[\d,]*(?:\.\d+)?) ± (\d[\d,]*(?:\.\d+)?)")
NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*(?:\.\d+)?")
LINK = re.compile(r"\]\((results/[\w./-]+\.csv)\)")


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables_of(page):
    """(text before it, header, whether a column holds labels, rows) of each table of a page."""
    found, before, block = [], [], []
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


def read(paper, names):
    rows = []
    for name in names:
        with (PAPERS / paper / name).open(encoding="utf-8", newline="") as file:
            rows += [{column: cell or "" for column, cell in row.items()} for row in csv.DictReader(file)]
    return rows


def shown(text):
    """The numbers of a cell, and the count of decimals of each; "1/103" has the number 103."""
    plain = LINK.sub("", re.sub(r"`[^`]*`", "", text))
    return [(float(number.replace(",", "")), len(number.partition(".")[2])) for number in NUMBER.findall(plain)]


def without_exponents(text):
    """ "5e-8" as "0.00000005"."""
    return re.sub(r"\b(\d)e-(\d+)\b", lambda found: f"{float(found[0]):.{found[2]}f}", text)


def numbers_in(rows):
    found = []
    for row in rows:
        for cell in row.values():
            try:
                found.append(float(cell))
            except ValueError:
                found += [number for number, _ in shown(cell)]
    return found


def stands(number, digits, known):
    return any(abs(number - abs(value)) <= 0.5 * 10.0**-digits + 1e-9 * abs(value) for value in known)


def spreads_in(rows):
    """(mean, deviation) of every column of the rows that has both: "time (s)" and "time (s) std", or "time ±"."""
    pairs = []
    for row in rows:
        for column, mean in row.items():
            stems = (f"{column} std", f"{column.partition(' (')[0]} ±", f"{column.partition(' ')[0]} ±")
            pairs += [(mean, row.get(name)) for name in stems]
    return [(float(mean), float(std)) for mean, std in pairs if mean and std]


def rows_about(rows, labels, column):
    """The rows of a CSV file with all labels of a table's row, or with the variant "COLUMN, LABEL"."""
    crossed = f"{column}, {labels[0]}"
    return [row for row in rows if set(labels) <= set(row.values()) or crossed in row.values()]


@pytest.mark.parametrize("paper", PAGES)
def test_every_number_of_a_table_stands_in_its_csv(paper):
    checked = 0
    for before, header, is_label, rows in tables_of(PAPERS / paper / "README.md"):
        if header[0] in WITHOUT_RESULTS:
            continue
        claims = header[0] == CLAIMS
        for cells in rows:
            names = LINK.findall(cells[-1] if claims else before)
            source = read(paper, names if claims else names[-1:])
            assert source, f"no CSV file is named for: {cells}"
            labels = [cell.replace("`", "") for cell, label in zip(cells, is_label) if label and cell != "-"]
            for column, cell, label in zip(header, cells, is_label, strict=True):
                if label and not (claims and column == header[-1]):
                    continue
                about = source if claims else rows_about(source, labels, column)
                assert about, f"no row of {names[-1]} is about {labels}, {column}"
                for number, digits in shown(cell):
                    found = stands(number, digits, numbers_in(about))
                    assert found, f"{number:g} of {labels}, {column}: not in {names}"
                    checked += 1
                together = spreads_in(about)
                for pair in SPREAD.findall(cell) if together and "paper" not in column else ():
                    spread = [shown(number)[0] for number in pair]
                    found = any(
                        all(stands(number, digits, [value]) for (number, digits), value in zip(spread, known))
                        for known in together
                    )
                    assert found, f"{pair} of {labels}, {column}: not in {names}"
    assert checked > 100


def test_every_row_of_a_table_is_a_row_of_its_csv():
    """All numbers of a row are in one row of the CSV file, or those of a cell where columns are rows of the file."""
    checked = 0
    for before, header, is_label, rows in tables_of(PAPERS / RENAMED / "README.md"):
        names = LINK.findall(before)
        if not names or header[0] == CLAIMS:
            continue
        source = [numbers_in([row]) for row in read(RENAMED, names[-1:])]
        measured = [not label and "paper" not in column for column, label in zip(header, is_label, strict=True)]
        for cells in rows:
            numbers = [shown(without_exponents(cell)) for cell, known in zip(cells, measured, strict=True) if known]
            one_row = any(all(stands(*number, row) for cell in numbers for number in cell) for row in source)
            cell_by_cell = all(any(all(stands(*n, row) for n in cell) for row in source) for cell in numbers)
            assert one_row or (cell_by_cell and "accuracy (%)" not in header), f"{cells}: not in {names[-1]}"
            checked += sum(map(len, numbers))
    assert checked > 300


def test_every_spread_on_a_page_is_one_of_its_csvs():
    page = without_exponents((PAPERS / RENAMED / "README.md").read_text(encoding="utf-8"))
    known = [pair for name in set(LINK.findall(page)) for pair in spreads_in(read(RENAMED, [name]))]
    pairs = SPREAD.findall(page)
    for pair in pairs:
        spread = [shown(number)[0] for number in pair]
        found = any(all(stands(*one, [value]) for one, value in zip(spread, values)) for values in known)
        assert found, f"{' ± '.join(pair)}: not in the CSV files of the page"
    assert len(pairs) > 120


@pytest.mark.parametrize("paper", [*PAGES, RENAMED])
def test_every_file_that_a_page_names_exists_and_every_result_is_named(paper):
    text = (PAPERS / paper / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\((results/[^)]+)\)", text))
    kept = {path.relative_to(PAPERS / paper).as_posix() for path in (PAPERS / paper / "results").rglob("*.*")}
    assert named == kept
