"""Shared by the experiments of this folder: their options, tables in float64, and pictures.

Every script takes ``--scale smoke|laptop|paper``. For the paper's examples and theorems ``paper`` only takes more
points, rounds and seeds. Experiments beyond the paper have our settings at every scale. ``smoke`` shows that a script
runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

import variants as shared
from variants import Rows, Variant, parse, report, run_variants

from fedjax_async.results.figure import require_matplotlib

__all__ = ["Rows", "Variant", "options", "parse", "picture", "report", "run_variants"]


def options(about: str | None, name: str) -> argparse.ArgumentParser:
    """The parser of the options that all scripts share."""
    return shared.options(about, "vector_fields", name)


def picture(columns: int = 1, width: float = 5.0, height: float = 4.0) -> tuple[Any, Any]:
    """A figure with ``columns`` axes, and the list of them."""
    figure = require_matplotlib()(figsize=(width * columns, height), layout="constrained", dpi=130)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes
