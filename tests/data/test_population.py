"""The generated population has the distribution that its docstring states, at any size; virtual arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.base import hashing
from fedjax_async.data import (
    Federation,
    Generated,
    Identity,
    ceiling,
    client_rows,
    federate,
    generate,
    generated,
    load,
    population,
)


@functools.lru_cache(maxsize=8)
def dealt(clients=200, seed=0, **options):
    return federate(population(**options), num_clients=clients, seed=seed)


def labels_of(data):
    """The labels of all examples of all clients, and the owner of each."""
    rows = np.concatenate([client_rows(data, i) for i in range(len(data.size))])
    return np.asarray(jax.jit(lambda y, rows: y[rows])(data.y, rows)), np.repeat(np.arange(len(data.size)), data.size)


def test_labels_follow_the_clients_mix():
    """P(y = c | k) = (1 - skew)/C + skew [c in F_k]/F for consecutive favourites; the mean of all mixes is uniform."""
    classes, favourites, skew, size = 5, 2, 0.6, 2000
    data = dealt(60, 1, features=5, classes=classes, favourites=favourites, skew=skew, size=size, std_log_size=0.0)
    y, owner = labels_of(data)
    share = np.zeros((60, classes))
    np.add.at(share, (owner, y), 1 / size)
    firsts = []
    for mix in share:
        expected = [np.full(classes, (1 - skew) / classes) for _ in range(classes)]
        for first, one in enumerate(expected):
            one[(first + np.arange(favourites)) % classes] += skew / favourites
        distance = [np.abs(mix - one).sum() / 2 for one in expected]
        assert min(distance) < 0.05
        firsts.append(int(np.argmin(distance)))
        assert np.abs(mix - 1 / classes).sum() / 2 == pytest.approx(skew * (1 - favourites / classes), abs=0.05)
    assert len(set(firsts)) == classes


def test_the_test_set_is_even_and_reaches_the_ceiling():
    data = dealt(10, 3, skew=1.0, shift=0.8, separation=3.5, test_examples=20_000)
    best = ceiling(3.5 / np.sqrt(1 + 0.8**2))
    guess = np.argmax(data.test_x @ data.x.parameters.directions.T, axis=1)
    assert np.mean(guess == data.test_y) == pytest.approx(best, abs=0.008)
    np.testing.assert_allclose(np.bincount(data.test_y) / 20_000, 0.1, atol=0.01)


def test_the_ceiling_by_simulation():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((200_000, 7))
    z[:, 0] += 1.7
    assert ceiling(1.7, 7) == pytest.approx(np.mean(np.argmax(z, axis=1) == 0), abs=0.004)
    assert ceiling(9.0) == pytest.approx(1, abs=1e-6)


def mixed(x):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def folded(stream, n):
    first = mixed((stream[0] + n) % 2**32)
    return first, mixed(stream[1] ^ ((first + n * hashing.GOLDEN) % 2**32))


def words(stream, count):
    return mixed((stream[0] + np.arange(count) * (stream[1] | 1)) % 2**32)


def normal(word):
    s = sum((word >> shift) & 255 for shift in (0, 8, 16, 24)) - 510.0
    return s * (0.0064210406128 + 5.7739542833e-9 * s**2)


def by_hand(p, client, position):
    """The formulas of ``population`` for one example, in Python integers and float64."""
    classes, features = p.directions.shape
    person = folded(tuple(int(word) for word in p.seed), client)
    mine = folded(person, position + 1)
    habits, draw = words(folded(person, 0), classes + 1), words(folded(mine, 0), 3)
    own = (habits[0] + draw[1] % int(p.favourites)) % classes
    y = own if (draw[0] >> 8) / 2**24 < p.skew else draw[2] % classes
    noise = normal(words(folded(mine, 1), features))
    shift = float(p.shift) * normal(habits[1:]) @ p.directions.astype(float)
    return float(p.separation) * p.directions[y] + shift + noise, y


def test_values_are_those_of_the_formulas_however_they_are_asked_for():
    data = dealt(20, 5, favourites=3)
    rows = np.concatenate([client_rows(data, i)[:3] for i in range(20)])
    expected = [by_hand(data.x.parameters, i, j) for i in range(20) for j in range(3)]
    x, y = np.stack([one[0] for one in expected]), np.array([one[1] for one in expected])
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int32)
    m = data.x.parameters.directions.astype(np.float64)
    np.testing.assert_allclose(m @ m.T, np.eye(10), atol=1e-6)
    np.testing.assert_array_equal(data.y[rows], y)
    np.testing.assert_allclose(data.x[rows], x, rtol=1e-5, atol=1e-5)
    mapped = jax.jit(jax.vmap(lambda r: (data.x[data.order[r]], data.y[r])))(jnp.asarray(rows).reshape(6, 10))
    np.testing.assert_allclose(mapped[0].reshape(60, 64), x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(mapped[1].reshape(60), y)


def test_the_seed_makes_the_world():
    same, again, other = (
        np.asarray(federate(population(features=10), num_clients=3, seed=seed).x[:5]) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(same, again)
    assert np.abs(same - other).max() > 0.1


def test_sizes_are_lognormal_or_equal():
    size = dealt(20_000, 0, features=10, size=50, std_log_size=0.7).size
    assert np.median(size) == pytest.approx(50, rel=0.03)
    assert np.log(size).std() == pytest.approx(0.7, abs=0.02)
    assert set(dealt(7, 0, features=10, size=9, std_log_size=0.0).size) == {9}


def test_a_million_clients_cost_eight_bytes_each():
    data = federate(load("population:features=64"), num_clients=1_000_000, seed=0)
    arrays = [leaf for leaf in jax.tree.leaves(data._replace(test_x=0, test_y=0)) if hasattr(leaf, "nbytes")]
    assert sum(leaf.nbytes for leaf in arrays) < 8_000_000 + 10_000
    last = client_rows(data, 999_999)
    assert data.x[last].shape == (data.size[-1], 64) and len(data.x) < 2**31


# --- virtual arrays: every kind of index gives the values of an ordinary array -----------------------


def numbered(parameters, client, position):
    """x is made from the client and the position; y is a class."""
    x = jnp.stack([parameters["base"] + client, position]).astype(jnp.uint8)
    return x, (client + position) % 3


def numbered_data(sizes=(2, 2), base=0, function=numbered, **fields):
    parameters = {"base": np.int32(base)}
    x, y = generate(numbered, np.arange(4), np.zeros(4), parameters)
    defaults = {"test_x": x, "test_y": y, "parameters": parameters, "num_classes": 3}
    return generated(function, sizes=np.asarray(sizes), **(defaults | fields))


@settings(max_examples=4)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), base=st.integers(0, 200))
def test_every_client_reads_its_own_examples(sizes, base):
    data = numbered_data(sizes, base)
    assert (data.x.dtype, data.x.shape[1:], data.y.shape) == (np.uint8, (2,), (len(data.x),))
    x, y = np.asarray(data.x[:]), np.asarray(data.y[:])
    for client, size in enumerate(sizes):
        rows = client_rows(data, client)
        np.testing.assert_array_equal(x[rows], np.c_[np.full(size, base + client), np.arange(size)])
        np.testing.assert_array_equal(y[rows], (client + np.arange(size)) % 3)


def test_any_index_gives_the_same_values():
    data = numbered_data([3, 5, 2])
    everything = np.asarray(data.x[:])
    assert everything.shape == (15, 2)
    index = jnp.array([[7, 0], [11, 6]])
    np.testing.assert_array_equal(data.x[index], everything[index])
    np.testing.assert_array_equal(data.x[6], everything[6])
    np.testing.assert_array_equal(data.x[2:9:3], everything[2:9:3])
    np.testing.assert_array_equal(jax.jit(lambda x, i: x[i])(data.x, index), everything[index])
    np.testing.assert_array_equal(jax.vmap(lambda i: data.x[data.order[i]])(index), everything[index])


def test_identity_is_a_range():
    order = Identity((5,))
    assert (len(order), order.dtype) == (5, np.int32)
    np.testing.assert_array_equal(order[1:4], np.arange(1, 4, dtype=np.int32))
    assert order[jnp.int32(3)] == 3
    assert jax.tree.leaves(order) == [] and jax.jit(lambda o: o)(order) == order


@pytest.mark.parametrize("array", [Identity((5,)), Generated((), numbered, 0, 1, (5, 2), np.dtype(np.uint8))])
def test_nothing_loops_over_a_virtual_array_for_ever(array):
    for consume in (list, np.asarray, iter):
        with pytest.raises(TypeError):
            consume(array)


def test_other_parameters_are_the_same_program():
    traces = []

    @jax.jit
    def read(x, index):
        traces.append(1)
        return x[index]

    index = jnp.arange(3)
    first, second = (np.asarray(read(numbered_data([4, 4], base).x, index)) for base in (0, 5))
    assert len(traces) == 1
    np.testing.assert_array_equal(second[:, 0], first[:, 0] + 5)


def dealt_anew(size=4, **change):
    people = population(features=10, size=size)
    assert isinstance(people, Federation)
    return federate(people, **({"num_clients": 10} | change))


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (population, {"classes": 1}, "^classes = "),
        (population, {"features": 9}, "^features = "),
        (population, {"separation": -1.0}, "^separation = "),
        (population, {"shift": float("nan")}, "^shift = "),
        (population, {"skew": 1.5}, "^skew = "),
        (population, {"favourites": 11}, "^favourites = "),
        (population, {"size": 0}, "^size = "),
        (population, {"std_log_size": -0.1}, "^std_log_size = "),
        (population, {"test_examples": 0}, "^test_examples = "),
        (dealt_anew, {"num_clients": None}, "^num_clients = None"),
        (dealt_anew, {"num_clients": 0}, "^num_clients = 0"),
        (dealt_anew, {"num_clients": 2**31 - 100}, "^num_clients = 2147483548"),
        (dealt_anew, {"num_clients": 1000, "size": 2**24}, "^sizes = "),
        (dealt_anew, {"partitioner": "dirichlet"}, "^partitioner = 'dirichlet': must be natural"),
        (dealt_anew, {"test_fraction": 0.1}, "^test_fraction = 0.1"),
        (numbered_data, {"sizes": [3, 0]}, "^sizes = "),
        (numbered_data, {"sizes": [1.5]}, "^sizes = "),
        (numbered_data, {"sizes": np.zeros(0, np.int32)}, "^sizes = "),
        (numbered_data, {"sizes": [2**30, 1, 1]}, "^sizes = '3 clients, the largest of 1073741824 examples': must be"),
        (numbered_data, {"test_y": np.zeros(3, np.int32)}, "^test_y = "),
        (numbered_data, {"test_x": np.zeros((0, 2)), "test_y": np.zeros(0)}, "^test_x = 'no rows'"),
        (numbered_data, {"test_x": np.zeros((4, 3), np.uint8)}, "^test_x = "),
        (numbered_data, {"function": lambda p, c, i: c}, "^function = "),
    ],
)
def test_what_cannot_be_generated_is_refused(function, options, message):
    with pytest.raises(ValueError, match=message):
        function(**options)
