"""Each server rule against its plain NumPy loop, and the identities among rules, in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.server import SERVERS, asgd, fedasync, fedavg, fedbuff, rule, scale_by
from tests.server import textbook
from tests.server.made_up import D, flat, random_uploads, receive_all, stacked, start_params, unflat

# name in SERVERS, its options, the textbook's version
CASES = [
    ("fedavg", {}, textbook.averaging(textbook.add(), by_examples=True)),
    ("fedavg", {"weighting": "uniform", "server_lr": 0.7}, textbook.averaging(textbook.add(0.7))),
    ("fedavgm", {}, textbook.averaging(*textbook.momentum(), by_examples=True)),
    (
        "fedavgm",
        {"weighting": "uniform", "server_lr": 0.3, "momentum": 0.5},
        textbook.averaging(*textbook.momentum(0.3, 0.5)),
    ),
    ("fedadagrad", {}, textbook.averaging(*textbook.adagrad(), by_examples=True)),
    (
        "fedadagrad",
        {"weighting": "uniform", "server_lr": 0.2, "eps": 0.5, "initial": 0.1},
        textbook.averaging(*textbook.adagrad(0.2, 0.5, 0.1)),
    ),
    ("fedadam", {}, textbook.averaging(*textbook.adam(), by_examples=True)),
    (
        "fedadam",
        {"weighting": "uniform", "server_lr": 0.2, "b1": 0.5, "b2": 0.7, "eps": 0.1},
        textbook.averaging(*textbook.adam(lr=0.2, b1=0.5, b2=0.7, eps=0.1)),
    ),
    ("fedyogi", {}, textbook.averaging(*textbook.yogi(), by_examples=True)),
    (
        "fedyogi",
        {"weighting": "uniform", "server_lr": 0.2, "b1": 0.5, "b2": 0.7, "eps": 0.1},
        textbook.averaging(*textbook.yogi(lr=0.2, b1=0.5, b2=0.7, eps=0.1)),
    ),
    ("fedasync", {}, textbook.mixing()),
    ("fedasync", {"staleness": "constant", "mixing": 0.9}, textbook.mixing(0.9, textbook.constant)),
    ("fedasync", {"staleness": "hinge"}, textbook.mixing(0.6, textbook.hinge)),
    (
        "fedasync",
        {"staleness": "hinge", "slope": 0.3, "threshold": 2},
        textbook.mixing(0.6, lambda tau: textbook.hinge(tau, 0.3, 2)),
    ),
    ("fedasync", {"exponent": 2}, textbook.mixing(0.6, lambda tau: textbook.polynomial(tau, 2))),
    ("asgd", {}, textbook.averaging(textbook.add())),
    ("asgd", {"server_lr": 0.1}, textbook.averaging(textbook.add(0.1))),
    ("fedbuff", {}, textbook.averaging(textbook.add(), s=textbook.polynomial)),
    (
        "fedbuff",
        {"staleness": "hinge", "server_lr": 0.5},
        textbook.averaging(textbook.add(0.5), s=textbook.hinge),
    ),
]
IDS = [f"{name}-{'-'.join(map(str, options.values())) or 'default'}" for name, options, _ in CASES]


def test_every_rule_has_a_textbook_version():
    assert {name for name, _, _ in CASES} == set(SERVERS)


@pytest.mark.parametrize(("name", "options", "book"), CASES, ids=IDS)
def test_rule_equals_its_numpy_loop(request, name, options, book):
    uploads = random_uploads(IDS.index(request.node.callspec.id))
    with jax.enable_x64(True):
        params = start_params()
        _, path, weights = receive_all(SERVERS[name](**options), params, stacked(uploads))
        expected, effective = textbook.play(flat(params), uploads, book)
        np.testing.assert_allclose(flat(path), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(weights, effective, rtol=1e-12)
    assert len(np.unique(expected[:, 0])) > 10


@pytest.mark.parametrize("name", SERVERS)
def test_a_run_whose_every_arrival_closes_may_say_so_once(name):
    uploads = [u._replace(closes=True) for u in random_uploads(7, 20)]
    with jax.enable_x64(True):
        arrivals, params, server = stacked(uploads), start_params(), SERVERS[name]()
        state, path, weights = receive_all(server, params, arrivals)
        always, always_path, always_weights = receive_all(server, params, arrivals, always_closes=True)
        np.testing.assert_allclose(flat(always_path), flat(path), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(always_weights, weights)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), always, state)


@pytest.mark.parametrize("always_closes", [False, True])
@pytest.mark.parametrize("name", SERVERS)
def test_a_step_with_none_accepted_changes_nothing(name, always_closes):
    good = [u._replace(closes=True) for u in random_uploads(3, 4, rejected=0.0)]
    bad = [u._replace(closes=True) for u in random_uploads(4, 5, rejected=1.0)]
    with jax.enable_x64(True):
        params, server = start_params(), SERVERS[name]()
        before, path, _ = receive_all(server, params, stacked(good), always_closes=always_closes)
        after, _, weights = receive_all(server, params, stacked(good + bad), always_closes=always_closes)
        jax.tree.map(np.testing.assert_array_equal, after, before)
        np.testing.assert_array_equal(weights[len(good) :], 0.0)
        assert np.abs(flat(path)[-1] - flat(path)[0]).min() > 0


@pytest.mark.parametrize("name", SERVERS)
def test_a_rejected_arrival_adds_nothing_but_still_closes(name):
    first, second, third = random_uploads(5, 3, rejected=0.0, closing=0.0)
    lost = random_uploads(6, 1, rejected=1.0)[0]
    with jax.enable_x64(True):
        params, server = start_params(), SERVERS[name]()
        with_lost = [first, lost._replace(closes=False), second, lost._replace(closes=True), third._replace(closes=True)]
        without = [first, second._replace(closes=True), third._replace(closes=True)]
        _, path, _ = receive_all(server, params, stacked(with_lost))
        _, plain, _ = receive_all(server, params, stacked(without))
        np.testing.assert_allclose(flat(path)[[3, 4]], flat(plain)[[1, 2]], rtol=1e-12)
        np.testing.assert_array_equal(flat(path)[2], flat(params))


OPTAX = {
    "fedavgm": optax.sgd(1.0, momentum=0.9),
    "fedadagrad": optax.adagrad(0.03, initial_accumulator_value=1e-6, eps=1e-3),
    "fedadam": optax.adam(0.01, b1=0.9, b2=0.99, eps=1e-3),
    "fedyogi": optax.yogi(0.01, b1=0.9, b2=0.99, eps=1e-3),
}


@pytest.mark.parametrize("name", OPTAX)
def test_server_optimisers_are_optax_on_the_averaged_delta(name):
    uploads = random_uploads(11, 24, rejected=0.0, closing=0.0)
    uploads = [u._replace(closes=i % 4 == 3) for i, u in enumerate(uploads)]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = start_params()
        _, path, _ = receive_all(SERVERS[name](), params, stacked(uploads))
        state = OPTAX[name].init(params)
        for i in range(0, len(uploads), 4):
            mean = np.average(
                [u.delta for u in uploads[i : i + 4]], axis=0, weights=[u.examples for u in uploads[i : i + 4]]
            )
            updates, state = OPTAX[name].update(unflat(-mean), state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(flat(path)[i + 3], flat(params), rtol=1e-9, atol=1e-12)


def test_any_optax_optimiser_serves_as_a_rule():
    """Lion's steps have the size of the learning rate, whatever the deltas."""
    with jax.enable_x64(True):
        params = start_params()
        server = rule(optimizer=optax.lion(0.25, weight_decay=0.0))
        _, path, _ = receive_all(server, params, stacked(random_uploads(1, 6, rejected=0.0, closing=1.0)))
        np.testing.assert_allclose(np.abs(np.diff(flat(path), axis=0)), 0.25, rtol=1e-12)


# --- identities --------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), mixing=st.floats(0.01, 0.99))
def test_fedasync_from_one_dispatch_is_asgd_with_geometric_weights(seed, mixing):
    """``x_k = x_0 + sum_i a (1 - a)^(k - i) Delta_i`` when all k clients started from x_0."""
    with jax.enable_x64(True):
        k, params = 8, start_params(seed)
        uploads = [u._replace(start=flat(params), closes=True) for u in random_uploads(seed, k, rejected=0.0)]
        end = _ending("fedasync-constant", params, uploads, mixing)
        geometric = mixing * (1 - mixing) ** np.arange(k - 1, -1, -1)
        weighted = [u._replace(delta=g * u.delta) for g, u in zip(geometric, uploads)]
        np.testing.assert_allclose(end, _ending("asgd", params, weighted, 1.0), rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), a=st.floats(0.01, 1.0))
def test_fedasync_stays_between_the_server_and_the_clients(seed, a):
    with jax.enable_x64(True):
        params = start_params(seed)
        uploads = [u._replace(closes=True) for u in random_uploads(seed, 8, rejected=0.0)]
        models = np.array([flat(params), *(u.start + u.delta for u in uploads)])
        end = _ending("fedasync-constant", params, uploads, a)
        assert np.all(end >= models.min(axis=0) - 1e-12) and np.all(end <= models.max(axis=0) + 1e-12)


FACTORIES = {
    "fedasync-constant": lambda a: fedasync(mixing=a, staleness="constant"),
    "asgd": lambda a: asgd(server_lr=a),
    "fedbuff-constant": lambda a: fedbuff(server_lr=a, staleness="constant"),
    "fedbuff": lambda a: fedbuff(server_lr=a),
    "fedavg": lambda a: fedavg(server_lr=a),
    "fedavg-uniform": lambda a: fedavg(server_lr=a, weighting="uniform"),
    "sum/17": lambda a: rule(optimizer=optax.sgd(a), divisor=17),
}


def _endings():
    """One compiled program a factory and length of run; its first hyperparameter is an argument."""

    def compiled(factory):
        return jax.jit(lambda params, arrivals, a: receive_all(factory(a), params, arrivals)[1])

    return {name: compiled(factory) for name, factory in FACTORIES.items()}


ENDINGS = _endings()


def _ending(name, params, uploads, a):
    return flat(ENDINGS[name](params, stacked(uploads), jnp.asarray(a, float)))[-1]


def test_fedasync_with_full_mixing_takes_over_the_clients_model():
    with jax.enable_x64(True):
        uploads = [u._replace(closes=True) for u in random_uploads(2, 10, rejected=0.0)]
        _, path, _ = receive_all(fedasync(mixing=1.0, staleness="constant"), start_params(), stacked(uploads))
        np.testing.assert_allclose(flat(path), [u.start + u.delta for u in uploads], rtol=1e-12, atol=1e-14)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), lr=st.floats(0.01, 2.0))
def test_fedbuff_over_all_clients_without_staleness_is_uniform_fedavg(seed, lr):
    with jax.enable_x64(True):
        params = start_params(seed)
        uploads = random_uploads(seed, 8, rejected=0.0)
        uploads = [u._replace(closes=i % 4 == 3) for i, u in enumerate(uploads)]
        expected = _ending("fedavg-uniform", params, uploads, lr)
        np.testing.assert_allclose(_ending("fedbuff-constant", params, uploads, lr), expected, rtol=1e-12)
        fresh = [u._replace(staleness=0) for u in uploads]
        np.testing.assert_allclose(_ending("fedbuff", params, fresh, lr), expected, rtol=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), lr=st.floats(0.01, 2.0))
def test_asgd_is_fedbuff_with_a_buffer_of_one_and_no_staleness_weight(seed, lr):
    with jax.enable_x64(True):
        params = start_params(seed)
        uploads = [u._replace(closes=True) for u in random_uploads(seed, 8)]
        np.testing.assert_allclose(
            _ending("asgd", params, uploads, lr), _ending("fedbuff-constant", params, uploads, lr), rtol=1e-12
        )


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_a_round_knows_no_order_and_no_unit_of_weight(seed, data):
    with jax.enable_x64(True):
        params = start_params(seed)
        uploads = [u._replace(closes=False) for u in random_uploads(seed, 8)]
        shuffled = [u._replace(examples=u.examples * 2.5) for u in data.draw(st.permutations(uploads))]
        for name in ("fedavg", "fedbuff"):
            ends = [_ending(name, params, [*us[:-1], us[-1]._replace(closes=True)], 1.0) for us in (uploads, shuffled)]
            np.testing.assert_allclose(ends[0], ends[1], rtol=1e-9, atol=1e-12)


def test_a_divisor_replaces_the_sum_of_weights():
    with jax.enable_x64(True):
        params = start_params()
        uploads = [u._replace(closes=i == 7) for i, u in enumerate(random_uploads(8, 8))]
        expected = flat(params) + sum(u.delta for u in uploads) / 17
        np.testing.assert_allclose(_ending("sum/17", params, uploads, 1.0), expected, rtol=1e-12)
        assert any(u.examples == 0 for u in uploads)


def test_recorded_weights_times_deltas_rebuild_the_run():
    """With every arrival closing, ``x_E = x_0 + sum_e weight_e Delta_e`` for additive rules."""
    with jax.enable_x64(True):
        params = start_params()
        uploads = [u._replace(closes=True) for u in random_uploads(9, 30)]
        server = rule(scale_by(lambda arrival: 1.0 / (arrival.client.astype(float) + 2.0)), optimizer=optax.sgd(1.0))
        _, path, weights = receive_all(server, params, stacked(uploads))
        deltas = np.array([u.delta for u in uploads])
        assert deltas.shape == (30, D)
        np.testing.assert_allclose(flat(path)[-1], flat(params) + np.asarray(weights) @ deltas, rtol=1e-9, atol=1e-12)
