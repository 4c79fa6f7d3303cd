"""Data of your own: defects are named and refused before the run, and good data are those of ``federate``."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedjax_async.config import Settings, prepare
from fedjax_async.data import Dataset, check_data, client_rows, decode, federate, from_arrays, from_torch, generated
from fedjax_async.data.checking import BLOCK
from fedjax_async.data.federated import with_validation
from fedjax_async.types import FederatedData
from tests.refusals import refusals
from tests.told import refusal

ROWS, TESTS, FEATURES, CLASSES = 28, 8, 3, 4  # 24 rows are trained on
SMALL = {"model": "logistic", "method": "fedasync", "updates": 6, "eval_updates": 3, "steps": 2, "batch_size": 2}


def made_up(**fields) -> FederatedData:
    """Four clients of 3, 5, 6 and 10 examples, with test parts of 2 and validation parts of 1."""
    rng = np.random.default_rng(0)
    size = np.array([3, 5, 6, 10], np.int32)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (np.arange(ROWS) % CLASSES).astype(np.int32)
    four = np.arange(4, dtype=np.int32)
    data = FederatedData(
        "made_up", x, y, rng.permutation(24).astype(np.int32), np.cumsum(size, dtype=np.int32) - size, size,
        x[:TESTS], y[:TESTS], decode.as_is, CLASSES,
        test_order=np.arange(TESTS, dtype=np.int32), test_offset=2 * four, test_size=np.full(4, 2, np.int32),
        validation_order=24 + four, validation_offset=four, validation_size=np.ones(4, np.int32),
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

test_a_defect_is_refused_by_name_before_the_run = refusals(
    # labels
    (changed("y", 17, 99), r"data.y[17] = 99: must be a label from 0 to 3"),
    (changed("y", 3, -1), r"data.y[3] = -1: must be a label from 0 to 3"),
    (changed("test_y", 5, 4), r"data.test_y[5] = 4: must be a label"),
    (made_up(y=np.zeros(ROWS)), r"data.y = 'float64': must be integer labels, since num_classes = 4"),
    (made_up(test_y=np.zeros(TESTS)), r"data.test_y = 'float64': must be integer labels"),
    (made_up(y=np.zeros((ROWS, 1), int)), r"data.y = 'shape [28, 1]': must be one label per row, shape [28]"),
    (made_up(num_classes=2.5), r"data.num_classes = 2.5: must be a whole number"),
    # values
    (changed("x", (5, 2), np.nan), r"data.x[5, 2] = nan: must be finite"),
    (changed("test_x", (0, 1), -np.inf), r"data.test_x[0, 1] = -inf: must be finite"),
    (without_num_classes(y=np.r_[np.zeros(ROWS - 1), np.inf]), r"data.y[27] = inf: must be finite"),
    (without_num_classes(test_y=np.full((TESTS, 2), np.nan)), r"data.test_y[0, 0] = nan: must be finite"),
    (made_up(x=jnp.full((ROWS, FEATURES), jnp.nan)), r"data.x[0, 0] = nan: must be finite"),
    # lengths, shapes and types
    (made_up(y=made_up().y[:-4]), r"data.y = '24 rows': must be one for each of the 28 rows of data.x"),
    (made_up(test_y=made_up().y), r"data.test_y = '28 rows': must be one for each of the 8 rows of data.test_x"),
    (made_up(test_x=np.zeros((TESTS, 2), np.float32)), r"data.test_x = 'rows of shape [2]': must be rows of shape [3]"),
    (made_up(test_x=np.zeros((TESTS, 3), np.uint8)), r"data.test_x = 'uint8': must be floats, as in data.x"),
    (without_num_classes(test_y=np.zeros((TESTS, 1))), r"data.test_y = 'rows of shape [1]': must be rows of shape [2]"),
    (made_up(x=np.zeros((ROWS, 0))), r"data.x = 'shape [28, 0]': must be rows with at least one number"),
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
    (changed("order", 4, ROWS), r"data.order[4] = 28: must be a row of data.x, from 0 to 27"),
    (changed("order", 0, -1), r"data.order[0] = -1: must be a row of data.x"),
    (made_up(order=np.zeros(0, int)), r"data.order = 'no rows': must be at least one row"),
    (made_up(offset=np.zeros(3, int)), r"data.offset = '3 entries': must be 4 entries, one per client"),
    (made_up(size=[3, 5, 6, 10]), r"data.size = 'list': must be a NumPy or JAX array"),
    (made_up(size=np.ones(4)), r"data.size = 'float64[4]': must be integers with one axis"),
    (made_up(order=np.zeros((24, 1), int)), r"data.order = 'int64[24, 1]': must be integers with one axis"),
    # test and validation parts
    (changed("test_order", 7, TESTS), r"data.test_order[7] = 8: must be a row of data.test_x, from 0 to 7"),
    (changed("test_size", 3, 3), r"data.test_offset[3] = 6: must be from 0 to 5"),
    (changed("test_size", 3, -1), r"data.test_size[3] = -1: must be from 0 to 8"),
    (made_up(test_offset=None), r"data.test_offset = 'NoneType': must be a NumPy or JAX array"),
    (changed("validation_order", 2, ROWS), r"data.validation_order[2] = 28: must be a row of data.x, from 0 to 27"),
    (made_up(validation_size=np.ones(3, int)), r"data.validation_size = '3 entries': must be 4 entries, one per cli"),
    (changed("validation_order", 2, 7), r"data.validation_order = 7: must be a row that no client trains on"),
    (changed("validation_offset", 1, 4), r"data.validation_offset[1] = 4: must be from 0 to 3"),
    by=lambda data: prepare(Settings(**SMALL), data=data),
    begins=True,
)


def test_good_data_come_back_as_they_are_and_wider_tables_as_int32():
    own = made_up()
    for data in (own, without_num_classes(), made_up(x=jnp.asarray(own.x)), made_up(test_size=own.size * 0)):
        assert check_data(data) is data
    wide = {name: getattr(own, name).astype(np.int64) for name in ("order", "offset", "size", "test_order")}
    data = check_data(made_up(**wide))
    for name, table in wide.items():
        assert getattr(data, name).dtype == np.int32
        np.testing.assert_array_equal(getattr(data, name), table)
    with pytest.raises(ValueError, match=r"^data = 'dict': must be FederatedData"):
        check_data({})


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


test_arrays_that_do_not_fit_are_refused_by_name = refusals(
    ({"clients": []}, "clients = 'no pairs': must be one pair (x, y) per client"),
    ({"clients": {0: GOOD}}, "clients = 'dict': must be a list of pairs (x, y), one per client"),
    ({"clients": [GOOD, X]}, "clients[1] = 'numpy.ndarray': must be a pair (x, y) of arrays"),
    ({"clients": [GOOD, (X.tolist(), Y)]}, "clients[1].x = 'list': must be a NumPy, JAX or torch array"),
    ({"clients": [GOOD, (X[:0], Y[:0])]}, "clients[1].x = 'no rows': must be at least one row"),
    ({"clients": [GOOD, (X, Y[:3])]}, "clients[1].y = '3 rows': must be one for each of the 28 rows"),
    ({"clients": [GOOD, (X[:, :2], Y)]}, "clients[1].x = 'rows of shape [2]': must be rows of shape [3], as in c"),
    ({"clients": [GOOD, (X.astype(np.uint8), Y)]}, "clients[1].x = 'uint8': must be floats, as in clients[0].x"),
    ({"clients": [GOOD, (X, Y - 1)]}, "clients[1].y[0] = -1: must be a label from 0 to 3"),
    ({"clients": [GOOD, (X, Y.astype(float))]}, "clients[1].y = 'float64': must be integer labels"),
    ({"clients": [(X, Y.astype(float)), GOOD]}, "clients[1].y = 'int32': must be floats, as in clients[0].y"),
    ({"clients": [(X, Y[:, None])]}, "clients[0].y = 'shape [28, 1]': must be one label per row"),
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
    by=lambda arguments: from_arrays(**({"clients": [GOOD], "test": GOOD} | arguments)),
    begins=True,
)


def test_several_yes_or_no_labels_an_example_are_told_to_be_targets():
    several = np.arange(ROWS * 3).reshape(ROWS, 3) % 2
    says = refusal(prepare, Settings(**SMALL), data=from_arrays([(X, several)], (X, several), name="mine"))
    advice = "several yes-or-no labels an example are targets: pass y.astype(float), and a model with their loss"
    assert says.startswith("shape of model outputs = ['B', 2]: must be [B, 3, 2], since mine has") and advice in says


class Frame(np.ndarray):
    """An array whose columns have names, as a pandas frame has them."""

    columns: tuple[str, ...]


def test_no_row_is_held_out_by_one_client_and_trained_on_by_another():
    none = {f"validation_{name}": None for name in ("order", "offset", "size")}
    shared = made_up(order=np.arange(ROWS, dtype=np.int32) % 10, **none)
    says = refusal(with_validation, shared, 0.5, np.random.default_rng(0))
    assert says.startswith("validation_fraction = 0.5: must be None: rows of made_up belong to several clients")
    kept = with_validation(made_up(**none), 0.5, np.random.default_rng(0))
    assert not set(kept.order[: kept.size.sum()]) & set(kept.validation_order[kept.validation_offset[0] :])


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


def test_parts_of_a_data_set_may_be_left_out():
    for y in (np.arange(60) % 3, np.linspace(0, 1, 60)):
        alone = Dataset("alone", np.zeros((60, 2), np.float32), y)
        allowed = r"^test_fraction = None: must be given, such as 0.2: the data set alone has no test set \(test_x and"
        with pytest.raises(ValueError, match=allowed):
            federate(alone, "iid", 3)
        assert len(federate(alone, "iid", 3, test_fraction=0.2).test_x) == 12
    x, y = np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.array([0, 2, 1, 0, 1, 1])
    data = federate(Dataset("pictures", x, y, x[:2], y[:2]), "iid", 2, 0)
    assert data.num_classes == 3 and data.decode is decode.unit_images
    data = federate(Dataset("curve", x / 10, y / 2, x[:2] / 10, y[:2] / 2), "iid", 2, 0)
    assert data.num_classes is None and data.decode is decode.as_is  # targets that are numbers
    with pytest.raises(ValueError, match=r"bad.y\[0\] = -1: must be a label from 0 to 2"):
        federate(Dataset("bad", x, y - 1, x[:2], y[:2]), "iid", 2, 0)


ITEMS = [(np.random.default_rng(i).random((1, 4, 4)).astype(np.float32), i % 3) for i in range(6)]


class Subset:
    """As torch.utils.data.Subset: a map-style data set has items by index and a length, and no more."""

    def __init__(self, *items):
        self.items = items

    def __getitem__(self, index):
        return self.items[index]

    def __len__(self):
        return len(self.items)


def test_map_style_data_sets():
    data = from_torch([Subset(ITEMS[4], ITEMS[1]), Subset(ITEMS[0])], Subset(ITEMS[5]), channels_first=True)
    np.testing.assert_array_equal(data.x[0, :, :, 0], ITEMS[4][0][0])
    assert data.y.tolist() == [1, 1, 0] and data.size.tolist() == [2, 1] and data.num_classes == 3
    named = [{"img": Image.fromarray(np.full((4, 4), i, np.uint8)), "label": i} for i in range(2)]
    data = from_torch([named], client_tests=[named[:1]], x="img", y="label")
    assert data.x.dtype == np.uint8 and data.test_size.tolist() == [1] and data.decode.__name__ == "unit_images"


test_map_style_data_sets_that_do_not_fit = refusals(
    ([iter(ITEMS)], {}, r"^clients\[0\] = 'list_iterator': must be a map-style data set"),
    ([[]], {}, r"^clients\[0\] = 'no items'"),
    ([ITEMS], {"y": 2}, r"^clients\[0\]\[0\]: 2 is not in it \(known: 0, 1\)"),
    ([[ITEMS[0], (np.zeros(3), 1)]], {}, r"^clients\[0\]\[1\]\[0\] = 'shape \[3\]': must be shape \[1, 4, 4\]"),
    ([[(np.zeros(3), 1)]], {"channels_first": True}, r"^clients\[0\]: shape of x = \[1, 3\]"),
    ([[("text", 1)]], {}, r"^clients\[0\]\[0\]\[0\] = 'str': must be a NumPy, JAX or torch array"),
    by=lambda clients, options: from_torch(clients, ITEMS, **options),
)
