"""What the site is built with: links of copied pages, contents, docstrings; the public names of the API reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from notebooks import book, docstrings, gallery, generate

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "experiments" / "pushcen" / "README.md"


WORDS = book.FOLDER / "words.md"


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        (PAGE, "[a](../methods/README.md#x)", "[a](../methods/README.md#x)"),  # both are copies
        (PAGE, "[a](../../notebooks/words.md)", "[a](../../../words.md)"),
        (PAGE, "![a](results/costs.csv)", "![a](../../../../experiments/pushcen/results/costs.csv)"),
        (PAGE, "[a](../benchmarks)", "[a](../benchmarks/README.md)"),
        (PAGE, "[a](../../README.md)", "[a](../../../README.md)"),  # the contents are the front page of the site
        (PAGE, "[a](results)", "a"),  # a folder without a page
        (PAGE, "[a](https://example.org/x)", "[a](https://example.org/x)"),
        (PAGE, "[a](#here)", "[a](#here)"),
        (WORDS, "[a](../experiments/pushcen/README.md)", "[a](_built/experiments/pushcen/README.md)"),
    ],
)
def test_links_hold_where_the_copy_stands(page, link, there):
    assert (book.place_of(page) == page) == (page == WORDS), "pages of the book stay where they are"
    assert book.moved(f"See {link}.", page, book.place_of(page)) == f"See {there}."


def test_the_contents_become_a_tree_for_each_part():
    page = "# Book\n\n## Start\n\n- [A](a.md): x.\n- [B](01_b.ipynb): see [c](c.md).\n\n## Study\n\n- [D](d.md)\n"
    text = book.contents(page)
    assert ":caption: Start\n\na\n01_b\n```" in text and ":caption: Study\n\nd\n```" in text
    assert text.count("```{toctree}") == 3 and "_built/api/fedjax_async.clock" in text


@pytest.mark.parametrize("package", book.PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    names = dict(book.public(package))
    assert names and all(name[0] != "_" for name in names)
    assert book.entry("fedjax_async", *next(iter(names.items())))[0].startswith(".. ")


@pytest.mark.parametrize(
    ("made", "text", "plain"),
    [
        # docstrings have no meaning but literals and roles
        (docstrings.plain, "`size` of ``k``", "``size`` of ``k``"),
        (docstrings.plain, ":func:`rule` and `x`", ":func:`rule` and ``x``"),
        (docstrings.plain, "|w| <= 1", r"\|w\| <= 1"),
        (docstrings.plain, "``noise``^2", r"``noise``\ ^2"),
        (docstrings.plain, "``a\n| b``", "``a\n| b``"),
        # a cell is one line without a meaning
        (generate.cell, "a | b", r"a \| b"),
        (generate.cell, "``x_y`` and z_y", r"`x_y` and z\_y"),
        (generate.cell, ":func:`~fedjax_async.rule` <x>", r"`fedjax_async.rule` \<x>"),
        (generate.cell, "two\n  lines", "two lines"),
        # papers are found
        (generate.citations, "as in (Nguyen et al. 2022)", ["Nguyen et al. 2022"]),
        (generate.citations, "Hsu, Qi, Brown 2019, section 3.2", ["Hsu, Qi, Brown 2019"]),
        (generate.citations, "OrthoFL 2025, 5.4", ["OrthoFL 2025"]),
        (generate.citations, "in the year 2025", []),
    ],
)
def test_texts_become(made, text, plain):
    assert made(text) == plain


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


def test_the_gallery_draws_the_pictures_that_are_kept():
    drawn = set(re.findall(r'"pictures/([\w.]+)"', gallery.script()))
    assert drawn == {path.name for path in (ROOT / "notebooks" / "pictures").iterdir()}
    assert sum(path.stat().st_size for path in (ROOT / "notebooks" / "pictures").iterdir()) < 1_000_000
