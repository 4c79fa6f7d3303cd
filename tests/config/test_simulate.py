"""From settings to runs: budgets, objects instead of names, refusals before anything compiles."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async import Settings, simulate
from fedjax_async.config import prepare
from fedjax_async.config.resolving import length_of_batch

SMALL = {"model": "logistic", "steps": 2, "delay": "exponential"}


def test_evaluations_end_where_the_first_budget_ends():
    by_updates = prepare(Settings(updates=40, time=1e5, **SMALL))
    assert by_updates.points.time[-1] == by_updates.schedule.time[-1] < 100
    by_time = prepare(Settings(updates=10**6, time=3.0, **SMALL))
    assert by_time.points.time[-1] == 3.0


def test_evaluations_at_chosen_times():
    points = prepare(Settings(time=4.0, eval_at="0.5,2.25", **SMALL)).points
    np.testing.assert_array_equal(points.time, [0, 0.5, 2.25, 4])


def test_data_with_owners_keep_them_and_least_squares_find_the_optimum():
    """One shared optimum and no noise: the loss goes to zero. Clients are the owners, not a Dirichlet partition."""
    world = {"dataset": "quadratic:heterogeneity=0,clients=6", "clients": 6, "delay": "exponential"}
    run = simulate(model="linear", steps=5, lr=0.5, updates=900, **world)
    assert run.settings["partition"] == "natural"
    assert run.evaluations["loss"][-1] < 1e-4 * run.evaluations["loss"][0]
    assert np.isnan(run.evaluations["accuracy"]).all()
    with pytest.raises(ValueError, match="num_classes = 10: must be None"):
        simulate(model="linear", updates=1)


def test_a_batch_longer_than_every_shard_is_the_whole_shard():
    runs = [prepare(Settings(updates=4, batch_size=size, **SMALL)) for size in (10**9, 5000)]
    assert runs[0].components.client == runs[1].components.client
    assert length_of_batch(runs[0].settings, runs[0].components.data) == runs[0].components.data.size.max() < 5000


@pytest.mark.parametrize(("change", "message"), [
    ({"model": "logistic:num_classes=3"}, "model outputs = 3"), ({"compute": "float64"}, "64-bit"),
    ({"per_client": True}, "test_fraction"), ({"method": 5}, "method"), ({"batching": "scan"}, "batching = 'scan'"),
    ({"metod": "fedavg"}, "did you mean 'method'"), ({"optimizer": "sgd:nesterov=true"}, "nesterov"),
    ({"steps": 10**12}, "steps"), *(({"eval_at": wrong}, "eval_at") for wrong in ("1,two", "-1", "1e400", "")),
    ({"eval_at": "1", "eval_updates": 2}, "at most one"),
    ({"checkpoint": 2}, "^checkpoint = 2: must be left out without a folder"),
    ({"eval_examples": 1001}, "^eval_examples = 1001: must be a whole number from 1 to 1000"),
    ({"eval_examples": 9, "per_client": True}, "^eval_examples = 9: must be left out where clients have tests"),
    ({"eval_examples": 9, "dataset": "population"}, "^eval_examples = 9: must be left out: population is already"),
])  # fmt: skip
def test_refused_before_anything_compiles(change, message):
    with pytest.raises(ValueError, match=message):
        simulate(**({"updates": 5} | SMALL | change))


def test_fewer_test_examples_are_evenly_spaced_and_change_the_evaluation_only():
    plain = {"dataset": "fashion_mnist_6k", "model": "logistic", "clients": 4, "steps": 2, "updates": 8}
    whole, part = (prepare(Settings(**plain, eval_examples=count)) for count in (None, 100))
    np.testing.assert_array_equal(part.components.data.test_x, whole.components.data.test_x[::10])
    np.testing.assert_array_equal(part.components.data.test_y, whole.components.data.test_y[::10])
    np.testing.assert_array_equal(part.components.data.order, whole.components.data.order)
    assert part.components.client == whole.components.client
