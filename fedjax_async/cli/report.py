"""The command ``report``: one HTML page about folders of results."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedjax_async.results.html_report import write_report


def report(arguments: argparse.Namespace) -> None:
    """Write the page and print its path and size."""
    folders = arguments.folders
    beside = Path(folders[0]) if len(folders) == 1 else Path()
    options = {name: getattr(arguments, name) for name in ("target", "final", "interval")}
    path = write_report(folders, arguments.out or beside / "report.html", **options)
    print(f"written: {path} ({path.stat().st_size / 1e6:.1f} MB), open it in any browser")
