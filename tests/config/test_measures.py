"""Metrics, training loss and fine-tuning as settings: names, functions, own parts, sweeps, folders, refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Metric, Settings, models, register, simulate
from fedjax_async.config import prepare
from fedjax_async.config.grid import expand
from fedjax_async.config.measures import metrics_of
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.local import local_training

SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 3, "partition": "iid"}
pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


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
    new = {"metrics", "train_loss", "train_examples", "fine_tune"}
    assert not new & set(as_dict(Settings(updates=6))) and not new & set(prepare(Settings(**SMALL)).described)


def test_columns_are_names_with_the_values_of_their_options():
    assert [name for name, _ in metrics_of("top:k=3,macro_f1,top:k=1")] == ["top3", "macro_f1", "top1"]
    assert metrics_of("top:k=3")[0][1] is metrics_of("top:k=3")[0][1]  # so that runs share programs


def test_a_registered_metric_has_a_name_and_options():
    @register("metrics", "within")
    def within(*, share: float = 0.5):
        """Whether the label's probability is at least ``share``."""
        return lambda outputs, y: jnp.max(outputs, -1) >= share

    (name, metric), (other, _) = metrics_of("within:share=-10.0,macro_f1")
    assert (name, other) == ("within-10.0", "macro_f1")
    assert metric.values(jnp.array([[-9.0, -11.0], [-11.0, -12.0]]), None).tolist() == [True, False]
    assert list(as_dict(Settings(**SMALL, metrics="within:share=-10.0,macro_f1"))["own"]["metrics"]) == ["within"]


BROKEN = {
    "a mean": ({"m": lambda o, y: hits(o, y).mean()},
         r"metrics\['m'\] returned float32\[\]: must return a number per ex"),
    "many without finish": ({"m": lambda o, y: o},
         r"metrics\['m'\] returned float32\[3, 10\]: must return a number per"),
    "nothing": ({"m": lambda o, y: None}, r"metrics\['m'\] returned None: must return a number per example"),
    "an error": ({"m": lambda o, y: o[y.nothing]}, r"metrics\['m'\]: must be a function .* it raised AttributeError"),
    "a vector": ({"m": Metric(lambda o, y: o, lambda means: means)},
         r"metrics\['m'\].finish returned float32\[10\]: mu"),
    "rows": ({"m": Metric(lambda o, y: o.sum(0), jnp.sum)},
         r"metrics\['m'\].values returned float32\[10\]: must return"),
    "k": ("top:k=11", r"k of top = 11: must be at most 10, the number of classes"),
    "a usual column": ({"accuracy": hits}, r"metrics = 'accuracy': must be another name"),
    "a column of clients": ({"own_hits": hits}, r"metrics = 'own_hits': must be another name"),
    "twice": ("top:k=3,top:k=3", r"metrics = 'top3': must be another name"),
    "no name": ({"a b": hits}, r"name of a metric = 'a b': must be letters, digits and '_'"),
    "empty": ({}, r"metrics = \{\}: must be at least one name and metric"),
    "a list": (["top"], r"metrics = \['top'\]: must be a text, or a dict of names and metrics"),
}  # fmt: skip


BARE = models.decoded(models.make("logistic", num_classes=10, input_shape=(28, 28, 1)), fashion_mnist_6k().decode)
NUMBERS = {"dataset": "quadratic", "model": "linear", "partition": None, "metrics": "macro_f1"}


@pytest.mark.parametrize(("change", "message"), [
    *(pytest.param({"metrics": metrics}, message, id=case) for case, (metrics, message) in BROKEN.items()),
    ({"fine_tune": 2}, "fine_tune = 2: must be left out without test_fraction or tests of each client"),
    ({"fine_tune": 2, "test_fraction": 0.2, "client": local_training(BARE, optimizer=optax.sgd(0.1))},
     r"^fine_tune = 2: must be left out: the client .* needs the optimiser"),
    ({"train_examples": 5001}, "train_examples = 5001: must be a whole number from 1 to 5000"),
    (NUMBERS, "targets of macro_f1 = 'float32': must be class labels"),
])  # fmt: skip
def test_measures_that_break_their_contract_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        simulate(**SMALL | change)


def test_a_population_needs_a_sample_and_evaluates_it():
    population = {"dataset": "population", "model": "logistic", "updates": 2, "steps": 1}
    says = r"train_examples = None: must be a number of examples: .* has 1452033, too many"
    with pytest.raises(ValueError, match=says):
        simulate(**population, clients=20_000, train_loss=True)
    run = simulate(**population, clients=100, train_examples=64, engine="reference")
    assert np.isfinite(run.evaluations["train_loss"]).all()


# --- sweeps and folders -----------------------------------------------------------------------------


def test_runs_that_measure_alike_share_a_program():
    base = SMALL | {"test_fraction": 0.2, "metrics": {"hits": hits}, "fine_tune": 2, "train_examples": 40}
    settings = [Settings(**base, lr=lr) for lr in (0.1, 0.2)]
    assert len(plan_groups(settings)) == 1
    assert len(plan_groups([settings[0], replace(settings[0], fine_tune=3)])) == 2
    seeds = [Settings(**SMALL, seed=seed, train_examples=40) for seed in (0, 1)]
    assert len(plan_groups(seeds)) == 1, "another sample is no other program"


def test_a_sweep_over_metrics_by_name_and_by_option():
    points = expand(SMALL | {"metrics": "top:k=3"}, {"metrics": ["macro_f1", "top:k=3"]})
    points += expand(SMALL | {"metrics": "top:k=3"}, {"metrics.k": [5]})
    columns = [name for point in points for name, _ in metrics_of(point.settings.metrics)]
    assert columns == ["macro_f1", "top3", "top5"]


def test_settings_come_back_from_a_file_with_the_same_functions_only():
    settings = Settings(**SMALL, metrics={"hits": hits, "miss_error": misses}, fine_tune=3, test_fraction=0.2)
    saved = json.loads(json.dumps(as_dict(settings)))
    assert from_dict(saved, {"metrics": {"hits": hits, "miss_error": misses}}) == settings
    assert as_dict(from_dict(saved)) == saved
    for wrong in ({"hits": misses, "miss_error": misses}, {"hits": hits}):
        with pytest.raises(ValueError, match="metrics"):
            from_dict(saved, {"metrics": wrong})
    with pytest.raises(ValueError, match="metrics = 'hits,miss_error': is a part of your own; give it again"):
        prepare(from_dict(saved))
    named = Settings(**SMALL, metrics="top:k=3,macro_f1", train_loss=True)
    assert from_dict(as_dict(named)) == named and "own" not in as_dict(named)
