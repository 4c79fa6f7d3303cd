"""Files are complete or absent, whatever fails during writing; archives keep every type and bit."""

from __future__ import annotations

import errno
import gc
import io
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedjax_async.base import disk
from tests.told import refusal

ARRAYS = {
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([1.0, np.nan, -3.14], ml_dtypes.bfloat16),
    "step": np.array(7),
    "none": np.zeros((0, 3)),
    "name": np.array("a schedule"),
}
CONTENT = disk.npz_bytes(ARRAYS)


class Full(io.FileIO):
    """A file on a disk with free space for so many bytes."""

    def __init__(self, path, mode, room):
        super().__init__(path, mode)
        self.room = room

    def write(self, content):
        self.room -= memoryview(content).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def fill(monkeypatch, room):
    """Let every file that is opened for writing have a full disk."""
    full = lambda path, mode: Full(path, mode, room) if "w" in mode else open(path, mode)  # noqa: E731, SIM115
    monkeypatch.setattr(disk, "open", full, raising=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def same(have, want):
    assert list(have) == list(want)
    for name, array in want.items():
        assert (have[name].dtype, have[name].shape) == (array.dtype, array.shape), name
        assert have[name].tobytes() == array.tobytes(), name


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")
    with disk.replacing(path) as file:
        file.write(b"new")
        (other,) = set(tmp_path.iterdir()) - {path}
        assert path.read_bytes() == b"old" and disk.is_leftover(other) and not disk.is_leftover(path)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]
    disk.write(str(path), b"third")
    assert path.read_bytes() == b"third"


def test_it_is_on_the_disk_before_it_has_its_name_and_so_is_the_name(tmp_path, monkeypatch):
    done, replace = [], os.replace
    kind = lambda number: "folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda number: done.append(kind(number)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("name"), replace(*names)))
    disk.write(tmp_path / "a", b"content")
    assert done == ["file", "name", "folder"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch, call):
    disk.write(tmp_path / "a", b"old")

    def fail(*args):
        raise OSError("broken disk")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="broken disk"):
        disk.write(tmp_path / "a", b"new")
    assert contents(tmp_path) == {"a": b"old"}


def test_an_error_names_the_file_that_was_to_be_written(tmp_path):
    path = tmp_path / "a.npz"
    for raised, named in (
        (OSError(errno.ENOSPC, "full"), str(path)),
        (OSError(errno.EROFS, "read-only", str(tmp_path / ".a.npz.12.tmp")), str(path)),
        (OSError("12 requested and 3 written"), str(path)),  # NumPy's
        (OSError(errno.EACCES, "forbidden", "another file"), "another file"),
    ):
        with pytest.raises(OSError) as error, disk.naming(path):
            raise raised
        assert error.value.filename == named and (raised.errno is not None or raised.args[-1] in str(error))


def test_a_disk_may_be_full_at_any_byte(tmp_path, monkeypatch, capfd):
    path = tmp_path / "a.npz"
    disk.write(path, b"old")
    total = len(CONTENT)
    for room in [0, *range(1, total, 37), total - 1]:
        fill(monkeypatch, room)
        with pytest.raises(OSError) as error, disk.replacing(path) as file:
            disk.write_npz(file, ARRAYS)
        assert error.value.errno == errno.ENOSPC and error.value.filename == str(path)
        assert contents(tmp_path) == {"a.npz": b"old"}, room
    del error
    gc.collect()  # half-written archives raise nothing when they are deleted
    assert capfd.readouterr() == ("", "")
    fill(monkeypatch, 2 * total)
    with disk.replacing(path) as file:
        disk.write_npz(file, ARRAYS)
    same(disk.read_npz(path), ARRAYS)


def test_threads_write_side_by_side(tmp_path):
    def work(folder):
        folder.mkdir()
        for k in range(20):
            with disk.replacing(folder / "a.npz") as file:
                disk.write_npz(file, ARRAYS | {"k": np.array(k)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [tmp_path / name for name in "abcd"]))
    for name in "abcd":
        assert [p.name for p in (tmp_path / name).iterdir()] == ["a.npz"]
        same(disk.read_npz(tmp_path / name / "a.npz"), ARRAYS | {"k": np.array(19)})


def test_only_what_killed_processes_left_is_swept_up(tmp_path):
    kept = {"a.npz", ".hidden", "a.tmp", ".tmp", ".a.npz.x.tmp", disk.LOCK}
    for name in kept | {".a.npz.12.tmp", ".settings.json.7.tmp"}:
        (tmp_path / name).touch()
    disk.sweep_up(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == kept
    assert disk.is_leftover(tmp_path / disk.LOCK)


def test_whether_a_file_can_be_written_is_proven_by_one_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a"
    disk.prove(path)
    assert contents(tmp_path) == {}
    disk.write(path, b"old")
    disk.prove(path)

    def refused(path, number=None):
        with pytest.raises(OSError) as error:
            disk.prove(path)
        assert number in (None, error.value.errno) and contents(tmp_path) == {"a": b"old"}

    refused(tmp_path, errno.EISDIR)
    refused(path / "b", errno.ENOTDIR)
    refused(tmp_path / "b" / "c", errno.ENOENT)
    refused(tmp_path / ("x" * 300))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: os.rename(tmp_path / "nothing", names[1]))  # no renaming here
        refused(path)
    fill(monkeypatch, 0)
    refused(path, errno.ENOSPC)


TYPES = [np.bool_, np.int8, np.uint16, np.int64, np.float16, np.float32, np.float64, np.complex64, "U3"]
OWN = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4]
shapes = hnp.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)
known = st.sampled_from(TYPES).flatmap(lambda kind: hnp.arrays(kind, shapes))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text("abc /.-", min_size=1), known))
def test_archives_are_those_of_numpy(arrays):
    stream = io.BytesIO()
    with np.errstate(all="ignore"):
        np.savez(stream, **arrays)
    assert disk.npz_bytes(arrays) == stream.getvalue()
    same(disk.read_npz(stream), arrays)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OWN), hnp.arrays(np.uint16, shapes), st.booleans())
def test_types_that_numpy_does_not_know_keep_their_name_and_bits(kind, bits, turned):
    size = np.dtype(kind).itemsize
    array = (bits % 16 if size == 1 else bits).astype(f"u{size}").view(kind)
    arrays = {"a": array.T if turned else array}
    same(disk.read_npz(io.BytesIO(disk.npz_bytes(arrays))), arrays)


def test_a_file_cut_short_anywhere_is_refused():
    for length in [*range(0, len(CONTENT), 29), len(CONTENT) - 1]:
        assert refusal(disk.read_npz, io.BytesIO(CONTENT[:length]))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_a_changed_byte_is_found_or_does_no_harm(place, change):
    """No array changes its values; a change in the archive's directory may rename one (a file's checksum finds it)."""
    content = bytearray(CONTENT)
    content[place] ^= change
    try:
        found = disk.read_npz(io.BytesIO(content))
    except ValueError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert {array.tobytes() for array in found.values()} <= {array.tobytes() for array in ARRAYS.values()}


def test_what_is_no_archive_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        disk.read_npz(tmp_path / "nowhere")
    (tmp_path / "text").write_text("a,b\n1,2\n")
    np.save(tmp_path / "array.npy", np.ones(3))
    for name in ("text", "array.npy"):
        assert "not a zip file" in refusal(disk.read_npz, tmp_path / name)


def test_pickles_are_neither_written_nor_read():
    assert "Object arrays cannot be saved" in refusal(disk.npz_bytes, {"a": np.array([object()])})
    stream = io.BytesIO()
    np.savez(stream, a=np.array([1, None]))
    assert "Object arrays cannot be loaded" in refusal(disk.read_npz, stream)
