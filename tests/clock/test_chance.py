import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock.chance import FAMILIES, Draws, generator, half_normal, pareto_tail, uniform

SIDE = 300  # clients, and numbers of each client
PLACES = np.arange(SIDE)[:, None], np.arange(SIDE)
GAMMA = math.gamma


def normal_law(x):
    return np.array([math.erfc(-one / math.sqrt(2)) / 2 for one in x])


def gamma_law(a):
    """The distribution function of the gamma, by the series of the incomplete gamma function."""

    def law(x):
        total = term = np.full_like(x, 1 / GAMMA(a + 1))
        for n in range(1, 200):
            term = term * x / (a + n)
            total = total + term
        return x**a * np.exp(-x) * total

    return law


LAWS = {
    "random": (lambda d: d.random(), lambda x: x),
    "standard_normal": (lambda d: d.standard_normal(), normal_law),
    "standard_exponential": (lambda d: d.standard_exponential(), lambda x: -np.expm1(-x)),
    "standard_gamma of 0.4": (lambda d: d.standard_gamma(np.array(0.4)), gamma_law(0.4)),
    "standard_gamma of 3": (lambda d: d.standard_gamma(np.array(3.0)), gamma_law(3.0)),
}  # fmt: skip


def square(seed=0, stream="noise", *before):
    return Draws(seed, stream, *before, *PLACES)


@pytest.mark.parametrize("name", LAWS)
def test_numbers_follow_their_law(name):
    """Kolmogorov and Smirnov's distance, whose 99.99 % quantile is 2.23 / sqrt(n)."""
    draw, law = LAWS[name]
    for seed in (0, 1, 2**70):
        x = draw(square(seed))
        assert x.dtype == np.float64
        assert x.shape == (SIDE, SIDE)
        ordered = np.sort(x.reshape(-1))
        exact = law(ordered)
        steps = np.arange(len(ordered) + 1) / len(ordered)
        assert max((steps[1:] - exact).max(), (exact - steps[:-1]).max()) < 2.23 / SIDE
        assert len(np.unique(x)) == x.size


def test_geometric_numbers_follow_their_law():
    x = square().geometric(np.array(0.3))
    assert x.min() == 1
    for k in range(1, 10):
        share = 0.3 * 0.7 ** (k - 1)
        assert abs((x == k).mean() - share) < 4 * math.sqrt(share / x.size)
    assert (square().geometric(np.array(1.0)) == 1).all()


def test_neighbours_of_every_kind_are_independent():
    def pair(one, other):
        one, other = one.random(), other.random()
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4.5 / SIDE
        # dependence that the correlation misses: pairs fill the 4 x 4 cells of the unit square equally
        cells = np.bincount((4 * one.ravel()).astype(int) * 4 + (4 * other.ravel()).astype(int), minlength=16)
        assert ((cells - x_mean) ** 2 / x_mean).sum() < 50  # chi-square of 15 degrees: 50 is the 99.999 % quantile

    x_mean = SIDE * SIDE / 16
    clients, numbers = PLACES
    pair(square(), square(1))
    pair(square(2**64), square(2**64 + 1))
    pair(square(), square(0, "jitter"))
    pair(square(0, "noise", 0), square(0, "noise", 1))
    pair(square(), Draws(0, "noise", clients + 1, numbers))
    pair(square(), Draws(0, "noise", clients, numbers + 1))
    pair(square(), Draws(0, "noise", clients + 2**20, numbers))
    pair(Draws(0, "noise", clients, numbers + SIDE), Draws(0, "noise", numbers + SIDE, clients))
    later = square()
    later.random()
    pair(square(), later)


def test_every_bit_of_a_place_changes_half_of_the_bits_of_its_number():
    places = np.arange(4000)
    for bit in range(40):
        one, other = (
            (Draws(0, "noise", who, 0).random() * 2**53).astype(np.int64) for who in (places, places ^ 1 << bit)
        )
        flipped = (one ^ other)[:, None] >> np.arange(53) & 1
        assert abs(flipped.mean(axis=0) - 0.5).max() < 5 / (2 * math.sqrt(4000))


@given(st.integers(0, 2**80), st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**31)), min_size=1, max_size=9))
@settings(deadline=None, max_examples=60)
def test_a_number_depends_on_its_place_alone(seed, places):
    clients, numbers = np.array(places).T
    shapes = 0.2 + numbers % 7

    def everything(draws, shape):
        yield from (
            draws.random(),
            draws.standard_gamma(shape),
            draws.standard_normal(),
            draws.standard_exponential(),
            draws.geometric(1 / (1 + shape)),
        )

    together = list(everything(Draws(seed, "noise", clients, numbers), shapes))
    for k, (client, number) in enumerate(places):
        alone = list(everything(Draws(seed, "noise", client, number), shapes[k : k + 1]))
        for one, other in zip(together, alone):
            assert one[k] == other[0]


def test_a_mask_draws_some_of_the_numbers():
    mask = np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 3 == 0
    np.testing.assert_array_equal(square().standard_normal(mask), square().standard_normal()[mask])


def test_another_seed_stream_or_counter_gives_other_numbers():
    seen = [
        generator(*given).integers(2**62)
        for given in [(0, "rounds"), (1, "rounds"), (0, "sampling"), (0, "rounds", 1), (0, "rounds", 2)]
    ]
    assert len(set(seen)) == len(seen)


# --- families of durations ----------------------------------------------------------------------

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


@pytest.mark.parametrize("name", ["gamma", "pareto"])
def test_a_spread_too_small_to_compute_with_is_none(name):
    """The rejection method of gamma never accepted for them: 1 + x / sqrt(9 d) is 1."""
    x = draw(FAMILIES[name], np.array([1.0, 1e3, 1e3]), np.array([1e-160, 1e-9, 1.0]), (1000, 3))
    assert (x[:, 0] == 1).all() and (x[:, 1] == 1e3).all()
    assert x[:, 2].std() == pytest.approx(1, rel=0.2)


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
