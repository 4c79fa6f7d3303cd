"""The entry point: plugins, the command, warnings and errors as lines, the exit code."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from fedjax_async.base.command_line import command_line
from fedjax_async.base.notices import AllRejected, RunWarning
from fedjax_async.cli.flags import parser


def _load_plugins(given: list[str] | None) -> None:
    """Load the plugins of installed packages and of the flag; without any, nothing is imported."""
    if given or (given is not None and metadata.entry_points(group="fedjax_async.plugins")):
        from fedjax_async.config import plugins  # noqa: PLC0415 (needs JAX)

        plugins.load(given)


@contextmanager
def _said() -> Iterator[set[type[Warning]]]:
    """Print each warning about runs once, as one line; yields the set of warning classes seen so far."""
    kinds: set[type[Warning]] = set()
    lines: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", RunWarning)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            line = f"fedjax-async: warning: {message}"
            if not issubclass(category, RunWarning):
                usual(message, category, *where, **options)
            elif line not in lines:
                print(line, file=sys.stderr, flush=True)
            kinds.add(category)
            lines.add(line)

        warnings.showwarning = show
        yield kinds


def _plain(error: Any) -> tuple[str | bytes, int]:
    """Characters that the output cannot show: ``±`` as ``+-``, bytes of a file's name as they are, others escaped."""
    text = error.object[error.start : error.end]
    if all("\udc80" <= character <= "\udcff" for character in text):
        return text.encode("ascii", "surrogateescape"), error.end
    return text.replace("±", "+-").encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error("fedjax_async.plain", _plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code, 0 for success. Errors are one line on standard error.

    2: input that cannot be used, or too little memory. 3: results are written, but every upload of a run was rejected.
    130: interrupted.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale without Unicode must not end a command after its work
        sys.stdout.reconfigure(errors="fedjax_async.plain")
    words = sys.argv[1:] if argv is None else argv
    arguments = parser().parse_args(words)
    with command_line(["fedjax-async", *words]), _said() as kinds:
        code = _act(arguments)
    return code or (3 if AllRejected in kinds else 0)


def _act(arguments: argparse.Namespace) -> int:
    try:
        _load_plugins(getattr(arguments, "plugin", None))
        arguments.action(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as interrupt:
        print("fedjax-async: interrupted", *interrupt.args, sep="", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError) as error:
        print("fedjax-async: error:", *(str(error) or "memory: exhausted").splitlines(), file=sys.stderr)
        return 2
    return 0
