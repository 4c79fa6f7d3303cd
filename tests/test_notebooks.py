"""Every notebook runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.filterwarnings("default")  # of the notebook machinery, not ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_it_runs(path):
    with tempfile.TemporaryDirectory() as sockets:  # in place of ports, so that tests may run side by side
        client = NotebookClient(
            nbformat.read(path, as_version=4),
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
        )
        done = client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_it_is_kept_without_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.id for cell in cells] == [f"cell-{k:02d}" for k in range(len(cells))]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")
