"""Partitions: every example is used once, no client is empty, each skew is as documented; ``federate`` applies them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base.factories import summary
from fedjax_async.base.registry import spec as spec_of
from fedjax_async.data import Dataset, client_rows, fashion_mnist_6k, federate, synthetic
from fedjax_async.data.decode import as_is
from fedjax_async.data.drawing import draw_in_turns
from fedjax_async.data.partition import PARTITIONERS, apportion, check_partition, split_clients
from tests.refusals import last_options, refusals

SPECS = [
    "iid",
    "dirichlet:alpha=0.5",
    "dirichlet:alpha=0.05,min_size=2",
    "dirichlet_balanced:alpha=0.1",
    "dirichlet_balanced:alpha=0.1,at_a_time=3",
    "shards:classes_per_client=2",
    "halves:blocks=2",
    "quantity",
    "power_law:exponent=1.5",
    "natural",
    "table:path=TABLE",
]


def deal(spec, labels, num_clients, seed=0):
    labels = np.asarray(labels)
    if spec.endswith("TABLE"):
        classes = max(len(np.unique(labels)), 1)
        shares = 1 + np.random.default_rng(seed).integers(0, 3, (max(num_clients, 1), classes))
        spec = spec.removesuffix("TABLE") + str(table_file(shares))
    partition = spec_of("partitioner", PARTITIONERS, spec, groups=np.arange(len(labels)) % 97).make()
    return partition(labels, num_clients, np.random.default_rng(seed))


def table_file(shares):
    """A table in the layout of flwr-datasets' ``compute_counts(...).to_csv()``."""
    path = Path(tempfile.gettempdir()) / f"shares-{os.getpid()}.csv"
    lines = [["Partition ID", *range(shares.shape[1])], *([i, *row] for i, row in enumerate(shares.tolist()))]
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return path


def balanced(examples, classes=10, seed=0):
    return np.random.default_rng(seed).permutation(np.arange(examples) % classes).astype(np.int32)


def class_table(parts, labels):
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def concentration(parts, labels):
    """Mean over clients of sum_c q_ic^2: 1 for one class per client, 1/C for equal shares of all classes."""
    table = class_table(parts, labels)
    mixes = table / table.sum(axis=1, keepdims=True)
    return np.mean(np.sum(mixes**2, axis=1))


def test_the_specs_above_cover_the_registry():
    assert {spec.split(":")[0] for spec in SPECS} == set(PARTITIONERS)
    assert all(summary(factory) for factory in PARTITIONERS.values())


@pytest.mark.slow_cases("dirichlet:alpha=0.05,min_size=2")
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=25)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=150),
    num_clients=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_example_is_owned_once_or_the_refusal_is_clear(spec, labels, num_clients, seed):
    try:
        parts = deal(spec, labels, num_clients, seed)
    except ValueError as error:
        assert "\n" not in str(error) and "=" in str(error)
        return
    assert len(parts) == num_clients
    assert all(len(part) > 0 for part in parts)
    assert all(np.all(np.diff(part) > 0) for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


@pytest.mark.parametrize("spec", SPECS)
def test_ample_data_is_never_refused_and_the_seed_decides(spec):
    labels = balanced(2000)
    first, again, other = (deal(spec, labels, 20, seed) for seed in (3, 3, 4))
    check_partition(first, 2000, 20)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other))
    with pytest.raises(ValueError, match="num_clients = 11: must be at most the number of examples, 10"):
        deal(spec, balanced(10), 11)
    with pytest.raises(ValueError, match="num_clients = 0"):
        deal(spec, balanced(10), 0)


def checked(*parts):
    return check_partition([np.array(part, int) for part in parts], 3, 2)


def split(fraction, *parts):
    return split_clients(parts or [np.arange(10)], fraction, np.random.default_rng(0))


WRONG = """
dirichlet:alpha=0 dirichlet:min_size=0 dirichlet:min_size=101 dirichlet_balanced:alpha=0 dirichlet_balanced:at_a_time=0
shards:classes_per_client=0 shards:classes_per_client=11 halves:blocks=11 quantity:min_size=101 power_law:exponent=-1
"""
THOUSAND, OF = balanced(1000), "^(partitioner = '.*': )?"
test_what_cannot_be_dealt_is_refused = refusals(
    *((deal, (spec, THOUSAND, 10), f"{OF}{says}") for spec, says in last_options(WRONG)),
    (deal, ("dirichlet:alpha=0.001,min_size=90,max_tries=5", THOUSAND, 10), f"{OF}alpha = "),
    (deal, ("shards:classes_per_client=2", balanced(100), 4), "^classes_per_client = 2: must be at least 3 for 4"),
    (deal, ("dirichlet", np.linspace(0, 1, 50), 5), f"{OF}labels = 'float64"),
    (split, (0,), f"{OF}test_fraction = "),
    (split, (1,), f"{OF}test_fraction = "),
    (split, (0.5, np.arange(3), np.array([3])), f"{OF}.*client 1 has 1"),
    (checked, ([0, 1], [1, 2]), f"{OF}partition = "),
    (checked, ([0, 1], [3]), f"{OF}partition = "),
    (checked, ([0, 1, 2], []), f"{OF}partition = "),
    (checked, ([0], [1], [2]), f"{OF}partition = "),
    (checked, ([-1, 0], [1, 2]), f"{OF}partition = "),
    by=lambda call, given: call(*given),
)


def test_clients_of_an_exhausted_class_go_on_to_the_next_that_has_some():
    mixes = np.array([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    sizes, need = np.array([30, 10, 2, 18]), np.array([20, 20, 20])
    counts = draw_in_turns(mixes, need, sizes, 3, np.random.default_rng(0))
    np.testing.assert_array_equal(counts.sum(axis=0), sizes)
    np.testing.assert_array_equal(counts.sum(axis=1), need)
    assert counts[:2, 3].sum() <= 2 and counts[2, 3] >= 16, "the third client draws its own class while some is left"
    assert counts[:2, 0].sum() + counts[2, 0] == 30 and counts[2, :3].sum() == 20 - counts[2, 3]


def test_drawing_in_turns_is_milder_than_drawing_all_at_once():
    labels = balanced(6000)
    turns, once = (
        np.mean([concentration(deal(f"dirichlet_balanced:alpha=0.1{how}", labels, 10, s), labels) for s in range(6)])
        for how in (",at_a_time=3", "")
    )
    assert 0.2 < turns < once - 0.02


def test_sizes_and_mixes_without_a_draw():
    table = class_table(deal("iid", balanced(10_000), 10), balanced(10_000))
    assert set(table.sum(axis=1)) == {1000} and 60 < table.min() <= table.max() < 140
    assert sorted(map(len, deal("iid", balanced(11), 3))) == [3, 4, 4]
    assert list(map(len, deal("quantity", balanced(5500), 10))) == [100 * (i + 1) for i in range(10)]
    assert min(map(len, deal("quantity:min_size=30", balanced(1000), 10))) == 30
    sizes = np.array(list(map(len, deal("power_law:exponent=2", balanced(100_000), 10))))
    np.testing.assert_allclose(sizes / sizes[0], np.arange(1, 11.0) ** -2, atol=1e-4)
    assert set(map(len, deal("power_law:exponent=0", balanced(1000), 10))) == {100}
    labels = balanced(1000)
    assert [set(labels[part]) for part in deal("halves", labels, 2)] == [set(range(5)), set(range(5, 10))]
    parts = deal("halves:blocks=5", labels, 10)
    assert [set(labels[part]) for part in parts[2:4]] == [{2, 3}, {2, 3}] and set(map(len, parts)) == {100}


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_law_of_the_dirichlet(alpha):
    """For p ~ Dir(alpha 1_N): E sum_i p_i^2 = (alpha + 1) / (N alpha + 1); averaged over classes and seeds."""
    labels, n = balanced(5000), 8
    squares = []
    for seed in range(40):
        table = class_table(deal(f"dirichlet:alpha={alpha}", labels, n, seed), labels)
        squares.append(np.sum((table / 500) ** 2, axis=0).mean())
    assert np.mean(squares) == pytest.approx((alpha + 1) / (n * alpha + 1), rel=0.08)


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_balanced_dirichlet_is_balanced_and_nearly_as_skewed_as_its_mixes(alpha):
    """Mixes q ~ Dir(alpha 1_C): E sum_c q_c^2 = (alpha + 1) / (C alpha + 1); scarce classes pull it down a little."""
    labels = balanced(4000)
    skews = []
    for seed in range(20):
        parts = deal(f"dirichlet_balanced:alpha={alpha}", labels, 40, seed)
        assert set(map(len, parts)) == {100}
        skews.append(concentration(parts, labels))
    ideal = (alpha + 1) / (10 * alpha + 1)
    assert 0.8 * ideal < np.mean(skews) < 1.1 * ideal + 0.01


def test_dirichlet_min_size_is_kept_by_drawing_again():
    def least(spec):
        return min(min(map(len, deal(spec, balanced(1000), 10, seed))) for seed in range(20))

    assert least("dirichlet:alpha=0.1,min_size=20") >= 20 > least("dirichlet:alpha=0.1") >= 1


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_shards_give_k_classes_and_share_classes_evenly(k):
    labels = balanced(6000)
    table = class_table(deal(f"shards:classes_per_client={k}", labels, 30), labels)
    assert set((table > 0).sum(axis=1)) == {k} and set((table > 0).sum(axis=0)) == {3 * k}
    held = table[table > 0]
    assert held.max() - held.min() <= 1


def test_natural_owners_are_not_split():
    groups = np.array([7, 3, 7, 9, 3, 3, 9, 1])
    natural = PARTITIONERS["natural"](groups=groups)
    labels = np.zeros(8, np.int32)
    whole = natural(labels, 4, np.random.default_rng(0))
    assert [part.tolist() for part in whole] == [[7], [1, 4, 5], [0, 2], [3, 6]]
    shared = natural(labels, 2, np.random.default_rng(0))
    check_partition(shared, 8, 2)
    owners = [set(groups[part]) for part in shared]
    assert owners[0].isdisjoint(owners[1]) and list(map(len, owners)) == [2, 2]
    with pytest.raises(ValueError, match="num_clients = 5: must be at most the 4 natural owners"):
        natural(labels, 5, np.random.default_rng(0))
    with pytest.raises(ValueError, match="no natural owners"):
        PARTITIONERS["natural"]()(labels, 2, np.random.default_rng(0))


@given(
    total=st.integers(0, 500),
    shares=st.lists(st.floats(0, 100), min_size=1, max_size=12).filter(lambda s: sum(s) > 0),
    minimum=st.integers(0, 3),
)
def test_apportion_sums_up_respects_the_minimum_and_is_near(total, shares, minimum):
    if total < minimum * len(shares):
        return
    counts = apportion(total, np.array(shares), minimum)
    assert counts.sum() == total and counts.min() >= minimum
    if minimum == 0:
        assert np.all(np.abs(counts - total * np.array(shares) / sum(shares)) < 1 + 1e-6)


@given(sizes=st.lists(st.integers(2, 30), min_size=1, max_size=8), fraction=st.floats(0.01, 0.99))
def test_split_keeps_every_clients_examples_apart(sizes, fraction):
    parts = np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    train, test = split_clients(parts, fraction, np.random.default_rng(1))
    for part, mine, held_out in zip(parts, train, test):
        assert sorted([*mine, *held_out]) == sorted(part) and len(mine) >= 1 <= len(held_out)
        assert abs(len(held_out) - fraction * len(part)) <= 1


FOUR_CLASSES = balanced(100, classes=4)
COUNTS = np.array([[5, 0, 25, 10], [20, 25, 0, 15]])


def deal_table(shares, clients=2):
    return PARTITIONERS["table"](path=table_file(shares))(FOUR_CLASSES, clients, np.random.default_rng(0))


test_tables_that_do_not_fit = refusals(
    (COUNTS[:, :3], "classes = 3: must be 4, those of the data set"),
    (np.where(COUNTS == 25, -1, COUNTS), "row 1, 2 = '-1': must be a finite number >= 0"),
    (COUNTS * [1, 0, 1, 1], "only zeros for ['1']"),
    (np.array([[0, 0, 0, 0], [1, 1, 1, 1]]), "row 1 = 'no example'"),
    (COUNTS, 3, "num_clients = 3: must be 2, the rows of"),
    by=deal_table,
)


def test_a_table_of_counts_is_met_exactly_and_shares_in_proportion():
    for shares in (COUNTS, COUNTS / 25):
        np.testing.assert_array_equal(class_table(deal_table(shares), FOUR_CLASSES), COUNTS)


def test_the_header_of_a_table_orders_its_columns():
    labels = np.array([0, 0, 1, 1, 1, 2]) * 2  # labels 0, 2, 4
    names = ("cat", "unused", "dog", "too", "emu")
    rng = np.random.default_rng(0)

    def dealt(header, *rows, names=names):
        path = table_file(np.zeros((1, 1), int))
        path.write_text("".join(f"{line}\n" for line in (header, *rows)))
        return class_table(PARTITIONERS["table"](path=path, class_names=names)(labels, 2, rng), labels)[:, ::2].tolist()

    wanted = [[2, 1, 0], [0, 2, 1]]
    for known in (names, None):
        assert dealt("id,0,2,4", "0,2,1,0", "1,0,2,1", names=known) == wanted
        assert dealt("id,4,0,2", "0,0,2,1", "1,1,0,2", names=known) == wanted
        assert dealt("id,10,9,8", "0,0,1,2", "1,1,2,0", names=known) == wanted  # by their order
    assert dealt("id,cat,dog,emu", "0,2,1,0", "1,0,2,1") == wanted
    assert dealt("id, emu, cat ,dog", "0,0,2,1", "1,1,0,2") == wanted
    assert dealt("id,10,2,1", "0,1,2,0", "1,2,0,1", names=("2", "x", "10", "y", "1")) == wanted  # names of classes
    for header, known, message in [
        ("id,cat,cow,emu", names, r"classes = \['cow'\]: must be those of the data set, cat, unused, dog, too, emu"),
        ("id,cat,1,2", names, r"classes = \['1', '2'\]: must be those of the data set"),
        ("id,cat,dog,emu", None, r"classes = \['cat', 'dog', 'emu'\]: must be numbers, as the data set names no"),
        ("id,cat,unused,emu", names, r"labels of its classes = \[0, 1, 4\]: must be those with examples, \[0, 2, 4\]"),
        ("id,cat,dog,dog", names, r"classes = \['cat', 'dog', 'dog'\]: must be different"),
        ("id,1,1,2", None, r"classes = \['1', '1', '2'\]: must be different"),
        ("id;cat;dog", names, r"as a table \(Error: separated by semicolons, but must be by commas"),
    ]:
        with pytest.raises(ValueError, match=message):
            dealt(header, "0,2,1,0", "1,1,2,1", names=known)


def test_data_sets_pass_the_names_of_their_classes_to_a_table(tmp_path):
    path, dataset = tmp_path / "shares, new.csv", fashion_mnist_6k()
    names = list(dataset.class_names)
    assert names[0] == "T-shirt/top" and names[9] == "Ankle boot"
    path.write_text(f"id,{','.join(names[::-1])}\n0,1{',0' * 9}\n1,0{',1' * 9}\n")
    data = federate(dataset, f"table:path='{path}'", 2)
    assert set(dataset.y[client_rows(data, 0)]) == {9}
    with pytest.raises(ValueError, match="must be numbers, as the data set names no classes"):
        federate(dataset._replace(class_names=None), f"table:path='{path}'", 2)
    with pytest.raises(ValueError, match=r"class_names = '3 names': must be 10 names, one per class"):
        federate(dataset._replace(class_names=("a", "b", "c")), "iid", 2)


def numbered(examples=60, classes=3, **fields):
    """Every example's input is its own number, so that a test can follow the rows."""
    x = np.arange(examples, dtype=np.uint8)[:, None]
    y = (np.arange(examples) % classes).astype(np.int32)
    defaults = {"test_x": x[:6] + 100, "test_y": y[:6], "num_classes": classes}
    return Dataset("numbered", x, y, decode=as_is, **(defaults | fields))


def test_the_table_covers_the_pool_which_is_not_copied():
    dataset = numbered()
    data = federate(dataset, "dirichlet:alpha=0.5", num_clients=4, seed=3)
    assert np.shares_memory(data.x, dataset.x) and np.shares_memory(data.test_x, dataset.test_x)
    assert (data.x.dtype, data.order.dtype, data.offset.dtype, data.size.dtype) == (np.uint8, *(np.int32,) * 3)
    np.testing.assert_array_equal(data.offset, np.concatenate([[0], np.cumsum(data.size)[:-1]]))
    rows = np.concatenate([client_rows(data, i) for i in range(4)])
    np.testing.assert_array_equal(np.sort(rows), np.arange(60))
    assert data.test_order is None
    with pytest.raises(ValueError, match="client = 4"):
        client_rows(data, 4)


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


def test_natural_owners_give_the_number_of_clients():
    """Test rows of nobody who trains are the global test set."""
    assert len(federate(synthetic(clients=5, features=4), "natural").size) == 5
    grouped = numbered(groups=np.repeat(np.arange(6, dtype=np.int32), 10))
    np.testing.assert_array_equal(federate(grouped, "natural").order, np.arange(60))
    strangers = np.full(len(grouped.test_x), 6, np.int32)
    assert federate(grouped._replace(test_groups=strangers), "natural").test_order is None
    assert federate(grouped._replace(test_groups=strangers - 1), "natural").test_size.tolist()[:5] == [0] * 5


test_what_cannot_be_federated_is_refused_by_name = refusals(
    ({}, {"partitioner": "dirichlett"}, "did you mean 'dirichlet'"),
    ({}, {"partitioner": "natural"}, "no natural owners"),
    ({}, {"num_clients": None}, "num_clients = None: must be given"),
    ({}, {"num_clients": 2.5}, "num_clients = 2.5"),
    ({}, {"seed": -1}, "seed = -1"),
    ({}, {"test_fraction": 1.0}, "test_fraction = 1.0"),
    ({"test_y": np.zeros(5, np.int32)}, {}, "numbered.test_y"),
    ({"test_y": np.zeros(6)}, {}, "numbered.test_y = 'float64'"),
    ({"num_classes": 2}, {}, "numbered.y"),
    ({"groups": np.zeros(3, np.int32)}, {}, "numbered.groups"),
    ({"test_x": np.zeros((0, 1), np.uint8), "test_y": np.zeros(0, np.int32)}, {}, "has no test set"),
    ({"test_x": None, "test_y": None}, {}, "numbered.test_x = None: must be an array; both are left out for"),
    ({"test_y": None}, {}, "numbered.test_y = None: must be an array"),
    ({"test_y": [0] * 6}, {}, "numbered.test_y = 'list': must be a NumPy or JAX array"),
    by=lambda fields, change: federate(numbered(**fields), **({"partitioner": "iid", "num_clients": 4} | change)),
)


def test_too_few_examples_for_the_parts_of_a_client_name_min_size():
    def sizes(min_size, **fractions):
        return federate(numbered(), f"power_law:exponent=3,min_size={min_size}", 10, **fractions).size.min()

    for fractions in ({"validation_fraction": 0.1}, {"test_fraction": 0.1}):
        with pytest.raises(ValueError, match=r"but client \d has 1: ask for .* min_size=2 in the partition, a"):
            sizes(1, **fractions)
        assert sizes(2, **fractions) == 1
    both = {"validation_fraction": 0.1, "test_fraction": 0.1}
    with pytest.raises(ValueError, match=r"^validation_fraction = 0.1: .* min_size=3 in the partition"):
        sizes(2, **both)
    assert sizes(3, **both) == 1
