"""Data of your own: defects are named and refused before the run, and good data are those of ``federate``."""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import named
from fedjax_async.base import registry
from fedjax_async.base.home import arrays_folder
from fedjax_async.config import Settings, prepare
from fedjax_async.config.resolving import settings_from
from fedjax_async.data import (
    Dataset,
    Identity,
    check_data,
    client_rows,
    decode,
    fashion_mnist_6k,
    federate,
    from_arrays,
    generated,
    list_datasets,
    load,
    open_folder,
    write_folder,
)
from fedjax_async.data.arrays import write_cache
from fedjax_async.data.checking import BLOCK
from fedjax_async.data.looks import DataWarning, warn_of_looks
from fedjax_async.data.published import SOURCES
from fedjax_async.models import from_flax
from fedjax_async.types import FederatedData
from tests.data.small_mnist import small_arrays, small_published
from tests.told import refusal, warned

ROWS, TESTS, FEATURES, CLASSES = 24, 8, 3, 4
SMALL = {"model": "logistic", "method": "fedasync", "updates": 6, "eval_updates": 3, "steps": 2, "batch_size": 2}


def made_up(**fields) -> FederatedData:
    """Four clients of 3, 5, 6 and 10 examples, with test parts of 2 and validation parts of 1."""
    rng = np.random.default_rng(0)
    size = np.array([3, 5, 6, 10], np.int32)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (np.arange(ROWS) % CLASSES).astype(np.int32)
    four = np.arange(4, dtype=np.int32)
    data = FederatedData(
        "made_up", x, y, rng.permutation(ROWS).astype(np.int32), np.cumsum(size, dtype=np.int32) - size, size,
        x[:TESTS], y[:TESTS], decode.as_is, CLASSES,
        test_order=np.arange(TESTS, dtype=np.int32), test_offset=2 * four, test_size=np.full(4, 2, np.int32),
        validation_order=four, validation_offset=four, validation_size=np.ones(4, np.int32),
    )  # fmt: skip
    return data._replace(**fields)


def changed(field, position, value):
    """The made-up data with one entry of one array replaced."""
    array = getattr(made_up(), field).copy()
    array[position] = value
    return made_up(**{field: array})


def without_num_classes(**fields):
    return made_up(num_classes=None, y=np.zeros((ROWS, 2)), test_y=np.zeros((TESTS, 2)))._replace(**fields)


class FakeTensor:
    """The parts of a torch tensor that ``from_arrays`` uses; the tests do not need torch."""

    def __init__(self, array, dtype="float32", device="cpu", layout="torch.strided"):
        self.array, self.dtype, self.layout = array, f"torch.{dtype}", layout
        self.device = type("device", (), {"type": device.partition(":")[0], "__str__": lambda _: device})()
        self.shape = array.shape

    def detach(self):
        return self

    def numpy(self):
        if self.layout != "torch.strided":
            raise TypeError("can't convert\nthis")
        return self.array


FakeTensor.__module__, FakeTensor.__name__ = "torch", "Tensor"

DEFECTS = [
    # labels
    (changed("y", 17, 99), r"data.y[17] = 99: must be a label from 0 to 3"),
    (changed("y", 3, -1), r"data.y[3] = -1: must be a label from 0 to 3"),
    (changed("test_y", 5, 4), r"data.test_y[5] = 4: must be a label"),
    (made_up(y=np.zeros(ROWS)), r"data.y = 'float64': must be integer labels, since num_classes = 4"),
    (made_up(test_y=np.zeros(TESTS)), r"data.test_y = 'float64': must be integer labels"),
    (made_up(y=np.zeros((ROWS, 1), int)), r"data.y = 'shape [24, 1]': must be one label per row, shape [24]"),
    (made_up(num_classes=2.5), r"data.num_classes = 2.5: must be a whole number"),
    # values
    (changed("x", (5, 2), np.nan), r"data.x[5, 2] = nan: must be finite"),
    (changed("test_x", (0, 1), -np.inf), r"data.test_x[0, 1] = -inf: must be finite"),
    (without_num_classes(y=np.r_[np.zeros(ROWS - 1), np.inf]), r"data.y[23] = inf: must be finite"),
    (without_num_classes(test_y=np.full((TESTS, 2), np.nan)), r"data.test_y[0, 0] = nan: must be finite"),
    (made_up(x=jnp.full((ROWS, FEATURES), jnp.nan)), r"data.x[0, 0] = nan: must be finite"),
    # lengths, shapes and types
    (made_up(y=made_up().y[:-4]), r"data.y = '20 rows': must be one for each of the 24 rows of data.x"),
    (made_up(test_y=made_up().y), r"data.test_y = '24 rows': must be one for each of the 8 rows of data.test_x"),
    (made_up(test_x=np.zeros((TESTS, 2), np.float32)), r"data.test_x = 'rows of shape [2]': must be rows of shape [3]"),
    (made_up(test_x=np.zeros((TESTS, 3), np.uint8)), r"data.test_x = 'uint8': must be floats, as in data.x"),
    (without_num_classes(test_y=np.zeros((TESTS, 1))), r"data.test_y = 'rows of shape [1]': must be rows of shape [2]"),
    (made_up(x=np.zeros((ROWS, 0))), r"data.x = 'shape [24, 0]': must be rows with at least one number"),
    (made_up(x=np.float32(3)), r"data.x = 'numpy.float32': must be a NumPy or JAX array"),
    (made_up(x=np.array(3.0)), r"data.x = 'shape []': must be an array with an axis of rows"),
    (made_up(x=made_up().x.tolist()), r"data.x = 'list': must be a NumPy or JAX array, such as np.asarray makes"),
    (made_up(x=FakeTensor(made_up().x)), r"data.x = 'torch.Tensor': must be a NumPy or JAX array"),
    (made_up(x=np.ma.masked_array(made_up().x)), r"data.x = 'numpy.MaskedArray': must be a NumPy or JAX array"),
    (made_up(x=made_up().x.astype(object)), r"data.x = 'object': must be an array of numbers"),
    (made_up(y=np.array(["a"] * ROWS)), r"data.y = '<U1': must be an array of numbers"),
    (made_up(x=np.zeros((ROWS, 3), "m8[s]")), r"data.x = 'timedelta64[s]': must be an array of numbers"),
    (made_up(test_x=None), r"data.test_x = None: must be an array: there is no run without a test set"),
    (made_up(test_x=np.zeros((0, 3)), test_y=np.zeros(0, int)), r"data.test_x = 'no rows': must be at least one row"),
    (made_up(x=np.zeros((0, 3)), y=np.zeros(0, int)), r"data.x = 'no rows': must be at least one row"),
    (made_up(decode=None), r"data.decode = None: must be a function"),
    (made_up(name=3), r"data.name = 3: must be text"),
    # clients and their rows
    (made_up(size=np.zeros(0, int), offset=np.zeros(0, int)), r"data.size = 'no clients': must be one entry"),
    (changed("size", 1, 0), r"data.size[1] = 0: must be from 1 to 24, the length of data.order"),
    (changed("size", 3, 25), r"data.size[3] = 25: must be from 1 to 24"),
    (changed("size", 3, 11), r"data.offset[3] = 14: must be from 0 to 13, so that 11 rows lie within the 24 of data"),
    (changed("offset", 0, -1), r"data.offset[0] = -1: must be from 0 to 21"),
    (changed("order", 4, ROWS), r"data.order[4] = 24: must be a row of data.x, from 0 to 23"),
    (changed("order", 0, -1), r"data.order[0] = -1: must be a row of data.x"),
    (made_up(order=np.zeros(0, int)), r"data.order = 'no rows': must be at least one row"),
    (made_up(offset=np.zeros(3, int)), r"data.offset = '3 entries': must be 4 entries, one per client"),
    (made_up(size=[3, 5, 6, 10]), r"data.size = 'list': must be a NumPy or JAX array"),
    (made_up(size=np.ones(4)), r"data.size = 'float64[4]': must be integers with one axis"),
    (made_up(order=np.zeros((ROWS, 1), int)), r"data.order = 'int64[24, 1]': must be integers with one axis"),
    # test and validation parts
    (changed("test_order", 7, TESTS), r"data.test_order[7] = 8: must be a row of data.test_x, from 0 to 7"),
    (changed("test_size", 3, 3), r"data.test_offset[3] = 6: must be from 0 to 5"),
    (changed("test_size", 3, -1), r"data.test_size[3] = -1: must be from 0 to 8"),
    (made_up(test_offset=None), r"data.test_offset = 'NoneType': must be a NumPy or JAX array"),
    (changed("validation_order", 2, ROWS), r"data.validation_order[2] = 24: must be a row of data.x, from 0 to 23"),
    (made_up(validation_size=np.ones(3, int)), r"data.validation_size = '3 entries': must be 4 entries, one per cli"),
    (changed("validation_offset", 1, 4), r"data.validation_offset[1] = 4: must be from 0 to 3"),
]


@pytest.mark.parametrize(("data", "message"), DEFECTS, ids=[message.partition(":")[0] for _, message in DEFECTS])
def test_a_defect_is_refused_by_name_before_the_run(data, message):
    assert refusal(prepare, Settings(**SMALL), data=data).startswith(message)


def test_good_data_come_back_as_they_are():
    own = made_up()
    for data in (own, without_num_classes(), made_up(x=jnp.asarray(own.x)), made_up(test_size=own.size * 0)):
        assert check_data(data) is data
    with pytest.raises(ValueError, match=r"^data = 'dict': must be FederatedData"):
        check_data({})


def test_wider_tables_become_int32():
    wide = {name: getattr(made_up(), name).astype(np.int64) for name in ("order", "offset", "size", "test_order")}
    data = check_data(made_up(**wide))
    for name, table in wide.items():
        assert getattr(data, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(data, name), table)
    assert data.x is made_up(x=data.x).x


def test_the_first_bad_value_is_found_beyond_the_first_block():
    x = np.zeros((BLOCK // 2 + 10, FEATURES), np.float32)
    x[-2, 1] = x[-1, 0] = np.nan
    with pytest.raises(ValueError, match=rf"^data\.x\[{len(x) - 2}, 1\] = nan"):
        check_data(made_up(x=x, y=np.zeros(len(x), np.int32)))
    halves = made_up().x.astype(ml_dtypes.bfloat16)
    halves[7, 1] = np.inf
    with pytest.raises(ValueError, match=r"^data\.x\[7, 1\] = inf: must be finite"):
        check_data(made_up(x=halves))


def test_virtual_and_streamed_examples_are_not_read():
    calls = []

    def example(parameters, client, position):
        calls.append(client)
        return jnp.zeros(FEATURES), client % CLASSES

    own = made_up()
    data = generated(example, sizes=np.array([2, 3]), test_x=own.test_x, test_y=own.test_y, num_classes=CLASSES)
    calls.clear()
    assert check_data(data) is data and calls == []
    with pytest.raises(ValueError, match=r"^data\.order = 'Identity\(6\)': must be at most 5 rows"):
        check_data(data._replace(x=own.x[:5], y=own.y[:5]))
    with pytest.raises(ValueError, match=r"^data\.test_x\[0, 0\] = nan"):
        check_data(data._replace(test_x=np.full((TESTS, FEATURES), np.nan, np.float32)))
    unread = changed("x", (0, 0), np.nan)._replace(y=own.y + 50, streamed=True)
    assert check_data(unread) is unread


@pytest.mark.parametrize(
    "name", sorted({one.name for one in list_datasets() if one.state in ("embedded", "generated")})
)
def test_data_sets_of_the_package_pass(name):
    data = federate(load(name), num_clients=None if name == "synthetic" else 10, partitioner=None)
    assert check_data(data) is data


def test_fetched_data_sets_and_folders_pass(monkeypatch, tmp_path):
    for one in list_datasets():
        if one.state == "ready" and one.size != "weights":  # on this machine
            check_data(federate(load(one.name), num_clients=10))
    monkeypatch.setitem(SOURCES, "mnist", small_published())
    write_cache(small_arrays(), arrays_folder("mnist", SOURCES["mnist"].version, tmp_path))
    data = federate(load("mnist", tmp_path), num_clients=3, validation_fraction=0.2, test_fraction=0.2)
    assert check_data(data) is data
    written = open_folder(
        write_folder(tmp_path / "clients", federate(load("mnist", tmp_path), num_clients=3, test_fraction=0.2))
    )
    assert check_data(written) is written and isinstance(written.x, np.memmap)


# --- from_arrays ------------------------------------------------------------------------------------


def pairs(data):
    """The examples of each client, and those of the test set."""
    rows = [client_rows(data, client) for client in range(len(data.size))]
    return [(data.x[own], data.y[own]) for own in rows], (data.test_x, data.test_y)


@st.composite
def federations(draw):
    """A data set with natural owners, of labels or of targets."""
    clients = draw(st.integers(1, 5))
    groups = np.r_[np.arange(clients), draw(st.lists(st.integers(0, clients - 1), min_size=20, max_size=20))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rng.shuffle(groups)
    rows = len(groups)
    x, test_x = (rng.normal(size=(n, FEATURES)).astype(draw(st.sampled_from(["f4", "f8"]))) for n in (rows, TESTS))
    classes = draw(st.sampled_from([None, CLASSES]))
    y = rng.integers(0, CLASSES, rows + TESTS).astype(np.int32)
    if classes is None:
        y = rng.normal(size=rows + TESTS).astype(np.float32)
    return Dataset("own", x, y[:rows], test_x, y[rows:], decode.as_is, classes, groups.astype(np.int32))


@settings(max_examples=30)
@given(dataset=federations(), kind=st.sampled_from([np.asarray, FakeTensor]))
def test_any_federation_passes_and_holds_the_same_clients(dataset, kind):
    wanted = federate(dataset, "natural")
    assert check_data(wanted) is wanted
    clients, test = pairs(wanted)
    clients = [(kind(x), kind(y)) for x, y in clients]
    data = from_arrays(clients, test, num_classes=dataset.num_classes)
    np.testing.assert_array_equal(data.size, wanted.size)
    for mine, theirs in zip(pairs(data)[0], pairs(wanted)[0], strict=True):
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])
    assert (data.name, data.num_classes, data.decode) == ("own", wanted.num_classes, wanted.decode)
    parts = from_arrays(clients, client_tests=clients, num_classes=dataset.num_classes)
    np.testing.assert_array_equal(parts.test_x, data.x)
    np.testing.assert_array_equal(parts.test_offset, data.offset)
    np.testing.assert_array_equal(parts.test_size, data.size)


def test_types_are_taken_as_they_come():
    x, y = made_up().x, made_up().y
    for images, wanted in (((9, 4, 4), decode.unit_images), ((9, 4, 4, 3), decode.unit_images), ((9, 4), decode.as_is)):
        pixels = np.zeros(images, np.uint8)
        data = from_arrays([(pixels, y[:9])], (pixels, y[:9]))
        assert data.decode is wanted and data.x.dtype == np.uint8
        assert from_arrays([(pixels, y[:9])], (pixels, y[:9]), decode=decode.mnist).decode is decode.mnist
    data = from_arrays(
        [(jnp.asarray(x), jnp.asarray(y)), (x.astype(np.float64), y.astype(np.uint8))], (x, y), name="mixed"
    )
    assert (data.name, data.x.dtype, data.y.dtype, data.num_classes) == ("mixed", np.float64, np.int32, CLASSES)
    assert from_arrays([(x, y.astype(np.float32))], (x, y.astype(np.float64))).num_classes is None
    assert from_arrays([(x, y)], (x, y), num_classes=7).num_classes == 7
    parts = from_arrays([(x, y)] * 3, client_tests=[(x, y), (x[:0], y[:0]), (x[:2], y[:2])])
    assert parts.test_size.tolist() == [ROWS, 0, 2]


X, Y = made_up().x, made_up().y
GOOD = (X, Y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": []}, "clients = 'no pairs': must be one pair (x, y) per client"),
        ({"clients": {0: GOOD}}, "clients = 'dict': must be a list of pairs (x, y), one per client"),
        ({"clients": [GOOD, X]}, "clients[1] = 'numpy.ndarray': must be a pair (x, y) of arrays"),
        ({"clients": [GOOD, (X.tolist(), Y)]}, "clients[1].x = 'list': must be a NumPy, JAX or torch array"),
        ({"clients": [GOOD, (X[:0], Y[:0])]}, "clients[1].x = 'no rows': must be at least one row"),
        ({"clients": [GOOD, (X, Y[:3])]}, "clients[1].y = '3 rows': must be one for each of the 24 rows"),
        ({"clients": [GOOD, (X[:, :2], Y)]}, "clients[1].x = 'rows of shape [2]': must be rows of shape [3], as in c"),
        ({"clients": [GOOD, (X.astype(np.uint8), Y)]}, "clients[1].x = 'uint8': must be floats, as in clients[0].x"),
        ({"clients": [GOOD, (X, Y - 1)]}, "clients[1].y[0] = -1: must be a label from 0 to 3"),
        ({"clients": [GOOD, (X, Y.astype(float))]}, "clients[1].y = 'float64': must be integer labels"),
        ({"clients": [(X, Y.astype(float)), GOOD]}, "clients[1].y = 'int32': must be floats, as in clients[0].y"),
        ({"clients": [(X, Y[:, None])]}, "clients[0].y = 'shape [24, 1]': must be one label per row"),
        ({"clients": [(X, Y == 1)], "num_classes": 2}, "clients[0].y = 'bool': must be integer labels"),
        ({"clients": [(np.full_like(X, np.inf), Y)]}, "clients[0].x[0, 0] = inf: must be finite"),
        ({"num_classes": 3}, "clients[0].y[3] = 3: must be a label from 0 to 2"),
        ({"num_classes": 0}, "num_classes = 0: must be a whole number"),
        ({"test": None}, "test = None: must be a pair (x, y), or client_tests must be given"),
        ({"client_tests": [GOOD]}, "client_tests = 'given': must be left out, since test is given"),
        ({"test": (X, Y + 9), "num_classes": 4}, "test.y[0] = 9: must be a label"),
        ({"test": (X[:0], Y[:0])}, "test.x = 'no rows': must be at least one row"),
        ({"test": None, "client_tests": []}, "client_tests = '0 pairs': must be 1 pairs, one per client"),
        ({"test": None, "client_tests": [(X[:0], Y[:0])]}, "client_tests = 'no rows': must be at least one row"),
        ({"test": (FakeTensor(X, device="cuda:0"), Y)}, "test.x = 'a tensor on cuda:0': must be on the CPU"),
        ({"test": (FakeTensor(X, dtype="bfloat16"), Y)}, "test.x = 'torch.bfloat16': must be of a type that NumPy has"),
        ({"test": (FakeTensor(X, layout="torch.sparse_coo"), Y)}, "test.x = 'torch.sparse_coo tensor of torch.float32"),
        ({"name": 3}, "name = 3: must be of letters, digits"),
        ({"decode": 3}, "data.decode = 3: must be a function"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(arguments, message):
    assert refusal(from_arrays, **({"clients": [GOOD], "test": GOOD} | arguments)).startswith(message)


class Frame(np.ndarray):
    """An array whose columns have names, as a pandas frame has them."""

    columns: tuple[str, ...]


def test_frames_with_columns_in_another_order_are_refused():
    def frame(*columns):
        made = X.view(Frame)
        made.columns = columns
        return made

    one = frame("a", "b", "c"), Y
    assert from_arrays([one, GOOD], one).x.shape == (2 * ROWS, 3)  # an array has no names to compare
    other = frame("a", "c", "b"), Y
    allowed = "= ['a', 'c', 'b']: must be ['a', 'b', 'c'], in this order, as in clients[0].x"
    assert refusal(from_arrays, [one, other], one) == f"columns of clients[1].x {allowed}"
    assert refusal(from_arrays, [one], other) == f"columns of test.x {allowed}"
    assert refusal(from_arrays, [one], client_tests=[other]) == f"columns of client_tests[0].x {allowed}"


# --- data that look as if a step of their preparation was forgotten: a run warns, once for each thing ---

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
    times = 1.7e9 + np.arange(60.0) / 60
    assert said(np.stack([times / 1e9 - 1.7, times - times.mean(), np.full(60, 1e9 + 0.1)], axis=1)) == []
    (found,) = said(np.stack([times, times - times.mean()], axis=1))
    assert found.startswith(
        "x[:, 0] is rounded to float32, which loses its differences (near 1.7e+09, the deviation is"
    )
    assert said(np.arange(60)[:, None] + 10**6) == []
    (found,) = said(np.arange(60)[:, None] + 17 * 10**8)
    assert found.startswith("x[:, 0] is rounded to float32")
    (found,) = said(1e-60 * RNG.standard_normal((60, 2, 3)))
    assert found.startswith("x[:, 0, 0] is rounded to float32")


def test_sequences_without_any_label_are_said_to_count_as_wrong():
    y = np.array([[1, 2, 0]] * 60)
    assert said(y=y, test_y=y) == []
    none = np.where(np.arange(60)[:, None] < 2, 0, y)
    found = said(y=y, test_y=none)
    assert found == ["2 of 60 test examples have no label but padding (0): they count as wrong, with loss 0"]


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
    dataset = Dataset("own", IMAGES, y, IMAGES, y)
    with pytest.warns(DataWarning, match=ONES):
        federate(dataset, "iid", 3)
    with pytest.warns(DataWarning, match=ONES):
        federate(Dataset("own", IMAGES, y), "iid", 3, test_fraction=0.1)
    with pytest.warns(DataWarning, match=ONES):
        from_arrays([(IMAGES, y)] * 2, (IMAGES, y))
    # none: the classes are counted elsewhere; there is a 0; in sequences 0 is padding; targets are no labels
    federate(dataset._replace(num_classes=5), "iid", 3)
    from_arrays([(IMAGES, y)], (IMAGES, y), num_classes=4)
    from_arrays([(IMAGES, y)], (IMAGES, LABELS))
    sequences = np.stack([y, y], axis=1)
    from_arrays([(IMAGES, sequences)], (IMAGES, sequences))
    from_arrays([(IMAGES, y / 2)], (IMAGES, y / 2))


def test_test_labels_that_no_client_trains():
    (line,) = said(y=np.minimum(LABELS, 1))
    assert line == "20 of 60 test examples have a label that no client trains (2): no run can learn it"
    (line,) = said(y=np.minimum(LABELS, 1), test_y=np.arange(60) % 10)
    assert "48 of 60 test examples" in line and "(2, 3, 4, 5, 6, ...)" in line
    order, size = np.flatnonzero(LABELS != 2).astype(np.int32), np.int32([40])
    assert len(said(order=order, size=size)) == 1  # rows that no client owns do not count
    assert len(said(order=Identity((60,)))) == 0
    assert len(said(y=np.minimum(LABELS, 1).astype(np.uint64))) == 1
    assert said(y=LABELS.astype(np.float32), test_y=LABELS + 0.5) == []


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
