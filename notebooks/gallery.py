"""Draw the pictures of ``gallery.md`` by running its blocks: ``python notebooks/gallery.py``."""

from __future__ import annotations

import os
import re
import runpy
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def script() -> str:
    """The blocks of the page, one after the other."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (FOLDER / "gallery.md").read_text("utf-8"), re.DOTALL | re.M))


def main() -> None:
    """Run the page in its folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gallery.py"
        path.write_text(script(), encoding="utf-8")
        os.chdir(FOLDER)
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main()
