"""Claim a folder before the work: make it, check that it can be written, lock it against other processes.

The operating system holds the lock and releases it when the process ends, even if it is killed. A killed process
leaves the lock file behind; that file blocks no later process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

from fedjax_async.base import disk

try:
    import fcntl
except ImportError:  # Windows: folders are checked, but not locked
    fcntl = None  # type: ignore[assignment]

OWNER_LENGTH = 200  # bytes of the text in a lock file; fixed, so that one write replaces the whole text
TRIES = 100  # attempts to lock the file, which its owner may remove at the same moment
_this_thread = threading.local()  # `folders`: the real paths that this thread has claimed


@contextlib.contextmanager
def claimed(folder: str | Path | None, *, shared: bool = False) -> Iterator[None]:
    """Reserve ``folder`` for this thread alone, or with ``shared`` for all processes that ask to share it.

    The folder and its parents are made, and a file is written into it and removed. At the end, folders that were
    made here and are still empty are removed. Nothing happens for ``None``, or if this thread has claimed the folder
    already. Where the platform or the file system has no locks (``fcntl.flock``), the folder is only checked.

    Raises: ``ValueError`` naming the folder if it cannot be made or written, or naming another process that uses it.
    """
    claims: set[str] = _this_thread.__dict__.setdefault("folders", set())
    real = None if folder is None else os.path.realpath(folder)
    if real is None or real in claims:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(_made(Path(real)))
            stack.enter_context(_locked(made / disk.LOCK, str(folder), shared))
            disk.prove(made / disk.LOCK)
        except (FileExistsError, NotADirectoryError) as error:  # the folder or one above it
            raise ValueError(f"folder = {str(folder)!r}: must be a folder, not a file") from error
        except OSError as error:
            raise ValueError(
                f"folder = {str(folder)!r}: must be a folder that can be written ({_reason(error)})"
            ) from error
        claims.add(real)
        stack.callback(claims.discard, real)
        yield


def require_writable(field: str, path: str | Path) -> None:
    """``ValueError`` naming ``field`` unless a file can be written at ``path``; leaves nothing there."""
    path = Path(path)
    try:
        with _made(path.parent):
            disk.prove(path)
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))  # the folder or one above it
        reason = f"{str(path.parent)!r} is not a folder" if is_file else _reason(error)
        raise ValueError(f"{field} = {str(path)!r}: must be a file that can be written ({reason})") from error


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """Make a folder with its parents; at the end, remove those that are new and still empty."""
    new = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    finally:
        for path in new:
            with contextlib.suppress(OSError):
                path.rmdir()


@contextlib.contextmanager
def _locked(path: Path, folder: str, shared: bool) -> Iterator[None]:
    """Hold the lock on the file ``path``, made if missing; the last process that holds the lock removes the file."""
    if fcntl is None:
        yield
        return
    opened = _open_locked(path, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        os.pwrite(opened, _owner(shared).encode().ljust(OWNER_LENGTH)[:OWNER_LENGTH], 0)
        yield
    finally:
        if _lock(opened, fcntl.LOCK_EX):  # no other process shares the lock
            path.unlink(missing_ok=True)
        os.close(opened)


def _open_locked(path: Path, folder: str, kind: int) -> int:
    """The descriptor of the opened and locked file; ``ValueError`` naming the process that holds the lock."""
    for _ in range(TRIES):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(opened, kind):
            owner = os.pread(opened, OWNER_LENGTH, 0).decode(errors="replace").strip() or "another process"
            os.close(opened)
            raise ValueError(f"folder = {folder!r}: must be free, but the folder is in use by {owner}")
        if _is_at(opened, path):
            return opened
        os.close(opened)  # its owner removed the file after it was opened here
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _lock(opened: int, kind: int) -> bool:
    """Lock without waiting; False if another process holds a lock against it. True on a file system without locks."""
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
