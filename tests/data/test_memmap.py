"""Clients on disk: reading returns what was written; an incomplete or altered folder is refused."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.data import (
    Identity,
    client_rows,
    fashion_mnist_6k,
    federate,
    load,
    memmap,
    open_folder,
    pack,
    packed_offsets,
    population,
    synthetic,
    write_clients,
    write_folder,
)
from fedjax_async.data.decode import as_is
from fedjax_async.types import FederatedData
from tests.refusals import refusals


def made_up(sizes, dtype=np.float32, item=(3,), seed=0):
    """Federated data in memory with rows in random order."""
    rng = np.random.default_rng(seed)
    size = np.array(sizes, np.int32)
    total = int(size.sum())
    x = rng.integers(0, 100, (total, *item)).astype(dtype)
    y = rng.integers(0, 4, total).astype(np.int32)
    order = rng.permutation(total).astype(np.int32)
    offset = (np.cumsum(size) - size).astype(np.int32)
    return FederatedData("made_up", x, y, order, offset, size, x[:2], y[:2], decode=as_is, num_classes=4)


def same_clients(one, other):
    np.testing.assert_array_equal(one.size, other.size)
    for client in range(len(one.size)):
        mine, theirs = client_rows(one, client), client_rows(other, client)
        np.testing.assert_array_equal(one.x[mine], other.x[theirs])
        np.testing.assert_array_equal(one.y[mine], other.y[theirs])
    np.testing.assert_array_equal(one.test_x, other.test_x)
    np.testing.assert_array_equal(one.test_y, other.test_y)


sizes_of = st.lists(st.integers(1, 7), min_size=1, max_size=9)


@settings(max_examples=20)
@given(
    sizes=sizes_of,
    dtype=st.sampled_from([np.float32, np.uint8, np.float64, np.int16, ">f4"]),
    item=st.sampled_from([(), (3,), (2, 2, 1)]),
    chunk=st.integers(1, 200),
)
def test_what_is_written_is_read(sizes, dtype, item, chunk):
    data = made_up(sizes, dtype, item)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memmap, "CHUNK", chunk)
        read = open_folder(write_folder(Path(folder) / "made_up", data), verify=True)
        same_clients(read, data)
        assert isinstance(read.x, np.memmap) and isinstance(read.y, np.memmap) and read.streamed
        assert read.x.dtype == np.dtype(dtype).newbyteorder("<") and read.order == Identity((len(data.x),))
        assert (read.name, read.decode, read.num_classes) == ("made_up", as_is, 4)
        assert not data.streamed


def test_clients_test_sets_raw_images_and_generated_populations_survive(tmp_path):
    data = federate(fashion_mnist_6k(), "shards", num_clients=20, seed=1, test_fraction=0.2)
    read = open_folder(write_folder(tmp_path / "images", data))
    same_clients(read, data)
    assert read.decode is data.decode and read.x.dtype == np.uint8
    for field in ("test_order", "test_offset", "test_size"):
        np.testing.assert_array_equal(getattr(read, field), getattr(data, field))
    data = federate(population(features=10, size=6, std_log_size=0.0), num_clients=30, seed=4)
    read = open_folder(write_folder(tmp_path / "people", data))
    np.testing.assert_array_equal(read.size, data.size)
    np.testing.assert_array_equal(read.y, data.y[:])
    np.testing.assert_allclose(read.x, data.x[:], rtol=1e-5, atol=1e-5)


def stream(count=3, **change):
    """Chunks of one, two, three ... clients of two examples."""
    for n in range(1, count + 1):
        chunk = {"x": np.full((2 * n, 3), n, np.float32), "y": np.arange(2 * n) % 2, "size": np.full(n, 2)}
        yield tuple((chunk | (change if n == count else {})).values())


TESTS = {"test_x": np.zeros((4, 3), np.float32), "test_y": np.zeros(4, np.int32)}


def test_a_stream_of_chunks_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    read = open_folder(write_clients(tmp_path / "s", stream(), num_classes=2, name="s", **TESTS))
    assert read.size.tolist() == [2] * 6
    assert read.x[client_rows(read, 5), 0].tolist() == [3, 3]

    def broken():
        yield from stream()
        raise RuntimeError("the source is gone")

    def full(column, rows):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RuntimeError, match="gone"):
        write_clients(tmp_path / "t", broken(), **TESTS)
    monkeypatch.setattr(memmap.Column, "append", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/t'$"):
        write_clients(tmp_path / "t", stream(), **TESTS)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def written(folder, given):
    try:
        return write_clients(folder / "new", num_classes=2, **({"chunks": stream()} | TESTS | given))
    finally:
        assert list(folder.iterdir()) == []


test_what_cannot_be_written_leaves_nothing_behind = refusals(
    ({"chunks": list(stream(size=np.array([5, 2])))}, "^size = '7 in all'"),
    ({"chunks": list(stream(size=np.array([6, 0])))}, "^size = "),
    ({"chunks": list(stream(x=np.zeros((6, 4), np.float32)))}, "^x = "),
    ({"chunks": list(stream(x=np.zeros((6, 3))))}, "^x = "),
    ({"chunks": list(stream(y=np.full(6, 2)))}, r"^y\[0\] = 2: must be a label from 0 to 1"),
    ({"chunks": list(stream(y=np.full(6, 2**40)))}, r"^y\[0\] = 1099511627776: must be a label from 0 to 1"),
    ({"chunks": list(stream(y=np.zeros(6)))}, "^y = 'float64': must be integer labels"),
    ({"chunks": []}, "^chunks = 'none'"),
    ({"chunks": [(np.array([None]), np.zeros(1, int), np.ones(1, int))]}, "^x = "),
    ({"test_order": np.arange(4)}, "^own_tests = "),
    ({"test_y": np.zeros(1)}, "^test_y = '1 targets'"),
    by=written,
    folder=True,
)


def test_folders_that_exist_parts_that_are_not_kept_and_too_many_rows_are_refused(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("precious")
    validated = federate(fashion_mnist_6k(), "iid", num_clients=4, validation_fraction=0.5)
    monkeypatch.setattr(memmap, "MOST_ROWS", 11)
    with pytest.raises(ValueError, match=r"^folder = "):
        write_folder(tmp_path, made_up([1, 2]))
    with pytest.raises(ValueError, match=r"^data.validation_size = 'given': must be left out: a folder keeps no"):
        write_folder(tmp_path / "f", validated)
    with pytest.raises(ValueError, match=r"^chunks = '12 examples or more': must be at most 11"):
        write_clients(tmp_path / "f", stream(), **TESTS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def my_decode(x):
    return x * 2


def test_a_decoder_of_ones_own_is_given_again_and_altered_values_are_found_when_asked_for(tmp_path):
    folder = write_folder(tmp_path / "own", made_up([2, 3])._replace(decode=my_decode))
    with pytest.raises(ValueError, match="decode = None"):
        open_folder(folder)
    assert open_folder(folder, decode=my_decode).decode is my_decode
    folder = write_folder(tmp_path / "d", made_up([2, 3]))
    (folder / "metadata.json").write_bytes("\ufeff".encode() + (folder / "metadata.json").read_bytes())
    same_clients(open_folder(folder), made_up([2, 3]))  # a byte order mark does not matter
    content = bytearray((folder / "x.npy").read_bytes())
    content[-1] ^= 1
    (folder / "x.npy").write_bytes(content)
    open_folder(folder)
    with pytest.raises(ValueError, match="x = 'other contents"):
        open_folder(folder, verify=True)


def altered(folder, change):
    file = folder / "metadata.json"
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))


def overwrite(file, array):
    """Write another array with the same number of bytes."""
    length = file.stat().st_size
    np.save(file, array)
    file.write_bytes(file.read_bytes()[:length].ljust(length))


def opened(folder, spoil):
    open_folder(write_folder(folder / "d", made_up([2, 3])))
    spoil(folder / "d")
    return open_folder(folder / "d")


test_a_damaged_folder_is_refused = refusals(
    (lambda f: (f / "x.npy").write_bytes((f / "x.npy").read_bytes()[:-1]), "x.npy.* = .*bytes"),
    (lambda f: (f / "y.npy").write_bytes((f / "y.npy").read_bytes() + b"0"), "y.npy.* = .*bytes"),
    (lambda f: (f / "size.npy").unlink(), "size.npy.* = None"),
    (lambda f: (f / "metadata.json").unlink(), "metadata.json"),
    (lambda f: (f / "metadata.json").write_text('{"format": '), "metadata.json"),
    (lambda f: (f / "metadata.json").write_text("[]"), "format = None"),
    (lambda f: altered(f, lambda m: m.update(format="other")), "format = 'other'"),
    (lambda f: altered(f, lambda m: m.update(version=99)), "version = 99"),
    (lambda f: altered(f, lambda m: m.pop("name")), "name"),
    (lambda f: altered(f, lambda m: m.pop("files")), "files"),
    (lambda f: altered(f, lambda m: m["files"].update({"../x": m["files"]["x"]})), "files"),
    (lambda f: altered(f, lambda m: m["files"]["x"].pop("sha256")), "files"),
    (lambda f: overwrite(f / "y.npy", np.zeros(5, np.float32)), "float32"),
    (lambda f: (f / "y.npy").write_bytes(b"x" * (f / "y.npy").stat().st_size), "NumPy file"),
    (lambda f: overwrite(f / "y.npy", np.array([None] * 3, object)), "NumPy file"),
    (lambda f: overwrite(f / "size.npy", np.array([2, 4], np.int32)), "size = "),
    by=opened,
    folder=True,
)


def test_a_folder_by_its_spec(tmp_path):
    full = federate(synthetic(clients=6, features=3), "natural", test_fraction=0.3)
    folder = write_folder(tmp_path / "f", full)
    spec = load(f"folder:path={folder}")
    same_clients(federate(spec), full)
    fewer = federate(spec, num_clients=4)
    assert fewer.size.tolist() == full.size[:4].tolist()
    for client in range(4):
        rows = (one.test_order[one.test_offset[client] :][: one.test_size[client]] for one in (fewer, full))
        np.testing.assert_array_equal(*rows)
    assert len(fewer.test_order) == fewer.test_size.sum()
    with pytest.raises(ValueError, match=r"^num_clients = 7: must be a whole number from 1 to 6"):
        federate(spec, num_clients=7)


@settings(max_examples=30)
@given(sizes=sizes_of, data=st.data())
def test_packed_clients_are_the_clients(sizes, data):
    pool = made_up(sizes, item=data.draw(st.sampled_from([(), (2,)])))
    with tempfile.TemporaryDirectory() as folder:
        if data.draw(st.booleans()):
            pool = open_folder(write_folder(Path(folder) / "pool", pool))
        clients = np.array(data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8)), np.int32)
        rows = int(pool.size[clients].sum()) + data.draw(st.integers(0, 3))
        x, y, offset = pack(pool, clients, rows)
        assert len(x) == len(y) == rows and (x.dtype, y.dtype) == (pool.x.dtype, pool.y.dtype)
        np.testing.assert_array_equal(offset, packed_offsets(pool, clients))
        covered = np.zeros(rows, int)
        for low, client in zip(offset, clients):
            mine, size = client_rows(pool, client), pool.size[client]
            np.testing.assert_array_equal(x[low : low + size], pool.x[mine])
            np.testing.assert_array_equal(y[low : low + size], pool.y[mine])
            covered[low : low + size] += 1
        assert covered.max(initial=0) <= 1 and not x[covered == 0].any() and not y[covered == 0].any()


test_what_cannot_be_packed = refusals(
    ([0, 1], 6, "^rows = 6: must be from 7"),
    ([0, 1], 2**31, "^rows = 2147483648"),
    ([2], 9, "^clients = "),
    ([-1], 9, "^clients = "),
    ([0.0], 9, "^clients = "),
    by=lambda clients, rows: pack(made_up([2, 5]), np.array(clients), rows),
)
