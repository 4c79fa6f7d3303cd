"""IDX files, tar archives and Debian packages, whole and broken."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.data import archive
from fedjax_async.data.archive import parse_ar, read_files
from fedjax_async.data.images import format_idx, parse_idx
from tests.data.small_mnist import NAMES, ar_bytes, deb_package, npm_package, small_files, tar_bytes


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]),
    seed=st.integers(0, 100),
)
def test_idx_round_trip(shape, dtype, seed):
    array = (np.random.default_rng(seed).standard_normal(shape) * 50).astype(np.int8).astype(dtype)
    back = parse_idx(format_idx(array))
    assert back.dtype == array.dtype
    assert back.dtype.isnative
    np.testing.assert_array_equal(back, array)


def zip_bytes(files, compression=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_idx_by_hand():
    """Big-endian int16, two axes of 1 and 2."""
    data = bytes([0, 0, 0x0B, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 0, 0xFF, 0xFE])
    assert parse_idx(data).tolist() == [[256, -2]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        b"\0\1\x08\1" + b"\0" * 8,
        b"\0\0\x07\1\0\0\0\1\0",
        b"\0\0\x08\3\0\0\0\1",
        b"\0\0\x08\1\0\0\0\3\1\2",
        b"\0\0\x08\1\0\0\0\3\1\2\3\4",
        b"\0\0\x08\3" + b"\xff" * 12,
        gzip.compress(b"\0\0\x08\1\0\0\0\1\1", mtime=0),
        b"<!DOCTYPE html>",
    ],
)
def test_malformed_idx(data):
    with pytest.raises(ValueError, match=r"^idx = "):
        parse_idx(data)
    with pytest.raises(ValueError, match="dtype = complex128"):
        format_idx(np.zeros(2, complex))


def test_ar_members_of_odd_and_even_length():
    members = {"debian-binary": b"2.0\n", "odd": b"abc", "last": b""}
    assert parse_ar(ar_bytes(members)) == members
    assert parse_ar(ar_bytes({"name/": b"x"})) == {"name": b"x"}


@pytest.mark.parametrize(
    "data", [b"", b"PK\3\4", ar_bytes({"a": b"xyz"})[:-3], ar_bytes({"a": b"xy"})[:30], b"!<arch>\n" + b"x" * 60]
)
def test_broken_ar(data):
    with pytest.raises(ValueError, match=r"^ar = "):
        parse_ar(data)


def test_every_kind_of_source_gives_the_same_files(tmp_path):
    files = small_files()
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    for i, (name, data) in enumerate(files.items()):
        (folder / (name + ".gz" * (i % 2))).write_bytes(gzip.compress(data, mtime=0) if i % 2 else data)
    plain_tar = tmp_path / "plain.tar"
    plain_tar.write_bytes(tar_bytes(files, "w"))
    sources = [
        tmp_path / "folder",
        plain_tar,
        npm_package(tmp_path / "package.tgz", files),
        deb_package(tmp_path / "xz.deb", files),
        deb_package(tmp_path / "gz.deb", files, "gz"),
    ]
    for source in sources:
        assert read_files(source, NAMES) == files


def test_members_that_try_to_get_out_are_only_names(tmp_path):
    """Nothing is written, so a path leads nowhere; links and folders with a wanted name do not count as files."""
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("wanted")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        member = tarfile.TarInfo("../../outside/wanted")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"data"))
    before = sorted(tmp_path.rglob("*"))
    assert read_files(path, ["wanted"]) == {"wanted": b"data"}
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bomb.tar", tar_bytes({"wanted": b"0" * 1001}, "w:gz")),
        ("bomb.gz.tar", tar_bytes({"wanted.gz": gzip.compress(b"0" * 100_000, mtime=0)}, "w:gz")),
        ("bomb.zip", zip_bytes({"wanted": b"0" * 1001})),
    ],
)
def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(archive, "LIMIT", 1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"at most 1000|more than 1000"):
        read_files(tmp_path / name, ["wanted"])


@pytest.mark.parametrize("cut", [0, 10, 1000, -100])
def test_truncated_packages(tmp_path, cut):
    for path in (npm_package(tmp_path / "p.tgz", small_files()), deb_package(tmp_path / "p.deb", small_files())):
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(ValueError, match=r"source|ar = ") as caught:
            read_files(path, NAMES)
        assert "\n" not in str(caught.value)


WHOLE = zip_bytes({"config.json": b"deep"}, zipfile.ZIP_STORED)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.tgz", None, "must be an existing folder or archive"),
        ("page.html", b"<html>", "cannot be read"),
        ("empty.deb", ar_bytes({"debian-binary": b"2.0\n"}), r"must hold a data\.tar"),
        ("without.tgz", tar_bytes({"config.json.md5": b"1"}, "w:gz"), r"has no config\.json$"),
        ("p.zip", WHOLE[:40], "p.zip': cannot be read"),
        ("p.zip", b"", "p.zip': cannot be read"),
        ("p.zip", WHOLE.replace(b"deep", b"dead"), "p.zip': cannot be read"),
        ("p.zip", b"PK" + WHOLE[9:], "p.zip': cannot be read"),
    ],
)
def test_sources_that_are_not_there_or_are_something_else(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_files(tmp_path / name, ["config.json"])


def test_of_several_files_of_a_name_the_one_nearest_the_root_counts(tmp_path):
    files = {"a/b/c/config.json": b"deep", "model/config.json": b"shallow", "../../out.txt": b"out"}
    files["z/x.gz"] = gzip.compress(b"x")
    (tmp_path / "p.whl").write_bytes(zip_bytes(files))
    found = read_files(tmp_path / "p.whl", ["config.json", "out.txt", "x"])
    assert found == {"config.json": b"shallow", "out.txt": b"out", "x": b"x"}
    for name in ("1_first/config.json", "config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_files(tmp_path, ["config.json"]) == {"config.json": b"config.json"}
