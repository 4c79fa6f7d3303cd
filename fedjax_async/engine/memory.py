"""Device memory: sizes in text, and what compiled programs say they need."""

from __future__ import annotations

import re
from typing import Any

import jax

from fedjax_async import check

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_size(field: str, text: str) -> int:
    """Bytes from text such as ``4GB``, ``512 MiB`` or ``2e9``.

    >>> parse_size("memory_limit", "1.5GB"), parse_size("memory_limit", "2 KiB")
    (1500000000, 2048)
    """
    allowed = "a size such as 4GB, 512MiB or 2e9 (bytes)"
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*((?:[KMG]I?)?)B?\s*", str(text).upper().replace("E", "e"))
    check.require(found is not None, field, text, allowed)
    number, unit = found.groups() if found is not None else ("0", "")
    size = int(float(number) * _UNITS[unit])
    check.require(size > 0, field, text, allowed)
    return size


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree (arrays or their shapes)."""
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def temporary_bytes(compiled: Any) -> int:
    """What one call of a compiled program needs besides its arguments and results; 0 where the backend does not say."""
    found = compiled.memory_analysis()
    return 0 if found is None else int(found.temp_size_in_bytes)
