"""Read chosen files from a folder, a tar or zip archive or a Debian package into memory.

Nothing is extracted to disk. So no member name can lead outside a folder, no link is followed, and no code of the
package runs.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

LIMIT = 256 * 2**20  # bytes of one unpacked file; the largest file needed has 101 MB
BROKEN = (tarfile.TarError, zipfile.BadZipFile, RuntimeError, EOFError, OSError, zlib.error, lzma.LZMAError)


def read_files(source: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the files called ``names`` in ``source``, a folder or an archive.

    Archives: ``.tar.*``, ``.tgz``, ``.zip``, ``.whl``, ``.deb``. A file matches by the last component of its path;
    ``NAME.gz`` matches ``NAME``. If several match in a folder or zip archive, the one nearest to the root is read; in a
    tar archive, the first one. Raises ``ValueError`` for a source that cannot be read and for missing files.
    """
    wanted = set(names)
    found: dict[str, bytes] = {}
    try:
        for name, content in _entries(source, wanted):
            found.setdefault(name, content)
    except BROKEN as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"source = '{source}': cannot be read ({reason})") from error
    missing = sorted(wanted - set(found))
    if missing:
        raise ValueError(f"source = '{source}': has no {', '.join(missing)}")
    return found


def parse_ar(data: bytes) -> dict[str, bytes]:
    """The members of an ``ar`` archive, by name; raises ``ValueError`` if the bytes are not such an archive.

    Layout: ``!<arch>\\n``, then for each member a header of 60 bytes (name 16, time 12, owner 6, group 6, mode 8,
    size 10, and a grave accent with a line feed), its bytes, and a line feed after an odd number of bytes.
    """
    if data[:8] != b"!<arch>\n":
        raise ValueError(f"ar = bytes that begin {data[:8]!r}: must begin !<arch> and a line feed")
    members: dict[str, bytes] = {}
    at = 8
    while at < len(data):
        header = data[at : at + 60]
        size_field = header[48:58].strip()
        if len(header) < 60 or header[58:] != b"`\n" or not size_field.isdigit():
            raise ValueError(f"ar = {len(data)} bytes: must have a member header at byte {at}")
        size = int(size_field)
        if at + 60 + size > len(data):
            raise ValueError(f"ar = {len(data)} bytes: must be at least {at + 60 + size}; the file is cut short")
        members[header[:16].decode("ascii", "replace").strip().rstrip("/")] = data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return members


def _entries(source: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """(wanted name, contents) of every file in ``source`` that has a wanted name."""
    if source.is_dir():
        for path in sorted(source.rglob("*"), key=lambda path: (len(path.parts), path)):
            if path.is_file() and (name := _wanted_name(path.name, wanted)):
                yield name, _unpacked(path.name, path.read_bytes())
        return
    if not source.is_file():
        raise ValueError(f"source = '{source}': must be an existing folder or archive")
    if source.suffix == ".deb":
        members = parse_ar(source.read_bytes())
        inner = next((name for name in members if name.startswith("data.tar")), None)
        if inner is None:
            raise ValueError(f"source = '{source}': must hold a data.tar, as a Debian package does")
        yield from _tar_entries(io.BytesIO(members[inner]), wanted)
        return
    with source.open("rb") as file:
        entries = _zip_entries if source.suffix in (".whl", ".zip") else _tar_entries
        yield from entries(file, wanted)


def _zip_entries(file: io.BufferedIOBase | io.BufferedReader, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        for member in sorted(archive.infolist(), key=lambda member: member.filename.count("/")):
            last = PurePosixPath(member.filename).name
            name = _wanted_name(last, wanted)
            if name is None or member.is_dir():
                continue
            if member.file_size > LIMIT:  # zipfile reads at most the size stated in the header
                raise ValueError(f"source: {member.filename} has {member.file_size} bytes, must have at most {LIMIT}")
            yield name, _unpacked(last, archive.read(member))


def _tar_entries(file: io.BufferedIOBase | io.BufferedReader, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=file, mode="r:*") as tar:
        for member in tar:
            last = PurePosixPath(member.name).name
            name = _wanted_name(last, wanted)
            if name is None or not member.isfile():
                continue
            if member.size > LIMIT:
                raise ValueError(f"source: {member.name} has {member.size} bytes, must have at most {LIMIT}")
            stream = tar.extractfile(member)
            if stream is not None:
                yield name, _unpacked(last, stream.read())


def _wanted_name(last: str, wanted: set[str]) -> str | None:
    """The wanted name that a file matches, or None."""
    plain = last.removesuffix(".gz")
    return last if last in wanted else plain if plain in wanted else None


def _unpacked(last: str, content: bytes) -> bytes:
    """The contents, decompressed if the name ends in .gz; raises ``ValueError`` above the size limit."""
    if not last.endswith(".gz"):
        return content
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        plain = file.read(LIMIT + 1)
    if len(plain) > LIMIT:
        raise ValueError(f"source: {last} unpacks to more than {LIMIT} bytes")
    return plain
