"""The command line that this process works for; a call from Python has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

WORDS: ContextVar[tuple[str, ...]] = ContextVar("words of the command line", default=())


@contextlib.contextmanager
def command_line(words: Sequence[str]) -> Iterator[None]:
    """Work for the command with these words: folders of results keep it (``results/beside.py``)."""
    token = WORDS.set(tuple(words))
    try:
        yield
    finally:
        WORDS.reset(token)
