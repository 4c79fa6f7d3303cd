"""Compiled programs kept on disk from one process to the next: a storage for JAX's persistent compilation cache.

JAX decides what is looked up and under which key; this file stores the entries. JAX's own storage does not check its
entries, does not replace a damaged one, and needs another package to limit its size. The commands of ``fedjax-async``
call :func:`keep_compiled`; importing the package changes nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
import tempfile
from pathlib import Path
from typing import Any

from fedjax_async.base import check
from fedjax_async.base.home import NO_HOME, default_data_dir, say_not_kept

LARGEST = 512 * 2**20  # bytes of all entries together
SHORTEST = 0.1  # seconds; programs that compile faster are not stored
MINIMUM = "jax_persistent_cache_min_compile_time_secs"
SUFFIX, UNFINISHED = ".program", ".part"
FORMAT = b"fedjax_async program 1\n"
DIGEST = 32  # bytes


class Entries:
    """A folder of compiled programs in the form that JAX asks of its cache: ``get(key)`` and ``put(key, value)``.

    An entry holds a digest of its name and content. One that is damaged, cut off or of another machine counts as
    missing and is written again. Entries appear under their names only when complete, so processes may share the
    folder. The least recently used entries are removed when all together exceed ``limit`` bytes. Disk errors are never
    raised.
    """

    def __init__(self, folder: Path, machine: str, limit: int = LARGEST) -> None:
        self._path = folder  # JAX reads this name
        self.machine, self.limit = machine, limit

    def file(self, key: str) -> Path:
        """The file of an entry: programs for other processors or other versions have other names."""
        return self._path / (hashlib.sha256(f"{self.machine}\n{key}".encode()).hexdigest() + SUFFIX)

    def get(self, key: str) -> bytes | None:
        """The entry, or None; reading makes it the most recently used."""
        file = self.file(key)
        with contextlib.suppress(OSError):
            content = file.read_bytes()
            value = content[len(FORMAT) + DIGEST :]
            if content == _sealed(file.name, value):
                with contextlib.suppress(OSError):  # the folder is read-only
                    os.utime(file)
                return value
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        """Write the entry atomically, then remove what exceeds the limit; an entry above the limit is not written."""
        file = self.file(key)
        content = _sealed(file.name, value)
        if len(content) > self.limit:
            return
        with contextlib.suppress(OSError):
            handle, part = tempfile.mkstemp(dir=self._path, suffix=UNFINISHED)
            try:
                with os.fdopen(handle, "wb") as opened:
                    opened.write(content)
                os.replace(part, file)
            except OSError:
                Path(part).unlink(missing_ok=True)
                raise
            self.shorten()

    def shorten(self) -> None:
        """Remove the least recently used entries, and files of killed processes, until the limit is kept."""
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                if entry.name.endswith((SUFFIX, UNFINISHED)):
                    with contextlib.suppress(FileNotFoundError):  # another process has removed it
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        size = sum(length for _, length, _ in found)
        for _, length, path in sorted(found):
            if size <= self.limit:
                return
            Path(path).unlink(missing_ok=True)
            size -= length


def _sealed(name: str, value: bytes) -> bytes:
    return FORMAT + hashlib.blake2b(name.encode() + value, digest_size=DIGEST).digest() + value


def _machine() -> str:
    """What a compiled program may depend on besides JAX's key: the processor, its instruction sets, the versions."""
    import jax  # noqa: PLC0415 (the command line imports this file for its help)
    import jaxlib  # noqa: PLC0415

    lines = [platform.system(), platform.machine(), platform.processor(), jax.__version__, jaxlib.__version__]
    with contextlib.suppress(OSError):
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        lines += [line for line in processor if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join(lines)


def _unusable(folder: Path) -> str:
    """Make the folder if it is missing; why it is not one that this user, and nobody else, can write, or ``""``.

    Entries are run as code, so nobody else may write them.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"{folder} belongs to another user"
    if hasattr(os, "geteuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write {folder}"
    return "" if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else f"{folder} cannot be written"


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Save the programs that JAX compiles from now on in ``folder``, and load saved ones from there.

    ``folder``: by default ``compiled`` in ``$FEDJAX_ASYNC_DATA`` or ``~/.cache/fedjax_async``. The results of a run are
    the same, bit for bit. Programs that take less than 0.1 s to compile are not saved (JAX's setting
    ``jax_persistent_cache_min_compile_time_secs`` is lowered to this, unless it was changed). All together take at most
    512 MiB (or ``jax_compilation_cache_max_size``).

    Returns the folder, or None if nothing is saved. That is so without a word if JAX has a cache already
    (``JAX_COMPILATION_CACHE_DIR``) or caches are off (``JAX_ENABLE_COMPILATION_CACHE=false``). A warning says why if
    there is no home directory, the folder cannot be written, another user owns it or can write it, or this version of
    JAX has another interface. Call it before the first run.
    """
    import jax  # noqa: PLC0415

    chosen = None if folder is None else check.path("folder", folder)
    config: Any = jax.config  # its type does not list the settings
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return None
    limit = config.jax_compilation_cache_max_size
    if limit == 0:
        return None
    usual = default_data_dir()
    home = chosen or (usual and usual / "compiled")
    cache = _cache_of_jax()
    if home is None:
        why = NO_HOME
    elif cache is None or not (cache._cache is None or isinstance(cache._cache, Entries)):
        why = "this version of JAX keeps them in another way"
    else:
        why = _unusable(home)
    if home is None or why:
        say_not_kept("compiled programs", why)
        return None
    cache._cache = Entries(home, _machine(), LARGEST if limit < 0 else limit)
    if MINIMUM.upper() not in os.environ and getattr(config, MINIMUM) == 1.0:  # JAX's default
        config.update(MINIMUM, SHORTEST)
    return home


def _cache_of_jax() -> Any:
    """JAX's module that holds the cache, or None: JAX has no public way to replace the cache's storage."""
    try:
        from jax._src import compilation_cache  # noqa: PLC0415
    except ImportError:
        return None
    return compilation_cache if hasattr(compilation_cache, "_cache") else None
