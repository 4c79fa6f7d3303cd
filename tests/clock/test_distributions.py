from __future__ import annotations

import numpy as np
import pytest

from fedjax_async.clock.chance import FAMILIES, Draws, half_normal, pareto_tail, uniform

MEAN, STD, DRAWS = 60.0, 15.0, 200_000


def draw(family, mean=MEAN, std=STD, size=(DRAWS,), seed=0):
    places = np.arange(np.prod(size)).reshape(size)
    return family(Draws(seed, "noise", places), np.asarray(mean), np.asarray(std))


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_match_what_the_family_promises(name):
    x = draw(FAMILIES[name])
    std = {"constant": 0.0, "exponential": MEAN}.get(name, STD)
    assert x.dtype == np.float64
    assert (x > 0).all()
    assert abs(x.mean() - MEAN) < 5 * max(std, 1e-9) / np.sqrt(DRAWS)
    assert abs(x.std() - std) < (0.05 if name == "pareto" else 0.02) * MEAN  # the tail index of pareto is 5.1


@pytest.mark.parametrize("name", FAMILIES)
def test_means_and_deviations_are_arrays_one_a_client(name):
    mean, std = np.array([1.0, 10.0, 1000.0]), np.array([0.0, 1.0, 400.0])
    x = draw(FAMILIES[name], mean, std, (20_000, 3))
    assert x.shape == (20_000, 3)
    assert np.isfinite(x).all()
    np.testing.assert_allclose(x.mean(0), mean, rtol=0.05)
    if name != "exponential":
        np.testing.assert_allclose(x[:, 0], 1.0, rtol=1e-12)


def test_lognormal_has_the_logarithm_of_the_specification():
    logs = np.log(draw(FAMILIES["lognormal"]))
    s = np.sqrt(np.log(STD**2 / MEAN**2 + 1))
    assert abs(logs.std() - s) < 0.005
    assert abs(logs.mean() - (np.log(MEAN) - s**2 / 2)) < 0.005


def test_normal_is_the_gaussian_conditioned_on_being_positive():
    x = draw(FAMILIES["normal"], 96.2, 135.6)
    plain = np.random.default_rng(1).normal(96.2, 135.6, DRAWS)
    kept = plain[plain > 0]
    assert (x > 0).all()
    for level in (0.1, 0.5, 0.9):
        assert abs(np.quantile(x, level) - np.quantile(kept, level)) < 2.5
    assert x.mean() > 96.2 + 40  # truncation raises the mean; a draw <= 0 is not replaced by the mean


def test_a_gaussian_or_its_mean():
    x = draw(FAMILIES["normal_or_mean"], 96.2, 135.6)
    plain = np.random.default_rng(1).normal(96.2, 135.6, DRAWS)
    assert abs(np.mean(x == 96.2) - np.mean(plain <= 0)) < 0.005
    for level in (0.05, 0.9):
        assert abs(np.quantile(x, level) - np.quantile(np.where(plain > 0, plain, 96.2), level)) < 2.5


def test_redraws_leave_the_other_places_alone():
    mean = np.full(64, 1.0)
    calm = draw(FAMILIES["normal"], mean, np.full(64, 0.01), (16, 64))
    wild = draw(FAMILIES["normal"], mean, np.r_[np.full(32, 0.01), np.full(32, 5.0)], (16, 64))
    np.testing.assert_array_equal(calm[:, :32], wild[:, :32])


def test_wide_half_normal_and_uniform_keep_the_mean_and_stay_positive():
    for family, ratio in ((half_normal, 0.7555), (uniform, 1 / np.sqrt(3))):
        x = draw(family, 10.0, 50.0)
        assert (x >= 0).all()
        assert abs(x.mean() - 10) < 0.1
        assert abs(x.std() / 10 - ratio) < 0.01


def test_pareto_tail_has_its_index():
    x = draw(pareto_tail(1.5), 3.0)
    smallest = 3.0 * (1 - 1 / 1.5)
    assert x.min() >= smallest
    assert abs((x > 10 * smallest).mean() - 10**-1.5) < 0.002
