"""Run the notebooks and store their outputs: ``python notebooks/execute.py``, or with names such as ``02 11``.

The stored outputs let the notebooks be read on the web. They leave out what differs between executions with the same
results: times, warnings, versions of the kernel, random names inside pictures.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Python finds the package beside the notebooks; matplotlib writes no date and no random names
ENVIRONMENT = {"PYTHONPATH": str(FOLDER.parent), "SOURCE_DATE_EPOCH": "0", "MATPLOTLIBRC": str(FOLDER / "matplotlibrc")}
ENVIRONMENT |= {"TQDM_DISABLE": "1"}  # outputs without progress bars
SVG = "image/svg+xml"
NUMBER = r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?|\bnan\b|\binf\b"


def read(path: Path) -> NotebookNode:
    """The notebook in ``path``."""
    return nbformat.read(path, as_version=4)


def executed(path: Path) -> NotebookNode:
    """The notebook after running it from top to bottom, with the outputs as they are stored."""
    with tempfile.TemporaryDirectory() as sockets:  # instead of ports, so that several may run at the same time
        client = NotebookClient(
            read(path),
            timeout=600,
            record_timing=False,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
            config=Config(KernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"}),
        )
        done = client.execute(env=os.environ | ENVIRONMENT)
    done.metadata = read(path).metadata
    for index, cell in enumerate(done.cells):
        cell.id = f"cell-{index:02d}"
    for cell in code_cells(done):
        cell.outputs = joined([output for output in cell.outputs if output.get("name") != "stderr"])
        for output in cell.outputs:
            if SVG in output.get("data", {}):
                output.data[SVG] = " ".join(output.data[SVG].split())  # one line per picture instead of thousands
    return done


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs with consecutive printed texts joined, because timing splits them at random."""
    found: list[NotebookNode] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def said(cell: NotebookNode) -> str:
    """The texts of a cell's outputs."""
    return "\n".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def words(cell: NotebookNode) -> list[str]:
    """The kinds and words of a cell's outputs, sorted, with every number replaced by #.

    Sorted, because other numbers can change the order of rows, and with them the widths of columns.
    """
    kinds = [kind for output in cell.outputs for kind in (output.output_type, *output.get("data", {}))]
    return sorted([*kinds, *re.sub(r"-{2,}", "-", re.sub(NUMBER, "#", said(cell))).split()])


def numbers(cell: NotebookNode) -> tuple[list[int], list[float]]:
    """The whole numbers in a cell's outputs and the others, in their order; none if the cell has the tag ``rounding``.

    Other machines and versions add floating-point numbers in another order. The tag marks the cells where training
    makes that visible: what they choose, or when they reach a target.
    """
    if "rounding" in cell.metadata.get("tags", []):
        return [], []
    found = [text.replace(",", "") for text in re.findall(NUMBER, said(cell))]
    whole = [text.lstrip("+-").isdigit() for text in found]
    return [int(text) for text, is_whole in zip(found, whole) if is_whole], [
        float(text) for text, is_whole in zip(found, whole) if not is_whole
    ]


def main(names: list[str]) -> None:
    """Run the notebooks whose names begin with one of ``names`` (all if none) and write them back."""
    for path in NOTEBOOKS:
        if not names or path.name.startswith(tuple(names)):
            nbformat.write(executed(path), path)
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
