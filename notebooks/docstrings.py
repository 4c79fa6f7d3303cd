"""Docstrings for the API reference: what autodoc reads as reStructuredText, from how the package writes them."""

from __future__ import annotations

import re
from typing import Any

from notebooks import generate


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of a Markdown table, without its rule."""
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def list_table(lines: list[str]) -> list[str]:
    """A Markdown table as a list-table."""
    found = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in rows_of(lines):
        found += [f"   {'-' if column else '* -'} {cell}".replace("   -", "     -") for column, cell in enumerate(row)]
    return [*found, ""]


def with_tables(lines: list[str]) -> list[str]:
    """The lines with list-tables in the place of Markdown tables."""
    found: list[str] = []
    table: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("| "):
            table.append(line)
            continue
        if table:
            found += list_table(table)
            table = []
        found.append(line)
    return found


def plain(text: str) -> str:
    """Text in which only literals and roles have a meaning: single backticks become double, bars are bars."""
    marked = re.compile(r"(``.*?``|:\w+:`[^`]*`)|`([^`\n]+)`(?!_)|(\|)", re.DOTALL)

    def written(found: re.Match[str]) -> str:
        code = found[1] or (f"``{found[2]}``" if found[2] else r"\|")
        follows = text[found.end() : found.end() + 1]
        return code + (r"\ " if found[3] is None and re.match(r"[\w^=+<>]", follows) else "")

    return marked.sub(written, text)


def fields_of(contract: Any) -> list[str]:
    """The fields of a NamedTuple, with the comments of its source text."""
    try:
        rows = list(generate.fields_of(contract))
    except (OSError, TypeError):
        return []
    found = ["", "Fields:", ""]
    for name, kind, comment in rows:
        shown = f"{name.strip('`')}: {kind.strip('`')}".replace("\\|", "|")
        text = re.sub(r"(?<!\w)([*])|(_)(?!\w)", r"\\\1\2", plain(re.sub(r"\\(.)", r"\1", comment)))
        found.append(f"* ``{shown}``{': ' if text else ''}{text}")
    return [*found, ""]


def process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place."""
    found = plain("\n".join(with_tables(lines))).splitlines()
    if what == "class" and hasattr(thing, "_fields"):
        found += fields_of(thing)
    lines[:] = found


def skip(app: Any, what: str, name: str, thing: Any, skips: bool, options: Any) -> bool | None:
    """Leave the fields of NamedTuples out: :func:`process` lists them."""
    return True if (getattr(thing, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Any) -> None:
    """Connect to autodoc."""
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip)
