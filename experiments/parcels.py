"""Data sets as parts of a chosen size, for machines without a network; put together again with every hash checked.

    python experiments/parcels.py split mnist cifar10 --to FOLDER [--size 62]   # MB of a part at most
    python experiments/parcels.py join FOLDER

``split`` takes the fetched files of data sets and pretrained models (``minilm``) from ``$FEDJAX_ASYNC_DATA`` or
``~/.cache/fedjax_async``. ``join`` writes them there on the other machine. The parts are one compressed archive, cut
into pieces; ``parcels.json`` has the SHA-256 of each part and of each file.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from fedjax_async.base import home

MANIFEST = "parcels.json"
MEGABYTE = 10**6


def files_of(name: str, root: Path) -> list[Path]:
    """The files of a data set or a pretrained model; of a data set the arrays as they are loaded, if they are there."""
    for folder in (root / "arrays" / name, root / "pretrained" / name, root / name):
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        if found:
            return found
    raise ValueError(f"name = {name!r}: must be a data set or model that was fetched into {root}")


class Parts(io.RawIOBase):
    """A file that is written as parts of at most ``size`` bytes; ``hashes``: name of each part -> SHA-256."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__()
        self.folder, self.size, self.hashes = folder, size, {}
        self._held = bytearray()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, content: Any) -> int:
        """Append; whole parts are written at once."""
        self._held += content
        while len(self._held) >= self.size:
            self._part(self.size)
        return len(content)

    def _part(self, size: int) -> None:
        content, self._held = bytes(self._held[:size]), self._held[size:]
        name = f"part-{len(self.hashes):03}"
        (self.folder / name).write_bytes(content)
        self.hashes[name] = hashlib.sha256(content).hexdigest()

    def close(self) -> None:
        """Write the last part."""
        if self._held:
            self._part(len(self._held))
        super().close()


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(names: Iterable[str], folder: Path, *, megabytes: float = 62, root: Path | None = None) -> dict[str, Any]:
    """Write parts and manifest into ``folder``; returns the manifest. Equal files give equal parts.

    ``root``: where the fetched data sets are. ``ValueError`` for unknown names, or parts of less than one byte.
    """
    root = home.resolve_data_dir(root)
    if not megabytes * MEGABYTE >= 1:
        raise ValueError(f"megabytes = {megabytes}: must be at least one byte, 1e-6")
    files = {path.relative_to(root).as_posix(): path for name in names for path in files_of(name, root)}
    folder.mkdir(parents=True, exist_ok=True)
    with (
        Parts(folder, int(megabytes * MEGABYTE)) as parts,
        gzip.GzipFile(fileobj=parts, mode="wb", compresslevel=6, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name, path in sorted(files.items()):
            about = tarfile.TarInfo(name)  # neither owner nor time, so that the bytes are always the same
            about.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(about, file)
    hashes = {name: sha256(path) for name, path in sorted(files.items())}
    manifest = {"parts": parts.hashes, "files": hashes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def join(folder: Path, *, root: Path | None = None) -> list[str]:
    """Put the files of ``folder`` together below ``root``; returns their names.

    ``ValueError`` if a part or a file is missing or damaged; then no file is written.
    """
    root = home.resolve_data_dir(root)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"folder = {str(folder)!r}: must have a file {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    for name in (*manifest["parts"], *manifest["files"]):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{folder / MANIFEST}: {name!r} must be inside its folder")
    for name, expected in manifest["parts"].items():
        part = folder / name
        if not part.is_file() or sha256(part) != expected:
            raise ValueError(f"{part}: is missing or damaged; its SHA-256 must be {expected}")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as place:
        whole = Path(place) / "archive"
        with whole.open("wb") as file:
            for name in manifest["parts"]:
                file.write((folder / name).read_bytes())
        try:
            with tarfile.open(whole, mode="r:gz") as archive:
                archive.extractall(Path(place) / "files", filter="data")
        except tarfile.TarError as error:
            raise ValueError(f"{folder}: its parts are no archive: {error}") from None
        for name, expected in manifest["files"].items():
            path = Path(place) / "files" / name
            if not path.is_file() or sha256(path) != expected:
                raise ValueError(f"{name}: is missing or damaged in the parts of {folder}")
        for name in manifest["files"]:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(Path(place) / "files" / name, root / name)
    return list(manifest["files"])


def main() -> None:
    """Split or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="write parts")
    splitting.add_argument("names", nargs="+", metavar="NAME", help="fetched data sets or models")
    splitting.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder of the parts")
    splitting.add_argument("--size", type=float, default=62, metavar="MB", help="of a part at most [62]")
    joining = commands.add_parser("join", help="put parts together")
    joining.add_argument("folder", type=Path, metavar="DIR", help="folder of the parts")
    given = parser.parse_args()
    try:
        if given.command == "split":
            made = split(given.names, given.to, megabytes=given.size)
            print(f"{len(made['files'])} files in {len(made['parts'])} parts in {given.to}")
        else:
            print(f"{len(join(given.folder))} files are whole")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
