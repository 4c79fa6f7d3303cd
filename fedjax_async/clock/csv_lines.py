"""Reading CSV files that people write: numbered lines, and errors that name the file."""

from __future__ import annotations

import csv
from pathlib import Path


def read_lines(path: str | Path) -> list[tuple[int, list[str]]]:
    """Lines that are not empty, as ``(line number, cells)``; the first is the header.

    ``ValueError`` if the file cannot be read, is not text, or has no line of values.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [(number, cells) for number, cells in enumerate(csv.reader(file), 1) if any(cells)]
    except OSError as error:
        raise ValueError(f"path = {str(path)!r}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"path = {str(path)!r}: not a text file") from None
    if len(lines) < 2:
        raise ValueError(f"{path}: must have a header line and at least one line of values")
    return lines
