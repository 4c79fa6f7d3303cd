"""Every experiment runs: each script with --smoke, as a user would start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"common.py", "torch_loop.py"}  # imported by the others
SCRIPTS = sorted(path for path in (ROOT / "experiments").rglob("*.py") if path.name not in SHARED)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_smoke(script, tmp_path):
    out = tmp_path / "table.csv"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert out.read_text().count("\n") > 1, "a table with at least one row"
    assert "hardware" in out.read_text().splitlines()[0]
