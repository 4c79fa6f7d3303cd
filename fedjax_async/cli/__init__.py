"""The command line: ``fedjax-async quickstart | run | compare | sweep | plan | list | data``.

Flags are parsed, and missing data sets are named, without NumPy and JAX; a command's own module is imported when it
starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fedjax_async.cli.flags import parser

__all__ = ["main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0, or 2 with one line on standard error for input that cannot be used."""
    arguments = parser().parse_args(argv)
    try:
        arguments.action(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print("fedjax-async: error:", *str(error).splitlines(), file=sys.stderr)
        return 2
    return 0
