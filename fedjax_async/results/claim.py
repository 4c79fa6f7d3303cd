"""The place for results, before the work: made, proven writable, and used by one process at a time.

The operating system holds the lock and releases it when the process ends, however it ends. A killed process leaves
the lock's file behind, which stops nobody.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

from fedjax_async import disk

try:
    import fcntl
except ImportError:  # Windows: folders are proven writable, but not locked
    fcntl = None  # type: ignore[assignment]

OWNER_LENGTH = 200  # bytes of the text in a lock's file, so that one write replaces all of it
TRIES = 100  # to lock a file that its owner does not remove at that moment
_this_thread = threading.local()  # `places`: the folders that this thread has claimed


@contextlib.contextmanager
def claimed(folder: str | Path | None, *, shared: bool = False) -> Iterator[None]:
    """Have ``folder`` for this thread alone, or share it with others that ask to share it.

    The folder and its parents are made, and a file is written into it and removed. In the end the folders made here
    that are still empty are removed. A claim inside a claim of the same folder by the same thread does nothing, and
    so does ``None``.

    Where the platform or the file system has no locks (``fcntl.flock``), the folder is only proven writable.

    Raises: ``ValueError`` naming the folder where it cannot be made or written, or is in use; the latter names the
    process that uses it.
    """
    places: set[str] = _this_thread.__dict__.setdefault("places", set())
    place = None if folder is None else os.path.realpath(folder)
    if place is None or place in places:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            home = stack.enter_context(_made(Path(place)))
            stack.enter_context(_locked(home / disk.LOCK, str(folder), shared))
            disk.prove(home / disk.LOCK)
        except (FileExistsError, NotADirectoryError) as error:  # the folder or one above it
            raise ValueError(f"folder = {str(folder)!r}: must be a folder, not a file") from error
        except OSError as error:
            raise ValueError(
                f"folder = {str(folder)!r}: must be a folder that can be written ({_why(error)})"
            ) from error
        places.add(place)
        stack.callback(places.discard, place)
        yield


def require_writable(field: str, path: str | Path) -> None:
    """``ValueError`` naming ``field`` unless a file can be written at ``path``; nothing is left behind."""
    path = Path(path)
    try:
        with _made(path.parent):
            disk.prove(path)
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))  # the folder or one above it
        why = f"{str(path.parent)!r} is not a folder" if is_file else _why(error)
        raise ValueError(f"{field} = {str(path)!r}: must be a file that can be written ({why})") from error


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Make a folder with its parents; in the end, those that are new and still empty are removed."""
    new = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        for place in new:
            with contextlib.suppress(OSError):
                place.rmdir()


@contextlib.contextmanager
def _locked(path: Path, folder: str, shared: bool) -> Iterator[None]:
    """Hold the lock of a file, which is made if missing; the last process that holds it removes it."""
    if fcntl is None:
        yield
        return
    opened = _open_locked(path, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        os.pwrite(opened, _owner(shared).encode().ljust(OWNER_LENGTH)[:OWNER_LENGTH], 0)
        yield
    finally:
        if _lock(opened, fcntl.LOCK_EX):  # no other process shares it
            path.unlink(missing_ok=True)
        os.close(opened)


def _open_locked(path: Path, folder: str, kind: int) -> int:
    """The file, opened and locked; ``ValueError`` naming the process that holds it."""
    for _ in range(TRIES):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(opened, kind):
            owner = os.pread(opened, OWNER_LENGTH, 0).decode(errors="replace").strip() or "another process"
            os.close(opened)
            raise ValueError(f"folder = {folder!r}: must be free, but the folder is in use by {owner}")
        if _is_at(opened, path):
            return opened
        os.close(opened)  # its owner removed it after it was opened here
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _lock(opened: int, kind: int) -> bool:
    """Whether no other process holds the lock against ``kind``; also true on a file system without locks."""
    try:
        fcntl.flock(opened, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _owner(shared: bool) -> str:
    process = f"process {os.getpid()} on {platform.node()}"
    return f"jobs of its sweep (the newest is {process})" if shared else process


def _is_at(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path))
    except FileNotFoundError:
        return False
