"""Metrics against hand arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedjax_async.results import area, best_accuracy, final_accuracy, relative_time, to_target
from tests.results.made_up import make_run


def test_to_target_is_the_first_evaluation_that_reaches_it():
    run = make_run([0.1, 0.5, 0.4, 0.6], time=[0.0, 2.0, 5.0, 9.0])
    assert to_target(run, 0.5) == 2.0
    assert to_target(run, 0.55) == 9.0
    assert to_target(run, 0.05) == 0.0
    assert math.isnan(to_target(run, 0.61))
    # By 2 s: client 0 arrived at 1 and 2, client 1 at 2; by 9 s: 3 of client 0 (one lost), 4 and 3 of the others.
    assert to_target(run, 0.5, "update") == 3 and to_target(run, 0.5, "step") == 3
    assert to_target(run, 0.55, "update") == 10
    assert to_target(run, 0.5, "bytes") == 3 * 100 + 6 * 100


def test_a_target_equal_in_float32_counts_as_reached():
    run = make_run([0.1, 0.7])
    assert to_target(run, final_accuracy(run)) == 12.0


def test_final_best_and_area():
    run = make_run([0.1, 0.9, 0.5], time=[0.0, 1.0, 4.0])
    assert final_accuracy(run) == 0.5
    assert best_accuracy(run) == np.float32(0.9)
    np.testing.assert_allclose(area(run), (0.1 * 1 + 0.9 * 3) / 4, rtol=1e-6)
    assert area(make_run([0.3], time=[0.0])) == np.float32(0.3)
    assert math.isnan(best_accuracy(make_run([math.nan, math.nan])))
    assert best_accuracy(make_run([math.nan, 0.5])) == 0.5


def test_bad_units_and_empty_tables():
    with pytest.raises(ValueError, match="unit = 'hours'"):
        to_target(make_run(), 0.5, "hours")
    with pytest.raises(ValueError, match="at least one evaluation"):
        final_accuracy(make_run([]))


def test_relative_time_by_hand():
    at = [0.0, 1.0, 2.0, 4.0]
    runs = {
        "fedavg": [make_run([0.1, 0.2, 0.3, 0.5], at), make_run([0.1, 0.2, 0.78, 0.8], at)],
        "fedasync": [make_run([0.1, 0.48, 0.6, 0.6], at), make_run([0.1, 0.2, 0.3, 0.8], at)],
    }
    found = relative_time(runs, "fedavg")
    np.testing.assert_allclose(found.target, [0.475, 0.76], rtol=1e-6)
    np.testing.assert_array_equal(found.time["fedavg"], [4.0, 2.0])
    np.testing.assert_array_equal(found.ratio["fedavg"], [1.0, 1.0])
    np.testing.assert_array_equal(found.ratio["fedasync"], [0.25, 2.0])


def test_every_method_reaches_the_common_target():
    generator = np.random.default_rng(0)
    runs = {name: [make_run(list(generator.uniform(0.1, 0.9, 7))) for _ in range(3)] for name in "abcd"}
    assert all(np.isfinite(times).all() for times in relative_time(runs, "a").time.values())


def test_relative_time_without_a_usable_baseline():
    flat = {"fedavg": [make_run([0.1, 0.1])], "other": [make_run([0.1, 0.9])]}
    assert np.isnan(relative_time(flat, "fedavg").ratio["other"]).all()  # at the target before it began
    with pytest.raises(ValueError, match="baseline = 'fedprox'"):
        relative_time(flat, "fedprox")
    with pytest.raises(ValueError, match="equally many seeds"):
        relative_time(flat | {"third": []}, "fedavg")
