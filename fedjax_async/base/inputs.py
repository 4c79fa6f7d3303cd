"""The input files of a run: which ones its readers open, and digests of their contents.

A digest depends on the content alone, so a moved copy of a file has the same. It is remembered under the file's size
and times of change: in this process, and for large files also in ``digests.json`` in the folder of fetched data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedjax_async.base import home, registry

if TYPE_CHECKING:
    import numpy as np

LARGE = 2**23  # bytes; digests of larger files are also remembered on the disk
LARGEST_HASHED = 2**30  # bytes of a mapped array that is hashed as it is, like arrays in memory
MOST_REMEMBERED = 1000  # of them
# Nanoseconds; a file that changed less than this before it was read may change again at the same time stamp.
SETTLED = 2 * 10**9
MOST_LISTED = 32  # files of one setting; more are listed as their folder, with one digest

Digests = tuple[tuple[str, str], ...]  # (path, digest) of each file, in the order of reading
Stamp = list[int]  # what os.stat says about a file that changes whenever its content does

_known: dict[str, tuple[Stamp | None, str]] = {}  # path as given -> stamp, None if not settled; digest
changed: list[str] = []  # files that were found to have changed in this process, each time


class FileSpec(str):
    """The text of a setting that names files, with the digests of their contents.

    It equals its text: what was read from a file that has changed since is forgotten by :func:`digest`.
    """

    pattern: str  # the text with ``*`` for each path, so that it is the same for a moved copy
    files: Digests

    def __new__(cls, text: str, pattern: str = "*", files: Digests = ()) -> FileSpec:
        made = super().__new__(cls, text)
        made.pattern, made.files = pattern, files
        return made


def digest(path: str | Path) -> str:
    """SHA-256 of a file's content, 64 hexadecimal characters; ``OSError`` if it cannot be read.

    If the path had another content earlier in this process, the caches of what was read by name are emptied.
    """
    about = os.stat(path)
    stamp = [about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino, about.st_dev]
    before = _known.get(str(path))
    if before is not None and before[0] == stamp:
        return before[1]
    settled = time.time_ns() - max(about.st_mtime_ns, about.st_ctime_ns) > SETTLED
    large = settled and about.st_size >= LARGE
    found = _remembered(path, stamp) if large else None
    if found is None:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if large:
            _remember(path, stamp, found)
    if before is not None and before[1] != found:
        changed.append(str(path))
        registry.forget()
    _known[str(path)] = (stamp if settled else None, found)
    return found


def mapped(array: np.memmap) -> str | None:
    """What a large memory-mapped array holds, by the digest of its file, which is remembered.

    ``None`` for a small one, and for one that is not all that follows its offset in the file.
    """
    if array.nbytes <= LARGEST_HASHED or array.filename is None:
        return None
    if os.path.getsize(array.filename) != array.offset + array.nbytes:
        return None
    whole = f"{array.dtype} {array.shape} {array.offset} {digest(str(array.filename))}"
    return whole if array.flags.c_contiguous else None


def listed(paths: list[Path], folder: str | Path | None = None) -> Digests:
    """The path and the digest of each file; of many files only ``folder``, and one digest of all their digests."""
    found = tuple((str(path), digest(path)) for path in paths)
    if len(found) <= MOST_LISTED:
        return found
    whole = hashlib.sha256("".join(each for _, each in found).encode()).hexdigest()
    return ((str(os.path.commonpath(paths) if folder is None else folder), whole),)


def described(fields: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Setting -> its text without paths, and path and digest of each file, as ``settings.json`` keeps them."""
    return {
        field: {"spec": value.pattern, "sha256": [list(pair) for pair in value.files]}
        for field, value in fields.items()
        if isinstance(value, FileSpec)
    }


def restored(fields: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` with the digests that :func:`described` wrote; ``ValueError`` if ``saved`` is of another form."""
    try:
        files = {field: tuple((str(path), str(found)) for path, found in saved[field]["sha256"]) for field in saved}
        specs = {field: FileSpec(fields[field], str(saved[field]["spec"]), pairs) for field, pairs in files.items()}
    except (KeyError, TypeError, ValueError):
        raise ValueError("files: must be digests of the input files of settings, as a run writes them") from None
    return {**fields, **specs}


# --- what readers open ------------------------------------------------------------------------------

_reading: ContextVar[list[Path] | None] = ContextVar("_reading", default=None)


def reading(path: Path) -> Path:
    """Tell that a run reads the file ``path``; returns it. Readers of data sets call it for each file."""
    files = _reading.get()
    if files is not None and path not in files:
        files.append(path)
    return path


@contextlib.contextmanager
def collected() -> Iterator[list[Path]]:
    """Yields a list, which gets the files that are read within."""
    files: list[Path] = []
    token = _reading.set(files)
    try:
        yield files
    finally:
        _reading.reset(token)


# --- digests of large files on the disk -------------------------------------------------------------


def _store() -> Path | None:
    folder = home.default_data_dir()
    return None if folder is None else folder / "digests.json"


def _content() -> dict[str, list[Any]]:
    """Path -> stamp and digest; empty if there is no such file or it is damaged."""
    store = _store()
    if store is None:  # there is no home directory
        return {}
    try:
        content = json.loads(store.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remembered(path: str | Path, stamp: Stamp) -> str | None:
    """The digest that was remembered for this file, ``None`` if there is none or the file has changed."""
    entry = _content().get(os.path.realpath(path))
    fits = isinstance(entry, list) and len(entry) == 2 and entry[0] == stamp and isinstance(entry[1], str)
    return entry[1] if fits and entry is not None else None


def _remember(path: str | Path, stamp: Stamp, found: str) -> None:
    """Remember a digest; without a folder to write to, the file is only read again the next time."""
    from fedjax_async.base import disk  # noqa: PLC0415 (needs NumPy)

    store = _store()
    if store is None:
        return
    content = _content()
    content.pop(os.path.realpath(path), None)
    content[os.path.realpath(path)] = [stamp, found]
    kept = dict(list(content.items())[-MOST_REMEMBERED:])
    with contextlib.suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        disk.write(store, json.dumps(kept, indent=1).encode())


def below(path: Path) -> Iterator[Path]:
    """The files of a path: itself, or all files in the folder and below it, without hidden ones, in order of names."""
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
