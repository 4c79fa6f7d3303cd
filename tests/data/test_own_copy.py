"""CIFAR-100 and Tiny-ImageNet from made-up copies of the published files, with few images. Needs Pillow."""

from __future__ import annotations

import tarfile

import jax
import numpy as np
import pytest

from fedjax_async.base.home import require_datasets
from fedjax_async.data import list_datasets, load, own_copy
from tests.data.small_mnist import image_bytes
from tests.told import refusal

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
    ]:
        (folder / "test.bin").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(f"cifar100:path={folder}", tmp_path)
    (folder / "test.bin").unlink()
    with pytest.raises(ValueError, match=r"has no test\.bin"):
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
    notes.write_text(lines.replace("val_1.JPEG", "../val_1.JPEG"))
    refused("must be a file name and one of the classes in train")
    notes.write_text(lines.replace(KINDS[1], "n00000000"))
    refused("must be a file name and one of the classes in train")
    notes.write_text(lines.replace("val_1.JPEG", "val_7.JPEG"))
    refused("val_7.JPEG': cannot be read")
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
