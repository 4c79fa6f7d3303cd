"""Metrics, training loss, fine-tuning, personal layers, Ditto and augmentation as settings. Worlds draw them, too."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Metric, Settings, data, fingerprint, models, named, register, simulate
from fedjax_async.cli.runs import clients_text
from fedjax_async.config import prepare
from fedjax_async.config.grid import expand
from fedjax_async.config.measures import metrics_of
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.data import augmentation
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.engine.components import bound
from fedjax_async.local import local_training
from fedjax_async.models.personal import personal_paths
from fedjax_async.results import final_value
from fedjax_async.types import Model
from tests.refusals import refusals
from tests.told import refusal

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 3, "partition": "iid"}


def hits(outputs, y):
    return jnp.argmax(outputs, -1) == y


def misses(outputs, y):
    return jnp.argmax(outputs, -1) != y


def test_names_and_functions_are_columns_and_a_run_without_them_is_written_as_before():
    metrics = {"hits": hits, "miss_error": misses, "first": "top:k=1"}
    run = simulate(**SMALL, metrics=metrics, train_examples=50, engine="reference")
    np.testing.assert_allclose(run.evaluations["hits"], run.evaluations["accuracy"], atol=1e-6)
    np.testing.assert_array_equal(run.evaluations["first"], run.evaluations["hits"])
    np.testing.assert_allclose(run.evaluations["miss_error"], 1 - run.evaluations["accuracy"], atol=1e-6)
    assert run.settings["metrics"] == "hits,miss_error,first" and run.settings["train_examples"] == 50
    assert set(run.settings["own"]["metrics"]) == {"hits", "miss_error", "first"}
    new = {"metrics", "train_loss", "train_examples", "fine_tune", "augment"}
    assert not new & set(as_dict(Settings(updates=6))) and not new & set(prepare(Settings(**SMALL)).described)


def test_columns_are_names_with_the_values_of_their_options():
    assert [name for name, _ in metrics_of("top:k=3,macro_f1,top:k=1")] == ["top3", "macro_f1", "top1"]
    assert metrics_of("top:k=3")[0][1] is metrics_of("top:k=3")[0][1]  # so that runs share programs
    points = expand(SMALL | {"metrics": "top:k=3"}, {"metrics": ["macro_f1", "top:k=3"]})
    points += expand(SMALL | {"metrics": "top:k=3"}, {"metrics.k": [5]})
    columns = [name for point in points for name, _ in metrics_of(point.settings.metrics)]
    assert columns == ["macro_f1", "top3", "top5"]


def test_a_registered_metric_has_a_name_and_options(nothing_stays_registered):
    @register("metrics", "within")
    def within(*, share: float = 0.5):
        """Whether the label's probability is at least ``share``."""
        return lambda outputs, y: jnp.max(outputs, -1) >= share

    (name, metric), (other, _) = metrics_of("within:share=-10.0,macro_f1")
    assert (name, other) == ("within-10.0", "macro_f1")
    assert metric.values(jnp.array([[-9.0, -11.0], [-11.0, -12.0]]), None).tolist() == [True, False]
    assert list(as_dict(Settings(**SMALL, metrics="within:share=-10.0,macro_f1"))["own"]["metrics"]) == ["within"]


BARE = models.decoded(models.make("logistic", num_classes=10, input_shape=(28, 28, 1)), fashion_mnist_6k().decode)
NUMBERS = {"dataset": "quadratic", "model": "linear", "partition": None, "metrics": "macro_f1"}
TUNED = {"fine_tune": 2, "test_fraction": 0.2}
POPULATION = {"dataset": "population", "model": "logistic", "updates": 2, "steps": 1, "partition": None}


def of_metrics(metrics, *says):
    return {"metrics": metrics}, *says


test_measures_that_break_their_contract_are_refused = refusals(
    of_metrics({"m": lambda o, y: hits(o, y).mean()}, "metrics['m'] returned float32[]: must return a number per ex"),
    of_metrics({"m": lambda o, y: o}, "metrics['m'] returned float32[3, 10]: must return a number per"),
    of_metrics({"m": lambda o, y: None}, "metrics['m'] returned None: must return a number per example"),
    of_metrics({"m": lambda o, y: o[y.nothing]}, r"metrics\['m'\]: must be a function .* it raised AttributeError"),
    of_metrics({"m": Metric(lambda o, y: o, lambda means: means)}, "metrics['m'].finish returned float32[10]: mu"),
    of_metrics({"m": Metric(lambda o, y: o.sum(0), jnp.sum)}, "metrics['m'].values returned float32[10]: must ret"),
    of_metrics("top:k=11", "k of top = 11: must be at most 10, the number of classes"),
    of_metrics({"accuracy": hits}, "metrics = 'accuracy': must be another name"),
    of_metrics({"own_hits": hits}, "metrics = 'own_hits': must be another name"),
    of_metrics("top:k=3,top:k=3", "metrics = 'top3': must be another name"),
    of_metrics({"a b": hits}, "name of a metric = 'a b': must be letters, digits and '_'"),
    of_metrics({}, "metrics = {}: must be at least one name and metric"),
    of_metrics(["top"], "metrics = ['top']: must be a text, or a dict of names and metrics"),
    ({"fine_tune": 2}, "fine_tune = 2: must be left out without test_fraction or tests of each client"),
    (TUNED | {"client": local_training(BARE, optimizer=optax.sgd(0.1))}, "^fine_tune = 2: .* needs the optimiser"),
    ({"train_examples": 5001}, "train_examples = 5001: must be a whole number from 1 to 5000"),
    (NUMBERS, "targets of macro_f1 = 'float32': must be class labels"),
    (POPULATION | {"clients": 20_000, "train_loss": True}, "must be a number of examples: .* has 1452033, too many"),
    ({"augment": 0.5}, "augment = 0.5: must be a text, or a function"),
    ({"personal": "Dense_1"}, r"^personal = 'Dense_1': must be layers of the model, .*; it has output$"),
    ({"personal": "norms"}, r"^personal = 'norms': must be layers of the model, by name .*; it has output$"),
    ({"personal": "output"}, r"^personal = 'output': must be some of the layers, not all .*\(output\)"),
    (
        {"ditto": 1.0, "method": "pushcen", "partition": None},
        "^ditto = 1.0: must be left out: pushcen runs with",
    ),
    by=lambda change: simulate(**SMALL | change),
)


def test_a_population_with_a_sample_is_evaluated():
    run = simulate(**POPULATION, clients=100, train_examples=64, engine="reference")
    assert np.isfinite(run.evaluations["train_loss"]).all()


def test_runs_that_measure_alike_share_a_program():
    base = SMALL | TUNED | {"metrics": {"hits": hits}, "train_examples": 40}
    settings = [Settings(**base, lr=lr) for lr in (0.1, 0.2)]
    assert len(plan_groups(settings)) == 1
    assert len(plan_groups([settings[0], replace(settings[0], fine_tune=3)])) == 2
    seeds = [Settings(**SMALL, seed=seed, train_examples=40) for seed in (0, 1)]
    assert len(plan_groups(seeds)) == 1, "another sample is no other program"


def test_settings_come_back_from_a_file_with_the_same_functions_only():
    settings = Settings(**SMALL, metrics={"hits": hits, "miss_error": misses}, fine_tune=3, test_fraction=0.2)
    saved = json.loads(json.dumps(as_dict(settings)))
    assert from_dict(saved, {"metrics": {"hits": hits, "miss_error": misses}}) == settings
    assert as_dict(from_dict(saved)) == saved
    for wrong in ({"hits": misses, "miss_error": misses}, {"hits": hits}):
        assert "metrics" in refusal(from_dict, saved, {"metrics": wrong})
    assert "metrics = 'hits,miss_error': is a part of your own; give it again" in refusal(prepare, from_dict(saved))
    plain = Settings(**SMALL, metrics="top:k=3,macro_f1", train_loss=True)
    assert from_dict(as_dict(plain)) == plain and "own" not in as_dict(plain)


RNG = np.random.default_rng(0)
IMAGES = data.Dataset(
    "images",
    *(RNG.integers(0, 256, (60, 6, 6)).astype(np.uint8), np.arange(60, dtype=np.int32) % 3),
    *(RNG.integers(0, 256, (12, 6, 6)).astype(np.uint8), np.arange(12, dtype=np.int32) % 3),
)


def test_evaluations_see_the_images_as_they_are():
    given = {"dataset": IMAGES, "steps": 3, "batch_size": 4, "updates": 16, "eval_updates": 8, "engine": "reference"}
    plain, augmented = (simulate(**SMALL | given, augment=augment) for augment in (None, "crop:padding=2+flip"))
    assert "augment" not in plain.settings and augmented.settings["augment"] == "crop:padding=2+flip"
    weights, bias = (np.asarray(augmented.params["output"][name], np.float64) for name in ("kernel", "bias"))
    assert np.abs(weights - plain.params["output"]["kernel"]).max() > 1e-3
    assert plain.evaluations["loss"][0] == augmented.evaluations["loss"][0]
    logits = (IMAGES.test_x.reshape(12, -1) / 255) @ weights + bias
    loss = np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(12), IMAGES.test_y])
    np.testing.assert_allclose(augmented.evaluations["loss"][-1], loss, rtol=1e-5)


def test_an_own_function_takes_the_place_of_a_name():
    def darker(key, x):
        return x // 2

    given = as_dict(Settings(**SMALL, augment=darker))
    assert given["own"]["augment"] == {given["augment"]: fingerprint(darker)}


@pytest.mark.parametrize(("probability", "mirrored"), [(0, 0), (1, 3)])
def test_whole_numbers_are_probabilities_too(probability, mirrored):
    """They were refused as no function of images."""
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    found = np.asarray(augmentation(f"flip:probability={probability}")(jax.random.key(0), images))
    assert sum(not np.array_equal(one, other) for one, other in zip(found, images)) == mirrored


SIZES, TESTS, FEATURES = (5, 9, 7), 4, 3
STEPS, RATE, ROUNDS = 3, 0.1, 2
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


def run_of(**changes):
    parts = [tuple(rows.astype(np.float32) for rows in part) for part in PARTS]
    train, test = ([tuple(rows[cut] for rows in part) for part in parts] for cut in (slice(TESTS, None), slice(TESTS)))
    own = data.from_arrays(clients=train, client_tests=test)
    method = {"method": f"fedavg@cohort:size={len(SIZES)}", "server_steps": ROUNDS, "per_client": True}
    return simulate(**{"data": own, "model": affine(), "steps": STEPS, "lr": RATE, **method, **changes})


def descended(w, b, client, steps=STEPS, pull=0.0, towards=(0.0, 0.0)):
    x, y = (rows[TESTS:] for rows in PARTS[client])
    for _ in range(steps):
        error = x @ w + b - y
        dw, db = x.T @ error / len(y), error.mean()
        w, b = w - RATE * (dw + pull * (w - towards[0])), b - RATE * (db + pull * (b - towards[1]))
    return w, b


def losses(models_of):
    """The loss of each client's model, w and b, on its test rows."""
    tests = [[rows[:TESTS] for rows in part] for part in PARTS]
    return [0.5 * np.mean((x @ w + b - y) ** 2) for (w, b), (x, y) in zip(models_of, tests)]


def by_hand(personal, weight=0.0):
    """Returns the global w and b, each client's b and each client's Ditto model, after FedAvg's rounds."""
    w, b, own, models_of = START["w"], START["b"], [START["b"]] * 3, [(START["w"], START["b"])] * 3
    share = np.array(SIZES) / sum(SIZES)
    for _ in range(ROUNDS):
        ends = [descended(w, own[i] if personal else b, i) for i in range(3)]
        models_of = [descended(*models_of[i], i, pull=weight, towards=(w, b)) for i in range(3)]
        w = sum(s * end[0] for s, end in zip(share, ends))
        own = [end[1] for end in ends]
        b = b if personal else sum(s * end[1] for s, end in zip(share, ends))
    return w, b, own, models_of


def test_a_personal_layer_and_fine_tuning_are_those_of_numpy():
    run = run_of(personal="b", fine_tune=2)
    w, b, own, _ = by_hand(personal=True)
    np.testing.assert_allclose(run.params["w"], w, rtol=1e-5)
    assert run.params["b"] == np.float32(b), "nobody uploads it"
    last = {name: values[-1] for name, values in run.per_client.items()}
    np.testing.assert_allclose(last["own_loss"], losses([(w, own[i]) for i in range(3)]), rtol=1e-5)
    tuned = losses([descended(w, own[i], i, steps=2) for i in range(3)])
    np.testing.assert_allclose(last["tuned_loss"], tuned, rtol=1e-5)
    np.testing.assert_allclose(last["loss"], losses([(w, b)] * 3), rtol=1e-5)
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
    run = run_of(ditto=weight)
    w, b, _, personal = by_hand(personal=False, weight=weight)
    np.testing.assert_allclose([*run.params["w"], run.params["b"]], [*w, b], rtol=1e-5)
    np.testing.assert_allclose(run.per_client["own_loss"][-1], losses(personal), rtol=1e-5)
    assert run.counters["gradients"] == 2 * run.counters["local_steps"]


def names_of(spec, names):
    init = models.make(spec, num_classes=10, input_shape=(32, 32, 3)).init
    return {"/".join(path) for path in personal_paths(names, jax.eval_shape(init, jax.random.key(0)))}


def test_layers_are_found_by_name():
    assert names_of("mlp", "output") == names_of("mlp", "out*") == {"output/kernel", "output/bias"}
    assert names_of("mlp", "fc1/bias,output/bias") == names_of("mlp", "bias") == {"fc1/bias", "output/bias"}
    norms, first = (names_of("vgg11:width=0.05", names) for names in ("norms", "conv1"))
    assert len(norms) == 8 * 4 and norms == names_of("vgg11:width=0.05", "norm")
    assert "batch_stats/conv1/norm/mean" in norms and "params/conv8/norm/scale" in norms
    without_statistics = {"norm1": {"scale": 0, "bias": 0}, "fc": {"kernel": 0, "bias": 0}}
    assert personal_paths("norms", without_statistics) == {("norm1", "scale"), ("norm1", "bias")}
    assert {name.split("/")[1] for name in first} == {"conv1"} and len(first) == 6
    of_torch = {"params": {"norm": {"weight": 0}, "fc": {"weight": 0}}, "batch_stats": {"norm": {"running_mean": 0}}}
    assert personal_paths("norms", of_torch) == {("params", "norm", "weight"), ("batch_stats", "norm", "running_mean")}


SCORED = {**SMALL, "test_fraction": 0.2, "per_client": True, "batch_size": 8}


@pytest.mark.parametrize("method", ["feddyn", "fedmrur", "asynccurve"])
def test_plain_training_beside_a_method_does_not_take_its_options(method):
    """Ditto and fine-tuning ended with a TypeError where the method's own training has options that are numbers."""
    experiment = prepare(Settings(**SCORED | {"method": method}, ditto=0.3, fine_tune=1))
    assert any(name.startswith("client.") for name in experiment.components.hyper)
    assert bound(experiment.components.client, experiment.components.hyper).own is not None
    assert bound(experiment.measures.tuner, experiment.components.hyper).step is not None


def test_what_stays_is_not_sent():
    lossy = {"compress": "topk:ratio=0.5", "ditto": 0.3}
    changes = ({}, {"personal": "bias"}, {"ditto": 1.0}, lossy, lossy | {"personal": "bias"})
    plain, kept, ditto, whole, part = (prepare(Settings(**SCORED, **change)).traffic for change in changes)
    assert (plain.up - kept.up, plain.down - kept.down) == (40, 40)  # ten numbers of four bytes
    assert ditto == plain and part.up < whole.up


@pytest.mark.slow
def test_fedbn_trains_a_network_with_statistics():
    given = {**SCORED, "model": named("net", models.make("vgg11:width=0.05", num_classes=10, input_shape=(28, 28, 1)))}
    run = simulate(**given, personal="norms")
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(np.unique(leaf).size, 1), run.params["batch_stats"])
