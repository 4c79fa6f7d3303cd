"""The parser of flags: an error is one line, and an option with a value may be given only once."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fedjax_async.base import check
from fedjax_async.base.grammar import is_plain_number
from fedjax_async.cli.unknown import Known, hint

Parsed = TypeVar("Parsed")  # a number


def _ascii(kind: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """The type of a number in ASCII: Python also reads ``1_0`` and the digits of other scripts."""

    def parse(text: str) -> Parsed:
        if not is_plain_number(text):
            raise ValueError(text)
        return kind(text)

    parse.__name__ = kind.__name__  # the name of the type in the message of a wrong value
    return parse


whole, real = _ascii(int), _ascii(float)


NO_PLOTS: dict[str, Any] = {"action": "store_true", "help": "draw no pictures; matplotlib is then not needed"}


def folder(text: str) -> str:
    """The type of ``--out``, and of other folders."""
    return _named(text, "folder")


def file(text: str) -> str:
    """The type of ``--gantt``, of the page of ``report`` and of other files that are written."""
    return _named(text, "file")


def _named(text: str, kind: str) -> str:
    """The path of a file or folder, with ``~`` expanded: a shell leaves it alone in ``--out=~/runs``."""
    if not text or check.has_control(text):
        raise argparse.ArgumentTypeError(f"must be the name of a {kind}, without control characters")
    try:
        found = check.path(kind, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from error
    return str(found) if text.startswith("~") else text


def in_free_folder(given: str | None, usual: str | Path, act: Callable[[str], None]) -> None:
    """``act(folder)`` with the folder that is given, else with the first of ``usual``, ``usual_2``, ... that is free.

    A folder is free unless ``act`` raises ``Occupied`` because it holds other results; a line names the one chosen.
    """
    from fedjax_async.results.store import Occupied, numbered  # noqa: PLC0415 (needs NumPy)

    if given is not None:
        act(given)
        return
    for folder in numbered(usual):
        try:
            act(str(folder))
        except Occupied:
            continue
        if folder != Path(usual):
            print(f"{usual} holds other results, which are kept (--overwrite replaces them)")
        return


# What beginners and other programs call the commands.
COMMANDS = {"train": "run", "simulate": "run", "start": "run", "continue": "resume", "plot": "redraw", "help": "--help"}


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that refuses abbreviated options and options given twice; argparse accepts both silently.

    Flags without a value, and those that collect a list (``action="append"``), may be repeated. ``instead``: where a
    command without flags for the settings takes them from. ``commands``: the parsers of all commands by name, to say of
    a flag whose it is.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"allow_abbrev": False})
        self.instead = ""
        self.commands: Mapping[str, Parser] = {}
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; unknown arguments are an error of this command, with the nearest flag in the message."""
        given = list(sys.argv[1:] if args is None else args)
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        first = str(given[0]).partition("=")[0] if given else ""
        # a wrong flag where the command should be must not be reported as a missing command
        wrong = self._subparsers is not None and first.startswith("--") and not any(f.startswith(first) for f in known)
        found, left = (namespace, given[:1]) if wrong else super().parse_known_args(given, namespace)
        if left:
            meant = hint(left, found, self._known(left[0].partition("=")[0]))
            self.error(f"unrecognized arguments: {' '.join(left)}{meant}")
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown command with the nearest one."""
        if action.choices is None or value in action.choices:
            return
        small = value.lower()
        meant = COMMANDS.get(small) or next(iter(difflib.get_close_matches(small, action.choices, n=1)), None)
        hint = f"; did you mean {meant}?" if meant else ""
        raise argparse.ArgumentError(action, f"unknown {value!r}{hint} (known: {', '.join(map(str, action.choices))})")

    def takes(self, flag: str) -> bool:
        """Whether the command has a flag of this name."""
        return flag in self._option_string_actions

    def _known(self, unknown: str) -> Known:
        """What the command knows, and which others have the ``unknown`` flag; quickstart has those of ``compare``."""
        owners = [name for name, command in self.commands.items() if command.takes(unknown) and name != "quickstart"]
        return Known(list(self._option_string_actions), self.instead, owners)

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line, without the usage: that of a command with 50 flags would hide the message."""
        self.exit(2, f"fedjax-async: error: {' '.join(message.split())} (see {self.prog} --help)\n")


class _StoreOnce(argparse.Action):
    """Store a value, once. The namespace keeps the options that were given under ``_given``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        given: set[str] = namespace.__dict__.setdefault("_given", set())
        if self.dest in given:
            parser.error(f"{self.option_strings[0]} {values}: must be given once, not twice")
        if option is not None:
            given.add(self.dest)
        setattr(namespace, self.dest, values)
