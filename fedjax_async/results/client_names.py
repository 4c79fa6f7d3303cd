"""Names of clients where tables and pictures show them: texts from files, which no page or picture may interpret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from fedjax_async.types import Run

LONGEST = 24  # characters of a name in a picture
COLUMN = "client_name"  # beside the column ``client``, in files and data frames
_MARKDOWN = re.compile(r"([\\`*_\[\]~$])")


def shown_name(names: Sequence[str] | None, client: int) -> str:
    """The name of a client for a table, on one line of printable characters; without names, its number.

    >>> shown_name(["North\\nshop"], 0), shown_name(None, 0)
    ('North shop', '0')
    """
    if names is None:
        return str(client)
    line = " ".join(names[client].split())
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def label(names: Sequence[str] | None, client: int) -> str:
    """The name of a client for a picture, of at most ``LONGEST`` characters; a longer name is cut and gets an ellipsis.

    The client's number follows in parentheses where the name alone does not tell the client: if it is cut, empty or
    itself a number.

    >>> [label(["North", "7", "A clinic with a name that is too long"], client) for client in range(3)]
    ['North', '7 (1)', 'A clinic with a nam… (2)']
    >>> label(None, 2)
    '2'
    """
    name = shown_name(names, client)
    number = f" ({client})"
    if names is None or (len(name) <= LONGEST and name and not name.isdecimal()):
        return name
    fits = len(name) + len(number) <= LONGEST
    return f"{name if fits else name[: LONGEST - len(number) - 1] + '…'}{number}".strip()


def titled(names: Sequence[str] | None, client: int) -> str:
    """``client 3``, with its name in parentheses if there are names."""
    return f"client {client}" + ("" if names is None else f" ({shown_name(names, client)})")


def labels(names: Sequence[str] | None, clients: Sequence[int] | np.ndarray) -> list[str]:
    """The label of each of these clients."""
    return [label(names, int(client)) for client in clients]


def with_names(run: Run, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns, with those of clients' names after ``client``, if the run has names and the table clients."""
    names, found = run.client_names, dict(columns)
    if names is None or "client" not in found:
        return found
    at = list(found).index("client") + 1
    column = np.array(names, object)[found["client"]]
    return dict([*list(found.items())[:at], (COLUMN, column), *list(found.items())[at:]])


def markdown_rows(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Rows of a table with texts that Markdown shows as they are, and not as markup or HTML.

    >>> markdown_rows([{"client": 1, "client_name": "<b>*"}])
    [{'client': 1, 'client_name': '&lt;b&gt;\\\\*'}]
    """
    return [{name: _escaped(v) if isinstance(v, str) else v for name, v in row.items()} for row in rows]


def _escaped(text: str) -> str:
    """``|`` stays, which every Markdown table escapes."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return _MARKDOWN.sub(r"\\\1", text)
