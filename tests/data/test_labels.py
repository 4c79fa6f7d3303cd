"""Labels of any integer type, from every reader: kept exactly, or refused by name where int32 cannot hold them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedjax_async.data import (
    Dataset,
    check_data,
    federate,
    from_arrays,
    from_torch,
    generated,
    load,
    open_folder,
    write_clients,
    write_folder,
)
from fedjax_async.data.tfds import _stack
from tests.data.test_formats import h5_file, leaf_file, saved
from tests.told import refusal

X, PIXELS = np.ones((2, 3), np.float32), np.zeros((2, 2, 1), np.uint8)


def table(y):
    return pa.table({"x": [[1.0, 2.0]] * 2, "y": pa.array(y)})


def in_parquet(folder, y):
    pq.write_table(table(y), folder / "a.parquet")
    return load(f"parquet:path={folder / 'a.parquet'},x=x,y=y")


def in_tff(folder, y):
    file = h5_file(folder / "a.h5", {"a": {"pixels": X, "label": y}})
    return load(f"tff:path={file}")


def in_leaf(folder, y):
    leaf_file(folder / "a.json", {"a": {"x": X.tolist(), "y": y.tolist()}})
    return load(f"leaf:task=vectors,path={folder / 'a.json'}")


def of_virtual(y):
    data = generated(lambda _, client, position: (X[0], client), sizes=[2], test_x=X, test_y=y, num_classes=2**31)
    return check_data(data)._replace(y=np.asarray(data.test_y))


def of_arrays(folder, y):
    return from_arrays([(X, y)], (X, y))


DATA = from_arrays([(X, np.array([0, 1]))], (X, np.array([0, 1])))._replace(num_classes=2**31)
ONE = {"test_x": X, "num_classes": 2**31}  # the test set of a folder of one client
READERS = {
    "parquet": in_parquet,
    "hugging_face": lambda folder, y: load(f"hugging_face:path={saved(folder / 'hf', table(y))},x=x,y=y"),
    "flower": lambda folder, y: load(f"flower:path={saved(folder / 'p' / 'partition_0', table(y)).parent},x=x,y=y"),
    "tff": in_tff,
    "leaf": in_leaf,
    "arrays": of_arrays,
    "torch": lambda folder, y: from_torch([list(zip(X, y))], list(zip(X, y))),
    "a data set": lambda folder, y: federate(Dataset("own", X, y, X, y), "iid", 1),
    "data": lambda folder, y: check_data(DATA._replace(y=y)),
    "a test set": lambda folder, y: check_data(DATA._replace(test_y=y))._replace(y=y),
    "a folder": lambda folder, y: check_data(open_folder(write_clients(folder / "f", [(X, y, [2])], test_y=y, **ONE))),
    "virtual": lambda folder, y: of_virtual(y),
    "tfds": lambda folder, y: of_arrays(folder, _stack("made up", [{"image": PIXELS, "label": one} for one in y])[1]),
}
WRONG = [
    np.array([0, 2**31]),
    np.array([0, 2**32]),  # int32 would wrap it to 0
    np.array([0, 2**40]),
    np.array([0, -1]),
    np.array([0, -(2**40)]),
    np.array([0, 2**32 + 1], np.uint64),
    np.array([0, 2**63], np.uint64),
    np.array([0, 2**31], np.uint32),
    np.array([0, -1], np.int8),
]


@pytest.mark.parametrize("reader", READERS)
def test_a_label_that_int32_cannot_hold_is_refused_with_its_place(tmp_path, reader):
    for number, y in enumerate(WRONG):
        if reader == "tfds" and y.dtype == np.uint64 and y[1] >= 2**63:
            continue  # an item of TFDS has a label of int64
        folder = tmp_path / str(number)
        folder.mkdir()
        shown = str(float(y[1]) if reader == "leaf" else y[1])  # LEAF's files have no integers
        said = refusal(READERS[reader], folder, y)
        assert f"[1] = {shown}: " in said
        assert "a label from 0 to" in said or "a whole number from 0 to 2147483647" in said


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_labels_of_any_integer_type_are_kept(tmp_path, reader, kind):
    y = np.array([0, min(2**31 - 1, np.iinfo(kind).max)], kind)
    found = np.asarray(READERS[reader](tmp_path, y).y)
    assert found.tolist() == y.tolist() and found.astype(np.int32).tolist() == y.tolist()


def test_whole_floats_are_labels_in_leaf_and_targets_elsewhere(tmp_path):
    y = np.array([0.0, 3.0])
    assert in_leaf(tmp_path, y).y.dtype == np.int32
    for reader in ("parquet", "tff", "arrays", "a data set"):
        found = READERS[reader](tmp_path, y)
        assert found.y.dtype.kind == "f" and found.y.tolist() == [0, 3] and found.num_classes is None


def test_more_classes_than_labels_of_int32_are_refused(tmp_path):
    y, most = np.array([0, 1]), r"num_classes = 2147483649: must be a whole number from 1 to 2147483648"
    with pytest.raises(ValueError, match=most):
        from_arrays([(X, y)], (X, y), num_classes=2**31 + 1)
    with pytest.raises(ValueError, match=most):
        write_clients(tmp_path / "f", [(X, y, [2])], test_x=X, test_y=y, num_classes=2**31 + 1)
    with pytest.raises(ValueError, match=most):
        check_data(of_arrays(tmp_path, y)._replace(num_classes=2**31 + 1))


def test_integers_that_are_no_labels_do_not_wrap_either(tmp_path):
    """Ids and times as inputs, and whole numbers as targets without classes: the device keeps 32 bits of them."""
    good = np.array([[0], [-(2**31)]])
    for x in (good, np.array([[0], [2**32 - 1]], np.uint64)):
        assert from_arrays([(x, X)], (x, X)).x.tolist() == x.tolist()
    for wrong in (np.array([[0], [2**31]]), np.array([[0], [-(2**31) - 1]]), np.array([[0], [2**32]], np.uint64)):
        message = rf"x\[1, 0\] = {wrong[1, 0]}: must be from (-2147483648 to 2147483647|0 to 4294967295), or a float"
        with pytest.raises(ValueError, match=message):
            from_arrays([(wrong, X)], (wrong, X))
        with pytest.raises(ValueError, match=message):
            write_clients(tmp_path / "x", [(wrong, X, [2])], test_x=wrong, test_y=X)
        with pytest.raises(ValueError, match=message.replace("x", "y", 1)):
            write_folder(tmp_path / "y", of_arrays(tmp_path, X)._replace(y=wrong, test_y=wrong))
    assert not list(tmp_path.iterdir())


def test_floats_that_would_be_infinite_in_32_bits_are_refused(tmp_path):
    good, wrong = np.array([[0.0], [-3e38]]), np.array([[0.0], [-1e39]])
    assert from_arrays([(good, X)], (good, X)).x.tolist() == good.tolist()
    message = r"x\[1, 0\] = -1e\+39: must be from -3.403e\+38 to 3.403e\+38: floats have 32 bits"
    with pytest.raises(ValueError, match=message):
        from_arrays([(wrong, X)], (wrong, X))
    with pytest.raises(ValueError, match=message):
        write_clients(tmp_path / "x", [(wrong, X, [2])], test_x=wrong, test_y=X)


@pytest.mark.parametrize("kind", [np.uint16, np.float32])
def test_images_of_tfds_that_eight_bits_cannot_hold_are_refused(kind):
    images = [{"image": np.full((2, 2, 1), 300, kind), "label": 0}]
    with pytest.raises(ValueError, match=rf"^made up = 'images of {kind.__name__}': must be images of 8 bits"):
        _stack("made up", images)


ONE_HOT, TRUTHS, FLOATS = np.eye(2)[[0, 1]], np.array([False, True]), np.array([0.0, 1.0])


@pytest.mark.parametrize(
    ("y", "remedy"),
    [
        (ONE_HOT, "these are one-hot rows: pass y.argmax(axis=1)"),
        (ONE_HOT.astype(np.float32), "these are one-hot rows: pass y.argmax(axis=1)"),
        (ONE_HOT.astype(bool), "these are one-hot rows: pass y.argmax(axis=1)"),
        (ONE_HOT.astype(int), "must be labels: pass y.argmax(axis=1)"),
        (jnp.asarray(ONE_HOT, int), "must be labels: pass y.argmax(axis=1)"),
        (TRUTHS, "these are truth values: pass y.astype(int)"),
        (jnp.asarray(TRUTHS), "these are truth values: pass y.astype(int)"),
        (FLOATS, "these are labels as floats: pass y.astype(int)"),
    ],
)
def test_targets_that_are_not_labels_yet_are_told_what_they_are(y, remedy):
    dataset = Dataset("own", X, y, X, y)
    calls = [lambda: federate(dataset, "dirichlet", 1), lambda: federate(dataset._replace(num_classes=2), "iid", 1)]
    calls += [lambda: from_arrays([(X, y)], (X, y), num_classes=2)]
    if y.dtype.kind == "i":  # which would otherwise be taken for sequences of labels
        calls += [lambda: from_arrays([(X, y)], (X, y)), lambda: federate(dataset, "iid", 1)]
    for call in calls:
        assert refusal(call).endswith(remedy)


def test_labels_from_1_to_the_number_of_classes_are_told_where_labels_begin():
    y = np.array([1, 2])
    with pytest.raises(ValueError, match=r"= 2: must be a label from 0 to 1; labels count from 0: pass y - 1$"):
        from_arrays([(X, y)], (X, y), num_classes=2)
