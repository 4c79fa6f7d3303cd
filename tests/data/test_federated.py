"""``federate``: the client index table points at the right rows of the pool."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.data import Dataset, client_rows, federate, synthetic
from fedjax_async.data.decode import as_is, unit_images


def numbered(examples=60, classes=3, **fields):
    """Every example's input is its own number, so that a test can follow the rows."""
    x = np.arange(examples, dtype=np.uint8)[:, None]
    y = (np.arange(examples) % classes).astype(np.int32)
    defaults = {"test_x": x[:6] + 100, "test_y": y[:6], "num_classes": classes}
    return Dataset("numbered", x, y, decode=as_is, **(defaults | fields))


def test_the_table_covers_the_pool_and_matches_the_partition():
    data = federate(numbered(), "dirichlet:alpha=0.5", num_clients=4, seed=3)
    assert data.x.dtype == np.uint8
    assert (data.order.dtype, data.offset.dtype, data.size.dtype) == (np.int32,) * 3
    np.testing.assert_array_equal(data.offset, np.concatenate([[0], np.cumsum(data.size)[:-1]]))
    rows = np.concatenate([client_rows(data, i) for i in range(4)])
    np.testing.assert_array_equal(np.sort(rows), np.arange(60))
    assert data.test_order is None
    with pytest.raises(ValueError, match="client = 4"):
        client_rows(data, 4)


def test_the_pool_is_not_copied():
    dataset = numbered()
    data = federate(dataset, "iid", num_clients=4)
    assert np.shares_memory(data.x, dataset.x)
    assert np.shares_memory(data.test_x, dataset.test_x)


def test_held_out_examples_stay_with_their_client_and_out_of_training():
    dataset = numbered()
    whole = federate(dataset, "quantity", num_clients=5, seed=1)
    data = federate(dataset, "quantity", num_clients=5, seed=1, test_fraction=0.2)
    assert set(data.x[:, 0]).isdisjoint(data.test_x[:, 0])
    for i in range(5):
        test = data.test_order[data.test_offset[i] :][: data.test_size[i]]
        mine, held_out = data.x[client_rows(data, i), 0], data.test_x[test, 0]
        assert sorted([*mine, *held_out]) == sorted(whole.x[client_rows(whole, i), 0])
        np.testing.assert_array_equal(data.y[client_rows(data, i)], mine % 3)
        np.testing.assert_array_equal(data.test_y[test], held_out % 3)
    assert data.test_size.sum() == len(data.test_x) == len(data.test_y)
    assert data.size.sum() == len(data.x) == len(data.order)


def test_the_seed_makes_the_world():
    dataset = numbered()
    orders = [federate(dataset, "iid", 4, seed).order for seed in (0, 0, 1)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_natural_owners_give_the_number_of_clients():
    data = federate(synthetic(clients=5, features=4), "natural")
    assert len(data.size) == 5
    grouped = numbered(groups=np.repeat(np.arange(6, dtype=np.int32), 10))
    np.testing.assert_array_equal(federate(grouped, "natural").order, np.arange(60))
    with pytest.raises(ValueError, match="num_clients = None: must be given"):
        federate(numbered(), "iid")


def test_test_rows_of_nobody_who_trains_are_the_global_test_set():
    owners = np.repeat(np.arange(6, dtype=np.int32), 10)
    grouped = numbered(groups=owners)
    strangers = np.full(len(grouped.test_x), 6, np.int32)
    assert federate(grouped._replace(test_groups=strangers), "natural").test_order is None
    assert federate(grouped._replace(test_groups=strangers - 1), "natural").test_size.tolist()[:5] == [0] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partitioner": "dirichlett"}, "did you mean 'dirichlet'"),
        ({"partitioner": "dirichlet:beta=1"}, "no option 'beta'"),
        ({"partitioner": "natural"}, "no natural owners"),
        ({"num_clients": 61}, "num_clients = 61"),
        ({"num_clients": 2.5}, "num_clients = 2.5"),
        ({"seed": -1}, "seed = -1"),
        ({"test_fraction": 1.0}, "test_fraction = 1.0"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        federate(numbered(), **({"partitioner": "iid", "num_clients": 4} | change))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_y": np.zeros(5, np.int32)}, "numbered.test_y"),
        ({"test_y": np.zeros(6)}, "numbered.test_y = 'float64'"),
        ({"num_classes": 2}, "numbered.y"),
        ({"groups": np.zeros(3, np.int32)}, "numbered.groups"),
        ({"test_x": np.zeros((0, 1), np.uint8), "test_y": np.zeros(0, np.int32)}, "has no test set"),
        ({"test_x": None, "test_y": None}, "numbered.test_x = None: must be an array; both are left out for"),
        ({"test_y": None}, "numbered.test_y = None: must be an array"),
        ({"test_y": [0] * 6}, "numbered.test_y = 'list': must be a NumPy or JAX array"),
    ],
)
def test_inconsistent_data_sets(fields, message):
    with pytest.raises(ValueError, match=message):
        federate(numbered(**fields), "iid", num_clients=4)


def test_a_data_set_without_a_test_set():
    for y in (np.arange(60) % 3, np.linspace(0, 1, 60)):
        alone = Dataset("alone", np.zeros((60, 2), np.float32), y)
        allowed = r"^test_fraction = None: must be given, such as 0.2: the data set alone has no test set \(test_x and"
        with pytest.raises(ValueError, match=allowed):
            federate(alone, "iid", 3)
        assert len(federate(alone, "iid", 3, test_fraction=0.2).test_x) == 12


def test_too_few_examples_for_the_parts_of_a_client_name_min_size():
    def sizes(min_size, **fractions):
        return federate(numbered(), f"power_law:exponent=3,min_size={min_size}", 10, **fractions).size.min()

    for fractions, needed in (({"validation_fraction": 0.1}, 2), ({"test_fraction": 0.1}, 2)):
        with pytest.raises(
            ValueError, match=rf"but client \d has 1: ask for .* min_size={needed} in the partition, as in"
        ):
            sizes(1, **fractions)
        assert sizes(2, **fractions) == 1
    both = {"validation_fraction": 0.1, "test_fraction": 0.1}
    with pytest.raises(ValueError, match=r"^validation_fraction = 0.1: .* min_size=3 in the partition"):
        sizes(2, **both)
    assert sizes(3, **both) == 1


def test_decoder_and_classes_may_be_left_out():
    x, y = np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.array([0, 2, 1, 0, 1, 1])
    data = federate(Dataset("pictures", x, y, x[:2], y[:2]), "iid", 2, 0)
    assert data.num_classes == 3 and data.decode is unit_images
    data = federate(Dataset("curve", x / 10, y / 2, x[:2] / 10, y[:2] / 2), "iid", 2, 0)
    assert data.num_classes is None and data.decode is as_is  # targets that are numbers
    with pytest.raises(ValueError, match=r"bad.y\[0\] = -1: must be a label from 0 to 2"):
        federate(Dataset("bad", x, y - 1, x[:2], y[:2]), "iid", 2, 0)
