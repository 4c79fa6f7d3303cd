"""A process of one checkout of the package, which answers requests: one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Worker:
    """A script run with the package of a checkout, on a CPU; ``given``: the script and its arguments."""

    def __init__(self, checkout: Path, given: Sequence[str], cwd: Path, **environment: str) -> None:
        self.checkout = checkout.resolve()
        variables = {**os.environ, "PYTHONPATH": str(self.checkout), "JAX_PLATFORMS": "cpu", **environment}
        self.process = subprocess.Popen(
            [sys.executable, *given], env=variables, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Any:
        """The answer to one request; ``RuntimeError`` if the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended: its answer below is empty
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.checkout} has ended, see above")
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self.process.communicate()
