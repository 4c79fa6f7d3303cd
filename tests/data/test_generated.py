"""Generated data: the population's distribution, virtual arrays, and problems whose optimum and constants are known."""

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
    quadratic_problem,
    synthetic,
)
from fedjax_async.models import linear
from tests.refusals import last_options, refusals


@functools.lru_cache(maxsize=8)
def dealt(clients=200, seed=0, **options):
    return federate(population(**options), num_clients=clients, seed=seed)


def test_labels_follow_the_clients_mix():
    """P(y = c | k) = (1 - skew)/C + skew [c in F_k]/F for consecutive favourites; the mean of all mixes is uniform."""
    classes, favourites, skew, size = 5, 2, 0.6, 2000
    data = dealt(60, 1, features=5, classes=classes, favourites=favourites, skew=skew, size=size, std_log_size=0.0)
    rows = np.stack([client_rows(data, i) for i in range(60)])
    y = np.asarray(jax.jit(lambda y, rows: y[rows])(data.y, rows))
    share = np.stack([np.bincount(own, minlength=classes) for own in y]) / size
    # the mix of a client whose favourites begin at each class
    expected = np.stack([np.isin(np.arange(classes), (first + np.arange(favourites)) % classes) for first in range(5)])
    distance = np.abs(share[:, None] - (1 - skew) / classes - skew / favourites * expected).sum(axis=2) / 2
    assert distance.min(axis=1).max() < 0.05 and set(distance.argmin(axis=1)) == set(range(classes))
    away = np.abs(share - 1 / classes).sum(axis=1) / 2
    np.testing.assert_allclose(away, skew * (1 - favourites / classes), rtol=0, atol=0.05)


def test_the_test_set_is_even_and_reaches_the_ceiling():
    data = dealt(10, 3, skew=1.0, shift=0.8, separation=3.5, test_examples=20_000)
    best = ceiling(3.5 / np.sqrt(1 + 0.8**2))
    guess = np.argmax(data.test_x @ data.x.parameters.directions.T, axis=1)
    assert np.mean(guess == data.test_y) == pytest.approx(best, abs=0.008)
    np.testing.assert_allclose(np.bincount(data.test_y) / 20_000, 0.1, atol=0.01)
    z = np.random.default_rng(0).standard_normal((200_000, 7)) + 1.7 * np.eye(7)[0]
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


def test_the_seed_makes_the_world_and_sizes_are_lognormal_or_equal():
    same, again, other = (
        np.asarray(federate(population(features=10), num_clients=3, seed=seed).x[:5]) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(same, again)
    assert np.abs(same - other).max() > 0.1
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


def test_identity_is_a_range_and_nothing_loops_over_a_virtual_array_for_ever():
    order = Identity((5,))
    assert (len(order), order.dtype) == (5, np.int32)
    np.testing.assert_array_equal(order[1:4], np.arange(1, 4, dtype=np.int32))
    assert order[jnp.int32(3)] == 3
    assert jax.tree.leaves(order) == [] and jax.jit(lambda o: o)(order) == order
    for array in (order, Generated((), numbered, 0, 1, (5, 2), np.dtype(np.uint8))):
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


WRONG = """
population:classes=1 population:features=9 population:separation=-1.0 population:shift=nan population:skew=1.5
population:favourites=11 population:size=0 population:std_log_size=-0.1 population:test_examples=0
"""
test_what_cannot_be_generated_is_refused = refusals(
    *((load, {"spec": spec}, says) for spec, says in last_options(WRONG)),
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
    by=lambda function, options: function(**options),
)


@settings(max_examples=30)
@given(
    clients=st.integers(2, 6),
    dim=st.integers(1, 5),
    zeta=st.floats(0, 50),
    noise=st.sampled_from([0.0, 0.3]),
    same=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_stated_optimum_and_heterogeneity_are_exact(clients, dim, zeta, noise, same, seed):
    p = quadratic_problem(
        clients=clients, dim=dim, examples=8, heterogeneity=zeta, noise=noise, same_curvature=same, seed=seed
    )
    gradients = np.stack([p.gradient(i, p.optimum) for i in range(clients)])
    np.testing.assert_allclose(gradients.mean(axis=0), 0, atol=1e-9 * max(zeta, 1))
    assert np.mean(np.sum(gradients**2, axis=1)) == pytest.approx(zeta**2, rel=1e-6, abs=1e-12)
    for i in range(clients):
        np.testing.assert_allclose(np.linalg.eigvalsh(p.curvature[i]), np.geomspace(0.1, 1.0, dim), rtol=1e-9)


@pytest.mark.float64
def test_the_examples_carry_the_quadratics():
    """A client's mean loss is 1/2 (w - b)^T A (w - b) + noise^2 / 2, and its gradient is the gradient of this."""
    p = quadratic_problem(clients=3, dim=4, examples=12, heterogeneity=2.0, noise=0.5, seed=1)
    data = federate(p.dataset, "natural")
    model = linear(input_shape=(4,))
    assert model.init(jax.random.key(0))["w"].tolist() == [0] * 4

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params, x, y):
        return jnp.mean(model.loss(model.apply(params, x), y))

    w = np.random.default_rng(0).standard_normal(4)
    for i in range(3):
        rows = client_rows(data, i)
        loss, gradient = mean_loss({"w": w}, data.x[rows], data.y[rows])
        away = w - p.local_optima[i]
        assert float(loss) == pytest.approx(0.5 * away @ p.curvature[i] @ away + 0.125, rel=1e-12)
        np.testing.assert_allclose(gradient["w"], p.gradient(i, w), rtol=1e-10)
    best, slope = mean_loss({"w": p.optimum}, data.x, data.y)
    assert float(best) == pytest.approx(p.minimum, rel=1e-12)
    np.testing.assert_allclose(slope["w"], 0, atol=1e-12)
    # float32 parameters stay such under x64
    single = jax.eval_shape(mean_loss, {"w": jnp.ones(4, jnp.float32)}, data.x, data.y)
    assert {leaf.dtype for leaf in jax.tree.leaves(single)} == {jnp.dtype("float32")}


def test_synthetic_shapes_owners_sizes_and_covariance():
    data = synthetic(clients=20, seed=1)
    sizes = np.bincount(data.groups)
    assert len(sizes) == 20 and data.x.shape == (sizes.sum(), 60)
    assert (data.x.dtype, data.y.dtype) == (np.float32, np.int32)
    assert abs(len(data.test_x) - sizes.sum() / 9) < 20
    np.testing.assert_array_equal(data.x, synthetic(clients=20, seed=1).x)
    sizes = np.bincount(synthetic(clients=300, features=2, mean_log_size=5.0, std_log_size=0.8).groups)
    logs = np.log(sizes - 50 + 0.5)
    assert sizes.min() >= 50
    assert logs.mean() == pytest.approx(5.0, abs=0.15) and logs.std() == pytest.approx(0.8, abs=0.1)
    data = synthetic(clients=1, least_size=20_000, std_log_size=0.0, features=10)
    np.testing.assert_allclose(data.x.var(axis=0), np.arange(1, 11) ** -1.2, rtol=0.06)


def test_synthetic_beta_moves_the_inputs_apart():
    def spread(beta):
        data = synthetic(clients=200, beta=beta, std_log_size=0.0, features=20)
        means = np.stack([data.x[data.groups == k].mean() for k in range(200)])
        return means.var()

    # a client's mean input is B_k + the mean of 20 unit normals: variance beta + 1/20, and a little sampling noise
    assert spread(0.0) == pytest.approx(0.05, rel=0.5)
    assert spread(4.0) == pytest.approx(4.05, rel=0.3)


def test_synthetic_clients_are_linear_problems_and_share_a_model_only_when_asked():
    """With one model for all clients, one linear map explains the labels of all clients."""

    def signs(data):
        return np.c_[data.x, np.ones(len(data.x))].astype(np.float64), 2.0 * data.y - 1

    def fitted_by_first(same_model):
        data = synthetic(clients=2, classes=2, features=3, least_size=3000, beta=0.0, same_model=same_model, seed=6)
        (x, sign), first = signs(data), data.groups == 0
        w = np.linalg.lstsq(x[first], sign[first], rcond=None)[0]
        return np.mean(np.sign(x[~first] @ w) == sign[~first])

    assert fitted_by_first(True) > 0.8 and fitted_by_first(False) < 0.7
    # labels are the argmax of linear scores, so a perceptron separates every pair of a client's classes
    x, sign = signs(synthetic(clients=1, classes=2, features=5, seed=3))
    w = np.zeros(6)
    for _ in range(20_000):
        wrong = np.flatnonzero(sign * (x @ w) <= 0)
        if len(wrong) == 0:
            break
        w += sign[wrong] @ x[wrong] / len(wrong)
    assert np.all(sign * (x @ w) > 0)
    # u_k adds u_k (sum_j x_j + 1) to the score of every class: no label depends on alpha, as published
    plain, apart = (synthetic(alpha=alpha, clients=3, seed=2).y for alpha in (0.0, 4.0))
    np.testing.assert_array_equal(plain, apart)


IMPOSSIBLE = """
quadratic:clients=0 quadratic:clients=1 quadratic:examples=9 quadratic:noise=1.0,examples=10 quadratic:smallest=0.0
quadratic:largest=0.05 quadratic:heterogeneity=-1.0 quadratic:noise=inf synthetic:alpha=-1 synthetic:beta=-0.5
synthetic:clients=0 synthetic:classes=1
"""
test_impossible_problems_are_refused_by_the_name_of_the_last_option = refusals(*last_options(IMPOSSIBLE), by=load)
