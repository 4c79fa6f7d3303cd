"""The page of the comparison: its tables between marks, and the page to explore where it cannot be written."""

from __future__ import annotations

import sys

import pytest

from fedjax_async.base import registry
from tests.experiment import comparing


@pytest.fixture(scope="module")
def files():
    yield from comparing("comparison", "comparison")


@pytest.mark.parametrize(("page", "why"), [
    ("page.txt", r"html = '\.txt': must be"),
    ("file/page.html", "must be a file that can be written"),
    ("page.html", "plotly is missing"),
])  # fmt: skip
def test_a_page_that_cannot_be_written_is_refused_before_training(files, tmp_path, monkeypatch, page, why):
    def missing():
        raise ValueError("plotly is missing")

    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["comparison", "--scale", "smoke", "--html", str(tmp_path / page)])
    monkeypatch.setattr(files.report.html_figures, "require_plotly", missing)
    monkeypatch.setattr(files.comparison, "trained", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(SystemExit, match=why):
        files.comparison.main()


def test_a_table_is_put_between_its_marks(files):
    text = f"a\n{files.page.mark('x')}\nold\n{files.page.mark('x', end=True)}\nb\n"
    made = files.page.put(text, "x", [{"method": "asgd", "seconds": 1.5}])
    assert "old" not in made and made.startswith("a\n") and made.endswith("b\n") and "| asgd | 2 |" in made
    with pytest.raises(ValueError, match="must have the marks"):
        files.page.put(text, "y", [])


def test_rows_of_earlier_runs_keep_their_machine(files):
    head, before = "world,task,method,point,score,hardware,jax\r\n", "w,t,asgd,asgd,0.12345678,old,1\r\n"
    table = head + before.replace("78,old,1", "79,new,2") + "w,t,mine,mine,0.5,new,2\r\n"
    of_both = head + before.replace("78", "79") + "w,t,mine,mine,0.5,new,2\r\n"
    assert files.page.of_their_machines(table, head + before) == of_both
    assert files.page.of_their_machines(table, "") == table
    assert files.page.of_their_machines(table, head + before.replace("0.1", "0.2")) == table, "run again"


def test_a_changed_file_beside_a_method_counts_as_another_method(files, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "ADDED", {})
    mine, beside = tmp_path / "mine.py", tmp_path / "beside_mine.py"
    beside.write_text("LIMIT = 1.0\n")
    mine.write_text(
        "from beside_mine import LIMIT\n"
        "from fedjax_async import register, server\n"
        "register('method', 'mine')(lambda *, limit=LIMIT: server.fedasync(mixing=limit))\n"
    )
    files.parts.added(str(mine))
    before = files.parts.digest(str(mine))
    (tmp_path / "other.py").write_text("x = 1\n")
    assert files.parts.digest(str(mine)) == before
    beside.write_text("LIMIT = 2.0\n")
    assert files.parts.digest(str(mine)) != before
