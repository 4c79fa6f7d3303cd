"""Labels of any integer type, from every reader: kept or refused; data that look badly prepared are remarked on."""

from __future__ import annotations

import re
from dataclasses import replace

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from fedjax_async import named
from fedjax_async.base import registry
from fedjax_async.config import Settings, prepare
from fedjax_async.config.resolving import settings_from
from fedjax_async.data import (
    Dataset,
    Identity,
    check_data,
    decode,
    fashion_mnist_6k,
    federate,
    from_arrays,
    from_torch,
    generated,
    load,
    open_folder,
    write_clients,
    write_folder,
)
from fedjax_async.data.looks import DataWarning, warn_of_looks
from fedjax_async.data.tfds import _stack
from fedjax_async.models import from_flax
from tests.data.layouts import h5_file, leaf_file, read, saved
from tests.refusals import refusals
from tests.told import refusal, warned

X = np.ones((2, 3), np.float32)


def table(y):
    return pa.table({"x": [[1.0, 2.0]] * 2, "y": pa.array(y)})


def in_leaf(folder, y):
    leaf_file(folder / "a.json", {"a": {"x": X.tolist(), "y": y.tolist()}})
    return load(f"leaf:task=vectors,path={folder / 'a.json'}")


def of_virtual(y):
    data = generated(lambda _, client, position: (X[0], client), sizes=[2], test_x=X, test_y=y, num_classes=2**31)
    return check_data(data)._replace(y=np.asarray(data.test_y))


def arrays(x, y, **options):
    return from_arrays([(x, y)], (x, y), **options)


def written(folder, x, y, **options):
    return write_clients(folder / "f", [(x, y, [2])], test_x=x, test_y=y, **options)


def of_tfds(kind, labels=(0,)):
    """Images of TFDS with these labels: images and labels as they are stacked."""
    return _stack("made up", [{"image": np.full((2, 2, 1), 300).astype(kind), "label": label} for label in labels])


DATA = arrays(X, np.array([0, 1]))._replace(num_classes=2**31)
READERS = {
    "parquet": lambda folder, y: read(folder, "parquet:path=HERE/it,x=x,y=y", {"x": [[1.0, 2.0]] * 2, "y": y}),
    "hugging_face": lambda folder, y: load(f"hugging_face:path={saved(folder / 'hf', table(y))},x=x,y=y"),
    "flower": lambda folder, y: load(f"flower:path={saved(folder / 'p' / 'partition_0', table(y)).parent},x=x,y=y"),
    "tff": lambda folder, y: load(f"tff:path={h5_file(folder / 'a', {'a': {'pixels': X, 'label': y}})}"),
    "leaf": in_leaf,
    "arrays": lambda folder, y: arrays(X, y),
    "torch": lambda folder, y: from_torch([list(zip(X, y))], list(zip(X, y))),
    "a data set": lambda folder, y: federate(Dataset("own", X, y, X, y), "iid", 1),
    "data": lambda folder, y: check_data(DATA._replace(y=y)),
    "a test set": lambda folder, y: check_data(DATA._replace(test_y=y))._replace(y=y),
    "a folder": lambda folder, y: check_data(open_folder(written(folder, X, y, num_classes=2**31))),
    "virtual": lambda folder, y: of_virtual(y),
    "tfds": lambda folder, y: arrays(X, of_tfds(np.uint8, y)[1]),
}
# int32 would wrap 2**32 to 0
WRONG = {"i8": [2**31, 2**32, 2**40, -1, -(2**40)], "u8": [2**32 + 1, 2**63], "u4": [2**31], "i1": [-1]}


@pytest.mark.parametrize("reader", READERS)
def test_a_label_that_int32_cannot_hold_is_refused_with_its_place(tmp_path, reader):
    for kind, value in ((kind, value) for kind, values in WRONG.items() for value in values):
        if reader == "tfds" and value == 2**63:
            continue  # an item of TFDS has a label of int64
        folder = tmp_path / f"{kind} {value}"
        folder.mkdir()
        said = refusal(READERS[reader], folder, np.array([0, value], kind))
        assert f"[1] = {float(value) if reader == 'leaf' else value}: " in said  # LEAF's files have no integers
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


def test_integers_that_are_no_labels_do_not_wrap_either(tmp_path):
    """Ids and times as inputs, and whole numbers as targets without classes: the device keeps 32 bits of them."""
    for x in (np.array([[0], [-(2**31)]]), np.array([[0], [2**32 - 1]], np.uint64), np.array([[0.0], [-3e38]])):
        assert arrays(x, X).x.tolist() == x.tolist()
    for wrong in (np.array([[0], [2**31]]), np.array([[0], [-(2**31) - 1]]), np.array([[0], [2**32]], np.uint64)):
        said = rf"\[1, 0\] = {wrong[1, 0]}: must be from (-2147483648 to 2147483647|0 to 4294967295), or a float"
        assert re.search(rf"x{said}", refusal(arrays, wrong, X))
        assert re.search(rf"x{said}", refusal(written, tmp_path, wrong, X))
        wide = arrays(X, X)._replace(y=wrong, test_y=wrong)
        assert re.search(rf"y{said}", refusal(write_folder, tmp_path / "y", wide))
    assert not list(tmp_path.iterdir())


TWO, BIG = np.array([0, 1]), np.array([[0.0], [-1e39]])
CLASSES = "num_classes = 2147483649: must be a whole number from 1 to 2147483648"
INFINITE = "x[1, 0] = -1e+39: must be from -3.403e+38 to 3.403e+38: floats have 32 bits"
test_what_32_bits_or_the_classes_do_not_hold_is_refused = refusals(
    (lambda folder: arrays(X, TWO, num_classes=2**31 + 1), CLASSES),
    (lambda folder: written(folder, X, TWO, num_classes=2**31 + 1), CLASSES),
    (lambda folder: check_data(arrays(X, TWO)._replace(num_classes=2**31 + 1)), CLASSES),
    (lambda folder: arrays(BIG, X), INFINITE),
    (lambda folder: written(folder, BIG, X), INFINITE),
    (lambda folder: of_tfds(np.uint16), "^made up = 'images of uint16': must be images of 8 bits"),
    (lambda folder: of_tfds(np.float32), "^made up = 'images of float32': must be images of 8 bits"),
    (
        lambda folder: arrays(X, TWO + 1, num_classes=2),
        "= 2: must be a label from 0 to 1; labels count from 0: pass y - 1$",
    ),
    by=lambda folder, call: call(folder),
    folder=True,
)

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
    calls += [lambda: arrays(X, y, num_classes=2)]
    if y.dtype.kind == "i":  # which would otherwise be taken for sequences of labels
        calls += [lambda: arrays(X, y), lambda: federate(dataset, "iid", 1)]
    for call in calls:
        assert refusal(call).endswith(remedy)


RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 3
IMAGES = RNG.random((60, 8, 9, 1)).astype(np.float32)


def said(x=IMAGES, y=LABELS, test_y=LABELS, **fields):
    """What is said about data of one client, without their name."""
    data = from_arrays([(x, y)], (x, test_y))._replace(**fields)
    _, lines = warned(warn_of_looks, data, kind=DataWarning)
    assert all(line.startswith("data own: ") and "\n" not in line for line in lines)
    return [line.removeprefix("data own: ") for line in lines]


def test_inputs_that_float32_cannot_tell_apart_are_remarked_on():
    times, numbers = 1.7e9 + np.arange(60.0) / 60, np.arange(60)[:, None]
    fine = np.stack([times / 1e9 - 1.7, times - times.mean(), np.full(60, 1e9 + 0.1)], axis=1)
    assert said(fine[:, :2]) == said(numbers + 10**6) == []
    assert all("float32" not in line for line in said(fine)), "a number that does not differ"
    how = " is rounded to float32, which loses its differences (near "
    for x, start in (
        (np.stack([times, times - times.mean()], axis=1), f"x[:, 0]{how}1.7e+09, the deviation is"),
        (numbers + 17 * 10**8, f"x[:, 0]{how}"),
        (1e-60 * RNG.standard_normal((60, 2, 3)), f"x[:, 0, 0]{how}"),
    ):
        (found,) = said(x)
        assert found.startswith(start)
    (found,) = said(y=times, test_y=times)
    assert found.startswith(f"y{how}1.7e+09, the deviation is")
    assert said(y=times - 1.7e9, test_y=times - 1.7e9) == []


def test_good_data_are_not_remarked_on():
    standardised = 3 * RNG.standard_normal((60, 8, 9, 3)).astype(np.float32)
    counts = np.rint(100 * RNG.random((60, 64))).astype(np.float32)
    tokens = RNG.integers(0, 82, (60, 80)).astype(np.uint8)
    for x in (IMAGES, (255 * IMAGES).astype(np.uint8), standardised, counts, tokens, 16 * IMAGES, 300 * IMAGES[:, 0]):
        assert said(x) == []
    for data in (federate(fashion_mnist_6k(), "iid", 10), load("population").deal(5, 0)):
        warn_of_looks(data)  # warnings are errors here


def test_pixels_that_are_not_scaled():
    whole = np.rint(255 * IMAGES)
    vectors = whole.reshape(60, -1)[:, :64]
    for x, advice in (
        (255 * IMAGES, ", or set normalise='training'"),
        (whole.astype(np.int32), ", or pass them as uint8"),
        (vectors, ", or set normalise='training'"),
        (vectors.astype(np.uint8), ""),
        (vectors.astype(np.int64), ""),
    ):
        (line,) = said(x)
        assert line == (
            f"the inputs are numbers from {x.min():g} to {x.max():g}, like pixels that are not scaled: "
            f"divide them by 255{advice}"
        )
    raw = (255 * IMAGES).astype(np.uint8)
    assert said(raw, decode=decode.as_is)[0].startswith("uint8 images come to the model as numbers up to 255: give")
    assert said(raw, decode=decode.as_is, streamed=True) != []  # seen without reading a value
    assert said(255 * IMAGES, streamed=True) == []
    assert said(255 * IMAGES, decode=lambda x: x / 255) == []  # a decoder of one's own


def test_a_column_that_is_far_larger_than_the_others():
    x = np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)
    x[:, 3] = 50 + 10 * x[:, 3]
    about = f"(mean {x[:, 3].mean(dtype=float):.3g}, deviation {x[:, 3].std(dtype=float):.3g})"
    what = f"column 3 of x is far larger than the others {about}"
    assert said(x) == [f"{what}: set normalise='training', or standardise it"]
    for fine in (x[:, 3:4], 40 * x[:, :3], np.delete(x, 3, axis=1), x / 40):
        assert said(fine) == []
    assert said(x, streamed=True) == said(x, decode=lambda x: x / 50) == []


def test_channels_first():
    (line,) = said(RNG.random((60, 3, 32, 32)))
    advice = "look like images with the channels first; the models take them last: np.moveaxis(x, 1, -1)"
    assert line == f"rows of shape [3, 32, 32] {advice}"
    assert len(said(np.zeros((60, 1, 28, 28), np.uint8))) == 1
    assert said(RNG.random((60, 3, 32, 3))) == said(RNG.random((60, 3, 4, 5))) == []


ONES = (
    "^data own: labels are from 1 to 3, but the first class is 0: the model has 4 outputs, and no example of class 0; "
    "pass y - 1 if the classes are numbered from 1$"
)


def test_labels_that_begin_at_one():
    y = (LABELS + 1).astype(np.uint8)
    dataset, sequences = Dataset("own", IMAGES, y, IMAGES, y), np.stack([y, y], axis=1)
    for call in (
        lambda: federate(dataset, "iid", 3),
        lambda: federate(Dataset("own", IMAGES, y), "iid", 3, test_fraction=0.1),
        lambda: from_arrays([(IMAGES, y)] * 2, (IMAGES, y)),
    ):
        with pytest.warns(DataWarning, match=ONES):
            call()
    # none: the classes are counted elsewhere; there is a 0; in sequences 0 is padding; targets are no labels
    federate(dataset._replace(num_classes=5), "iid", 3)
    from_arrays([(IMAGES, y)], (IMAGES, y), num_classes=4)
    for train, test in ((y, LABELS), (sequences, sequences), (y / 2, y / 2)):
        from_arrays([(IMAGES, train)], (IMAGES, test))


def test_test_labels_that_no_client_trains_or_that_are_padding_alone():
    two, tens, sequences = np.minimum(LABELS, 1), np.arange(60) % 10, np.array([[1, 2, 0]] * 60)
    (line,) = said(y=two)
    assert line == "20 of 60 test examples have a label that no client trains (2): no run can learn it"
    (line,) = said(y=two, test_y=tens)
    assert "48 of 60 test examples" in line and "(2, 3, 4, 5, 6, ...)" in line
    order, size = np.flatnonzero(LABELS != 2).astype(np.int32), np.int32([40])
    assert len(said(order=order, size=size)) == 1  # rows that no client owns do not count
    assert len(said(y=two.astype(np.uint64))) == 1
    assert said(order=Identity((60,))) == said(y=LABELS.astype(np.float32), test_y=LABELS + 0.5) == []
    assert said(y=sequences, test_y=sequences) == []
    found = said(y=sequences, test_y=np.where(np.arange(60)[:, None] < 2, 0, sequences))
    assert found == ["2 of 60 test examples have no label but padding (0): they count as wrong, with loss 0"]


def test_a_run_says_it_and_normalised_inputs_are_fine():
    dataset = named("own", Dataset("own", 255 * IMAGES, LABELS, 255 * IMAGES, LABELS))
    for method in ("fedasync", "pushcen"):
        run = Settings(method=method, dataset=dataset, model="logistic", clients=4, updates=2, partition="iid")
        registry.forget()
        with pytest.warns(DataWarning, match="^data own: the inputs are numbers from"):
            prepare(run)
        prepare(replace(run, normalise="training"))


ADVICE = {
    "channels": "rows of shape [3, 12, 12] look like images with the channels first: pass np.moveaxis(x, 1, -1)",
    "one-hot": "these are one-hot rows: pass y.argmax(axis=1)",
    "truths": "these are truth values: pass y.astype(int)",
    "floats": "these are labels as floats: pass y.astype(int)",
}


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        if x.shape[1] < 5:
            raise TypeError("too few pixels")
        return nn.Dense(3)(nn.Conv(3, (5, 5), padding="VALID")(x).reshape(len(x), -1))


@pytest.mark.filterwarnings("ignore::fedjax_async.data.looks.DataWarning")
@pytest.mark.parametrize("what", ADVICE)
def test_a_model_that_does_not_fit_tells_what_the_data_are(what):
    x = RNG.random((60, 3, 12, 12) if what == "channels" else (60, 12, 12, 3)).astype(np.float32)
    y = {"one-hot": np.eye(3)[LABELS], "truths": LABELS == 1, "floats": LABELS.astype(np.float32)}.get(what, LABELS)
    made = [from_flax(Convolution(), input_shape=(12, 12, 3))] if what == "channels" else []
    for model in ("lenet5", Convolution(), *made):
        settings = {"model": named("net", model) if not isinstance(model, str) else model, "updates": 2}
        settings |= {"data": named("own", from_arrays([(x, y)] * 3, (x, y)))}
        assert ADVICE[what] in refusal(lambda given=settings: prepare(settings_from(None, given)))
