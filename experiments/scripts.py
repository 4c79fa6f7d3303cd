"""The scripts of the papers called from one process: JAX and the data sets are loaded once for all of them."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
KNOWN = re.compile(r"^(\S+): (\d+) of (\d+) runs are known$", re.MULTILINE)
NOT_RUN = re.compile(r"^\S+: not run: (.+)$", re.MULTILINE)


class Ended(NamedTuple):
    """How a script ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def counted(self) -> tuple[int, int]:
        """The number of known runs, and of all runs of the command."""
        found = KNOWN.findall(self.stderr)
        return sum(int(known) for _, known, _ in found), sum(int(runs) for _, _, runs in found)

    @property
    def unavailable(self) -> str:
        """Why a task cannot be run here, or empty."""
        found = NOT_RUN.search(self.stderr)
        return "" if found is None else found[1]


@contextlib.contextmanager
def _as_started(script: Path, options: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as for ``python SCRIPT OPTIONS``; afterwards no module of an experiment is left."""
    arguments, path, before = sys.argv, sys.path[:], _own_modules()
    for name in before:
        del sys.modules[name]
    sys.argv, sys.path = [str(script), *options], [str(script.parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path
        for name in _own_modules():
            del sys.modules[name]
        sys.modules.update(before)


def _own_modules() -> dict[str, ModuleType]:
    """The imported modules that lie in a folder of the experiments."""
    found = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in sys.modules.items()}
    return {name: sys.modules[name] for name, file in found.items() if file and Path(file).parent.parent == HERE}


def call(script: Path, options: str | Sequence[str]) -> Ended:
    """Run a script to its end in this process. ``options``: a list, or one text as on a command line.

    An error of the script is raised; ``SystemExit`` becomes the exit code.
    """
    given = shlex.split(options) if isinstance(options, str) else [*options]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with _as_started(script, given), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
    return Ended(code, out.getvalue(), err.getvalue())
