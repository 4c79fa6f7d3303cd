"""The pages of the papers' experiments: every number in a table is in the CSV file that the table names."""

from __future__ import annotations

import re

import pytest

from tests.experiment import EXPERIMENTS, module

pages = module("", "pages")


@pytest.mark.parametrize("paper", pages.PAGES)
def test_every_number_of_a_table_stands_in_its_csv(paper):
    checked, wrong = pages.numbers(paper)
    assert not wrong and checked > 100


def test_every_row_of_a_table_is_a_row_of_its_csv():
    checked, wrong = pages.rows_of_csvs(pages.RENAMED)
    assert not wrong and checked > 300


def test_every_spread_on_a_page_is_one_of_its_csvs():
    checked, wrong = pages.spreads(pages.RENAMED)
    assert not wrong and checked > 120


@pytest.mark.parametrize("paper", pages.LOOSE)
def test_every_number_of_a_cell_stands_in_a_row_of_its_csv(paper):
    checked, wrong = pages.loosely(paper)
    assert not wrong and checked >= {"benchmarks": 1500, "vector_fields": 120, "robustness": 77, "privacy": 49}[paper]


@pytest.mark.parametrize("paper", [*pages.PAGES, pages.RENAMED])
def test_every_file_that_a_page_names_exists_and_every_result_is_named(paper):
    """Curves of runs that no table has yet are named by the plan, on the experiments' front page."""
    text, plan = ((EXPERIMENTS / page).read_text(encoding="utf-8") for page in (f"{paper}/README.md", "README.md"))
    named = set(re.findall(r"\((results/[^)]+)\)", text))
    planned = set(re.findall(rf"\({paper}/(results/[^)]+)\)", plan))
    planned |= {name.replace("_curves.csv", "_clients.csv") for name in planned}  # if its script keeps clients
    kept = {path.relative_to(EXPERIMENTS / paper).as_posix() for path in (EXPERIMENTS / paper / "results").rglob("*.*")}
    assert named <= kept <= named | planned


@pytest.mark.parametrize("paper", ["orthofl", "asynfl", "asynccurve", "pushcen", "vector_fields"])
def test_a_page_says_how_to_repeat_each_of_its_tables(paper):
    """Hardware and JAX are those of the files; every table has a command, and reviewers' questions have answers."""
    text = (EXPERIMENTS / paper / "README.md").read_text(encoding="utf-8").partition("## To repeat it")[2]
    asked = ("Data", "Seeds", "Settings", "Environment", "Expected numbers", "Tolerance")
    assert re.findall(r"^- (.*?):", text, re.MULTILINE) == [*asked]
    found = set()
    for line in re.findall(r"^\| `.*", text, re.MULTILINE):
        command, files, _, _, hardware, jax, _ = pages.cells_of(line)
        names = pages.LINK.findall(files)
        assert (EXPERIMENTS / paper / command.strip("`").split()[0]).is_file() and names
        rows = pages.read(paper, names)
        known = {row["hardware"] for row in rows if row.get("hardware")}
        short = {each.replace("(R)", "").replace(" Processor", "").replace(" 80GB HBM3", "") for each in known}
        assert hardware == "; ".join(sorted(short)) and {jax} == {row["jax"] for row in rows if row.get("jax")}
        found |= set(names)
    tables = {f"results/{path.name}" for path in (EXPERIMENTS / paper / "results").glob("*.csv")}
    assert found == {name for name in tables if not name.endswith(("_curves.csv", "_clients.csv"))}
