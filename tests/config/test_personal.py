"""Personal layers, Ditto and fine-tuning as settings, against NumPy. ``test_worlds.py`` draws them, too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings, data, models, named, simulate
from fedjax_async.cli.runs import clients_text
from fedjax_async.config import prepare
from fedjax_async.engine.components import bound
from fedjax_async.models.personal import personal_paths
from fedjax_async.results import final_value
from fedjax_async.types import Model

SIZES, TESTS, FEATURES = (5, 9, 7), 4, 3
STEPS, RATE, ROUNDS = 3, 0.1, 2
RNG = np.random.default_rng(0)
PARTS = [(RNG.normal(size=(n + TESTS, FEATURES)), RNG.normal(size=n + TESTS) + i) for i, n in enumerate(SIZES)]
START = {"w": np.array([0.5, -0.2, 0.1]), "b": np.array(0.3)}


@functools.cache
def affine():
    """A linear model, x w + b, with squared loss: two leaves."""

    def init(key):
        return {name: jnp.asarray(value, jnp.float32) for name, value in START.items()}

    def apply(params, x, key=None):
        return jnp.matmul(x, params["w"], precision=jax.lax.Precision.HIGHEST) + params["b"].reshape(1)

    return Model(init, apply, lambda outputs, y: 0.5 * jnp.square(outputs - y))


def settings(**changes):
    parts = [tuple(rows.astype(np.float32) for rows in part) for part in PARTS]
    train, test = ([tuple(rows[cut] for rows in part) for part in parts] for cut in (slice(TESTS, None), slice(TESTS)))
    own = data.from_arrays(clients=train, client_tests=test)
    method = {"method": f"fedavg@cohort:size={len(SIZES)}", "server_steps": ROUNDS, "per_client": True}
    return {"data": own, "model": affine(), "steps": STEPS, "lr": RATE, **method, **changes}


# --- the same in NumPy --------------------------------------------------------------------------------


def gradient(w, b, client):
    x, y = (rows[TESTS:] for rows in PARTS[client])
    error = x @ w + b - y
    return x.T @ error / len(y), error.mean()


def descended(w, b, client, steps=STEPS, pull=0.0, towards=(0.0, 0.0)):
    for _ in range(steps):
        dw, db = gradient(w, b, client)
        w, b = w - RATE * (dw + pull * (w - towards[0])), b - RATE * (db + pull * (b - towards[1]))
    return w, b


def loss(w, b, client):
    x, y = (rows[:TESTS] for rows in PARTS[client])
    return 0.5 * np.mean((x @ w + b - y) ** 2)


def by_hand(personal, weight=None):
    """Returns the global w and b, each client's b and each client's Ditto model, after FedAvg's rounds."""
    w, b, own, models_of = START["w"], START["b"], [START["b"]] * 3, [(START["w"], START["b"])] * 3
    share = np.array(SIZES) / sum(SIZES)
    for _ in range(ROUNDS):
        ends = [descended(w, own[i] if personal else b, i) for i in range(3)]
        if weight is not None:
            models_of = [descended(*models_of[i], i, pull=weight, towards=(w, b)) for i in range(3)]
        w = sum(s * end[0] for s, end in zip(share, ends))
        own = [end[1] for end in ends]
        b = b if personal else sum(s * end[1] for s, end in zip(share, ends))
    return w, b, own, models_of


def test_a_personal_layer_and_fine_tuning_are_those_of_numpy():
    run = simulate(**settings(personal="b", fine_tune=2))
    w, b, own, _ = by_hand(personal=True)
    np.testing.assert_allclose(run.params["w"], w, rtol=1e-5)
    assert run.params["b"] == np.float32(b), "nobody uploads it"
    last = {name: values[-1] for name, values in run.per_client.items()}
    np.testing.assert_allclose(last["own_loss"], [loss(w, own[i], i) for i in range(3)], rtol=1e-5)
    tuned = [loss(*descended(w, own[i], i, steps=2), i) for i in range(3)]
    np.testing.assert_allclose(last["tuned_loss"], tuned, rtol=1e-5)
    np.testing.assert_allclose(last["loss"], [loss(w, b, i) for i in range(3)], rtol=1e-5)
    found = run.evaluations["client_own_loss"][-1], run.evaluations["client_own_loss_worst"][-1]
    np.testing.assert_allclose(found, (last["own_loss"].mean(), last["own_loss"].max()), rtol=1e-6)
    lines = [line.partition(", ")[0] for line in clients_text(run)]
    assert lines == ["global model", "own models", "fine-tuned models"]
    worst = final_value(run, "client_own_loss_worst")
    assert clients_text(run)[1].endswith(f"worst tenth {worst:.4g}")
    (hint,) = clients_text(run._replace(evaluations={"accuracy": run.evaluations["accuracy"]}, per_client={}))
    assert hint == "the clients' models of --personal are not scored: --per-client --test-fraction 0.2 does it"


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_ditto_is_that_of_numpy_and_leaves_the_global_run_alone(weight):
    run = simulate(**settings(ditto=weight))
    w, b, _, personal = by_hand(personal=False, weight=weight)
    np.testing.assert_allclose([*run.params["w"], run.params["b"]], [*w, b], rtol=1e-5)
    np.testing.assert_allclose(run.per_client["own_loss"][-1], [loss(*personal[i], i) for i in range(3)], rtol=1e-5)
    assert run.counters["gradients"] == 2 * run.counters["local_steps"]


# --- which layers -------------------------------------------------------------------------------------


@functools.cache
def shapes_of(spec):
    return jax.eval_shape(models.make(spec, num_classes=10, input_shape=(32, 32, 3)).init, jax.random.key(0))


def names_of(spec, names):
    return {"/".join(path) for path in personal_paths(names, shapes_of(spec))}


def test_layers_are_found_by_name():
    assert names_of("mlp", "output") == names_of("mlp", "out*") == {"output/kernel", "output/bias"}
    assert names_of("mlp", "fc1/bias,output/bias") == names_of("mlp", "bias") == {"fc1/bias", "output/bias"}
    norms = names_of("vgg11:width=0.05", "norms")
    assert len(norms) == 8 * 4 and norms == names_of("vgg11:width=0.05", "norm")
    assert "batch_stats/conv1/norm/mean" in norms and "params/conv8/norm/scale" in norms
    without_statistics = {"norm1": {"scale": 0, "bias": 0}, "fc": {"kernel": 0, "bias": 0}}
    assert personal_paths("norms", without_statistics) == {("norm1", "scale"), ("norm1", "bias")}
    assert {name.split("/")[1] for name in names_of("vgg11:width=0.05", "conv1")} == {"conv1"}
    assert len(names_of("vgg11:width=0.05", "conv1")) == 6


SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 12, "eval_updates": 4, "partition": "iid"}
SMALL |= {"test_fraction": 0.2, "per_client": True, "batch_size": 8, "lr": 0.05}


@pytest.mark.parametrize("method", ["feddyn", "fedmrur", "asynccurve"])
def test_plain_training_beside_a_method_does_not_take_its_options(method):
    """Ditto and fine-tuning ended with a TypeError where the method's own training has options that are numbers."""
    experiment = prepare(Settings(**SMALL | {"method": method}, ditto=0.3, fine_tune=1))
    assert any(name.startswith("client.") for name in experiment.components.hyper)
    assert bound(experiment.components.client, experiment.components.hyper).own is not None
    assert bound(experiment.measures.tuner, experiment.components.hyper).step is not None


LOSSY = {**SMALL, "method": "fedbuff@buffer:size=2", "personal": "bias", "ditto": 0.3, "delay": "exponential:mean=100"}
LOSSY |= {"compress": "topk:ratio=0.5", "faults": "drop:probability=0.2"}
LOSSY |= {"updates": None, "server_steps": 6, "eval_updates": None, "eval_steps": 2}


def test_what_stays_is_not_sent():
    plain, kept = (prepare(Settings(**SMALL, **changes)).traffic for changes in ({}, {"personal": "bias"}))
    assert (plain.up - kept.up, plain.down - kept.down) == (40, 40)  # ten numbers of four bytes
    assert prepare(Settings(**SMALL, ditto=1.0)).traffic == plain
    assert prepare(Settings(**LOSSY)).traffic.up < prepare(Settings(**{**LOSSY, "personal": None})).traffic.up


def test_what_cannot_be_used_is_named():
    for change, message in (
        ({"personal": "Dense_1"}, r"^personal = 'Dense_1': must be layers of the model, .*; it has output$"),
        ({"personal": "norms"}, r"^personal = 'norms': must be layers of the model, by name .*; it has output$"),
        ({"personal": "output"}, r"^personal = 'output': must be some of the layers, not all .*\(output\)"),
        ({"ditto": 1.0, "method": "pushcen"}, r"^ditto = 1\.0: must be left out: pushcen runs without a server"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(Settings(**{**SMALL, **change, "per_client": False}))


@pytest.mark.slow
def test_fedbn_trains_a_network_with_statistics():
    given = {**SMALL, "model": named("net", models.make("vgg11:width=0.05", num_classes=10, input_shape=(28, 28, 1)))}
    run = simulate(**given, personal="norms")
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(np.unique(leaf).size, 1), run.params["batch_stats"])
