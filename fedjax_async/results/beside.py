"""What a folder keeps beside its results: ``labels.json`` of a comparison, and in ``command.txt`` the commands.

Neither changes a result: the folders of equal runs may differ in ``command.txt``, and in nothing else.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedjax_async.base import disk
from fedjax_async.base.command_line import WORDS
from fedjax_async.results.compared import folder_name
from fedjax_async.results.store import BESIDE, COMMAND, LABELS


@contextlib.contextmanager
def _beginning(folder: Path, name: str, content: bytes | None) -> Iterator[None]:
    """Write the file (None: remove it); an exception that leaves the folder without results leaves no such file."""
    if content is None:
        (folder / name).unlink(missing_ok=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        disk.write(folder / name, content)
    try:
        yield
    except BaseException:
        kept = [path for path in folder.iterdir() if path.name not in BESIDE and not disk.is_leftover(path)]
        for each in () if kept else BESIDE:
            (folder / each).unlink(missing_ok=True)
        raise


# --- labels -------------------------------------------------------------------------------------------


def labels_in(folder: Path) -> dict[str, str]:
    """Folder of a method's runs -> label, as far as methods have labels; ``ValueError`` naming a damaged file."""
    path = folder / LABELS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(label, str) for label in found.values()):
        raise ValueError(f"{path}: must hold the labels of a comparison's methods, folder -> label")
    return found


@contextlib.contextmanager
def labelled(folder: Path | None, methods: Mapping[str, object]) -> Iterator[None]:
    """Keep the labels among the names of ``methods`` (name -> spec) in the folder of the comparison, if there is one.

    Labels of methods that an earlier call compared stay.
    """
    if folder is None:
        yield
        return
    ours = {folder_name(name): name for name in methods}
    kept = {each: label for each, label in labels_in(folder).items() if each not in ours}
    kept |= {each: name for each, name in ours.items() if name != str(methods[name])}
    content = (json.dumps(kept, indent=2) + "\n").encode() if kept else None  # in the order of the methods
    with _beginning(folder, LABELS, content):
        yield


# --- the command --------------------------------------------------------------------------------------


def command_in(folder: Path) -> str:
    """The commands that wrote into a folder, a line each; empty if none is known."""
    path = folder / COMMAND
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""


@contextlib.contextmanager
def commanded(folder: Path | None, *, anew: bool = False) -> Iterator[None]:
    """Keep the command line of this process in a folder, below those of earlier ones (``anew``: alone).

    The same command given again adds no line. Without a folder, or in a call from Python, nothing is written.
    """
    words = WORDS.get()
    if folder is None or not words:
        yield
        return
    line = " ".join(map(shlex.quote, words)) + "\n"
    lines = [] if anew else command_in(folder).splitlines(keepends=True)
    lines += [] if lines[-1:] == [line] else [line]
    with _beginning(folder, COMMAND, "".join(lines).encode(errors="surrogateescape")):
        yield
