"""What the site is built with: links of copied pages, contents, docstrings; the public names of the API reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from notebooks import book, docstrings, gallery, generate

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "experiments" / "pushcen" / "README.md"


@pytest.mark.parametrize(
    ("link", "there"),
    [
        ("[a](../methods/README.md#x)", "[a](../methods/README.md#x)"),  # both are copies
        ("[a](../../notebooks/words.md)", "[a](../../../words.md)"),
        ("![a](results/costs.csv)", "![a](../../../../experiments/pushcen/results/costs.csv)"),
        ("[a](../benchmarks)", "[a](../benchmarks/README.md)"),
        ("[a](../../README.md)", "[a](../../../README.md)"),  # the contents are the front page of the site
        ("[a](results)", "a"),  # a folder without a page
        ("[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("[a](#here)", "[a](#here)"),
    ],
)
def test_links_hold_where_the_copy_stands(link, there):
    assert book.moved(f"See {link}.", PAGE, book.place_of(PAGE)) == f"See {there}."


def test_pages_of_the_book_stay_where_they_are():
    words = book.FOLDER / "words.md"
    assert book.place_of(words) == words
    text = book.moved("[a](../experiments/pushcen/README.md)", words, words)
    assert text == "[a](_built/experiments/pushcen/README.md)"


def test_the_contents_become_a_tree_for_each_part():
    text = book.contents(
        "# Book\n\n## Start\n\n- [A](a.md): x.\n- [B](01_b.ipynb): see [c](c.md).\n\n## Study\n\n- [D](d.md)\n"
    )
    assert ":caption: Start\n\na\n01_b\n```" in text and ":caption: Study\n\nd\n```" in text
    assert text.count("```{toctree}") == 3 and "_built/api/fedjax_async.clock" in text


@pytest.mark.parametrize("package", book.PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    names = dict(book.public(package))
    assert names and all(name[0] != "_" for name in names)
    assert book.entry("fedjax_async", *next(iter(names.items())))[0].startswith(".. ")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("`size` of ``k``", "``size`` of ``k``"),
        (":func:`rule` and `x`", ":func:`rule` and ``x``"),
        ("|w| <= 1", r"\|w\| <= 1"),
        ("``noise``^2", r"``noise``\ ^2"),
        ("``a\n| b``", "``a\n| b``"),
    ],
)
def test_docstrings_have_no_meaning_but_literals_and_roles(text, plain):
    assert docstrings.plain(text) == plain


def test_a_table_in_a_docstring_is_a_list_table():
    found = docstrings.with_tables(["A", "", "| of | is |", "| --- | --- |", "| ``a`` | b |", "", "B"])
    assert [line for line in found if line] == [
        "A", ".. list-table::", "   :header-rows: 1", "   * - of", "     - is", "   * - ``a``", "     - b", "B",
    ]  # fmt: skip


class Pair(NamedTuple):
    """Two numbers."""

    first: int  # [N] of `x`, not x_
    second: float = 0.0


def test_fields_have_the_comments_of_their_lines():
    assert docstrings.fields_of(Pair)[3:5] == [
        r"* ``first: int``: [N] of ``x``, not x\_", "* ``second: float = 0.0``",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a | b", r"a \| b"),
        ("``x_y`` and z_y", r"`x_y` and z\_y"),
        (":func:`~fedjax_async.rule` <x>", r"`fedjax_async.rule` \<x>"),
        ("two\n  lines", "two lines"),
    ],
)
def test_a_cell_is_one_line_without_a_meaning(text, cell):
    assert generate.cell(text) == cell


def test_papers_are_found():
    assert generate.citations("as in (Nguyen et al. 2022)") == ["Nguyen et al. 2022"]
    assert generate.citations("Hsu, Qi, Brown 2019, section 3.2") == ["Hsu, Qi, Brown 2019"]
    assert generate.citations("OrthoFL 2025, 5.4") == ["OrthoFL 2025"]
    assert generate.citations("in the year 2025") == []


def test_the_gallery_draws_the_pictures_that_are_kept():
    drawn = set(re.findall(r'"pictures/([\w.]+)"', gallery.script()))
    assert drawn == {path.name for path in (ROOT / "notebooks" / "pictures").iterdir()}
    assert sum(path.stat().st_size for path in (ROOT / "notebooks" / "pictures").iterdir()) < 1_000_000
